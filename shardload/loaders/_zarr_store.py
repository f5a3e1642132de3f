"""The arrays of one Orbax item, stored in OCDBT or in one folder per array."""

from __future__ import annotations

import math
import os
from pathlib import Path

from shardload.errors import SourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders import _ocdbt, _zarr
from shardload.loaders._ocdbt import MAX_KEYS, OcdbtValue
from shardload.loaders._zarr_chunks import Cell, storage
from shardload.loaders.folder import descendant
from shardload.manifest import Extent, Tensor
from shardload.stores import file_access
from shardload.stores.remote import COPY_FIRST

MAX_EXPANSION = 40_000
"""Declared bytes per stored byte: zstd shrinks zeros, as in fresh optimizer slots, to 1/32 768."""
EXPANSION_FLOOR_BYTES = 1 << 26
MAX_OVERHANG = 16
"""Bytes of chunks per byte of their tensor: in each dim, an edge chunk overhangs by less than the chunk's length."""


class Arrays:
    """The stored values of an item's folder, by array.

    Args:
        folder: The item.
        is_complete: Whether Orbax wrote every chunk, including chunks of zeros.

    Raises:
        SourceError: When the store is damaged.
        UnsafeSourceError: When it reaches outside the folder.
    """

    def __init__(self, folder: Path, *, is_complete: bool) -> None:
        self._folder = folder
        self._is_complete = is_complete
        is_ocdbt = os.path.lexists(folder / _ocdbt.MANIFEST)
        if not is_ocdbt and file_access.mirror_of(folder) is not None:
            raise UnsupportedError(
                f"{folder} keeps a folder for each array, which is only read on this machine. {COPY_FIRST}"
            )
        values = _ocdbt.read_values(folder) if is_ocdbt else _files(folder)
        self._total = sum(value.length for value in values.values())
        self._headers = {key.rpartition("/")[0]: key for key in values if key.endswith(("/.zarray", "/zarr.json"))}
        self._values: dict[str, dict[str, OcdbtValue]] = {name: {} for name in self._headers}
        for key, value in values.items():
            self._file_away(key, value)
        self._sizes: dict[str, int] = {}

    def _file_away(self, key: str, value: OcdbtValue) -> None:
        name = key
        while "/" in name:
            name = name.rpartition("/")[0]
            if name in self._headers:
                self._values[name][key[len(name) + 1 :]] = value
                return

    @property
    def files(self) -> dict[str, int]:
        """Size of each file with data of the requested tensors."""
        return dict(sorted(self._sizes.items()))

    def holds(self, name: str) -> bool:
        """Whether the item stores an array of this name."""
        return name in self._headers

    def tensor(self, stored_name: str, *, name: str) -> Tensor:
        """Return the array ``stored_name`` as the tensor ``name``.

        Raises:
            SourceError: When the array is missing, lacks chunks or contradicts itself.
            UnsafeSourceError: When it declares far more than the item stores.
        """
        if stored_name not in self._headers:
            raise SourceError(
                f"{self._folder} lists the array {stored_name!r}, but does not hold it. The save did not finish, or "
                "files are missing; use another step"
            )
        key = self._headers[stored_name]
        where = f"{self._folder}: {key}"
        values = self._values[stored_name]
        header = values[key[len(stored_name) + 1 :]]
        metadata = header.read(_zarr.MAX_METADATA_BYTES, what=key)
        array = _zarr.parse(metadata, name=name, where=where)
        chunks = self._chunks(array, values, where)
        self._refuse_bomb(array, where)
        for value in (header, *chunks.values()):
            if value.path not in self._sizes:
                self._sizes[value.path] = file_access.size_of(value.path)
        if not math.prod(array.shape):
            return Tensor(name, array.shape, array.dtype, Extent(header.path, 0))
        return Tensor(name, array.shape, array.dtype, storage(array, chunks, header=header, metadata=metadata))

    def _chunks(self, array: _zarr.Array, values: dict[str, OcdbtValue], where: str) -> dict[Cell, OcdbtValue]:
        found: dict[Cell, OcdbtValue] = {}
        for key, value in values.items():
            if key in (_zarr.ZARR3, _zarr.ZARR2, ".zattrs"):
                continue
            cell = array.cell(key)
            if cell is None:
                raise SourceError(f"{where} has shape {array.shape} in chunks of {array.chunk_shape}, but also {key!r}")
            found[cell] = value
        cells = math.prod(array.grid)
        if self._is_complete and len(found) != cells:
            raise SourceError(
                f"{where} should have {cells} chunks, but {cells - len(found)} are missing. Copy the step again, or "
                "use another one"
            )
        return found

    def _refuse_bomb(self, array: _zarr.Array, where: str) -> None:
        size, chunk = (math.prod(shape) * array.dtype.itemsize for shape in (array.shape, array.chunk_shape))
        if chunk > max(EXPANSION_FLOOR_BYTES, MAX_OVERHANG * size):
            raise UnsafeSourceError(f"{where} declares chunks of {chunk} bytes for a tensor of {size}")
        most = max(EXPANSION_FLOOR_BYTES, MAX_EXPANSION * self._total)
        for what, shape in (("tensor", array.shape), ("chunk", array.chunk_shape)):
            declared = math.prod(shape) * array.dtype.itemsize
            if declared > most:
                raise UnsafeSourceError(
                    f"{where} declares a {what} of {declared} bytes, but all arrays together store {self._total}: a "
                    "decompression bomb"
                )


def _files(folder: Path) -> dict[str, OcdbtValue]:
    """Return every file of a store without OCDBT, by its path relative to ``folder``."""
    found: dict[str, OcdbtValue] = {}
    try:
        for parent, folders, names in os.walk(folder):
            inside = os.path.relpath(parent, folder)
            if inside == ".":
                continue
            for name in (*names, *(f for f in folders if Path(parent, f).is_symlink())):
                key = f"{inside}/{name}".replace(os.sep, "/")
                path = descendant(folder, key, named_by=str(folder))
                found[key] = OcdbtValue(str(path), 0, path.stat().st_size)
                if len(found) > MAX_KEYS:
                    raise UnsafeSourceError(f"{folder} holds more than {MAX_KEYS} files")
    except OSError as error:
        raise SourceError(f"{folder} cannot be read: {error}") from error
    return found
