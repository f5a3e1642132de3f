"""T5Gemma: encoders and decoders made of Gemma 2's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.errors import UnsupportedError
from shardload.families.parts.checks import WINDOW, FieldDifference
from shardload.families.parts.config import Config, Dims, published_decoder
from shardload.families.parts.conversion import Export, LayerSettings
from shardload.families.parts.rope import FULL, SLIDING
from shardload.families.parts.tensors import DECODER_FIELDS, TensorSpec, gated_mlp
from shardload.families.record import NO_GGUF, Family, ModelType


def _windows_of_t5gemma(config: Config) -> Iterator[FieldDifference]:
    """Yield, to refuse the model, windows that KerasHub ignores (encoder) or makes one token longer (decoder)."""
    for part, has in (("encoder", "no window"), ("decoder", "one token more")):
        found = config.get(part)
        nested = found if isinstance(found, Mapping) else {}
        types = nested.get("layer_types")
        window, longest = nested.get("sliding_window", 4096), nested.get("max_position_embeddings") or float("inf")
        if window and window < longest and (types is None or SLIDING in types):
            yield FieldDifference("sliding_window", f"{window} (in the {part})", has, WINDOW)


# ---- tensors ------------------------------------------------------------------------------------


def _tensors(config: Config) -> Iterator[TensorSpec]:
    encoder, decoder = config["encoder"], config["decoder"]
    for name, part in (("encoder", encoder), ("decoder", decoder)):
        at, hidden = f"model.{name}", part["hidden_size"]
        yield TensorSpec(f"{at}.embed_tokens.weight", (part["vocab_size"], hidden))
        for i in range(part["num_hidden_layers"]):
            yield from layer_tensors(
                part, f"{at}.layers.{i}", seen=encoder["hidden_size"] if name == "decoder" else None
            )
        yield TensorSpec(f"{at}.norm.weight", (hidden,))


def layer_tensors(part: Config, at: str, *, seen: int | None = None) -> Iterator[TensorSpec]:
    """Yield the tensors of a layer; ``seen`` is the hidden size of the encoder that a decoder's layer attends to."""
    hidden = part["hidden_size"]
    steps = {"self_attn": hidden} if seen is None else {"self_attn": hidden, "cross_attn": seen}
    for step, inputs in steps.items():
        yield from _attention(part, f"{at}.{step}", inputs=inputs)
    yield from gated_mlp(part, f"{at}.mlp")
    for step in (*steps, "feedforward"):
        yield TensorSpec(f"{at}.pre_{step}_layernorm.weight", (hidden,))
        yield TensorSpec(f"{at}.post_{step}_layernorm.weight", (hidden,))


def _attention(part: Config, at: str, *, inputs: int) -> Iterator[TensorSpec]:
    hidden, head = part["hidden_size"], part["head_dim"]
    queries, keys = part["num_attention_heads"] * head, part["num_key_value_heads"] * head
    yield TensorSpec(f"{at}.q_proj.weight", (queries, hidden))
    yield TensorSpec(f"{at}.k_proj.weight", (keys, inputs))
    yield TensorSpec(f"{at}.v_proj.weight", (keys, inputs))
    yield TensorSpec(f"{at}.o_proj.weight", (hidden, queries))


# ---- the configuration of a backbone ------------------------------------------------------------


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    if SLIDING in (*backbone.encoder_layer_types, *backbone.decoder_layer_types):
        raise UnsupportedError(
            "Cannot write T5Gemma with sliding attention for Hugging Face: KerasHub's encoder has no window, and its "
            "decoder's has one token more. Choose the format preset"
        )
    return {
        "model_type": "t5gemma",
        "architectures": ["T5GemmaForConditionalGeneration"],
        "encoder": exported_part(backbone, "encoder"),
        "decoder": exported_part(backbone, "decoder")
        | {"cross_attention_hidden_size": backbone.encoder_hidden_dim, "is_decoder": True},
        "vocab_size": backbone.vocabulary_size,
        "dropout_rate": backbone.dropout_rate,
        "is_encoder_decoder": True,
        "tie_word_embeddings": backbone.tie_word_embeddings,
    }


def exported_part(backbone: Any, part: str) -> dict[str, Any]:
    """Return the configuration of a backbone's ``encoder`` or ``decoder`` (``part``), as T5Gemma has it."""

    def of_part(name: str) -> Any:
        return getattr(backbone, f"{part}_{name}")

    return {
        "model_type": "t5_gemma_module",
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": of_part("hidden_dim"),
        "intermediate_size": of_part("intermediate_dim"),
        "num_hidden_layers": of_part("num_layers"),
        "num_attention_heads": of_part("num_attention_heads"),
        "num_key_value_heads": of_part("num_key_value_heads"),
        "head_dim": of_part("head_dim"),
        "layer_types": list(of_part("layer_types")),
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": backbone.rms_norm_eps,
        "query_pre_attn_scalar": backbone.query_pre_attn_scalar,
        "attention_bias": backbone.attention_bias,
        "attention_dropout": backbone.attention_dropout,
        "dropout_rate": backbone.dropout_rate,
        "initializer_range": backbone.initializer_range,
        "sliding_window": backbone.sliding_window,
        "attn_logit_softcapping": backbone.attn_logit_softcapping,
        "final_logit_softcapping": backbone.final_logit_softcapping,
        "rope_theta": backbone.rope_max_wavelength,
    }


# ---- published models ---------------------------------------------------------------------------


def _published(dims: Dims) -> dict[str, Any]:
    part = published_decoder("t5_gemma_module", "", dims, vocab=256000, head_dim=64, query_pre_attn_scalar=64)
    part |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "sliding_window": 4096}
    part |= {"attention_bias": False, "attention_dropout": 0.0, "dropout_rate": 0.0, "initializer_range": 0.02}
    # Published models read up to 8192 tokens; KerasHub's class has other windows, which change nothing up to 4096.
    part |= {"layer_types": [SLIDING, FULL] * (dims.layers // 2), "max_position_embeddings": 4096}
    part |= {"rope_theta": 10000.0, "hidden_activation": "gelu_pytorch_tanh"}
    del part["architectures"]
    return {
        "model_type": "t5gemma",
        "architectures": ["T5GemmaForConditionalGeneration"],
        "encoder": part,
        "decoder": {**part, "cross_attention_hidden_size": dims.hidden, "is_decoder": True},
        "vocab_size": 256000,
        "dropout_rate": 0.0,
        "is_encoder_decoder": True,
        "tie_word_embeddings": True,
    }


FAMILY = Family(
    name="t5gemma",
    title="T5Gemma",
    model_types=(
        ModelType(name="t5_gemma_module", is_part=True),
        ModelType(
            name="t5gemma",
            lacks=NO_GGUF,
            differences=_windows_of_t5gemma,
            parts={"encoder": "t5_gemma_module", "decoder": "t5_gemma_module"},
            tensors=_tensors,
            tensor_fields=("vocab_size",),
            part_fields=dict.fromkeys(("encoder", "decoder"), (*DECODER_FIELDS, "head_dim")),
        ),
    ),
    sizes={
        "t5gemma_s_s": _published(Dims(512, 8, 8, 8, 1024)),
        "t5gemma_b_b": _published(Dims(768, 12, 12, 12, 2048)),
        "t5gemma_l_l": _published(Dims(1024, 24, 16, 16, 2816)),
        "t5gemma_xl_xl": _published(Dims(2048, 24, 32, 32, 5120)),
    },
    exports={"T5GemmaBackbone": Export(_export, model_types=("t5gemma",))},
)
