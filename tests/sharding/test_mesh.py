import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardload.errors import MeshError
from shardload.sharding.mesh import MeshSpec


@pytest.mark.parametrize(
    ("text", "axes", "expected"),
    [
        ("1x8", None, MeshSpec(("batch", "model"), (1, 8))),
        ("1X8", None, MeshSpec(("batch", "model"), (1, 8))),
        ("8", None, MeshSpec(("batch", "model"), (1, 8))),
        ("2x4", "data, tensor", MeshSpec(("data", "tensor"), (2, 4))),
        ("2x2x2", "a,b,c", MeshSpec(("a", "b", "c"), (2, 2, 2))),
        ("data=2,model=4", None, MeshSpec(("data", "model"), (2, 4))),
    ],
)
def test_parse(text, axes, expected):
    assert MeshSpec.parse(text, axes=axes) == expected


@pytest.mark.parametrize(
    ("text", "axes", "message"),
    [
        ("", None, "Cannot read the mesh ''"),
        ("1x", None, "Cannot read the mesh '1x'"),
        ("-1x8", None, "Cannot read the mesh"),
        ("axb", None, "Write sizes like 1x8"),
        ("data=2,model", None, "for each axis: data=2,model=4"),
        ("data=2", "data", r"names its axes already; give no separate axes \(data\)"),
        ("=4", None, "Cannot read the mesh '=4'. Write a name and a size for each axis: data=2,model=4"),
        ("1x2x3", None, "name them"),
        ("2x4", "a", "needs one name per axis, got a for 2x4$"),
        ("2x4", "a,a", "must differ, got a, a$"),
        ("0x8", None, "must be positive and at most .* got 0x8$"),
        ("999999999x999999999", None, "at most"),
    ],
)
def test_nonsense_is_refused(text, axes, message):
    with pytest.raises(MeshError, match=message):
        MeshSpec.parse(text, axes=axes)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_coordinates_equal_unravel_index(sizes):
    mesh = MeshSpec(tuple(f"a{i}" for i in range(len(sizes))), tuple(sizes))
    for position in range(mesh.size):
        assert tuple(mesh.coordinates(position).values())[::-1] == np.unravel_index(position, sizes)


def test_unknown_axis_is_named():
    with pytest.raises(MeshError, match=r"batch=1,model=8 has no axis 'tensor'; it has batch, model"):
        MeshSpec.parse("1x8").axis_size("tensor")


def test_text_form_parses_back():
    mesh = MeshSpec(("data", "model"), (2, 4))
    assert MeshSpec.parse(str(mesh)) == mesh


@pytest.mark.parametrize(
    ("mesh", "kinds", "batch", "guessed"),
    [
        ("1x8", ["batch", "model"], "batch", ()),
        ("fsdp=8,tp=1", ["fsdp", "model"], "fsdp", ()),
        ("tp=4,fsdp=2", ["model", "fsdp"], "fsdp", ()),
        ("model=4,data=2", ["model", "batch"], "data", ()),
        ("data=2,fsdp=2,model=2", ["batch", "fsdp", "model"], "data", ()),
        ("replica=2,zero=2,expert=2,tensor=1", ["batch", "fsdp", "expert", "model"], "replica", ()),
        ("DP=2,TP=4", ["batch", "model"], "DP", ()),
        ("data=8", ["batch"], "data", ()),
        ("x=8", ["model"], "x", ("x",)),
        ("x=2,y=2,z=2", ["batch", "fsdp", "model"], "x", ("x", "y", "z")),
        ("x=1,tp=8", ["batch", "model"], "x", ()),
        ("tp=4,x=2", ["model", "model"], "tp", ("x",)),
    ],
)
def test_the_name_of_an_axis_says_what_it_splits_else_its_position(mesh, kinds, batch, guessed):
    spec = MeshSpec.parse(mesh)
    assert [spec.axis_kind(axis) for axis in spec.axes] == kinds
    assert (spec.batch_axis, spec.guessed_axes) == (batch, guessed)
