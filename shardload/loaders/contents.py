"""Inputs to format detection: the first bytes of a file, further bounded reads, the names in a folder."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from shardload.errors import SourceError
from shardload.loaders.folder import member
from shardload.stores import local
from shardload.stores.json_files import read_object

HEAD_BYTES = 64
CONFIG = "config.json"


@dataclass(frozen=True)
class FileContent:
    """An open, non-empty file whose format is being detected."""

    path: str
    """Absolute path."""
    fd: int
    size: int
    """In bytes."""

    @cached_property
    def head(self) -> bytes:
        """The first `HEAD_BYTES` bytes, or the whole file if it is shorter."""
        return self.read(0, HEAD_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        """Read at most ``count`` bytes; fewer at the end of the file."""
        count = max(0, min(count, self.size - offset))
        return local.read_header(self.fd, count, offset=offset, path=self.path, what="the first bytes")

    @cached_property
    def first_shard(self) -> str | None:
        """The first file named in the ``weight_map`` of a JSON file, or ``None``."""
        try:
            found = read_object(self.path).get("weight_map") if self.head.lstrip().startswith(b"{") else None
        except SourceError:
            return None
        if not isinstance(found, dict) or not found:
            return None
        first = next(iter(found.values()))
        return str(first[0] if isinstance(first, list) and first else first)


@dataclass(frozen=True)
class FolderContent:
    """A folder whose format is being detected."""

    path: Path
    """Absolute path."""
    names: list[str]
    """Names of its entries, sorted."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The content of ``config.json``; empty if there is none.

        Raises:
            SourceError: When it is not a JSON object.
        """
        return read_object(member(self.path, CONFIG, named_by=str(self.path))) if CONFIG in self.names else {}
