"""How long planning takes: ``python -m benchmarks.planning``.

Three questions, each measurement in a process of its own, from a built model without values to a plan; "wall" and "CPU"
differ on a busy machine.

* Gemma 2 27B on 4x8: inference and training; then the same from the name of the architecture to a compiled step.
* Depth: a Llama of 8B with 8 to 64 layers, training on 2x4, and the exponent of a line through the logarithms.
* A Llama of 405B on 8x64, training.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

GEMMA = {"mesh": "4x8", "batch": 16, "sequence": 512}
DEPTHS = (8, 16, 32, 64)
LLAMA_8B = {
    "vocabulary_size": 128256,
    "num_query_heads": 32,
    "num_key_value_heads": 8,
    "hidden_dim": 4096,
    "intermediate_dim": 14336,
}
LLAMA_405B = {
    "vocabulary_size": 128256,
    "num_layers": 126,
    "num_query_heads": 128,
    "num_key_value_heads": 8,
    "hidden_dim": 16384,
    "intermediate_dim": 53248,
}


def timed(name: str, call: Callable[[], Any], **facts: Any) -> Any:
    """Run a call, print what it took as a line of JSON, and return its result."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    spent = {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}
    print(json.dumps({"name": name, **facts, **spent, **_said(result)}), flush=True)
    return result


def _said(result: Any) -> dict[str, Any]:
    from shardload.parallel import LayoutPlan
    from shardload.pipeline.layout_planning import LayoutReport

    if isinstance(result, LayoutPlan):
        return {"device_bytes": result.device.total, "step_s": result.step_s}
    if isinstance(result, LayoutReport) and result.compiled is not None:
        return {
            "device_bytes": result.plan.device.total,
            "compiled_bytes": result.compiled.total_bytes,
            "stages_s": dict(result.seconds),
            "notes": list(result.notes),
        }
    return {}


def gemma(train: str | None) -> None:
    """Plan Gemma 2 27B."""
    from shardload.parallel import search
    from shardload.pipeline.load import build, open_planned
    from shardload.pipeline.request import Construction, PlanRequest
    from shardload.sharding.mesh import MeshSpec

    source = open_planned(PlanRequest(source="gemma2_27b"))
    model = timed("gemma2_27b, build", lambda: build(source.manifest, Construction(dtype="bfloat16")))
    mesh, sizes = MeshSpec.parse(str(GEMMA["mesh"])), {k: GEMMA[k] for k in ("batch", "sequence")}
    name = f"gemma2_27b on {GEMMA['mesh']}, {train or 'inference'}"
    timed(name, lambda: search(model, mesh, optimizer=train, device_memory_bytes=2**36, **sizes))


def gemma_compiled(train: str | None, memory: str) -> None:
    """Plan Gemma 2 27B from its name, and compile the step against a device memory."""
    import jax

    from shardload.pipeline.layout_planning import StepSpec, plan_layouts
    from shardload.pipeline.request import PlanRequest

    jax.config.update("jax_num_cpu_devices", 32)
    request = PlanRequest(source="gemma2_27b", mesh=str(GEMMA["mesh"]), dtype="bfloat16", device_memory_bytes=memory)
    step = StepSpec(train, int(GEMMA["batch"]), int(GEMMA["sequence"]), compile=True)
    timed(f"gemma2_27b on 4x8, {train or 'inference'}, compiled, {memory}", lambda: plan_layouts(request, step))


def llama(layers: int, mesh: str, sizes: dict[str, int], *, batch: int, sequence: int) -> None:
    """Plan training of a Llama."""
    import keras_hub

    import shardload
    from shardload.parallel import search
    from shardload.sharding.mesh import MeshSpec

    with shardload.abstract():
        model = keras_hub.models.LlamaBackbone(**{**sizes, "num_layers": layers}, dtype="bfloat16")
    parameters = sum(math.prod(v.shape) for v in model.variables)
    timed(
        f"Llama of {layers} layers on {mesh}",
        lambda: search(model, MeshSpec.parse(mesh), optimizer="adamw", batch=batch, sequence=sequence),
        layers=layers,
        parameters=parameters,
    )


CASES: dict[str, Callable[[], None]] = {
    "gemma-inference": lambda: gemma(None),
    "gemma-training": lambda: gemma("adamw"),
    "gemma-compiled-inference": lambda: gemma_compiled(None, "16GiB"),
    "gemma-compiled-training": lambda: gemma_compiled("adamw", "64GiB"),
    **{f"depth-{n}": lambda n=n: llama(n, "2x4", LLAMA_8B, batch=16, sequence=512) for n in DEPTHS},  # type: ignore[misc]
    "llama-405b": lambda: llama(126, "8x64", LLAMA_405B, batch=64, sequence=2048),
}


def exponent(points: dict[int, float]) -> float:
    """Return the slope of the least-squares line through the logarithms: 1 is linear in depth."""
    xs, ys = [math.log(n) for n in points], [math.log(s) for s in points.values()]
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / sum((a - x) ** 2 for a in xs)


def main(argv: list[str] | None = None) -> int:
    """Run every case in a process of its own."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--only", default="", help="only cases whose name contains this")
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="lines of JSON only")
    options = parser.parse_args(argv)
    if options.case:
        CASES[options.case]()
        return 0
    depths: dict[int, float] = {}
    for case in (name for name in CASES if options.only in name):
        command = [sys.executable, "-m", "benchmarks.planning", "--case", case]
        done = subprocess.run(command, check=False, text=True, stdout=subprocess.PIPE)
        if done.returncode:
            return done.returncode
        for found in (json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")):
            if case.startswith("depth-"):
                depths[found["layers"]] = found["cpu_s"]
            print(json.dumps(found) if options.json else _row(found), flush=True)
    if len(depths) > 1:
        last = {"name": "seconds of CPU ~ layers ** e", "exponent": exponent(depths)}
        print(json.dumps(last) if options.json else f"{last['name']}, e = {last['exponent']:.2f}")
    return 0


def _row(found: dict[str, Any]) -> str:
    more = "".join(f", {key} {found[key]}" for key in ("device_bytes", "compiled_bytes", "stages_s") if key in found)
    return f"{found['name']:<50} wall {found['wall_s']:6.1f} s  CPU {found['cpu_s']:6.1f} s{more}"


if __name__ == "__main__":
    sys.exit(main())
