"""Quantised Hugging Face folders of real size: memory against the plan, bytes read, and time against bfloat16.

    python -m benchmarks.quantised_folders [--layers 12] [--only fp8,gptq] [--rounds 2] [--keep] [--folder DIR] [--json]

A Llama of width 2048 is written once as each method stores it, with random codes. Each load runs in a process of its
own, in turn with the others, onto 1x8 in bfloat16: wall and CPU seconds; the peak of anonymous memory beyond the
arrays, and what the plan says; bytes that the process read from files (``rchar``), and the plan's; and the bytes of
live arrays per device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

WIDTH, INTERMEDIATE, HEADS, KV_HEADS, VOCABULARY, GROUP = 2048, 5632, 16, 8, 32000, 128
Stored = dict[str, tuple[str, tuple[int, ...]]]
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}


def fp8(name: str, out: int, into: int) -> Stored:
    """Blocks of 128 by 128, as DeepSeek and transformers store them."""
    return {
        f"{name}.weight": ("F8_E4M3", (out, into)),
        f"{name}.weight_scale_inv": ("F32", (-(-out // GROUP), into // GROUP)),
    }


def packed(name: str, out: int, into: int) -> Stored:
    """Four bits of compressed-tensors."""
    return {
        f"{name}.weight_packed": ("I32", (out, into // 8)),
        f"{name}.weight_scale": ("BF16", (out, into // GROUP)),
        f"{name}.weight_shape": ("I64", (2,)),
    }


def gptq(name: str, out: int, into: int) -> Stored:
    """Four bits of GPTQ."""
    return {
        f"{name}.qweight": ("I32", (into // 8, out)),
        f"{name}.qzeros": ("I32", (into // GROUP, out // 8)),
        f"{name}.scales": ("F16", (into // GROUP, out)),
        f"{name}.g_idx": ("I32", (into,)),
    }


def awq(name: str, out: int, into: int) -> Stored:
    """Four bits of AWQ."""
    return {
        f"{name}.qweight": ("I32", (into, out // 8)),
        f"{name}.qzeros": ("I32", (into // GROUP, out // 8)),
        f"{name}.scales": ("F16", (into // GROUP, out)),
    }


def nf4(name: str, out: int, into: int) -> Stored:
    """Four bits of bitsandbytes, scales nested."""
    size, weight = out * into, f"{name}.weight"
    return {
        weight: ("U8", (size // 2, 1)),
        f"{weight}.absmax": ("U8", (size // 64,)),
        f"{weight}.quant_map": ("F32", (16,)),
        f"{weight}.nested_absmax": ("F32", (-(-size // 64 // 256),)),
        f"{weight}.nested_quant_map": ("F32", (256,)),
        f"{weight}.quant_state.bitsandbytes__nf4": ("U8", (len(_state(out, into)),)),
    }


def _state(out: int, into: int) -> bytes:
    said = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [out, into]}
    return json.dumps({**said, "nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}).encode()


def plain(name: str, out: int, into: int) -> Stored:
    """What all are compared with."""
    return {f"{name}.weight": ("BF16", (out, into))}


_GROUPS = {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "strategy": "group", "group_size": GROUP}}}
METHODS: dict[str, tuple[Callable[[str, int, int], Stored], dict[str, Any] | None]] = {
    "bfloat16": (plain, None),
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}),
    "packed": (
        packed,
        {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": _GROUPS},
    ),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP}),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}),
    "nf4": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True}),
}


def tensors(method: str, layers: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yield name, dtype and shape of everything in a folder."""
    kv = WIDTH // HEADS * KV_HEADS
    inner = (("gate", INTERMEDIATE, WIDTH), ("up", INTERMEDIATE, WIDTH), ("down", WIDTH, INTERMEDIATE))
    attention = (("q", WIDTH, WIDTH), ("k", kv, WIDTH), ("v", kv, WIDTH), ("o", WIDTH, WIDTH))
    yield "model.embed_tokens.weight", "BF16", (VOCABULARY, WIDTH)
    yield "model.norm.weight", "BF16", (WIDTH,)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{at}.{norm}.weight", "BF16", (WIDTH,)
        for part, dims in (("self_attn", attention), ("mlp", inner)):
            for name, out, into in dims:
                for stored, (dtype, shape) in METHODS[method][0](f"{at}.{part}.{name}_proj", out, into).items():
                    yield stored, dtype, shape


def write(folder: Path, method: str, layers: int) -> None:
    """Write a folder with random codes; groups are in order, and no float8 is NaN."""
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCABULARY, "hidden_size": WIDTH,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": layers, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "max_position_embeddings": 2048,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
    }  # fmt: skip
    if (settings := METHODS[method][1]) is not None:
        config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    header, at = {}, 0
    for name, dtype, shape in tensors(method, layers):
        n_bytes = int(np.prod(shape)) * SIZES[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + n_bytes]}
        at += n_bytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        rng = np.random.default_rng(0)
        for name, dtype, shape in tensors(method, layers):
            file.write(_content(rng, name, dtype, shape))


def _content(rng: np.random.Generator, name: str, dtype: str, shape: tuple[int, ...]) -> bytes:
    if name.endswith("g_idx"):
        return (np.arange(shape[0]) // GROUP).astype("<i4").tobytes()
    if name.endswith("weight_shape"):
        rows = INTERMEDIATE if "gate" in name or "up_proj" in name else WIDTH
        rows = WIDTH // HEADS * KV_HEADS if "k_proj" in name or "v_proj" in name else rows
        return np.array([rows, INTERMEDIATE if "down" in name else WIDTH], "<i8").tobytes()
    if "quant_state" in name:
        out, into = np.frombuffer(_content(rng, name.partition(".weight")[0] + ".weight_shape", "I64", (2,)), "<i8")
        return _state(int(out), int(into))
    if dtype in ("F16", "F32"):
        return rng.uniform(0.01, 0.02, shape).astype({"F16": "<f2", "F32": "<f4"}[dtype]).tobytes()
    if dtype == "BF16":
        return (rng.normal(0, 0.02, shape).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    found = rng.integers(0, 256, int(np.prod(shape)) * SIZES[dtype], np.uint8)
    return (found & 0xFE if dtype == "F8_E4M3" else found).tobytes()


def child(folder: str, **options: Any) -> dict[str, Any]:
    """Plan and load a folder in this process; return what it took."""
    import jax

    import shardload
    from benchmarks.measure import warm_memory
    from benchmarks.store_memory import resident

    plan = shardload.plan(folder, mesh="1x8", dtype="bfloat16", **options)
    # Their first use imports and compiles.
    shardload.load(next(Path(folder).parent.glob("warm-*")), mesh="1x8", dtype="bfloat16", **options)
    gc.collect()  # of the model that has just been loaded
    warm_memory(2 << 30)
    before, read_before, peak, ended = resident(), _read_bytes(), 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.005):
            peak = max(peak, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    began_s, cpu_s = time.perf_counter(), time.process_time()
    model = shardload.load(folder, mesh="1x8", dtype="bfloat16", **options)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
    ended.set()
    thread.join()
    read_bytes = _read_bytes() - read_before
    device = jax.devices()[0]
    arrays = {id(variable.value): variable.value for variable in model.weights}
    shards = [shard.data.nbytes for value in arrays.values() for shard in value.addressable_shards]
    on_first = sum(s.data.nbytes for v in arrays.values() for s in v.addressable_shards if s.device == device)
    return {
        "wall_s": wall_s, "cpu_s": cpu_s, "read_bytes": read_bytes, "planned_read_bytes": plan.bytes.read,
        "beyond_arrays_bytes": peak - before - sum(shards), "planned_staging_bytes": plan.host_bytes.peak_staging,
        "device_bytes": on_first, "planned_device_bytes": plan.devices[0].bytes,
    }  # fmt: skip


def _read_bytes() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


def run(folder: Path, methods: list[str], *, layers: int, rounds: int, keep: bool) -> dict[str, list[dict[str, Any]]]:
    """Write the folders that are missing, then load each ``rounds`` times, in turn."""
    for method in methods:
        for name, count in ((method, layers), (f"warm-{method}", 1)):
            if not (folder / method / name).exists():
                write(folder / method / name, method, count)
    found: dict[str, list[dict[str, Any]]] = {method: [] for method in methods}
    for _ in range(rounds):
        for method in methods:
            code = [sys.executable, "-m", "benchmarks.quantised_folders", "--child", str(folder / method / method)]
            code += ["--keep"] if keep else []
            result = subprocess.run(code, check=True, stdout=subprocess.PIPE, text=True)
            found[method].append(json.loads(result.stdout.splitlines()[-1]))
    return found


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """Medians, as Markdown."""
    lines = [
        "| | stored | read / plan | beyond the arrays | plan's staging | bytes of a device / plan | wall | CPU | "
        "against bfloat16 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    first = statistics.median(run["wall_s"] for run in next(iter(found.values())))
    for method, runs in found.items():
        of = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
        lines.append(
            f"| {method} | {of['planned_read_bytes'] / 1e9:.2f} GB | {of['read_bytes'] / of['planned_read_bytes']:.3f} "
            f"| {of['beyond_arrays_bytes'] / 2**20:.0f} MiB | {of['planned_staging_bytes'] / 2**20:.0f} MiB "
            f"| {of['device_bytes'] / of['planned_device_bytes']:.3f} | {of['wall_s']:.2f} s | {of['cpu_s']:.2f} s "
            f"| {of['wall_s'] / first:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Write, load and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only", default=",".join(METHODS))
    parser.add_argument("--keep", action="store_true", help="keep the codes packed, instead of dequantising them")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(child(args.child, **({"quantized": "keep"} if args.keep else {}))))
        return
    with tempfile.TemporaryDirectory(prefix="shardload-quantised-") as name:
        folder, methods = args.folder or Path(name), args.only.split(",")
        found = run(folder, methods, layers=args.layers, rounds=args.rounds, keep=args.keep)
    print(
        json.dumps({"arguments": {"layers": args.layers, "rounds": args.rounds}, "results": found})
        if args.json
        else table(found)
    )


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    main()
