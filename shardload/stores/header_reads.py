"""The reads by which one process opens a checkpoint, noted so that other processes need not repeat them.

    process 0   Location.open ─► notes each read: name below the checkpoint, offset, bytes ─► `HeaderReads.pack`
    others      Location.open ─► answers the same reads from these notes; a real file is opened for any other read

Formats are not involved: the same loader runs on each process, and gets the same bytes. Of a bucket or hub, it also
gets what the store told: which objects there are, and their versions, to which all later reads are limited.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from shardload.stores.location import Location, opening_by
from shardload.stores.objects import StoreFacts
from shardload.stores.remote import RemoteStore, knowing
from shardload.stores.store import File, Store

MOST_BYTES = 64 << 20
"""Most bytes that are noted. Headers have up to some MB, a tokenizer 35 MB; whoever reads more reads values."""


@dataclass(slots=True)
class NotedReads:
    """What was read of one file: its size, and the bytes at each offset."""

    n_bytes: int
    parts: dict[int, bytes] = field(default_factory=dict)
    """Offset → the longest read that began there."""

    def find(self, offset: int, count: int) -> bytes | None:
        """Return ``count`` bytes from ``offset`` on, if they were read; else ``None``."""
        for start, part in self.parts.items():
            if start <= offset and offset + count <= start + len(part):
                return part[offset - start : offset - start + count]
        return None


def root_of(location: Location) -> tuple[Location, str]:
    """Return the folder of an opened checkpoint, and the name that it must have on all processes; empty: any name."""
    # A step is a folder named by its number: two steps have equal names of files.
    return (location, location.name) if location.is_folder() else (location.parent, "")


class ReadNotes:
    """Files that are opened and read meanwhile, by their location."""

    def __init__(self) -> None:
        self.files: dict[Location, NotedReads] = {}
        self.is_on = True
        self._n_bytes, self._is_too_much = 0, False

    def open(self, location: Location) -> File:
        """Open a file, and note what is read of it."""
        file = location.store.open(location.key)
        if _is_apart(location.store):
            return file
        return _NotedFile(file, self, self.files.setdefault(location, NotedReads(file.n_bytes)))

    def note(self, reads: NotedReads, offset: int, found: memoryview) -> None:
        """Note bytes that were read; beyond `MOST_BYTES`, stop and forget everything."""
        if not self.is_on or len(reads.parts.get(offset, b"")) >= len(found):
            return
        self._n_bytes += len(found)
        if self._n_bytes > MOST_BYTES:
            self.is_on, self._is_too_much = False, True
            self.files.clear()
            return
        reads.parts[offset] = bytes(found)

    def pack(self, location: Location) -> bytes | None:
        """Return the notes about files below an opened checkpoint; ``None`` if there are too many or none."""
        if self._is_too_much:
            return None
        root, name = root_of(location)
        below = {where: path for path in self.files if (where := path.relative_to(root))}
        files = {where: self.files[path] for where, path in below.items()}
        index = [[n, f.n_bytes, [[at, len(part)] for at, part in f.parts.items()]] for n, f in files.items()]
        head = json.dumps({"root": name, "files": index, "store": _told_by(location.store)}).encode()
        body = b"".join(part for f in files.values() for part in f.parts.values())
        return zlib.compress(len(head).to_bytes(8, "little") + head + body, 1) if files else None


def _is_apart(store: Store) -> bool:
    """Whether each process reads a store for itself: a remote one whose versions other processes cannot rely on."""
    return store.is_remote and (not isinstance(store, RemoteStore) or store.facts is None)


def _told_by(store: Store) -> dict[str, Any] | None:
    if not isinstance(store, RemoteStore) or store.facts is None:
        return None
    return {"url": store.url, "facts": store.facts.as_json()}


class _NotedFile:
    """A file whose reads are noted."""

    descriptor = None  # system calls on it would not be noted

    def __init__(self, file: File, notes: ReadNotes, reads: NotedReads) -> None:
        self._file, self._notes, self._reads = file, notes, reads
        self.n_bytes = file.n_bytes

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on; see `shardload.stores.store.File`."""
        self._file.read_into(buffer, offset)
        self._notes.note(self._reads, offset, buffer)

    read_unchecked = read_into

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def noting() -> Iterator[ReadNotes]:
    """Note what this thread reads of files that it opens in the with block."""
    noted = ReadNotes()
    try:
        with opening_by(noted.open):
            yield noted
    finally:
        noted.is_on = False


class Replay:
    """Answers reads from the notes of another process: as long as files have the names that they have there."""

    def __init__(self, packed: bytes) -> None:
        raw = zlib.decompress(packed)
        start = 8 + int.from_bytes(raw[:8], "little")
        head = json.loads(raw[8:start])
        self._name: str = head["root"]
        self.files: dict[str, NotedReads] = {}
        for name, n_bytes, parts in head["files"]:
            reads = self.files[name] = NotedReads(n_bytes)
            for offset, count in parts:
                reads.parts[offset] = raw[start : start + count]
                start += count
        self._roots: set[Location] = set()
        store = head["store"]
        self.facts = {} if store is None else {store["url"]: StoreFacts.of(store["facts"])}
        """URL of the store → what it has told; empty for files on this machine."""

    def open(self, location: Location) -> File:
        """Return a file that answers what was noted; the file itself if nothing was."""
        if self._is_known(location.store) and (found := self._find(location)) is not None:
            return _ReplayedFile(location, found)
        return location.store.open(location.key)

    def _is_known(self, store: Store) -> bool:
        if not store.is_remote:
            return not self.facts
        return isinstance(store, RemoteStore) and store.url in self.facts

    def _find(self, location: Location) -> NotedReads | None:
        folder, below = location.parent, location.name
        while below not in self.files or self._name not in ("", folder.name):
            if folder.key == folder.parent.key:
                return None
            folder, below = folder.parent, f"{folder.name}/{below}"
        self._roots.add(folder)
        return self.files[below]

    def is_of(self, location: Location) -> bool:
        """Whether all answers were about files of this checkpoint, not about others with such names."""
        return self._roots <= {root_of(location)[0]}

    def size_of(self, location: Location, root: Location) -> int | None:
        """Return the size that a file had where its reads were noted; ``None`` if none were."""
        found = self.files.get(location.relative_to(root) or "")
        return None if found is None else found.n_bytes


class _ReplayedFile:
    """A file that is opened only for reads that were not noted."""

    descriptor = None

    def __init__(self, location: Location, reads: NotedReads) -> None:
        self._location, self._reads = location, reads
        self._file: File | None = None
        self.n_bytes = reads.n_bytes

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill ``buffer`` from ``offset`` on; see `shardload.stores.store.File`."""
        found = self._reads.find(offset, len(buffer))
        if found is not None:
            buffer[:] = found
            return
        if self._file is None:
            self._file = self._location.store.open(self._location.key)
        self._file.read_into(buffer, offset)

    read_unchecked = read_into

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()


@contextmanager
def replaying(packed: bytes) -> Iterator[Replay]:
    """Answer what this thread reads of files that it opens in the with block from the notes of another process."""
    replay = Replay(packed)
    with opening_by(replay.open), knowing(replay.facts):
        yield replay
