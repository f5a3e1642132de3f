"""Find the dims of a traced program that play the same part, and merge operations that cost the same.

A *dim group*, identified by a number, is what a plan decides about: an axis splits all its dims or none. It joins all
factors of the traced program that play the same part, such as those of the hidden dims of all layers of a transformer.
None of this depends on a mesh, so it is done once for all searches of a step.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.layout_search.program import Factors, Operation, Program
from shardload.layout_search.tracing import Traced

_ROUNDS = 3
"""In how many rounds a search compares factors (which dims that must be split alike share), to find those that play the
same part in equal layers. The first round compares the operations and weights that have the factors. Each later round
goes one step further: to the operations and weights that share other factors with these. Factors that no round tells
apart become one decision: a mesh axis splits all of them or none."""


class DimGroups:
    """The dim groups of a traced program, and its operations, merged where they cost the same."""

    def __init__(self, traced: Traced) -> None:
        """Compare the factors of a traced program, to find those that play the same part."""
        self._program = traced.program
        self._of_factor = _groups_of_factors(traced)
        self.length = {group: traced.program.length(factor) for factor, group in self._of_factor.items()}
        """For each dim group, the length of its factors. The number of parts must divide it."""
        self._known: dict[Factors, Factors] = {}
        numbers: dict[Operation, int] = {}
        self.kind: NDArray[np.int64] = np.array(
            [numbers.setdefault(self._in_groups(op), len(numbers)) for op in traced.program.operations], np.int64
        )
        """For each operation of the program, the index of its kind in ``kinds``."""
        self.kinds = tuple(numbers)
        """The different operations of the program, with dim groups in the place of factors."""

    def of(self, dims: Factors) -> Factors:
        """Return the dim groups (dims split alike) of some factors, in their order; of factors without one, none."""
        found = self._known.get(dims)
        if found is None:
            groups = (self._of_factor.get(factor) for factor in self._program.factors(dims))
            found = self._known[dims] = tuple(k for k in groups if k is not None)
        return found

    def _in_groups(self, op: Operation) -> Operation:
        exchanges = tuple(
            replace(e, split=self.of(e.split), dims=self.of(e.dims), unless=self.of(e.unless)) for e in op.exchanges
        )
        return replace(op, dims=self.of(op.dims), minor=self.of(op.minor), exchanges=exchanges)


def _groups_of_factors(traced: Traced) -> dict[int, int]:
    """Return, for each factor of the program, the number of its dim group: one for the same factors of equal layers."""
    program = traced.program
    uses = Counter(_signature(program, op) for op in program.operations)
    for variable, value in traced.weights:
        about = "weight", value.shape, value.itemsize, bool(variable.trainable)
        uses[program.factors(value.factors), about] += 1
    batch = program.factors(traced.batch)
    # Sorted, so that every process numbers the dim groups alike and arrives at the same plan.
    factors = sorted({*itertools.chain(*(dims for dims, _ in uses)), *batch})
    colour: dict[int, Any] = {f: (program.length(f), f in batch) for f in factors}
    # Each round adds to a factor's colour those of its neighbours: weights and operations that have it in a dim, with
    # the position and all other dims. Colours are hashes, as nested tuples would grow with every round.
    for _ in range(_ROUNDS):
        seen: dict[int, Counter[Any]] = {f: Counter() for f in factors}
        for (dims, about), count in uses.items():
            colours = tuple(colour[f] for f in dims)
            for i, f in enumerate(dims):
                seen[f][hash((i, about, colours))] += count
        colour = {f: hash((colour[f], frozenset(seen[f].items()))) for f in factors}
    # By first occurrence, not by hash: hashes of strings differ between processes.
    numbers: dict[Any, int] = {}
    dim_groups = {f: numbers.setdefault(colour[f], len(numbers)) for f in factors}
    # Apart, or one decision would split two dims of a tensor over the same axis.
    clash: set[int] = set()
    for tensor in program.tensors:
        meeting = Counter(dim_groups[f] for f in {*itertools.chain(*map(program.factors, tensor))} & dim_groups.keys())
        clash |= {dim_group for dim_group, count in meeting.items() if count > 1}
    following = itertools.count(len(numbers))
    return {f: next(following) if k in clash else k for f, k in dim_groups.items()}


def _signature(program: Program, op: Operation) -> tuple[Factors, tuple[Any, ...]]:
    """Return the factors of an operation's dims, and a tuple of all else, which is equal for equal work."""
    dims = [*program.factors(op.dims)]
    exchanges = []
    for e in op.exchanges:
        # Positions in `dims` instead of factors, which differ from layer to layer.
        ends = [len(dims)]
        for part in (e.split, e.dims, e.unless):
            dims += program.factors(part)
            ends.append(len(dims))
        exchanges.append((e.kind, e.nbytes, *ends))
    return tuple(dims), (op.name, op.flops, op.nbytes, tuple(exchanges))
