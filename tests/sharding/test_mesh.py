import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import shardload
from shardload.errors import MeshError, UsageError
from shardload.sharding.devices import not_started, resolve_devices
from shardload.sharding.mesh import MeshSpec, planned_mesh


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
        ("data=2,fsdp=2,model=2", ["batch", "fsdp", "model"], "data fsdp", ()),
        ("replica=2,zero=2,expert=2,tensor=1", ["batch", "fsdp", "expert", "model"], "replica zero", ()),
        ("DP=2,TP=4", ["batch", "model"], "DP", ()),
        ("data=8", ["batch"], "data", ()),
        ("data=2,context=2,model_1=2,model_2=2", ["batch", "sequence", "model", "model"], "data", ()),
        ("ep=8", ["expert"], "", ()),
        ("stage=2,dp=4", ["stage", "batch"], "dp", ()),
        ("x=8", ["model"], "", ("x",)),
        ("x=2,y=2,z=2", ["batch", "fsdp", "model"], "x y", ("x", "y", "z")),
        ("x=1,tp=8", ["batch", "model"], "x", ()),
        ("tp=4,x=2", ["model", "model"], "", ("x",)),
    ],
)
def test_the_name_of_an_axis_says_what_it_splits_else_its_position(mesh, kinds, batch, guessed):
    spec = MeshSpec.parse(mesh)
    assert [spec.axis_kind(axis) for axis in spec.axes] == kinds
    assert " ".join(spec.batch_axes) == batch
    assert [note.split(" of the mesh")[0] for note in spec.guess_notes] == [f"axis {axis!r}" for axis in guessed]


# ---- the mesh of a saved plan --------------------------------------------------------------------


MESH = MeshSpec(("data", "model"), (2, 4))


def test_the_mesh_of_a_saved_plan_is_read_without_jax(tmp_path):
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"mesh": {"axes": MESH.axes, "sizes": MESH.sizes}}))
    assert planned_mesh(file) == planned_mesh(str(file)) == MESH
    code = f"import sys; from shardload.sharding.mesh import planned_mesh; planned_mesh({str(file)!r}); "
    subprocess.run([sys.executable, "-c", code + "assert 'jax' not in sys.modules"], check=True)


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"mesh": "2x4"}', '{"mesh": {"axes": ["a"], "sizes": [0]}}', b"\xff"]
)
def test_what_is_no_plan_has_no_mesh(content, tmp_path):
    file = tmp_path / "plan.json"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert planned_mesh(file) is None
    assert planned_mesh(tmp_path / "none.json") is planned_mesh("search") is planned_mesh(None) is None


# ---- devices that a caller names: in any sequence or array ---------------------------------------


WRONG = {
    "none": lambda: [],
    "an empty array": lambda: np.array([], dtype=object),
    "one device": lambda: jax.devices()[0],
    "names": lambda: ["cpu:0", "cpu:1"],
    "an array of names": lambda: np.array(["cpu:0", "cpu:1"]),
}


@pytest.mark.parametrize("mesh", [None, "1x2"])
@pytest.mark.parametrize("what", WRONG)
def test_what_is_no_list_of_devices_is_refused(what, mesh):
    with pytest.raises(UsageError, match=r"Cannot use devices=.*: expected a list of devices such as jax\.devices"):
        resolve_devices(mesh, devices=WRONG[what]())
    with pytest.raises(UsageError, match="Cannot use devices="):
        shardload.AutoShardDistribution(mesh, devices=WRONG[what]())


def test_an_array_of_devices_is_a_list_of_them_in_mesh_order():
    devices = jax.devices()[:4][::-1]
    assert resolve_devices(devices=np.array(devices)).devices == tuple(devices)
    for shape in [(4,), (2, 2)]:
        assert resolve_devices("2x2", devices=np.array(devices).reshape(shape)).devices == tuple(devices)
    found = resolve_devices(devices=np.array(devices).reshape(2, 2))
    assert (str(found.mesh), found.devices) == ("batch=1,model=4", tuple(devices))


def test_a_process_that_does_not_come_is_the_cause_of_a_timeout(monkeypatch):
    error = RuntimeError("DEADLINE_EXCEEDED: GetKeyValue() timed out with key: cpu:topology/1")
    assert "set JAX_PLATFORMS=cpu" in str(not_started(error))
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    assert "it waits for every process: one of them has ended" in str(not_started(error))


def test_an_axis_is_divided_and_joined_again():
    mesh = MeshSpec(("batch", "model"), (8, 64))
    divided = mesh.divided("model", 8)
    assert str(divided) == "batch=8,model_1=8,model_2=8"
    assert mesh.parts_in(divided) == {"batch": ("batch",), "model": ("model_1", "model_2")}
    assert divided.undivided == mesh == mesh.undivided
    assert mesh.parts_in(mesh) == {"batch": ("batch",), "model": ("model",)}
    assert mesh.parts_in(MeshSpec(("batch", "model_1", "model_2"), (8, 4, 8))) is None
    assert mesh.parts_in(MeshSpec(("model_1", "model_2", "batch"), (8, 8, 8))) is None
    twice = divided.divided("model_1", 2)
    assert str(twice) == "batch=8,model_1_1=2,model_1_2=4,model_2=8" and twice.undivided == mesh
