"""Codes and groups of one kernel, put in Keras' order box by box: compared with all at once, and Keras' own packing."""

import itertools
import math

import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.keras_bridge.kept_values import KeptCodes, KeptGroups
from shardload.sharding.layout import Bounds, Layout
from shardload.transfer.encoding import Output
from shardload.transfer.load_plan import ONE_DEVICE


def output(shape, dtype):
    return Output("codes", shape, np.dtype(dtype), Layout.replicated(ONE_DEVICE, len(shape)))


def kept_codes(shape, row_dims, *, mode, bits=4):
    rows, columns = math.prod(shape[:row_dims]), math.prod(shape[row_dims:])
    stored = -(-columns // 2) if bits == 4 else columns
    own = output((rows, stored), "int8") if mode == "int4" else output((stored, rows), "uint8")
    return KeptCodes((own,), shape, row_dims, bits == 4, mode == "gptq", mode == "int4")


def packed_by_keras(codes, row_dims, *, mode, bits=4):
    matrix = codes.reshape(math.prod(codes.shape[:row_dims]), -1)
    if mode == "int4":
        return np.asarray(keras.quantizers.pack_int4((matrix.astype(int) - 8).astype(np.int8), axis=-1)[0])
    return np.asarray(keras.quantizers.pack_int4(matrix.T, axis=0, dtype="uint8")[0]) if bits == 4 else matrix.T


def boxes_of(encoding, cuts):
    """The kernel in boxes that may be encoded alone: cut along the two dims that may be cut, at allowed places."""
    edges = []
    for d, n in enumerate(encoding.shape):
        step = encoding.multiples[d]
        places = {0, n} | {at // step * step for at in cuts if at < n}
        edges.append([0, n] if d in encoding.whole_dims else sorted(places))
    ranges = [list(itertools.pairwise(places)) for places in edges]
    for index in np.ndindex(*map(len, ranges)):
        found = [one[i] for one, i in zip(ranges, index, strict=True)]
        yield Bounds(tuple(a for a, _ in found), tuple(b for _, b in found))


@st.composite
def kernels(draw):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=2, max_size=3)))
    mode, bits = draw(st.sampled_from([("int4", 4), ("gptq", 4), ("gptq", 8)]))
    return shape, draw(st.integers(1, len(shape) - 1)), mode, bits, draw(st.lists(st.integers(0, 6)))


@given(kernels())
def test_boxes_of_codes_give_what_keras_packs(kernel):
    shape, row_dims, mode, bits, cuts = kernel
    encoding = kept_codes(shape, row_dims, mode=mode, bits=bits)
    codes = np.random.default_rng(0).integers(0, 1 << bits, shape).astype(np.uint8)
    wanted, found = packed_by_keras(codes, row_dims, mode=mode, bits=bits), np.zeros(encoding.outputs[0].shape, "u1")
    found, written = found.view(encoding.outputs[0].dtype), np.zeros(found.shape, int)
    for box in boxes_of(encoding, cuts):
        for number, place, values in encoding.encode(codes[box.slices], box):
            assert number == 0
            found[place.slices], written[place.slices] = values, written[place.slices] + 1
    assert (written == 1).all()
    assert (found.dtype, found.tobytes()) == (wanted.dtype, wanted.tobytes())


@given(kernels(), st.integers(0, 48), st.integers(0, 48), st.integers(1, 8), st.integers(1, 8))
def test_a_box_of_packed_codes_follows_from_the_box_that_it_says(kernel, row, column, n_rows, n_columns):
    shape, row_dims, mode, bits, _ = kernel
    encoding = kept_codes(shape, row_dims, mode=mode, bits=bits)
    own = encoding.outputs[0].shape
    start = row % own[0], column % own[1]
    box = Bounds(start, (min(own[0], start[0] + n_rows), min(own[1], start[1] + n_columns)))
    needed = encoding.needed(0, box)
    codes = (np.arange(math.prod(shape)).reshape(shape) % (1 << bits)).astype(np.uint8)
    [(_, place, values)] = encoding.encode(codes[needed.slices], needed)
    assert place.intersect(box) == box
    wanted = packed_by_keras(codes, row_dims, mode=mode, bits=bits)[box.slices]
    assert np.array_equal(values[box.relative_to(place.start).slices], wanted)


@pytest.mark.parametrize("transposed", [False, True])
def test_groups_of_each_matrix_follow_one_another(transposed):
    values = np.arange(3 * 5 * 2).reshape(3, 5, 2).astype(np.float32)  # heads, columns, groups
    own = output((5, 6) if transposed else (6, 5), "float32")
    [(_, place, found)] = KeptGroups((own,), (3, 5, 2), 1, transposed).encode(values, Bounds.whole((3, 5, 2)))
    wanted = np.concatenate([values[head].T for head in range(3)])
    assert place == Bounds.whole(own.shape)
    assert np.array_equal(found, wanted.T if transposed else wanted)


def test_zero_points_of_int4_are_signed():
    groups = KeptGroups((output((1, 3), "int8"),), (3, 1), 0, is_transposed=False, is_signed=True)
    [(_, _, found)] = groups.encode(np.array([[0], [8], [15]], np.uint8), Bounds.whole((3, 1)))
    assert found.dtype == np.int8
    assert found.tolist() == [[-8, 0, 7]]
