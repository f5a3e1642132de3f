"""What hangs off a model: its layers, all its variables, and which optimizer slot belongs to which variable."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from shardload import _keras


def layers(model: Any) -> Iterator[tuple[Any, Sequence[Any]]]:
    """Every layer with its direct sub-layers, outermost first, each once."""
    seen: set[int] = set()
    queue = [model]
    for layer in queue:
        if id(layer) in seen:
            continue
        seen.add(id(layer))
        children = _keras.child_layers(layer)
        yield layer, children
        queue.extend(children)


def all_variables(model: Any) -> dict[int, Any]:
    """Every variable reachable from ``model`` by ``id``: its own, its optimizer's, then metrics and samplers' seeds."""
    return {id(v): v for v in _keras.state_of(model)}


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
