"""GPT-OSS with plain experts, as after training or dequantisation; KerasHub's converter reads MXFP4 codes only.

experts.gate_up_proj   (experts, in, 2 * out), gate and up columns alternate, as in KerasHub's class
experts.down_proj      (experts, in, out)
"""

from __future__ import annotations

from typing import Any

from shardload.families.parts import rope
from shardload.hub.converters import Config, OwnConverter, byte_pairs


def _arguments(config: Config) -> dict[str, Any]:
    rotation = rope.rotation(config, rope.FULL, rope.Rotary(1.5e5), head_dim=None)
    return {
        "vocabulary_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "hidden_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "num_query_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "num_experts": config["num_local_experts"],
        "top_k": config["num_experts_per_tok"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "sliding_window": config["sliding_window"],
        "rope_max_wavelength": rotation.theta,
        "rope_scaling_factor": rotation.parameters.get("factor", 1.0),
    }


def _port(backbone: Any, loader: Any, config: Config) -> None:
    embedding = backbone.token_embedding
    loader.port_weight(embedding.embeddings, "model.embed_tokens.weight")
    loader.port_weight(embedding.reverse_embeddings, "lm_head.weight", lambda value, _: value.T)
    loader.port_weight(backbone.layer_norm.scale, "model.norm.weight")
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


def _tokenizer(cls: Any, preset: str, **kwargs: Any) -> Any:
    vocabulary, merges = byte_pairs(preset, with_added=True)
    return cls(vocabulary=vocabulary, merges=merges, **kwargs)


CONVERTER = OwnConverter("GptOssBackbone", _arguments, _port, _tokenizer)
