"""GPT-OSS. A converter here reads experts as plain tensors; KerasHub's own reads only MXFP4, a whole tensor at a time.

Shapes of the plain tensors, and of those that are dequantised::

    experts.gate_up_proj   (experts, in, 2 * out), gate and up columns alternate, as in KerasHub's class
    experts.down_proj      (experts, in, out)
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from shardload.families.parts import rope
from shardload.families.parts.checks import Checks, by_layer_type, first_slides
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import (
    Converter,
    Export,
    LayerSettings,
    byte_pair_tokenizer,
    decoder_arguments,
    exported_decoder,
    port_ends,
)
from shardload.families.parts.gguf import BLOCK, CONTRACTIONS, GgufArchitecture, PreTokenizer
from shardload.families.parts.gguf_values import GgufValues, decoder_entries
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import (
    DECODER_FIELDS,
    DECODER_HEADS,
    OPTIONAL_OUTPUT_LAYER,
    DecoderTensors,
    TensorSpec,
    affine,
)
from shardload.families.record import Family, ModelType

# GPT-4o's expression also splits before a capital: "camelCase" is two words.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_WORDS = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{upper}{_LOWER}{lower}{CONTRACTIONS}?" for upper, lower in (("*", "+"), ("+", "*"))
)
_WORDS += r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ROTARY = Rotary(1.5e5, stretched="yarn")
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def _complete(config: dict[str, Any]) -> None:
    if not (config.get("rope_parameters") or config.get("rope_scaling")):
        config["rope_scaling"] = _YARN  # transformers 4 reads null as no scaling, 5 as this


# ---- its tensors --------------------------------------------------------------------------------


def _tensors_of_block(config: Config, layer: int, at: str) -> Iterator[TensorSpec]:
    """Yield the tensors of a layer that other decoders lack: sinks, router, and experts as plain weights."""
    experts, hidden, width = (config[key] for key in ("num_local_experts", "hidden_size", "intermediate_size"))
    yield TensorSpec(f"{at}.self_attn.sinks", (config["num_attention_heads"],))
    yield from affine(f"{at}.mlp.router", (experts, hidden), out=experts)
    for name, inputs, outputs in (("gate_up_proj", hidden, 2 * width), ("down_proj", width, hidden)):
        yield TensorSpec(f"{at}.mlp.experts.{name}", (experts, inputs, outputs))
        yield TensorSpec(f"{at}.mlp.experts.{name}_bias", (experts, outputs))


def _published(layers: int, experts: int) -> dict[str, Any]:
    """Return the ``config.json`` of a published model, without its quantisation: plans are for plain weights."""
    rest: dict[str, Any] = {"head_dim": 64, "attention_bias": True, "sliding_window": 128, "rms_norm_eps": 1e-5}
    rest |= {"num_local_experts": experts, "num_experts_per_tok": 4, "swiglu_limit": 7.0}
    rest |= {"rope_theta": 1.5e5, "rope_scaling": _YARN, "max_position_embeddings": 131072}
    dims = Dims(2880, layers, 64, 8, 2880)
    return published_decoder("gpt_oss", "GptOssForCausalLM", dims, vocab=201088, tied=False, **rest)


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    factor = backbone.rope_scaling_factor
    return {
        **exported_decoder(backbone, "gpt_oss", "GptOssForCausalLM"),
        "intermediate_size": backbone.intermediate_dim,
        "head_dim": backbone.head_dim,
        "hidden_act": "silu",
        "attention_bias": True,
        "num_local_experts": backbone.num_experts,
        "num_experts_per_tok": backbone.top_k,
        "sliding_window": backbone.sliding_window,
        "swiglu_limit": 7.0,
        "rope_theta": backbone.rope_max_wavelength,
        # Without an entry, transformers 5 takes the scaling of the published models.
        "rope_scaling": {"rope_type": "default"} if factor == 1.0 else {**_YARN, "factor": factor},
        "tie_word_embeddings": False,
    }


_GGUF_BLOCK = {name: BLOCK[name] for name in ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output")} | {
    "attn_sinks": "self_attn.sinks",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}


def _gguf(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "gpt_oss", "GptOssForCausalLM")
    # YaRN's defaults, which files may omit, and `truncate` as in the configuration that OpenAI released.
    turns = {"beta_fast": 32.0, "beta_slow": 1.0} | (base["rope_scaling"] or {}) | {"truncate": False}
    return base | {
        "num_local_experts": values.count("expert_count"),
        "num_experts_per_tok": values.count("expert_used_count"),
        "sliding_window": values.count("attention.sliding_window"),
        "rope_scaling": turns if base["rope_scaling"] else {"rope_type": "default"},
    }


# ---- the converter, for KerasHub ----------------------------------------------------------------


def _arguments(config: Config) -> dict[str, Any]:
    rotation = rope.rotation(config, rope.FULL, _ROTARY, head_dim=None)
    return {
        **decoder_arguments(config),
        "head_dim": config["head_dim"],
        "num_experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "sliding_window": config["sliding_window"],
        "rope_max_wavelength": rotation.theta,
        "rope_scaling_factor": rotation.parameters.get("factor", 1.0),
    }


def _port_weights(backbone: Any, loader: Any, config: Config) -> None:
    port_ends(backbone, loader)
    for i, block in enumerate(backbone.transformer_layers):
        at = f"model.layers.{i}"
        loader.port_weight(block.input_layernorm.scale, f"{at}.input_layernorm.weight")
        loader.port_weight(block.post_attention_layernorm.scale, f"{at}.post_attention_layernorm.weight")
        _port_attention(block.self_attention_layer, loader, f"{at}.self_attn")
        _port_experts(block.sparse_moe_block, loader, f"{at}.mlp")


def _port_attention(attention: Any, loader: Any, at: str) -> None:
    for letter, name in (("q", "query"), ("k", "key"), ("v", "value"), ("o", "output")):
        layer = getattr(attention, f"{name}_dense")
        loader.port_weight(layer.kernel, f"{at}.{letter}_proj.weight", lambda value, shape: value.T.reshape(shape))
        loader.port_weight(layer.bias, f"{at}.{letter}_proj.bias", lambda value, shape: value.reshape(shape))
    loader.port_weight(attention.sinks, f"{at}.sinks")


def _port_experts(mixture: Any, loader: Any, at: str) -> None:
    router = mixture.router.router_dense
    loader.port_weight(router.kernel, f"{at}.router.weight", lambda value, _: value.T)
    loader.port_weight(router.bias, f"{at}.router.bias")
    # Stored in the very layout of KerasHub's class, so no hook is needed.
    for name in ("gate_up_proj", "gate_up_proj_bias", "down_proj", "down_proj_bias"):
        loader.port_weight(getattr(mixture.experts, name), f"{at}.experts.{name}")


GPT_OSS = ModelType(
    name="gpt_oss",
    defaults=ROTARY
    | decoder_defaults(201088, 2880, 2880, 36, 64, kv=8, longest=131072)
    | {"rope_theta": 1.5e5, "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128}
    | {"num_local_experts": 128, "num_experts_per_tok": 4, "attention_bias": True},
    complete=_complete,
    checks=Checks(("rms_norm_eps", 1e-5), None, _ROTARY, by_layer_type(first_slides), sets_windows=True),
    only={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    heads=DECODER_HEADS,
    optional_part=OPTIONAL_OUTPUT_LAYER,
    converter=Converter(
        *("GptOssBackbone", _arguments, _port_weights, functools.partial(byte_pair_tokenizer, with_added=True)),
    ),
    tensors=DecoderTensors(feed_forward=_tensors_of_block),
    tensor_fields=(*DECODER_FIELDS, "num_local_experts"),
    unstated_dtype="bfloat16",
)
FAMILY = Family(
    name="gpt_oss",
    title="GPT-OSS",
    windows_without_self=("GptOssAttention", "GptOssTransformerDecoder"),
    dense_experts=("GptOssExperts",),
    model_types=(GPT_OSS,),
    exports={"GptOssBackbone": Export(_export, "gpt-4o", ("gpt_oss",))},
    sizes={"gpt_oss_20b": _published(24, 32), "gpt_oss_120b": _published(36, 128)},
    gguf=(
        GgufArchitecture(
            name="gpt-oss",
            model_types=("gpt_oss",),
            config=_gguf,
            block_names=_GGUF_BLOCK,
            bare=frozenset({"self_attn.sinks"}),
            fused_experts={"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)},
        ),
    ),
    pre_tokenizers={"gpt-4o": PreTokenizer(_WORDS)},
)
