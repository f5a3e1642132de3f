"""Convert between KerasHub and Hugging Face: converters that KerasHub lacks, and the ``config.json`` of a backbone.

A converter says which tensor belongs to which variable, and how to transpose or reshape it. It copies nothing:
`shardload.mapping` reads the bytes later. A written ``config.json`` has the values that the backbone's layers compute
with, which may differ from the arguments of its constructor.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
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
class VariablePart:
    """A part of a KerasHub variable, and where its elements are in a tensor of Hugging Face.

    It is needed where KerasHub's converter joins tensors, or computes with them, so that recording it tells no place.
    """

    variable: Any
    start: tuple[int, ...]
    stop: tuple[int, ...]
    """The part: in each dim of the variable, the indices from ``start`` up to, but not including, ``stop``."""
    tensor: str
    strides: tuple[int, ...]
    """For each dim of the variable: by how many elements the position in the tensor grows from index to index."""
    offset: int = 0
    """Position in the tensor of the part's first element."""


@dataclass(frozen=True, slots=True)
class ZeroRows:
    """The first rows of a tensor of Hugging Face that KerasHub's class lacks; zeros are written for them.

    They are negative zeros, because ``x + -0.0`` is ``x`` for every ``x``, and ``-0.0 + 0.0`` is not.
    """

    tensor: str
    rows: int | None = None
    """How many; ``None`` for the whole tensor."""


def expert_matrices(variable: Any, tensors: str, *, half: int | None = None) -> Iterator[VariablePart]:
    """Yield where the matrix of each expert in ``variable``, (experts, in, out), is stored: as a tensor (out, in).

    ``{}`` in ``tensors`` is an expert's number. ``half``: 0 or 1 if each tensor has that half of the variable's
    columns, because gate and up projection are side by side.
    """
    experts, inputs, width = variable.shape
    first, last = (0, width) if half is None else (half * width // 2, (half + 1) * width // 2)
    for i in range(experts):
        start, stop = (i, 0, first), (i + 1, inputs, last)
        yield VariablePart(variable, start, stop, tensors.format(i), (inputs * width, 1, inputs))


def joined_outputs(layer: Any, names: Sequence[str]) -> Iterator[VariablePart]:
    """Yield where the parts of a linear layer, whose outputs are those of several of Hugging Face, are stored."""
    inputs, width = layer.kernel.shape
    each = width // len(names)
    for i, name in enumerate(names):
        first, last = i * each, (i + 1) * each
        yield VariablePart(layer.kernel, (0, first), (inputs, last), f"{name}.weight", (1, inputs))
        if layer.bias is not None:
            yield VariablePart(layer.bias, (first,), (last,), f"{name}.bias", (1,))


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
    model_types: tuple[str, ...] = ()
    """The ``model_type`` values of the configurations that `config` returns."""
    parts: Callable[[Any], Iterator[VariablePart]] = lambda backbone: iter(())
    """Takes a backbone; yields all parts of the variables whose values KerasHub's converter computes from tensors, as
    it stacks experts. Of all other variables, the converter tells where they are."""
    derived: Callable[[Any], tuple[Any, ...]] = lambda backbone: ()
    """Takes a backbone; returns variables that KerasHub's converter computes from others: no tensor has them."""
    same: Callable[[Any], tuple[tuple[Any, Any], ...]] = lambda backbone: ()
    """Takes a backbone; returns pairs of variables that KerasHub's converter reads from one tensor. The first is
    written; an export is refused if the second has other values, which training gives it."""
    without_pooler: bool = False
    """Whether Hugging Face's class has a pooler and KerasHub's has none, so that a note says that none is written."""
    zeros: tuple[ZeroRows, ...] = ()
    """What Hugging Face's class has and KerasHub's lacks, and what changes nothing if it is zero."""


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
