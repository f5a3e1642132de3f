"""Phi-3 and Phi-4, whose checkpoints join query, key and value in one matrix, and gate and up in another.

qkv_proj       (heads + 2 * key-value heads) * head_dim rows
gate_up_proj   gate, then up
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardload.errors import SourceError
from shardload.families.parts import rope
from shardload.families.parts.checks import SILU, Checks, every_layer
from shardload.families.parts.config import ROTARY, Config, Dims, decoder_defaults, published_decoder
from shardload.families.parts.conversion import (
    Converter,
    Export,
    LayerSettings,
    decoder_arguments,
    exported_plain_decoder,
    port_ends,
)
from shardload.families.parts.gguf import CONTRACTIONS, WORDS, GgufArchitecture, PreTokenizer
from shardload.families.parts.gguf_values import GgufValues, decoder_entries, shortest
from shardload.families.parts.rope import Rotary
from shardload.families.parts.tensors import DECODER_FIELDS, OPTIONAL_OUTPUT_LAYER, TensorSpec, has_output_layer
from shardload.families.record import Family, ModelType

_ROTARY = Rotary(1e4, is_partial=True)
_GGUF_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}


def _gguf(values: GgufValues) -> dict[str, Any]:
    base = decoder_entries(values, "phi3", "Phi3ForCausalLM")
    original = values.number("rope.scaling.original_context_length", base["max_position_embeddings"])
    rotated = values.number("rope.dimension_count", base["head_dim"])
    found = base | {
        # 0 means Phi-4, which has none.
        "sliding_window": values.number("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": original,
        "partial_rotary_factor": rotated / base["head_dim"],
    }
    return found | ({"rope_scaling": _longrope(values)} if values.rope_factors else {})


def _longrope(values: GgufValues) -> dict[str, Any]:
    """Return the ``rope_scaling`` of a GGUF file: a list of rotary factors for short texts, and one for long texts."""
    lists = {which: values.rope_factors.get(f"rope_factors_{which}") for which in ("short", "long")}
    found = {f"{which}_factor": list(map(shortest, factors)) for which, factors in lists.items() if factors}
    if len(found) != 2:
        raise SourceError(
            f"{values.path} should contain 'rope_factors_short.weight' and 'rope_factors_long.weight', but contains "
            "only one of them. Download the file again"
        )
    return {"rope_type": "longrope"} | found


# ---- the converter, for KerasHub ----------------------------------------------------------------


def _arguments(config: Config) -> dict[str, Any]:
    scaling = rope.rotation(config, rope.FULL, _ROTARY, head_dim=None)
    found = decoder_arguments(config)
    found |= {"max_sequence_length": config["max_position_embeddings"], "rope_max_wavelength": scaling.theta}
    if scaling.kind != "longrope":
        return found
    return found | {
        "pretraining_sequence_length": scaling.parameters["original_max_position_embeddings"],
        "rope_scaling_type": "su",
        "rope_scaling_short_factor": scaling.parameters["short_factor"],
        "rope_scaling_long_factor": scaling.parameters["long_factor"],
    }


def _port_weights(backbone: Any, loader: Any, config: Config) -> None:
    port_ends(backbone, loader)
    for i, block in enumerate(backbone.transformer_layers):
        _port_block(block, loader, f"model.layers.{i}")


def _port_block(block: Any, loader: Any, at: str) -> None:
    attention = block.attention
    loader.port_weight(block.pre_attention_layernorm.scale, f"{at}.input_layernorm.weight")
    loader.port_weight(block.post_attention_layernorm.scale, f"{at}.post_attention_layernorm.weight")
    fused = (
        (f"{at}.self_attn.qkv_proj.weight", (attention.query_dense, attention.key_dense, attention.value_dense)),
        (f"{at}.mlp.gate_up_proj.weight", (block.feedforward_gate_dense, block.feedforward_intermediate_dense)),
    )
    # Each layer takes its rows of the fused matrix, which are as many as its kernel has outputs.
    for name, layers in fused:
        start = 0
        for layer in layers:
            rows = slice(start, start + math.prod(layer.kernel.shape[1:]))
            loader.port_weight(layer.kernel, name, lambda value, shape, rows=rows: value[rows].T.reshape(shape))
            start = rows.stop
    loader.port_weight(
        attention.output_dense.kernel, f"{at}.self_attn.o_proj.weight", lambda value, shape: value.T.reshape(shape)
    )
    loader.port_weight(block.feedforward_output_dense.kernel, f"{at}.mlp.down_proj.weight", lambda value, _: value.T)


# ---- and back -----------------------------------------------------------------------------------


_PADDING = 32000
"""Default of ``pad_token_id`` in transformers, which refuses to build a smaller vocabulary with it."""


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    scaling = None
    if backbone.rope_scaling_type == "su":
        factors = {"short_factor": backbone.rope_scaling_short_factor, "long_factor": backbone.rope_scaling_long_factor}
        scaling = {"rope_type": "longrope", **factors}
    return {
        **exported_plain_decoder(backbone, "phi3", "Phi3ForCausalLM"),
        **({} if backbone.vocabulary_size > _PADDING else {"pad_token_id": None}),
        "max_position_embeddings": backbone.max_sequence_length,
        "original_max_position_embeddings": backbone.pretraining_sequence_length,
        "rope_scaling": scaling,
        "sliding_window": None,
    }


def _tensors(config: Config) -> Iterator[TensorSpec]:
    vocab, hidden, width = config["vocab_size"], config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    yield TensorSpec("model.embed_tokens.weight", (vocab, hidden))
    for i in range(config["num_hidden_layers"]):
        at = f"model.layers.{i}"
        yield TensorSpec(f"{at}.self_attn.qkv_proj.weight", ((heads + 2 * kv_heads) * (hidden // heads), hidden))
        yield TensorSpec(f"{at}.self_attn.o_proj.weight", (hidden, hidden))
        yield TensorSpec(f"{at}.mlp.gate_up_proj.weight", (2 * width, hidden))
        yield TensorSpec(f"{at}.mlp.down_proj.weight", (hidden, width))
        yield TensorSpec(f"{at}.input_layernorm.weight", (hidden,), near_one=True)
        yield TensorSpec(f"{at}.post_attention_layernorm.weight", (hidden,), near_one=True)
    yield TensorSpec("model.norm.weight", (hidden,), near_one=True)
    if has_output_layer(config):
        yield TensorSpec("lm_head.weight", (vocab, hidden))


PHI_3 = ModelType(
    name="phi3",
    defaults=ROTARY
    | decoder_defaults(32064, 3072, 8192, 32, 32, kv=None, longest=4096)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "sliding_window": None},
    checks=Checks(("rms_norm_eps", 1e-5), SILU, _ROTARY, every_layer),
    optional_part=OPTIONAL_OUTPUT_LAYER,
    tensors=_tensors,
    tensor_fields=DECODER_FIELDS,
    converter=Converter(
        *("Phi3Backbone", _arguments, _port_weights),
        lambda cls, folder, **kwargs: cls(str(Path(folder) / "tokenizer.model"), **kwargs),
    ),
)
FAMILY = Family(
    name="phi3",
    title="Phi-3",
    model_types=(PHI_3,),
    sizes={
        "phi4": published_decoder(
            *("phi3", "Phi3ForCausalLM", Dims(5120, 40, 40, 10, 17920)),
            vocab=100352,
            tied=False,
            rms_norm_eps=1e-5,
            rope_theta=250000.0,
            max_position_embeddings=16384,
            original_max_position_embeddings=16384,
            sliding_window=None,
        ),
    },
    exports={"Phi3Backbone": Export(_export, model_types=("phi3",))},
    gguf=(
        GgufArchitecture(
            name="phi3",
            model_types=("phi3",),
            config=_gguf,
            block_names=_GGUF_BLOCK,
            rope_factors=frozenset({"rope_factors_long.weight", "rope_factors_short.weight"}),
        ),
    ),
    pre_tokenizers={"dbrx": PreTokenizer(CONTRACTIONS + WORDS % "{1,3}")},
)
