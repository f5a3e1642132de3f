"""The values of a checkpoint by the weights of its model, which are the same in every format.

tensors of either source ─ loading code ─► views and computed values ─► rows of a weight
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.converting.computing import StoredValue, compute
from shardload.converting.source import Source, open_source
from shardload.converting.strided_copy import bits, copy_view, reader_of
from shardload.manifest import View, c_strides
from shardload.mapping.state_keys import roles_of

Array = NDArray[Any]
READ_BYTES = 64 << 20
"""Bytes read at once: rows of a transposed weight are spread over its tensor, which is read again for each range."""


@dataclass(slots=True, eq=False)
class ModelValues:
    """The weights of a checkpoint's model, read a few rows at a time."""

    source: Source
    values: dict[str, StoredValue]
    """Key of the weight, equal in all models of the same structure → the location of its value."""
    _computed: tuple[str, Array] | None = field(default=None)

    def dtype(self, key: str) -> np.dtype[Any]:
        """Return the dtype of a weight as stored; of quantised and computed ones, as loaded."""
        return self.values[key].dtype

    def shape(self, key: str) -> tuple[int, ...]:
        """Return the shape of a weight."""
        return tuple(map(int, self.values[key].variable.shape))

    @property
    def keys(self) -> Iterable[str]:
        """The weights' keys, in the model's order."""
        return self.values

    def name(self, key: str) -> str:
        """Return the path of a weight in its model."""
        return str(self.values[key].variable.path)

    def ranges(self, key: str) -> Iterator[tuple[int, int]]:
        """Yield ranges of rows of at most `READ_BYTES`, or single rows if they have more."""
        shape = self.shape(key) or (1,)
        row_bytes = max(1, math.prod(shape[1:]) * self.dtype(key).itemsize)
        step = max(1, READ_BYTES // row_bytes)
        for start in range(0, shape[0], step):
            yield start, min(start + step, shape[0])

    def encoded(self, key: str) -> None:
        """Return ``None``: a weight is a view of a tensor, or computed, so its stored bytes do not tell it."""

    def rows(self, key: str, start: int, stop: int) -> Array:
        """Read rows of a weight; a scalar counts as one row."""
        value = self.values[key]
        if value.tensor is None or value.view is None:
            whole = self._compute(key, value)
            return whole[start:stop] if whole.shape else whole
        view = value.view
        if view.shape:
            view = View(
                view.tensor, view.offset + start * view.strides[0], (stop - start, *view.shape[1:]), view.strides
            )
        found = np.empty(view.shape, value.dtype)
        flat = bits(found).reshape(-1)  # the same memory

        def write(at: int, elements: Array) -> None:
            flat[at : at + len(elements)] = elements

        target = View("", 0, view.shape, c_strides(view.shape))
        # One block: `ranges` already limits the rows.
        block = max(1, found.size)
        copy_view(reader_of(value.tensor, value.dtype), write, view, target, block_elements=block)
        return found

    def _compute(self, key: str, value: StoredValue) -> Array:
        """Compute the value of a weight; the last one is kept, because callers read it range by range."""
        if self._computed is None or self._computed[0] != key:
            found: dict[int, Array] = {}
            assert value.step is not None
            compute(
                value.step,
                self.source.manifest,
                {id(value.variable): value.dtype},
                values=self.source.values.values(),
                write=lambda variable, array: found.update({id(variable): np.array(array, value.dtype)}),
                done=lambda variable: None,
            )
            self._computed = key, found[id(value.variable)]
        return self._computed[1]


def of_models(first: str, second: str) -> tuple[ModelValues, ModelValues]:
    """Open two checkpoints that describe their models; of a task and a backbone, only the backbones.

    Raises:
        UnsupportedError: When one of them describes no model.
        MismatchError: When the tensors of one do not match its model.
    """
    sources = open_source(first), open_source(second)
    whole = type(sources[0].model) is type(sources[1].model)
    one, two = (_values(source, source.model if whole else source.backbone) for source in sources)
    return one, two


def _values(source: Source, model: Any) -> ModelValues:
    # Values that are arrays are initial ones or seeds, not what the checkpoint says about its weights.
    keys = {i: role.key for i, role in roles_of(model).items() if role.kind == "weight"}
    stored = {keys[i]: value for i, value in source.values.items() if i in keys and value.array is None}
    return ModelValues(source, stored)
