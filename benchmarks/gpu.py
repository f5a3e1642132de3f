"""What only a machine with a GPU shows. It needs the wheel, KerasHub and a JAX that has a GPU, and says so without.

    exact     every dtype of a safetensors file, in pieces and whole, transposed and cast; a whole model: the same bits
    memory    the GPU's memory limited to the weights + 10 % (+ 50, + 100 %): which loader still fits, and its peak
    rate      from the page cache to the GPU, against copies of as many bytes from pinned and from ordinary memory
    token     seconds from the call to the first token, in a process of its own, against KerasHub
    ready     seconds to the first result of `predict`, with and without ``warm_up``, and with JAX's compilation cache
    saving    how long a save in the background blocks, against `jax.device_get` of the same arrays; what it restores;
              the same without pinned memory (SHARDLOAD_PINNED_SAVES=0)

    python -m benchmarks.gpu [--model gemma2_2b] [--scale 1] [--only rate] [--pairs 5] [--out numbers.json]

Every measurement has a process of its own, as memory limits and compiled programs belong to one. Without a GPU,
``--anyway`` runs it all on the CPU, which shows that the program works, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import interleave

LIMITS = 1.1, 1.5, 2.0
"""Device memory over bytes of the weights."""
PROMPT = [2, 651, 6037, 576, 6081, 603]
"""Token ids: "The capital of France is", as Gemma has them."""
SAFETENSORS = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "int16": "I16", "uint16": "U16", "int32": "I32", "uint32": "U32",
    "float16": "F16", "float32": "F32", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip
SHAPES: tuple[tuple[int, ...], ...] = ((), (0, 3), (7, 5, 3), (1, 1000), (3001, 1777), (6000, 2304))


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays have the same shape, dtype and bits."""
    import numpy as np

    a, b = (np.ascontiguousarray(np.asarray(x)) for x in (a, b))
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


def write_every_dtype(path: Path) -> dict[str, Any]:
    """Write a safetensors file of random bits, and return its arrays."""
    import ml_dtypes  # noqa: F401 - gives NumPy the short floats
    import numpy as np

    rng = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    header: dict[str, Any] = {}
    at = 0
    for name, code in SAFETENSORS.items():
        dtype = np.dtype(name)
        for shape in SHAPES:
            n_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
            bits = rng.integers(0, 2 if name == "bool" else 256, n_bytes, np.uint8)
            key = f"{name}.{'x'.join(map(str, shape)) or 'scalar'}"
            arrays[key] = bits.view(dtype).reshape(shape)
            header[key] = {"dtype": code, "shape": list(shape), "data_offsets": [at, at + n_bytes]}
            at += n_bytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in arrays.values():
            file.write(array.tobytes())
    return arrays


def exact(folder: Path) -> dict[str, Any]:
    """Count the arrays that were compared; raise if one differs."""
    import jax
    import numpy as np

    import shardload

    device = jax.devices()[0]
    arrays = write_every_dtype(folder / "every.safetensors")
    compared, differing = 0, []

    def check(what: str, found: Any, expected: Any) -> None:
        nonlocal compared
        compared += 1
        if not same_bits(found, expected):
            differing.append(what)

    for budget in (None, "24MiB"):
        loaded = shardload.load_arrays(folder / "every.safetensors", device, host_memory_bytes=budget)
        turned = shardload.load_arrays(
            folder / "every.safetensors",
            device,
            host_memory_bytes=budget,
            transpose=lambda name, shape: tuple(reversed(range(len(shape)))),
        )
        for name, array in arrays.items():
            check(f"{name}, budget {budget}", loaded[name], array)
            check(f"{name} transposed, budget {budget}", turned[name], array.T)
        del loaded, turned
    with np.errstate(all="ignore"):
        for wanted in ("float32", "bfloat16", "float16"):
            floats = {n: a for n, a in arrays.items() if n.startswith(("bfloat16", "float16", "float32", "float8"))}
            cast = shardload.load_arrays(folder / "every.safetensors", device, dtype=wanted)
            for name, array in floats.items():
                check(f"{name} as {wanted}", cast[name], array.astype(wanted))
    source = folder / "model" / "model.weights.h5"
    there, here = (shardload.load_arrays(source, where) for where in (device, jax.devices("cpu")[0]))
    for name in here:
        check(f"the model's {name}", there[name], here[name])
    return {"compared": compared, "differing": differing}


def fits(folder: Path, side: str) -> dict[str, Any]:
    """Load the whole model under the memory limit of this process."""
    import jax

    limit = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    began = time.perf_counter()
    try:
        model = loader(side)(folder)
        jax.block_until_ready([v.value for v in model.weights])
    except Exception as error:  # a failure of either side is what this measures
        return {"limit_bytes": limit, "loaded": False, "error": f"{type(error).__name__}: {str(error)[:300]}"}
    stats = jax.devices()[0].memory_stats() or {}
    return {
        "limit_bytes": limit,
        "loaded": True,
        "wall_s": time.perf_counter() - began,
        "weight_bytes": sum(v.value.nbytes for v in model.weights),
        "peak_bytes": stats.get("peak_bytes_in_use"),
    }


def loader(side: str) -> Callable[[Path], Any]:
    """Import what loads, outside the clock; return the function that does."""
    import keras_hub

    import shardload

    load = shardload.load if side == "ours" else keras_hub.models.CausalLM.from_preset
    options = {"mesh": "1x1"} if side == "ours" else {"preprocessor": None}
    return lambda folder: load(str(folder / "model"), dtype="bfloat16", **options)


def token(folder: Path, side: str) -> dict[str, Any]:
    """Time the load and the first token after it."""
    import jax
    import numpy as np

    load = loader(side)
    jax.device_put(0, jax.devices()[0]).block_until_ready()
    began, cpu = time.perf_counter(), time.process_time()
    model = load(folder)
    jax.block_until_ready([v.value for v in model.weights])
    loaded = time.perf_counter()
    ids = np.array([[*PROMPT, 0]], np.int32)
    model.preprocessor = None
    found = model.generate(
        {"token_ids": ids, "padding_mask": ids != 0}, max_length=len(PROMPT) + 1, stop_token_ids=None
    )
    ready = time.perf_counter()
    return {
        "token": int(np.asarray(found["token_ids"])[0, -1]),
        "load_s": loaded - began,
        "ready_s": ready - began,
        "cpu_s": time.process_time() - cpu,
    }


def ready(folder: Path, side: str) -> dict[str, Any]:
    """Time the load and the first `predict`, whose step may be compiled meanwhile."""
    import jax
    import numpy as np

    import shardload

    x = {"token_ids": np.ones((2, 64), np.int32), "padding_mask": np.ones((2, 64), np.bool_)}
    options: dict[str, Any] = {"warm_up": {"predict": x}} if side == "warm_up" else {}
    loader("ours")
    jax.device_put(0, jax.devices()[0]).block_until_ready()
    began, cpu = time.perf_counter(), time.process_time()
    model = shardload.load(str(folder / "model"), dtype="bfloat16", mesh="1x1", **options)
    loaded = time.perf_counter()
    model.preprocessor = None
    total = float(np.asarray(model.predict(x, verbose=0), np.float32).sum())
    return {
        "load_s": loaded - began,
        "ready_s": time.perf_counter() - began,
        "cpu_s": time.process_time() - cpu,
        "result": total,
    }


def rate(folder: Path, pairs: int) -> dict[str, Any]:
    """Measure the GB/s of a load and of plain copies, in turn."""
    import jax
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    import shardload

    device = jax.devices()[0]
    source = folder / "model" / "model.weights.h5"
    n_bytes = source.stat().st_size
    piece = np.ones(64 << 20, np.uint8)
    pieces = max(1, n_bytes // piece.nbytes)
    pinned = jax.device_put(piece, SingleDeviceSharding(device, memory_kind="pinned_host"))
    jax.block_until_ready(pinned)
    on_device = SingleDeviceSharding(device, memory_kind="device")

    def plain(host: Any) -> Callable[[], Any]:
        return lambda: jax.block_until_ready([jax.device_put(host, on_device) for _ in range(pieces)])

    def ours(budget: str | None) -> Callable[[], Any]:
        return lambda: jax.block_until_ready(shardload.load_arrays(source, device, host_memory_bytes=budget))

    def read() -> int:
        buffer, total = bytearray(8 << 20), 0
        with source.open("rb", buffering=0) as file:
            while got := file.readinto(buffer):
                total += got
        return total

    kinds = {
        "pinned memory": plain(pinned),
        "ordinary memory": plain(piece),
        "reading alone, one thread": read,
        "shardload": ours(None),
        "shardload, 2 GiB budget": ours("2GiB"),
    }
    runs = interleave(kinds, rounds=pairs, between=lambda: None)
    return {
        kind: {
            "gb_s": n_bytes / 1e9 / statistics.median(run.wall_s for run in each),
            "cpu_s": statistics.median(run.cpu_s for run in each),
            "wall_s": [run.wall_s for run in each],
        }
        for kind, each in runs.items()
    }


def saving(folder: Path, pairs: int) -> dict[str, Any]:
    """How long a save blocks; and whether what it saved comes back bit for bit, into the model and as arrays."""
    import jax
    import numpy as np

    import shardload

    model = loader("ours")(folder)
    renewed = jax.jit(lambda arrays: [a + 0 for a in arrays])

    def values() -> list[Any]:
        return [v.value for v in model.weights]

    def renew() -> None:
        for variable, value in zip(model.weights, renewed(values()), strict=True):
            variable.assign(value)
        jax.block_until_ready(values())

    blocked, copied, whole = [], [], []
    steps = folder / ("steps" if "SHARDLOAD_PINNED_SAVES" not in os.environ else "steps-by-orbax")
    with shardload.Checkpointer(steps, max_to_keep=1) as checkpointer:
        for step in range(pairs + 1):
            renew()
            began = time.perf_counter()
            checkpointer.save(step, model)
            returned = time.perf_counter()
            checkpointer.wait()
            published = time.perf_counter()
            renew()
            again = time.perf_counter()
            jax.device_get(values())
            if step:
                copied.append(time.perf_counter() - again)
                blocked.append(returned - began)
                whole.append(published - began)
        expected = [np.asarray(v) for v in values()]
        for variable in model.weights:
            variable.assign(jax.numpy.zeros_like(variable.value))
        checkpointer.restore(model)
    same = all(same_bits(v, e) for v, e in zip(values(), expected, strict=True))
    return {"blocked_s": blocked, "device_get_s": copied, "published_s": whole, "restored_bits_equal": same}


def device(folder: Path) -> dict[str, Any]:
    """What JAX runs on."""
    import jax

    found = jax.devices()[0]
    limit = (found.memory_stats() or {}).get("bytes_limit", 0)
    return {"platform": found.platform, "kind": found.device_kind, "limit_bytes": limit, "jax": jax.__version__}


def child(part: str, folder: Path, *arguments: str, fraction: float | None = None, **more: str) -> dict[str, Any]:
    """Run a part in a process of its own, with at most this fraction of the GPU's memory; ``more``: its environment."""
    environment = {**os.environ, "KERAS_BACKEND": "jax", **more}
    if fraction is not None:
        environment["XLA_PYTHON_CLIENT_MEM_FRACTION"] = f"{fraction:.5f}"
    code = [sys.executable, "-m", "benchmarks.gpu", "--child", part, "--folder", str(folder), *arguments]
    done = subprocess.run(code, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"failed": done.stderr[-2000:]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(
    options: argparse.Namespace, folder: Path, machine: dict[str, Any], keep: Callable[[str, Any], None]
) -> None:
    """Run the parts that were asked for; pass each result to ``keep``."""
    code = [sys.executable, "-m", "shardload", "synth", options.model, "--scale", str(options.scale), "--json"]
    made = subprocess.run([*code, "--directory", str(folder)], capture_output=True, text=True, check=True)
    Path(json.loads(made.stdout)["path"]).rename(folder / "model")
    n_bytes = (folder / "model" / "model.weights.h5").stat().st_size
    keep("weight_bytes", n_bytes)
    pairs = ("--pairs", str(options.pairs))
    asked = options.only.split(",")
    wanted = [
        part for part in ("exact", "memory", "rate", "token", "ready", "saving") if any(one in part for one in asked)
    ]
    for part in wanted:
        if part == "memory":
            total = machine["limit_bytes"] / 0.75  # what JAX takes by default
            for side in ("ours", "peer"):
                for limit in LIMITS:
                    fraction = limit * n_bytes / total if total else None
                    found = child("memory", folder, "--side", side, fraction=fraction)
                    keep(f"memory, {side}, weights x {limit}", found)
                    if found.get("loaded"):
                        break
        elif part == "token":
            runs: dict[str, list[Any]] = {"ours": [], "peer": []}
            for index in range(options.pairs):
                for side in ("ours", "peer") if index % 2 else ("peer", "ours"):
                    runs[side].append(child("token", folder, "--side", side))
            keep("token", runs)
        elif part == "saving":
            keep("saving", child("saving", folder, *pairs))
            keep("saving, not pinned", child("saving", folder, *pairs, SHARDLOAD_PINNED_SAVES="0"))
        elif part == "ready":
            keep("ready", interleaved_ready(folder, options.pairs))
        else:
            keep(part, child(part, folder, *pairs))


def interleaved_ready(folder: Path, pairs: int) -> dict[str, list[dict[str, Any]]]:
    """Run `ready` in all ways in turn. The first round only fills the compilation cache, and is not kept."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    ways = {
        f"{side}{', compiled before' if c else ''}": (side, c) for c in ({}, cache) for side in ("plain", "warm_up")
    }
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for index in range(pairs + 1):
        for way in list(ways) if index % 2 else list(reversed(ways)):
            side, more = ways[way]
            if index or more:
                found = child("ready", folder, "--side", side, **more)
                runs[way] += [found] if index else []
    return runs


def main(argv: list[str] | None = None) -> int:
    """Measure, print one line per result, and write JSON."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--model", default="gemma2_2b", help="a name that `shardload synth` knows")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--only", default="", help="parts whose names contain one of these, with commas between")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--anyway", action="store_true", help="also without a GPU")
    parser.add_argument("--out", type=Path, help="also write all numbers to this file")
    parser.add_argument("--folder", type=Path, help="where to put the model; temporary by default")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.child:
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "device": lambda: device(options.folder),
            "exact": lambda: exact(options.folder),
            "memory": lambda: fits(options.folder, options.side),
            "token": lambda: token(options.folder, options.side),
            "ready": lambda: ready(options.folder, options.side),
            "rate": lambda: rate(options.folder, options.pairs),
            "saving": lambda: saving(options.folder, options.pairs),
        }
        print(json.dumps(parts[options.child]()))
        return 0
    results: dict[str, Any] = {}

    def keep(name: str, found: Any) -> None:
        results[name] = found
        print(f"{name}: {json.dumps(found)}", flush=True)
        if options.out:
            options.out.write_text(json.dumps(results, indent=1))

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        machine = child("device", Path(folder))
        keep("machine", machine)
        if machine.get("platform") != "gpu" and not options.anyway:
            keep("skipped", f"JAX has no GPU here, only {machine.get('platform', 'an error')}")
            return 0
        measure(options, Path(folder), machine, keep)
    return 0


if __name__ == "__main__":
    sys.exit(main())
