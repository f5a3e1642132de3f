"""One Keras ``.weights.h5`` file: tensors named by their dataset paths, such as ``layers/dense/vars/0``.

A name like ``model_00001.weights.h5`` says that the file is a part of the checkpoint ``model.weights.json``, or it is
the user's name for a step. Keras writes the model's own group ``vars`` to whole files, and of the parts to the first.
"""

from __future__ import annotations

import re

from shardload.errors import SourceNotFoundError
from shardload.loaders import keras_sharded
from shardload.loaders.contents import FileContent
from shardload.loaders.extents import collect
from shardload.loaders.parts import refuse_part
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest
from shardload.stores.location import Location

_PART = re.compile(r"(?P<stem>.+)_\d{5}\.weights\.h5")
MAGIC = b"\x89HDF\r\n\x1a\n"


def open_file(path: Location) -> Manifest:
    """Return the manifest of one ``.weights.h5`` file.

    Raises:
        SourceError: See `shardload.loaders.hdf5.read_tensors`; also when it is a part by its name and its content.
        SourceNotFoundError: When it is a part, and the index is missing.
        UnsupportedError: When the file is a legacy Keras HDF5 file, or a dataset needs a missing filter.
    """
    # Imported late: formats are listed and recognised without h5py.
    from shardload.loaders import hdf5

    part = _PART.fullmatch(path.name)
    if part is not None and keras_sharded.lists(index := path.parent / f"{part['stem']}.weights.json", path.name):
        return keras_sharded.open_index(index)
    region = hdf5.FileRegion.whole(path)
    files = {path: region.nbytes}
    content = hdf5.read_tensors(region)
    if part is not None and not content.is_whole:
        raise SourceNotFoundError(
            f"{path} is one of several parts, but {path.parent} lacks their index {index.name}. Copy the index and all "
            "parts there; to open this part alone, rename it"
        )
    if not content.is_whole:
        refuse_part(path)
    return Manifest(path, "keras-h5", collect(content.tensors, files=files), files, notes=content.notes)


def is_hdf5(content: FileContent) -> bool:
    """Whether a file has HDF5's signature at its start, or after a user block of 512, 1024, 2048 … bytes."""
    offset = 0
    while offset + len(MAGIC) <= content.size:
        if content.read(offset, len(MAGIC)) == MAGIC:
            return True
        offset = 2 * offset or 512
    return False


SPEC = FormatSpec(
    name="keras-h5",
    description="a Keras .weights.h5 file",
    endings=(".weights.h5", ".h5", ".hdf5"),
    is_file=is_hdf5,
    open_file=open_file,
    described_by="keras-sidecar",
    tensor_names="keras",
)
