"""A store whose files are bytes in memory: the smallest complete store, and proof that loaders read through one."""

from pathlib import Path

from shardload.errors import SourceError, SourceNotFoundError, TransferError
from shardload.stores.location import Location
from shardload.stores.store import FileIdentity, Store


class MemoryStore(Store):
    """Files by key; replacing one changes its identity."""

    def __init__(self, files=()):
        self.files = {key: bytes(content) for key, content in dict(files).items()}

    @classmethod
    def copy_of(cls, path):
        """The location of a copy of a local file, or of a folder with everything in it."""
        path = Path(path)
        found = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
        store = cls({each.relative_to(path.parent).as_posix(): each.read_bytes() for each in found})
        return Location(store, path.name)

    def shown(self, key):
        return f"memory://{key}"

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
        return MemoryFile(self.files[key], self.shown(key))

    def identity(self, key):
        return FileIdentity(self.open(key).n_bytes, (0, 0, id(self.files[key])))


class MemoryFile:
    """An open file."""

    descriptor = None
    is_checked = False

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
