"""Defaults that transformers uses for fields that a configuration omits.

They are the defaults of its configuration classes, for fields that KerasHub's converters or `shardload.hub.fidelity`
read. Versions 4.57 and 5.23 agree on them. Fields without a default (ESM's ``vocab_size``) are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Fields = Mapping[str, Any]
IMAGE_MODELS = ("vit", "deit", "swin", "dinov2", "dinov2_with_registers", "dinov3_vit")
"""Model types for images only."""
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _decoder(*sizes: int, kv: int | None, longest: int) -> dict[str, Any]:
    return dict(zip(_SIZES, sizes, strict=True)) | {"num_key_value_heads": kv, "max_position_embeddings": longest}


_ROTARY = {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
_QWEN = _ROTARY | {"sliding_window": 4096, "use_sliding_window": False}
_MOE = {"norm_topk_prob": False, "decoder_sparse_step": 1, "router_aux_loss_coef": 0.001, "output_router_logits": False}
_BASE = dict(zip(_SIZES[1:], (768, 3072, 12, 12), strict=True))
_DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
_NO_DROPOUT = dict.fromkeys(_DROPOUT, 0.0)
_BERT = _BASE | _DROPOUT | {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
_SQUARES = {"image_size": 224, "patch_size": 16}
_VIT = _BASE | _NO_DROPOUT | _SQUARES | {"qkv_bias": True, "layer_norm_eps": 1e-12}
_DINO = _BASE | _NO_DROPOUT | _SQUARES | {"mlp_ratio": 4, "layerscale_value": 1.0, "drop_path_rate": 0.0}
_DINO |= {"use_swiglu_ffn": False}

DEFAULTS: Mapping[str, Fields] = {
    "llama": _ROTARY | _decoder(32000, 4096, 11008, 32, 32, kv=None, longest=2048),
    "mistral": _ROTARY | _decoder(32000, 4096, 14336, 32, 32, kv=8, longest=131072) | {"sliding_window": 4096},
    "mixtral": _ROTARY
    | _decoder(32000, 4096, 14336, 32, 32, kv=8, longest=131072)
    | {"rope_theta": 1e6, "rms_norm_eps": 1e-5, "sliding_window": None}
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "output_router_logits": False},
    "qwen2": _QWEN | _decoder(151936, 4096, 22016, 32, 32, kv=32, longest=32768),
    "qwen3": _QWEN | _decoder(151936, 4096, 22016, 32, 32, kv=32, longest=32768) | {"head_dim": 128},
    "qwen2_moe": _QWEN
    | _MOE
    | _decoder(151936, 2048, 5632, 24, 16, kv=16, longest=32768)
    | {"num_experts": 60, "num_experts_per_tok": 4}
    | {"moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632},
    "qwen3_moe": _QWEN
    | _MOE
    | _decoder(151936, 2048, 6144, 24, 32, kv=4, longest=32768)
    | {"head_dim": None, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
    "smollm3": _ROTARY
    | _decoder(128256, 2048, 11008, 36, 16, kv=4, longest=32768)
    | {"rope_theta": 2e6, "sliding_window": None, "use_sliding_window": False, "no_rope_layer_interval": 4}
    | {"attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "tie_word_embeddings": True},
    "gpt_oss": _ROTARY
    | _decoder(201088, 2880, 2880, 36, 64, kv=8, longest=131072)
    | {"rope_theta": 1.5e5, "rms_norm_eps": 1e-5, "head_dim": 64, "sliding_window": 128}
    | {"num_local_experts": 128, "num_experts_per_tok": 4},
    "gemma": _decoder(256000, 3072, 24576, 28, 16, kv=16, longest=8192) | {"head_dim": 256},
    "gemma2": _decoder(256000, 2304, 9216, 26, 8, kv=4, longest=8192)
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096}
    | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    "gemma3_text": _decoder(262208, 2304, 9216, 26, 8, kv=4, longest=131072)
    | {"head_dim": 256, "query_pre_attn_scalar": 256, "sliding_window": 4096},
    "siglip_vision_model": _BASE | _SQUARES,
    "phi3": _ROTARY
    | _decoder(32064, 3072, 8192, 32, 32, kv=None, longest=4096)
    | {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096, "sliding_window": None},
    "bloom": {"vocab_size": 250880, "hidden_size": 64, "n_layer": 2, "n_head": 8, "layer_norm_epsilon": 1e-5},
    "gpt2": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "resid_pdrop": 0.1},
    "bert": _BERT,
    "roberta": _BERT | {"vocab_size": 50265},
    "xlm-roberta": _BERT,
    "albert": _BERT
    | _NO_DROPOUT
    | dict(zip(_SIZES, (30000, 4096, 16384, 12, 64), strict=True))
    | {"embedding_size": 128, "num_hidden_groups": 1, "inner_group_num": 1},
    "distilbert": {"vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12}
    | {"max_position_embeddings": 512, "dropout": 0.1},
    "bart": {"vocab_size": 50265, "d_model": 1024, "num_hidden_layers": 12, "max_position_embeddings": 1024}
    | {f"{part}_layers": 12 for part in ("encoder", "decoder")}
    | {f"{part}_attention_heads": 16 for part in ("encoder", "decoder")}
    | {f"{part}_ffn_dim": 4096 for part in ("encoder", "decoder")}
    | {"dropout": 0.1},
    "esm": _BASE | _DROPOUT | {"max_position_embeddings": 1026, "position_embedding_type": "absolute"},
    "vit": _VIT,
    "deit": _VIT,
    "swin": {"image_size": 224, "patch_size": 4, "window_size": 7, "embed_dim": 96, "mlp_ratio": 4.0, "qkv_bias": True}
    | {"depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "drop_path_rate": 0.1}
    | _NO_DROPOUT,
    "dinov2": _DINO | {"patch_size": 14},
    "dinov2_with_registers": _DINO | {"num_register_tokens": 4},
    "dinov3_vit": dict(zip(_SIZES[1:], (384, 1536, 12, 6), strict=True))
    | _SQUARES
    | {"hidden_act": "gelu", "layer_norm_eps": 1e-5, "layerscale_value": 1.0, "rope_theta": 100.0}
    | {"num_register_tokens": 0, "use_gated_mlp": False, "attention_dropout": 0.0, "drop_path_rate": 0.0}
    | {f"{part}_bias": part != "key" for part in ("query", "key", "value", "proj", "mlp")},
}
"""By ``model_type``."""
_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
_GPT_OSS_ROPE |= {"original_max_position_embeddings": 4096}


def completed(config: Fields) -> dict[str, Any]:
    """Return the configuration of a model or a part with the defaults of its ``model_type`` filled in."""
    kind = config.get("model_type")
    found = {**DEFAULTS.get(kind, {}), **config} if isinstance(kind, str) else dict(config)
    # None stands for multi-head attention: as many key-value heads as heads.
    heads = found.get("num_attention_heads")
    if found.get("num_key_value_heads", 0) is None:
        found["num_key_value_heads"] = heads
    if kind == "qwen3_moe" and found["head_dim"] is None and isinstance(heads, int) and heads > 0:
        found["head_dim"] = int(found["hidden_size"]) // heads
    if kind == "gpt_oss" and not (found.get("rope_parameters") or found.get("rope_scaling")):
        found["rope_scaling"] = _GPT_OSS_ROPE  # transformers 4 reads null as no scaling, 5 as this
    return _with_turns(found) if kind == "smollm3" else found


def _with_turns(config: dict[str, Any]) -> dict[str, Any]:
    """Fill in SmolLM3's layer lists: every few layers have no rotary positions and, if it is used, a sliding window."""
    if config.get("no_rope_layers") is None:
        every = int(config["no_rope_layer_interval"])
        config["no_rope_layers"] = [int((i + 1) % every != 0) for i in range(int(config["num_hidden_layers"]))]
    if config.get("layer_types") is None:
        slides = config["use_sliding_window"] and config["sliding_window"] is not None
        turned = [bool(turns or not slides) for turns in config["no_rope_layers"]]
        config["layer_types"] = ["full_attention" if one else "sliding_attention" for one in turned]
    return config
