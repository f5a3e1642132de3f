"""One Keras ``.weights.h5`` file: tensors named by their dataset paths, such as ``layers/dense/vars/0``."""

from __future__ import annotations

import os
from pathlib import Path

from shardload.loaders import hdf5
from shardload.loaders._extents import collect
from shardload.manifest import Manifest


def open_file(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of one ``.weights.h5`` file.

    Raises:
        SourceError: See `shardload.loaders.hdf5.read_tensors`.
        UnsupportedError: When the file is a legacy Keras HDF5 file, or a dataset cannot be read as numbers.
    """
    region = hdf5.FileRegion.whole(str(Path(path).absolute()))
    files = {region.path: region.nbytes}
    return Manifest(region.path, "keras-h5", collect(hdf5.read_tensors(region), files=files), files)
