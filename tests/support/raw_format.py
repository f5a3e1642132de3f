"""A format that can also be written, in one module: a header of JSON, then raw values in the order of the header.

{"model": …, "tensors": [["layers/dense/vars/0", [4, 2], "float32"], …]} ↵ values values values
"""

import json
import math

import numpy as np

from shardload.errors import SourceError
from shardload.loaders import FormatSpec
from shardload.loaders.extents import checked_tensors
from shardload.loaders.file_pieces import FilePiece, TensorPlace
from shardload.manifest import Extent, Manifest, Tensor
from shardload.stores.json_files import MAX_JSON_BYTES, parse_object

MAGIC = b'{"model": '


def open_file(path):
    """Return the manifest of a file, after its header was compared with its size."""
    with path.stream() as file:
        header, size = file.readline(MAX_JSON_BYTES), file.seek(0, 2)
    found = parse_object(header, path=str(path))
    at, tensors = len(header), []
    try:
        for name, shape, dtype in found["tensors"]:
            tensors.append(Tensor(str(name), tuple(map(int, shape)), np.dtype(dtype), Extent(path, at)))
            at += tensors[-1].nbytes
    except (KeyError, TypeError, ValueError) as error:
        raise SourceError(f"Cannot read {path}: damaged header: {error}") from error
    if at != size:
        raise SourceError(f"Cannot read {path}: it has {size} bytes, but its header lists {at}")
    return Manifest(path, "raw", checked_tensors(tensors, files={path: size}), {path: size}, found["model"])


def write_file(path, tensors, described):
    """Write the header, and leave room for the values."""
    listed = [[t.name, list(t.shape), t.dtype.name] for t in tensors]
    header = json.dumps({"model": described, "tensors": listed}).encode() + b"\n"
    places, at = [], len(header)
    for tensor in tensors:
        places.append(TensorPlace(tensor.name, (FilePiece("", at, 0, math.prod(tensor.shape)),)))
        at += tensor.nbytes
    with path.open("wb") as file:
        file.write(header)
        file.truncate(at)
    return tuple(places)


SPEC = FormatSpec(
    name="raw",
    description="a .raw file",
    endings=(".raw",),
    is_file=lambda content: content.head.startswith(MAGIC),
    open_file=open_file,
    write_file=write_file,
    described_by="keras",
    tensor_names="keras",
)
