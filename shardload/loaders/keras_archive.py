"""``.keras`` archives: Keras stores the member ``model.weights.h5`` uncompressed, so it is read in place.

    ┌ local header ┬ metadata.json ┬ local header ┬ config.json ┬ local header ┬ model.weights.h5 ┬ central directory ┐
                                                                              └ an HDF5 file inside the file

In an archive that was unzipped and zipped again, it is compressed: then it is unpacked to a private file first.
"""

from __future__ import annotations

import functools
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any, BinaryIO

from shardload.errors import SourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders import zip_members
from shardload.loaders.extents import collect
from shardload.loaders.recognition import refused_zip
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest
from shardload.stores import private_copies
from shardload.stores.json_files import MAX_JSON_BYTES, parse_object
from shardload.stores.location import Location
from shardload.stores.store import File
from shardload.units import exact_bytes

WEIGHTS = "model.weights.h5"
CONFIG = "config.json"
METADATA = "metadata.json"
MAX_EXPANSION = 1000
"""Inflated bytes per stored byte, as in Keras."""
ASSETS = "assets/"
ASSET_EXPANSION = 100
"""The same limit for files that layers saved, above `ASSET_FLOOR_BYTES`; both as in Keras."""
ASSET_FLOOR_BYTES = 1 << 28
WEIGHTS_EXPANSION = 100
"""The same limit for compressed weights, above `WEIGHTS_FLOOR_BYTES`. Trained weights shrink by less than half."""
WEIGHTS_FLOOR_BYTES = 1 << 25


def open_file(path: Location) -> Manifest:
    """Return the manifest of one ``.keras`` archive.

    Raises:
        SourceError: When the zip or the HDF5 in it contradicts itself.
        UnsafeSourceError: When the zip has overlapping or repeated members, a prefix, or is a zip bomb.
        UnsupportedError: When the weights are encrypted, or stored as ``.npz``.
        WriteError: When there is no room to unpack compressed weights.
    """
    # Imported late: formats are listed and recognised without h5py.
    from shardload.loaders.hdf5 import datasets as hdf5

    members = zip_members.read_members(path)
    info = _weights(path, members)
    with closing(path.open()) as file:
        starts = zip_members.data_starts(path, file, members)
        config, metadata = (_json(path, file, members, name, starts) for name in (CONFIG, METADATA))
        start, files = starts[WEIGHTS], {path: file.n_bytes}
        if info.compress_type == zipfile.ZIP_STORED:
            region = hdf5.FileRegion(path, start, info.file_size)
        else:
            region = hdf5.FileRegion.whole(_unpacked(path, file, info, start=start))
            files = {region.path: region.nbytes}
    content = hdf5.read_tensors(region)
    tensors = collect(content.tensors, files=files)
    return Manifest(path, "keras-archive", tensors, files, config, metadata, notes=content.notes)


def _unpacked(path: Location, file: File, info: zipfile.ZipInfo, *, start: int) -> Location:
    content = zip_members.blocks(path, file, info, start=start)
    return private_copies.write(content, n_bytes=info.file_size, shown=f"{path}:{info.filename}")


def assets(path: Location) -> Iterator[tuple[str, Callable[[BinaryIO], None]]]:
    """Yield the asset files that layers saved: names below ``assets/``, and a function that writes each content.

    Raises:
        UnsafeSourceError: When a file declares far more bytes than are stored.
        SourceError: When the zip contradicts itself.
    """
    members = zip_members.read_members(path)
    files = [info for key, info in members.items() if key.startswith(ASSETS) and not key.endswith("/")]
    for info in files:
        if info.file_size > ASSET_FLOOR_BYTES and info.file_size > ASSET_EXPANSION * info.compress_size:
            raise UnsafeSourceError(
                f"{path}: {info.filename} declares {exact_bytes(info.file_size)}, but stores only "
                f"{info.compress_size}; assets may expand at most {ASSET_EXPANSION} times. Save the model again with "
                "Keras"
            )
    with closing(path.open()) as file:
        starts = zip_members.data_starts(path, file, members)
        for info in files:
            content = zip_members.blocks(path, file, info, start=starts[info.filename])
            yield info.filename.removeprefix(ASSETS), functools.partial(_copy, content)


def _copy(content: Iterator[bytes], file: BinaryIO) -> None:
    for block in content:
        file.write(block)


def _weights(path: Location, members: Mapping[str, zipfile.ZipInfo]) -> zipfile.ZipInfo:
    if (info := members.get(WEIGHTS)) is None:
        if "model.weights.npz" in members:
            raise UnsupportedError(
                f"{path} stores its weights as .npz; save it again: keras.saving.save_model(model, path)"
            )
        if refused := refused_zip(path, members=members):
            raise refused
        listed = ", ".join(sorted(members)[:8])
        raise SourceError(
            f"{path} is a zip, but not a Keras archive: it should contain {WEIGHTS}, but contains {listed}"
        )
    zip_members.check_readable(path, info)
    if info.compress_type != zipfile.ZIP_STORED:
        _check_expansion(path, info)
    # The region must end where the member does, or libhdf5 would read its neighbour.
    elif info.compress_size != info.file_size:
        raise SourceError(
            f"{path}: {WEIGHTS} is stored, but has {exact_bytes(info.compress_size)} for {info.file_size}"
        )
    return info


def _check_expansion(path: Location, info: zipfile.ZipInfo) -> None:
    if info.file_size > WEIGHTS_FLOOR_BYTES and info.file_size > WEIGHTS_EXPANSION * info.compress_size:
        raise UnsafeSourceError(
            f"{path}: {WEIGHTS} declares {exact_bytes(info.file_size)}, but stores only {info.compress_size}; "
            f"compressed weights may expand at most {WEIGHTS_EXPANSION} times. If you trust it, unzip it and open "
            f"{WEIGHTS}"
        )


def _json(
    path: Location, file: File, members: Mapping[str, zipfile.ZipInfo], name: str, starts: Mapping[str, int]
) -> dict[str, Any]:
    if (info := members.get(name)) is None:
        raise SourceError(
            f"{path} should contain {name}, as every Keras archive does, but contains {', '.join(members)}"
        )
    # Up to 1 KiB stored counts as 1 KiB: small configurations that compress well are harmless.
    if info.file_size > MAX_JSON_BYTES or info.file_size > MAX_EXPANSION * max(info.compress_size, 1024):
        raise UnsafeSourceError(
            f"{path}: {name} declares {exact_bytes(info.file_size)}, but stores only {info.compress_size}; it may "
            f"expand at most {MAX_EXPANSION} times, to {MAX_JSON_BYTES} bytes. Save the model again with Keras"
        )
    content = b"".join(zip_members.blocks(path, file, info, start=starts[name]))
    return parse_object(content, path=f"{path}:{name}")


SPEC = FormatSpec(
    name="keras-archive",
    description="a .keras archive",
    endings=(".keras",),
    is_file=lambda content: content.head.startswith(zip_members.MAGIC),
    open_file=open_file,
    described_by="keras",
    tensor_names="keras",
    assets=assets,
)
