"""Inputs to format detection: the first bytes of a file, further bounded reads, the names in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shardload.errors import SourceError
from shardload.loaders.folder import member
from shardload.stores.file_reading import read_header
from shardload.stores.json_files import read_object
from shardload.stores.location import Location
from shardload.stores.store import File

# More than the longest signature that is checked, the 23 bytes of a Git LFS pointer.
HEAD_BYTES = 64
CONFIG = "config.json"


# No slots in these two classes: `cached_property` keeps its values in the instance's dict.
@dataclass(frozen=True)
class FileContent:
    """An open, non-empty file whose format is being detected."""

    path: Location
    file: File

    @property
    def size(self) -> int:
        """The file's size in bytes."""
        return self.file.n_bytes

    @cached_property
    def head(self) -> bytes:
        """The first `HEAD_BYTES` bytes, or the whole file if it is shorter."""
        return self.read(0, HEAD_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        """Read at most ``count`` bytes; fewer at the end of the file."""
        count = max(0, min(count, self.size - offset))
        return read_header(self.file, count, offset=offset, path=str(self.path), what="the first bytes")

    @cached_property
    def first_shard(self) -> str | None:
        """The first file named in the ``weight_map`` of a JSON file, or ``None``."""
        try:
            found = read_object(self.path).get("weight_map") if self.head.lstrip().startswith(b"{") else None
        except SourceError:
            # Damaged JSON matches no format; `recognition` reads the file again to report the error.
            return None
        if not isinstance(found, dict) or not found:
            return None
        # Keras lists several shards for a group of variables; transformers names one file for each tensor.
        first = next(iter(found.values()))  # enough: an index lists shards of one format
        return str(first[0] if isinstance(first, list) and first else first)


@dataclass(frozen=True)
class FolderContent:
    """A folder whose format is being detected."""

    path: Location
    names: list[str]
    """Names of its entries, sorted."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``; empty if there is none.

        Raises:
            SourceError: When it is not a JSON object.
        """
        return read_object(member(self.path, CONFIG, named_by=str(self.path))) if CONFIG in self.names else {}
