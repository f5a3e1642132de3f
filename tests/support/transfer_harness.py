"""Small checkpoints on disk, loaded through plan and transfer alone."""

import jax
import numpy as np

from shardload.manifest import Chunked, Decoded, Extent, Manifest, Tensor
from shardload.stores.local import located
from shardload.transfer.execution import execute


class Rows:
    """Decodes rows of an array and keeps a record."""

    def __init__(self, value, *, path, alignment=1):
        self.value, self.paths, self.row_alignment, self.stored_bytes = value, (path,), alignment, value.nbytes // 2
        self.calls = []

    def read_rows(self, start, stop):
        self.calls.append((start, stop))
        return self.value[start:stop] if self.value.ndim else self.value


class Chunks:
    """An array stored as a grid of chunks, the last first; what sticks out over its edge is rubbish."""

    def __init__(self, value, shape):
        self.value, self.shape = value, shape

    def write(self, file, path):
        grid = [-(-n // c) for n, c in zip(self.value.shape, self.shape, strict=True)]
        extents = {}
        for index in reversed(list(np.ndindex(*grid))):
            chunk = np.full(self.shape, 77, self.value.dtype)
            part = self.value[tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, self.shape, strict=True))]
            chunk[tuple(slice(0, n) for n in part.shape)] = part
            file.write(b"gap")
            extents[index] = Extent(located(path), file.tell())
            file.write(chunk.tobytes())
        return Chunked(self.shape, extents)


def manifest_of(path, tensors):
    """Write arrays back to back and describe them; `Rows` become decoded tensors."""
    described = {}
    with path.open("wb") as file:
        for name, value in tensors.items():
            if isinstance(value, Rows):
                described[name] = Tensor(name, value.value.shape, value.value.dtype, Decoded(value))
                continue
            if isinstance(value, Chunks):
                described[name] = Tensor(name, value.value.shape, value.value.dtype, value.write(file, path))
                continue
            described[name] = Tensor(name, value.shape, value.dtype, Extent(located(path), file.tell()))
            file.write(value.tobytes())
        size = file.tell()
    return Manifest(located(path), "safetensors", described, {located(path): size})


def load(plan, manifest, **options):
    found = {}
    mesh_size = plan.bindings[0].layout.mesh.size
    stats = execute(plan, manifest, devices=jax.devices()[:mesh_size], on_ready=found.__setitem__, **options)
    return found, stats


def check(array, expected, layout):
    assert array.shape == expected.shape and array.dtype == expected.dtype
    by_device = {s.device: s for s in array.addressable_shards}
    for device, bounds in zip(jax.devices(), layout.bounds(expected.shape), strict=False):
        np.testing.assert_array_equal(np.asarray(by_device[device].data), expected[bounds.slices])
