"""Splitting a layout over further axes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.errors import MeshError
from shardload.sharding.layout import Layout, spread, why_not_spread
from shardload.sharding.mesh import MeshSpec

MESH = MeshSpec.parse("batch=2,model=4")


def layout(*spec, mesh=MESH):
    return Layout.of_spec(mesh, spec, len(spec))


@pytest.mark.parametrize(
    ("before", "shape", "after"),
    [
        ((None, "model"), (6, 8), ("batch", "model")),  # the dim that is free
        ((None, "model"), (3, 8), (None, ("model", "batch"))),  # it does not divide: further on a split one
        ((None, None), (4, 6), (None, "batch")),  # the largest
        ((None, None), (4, 3), ("batch", None)),  # another one than the largest
        (("model", None), (8, 5), (("model", "batch"), None)),
        ((None, "model"), (3, 4), (None, "model")),  # none divides
        (("batch", None), (4, 4), ("batch", None)),  # it splits the variable already
        ((), (), ()),
        ((None, None), (0, 4), (None, "batch")),
    ],
)
def test_an_axis_splits_a_free_dim_then_a_split_one(before, shape, after):
    assert spread(layout(*before), shape, ["batch"]) == layout(*after)


def test_several_axes_choose_one_after_the_other():
    assert spread(layout(None, None), (8, 6), ["model", "batch"]) == layout("model", "batch")
    assert spread(layout(None), (8,), ["batch", "model"]) == layout(("batch", "model"))


@pytest.mark.parametrize(
    ("before", "shape", "why"),
    [
        ((None, "model"), (3, 4), "no dim of its 3x1 shard divides by the 2 devices of axis 'batch'"),
        ((), (), "no dim of its scalar shard divides by the 2 devices of axis 'batch'"),
        (("batch",), (4,), ""),
        ((None,), (4,), ""),
    ],
)
def test_it_says_why_an_axis_is_left_out(before, shape, why):
    assert why_not_spread(layout(*before), shape, ["batch"]) == why


def test_an_axis_of_one_device_splits_nothing():
    single = layout(None, mesh=MeshSpec.parse("1x8"))
    assert spread(single, (8,), ["batch"]) == single
    assert why_not_spread(single, (8,), ["batch"]) == "axis 'batch' has one device"


def test_an_unknown_axis_is_refused():
    with pytest.raises(MeshError, match="has no axis 'data'; it has batch, model"):
        spread(layout(None), (8,), ["data"])


@given(st.lists(st.integers(0, 12), max_size=3), st.permutations(["batch", "model"]))
def test_what_is_spread_divides_and_is_as_small_as_what_it_says(shape, axes):
    before = Layout.replicated(MESH, len(shape))
    after = spread(before, tuple(shape), axes)
    assert after.divides(tuple(shape))
    left_out = sum(f"of axis {axis!r}" in why_not_spread(before, tuple(shape), axes) for axis in axes)
    assert sum(map(len, after.spec)) == 2 - left_out
