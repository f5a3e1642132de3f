import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.sharding.layout import Bounds

SHAPE = (4, 5, 6)


@st.composite
def boxes(draw):
    ranges = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in SHAPE]
    return Bounds(tuple(a for a, _ in ranges), tuple(b for _, b in ranges))


def mask(box):
    found = np.zeros(SHAPE, bool)
    found[box.slices] = True
    return found


@given(boxes(), boxes())
def test_intersection_equals_numpy(one, other):
    both = one.intersect(other)
    expected = mask(one) & mask(other)
    assert (both is None) == (not expected.any())
    if both is not None:
        np.testing.assert_array_equal(mask(both), expected)


@given(boxes())
def test_size_is_the_number_of_elements(box):
    assert box.size == mask(box).sum() == np.prod(box.shape)


@given(boxes())
def test_relative_to_its_own_start_is_whole(box):
    assert box.relative_to(box.start) == Bounds.whole(box.shape)


def test_rank_0_holds_one_element_and_meets_itself():
    point = Bounds.whole(())
    assert point.size == 1
    assert point.intersect(point) == point


@pytest.mark.parametrize(
    ("start", "stop", "message"), [((0,), (1, 2), "rank"), ((2,), (1,), "start <= stop"), ((-1,), (1,), "0 <=")]
)
def test_nonsense_is_refused(start, stop, message):
    with pytest.raises(ValueError, match=message):
        Bounds(start, stop)
