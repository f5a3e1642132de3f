"""`diff` of values that are not numbers, that differ in bits only, and of every dtype."""

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from shardload.comparing import diff

NAN, INF = np.nan, np.inf
FLOATS = ("float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2")
ROWS = 5 << 20
"""Rows of float32, which are read in several chunks."""


@pytest.fixture
def differ(tmp_path):
    def compared(first, second):
        """Return (what, elements, largest) of the only tensor; ``None`` if it is equal."""
        for name, values in (("a", first), ("b", second)):
            save_file({"w": np.asarray(values)}, tmp_path / f"{name}.safetensors")
        found = diff(tmp_path / "a.safetensors", tmp_path / "b.safetensors").differences
        return (found[0].what, found[0].elements, found[0].largest) if found else None

    return compared


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_nan_against_a_number_is_the_largest_difference(differ, dtype):
    first, second = np.ones((2, 1000), ml_dtypes.finfo(dtype).dtype)
    first[0] = NAN
    assert differ(first, second) == pytest.approx(("values", 1, NAN), nan_ok=True)
    second[1:3] = 2
    assert differ(first, second) == pytest.approx(("values", 3, NAN), nan_ok=True)
    assert differ(first, first) is None


@pytest.mark.parametrize("row", [0, ROWS - 1])
def test_the_order_of_chunks_does_not_hide_a_nan(differ, row):
    first, second = np.zeros((2, ROWS), np.float32)
    second[ROWS - 1 - row] = 3
    second[row] = NAN
    assert differ(first, second) == pytest.approx(("values", 2, NAN), nan_ok=True)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "bfloat16"])
def test_what_differs_in_bits_only_differs_by_zero(differ, dtype):
    dtype = ml_dtypes.finfo(dtype).dtype
    assert differ(np.zeros(3, dtype), -np.zeros(3, dtype)) == ("values", 3, 0)
    nans = np.full(3, NAN, dtype)
    assert differ(nans, -nans) == ("values", 3, 0)


def test_infinities(differ):
    assert differ(np.float32([INF, INF, 1]), np.float32([INF, INF, 3])) == ("values", 1, 2)
    assert differ(np.float32([INF, INF, 1]), np.float32([INF, 0, 3])) == ("values", 2, INF)
    assert differ(np.float32([INF]), np.float32([-INF])) == ("values", 1, INF)
    assert differ(np.float32([INF]), np.float32([NAN])) == pytest.approx(("values", 1, NAN), nan_ok=True)


def test_across_dtypes_nans_are_equal(differ):
    values = np.float32([NAN, INF, -INF, 0, 1])
    assert differ(values, values.astype(ml_dtypes.bfloat16)) == ("dtype", 0, None)
    changed = np.float16([NAN, INF, -INF, 0.5, 1])
    assert differ(values, changed) == ("dtype", 1, 0.5)
    changed[4] = NAN
    assert differ(values, changed) == pytest.approx(("dtype", 2, NAN), nan_ok=True)
    assert differ(values[3:], np.int8([3, 1])) == ("dtype", 1, 3)


def test_both_parts_of_complex_numbers_count(differ):
    first = np.complex64([1 + 1j, complex(INF, 1), complex(NAN, 1)])
    assert differ(first, first) is None
    assert differ(first, np.complex64([4 + 5j, complex(INF, 3), complex(NAN, 2)])) == ("values", 3, 5)
    for number in (first[0], first[1]):
        assert differ([number], np.complex64([complex(INF, NAN)])) == pytest.approx(("values", 1, NAN), nan_ok=True)
    assert differ(first[:1], np.float32([1])) == ("dtype", 1, 1)


def test_large_integers_are_exact(differ):
    assert differ(np.int64([2**60, 0]), np.int64([2**60 + 1, 0])) == ("values", 1, 1)
    assert differ(np.int64([2**63 - 1]), np.int64([-(2**63)])) == ("values", 1, float(2**64))
    assert differ(np.uint64([2**63 + 1, 5]), np.int64([2**63 - 1, 5])) == ("dtype", 1, 2)
    assert differ(np.uint64([3]), np.int64([-4])) == ("dtype", 1, 7)
    assert differ(np.uint8([255, 1]), np.uint8([0, 1])) == ("values", 1, 255)
    assert differ(np.uint8([255]), np.int8([-1])) == ("dtype", 1, 256)
    assert differ(np.array([True, False]), np.array([True, True])) == ("values", 1, 1)


def test_scalars_and_tensors_without_elements(differ):
    assert differ(np.float32(NAN), np.float32(1)) == pytest.approx(("values", 1, NAN), nan_ok=True)
    empty = np.zeros((0, 3), np.float32)
    assert differ(empty, empty) is None
    assert differ(empty, empty.astype(np.complex64)) == ("dtype", 0, None)
