"""The space that a cache of ranges takes: what is in it, what is removed when it is full, and leftovers of writers.

Objects are removed by their last use, the oldest first. An object that the current load uses stays, even if the cache
is full: if a checkpoint is larger than the cache, removing what was read first would leave nothing for the next start.
So does what is pinned, in the version that was used last.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from shardload.stores import range_files
from shardload.stores.range_files import CachedObject, CacheFolder

_OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_MARGIN_S = 1.0
"""File systems round times of modification: what was used this long before a load counts as used by it."""
_FOLDER_NAME_LENGTH = 32


@dataclass(frozen=True, slots=True)
class StoredObject:
    """What the cache has of one version of an object."""

    folders: tuple[str, str]
    """Names of its folder in the cache."""
    described: CachedObject | None
    """What it is, as a file in the folder says; ``None`` if that cannot be read."""
    ranges: tuple[tuple[str, int], ...]
    """Names and sizes in bytes of its files."""
    used_s: float
    """When it was used last, in seconds since 1970."""

    @property
    def n_bytes(self) -> int:
        """Bytes that its files take, with their headers."""
        return sum(size for _, size in self.ranges)


def stored_objects(folder: CacheFolder) -> list[StoredObject]:
    """Return what is in a cache, the most recently used object first."""
    return sorted(_stored(folder), key=lambda each: (-each.used_s, each.folders))


def _stored(folder: CacheFolder) -> Iterator[StoredObject]:
    for address in _folders(folder, "objects"):
        for version in _folders(folder, "objects", address):
            with contextlib.suppress(OSError), folder.opened("objects", address, version) as fd:
                described = range_files.described(fd)
                if described is not None and described.folders != (address, version):
                    described = None
                with os.scandir(fd) as entries:
                    files = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
                ranges = tuple((n, s.st_size) for n, s in files if range_files.is_range(n) and stat.S_ISREG(s.st_mode))
                yield StoredObject((address, version), described, ranges, range_files.last_used_s(fd))


def _folders(folder: CacheFolder, *names: str) -> list[str]:
    with contextlib.suppress(OSError), folder.opened(*names) as fd:
        return [name for name in range_files.names_in(fd) if len(name) == _FOLDER_NAME_LENGTH and name.isalnum()]
    return []


@contextlib.contextmanager
def _locked(folder: CacheFolder) -> Iterator[None]:
    """Let one process at a time remove files, so that no two count the same ones."""
    with folder.opened(create=True) as at:
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open("lock", flags, 0o600, dir_fd=at)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class Room:
    """What `make_room` did, in bytes of files with their headers."""

    removed: int
    left: int


def make_room(folder: CacheFolder, *, limit_bytes: int, used_before_s: float, pinned: Iterable[str] = ()) -> Room:
    """Remove ranges until at most ``limit_bytes`` are left.

    Objects that were used at ``used_before_s`` (seconds since 1970) or later are kept, and those at or below the
    addresses ``pinned``.
    """
    with _locked(folder):
        now_s = time.time()
        found = [_not_later(folder, each, now_s=now_s) for each in stored_objects(folder)]
        kept = {each.folders for each in latest(found) if any(_is_at(each, address) for address in pinned)}
        total = left = sum(each.n_bytes for each in found)
        for each in reversed(found):
            if left <= limit_bytes or each.used_s > used_before_s - _MARGIN_S:
                break
            if each.folders not in kept:
                left -= _remove(folder, each, most_bytes=left - limit_bytes)
        return Room(total - left, left)


def _not_later(folder: CacheFolder, each: StoredObject, *, now_s: float) -> StoredObject:
    """Return an object, as used now if it was used later than that: the clock was set back, and it must not stay."""
    if each.used_s <= now_s + _MARGIN_S:
        return each
    if each.described is None:
        return replace(each, used_s=0.0)
    folder.touch(each.described, at_s=now_s)
    return replace(each, used_s=now_s)


def _remove(folder: CacheFolder, each: StoredObject, *, most_bytes: int | None = None) -> int:
    """Remove ranges of an object, all or as many as take ``most_bytes`` or a little more; return how many bytes."""
    removed, left = 0, list(each.ranges)
    with contextlib.suppress(OSError), folder.opened("objects", *each.folders) as fd:
        while left and (most_bytes is None or removed < most_bytes):
            name, size = left.pop()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=fd)
            removed += size
        if not left:
            for name in range_files.names_in(fd):
                os.unlink(name, dir_fd=fd)
    if not left:
        # Not empty if another process has just written there: then its folder stays.
        with contextlib.suppress(OSError), folder.opened("objects", each.folders[0]) as fd:
            os.rmdir(each.folders[1], dir_fd=fd)
        with contextlib.suppress(OSError), folder.opened("objects") as fd:
            os.rmdir(each.folders[0], dir_fd=fd)
    return removed


def clear(folder: CacheFolder, *, older_than_s: float = 0.0, address: str | None = None) -> list[StoredObject]:
    """Remove objects that were not used for ``older_than_s``, at or below ``address``; return what was removed."""
    if not (folder.path / range_files.FOLDER).is_dir():
        return []
    before_s = time.time() - older_than_s
    with _locked(folder):
        chosen = [e for e in stored_objects(folder) if (not older_than_s or e.used_s < before_s) and _is_at(e, address)]
        for each in chosen:
            _remove(folder, each)
    remove_leftovers(folder)
    return chosen


def _is_at(each: StoredObject, address: str | None) -> bool:
    if address is None:
        return True
    place = "" if each.described is None else each.described.address
    return place == address or place.startswith(f"{address.rstrip('/')}/")


def latest(found: Iterable[StoredObject]) -> list[StoredObject]:
    """Return the version of each object that was used last, given all by their last use, the latest first."""
    versions: dict[str, StoredObject] = {}
    for each in found:
        versions.setdefault(each.folders[0], each)
    return list(versions.values())


def remove_leftovers(folder: CacheFolder) -> None:
    """Remove files whose writers ended before they were finished: a living one keeps its file locked."""
    with contextlib.suppress(OSError), folder.opened("new") as at:
        for name in range_files.names_in(at):
            with contextlib.suppress(OSError):
                fd = os.open(name, _OPEN_FILE, dir_fd=at)
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=at)
                finally:
                    os.close(fd)
