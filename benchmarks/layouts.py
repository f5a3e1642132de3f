"""Layouts found by search against maps by hand: bytes per device, and what compiled programs exchange.

Every layout of every model is compiled, forward and backward, for simulated devices and without weights; counted are
the summed result bytes of collective instructions in the compiled program. Nothing is timed but the search.

    hand     the ``get_layout_map`` of a KerasHub backbone where it has one, else rules by name as Megatron has them
    auto     the rules of shardload by layer type
    largest  the largest dim that divides, of every variable ("fsdp" over the model axis)
    search   shardload.parallel.search, without a memory limit
    parallax the automatic sharding of google-parallax, where it is installed (pip install google-parallax==0.0.2); it
             fails on models with convolutions or loops, and on dims that do not divide

    python -m benchmarks.layouts [--mesh 2x4] [--only gemma] [--numbers] [--json]
    python -m benchmarks.layouts --planned [--mesh 2x4] [--only gemma] [--explain] [--inference | --training] [--json]

``--numbers`` also runs each searched layout and compares outputs, loss and gradients with one device. ``--planned``
compares what plans exchange with what their compiled programs do, as `layouts_planned` describes.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks.xla_flags import quick_to_compile

MIB = 1 << 20
PARALLAX = "parallax"
"""The package of google-parallax, which these benchmarks do not require."""
HEADS = r".*(query|key|value)(_dense|_layer|_proj|_projector)?"
INTO_HIDDEN = r".*(intermediate|gate|gating|input_projector|mlp/dense_1|mlp/fc1|weights_in|dense_h_to_4h)\w*"
OUT_OF_HIDDEN = r".*(feedforward_output|ffw_linear|output_dense|_down|output_projector|mlp/dense_2|mlp/fc2|4h_to_h)\w*"
MEGATRON = {
    rf"{HEADS}/kernel": 1,
    rf"{HEADS}/bias": 0,
    r".*(attention_?output(_dense|_layer)?|attention/(output_projector|out_proj|output_dense))/kernel": 0,
    rf"{INTO_HIDDEN}/kernel": 1,
    rf"{INTO_HIDDEN}/bias": 0,
    rf"{OUT_OF_HIDDEN}/kernel": 0,
    r".*experts/\w+": 0,
    r".*(token|word)_embedding/embeddings": 0,
    r".*reverse_embeddings": 1,
    r".*(_1_conv|_conv1)/kernel": 3,
    r".*(_conv1/bias|_1_bn/\w+)": 0,
    r".*(_2_conv|_conv2)/kernel": 2,
}
"""Which dim of a variable the model axis splits, by name; the first that matches counts. For kernels of heads whose
heads lead, as Gemma's (heads, width, size), see `by_name`. Of convolutions in a row, the first is split by its output
channels and the second by its input channels."""


def decoders() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Families with a map by hand, two layers of their real widths."""
    import keras_hub

    hub = keras_hub.models
    gemma2 = {
        "query_head_dim_normalize": True,
        "use_post_ffw_norm": True,
        "use_post_attention_norm": True,
        "final_logit_soft_cap": 30,
        "attention_logit_soft_cap": 50,
        "sliding_window_size": 4096,
        "use_sliding_window_attention": True,
    }
    yield "gemma_2b", lambda: hub.GemmaBackbone(256000, 2, 8, 1, 2048, 32768, 256)
    yield "gemma_7b", lambda: hub.GemmaBackbone(256000, 2, 16, 16, 3072, 49152, 256)
    yield "gemma2_2b", lambda: hub.GemmaBackbone(256000, 2, 8, 4, 2304, 18432, 256, **gemma2)
    yield "gemma2_27b", lambda: hub.GemmaBackbone(256000, 2, 32, 16, 4608, 73728, 128, **gemma2)
    yield "llama3_8b", lambda: hub.Llama3Backbone(128256, 2, 32, 4096, 14336, 8)
    yield "qwen2.5_7b", lambda: hub.QwenBackbone(152064, 2, 28, 4, 3584, 18944)
    yield "qwen1.5_moe", lambda: hub.QwenMoeBackbone(151936, 2, 16, 16, 2048, 5632, 1408, 5632, 16, 4)
    yield "qwen3_moe", lambda: hub.Qwen3MoeBackbone(151936, 2, 32, 4, 128, 2048, 6144, 768, 16, 8)


def block() -> Any:
    """Two transformer blocks of Keras layers on 128 vectors of width 256."""
    import keras

    y = inputs = keras.Input((128, 256))
    for n in range(2):
        y = keras.layers.LayerNormalization()(y + keras.layers.MultiHeadAttention(8, 32)(y, y))
        hidden = keras.layers.Dense(1024, activation="gelu", name=f"feedforward_intermediate_{n}")(y)
        y = keras.layers.LayerNormalization()(y + keras.layers.Dense(256, name=f"feedforward_output_{n}")(hidden))
    return keras.Model(inputs, y)


def others() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Families without a map by hand, two layers of a middling width."""
    import keras_hub

    yield "block", block
    hub = keras_hub.models
    image = (64, 64, 3)
    sizes = {"vocabulary_size": 8192, "num_layers": 2, "num_heads": 8, "hidden_dim": 512, "intermediate_dim": 2048}
    grouped = {
        "vocabulary_size": 8192,
        "num_layers": 2,
        "num_query_heads": 8,
        "num_key_value_heads": 4,
        "hidden_dim": 512,
        "intermediate_dim": 2048,
    }

    def uniform(name: str) -> Callable[[], Any]:
        return lambda: getattr(hub, f"{name}Backbone")(**sizes)

    for name in ("Bert", "Roberta", "XLMRoberta", "DistilBert", "DebertaV3", "XLNet", "T5", "Bart", "GPT2", "GPTNeoX"):
        yield name.lower(), uniform(name)
    yield "opt", lambda: hub.OPTBackbone(**sizes)
    yield "bloom", lambda: hub.BloomBackbone(**sizes)
    yield "albert", lambda: hub.AlbertBackbone(**sizes, embedding_dim=128)
    yield "electra", lambda: hub.ElectraBackbone(8192, 2, 8, 512, 256, 2048)
    yield "fnet", lambda: hub.FNetBackbone(8192, 2, 512, 2048)
    yield "falcon", lambda: hub.FalconBackbone(8192, 2, 8, 512, 2048)
    yield "mistral", lambda: hub.MistralBackbone(**grouped)
    yield "phi3", lambda: hub.Phi3Backbone(**grouped)
    yield "qwen3", lambda: hub.Qwen3Backbone(**grouped, head_dim=64)
    yield "gemma3", lambda: hub.Gemma3Backbone(**grouped, image_size=16, head_dim=64, vision_encoder=None)
    yield "gpt_oss", lambda: hub.GptOssBackbone(**grouped, num_experts=8, head_dim=64, sliding_window=16)
    yield "vit", lambda: hub.ViTBackbone(image, 8, 2, 8, 512, 2048)
    yield "dinov2", lambda: hub.DINOV2Backbone(8, 2, 512, 8, 2048, image_shape=image, position_embedding_shape=image)
    yield (
        "resnet",
        lambda: hub.ResNetBackbone(
            [64], [7], [64, 128], [2, 2], [1, 2], "bottleneck_block", image_shape=image, use_pre_activation=False
        ),
    )
    yield "vgg", lambda: hub.VGGBackbone([2, 2, 2], [128, 256, 512], image_shape=image)
    yield "densenet", lambda: hub.DenseNetBackbone([4, 4, 4], image_shape=image, growth_rate=64)


def by_name(model: Any, mesh: Any) -> dict[str, Any]:
    """Rules as Megatron has them: heads, hidden units, experts and the vocabulary, where they divide; nothing else."""
    axis, rules = mesh.axes[-1], {}
    for variable in model.variables:
        shape = tuple(variable.shape)
        dim = next((dim for pattern, dim in MEGATRON.items() if re.fullmatch(pattern, variable.path)), None)
        if dim is not None:
            dim = 0 if len(shape) == 3 and shape[0] < shape[1] and dim == 1 else dim
            dim = dim if shape[dim] % mesh.axis_size(axis) == 0 else None
        rules[variable.path] = tuple(axis if d == dim else None for d in range(len(shape)))
    return rules


def largest(model: Any, mesh: Any) -> dict[str, Any]:
    """Split the largest dim that divides, of every variable."""
    axis, rules = mesh.axes[-1], {}
    for variable in model.variables:
        dims = [d for d, n in enumerate(variable.shape) if n % mesh.axis_size(axis) == 0 and n > 1]
        if dims:
            at = max(dims, key=lambda d: variable.shape[d])
            rules[variable.path] = tuple(axis if d == at else None for d in range(len(variable.shape)))
    return rules


def by_parallax(model: Any, mesh: Any, inputs: Any) -> dict[str, Any]:
    """What google-parallax assigns, from the forward pass as its ``jit`` traces it."""
    import jax
    from parallax.sharding.auto_shard import get_shardings

    variables, trained = [*model.trainable_variables, *model.non_trainable_variables], len(model.trainable_variables)
    leaves, structure = jax.tree.flatten(inputs)

    def forward(values: dict[str, Any], *leaves: Any) -> Any:
        state = [values[f"{i:05}"] for i in range(len(variables))]
        return model.stateless_call(state[:trained], state[trained:], jax.tree.unflatten(structure, leaves))[0]

    # A dict, as it takes lists for the axes of one array.
    values = {f"{i:05}": jax.ShapeDtypeStruct(tuple(v.shape), v.dtype) for i, v in enumerate(variables)}
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh(mesh.sizes, mesh.axes)):
        (assigned, *_), _ = get_shardings(forward, values, *leaves, model_axis_name=mesh.axes[-1])
    return {v.path: tuple(axes) for v, axes in zip(variables, assigned.values(), strict=True) if any(axes)}


def measured(name: str, make: Callable[[], Any], mesh: Any, *, batch: int, sequence: int, numbers: bool) -> Any:
    """Compile every layout of one model."""
    import jax

    import shardload
    from shardload.layout_search.tracing import input_specs
    from shardload.parallel import LayoutPlan, check_numbers, choose, compile_step, search

    with shardload.abstract():
        model = make()
    inputs = input_specs(model, batch=batch, sequence=sequence)
    row: dict[str, Any] = {"model": name, "mesh": str(mesh)}

    def add(label: str, layout: Any) -> None:
        try:
            choice = choose(model, mesh, layout() if callable(layout) else layout)
            step = compile_step(model, choice, inputs, training="gradients")
        except Exception as error:
            row[label] = {"error": f"{type(error).__name__}: {str(error)[:120]}"}
            return
        row[label] = {
            "weights_bytes": choice.device_bytes,
            "exchanged_bytes": step.collective_bytes,
            "collectives": dict(step.counts),
            "fallbacks": len(choice.fallbacks),
        }

    add("hand", "keras_hub" if hasattr(type(model), "get_layout_map") else lambda: by_name(model, mesh))
    add("auto", "auto")
    add("largest", lambda: largest(model, mesh))
    began = time.perf_counter()
    plan: LayoutPlan = search(model, mesh, inputs=inputs, optimizer="adamw")
    row["search_s"] = time.perf_counter() - began
    add("search", plan)
    if PARALLAX in labels():
        add(PARALLAX, lambda: by_parallax(model, mesh, inputs))
    row["planned_bytes"] = plan.exchanged_bytes
    if numbers:
        values = jax.tree.map(_sample, inputs)
        with_values = make()
        found = search(with_values, mesh, inputs=values, optimizer="adamw")
        check = check_numbers(with_values, choose(with_values, mesh, found), values)
        try:
            check.raise_if_wrong()
            row["numbers"] = "equal"
        except Exception as error:
            row["numbers"] = str(error)[:300]
    return row


def _sample(spec: Any) -> Any:
    import numpy as np

    rng = np.random.default_rng(0)
    if np.issubdtype(np.dtype(spec.dtype), np.floating):
        return rng.normal(size=spec.shape).astype(spec.dtype)
    return np.minimum(rng.integers(0, 64, spec.shape), 1).astype(spec.dtype)


def labels() -> tuple[str, ...]:
    """The layouts that are compared."""
    found = importlib.util.find_spec(PARALLAX) is not None
    return ("hand", "auto", "largest", "search", *([PARALLAX] if found else []))


def line(row: dict[str, Any]) -> str:
    """One line of the table."""
    cells = [f"{row['model']:<12}{row['mesh'].replace('batch=', '').replace(',model=', 'x'):<5}"]
    for label in labels():
        found = row[label]
        if "error" in found:
            cells.append(f"{'-':>24}")
        else:
            weights, exchanged = found["weights_bytes"] / MIB, found["exchanged_bytes"] / MIB
            cells.append(f"{weights:9.1f}{exchanged:9.1f} ({sum(found['collectives'].values()):>3})")
    return " ".join([*cells, f"{row['planned_bytes'] / MIB:9.1f}", f"{row['search_s']:5.1f}", row.get("numbers", "")])


def main(argv: list[str] | None = None) -> int:
    """Print the table, or one JSON object per line."""
    parser = argparse.ArgumentParser(description=str(__doc__).split("\n", 1)[0])
    parser.add_argument("--mesh", action="append", help="may be given several times (2x4; with --planned, five)")
    parser.add_argument("--only", default="", help="a regular expression that the name contains: ^t5$")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--sequence", type=int, default=0, help="tokens; 2048 with a map by hand, else 128")
    parser.add_argument("--numbers", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument(
        "--planned", action="store_true", help="planned against compiled bytes, also of held-out models"
    )
    parser.add_argument("--explain", action="store_true", help="with --planned: collectives of programs that differ")
    step = parser.add_mutually_exclusive_group()
    step.add_argument("--inference", action="store_true", help="with --planned: the forward pass alone")
    step.add_argument("--training", action="store_true", help="with --planned: gradients alone")
    options = parser.parse_args(argv)
    os.environ.setdefault("KERAS_BACKEND", "jax")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    # On a busy machine simulated devices wait for each other for longer than XLA's 40 s. Machine code is not optimised:
    # nothing is timed, and collectives are decided before it is generated.
    os.environ.setdefault("XLA_FLAGS", quick_to_compile(wait_s=3600))
    (planned if options.planned else compared)(options)
    return 0


def planned(options: argparse.Namespace) -> None:
    """Compare plans with compiled programs."""
    from benchmarks import layouts_planned

    steps = ["forward"] * (not options.training) + ["gradients"] * (not options.inference)
    meshes = options.mesh or layouts_planned.MESHES
    cases = layouts_planned.cases(options.only, meshes, steps, batch=options.batch, sequence=options.sequence)
    layouts_planned.compare(cases, as_json=options.json, explain=options.explain)


def compared(options: argparse.Namespace) -> None:
    """Compare searched layouts with others, on one mesh after the other."""
    import jax

    from shardload.sharding.mesh import MeshSpec

    meshes = [MeshSpec.parse(mesh) for mesh in options.mesh or ["2x4"]]
    jax.config.update("jax_num_cpu_devices", max(mesh.size for mesh in meshes))
    if not options.json:
        head = f"{'model':<12}{'mesh':<5}" + "".join(f"{label:>25}" for label in labels())
        print(head + "   planned  s   (each: MiB of weights, MiB exchanged, collectives)", flush=True)
    for mesh, (families, sequence) in itertools.product(meshes, ((decoders, 2048), (others, 128))):
        for name, make in families():
            if re.search(options.only, name):
                sizes = {"batch": options.batch, "sequence": options.sequence or sequence}
                row = measured(name, make, mesh, **sizes, numbers=options.numbers and sequence == 128)
                print(json.dumps(row) if options.json else line(row), flush=True)


if __name__ == "__main__":
    sys.exit(main())
