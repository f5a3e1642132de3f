"""Containers that layers have as attributes: Keras walks them item by item, in search of layers and variables.

A tokenizer has its vocabulary as a list and as a dict: Gemma 3's 262,144 strings take Keras 0.6 s to walk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from types import FunctionType
from typing import Any

from keras.src.utils.tracking import TrackedDict, TrackedList

from shardload.keras_bridge.patches import Patches

LEAVES = frozenset((bool, int, float, str, bytes, FunctionType, type(None)))
"""Types of which no instance contains a layer, a variable or an optimizer."""


def members_of(container: Any) -> Iterable[Any]:
    """Return the items of a list, tuple or set, or the values of a dict; none if all are of `LEAVES`."""
    items = container.values() if isinstance(container, dict) else container
    return () if _are_leaves(items) else items


def without_walking_vocabularies() -> AbstractContextManager[None]:
    """Let Keras track lists and dicts of strings or numbers inside the block without asking each item.

    Keras finds nothing to track in them, so the attributes are the same.
    """
    return _UNWALKED.applied()


def _are_leaves(items: Iterable[Any]) -> bool:
    try:
        return LEAVES.issuperset(map(type, items))
    except Exception:  # of any kind: a metaclass may define how its classes are hashed and compared
        return False


def _unwalked(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, values: Any = None, tracker: Any = None) -> None:
        if type(values) not in (list, dict) or not _are_leaves(values.values() if type(values) is dict else values):
            original(self, values, tracker)
            return
        original(self, values)
        self.tracker = tracker  # items that are added later are tracked as usual

    return init


_UNWALKED = Patches(lambda: [(cls, "__init__", _unwalked) for cls in (TrackedList, TrackedDict)])
