"""Which layer feeds which in functional and sequential models: the graph that Keras keeps, without a trace."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator
from typing import Any

import keras

from shardload.keras_bridge.keras_types import Model


def arguments_of_call(model: Model) -> frozenset[str] | None:
    """Return the names of the arguments that a model's ``call`` uses; ``None`` if it may use any.

    The ``call`` of a functional or sequential model takes ``**kwargs``; it uses the names that its layers declare as
    context arguments.
    """
    taken = inspect.signature(model.call).parameters
    names = {name for name, p in taken.items() if p.kind is not p.VAR_KEYWORD}
    if len(names) < len(taken):
        if not model.call.__module__.startswith("keras.src.models"):
            return None
        for layer in model._flatten_layers():
            names |= set(getattr(layer, "_call_context_args", ()))
    return frozenset(names)


def sole_consumers(model: Model) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of a layer and the only layer that reads its output, in the order of the calls.

    The first layer of a pair is called once and has one output, which is no output of the model; the second is called
    once. A model that is not functional has no pairs.
    """
    # A Sequential model keeps its graph in a functional model.
    graph = getattr(model, "_functional", None) or model
    if not isinstance(graph, keras.Model) or not hasattr(graph, "_nodes_by_depth"):
        return
    # Keras counts depth from the outputs, so the greatest depth is called first.
    nodes = [node for depth in sorted(graph._nodes_by_depth, reverse=True) for node in graph._nodes_by_depth[depth]]
    calls = Counter(id(node.operation) for node in nodes)
    read_by: dict[int, list[Any]] = {}
    for node in nodes:
        for tensor in () if node.is_input else node.input_tensors:
            read_by.setdefault(id(tensor), []).append(node.operation)
    returned = {id(tensor) for tensor in graph.outputs}
    for node in nodes:
        if node.is_input or calls[id(node.operation)] > 1 or len(node.outputs) != 1:
            continue
        readers = read_by.get(id(node.outputs[0]), [])
        if len(readers) == 1 and id(node.outputs[0]) not in returned and calls[id(readers[0])] == 1:
            yield node.operation, readers[0]
