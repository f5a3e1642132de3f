"""Which dims of a program must be split alike, and what a split makes devices exchange: one program per rule."""

import math

import jax
import jax.numpy as jnp
import pytest

from shardload.layout_search.program import Program
from shardload.layout_search.tracing import arguments_of, read_program

F32 = jnp.float32


def traced(function, *shapes, dtypes=None):
    """Read a function; return the program, and the factors of each dim of arguments and results, a letter for each."""
    dtypes = dtypes or [F32] * len(shapes)
    closed = jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct(s, d) for s, d in zip(shapes, dtypes, strict=True)])
    program = Program()
    arguments = arguments_of(program, closed)
    results = read_program(program, closed, arguments)
    letters: dict[int, str] = {}

    def name(value):
        dims = ["".join(letters.setdefault(f, chr(97 + len(letters))) for f in program.factors(d)) for d in value.dims]
        return [dim or "." for dim in dims]

    names = [*map(name, arguments), *map(name, results)]
    # Without lists where every dim has one factor: "ab".
    return program, ["".join(dims) if all(len(dim) == 1 for dim in dims) else dims for dims in names]


def exchanged(program):
    return sorted((e.kind, int(e.nbytes)) for op in program.operations for e in op.exchanges)


def sliced(program):
    return sorted(map(program.length, {*program.factors(tuple(program.sliced))}))


def test_a_product_unites_contracted_dims_and_adds_up_where_they_are_split():
    program, names = traced(lambda x, w: x @ w, (8, 16), (16, 32))
    assert names == ["ab", "bc", "ac"]
    assert exchanged(program) == [("all-reduce", 8 * 32 * 4)]
    assert sum(op.flops for op in program.operations) == 2 * 8 * 16 * 32


def test_elementwise_operations_unite_dims_and_broadcast_those_of_length_one():
    _, names = traced(lambda x, b, s: x * b + s, (8, 16), (16,), (8, 1))
    assert names == ["ab", "b", "a.", "ab"]


def test_a_transposed_batched_product_keeps_its_batch_dims():
    _, names = traced(lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k), (2, 6, 4, 8), (2, 10, 4, 8))
    assert names == ["abcd", "aecd", "acbe"]


def test_merged_and_divided_dims_keep_their_factors():
    _, names = traced(lambda x: x.reshape(8, 4, 6), (8, 24))
    assert names == [["a", "bc"], "abc"]
    _, names = traced(lambda x: x.reshape(8, 24), (8, 4, 6))
    assert names == ["abc", ["a", "bc"]]
    _, names = traced(lambda x: x.reshape(2, 4, 8).reshape(64), (64,))
    assert names == [["abc"], ["abc"]]
    _, names = traced(lambda x: x.reshape(4, 12).reshape(48).reshape(8, 6), (48,))
    assert names == [["abc"], ["ab", "c"]]


def test_the_lengths_of_factors_are_what_their_dims_can_be_split_into():
    program, _ = traced(lambda x: x.reshape(8, 4, 6), (8, 24))
    factors = {f for dims in program.tensors for dim in dims for f in program.factors(dim)}
    assert sorted(map(program.length, factors)) == [4, 6, 8]


def test_dims_whose_factors_do_not_divide_each_other_are_not_split():
    program, (x, y, out) = traced(lambda x, y: x.reshape(12) + y.reshape(12), (3, 4), (4, 3))
    assert not set(x) & set(y) and out != y
    assert sliced(program) == [3, 3, 4, 4]


def test_query_heads_and_groups_of_heads_share_a_factor():
    def attention(q, k):
        grouped = q.reshape(2, 6, 4, 2, 8)  # 8 heads: 4 groups of 2
        scores = jnp.einsum("bqgnd,bkgd->bgnqk", grouped, k)
        return jnp.einsum("bgnqk,bkgd->bqgnd", scores, k).reshape(2, 6, 8, 8)

    _, (q, k, out) = traced(attention, (2, 6, 8, 8), (2, 6, 4, 8))
    assert q[2] == out[2] and len(q[2]) == 2
    assert k[2] == q[2][0]
    _, (q, k, _) = traced(lambda q, k: q * jnp.repeat(k, 2, axis=1), (6, 8), (6, 4))
    assert q[1][0] == k[1] and len(q[1]) == 2


def test_a_reshape_that_swaps_lengths_unites_no_dims():
    # XLNet makes (positions, batch) of (batch, positions) so: the batch is not a part of the positions from there on.
    program, names = traced(lambda x: x.reshape(128, 16), (16, 128))
    assert names == ["ab", "cd"]
    assert exchanged(program) == [("all-gather", 128 * 16 * 4)] * 2


def test_a_dim_that_is_merged_is_gathered_unless_the_one_before_it_is_fully_split():
    program, names = traced(lambda x: x.reshape(24), (4, 6))
    assert names == ["ab", ["ab"]]
    [(exchange,)] = [op.exchanges for op in program.operations]
    assert (exchange.kind, exchange.nbytes) == ("all-gather", 24 * 4)
    assert [program.length(f) for f in exchange.split] == [6]
    assert [program.length(f) for f in exchange.unless] == [4]


def test_reductions_add_up_over_the_dims_that_they_drop():
    program, names = traced(lambda x: jnp.sum(x, axis=1), (8, 16))
    assert names == ["ab", "a"]
    assert exchanged(program) == [("all-reduce", 8 * 4)]


def test_slices_and_concatenations_need_their_dim_whole_and_it_is_not_split():
    program, names = traced(lambda x: x[:, :4], (8, 16))
    assert names == ["ab", "ac"]
    assert exchanged(program) == [("all-gather", 8 * 16 * 4)] and sliced(program) == [4, 16]
    program, names = traced(lambda x, y: jnp.concatenate([x, y], axis=1), (8, 4), (8, 6))
    assert names == ["ab", "ac", "ad"]
    assert sliced(program) == [4, 6, 10]
    program, _ = traced(lambda x: jnp.split(x, 4, axis=1), (8, 16))  # the gates of a recurrent layer
    assert sliced(program) == [4, 4, 4, 4, 16]


def test_devices_that_share_a_group_of_heads_add_up_the_gradients_of_its_keys():
    program, names = traced(lambda x: jnp.sum(x.reshape(2, 4, 16), axis=1), (8, 16))
    assert names == [["ab", "c"], "ac"]
    [exchange] = [e for op in program.operations for e in op.exchanges]
    assert (exchange.kind, exchange.nbytes) == ("all-reduce", 2 * 16 * 4)
    assert [program.length(f) for f in exchange.split] == [4]  # the heads of a group


def test_a_lookup_adds_up_over_the_vocabulary_and_carries_the_features():
    program, names = traced(lambda t, i: jnp.take(t, i, axis=0), (64, 16), (8, 12), dtypes=[F32, jnp.int32])
    table, indices, out = names
    assert out == indices + table[1]
    assert ("all-reduce", 8 * 12 * 16 * 4) in exchanged(program)


def test_the_gradient_of_a_lookup_adds_up_over_the_batch():
    def loss(table, indices):
        return jnp.sum(jnp.square(jnp.take(table, indices, axis=0)))

    program, (table, *_, gradient) = traced(jax.grad(loss), (64, 16), (8, 12), dtypes=[F32, jnp.int32])
    assert gradient[1] == table[1]
    assert ("all-reduce", 64 * 16 * 4) in exchanged(program)


def test_convolutions_contract_input_channels_and_carry_output_channels():
    def convolve(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    program, (image, kernel, out) = traced(convolve, (8, 16, 16, 12), (3, 3, 12, 20))
    assert image[3] == kernel[2] and out[3] == kernel[3] and out[0] == image[0]
    assert ("all-reduce", 8 * 16 * 16 * 20 * 4) in exchanged(program)


def test_depthwise_convolutions_split_by_channel_without_exchange():
    def convolve(x, w):
        numbers = ("NHWC", "HWIO", "NHWC")
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=12)

    program, (image, kernel, out) = traced(convolve, (8, 16, 16, 12), (3, 3, 1, 12))
    assert image[3] == kernel[3] == out[3]
    assert all(kind == "all-gather" for kind, _ in exchanged(program))  # of spatial dims only


def test_a_scan_keeps_its_carry_split_alike_and_counts_every_step():
    def run(x, w):
        return jax.lax.scan(lambda h, step: (jnp.tanh(h @ w + step), h), jnp.zeros((8, 16)), x)

    program, (x, w, carry, stacked) = traced(run, (10, 8, 16), (16, 16))
    assert w == x[2] * 2  # the state is contracted and produced: no axis can split it
    assert carry == x[1:] and stacked[1:] == carry
    assert sum(op.flops for op in program.operations if op.name == "dot") == 10 * 2 * 8 * 16 * 16


def test_branches_of_a_condition_are_split_alike():
    def run(p, x, y):
        return jax.lax.cond(p, lambda x, y: x * 2, lambda x, y: y + 1, x, y)

    _, (_, x, y, out) = traced(run, (), (8, 16), (8, 16), dtypes=[jnp.bool_, F32, F32])
    assert x == y == out


def test_rematerialised_and_custom_derivatives_are_entered():
    @jax.checkpoint
    def inner(x, w):
        return jax.nn.gelu(jax.nn.relu(x @ w))

    _, (x, w, gradient) = traced(jax.grad(lambda x, w: jnp.sum(inner(x, w))), (8, 16), (16, 32))
    assert gradient == x and w[0] == x[1]


def test_an_unknown_primitive_constrains_nothing_and_is_counted():
    program, (x, out) = traced(jnp.linalg.cholesky, (8, 8))
    assert program.unknown["cholesky"] == 1
    assert not set(x) & set(out)
    assert {kind for kind, _ in exchanged(program)} == {"all-gather"}


@pytest.mark.parametrize("shape", [(4, 6), (24,), (2, 12), (24, 1), (3, 8)])
def test_the_factors_of_a_dim_multiply_to_its_length(shape):
    program, (x, out) = traced(lambda x: x.reshape(shape).reshape(4, 6), (4, 6))
    for value in program.values:
        for length, dim in zip(value.shape, value.dims, strict=True):
            assert math.prod(map(program.length, program.factors(dim))) == length
    assert len(x) == len(out) == 2
