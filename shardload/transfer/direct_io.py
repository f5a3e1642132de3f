"""Read local files past the page cache (``O_DIRECT``), where that is asked for, or seems faster for a cold file.

The kernel then copies nothing, so a cold file costs a fraction of the CPU time. Offset, length and memory of each read
must be multiples of the device's block, so a thread reads into a buffer of its own, and copies what is needed::

    file      ──┤ aligned ····[ wanted bytes )···· aligned ├──
    buffer      │ head        [ ────────────► scratch      │ tail

What is read so does not stay in the page cache: the next load of the same file reads from the disk again.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from shardload.errors import TransferError
from shardload.stores.local import open_readonly
from shardload.stores.location import Location
from shardload.transfer.byte_source import ByteSource
from shardload.transfer.host_memory import memory
from shardload.transfer.load_plan import Block
from shardload.transfer.scratch import BlockMemory
from shardload.units import format_rate

Io = Literal["auto", "buffered", "direct"]
"""How to read local files: through the page cache, past it, or as `choose_io` finds faster."""

ALIGNMENT = 4096
"""Multiple of which every offset, length and address is: that of the largest blocks in use; most devices need 512."""
PIECE_BYTES = 2 << 20
"""Most bytes of one read, and of the buffer that each thread has. Longer reads were no faster, and leave the core's L2
cache before they are copied."""
DIRECT_THREADS = 4
"""Fewest threads that read directly: each has one read in flight, and the kernel reads nothing ahead."""
AUTO_BYTES = 256 << 20
"""Smallest source, in bytes, for which ``auto`` looks at the page cache: smaller ones are read in a moment."""
_CACHED = 0.1
"""Share of a source in the page cache from which ``auto`` reads through the cache."""
_FASTER = 1.25
"""How many times faster a direct read must be in the probe for ``auto`` to read directly."""
_PROBED_BYTES = 4 << 20
_WINDOWS = 64
"""Places of a file at which its residency in the page cache is looked up, a MiB each."""


@dataclass(frozen=True, slots=True)
class FileReading:
    """Whether a load reads its local files past the page cache, and a note for its report; empty if there is none."""

    direct: bool
    note: str = ""


def choose_io(wanted: Io, files: Iterable[Location], *, verified: bool) -> FileReading:
    """Decide how to read a source: as ``wanted``, if its files are local and not ``verified`` as they are read.

    Raises:
        TransferError: When ``wanted`` is ``"direct"``, and a file cannot be read so.
    """
    if wanted == "buffered":
        return FileReading(direct=False)
    paths = [Path(path.key) for path in files if not path.store.is_remote and path.store.local_path(path.key)]
    paths = [path for path in paths if path.is_file()]
    if verified or not paths:
        why = "its bytes are verified as they are read" if verified else "it is not in local files"
        return FileReading(direct=False, note=f"the source is read as usual, not past the page cache: {why}")
    for path in paths:
        if (error := refusal_of(path)) is not None:
            if wanted == "direct":
                raise TransferError(
                    f"Cannot read {path} past the page cache: {error.strerror or error}, expected a file system that "
                    "supports O_DIRECT. Use io='buffered' (--io buffered)"
                ) from error
            return FileReading(direct=False, note=f"read through the page cache: {path} cannot be opened with O_DIRECT")
    return (
        FileReading(direct=True, note="read past the page cache (O_DIRECT)") if wanted == "direct" else _probed(paths)
    )


def _probed(paths: Sequence[Path]) -> FileReading:
    """Choose by the page cache and the speed of the disk; see `choose_io`."""
    sizes = {path: path.stat().st_size for path in paths}
    if (total := sum(sizes.values())) < AUTO_BYTES:
        return FileReading(direct=False)
    cached = sum(resident_share(path) * size for path, size in sizes.items()) / total
    if cached > _CACHED:
        return FileReading(direct=False)
    largest = max(paths, key=lambda path: sizes[path])
    direct, buffered = read_rate(largest, sizes[largest] // 4, os.O_DIRECT), read_rate(largest, sizes[largest] // 2, 0)
    rates = f"{format_rate(direct)} against {format_rate(buffered)} in a probe"
    if direct < _FASTER * buffered:
        return FileReading(direct=False, note=f"read through the page cache, though the files are not in it: {rates}")
    return FileReading(direct=True, note=f"read past the page cache (O_DIRECT), as the files are not in it: {rates}")


def refusal_of(path: Path) -> OSError | None:
    """Return the error of reading one block of a file directly; ``None`` if that works."""
    if not hasattr(os, "O_DIRECT"):
        return OSError(0, "this system has no O_DIRECT")
    try:
        with _opened(path, os.O_DIRECT) as fd:
            os.preadv(fd, [_buffer(ALIGNMENT).data], 0)
    except OSError as error:
        return error
    return None


def read_rate(path: Path, offset: int, flags: int) -> float:
    """Return the GB/s at which a few MiB of a file arrive."""
    buffer = _buffer(PIECE_BYTES)
    buffer[::ALIGNMENT] = 0  # not the first touch of the memory is to be timed
    start = offset - offset % ALIGNMENT
    began = time.perf_counter()
    with _opened(path, flags) as fd:
        for at in range(start, start + _PROBED_BYTES, PIECE_BYTES):
            os.preadv(fd, [buffer.data], at)
    return _PROBED_BYTES / 1e9 / (time.perf_counter() - began)


def resident_share(path: Path) -> float:
    """Return which share of a file is in the page cache, from places that are spread evenly; 0 for an empty file."""
    size, page = path.stat().st_size, mmap.PAGESIZE
    if not size:
        return 0.0
    libc = ctypes.CDLL(None, use_errno=True)
    window = min(1 << 20, size)
    starts = {(size - window) * k // max(1, _WINDOWS - 1) // page * page for k in range(_WINDOWS)}
    with _opened(path, 0) as fd, mmap.mmap(fd, size, prot=mmap.PROT_READ) as area:
        whole = np.frombuffer(area, np.uint8)
        address, resident, seen = whole.ctypes.data, 0, 0
        del whole  # a mapping with views cannot be closed
        for start in starts:
            pages = -(-min(window, size - start) // page)
            states = np.zeros(pages, np.uint8)
            failed = libc.mincore(
                ctypes.c_void_p(address + start), ctypes.c_size_t(pages * page), ctypes.c_void_p(states.ctypes.data)
            )
            if failed:
                return 1.0  # unknown: read as usual
            resident, seen = resident + int((states & 1).sum()), seen + pages
    return resident / seen


@contextlib.contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    fd = open_readonly(path, flags)
    try:
        yield fd
    finally:
        os.close(fd)


def _buffer(n_bytes: int) -> NDArray[np.uint8]:
    """Allocate memory at a multiple of `ALIGNMENT`."""
    raw = memory(n_bytes + ALIGNMENT)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + n_bytes]


class DirectReads(ByteSource):
    """Reads local files past the page cache; all blocks pass through scratch memory."""

    def __init__(self) -> None:
        super().__init__(None)
        self._own = threading.local()
        self._descriptors: dict[Location, int] = {}
        self._received: dict[int, int] = {}

    def fill(self, flat: BlockMemory, n_bytes: int, *, path: Location, offset: int) -> int:
        """Copy bytes of a file into scratch, from aligned reads into this thread's buffer; see `ByteSource.fill`."""
        fd, at, thread = self._descriptor(path), 0, threading.get_ident()
        while at < n_bytes:
            head = (offset + at) % ALIGNMENT
            length = min(PIECE_BYTES, -(-(head + n_bytes - at) // ALIGNMENT) * ALIGNMENT)
            buffer = self._buffer()
            got = os.preadv(fd, [buffer.data[:length]], offset + at - head)
            self._received[thread] = self._received.get(thread, 0) + got
            part = buffer[head : min(got, head + n_bytes - at)]
            if part.size == 0:  # the end of the file
                break
            flat.write(part, at)
            at += part.size
        return at

    def verifies(self, block: Block) -> bool:
        """Return False: there is nothing to compare bytes with."""
        return False

    def read_bytes(self, blocks: Sequence[Block]) -> int:
        """Return the bytes read, with what was read before and after wanted bytes to align the reads."""
        return sum(self._received.values()) + sum(block.read_bytes for block in blocks if block.how == "decoded")

    def close(self) -> None:
        """Close all files, which no thread may use any more."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])
        super().close()

    def _buffer(self) -> NDArray[np.uint8]:
        if (found := getattr(self._own, "buffer", None)) is None:
            found = self._own.buffer = _buffer(PIECE_BYTES)
        return found

    def _descriptor(self, path: Location) -> int:
        if (found := self._descriptors.get(path)) is not None:
            return found
        mine = open_readonly(path.key, os.O_DIRECT)
        # Another thread may have opened it as well; see `ByteSource.open`.
        if (found := self._descriptors.setdefault(path, mine)) != mine:
            os.close(mine)
        return found
