"""Locate each value in an OCDBT store: TensorStore's key-value store, a B-tree in many small files.

    manifest.ocdbt ─► root node ─► inner nodes ─► leaf nodes:  key ─► inline bytes (at most 1 KiB)
    (each node: a byte range of a file in d/)                   key ─► file, offset, length

The store may refer to folders of the processes that wrote it: ``ocdbt.process_0/`` + ``d/1d35…``. It is untrusted:
each reference must stay in the store's folder and in its file. A node's size is checked before TensorStore inflates
it, since zstd data can grow 32 768-fold.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from shardload.errors import LimitError, SourceError, TruncatedSourceError, UnsafeSourceError
from shardload.loaders.contents import descendant
from shardload.stores.location import Location
from shardload.units import exact_bytes, plural

BACKSLASH = "TensorStore takes the backslash in its path for a slash"
MANIFEST = "manifest.ocdbt"
_MAX_MANIFEST_BYTES = 1 << 20
"""Limit on the bytes of ``manifest.ocdbt``. It may list sixteen versions of the store; Orbax writes one."""
_MAX_NODE_BYTES = 1 << 27
"""Limit on the bytes of a B-tree node, stored or inflated; Orbax requests at most 100 MB when it writes."""
_MAX_HEIGHT = 16
MAX_KEYS = 1 << 20
"""Limit on the keys of a store: a million chunks. The largest published checkpoints have a few hundred thousand."""
_MAX_VISITS, _VISITS_FLOOR_BYTES = 4, 1 << 16
"""Limit on the total size of the nodes read: the first number times the size of the files with nodes, plus the second.
A node has one parent, or a few in merged stores. Unlimited, a chain of nodes that each list the next one 99 times
would never end."""
_LABELS = re.compile(
    r'^[A-Z_]+: |Error (?:reading|opening|decoding)[^:]*"[^"]*": |Error parsing object member "metadata": '
)
_ADDED = re.compile(r" \[[a-z_ ]+=|; at (?:uncompressed )?byte ")
"""Matches the details after the cause in TensorStore's error texts, which only its developers need."""
_NUMBER = re.compile(r"[0-9]{1,19}")
"""Matches an offset or a length; bounded, because int() raises for thousands of digits."""
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZSTD_BLOCK_BYTES = 1 << 17
_NODE_HEADER_BYTES = 14
"""Bytes of a node before its content: magic (4), length (8), version and compression (one each)."""


@dataclass(frozen=True, slots=True)
class OcdbtValue:
    """One value in an OCDBT store: where its bytes are in a file, or the bytes themselves."""

    path: Location
    """The file that contains the value."""
    offset: int
    """Offset of the value in the file, in bytes; 0 if the value is in `inline`."""
    length: int
    inline: bytes | None = None
    """The value itself, if it is stored inside a B-tree node of ``path``."""

    def read(self, limit: int, *, what: str) -> bytes:
        """Return the value; raise if it has more than ``limit`` bytes. ``what`` names it in the error."""
        if self.length > limit:
            raise UnsafeSourceError(
                f"{self.path}: {what} should have at most {exact_bytes(limit)}, but has {exact_bytes(self.length)}"
            )
        if self.inline is not None:
            return self.inline
        return self.path.read_header(self.length, offset=self.offset, what=what)


def read_values(folder: Location) -> dict[str, OcdbtValue]:
    """Return all keys, in order, with the places of their values, in the newest version of a folder's OCDBT store."""
    return dict(OcdbtWalk(folder).walk())


@dataclass(slots=True)
class OcdbtWalk:
    """One walk through the B-tree of a store. It counts keys and bytes, so that a hostile store cannot keep it busy."""

    folder: Location
    sizes: dict[str, tuple[Location, int]] = field(default_factory=dict)
    """Cache: a file's name in the store → its location and size in bytes."""
    keys: int = 0
    node_bytes: int = 0
    """Total bytes of the B-tree nodes read so far; each time that a node is read counts."""
    node_files: set[Location] = field(default_factory=set)
    """Files from which nodes have been read so far; their total size limits ``node_bytes``."""
    node_file_bytes: int = 0

    def walk(self) -> Iterator[tuple[str, OcdbtValue]]:
        """Yield each key in the newest version of the store with the place of its value, in key order."""
        manifest = self.folder / MANIFEST
        size = self._file(MANIFEST)[1]
        if size > _MAX_MANIFEST_BYTES:
            raise UnsafeSourceError(f"{manifest} should have at most {_MAX_MANIFEST_BYTES} bytes, but has {size}")
        if not size:
            raise TruncatedSourceError(f"{manifest} is empty. The save did not finish; use another step")
        # TensorStore opens the file itself.
        manifest.local_part(0, size)
        _refuse_inflation(manifest.read_header(size, offset=0, what="the manifest"), manifest)
        versions = self.dump(None, manifest).get("versions")
        if not versions:
            raise SourceError(f"{manifest} lists no version of the store. Save the checkpoint again")
        # A manifest may list older versions; the newest one is the checkpoint.
        root = max(versions, key=lambda v: v["generation_number"])["root"]
        # An early answer for honest stores; `_node` counts, because a hostile manifest may declare too few.
        declared = root["statistics"]["num_keys"]
        if declared > MAX_KEYS:
            raise UnsafeSourceError(f"{manifest} declares {plural(declared, 'key')}; at most {MAX_KEYS} are allowed")
        if "location" in root:
            yield from self._node(root["location"], b"", _MAX_HEIGHT)

    def _node(self, location: str, prefix: bytes, depth: int) -> Iterator[tuple[str, OcdbtValue]]:
        found = self.locate(location, "btreenode")
        if found.length > _MAX_NODE_BYTES or not depth:
            raise UnsafeSourceError(
                f"{found.path} contains a B-tree node of {exact_bytes(found.length)}, or too many levels"
            )
        self._count(found)
        found.path.local_part(found.offset, found.offset + found.length)
        _refuse_inflation(found.read(_MAX_NODE_BYTES, what="a B-tree node"), found.path)
        node = self.dump(location, found.path)
        for entry in node["entries"]:
            if node["height"]:
                below = prefix + entry["subtree_common_prefix"]
                # One level less, and no more than the node declares: a node that refers to itself ends in an error.
                yield from self._node(entry["location"], below, min(depth - 1, node["height"]))
                continue
            self.keys += 1
            if self.keys > MAX_KEYS:
                raise UnsafeSourceError(f"{found.path}: the store has more than {MAX_KEYS} keys")
            key = prefix + entry["key"]
            try:
                name = key.decode("utf-8")
            except UnicodeDecodeError as error:
                raise SourceError(f"{found.path} contains the key {key[:200]!r}, which is not UTF-8") from error
            # Values of at most 1 KiB are stored in the node and have no location.
            if (inline := entry.get("inline_value")) is not None:
                yield name, OcdbtValue(found.path, 0, len(inline), bytes(inline))
            else:
                yield name, self.locate(entry["indirect_value"], "value")

    def _count(self, node: OcdbtValue) -> None:
        self.node_bytes += node.length
        if node.path not in self.node_files:
            self.node_files.add(node.path)
            self.node_file_bytes += node.path.size
        if self.node_bytes > _VISITS_FLOOR_BYTES + _MAX_VISITS * self.node_file_bytes:
            raise UnsafeSourceError(
                f"{node.path}: the nodes of the B-tree refer to the same nodes again and again: "
                f"{exact_bytes(self.node_bytes)} of them were read from files of {exact_bytes(self.node_file_bytes)}. "
                "Save the checkpoint again"
            )

    def locate(self, location: str, kind: str) -> OcdbtValue:
        """Parse and check ``location``, where OCDBT says a value or node is: ``kind:base:file:offset:length``."""
        parts = location.split(":")
        if len(parts) != 5 or parts[0] != kind or not all(map(_NUMBER.fullmatch, parts[3:])):
            raise SourceError(
                f"{self.folder / MANIFEST} leads to {location[:300]!r}, which is not the location of a {kind}"
            )
        name, offset, length = unquote(parts[1]) + unquote(parts[2]), int(parts[3]), int(parts[4])
        path, size = self._file(name)
        if offset + length > size:
            raise TruncatedSourceError(
                f"{path} is truncated: the B-tree puts {exact_bytes(length)} at offset {offset}, but the file has "
                f"{exact_bytes(size)}. Copy it again, or use another step"
            )
        return OcdbtValue(path, offset, length)

    def _file(self, name: str) -> tuple[Location, int]:
        if name not in self.sizes:
            path = descendant(self.folder, name, named_by=str(self.folder / MANIFEST))
            self.sizes[name] = path, path.size
        return self.sizes[name]

    def dump(self, location: str | None, path: Location) -> Any:
        """Let TensorStore decode the B-tree node at ``location``, or the manifest if ``None``; errors name ``path``."""
        import tensorstore as ts  # 0.2 s to import

        folder = f"{(self.folder / MANIFEST).local_part(0, 0).parent}/"
        if "\\" in folder:
            raise SourceError(f"Cannot read {path}: {BACKSLASH}. Rename the folder")
        try:
            base = ts.KvStore.open({"driver": "file", "path": folder}).result()
            return ts.ocdbt.dump(base, location).result()
        # Which of these TensorStore raises depends on its status code.
        except (ValueError, RuntimeError, OSError) as error:
            if limit := LimitError.explaining(error, f"open {path}"):
                raise limit from error
            reason = said(error).replace(folder, f"{self.folder}/")
            raise SourceError(f"{path} is damaged: {reason}. Copy it again, or use another step") from error


def said(error: BaseException | None) -> str:
    """Return the cause that a TensorStore error gives, without details that only TensorStore's developers need."""
    text = _LABELS.sub("", _ADDED.split(str(error))[0])
    return text.strip().rstrip(".") or "it cannot be decoded"


def _refuse_inflation(raw: bytes, path: Location) -> None:
    """Raise if zstd could inflate a B-tree node to more than 128 MiB. TensorStore itself reports malformed data."""
    at, inflated = _NODE_HEADER_BYTES, 0
    while raw[at : at + 4] == _ZSTD_MAGIC and at + 6 <= len(raw):
        # Frame header (RFC 8878): magic and flags, window unless a single segment, dictionary id, content size. That
        # size is optional, so the sizes of the blocks are added up instead.
        flags = raw[at + 4]
        single = flags >> 5 & 1
        at += 5 + (1 - single) + (0, 1, 2, 4)[flags & 3] + (single, 2, 4, 8)[flags >> 6]
        for _ in itertools.count():
            # Block header: last (1 bit), kind (2: raw, repeated byte, compressed), size (21).
            header = int.from_bytes(raw[at : at + 3], "little")
            size, kind = header >> 3, header >> 1 & 3
            at += 3 + (1 if kind == 1 else size)
            inflated += _ZSTD_BLOCK_BYTES if kind >= 2 else size
            if inflated > _MAX_NODE_BYTES:
                raise UnsafeSourceError(
                    f"{path} contains a node of {exact_bytes(len(raw))} that inflates to more than {_MAX_NODE_BYTES} "
                    "bytes"
                )
            if header & 1 or at >= len(raw):
                break
        # The checksum of the frame; another frame may follow.
        at += 4 * (flags >> 2 & 1)
