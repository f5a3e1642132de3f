"""Swin Transformer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import NO_DROPOUT, Config
from shardload.families.parts.conversion import Export, LayerSettings, VariablePart, joined_outputs
from shardload.families.parts.images import IMAGE_MODEL, oblong, part_of_a_patch, patch_sizes
from shardload.families.parts.tensors import VISION_HEADS, TensorSpec, dense, norm
from shardload.families.record import NO_GGUF, Family, ModelType
from shardload.units import plural


def _padded_windows(config: Config, name: str) -> str | None:
    """Return an error's text if Swin's windows do not cover a stage evenly, as KerasHub needs; else ``None``."""
    squares, window, depths = patch_sizes(config), config.get("window_size"), config.get("depths")
    if squares is None or not isinstance(window, int) or window < 1 or not isinstance(depths, list):
        return None
    side = squares[0] // squares[1]
    sizes = f"config.json sets image_size={config['image_size']} and patch_size={config['patch_size']}"
    for stage, depth in enumerate(depths):
        if side % window and (depth != 1 or side < window):  # the first block of a stage has no mask
            needs = f"a multiple of window_size={window}"
            return f"{sizes}: {side} x {plural(side, 'patch')} in stage {stage}, but {name} needs {needs}"
        if side % 2 and stage + 1 < len(depths):
            return f"{sizes}: {side} x {plural(side, 'patch')} in stage {stage}, but {name} needs an even number"
        side //= 2
    return None


def _tensors(config: Config) -> Iterator[TensorSpec]:
    patch, hidden, last = config["patch_size"], config["embed_dim"], len(config["depths"]) - 1
    yield TensorSpec("embeddings.patch_embeddings.projection.weight", (hidden, 3, patch, patch))
    yield TensorSpec("embeddings.patch_embeddings.projection.bias", (hidden,))
    yield from norm("embeddings.norm", hidden)
    for stage, (depth, heads) in enumerate(zip(config["depths"], config["num_heads"], strict=True)):
        for i in range(depth):
            yield from _block(config, f"encoder.layers.{stage}.blocks.{i}", hidden, heads)
        # Four patches become one of twice the width.
        if stage < last:
            at = f"encoder.layers.{stage}.downsample"
            yield TensorSpec(f"{at}.reduction.weight", (2 * hidden, 4 * hidden))
            yield from norm(f"{at}.norm", 4 * hidden)
            hidden *= 2
    yield from norm("layernorm", hidden)


def _block(config: Config, at: str, hidden: int, heads: int) -> Iterator[TensorSpec]:
    width = int(hidden * config["mlp_ratio"])
    yield TensorSpec(f"{at}.attention.self.relative_position_bias_table", ((2 * config["window_size"] - 1) ** 2, heads))
    for part in ("query", "key", "value"):
        yield TensorSpec(f"{at}.attention.self.{part}.weight", (hidden, hidden))
        if config["qkv_bias"]:
            yield TensorSpec(f"{at}.attention.self.{part}.bias", (hidden,))
    yield from dense(f"{at}.attention.output.dense", hidden, hidden)
    yield from dense(f"{at}.intermediate.dense", hidden, width)
    yield from dense(f"{at}.output.dense", width, hidden)
    yield from norm(f"{at}.layernorm_before", hidden)
    yield from norm(f"{at}.layernorm_after", hidden)


def _joined(backbone: Any) -> Iterator[VariablePart]:
    for i, stage in enumerate(backbone.stages):
        for j, block in enumerate(stage.blocks):
            at = f"encoder.layers.{i}.blocks.{j}.attention.self"
            yield from joined_outputs(block.attn.qkv, [f"{at}.{part}" for part in ("query", "key", "value")])


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    height, width, channels = backbone.image_shape
    if height != width or channels != 3 or not backbone.patch_norm:
        found = f"images of {height} x {width} pixels and {channels} channels, patch_norm={backbone.patch_norm}"
        raise UnsupportedError(
            f"Cannot write Swin Transformer for Hugging Face: it has {found}, expected squares of three channels and "
            "patch_norm=True"
        )
    return {
        "model_type": "swin",
        "architectures": ["SwinModel"],
        "image_size": height,
        "patch_size": backbone.patch_size,
        "num_channels": 3,
        "embed_dim": backbone.embed_dim,
        "depths": list(backbone.depths),
        "num_heads": list(backbone.num_heads),
        "window_size": backbone.window_size,
        "mlp_ratio": backbone.mlp_ratio,
        "qkv_bias": backbone.qkv_bias,
        "hidden_act": layers.activation,
        "layer_norm_eps": layers.epsilon,
        "hidden_dropout_prob": backbone.dropout_rate,
        "attention_probs_dropout_prob": backbone.attention_dropout,
        "drop_path_rate": backbone.drop_path,
        "use_absolute_embeddings": False,
    }


def _published(embedding: int, *, third: int, heads: int, image: int = 224, window: int = 7) -> dict[str, Any]:
    return {
        "model_type": "swin",
        "architectures": ["SwinModel"],
        "image_size": image,
        "patch_size": 4,
        "num_channels": 3,
        "embed_dim": embedding,
        "depths": [2, 2, third, 2],
        "num_heads": [heads, 2 * heads, 4 * heads, 8 * heads],
        "window_size": window,
        "mlp_ratio": 4.0,
        "qkv_bias": True,
    }


SWIN = ModelType(
    name="swin",
    lacks=NO_GGUF,
    defaults={"image_size": 224, "patch_size": 4, "window_size": 7, "embed_dim": 96, "mlp_ratio": 4.0, "qkv_bias": True}
    | {"depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "drop_path_rate": 0.1}
    | NO_DROPOUT,
    lacking=lambda config, name: oblong(config) or part_of_a_patch(config, name) or _padded_windows(config, name),
    checks=Checks(("layer_norm_eps", 1e-5), ("hidden_act", "gelu")),
    prefix="swin",
    heads=VISION_HEADS,
    tensors=_tensors,
    tensor_fields=("image_size", "patch_size", "embed_dim", "window_size"),
    tensor_lists=("depths", "num_heads"),
    **IMAGE_MODEL,
)
FAMILY = Family(
    name="swin",
    title="Swin Transformer",
    model_types=(SWIN,),
    sizes={
        "swin_tiny_patch4_window7_224": _published(96, third=6, heads=3),
        "swin_small_patch4_window7_224": _published(96, third=18, heads=3),
        "swin_base_patch4_window7_224": _published(128, third=18, heads=4),
        "swin_base_patch4_window12_384": _published(128, third=18, heads=4, image=384, window=12),
        "swin_large_patch4_window7_224": _published(192, third=18, heads=6),
        "swin_large_patch4_window12_384": _published(192, third=18, heads=6, image=384, window=12),
    },
    exports={"SwinTransformerBackbone": Export(_export, model_types=("swin",), parts=_joined)},
)
