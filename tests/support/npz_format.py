"""A format in one module, as a package of its own would add it: NumPy archives (``.npz``) of uncompressed arrays.

model.npz (a zip)   model.json       the model, as Keras describes it
                    dense/kernel.npy  header, then raw values ◄── Extent
"""

import json
import struct
import zipfile
import zlib

import keras
import numpy as np
from numpy.lib import format as npy

from shardload.errors import ShardloadError, SourceError, UnsupportedError
from shardload.loaders import FormatSpec
from shardload.manifest import Extent, Manifest, Tensor
from shardload.stores.json_files import MAX_JSON_BYTES, parse_object

CONFIG = "model.json"
MAGIC = b"PK\x03\x04"
LOCAL_HEADER = struct.Struct("<4s5H3I2H")


def save(model, path):
    """Write the model and its variables."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(CONFIG, json.dumps(keras.saving.serialize_keras_object(model)))
        for variable in model.variables:
            with archive.open(f"{variable.path}.npy", "w") as file:
                npy.write_array(file, np.asarray(variable.value))


def is_file(content):
    """Whether the first member of a zip is one of ours."""
    if not content.head.startswith(MAGIC) or len(content.head) < LOCAL_HEADER.size:
        return False
    name_length = LOCAL_HEADER.unpack(content.head[: LOCAL_HEADER.size])[9]
    return content.read(LOCAL_HEADER.size, min(name_length, 1024)).endswith((CONFIG.encode(), b".npy"))


def open_file(path):
    """The headers of the archive and of each array; any error of another library is one of the file."""
    try:
        return read_archive(path)
    except ShardloadError:
        raise
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, ValueError, EOFError, struct.error, zlib.error) as e:
        raise SourceError(f"Cannot read {path}: {e}, expected an archive of this format. Save it again") from e


def read_archive(path):
    """The manifest of an archive without damage."""
    with path.stream() as file, zipfile.ZipFile(file) as archive:
        members = {info.filename: info for info in archive.infolist()}
        if CONFIG not in members:
            raise SourceError(f"Cannot read {path}: it has no {CONFIG}, expected the model's. Save it with `save`")
        config = members.pop(CONFIG)
        if config.file_size > MAX_JSON_BYTES:
            raise SourceError(f"{path}: {CONFIG} has {config.file_size} bytes")
        tensors = [tensor(path, file, info) for info in members.values()]
        described = parse_object(archive.read(config), path=f"{path}:{CONFIG}")
        size = file.seek(0, 2)
    return Manifest(path, "npz", {each.name: each for each in tensors}, {path: size}, described)


def tensor(path, file, info):
    """One array: its raw values follow a header."""
    file.seek(info.header_offset)
    start = info.header_offset + LOCAL_HEADER.size + sum(LOCAL_HEADER.unpack(file.read(LOCAL_HEADER.size))[9:])
    file.seek(start)
    if (version := npy.read_magic(file)) != (1, 0):
        raise SourceError(f"{path}: {info.filename} has npy version {version}, expected (1, 0)")
    shape, is_fortran, dtype = npy.read_array_header_1_0(file)
    if info.compress_type or is_fortran or dtype.hasobject:
        raise UnsupportedError(f"{path}: {info.filename} is not stored as raw values in C order")
    found = Tensor(info.filename.removesuffix(".npy"), shape, dtype, Extent(path, file.tell()))
    if file.tell() + found.nbytes != start + info.file_size:
        raise SourceError(f"{path}: {info.filename} is truncated")
    return found


SPEC = FormatSpec(
    name="npz",
    description="a NumPy archive of uncompressed arrays",
    endings=(".npz",),
    is_file=is_file,
    open_file=open_file,
    described_by="keras",
)
