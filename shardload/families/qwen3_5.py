"""Qwen 3.5, and its mixtures of experts: text with images, three of four layers with linear attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.config import Config, Dims, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings, exported_decoder
from shardload.families.parts.rope import FULL
from shardload.families.parts.tensors import DECODER_FIELDS, TensorSpec, dense, gated_mlp, has_output_layer, norm
from shardload.families.qwen import experts_with_shared, matrices_of_experts
from shardload.families.record import Family, ModelType, Part

_GGUF_REFUSED = "it stores -exp(A_log), from which A_log cannot be recovered bit for bit"
_TEXT, _VISION, _LINEAR = "model.language_model", "model.visual", "linear_attention"
_LINEAR_FIELDS = (
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
)
_VISION_FIELDS = (
    *("depth", "hidden_size", "num_heads", "intermediate_size", "in_channels", "patch_size"),
    *("temporal_patch_size", "spatial_merge_size", "num_position_embeddings"),
)
_FeedForward = Callable[[Config, int, str], Iterator[TensorSpec]]


# ---- tensors ------------------------------------------------------------------------------------


def _tensors(config: Config, feed_forward: _FeedForward) -> Iterator[TensorSpec]:
    text, vision = config["text_config"], config.get("vision_config")
    vocab, hidden, layers = text["vocab_size"], text["hidden_size"], text["num_hidden_layers"]
    yield TensorSpec(f"{_TEXT}.embed_tokens.weight", (vocab, hidden))
    for i, kind in enumerate(_layer_types(text, layers)):
        at = f"{_TEXT}.layers.{i}"
        yield from _attention(text, f"{at}.self_attn") if kind == FULL else _linear(text, f"{at}.linear_attn")
        yield from feed_forward(text, i, at)
        yield TensorSpec(f"{at}.input_layernorm.weight", (hidden,))
        yield TensorSpec(f"{at}.post_attention_layernorm.weight", (hidden,))
    yield TensorSpec(f"{_TEXT}.norm.weight", (hidden,))
    if vision:
        yield from _vision_tensors(vision, hidden)
    if has_output_layer(config):
        yield TensorSpec("lm_head.weight", (vocab, hidden))


def _layer_types(text: Config, layers: int) -> list[str]:
    """Return the kind of attention of each layer; without ``layer_types``, every fourth attends to all tokens."""
    types = text.get("layer_types")
    if isinstance(types, list) and len(types) == layers:
        return types
    return [_LINEAR if (i + 1) % 4 else FULL for i in range(layers)]


def _attention(text: Config, at: str) -> Iterator[TensorSpec]:
    hidden, heads, head_dim = text["hidden_size"], text["num_attention_heads"], text["head_dim"]
    keys = text["num_key_value_heads"] * head_dim
    yield TensorSpec(f"{at}.q_proj.weight", (2 * heads * head_dim, hidden))  # with a gate for each feature of a head
    yield TensorSpec(f"{at}.k_proj.weight", (keys, hidden))
    yield TensorSpec(f"{at}.v_proj.weight", (keys, hidden))
    yield TensorSpec(f"{at}.o_proj.weight", (hidden, heads * head_dim))
    yield TensorSpec(f"{at}.q_norm.weight", (head_dim,))
    yield TensorSpec(f"{at}.k_norm.weight", (head_dim,))


def _linear(text: Config, at: str) -> Iterator[TensorSpec]:
    hidden, heads = text["hidden_size"], text["linear_num_value_heads"]
    keys, values = text["linear_num_key_heads"] * text["linear_key_head_dim"], heads * text["linear_value_head_dim"]
    yield TensorSpec(f"{at}.in_proj_qkv.weight", (2 * keys + values, hidden))
    yield TensorSpec(f"{at}.in_proj_z.weight", (values, hidden))
    yield TensorSpec(f"{at}.in_proj_b.weight", (heads, hidden))
    yield TensorSpec(f"{at}.in_proj_a.weight", (heads, hidden))
    yield TensorSpec(f"{at}.conv1d.weight", (2 * keys + values, 1, text["linear_conv_kernel_dim"]))
    yield TensorSpec(f"{at}.dt_bias", (heads,))
    yield TensorSpec(f"{at}.A_log", (heads,))
    yield TensorSpec(f"{at}.norm.weight", (text["linear_value_head_dim"],), near_one=True)
    yield TensorSpec(f"{at}.out_proj.weight", (hidden, values))


def _vision_tensors(vision: Config, outputs: int) -> Iterator[TensorSpec]:
    hidden, width, patch = vision["hidden_size"], vision["intermediate_size"], vision["patch_size"]
    cube = (vision["in_channels"], vision["temporal_patch_size"], patch, patch)
    yield TensorSpec(f"{_VISION}.patch_embed.proj.weight", (hidden, *cube))
    yield TensorSpec(f"{_VISION}.patch_embed.proj.bias", (hidden,))
    yield TensorSpec(f"{_VISION}.pos_embed.weight", (vision["num_position_embeddings"], hidden))
    for i in range(vision["depth"]):
        at = f"{_VISION}.blocks.{i}"
        yield from norm(f"{at}.norm1", hidden)
        yield from norm(f"{at}.norm2", hidden)
        yield from dense(f"{at}.attn.qkv", hidden, 3 * hidden)
        yield from dense(f"{at}.attn.proj", hidden, hidden)
        yield from dense(f"{at}.mlp.linear_fc1", hidden, width)
        yield from dense(f"{at}.mlp.linear_fc2", width, hidden)
    merged = hidden * vision["spatial_merge_size"] ** 2
    yield from norm(f"{_VISION}.merger.norm", hidden)
    yield from dense(f"{_VISION}.merger.linear_fc1", merged, merged)
    yield from dense(f"{_VISION}.merger.linear_fc2", merged, outputs)


# ---- the configuration of a backbone ------------------------------------------------------------


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return _exported(backbone, "qwen3_5", "Qwen3_5") | {
        "text_config": _text_of(backbone, "qwen3_5_text") | {"intermediate_size": backbone.intermediate_dim}
    }


def _export_moe(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    experts = {
        "moe_intermediate_size": backbone.moe_intermediate_dim,
        "shared_expert_intermediate_size": backbone.shared_expert_intermediate_size,
        "num_experts": backbone.num_experts,
        "num_experts_per_tok": backbone.top_k,
        "router_aux_loss_coef": backbone.router_aux_loss_coefficient,
    }
    return _exported(backbone, "qwen3_5_moe", "Qwen3_5Moe") | {
        "text_config": _text_of(backbone, "qwen3_5_moe_text") | experts
    }


def _exported(backbone: Any, model_type: str, stem: str) -> dict[str, Any]:
    """Return the entries of a ``config.json`` but ``text_config``."""
    tower = backbone.vision_encoder
    if tower is None or backbone.mrope_section is None:
        lacks = "vision_encoder" if tower is None else "mrope_section"
        raise UnsupportedError(
            f"Cannot write {type(backbone).__name__} for Hugging Face: it has {lacks}=None, expected a model that "
            "reads images, as each one is there"
        )
    return {
        "model_type": model_type,
        "architectures": [f"{stem}ForConditionalGeneration"],
        "vision_config": {
            "model_type": f"{model_type}_vision",
            "hidden_act": "gelu_pytorch_tanh",
            **{name: getattr(tower, name) for name in (*_VISION_FIELDS, "out_hidden_size")},
        },
        "tie_word_embeddings": backbone.tie_word_embeddings,
    }


def _text_of(backbone: Any, model_type: str) -> dict[str, Any]:
    decoder = exported_decoder(backbone, model_type, "")
    del decoder["architectures"]
    return decoder | {
        "head_dim": backbone.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": list(backbone.layer_types),
        **{name: getattr(backbone, name) for name in _LINEAR_FIELDS},
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": backbone.rope_max_wavelength,
            "partial_rotary_factor": backbone.partial_rotary_factor,
            "mrope_section": list(backbone.mrope_section),
            "mrope_interleaved": True,
        },
        "tie_word_embeddings": backbone.tie_word_embeddings,
    }


# ---- published models ---------------------------------------------------------------------------


def _published(
    dims: Dims, *, value_heads: int, tower: tuple[int, int, int, int], tied: bool, kind: str = "qwen3_5", **more: Any
) -> dict[str, Any]:
    """Return the ``config.json`` of a published model; ``tower``: depth, width, heads and MLP's width of its vision."""
    linear: dict[str, Any] = dict(zip(_LINEAR_FIELDS, (16, value_heads, 128, 128, 4), strict=True))
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    rope |= {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    text = published_decoder(f"{kind}_text", "", dims, vocab=248320, tied=tied, head_dim=256, **linear, **more)
    del text["architectures"]
    sizes = dict(zip(("depth", "hidden_size", "num_heads", "intermediate_size"), tower, strict=True))
    vision = {"in_channels": 3, "patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
    stem = {"qwen3_5": "Qwen3_5", "qwen3_5_moe": "Qwen3_5Moe"}[kind]
    return {
        "model_type": kind,
        "architectures": [f"{stem}ForConditionalGeneration"],
        "text_config": text | {"hidden_act": "silu", "rope_parameters": rope},
        "vision_config": sizes | vision | {"out_hidden_size": dims.hidden, "num_position_embeddings": 2304},
        "tie_word_embeddings": tied,
    }


_TOWER = (24, 1024, 16, 4096)
_LARGE_TOWER = (27, 1152, 16, 4304)
_MIXTURE = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
_MIXTURE |= {"shared_expert_intermediate_size": 512}
QWEN_3_5 = ModelType(
    name="qwen3_5",
    lacks={Part.GGUF: _GGUF_REFUSED},
    only={"hidden_act": ("silu", "swish", None)},
    outside={r"mtp\..+": "layers that predict several tokens ahead, which transformers leaves out too"},
    parts={"text_config": "qwen3_5_text", "vision_config": "qwen3_5_vision"},
    optional_parts=frozenset({"vision_config"}),
    tensors=partial(_tensors, feed_forward=lambda text, i, at: gated_mlp(text, f"{at}.mlp")),
    part_fields={
        "text_config": (*DECODER_FIELDS, "head_dim", *_LINEAR_FIELDS),
        "vision_config": _VISION_FIELDS,
    },
    norms_minus_one=True,
)


def _experts(text: Config, layer: int, at: str) -> Iterator[TensorSpec]:
    return experts_with_shared({**text, "decoder_sparse_step": 1}, layer, at)


_EXPERT_FIELDS = ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
_MOE_FIELDS = tuple(name for name in (*DECODER_FIELDS, "head_dim") if name != "intermediate_size")
QWEN_3_5_MOE = replace(
    QWEN_3_5,
    name="qwen3_5_moe",
    parts={"text_config": "qwen3_5_moe_text", "vision_config": "qwen3_5_moe_vision"},
    tensors=partial(_tensors, feed_forward=_experts),
    part_fields={"text_config": (*_MOE_FIELDS, *_EXPERT_FIELDS, *_LINEAR_FIELDS), "vision_config": _VISION_FIELDS},
)
FAMILY = Family(
    name="qwen3_5",
    title="Qwen 3.5",
    model_types=(QWEN_3_5, QWEN_3_5_MOE),
    sizes={
        "qwen3_5_0.8b": _published(Dims(1024, 24, 8, 2, 3584), value_heads=16, tower=(12, 768, 12, 3072), tied=True),
        "qwen3_5_2b": _published(Dims(2048, 24, 8, 2, 6144), value_heads=16, tower=_TOWER, tied=True),
        "qwen3_5_4b": _published(Dims(2560, 32, 16, 4, 9216), value_heads=32, tower=_TOWER, tied=True),
        "qwen3_5_9b": _published(Dims(4096, 32, 16, 4, 12288), value_heads=32, tower=_LARGE_TOWER, tied=False),
        "qwen3_5_27b": _published(Dims(5120, 64, 24, 4, 17408), value_heads=48, tower=_LARGE_TOWER, tied=False),
        "qwen3_5_moe_35b_a3b": _published(
            Dims(2048, 40, 16, 2, 512), value_heads=32, tower=_LARGE_TOWER, tied=False, kind="qwen3_5_moe", **_MIXTURE
        ),
    },
    dense_experts=("Qwen3_5MoeExperts",),
    exports={
        "Qwen3_5Backbone": Export(_export, model_types=("qwen3_5",)),
        "Qwen3_5MoeBackbone": Export(
            _export_moe, model_types=("qwen3_5_moe",), parts=partial(matrices_of_experts, at=f"{_TEXT}.layers")
        ),
    },
    gguf_refused=dict.fromkeys(("qwen35", "qwen35moe"), _GGUF_REFUSED),
)
