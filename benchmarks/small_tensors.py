"""Thousands of small tensors: what a load costs per tensor, where bytes hardly count.

safetensors    `shardload.load_arrays` against `safetensors.numpy.load_file` and one `jax.device_put` per tensor, on one
               device and on eight; beside it the limits: the same `device_put`s of values that are in memory already,
               and one read of the file with one `device_put` of all its bytes
h5             a `.weights.h5` file, against h5py and `jax.device_put` per dataset
orbax          a tree of arrays, against Orbax v1
gguf           small blocks of a Llama, mostly Q8_0, against gguf's own `dequantize` and `jax.device_put`
keras          a Keras model of batch normalisations, against its own `load_weights`

Everything is timed, from opening the file, in turn. Tensors have 16 to 4,096 elements, half of them bfloat16 in
safetensors.

    python -m benchmarks.small_tensors [--count 20000] [--rounds 5] [--only safetensors,h5,orbax,gguf,keras] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoint import BFLOAT16
from benchmarks.measure import Row, interleave, rows_table

SHAPES = (
    (16,),
    (48,),
    (64,),
    (128,),
    (256,),
    (1024,),
    (4096,),
    (32, 32),
    (64, 64),
    (8, 128),
    (16, 8, 8),
    (3, 3, 16, 16),
)
Sides = dict[str, Callable[[], Any]]


@dataclass(frozen=True, slots=True)
class Case:
    """One load and what it is compared with."""

    name: str
    ours: Callable[[], Any]
    peers: Sides
    at_most: float | None = None
    """Largest ratio to the first peer that is wanted."""


def values(count: int, *, mixed: bool = False) -> dict[str, Any]:
    """Arrays by name; ``mixed``: half of them in bfloat16."""
    random = np.random.default_rng(0)
    found = {}
    for i in range(count):
        value = random.standard_normal(SHAPES[i % len(SHAPES)], np.float32)
        half = mixed and i // len(SHAPES) % 2 == 0
        found[f"layers/{i // 10}/vars/{i % 10}"] = value.astype(BFLOAT16) if half else value
    return found


def shardings() -> dict[str, Callable[[tuple[int, ...]], Any]]:
    """Where arrays go, by their shape."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

    mesh = jax.make_mesh((8,), ("model",), devices=jax.devices()[:8])
    one, whole = SingleDeviceSharding(jax.devices()[0]), NamedSharding(mesh, PartitionSpec())
    split = NamedSharding(mesh, PartitionSpec("model"))
    return {
        "one device": lambda shape: one,
        "eight, replicated": lambda shape: whole,
        "eight, split": lambda shape: whole if shape[0] % 8 else split,
    }


def safetensors(folder: Path, count: int) -> Iterator[Case]:
    """One file, three placements."""
    import jax
    from safetensors.numpy import load_file, save_file

    import shardload

    path = folder / "small.safetensors"
    save_file(values(count, mixed=True), path)
    held = load_file(path)
    device = jax.devices()[0]

    def put(place: Any, load: Callable[[], dict[str, Any]]) -> Any:
        arrays = {name: jax.device_put(value, place(value.shape)) for name, value in load().items()}
        return jax.block_until_ready(arrays)

    for name, place in shardings().items():
        peers: Sides = {
            "load_file, device_put": partial(put, place, lambda: load_file(path)),
            "device_put only": partial(put, place, lambda: held),
        }
        if name == "one device":
            peers["one read, one put"] = lambda: jax.device_put(np.fromfile(path, np.uint8), device).block_until_ready()

        def ours(place: Any = place) -> Any:
            return jax.block_until_ready(shardload.load_arrays(path, lambda _, shape: place(shape)))

        yield Case(name, ours, peers, at_most=2.0)


def h5(folder: Path, count: int) -> Iterator[Case]:
    """Keras' weights file."""
    import h5py
    import jax

    path = folder / "small.weights.h5"
    with h5py.File(path, "w") as file:
        for name, value in values(count).items():
            file[name] = value
    device = jax.devices()[0]

    def peer() -> Any:
        arrays = {}

        def visit(name: str, found: Any) -> None:
            if isinstance(found, h5py.Dataset):
                arrays[name] = jax.device_put(found[()], device)

        with h5py.File(path) as file:
            file.visititems(visit)
        return jax.block_until_ready(arrays)

    yield Case(".weights.h5", partial(_arrays, path, device), {"h5py, device_put": peer})


def orbax(folder: Path, count: int) -> Iterator[Case]:
    """An Orbax tree."""
    import jax
    from orbax.checkpoint import v1 as ocp

    path, device = folder / "small", jax.devices()[0]
    arrays = {name.replace("/", "_"): jax.device_put(value, device) for name, value in values(count).items()}
    ocp.save(path, arrays)
    wanted = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding) for name, a in arrays.items()}
    peer = partial(lambda: jax.block_until_ready(ocp.load(path, wanted)))
    yield Case("Orbax", partial(_arrays, path, device), {"Orbax v1": peer})


def gguf(folder: Path, count: int) -> Iterator[Case]:
    """A Llama of narrow layers."""
    import gguf
    import jax

    path, device = folder / "small.gguf", jax.devices()[0]
    _write_gguf(path, blocks=count // 9)

    def peer() -> Any:
        tensors = gguf.GGUFReader(path).tensors
        arrays = {t.name: jax.device_put(gguf.quants.dequantize(t.data, t.tensor_type), device) for t in tensors}
        return jax.block_until_ready(arrays)

    yield Case("GGUF", partial(_arrays, path, device), {"gguf, device_put": peer})


def _write_gguf(path: Path, blocks: int) -> None:
    import gguf

    kind, width, random = gguf.GGMLQuantizationType.Q8_0, 64, np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    for key in ("context_length", "embedding_length", "feed_forward_length", "vocab_size"):
        getattr(writer, f"add_{key}")(width)
    writer.add_block_count(blocks)
    writer.add_head_count(4)
    writer.add_head_count_kv(4)
    writer.add_layer_norm_rms_eps(1e-5)
    for i in range(blocks):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"):
            value = gguf.quants.quantize(random.standard_normal((width, width), np.float32), kind)
            writer.add_tensor(f"blk.{i}.{name}.weight", value, raw_dtype=kind)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{i}.{name}.weight", random.standard_normal(width, np.float32))
    writer.add_tensor("token_embd.weight", random.standard_normal((width, width), np.float32))
    writer.add_tensor("output_norm.weight", random.standard_normal(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def keras(folder: Path, count: int) -> Iterator[Case]:
    """A model with four small variables per layer, loaded again and again."""
    import keras

    import shardload

    inputs = keras.Input((32,))
    model = keras.Model(inputs, [keras.layers.BatchNormalization()(inputs) for _ in range(count // 4)])
    path = folder / "model.weights.h5"
    model.save_weights(path)
    ours = partial(shardload.load_weights, model, path)
    yield Case("Keras model", ours, {"model.load_weights": partial(model.load_weights, path)})


def _arrays(path: Path, device: Any) -> Any:
    import jax

    import shardload

    return jax.block_until_ready(shardload.load_arrays(path, device))


KINDS = {"safetensors": safetensors, "h5": h5, "orbax": orbax, "gguf": gguf, "keras": keras}


def measure(case: Case, *, rounds: int) -> list[Row]:
    """A row per peer."""
    runs = interleave({"ours": case.ours} | case.peers, rounds=rounds, between=lambda: None)
    limits = dict.fromkeys(list(case.peers)[:1], case.at_most)
    return [Row(case.name, peer, runs["ours"], runs[peer], at_most=limits.get(peer)) for peer in case.peers]


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--count", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    rows = []
    for kind in options.only.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for case in KINDS[kind](Path(folder), options.count):
                rows += measure(case, rounds=options.rounds)
    print(json.dumps([row.summary() for row in rows]) if options.json else rows_table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
