"""What a format is recognised by: the first bytes of a file, bounded reads of more, the names in a folder."""

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
    """A file that is open while it is being recognised, and is not empty."""

    path: str
    """Absolute."""
    fd: int
    size: int
    """In bytes."""

    @cached_property
    def head(self) -> bytes:
        """The first `HEAD_BYTES` bytes, or all there are."""
        return self.read(0, HEAD_BYTES)

    def read(self, offset: int, count: int) -> bytes:
        """At most ``count`` bytes; fewer at the end of the file."""
        count = max(0, min(count, self.size - offset))
        return local.read_header(self.fd, count, offset=offset, path=self.path, what="the first bytes")

    @cached_property
    def first_shard(self) -> str | None:
        """The first file that a ``weight_map`` names, where the file is JSON with one."""
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
    """A folder that is being recognised."""

    path: Path
    """Absolute."""
    names: list[str]
    """Of its entries, sorted."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """Its ``config.json``; empty where there is none.

        Raises:
            SourceError: When that is no JSON object.
        """
        return read_object(member(self.path, CONFIG, named_by=str(self.path))) if CONFIG in self.names else {}
