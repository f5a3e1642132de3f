"""When the values of a training step need buffers, and which work is done again, if blocks recompute their values.

A *block* is a layer that a model repeats, as a transformer does. Without recomputation, the values that its backward
pass reads are kept from the forward pass on. A block that recomputes keeps its inputs, and makes the values again when
its backward pass begins::

                         forward pass                 backward pass
    kept         made ████████████████████████████████████████████ read
    recomputed   made ██ read in the block        made again ████ read
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shardload.keras_bridge.recomputation import Recompute
from shardload.layout_search.program import Equation, Value
from shardload.layout_search.tracing import Traced

Span = tuple[int, int]
"""The first and the last moment at which a value needs a buffer."""


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """What changes if blocks recompute: buffers that live shorter or longer, and operations that run twice."""

    remat: Mapping[str, Recompute] = field(default_factory=dict)
    """For each kind of blocks that recomputes (the name of a layer's class), what it recomputes."""
    spans: Mapping[int, tuple[Span, ...]] = field(default_factory=dict)
    """By ``id`` of a value: when it needs a buffer, for values with another lifetime than without recomputation."""
    again: frozenset[int] = frozenset()
    """Indices of the operations in `Program.operations` that the backward pass runs again."""
    begins: Mapping[str, int] = field(default_factory=dict)
    """For each block that recomputes, when its backward pass begins."""

    def of_weight(self, traced: Traced, weight: Value) -> Iterator[Span]:
        """Yield when a copy of a weight is needed that is gathered for each pass, not kept from one to the other."""
        uses = traced.program.used_at.get(id(weight), ())
        forward = [at for at, _, in_backward in uses if not in_backward]
        backward = [at for at, _, in_backward in uses if in_backward]
        again = {block for _, block, in_backward in uses if block in self.begins and not in_backward}
        if self.remat:
            full = (b for b in again if self.remat.get(traced.blocks[b.rsplit("/", 1)[-1]]) == "full")
            backward += [self.begins[block] for block in full]
        for moments in filter(None, (forward, backward)):
            yield min(moments), max(moments)

    def of(self, value: Value) -> tuple[Span, ...]:
        """Return when a value needs a buffer; never, if it has none of its own."""
        found = self.spans.get(id(value))
        return found if found is not None else ((value.born, value.last_use),) if value.stored else ()


def lifetimes(traced: Traced, remat: Mapping[str, Recompute], *, fused_attention: bool = False) -> Lifetimes:
    """Return what changes if the kinds of blocks in ``remat`` recompute what it says.

    With ``fused_attention``, scores and their gradients never need a buffer.
    """
    program, spans, again = traced.program, dict[int, tuple[Span, ...]](), set[int]()
    begin: dict[str, int] = {}
    of_block: dict[str, list[Value]] = {}
    for value in program.values:
        if value.block and value.view_of is None:
            of_block.setdefault(value.block, []).append(value)
    for block, equations in program.equations.items():
        mode = remat.get(traced.blocks.get(block.rsplit("/", 1)[-1], ""))
        begins = program.backward_from.get(block)
        if mode is None or begins is None:
            continue
        begin[block] = begins
        dropped = [v for v in of_block.get(block, ()) if _is_dropped(v, mode, traced.boundary)]
        operations, inputs = _made_again(equations, dropped, mode)
        again |= operations
        first, last = _moments(equations, {id(v) for v in inputs})
        for value in dropped:
            made = max(first.get(id(value), value.last_use), begins)
            spans[id(value)] = ((value.born, max(value.born, value.forward_use)), (made, value.last_use))
        for value in inputs:
            # Several blocks may start from it: the first block of the model is the last to read it again.
            known = spans.get(id(value), ((value.born, value.last_use),))
            until = max(known[-1][1], last.get(id(value), 0), begins)
            spans[id(value)] = (*known[:-1], (known[-1][0], until))
    if fused_attention:
        scores = (v for v in program.values if frozenset(program.factors(v.factors)) in traced.scores)
        spans |= {id(value.root): () for value in scores}
    # Weights need no buffer besides their own.
    for _, value in traced.weights:
        spans.pop(id(value), None)
    return Lifetimes(dict(remat), spans, frozenset(again), begin)


def _is_dropped(value: Value, mode: Recompute, boundary: int) -> bool:
    kept = value.stored and value.born <= boundary < value.last_use
    return kept and not value.leaves_block and not (mode == "matmuls" and value.of_weights)


def _made_again(equations: list[Equation], dropped: list[Value], mode: Recompute) -> tuple[set[int], list[Value]]:
    """Return the operations that make ``dropped`` again, and the values that they start from."""
    maker: dict[int, Equation] = {}
    for equation in equations:
        for value in equation.results:
            # The innermost equation comes first, before the call of the function that it is in.
            maker.setdefault(id(value), equation)
    operations, inputs, seen, waiting = set[int](), dict[int, Value](), set[int](), [*dropped]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        made_by = maker.get(id(value))
        if made_by is None or (mode == "matmuls" and value.of_weights):
            # Constants are made where they are read.
            if not value.root.recomputed:
                inputs[id(value.root)] = value.root
        else:
            operations |= {*made_by.operations}
            waiting += made_by.operands
    return operations, list(inputs.values())


def _moments(equations: list[Equation], inputs: set[int]) -> tuple[dict[int, int], dict[int, int]]:
    """Return, by ``id``, when values are made again, and when those in ``inputs`` are read for that the last time.

    A value is made just before the backward pass reads it, or before another one that is made from it.
    """
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    # The results of an equation come after its operands, and an equation in a function before the function's call.
    for equation in reversed(equations):
        read = (first.get(id(v.root), v.root.backward_use) for v in equation.results if id(v.root) not in inputs)
        at = min((moment for moment in read if moment is not None), default=None)
        if at is None:
            continue
        for value in equation.results:
            first[id(value.root)] = min(at, first.get(id(value.root), at))
        for value in (operand.root for operand in equation.operands):
            if id(value) in inputs:
                last[id(value)] = max(at, last.get(id(value), at))
            else:
                before = first.get(id(value), value.backward_use)
                first[id(value)] = at if before is None else min(at, before)
    return first, last
