"""Factors of a matrix as factors of a kernel, and back: the same product."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardload.manifest import View, c_strides
from shardload.mapping.lora_views import KernelDims


def view_of(array, base):
    """Which elements of ``base`` an array is, in units of elements."""
    start = (array.__array_interface__["data"][0] - base.__array_interface__["data"][0]) // base.itemsize
    return View("w", start, array.shape, tuple(s // base.itemsize for s in array.strides))


KERNELS = {
    "dense": lambda w: w.T,
    "transposed": lambda w: w,
    "heads of queries": lambda w: w.reshape(3, 4, 10).transpose(2, 0, 1),
    "heads first": lambda w: w.reshape(3, 4, 10).transpose(0, 2, 1),
    "output of heads": lambda w: w.T.reshape(5, 2, 12),
    "a part of fused rows": lambda w: w[4:8].reshape(2, 2, 10).transpose(2, 0, 1),
    "a part of fused columns": lambda w: w[:, 3:9].T,
    "one head": lambda w: w.reshape(1, 12, 10).transpose(0, 2, 1),
    "alternating rows": lambda w: w[1::2].T,
}


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None)
@given(rank=st.integers(1, 5), seed=st.integers(0, 99))
def test_the_product_is_the_same_in_both_forms(name, rank, seed):
    rng = np.random.default_rng(seed)
    left, right = (rng.integers(-9, 9, size).astype("float64") for size in ((12, rank), (rank, 10)))
    w, product = np.zeros((12, 10)), left @ right
    kernel = KERNELS[name](w)
    dims = KernelDims.of(view_of(kernel, w), (12, 10))
    assert dims.shape == kernel.shape
    a, b = dims.kernel_factors(left, right)
    assert b.shape[0] <= rank * dims.blocks
    assert a.shape == (*kernel.shape[:-1], b.shape[0]) and b.shape == (b.shape[0], kernel.shape[-1])
    np.testing.assert_array_equal(a @ b, KERNELS[name](product))
    again = np.zeros((12, 10))
    np.add(*(np.zeros((12, 10)), np.matmul(*dims.matrix_factors(a, b, (12, 10)))), out=again)
    np.testing.assert_array_equal(KERNELS[name](again), KERNELS[name](product))
    outside = np.ones((12, 10), bool)
    KERNELS[name](outside)[...] = False
    assert not again[outside].any()


@pytest.mark.parametrize("name", KERNELS)
@settings(deadline=None)
@given(rank=st.integers(1, 4), seed=st.integers(0, 99))
def test_trained_factors_of_a_kernel_are_factors_of_the_matrix(name, rank, seed):
    rng = np.random.default_rng(seed)
    w = np.zeros((12, 10))
    kernel = KERNELS[name](w)
    dims = KernelDims.of(view_of(kernel, w), (12, 10))
    a = rng.integers(-9, 9, (*kernel.shape[:-1], rank)).astype("float64")
    b = rng.integers(-9, 9, (rank, kernel.shape[-1])).astype("float64")
    left, right = dims.matrix_factors(a, b, (12, 10))
    assert left.shape[1] <= rank * dims.blocks
    np.testing.assert_array_equal(KERNELS[name](left @ right), a @ b)
    again = dims.kernel_factors(left, right)
    assert again[1].shape[0] <= rank or not b.any(1).all()  # of a row of zeros, no block is known
    np.testing.assert_array_equal(again[0] @ again[1], a @ b)


@pytest.mark.parametrize("name", KERNELS)
def test_new_factors_stay_factors_of_their_rank(name):
    """PEFT's B is zero at first: then the product is, with any A."""
    w = np.zeros((12, 10))
    dims = KernelDims.of(view_of(KERNELS[name](w), w), (12, 10))
    for left, right in ((np.zeros((12, 3)), np.ones((3, 10))), (np.ones((12, 3)), np.zeros((3, 10)))):
        a, b = dims.kernel_factors(left, right)
        assert b.shape[0] == 3 and not (a @ b).any() and (a.any() or b.any())


@pytest.mark.parametrize(
    "view",
    [
        View("w", 0, (120,), (1,)),
        View("w", 0, (60, 2), (2, 1)),
        View("w", 5, (12, 10), (10, 1)),
        View("w", 0, (6, 20), (20, 1)),
    ],
)
def test_a_dim_along_rows_and_columns_has_no_factors(view):
    assert KernelDims.of(view, (12, 10)) is None


def test_a_whole_matrix_is_a_view_of_itself():
    dims = KernelDims.of(View("w", 0, (12, 10), c_strides((12, 10))), (12, 10))
    assert dims.along_rows == (True, False) and dims.blocks == 1
