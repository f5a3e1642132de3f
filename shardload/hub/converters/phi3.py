"""Phi-3 and Phi-4: query, key and value are one matrix in a checkpoint, and so are gate and up.

qkv_proj       (heads + 2 * key-value heads) * head_dim rows
gate_up_proj   gate, then up
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from shardload.families.parts import rope
from shardload.hub.converters import Config, OwnConverter


def _arguments(config: Config) -> dict[str, Any]:
    scaling = rope.rotation(config, rope.FULL, rope.Rotary(1e4, is_partial=True), head_dim=None)
    found = {
        "vocabulary_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "hidden_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "num_query_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "layer_norm_epsilon": config["rms_norm_eps"],
        "max_sequence_length": config["max_position_embeddings"],
        "rope_max_wavelength": scaling.theta,
    }
    if scaling.kind != "longrope":
        return found
    return found | {
        "pretraining_sequence_length": scaling.parameters["original_max_position_embeddings"],
        "rope_scaling_type": "su",
        "rope_scaling_short_factor": scaling.parameters["short_factor"],
        "rope_scaling_long_factor": scaling.parameters["long_factor"],
    }


def _port(backbone: Any, loader: Any, config: Config) -> None:
    embedding = backbone.token_embedding
    loader.port_weight(embedding.embeddings, "model.embed_tokens.weight")
    loader.port_weight(embedding.reverse_embeddings, "lm_head.weight", lambda value, _: value.T)
    loader.port_weight(backbone.layer_norm.scale, "model.norm.weight")
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
            rows = slice(start, start + int(np.prod(layer.kernel.shape[1:])))
            loader.port_weight(layer.kernel, name, lambda value, shape, rows=rows: value[rows].T.reshape(shape))
            start = rows.stop
    loader.port_weight(
        attention.output_dense.kernel, f"{at}.self_attn.o_proj.weight", lambda value, shape: value.T.reshape(shape)
    )
    loader.port_weight(block.feedforward_output_dense.kernel, f"{at}.mlp.down_proj.weight", lambda value, _: value.T)


def _tokenizer(cls: Any, preset: str, **kwargs: Any) -> Any:
    return cls(str(Path(preset) / "tokenizer.model"), **kwargs)


CONVERTER = OwnConverter("Phi3Backbone", _arguments, _port, _tokenizer)
