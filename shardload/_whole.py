"""One stored tensor, whole, in host memory: for code that computes with it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.manifest import Chunked, Decoded, Extent, Manifest, Tensor
from shardload.stores.local import opened, read_exact


def read_tensor(manifest: Manifest, name: str) -> NDArray[Any]:
    """All of a tensor, in an array of its own.

    Raises:
        TransferError: When the file no longer holds what its headers promised.
    """
    tensor = manifest.tensors[name]
    match tensor.storage:
        case Decoded(reader):
            return reader.read_rows(0, tensor.rows)
        case Extent(path, offset):
            value = np.empty(tensor.shape, tensor.dtype)
            with opened(path) as (fd, _):
                read_exact(fd, value.reshape(-1).view(np.uint8).data, offset, path)
            return value
        case Chunked() as grid:
            return _join(tensor, grid)


def _join(tensor: Tensor, grid: Chunked) -> NDArray[Any]:
    value, chunk = np.empty(tensor.shape, tensor.dtype), np.empty(grid.chunk_shape, tensor.dtype)
    for index, extent in grid.extents.items():
        with opened(extent.path) as (fd, _):
            read_exact(fd, chunk.reshape(-1).view(np.uint8).data, extent.offset, extent.path)
        inside = value[tuple(slice(i * n, (i + 1) * n) for i, n in zip(index, grid.chunk_shape, strict=True))]
        inside[...] = chunk[tuple(map(slice, inside.shape))]
    return value
