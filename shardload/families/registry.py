"""The registry of families: all known families, and look-ups by ``model_type``, GGUF architecture or KerasHub's class.

    built in      `BUILT_IN`: name → "module:FAMILY" in this package                          ─┐
    installed     an entry point of the group ``shardload.families``: name = "package.module:FAMILY"  ├─► families()
    registered    `register(family)`, in this process                                          ─┘

The modules of families are imported at the first look-up, all at once: they are data and import nothing heavy.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from shardload.errors import UnsupportedError, UsageError
from shardload.families.parts.config import Config
from shardload.families.parts.conversion import Export
from shardload.families.parts.gguf import GgufArchitecture, PreTokenizer
from shardload.families.record import Family, ModelType

GROUP = "shardload.families"
# The order is that of lists in messages.
BUILT_IN = {
    "gemma": "gemma:GEMMA_FAMILY",
    "gemma3": "gemma3:GEMMA_3_FAMILY",
    "gemma3n": "gemma3n:FAMILY",
    "gemma4": "gemma4:FAMILY",
    "t5gemma": "t5gemma:FAMILY",
    "t5gemma2": "t5gemma2:FAMILY",
    "paligemma": "paligemma:FAMILY",
    "llama": "llama:FAMILY",
    "mistral": "mistral:FAMILY",
    "smollm3": "smollm3:FAMILY",
    "qwen2": "qwen:FAMILY",
    "qwen3": "qwen3:FAMILY",
    "qwen3_5": "qwen3_5:FAMILY",
    "gpt_oss": "gpt_oss:FAMILY",
    "gpt2": "gpt2:GPT_2_FAMILY",
    "phi3": "phi3:FAMILY",
    "bloom": "bloom:FAMILY",
    "embedding_gemma": "gemma3:EMBEDDING_GEMMA_FAMILY",
    "bert": "bert:FAMILY",
    "roberta": "roberta:FAMILY",
    "albert": "albert:FAMILY",
    "distilbert": "distilbert:FAMILY",
    "bart": "bart:FAMILY",
    "esm": "esm:FAMILY",
    "vit": "vit:FAMILY",
    "swin": "swin:FAMILY",
    "dino": "dino:FAMILY",
    "siglip": "vision:SIGLIP_FAMILY",
    "blip2": "blip2:FAMILY",
    "clip": "clip:CLIP_FAMILY",
    "sam3": "sam3:FAMILY",
    "falcon": "gpt2:FALCON_FAMILY",
    "gpt_neox": "gpt2:GPT_NEOX_FAMILY",
}
_registered: dict[str, Family] = {}


def register(family: Family) -> None:
    """Add a family to the registry of this process; an installed package declares an entry point of `GROUP` instead.

    Raises:
        UsageError: When its name or one of its model types is taken.
    """
    if family.name in names():
        raise UsageError(f"Cannot register the family {family.name!r}: the name is taken. Choose another name")
    if taken := [kind.name for kind in family.model_types if kind.name in _model_types()]:
        owner = _model_types()[taken[0]][0].name
        raise UsageError(
            f"Cannot register the family {family.name!r}: its model_type {taken[0]!r} belongs to {owner!r}. Drop it"
        )
    _registered[family.name] = family
    _model_types.cache_clear()


def unregister(name: str) -> None:
    """Remove a family that `register` added."""
    del _registered[name]
    _model_types.cache_clear()


def names() -> tuple[str, ...]:
    """Return the name of every family, without importing one."""
    return (*BUILT_IN, *announced(), *_registered)


def families() -> tuple[Family, ...]:
    """Return every family, in the order of `names`; raise if an installed package with one cannot be imported."""
    return (*map(_declared, (*BUILT_IN, *announced())), *_registered.values())


def model_type_of(config: Config) -> ModelType:
    """Return what is known about a configuration's ``model_type``; if nothing is, a `ModelType` with only its name."""
    return _found(config)[1]


def family_of(config: Config) -> Family | None:
    """Return the family that a configuration's ``model_type`` belongs to; ``None`` for an unknown one."""
    return _found(config)[0]


def model_types() -> Mapping[str, ModelType]:
    """Return every known ``model_type`` by its name."""
    return {name: kind for name, (_, kind) in _model_types().items()}


def gguf_architectures() -> dict[str, list[GgufArchitecture]]:
    """Return the supported GGUF architectures: name → kinds of models with it (``bert``: BERT, DistilBERT, RoBERTa)."""
    found: dict[str, list[GgufArchitecture]] = {}
    for family in families():
        for kind in family.gguf:
            found.setdefault(kind.name, []).append(kind)
    return found


def why_refused(gguf_architecture: str) -> str | None:
    """Return why a GGUF architecture is not supported, as a family's ``gguf_refused`` says; ``None`` if none does."""
    return next((f.gguf_refused[gguf_architecture] for f in families() if gguf_architecture in f.gguf_refused), None)


def exports() -> dict[str, Export]:
    """Return all backbones that can be written for Hugging Face: name of KerasHub's class → how to write it."""
    return {backbone: export for family in families() for backbone, export in family.exports.items()}


def pre_tokenizers() -> dict[str, PreTokenizer]:
    """Return how to split texts into words before byte pairs are merged, by GGUF's name (``tokenizer.ggml.pre``)."""
    return {name: found for family in families() for name, found in family.pre_tokenizers.items()}


def _found(config: Config) -> tuple[Family | None, ModelType]:
    kind: Any = config.get("model_type")
    known = _model_types().get(kind) if isinstance(kind, str) else None
    return known or (None, ModelType(name=str(kind)))


@cache
def _model_types() -> dict[str, tuple[Family, ModelType]]:
    found: dict[str, tuple[Family, ModelType]] = {}
    for family in families():
        for kind in family.model_types:
            # A package cannot replace a built-in model type, only add one.
            found.setdefault(kind.name, (family, kind))
    return found


@cache
def announced() -> dict[str, EntryPoint]:
    """Return the entry points by which installed packages add families, by the name of the family."""
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILT_IN}


@cache
def _declared(name: str) -> Family:
    if name in BUILT_IN:
        built_in: Family = pkgutil.resolve_name(f"shardload.families.{BUILT_IN[name]}")
        return built_in
    point = announced()[name]
    try:
        found = point.load()
    # Any exception: importing runs the package's code. An error, not a warning, as otherwise its models would be
    # reported as unknown.
    except Exception as error:
        raise UnsupportedError(
            f"Cannot use the family {name!r}: importing {point.value} failed: {error}. Update or uninstall its package"
        ) from error
    if not isinstance(found, Family) or found.name != name:
        raise UnsupportedError(
            f"Cannot use the family {name!r}: expected its Family at {point.value}. Update or uninstall its package"
        )
    return found
