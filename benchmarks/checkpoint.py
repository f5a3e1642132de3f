"""A synthetic decoder checkpoint as one safetensors file, and the layouts it is loaded in."""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from benchmarks.measure import Comparison, table, warm_files
from shardload.stores.local import located

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
HIDDEN, FFN, VOCABULARY = 2304, 9216, 64 * 1024
LAYER = {
    "self_attn.q_proj": (2048, HIDDEN),
    "self_attn.k_proj": (1024, HIDDEN),
    "self_attn.v_proj": (1024, HIDDEN),
    "self_attn.o_proj": (HIDDEN, 2048),
    "mlp.gate_proj": (FFN, HIDDEN),
    "mlp.up_proj": (FFN, HIDDEN),
    "mlp.down_proj": (HIDDEN, FFN),
    "input_layernorm": (HIDDEN,),
}
LAYOUTS = ("dim0", "dim1", "mix", "transposed")
"""Stored dim 0 split; stored dim 1 split; Megatron's mix of both; the mix into transposed ([in, out]) variables."""


def shapes(n_bytes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of about ``n_bytes`` of bfloat16: an embedding and as many layers as fit."""
    layer_bytes = 2 * sum(math.prod(s) for s in LAYER.values())
    layers = max(1, (n_bytes - 2 * VOCABULARY * HIDDEN) // layer_bytes)
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in LAYER.items()}
    return found


def write_safetensors(folder: Path, n_bytes: int) -> Path:
    """Write the file, one tensor in memory at a time."""
    header: dict[str, Any] = {}
    offset = 0
    wanted = shapes(n_bytes)
    for name, shape in wanted.items():
        stop = offset + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path = folder / "model.safetensors"
    random = np.random.default_rng(0)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in wanted.values():
            file.write((random.random(math.prod(shape), np.float32) - 0.5).astype(BFLOAT16).view(np.uint16))
    return path


def open_safetensors(path: Path) -> Any:
    """Its manifest."""
    from shardload.manifest import Extent, Manifest, Tensor

    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    tensors = {
        name: Tensor(name, tuple(h["shape"]), BFLOAT16, Extent(located(path), 8 + length + h["data_offsets"][0]))
        for name, h in header.items()
    }
    return Manifest(located(path), "safetensors", tensors, {located(path): path.stat().st_size})


def split_dim(name: str, layout: str) -> int:
    """Which stored dim of a matrix is split."""
    if layout in ("dim0", "dim1"):
        return int(layout[-1])
    return 1 if "o_proj" in name or "down_proj" in name else 0


def targets_for(manifest: Any, layout: str) -> list[Any]:
    """One variable per tensor on a 1x8 mesh."""
    from shardload.manifest import View
    from shardload.sharding.layout import Layout
    from shardload.sharding.mesh import MeshSpec
    from shardload.transfer.planning import Binding

    mesh, found = MeshSpec.parse("1x8"), []
    for name, tensor in manifest.tensors.items():
        view, dim = View.whole(tensor), split_dim(name, layout)
        if len(tensor.shape) == 2 and layout == "transposed" and "embed" not in name:
            view, dim = View(name, 0, tensor.shape[::-1], view.strides[::-1]), 1 - dim
        spread = Layout.replicated(mesh, 1) if len(tensor.shape) == 1 else Layout.split(mesh, 2, dim=dim, axis="model")
        found.append(Binding(name, view, BFLOAT16, spread))
    return found


def command(
    argv: list[str] | None, about: str, *, peer: str, pairs: int, layouts: str, measure: Callable[..., list[Comparison]]
) -> int:
    """The command line of a benchmark over one file: write it, warm up, measure, print.

    Args:
        argv: Arguments; the process's own by default.
        about: Its first line describes the command.
        peer: What the other side is called.
        pairs: How many pairs by default.
        layouts: Which of `LAYOUTS` by default.
        measure: Called with the file, the layouts, ``pairs=`` and ``threads=``.
    """
    parser = argparse.ArgumentParser(description=about.split("\n", 1)[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=pairs)
    parser.add_argument("--layouts", default=layouts, help=f"of {', '.join(LAYOUTS)}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from shardload.transfer.workers import default_threads

    with tempfile.TemporaryDirectory() as folder:
        path = write_safetensors(Path(folder), int(options.gb * 1e9))
        warm_files([path])
        found = measure(path, options.layouts.split(","), pairs=options.pairs, threads=default_threads())
    if options.json:
        print(json.dumps([c.summary() | c.runs() for c in found]))
        return 0
    print(f'{default_threads()} threads; "times faster" than {peer}: 1.00 is as fast')
    print(table(found, a="shardload", b=peer))
    return 0
