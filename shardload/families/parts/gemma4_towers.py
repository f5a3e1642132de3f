"""The towers of Gemma 4, which encode images and sound: their tensors, and their configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import TANH, FieldDifference
from shardload.families.parts.config import Config
from shardload.families.parts.gemma4_text import norm_scale
from shardload.families.parts.tensors import TensorSpec, dense

IMAGE_SIDE = 896
"""The side of images, in pixels, that KerasHub's converter assumes; Hugging Face's configuration states none."""


def _clipped(config: Config, at: str, inputs: int, outputs: int) -> Iterator[TensorSpec]:
    """Yield the matrix of a linear layer, and the bounds of what goes in and comes out."""
    yield TensorSpec(f"{at}.linear.weight", (outputs, inputs))
    if config["use_clipped_linears"]:
        for side in ("input", "output"):
            yield TensorSpec(f"{at}.{side}_min", ())
            yield TensorSpec(f"{at}.{side}_max", (), near_one=True)


_CONSTANTS: dict[str, dict[str, Any]] = {
    "vision_config": {"hidden_activation": TANH},
    # transformers has this epsilon in most norms for sound, whatever the field says, and KerasHub that of the field.
    "audio_config": {"hidden_act": "silu", "rms_norm_eps": 1e-6, "use_clipped_linears": True},
}


def ignored_by_towers(config: Config) -> Iterator[FieldDifference]:
    """Yield the fields that KerasHub's towers, or those of transformers, ignore, and that have another value."""
    for part, fields in _CONSTANTS.items():
        given = config.get(part)
        if not isinstance(given, Mapping):
            continue
        for field, value in fields.items():
            if given.get(field, value) != value:
                yield FieldDifference(field, f"{given[field]} (in {part})", str(value), (field,))


# ---- images -------------------------------------------------------------------------------------

VISION_SIZES = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"),
    *("head_dim", "patch_size", "pooling_kernel_size", "position_embedding_size"),
)
VISION_TYPE = "gemma4_vision"
VISION_DEFAULTS = {
    **dict(zip(VISION_SIZES, (768, 3072, 16, 12, 12, 64, 16, 3, 10240), strict=True)),
    "rms_norm_eps": 1e-6,
    "use_clipped_linears": False,
    "standardize": False,
}
"""As in transformers, whose defaults differ from those of KerasHub's converter."""


def vision_tensors(config: Config, outputs: int) -> Iterator[TensorSpec]:
    """Yield the tensors of the tower for images, and of the projection to ``outputs`` features."""
    tower, hidden, patch = "model.vision_tower", config["hidden_size"], config["patch_size"]
    yield TensorSpec(f"{tower}.patch_embedder.input_proj.weight", (hidden, 3 * patch**2))
    places = (2, config["position_embedding_size"], hidden)
    yield TensorSpec(f"{tower}.patch_embedder.position_embedding_table", places)
    for i in range(config["num_hidden_layers"]):
        yield from _vision_layer(config, f"{tower}.encoder.layers.{i}")
    if config["standardize"]:
        yield TensorSpec(f"{tower}.std_bias", (hidden,))
        yield norm_scale(f"{tower}.std_scale", hidden)
    yield TensorSpec("model.embed_vision.embedding_projection.weight", (outputs, hidden))


def _vision_layer(config: Config, at: str) -> Iterator[TensorSpec]:
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
        yield norm_scale(f"{at}.{name}_layernorm.weight", hidden)
    for name, features in (("q", queries), ("k", keys), ("v", keys)):
        yield from _clipped(config, f"{at}.self_attn.{name}_proj", hidden, features)
    yield from _clipped(config, f"{at}.self_attn.o_proj", queries, hidden)
    yield norm_scale(f"{at}.self_attn.q_norm.weight", width)
    yield norm_scale(f"{at}.self_attn.k_norm.weight", width)
    yield from _clipped(config, f"{at}.mlp.gate_proj", hidden, inner)
    yield from _clipped(config, f"{at}.mlp.up_proj", hidden, inner)
    yield from _clipped(config, f"{at}.mlp.down_proj", inner, hidden)


def exported_vision(tower: Any) -> dict[str, Any]:
    """Return the ``vision_config`` of KerasHub's tower."""
    if tower.image_size != IMAGE_SIDE:
        raise UnsupportedError(
            f"Cannot write Gemma 4 for images of {tower.image_size} pixels for Hugging Face, expected {IMAGE_SIDE}, "
            "which KerasHub's converter always assumes"
        )
    return {
        "model_type": VISION_TYPE,
        "hidden_size": tower.hidden_dim,
        "intermediate_size": tower.intermediate_dim,
        "num_hidden_layers": tower.num_layers,
        "num_attention_heads": tower.num_heads,
        "num_key_value_heads": tower.num_key_value_heads,
        "head_dim": tower.head_dim,
        "patch_size": tower.patch_size,
        "pooling_kernel_size": tower.pool_size,
        "position_embedding_size": tower.position_embedding_size,
        "hidden_activation": TANH,
        "rms_norm_eps": tower.layer_norm_epsilon,
        "rope_parameters": {"rope_type": "axial", "rope_theta": tower.rope_max_wavelength},
        "use_clipped_linears": tower.use_clipped_linears,
        "standardize": tower.standardize,
        "attention_bias": False,
    }


# ---- sound --------------------------------------------------------------------------------------

AUDIO_SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "conv_kernel_size", "output_proj_dims")
AUDIO_TYPE = "gemma4_audio"
AUDIO_DEFAULTS: dict[str, Any] = {
    **dict(zip(AUDIO_SIZES, (1024, 12, 8, 5, 1536), strict=True)),
    "subsampling_conv_channels": [128, 32],
    "residual_weight": 0.5,
    "rms_norm_eps": 1e-6,
    "use_clipped_linears": True,
    **{"attention_chunk_size": 12, "attention_context_left": 13, "attention_context_right": 0},
    **{"attention_logit_cap": 50.0, "attention_invalid_logits_value": -1e9, "gradient_clipping": 1e10},
}


def audio_tensors(config: Config, outputs: int) -> Iterator[TensorSpec]:
    """Yield the tensors of the tower for sound, and of the projection to ``outputs`` features."""
    tower, hidden, features = "model.audio_tower", config["hidden_size"], config["output_proj_dims"]
    convolutions = f"{tower}.subsample_conv_projection"
    first, second = config["subsampling_conv_channels"]
    for i, (inputs, channels) in enumerate(((1, first), (first, second))):
        yield TensorSpec(f"{convolutions}.layer{i}.conv.weight", (channels, inputs, 3, 3))
        yield norm_scale(f"{convolutions}.layer{i}.norm.weight", channels)
    # Both convolutions halve the number of frequencies, which is that of the first channels.
    yield TensorSpec(f"{convolutions}.input_proj_linear.weight", (hidden, first // 4 * second))
    for i in range(config["num_hidden_layers"]):
        yield from _audio_layer(config, f"{tower}.layers.{i}")
    yield from dense(f"{tower}.output_proj", hidden, features)
    yield TensorSpec("model.embed_audio.embedding_projection.weight", (outputs, features))


def _audio_layer(config: Config, at: str) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    for part in ("feed_forward1", "feed_forward2"):
        yield from _clipped(config, f"{at}.{part}.ffw_layer_1", hidden, 4 * hidden)
        yield from _clipped(config, f"{at}.{part}.ffw_layer_2", 4 * hidden, hidden)
        yield norm_scale(f"{at}.{part}.pre_layer_norm.weight", hidden)
        yield norm_scale(f"{at}.{part}.post_layer_norm.weight", hidden)
    for name in ("q_proj", "k_proj", "v_proj", "post"):
        yield from _clipped(config, f"{at}.self_attn.{name}", hidden, hidden)
    yield TensorSpec(f"{at}.self_attn.relative_k_proj.weight", (hidden, hidden))
    yield TensorSpec(f"{at}.self_attn.per_dim_scale", (hidden // config["num_attention_heads"],))
    yield from _clipped(config, f"{at}.lconv1d.linear_start", hidden, 2 * hidden)
    yield from _clipped(config, f"{at}.lconv1d.linear_end", hidden, hidden)
    yield TensorSpec(f"{at}.lconv1d.depthwise_conv1d.weight", (hidden, 1, config["conv_kernel_size"]))
    for name in ("lconv1d.pre_layer_norm", "lconv1d.conv_norm", "norm_pre_attn", "norm_post_attn", "norm_out"):
        yield norm_scale(f"{at}.{name}.weight", hidden)


def exported_audio(tower: Any) -> dict[str, Any]:
    """Return the ``audio_config`` of KerasHub's tower, of which all linear layers clip."""
    return {
        "model_type": AUDIO_TYPE,
        "hidden_size": tower.hidden_size,
        "num_hidden_layers": tower.num_layers,
        "num_attention_heads": tower.num_heads,
        "hidden_act": "silu",
        "subsampling_conv_channels": list(tower.sscp_conv_channels),
        "conv_kernel_size": tower.conv_kernel_size,
        "residual_weight": tower.residual_weight,
        "attention_chunk_size": tower.chunk_size,
        "attention_context_left": tower.context_left,
        "attention_context_right": tower.context_right,
        "attention_logit_cap": tower.logit_cap,
        "attention_invalid_logits_value": tower.invalid_logit_value,
        "use_clipped_linears": True,
        "rms_norm_eps": tower.norm_eps,
        "gradient_clipping": tower.gradient_clipping,
        "output_proj_dims": tower.output_proj_dims,
    }
