"""Plans against the layouts that MaxText and torchtitan publish for Llama 3, counted by the same cost model.

A published layout is a mesh, a layout for each kernel, what is recomputed, and the rows of a batch. Pinned in a search,
it gets the bytes that a plan states: what each device stores, and what it exchanges in a step. Against it stands the
plan that the search finds for as many devices and the same batch, with at most as many bytes on each device::

    published layout ─► search(pins=…, remat="full") ─► bytes of theirs ─► search on all meshes, within these bytes

float32 weights and slots of AdamW, products in bfloat16, 8,192 tokens. Nothing is compiled, and attention stores its
scores in both. Offloading to the host, 8-bit floats and pipelines are left out: shardload has none of them.

    python -m benchmarks.published_layouts [--only 8b]
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from typing import Any

SEQUENCE = 8192
SIZES = {
    "8b": (32, 32, 4096, 14336),
    "70b": (80, 64, 8192, 28672),
    "405b": (126, 128, 16384, 53248),
}
"""For each Llama 3: its layers, query heads, width and hidden features. All have 8 key heads."""


@dataclass(frozen=True, slots=True)
class Published:
    """A configuration that a project publishes."""

    name: str
    model: str
    mesh: str
    batch: int
    """Rows over all devices."""
    sequence_parallel: bool
    source: str


PUBLISHED = (
    Published(
        "MaxText", "8b", "fsdp=16", 16, False, "gpu-recipes a4/maxtext-configs/llama3-1-8b-16gpus-a4 (bf16 here)"
    ),
    Published("torchtitan", "8b", "fsdp=8", 16, False, "benchmarks/llama3_h100_202412_torchtitan.md, table 1"),
    Published("MaxText", "70b", "fsdp=256", 2048, False, "gpu-recipes a4/maxtext-configs/llama3-1-70b-256gpus-a4-bf16"),
    Published("torchtitan", "70b", "fsdp=32,model=8", 512, True, "the same file, table 4 (bf16 here)"),
    Published(
        "MaxText", "405b", "fsdp=256", 512, False, "gpu-recipes a4/maxtext-configs/llama3-1-405b-256gpus-a4-bf16"
    ),
    Published("torchtitan", "405b", "fsdp=16,model=8", 32, True, "train_configs/llama3_405b.toml (bf16 here)"),
)


def decoder(model: str) -> Any:
    """Return a Llama 3 with logits, without values."""
    import keras
    import keras_hub

    import shardload

    layers, heads, width, hidden = SIZES[model]
    keras.config.set_dtype_policy("mixed_bfloat16")
    with shardload.abstract():
        backbone = keras_hub.models.Llama3Backbone(128256, layers, heads, width, hidden, 8)
        return keras_hub.models.Llama3CausalLM(backbone=backbone, preprocessor=None)


def pins(mesh: str) -> dict[str, tuple[str | None, ...]]:
    """Return the layouts of both projects: the storage over ``fsdp``, heads, features and vocabulary over ``model``."""
    model = "model" if "model" in mesh else None
    return {
        ".*token_embedding/embeddings": (model, "fsdp"),
        ".*token_embedding/reverse_embeddings": ("fsdp", model),
        ".*(query|key|value)/kernel": ("fsdp", model, None),
        ".*attention_output/kernel": (model, None, "fsdp"),
        ".*feedforward_(intermediate|gate)_dense/kernel": ("fsdp", model),
        ".*feedforward_output_dense/kernel": (model, "fsdp"),
        ".*scale": (None,),
    }


def row(case: Published) -> str:
    """Search both plans, and return a line of a table."""
    from shardload.layout_search.search_arguments import Saving
    from shardload.layout_search.searching import LayoutSearch
    from shardload.layout_search.smallest_mesh import mesh_shapes
    from shardload.layout_search.tracing import input_specs
    from shardload.sharding.mesh import MeshSpec

    model = decoder(case.model)
    inputs = input_specs(model, batch=case.batch, sequence=SEQUENCE)
    search = LayoutSearch(model, inputs, optimizer="adamw")
    mesh = MeshSpec.parse(case.mesh)
    saving = Saving("full", sequence_parallel=case.sequence_parallel)
    theirs = search.on(mesh, device_memory_bytes=None, pins=pins(case.mesh), saving=saving)
    ours, _ = search.fastest_of(mesh_shapes(mesh.size, case.batch), theirs.device.total)
    assert ours is not None
    cells = [
        f"{plan.mesh}{' with split sequences' if plan.sequence_axes else ''}, recomputed: "
        f"{', '.join(plan.remat.values()) or 'nothing'} | {plan.device.total / 2**30:,.1f} | "
        f"{plan.exchanged_bytes / 1e9:,.1f} | {plan.step_s:,.1f}"
        for plan in (theirs, ours)
    ]
    ratio = ours.exchanged_bytes / theirs.exchanged_bytes
    return f"| {case.name} {case.model}, {case.batch} rows | {' | '.join(cells)} | {ratio:.2f} |"


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of a name: 8b, torchtitan")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["KERAS_BACKEND"] = "jax"
    print("GiB per device; GB of collective results per device and step; estimated seconds; bytes found / published")
    print("| configuration | published | GiB | GB | s | found | GiB | GB | s | GB ratio |\n" + "|---" * 10 + "|")
    for case in PUBLISHED:
        if options.only in f"{case.name} {case.model}".lower():
            print(row(case), flush=True)


if __name__ == "__main__":
    main()
