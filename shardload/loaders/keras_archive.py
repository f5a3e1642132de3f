"""``.keras`` archives: a zip whose member ``model.weights.h5`` is stored, not deflated, so it is read in place.

    ┌ local header ┬ metadata.json ┬ local header ┬ config.json ┬ local header ┬ model.weights.h5 ┬ central directory ┐
                                                                              └ an HDF5 file inside the file

The central directory lists where members start; each local header must agree with it, members may not overlap,
repeat or be encrypted, and nothing may precede the first one: such archives are built to be read in two ways.
"""

from __future__ import annotations

import functools
import shutil
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, BinaryIO

from shardload.errors import ShardloadError, SourceError, TruncatedSourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders.extents import collect
from shardload.loaders.other_formats import refused_zip
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest
from shardload.stores.headers import read_header
from shardload.stores.json_files import MAX_JSON_BYTES, parse_object
from shardload.stores.location import Location
from shardload.stores.store import File

MAGIC = b"PK\x03\x04"
WEIGHTS = "model.weights.h5"
CONFIG = "config.json"
METADATA = "metadata.json"
_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_ENCRYPTED = 0x1
MAX_EXPANSION = 1000
"""Inflated bytes per stored byte, as in Keras."""
ASSETS = "assets/"
ASSET_EXPANSION = 100
"""The same limit for files that layers saved, above `ASSET_FLOOR_BYTES`; both as in Keras."""
ASSET_FLOOR_BYTES = 1 << 28


def open_file(path: Location) -> Manifest:
    """Return the manifest of one ``.keras`` archive.

    Raises:
        SourceError: When the zip or the HDF5 in it contradicts itself.
        UnsafeSourceError: When the zip has overlapping or repeated members, a prefix, or is a zip bomb.
        UnsupportedError: When the weights are deflated or encrypted, or stored as ``.npz``.
    """
    # Imported late: formats are listed and recognised without h5py.
    from shardload.loaders import hdf5

    members = _members(path)
    info = _weights(path, members)
    with closing(path.open()) as file:
        start = _check_all(path, file, members)[info.filename]
        files = {path: file.n_bytes}
    region = hdf5.FileRegion(path, start, info.file_size)
    tensors = collect(hdf5.read_tensors(region), files=files)
    return Manifest(path, "keras-archive", tensors, files, _json(path, members, CONFIG), _json(path, members, METADATA))


def assets(path: Location) -> Iterator[tuple[str, Callable[[BinaryIO], None]]]:
    """Yield the asset files that layers saved: names below ``assets/``, and a function that writes each content.

    Raises:
        UnsafeSourceError: When a file declares far more bytes than are stored.
        SourceError: When the zip contradicts itself.
    """
    members = _members(path)
    with closing(path.open()) as file:
        _check_all(path, file, members)
    files = [info for key, info in members.items() if key.startswith(ASSETS) and not key.endswith("/")]
    for info in files:
        if info.file_size > ASSET_FLOOR_BYTES and info.file_size > ASSET_EXPANSION * info.compress_size:
            raise UnsafeSourceError(
                f"{path}: {info.filename} declares {info.file_size} bytes, but stores only {info.compress_size}; "
                f"assets may expand at most {ASSET_EXPANSION} times. Save the model again with Keras"
            )
    with _translated(path), path.stream() as raw, zipfile.ZipFile(raw) as archive:
        for info in files:
            yield info.filename.removeprefix(ASSETS), functools.partial(_copy, path, archive, info)


def _copy(path: Location, archive: zipfile.ZipFile, info: zipfile.ZipInfo, file: BinaryIO) -> None:
    with _translated(path), archive.open(info) as member:
        shutil.copyfileobj(member, file)


def _members(path: Location) -> dict[str, zipfile.ZipInfo]:
    with _translated(path), path.stream() as raw, zipfile.ZipFile(raw) as archive:
        infos = archive.infolist()
    members = {info.filename: info for info in infos}
    # zipfile returns the last of several members with one name; other readers may return the first.
    if len(members) < len(infos):
        raise UnsafeSourceError(
            f"{path} contains {len(infos)} members under {len(members)} names; save it again with Keras"
        )
    # zipfile tolerates data before the archive, such as a self-extracting program, and adjusts all offsets.
    if not members or min(info.header_offset for info in infos) != 0:
        raise UnsafeSourceError(f"{path} has other data before its first member; save it again with Keras")
    size = path.size
    for info in infos:
        if info.header_offset + info.compress_size > size:
            raise TruncatedSourceError(f"{path} is truncated: member {info.filename!r} ends past its {size} bytes")
    return members


def _weights(path: Location, members: dict[str, zipfile.ZipInfo]) -> zipfile.ZipInfo:
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
    if info.flag_bits & _ENCRYPTED:
        raise UnsupportedError(f"{path}: member {WEIGHTS} is encrypted; save the model again without a password")
    if info.compress_type != zipfile.ZIP_STORED:
        raise UnsupportedError(
            f"{path}: member {WEIGHTS} is compressed, so it cannot be read in place. Keras stores it uncompressed: "
            f"unzip the archive and open its {WEIGHTS}, or load and save it with Keras"
        )
    # The region must end where the member does, or libhdf5 would read its neighbour.
    if info.compress_size != info.file_size:
        raise SourceError(f"{path}: {WEIGHTS} is stored, but has {info.compress_size} bytes for {info.file_size}")
    return info


def _check_all(path: Location, file: File, members: dict[str, zipfile.ZipInfo]) -> dict[str, int]:
    """Return where each member's data starts, after checking that local headers agree and members do not overlap."""
    starts: dict[str, int] = {}
    end, before = 0, ""
    # Members that overlap let a small archive unpack to petabytes.
    for info in sorted(members.values(), key=lambda info: info.header_offset):
        if info.header_offset < end:
            raise UnsafeSourceError(
                f"{path}: members {before!r} and {info.filename!r} overlap, so it could expand to any size"
            )
        starts[info.filename] = _data_start(path, file, info)
        end, before = starts[info.filename] + info.compress_size, info.filename
    if end > file.n_bytes:
        raise TruncatedSourceError(
            f"{path} is truncated: member {before!r} ends at byte {end}, the file at {file.n_bytes}"
        )
    return starts


def _data_start(path: Location, file: File, info: zipfile.ZipInfo) -> int:
    what = f"the local header of {info.filename!r}"
    raw = read_header(file, _LOCAL_HEADER.size, offset=info.header_offset, path=str(path), what=what)
    magic, _, flags, method, *_, name_length, extra_length = _LOCAL_HEADER.unpack(raw)
    at = info.header_offset + _LOCAL_HEADER.size
    name = read_header(file, name_length, offset=at, path=str(path), what=what)
    # `filename` is cut at a NUL byte; `orig_filename` is what the directory says. Bit 11 of the flags means UTF-8.
    expected = info.orig_filename.encode("utf-8" if info.flag_bits & 0x800 else "cp437", "replace")
    # Sizes are not compared: a local header may leave them to a zip64 field or to a descriptor after the data.
    if magic != MAGIC or name != expected or method != info.compress_type or (flags ^ info.flag_bits) & _ENCRYPTED:
        raise UnsafeSourceError(
            f"{path}: {what} says {name[:100]!r} (method {method}), the central directory {info.filename!r} "
            f"(method {info.compress_type}); they must agree. Save it again with Keras"
        )
    return at + int(name_length) + int(extra_length)


def _json(path: Location, members: dict[str, zipfile.ZipInfo], name: str) -> dict[str, Any]:
    if (info := members.get(name)) is None:
        raise SourceError(
            f"{path} should contain {name}, as every Keras archive does, but contains {', '.join(members)}"
        )
    # Up to 1 KiB stored counts as 1 KiB: small configurations that compress well are harmless.
    if info.file_size > MAX_JSON_BYTES or info.file_size > MAX_EXPANSION * max(info.compress_size, 1024):
        raise UnsafeSourceError(
            f"{path}: {name} declares {info.file_size} bytes, but stores only {info.compress_size}; it may expand at "
            f"most {MAX_EXPANSION} times, to {MAX_JSON_BYTES} bytes. Save the model again with Keras"
        )
    with _translated(path), path.stream() as raw, zipfile.ZipFile(raw) as archive, archive.open(info) as member:
        return parse_object(member.read(info.file_size), path=f"{path}:{name}")


@contextmanager
def _translated(path: Location) -> Iterator[None]:
    """Translate zipfile's errors, seven types that all mean a damaged archive."""
    try:
        yield
    except ShardloadError:
        # Some of these are a ValueError or an OSError as well, and say more.
        raise
    except RuntimeError as error:
        # Encryption and unknown compression; a NotImplementedError is a RuntimeError.
        raise UnsupportedError(f"{path}: {error}; save it again with Keras") from error
    except (zipfile.BadZipFile, ValueError, OSError, EOFError, struct.error, zlib.error, KeyError) as error:
        raise SourceError(f"{path} is a damaged zip archive: {error}. Download or save it again") from error


SPEC = FormatSpec(
    name="keras-archive",
    description="a .keras archive",
    endings=(".keras",),
    is_file=lambda content: content.head.startswith(MAGIC),
    open_file=open_file,
    described_by="keras",
    tensor_names="keras",
    assets=assets,
)
