"""Lookup layers (``StringLookup``, ``IntegerLookup``, ``TextVectorization``) and whether they have a vocabulary.

A layer that was never adapted writes its special tokens to ``vocabulary.txt`` and refuses to read them again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from keras.src.layers import TextVectorization
from keras.src.layers.preprocessing.index_lookup import IndexLookup
from keras.src.saving import saving_lib

from shardload.keras_bridge.keras_types import Model
from shardload.keras_bridge.saving import WALK_PATCH, saved_objects

_FILE = "vocabulary.txt"


def assets_of(model: Model) -> dict[str, Any] | None:
    """Return the files that layers save as nested uint8 arrays, without empty vocabularies; ``None`` without files."""
    with WALK_PATCH.applied():
        found: dict[str, Any] | None = saving_lib._save_assets_to_dict(model)
    for path, _ in unadapted_layers(model) if found else ():
        _remove(found or {}, path.split("/"))
    return found or None


def _remove(tree: dict[str, Any], path: list[str]) -> None:
    """Remove a subtree, and the folders that this leaves empty."""
    first, *rest = path
    if rest and isinstance(tree.get(first), dict):
        _remove(tree[first], rest)
    if not rest or not tree.get(first):
        tree.pop(first, None)


def unadapted_layers(model: Model) -> list[tuple[str, Any]]:
    """Return the lookup layers that have no vocabulary, with their paths."""
    found: list[tuple[str, Any]] = []
    inner: set[int] = set()
    for path, saveable in saved_objects(model):
        if isinstance(saveable, TextVectorization):
            inner.add(id(saveable._lookup_layer))  # its outer layer comes first and stands for both
        if id(saveable) not in inner and has_empty_vocabulary(saveable):
            found.append((path, saveable))
    return found


def has_empty_vocabulary(layer: Any) -> bool:
    """Whether ``layer`` is a lookup layer without a vocabulary."""
    lookup = _lookup_of(layer)
    return lookup is not None and lookup.vocabulary_size() <= lookup._token_start_index()


def is_empty_vocabulary(layer: Any, folder: Path) -> bool:
    """Whether ``folder`` contains what ``layer`` writes without a vocabulary: special tokens only."""
    lookup, file = _lookup_of(layer), folder / _FILE
    if lookup is None or not file.is_file():
        return False
    lines = file.read_text().splitlines()
    while lines and not lines[-1]:
        lines.pop()
    tokens = [str(lookup.mask_token)] * lookup._oov_start_index() + [str(lookup.oov_token)] * lookup.num_oov_indices
    return lines == tokens[: len(lines)]


def _lookup_of(layer: Any) -> Any:
    found = layer._lookup_layer if isinstance(layer, TextVectorization) else layer
    return found if isinstance(found, IndexLookup) else None
