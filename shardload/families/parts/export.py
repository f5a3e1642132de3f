"""Hugging Face configurations that are written for KerasHub's backbones: entries that several families share.

Constants are those of KerasHub's layers, such as Gemma's rotary bases. What loading may set on layers (the epsilon of
BERT and GPT-2, the form of GELU) is read from the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol


class LayerSettings(Protocol):
    """What the layers of a backbone compute with, whatever its constructor was given."""

    @property
    def epsilon(self) -> float:
        """The epsilon of most layers."""

    @property
    def activation(self) -> str:
        """The name of the activation in transformers; raises an ``UnsupportedError`` if there is none."""


@dataclass(frozen=True, slots=True)
class Export:
    """What is written for one class of KerasHub."""

    config: Callable[[Any, LayerSettings], dict[str, Any]]
    """From a backbone to its ``config.json``, but for the longest text, token ids and the dtype.

    Raises an ``UnsupportedError`` for a feature that Hugging Face's configuration lacks, a clause."""
    pre_tokenizer: str | None = None
    """Pre-tokenizer of its byte pairs (`Family.pre_tokenizers`). KerasHub splits all byte pairs as Llama 3 does, so a
    preset does not say which one its vocabulary was made for."""


def decoder_entries(backbone: Any, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the entries of a decoder with rotary positions and RMS norms."""
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


def plain_decoder_entries(backbone: Any, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the entries that Mistral and Qwen have in common."""
    return {
        **decoder_entries(backbone, model_type, architecture),
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": "silu",
        "rope_theta": backbone.rope_max_wavelength,
        "tie_word_embeddings": bool(getattr(backbone, "tie_word_embeddings", False)),
    }
