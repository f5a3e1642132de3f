"""How each primitive of JAX maps the dims of its operands to those of its results: one function, its rule, for each.

Dims that must be split alike have the same *factors* (see `program`). A rule *carries* a dim if it gives a dim of the
result the factors of a dim of an operand, and *unites* dims if it makes their factors equal. Primitives that move or
combine entries come first. Then come sums over dims and lookups of entries: if the dim that is summed over, or looked
up in, is split, devices add their results. This module has more than 400 lines, as it is read like a table.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from shardload.layout_search.program import Exchange, Factors, Lookup, Program, Value

PrimitiveRule = Callable[[Program, Any, Sequence[Value]], list[Value]]
"""How one JAX primitive maps dims: a function of the program, an equation, and the operands' `Value`s, that adds the
work of the operation to the program and returns the results' `Value`s."""

_ELEMENTWISE = """
abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt ceil clamp
clz complex conj convert_element_type copy copy_p cos cosh digamma div eq eq_to erf erf_inv erfc exp exp2 expm1 floor
from_edtype ge gt igamma igamma_grad_a igammac imag integer_pow is_finite layout_constraint le le_to lgamma log log1p
log2 logistic lt lt_to max min mul mul_add_fused mulhi name nand ne neg nextafter nor not one_minus_square
optimization_barrier or polygamma polynomial population_count pow pvary real reduce_precision reduced_vary_cast
regularized_incomplete_beta rem round rsqrt select_n sharding_constraint shift_left shift_right_arithmetic
shift_right_logical sign sin sinh sqrt square stop_gradient sub tan tanh threefry2x32 to_edtype
with_memory_space_constraint xor zeta
"""
ELEMENTWISE = frozenset(_ELEMENTWISE.split())
_VIEWS = frozenset({"copy", "copy_p", "name", "optimization_barrier", "pvary", "sharding_constraint", "stop_gradient"})
_SOURCES = """
empty empty2 full iota random_bits random_clone random_fold_in random_gamma random_seed random_split random_unwrap
random_wrap rng_bit_generator rng_uniform axis_index create_token platform_index
"""
SOURCES = frozenset(_SOURCES.split())


def itemsize(aval: Any) -> int:
    """Return the bytes of one entry of an array that ``aval`` describes; a random key counts as 8 bytes."""
    return int(getattr(aval.dtype, "itemsize", 8))


def fresh(program: Program, var: Any, dims: Sequence[Factors | None] | None = None, **view: Any) -> Value:
    """Add an array of the shape and dtype of ``var`` to a program; ``dims`` and ``view`` are as in `Program.value`."""
    return program.value(var.aval.shape, itemsize(var.aval), dims, **view)


def elementwise(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of operations on each element: operands and result are split alike, but for dims of length 1."""
    # Binary primitives broadcast dims of length 1 implicitly. To require equal shapes here would split one group in
    # two: for a transformer block, the residual stream.
    results = []
    if eqn.primitive.name in ("exp", "exp2") and not program.in_backward:
        program.exponents.append(operands[0])
    for i, var in enumerate(eqn.outvars):
        shape = tuple(var.aval.shape)
        if len(eqn.outvars) == len(operands) > 1:
            same = [operands[i]]  # optimization_barrier and its like: one result per operand
        else:
            same = [v for v in operands if len(v.shape) == len(shape)]
        dims = _elementwise_dims(program, shape, same)
        # These share the buffer of their operand.
        view = same[0] if eqn.primitive.name in _VIEWS and same else None
        results.append(fresh(program, var, dims, view_of=view))
        if eqn.primitive.name == "convert_element_type":
            results[-1].cast_of = operands[0]
    if results and eqn.primitive.name not in _VIEWS:
        # Fused elementwise work is bound by memory, so its flops are not counted.
        program.work("elementwise", results[0].factors, nbytes=results[0].nbytes)
    return results


def _elementwise_dims(program: Program, shape: Sequence[int], operands: Sequence[Value]) -> list[Factors | None]:
    """Return the dims of what operands of one rank are combined to: each is split as in all operands of its length."""
    dims: list[Factors | None] = [None] * len(shape)
    differing: dict[int, Factors] = {}
    for value in operands:
        for d, n in enumerate(value.dims):
            known = dims[d]
            if n and shape[d] == value.shape[d]:
                dims[d] = n if known is None else program.unite(known, n)
                if program.factors(dims[d] or ()) != program.factors(n):
                    differing[d] = n
    for d, n in differing.items():
        # Whole in one operand and split in the other. Scores stay whole along the keys, as their queries are split: the
        # mask is gathered. A gradient of keys is split as that of the queries is.
        known = dims[d] or ()
        whole, split = (known, n) if program.whole_of(known) else (n, known)
        others = {*program.factors(tuple(itertools.chain(*(m for at, m in enumerate(dims) if m and at != d))))}
        dims[d] = whole if others & {*program.factors(split)} else split
    return dims


def source(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``iota`` and random numbers: the results may be split in any way that later operations need."""
    made = [fresh(program, var) for var in eqn.outvars]
    for value in made:
        value.recomputed = True
    return made


def broadcast_in_dim(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``broadcast_in_dim``: dims of equal length stay split; others may be split in any way."""
    value, shape = operands[0], eqn.params["shape"]
    dims: list[Factors | None] = [None] * len(shape)
    for d, at in enumerate(eqn.params["broadcast_dimensions"]):
        if value.shape[d] == shape[at]:
            dims[at] = value.dims[d]
    made = fresh(program, eqn.outvars[0], dims)
    made.recomputed = True
    return [made]


def transpose(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``transpose``: each dim of the result is split like the operand's dim that it comes from."""
    value = operands[0]
    return [fresh(program, eqn.outvars[0], [value.dims[d] for d in eqn.params["permutation"]], view_of=value)]


def squeeze(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``squeeze``: dims of length 1 go, and the others are split as in the operand."""
    value, gone = operands[0], set(eqn.params["dimensions"])
    kept = [n for d, n in enumerate(value.dims) if d not in gone]
    return [fresh(program, eqn.outvars[0], kept, view_of=value)]


def expand_dims(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``expand_dims``: dims of length 1 are added, and the others are split as in the operand."""
    value, new = operands[0], set(eqn.params["dimensions"])
    kept = iter(value.dims)
    rank = len(eqn.outvars[0].aval.shape)
    return [fresh(program, eqn.outvars[0], [() if d in new else next(kept) for d in range(rank)], view_of=value)]


def reshape(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``reshape``: dims that are merged or divided keep their factors, and stay split."""
    value, new = operands[0], tuple(eqn.outvars[0].aval.shape)
    dims: list[Factors | None] = [None] * len(new)
    for old_block, new_block in _blocks(value.shape, new):
        # Dims of length 1 come and go without moving anything.
        olds = [d for d in old_block if value.shape[d] != 1]
        news = [d for d in new_block if new[d] != 1]
        if len(news) == 1:
            dims[news[0]] = tuple(itertools.chain(*(value.dims[d] for d in olds)))
            # Entries are in row-major order. A split of the second dim is ranges of entries of the merged one only if
            # the first dim is split into single entries. Otherwise XLA gathers the second.
            for at, d in enumerate(olds[1:], 1):
                before = tuple(itertools.chain(*(value.dims[o] for o in olds[:at])))
                program.need_whole(value, d, why="reshape", unless=before)
        elif len(olds) == 1:
            divided = _divided(program, value.dims[olds[0]], [new[d] for d in news])
            for d, dim in zip(news, divided, strict=True):
                dims[d] = dim
        else:
            # (16, 128) to (128, 16): the same ranges of entries, but dims of another meaning. To carry them would split
            # positions like examples in all that follows, which XLA does not do.
            for d in olds:
                program.need_whole(value, d, why="reshape")
                program.mark_sliced(value.dims[d])
    return [fresh(program, eqn.outvars[0], dims, view_of=value)]


def _divided(program: Program, dim: Factors, lengths: Sequence[int]) -> list[Factors]:
    """Return the dims of certain ``lengths`` into which a reshape divides a dim, the major one first.

    In grouped-query attention, 8 query heads become 4 groups of 2 heads: their dim then has two factors, 4 and 2. Over
    2 or 4 devices, each device has whole groups. Over 8, each has one head, if one axis splits each factor.
    """
    made = [program.dim(n) for n in lengths]
    program.unite(dim, tuple(itertools.chain(*made)))
    return [program.factors(one) for one in made]


def _blocks(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """Pair up the dims that a reshape turns into each other: ([0], [0, 1]) and ([1], [2]) for (6, 4) to (2, 3, 4)."""
    blocks: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        olds: list[int] = []
        news: list[int] = []
        a = b = 1
        # Take dims from the side with the smaller product until both sides have as many entries.
        while not (olds and news and a == b):
            if (a <= b or j >= len(new)) and i < len(old):
                a, i = a * old[i], i + 1
                olds.append(i - 1)
            elif j < len(new):
                b, j = b * new[j], j + 1
                news.append(j - 1)
            else:
                break
        blocks.append((olds, news))
    return blocks


# ---- sliced dims -----------------------------------------------------------------------------------


def _keeping(program: Program, eqn: Any, value: Value, kept: Callable[[int], bool]) -> list[Value]:
    """Return the results of an equation that slices, pads or pools ``value``, but not along its ``kept`` dims.

    Kept dims stay split. Any other dim must be whole on every device, because what a device computes may need entries
    of several shards. If it is split, it is gathered first; a search does not split it.
    """
    results = [fresh(program, var, [n if kept(d) else None for d, n in enumerate(value.dims)]) for var in eqn.outvars]
    for d in range(len(value.dims)):
        if not kept(d):
            program.slice_dim(value, d, why=eqn.primitive.name)
            # XLA carries a split of the slices back to the whole.
            for made in results:
                program.mark_sliced(made.dims[d])
    return results


def same_length(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``slice`` and ``pad``: dims that keep their length stay split; others must be whole."""
    shape, value = eqn.outvars[0].aval.shape, operands[0]
    return _keeping(program, eqn, value, lambda d: value.shape[d] == shape[d])


def windowed(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of pooling and ``tile``: dims that are neither pooled nor repeated stay split; others are whole."""
    window = eqn.params.get("window_dimensions") or eqn.params.get("reps") or (1,) * len(operands[0].shape)
    return _keeping(program, eqn, operands[0], lambda d: window[d] == 1)


def select_and_scatter_add(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of the gradient of max pooling: dims that are not pooled are split alike; others are whole."""
    window, (src, value) = eqn.params["window_dimensions"], operands[:2]
    for d, n in enumerate(src.dims):
        if window[d] == 1:
            program.unite(n, value.dims[d])
        else:
            program.slice_dim(src, d, why="select_and_scatter_add")
    return _keeping(program, eqn, value, lambda d: window[d] == 1)


def along_one_dim(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of cumulative sums, sorts and splits: the dim along which they run is whole; others stay split."""
    params = eqn.params
    # The parameter differs by primitive: cumsum and split say axis, sort says dimension; others use the last dim.
    named = [params[key] for key in ("axis", "dimension", "dimensions", "axes") if key in params]
    along = named[0] if named else len(operands[0].shape) - 1
    dims = {along % max(len(operands[0].shape), 1)} if isinstance(along, int) else set(along)
    for other in operands[1:]:
        for d, n in enumerate(other.dims):
            # A sort may have several operands of one shape, sorted together.
            if len(other.shape) == len(operands[0].shape) and d not in dims:
                program.unite(n, operands[0].dims[d])
    return _keeping(program, eqn, operands[0], lambda d: d not in dims)


def rev(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``rev``: all dims stay split. If a dim that is reversed is split, devices swap their shards."""
    value = operands[0]
    reversed_dims = [value.dims[d] for d in eqn.params["dimensions"]]
    exchanges = [Exchange("collective-permute", n, value.nbytes, value.factors) for n in reversed_dims]
    program.work("rev", value.factors, nbytes=value.nbytes, exchanges=exchanges)
    return [fresh(program, eqn.outvars[0], value.dims)]


def concatenate(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``concatenate``: the dim along which operands are joined is whole; others are split alike."""
    along = eqn.params["dimension"]
    first = operands[0]
    for other in operands:
        program.slice_dim(other, along, why="concatenate")
        for d, n in enumerate(other.dims):
            if d != along:
                program.unite(first.dims[d], n)
    made = fresh(program, eqn.outvars[0], [None if d == along else n for d, n in enumerate(first.dims)])
    program.mark_sliced(made.dims[along])
    return [made]


def top_k(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``top_k``: XLA gathers the whole operand on every device; the results' last dim is new."""
    value = operands[0]
    program.need_all(value, why="top_k")
    return [fresh(program, var, [*value.dims[:-1], None]) for var in eqn.outvars]


def stack(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``stack``: dims of all operands are split alike, and the new dim may be split in its own way."""
    axis, first = eqn.params["axis"], operands[0]
    for other in operands[1:]:
        program.unite_dims(first, other)
    dims: list[Factors | None] = list(first.dims)
    dims.insert(axis, None)
    return [fresh(program, eqn.outvars[0], dims)]


def unstack(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``unstack``: the dim along which the operand is cut is whole; all others stay split."""
    axis, value = eqn.params["axis"], operands[0]
    program.slice_dim(value, axis, why="unstack")
    dims = [n for d, n in enumerate(value.dims) if d != axis]
    return [fresh(program, var, dims) for var in eqn.outvars]


def dynamic_update_slice(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``dynamic_update_slice``: dims that the update spans fully are split alike; others are whole."""
    value, update = operands[:2]
    for d, n in enumerate(update.dims):
        if update.shape[d] == value.shape[d]:
            program.unite(value.dims[d], n)
        else:
            program.slice_dim(update, d, why="dynamic_update_slice")
    return _keeping(program, eqn, value, lambda d: update.shape[d] == value.shape[d])


# ---- sums and lookups ------------------------------------------------------------------------------


def reduce(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of sums, maxima and the like: other dims stay split; over split dims, results are all-reduced."""
    axes = eqn.params.get("axes", eqn.params.get("dimensions", ()))
    # A variadic reduce has its initial values as operands too: scalars, without dims.
    for other in operands[1:]:
        for a, b in zip(operands[0].dims, other.dims, strict=False):
            program.unite(a, b)
    value, results = operands[0], []
    program.store(value)
    for var in eqn.outvars:
        made = fresh(program, var, [n for d, n in enumerate(value.dims) if d not in axes])
        exchanges = [Exchange("all-reduce", value.dims[d], made.nbytes, made.factors) for d in axes]
        program.work("reduce", value.factors, flops=math.prod(value.shape), exchanges=exchanges)
        program.store(made)
        results.append(made)
    return results


def dot_general(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of matrix products: summed dims are split alike (devices add their sums), and so are batch dims."""
    (left_sum, right_sum), (left_batch, right_batch) = eqn.params["dimension_numbers"]
    left, right = operands[:2]
    for a, b in zip((*left_sum, *left_batch), (*right_sum, *right_batch), strict=True):
        program.unite(left.dims[a], right.dims[b])
    free_left = [d for d in range(len(left.dims)) if d not in (*left_sum, *left_batch)]
    free_right = [d for d in range(len(right.dims)) if d not in (*right_sum, *right_batch)]
    # The result has batch dims, then free dims of the left operand, then those of the right.
    dims: list[Factors | None] = [left.dims[d] for d in (*left_batch, *free_left)]
    for d in free_right:
        own = {*program.factors(right.dims[d])}
        # Both operands have the same tokens, or the same examples of a batch: as queries and keys, or the embeddings of
        # two towers. One of them is gathered, the smaller one.
        same = [at for at, dim in enumerate(dims) if dim and own & {*program.factors(dim)}]
        keeps_left = bool(same) and (right.nbytes <= left.nbytes or same[0] < len(left_batch))
        if same and keeps_left:
            program.need_whole(right, d, why="dot")
        elif same:
            program.need_whole(left, free_left[same[0] - len(left_batch)], why="dot")
            dims[same[0]] = program.whole_dim(dims[same[0]] or ())
        dims.append(program.whole_dim(right.dims[d]) if keeps_left else right.dims[d])
    for at, dim in enumerate(dims):
        of = program.whole_of(dim or ())
        # Gradients of keys: the queries, which are split, are summed over. Of the sum, each device needs its keys.
        if of and not {*of} & {
            *program.factors(tuple(itertools.chain(*(m for i, m in enumerate(dims) if m and i != at))))
        }:
            dims[at] = of
    made = fresh(program, eqn.outvars[0], dims)
    made.of_weights = not left_batch
    if left_batch and not {id(left.base), id(right.base)} & program.read_as.keys():
        program.batched_products.append(made)
    exchanges = []
    for a, b in zip(left_sum, right_sum, strict=True):
        # Scores have the tokens of keys whole: their product with values gathers the values.
        if program.factors(left.dims[a]) == program.factors(right.dims[b]):
            exchanges.append(Exchange("all-reduce", left.dims[a], made.nbytes, made.factors))
        else:
            program.need_whole(left, a, why="dot")
            program.need_whole(right, b, why="dot")
    summed = tuple(itertools.chain(*(left.dims[d] for d in left_sum)))
    flops = 2 * math.prod(made.shape) * math.prod(left.shape[d] for d in left_sum)
    program.store(left, right, made)
    program.sums.append((made, summed))
    program.work("dot", made.factors + summed, flops=flops, nbytes=made.nbytes, exchanges=exchanges)
    program.read(left, right)
    return [made]


def convolution(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of convolutions: batch and channels may be split; over split input channels, results are added."""
    numbers, (image, kernel) = eqn.params["dimension_numbers"], operands[:2]
    space, (_, in_channels, *window) = numbers.lhs_spec[2:], numbers.rhs_spec
    shape = tuple(eqn.outvars[0].aval.shape)
    dims: list[Factors | None] = [None] * len(shape)
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
    summed = kernel.dims[in_channels] if eqn.params["feature_group_count"] == 1 else ()
    exchanges = [Exchange("all-reduce", summed, made.nbytes, made.factors)]
    flops = 2 * math.prod(shape) * math.prod(kernel.shape[d] for d in (in_channels, *window))
    program.store(image, kernel, made)
    program.work("convolution", made.factors + summed, flops=flops, nbytes=made.nbytes, exchanges=exchanges)
    return [made]


def _channels(program: Program, eqn: Any, image: Value, kernel: Value) -> tuple[Factors | None, Factors | None]:
    """Return a convolution's batch dim and channel dim; ``None`` stands for a new dim.

    A grouped convolution divides the channels into feature groups, and convolves each group by itself. In a depthwise
    convolution, each group has one channel, so channels stay split. In the gradient of its kernel, the batch dim and
    the channel dim have changed places. If each group has several channels, they do not stay split: XLA gathers the
    image and the kernel along their channel dims. (Of such an image, XLA by itself would gather the rows, too:
    `shardload.keras_bridge.xla_faults` keeps them on their devices.)
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
    if batches == 1:
        program.estimated["convolutions in groups of several channels"] += 1
    for d in (out_channels, in_channels) if batches == 1 else (out_channels,):
        program.need_whole(kernel, d, why="convolution")
    return result, None


def gather(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``gather`` (a lookup): dims stay split. If the looked-up dim is split, results are added."""
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    embedding, indices = operands[:2]
    shape = eqn.outvars[0].aval.shape
    dims: list[Factors | None] = [None] * len(shape)
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
    by_index = {*program.factors(indices.factors)}
    exchanges = []
    for d in looked_up:
        if by_index & {*program.factors(embedding.dims[d])}:
            # Rows and indices are split alike, as the nodes and edges of a graph: XLA gathers the rows.
            program.need_whole(embedding, d, why="gather")
            program.estimated["lookups of rows that are split like their indices"] += 1
        else:
            exchanges.append(Exchange("all-reduce", embedding.dims[d], made.nbytes, made.factors))
    whole = all(sizes[d] == embedding.shape[d] for d in window)
    # A plain embedding lookup: whole rows, by one index.
    if len(looked_up) == 1 and whole and not batching:
        program.lookups.append(Lookup(embedding, looked_up[0], indices, made))
    program.store(made)
    program.work("gather", made.factors, nbytes=made.nbytes, exchanges=exchanges)
    return [made]


def scatter(program: Program, eqn: Any, operands: Sequence[Value]) -> list[Value]:
    """Sharding rule of ``scatter``: the operand's dims stay split. If updates are split by batch, results are added."""
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
    own = {*program.factors(made.factors)}
    spread = [updates.dims[at] for at in rest if not own & {*program.factors(updates.dims[at])}]
    exchanges = [Exchange("all-reduce", dim, made.nbytes, made.factors) for dim in spread]
    program.store(made)
    program.work("scatter", made.factors, nbytes=updates.nbytes, exchanges=exchanges)
    program.read(updates)
    return [made]
