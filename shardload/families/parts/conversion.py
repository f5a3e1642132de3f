"""Convert between KerasHub and Hugging Face: converters that KerasHub lacks, and the ``config.json`` of a backbone.

A converter says which tensor belongs to which variable, and how to transpose or reshape it. It copies nothing:
`shardload.mapping` reads the bytes later. A written ``config.json`` has the values that the backbone's layers compute
with, which may differ from the arguments of its constructor.
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
    """A converter from Hugging Face to a KerasHub class, with the same functions as KerasHub's own converters."""

    backbone: str
    """Name of KerasHub's backbone class."""
    arguments: Callable[[Config], dict[str, Any]]
    """Takes a ``config.json``; returns the arguments of the class's constructor."""
    port_weights: Callable[[Any, Any, Config], Any]
    """Assigns tensors to each variable; takes the backbone, KerasHub's loader of tensors, and the ``config.json``."""
    tokenizer: Callable[..., Any]
    """Makes KerasHub's tokenizer from files; takes its class, the folder of the files, and further arguments."""
    applies: Callable[[Collection[str]], bool] = lambda names: True
    """Takes the tensor names of a checkpoint; returns whether to use this converter instead of KerasHub's own."""


def decoder_arguments(config: Config) -> dict[str, Any]:
    """Return the arguments, read from a ``config.json``, that KerasHub's decoders with RMS norms have in common."""
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
    """Assign the weights of a decoder that are outside of its blocks: embedding, output layer and last norm."""
    loader.port_weight(backbone.token_embedding.embeddings, "model.embed_tokens.weight")
    loader.port_weight(backbone.token_embedding.reverse_embeddings, "lm_head.weight", lambda value, _: value.T)
    loader.port_weight(backbone.layer_norm.scale, "model.norm.weight")


def byte_pair_tokenizer(cls: Any, folder: str, *, with_added: bool = False, **kwargs: Any) -> Any:
    """Make KerasHub's tokenizer from a ``tokenizer.json``; ``with_added`` includes the file's ``added_tokens``."""
    described = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    model = described["model"]
    added = described.get("added_tokens", ()) if with_added else ()
    # Older versions of tokenizers write a merge as one text, newer ones as a pair.
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    vocabulary = {**model["vocab"], **{token["content"]: token["id"] for token in added}}
    return cls(vocabulary=vocabulary, merges=merges, **kwargs)


class LayerSettings(Protocol):
    """Settings read from the layers of a built backbone, which may differ from its constructor's arguments."""

    @property
    def epsilon(self) -> float:
        """The epsilon that most normalisation layers of the backbone use."""

    @property
    def activation(self) -> str:
        """Name of the backbone's activation in transformers; raises an ``UnsupportedError`` if it has no name there."""


@dataclass(frozen=True, slots=True)
class Export:
    """How to write backbones of one KerasHub class for Hugging Face."""

    config: Callable[[Any, LayerSettings], dict[str, Any]]
    """Returns a backbone's ``config.json`` without context length, token ids and dtype, which the caller adds.

    Raises an ``UnsupportedError`` if the backbone has a feature that Hugging Face's configuration cannot express."""
    pre_tokenizer: str | None = None
    """How these models split text into words, as a key of `Family.pre_tokenizers` (``qwen2``).

    A byte-pair tokenizer needs it in its ``tokenizer.json``, but a preset does not store it. ``None``: if a model has a
    byte-pair tokenizer, the written folder gets none, and a note says so. Other kinds of tokenizers do not need it."""


def exported_decoder(backbone: Any, model_type: str, architecture: str) -> dict[str, Any]:
    """Return the entries that the ``config.json`` of any exported decoder has: class, sizes and epsilon."""
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
    """Return the ``config.json`` entries that exported models of Mistral and Qwen have in common."""
    return {
        **exported_decoder(backbone, model_type, architecture),
        "intermediate_size": backbone.intermediate_dim,
        "hidden_act": "silu",
        "rope_theta": backbone.rope_max_wavelength,
        "tie_word_embeddings": bool(getattr(backbone, "tie_word_embeddings", False)),
    }
