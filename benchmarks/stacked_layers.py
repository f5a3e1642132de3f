"""A Llama, tensor by tensor in a file, into stacked arrays as in MaxText: `load_arrays` by rules, and by hand.

    shardload   `StoredAs` rules: tensors go straight into the shards of the stacked arrays
    stack       `safe_open`: every layer's tensor, transposed; `np.stack`; `jax.device_put` with the sharding
    floor       as many threads read the same bytes of the file into fresh memory, and do nothing else

Everything is timed, from opening the file: same file, same shardings, same eight devices, in turn. Memory is the peak
of a process of its own for each side, less what it had before and the arrays themselves.

    python -m benchmarks.stacked_layers [--gb 1] [--pairs 7] [--json]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.measure import compare, memory_status, table, warm_files
from benchmarks.transfer_floor import floor

WIDTH, HIDDEN, HEADS, KV_HEADS, HEAD, VOCABULARY = 2048, 5632, 16, 4, 128, 32_000
LAYER = "model.layers.{layer}"
SHAPES = {
    "self_attn.q_proj": (HEADS * HEAD, WIDTH),
    "self_attn.k_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.v_proj": (KV_HEADS * HEAD, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * HEAD),
    "mlp.gate_proj": (HIDDEN, WIDTH),
    "mlp.up_proj": (HIDDEN, WIDTH),
    "mlp.down_proj": (WIDTH, HIDDEN),
    "input_layernorm": (WIDTH,),
    "post_attention_layernorm": (WIDTH,),
}
HEADS_OUT, OUT = "(heads head) in -> in layer heads head", "out in -> in layer out"
ARRAYS: Mapping[str, tuple[str, str, tuple[str | None, ...]]] = {
    "attention.query": ("self_attn.q_proj", HEADS_OUT, (None, None, "model", None)),
    "attention.key": ("self_attn.k_proj", HEADS_OUT, ("model", None, None, None)),
    "attention.value": ("self_attn.v_proj", HEADS_OUT, ("model", None, None, None)),
    "attention.out": ("self_attn.o_proj", "out (heads head) -> heads layer head out", ("model", None, None, None)),
    "mlp.wi_0": ("mlp.gate_proj", OUT, (None, None, "model")),
    "mlp.wi_1": ("mlp.up_proj", OUT, (None, None, "model")),
    "mlp.wo": ("mlp.down_proj", OUT, ("model", None, None)),
    "pre_norm": ("input_layernorm", "width -> width layer", ()),
    "post_norm": ("post_attention_layernorm", "width -> width layer", ()),
}
"""Name of an array → tensors of the layers, dims, and the axis that splits each dim; the layer axis is dim 1."""
BY_HAND: Mapping[str, Callable[[Any], Any]] = {
    HEADS_OUT: lambda value: value.reshape(-1, HEAD, WIDTH).transpose(2, 0, 1),
    OUT: lambda value: value.T,
    "out (heads head) -> heads layer head out": lambda value: value.reshape(WIDTH, -1, HEAD).transpose(1, 2, 0),
    "width -> width layer": lambda value: value,
}
"""The same dims for one layer, in NumPy."""


def write_llama(path: Path, n_bytes: int) -> int:
    """Write a file of about this many bytes in bfloat16; return how many layers it has."""
    import ml_dtypes
    import numpy as np
    from safetensors.numpy import save_file

    each = sum(2 * int(np.prod(shape)) for shape in SHAPES.values())
    layers = max(1, round((n_bytes - 4 * VOCABULARY * WIDTH) / each))
    shapes = {"model.embed_tokens.weight": (VOCABULARY, WIDTH), "lm_head.weight": (VOCABULARY, WIDTH)}
    for i in range(layers):
        shapes |= {f"model.layers.{i}.{name}.weight": shape for name, shape in SHAPES.items()}
    rng = np.random.default_rng(0)
    block = rng.integers(0, 1 << 14, max(int(np.prod(s)) for s in shapes.values()), np.uint16)
    bits = {name: block[: int(np.prod(s))].reshape(s).view(ml_dtypes.bfloat16) for name, s in shapes.items()}
    save_file(bits, path)
    return layers


def targets() -> tuple[dict[str, Any], dict[str, Any]]:
    """The sharding of every array, and its rule."""
    import jax
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P

    import shardload

    mesh = jax.make_mesh((8,), ("model",))
    specs = {name: P(*spec) for name, (_, _, spec) in ARRAYS.items()}
    specs |= {"model.embed_tokens.weight": P("model", None), "lm_head.weight": P("model", None)}
    rules = {name: shardload.StoredAs(f"{LAYER}.{tensor}.weight", dims) for name, (tensor, dims, _) in ARRAYS.items()}
    heads = [name for name, (_, dims, _) in ARRAYS.items() if "heads" in dims]
    sized = {name: shardload.StoredAs(rules[name].tensors, rules[name].dims, sizes={"head": HEAD}) for name in heads}
    return {name: NamedSharding(mesh, spec) for name, spec in specs.items()}, rules | sized


def ours(path: Path, layers: int) -> dict[str, Any]:
    """The file through shardload."""
    import jax

    import shardload

    del layers
    where, rules = targets()
    # One level, although the names have dots: the names are the paths.
    found: dict[str, Any] = jax.block_until_ready(shardload.load_arrays(path, where, names=rules))
    return found


def stack(path: Path, layers: int) -> dict[str, Any]:
    """One array after the other, as one writes it by hand; the tensors of one array are in memory at a time."""
    import jax
    import numpy as np
    from safetensors import safe_open

    where, _ = targets()
    arrays = {}
    with safe_open(path, framework="np") as file:
        for name, sharding in where.items():
            if name not in ARRAYS:
                arrays[name] = jax.device_put(file.get_tensor(name), sharding)
                continue
            tensor, dims, _ = ARRAYS[name]
            parts = [BY_HAND[dims](file.get_tensor(f"model.layers.{i}.{tensor}.weight")) for i in range(layers)]
            arrays[name] = jax.device_put(np.stack(parts, axis=1), sharding)
            del parts
    found: dict[str, Any] = jax.block_until_ready(arrays)
    return found


SIDES = {"ours": ours, "stack": stack}


def check_equal(path: Path, layers: int) -> None:
    """Both give the same bits in the same places, or the comparison means nothing."""
    import numpy as np

    mine, theirs = ours(path, layers), stack(path, layers)
    for name, array in theirs.items():
        same = np.array_equal(np.asarray(array).view(np.uint16), np.asarray(mine[name]).view(np.uint16))
        if not same or not array.sharding.is_equivalent_to(mine[name].sharding, array.ndim):
            raise AssertionError(f"{name} differs between shardload and np.stack")


def extra_bytes(side: str, path: Path, layers: int) -> int:
    """Peak memory of one side, less what the process had before and the arrays: in a new process."""
    code = (
        "import sys; from pathlib import Path; from benchmarks.stacked_layers import child; "
        "child(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, side, str(path), str(layers)], capture_output=True, text=True, check=True
    )
    return int(done.stdout.splitlines()[-1])


def child(side: str, path: Path, layers: int) -> None:
    """Load once, and print how much memory that took besides the arrays."""
    _eight_devices()
    import jax
    import ml_dtypes  # noqa: F401
    from safetensors import safe_open  # noqa: F401

    import shardload

    _ = shardload.load_arrays, jax.devices(), targets()
    before = memory_status()["rss_bytes"]
    arrays = SIDES[side](path, layers)
    print(memory_status()["peak_rss_bytes"] - before - sum(array.nbytes for array in arrays.values()))


def _eight_devices() -> None:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax

    jax.config.update("jax_num_cpu_devices", 8)


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    _eight_devices()
    from shardload.transfer.workers import default_threads

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "llama.safetensors"
        layers = write_llama(path, int(options.gb * 1e9))
        warm_files([path])
        check_equal(path, layers)
        n_bytes, run = path.stat().st_size, partial(ours, path, layers)
        sizes = [n_bytes // (2 + 7 * layers)] * (2 + 7 * layers)
        sides = {
            "np.stack": partial(stack, path, layers),
            "reading alone": partial(floor, path, sizes, default_threads()),
        }
        found = [
            compare(name, run, peer, n_bytes=n_bytes, pairs=options.pairs, warm_bytes=3 * n_bytes)
            for name, peer in sides.items()
        ]
        memory = {side: extra_bytes(side, path, layers) for side in SIDES}
    if options.json:
        print(json.dumps({"memory": memory, "layers": layers, "runs": [c.summary() | c.runs() for c in found]}))
        return 0
    print(f"{layers} layers, {n_bytes / 1e9:.2f} GB in bfloat16, {default_threads()} threads")
    print(table(found, a="shardload", b="other"))
    shown = ", ".join(f"{side} {count / 1e6:.0f} MB" for side, count in memory.items())
    print(f"host memory besides the arrays: {shown}; {memory['stack'] / max(1, memory['ours']):.1f} times less")
    return 0


if __name__ == "__main__":
    sys.exit(main())
