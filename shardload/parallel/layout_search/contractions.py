"""How primitives that sum over dims, or look up entries, map dims: where such a dim is split, devices add results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardload.parallel.layout_search.program import Exchange, Lookup, Program, Value
from shardload.parallel.layout_search.shapes import fresh


def reduce(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Drop the reduced dims: where one is split, devices combine their results."""
    axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    for other in operands[1:]:
        for a, b in zip(operands[0].dims, other.dims, strict=False):
            program.unite(a, b)
    value, results = operands[0], []
    program.store(value)
    for var in eqn.outvars:
        made = fresh(program, var, [n for d, n in enumerate(value.dims) if d not in axes])
        exchanges = [Exchange("all-reduce", value.dims[d], made.nbytes, made.dims) for d in axes]
        program.work("reduce", value.dims, flops=math.prod(value.shape), exchanges=exchanges)
        program.store(made)
        results.append(made)
    return results


def dot_general(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Unite contracted and batch dims: where a contracted dim is split, devices add their results."""
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = operands[:2]
    for a, b in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        program.unite(left.dims[a], right.dims[b])
    free = [left.dims[d] for d in range(len(left.dims)) if d not in (*left_sum, *left_batch)]
    free += [right.dims[d] for d in range(len(right.dims)) if d not in (*right_sum, *right_batch)]
    made = fresh(program, eqn.outvars[0], [*(left.dims[d] for d in left_batch), *free])
    summed = [left.dims[d] for d in left_sum]
    exchanges = [Exchange("all-reduce", n, made.nbytes, made.dims) for n in summed]
    flops = 2 * math.prod(made.shape) * math.prod(left.shape[d] for d in left_sum)
    program.store(left, right, made)
    program.work("dot", (*made.dims, *summed), flops=flops, nbytes=made.nbytes, exchanges=exchanges)
    return [made]


def convolution(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Carry the batch and the output channels; input channels are contracted, spatial dims needed whole."""
    numbers, (image, kernel) = eqn.params["dimension_numbers"], operands[:2]
    groups = eqn.params["feature_group_count"]
    batches = eqn.params["batch_group_count"]
    (batch, features, *space), (out_channels, in_channels, *window) = numbers.lhs_spec, numbers.rhs_spec
    out_batch, out_features = numbers.out_spec[:2]
    shape = tuple(eqn.outvars[0].aval.shape)
    dims: list[int | None] = [None] * len(shape)
    summed = []
    if groups == 1 and batches == 1:
        program.unite(image.dims[features], kernel.dims[in_channels])
        summed = [image.dims[features]]
    if batches == 1:
        dims[out_batch] = image.dims[batch]
    else:
        program.need_whole(image, batch, why="convolution")
    if groups == 1 and batches == 1:
        dims[out_features] = kernel.dims[out_channels]
    elif groups > 1 and groups == image.shape[features]:  # depthwise: every channel has filters of its own
        dims[out_features] = program.unite(image.dims[features], kernel.dims[out_channels])
    else:
        program.need_whole(image, features, why="convolution")
        program.need_whole(kernel, out_channels, why="convolution")
    for d in space:
        program.need_whole(image, d, why="convolution")
    for d in window:
        if image.shape[space[window.index(d)]] > 1:
            program.need_whole(kernel, d, why="convolution")
    made = fresh(program, eqn.outvars[0], dims)
    exchanges = [Exchange("all-reduce", n, made.nbytes, made.dims) for n in summed]
    flops = 2 * math.prod(shape) * math.prod(kernel.shape[d] for d in (in_channels, *window))
    program.store(image, kernel, made)
    program.work("convolution", (*made.dims, *summed), flops=flops, nbytes=made.nbytes, exchanges=exchanges)
    return [made]


def gather(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Carry batch dims of the indices and whole windows; a split dim that is looked up in needs an all-reduce."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    table, indices = operands[:2]
    shape = eqn.outvars[0].aval.shape
    dims: list[int | None] = [None] * len(shape)
    batching = tuple(numbers.operand_batching_dims)
    window = [d for d in range(len(table.shape)) if d not in (*numbers.collapsed_slice_dims, *batching)]
    looked_up = [d for d in numbers.collapsed_slice_dims if d not in batching]
    for at, d in zip(numbers.offset_dims, window, strict=True):
        if sizes[d] == table.shape[d]:
            dims[at] = table.dims[d]
        else:
            program.need_whole(table, d, why="gather")
    rest = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    for at, d in zip(rest, range(len(indices.shape) - 1), strict=False):
        dims[at] = indices.dims[d]
    for d, at in zip(batching, numbers.start_indices_batching_dims, strict=True):
        program.unite(table.dims[d], indices.dims[at])
    made = fresh(program, eqn.outvars[0], dims)
    exchanges = [Exchange("all-reduce", table.dims[d], made.nbytes, made.dims) for d in looked_up]
    whole = all(sizes[d] == table.shape[d] for d in window)
    if len(looked_up) == 1 and whole and not batching:
        program.lookups.append(Lookup(table, looked_up[0], indices, made))
    program.store(made)
    program.work("gather", made.dims, nbytes=made.nbytes, exchanges=exchanges)
    return [made]


def scatter(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Carry the operand's dims; updates that are split along indices are added up by an all-reduce."""
    numbers, (value, indices, updates) = eqn.params["dimension_numbers"], operands[:3]
    batching = tuple(numbers.operand_batching_dims)
    window = [d for d in range(len(value.shape)) if d not in (*numbers.inserted_window_dims, *batching)]
    for at, d in zip(numbers.update_window_dims, window, strict=True):
        if updates.shape[at] == value.shape[d]:
            program.unite(value.dims[d], updates.dims[at])
        else:
            program.need_whole(updates, at, why="scatter")
            program.need_whole(value, d, why="scatter")
    rest = [d for d in range(len(updates.shape)) if d not in numbers.update_window_dims]
    for at, d in zip(rest, range(len(indices.shape) - 1), strict=False):
        program.unite(updates.dims[at], indices.dims[d])
    for d, at in zip(batching, numbers.scatter_indices_batching_dims, strict=True):
        program.unite(value.dims[d], indices.dims[at])
    made = fresh(program, eqn.outvars[0], value.dims)
    own = {program.group(n) for n in made.dims}
    summed = [updates.dims[at] for at in rest if program.group(updates.dims[at]) not in own]
    exchanges = [Exchange("all-reduce", n, made.nbytes, made.dims) for n in summed]
    program.store(made)
    program.work("scatter", made.dims, nbytes=updates.nbytes, exchanges=exchanges)
    return [made]
