"""Containers in attributes of layers, which Keras searches item by item for layers and variables.

A tokenizer keeps its vocabulary as a list and as a dict: Gemma 3's 262,144 strings take Keras 0.6 s to search.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache
from types import FunctionType
from typing import Any

import keras
from keras.src.utils.tracking import TrackedDict, TrackedList

from shardload.keras_bridge.patches import Patches

LEAVES = frozenset((bool, int, float, str, bytes, FunctionType, type(None)))
"""Types of which no instance contains a layer, a variable or an optimizer."""

_LARGE = 1_000
"""Length from which it pays to remember that a container has nothing but `LEAVES`."""
_VOCABULARIES: ContextVar[dict[int, Any] | None] = ContextVar("_VOCABULARIES", default=None)
"""Large containers of `LEAVES`, by ``id``; kept alive here, so that no other object gets their ``id``."""


def members_of(container: Any) -> Iterable[Any]:
    """Return the items of a list, tuple or set, or the values of a dict; none if all are of `LEAVES`."""
    known = _VOCABULARIES.get()
    if known is not None and id(container) in known:
        return ()
    items = container.values() if isinstance(container, dict) else container
    if not _are_leaves(items):
        return items
    if known is not None and len(container) >= _LARGE:
        known[id(container)] = container
    return ()


@contextmanager
def walking_vocabularies_once() -> Iterator[None]:
    """Let `members_of` look through each large container once inside the block.

    A load asks some fifteen times what a model consists of, which takes 12 ms each time for Gemma 3's vocabulary.
    Only for a block in which no other code changes the model.
    """
    token = _VOCABULARIES.set({})
    try:
        yield
    finally:
        _VOCABULARIES.reset(token)


@cache
def bookkeeping_attributes() -> frozenset[str]:
    """Return Keras' own attributes of every layer, in which no user keeps a layer, an optimizer or a sampler.

    Half of all attributes, and nearly all of the containers. Not ``_layers``, which lists the sub-layers.
    """
    own = vars(keras.layers.Layer(name="bookkeeping"))  # with a name, so as not to use up "layer"
    return frozenset(name for name in own if name.startswith("_")) - {"_layers"}


def without_walking_vocabularies() -> AbstractContextManager[None]:
    """Inside the block, Keras does not search lists and dicts that contain only strings, numbers and the like.

    It would find nothing to track in them, so the result is the same.
    """
    return _UNWALKED.applied()


def _are_leaves(items: Iterable[Any]) -> bool:
    try:
        return LEAVES.issuperset(map(type, items))
    except Exception:
        # A metaclass may define how its classes are hashed and compared, and so raise anything.
        return False


def _unwalked(original: Callable[..., None]) -> Callable[..., None]:
    def init(self: Any, values: Any = None, tracker: Any = None) -> None:
        if type(values) not in (list, dict) or not _are_leaves(values.values() if type(values) is dict else values):
            original(self, values, tracker)
            return
        # Without a tracker, Keras copies the items and asks none; items added later are tracked as usual.
        original(self, values)
        self.tracker = tracker

    return init


_UNWALKED = Patches(lambda: [(cls, "__init__", _unwalked) for cls in (TrackedList, TrackedDict)])
