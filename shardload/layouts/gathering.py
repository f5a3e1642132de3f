"""Keep features whole between blocks where a fallback splits them.

A table whose vocabulary does not divide is split by its features, and so is the input of a kernel whose outputs do not
divide. XLA then keeps features split through the sums and norms of every block: GPT-2 with two layers and its head
compiles, on 1x4, to 15 all-reduces and 5 all-gathers, instead of 4 and 2 with the outputs below gathered
(docs/design/0024-distribution-and-wrapper.md)::

    table ─► [gather] ─► norm ─► [gather] ─► block ─► norm ─► [gather] ─► head
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

from shardload.layouts import model_variables
from shardload.layouts.choice import VariableLayout
from shardload.layouts.model_variables import is_kind

GATHERED = PartitionSpec(PartitionSpec.UNCONSTRAINED)
"""Leaves the batch dim to XLA and gathers all others."""
Layers = Sequence[tuple[Any, Sequence[Any]]]
"""Each layer of a model with its direct sub-layers."""
_OF_OTHER_DIMS = ("Batch", "Group", "Instance", "Spectral", "Unit")
"""In the names of norms that are not over features, or have no features of the model's width."""


def gathered_outputs(model: Any, placed: Mapping[int, VariableLayout]) -> Callable[[str], Any] | None:
    """Return a function from the path of a layer's output to its layout: `GATHERED`, or ``None`` to leave it to XLA.

    Returns ``None`` in place of the function if nothing splits features between blocks.

    Args:
        model: A built model.
        placed: The layout of each variable, by ``id(variable)``.
    """
    splits = any(found.fallback is not None and not found.layout.is_replicated for found in placed.values())
    every = list(model_variables.layers(model))
    norms = _norms(every)
    gathered = _sources(every, placed) if norms else []
    if splits or gathered:
        gathered += norms
    if splits:
        gathered += _recurrences(every)
    paths = {f"{layer.path}/output" for layer in gathered if getattr(layer, "path", None)}
    return (lambda path: GATHERED if path in paths else None) if paths else None


def _sources(every: Layers, placed: Mapping[int, VariableLayout]) -> list[Any]:
    """Return the layers that begin a stream of split features: tables split by features, convolutions in no pair."""
    found = []
    for layer, children in every:
        own = {v.name: placed[id(v)] for v in model_variables.own_variables(layer, children) if id(v) in placed}
        if is_kind(layer, "Embedding"):
            split = "embeddings" in own and own["embeddings"].layout.parts[-1] > 1
        else:
            # A kernel in a pair has another rule (column, row), and its features are reduced within the pair.
            split = "kernel" in own and own["kernel"].rule == "channels" and own["kernel"].layout.parts[-1] > 1
        if split:
            found.append(layer)
    return found


def _recurrences(every: Layers) -> list[Any]:
    """Return recurrent layers with one output: a head that reads split features would split their every step."""
    return [layer for layer, _ in every if is_kind(layer, "RNN") and not layer.return_state]


def _norms(every: Layers) -> list[Any]:
    """Return the norms of the model's width."""
    found: list[Any] = []
    in_attention: set[int] = set()  # norms of queries and keys there are of single heads
    for layer, children in every:
        if id(layer) in in_attention or "Attention" in type(layer).__name__:
            in_attention |= set(map(id, children))
        elif _is_norm(layer) and all(len(v.shape) == 1 for v in model_variables.own_variables(layer, children)):
            found.append(layer)
    return found


def _is_norm(layer: Any) -> bool:
    name = type(layer).__name__
    return "Norm" in name and not any(other in name for other in _OF_OTHER_DIMS)
