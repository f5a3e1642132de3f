"""What hangs off a model: its layers, all its variables, and which optimizer slot belongs to which variable."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import keras

from shardload.keras_bridge.model_state import state_of


def layers(model: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Every layer with its direct sub-layers, outermost first, each once."""
    seen: set[int] = set()
    queue = [model]
    for layer in queue:
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        children = _children(layer)
        yield layer, children
        queue.extend(children)


def own_variables(layer: Any) -> list[Any]:
    """Variables a layer holds itself, not those of its sub-layers, in the order they were made."""
    inherited = {id(v) for child in _children(layer) for v in child.weights}
    return [v for v in layer.weights if id(v) not in inherited]


def _children(layer: Any) -> list[Any]:
    """Direct sub-layers, each once, in the order they were attached: attributes, and lists and dicts of them."""
    found: dict[int, Any] = {}
    for attribute in list(vars(layer).values()):
        for held in _members(attribute):
            if isinstance(held, keras.Layer) and held is not layer:
                found[id(held)] = held
    return list(found.values())


def _members(attribute: Any) -> Iterable[Any]:
    match attribute:
        case list() | tuple() | set():
            return attribute
        case dict():
            return attribute.values()
        case _:
            return (attribute,)


def all_variables(model: Any) -> dict[int, Any]:
    """Every variable reachable from ``model`` by ``id``: its own, its optimizer's, then metrics and samplers' seeds."""
    return {id(v): v for v in state_of(model)}


def slots(model: Any) -> Iterator[tuple[Any, Any]]:
    """Pairs of an optimizer slot and the variable it belongs to, where their shapes agree.

    An optimizer keeps each kind of slot in a list parallel to its trainable variables.
    """
    trainable = list(model.trainable_variables)
    optimizer = getattr(model, "optimizer", None)
    while optimizer is not None:
        known = {id(v) for v in getattr(optimizer, "variables", ())}
        for held in vars(optimizer).values():
            if isinstance(held, list | tuple) and len(held) == len(trainable):
                for slot, variable in zip(held, trainable, strict=True):
                    if id(slot) in known and slot.shape == variable.shape:
                        yield slot, variable
        optimizer = getattr(optimizer, "inner_optimizer", None)
