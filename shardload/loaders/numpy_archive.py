"""NumPy's archives (``.npz``): a zip with a ``.npy`` file for each array.

    ┌ local header ┬ kernel.npy: magic, text header, values ┬ local header ┬ bias.npy … ┬ central directory ┐

`numpy.savez` stores members as they are, so values are read in place. `numpy.savez_compressed` deflates them; such an
array is decoded as a whole, as are those in Fortran order or of the other byte order. The zip is as untrusted as that
of `shardload.loaders.keras_archive`. Headers are limited to 10,000 bytes, as in NumPy, which parses them as literals.
Arrays of objects are pickles, and refused; arrays of text, dates and records are no tensors, and left out with a note.
"""

from __future__ import annotations

import io
import math
import zipfile
import zlib
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from shardload.errors import SourceError, TransferError, UnsafeSourceError, UnsupportedError
from shardload.loaders.contents import FileContent
from shardload.loaders.extents import check_shape, checked_tensors
from shardload.loaders.keras_archive import LOCAL_HEADER, MAGIC, data_starts, member_blocks, read_members
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Extent, Manifest, Packed, Tensor
from shardload.stores.location import Location
from shardload.stores.store import File, read_bytes
from shardload.units import exact_bytes

_ENDING = ".npy"
_MAX_HEADER_BYTES = 10_000
"""Limit on the text header of an array, in bytes: NumPy's own."""
_MAX_DEFLATE = 1032
"""Most bytes that one byte of deflate can become. A member that declares more is a lie."""
_WAY_OUT = "Save it again with numpy.savez"


@dataclass(frozen=True, slots=True)
class NpyMember:
    """Decodes one array of an archive from the stored bytes of its member, or of its values."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    """Dtype of the stored values, which may have the other byte order."""
    is_fortran: bool
    skipped_bytes: int
    """Bytes before the values, once inflated."""
    crc: int | None
    """CRC of the inflated member; ``None`` if the bytes are those of the values, stored as they are."""
    shown: str
    """Name of the archive and the member, for errors."""

    def decode(self, stored: bytes | bytearray) -> NDArray[Any]:
        """Return the values in C order and this machine's byte order."""
        raw = bytes(stored) if self.crc is None else self._inflated(stored)
        flat = np.frombuffer(raw, self.dtype, math.prod(self.shape), self.skipped_bytes)
        value = flat.reshape(self.shape, order="F" if self.is_fortran else "C")
        return np.ascontiguousarray(value.astype(self.dtype.newbyteorder("="), copy=False)).reshape(self.shape)

    def _inflated(self, stored: bytes | bytearray) -> bytes:
        expected = self.skipped_bytes + math.prod(self.shape) * self.dtype.itemsize
        try:
            raw = zlib.decompressobj(-zlib.MAX_WBITS).decompress(stored, expected + 1)
        except zlib.error as error:
            raise TransferError(f"Cannot decompress {self.shown}: {error}. {_WAY_OUT}") from error
        if len(raw) != expected or zlib.crc32(raw) != self.crc:
            why = "does not match its checksum" if len(raw) == expected else f"has {exact_bytes(len(raw))}"
            raise TransferError(
                f"Cannot decompress {self.shown}: it {why}, expected {exact_bytes(expected)}. {_WAY_OUT}"
            )
        return raw


def is_archive(content: FileContent) -> bool:
    """Whether a file is a zip whose first member is an array of NumPy."""
    if not content.head.startswith(MAGIC) or len(content.head) < LOCAL_HEADER.size:
        return False
    name_length = LOCAL_HEADER.unpack(content.head[: LOCAL_HEADER.size])[9]
    return content.read(LOCAL_HEADER.size, min(name_length, 4096)).endswith(_ENDING.encode())


def open_file(path: Location) -> Manifest:
    """Return the manifest of an archive: a tensor for each array, by the name that `numpy.savez` got for it."""
    members = read_members(path, way_out=_WAY_OUT)
    tensors, notes = [], []
    with closing(path.open()) as file:
        starts, files = data_starts(path, file, members, way_out=_WAY_OUT), {path: file.n_bytes}
        for info in members.values():
            if not info.filename.endswith(_ENDING):
                notes.append(f"{info.filename} in {path.name} is no array, and is left out")
                continue
            found = _tensor(path, file, info, starts)
            if found is None:
                notes.append(f"{info.filename} in {path.name} contains no numbers, and is left out")
            else:
                tensors.append(found)
    return Manifest(path, SPEC.name, checked_tensors(tensors, files=files), files, notes=tuple(notes))


def _tensor(path: Location, file: File, info: zipfile.ZipInfo, starts: Mapping[str, int]) -> Tensor | None:
    name, start = f"{path}:{info.filename}", starts[info.filename]
    if info.flag_bits & 1 or info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise UnsupportedError(
            f"Cannot read {name}: it is encrypted or not deflated, expected an archive of numpy.savez"
        )
    is_stored = info.compress_type == zipfile.ZIP_STORED
    expands = info.file_size > _MAX_DEFLATE * max(1, info.compress_size)
    if expands or (is_stored and info.file_size != info.compress_size):
        raise UnsafeSourceError(
            f"Cannot read {name}: it declares {exact_bytes(info.file_size)}, but stores "
            f"{exact_bytes(info.compress_size)}. {_WAY_OUT}"
        )
    if is_stored:
        count = min(info.file_size, _MAX_HEADER_BYTES + 16)
        head = read_bytes(file, count, offset=start, path=str(path), what=info.filename)
    else:
        head = next(member_blocks(path, file, info, start=start), b"")
    shape, is_fortran, dtype, skipped = _header(name, head)
    check_shape(shape, name=info.filename, path=path)
    if skipped + math.prod(shape) * dtype.itemsize != info.file_size:
        raise SourceError(
            f"Cannot read {name}: an array of {dtype} {shape} needs {exact_bytes(math.prod(shape) * dtype.itemsize)}, "
            f"but the member has {exact_bytes(info.file_size - skipped)} after its header. {_WAY_OUT}"
        )
    if dtype.kind not in "biufc":
        return None
    own, tensor = dtype.newbyteorder("="), info.filename.removesuffix(_ENDING)
    if not is_stored:
        codec = NpyMember(shape, dtype, is_fortran, skipped, info.CRC, name)
        return Tensor(tensor, shape, own, Packed(path, start, info.compress_size, codec))
    if dtype.newbyteorder("<") != dtype or (is_fortran and len(shape) > 1):
        codec = NpyMember(shape, dtype, is_fortran, 0, None, name)
        return Tensor(tensor, shape, own, Packed(path, start + skipped, info.file_size - skipped, codec))
    return Tensor(tensor, shape, own, Extent(path, start + skipped))


def _header(name: str, head: bytes) -> tuple[tuple[int, ...], bool, np.dtype[Any], int]:
    """Return shape, whether the order is Fortran's, dtype, and the length in bytes of an array's header."""
    stream = io.BytesIO(head)
    try:
        version = npy.read_magic(stream)
        read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"found version {version} of the format, expected 1.0 or 2.0")
        shape, is_fortran, dtype = read(stream, max_header_size=_MAX_HEADER_BYTES)
    except Exception as error:  # NumPy parses the header as a literal, which fails in many ways
        raise SourceError(f"Cannot read {name}: {error}".partition("\n")[0] + f". {_WAY_OUT}") from error
    if dtype.hasobject:
        raise UnsupportedError(
            f"Cannot read {name}: it is an array of Python objects, a pickle that can run code when opened, expected "
            f"numbers. {_WAY_OUT}, without this array"
        )
    return tuple(map(int, shape)), is_fortran, dtype, stream.tell()


SPEC = FormatSpec(
    name="numpy",
    description="an .npz archive of NumPy",
    endings=(".npz",),
    is_file=is_archive,
    open_file=open_file,
)
