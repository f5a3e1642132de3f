import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardload.errors import LayoutError, MeshError
from shardload.sharding.layout import Bounds, Layout, spread, why_not_spread
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.execution import named_sharding

MESHES = [MeshSpec.parse(m) for m in ("1x1", "1x3", "1x8", "8x1", "2x4", "data=2,fsdp=2,model=2")]


@st.composite
def layouts(draw):
    """A layout and a shape it divides."""
    mesh = draw(st.sampled_from(MESHES))
    axes = list(draw(st.permutations(mesh.axes)))
    spec, shape = [], []
    for _ in range(draw(st.integers(0, 3))):
        here = tuple(axes.pop() for _ in range(draw(st.integers(0, len(axes)))))
        spec.append(here)
        shape.append(int(np.prod([mesh.axis_size(a) for a in here])) * draw(st.integers(0, 3)))
    return Layout(mesh, tuple(spec)), tuple(shape)


@settings(deadline=None)
@given(layouts())
def test_bounds_equal_those_of_named_sharding(pair):
    layout, shape = pair
    devices = jax.devices()[: layout.mesh.size]
    indices = named_sharding(layout, devices).devices_indices_map(shape)
    for device, bounds in zip(devices, layout.bounds(shape), strict=True):
        expected = tuple(s.indices(n)[:2] for s, n in zip(indices[device], shape, strict=True))
        assert tuple(zip(bounds.start, bounds.stop, strict=True)) == expected


@given(layouts(), st.data())
def test_boxes_at_some_positions_are_those_of_all(pair, data):
    layout, shape = pair
    positions = data.draw(st.lists(st.integers(0, layout.mesh.size - 1), max_size=4))
    found = layout.bounds_at(shape, positions)
    assert found == tuple(layout.bounds(shape)[i] for i in positions)
    assert len(set(map(id, found))) == len(set(found))


@given(layouts())
def test_shards_tile_the_variable(pair):
    layout, shape = pair
    seen = np.zeros(shape, int)
    for bounds in set(layout.bounds(shape)):
        seen[(*bounds.slices, ...)] += 1
    assert (seen == 1).all()
    assert layout.shard_shape(shape) == layout.bounds(shape)[0].shape


def test_replicated_and_split():
    mesh = MeshSpec.parse("2x4")
    assert Layout.replicated(mesh, 2).is_replicated
    assert Layout.split(mesh, 2, dim=1, axis="model").parts == (1, 4)
    assert str(Layout(mesh, (("batch", "model"), ()))) == "(batch+model, -)"


def test_what_does_not_divide_is_refused():
    layout = Layout.split(MeshSpec.parse("1x8"), 2, dim=1, axis="model")
    assert not layout.divides((4, 4))
    said = r"Shape \(4, 4\) does not divide into \(1, 8\) parts on the mesh batch=1,model=8"
    with pytest.raises(LayoutError, match=said):
        layout.bounds((4, 4))


@pytest.mark.parametrize(
    ("spec", "message"), [((("model",), ("model",)), "one dim only"), ((("tensor",),), r"names axes \['tensor'\]")]
)
def test_nonsense_is_refused(spec, message):
    with pytest.raises(LayoutError, match=message):
        Layout(MeshSpec.parse("1x8"), spec)


# ---- bounds --------------------------------------------------------------------------------------


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
    assert point.size == 1 and point.intersect(point) == point


@pytest.mark.parametrize(
    ("start", "stop", "message"), [((0,), (1, 2), "rank"), ((2,), (1,), "start <= stop"), ((-1,), (1,), "0 <=")]
)
def test_bounds_that_are_none_are_refused(start, stop, message):
    with pytest.raises(ValueError, match=message):
        Bounds(start, stop)


# ---- splitting a layout over further axes --------------------------------------------------------


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
