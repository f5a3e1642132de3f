"""BLIP-2: a vision tower, a transformer of queries (Q-Former), and OPT or T5."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import TANH, Checks
from shardload.families.parts.config import SIZES, Config
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.images import TOWER_FIELDS, patch_embedding
from shardload.families.parts.tensors import TensorSpec, dense, norm
from shardload.families.record import NO_GGUF, Family, ModelType

_OPT_OFFSET = 2
"""OPT's positions begin at 2: the first two rows of their embedding were those of padding."""
_T5_BUCKETS = 32


# ---- tensors ------------------------------------------------------------------------------------


def _tensors(config: Config) -> Iterator[TensorSpec]:
    vision, queries, text = (config[f"{part}_config"] for part in ("vision", "qformer", "text"))
    language = {"opt": _opt_tensors, "t5": _t5_tensors}.get(text["model_type"])
    if language is None:
        raise UnsupportedError(f"its text_config has model_type {text['model_type']!r:.60}, expected 'opt' or 't5'")
    yield TensorSpec("query_tokens", (1, config["num_query_tokens"], queries["hidden_size"]))
    yield from _vision_tensors(vision, "vision_model")
    yield from _query_tensors(queries, "qformer", images=vision["hidden_size"])
    yield from dense("language_projection", queries["hidden_size"], text[_WIDTH[text["model_type"]]])
    yield from language(text, "language_model")


def _vision_tensors(vision: Config, at: str) -> Iterator[TensorSpec]:
    hidden, width = vision["hidden_size"], vision["intermediate_size"]
    positions = (vision["image_size"] // vision["patch_size"]) ** 2 + 1
    yield TensorSpec(f"{at}.embeddings.class_embedding", (1, 1, hidden))
    yield TensorSpec(f"{at}.embeddings.position_embedding", (1, positions, hidden))
    yield from patch_embedding(vision, f"{at}.embeddings.patch_embedding")
    for i in range(vision["num_hidden_layers"]):
        layer = f"{at}.encoder.layers.{i}"
        yield from norm(f"{layer}.layer_norm1", hidden)
        yield from dense(f"{layer}.self_attn.qkv", hidden, 3 * hidden)
        yield from dense(f"{layer}.self_attn.projection", hidden, hidden)
        yield from norm(f"{layer}.layer_norm2", hidden)
        yield from dense(f"{layer}.mlp.fc1", hidden, width)
        yield from dense(f"{layer}.mlp.fc2", width, hidden)
    yield from norm(f"{at}.post_layernorm", hidden)


def _query_tensors(queries: Config, at: str, *, images: int) -> Iterator[TensorSpec]:
    hidden, width = queries["hidden_size"], queries["intermediate_size"]
    yield from norm(f"{at}.layernorm", hidden)
    for i in range(queries["num_hidden_layers"]):
        layer = f"{at}.encoder.layer.{i}"
        seen = {"attention": hidden}
        if i % queries["cross_attention_frequency"] == 0:
            seen["crossattention"] = images
        for name, inputs in seen.items():
            yield from dense(f"{layer}.{name}.attention.query", hidden, hidden)
            yield from dense(f"{layer}.{name}.attention.key", inputs, hidden)
            yield from dense(f"{layer}.{name}.attention.value", inputs, hidden)
            yield from dense(f"{layer}.{name}.output.dense", hidden, hidden)
            yield from norm(f"{layer}.{name}.output.LayerNorm", hidden)
        yield from dense(f"{layer}.intermediate_query.dense", hidden, width)
        yield from dense(f"{layer}.output_query.dense", width, hidden)
        yield from norm(f"{layer}.output_query.LayerNorm", hidden)


def _opt_tensors(text: Config, at: str) -> Iterator[TensorSpec]:
    hidden, width, at = text["hidden_size"], text["ffn_dim"], f"{at}.model.decoder"
    yield TensorSpec(f"{at}.embed_tokens.weight", (text["vocab_size"], hidden))
    yield TensorSpec(f"{at}.embed_positions.weight", (text["max_position_embeddings"] + _OPT_OFFSET, hidden))
    for i in range(text["num_hidden_layers"]):
        layer = f"{at}.layers.{i}"
        for part in ("q", "k", "v", "out"):
            yield from dense(f"{layer}.self_attn.{part}_proj", hidden, hidden)
        yield from norm(f"{layer}.self_attn_layer_norm", hidden)
        yield from dense(f"{layer}.fc1", hidden, width)
        yield from dense(f"{layer}.fc2", width, hidden)
        yield from norm(f"{layer}.final_layer_norm", hidden)
    yield from norm(f"{at}.final_layer_norm", hidden)


def _t5_tensors(text: Config, at: str) -> Iterator[TensorSpec]:
    hidden, vocab = text["d_model"], text["vocab_size"]
    yield TensorSpec(f"{at}.shared.weight", (vocab, hidden))
    for stack, attentions in (("encoder", ("Self",)), ("decoder", ("Self", "EncDec"))):
        for i in range(text["num_layers"]):
            block = f"{at}.{stack}.block.{i}.layer"
            for n, kind in enumerate(attentions):
                yield from _t5_attention(text, f"{block}.{n}.{kind}Attention", has_positions=i == n == 0)
                yield TensorSpec(f"{block}.{n}.layer_norm.weight", (hidden,), near_one=True)
            last = f"{block}.{len(attentions)}"
            yield TensorSpec(f"{last}.DenseReluDense.wi_0.weight", (text["d_ff"], hidden))
            yield TensorSpec(f"{last}.DenseReluDense.wi_1.weight", (text["d_ff"], hidden))
            yield TensorSpec(f"{last}.DenseReluDense.wo.weight", (hidden, text["d_ff"]))
            yield TensorSpec(f"{last}.layer_norm.weight", (hidden,), near_one=True)
        yield TensorSpec(f"{at}.{stack}.final_layer_norm.weight", (hidden,), near_one=True)
    yield TensorSpec(f"{at}.lm_head.weight", (vocab, hidden))


def _t5_attention(text: Config, at: str, *, has_positions: bool) -> Iterator[TensorSpec]:
    hidden, inner = text["d_model"], text["num_heads"] * text["d_kv"]
    for part in "qkv":
        yield TensorSpec(f"{at}.{part}.weight", (inner, hidden))
    yield TensorSpec(f"{at}.o.weight", (hidden, inner))
    if has_positions:
        yield TensorSpec(f"{at}.relative_attention_bias.weight", (_T5_BUCKETS, text["num_heads"]))


def _task(config: Config) -> str:
    """Return the name of KerasHub's class for a decoder alone (OPT), or for an encoder with a decoder (T5)."""
    text = config.get("text_config")
    is_t5 = isinstance(text, Mapping) and text.get("model_type") == "t5"
    return "BLIP2Seq2SeqLM" if is_t5 else "BLIP2CausalLM"


# ---- the configuration of a backbone ------------------------------------------------------------


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    vision, queries, text = backbone.vision_encoder, backbone.qformer, backbone.language_model
    if vision is None or queries is None:
        raise UnsupportedError(
            "Cannot write BLIP-2 for Hugging Face: it has no vision_encoder and no qformer, expected both"
        )
    is_t5 = hasattr(text, "t5")
    return {
        "model_type": "blip-2",
        "architectures": ["Blip2ForConditionalGeneration"],
        "num_query_tokens": queries.num_query_tokens,
        "vision_config": _layers_of(vision, "blip_2_vision_model")
        | {
            "image_size": vision.image_size[0],  # of a square: KerasHub would read another backbone if not
            "patch_size": vision.patch_size[0],
            "qkv_bias": True,
            "initializer_range": vision.initializer_range,
        },
        "qformer_config": _layers_of(queries, "blip_2_qformer")
        | {
            "encoder_hidden_size": queries.vision_dim,
            "cross_attention_frequency": queries.cross_attention_frequency,
            "hidden_dropout_prob": queries.dropout,
        },
        "text_config": _t5_of(text) if is_t5 else _opt_of(text),
        "tie_word_embeddings": not is_t5,
    }


def _layers_of(encoder: Any, model_type: str) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "hidden_size": encoder.hidden_dim,
        "intermediate_size": encoder.intermediate_dim,
        "num_hidden_layers": encoder.num_layers,
        "num_attention_heads": encoder.num_heads,
        "hidden_act": "gelu",
        "layer_norm_eps": encoder.layer_norm_epsilon,
    }


def _opt_of(text: Any) -> dict[str, Any]:
    return {
        "model_type": "opt",
        "vocab_size": text.vocabulary_size,
        "hidden_size": text.hidden_dim,
        "word_embed_proj_dim": text.hidden_dim,
        "ffn_dim": text.intermediate_dim,
        "num_hidden_layers": text.num_layers,
        "num_attention_heads": text.num_heads,
        "max_position_embeddings": text.max_sequence_length,
        "activation_function": "relu",
        "do_layer_norm_before": True,
        "dropout": text.dropout,
        "tie_word_embeddings": True,
    }


def _t5_of(text: Any) -> dict[str, Any]:
    return {
        "model_type": "t5",
        "vocab_size": text.vocabulary_size,
        "d_model": text.hidden_dim,
        "d_ff": text.intermediate_dim,
        "d_kv": text.key_value_dim,
        "num_layers": text.num_layers,
        "num_decoder_layers": text.num_layers,
        "num_heads": text.num_heads,
        "feed_forward_proj": "gated-gelu",
        "relative_attention_num_buckets": _T5_BUCKETS,
        "relative_attention_max_distance": 128,
        "layer_norm_epsilon": text.layer_norm_epsilon,
        "dropout_rate": text.dropout,
        "is_encoder_decoder": True,
        "tie_word_embeddings": False,  # with true, transformers would scale the output
    }


# ---- published models ---------------------------------------------------------------------------


def _published(text: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": "blip-2",
        "architectures": ["Blip2ForConditionalGeneration"],
        "num_query_tokens": 32,
        "vision_config": {"model_type": "blip_2_vision_model", **_VISION_DEFAULTS},
        "qformer_config": {"model_type": "blip_2_qformer", **_QUERY_DEFAULTS},
        "text_config": text,
        "tie_word_embeddings": text["model_type"] == "opt",
    }


def _published_opt(hidden: int, width: int) -> dict[str, Any]:
    sizes = {"vocab_size": 50304, "hidden_size": hidden, "num_hidden_layers": 32, "num_attention_heads": 32}
    return _published({"model_type": "opt", **sizes, "ffn_dim": width, "max_position_embeddings": 2048})


def _published_t5(hidden: int, heads: int, width: int) -> dict[str, Any]:
    sizes = {"vocab_size": 32128, "d_model": hidden, "num_layers": 24, "num_heads": heads, "d_ff": width, "d_kv": 64}
    rest = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}
    return _published({"model_type": "t5", **sizes, **rest})


_WIDTH = {"opt": "hidden_size", "t5": "d_model"}
_ENCODER = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_VISION_DEFAULTS = dict(zip(_ENCODER, (1408, 6144, 39, 16), strict=True)) | {"image_size": 224, "patch_size": 14}
_QUERY_DEFAULTS = dict(zip(_ENCODER, (768, 3072, 12, 12), strict=True)) | {"cross_attention_frequency": 2}
_QUERY_DEFAULTS |= {"encoder_hidden_size": 1408}
PARTS = (
    ModelType(name="blip_2_vision_model", is_part=True, defaults=_VISION_DEFAULTS),
    ModelType(name="blip_2_qformer", is_part=True, defaults=_QUERY_DEFAULTS),
    ModelType(
        name="opt",
        is_part=True,
        defaults={"max_position_embeddings": 2048},
        tensor_fields=(*(name for name in SIZES if name != "intermediate_size"), "ffn_dim", "max_position_embeddings"),
    ),
    ModelType(
        name="t5", is_part=True, tensor_fields=("vocab_size", "d_model", "d_ff", "d_kv", "num_layers", "num_heads")
    ),
)
BLIP_2 = ModelType(
    name="blip-2",
    lacks=NO_GGUF,
    parts={"vision_config": "blip_2_vision_model", "qformer_config": "blip_2_qformer", "text_config": "opt"},
    task=_task,
    # T5's, as KerasHub's class computes GELU without approximation.
    checks=Checks(
        activation=("feed_forward_proj", "gated-gelu"),
        activation_names={"gated-gelu": TANH},
        activation_layer="input_projector",
    ),
    tensors=_tensors,
    tensor_fields=("num_query_tokens",),
    part_fields={
        "vision_config": TOWER_FIELDS,
        "qformer_config": (*_ENCODER, "cross_attention_frequency"),
        "text_config": (),
    },
)
FAMILY = Family(
    name="blip2",
    title="BLIP-2",
    model_types=(*PARTS, BLIP_2),
    sizes={
        "blip2_opt_2.7b": _published_opt(2560, 10240),
        "blip2_opt_6.7b": _published_opt(4096, 16384),
        "blip2_flan_t5_xl": _published_t5(2048, 32, 5120),
        "blip2_flan_t5_xxl": _published_t5(4096, 64, 10240),
    },
    exports={"BLIP2Backbone": Export(_export, model_types=("blip-2",))},
)
