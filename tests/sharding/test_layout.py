import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardload.errors import LayoutError
from shardload.sharding.layout import Layout
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
    with pytest.raises(
        LayoutError, match=r"Shape \(4, 4\) does not divide into \(1, 8\) parts on the mesh batch=1,model=8"
    ):
        layout.bounds((4, 4))


@pytest.mark.parametrize(
    ("spec", "message"), [((("model",), ("model",)), "one dim only"), ((("tensor",),), r"names axes \['tensor'\]")]
)
def test_nonsense_is_refused(spec, message):
    with pytest.raises(LayoutError, match=message):
        Layout(MeshSpec.parse("1x8"), spec)
