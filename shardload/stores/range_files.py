"""The files of a cache of ranges: one for each stored range of one version of an object, written whole or not at all.

    DIR/shardload-ranges-1/      only this user may read and write it
        lock                     locked while ranges are removed
        new/                     files that are being written, each locked by its writer
        objects/ADDRESS/VERSION/ two digests: of the object's address, and of its version
            object.json          what they are digests of; its time of modification is the object's last use
            START-STOP           4 KiB of header (what it is, digests of its bytes), then bytes [START, STOP)

Nothing in the folder is trusted: names and lengths count only as far as the header and its digests confirm them, and no
symbolic link is followed below DIR. The digests (xxh3) detect accidents, not an attacker who can write to the folder.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import functools
import hashlib
import itertools
import json
import os
import re
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from shardload.errors import UsageError

FOLDER = "shardload-ranges-1"
"""Folder in the user's one, with the version of its form: what another version wrote is not read."""
MOST_RANGE_BYTES = 16 << 20
"""Most bytes in one file: a longer range is stored as several."""
_HEADER_BYTES = 4096
"""Size of a file's header: a page, so that the bytes of the range begin where reads are fast."""
_CHUNK_BYTES = 256 << 10
"""How many bytes one digest covers. A read of a part of a range reads and compares whole chunks."""
_MAGIC = b"shardload ranges"
_HEAD = struct.Struct("<16s16sQQII")
"""Magic, digest of the object, first byte, one past the last, bytes of a chunk, number of digests (8 bytes each)."""
_KEPT_FOLDERS = 32
"""How many objects' folders stay open between reads."""
_MOST_PARTS = 1024
"""Most pieces of memory that one ``preadv`` call fills on Linux and macOS."""
_NAME = re.compile(r"([0-9a-f]{1,16})-([0-9a-f]{1,16})")
_DESCRIPTION = "object.json"
_MOST_JSON_BYTES = 1 << 16
_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a pipe that someone put there must not wait for its writer.
_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC

Segment = tuple[int, int]
"""A range of an object that is stored as one file: its first byte, and one past its last."""

_numbers = itertools.count()


@dataclass(frozen=True)
class CachedObject:
    """One version of an object: what the ranges in the cache belong to."""

    address: str
    """Its address, without what follows ``?``, which may be a signature."""
    version: str
    """What differs between versions: ETag, time of the last change, or text for an address that names one version."""
    size: int
    """The object's size in bytes."""
    variant: str = ""
    """A digest of what else tells objects at one address apart: an endpoint, parts of a query that are no signature."""

    @functools.cached_property
    def digest(self) -> bytes:
        """A digest of all of it, which the header of each file repeats."""
        return hashlib.blake2b(json.dumps(asdict(self)).encode(), digest_size=16).digest()

    @property
    def folders(self) -> tuple[str, str]:
        """Names of its folder below ``objects``: one for the address, one for the version."""
        return address_folder(self.address, self.variant), self.digest.hex()


def address_folder(address: str, variant: str) -> str:
    """Return the name of the folder of all versions of an object."""
    return hashlib.blake2b(f"{variant} {address}".encode(), digest_size=16).hexdigest()


class _KeptFolder:
    """An object's open folder, kept open while files in it are read, as opening it takes six system calls."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class CacheFolder:
    """A folder of cached ranges, which is created when the first one is written."""

    def __init__(self, path: Path) -> None:
        """Check the folder ``path``; raise `UsageError` if it is no folder, or if others may write to it."""
        self.path = path
        self._kept: dict[CachedObject, _KeptFolder] = {}
        self._check()

    def _check(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            found = self.path.stat()
            if not stat.S_ISDIR(found.st_mode):
                raise UsageError(f"Cannot use {self.path} as the cache: it is a file, expected a folder")
            _refuse_shared(found, self.path)
        with contextlib.suppress(FileNotFoundError):
            found = (self.path / FOLDER).lstat()
            if not stat.S_ISDIR(found.st_mode):
                raise UsageError(
                    f"Cannot use {self.path} as the cache: {FOLDER} in it is not a folder. Remove it, or give another "
                    "folder"
                )
            _refuse_shared(found, self.path / FOLDER)

    @contextlib.contextmanager
    def opened(self, *names: str, create: bool = False) -> Iterator[int]:
        """Yield a descriptor of a folder below the root; ``create`` makes what is missing, for this user alone."""
        if create:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            for name in (FOLDER, *names):
                if create:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=fd)
                inner = os.open(name, _OPEN_FOLDER, dir_fd=fd)
                os.close(fd)
                fd = inner
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def of(self, found: CachedObject, *, create: bool = False) -> Iterator[int]:
        """Yield a descriptor of the folder of a version of an object; ``create`` makes it, with its description."""
        with self.opened("objects", *found.folders, create=create) as fd:
            if create and not _exists(_DESCRIPTION, fd):
                with self._new_file() as (own, at, name):
                    write_everything(own, [memoryview(json.dumps(asdict(found)).encode())])
                    os.rename(name, _DESCRIPTION, src_dir_fd=at, dst_dir_fd=fd)
            yield fd

    @contextlib.contextmanager
    def _new_file(self) -> Iterator[tuple[int, int, str]]:
        """Yield a new file, locked while it is written: its descriptor, that of its folder, and its name there."""
        with self.opened("new", create=True) as at:
            name = f"{os.getpid()}-{next(_numbers)}-{os.urandom(4).hex()}"
            fd = os.open(name, _NEW_FILE, 0o600, dir_fd=at)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
                yield fd, at, name
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=at)
                raise
            finally:
                os.close(fd)

    def segments(self, found: CachedObject) -> list[Segment]:
        """Return which ranges of an object are stored, sorted, as the names of files say."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError), self.of(found) as fd:
            return sorted(each for name in names_in(fd) if (each := segment_of(name, found.size)) is not None)
        return []

    def touch(self, found: CachedObject, *, at_s: float | None = None) -> None:
        """Note that an object is used now, or at another time, as far as the folder can be written to."""
        times = None if at_s is None else (at_s, at_s)
        with contextlib.suppress(OSError), self.of(found) as fd:
            os.utime(_DESCRIPTION, times, dir_fd=fd, follow_symlinks=False)

    @contextlib.contextmanager
    def _open(self, found: CachedObject, segment: Segment) -> Iterator[int]:
        if (kept := self._kept.get(found)) is None:
            with self.of(found) as at:
                kept = self._kept[found] = _KeptFolder(os.dup(at))
            for old in list(self._kept)[:-_KEPT_FOLDERS]:
                self._kept.pop(old, None)
        try:
            fd = os.open(name_of(segment), _OPEN_FILE, dir_fd=kept.fd)
        except FileNotFoundError:  # perhaps the folder has been removed, and made again
            self._kept.pop(found, None)
            raise
        try:
            yield fd
        finally:
            os.close(fd)

    def read_into(
        self, buffers: Sequence[memoryview], found: CachedObject, segment: Segment, start: int
    ) -> bool | None:
        """Fill buffers, in turn, with an object's bytes from ``start`` on, all of which one stored range contains.

        Returns:
            Whether the bytes are those that were stored: false if the file is damaged; ``None`` if it is gone.
        """
        try:
            with self._open(found, segment) as fd:
                return _read(fd, buffers, found, segment, start)
        except FileNotFoundError:
            return None
        except OSError:
            return False  # a symbolic link, or a disk that fails

    def write(self, found: CachedObject, start: int, data: memoryview) -> None:
        """Store a range of an object; raises `OSError`, after which nothing of it is stored."""
        segment = (start, start + len(data))
        header = memoryview(_header(found, segment, [_digest(chunk) for chunk in _by_chunk([data])]))
        with self.of(found, create=True) as at, self._new_file() as (fd, new, name):
            write_everything(fd, [header, data])
            os.rename(name, name_of(segment), src_dir_fd=new, dst_dir_fd=at)

    def discard(self, found: CachedObject, segment: Segment) -> None:
        """Remove a stored range, if the folder can be written to."""
        with contextlib.suppress(OSError), self.of(found) as fd:
            os.unlink(name_of(segment), dir_fd=fd)


def _refuse_shared(found: os.stat_result, path: Path) -> None:
    writable = bool(found.st_mode & 0o022)
    if found.st_uid not in (os.geteuid(), 0) or writable:
        who = "other users can write to it" if writable else "it belongs to another user"
        raise UsageError(
            f"Cannot use {path} as the cache: {who} (mode {stat.S_IMODE(found.st_mode):03o}), expected a folder that "
            "only you can write to. Give a new folder, which is created with mode 700"
        )


def _exists(name: str, at: int) -> bool:
    try:
        os.stat(name, dir_fd=at, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def names_in(at: int) -> list[str]:
    """Return the names in an open folder."""
    with os.scandir(at) as entries:
        return [entry.name for entry in entries]


def name_of(segment: Segment) -> str:
    """Return the name of a stored range's file."""
    return f"{segment[0]:x}-{segment[1]:x}"


def segment_of(name: str, size: int) -> Segment | None:
    """Return the range that a file's name stands for; ``None`` if it cannot be one of an object of this size."""
    if (match := _NAME.fullmatch(name)) is None:
        return None
    start, stop = int(match[1], 16), int(match[2], 16)
    is_possible = 0 <= start < stop <= min(size, start + MOST_RANGE_BYTES) and name == name_of((start, stop))
    return (start, stop) if is_possible else None


def is_range(name: str) -> bool:
    """Whether a file's name is that of a stored range."""
    return segment_of(name, 1 << 63) is not None


def described(at: int) -> CachedObject | None:
    """Read what the object in a folder is, as its file says; ``None`` if that cannot be read."""
    try:
        fd = os.open(_DESCRIPTION, _OPEN_FILE, dir_fd=at)
        try:
            body = json.loads(os.read(fd, _MOST_JSON_BYTES))
        finally:
            os.close(fd)
        found = CachedObject(body["address"], body["version"], body["size"], body["variant"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    texts = (found.address, found.version, found.variant)
    return found if all(isinstance(text, str) for text in texts) and type(found.size) is int else None


def last_used_s(at: int) -> float:
    """Return when the object in a folder was used last, in seconds since 1970; 0 if that is not known."""
    try:
        return os.stat(_DESCRIPTION, dir_fd=at, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _by_chunk(parts: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Divide what lies in pieces of memory, one after the other, into chunks; yield the pieces of each."""
    held: list[memoryview] = []
    left = _CHUNK_BYTES
    for part in parts:
        at = 0
        while at < len(part):
            held.append(part[at : at + left])
            at, left = at + len(held[-1]), left - len(held[-1])
            if not left:
                yield held
                held, left = [], _CHUNK_BYTES
    if held:
        yield held


def _digest(parts: Sequence[memoryview]) -> int:
    import xxhash

    if len(parts) == 1:
        return xxhash.xxh3_64_intdigest(parts[0])
    found = xxhash.xxh3_64()
    for part in parts:
        found.update(part)
    return found.intdigest()


def _header(found: CachedObject, segment: Segment, digests: Sequence[int]) -> bytes:
    import xxhash

    head = _HEAD.pack(_MAGIC, found.digest, *segment, _CHUNK_BYTES, len(digests))
    head = (head + struct.pack(f"<{len(digests)}Q", *digests)).ljust(_HEADER_BYTES - 8, b"\0")
    return head + xxhash.xxh3_64_digest(head)


def _read(fd: int, buffers: Sequence[memoryview], found: CachedObject, segment: Segment, start: int) -> bool:
    length = segment[1] - segment[0]
    there = os.fstat(fd)
    if not stat.S_ISREG(there.st_mode) or there.st_size != _HEADER_BYTES + length:
        return False
    # Whole chunks, as digests cover these: what is in them besides the wanted bytes goes to memory of its own.
    wanted = sum(map(len, buffers))
    first = (start - segment[0]) // _CHUNK_BYTES * _CHUNK_BYTES
    skip = start - segment[0] - first
    end = min(length, -(-(first + skip + wanted) // _CHUNK_BYTES) * _CHUNK_BYTES)
    parts = [_edge(0, skip), *buffers, _edge(1, end - first - skip - wanted)]
    header = bytearray(_HEADER_BYTES)
    if not _filled(fd, [memoryview(header)], 0):
        return False
    digests = struct.unpack_from(f"<{-(-length // _CHUNK_BYTES)}Q", header, _HEAD.size)
    # The header of these digests, which has a digest of its own, is the one that such a file must have.
    if _header(found, segment, digests) != header:
        return False
    # Each chunk is compared while it is in the core's cache: from memory, that takes more than twice the time.
    for number, chunk in enumerate(_by_chunk(parts), first // _CHUNK_BYTES):
        if not _filled(fd, chunk, _HEADER_BYTES + number * _CHUNK_BYTES) or _digest(chunk) != digests[number]:
            return False
    return True


_own = threading.local()


def _edge(number: int, n_bytes: int) -> memoryview:
    """Return memory of this thread for the bytes of a chunk before (0) or after (1) those that are wanted."""
    if not hasattr(_own, "edges"):
        _own.edges = [memoryview(bytearray(_CHUNK_BYTES)) for _ in range(2)]
    found: memoryview = _own.edges[number]
    return found[:n_bytes]


def _filled(fd: int, parts: Sequence[memoryview], offset: int) -> bool:
    rest = [part for part in parts if part]
    while rest:
        count = os.preadv(fd, rest[:_MOST_PARTS], offset)
        if not count:
            return False
        offset += count
        rest = _without(rest, count)
    return True


def _without(parts: Sequence[memoryview], count: int) -> list[memoryview]:
    """Return pieces of memory without their first ``count`` bytes."""
    for number, part in enumerate(parts):
        if count < len(part):
            return [part[count:], *parts[number + 1 :]]
        count -= len(part)
    return []


def write_everything(fd: int, parts: list[memoryview]) -> None:
    """Write pieces of memory one after the other."""
    while parts:
        count = os.writev(fd, parts)
        if not count:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        parts = _without(parts, count)
