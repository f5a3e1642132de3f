"""Between KerasHub's classes and Hugging Face's files: converters that KerasHub lacks, and configurations to write.

A converter only names tensors and views them: hooks transpose and reshape without copies, and `shardload.mapping` reads
the bytes. Constants in written configurations are those of KerasHub's layers, such as Gemma's rotary bases; what
loading may set on layers (the epsilon of BERT and GPT-2, the form of GELU) is read from the layers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from shardload.families.parts.config import Config


@dataclass(frozen=True, slots=True)
class Converter:
    """What KerasHub's converters state as functions of a module."""

    backbone: str
    """Name of KerasHub's class."""
    arguments: Callable[[Config], dict[str, Any]]
    """From ``config.json`` to the class's arguments."""
    port_weights: Callable[[Any, Any, Config], Any]
    """Ports each weight: backbone, loader, ``config.json``."""
    tokenizer: Callable[..., Any]
    """From the folder's files to KerasHub's tokenizer: its class, the folder, further arguments."""
    applies: Callable[[Collection[str]], bool] = lambda names: True
    """Whether it is for a checkpoint with tensors of these names; KerasHub's converter is for the others."""


def decoder_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments that KerasHub's classes of decoders with rotary positions and RMS norms have in common."""
    return {
        "vocabulary_size": config["vocab_size"],
        "num_layers": config["num_hidden_layers"],
        "hidden_dim": config["hidden_size"],
        "intermediate_dim": config["intermediate_size"],
        "num_query_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "layer_norm_epsilon": config["rms_norm_eps"],
    }


def port_ends(backbone: Any, loader: Any) -> None:
    """Port what a decoder has outside of its blocks: embedding, output layer and last norm."""
    loader.port_weight(backbone.token_embedding.embeddings, "model.embed_tokens.weight")
    loader.port_weight(backbone.token_embedding.reverse_embeddings, "lm_head.weight", lambda value, _: value.T)
    loader.port_weight(backbone.layer_norm.scale, "model.norm.weight")


def byte_pair_tokenizer(cls: Any, folder: str, *, with_added: bool = False, **kwargs: Any) -> Any:
    """Make KerasHub's tokenizer from a ``tokenizer.json``; ``with_added`` adds the tokens that it lists separately."""
    described = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    model = described["model"]
    added = described.get("added_tokens", ()) if with_added else ()
    # Older versions of tokenizers write a merge as one text, newer ones as a pair.
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    vocabulary = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    return cls(vocabulary=vocabulary, merges=merges, **kwargs)


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


def exported_decoder(backbone: Any, model_type: str, architecture: str) -> dict[str, Any]:
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


def exported_plain_decoder(backbone: Any, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the entries that Mistral and Qwen have in common."""
    return {
        **exported_decoder(backbone, model_type, architecture),
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": "silu",
        "rope_theta": backbone.rope_max_wavelength,
        "tie_word_embeddings": bool(getattr(backbone, "tie_word_embeddings", False)),
    }
