"""When the values of a training step need buffers, and which work is done again, if blocks recompute their values.

A *block* is a layer that a model repeats, as a transformer does. Without recomputation, the values that its backward
pass reads are kept from the forward pass on. A block that recomputes keeps its inputs, and makes the values again when
its backward pass begins::

                         forward pass                 backward pass
    kept         made ████████████████████████████████████████████ read
    recomputed   made ██ read in the block        made again ████ read
"""

from __future__ import annotations

from collections.abc import Mapping
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
        for value in dropped:
            spans[id(value)] = ((value.born, value.forward_use), (begins, value.last_use))
        for value in inputs:
            # Several blocks may start from it: the first block of the model is the last to read it again.
            known = spans.get(id(value), ((value.born, value.last_use),))
            spans[id(value)] = ((value.born, max(known[-1][1], begins)),)
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
