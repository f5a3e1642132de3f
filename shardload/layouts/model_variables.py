"""Find a model's layers, and all its variables: weights, optimizer slots, metrics and random seeds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from shardload.errors import UsageError
from shardload.keras_bridge.model_state import bookkeeping_attributes, members_of, state_of
from shardload.keras_bridge.variables import stored_dtype

LARGE_BYTES = 1 << 20
"""A vector of unknown meaning with at least this many bytes is split, and a replicated variable is reported."""


def nested_layers(model: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Yield each layer of a model once, together with its direct sub-layers; outer layers come before inner ones."""
    seen: set[int] = set()
    queue = [model]
    # The list grows while it is read: breadth first, and no recursion limit for deep models.
    for layer in queue:
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        children = _children(layer)
        yield layer, children
        queue.extend(children)


def own_variables(layer: Any, children: Iterable[Any] | None = None) -> list[Any]:
    """Return the variables that a layer created itself, oldest first; ``children`` are its sub-layers, if known."""
    inherited = {id(v) for child in (_children(layer) if children is None else children) for v in child.weights}
    return [v for v in layer.weights if id(v) not in inherited]


def _children(layer: Any) -> list[Any]:
    """Return the layers that ``layer`` holds in attributes, or in lists and dicts there, each once, oldest first."""
    found: dict[int, Any] = {}
    skipped = bookkeeping_attributes()
    # Only models have a public `layers`; attributes are what every layer has.
    for name, attribute in list(vars(layer).items()):
        if name in skipped:
            continue
        # A tuple of types: to make a union takes as long as the rest of the loop.
        for held in members_of(attribute) if isinstance(attribute, (list, tuple, set, dict)) else (attribute,):
            if isinstance(held, keras.Layer) and held is not layer:
                found[id(held)] = held
    return list(found.values())


def check_model(model: Any, *, to: str) -> None:
    """Raise unless ``model`` is a Keras model or layer. ``to`` is a verb: the message begins "Cannot {to} …"."""
    if not isinstance(model, keras.Layer):
        raise UsageError(
            f"Cannot {to} {model!r:.60}: expected a keras.Model. Build it first, inside shardload.abstract() to "
            "allocate nothing; `shardload plan NAME` on the command line plans by name"
        )


def all_variables(model: Any) -> dict[int, Any]:
    """Return all variables of a model, its optimizer, metrics and samplers' seeds, as ``{id(variable): variable}``."""
    return {id(v): v for v in state_of(model)}


def nbytes(variable: Any) -> int:
    """Return how many bytes the value of a variable has, or will have once it is created."""
    return math.prod(map(int, variable.shape)) * stored_dtype(variable).itemsize


def is_kind(layer: Any, *names: str) -> bool:
    """Whether a layer is an instance of a Keras or KerasHub class with one of these names, or of a subclass of it."""
    # By name: importing KerasHub to compare classes takes seconds, and many models do without it.
    return any(c.__name__ in names and c.__module__.startswith("keras") for c in type(layer).__mro__)
