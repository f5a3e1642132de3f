"""The arrays of one Orbax item, stored in OCDBT or in one folder per array."""

from __future__ import annotations

import math

from shardload.errors import SourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders import ocdbt, zarr_metadata
from shardload.loaders.folder import descendant
from shardload.loaders.ocdbt import MAX_KEYS, OcdbtValue
from shardload.loaders.zarr_chunks import Cell, storage
from shardload.manifest import Extent, Tensor
from shardload.stores.location import Location
from shardload.stores.remote_failures import COPY_FIRST
from shardload.units import exact_bytes, plural

_HEADERS = frozenset({zarr_metadata.ZARR2, zarr_metadata.ZARR3})
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

    def __init__(self, folder: Location, *, is_complete: bool) -> None:
        self._folder = folder
        self._is_complete = is_complete
        is_ocdbt = ocdbt.MANIFEST in folder.names()
        if not is_ocdbt and folder.store.is_remote:  # each chunk would be a file to fetch
            raise UnsupportedError(
                f"{folder} has a folder for each array, which can only be read on this machine. {COPY_FIRST}"
            )
        values = ocdbt.read_values(folder) if is_ocdbt else _files(folder)
        self._total = sum(value.length for value in values.values())
        # An array named "" is the root of the store: a tree may have an empty text as key.
        self._headers = {key.rpartition("/")[0]: key for key in values if key.rpartition("/")[2] in _HEADERS}
        self._values: dict[str, dict[str, OcdbtValue]] = {name: {} for name in self._headers}
        for key, value in values.items():
            self._file_away(key, value)
        self._sizes: dict[Location, int] = {}

    def _file_away(self, key: str, value: OcdbtValue) -> None:
        name = key
        # Find the longest prefix that is an array: keys of chunks contain slashes, and so may names of arrays.
        while "/" in name:
            name = name.rpartition("/")[0]
            if name in self._headers:
                self._values[name][key[len(name) + 1 :]] = value
                return
        if "" in self._headers:
            self._values[""][key] = value

    @property
    def files(self) -> dict[Location, int]:
        """Size of each file with data of the requested tensors."""
        return dict(sorted(self._sizes.items()))

    def contains(self, name: str) -> bool:
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
                f"{self._folder} lists the array {stored_name!r}, but does not contain it. The save did not finish, or "
                "files are missing; use another step"
            )
        key = self._headers[stored_name]
        where = f"{self._folder}: {key}"
        values = self._values[stored_name]
        header = values[key.rpartition("/")[2]]
        metadata = header.read(zarr_metadata.MAX_METADATA_BYTES, what=key)
        array = zarr_metadata.parse(metadata, name=name, where=where)
        chunks = self._chunks(array, values, where)
        self._refuse_expansion(array, where)
        # The header's file counts too: chunks that were never written name it as theirs.
        for value in (header, *chunks.values()):
            if value.path not in self._sizes:
                self._sizes[value.path] = value.path.size
        # Nothing to read, so any offset is valid.
        if not math.prod(array.shape):
            return Tensor(name, array.shape, array.dtype, Extent(header.path, 0))
        return Tensor(name, array.shape, array.dtype, storage(array, chunks, header=header, metadata=metadata))

    def _chunks(self, array: zarr_metadata.Array, values: dict[str, OcdbtValue], where: str) -> dict[Cell, OcdbtValue]:
        found: dict[Cell, OcdbtValue] = {}
        for key, value in values.items():
            if key in (zarr_metadata.ZARR3, zarr_metadata.ZARR2, ".zattrs"):
                continue
            cell = array.cell(key)
            if cell is None:
                raise SourceError(
                    f"{where} has shape {array.shape} in chunks of {array.chunk_shape}, but also a chunk {key!r}, "
                    "which is outside that grid"
                )
            found[cell] = value
        cells = math.prod(array.grid)
        # Otherwise a missing chunk contains the fill value: Orbax skips chunks that are all zeros.
        if self._is_complete and len(found) != cells:
            raise SourceError(
                f"{where} should have {plural(cells, 'chunk')}, but has {len(found)}. Copy the step again, or use "
                "another one"
            )
        return found

    def _refuse_expansion(self, array: zarr_metadata.Array, where: str) -> None:
        size, chunk = (math.prod(shape) * array.dtype.itemsize for shape in (array.shape, array.chunk_shape))
        if chunk > max(EXPANSION_FLOOR_BYTES, MAX_OVERHANG * size):
            raise UnsafeSourceError(f"{where} declares chunks of {exact_bytes(chunk)} for a tensor of {size}")
        most = max(EXPANSION_FLOOR_BYTES, MAX_EXPANSION * self._total)
        for what, shape in (("tensor", array.shape), ("chunk", array.chunk_shape)):
            declared = math.prod(shape) * array.dtype.itemsize
            if declared > most:
                raise UnsafeSourceError(
                    f"{where} declares a {what} of {exact_bytes(declared)}, but all arrays together store "
                    f"{self._total}; at most {MAX_EXPANSION} times as many are possible. Copy the step again, or use "
                    "another one"
                )


def _files(folder: Location) -> dict[str, OcdbtValue]:
    """Return every file of a store without OCDBT, by its path relative to ``folder``; links count as files."""
    found: dict[str, OcdbtValue] = {}
    # Files next to the arrays' folders are Orbax' own metadata.
    waiting = [name for name in folder.names() if (folder / name).is_folder() and not (folder / name).is_link()]
    while waiting:
        inside = waiting.pop()
        for name in (folder / inside).names():
            key = f"{inside}/{name}"
            path = descendant(folder, key, named_by=str(folder))
            if path.is_folder() and not path.is_link():
                waiting.append(key)
                continue
            try:
                found[key] = OcdbtValue(path, 0, path.store.identity(path.key).size)
            except OSError as error:
                raise SourceError(f"Cannot read {path}: {error}") from error
            if len(found) > MAX_KEYS:
                raise UnsafeSourceError(f"{folder} contains more than {MAX_KEYS} files")
    return found
