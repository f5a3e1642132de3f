"""Keep features whole between blocks where a fallback splits them.

A table whose vocabulary does not divide is split by its features, and so is the input of a kernel whose outputs do not
divide. XLA then keeps features split through the sums and norms of every block: GPT-2 with two layers and its head
compiles, on 1x4, to 15 all-reduces and 5 all-gathers, instead of 4 and 2 with the outputs below gathered
(docs/design/0024-distribution-and-wrapper.md)::

    table ─► [gather] ─► norm ─► [gather] ─► block ─► norm ─► [gather] ─► head
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jax.sharding import PartitionSpec

from shardload.parallel import model_variables
from shardload.parallel.model_variables import is_kind
from shardload.parallel.result import VariableLayout

GATHERED = PartitionSpec(PartitionSpec.UNCONSTRAINED)
"""The batch as XLA has it, all other dims whole."""
_OF_OTHER_DIMS = ("Batch", "Group", "Instance", "Spectral", "Unit")
"""In the names of norms that are not over features, or have no features of the model's width."""


def gathered_outputs(model: Any, placed: Mapping[int, VariableLayout]) -> Callable[[str], Any] | None:
    """Return what says of the path of a layer's output whether to gather it; ``None`` if no fallback splits features.

    Args:
        model: A built model.
        placed: The layout of each variable, by ``id(variable)``.
    """
    if not any(found.fallback is not None and not found.layout.is_replicated for found in placed.values()):
        return None
    paths = {f"{layer.path}/output" for layer in _between_blocks(model, placed) if getattr(layer, "path", None)}
    return lambda path: GATHERED if path in paths else None


def _between_blocks(model: Any, placed: Mapping[int, VariableLayout]) -> Iterator[Any]:
    """Yield tables split by their features, and norms of the model's width."""
    in_attention: set[int] = set()  # norms of queries and keys there are of single heads
    for layer, children in model_variables.layers(model):
        if id(layer) in in_attention or "Attention" in type(layer).__name__:
            in_attention |= set(map(id, children))
        own = {v.name: v for v in model_variables.own_variables(layer, children)}
        if is_kind(layer, "Embedding"):
            if "embeddings" in own and placed[id(own["embeddings"])].layout.parts[-1] > 1:
                yield layer
        elif _is_norm(layer) and id(layer) not in in_attention and all(len(v.shape) == 1 for v in own.values()):
            yield layer


def _is_norm(layer: Any) -> bool:
    name = type(layer).__name__
    return "Norm" in name and not any(other in name for other in _OF_OTHER_DIMS)
