"""The records that declare a family of models: plain data, and functions where data is not enough.

    Family        one module of `shardload.families`
      ModelType   one ``model_type`` of Hugging Face's ``config.json``

The functions take models and open checkpoints as arguments, so this module imports neither Keras nor JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from shardload.families.parts.checks import Checks, FieldDifference
from shardload.families.parts.config import Config
from shardload.families.parts.conversion import Converter, Export
from shardload.families.parts.gguf import GgufArchitecture, PreTokenizer
from shardload.families.parts.tensors import OptionalPart, TensorSpec


class Part(StrEnum):
    """What a family declares for each of its models, or says why not: see `ModelType.lacks`."""

    EXPORT = "export"
    """Models are written as Hugging Face folders: `Family.exports`."""
    GGUF = "GGUF"
    """GGUF files are read: `Family.gguf`."""
    ADAPTERS = "adapters"
    """Adapters of PEFT are merged into folders, and LoRA of models is written for PEFT. It needs no declaration."""
    SIZE = "size"
    """Published sizes can be planned and made up: `Family.sizes`."""


OTHER_FILE = "GGUF has text and images in two files, and the text model is read alone"
"""`ModelType.lacks` of models whose vision tower is in a file of its own (``mmproj``)."""
NO_GGUF = {Part.GGUF: "GGUF has no such architecture"}
"""`ModelType.lacks` of models for which the package ``gguf`` lists no architecture; a test compares it."""


def _nothing(_: Any) -> None:
    return None


@dataclass(frozen=True, slots=True)
class KerasTokenizer:
    """How to write a KerasHub tokenizer to a Hugging Face folder: its files get other names, but keep their content."""

    files: Mapping[str, str]
    """KerasHub's name of a file → the name of the same file in a Hugging Face folder."""
    lower_case_class: str | None = None
    """Class of transformers' tokenizer, to write to ``tokenizer_config.json``; ``None``: that file is not needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelType:
    """What is known about one ``model_type`` of ``config.json``. All fields but the name are optional."""

    name: str

    # ---- its configuration --------------------------------------------------------------------
    defaults: Config = field(default_factory=dict)
    """Field → transformers' default, for fields that a configuration may omit."""
    complete: Callable[[dict[str, Any]], None] = _nothing
    """Adds, in place, the defaults of a configuration that depend on other fields; called once `defaults` are set."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Field that KerasHub's converter reads → the name under which other versions of transformers write it."""
    parts: Mapping[str, str] = field(default_factory=dict)
    """Field with the configuration of a part of a model (``vision_config``) → its ``model_type``, if none is stated."""
    optional_parts: frozenset[str] = frozenset()
    """Those of `parts` that a configuration may omit, or set to null, because a model without them loads, too."""
    adapt: Callable[[dict[str, Any]], None] = _nothing
    """Changes, in place, fields that KerasHub's converter understands differently than transformers does."""
    for_converter: Callable[[Config], Config] = lambda config: config
    """Returns the configuration to give to KerasHub, which picks a converter by ``model_type``. It may lack entries
    that the converter refuses, or have another ``model_type``, whose converter fits."""
    lacking: Callable[[Config, str], str | None] = lambda config, name: None
    """Returns why KerasHub cannot build a model with this configuration, as a clause ("config.json sets …"), or
    ``None`` if it can. Takes the configuration with defaults filled in, and how to name KerasHub's class."""
    has_tie_argument: bool = False
    """Whether KerasHub's class can be built both with and without an output layer of its own: its constructor takes
    ``tie_word_embeddings``, and its converter can read ``lm_head.weight``."""

    # ---- what it computes ---------------------------------------------------------------------
    checks: Checks | None = None
    """Fields to compare with the built model; ``is_causal``, `only` and `differences` are compared for every model."""
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Field → values with which a model may be loaded (``None``: null); KerasHub always computes with the first. A
    model without the field may be loaded too."""
    differences: Callable[[Config], Iterator[FieldDifference]] = lambda config: iter(())
    """Takes a configuration; yields the fields in it that KerasHub's class ignores, so that the model is refused."""
    pools_if: str | None = None
    """Field that is true if a model makes text embeddings: it ends in pooling layers, stored in their own folders."""
    is_part: bool = False
    """Whether it is a part of other models only (a vision tower), so that no folder has it as its ``model_type``."""
    is_image_model: bool = False
    attends_both_ways: bool = False
    """Whether to skip the check of ``is_causal``, because the model has no causal mask or transformers ignores it."""

    # ---- its tensors --------------------------------------------------------------------------
    prefix: str = ""
    """First part of tensor names (``bert``). Transformers omits it when it saves a base model without a task, so that
    names are looked up with and without it."""
    heads: str = ""
    """Regular expression for the start of tensor names (``classifier``) of a task's head. A load into a backbone, which
    has no head, leaves these tensors out."""
    outside: Mapping[str, str] = field(default_factory=dict)
    """Regular expression for tensor names → what these tensors are, for the report. KerasHub's class has no variables
    for them, so a load leaves them out."""
    has_pooler_outside: bool = False
    """Whether transformers' model has a pooler and KerasHub's has none, so that the pooler's tensors are left out."""
    optional_part: OptionalPart | None = None
    tensors: Callable[[Config], Iterator[TensorSpec]] | None = None
    """Takes a configuration, with defaults; yields name and shape of a checkpoint's tensors, in the file's order."""
    tensor_fields: tuple[str, ...] = ()
    """Fields that `tensors` reads. They are checked to be positive whole numbers before `tensors` is called."""
    part_fields: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Part of the configuration (``text_config``) that `tensors` reads → fields of it, which are checked likewise."""
    tensor_lists: tuple[str, ...] = ()
    """Fields with one number for each stage of a model, which `tensors` reads. They are checked to be lists of positive
    whole numbers, all of one length."""
    norms_minus_one: bool = False
    """Whether norms store their scale minus one, as Gemma's do: a stored 0 scales by 1."""
    has_conv1d: bool = False
    """Whether linear layers are transformers' ``Conv1D``, which stores its weight as (in, out)."""
    forgotten: Callable[[Any], Iterator[tuple[Any, str]]] = lambda backbone: iter(())
    """Takes KerasHub's backbone; yields variables that KerasHub's converter forgets, each with the name of its tensor,
    which has the same shape. A checkpoint may lack it."""
    uncomputed: Callable[[Config], str | None] = lambda config: None
    """Takes a configuration; returns a regular expression for names of tensors that a checkpoint may lack, because the
    model never computes with them; ``None``: there are none."""
    without_task: str = ""
    """Why KerasHub's class with a head cannot be built without values, as a clause; a load gives the backbone."""
    converter: Converter | None = None
    """shardload's own converter, for a model that KerasHub has a class for, but no converter."""
    task: Callable[[Config], str | None] = lambda config: None
    """Takes a configuration; returns the name of KerasHub's class for models that generate text, if the backbone's
    class has several; ``None``: the one with the name of transformers' class, or with the shortest name."""
    loads_head_of: tuple[str, ...] = ()
    """Names of transformers' classes whose task head KerasHub can load; image classifiers need not be listed."""
    unstated_dtype: str = "float32"
    """Dtype of published checkpoints whose configuration states none, for a plan without their weights."""
    rounded_to: str | None = None
    """Dtype that KerasHub's converter rounds every tensor to when it reads a checkpoint; ``None``: it rounds none."""

    lacks: Mapping[Part, str] = field(default_factory=dict)
    """Part that the family does not have for these models → why not, as a clause for the documentation's table."""

    # ---- its tokenizer ------------------------------------------------------------------------
    tokenizer_class: str = "LlamaTokenizer"
    """Class of transformers to name in ``tokenizer_config.json`` when a SentencePiece tokenizer is written."""
    keras_tokenizer: KerasTokenizer | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Related models that are declared together. All fields but the name and the title are optional."""

    name: str
    """Name in the registry: a key of `BUILT_IN`, or the name of a package's entry point."""
    title: str
    """Name as the publisher of the models writes it, for messages: ``Gemma 3``."""
    model_types: tuple[ModelType, ...] = ()
    sizes: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Name of a published size (``gemma2_9b``) → its ``config.json``."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """Name by which users may ask for a size as well (``gemma2_7b``) → the size's name in `sizes`."""
    alias_notes: Mapping[str, str] = field(default_factory=dict)
    """Alias → why no size has this name, as a clause for notes: ``Gemma 2 was never released at 7B``."""
    windows_without_self: tuple[str, ...] = ()
    """Classes of KerasHub's layers whose window leaves out the attending token, so that it sees one token more."""
    dense_experts: tuple[str, ...] = ()
    """Classes of KerasHub's layers with the experts of a mixture, of which every one computes every token."""
    ties_unsaid: tuple[str, ...] = ()
    """KerasHub's classes whose ``get_config()`` omits ``tie_word_embeddings``. For files that Keras wrote, the tensors
    tell it: without those of an output layer, the embedding is the output layer."""
    gguf: tuple[GgufArchitecture, ...] = ()
    pre_tokenizers: Mapping[str, PreTokenizer] = field(default_factory=dict)
    """GGUF's name (``tokenizer.ggml.pre``) → how text is split before byte pairs are merged."""
    exports: Mapping[str, Export] = field(default_factory=dict)
    """Class name of a KerasHub backbone → how to write its ``config.json`` for Hugging Face."""
    gguf_refused: Mapping[str, str] = field(default_factory=dict)
    """GGUF architecture → why it is refused, for a message: KerasHub's class of that name computes another model."""
