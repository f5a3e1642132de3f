"""A traced program, reduced to dims: which of them must be split alike, and which collectives a split would cause.

If an operation maps a dim of an operand onto a dim of its result, both dims belong to one *group*: a mesh axis that
splits one dim of a group splits all of them. In a feed-forward layer, the hidden dims of the kernel ``up``, of the
kernel ``down`` and of the activation ``h`` are one group:

    x [batch, features] · up [features, hidden] ─► h [batch, hidden] · down [hidden, features] ─► y [batch, features]
                                     └────────────────────┴──────────────────┘ one group

If an operation sums over a split dim, its result needs an all-reduce. If it needs a split dim whole, its operand needs
an all-gather. `Program` collects groups, operations and these collectives.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

UNSPLIT = -1
"""The number of every dim of length 1. Such a dim is never split, so none needs a number of its own.

A longer dim has a number, its *node*, and belongs to a group of dims that must be split alike, which has a number, too.
`UNSPLIT`, in place of a node or of the number of a group, is a dim that is not split."""
CollectiveKind = Literal["all-reduce", "all-gather", "collective-permute"]


@dataclass(slots=True, eq=False)
class Value:
    """One array of a traced program: its shape, a number (*node*) for each dim, and when its buffer is needed."""

    shape: tuple[int, ...]
    itemsize: int
    dims: tuple[int, ...]
    """For each dim, its node: a number that `Program.group` maps to the dim's group; `UNSPLIT` for length 1."""
    view_of: Value | None = None
    """The value that this one is a reshape or transpose of, and whose buffer it shares; ``None`` if it is no view."""
    born: int = 0
    last_use: int = 0
    stored: bool = False
    """Whether the value needs a buffer, unlike an intermediate result of a fused operation."""
    recomputed: bool = False
    """Whether the value is a constant or a broadcast, which XLA does not store, but computes where it is read."""
    cast_of: Value | None = None
    """The value from which this one was converted to another dtype; ``None`` if it is no conversion."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value, over all devices."""
        return math.prod(self.shape) * self.itemsize

    @property
    def origin(self) -> Value:
        """The value before casts and reshapes that kept the shape: for a weight cast to bfloat16, the weight."""
        before = self.view_of if self.cast_of is None else self.cast_of
        return self if before is None or before.shape != self.shape else before.origin

    @property
    def root(self) -> Value:
        """The value that owns the buffer of this one: itself, or the value of which it is a view."""
        return self if self.view_of is None else self.view_of.root


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective that an operation needs if a mesh axis splits the dims of ``group`` (dims that are split alike)."""

    kind: CollectiveKind
    group: int
    """The node (number) of the dim whose split makes the collective necessary. It stands for all dims of its group."""
    nbytes: int
    """Bytes of the collective's result on one device, if no other mesh axis splits the result. If another axis splits
    one of ``dims``, each device has only a part of these bytes. For a collective-permute: bytes over all devices."""
    dims: tuple[int, ...]
    """Nodes (numbers) of those dims of the result that other mesh axes may split."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Arithmetic and memory traffic of one primitive. A split of one of ``dims`` divides the work over devices."""

    name: str
    dims: tuple[int, ...]
    """Nodes (numbers that `Value.dims` gives to dims) of all dims whose split divides the work over devices."""
    flops: float
    nbytes: float
    """Bytes written to memory over all devices."""
    exchanges: tuple[Exchange, ...] = ()


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup in an embedding: ``indices`` select ``rows``. A search may split such rows over the batch axis, too."""

    embedding: Value
    dim: int
    """The dim of the embedding along which the indices count: usually 0, its rows."""
    indices: Value
    rows: Value


@dataclass(slots=True)
class Program:
    """One traced program: its arrays, its operations, and groups of dims that must be split alike."""

    divisors: tuple[int, ...]
    """Sizes of the mesh axes. An axis can split a dim if its size divides the dim's length."""
    operations: list[Operation] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    tensors: set[tuple[int, ...]] = field(default_factory=set)
    """For every array with several dims, the nodes (numbers) of its dims. Dims that meet in one array cannot be split
    over the same mesh axis."""
    lookups: list[Lookup] = field(default_factory=list)
    sliced: set[int] = field(default_factory=set)
    """Nodes (numbers) of dims that are cut into slices, are slices, or are joined from slices. A search splits none:
    XLA would move slices between devices in ways that the cost model does not know."""
    members: dict[int, int] = field(default_factory=dict)
    """For grouped-query attention, where 8 query heads become a dim of 4 groups and a dim of 2 heads: maps the number
    of the dim of groups to that of the dim of all heads."""
    unknown: Counter[str] = field(default_factory=Counter)
    """How often each JAX primitive occurs that has no rule in `primitives`: a plan has a note on each of them."""
    clock: int = 0
    _parent: list[int] = field(default_factory=list)
    _length: list[int] = field(default_factory=list)
    _repeat: int = 1

    def group(self, node: int) -> int:
        """Return the group of a dim: all dims that are split alike have the same number, the node of one of them."""
        if node == UNSPLIT:
            return UNSPLIT
        parent = self._parent
        while parent[node] != node:
            # Path halving keeps later look-ups short.
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def length(self, node: int) -> int:
        """Return the greatest common divisor of all lengths in a dim's group: the number of parts must divide it."""
        return 1 if node == UNSPLIT else self._length[self.group(node)]

    def unite(self, first: int, second: int) -> int:
        """Merge the groups of two dims, given by their nodes, so that both are split alike; return the merged group."""
        # UNSPLIT is -1: the maximum is the other node.
        if UNSPLIT in (first, second):
            return max(first, second)
        a, b = self.group(first), self.group(second)
        if a != b:
            self._parent[b] = a
            # A split must divide the length of every dim in the group.
            self._length[a] = math.gcd(self._length[a], self._length[b])
            if b in self.members:
                self.members.setdefault(a, self.members.pop(b))
        return a

    def unite_dims(self, first: Value, second: Value) -> None:
        """Merge the groups of each dim of two values that have the same shape: the values are then split alike."""
        for a, b in zip(first.dims, second.dims, strict=True):
            self.unite(a, b)

    def node(self, length: int) -> int:
        """Return a new node (number) for a dim of this length, in a group of its own; `UNSPLIT` for length 1."""
        if length == 1:
            return UNSPLIT
        self._parent.append(len(self._parent))
        self._length.append(length)
        return len(self._parent) - 1

    def any_length(self) -> int:
        """Return a new node for a dim of a broadcast or constant, which may be split into any number of parts."""
        return self.node(0)  # gcd(0, n) is n

    def value(
        self,
        shape: Sequence[int],
        itemsize: int,
        dims: Sequence[int | None] | None = None,
        *,
        view_of: Value | None = None,
    ) -> Value:
        """Add an array to the program, and return it; ``dims`` has a node (number) for each dim.

        ``None`` stands for a new node, whose dim may be split in its own way. By default, all nodes are new.
        """
        shape = tuple(int(n) for n in shape)
        known = [None] * len(shape) if dims is None else dims
        nodes = tuple(
            UNSPLIT if n == 1 else self.node(n) if d is None or d == UNSPLIT else d
            for n, d in zip(shape, known, strict=True)
        )
        made = Value(shape, itemsize, nodes, view_of, self.clock, self.clock)
        self.values.append(made)
        # Only values of several dims can have a conflict: one axis cannot split two dims of a tensor.
        if len(nodes) > 1:
            self.tensors.add(nodes)
        return made

    def store(self, *values: Value) -> None:
        """Record that values need buffers: they count as activations from when they are made to their last use."""
        for value in values:
            value.root.stored = True

    def keep_for_later(self, boundary: int) -> None:
        """Record which values need buffers from the forward pass, which ends at ``boundary``, to the backward pass."""
        for value in self.values:
            # Views share their root's buffer, and what is recomputed needs none.
            if value.view_of is None and not value.recomputed and value.born <= boundary < value.last_use:
                value.stored = True

    def use(self, *values: Value) -> None:
        """Record that the current operation reads values: their buffers are needed at least until now."""
        for value in values:
            value.root.last_use = self.clock

    def work(
        self, name: str, dims: Sequence[int], *, flops: float = 0, nbytes: float = 0, exchanges: Sequence[Exchange] = ()
    ) -> None:
        """Record an operation with its dims (nodes), work and collectives; in a loop, as often as it is `repeated`."""
        n = self._repeat
        # A dim of length 1 is never split, so it causes no exchange.
        grown = tuple(Exchange(e.kind, e.group, e.nbytes * n, e.dims) for e in exchanges if e.group != UNSPLIT)
        self.operations.append(Operation(name, tuple(dims), flops * n, nbytes * n, grown))

    def need_whole(self, value: Value, dim: int, *, why: str) -> None:
        """Record that an operation needs a dim whole: if the dim is split, the value is gathered first."""
        if value.dims[dim] != UNSPLIT:
            gather = Exchange("all-gather", value.dims[dim], value.nbytes, value.dims)
            self.work(why, value.dims, exchanges=(gather,))

    def need_all(self, value: Value, *, why: str) -> None:
        """Record that an operation needs a whole value: a gather for each split dim, the last first, as XLA does it."""
        for d, node in enumerate(value.dims):
            if node != UNSPLIT:
                gather = Exchange("all-gather", node, value.nbytes, value.dims[: d + 1])
                self.work(why, value.dims, exchanges=(gather,))

    def heads_of(self, groups: int) -> int | None:
        """Return the node of the dim of all heads for that of a dim of their groups (see `members`), else ``None``."""
        return self.members.get(self.group(groups))

    def summed_bytes(self, value: Value, dim: int, made: Value) -> int:
        """Return the bytes that an all-reduce adds up on each device, if ``made`` is a sum of ``value`` over ``dim``.

        Only ``dim`` counts as split here. Usually these are all bytes of ``made``.

        In grouped-query attention, they may be fewer. For example, 8 heads in 4 groups are split over 8 devices, and
        gradients are summed over the 2 heads of each group. Each device has one head then. It adds up only with the
        device that has the other head of its group, and only the quarter of ``made`` that belongs to this group.
        """
        length = self.length(value.dims[dim])
        if length <= value.shape[dim]:
            return made.nbytes
        return made.nbytes // math.gcd(length // value.shape[dim], max(k for k in self.divisors if length % k == 0))

    def slice_dim(self, value: Value, dim: int, *, why: str) -> None:
        """Record that an operation slices a dim: the dim must be whole, and a search does not split it."""
        self.need_whole(value, dim, why=why)
        self.mark_sliced(value.dims[dim])

    def mark_sliced(self, node: int) -> None:
        """Record that a dim, given by its node, is a slice or is joined from slices: a search does not split it."""
        if node != UNSPLIT:
            self.sliced.add(node)

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each operation that is recorded in the block ``times`` times, as it is in a loop."""
        # Nested loops multiply.
        before, self._repeat = self._repeat, self._repeat * max(times, 1)
        try:
            yield
        finally:
            self._repeat = before

    def can_follow(self, outer: int, inner: int) -> bool:
        """Whether dims of two lengths can be split alike: each axis size that divides ``outer`` divides ``inner``."""
        return all(inner % k == 0 for k in self.divisors if k > 1 and outer % k == 0)
