"""Turn the solver's solution into a plan: layouts with reasons, collectives, and what the opposite decisions cost."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from shardload.errors import UnsupportedError
from shardload.keras_bridge.layer_layouts import CallLayouts
from shardload.keras_bridge.variables import numbered
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.linear_program import (
    Demand,
    Solution,
    activation_peak,
    assignment_of,
    chosen_options,
    fastest_that_fits,
    state_memory,
)
from shardload.layout_search.plan_parts import Decision, DeviceBytes, PlannedExchange, PlannedVariable
from shardload.layout_search.problem import Problem, WeightKind
from shardload.layout_search.program import Factors, OperandRead, Value
from shardload.layout_search.tracing import input_summary, line_of
from shardload.layout_search.weight_options import LEAST_STORED_BYTES, WeightOption, weight_exchanges
from shardload.layouts.kv_cache import KvCache
from shardload.sharding.layout import Spec
from shardload.units import format_bytes, plural


def plan_of_solution(
    model: Any,
    problem: Problem,
    demand: Demand,
    solution: Solution,
    *,
    inputs: Any,
    batch_axes: Sequence[str],
    limit: int | None,
) -> LayoutPlan:
    """Turn a solution into a `LayoutPlan`; ``demand`` is solved again with each decision reversed, to find its cost."""
    device = memory_of(problem, solution)
    # The axes may split other dims of all activations, such as their width.
    kinds = problem.buffers.kinds if problem.buffers is not None else ()
    is_split = any(
        kind.in_sequence and problem.sequence_axes(kind.dim_groups, assignment_of(problem, solution, kind.dim_groups))
        for kind in kinds
    )
    names = dict(zip(map(id, model.variables), numbered(v.path for v in model.variables), strict=True))
    return LayoutPlan(
        model=model.name,
        mesh=problem.mesh,
        batch_axes=tuple(batch_axes),
        training=problem.traced.training,
        inputs=input_summary(inputs),
        variables=tuple(_variables(model, problem, solution)),
        device=device,
        device_memory_bytes=limit,
        step_s=solution.seconds,
        exchanges=tuple(_exchanges(problem, solution)),
        decisions=tuple(_decisions(problem, demand, solution, names)),
        constants=dataclasses.asdict(problem.hardware),
        remat=dict(problem.lifetimes.remat),
        sequence_axes=problem.sequence.axes if problem.sequence is not None and is_split else (),
        call_layouts=tuple(call_layouts(problem, solution)) if is_split else (),
        attention=("fused" if problem.hardware.fused_attention else "stored") if problem.traced.scores else "",
        notes=tuple(_notes(model, problem, solution, inputs, batch_axes)),
    )


def memory_of(problem: Problem, solution: Solution) -> DeviceBytes:
    """Return what a device needs at the moment of a step at which it needs most."""
    activations, _ = activation_peak(problem, solution)
    kept = sum(
        nbytes // problem.shard_count(groups, assignment_of(problem, solution, groups))
        for groups, nbytes in problem.kv_cache.items()
    )
    return replace(state_memory(problem, solution), activations=max(activations - kept, 0), kv_cache=kept)


def _notes(model: Any, problem: Problem, solution: Solution, inputs: Any, batch_axes: Sequence[str]) -> Iterator[str]:
    mesh = problem.mesh
    yield from problem.asked.guess_notes
    idle = [axis for axis in batch_axes if problem.sizes[axis] > 1 and axis not in problem.pinned]
    if idle:
        lengths = sorted({np.shape(leaf)[0] for leaf in jax.tree.leaves(inputs) if np.shape(leaf)})
        yield (
            f"a batch of {' and '.join(map(str, lengths))} does not divide over axis "
            f"{' and '.join(map(repr, idle))}: its {plural(math.prod(map(mesh.axis_size, idle)), 'device')} all do the "
            "same work"
        )
    for axis in mesh.axes_of("sequence"):
        if problem.sizes[axis] > 1 and axis not in problem.pinned:
            yield f"axis {axis!r} splits nothing: its size divides the length of no sequence"
    others = [dim for dim in problem.traced.sequences if not {*problem.groups_of(dim)} & {*problem.pinned.values()}]
    if others and any(axis in problem.pinned for axis in mesh.axes_of("sequence")):
        yield (
            "inputs have sequences of different lengths: the plan counts one of them as split. Compile the step to see "
            "what the others exchange"
        )
    along = [axis for axis in mesh.axes_of("sequence") if axis in problem.pinned]
    convolved = (o for o in problem.traced.program.operations if o.name == "convolution")
    exchanged = (problem.groups_of(e.split) for o in convolved for e in o.exchanges)
    if along and {problem.pinned[axis] for axis in along} & {group for groups in exchanged for group in groups}:
        yield (
            f"convolutions along the sequence that axis {along[0]!r} splits: the plan counts the whole sequence as "
            "gathered for each. Compile the step to see what it exchanges"
        )
    if problem.update_bytes:
        yield (
            f"the optimizer needs {format_bytes(problem.update_bytes)} on each device for its update, under any "
            "layout: activations count at least that much. Its time and its collectives are not counted"
        )
    yield from _idle_notes(problem, solution)
    for name, count in sorted(problem.traced.program.estimated.items()):
        yield f"{name} (x{count}): XLA may exchange other bytes than planned; compile the step to see them"
    for name, count in sorted(problem.traced.program.unknown.items()):
        what = "" if name.startswith("while") else ": its operands count as gathered, its results as replicated"
        yield f"{'no rule for ' if what else ''}{name} (x{count}){what}"
    if problem.traced.training or problem.kv_cache or not hasattr(model, "generate"):
        return
    # A forward pass keeps no KV cache, which the models of KerasHub that generate have.
    cache = ""
    if isinstance(inputs, Mapping) and inputs.keys() == {"token_ids", "padding_mask"}:
        rows, tokens = inputs["token_ids"].shape
        with suppress(UnsupportedError):  # of models with an encoder, whose keys and values it keeps too
            found = KvCache.of(model, rows=rows, tokens=tokens)
            used = dict(_used_specs(problem, solution))
            share = found.device_bytes(mesh, lambda variable: used[id(variable)], batch_axes=batch_axes)
            cache = (
                f": {format_bytes(found.nbytes)} over all devices for {rows} x {plural(tokens, 'token')}, "
                f"{format_bytes(share)} on each"
            )
    yield f"generate() also keeps a KV cache, which is not counted{cache}. To count it, pass kv_cache (--kv-cache)"


def _idle_notes(problem: Problem, solution: Solution) -> Iterator[str]:
    """Yield a note on large weights that an axis could split, if the program did not take one of their dims apart."""
    program = problem.traced.program
    slicing = program.slicing()
    lines: dict[tuple[str, int, str], list[str]] = defaultdict(list)
    for weight, option in chosen_options(problem, solution):
        used = {axis for axes in option.spec for axis in axes}
        idle = [a for a in problem.mesh.axes_of("model") if problem.sizes[a] > 1 and a not in used]
        if weight.nbytes < LEAST_STORED_BYTES or not idle:
            continue
        for i in weight.members:
            variable, value = problem.traced.weights[i]
            for length, dim in zip(weight.shape, value.dims, strict=True):
                line = next((at for f in program.factors(dim) if (at := line_of(slicing.get(f))) is not None), None)
                if line is not None and length % math.prod(map(problem.mesh.axis_size, idle)) == 0:
                    lines["+".join(idle), length, line].append(variable.path)
    for (axes, length, line), paths in lines.items():
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        yield (
            f"axis {axes!r} does not split {paths[0]}{more}: the program slices its dim of {length}, or joins it to "
            f"others, at {line}. Where it is sliced, a weight of its own for each part could be split"
        )


def _used_specs(problem: Problem, solution: Solution) -> Iterator[tuple[int, Spec]]:
    """Yield ``id(variable)`` and the layout in which the step uses it: without the axes of its storage alone."""
    for weight, option in chosen_options(problem, solution):
        stored = {axis for axis, _ in option.stored}
        for i in weight.members:
            yield (
                id(problem.traced.weights[i][0]),
                tuple(tuple(axis for axis in axes if axis not in stored) for axes in option.spec),
            )


def call_layouts(problem: Problem, solution: Solution) -> Iterator[CallLayouts]:
    """Yield the layouts at both ends of layers with weights, if activations are split along their sequence."""
    if problem.sequence is None:
        return
    program, axes = problem.traced.program, {*problem.sequence.axes}
    reads: dict[int, list[OperandRead]] = defaultdict(list)
    for read in program.reads:
        reads[id(read.value.base)].append(read)

    def split(dims: Factors) -> bool:
        groups = problem.groups_of(dims)
        return bool(axes & {*problem.axes_of(groups, assignment_of(problem, solution, groups))})

    found: dict[tuple[str, bool, int], set[tuple[Spec, ...]]] = defaultdict(set)
    for call in program.calls:
        if call.inputs is not None and problem.in_sequence(call.inputs):
            whole = any(r.operation in call.operations and split(r.dims) for r in reads[id(call.inputs.base)])
            specs = (_activation_spec(problem, solution, call.inputs, whole=whole),)
            found[call.layer, False, len(call.inputs.shape)].add(specs)
        if call.outputs is not None and problem.in_sequence(call.outputs):
            # Looked-up rows are added up first: for rows that are split along the sequence, XLA gathers the embedding.
            lookups = (program.operations[i] for i in call.operations if program.operations[i].name == "gather")
            added = any(split(e.split) for lookup in lookups for e in lookup.exchanges)
            before, after = (_activation_spec(problem, solution, call.outputs, whole=w) for w in (True, False))
            both = added and before != after
            found[call.layer, True, len(call.outputs.shape)].add((before, after) if both else (after,))
    for (layer, is_output, _), ways in found.items():
        # A layer that is called in several ways gets none of them.
        if len(ways) == 1:
            yield CallLayouts(layer, is_output, ways.pop())


def _activation_spec(problem: Problem, solution: Solution, value: Value, *, whole: bool) -> Spec:
    """Return which axes split each dim of an activation; its sequence, if it is not to be ``whole``."""
    groups = problem.groups_of(value.factors)
    assignment = assignment_of(problem, solution, groups)
    along = () if whole or problem.sequence is None else problem.sequence_axes(groups, assignment)
    spec: list[tuple[str, ...]] = []
    for dim in value.dims:
        own = problem.groups_of(dim)
        axes = tuple(itertools.chain(*(problem.axes_of((k,), assignment) for k in own)))
        if along and problem.sequence is not None and problem.sequence.dim_groups & {*own}:
            # The first dim of several, as in scores of attention.
            axes, along = (*axes, *along), ()
        spec.append(axes)
    return tuple(spec)


def _exchanges(problem: Problem, solution: Solution) -> list[PlannedExchange]:
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for work in problem.work:
        assignment = assignment_of(problem, solution, work.all_groups)
        for exchange in work.exchanges:
            kind, axes, seconds, nbytes = problem.exchange(exchange, work, assignment)
            if axes and not any((k, axis) in solution.split for k in exchange.same_as for axis in axes):
                entry = found[kind, "+".join(axes)]
                entry[0] += work.count
                entry[1] += work.count * nbytes
                entry[2] += work.count * seconds
    for weight, option in chosen_options(problem, solution):
        for each in weight_exchanges(problem, weight, option):
            # An exchange that falls away counts negative, against the one in `problem.work`.
            entry, members = found[each.kind, "+".join(each.axes)], len(weight.members)
            entry[0] += members * each.count
            entry[1] += members * abs(each.count) * each.nbytes
            entry[2] += members * each.seconds
    return [PlannedExchange(kind, axis, int(n), round(b), s) for (kind, axis), (n, b, s) in sorted(found.items())]


def _decisions(problem: Problem, demand: Demand, solution: Solution, names: Mapping[int, str]) -> list[Decision]:
    made = []
    for dim_group, axis in problem.candidates:
        splits = (dim_group, axis) in solution.split
        # What the opposite costs: the best plan with only this decision reversed.
        opposite = replace(demand, forced=((dim_group, axis, not splits),))
        _, other = fastest_that_fits(problem, opposite)
        if other is None and demand.weight_limit_bytes is not None:
            _, other = fastest_that_fits(problem, replace(opposite, weight_limit_bytes=None))
        longer = None if other is None else other.seconds - solution.seconds
        members = tuple(
            f"{names[id(problem.traced.weights[i][0])]}[{dim}]"
            for weight in problem.weights
            for dim, groups in enumerate(weight.dim_groups)
            if dim_group in groups
            for i in weight.members
        )
        made.append(Decision(axis, splits, problem.length[dim_group], members, longer))
    return made


def _variables(model: Any, problem: Problem, solution: Solution) -> list[PlannedVariable]:
    made: dict[int, PlannedVariable] = {}
    for weight, option in chosen_options(problem, solution):
        stored, reason = tuple(axis for axis, _ in option.stored), _reason(problem, weight, option)
        for variable in (problem.traced.weights[i][0] for i in weight.members):
            made[id(variable)] = PlannedVariable(
                variable.path,
                weight.shape,
                weight.nbytes,
                option.spec,
                stored,
                weight.trainable,
                reason,
                weight.gathered_as if stored else "",
            )
    # Weights are in any order; a plan lists variables as the model does.
    order = {id(variable): at for at, variable in enumerate(model.variables)}
    return [made[key] for key in sorted(made, key=lambda key: order.get(key, len(order)))]


def _reason(problem: Problem, weight: WeightKind, option: WeightOption) -> str:
    if weight.pin is not None:
        return "pinned"
    if any(option.spec):
        dims = [f"{weight.shape[d]} of dim {d} split over {'+'.join(a)}" for d, a in enumerate(option.spec) if a]
        return ", ".join(dims) + (
            f"; the batch is moved to its rows over {'+'.join(option.moved)}" if option.moved else ""
        )
    if any(dim_group in weight.all_groups for dim_group, _ in problem.candidates):
        return "replicated: splitting one of its dims would take longer than it saves"
    return f"replicated: no dim of {weight.shape} can be split over {problem.mesh} without moving what it is used with"
