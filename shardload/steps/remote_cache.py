"""A remote step, represented by a local mirror folder; see `shardload.stores.file_access`.

    digests.json ─► names, sizes and digests of all files      (so no listing is needed: plain HTTP is enough)
    small files  ─► fetched into the mirror folder, each checked
    data files   ─► not fetched; `_RemoteFile` requests whole-MiB ranges and compares each MiB with its digest

Only shardload steps can be read this way. Sizes and names in ``digests.json`` are untrusted: `Digests.read` refuses
names that leave the folder, and the size of the mirror is limited.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from shardload.errors import ShardloadError, TransferError, UnsafeSourceError, UnsupportedError
from shardload.steps._checker import Checker
from shardload.steps.digest_list import DIGESTS_FILE, OWN_FOLDER, Damage
from shardload.stores import file_access
from shardload.stores.file_access import UNIT_BYTES
from shardload.stores.json_files import MAX_JSON_BYTES
from shardload.stores.remote import COPY_FIRST, Fetch, Folder

MAX_FILE_BYTES = 64 << 20
"""The largest file fetched as a whole: JSON is read up to 32 MiB, B-tree nodes take a few MiB, tokenizers 40."""
MAX_MIRROR_BYTES = 512 << 20
"""The limit for all fetched files together, on this machine's disk."""
MAX_FILES = 1 << 14
"""The limit for their number; each process that saved wrote two or three."""
IN_FLIGHT = 16
"""Small files fetched concurrently: their cost is one round trip each."""
_ITEMS = frozenset({OWN_FOLDER, "pytree", "model_config", "assets"})
"""Folders of a step that loading reads; other checkpointables may be of any size."""
_DATA = re.compile(r"(?:^|/)d/[^/]+$")
"""OCDBT data files. They contain B-tree nodes, too; such files are fetched on demand."""


class RemoteStep:
    """A remote step. Its mirror folder is removed when this object is garbage-collected.

    Args:
        remote: The step's remote folder.
        digests: The content of its ``digests.json``.

    Raises:
        DamagedError: If the digests are damaged.
    """

    def __init__(self, remote: Folder, digests: bytes) -> None:
        self.url, self._remote = remote.url, remote
        base = os.path.realpath(tempfile.mkdtemp(prefix="shardload-remote-"))  # mode 0700: private to this user
        self.folder = str(Path(base, remote.name))
        self._remove = weakref.finalize(self, _remove, base, self.folder)
        self._here: set[str] = {DIGESTS_FILE}
        self._lock = threading.Lock()
        self._filled = False
        try:
            with self.naming():
                self._write(DIGESTS_FILE, digests)
                self.checker = Checker(self.folder, shown=self.url)
        except BaseException:
            self._remove()
            raise
        file_access.enter(_Weakly(self))

    @property
    def n_bytes(self) -> int:
        """The total size of the step's files."""
        files = self.checker.digests.files.values()
        return sum(f.n_bytes for f in files) + Path(self.folder, DIGESTS_FILE).stat().st_size

    def fetch(self, name: str) -> None:
        """Fetch one file into the mirror folder, unless it is there already.

        Raises:
            UnsupportedError: If the file is too large to be fetched.
            DamagedError: If the file is missing or differs from the saved one.
            TransferError: If the store does not return it.
        """
        with self._lock:
            if name in self._here:
                return
            self._fetch([name])

    def fill(self) -> None:
        """Fetch every file that loading opens locally; raises like `fetch`."""
        with self._lock:
            if self._filled:
                return
            self._fetch(name for name in self.checker.digests.files if _is_mirrored(name) and name not in self._here)
            self._filled = True

    def remote_file(self, name: str) -> _RemoteFile | None:
        """Return a file of the step that was not fetched, else ``None``."""
        if name in self._here or name not in self.checker.digests.files:
            return None
        return _RemoteFile(self._remote, self.checker, name)

    def name_damage(self) -> list[Damage]:
        """Return missing and unexpected files, as far as the store can list them; reads no data.

        Raises:
            TransferError: If the store does not respond.
        """
        listed = {*self.checker.digests.files, DIGESTS_FILE}
        if self._remote.can_list:
            there = set(self._remote.names())
        else:
            empty = (name for name, file in self.checker.digests.files.items() if not file.n_bytes)
            there = listed - {name for name in empty if self._remote.read(name) is None}
        missing = [Damage(name, "is missing", None, self._remote.name) for name in sorted(listed - there)]
        return missing + [
            Damage(name, "is unexpected: it was not saved with the step", None, self._remote.name)
            for name in sorted(there - listed)
        ]

    @contextlib.contextmanager
    def naming(self) -> Iterator[None]:
        """Replace the mirror folder by the step's URL in errors raised in the block."""
        try:
            yield
        except Exception as error:
            rename(error, self.folder, self.url)
            raise

    def _fetch(self, names: Iterable[str]) -> None:
        wanted = list(names)
        self._bound(wanted)
        for first in range(0, len(wanted), IN_FLIGHT):
            files = [_RemoteFile(self._remote, self.checker, name) for name in wanted[first : first + IN_FLIGHT]]
            pending = [file.begin(0, file.n_units) for file in files]
            for file, fetched in zip(files, pending, strict=True):
                self._write(file.name, fetched.result())
                self._here.add(file.name)

    def _bound(self, names: list[str]) -> None:
        sizes = {name: self.checker.digests.files[name].n_bytes for name in {*self._here, *names} - {DIGESTS_FILE}}
        for name in names:
            if sizes[name] > MAX_FILE_BYTES:
                raise UnsupportedError(
                    f"{self.url}/{name} has {sizes[name]} bytes and would have to be fetched whole; the limit "
                    f"is {MAX_FILE_BYTES}. {COPY_FIRST}"
                )
        if sum(sizes.values()) > MAX_MIRROR_BYTES or len(sizes) > MAX_FILES:
            raise UnsafeSourceError(
                f"{self.url} lists {len(sizes)} small files of {sum(sizes.values())} bytes together; at most "
                f"{MAX_FILES} of {MAX_MIRROR_BYTES} are fetched. {COPY_FIRST}"
            )

    def _write(self, name: str, data: bytes | memoryview) -> None:
        target = Path(self.folder, name)
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
        except (OSError, ValueError) as error:
            raise TransferError(
                f"{self.url}/{name} cannot be put into the temporary folder {self.folder}: {error}. TMPDIR says where "
                "that is"
            ) from error


class _Weakly:
    """A weak reference to a mirror, so that `file_access` does not keep it alive."""

    def __init__(self, mirror: RemoteStep) -> None:
        self.folder, self.url = mirror.folder, mirror.url
        self._mirror = weakref.ref(mirror)

    @property
    def checker(self) -> Checker:
        return self._alive().checker

    def remote_file(self, name: str) -> _RemoteFile | None:
        return self._alive().remote_file(name)

    def fetch(self, name: str) -> None:
        self._alive().fetch(name)

    def name_damage(self) -> list[Damage]:
        return self._alive().name_damage()

    def _alive(self) -> RemoteStep:
        found = self._mirror()
        if found is None:
            raise TransferError(f"The remote checkpoint {self.url} was closed while it was still being read")
        return found


class _RemoteFile:
    """A file of a remote step, read in whole MiB; each MiB is compared with its digest before it is returned."""

    is_checked = True

    def __init__(self, remote: Folder, checker: Checker, name: str) -> None:
        self._remote, self._checker, self.name = remote, checker, name
        self.n_bytes = checker.digests.files[name].n_bytes

    @property
    def n_units(self) -> int:
        """The number of MiB; the last one may be partial."""
        return -(-self.n_bytes // UNIT_BYTES)

    def begin(self, unit: int, count: int) -> _Units:
        start, stop = unit * UNIT_BYTES, min((unit + count) * UNIT_BYTES, self.n_bytes)
        fetch = self._remote.begin(self.name, start, stop) if start < stop else None
        return _Units(self._checker, self.name, unit, stop - start, fetch)

    def read_into(self, buffer: memoryview, offset: int) -> None:
        rest = buffer.cast("B") if buffer.nbytes else memoryview(b"")
        if offset + len(rest) > self.n_bytes:
            raise TransferError(f"{self._remote.url}/{self.name} has {self.n_bytes} bytes, not {offset + len(rest)}")
        while rest:
            unit, skip = divmod(offset, UNIT_BYTES)
            count = min(-(-(skip + len(rest)) // UNIT_BYTES), READ_UNITS)
            part = self.begin(unit, count).result()[skip : skip + len(rest)]
            rest[: len(part)] = part
            rest, offset = rest[len(part) :], offset + len(part)

    def read_unchecked(self, buffer: memoryview, offset: int) -> None:
        stop = offset + len(buffer)
        found = _present(self._checker, self.name, self._remote.begin(self.name, offset, stop))
        if len(found) != len(buffer):
            raise self._checker.wrong_size(self.name, found=offset + len(found))
        buffer[:] = found

    def close(self) -> None:
        pass


READ_UNITS = 8
"""MiB per request."""


class _Units:
    """A request for some MiB of a file."""

    def __init__(self, checker: Checker, name: str, unit: int, n_bytes: int, fetch: Fetch | None) -> None:
        self._checker, self._name, self._unit, self._n_bytes, self._fetch = checker, name, unit, n_bytes, fetch

    def result(self) -> memoryview:
        if self._fetch is None:
            return memoryview(b"")
        data = memoryview(_present(self._checker, self._name, self._fetch))
        if len(data) != self._n_bytes:
            raise self._checker.wrong_size(self._name, found=self._unit * UNIT_BYTES + len(data))
        for at in range(0, len(data), UNIT_BYTES):
            self._checker.check_data(self._name, self._unit + at // UNIT_BYTES, data[at : at + UNIT_BYTES])
        return data

    def cancel(self) -> None:
        if self._fetch is not None:
            self._fetch.cancel()


def _present(checker: Checker, name: str, fetch: Fetch) -> bytes:
    try:
        found = fetch.result()
    except TransferError as error:
        if fetch.is_too_short(error):
            raise checker.wrong_size(name) from error
        raise
    if found is None:
        raise checker.missing(name)
    return found


def open_mirror(remote: Folder) -> RemoteStep | None:
    """Open the shardload step in a remote folder; ``None`` if the folder has no digests.

    Raises:
        DamagedError: If the digests are damaged.
        TransferError: If the store does not respond.
    """
    found = remote.read_small(DIGESTS_FILE, limit=MAX_JSON_BYTES)
    return None if found is None else RemoteStep(remote, found)


def rename(error: BaseException | None, folder: str, url: str) -> None:
    """Replace ``folder`` by ``url`` in the messages of an error and its causes."""
    parent, above = os.path.split(folder)[0], url.rpartition("/")[0]
    while error is not None:
        if isinstance(error, ShardloadError):
            error.args = tuple(
                arg.replace(folder, url).replace(parent, above) if isinstance(arg, str) else arg for arg in error.args
            )
        error = error.__cause__


def _is_mirrored(name: str) -> bool:
    top, _, rest = name.partition("/")
    return (not rest or top in _ITEMS) and not _DATA.search(name)


def _remove(base: str, folder: str) -> None:
    file_access.leave(folder)
    shutil.rmtree(base, ignore_errors=True)
