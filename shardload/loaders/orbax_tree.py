"""Orbax's ``_METADATA``: the key path and kind of every leaf of the saved tree.

{"tree_metadata": {"('params', 'kernel')": {"key_metadata": [{"key": "params", "key_type": 2}, …],
                                            "value_metadata": {"value_type": "jax.Array", …}}}}
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardload.errors import SourceError
from shardload.loaders.folder import member
from shardload.stores.json_files import read_object
from shardload.stores.location import Location

TREE = "_METADATA"
_STRINGS = "_strings.json"
_EMPTY = frozenset({"None", "Dict", "List", "Tuple", "NamedTuple"})
_ARRAYS = frozenset({"jax.Array", "np.ndarray", "scalar"})


@dataclass(frozen=True, slots=True)
class SavedLeaf:
    """A leaf of a saved tree."""

    keys: tuple[str, ...]
    """Its key path; sequence indices as text."""
    kind: str
    """Orbax's value type: ``jax.Array``, ``np.ndarray``, ``scalar``, ``string``, ``None``, ``Dict`` …"""

    @property
    def name(self) -> str:
        """The tensor's name."""
        return "/".join(self.keys)

    @property
    def stored_name(self) -> str:
        """The array's name in the store."""
        return ".".join(self.keys)

    @property
    def is_empty(self) -> bool:
        """Whether the leaf has no value."""
        return self.kind in _EMPTY

    @property
    def is_array(self) -> bool:
        """Whether Orbax's own handlers wrote it as an array."""
        return self.kind in _ARRAYS


@dataclass(frozen=True, slots=True)
class SavedTree:
    """The content of ``_METADATA``."""

    leaves: tuple[SavedLeaf, ...]
    is_complete: bool
    """Whether every chunk was written, including chunks of zeros."""


def read_tree(item: Location) -> SavedTree:
    """Read the tree of an item.

    Raises:
        SourceNotFoundError: When the item has no ``_METADATA``.
        SourceError: When ``_METADATA`` is damaged.
    """
    path = member(item, TREE, named_by=str(item))
    document = read_object(path)
    found = document.get("tree_metadata")
    if not isinstance(found, dict):
        raise SourceError(f"{path} should contain a 'tree_metadata' that lists the leaves of the tree, but does not")
    leaves = tuple(_leaf(entry, path) for entry in found.values())
    paths = [leaf.keys for leaf in leaves]
    if len(set(paths)) < len(paths):
        raise SourceError(f"{path} lists a leaf twice")
    return SavedTree(leaves, document.get("store_array_data_equal_to_fill_value") is True)


def _leaf(entry: object, path: Location) -> SavedLeaf:
    try:
        keys = tuple(str(part["key"]) for part in entry["key_metadata"])  # type: ignore[index]
        kind = str(entry["value_metadata"]["value_type"])  # type: ignore[index]
    except (KeyError, TypeError) as error:
        raise SourceError(f"{path} describes a leaf by {str(entry)[:200]}, which has no keys and type") from error
    return SavedLeaf(keys, kind)


def read_strings(item: Location) -> dict[str, Any]:
    """Read the text leaves, by the name Orbax stores them under.

    Raises:
        SourceError: When their file is damaged.
    """
    path = member(item, _STRINGS, named_by=str(item))
    return read_object(path) if path.exists() else {}
