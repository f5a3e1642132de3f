"""Which variables are matrices, how they are flattened, and the bytes of their state."""

import subprocess
import sys

import numpy as np
import pytest

from shardload.errors import UsageError
from shardload.optimizers import state_bytes
from shardload.optimizers.dealing import deal
from shardload.optimizers.matrices import MatrixRules


@pytest.mark.parametrize(
    ("shape", "rows", "sides"),
    [
        ((64, 128), (0,), (64, 128)),
        ((64, 8, 4), (0,), (64, 32)),
        ((8, 64, 4), (1,), (64, 32)),
        ((8, 4, 64), (0, 1), (32, 64)),
        ((3, 3, 16, 32), (0, 1, 2), (144, 32)),
    ],
)
def test_an_array_as_a_matrix_and_back(shape, rows, sides):
    view = MatrixRules().view("kernel", shape)
    array = np.arange(np.prod(shape)).reshape(shape)
    matrix = view.matrix(array)
    assert (view.rows, view.sides, matrix.shape) == (rows, sides, sides)
    np.testing.assert_array_equal(view.array(matrix), array)
    np.testing.assert_array_equal(matrix, np.moveaxis(array, rows, range(len(rows))).reshape(sides))


@pytest.mark.parametrize("shape", [(), (8,), (1, 8), (8, 1), (20_000, 30_000)])
def test_shapes_that_are_no_matrix(shape):
    assert MatrixRules().view("kernel", shape) is None


def test_one_long_side_and_paths():
    assert MatrixRules().view("head/kernel", (64, 20_000)).factor_sides == (64, None)
    assert MatrixRules().view("Token_Embedding/embeddings", (64, 64)) is None
    assert MatrixRules(row_dims={"qkv": (0, 2)}).view("qkv/kernel", (2, 64, 4)).sides == (8, 64)


@pytest.mark.parametrize("dims", [(), (0, 1), (2,), (0, 0)])
def test_row_dims_that_are_wrong(dims):
    with pytest.raises(UsageError, match=r"Cannot form rows of 'kernel' of shape \(4, 6\) from the dims"):
        MatrixRules(row_dims={"kernel": dims}).view("kernel", (4, 6))


@pytest.mark.parametrize("path", ["attention/query/bias", "gru/gru_cell/bias", "bias"])
def test_biases_are_no_matrices_whatever_their_dims(path):
    assert MatrixRules().view(path, (8, 64)) is None
    assert MatrixRules().view("debias/kernel", (8, 64)) is not None


@pytest.mark.parametrize(
    "arguments", [((4, -4),), ((0, 8),), ((4.0, 4),), (5,), (("4", 4),), ((4, 4), 8), ((4, 4), (8,)), ((4, 4), (1, 3))]
)
def test_state_of_what_cannot_be(arguments):
    with pytest.raises(UsageError, match="expected"):
        state_bytes(*arguments)


def test_state_bytes():
    square = 8 * (64 * 128 + 64 * 64 + 128 * 128) + 4 * (64 + 128)
    assert state_bytes((64, 128)) == square
    assert state_bytes((64, 128), (1, 8)) == state_bytes((64, 128), (2, 4)) == square // 8
    assert state_bytes((64, 128), factor_bytes=2) == square - 2 * (64 * 64 + 128 * 128)
    assert state_bytes((64, 128), path="embedding/embeddings") == state_bytes((64 * 128,)) == 8 * 64 * 128
    assert state_bytes((64, 128), max_dimension=64) == 8 * (64 * 128 + 64 * 64) + 4 * 64
    assert state_bytes((64, 12), (8, 1)) == 64 * 12 + 64 * 64 + 32 + 8 * 12 * 12 + 4 * 12  # 12 / 8: replicated


def test_state_bytes_needs_neither_jax_nor_keras():
    code = "import sys; from shardload.optimizers import state_bytes; print({'jax', 'keras'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_decompositions_are_dealt_evenly(devices):
    groups = deal([64] * 6 + [32] * 3 + [128], devices)
    assert sorted(i for group in groups for i in group.factors) == list(range(10))
    for group in groups:
        counts = [len(hand) for hand in group.hands]
        assert max(counts) - min(counts) <= 1
        assert sorted(i for hand in group.hands for i in hand) == list(range(len(group.factors)))
    load = [sum(len(group.hands[d]) * group.size**3 for group in groups) for d in range(devices)]
    assert max(load) - min(load) <= 128**3
