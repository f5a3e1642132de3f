"""An Orbax checkpoint whose arrays are plain files: Orbax writes it with tiny arrays, then they get their real shapes.

    pytree/trainable_variables.dense.kernel/zarr.json     shape, chunk shape, codec: bytes
                                            c/0/0  c/1/0  rows [0, n), rows [n, 2n): raw, the last one padded

Everything else (the tree's description, Orbax's marker files, the model's configuration) is as Orbax wrote it, so Orbax
reads the result as its own. Chunks are cut along dim 0, so each is one run of the array.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shardload.loaders.file_pieces import FilePiece, TensorPlace, Wanted
from shardload.loaders.orbax import saving as orbax_writer

CHUNK_BYTES = 64 << 20
"""Small enough that restoring a slice reads little more than the slice; large enough to keep files few."""
ITEM = "pytree"


def write_skeleton(
    folder: Path, tensors: Sequence[Wanted], *, groups: Sequence[str], model_config: str, assets: Mapping[str, Any]
) -> tuple[TensorPlace, ...]:
    """Make the checkpoint; return where the values belong.

    Args:
        folder: Folder to make; must not exist yet.
        tensors: Named by their key path, joined by "/".
        groups: Top-level keys of the tree, written even if empty.
        model_config: The model's description, as Keras' callback stores it.
        assets: The files that layers saved, as Keras' callback stores them: nested arrays of uint8.
    """
    # Orbax writes one element per array, so that its files exist without the memory or the disk for real values.
    tree: dict[str, Any] = {group: {} for group in groups}
    # Nor does it write arrays without elements: a step's structure.json alone has them.
    for tensor in (tensor for tensor in tensors if tensor.size):
        *above, last = tensor.name.split("/")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        # Of the right rank, which other entries of zarr.json depend on: `_resize` replaces only sizes and codecs.
        place[last] = np.zeros((1,) * len(tensor.shape), tensor.dtype)
    items = {ITEM: tree, "model_config": {"config": model_config}}
    orbax_writer.write_plain_arrays(folder, items | ({"assets": assets} if assets else {}))
    return tuple(_resize(folder, t) if t.size else TensorPlace(t.name, ()) for t in tensors)


def _resize(folder: Path, tensor: Wanted) -> TensorPlace:
    # Orbax joins the keys of a path with dots, and zarr names the folder so.
    name = f"{ITEM}/{tensor.name.replace('/', '.')}"
    description = folder / name / "zarr.json"
    found = json.loads(description.read_text(encoding="utf-8"))
    chunk = _chunk_shape(tensor)
    found["shape"] = list(tensor.shape)
    found["chunk_grid"]["configuration"]["chunk_shape"] = list(chunk)
    # Without compression, so that values can be copied to their place.
    found["codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}]
    description.write_text(json.dumps(found), encoding="utf-8")
    return TensorPlace(tensor.name, tuple(_pieces(folder, name, tensor, chunk)))


def _chunk_shape(tensor: Wanted) -> tuple[int, ...]:
    if not tensor.shape:
        return ()
    # Cut evenly: zarr stores the last chunk in full, so a short one would waste its padding. Zarr allows no size of 0.
    rows = tensor.shape[0]
    row_bytes = max(1, tensor.nbytes // max(1, rows))
    count = -(-rows * row_bytes // CHUNK_BYTES)
    return (max(1, -(-rows // max(1, count))), *(max(1, n) for n in tensor.shape[1:]))


def _pieces(folder: Path, name: str, tensor: Wanted, chunk: tuple[int, ...]) -> list[FilePiece]:
    count = math.prod(chunk)
    pieces = []
    for i, start in enumerate(range(0, tensor.size, count)):
        # Zarr 3's default key of chunk i along dim 0: c/i/0/0; of a scalar, c.
        cell = "/".join(["c", *([str(i)] + ["0"] * (len(chunk) - 1) if chunk else [])])
        path = folder / name / cell
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            file.truncate(count * tensor.dtype.itemsize)  # Zarr pads the last chunk to full size
        pieces.append(FilePiece(f"{name}/{cell}", 0, start, min(count, tensor.size - start)))
    return pieces
