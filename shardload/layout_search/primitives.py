"""How each primitive of JAX maps the dims of its operands to those of its results.

A rule takes the program, the equation and the operands' values, and returns the results' values. `RULES` has them by
primitive name. A primitive without a rule constrains nothing: its operands are needed whole and its results are new,
and the program's ``unknown`` counts it, for the notes of the plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardload.layout_search import contraction_primitives as contractions
from shardload.layout_search import shape_primitives as shapes
from shardload.layout_search.program import Program, Value
from shardload.layout_search.shape_primitives import Rule, fresh


def unknown(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Constrain nothing, need every operand whole, and count the primitive."""
    program.unknown[eqn.primitive.name] += 1
    for value in operands:
        program.need_all(value, why=eqn.primitive.name)
    results = [fresh(program, var) for var in eqn.outvars]
    program.store(*results)
    return results


RULES: dict[str, Rule] = {
    **dict.fromkeys(shapes.ELEMENTWISE, shapes.elementwise),
    **dict.fromkeys(shapes.SOURCES, shapes.source),
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), shapes.same_length),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "cumred_reduce_window_impl"),
        shapes.windowed,
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "approx_top_k", "split"),
        shapes.along_one_dim,
    ),
    **dict.fromkeys(
        ("argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
         "reduce_sum", "reduce_xor"),
        contractions.reduce,
    ),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub", "scatter_add",
         "scatter_max", "scatter_min", "scatter_mul"),
        contractions.scatter,
    ),
    "broadcast_in_dim": shapes.broadcast_in_dim,
    "concatenate": shapes.concatenate,
    "conv_general_dilated": contractions.convolution,
    "dot_general": contractions.dot_general,
    "dynamic_update_slice": shapes.dynamic_update_slice,
    "expand_dims": shapes.expand_dims,
    "gather": contractions.gather,
    "reshape": shapes.reshape,
    "rev": shapes.rev,
    "select_and_scatter_add": shapes.select_and_scatter_add,
    "squeeze": shapes.squeeze,
    "stack": shapes.stack,
    "tile": shapes.tile,
    "top_k": shapes.top_k,
    "transpose": shapes.transpose,
    "unstack": shapes.unstack,
}  # fmt: skip
