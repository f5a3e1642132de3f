"""The type of Hugging Face configurations, and default values in them that several families share.

The defaults are those of transformers' configuration classes (4.57 and 5.23 agree), for fields that KerasHub's
converters or `shardload.hub.fidelity` read. Fields without a default (ESM's ``vocab_size``) are not listed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

Config = Mapping[str, Any]
GENERATORS = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForConditionalLM")
"""Endings of names of transformers' classes whose output is one logit per vocabulary entry: ``LlamaForCausalLM``."""


def architecture_of(config: Config) -> str:
    """Return the class of transformers that saved a checkpoint; empty if the configuration names none."""
    return str((config.get("architectures") or [""])[0])


# ---- transformers' defaults ----------------------------------------------------------------------

SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
ROTARY = {"rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False}
BASE = dict(zip(SIZES[1:], (768, 3072, 12, 12), strict=True))
DROPOUT = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1}
NO_DROPOUT = dict.fromkeys(DROPOUT, 0.0)
SQUARES = {"image_size": 224, "patch_size": 16}


def decoder_defaults(*sizes: int, kv: int | None, longest: int) -> dict[str, Any]:
    """Return the values that transformers assumes for the sizes that a decoder's ``config.json`` omits.

    ``sizes`` are in the order of `SIZES`; ``kv`` is the number of key-value heads, ``longest`` the most positions.
    """
    return dict(zip(SIZES, sizes, strict=True)) | {"num_key_value_heads": kv, "max_position_embeddings": longest}


# ---- published sizes -----------------------------------------------------------------------------


class Dims(NamedTuple):
    """The numbers in which the published models of one family (2B, 9B, …) differ."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    intermediate: int


def published_decoder(
    model_type: str, class_name: str, dims: Dims, *, vocab: int, tied: bool = True, **rest: Any
) -> dict[str, Any]:
    """Return the ``config.json`` of a published model, a decoder with RMS norms; ``rest`` are more entries of it."""
    return {
        "model_type": model_type,
        "architectures": [class_name],
        "vocab_size": vocab,
        "hidden_size": dims.hidden,
        "num_hidden_layers": dims.layers,
        "num_attention_heads": dims.heads,
        "num_key_value_heads": dims.kv_heads,
        "intermediate_size": dims.intermediate,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": tied,
        **rest,
    }
