"""Plans of large models against compiled programs: a few layers at full width, on as many simulated devices.

The forward and backward pass is compiled for the plan's layouts, without weights. Planned and compiled are: weights on
each device, temporaries (the plan's activations), and bytes of collective results. On simulated devices, it is compiled
in float32, as XLA for CPU computes 16-bit floats in 32 bits, and with its barriers, so that what a plan recomputes is
recomputed. With ``--tpu``, it is compiled for the chips of a TPU that need not be there, in the dtype of the plan: the
package libtpu has to be installed, and `TPU_SKIP_MDS_QUERY=1` keeps it from looking for a TPU.

With ``--fitting``, the slice has the layouts of the plan of all layers that fits into the memory of a device, and
recomputes what that plan recomputes, and splits sequences if it does.

    python -m benchmarks.layout_slices [--only 405b] [--layers 4] [--fitting] [--tpu]
"""

from __future__ import annotations

import argparse
import os
from typing import Any

CASES = {
    "gemma2_27b": ("4x8", 32, 512),
    "llama3.1_405b": ("8x64", 8, 4096),
}
"""For each model: the mesh, the rows of a batch and the tokens of a row."""
WHOLE = {
    "gemma2_27b": (46, "bfloat16", 16 << 30),
    "llama3.1_405b": (126, "mixed_bfloat16", 80 << 30),
}
"""For each model: how many layers it has, and the dtype and the memory of a device for which it is planned."""
TPUS = {"gemma2_27b": "v5e:4x8", "llama3.1_405b": "v4:4x8x8"}
"""For each model: a TPU with as many devices as the mesh."""


def made(name: str, layers: int) -> Any:
    """Return the backbone of a model with fewer layers, without values."""
    import keras_hub

    import shardload

    with shardload.abstract():
        if name == "llama3.1_405b":
            return keras_hub.models.Llama3Backbone(128256, layers, 128, 16384, 53248, 8)
        return keras_hub.models.GemmaBackbone(
            256000, layers, 32, 16, 4608, 73728, 128, query_head_dim_normalize=True, use_post_ffw_norm=True,
            use_post_attention_norm=True, final_logit_soft_cap=30, attention_logit_soft_cap=50,
            sliding_window_size=4096, use_sliding_window_attention=True,
        )  # fmt: skip


def fitting(name: str, layers: int) -> dict[str, Any]:
    """Plan all layers of a model within the memory of a device; return options with which a slice has that plan."""
    import keras

    from shardload.layout_search.tracing import input_specs
    from shardload.parallel import search

    mesh, batch, sequence = CASES[name]
    whole, dtype, limit = WHOLE[name]
    keras.config.set_dtype_policy(dtype)
    model = made(name, whole)
    keras.config.set_dtype_policy("float32")
    inputs = input_specs(model, batch=batch, sequence=sequence)
    plan = search(model, mesh, inputs=inputs, optimizer="adamw", device_memory_bytes=limit)
    of_slice = {v.path for v in made(name, layers).variables}
    return {
        "mesh": plan.mesh,
        "pins": {v.path: v.spec for v in plan.variables if v.path in of_slice},
        "remat": plan.remat,
        "split": bool(plan.sequence_axes),
    }


def row(name: str, layers: int, remat: Any, *, split: bool, mesh: Any = None, pins: Any = None, tpu: bool) -> str:
    """Search a plan, compile its step, and return a line of a table."""
    import keras

    from shardload.layout_search.tracing import input_specs
    from shardload.parallel import Hardware, compile_step, search

    asked, batch, sequence = CASES[name]
    devices = None
    if tpu:
        from jax.experimental import topologies

        devices = topologies.get_topology_desc(TPUS[name], "tpu").devices
        keras.config.set_dtype_policy(WHOLE[name][1])
    model = made(name, layers)
    keras.config.set_dtype_policy("float32")
    inputs = input_specs(model, batch=batch, sequence=sequence)
    # XLA for CPU makes no reduce-scatters.
    hardware = Hardware(reduce_scatter=tpu)
    options = {"optimizer": "adamw", "hardware": hardware, "remat": remat, "sequence_parallel": split, "pins": pins}
    plan = search(model, mesh or asked, inputs=inputs, **options)
    step = compile_step(model, plan, inputs, training="gradients", devices=devices)
    batch_bytes = 2 * 4 * sequence * batch // plan.mesh.axis_size(plan.mesh.axes[0])
    pairs = (
        (plan.device.weights, step.argument_bytes - batch_bytes),
        (plan.device.activations, step.temporary_bytes),
        (plan.exchanged_bytes, step.collective_bytes),
    )
    cells = [
        f"{planned / 2**20:,.1f} / {compiled / 2**20:,.1f}, {compiled / planned:.2f}" for planned, compiled in pairs
    ]
    split_over = f", sequences over {'+'.join(plan.sequence_axes)}" if plan.sequence_axes else ""
    recomputed = ", ".join(plan.remat.values()) or "none"
    return f"| {name}, {layers} layers | {plan.mesh}{split_over} | {recomputed} | {' | '.join(cells)} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--fitting", action="store_true", help="with the layouts of the plan of all layers that fits")
    parser.add_argument("--tpu", action="store_true", help="compile for TPU instead of simulated devices")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["KERAS_BACKEND"] = "jax"
    import jax

    jax.config.update("jax_num_cpu_devices", 512)
    print("MiB planned / compiled on each device, and the ratio")
    print("| model | mesh | recomputed | weights | activations | exchanged |\n|---|---|---|---|---|---|")
    for name in (name for name in CASES if options.only in name):
        if options.fitting:
            print(row(name, options.layers, **fitting(name, options.layers), tpu=options.tpu), flush=True)
            continue
        for split in (False, True):
            for remat in ("none", "matmuls", "full"):
                print(row(name, options.layers, remat, split=split, tpu=options.tpu), flush=True)


if __name__ == "__main__":
    main()
