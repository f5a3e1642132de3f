"""How primitives that sum over dims, or look up entries, map dims: where such a dim is split, devices add results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shardload.layout_search.program import Exchange, Lookup, Program, Value
from shardload.layout_search.shape_primitives import fresh


def reduce(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Drop the reduced dims: where one is split, devices combine their results."""
    axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    # A variadic reduce has its initial values as operands too: scalars, without dims.
    for other in operands[1:]:
        for a, b in zip(operands[0].dims, other.dims, strict=False):
            program.unite(a, b)
    value, results = operands[0], []
    program.store(value)
    for var in eqn.outvars:
        made = fresh(program, var, [n for d, n in enumerate(value.dims) if d not in axes])
        exchanges = [
            Exchange("all-reduce", value.dims[d], program.summed_bytes(value, d, made), made.dims) for d in axes
        ]
        for d in axes:
            heads = program.heads_of(value.dims[d])
            if heads is not None:
                # Over groups of heads: each device has the sum of its group.
                exchanges.append(Exchange("all-reduce", heads, made.nbytes, made.dims))
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
    # The result has batch dims, then free dims of the left operand, then those of the right.
    free = [left.dims[d] for d in range(len(left.dims)) if d not in (*left_sum, *left_batch)]
    free += [right.dims[d] for d in range(len(right.dims)) if d not in (*right_sum, *right_batch)]
    made = fresh(program, eqn.outvars[0], [*(left.dims[d] for d in left_batch), *free])
    summed = [left.dims[d] for d in left_sum]
    exchanges = [Exchange("all-reduce", left.dims[d], program.summed_bytes(left, d, made), made.dims) for d in left_sum]
    for d in left_sum:
        heads = program.heads_of(left.dims[d])
        if heads is not None:
            # Over groups of heads: gradients, of which each device has those of its group, with a whole weight.
            gradients = max(left, right, key=lambda value: value.origin.born)
            exchanges.append(Exchange("all-gather", heads, gradients.nbytes, gradients.dims))
    flops = 2 * math.prod(made.shape) * math.prod(left.shape[d] for d in left_sum)
    program.store(left, right, made)
    program.work("dot", (*made.dims, *summed), flops=flops, nbytes=made.nbytes, exchanges=exchanges)
    return [made]


def convolution(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Carry the batch and the output channels; input channels are contracted, spatial dims needed whole."""
    numbers, (image, kernel) = eqn.params["dimension_numbers"], operands[:2]
    space, (_, in_channels, *window) = numbers.lhs_spec[2:], numbers.rhs_spec
    shape = tuple(eqn.outvars[0].aval.shape)
    dims: list[int | None] = [None] * len(shape)
    for at, node in zip(numbers.out_spec[:2], _channels(program, eqn, image, kernel), strict=True):
        dims[at] = node
    for d, in_kernel in zip(space, window, strict=True):
        program.need_whole(image, d, why="convolution")
        if image.shape[d] > 1:
            program.need_whole(kernel, in_kernel, why="convolution")
    made = fresh(program, eqn.outvars[0], dims)
    for d in numbers.out_spec[2:]:
        # XLA would carry a split of the result back to the image, and exchange its edges.
        program.mark_sliced(made.dims[d])
    # With groups, input channels are contracted within each group, which `_channels` keeps whole or on one device.
    summed = [kernel.dims[in_channels]] if eqn.params["feature_group_count"] == 1 else []
    exchanges = [Exchange("all-reduce", n, made.nbytes, made.dims) for n in summed]
    flops = 2 * math.prod(shape) * math.prod(kernel.shape[d] for d in (in_channels, *window))
    program.store(image, kernel, made)
    program.work("convolution", (*made.dims, *summed), flops=flops, nbytes=made.nbytes, exchanges=exchanges)
    return [made]


def _channels(program: Program, eqn: Any, image: Value, kernel: Value) -> tuple[int | None, int | None]:
    """Return the groups of the batch and of the channels of a convolution's result.

    A depthwise convolution has as many groups as channels, each with filters of its own: nothing is contracted. The
    gradient of its kernel has them in the place of the batch, and contracts the batch in the place of the channels.
    Where groups have several channels, XLA gathers these, and then the rows of an image.
    """
    batch, features = eqn.params["dimension_numbers"].lhs_spec[:2]
    out_channels, in_channels = eqn.params["dimension_numbers"].rhs_spec[:2]
    groups, batches = eqn.params["feature_group_count"], eqn.params["batch_group_count"]
    if groups == 1:
        program.unite(image.dims[features], kernel.dims[in_channels])
        if batches == 1:
            return image.dims[batch], kernel.dims[out_channels]
    grouped, result = (features, image.dims[batch]) if batches == 1 else (batch, None)
    if image.shape[grouped] == max(groups, batches):
        return result, program.unite(image.dims[grouped], kernel.dims[out_channels])
    program.need_whole(image, grouped, why="convolution")
    for d in (out_channels, in_channels) if batches == 1 else (out_channels,):
        program.need_whole(kernel, d, why="convolution")
    if batches == 1:
        rows = Exchange("all-gather", image.dims[batch], image.nbytes, image.dims[batch : batch + 1])
        program.work("convolution", image.dims, exchanges=[rows])
    return result, None


def gather(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Carry batch dims of the indices and whole windows; a split dim that is looked up in needs an all-reduce."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    embedding, indices = operands[:2]
    shape = eqn.outvars[0].aval.shape
    dims: list[int | None] = [None] * len(shape)
    batching = tuple(numbers.operand_batching_dims)
    window = [d for d in range(len(embedding.shape)) if d not in (*numbers.collapsed_slice_dims, *batching)]
    looked_up = [d for d in numbers.collapsed_slice_dims if d not in batching]
    for at, d in zip(numbers.offset_dims, window, strict=True):
        if sizes[d] == embedding.shape[d]:
            dims[at] = embedding.dims[d]
        else:
            program.need_whole(embedding, d, why="gather")
    rest = [d for d in range(len(shape)) if d not in numbers.offset_dims]
    for at, d in zip(rest, range(len(indices.shape) - 1), strict=False):
        # The last dim of the indices is the coordinate, not a dim of the result.
        dims[at] = indices.dims[d]
    for d, at in zip(batching, numbers.start_indices_batching_dims, strict=True):
        program.unite(embedding.dims[d], indices.dims[at])
    made = fresh(program, eqn.outvars[0], dims)
    exchanges = [Exchange("all-reduce", embedding.dims[d], made.nbytes, made.dims) for d in looked_up]
    whole = all(sizes[d] == embedding.shape[d] for d in window)
    # A plain embedding lookup: whole rows, by one index.
    if len(looked_up) == 1 and whole and not batching:
        program.lookups.append(Lookup(embedding, looked_up[0], indices, made))
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
    # Updates that are split like the result are added where they belong. Split along anything else, such as the batch,
    # each device has a partial sum: the gradient of an embedding.
    own = {program.group(n) for n in made.dims}
    summed = [updates.dims[at] for at in rest if program.group(updates.dims[at]) not in own]
    exchanges = [Exchange("all-reduce", n, made.nbytes, made.dims) for n in summed]
    program.store(made)
    program.work("scatter", made.dims, nbytes=updates.nbytes, exchanges=exchanges)
    return [made]
