"""Bytes of the KV cache on each device, while a model generates.

Of each array, the batch axes split the rows, as far as they divide them, as they split any batch. The key-value heads
are split as in the kernels that compute the keys: over the model axis, if it divides them. XLA lays it out like this,
as programs compiled for 2x4 show: whole arrays of (8, layers, 2, 1024, 4 heads, 8) are (4, layers, 2, 1024, 1, 8).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from shardload.keras_bridge.generation_cache import CachedArray, cached_arrays
from shardload.layouts.choice import LayoutChoice
from shardload.layouts.model_variables import nested_layers, own_variables
from shardload.layouts.roles import kernels_of
from shardload.sharding.layout import Spec
from shardload.sharding.mesh import MeshSpec


@dataclass(frozen=True, slots=True)
class KvCache:
    """The KV cache of a model for a number of sequences (rows) of a number of tokens: prompt and continuation."""

    rows: int
    tokens: int
    arrays: tuple[CachedArray, ...]
    keys: tuple[tuple[Any, int], ...]
    """The kernels that compute keys: the variable, and its dim of heads."""

    @classmethod
    def of(cls, model: Any, *, rows: int, tokens: int) -> KvCache:
        """Return the cache of a model, which needs no values.

        Raises:
            UnsupportedError: When the cache of the model's class cannot be told; the message is a clause, the reason.
        """
        return cls(rows, tokens, cached_arrays(model, rows=rows, tokens=tokens), tuple(_key_kernels(model)))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole cache, as if it were on one device."""
        return sum(math.prod(one.shape) * one.itemsize for one in self.arrays)

    def device_bytes(self, mesh: MeshSpec, spec_of: Callable[[Any], Spec], *, batch_axes: Sequence[str]) -> int:
        """Return the bytes on each device of a mesh; ``spec_of`` returns the layout of a variable of the model."""
        # Arrays of several layers may be one: they are split as the heads of all layers are.
        split = [set(spec_of(variable)[heads]) for variable, heads in self.keys]
        axes = set.intersection(*split) - {*batch_axes} if split else set()
        parts = math.prod(map(mesh.axis_size, axes))
        return sum(
            _shard_bytes(one, rows=math.prod(map(mesh.axis_size, batch_axes)), heads=parts) for one in self.arrays
        )

    def bytes_under(self, choice: LayoutChoice) -> int:
        """Return the bytes on each device if a model's variables have the layouts of ``choice``."""
        return self.device_bytes(choice.mesh, lambda variable: choice.of(variable).spec, batch_axes=choice.splits_batch)


def _shard_bytes(array: CachedArray, *, rows: int, heads: int) -> int:
    nbytes = math.prod(array.shape) * array.itemsize
    for dim, parts in ((array.rows, rows), (array.heads, heads)):
        if dim is not None and array.shape[dim] % parts == 0:
            nbytes //= parts
    return nbytes


def _key_kernels(model: Any) -> Iterator[tuple[Any, int]]:
    for layer, children in nested_layers(model):
        if layer.name.startswith("key"):
            for kernel in kernels_of(layer, own_variables(layer, children)):
                if len(kernel.outputs) > 1:
                    yield kernel.variable, kernel.outputs[0]
