"""A traced program, reduced to dims: which of them must be split alike, and which collectives a split would cause.

Dims of values that an operation maps onto each other form one *group*: splitting one over a mesh axis splits them all.
The hidden dim of a feed-forward layer is one group, with a dim of two kernels, a bias and an activation:

    x [batch, features] · up [features, hidden] ─► h [batch, hidden] · down [hidden, features] ─► y [batch, features]
                                     └────────────────────┴──────────────────┘ one group

`Program` collects groups (a union-find over dims), operations with their work, and the communication that a split of a
group would cause: contracting a split dim needs an all-reduce of the result, an operation that needs a dim whole an
all-gather of its operand. Dims of length 1 belong to no group. Of the mesh, only the sizes of its axes are known here:
they decide whether a dim can follow another through a reshape.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal

UNSPLIT = -1
"""The group of dims that nothing splits: those of length 1."""
CollectiveKind = Literal["all-reduce", "all-gather", "collective-permute"]


@dataclass(slots=True, eq=False)
class Value:
    """One array of the program."""

    shape: tuple[int, ...]
    itemsize: int
    dims: tuple[int, ...]
    """For each dim its node, which `Program.group` maps to its group; `UNSPLIT` where its length is 1."""
    view_of: Value | None = None
    """The value whose buffer this one shares, being a reshape or transpose of it."""
    born: int = 0
    last_use: int = 0
    stored: bool = False
    """Whether the value needs a buffer of its own; an intermediate of a fused operation does not."""
    recomputed: bool = False
    """Whether it is a constant or a broadcast, which XLA computes again wherever it is read instead of storing it."""
    cast_of: Value | None = None
    """The value that this one is a conversion of, to another dtype."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value."""
        return math.prod(self.shape) * self.itemsize

    @property
    def origin(self) -> Value:
        """The value before any casts and views that keep the shape, such as the weight before its cast to bfloat16."""
        before = self.view_of if self.cast_of is None else self.cast_of
        return self if before is None or before.shape != self.shape else before.origin

    @property
    def root(self) -> Value:
        """The value that owns the buffer."""
        return self if self.view_of is None else self.view_of.root


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective that an operation needs if ``group`` is split."""

    kind: CollectiveKind
    group: int
    nbytes: int
    """Bytes of the result over all devices; on each device, they are fewer if axes split its ``dims``. Those of a
    collective-permute count all shards."""
    dims: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Operation:
    """Arithmetic and memory traffic of one primitive, which a split of its dims divides over devices."""

    name: str
    dims: tuple[int, ...]
    """Nodes of all dims whose split divides the work."""
    flops: float
    nbytes: float
    """Bytes written to memory over all devices."""
    exchanges: tuple[Exchange, ...] = ()


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup of ``rows`` in an embedding."""

    embedding: Value
    dim: int
    """The dim of the embedding that indices refer to."""
    indices: Value
    rows: Value


@dataclass(slots=True)
class Program:
    """The groups, operations and values of one traced program."""

    divisors: tuple[int, ...]
    """Sizes of the mesh axes."""
    operations: list[Operation] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    tensors: set[tuple[int, ...]] = field(default_factory=set)
    """Dims of every value with several dims, of which a mesh axis can split only one."""
    lookups: list[Lookup] = field(default_factory=list)
    sliced: set[int] = field(default_factory=set)
    """Nodes of dims that an operation slices, or joins from slices. A search splits none of them: XLA would move slices
    between devices in ways that the cost model does not know."""
    members: dict[int, int] = field(default_factory=dict)
    """Group of a dim that counts groups of heads → node of all heads (grouped-query attention); both split together."""
    unknown: Counter[str] = field(default_factory=Counter)
    """Primitives without a rule, with how often each occurs."""
    clock: int = 0
    _parent: list[int] = field(default_factory=list)
    _length: list[int] = field(default_factory=list)
    _repeat: int = 1

    def group(self, node: int) -> int:
        """Return the representative of a node's group."""
        if node == UNSPLIT:
            return UNSPLIT
        parent = self._parent
        while parent[node] != node:
            # Path halving keeps later look-ups short.
            parent[node] = parent[parent[node]]
            node = parent[node]
        return node

    def length(self, node: int) -> int:
        """Return the greatest common divisor of the lengths of a group's dims; the number of parts must divide it."""
        return 1 if node == UNSPLIT else self._length[self.group(node)]

    def unite(self, first: int, second: int) -> int:
        """Merge two groups and return the result; a dim of length 1 leaves the other as it is."""
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
        """Merge the groups of two values of one shape, dim by dim."""
        for a, b in zip(first.dims, second.dims, strict=True):
            self.unite(a, b)

    def node(self, length: int) -> int:
        """Return a new node, for a dim of this length."""
        if length == 1:
            return UNSPLIT
        self._parent.append(len(self._parent))
        self._length.append(length)
        return len(self._parent) - 1

    def any_length(self) -> int:
        """Return a new node for a dim of a broadcast or a constant, which may be split into any number of parts."""
        return self.node(0)  # gcd(0, n) is n

    def value(
        self,
        shape: Sequence[int],
        itemsize: int,
        dims: Sequence[int | None] | None = None,
        *,
        view_of: Value | None = None,
    ) -> Value:
        """Return a new value; ``None`` among ``dims`` stands for a dim that follows no other."""
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
        """Record that values need buffers, so they count as activations while they are alive."""
        for value in values:
            value.root.stored = True

    def keep_for_later(self, boundary: int) -> None:
        """Record that values made up to ``boundary`` and read after it need buffers: those that backward uses."""
        for value in self.values:
            # Views share their root's buffer, and what is recomputed needs none.
            if value.view_of is None and not value.recomputed and value.born <= boundary < value.last_use:
                value.stored = True

    def use(self, *values: Value) -> None:
        """Record that the current operation reads values, so their buffers live at least until now."""
        for value in values:
            value.root.last_use = self.clock

    def work(
        self, name: str, dims: Sequence[int], *, flops: float = 0, nbytes: float = 0, exchanges: Sequence[Exchange] = ()
    ) -> None:
        """Record an operation, as often as the enclosing loops repeat it."""
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
        """Record that an operation needs all dims whole: XLA gathers the last one first, so each result is larger."""
        for d, node in enumerate(value.dims):
            if node != UNSPLIT:
                gather = Exchange("all-gather", node, value.nbytes, value.dims[: d + 1])
                self.work(why, value.dims, exchanges=(gather,))

    def heads_of(self, groups: int) -> int | None:
        """Return the node of all heads, given the node of a dim that counts groups of heads; see `members`."""
        return self.members.get(self.group(groups))

    def summed_bytes(self, value: Value, dim: int, made: Value) -> int:
        """Return the bytes of the all-reduce that an operation needs if a dim that it sums over is split.

        Grouped-query attention sums gradients over the heads of each group of them. Where the heads are split over more
        devices than there are groups, the devices that share a group add up its part only.
        """
        length = self.length(value.dims[dim])
        if length <= value.shape[dim]:
            return made.nbytes
        return made.nbytes // math.gcd(length // value.shape[dim], max(k for k in self.divisors if length % k == 0))

    def slice_dim(self, value: Value, dim: int, *, why: str) -> None:
        """Record that an operation slices a dim, which it needs whole for that."""
        self.need_whole(value, dim, why=why)
        self.mark_sliced(value.dims[dim])

    def mark_sliced(self, node: int) -> None:
        """Record that a dim is joined from slices, or is a slice, so that a search does not split it."""
        if node != UNSPLIT:
            self.sliced.add(node)

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count operations recorded inside the block ``times`` times, as the body of a loop."""
        # Nested loops multiply.
        before, self._repeat = self._repeat, self._repeat * max(times, 1)
        try:
            yield
        finally:
            self._repeat = before

    def can_follow(self, outer: int, inner: int) -> bool:
        """Whether every mesh axis that divides ``outer`` divides ``inner``: a dim of one can follow the other."""
        return all(inner % k == 0 for k in self.divisors if k > 1 and outer % k == 0)
