"""What a family of models declares: plain data, and functions where data is not enough.

    Family        one module of `shardload.families`
      ModelType   one ``model_type`` of Hugging Face's ``config.json``

Functions that need a model or an open checkpoint are given one; nothing here imports Keras or JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardload.families.parts.checks import Checks, FieldDifference
from shardload.families.parts.config import Config
from shardload.families.parts.conversion import Converter, Export
from shardload.families.parts.gguf import GgufArchitecture, PreTokenizer
from shardload.families.parts.tensors import OptionalPart, TensorSpec


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class KerasTokenizer:
    """The files of a KerasHub tokenizer that Hugging Face reads unchanged."""

    files: Mapping[str, str]
    """KerasHub's name → Hugging Face's."""
    lower_case_class: str | None = None
    """Class in ``tokenizer_config.json``, for tokenizers that lower-case texts if told to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """One ``model_type``. All fields but the name are optional."""

    name: str

    # ---- its configuration --------------------------------------------------------------------
    defaults: Config = field(default_factory=dict)
    """Field → transformers' default, for fields that a configuration may omit."""
    complete: Callable[[dict[str, Any]], None] = _nothing
    """Fills in, in place, defaults that depend on other fields; called after `defaults`."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Field that KerasHub's converter reads → the same field's name in other versions of transformers."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Field with the configuration of a part → the part's default ``model_type``."""
    adapt: Callable[[dict[str, Any]], None] = _nothing
    """Changes, in place, what KerasHub's converter reads otherwise than transformers."""
    for_converter: Callable[[Config], Config] = lambda config: config
    """Returns the configuration as KerasHub chooses and calls a converter with it: without entries that it refuses, or
    with the ``model_type`` of a converter that fits."""
    lacking: Callable[[Config, str], str | None] = lambda config, name: None
    """Names the first feature that KerasHub's class or converter lacks; takes the completed configuration and the
    class's name for the message, a clause that begins with ``config.json sets``."""
    has_tie_argument: bool = False
    """Whether KerasHub's class takes ``tie_word_embeddings`` and its converter reads ``lm_head.weight``."""

    # ---- what it computes ---------------------------------------------------------------------
    checks: Checks | None = None
    """Settings to compare with the built model; ``None``: only those below are compared."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field → the only values that KerasHub supports; a missing field is supported, ``null`` not always."""
    differences: Callable[[Config], Iterator[FieldDifference]] = lambda config: iter(())
    """Yields differences that the configuration alone shows."""
    pools_if: str | None = None
    """Field that makes it an embedding model, with layers that sentence-transformers stores in folders of their own."""
    is_image_model: bool = False
    attends_both_ways: bool = False
    """Whether the model has no tokens, or transformers ignores ``is_causal``."""

    # ---- its tensors --------------------------------------------------------------------------
    prefix: str = ""
    """First part of the tensors' names, which transformers omits when it stores a base model alone."""
    heads: str = ""
    """Regular expression for the prefixes of a task's own layers, outside of every backbone."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Regular expression for the names of further tensors that KerasHub's class lacks → what they are."""
    has_pooler_outside: bool = False
    """Whether transformers has a pooler and KerasHub has none."""
    optional_part: OptionalPart | None = None
    tensors: Callable[[Config], Iterator[TensorSpec]] | None = None
    """Lists all tensors of a checkpoint in the order of the file, from a completed configuration."""
    tensor_fields: tuple[str, ...] = ()
    """Fields that `tensors` reads, which must be positive whole numbers."""
    norms_minus_one: bool = False
    """Whether the model's norms store their scale minus one."""
    converter: Converter | None = None
    """For models that KerasHub has a class for, but no converter."""
    decodes: str | None = None
    """The quantisation method whose tensors KerasHub's converter decodes."""
    loads_head_of: tuple[str, ...] = ()
    """Classes of transformers whose head KerasHub's converter loads into a task, in addition to image classifiers."""
    rounded_to: str | None = None
    """Dtype that KerasHub's converter rounds every tensor to."""

    # ---- its tokenizer ------------------------------------------------------------------------
    tokenizer_class: str = "LlamaTokenizer"
    """Class of transformers for its SentencePiece model."""
    keras_tokenizer: KerasTokenizer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Models that one module declares. All fields but the name and the title are optional."""

    name: str
    """As in the registry."""
    title: str
    """As its publisher writes it, for messages: ``Gemma 3``."""
    model_types: tuple[ModelType, ...] = ()
    sizes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a published size (``gemma2_9b``) → its ``config.json``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Another name of a size → the name in `sizes`."""
    alias_notes: Mapping[str, str] = field(default_factory=dict)
    """Alias → why it is not a size, a clause."""
    windows_without_self: tuple[str, ...] = ()
    """KerasHub's layers whose window does not count the token itself."""
    ties_unsaid: tuple[str, ...] = ()
    """KerasHub's classes whose configuration does not state ``tie_word_embeddings``."""
    gguf: tuple[GgufArchitecture, ...] = ()
    pre_tokenizers: Mapping[str, PreTokenizer] = field(default_factory=dict)
    """GGUF's name (``tokenizer.ggml.pre``) → how text is split before byte pairs are merged."""
    exports: Mapping[str, Export] = field(default_factory=dict)
    """Class of KerasHub's backbone → what is written for Hugging Face."""
    gguf_refused: Mapping[str, str] = field(default_factory=dict)
    """GGUF architecture → why it is not supported, although KerasHub seems to have the model; a clause."""
