"""Variables that are encoded while they are loaded: quantised weights, computed on the host from a checkpoint's floats.

The planner treats the floats as one variable, which is staged in host memory, box by box. As soon as a box is complete,
it is encoded, and only the results go to devices::

    file ──► box of the floats (staged) ──► encode ──► codes, scales ──► their shards

A box is complete if it has all elements along `Encoding.whole_dims`: those that share a scale. If the other dims change
more slowly from element to element in the file, boxes are small, else the whole variable is one box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from shardload.manifest import Chunked, Tensor, View
from shardload.sharding.layout import Bounds, Layout


@dataclass(frozen=True, slots=True)
class Output:
    """A variable that devices store: the one that is read, or one of those that are computed from it."""

    name: str
    """The variable's unique name, as in `Binding`."""
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layout: Layout
    variable: Any = field(default=None, compare=False, repr=False)
    """The ``keras.Variable``, for the caller's use."""
    constant: NDArray[Any] | None = field(default=None, compare=False, repr=False)
    """The value, if it does not depend on what is read."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the variable on each device."""
        return math.prod(self.layout.shard_shape(self.shape)) * self.dtype.itemsize


class Encoding(Protocol):
    """Computes the variables that devices store from a variable that is read; several threads may use it at once."""

    @property
    def outputs(self) -> tuple[Output, ...]:
        """The variables to compute, the largest first."""

    @property
    def whole_dims(self) -> frozenset[int]:
        """Dims of the variable along which a box must be complete to be encoded."""

    @property
    def multiples(self) -> tuple[int, ...]:
        """For each dim of the variable, the number that a box must begin at a multiple of."""

    def needed(self, number: int, box: Bounds) -> Bounds:
        """Return the box of the variable from which a box of output ``number`` is computed."""

    def encode(self, values: NDArray[Any], box: Bounds) -> Iterator[tuple[int, Bounds, NDArray[Any]]]:
        """Yield (number of an output, box of it, its elements there) for all that follows from a box of the variable.

        ``values`` has the elements in ``box``, in the dtype of the binding. The memory of what is yielded may be reused
        in the next turn. Raises a `TransferError` if the elements cannot be encoded.
        """


def staged_layout(encoding: Encoding, layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return how to stage a variable: split as in ``layout`` where each device can then encode its outputs by itself.

    ``layout`` is the one that the variable would have if it were stored as it is. All devices need the whole variable
    (the result is replicated) if a device's box of an output follows from more than its box of the variable.
    """
    spec = tuple(() if d in encoding.whole_dims else axes for d, axes in enumerate(layout.spec))
    found = Layout(layout.mesh, spec)
    boxes = found.bounds(shape)
    for number, output in enumerate(encoding.outputs):
        if output.constant is not None:
            continue
        for box, own in zip(boxes, output.layout.bounds(output.shape), strict=True):
            if box.intersect(needed := encoding.needed(number, own)) != needed and needed.size:
                return Layout.replicated(layout.mesh, len(shape))
    return found


def divided_dim(encoding: Encoding, view: View, tensor: Tensor) -> int | None:
    """Return the dim along which a variable is staged in several boxes; ``None`` if it is staged as a whole.

    It is the dim that changes most slowly in the file. If a box must be complete along that dim, no box is complete
    before the last element has come. Chunks of a tensor may lie in any order, so such a tensor is staged as a whole.
    """
    dims = [d for d, n in enumerate(view.shape) if n > 1]
    slowest = max(dims, key=lambda d: view.strides[d], default=None)
    return None if slowest in encoding.whole_dims or isinstance(tensor.storage, Chunked) else slowest


def parts_to_encode(
    boxes: Sequence[Bounds], *, dim: int | None, multiple: int, limit: int, shape: tuple[int, ...]
) -> list[tuple[Bounds, list[int]]]:
    """Divide a variable into the boxes that are encoded one by one, each with the numbers of the pieces that fill it.

    Args:
        boxes: The pieces in which the variable arrives, in order.
        dim: The dim to divide, along which the pieces come in order; ``None``: the whole variable is one box.
        multiple: What a box must begin at a multiple of, along ``dim``.
        limit: Most elements of a box, unless one piece has more.
        shape: The shape of the variable.
    """
    whole = Bounds.whole(shape)
    if dim is None:
        return [(whole, list(range(len(boxes))))]
    found: list[tuple[Bounds, list[int]]] = []
    first = last = 0
    members: list[int] = []
    for number, box in enumerate(boxes):
        start, stop = box.start[dim], box.stop[dim]
        full = (max(last, stop) - first) * whole.size // shape[dim] > limit
        if members and full and start >= last and last % multiple == 0:
            found.append((_along(whole, dim, first, last), members))
            members = []
        first, last = (first, max(last, stop)) if members else (start, stop)
        members.append(number)
    return [*found, (_along(whole, dim, first, last), members)] if members else found


def _along(whole: Bounds, dim: int, start: int, stop: int) -> Bounds:
    starts, stops = list(whole.start), list(whole.stop)
    starts[dim], stops[dim] = start, stop
    return Bounds(tuple(starts), tuple(stops))
