"""Read a jaxpr into a `Program`, by one rule per primitive.

Nested programs are entered, loops once, with their work counted per iteration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from shardload.layout_search import contraction_primitives, shape_primitives
from shardload.layout_search.program import Program, Value
from shardload.layout_search.shape_primitives import PrimitiveRule, fresh, itemsize

RULES: dict[str, PrimitiveRule] = {
    **dict.fromkeys(shape_primitives.ELEMENTWISE, shape_primitives.elementwise),
    **dict.fromkeys(shape_primitives.SOURCES, shape_primitives.source),
    **dict.fromkeys(("slice", "dynamic_slice", "pad"), shape_primitives.same_length),
    **dict.fromkeys(
        ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "cumred_reduce_window_impl"),
        shape_primitives.windowed,
    ),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "approx_top_k", "split"),
        shape_primitives.along_one_dim,
    ),
    **dict.fromkeys(
        ("argmax", "argmin", "reduce", "reduce_and", "reduce_max", "reduce_min", "reduce_or", "reduce_prod",
         "reduce_sum", "reduce_xor"),
        contraction_primitives.reduce,
    ),
    **dict.fromkeys(
        ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub", "scatter_add",
         "scatter_max", "scatter_min", "scatter_mul"),
        contraction_primitives.scatter,
    ),
    "broadcast_in_dim": shape_primitives.broadcast_in_dim,
    "concatenate": shape_primitives.concatenate,
    "conv_general_dilated": contraction_primitives.convolution,
    "dot_general": contraction_primitives.dot_general,
    "dynamic_update_slice": shape_primitives.dynamic_update_slice,
    "expand_dims": shape_primitives.expand_dims,
    "gather": contraction_primitives.gather,
    "reshape": shape_primitives.reshape,
    "rev": shape_primitives.rev,
    "select_and_scatter_add": shape_primitives.select_and_scatter_add,
    "squeeze": shape_primitives.squeeze,
    "stack": shape_primitives.stack,
    "tile": shape_primitives.tile,
    "top_k": shape_primitives.top_k,
    "transpose": shape_primitives.transpose,
    "unstack": shape_primitives.unstack,
}  # fmt: skip
"""How each primitive of JAX maps the dims of its operands to those of its results, by name.

A primitive without a rule constrains nothing: its operands are needed whole and its results are new, and the program's
``unknown`` counts it, for the notes of the plan."""
# Where calls (jit, custom_jvp_call, remat, …) keep their program: the parameter differs by primitive.
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


def read_program(program: Program, closed: ClosedJaxpr, arguments: Sequence[Value]) -> list[Value]:
    """Read a program with the given arguments, and return the values of its results."""
    constants = [program.value(c.shape, getattr(c.dtype, "itemsize", 8)) for c in closed.consts]
    return _run(program, closed.jaxpr, [*constants, *arguments])


def arguments_of(program: Program, closed: ClosedJaxpr) -> list[Value]:
    """Return a new value for each argument of a program."""
    return [program.value(v.aval.shape, itemsize(v.aval)) for v in closed.jaxpr.invars]


def _run(program: Program, jaxpr: Jaxpr, inputs: Sequence[Value]) -> list[Value]:
    known: dict[Any, Value] = dict(zip([*jaxpr.constvars, *jaxpr.invars], inputs, strict=True))

    def value(var: Any) -> Value:
        if isinstance(var, Literal):
            return program.value(getattr(var.aval, "shape", ()), itemsize(var.aval))
        return known[var]

    for eqn in jaxpr.eqns:
        operands = [value(v) for v in eqn.invars]
        # Operands are used at the moment the results are born, so both are counted as alive then.
        program.clock += 1
        results = _equation(program, eqn, operands)
        program.use(*operands)
        known.update(zip(eqn.outvars, results, strict=True))
    return [value(v) for v in jaxpr.outvars]


def _equation(program: Program, eqn: Any, operands: list[Value]) -> list[Value]:
    name = eqn.primitive.name
    match name:
        case "scan":
            return _scan(program, eqn, operands)
        case "while":
            return _while(program, eqn, operands)
        case "cond":
            return _cond(program, eqn, operands)
    rule = RULES.get(name)
    if rule is not None:
        return rule(program, eqn, operands)
    inner = next((eqn.params[key] for key in _INNER if key in eqn.params), None)
    # The program inside a shard_map has the shapes of one device's shards: its dims cannot be compared with these.
    jaxpr = inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner
    if jaxpr is None or name == "shard_map" or len(jaxpr.invars) != len(operands):
        return _unknown(program, eqn, operands)
    return _enter(program, inner, operands)


def _enter(program: Program, inner: Any, operands: Sequence[Value]) -> list[Value]:
    return read_program(program, inner, operands) if isinstance(inner, ClosedJaxpr) else _run(program, inner, operands)


def _scan(program: Program, eqn: Any, operands: list[Value]) -> list[Value]:
    """Enter the body once; the dims of the carry are the same before and after, that of the steps is whole."""
    params = eqn.params
    (n_consts, n_carry), length = _counts_of_scan(params), params["length"]
    consts, carry, xs = operands[:n_consts], operands[n_consts : n_consts + n_carry], operands[n_consts + n_carry :]
    # Iterations run one after the other and each needs its step on every device.
    for x in xs:
        program.need_whole(x, 0, why="scan")
    with program.repeated(length):
        steps = [program.value(x.shape[1:], x.itemsize, x.dims[1:]) for x in xs]
        results = _enter(program, params["jaxpr"], [*consts, *carry, *steps])
    # The carry of one iteration is that of the next: a layout that changed inside would be exchanged each time.
    for before, after in zip(carry, results[:n_carry], strict=True):
        program.unite_dims(before, after)
    # What an iteration returns gets a new first dim, and a buffer for all iterations.
    stacked = []
    for var, made in zip(eqn.outvars[n_carry:], results[n_carry:], strict=True):
        stacked.append(fresh(program, var, [None, *made.dims]))
        program.store(stacked[-1])
    return [*results[:n_carry], *stacked]


def _counts_of_scan(params: Mapping[str, Any]) -> tuple[int, int]:
    """Return how many operands are constants and how many are the carry: JAX 0.11 groups them in a tree instead."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


def _while(program: Program, eqn: Any, operands: list[Value]) -> list[Value]:
    """Enter the body once: how often it runs is not known before it runs."""
    params = eqn.params
    n_cond, n_body = params["cond_nconsts"], params["body_nconsts"]
    carry = operands[n_cond + n_body :]
    _enter(program, params["cond_jaxpr"], [*operands[:n_cond], *carry])
    results = _enter(program, params["body_jaxpr"], [*operands[n_cond : n_cond + n_body], *carry])
    for before, after in zip(carry, results, strict=True):
        program.unite_dims(before, after)
    program.unknown["while: counted as one iteration"] += 1
    return results


def _cond(program: Program, eqn: Any, operands: list[Value]) -> list[Value]:
    """Enter every branch: the results of all branches are split alike."""
    # The first operand chooses the branch. All branches count, as if they all ran.
    per_branch = [_enter(program, branch, operands[1:]) for branch in eqn.params["branches"]]
    for results in per_branch[1:]:
        for a, b in zip(per_branch[0], results, strict=True):
            program.unite_dims(a, b)
    return per_branch[0]


def _unknown(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Constrain nothing, need every operand whole, and count the primitive."""
    program.unknown[eqn.primitive.name] += 1
    for value in operands:
        program.need_all(value, why=eqn.primitive.name)
    results = [fresh(program, var) for var in eqn.outvars]
    program.store(*results)
    return results
