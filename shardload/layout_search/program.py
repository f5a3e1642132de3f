"""A traced program, reduced to dims: which of them must be split alike, and which collectives a split would cause.

If an operation maps a dim of an operand onto a dim of its result, both dims have the same *factors*: a mesh axis that
splits one of these dims splits both. In a feed-forward layer, the hidden dims of the kernel ``up``, of the kernel
``down`` and of the activation ``h`` are one factor:

    x [batch, features] · up [features, hidden] ─► h [batch, hidden] · down [hidden, features] ─► y [batch, features]
                                     └────────────────────┴──────────────────┘ one factor

Most dims have one factor. A dim that a reshape divides has several, the major one first, as in grouped-query attention:

    queries [batch, 128 heads, 64] ─► [batch, 8 groups, 16 heads each, 64]    128 = 8 x 16: two factors

If an operation sums over a split dim, its result needs an all-reduce. If it needs a split dim whole, its operand needs
an all-gather. `Program` collects factors, operations and these collectives.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Factors = tuple[int, ...]
"""The numbers of the factors of a dim, the major one first. ``()`` stands for a dim that is never split, such as each
dim of length 1."""
CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter", "collective-permute"]


_PASSING = frozenset(
    {
        "add_any",
        "convert_element_type",
        "copy",
        "expand_dims",
        "neg",
        "reduce_precision",
        "reshape",
        "squeeze",
        "transpose",
    }
)
"""Primitives through which a gradient goes after it was added up over the batch."""


@dataclass(slots=True, eq=False)
class Value:
    """One array of a traced program: its shape, the factors of its dims, and when its buffer is needed."""

    shape: tuple[int, ...]
    itemsize: int
    dims: tuple[Factors, ...]
    """For each dim, the numbers of its factors, as they were when the array was made: see `Program.factors`."""
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
    block: str = ""
    """The block of the model (a repeated layer) in whose forward pass the value is made; empty outside of blocks."""
    leaves_block: bool = False
    """Whether the forward pass reads the value outside of its block, too: it is an output of the block."""
    of_weights: bool = False
    """Whether the value is a product without batch dims, as of activations with a weight."""
    forward_use: int = 0
    """When the forward pass reads the value for the last time."""
    backward_use: int | None = None
    """When the backward pass reads the value for the first time; ``None`` if it does not."""
    from_weights: bool = False
    """Whether the value depends on weights, unlike a mask or the positions of tokens."""

    @property
    def nbytes(self) -> int:
        """Bytes of the whole value, over all devices."""
        return math.prod(self.shape) * self.itemsize

    @property
    def factors(self) -> Factors:
        """The factors of all dims, in order."""
        return tuple(itertools.chain(*self.dims))

    @property
    def origin(self) -> Value:
        """The value before casts and reshapes that kept the shape: for a weight cast to bfloat16, the weight."""
        before = self.view_of if self.cast_of is None else self.cast_of
        return self if before is None or before.shape != self.shape else before.origin

    @property
    def base(self) -> Value:
        """The value before all casts and reshapes."""
        before = self.view_of if self.cast_of is None else self.cast_of
        return self if before is None else before.base

    @property
    def root(self) -> Value:
        """The value that owns the buffer of this one: itself, or the value of which it is a view."""
        return self if self.view_of is None else self.view_of.root


@dataclass(frozen=True, slots=True)
class Exchange:
    """A collective that an operation needs if mesh axes split a dim: one collective over all of these axes."""

    kind: CollectiveKind
    split: Factors
    """The dim whose split makes the collective necessary."""
    nbytes: int
    """Bytes of the collective's result on one device, if no other mesh axis splits the result. If another axis splits
    one of ``dims``, each device has only a part of these bytes. For a collective-permute: bytes over all devices."""
    dims: Factors
    """The factors of the result, which other mesh axes may split."""
    unless: Factors = ()
    """Factors, each of which must be split into single entries for the collective to be unnecessary. A dim that is
    merged from two can be split along the second only if it is fully split along the first. Empty: no exception."""
    along_sequence: bool = False
    """Whether the result is split along its sequence, and gathered if one of ``split`` is split over the same axes."""
    same_as: Factors = ()
    """If an axis splits one of these, another gather along the sequence has the same result, and this one is not run.
    The solver counts it even so."""


@dataclass(frozen=True, slots=True)
class Operation:
    """Arithmetic and memory traffic of one primitive. A split of one of ``dims`` divides the work over devices."""

    name: str
    dims: Factors
    """The factors of all dims whose split divides the work over devices."""
    flops: float
    nbytes: float
    """Bytes written to memory over all devices."""
    exchanges: tuple[Exchange, ...] = ()
    from_weights: bool = False
    """Whether an operand depends on weights."""
    minor: Factors = ()
    """Factors of operands' dims that come after another one in their dim: alone, they are no ranges of its entries."""


@dataclass(frozen=True, slots=True)
class OperandRead:
    """An operation reads a value, and may have dims that the value does not have, as a product has."""

    value: Value
    dims: Factors
    """The factors of all dims of the operation."""
    operation: int
    """Index of the operation in `Program.operations`."""
    clock: int
    block: str
    """The block of the model (a repeated layer) to whose forward or backward pass the operation belongs."""
    in_backward: bool


@dataclass(frozen=True, slots=True)
class Lookup:
    """A lookup in an embedding: ``indices`` select ``rows``. A search may split such rows over the batch axes, too."""

    embedding: Value
    dim: int
    """The dim of the embedding along which the indices count: usually 0, its rows."""
    indices: Value
    rows: Value


@dataclass(slots=True)
class LayerCall:
    """One call of a layer: its first argument and its result, as far as each is an array that the program has."""

    layer: str
    inputs: Value | None = None
    outputs: Value | None = None
    operations: range = range(0)
    """Indices of its operations in `Program.operations`."""


@dataclass(frozen=True, slots=True)
class Equation:
    """One equation in the forward pass of a block: what it reads, what it makes, and its operations."""

    operands: tuple[Value, ...]
    results: tuple[Value, ...]
    operations: range
    """Indices of its operations in `Program.operations`."""


@dataclass(slots=True)
class Program:
    """One traced program: arrays, operations, and factors, which dims that must be split alike have in common."""

    operations: list[Operation] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    tensors: set[tuple[Factors, ...]] = field(default_factory=set)
    """For every array, its dims. A mesh axis can split only one of the factors that meet in one array."""
    lookups: list[Lookup] = field(default_factory=list)
    sliced: dict[int, Any] = field(default_factory=dict)
    """Factors of dims that are cut into slices, are slices, or are joined from slices, each with the `source` of the
    operation. A search splits none: XLA would move slices between devices in ways that the cost model does not know."""
    source: Any = None
    """Where the model's code has the current equation: a JAX traceback, or ``None``."""
    unknown: Counter[str] = field(default_factory=Counter)
    """How often each JAX primitive occurs that has no rule in `primitives`: a plan has a note on each of them."""
    estimated: Counter[str] = field(default_factory=Counter)
    """How often operations occur for which XLA has several ways to exchange data, and a plan may count another one."""
    reads: list[OperandRead] = field(default_factory=list)
    """Which products and sums of updates read which values."""
    calls: list[LayerCall] = field(default_factory=list)
    """The calls of layers with weights of their own, in order."""
    from_weights: bool = False
    """Whether an operand of the current equation depends on weights."""
    minor: Factors = ()
    """Factors of the current equation's operands that come after another one in their dim."""
    whole: dict[Factors, Factors] = field(default_factory=dict)
    """Dims that are whole on every device, each with the dim that it is the whole of: both are not split alike."""
    read_as: dict[int, set[str]] = field(default_factory=dict)
    """By ``id`` of a weight: the dtypes to which operations convert it; ``""`` where one reads it as it is."""
    used_at: dict[int, list[tuple[int, str, bool]]] = field(default_factory=dict)
    """By ``id`` of a weight: when operations read it, in which block, and whether in the backward pass."""
    made_by: dict[int, tuple[str, Sequence[Value], range]] = field(default_factory=dict)
    """By ``id`` of a value of the backward pass: the primitive that made it, its operands and operations."""
    batched_products: list[Value] = field(default_factory=list)
    """Results of products of activations with activations that have batch dims, as of queries and keys."""
    sums: list[tuple[Value, Factors]] = field(default_factory=list)
    """Products, each with the dims that it sums over: if axes split one, each device has a sum that is a part."""
    exponents: list[Value] = field(default_factory=list)
    """Operands of ``exp`` in the forward pass, as in a softmax."""
    clock: int = 0
    block: str = ""
    """The block of the model (a repeated layer) to whose forward or backward pass the current equation belongs."""
    in_backward: bool = False
    """Whether the current equation belongs to the backward pass."""
    equations: dict[str, list[Equation]] = field(default_factory=dict)
    """For each block, the equations of its forward pass, in order."""
    backward_from: dict[str, int] = field(default_factory=dict)
    """For each block, when its backward pass begins."""
    _length: list[int] = field(default_factory=list)
    _parts: list[Factors | None] = field(default_factory=list)
    """For a factor that was merged with another one or divided into several: these. ``None`` for any other factor."""
    _repeat: int = 1
    _gathered: set[tuple[int, Factors, Factors]] = field(default_factory=set)
    """Which values are gathered along which dims."""

    def factors(self, dim: Factors) -> Factors:
        """Return the factors that a dim has now: some may have been merged with others, or divided, since it was made.

        Dims of which all factors are equal are split alike.
        """
        if all(self._parts[f] is None for f in dim):
            return dim
        found: list[int] = []
        for factor in dim:
            parts = self._parts[factor]
            if parts is None:
                found.append(factor)
            else:
                # Remembered, to keep later look-ups short.
                self._parts[factor] = current = self.factors(parts)
                found += current
        return tuple(found)

    def length(self, factor: int) -> int:
        """Return the length of a factor. If mesh axes split it, the product of their sizes must divide its length."""
        return self._length[factor]

    def dim(self, length: int) -> Factors:
        """Return a new dim of this length with a factor of its own; ``()`` for length 1, as such a dim is not split."""
        if length == 1:
            return ()
        self._length.append(length)
        self._parts.append(None)
        return (len(self._length) - 1,)

    def unite(self, first: Factors, second: Factors) -> Factors:
        """Give two dims of the same length the same factors, so that both are split alike; return these factors.

        A factor is divided where the other dim's factor is shorter. Where none divides the other (12 x 16 and
        16 x 12), the rest of both dims is not split by a search.
        """
        # A dim without factors is never split, and need not be united with one that may be.
        if not first or not second:
            return first or second
        # Stacks, with the major factor on top.
        one, other = self.factors(first), self.factors(second)
        if self.whole_of(one) == other or self.whole_of(other) == one:
            return one
        waiting, others = [*reversed(one)], [*reversed(other)]
        while waiting and others:
            a, b = self._top(waiting), self._top(others)
            major = math.gcd(self._length[a], self._length[b])
            if a != b and major == 1:
                self.mark_sliced((*waiting, *others))
                break
            a, b = self._major(waiting, major), self._major(others, major)
            if a != b:
                # The older factor stays, so that chains of replaced ones remain short.
                self._parts[max(a, b)] = (min(a, b),)
                if (of := self.whole.pop((max(a, b),), None)) is not None:
                    self.whole[min(a, b),] = of
        return self.factors(first)

    def whole_dim(self, dim: Factors) -> Factors:
        """Return a new dim of the same length that is whole on every device, next to this one, which may be split."""
        made = self.dim(math.prod(map(self.length, self.factors(dim))))
        self.whole[made] = self.factors(dim)
        return made

    def whole_of(self, dim: Factors) -> Factors | None:
        """Return the dim, which may be split, that a dim of `whole_dim` is the whole of; ``None`` for any other dim."""
        found = self.whole.get(self.factors(dim))
        return None if found is None else self.factors(found)

    def _top(self, stack: list[int]) -> int:
        # A factor that a dim has twice may just have been divided.
        stack += reversed(self.factors((stack.pop(),)))
        return stack[-1]

    def _major(self, stack: list[int], length: int) -> int:
        """Take the factor from the top of a stack; if it is longer than ``length``, divide it and leave the rest."""
        factor = stack.pop()
        if self._length[factor] == length:
            return factor
        major, minor = self.divide(factor, length)
        stack.append(minor)
        return major

    def divide(self, factor: int, major: int) -> tuple[int, int]:
        """Replace a factor by two: one of the length ``major``, and one of the rest. Return them."""
        parts = (*self.dim(major), *self.dim(self._length[factor] // major))
        self._parts[factor] = parts
        first, second = parts
        return first, second

    def unite_dims(self, first: Value, second: Value) -> None:
        """Unite each dim of two values that have the same shape: the values are then split alike."""
        for a, b in zip(first.dims, second.dims, strict=True):
            self.unite(a, b)

    def value(
        self,
        shape: Sequence[int],
        itemsize: int,
        dims: Sequence[Factors | None] | None = None,
        *,
        view_of: Value | None = None,
    ) -> Value:
        """Add an array to the program, and return it; ``dims`` are its dims.

        ``None`` stands for a new dim, which may be split in its own way. By default, all dims are new.
        """
        shape = tuple(int(n) for n in shape)
        known = [None] * len(shape) if dims is None else dims
        made_dims = tuple(() if n == 1 else self.dim(n) if d is None else d for n, d in zip(shape, known, strict=True))
        made = Value(shape, itemsize, made_dims, view_of, self.clock, self.clock, block=self.block)
        self.values.append(made)
        self.tensors.add(made_dims)
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
            root = value.root
            root.last_use = self.clock
            if value.from_weights and id(value.base) in self.read_as:
                self.used_at.setdefault(id(value.base), []).append((self.clock, self.block, self.in_backward))
            if self.in_backward and root.backward_use is None:
                root.backward_use = self.clock
            if not self.in_backward:
                root.forward_use = self.clock
                root.leaves_block |= root.block != self.block

    def work(
        self, name: str, dims: Factors, *, flops: float = 0, nbytes: float = 0, exchanges: Sequence[Exchange] = ()
    ) -> None:
        """Record an operation with its dims, work and collectives; in a loop, as often as it is `repeated`."""
        n = self._repeat
        # A dim of length 1 is never split, so it causes no exchange.
        grown = tuple(replace(e, nbytes=e.nbytes * n) for e in exchanges if e.split)
        self.operations.append(Operation(name, dims, flops * n, nbytes * n, grown, self.from_weights, self.minor))

    def read(self, *values: Value) -> None:
        """Record that the last operation reads values, which may have to be gathered for it."""
        at = len(self.operations) - 1
        for value in values:
            self.reads.append(
                OperandRead(value, self.operations[at].dims, at, self.clock, self.block, in_backward=self.in_backward)
            )

    def summed(self, value: Value, dim: Factors) -> tuple[float, ...]:
        """Return the bytes of the all-reduces along a dim whose results, cast or added up, are a gradient."""
        waiting, found = [value], list[float]()
        while waiting:
            primitive, operands, operations = self.made_by.get(id(waiting.pop()), ("", (), range(0)))
            exchanges = (e for i in operations for e in self.operations[i].exchanges if e.kind == "all-reduce")
            nbytes = next((e.nbytes for e in exchanges if {*self.factors(e.split)} & {*self.factors(dim)}), None)
            if nbytes is not None:
                found.append(nbytes)
            elif primitive in _PASSING:
                waiting += operands
        return tuple(found)

    def record(self, primitive: str, operands: Sequence[Value], results: Sequence[Value], operations: range) -> None:
        """Record an equation of a block, from which it is found out what recomputing its values takes."""
        if self.in_backward:
            for value in results:
                # The innermost equation comes first, before the call of the function that it is in.
                self.made_by.setdefault(id(value), (primitive, operands, operations))
        if self.block and self.in_backward:
            self.backward_from.setdefault(self.block, self.clock)
        elif self.block:
            self.equations.setdefault(self.block, []).append(Equation((*operands,), (*results,), operations))

    def scores(self) -> frozenset[frozenset[int]]:
        """Return the factors of each array of attention scores: products of activations that go into a softmax."""
        products = {frozenset(self.factors(value.factors)) for value in self.batched_products}
        softmaxed = {frozenset(self.factors(value.factors)) for value in self.exponents}
        # Scores of one row, head and token have no factors, as all scalars have none.
        return frozenset(products & softmaxed - {frozenset()})

    def need_whole(self, value: Value, dim: int, *, why: str, unless: Factors = ()) -> None:
        """Record that an operation needs a dim whole: if the dim is split, the value is gathered first.

        It is not gathered if the factors in ``unless`` are split into single entries, nor a second time: what another
        operation gathered before is read again.
        """
        if not value.dims[dim]:
            return
        key = id(value.root), self.factors(value.dims[dim]), unless
        if key in self._gathered:
            return
        self._gathered.add(key)
        gather = Exchange("all-gather", value.dims[dim], value.nbytes, value.factors, unless)
        self.work(why, value.factors, exchanges=[gather])

    def need_all(self, value: Value, *, why: str) -> None:
        """Record that an operation needs a whole value: a gather for each split dim, the last first, as XLA does it."""
        for d, dim in enumerate(value.dims):
            before = tuple(itertools.chain(*value.dims[: d + 1]))
            self.work(why, value.factors, exchanges=[Exchange("all-gather", dim, value.nbytes, before)])

    def slice_dim(self, value: Value, dim: int, *, why: str) -> None:
        """Record that an operation slices a dim: the dim must be whole, and a search does not split it."""
        self.need_whole(value, dim, why=why)
        self.mark_sliced(value.dims[dim])

    def mark_sliced(self, dim: Factors) -> None:
        """Record that a dim is a slice or is joined from slices: a search does not split it."""
        for factor in dim:
            self.sliced.setdefault(factor, self.source)

    def slicing(self) -> dict[int, Any]:
        """Return the factors that a search does not split, as they are now, with the `source` of what slices them."""
        return {factor: source for dim, source in self.sliced.items() for factor in self.factors((dim,))}

    @contextmanager
    def repeated(self, times: int) -> Iterator[None]:
        """Count each operation that is recorded in the block ``times`` times, as it is in a loop."""
        # Nested loops multiply.
        before, self._repeat = self._repeat, self._repeat * max(times, 1)
        try:
            yield
        finally:
            self._repeat = before
