"""safetensors: an 8-byte length, a JSON header, then the tensors without gaps.

    ┌────────┬──────────────────────────────────────────────────────────┬───────────────────────┐
    │ u64 n  │ {"name": {"dtype", "shape", "data_offsets": [a, b]}, …}  │ bytes, no holes       │
    └────────┴──────────────────────────────────────────────────────────┴───────────────────────┘
     0        8                                                          8 + n = offset 0 of the data

A file must be valid for the reference library (huggingface/safetensors, ``tensor.rs``) and have no key twice.
The header is parsed entry by entry, so that a hostile header takes no more memory than a normal one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from json import decoder
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from shardload.errors import SourceError, TruncatedSourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders.extents import check_shape, checked_tensors
from shardload.loaders.file_pieces import FilePiece, TensorPlace, Wanted, grouped
from shardload.manifest import Decoded, Extent, Manifest, Tensor, UnreadableRows
from shardload.stores.json_files import require_brace, unique_pairs
from shardload.stores.location import Location
from shardload.stores.store import read_bytes
from shardload.units import exact_bytes, plural

_MAX_HEADER_BYTES = 100_000_000
"""Limit on the bytes of a header, as in the reference library."""
_MAX_ENTRY_CHARS = 4096
"""Limit on the characters of one tensor's entry, enough for three keys and 32 dims of 20 digits."""

_DTYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "U16": np.uint16,
        "I16": np.int16,
        "U32": np.uint32,
        "I32": np.int32,
        "U64": np.uint64,
        "I64": np.int64,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "C64": np.complex64,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
        "F8_E5M2FNUZ": ml_dtypes.float8_e5m2fnuz,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}
_scan_string: Callable[[str, int, bool], tuple[str, int]] = decoder.scanstring  # type: ignore[attr-defined]
"""Scans a JSON string, from the character after its opening quote: the C function that `json` itself uses."""
_ENTRY = json.JSONDecoder(object_pairs_hook=unique_pairs)
_SUB_BYTE: dict[str, tuple[np.dtype[Any], int]] = {
    "F4": (np.dtype(ml_dtypes.float4_e2m1fn), 4),
    "F6_E2M3": (np.dtype(ml_dtypes.float6_e2m3fn), 6),
    "F6_E3M2": (np.dtype(ml_dtypes.float6_e3m2fn), 6),
}
"""Name of a dtype whose elements share bytes → NumPy's dtype, bits per element. Such tensors cannot be read."""
SHARD_BYTES = 5_000_000_000
"""Default limit on the size of a shard that is written: 5 GB, for years also the default of ``transformers``."""
PYTORCH = {"format": "pt"}
"""Metadata of a file whose tensors have PyTorch's names and shapes. transformers 4 refuses files without ``format``."""
_CODES = {dtype.name: code for code, dtype in _DTYPES.items()}
"""Name of a dtype in NumPy → its name in safetensors."""
SAFETENSORS_DTYPES = frozenset(_CODES)
"""Names of the dtypes of tensors that can be written."""


@dataclass(frozen=True, slots=True)
class SafetensorsHeader:
    """The parsed header of one safetensors file."""

    tensors: tuple[Tensor, ...]
    """All tensors, in the order of their bytes in the file."""
    metadata: dict[str, str]
    """The header's ``__metadata__``: texts by key, such as ``{"format": "pt"}``."""
    file_bytes: int
    """Size of the file in bytes."""


def open_file(path: Location) -> Manifest:
    """Return the manifest of one ``.safetensors`` file by itself, without a configuration."""
    header = read_header(path)
    files = {path: header.file_bytes}
    return Manifest(path, "safetensors", checked_tensors(header.tensors, files=files), files, metadata=header.metadata)


def read_header(path: Location) -> SafetensorsHeader:
    """Parse the header of one safetensors file, and check that its tensors cover the file without overlap or hole."""
    name = str(path)
    with closing(path.open()) as file:
        size = file.n_bytes
        length = int.from_bytes(read_bytes(file, 8, offset=0, path=name, what="the header's length"), "little")
        if length > _MAX_HEADER_BYTES:
            raise UnsafeSourceError(
                f"{path} has a header of {exact_bytes(length)}, expected at most {exact_bytes(_MAX_HEADER_BYTES)}. "
                "It is damaged or not a safetensors file; download it again"
            )
        what = "the safetensors header"
        # A damaged length would have the tensors parsed as text. A header past the end of the file is reported below.
        if 8 + length <= size:
            require_brace(file, 8 + length, path=name, what=what)
        raw = read_bytes(file, length, offset=8, path=name, what=what)
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SourceError(f"{path}: byte {8 + error.start} of the safetensors header is not UTF-8") from error
    # The header may have 100 MB: keep one copy of it.
    del raw
    return _Parser(path, text, data_start=8 + length, file_bytes=size).parse()


def begins_object(head: bytes) -> bool:
    """Whether a file's first bytes could be a header's 8-byte length, perhaps white space, and the header's ``{``."""
    return head[8:].lstrip(b" \t\r\n").startswith(b"{")


def looks_like(head: bytes, size: int) -> bool:
    """Whether first bytes could be those of safetensors: a header length that a file of ``size`` allows, then ``{``."""
    return begins_object(head) and int.from_bytes(head[:8], "little") <= min(_MAX_HEADER_BYTES, size)


class _Parser:
    """Parses a header's JSON text in one pass, one tensor's entry at a time, to keep little in memory."""

    def __init__(self, path: Location, text: str, *, data_start: int, file_bytes: int) -> None:
        self._path = path
        self._text = text
        self._data_start = data_start
        self._data_bytes = file_bytes - data_start
        self._metadata: dict[str, str] = {}
        self._spans: dict[str, tuple[int, int]] = {}
        """Name of a tensor → first byte and end (exclusive) of the tensor's data in the file."""

    def parse(self) -> SafetensorsHeader:
        tensors: dict[str, Tensor] = {}
        try:
            end = self._object(0, tensors)
        except (ValueError, StopIteration, IndexError) as error:
            # It is a ValueError and says more than the message below.
            if isinstance(error, SourceError):
                raise
            raise self._wrong(f"does not parse: {error}") from error
        if end != len(self._text):
            raise self._wrong(f"continues after its closing brace, at character {end}")
        # The header may list tensors in any order; the data may not have holes.
        ordered = tuple(sorted(tensors.values(), key=lambda tensor: self._spans[tensor.name]))
        self._refuse_holes(ordered)
        return SafetensorsHeader(ordered, self._metadata, self._data_start + self._data_bytes)

    def _object(self, start: int, tensors: dict[str, Tensor]) -> int:
        has_metadata = False
        for key, at in (members := _Members(self._text, start)):
            if key == "__metadata__":
                if has_metadata:
                    raise self._wrong("contains '__metadata__' twice")
                has_metadata = True
                # Some writers have no metadata and write null.
                is_null = self._text.startswith("null", at)
                members.position = at + len("null") if is_null else self._strings(at)
                continue
            entry, members.position = self._entry(key, at)
            if key in tensors:
                raise self._wrong(f"contains the tensor {key!r} twice")
            tensors[key] = self._tensor(key, entry)
        return members.position

    def _strings(self, start: int) -> int:
        for key, at in (members := _Members(self._text, start)):
            if self._text[at : at + 1] != '"':
                raise self._wrong(f"gives '__metadata__' key {key[:200]!r} a value that is not a string")
            if key in self._metadata:
                raise self._wrong(f"contains the '__metadata__' key {key[:200]!r} twice")
            self._metadata[key], members.position = _scan_string(self._text, at + 1, True)
        return members.position

    def _entry(self, name: str, start: int) -> tuple[dict[str, Any], int]:
        # `json` parses a short piece alone: to the first brace or, if the entry has a brace inside, as far as allowed.
        end = self._text.find("}", start, start + _MAX_ENTRY_CHARS) + 1
        if self._text[start : start + 1] != "{" or not end:
            raise self._wrong(f"describes tensor {name[:200]!r} by something that is not a short object")
        try:
            try:
                entry = json.loads(self._text[start:end], object_pairs_hook=unique_pairs)
            except json.JSONDecodeError:
                entry, length = _ENTRY.raw_decode(self._text[start : start + _MAX_ENTRY_CHARS])
                end = start + length
        except (ValueError, RecursionError) as error:
            raise self._wrong(f"describes tensor {name[:200]!r} in invalid JSON: {error}") from error
        # Other keys are ignored, as by the reference library.
        if not {"dtype", "shape", "data_offsets"} <= set(entry):
            raise self._wrong(f"should give tensor {name!r} dtype, shape and data_offsets, but gives {sorted(entry)}")
        return entry, end

    def _tensor(self, name: str, entry: dict[str, Any]) -> Tensor:
        (dtype, bits), (start, stop) = self._dtype(name, entry["dtype"]), self._offsets(name, entry["data_offsets"])
        shape = entry["shape"]
        if not isinstance(shape, list) or any(type(n) is not int for n in shape):
            raise self._wrong(f"should give tensor {name!r} a list of integers as shape, but gives {str(shape)[:200]}")
        check_shape(tuple(shape), name=name, path=self._path)
        if (n_bits := math.prod(shape) * bits) % 8:
            raise self._wrong(
                f"gives tensor {name!r} the shape {tuple(shape)} of {entry['dtype']}, which is "
                f"{plural(n_bits, 'bit')}, but should be a whole number of bytes"
            )
        expected = n_bits // 8
        # Python's integers do not overflow, so a shape cannot wrap around to a plausible size.
        if expected != stop - start:
            raise self._wrong(
                f"gives tensor {name!r} the shape {tuple(shape)} of {entry['dtype']}, which is "
                f"{exact_bytes(expected)}, but data_offsets [{start}, {stop}], which is {exact_bytes(stop - start)}"
            )
        self._spans[name] = first, last = self._data_start + start, self._data_start + stop
        if entry["dtype"] in _SUB_BYTE:
            why = f"its dtype {entry['dtype']} packs several elements into a byte"
            return Tensor(name, tuple(shape), dtype, Decoded(UnreadableRows(((self._path, first, last - first),), why)))
        return Tensor(name, tuple(shape), dtype, Extent(self._path, first))

    def _dtype(self, name: str, text: object) -> tuple[np.dtype[Any], int]:
        known = text if isinstance(text, str) else ""
        if known in _DTYPES:
            return _DTYPES[known], 8 * _DTYPES[known].itemsize
        if known in _SUB_BYTE:
            return _SUB_BYTE[known]
        raise self._wrong(
            f"gives tensor {name!r} the dtype {str(text)[:100]!r}; supported dtypes: {', '.join(_DTYPES)}"
        )

    def _offsets(self, name: str, offsets: object) -> tuple[int, int]:
        if not isinstance(offsets, list) or len(offsets) != 2 or any(type(n) is not int for n in offsets):
            raise self._wrong(f"should give tensor {name!r} two data_offsets, but gives {str(offsets)[:200]}")
        start, stop = offsets
        if not 0 <= start <= stop:
            raise self._wrong(f"gives tensor {name!r} data_offsets {offsets}, which end before they start")
        if stop > self._data_bytes:
            raise TruncatedSourceError(
                f"{self._path} is truncated: tensor {name!r} should end at byte {self._data_start + stop}, "
                f"but the file has {exact_bytes(self._data_start + self._data_bytes)}. Download it again"
            )
        return start, stop

    def _refuse_holes(self, ordered: tuple[Tensor, ...]) -> None:
        end, before = self._data_start, "the header"
        for tensor in ordered:
            start, stop = self._spans[tensor.name]
            if start != end:
                kind = "overlaps" if start < end else "leaves a hole after"
                raise self._wrong(
                    f"lets tensor {tensor.name!r} start at byte {start}, expected byte {end}: it {kind} {before}, "
                    "which ends there"
                )
            end, before = stop, f"tensor {tensor.name!r}"
        if end != self._data_start + self._data_bytes:
            raise self._wrong(
                f"covers the file up to byte {end}, but it has {exact_bytes(self._data_start + self._data_bytes)}"
            )

    def _wrong(self, what: str) -> SourceError:
        return SourceError(f"{self._path}: the safetensors header {what}. Download or save the file again")


class _Members:
    """Iterates over a JSON object in a text: yields each key and the position at which its value starts.

    The caller parses the value and moves ``position`` past it. At the end, ``position`` is past the object and the
    white space that follows it.
    """

    def __init__(self, text: str, start: int) -> None:
        self._text = text
        self.position = start

    def __iter__(self) -> Iterator[tuple[str, int]]:
        self._expect("{")
        more = self._peek() != "}"
        while more:
            self._expect('"')
            key, self.position = _scan_string(self._text, self.position, True)
            self._expect(":")
            self._peek()
            yield key, self.position
            if more := self._peek() != "}":
                self._expect(",")
        self._expect("}")
        self._peek()

    def _peek(self) -> str:
        while (char := self._text[self.position : self.position + 1]) in {" ", "\t", "\n", "\r"}:
            self.position += 1
        return char

    def _expect(self, char: str) -> None:
        if (found := self._peek()) != char:
            raise ValueError(f"expected {char!r} at character {self.position}, found {found or 'the end'!r}")
        self.position += 1


def write_skeleton(
    folder: Path,
    tensors: Sequence[Wanted],
    *,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] = PYTORCH,
    single: str = "model.safetensors",
) -> tuple[TensorPlace, ...]:
    """Make safetensors files without the values, and an index if there are several; return where the values belong.

    ``single``: name of the file, if there is one.
    """
    groups = grouped(tensors, shard_bytes)
    names = [f"model-{i:05}-of-{len(groups):05}.safetensors" for i in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [single]
    places = [
        place for name, group in zip(names, groups, strict=True) for place in _write(folder, name, group, metadata)
    ]
    if len(groups) > 1:
        weight_map = {t.name: name for name, group in zip(names, groups, strict=True) for t in group}
        index = {"metadata": {"total_size": sum(t.nbytes for t in tensors)}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
    return tuple(places)


def write_file_skeleton(
    path: Path, tensors: Sequence[Wanted], *, metadata: Mapping[str, str] = PYTORCH
) -> tuple[TensorPlace, ...]:
    """Make one safetensors file without the values; return where they belong."""
    places = _write(path.parent, path.name, tensors, metadata)
    return tuple(TensorPlace(p.name, tuple(replace(piece, path="") for piece in p.pieces)) for p in places)


def _write(folder: Path, name: str, tensors: Sequence[Wanted], metadata: Mapping[str, str]) -> list[TensorPlace]:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    at, starts = 0, []
    for tensor in tensors:
        if tensor.dtype.name not in _CODES:
            raise UnsupportedError(
                f"Cannot write tensor {tensor.name!r} to safetensors, which has no {tensor.dtype}. Choose another "
                "--dtype, or --to orbax"
            )
        starts.append(at)
        code, end = _CODES[tensor.dtype.name], at + tensor.nbytes
        entries[tensor.name] = {"dtype": code, "shape": list(tensor.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(entries, separators=(",", ":")).encode()
    # Padded as the safetensors library does, so that the data begins at a multiple of 8.
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    with (folder / name).open("wb") as file:
        file.write(header)
        file.truncate(len(header) + at)  # sparse until the values are copied
    pairs = zip(tensors, starts, strict=True)
    return [TensorPlace(t.name, (FilePiece(name, len(header) + start, 0, t.size),)) for t, start in pairs]
