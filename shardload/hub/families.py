"""The fields of each ``model_type``'s configuration that change what a model computes, as transformers reads them.

A missing field means transformers' default. Fields and architectures that are not listed here are not checked;
other checks detect features with their own tensors (biases, tied heads, further layers).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.hub import rope
from shardload.hub.config_defaults import IMAGE_MODELS, completed

Config = Mapping[str, Any]
ROPE = ("rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq")
WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern")
TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class Family:
    """The settings of one ``model_type``, as transformers reads them."""

    epsilon: tuple[str, float] | None = None
    activation: tuple[str, str] | None = None
    theta: float | None = None
    """Default base of rotary positions; ``None`` for models without them."""
    windows: Callable[[Config, int], list[int | None]] | None = None
    """Returns the window of each layer; ``None`` if all layers attend to everything."""
    has_activation: str | None = None
    """The activation that KerasHub computes if no layer has an attribute for it."""
    only: Mapping[str, tuple[Any, ...]] | None = None
    """Field → the only values that KerasHub supports; a missing field is supported, ``null`` not always."""
    caps: bool = False
    """Whether scores and logits are capped, and scores scaled by ``query_pre_attn_scalar``."""


# ---- sliding windows -----------------------------------------------------------------------------


def _every(config: Config, layers: int) -> list[int | None]:
    return [config.get("sliding_window")] * layers


def _if_used(config: Config, layers: int) -> list[int | None]:
    return _every(config, layers) if config.get("use_sliding_window") else [None] * layers


def _by_type(
    default: Callable[[Config, int], bool], *, always: bool = True
) -> Callable[[Config, int], list[int | None]]:
    """Return a function for windows by ``layer_types``, or by ``default`` for older configurations without it."""

    def windows(config: Config, layers: int) -> list[int | None]:
        if not always and not config.get("use_sliding_window"):
            return [None] * layers
        types = config.get("layer_types")
        if isinstance(types, list) and len(types) == layers:
            sliding = [kind == rope.SLIDING for kind in types]
        else:
            sliding = [default(config, i) for i in range(layers)]
        return [config.get("sliding_window") if slides else None for slides in sliding]

    return windows


# Qwen 2 and 3: the first layers attend to all tokens.
def _after(config: Config, i: int) -> bool:
    return i >= int(config.get("max_window_layers", 28))


# Qwen 2 MoE: every other one of the first layers slides, the others attend to all tokens.
def _before(config: Config, i: int) -> bool:
    return i % 2 == 0 and i < int(config.get("max_window_layers", 28))


# SmolLM 3: the layers without rotary positions slide.
def _unturned(config: Config, i: int) -> bool:
    turned = config.get("no_rope_layers")
    return not turned[i] if isinstance(turned, list) and i < len(turned) else (i + 1) % 4 == 0


# Gemma 2 and GPT-OSS: the first layer slides, the second attends to all tokens, and so on.
def _alternating(config: Config, i: int) -> bool:
    return i % 2 == 0


# Gemma 3: all layers slide but, by default, every sixth.
def _pattern(config: Config, i: int) -> bool:
    return bool((i + 1) % int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6))


def _gemma_3(config: Config, layers: int) -> list[int | None]:
    """Return the windows; a bidirectional one extends by half its size to each side, and KerasHub counts all tokens."""
    windows = _by_type(_pattern)(config, layers)
    if not config.get("use_bidirectional_attention"):
        return windows
    return [None if window is None else 2 * (int(window) // 2) + 1 for window in windows]


# ---- the families --------------------------------------------------------------------------------

_RMS = ("rms_norm_eps", 1e-6)
_SILU = ("hidden_act", "silu")
# If the type is null, transformers 4 adds no positions; 5 ignores the field and adds absolute positions.
_BERT_ONLY = {"is_decoder": (False, None), "position_embedding_type": ("absolute",)}
_BERT = Family(("layer_norm_eps", 1e-12), ("hidden_act", "gelu"), only=_BERT_ONLY)
# Positions start at pad_token_id + 1; KerasHub's converter always skips the first two rows.
_ROBERTA = Family(_BERT.epsilon, _BERT.activation, only={**_BERT_ONLY, "pad_token_id": (1,)})
_SWIGLU_ONLY = {"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)}
_GEMMA_ONLY = {"use_bidirectional_attention": (False, None)}

FAMILIES: Mapping[str, Family] = {
    "llama": Family(_RMS, _SILU, 1e4),
    "mistral": Family(_RMS, _SILU, 1e4, _every),
    "mixtral": Family(("rms_norm_eps", 1e-5), _SILU, 1e6, _every),
    **dict.fromkeys(("qwen2", "qwen3"), Family(_RMS, _SILU, 1e4, _by_type(_after, always=False))),
    "qwen2_moe": Family(_RMS, _SILU, 1e4, _by_type(_before, always=False), only={"qkv_bias": (True,)}),
    "qwen3_moe": Family(_RMS, _SILU, 1e4, _if_used),
    "smollm3": Family(_RMS, _SILU, 2e6, _by_type(_unturned, always=False), has_activation="silu"),
    "gpt_oss": Family(("rms_norm_eps", 1e-5), None, 1.5e5, _by_type(_alternating), only=_SWIGLU_ONLY),
    "gemma": Family(_RMS, ("hidden_act", TANH), 1e4, has_activation=TANH, only=_GEMMA_ONLY),
    "gemma2": Family(_RMS, ("hidden_activation", TANH), 1e4, _by_type(_alternating), TANH, only=_GEMMA_ONLY, caps=True),
    "gemma3_text": Family(_RMS, ("hidden_activation", TANH), 1e6, _gemma_3, TANH, caps=True),
    "gemma3": Family(_RMS, ("hidden_activation", TANH), 1e6, _gemma_3, TANH, only=_GEMMA_ONLY, caps=True),
    "gpt2": Family(
        ("layer_norm_epsilon", 1e-5),
        ("activation_function", "gelu_new"),
        only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False, None)},
    ),
    "phi3": Family(("rms_norm_eps", 1e-5), _SILU, 1e4, _every),
    "bloom": Family(("layer_norm_epsilon", 1e-5), only={"apply_residual_connection_post_layernorm": (False, None)}),
    "bert": _BERT,
    **dict.fromkeys(("roberta", "xlm-roberta"), _ROBERTA),
    "albert": Family(("layer_norm_eps", 1e-12), ("hidden_act", "gelu_new"), only=_BERT_ONLY),
    "distilbert": Family(None, ("activation", "gelu")),
    "bart": Family(None, ("activation_function", "gelu"), only={"scale_embedding": (False, None)}),
    "esm": Family(("layer_norm_eps", 1e-12), only={"token_dropout": (False, None), "is_decoder": (False, None)}),
    **dict.fromkeys(("vit", "deit"), Family(("layer_norm_eps", 1e-12), ("hidden_act", "gelu"))),
    "swin": Family(("layer_norm_eps", 1e-5), ("hidden_act", "gelu")),
    **dict.fromkeys(("dinov2", "dinov2_with_registers"), Family(("layer_norm_eps", 1e-6), ("hidden_act", "gelu"))),
}
_GEMMA_4 = {"use_bidirectional_attention": ("vision", None), "hidden_activation": (TANH, None)}
_QWEN_3_5 = {"hidden_act": ("silu", "swish", None)}
PARTLY: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("gemma4", "gemma4_text"), _GEMMA_4),
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe"), _QWEN_3_5),
}
"""Like `Family.only`, for model types without other checks."""
BOTH_WAYS: Collection[str] = (
    *("bert", "roberta", "xlm-roberta", "albert", "distilbert", "esm", "metaclip_2", "sam3_video"),
    *IMAGE_MODELS,
)
"""Model types without tokens, or for which transformers ignores ``is_causal``."""
KNOWN: Collection[str] = {
    *ROPE,
    *WINDOW,
    "is_causal",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "decoder_attention_heads",
    *(f.epsilon[0] for f in FAMILIES.values() if f.epsilon),
    *(f.activation[0] for f in FAMILIES.values() if f.activation),
    *(name for only in (*(f.only or {} for f in FAMILIES.values()), *PARTLY.values()) for name in only),
}
"""Every field that is checked."""


def text_of(config: Config) -> Config:
    """Return the text model's configuration with its defaults; the whole configuration if the model has no parts."""
    nested = config.get("text_config")
    # Gemma 3's text part may omit its model_type.
    text = {"model_type": f"{config.get('model_type')}_text", **nested} if isinstance(nested, Mapping) else config
    return completed(text)


def family_of(config: Config) -> Family | None:
    """Return the family of a configuration; ``None`` for a model type that is not checked."""
    kind = config.get("model_type")
    return FAMILIES.get(kind) if isinstance(kind, str) else None


def windows_of(config: Config, family: Family, layers: int) -> list[int | None]:
    """Return the window of each layer; ``None`` without a window or if the longest text fits into it."""
    windows = family.windows(config, layers) if family.windows else [None] * layers
    return [obeyed(window, config) for window in windows]


def obeyed(window: int | None, config: Config) -> int | None:
    """Return a KerasHub window; ``None`` if the longest text fits into it."""
    if not window:
        return None
    # A bidirectional window extends by half its size to each side.
    reach = window // 2 + 1 if config.get("use_bidirectional_attention") else window
    return int(window) if reach < (config.get("max_position_embeddings") or np.inf) else None
