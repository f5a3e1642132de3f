"""The ``config.json`` of each family that is written for Hugging Face, from its KerasHub backbone.

Constants are those of KerasHub's layers, such as Gemma's rotary bases. What loading may set on layers (the epsilon of
BERT and GPT-2, the form of GELU) is read from the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardload.converting.plans import NoPlaceError
from shardload.hub import fields

Config = dict[str, Any]
UNKNOWN = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields that KerasHub's classes do not have: they come from the source, or are left out."""


def _decoder(backbone: Any, model_type: str, architecture: str) -> Config:
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_query_heads,
        "num_key_value_heads": backbone.num_key_value_heads,
        "rms_norm_eps": backbone.layer_norm_epsilon,
    }


def _gemma(backbone: Any) -> Config:
    is_second = backbone.use_post_ffw_norm
    kind = ("gemma2", "Gemma2ForCausalLM") if is_second else ("gemma", "GemmaForCausalLM")
    common = {
        **_decoder(backbone, *kind),
        "intermediate_size": backbone.intermediate_dim // 2,  # KerasHub counts gate and up projection together
        "head_dim": backbone.head_dim,
        # Gemma's activation is read from the first name, Gemma 2's from the second.
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "rope_theta": 10000.0,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }
    if not is_second:
        return common
    return {
        **common,
        "query_pre_attn_scalar": _scalar(backbone),
        "attn_logit_softcapping": backbone.attention_logit_soft_cap,
        "final_logit_softcapping": backbone.final_logit_soft_cap,
        "sliding_window": backbone.sliding_window_size,
    }


def _scalar(backbone: Any) -> int:
    """Return ``query_pre_attn_scalar``: the head's width, or the width of the model per head."""
    normalised = backbone.query_head_dim_normalize
    return int(backbone.head_dim if normalised else backbone.hidden_dim // backbone.num_query_heads)


def _gemma3(backbone: Any) -> Config:
    if backbone.vision_encoder is not None:
        raise NoPlaceError("Cannot write Gemma 3 with a vision encoder for Hugging Face")
    if backbone.use_bidirectional_attention or backbone.attention_logit_soft_cap is not None:
        feature = "bidirectional attention" if backbone.use_bidirectional_attention else "capped attention scores"
        raise NoPlaceError(f"Cannot write Gemma 3 with {feature} for Hugging Face")
    factor = backbone.global_rope_scaling_factor
    return {
        **_decoder(backbone, "gemma3_text", "Gemma3ForCausalLM"),
        "intermediate_size": backbone.intermediate_dim,
        "head_dim": backbone.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": _scalar(backbone),
        "sliding_window": backbone.sliding_window_size,
        "sliding_window_pattern": 6,  # as in KerasHub's class: every sixth layer attends to all tokens
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": factor} if factor != 1.0 else None,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": backbone.final_logit_soft_cap,
        "attention_bias": False,
        "tie_word_embeddings": True,
    }


def _llama3(backbone: Any) -> Config:
    config = {
        **_decoder(backbone, "llama", "LlamaForCausalLM"),
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": "silu",
        "rope_theta": backbone.rope_max_wavelength,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": bool(backbone.tie_word_embeddings),
        "rope_scaling": None,
    }
    if backbone.rope_frequency_adjustment_factor is not None:
        config["rope_scaling"] = {
            "rope_type": "llama3",
            "factor": backbone.rope_frequency_adjustment_factor,
            "low_freq_factor": backbone.rope_low_freq_factor,
            "high_freq_factor": backbone.rope_high_freq_factor,
            "original_max_position_embeddings": backbone.rope_pretraining_sequence_length,
        }
    return config


def _plain_decoder(backbone: Any, model_type: str, architecture: str) -> Config:
    """Return the entries that Mistral and Qwen have in common."""
    return {
        **_decoder(backbone, model_type, architecture),
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": "silu",
        "rope_theta": backbone.rope_max_wavelength,
        "tie_word_embeddings": bool(getattr(backbone, "tie_word_embeddings", False)),
    }


def _mistral(backbone: Any) -> Config:
    config = _plain_decoder(backbone, "mistral", "MistralForCausalLM")
    return {**config, "head_dim": backbone.head_dim, "sliding_window": backbone.sliding_window}


def _qwen2(backbone: Any) -> Config:
    # KerasHub's window applies to all layers or none; transformers' applies from layer max_window_layers on.
    windowed = backbone.use_sliding_window_attention
    return {
        **_plain_decoder(backbone, "qwen2", "Qwen2ForCausalLM"),
        "use_sliding_window": windowed,
        "sliding_window": backbone.sliding_window_size,
        "max_window_layers": 0 if windowed else backbone.num_layers,
    }


def _qwen3(backbone: Any) -> Config:
    windowed = backbone.sliding_window_size is not None
    return {
        **_plain_decoder(backbone, "qwen3", "Qwen3ForCausalLM"),
        "head_dim": backbone.head_dim,
        "attention_bias": False,
        "use_sliding_window": windowed,
        "sliding_window": backbone.sliding_window_size,
        "max_window_layers": 0 if windowed else backbone.num_layers,
    }


def _gpt2(backbone: Any) -> Config:
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "vocab_size": backbone.vocabulary_size,
        "n_embd": backbone.hidden_dim,
        "n_layer": backbone.num_layers,
        "n_head": backbone.num_heads,
        "n_positions": backbone.max_sequence_length,
        "activation_function": _activation(backbone),
        "layer_norm_epsilon": fields.epsilon_of(backbone),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), backbone.dropout),
        "tie_word_embeddings": True,
    }


def _activation(backbone: Any) -> str:
    """Return the name of the activation that the layers have: KerasHub's classes take none."""
    if (name := fields.activation_of(backbone)) is None:
        raise NoPlaceError(
            f"Cannot describe {type(backbone).__name__} in a Hugging Face configuration: no name for its activation"
        )
    return name


def _bert(backbone: Any) -> Config:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": backbone.vocabulary_size,
        "hidden_size": backbone.hidden_dim,
        "num_hidden_layers": backbone.num_layers,
        "num_attention_heads": backbone.num_heads,
        "intermediate_size": backbone.intermediate_dim,
        "max_position_embeddings": backbone.max_sequence_length,
        "type_vocab_size": backbone.num_segments,
        "hidden_act": _activation(backbone),
        "layer_norm_eps": fields.epsilon_of(backbone),
        **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), backbone.dropout),
    }


FAMILIES: Mapping[str, Callable[[Any], Config]] = {
    "GemmaBackbone": _gemma,
    "Gemma3Backbone": _gemma3,
    "Llama3Backbone": _llama3,
    "MistralBackbone": _mistral,
    "QwenBackbone": _qwen2,
    "Qwen3Backbone": _qwen3,
    "GPT2Backbone": _gpt2,
    "BertBackbone": _bert,
}
"""Class of the backbone → its configuration, but for the fields in `UNKNOWN` and the dtype."""
