"""Stores whose files are bytes in memory: the smallest complete ones, and proof that loaders read through a store.

`MemoryStore` is local and compares nothing, `RemoteMemoryStore` is remote, `VerifyingMemoryStore` verifies: the two
properties of a store, one by one.
"""

import threading
import zlib
from pathlib import Path

from shardload.errors import DamagedError, SourceError, SourceNotFoundError, TransferError
from shardload.stores.location import Location
from shardload.stores.store import UNIT_BYTES, FileIdentity, Store


class MemoryStore(Store):
    """Files by key; replacing one changes its identity."""

    scheme = "memory"

    def __init__(self, files=()):
        self.files = {key: bytes(content) for key, content in dict(files).items()}

    @classmethod
    def copy_of(cls, path):
        """The location of a copy of a local file, or of a folder with everything in it."""
        path = Path(path)
        found = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        return Location(cls({each.relative_to(path.parent).as_posix(): each.read_bytes() for each in found}), path.name)

    def shown(self, key):
        return f"{self.scheme}://{key}"

    def kind(self, key):
        if key in self.files:
            return "file"
        return "folder" if not key or any(name.startswith(f"{key}/") for name in self.files) else None

    def names(self, key):
        if self.kind(key) != "folder":
            raise SourceError(f"Cannot list the folder {self.shown(key)}: it does not exist")
        prefix = f"{key}/" if key else ""
        return sorted({name[len(prefix) :].partition("/")[0] for name in self.files if name.startswith(prefix)})

    def open(self, key):
        if self.kind(key) == "folder":
            raise SourceError(f"{self.shown(key)} should be a file, but it is a folder")
        if key not in self.files:
            raise SourceNotFoundError(f"There is no file {self.shown(key)}")
        return self.opened(key)

    def opened(self, key):
        return MemoryFile(self.files[key], self.shown(key))

    def identity(self, key):
        return FileIdentity(self.open(key).n_bytes, (0, 0, id(self.files[key])))


class MemoryFile:
    """An open file."""

    descriptor = None

    def __init__(self, content, name):
        self.content, self.name, self.n_bytes = content, name, len(content)

    def read_into(self, buffer, offset):
        if offset + buffer.nbytes > self.n_bytes:
            raise TransferError(f"{self.name} ends before byte {offset + buffer.nbytes}")
        if buffer.nbytes:
            buffer.cast("B")[:] = self.content[offset : offset + buffer.nbytes]

    read_unchecked = read_into

    def close(self):
        pass


class RemoteMemoryStore(MemoryStore):
    """A remote store without digests; it records what is asked of it."""

    scheme = "remote"
    is_remote = True

    def __init__(self, files=()):
        super().__init__(files)
        self.reads, self.ahead = [], []
        """The ranges (key, start, stop) that were read at once, and those requested in advance."""
        self.pending = self.most_pending = 0
        self.lock = threading.Lock()

    def opened(self, key):
        return RemoteMemoryFile(self, key)


class RemoteMemoryFile(MemoryFile):
    """A file whose bytes can be requested in advance."""

    def __init__(self, store, key):
        super().__init__(store.files[key], store.shown(key))
        self.store, self.key = store, key

    def read_into(self, buffer, offset):
        self.store.reads.append((self.key, offset, offset + buffer.nbytes))
        super().read_into(buffer, offset)

    read_unchecked = read_into

    def begin(self, start, stop):
        with self.store.lock:
            self.store.ahead.append((self.key, start, stop))
            self.store.pending += 1
            self.store.most_pending = max(self.store.most_pending, self.store.pending)
        return PendingMemory(self, start, stop)


class PendingMemory:
    """A request."""

    def __init__(self, file, start, stop):
        self.file, self.start, self.stop = file, start, stop

    def result(self):
        with self.file.store.lock:
            self.file.store.pending -= 1
        return memoryview(self.file.content[self.start : self.stop])

    def cancel(self):
        pass


class VerifyingMemoryStore(MemoryStore):
    """A local store that compares each MiB with its checksum before it returns a byte of it."""

    scheme = "verifying"
    is_verifying = True

    def __init__(self, files=()):
        super().__init__(files)
        self.sums = {key: sums_of(content) for key, content in self.files.items()}

    def opened(self, key):
        return VerifyingMemoryFile(self.files[key], self.shown(key), self.sums[key])

    def flip(self, key, at):
        """Damage one byte."""
        damaged = bytearray(self.files[key])
        damaged[at] ^= 1
        self.files[key] = bytes(damaged)


class VerifyingMemoryFile(MemoryFile):
    """A file with checksums."""

    def __init__(self, content, name, sums):
        super().__init__(content, name)
        self.sums = sums

    def read_into(self, buffer, offset):
        first, last = offset // UNIT_BYTES, -(-(offset + buffer.nbytes) // UNIT_BYTES)
        found = sums_of(self.content[first * UNIT_BYTES : last * UNIT_BYTES])
        for unit, (one, saved) in enumerate(zip(found, self.sums[first:last], strict=False), first):
            if one != saved:
                raise DamagedError(f"{self.name} from byte {unit * UNIT_BYTES} is damaged")
        super().read_into(buffer, offset)

    read_unchecked = MemoryFile.read_into


def sums_of(content):
    """The checksum of each MiB."""
    return [zlib.crc32(content[at : at + UNIT_BYTES]) for at in range(0, len(content), UNIT_BYTES)]
