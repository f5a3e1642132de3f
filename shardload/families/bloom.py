"""BLOOM.

In a checkpoint, query, key and value are one matrix, head by head::

query_key_value   rows (heads, 3, head_dim)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from shardload.families.parts.checks import Checks
from shardload.families.parts.config import Config
from shardload.families.parts.conversion import Converter, Export, LayerSettings, byte_pair_tokenizer
from shardload.families.parts.gguf import GgufArchitecture, PreTokenizer, Undo
from shardload.families.parts.gguf_values import GgufValues, model_entries
from shardload.families.parts.tensors import TensorSpec, affine, norm
from shardload.families.record import Family, ModelType

_BLOOM_TOP = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
}
_BLOOM_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attention.query_key_value",
    "attn_output": "self_attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}


def _gguf_bloom(values: GgufValues) -> dict[str, Any]:
    return model_entries(values, "bloom", "BloomForCausalLM") | {
        "hidden_size": values.count("embedding_length"),
        "n_layer": values.count("block_count"),
        "n_head": values.count("attention.head_count"),
        "layer_norm_epsilon": values.number("attention.layer_norm_epsilon"),
        "tie_word_embeddings": True,
    }


# ---- the converter, for KerasHub ----------------------------------------------------------------


def _bloom_arguments(config: Config) -> dict[str, Any]:
    return {
        "vocabulary_size": config["vocab_size"],
        "num_layers": config["n_layer"],
        "num_heads": config["n_head"],
        "hidden_dim": config["hidden_size"],
        "intermediate_dim": 4 * config["hidden_size"],
        "layer_norm_epsilon": config["layer_norm_epsilon"],
    }


def _port_bloom(backbone: Any, loader: Any, config: Config) -> None:
    loader.port_weight(backbone.token_embedding.embeddings, "transformer.word_embeddings.weight")
    _port_norm(backbone.embeddings_layer_norm, loader, "transformer.word_embeddings_layernorm")
    _port_norm(backbone.layer_norm, loader, "transformer.ln_f")
    for i, block in enumerate(backbone.transformer_layers):
        _port_bloom_block(block, loader, f"transformer.h.{i}")


def _port_bloom_block(block: Any, loader: Any, at: str) -> None:
    attention = block._self_attention_layer
    _port_norm(block._pre_attention_layernorm, loader, f"{at}.input_layernorm")
    _port_norm(block._post_attention_layernorm, loader, f"{at}.post_attention_layernorm")
    for i, layer in enumerate((attention._query_dense, attention._key_dense, attention._value_dense)):
        _port_third(layer, loader, f"{at}.self_attention.query_key_value", i)
    for layer, name in (
        (attention._output_dense, "self_attention.dense"),
        (block._mlp_intermediate_dense, "mlp.dense_h_to_4h"),
        (block._mlp_output_dense, "mlp.dense_4h_to_h"),
    ):
        loader.port_weight(layer.kernel, f"{at}.{name}.weight", lambda value, _: value.T)
        loader.port_weight(layer.bias, f"{at}.{name}.bias")


def _port_third(layer: Any, loader: Any, name: str, which: int) -> None:
    """Assign the query, key or value part (``which``: 0, 1, 2) of BLOOM's joint tensor ``name`` to a KerasHub layer."""

    # Only reshape, index and transpose: the result is a view, from which `mapping` learns this third's bytes.
    def kernel(value: Any, shape: Any) -> Any:
        hidden, heads, width = shape
        return value.reshape(heads, 3, width, hidden)[:, which].transpose(2, 0, 1)

    loader.port_weight(layer.kernel, f"{name}.weight", kernel)
    loader.port_weight(layer.bias, f"{name}.bias", lambda value, shape: value.reshape(shape[0], 3, shape[1])[:, which])


def _port_norm(layer: Any, loader: Any, name: str) -> None:
    loader.port_weight(layer.gamma, f"{name}.weight")
    loader.port_weight(layer.beta, f"{name}.bias")


# ---- and back -----------------------------------------------------------------------------------


def _export(backbone: Any, layers: LayerSettings) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "n_layer": backbone.num_layers,
        "n_head": backbone.num_heads,
        "layer_norm_epsilon": backbone.layer_norm_epsilon,
        "apply_residual_connection_post_layernorm": False,
        "tie_word_embeddings": True,
    }


def _tensors(config: Config) -> Iterator[TensorSpec]:
    hidden = config["hidden_size"]
    yield TensorSpec("transformer.word_embeddings.weight", (config["vocab_size"], hidden))
    yield from norm("transformer.word_embeddings_layernorm", hidden)
    for i in range(config["n_layer"]):
        at = f"transformer.h.{i}"
        yield from norm(f"{at}.input_layernorm", hidden)
        yield from affine(f"{at}.self_attention.query_key_value", (3 * hidden, hidden), out=3 * hidden)
        yield from affine(f"{at}.self_attention.dense", (hidden, hidden), out=hidden)
        yield from norm(f"{at}.post_attention_layernorm", hidden)
        yield from affine(f"{at}.mlp.dense_h_to_4h", (4 * hidden, hidden), out=4 * hidden)
        yield from affine(f"{at}.mlp.dense_4h_to_h", (hidden, 4 * hidden), out=hidden)
    yield from norm("transformer.ln_f", hidden)


def _published(hidden: int, *, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bloom",
        "architectures": ["BloomForCausalLM"],
        "vocab_size": 250880,
        "hidden_size": hidden,
        "n_layer": layers,
        "n_head": heads,
        "layer_norm_epsilon": 1e-5,
    }


BLOOM = ModelType(
    name="bloom",
    defaults={"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5},
    checks=Checks(("layer_norm_epsilon", 1e-5)),
    only={"apply_residual_connection_post_layernorm": (False, None)},
    tensors=_tensors,
    tensor_fields=("vocab_size", "hidden_size", "n_layer", "n_head"),
    converter=Converter("BloomBackbone", _bloom_arguments, _port_bloom, byte_pair_tokenizer),
)
FAMILY = Family(
    name="bloom",
    title="BLOOM",
    model_types=(BLOOM,),
    sizes={
        "bloom_560m": _published(1024, layers=24, heads=16),
        "bloom_1.1b": _published(1536, layers=24, heads=16),
        "bloom_1.7b": _published(2048, layers=24, heads=16),
        "bloom_3b": _published(2560, layers=30, heads=32),
        "bloom_7.1b": _published(4096, layers=30, heads=32),
        "bloom_176b": _published(14336, layers=70, heads=112),
    },
    exports={"BloomBackbone": Export(_export, model_types=("bloom",))},
    gguf=(
        GgufArchitecture(
            name="bloom",
            model_types=("bloom",),
            config=_gguf_bloom,
            block_names=_BLOOM_BLOCK,
            top_names=_BLOOM_TOP,
            block="transformer.h",
            undone={"attn_qkv": Undo.UNFUSE},
        ),
    ),
    pre_tokenizers={
        "bloom": PreTokenizer(r" ?[^(\s|.,!?…。，、।۔،)]+"),  # noqa: RUF001 - sentence ends of several scripts
    },
)
