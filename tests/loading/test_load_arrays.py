"""Tensors as plain sharded arrays, without Keras."""

import json
import subprocess
import sys

import h5py
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from checkpoints import write_gguf
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file
from saved_steps import save_step

import shardload
from shardload.errors import LayoutError, MeshError, MismatchError, SourceNotFoundError, UnsupportedError, UsageError

Struct, HERE = jax.ShapeDtypeStruct, SingleDeviceSharding(jax.devices()[0])
VALUES = {
    "embed.weight": np.arange(32 * 16, dtype=np.float32).reshape(32, 16),
    "layers.0.proj": np.arange(64 * 8, dtype=np.float16).reshape(64, 8),
    "layers.1.proj": np.arange(64 * 8, dtype=np.float16).reshape(64, 8) + 1,
    "scale": np.array(3, np.float32),
    "ids": np.arange(8, dtype=np.int32),
}


@pytest.fixture
def path(tmp_path):
    save_file(VALUES, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"))


def assert_holds(array, value, sharding):
    assert isinstance(array, jax.Array) and array.sharding == sharding
    assert array.dtype == value.dtype and np.asarray(array).tobytes() == value.tobytes()
    for shard in array.addressable_shards:
        assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()


def test_every_tensor_by_a_function(path, mesh):
    def rule(name, shape, dtype):
        return None if name == "ids" else NamedSharding(mesh, P(("data", "model")) if len(shape) == 2 else P())

    found = shardload.load_arrays(path, rule)
    assert list(found) == [name for name in VALUES if name != "ids"] or found.keys() == VALUES.keys() - {"ids"}
    for name, array in found.items():
        spec = P(("data", "model")) if VALUES[name].ndim == 2 else P()
        assert_holds(array, VALUES[name], NamedSharding(mesh, spec))


def test_a_function_of_name_and_shape_only(path, mesh):
    found = shardload.load_arrays(path, lambda name, shape: P("model") if len(shape) == 2 else P(), mesh=mesh)
    assert found["embed.weight"].sharding.spec == P("model") and found["ids"].sharding.spec == P()


def test_a_function_that_leaves_out_everything(path):
    with pytest.raises(MismatchError, match="the function returned None for each of its tensors"):
        shardload.load_arrays(path, lambda name, shape: None)
    assert shardload.load_arrays(path, lambda name, shape: None, strict=False) == {}


def test_a_function_gets_the_shape_of_the_transposed_array(path, mesh):
    shapes = {}

    def rule(name, shape):
        shapes[name] = shape
        return P("model") if name == "embed.weight" else None

    found = shardload.load_arrays(path, rule, mesh=mesh, transpose={"embed.weight": (1, 0)})
    assert shapes["embed.weight"] == found["embed.weight"].shape == VALUES["embed.weight"].shape[::-1]


def test_a_tree_with_shapes_dtypes_and_several_meshes(path, mesh):
    other, device = jax.make_mesh((8,), ("x",)), SingleDeviceSharding(jax.devices()[3])
    columns = NamedSharding(mesh, P(None, "model"))
    targets = {
        "embed": {"weight": Struct((32, 16), jnp.bfloat16, sharding=columns)},
        "layers": [{"proj": P("data", "model")}, {"proj": NamedSharding(other, P("x"))}],
        "scale": device,
        "ids": Struct((8,), jnp.int32, sharding=device),
    }
    found = shardload.load_arrays(path, targets, mesh=mesh)
    leaves = {"embed": {"weight": 0}, "layers": [{"proj": 0}] * 2, "scale": 0, "ids": 0}
    assert jax.tree.structure(found) == jax.tree.structure(leaves)
    assert_holds(found["embed"]["weight"], VALUES["embed.weight"].astype(jnp.bfloat16), columns)
    assert_holds(found["layers"][0]["proj"], VALUES["layers.0.proj"], NamedSharding(mesh, P("data", "model")))
    assert_holds(found["layers"][1]["proj"], VALUES["layers.1.proj"], NamedSharding(other, P("x")))
    assert_holds(found["scale"], VALUES["scale"], device)
    assert_holds(found["ids"], VALUES["ids"], device)


@pytest.mark.parametrize("as_functions", [False, True])
def test_names_and_orders_of_dims_of_the_callers(path, mesh, as_functions):
    names = {"table": "embed.weight", "kernel": "layers.0.proj"}
    orders = {"kernel": (1, 0)}
    if as_functions:
        names, orders = names.__getitem__, lambda name, shape: (1, 0) if (name, shape) == ("kernel", (64, 8)) else None
    targets = {"table": P("data"), "kernel": P(None, ("model", "data"))}
    options = {"names": names, "transpose": orders, "dtype": "float32"}
    found = shardload.load_arrays(path, targets, mesh=mesh, strict=False, **options)
    assert_holds(found["table"], VALUES["embed.weight"], NamedSharding(mesh, P("data")))
    kernel = np.ascontiguousarray(VALUES["layers.0.proj"].T).astype(np.float32)
    assert_holds(found["kernel"], kernel, NamedSharding(mesh, P(None, ("model", "data"))))


@pytest.mark.parametrize("stored", [np.float32, jnp.bfloat16])
def test_values_that_become_infinite_are_told(tmp_path, mesh, stored):
    value = np.full((8, 8), 1e30, stored)
    save_file({"large": value, "small": value / 1e30, "endless": value * np.inf}, tmp_path / "f.safetensors")
    with pytest.warns(UserWarning, match=r"range of the new dtype became infinite: large\. Load them in a wider"):
        found = shardload.load_arrays(tmp_path / "f.safetensors", P("data"), mesh=mesh, dtype="float16")
    assert np.isinf(np.asarray(found["large"])).all() and (np.asarray(found["small"]) == 1).all()


def test_explicit_axes_and_one_target_for_all(path):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Explicit,))
    found = shardload.load_arrays(path, NamedSharding(mesh, P()))
    assert found.keys() == VALUES.keys()
    assert all(array.sharding.mesh == mesh for array in found.values())


def test_every_format_and_a_step(tmp_path, mesh):
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64)])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 16)), np.ones((4, 64)), verbose=0)
    model.save_weights(tmp_path / "model.weights.h5")
    save_step(model, tmp_path / "run", 3)
    for source in (tmp_path / "model.weights.h5", tmp_path / "run"):
        split = lambda name, shape, dtype: P("model") if shape and not shape[-1] % 8 else P()  # noqa: E731
        found = shardload.load_arrays(source, split, mesh=mesh)
        expected = [np.asarray(v) for v in model.trainable_variables]
        assert all(any(np.array_equal(a, e) for a in found.values()) for e in expected)


@pytest.mark.parametrize("form", ["data=2,model=4", {"data": 2, "model": 4}])
def test_a_mesh_in_any_form(path, form):
    found = shardload.load_arrays(path, {"embed.weight": P("data", "model")}, mesh=form, strict=False)
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "model"))
    assert_holds(found["embed.weight"], VALUES["embed.weight"], NamedSharding(mesh, P("data", "model")))


def test_arrays_to_replace(path, mesh):
    targets = {
        "embed.weight": jax.device_put(np.zeros((32, 16), jnp.bfloat16), NamedSharding(mesh, P(None, "model"))),
        "ids": jnp.zeros(8, jnp.int32),
    }
    found = shardload.load_arrays(path, targets, strict=False)
    assert_holds(found["embed.weight"], VALUES["embed.weight"].astype(jnp.bfloat16), targets["embed.weight"].sharding)
    assert_holds(found["ids"], VALUES["ids"], targets["ids"].sharding)


def test_an_order_of_dims_may_be_an_array(path, mesh):
    order = {"embed.weight": np.array([1, 0])}
    found = shardload.load_arrays(path, {"embed.weight": P()}, mesh=mesh, transpose=order, strict=False)
    assert found["embed.weight"].shape == VALUES["embed.weight"].shape[::-1]


def test_a_tensor_that_an_index_leaves_out_is_told(tmp_path):
    save_file(VALUES, tmp_path / "model-1.safetensors")
    weight_map = {name: "model-1.safetensors" for name in VALUES if name != "ids"}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.warns(UserWarning, match="left out 1 unlisted tensor: .* does not assign 'ids'"):
        found = shardload.load_arrays(tmp_path / "model.safetensors.index.json", HERE)
    assert found.keys() == VALUES.keys() - {"ids"}


def test_paths_joined_by_slashes_are_found_too(tmp_path, mesh):
    ocp.save(tmp_path / "run", {"params": {"dense": {"kernel": jnp.ones((8, 4))}}, "step": jnp.zeros(())})
    targets = {"params": {"dense": {"kernel": P("model")}}, "step": P()}
    found = shardload.load_arrays(tmp_path / "run", targets, mesh=mesh)
    assert_holds(found["params"]["dense"]["kernel"], np.ones((8, 4), np.float32), NamedSharding(mesh, P("model")))


WIDE, TWICE = "'scale' as float64: JAX has 64-bit dtypes disabled", "two leaves have the same"
OTHER = "Cannot use transpose: no target is called 'idz'"


@pytest.mark.parametrize(
    ("targets", "options", "error", "message"),
    [
        ({"nothing": P()}, {}, MismatchError, "it has no tensor for 1 target:\n  nothing\nPass names="),
        ({"ids": P()}, {"names": {"ids": "x"}}, MismatchError, r"ids \(x\)"),
        ({"ids": P()}, {}, MismatchError, "no target names 4 of its tensors:\n  embed.weight"),
        ({"ids": P("data")}, {"mesh": None, "strict": False}, UsageError, "a PartitionSpec needs a mesh"),
        ({"ids": P(("data", "model"), None)}, {"strict": False}, LayoutError, "it has more entries than dims"),
        ({"scale": P("data")}, {"strict": False}, LayoutError, "it has more entries than dims"),
        ({"ids": Struct((4,), jnp.int32)}, {"strict": False}, MismatchError, r"has shape \(4,\), but tensor"),
        ({"scale": Struct((), jnp.int32, sharding=HERE)}, {"strict": False}, MismatchError, "float32"),
        ({"scale": Struct((), "f4")}, {"strict": False, "mesh": None}, UsageError, "'scale': its .* no sharding"),
        ({"ids": P(("data", "data"))}, {"strict": False}, LayoutError, r"'ids' by .*: expected each axis .* once"),
        ({"ids": P("rows")}, {"strict": False}, LayoutError, r"'ids' by .*: the mesh has no axis 'rows', only data"),
        ({"scale": Struct((), np.float64, sharding=HERE)}, {"strict": False}, UsageError, WIDE),
        ({"ids": P()}, {"strict": False, "transpose": {"idz": (0,)}}, UsageError, OTHER),
        ({"ids": P()}, {"names": {"ID": "ids"}}, UsageError, "Cannot use names: no target is called 'ID'"),
        ({"ids": P(), "scale": P()}, {"names": {"scale": "scale", "idz": "x"}}, UsageError, "but one 'ids', which has"),
        ({"ids": P()}, {"strict": False, "transpose": {"ids": True}}, UsageError, "expected each dim once"),
        ({"ids": 3}, {"strict": False}, UnsupportedError, "expected a ShapeDtypeStruct, NamedSharding"),
        ({"ids": P()}, {"host_memory_bytes": "much"}, UsageError, "host_memory_bytes: Cannot read 'much'"),
        ({"embed.wieght": P()}, {}, MismatchError, "embed.wieght, did you mean 'embed.weight'?"),
        ({"embed.weight": (None, "model")}, {}, UsageError, r"a tuple is a tree of targets\)\. Write PartitionSpec"),
        ({"ids": P(P.UNCONSTRAINED)}, {"strict": False}, LayoutError, "leaves a dim unconstrained"),
        (jnp.zeros((8, 4)), {}, MismatchError, r"'embed.weight': its target has shape \(8, 4\)"),
        ({"ids": P()}, {"mesh": "1by8"}, MeshError, "Cannot read the mesh '1by8'"),
        ({"ids": P()}, {"mesh": "1x9"}, MeshError, "needs 9 devices"),
        ({"ids": object()}, {"strict": False}, UnsupportedError, "PartitionSpec, jax.Array or NumPy array"),
        ({"ids": np.zeros(4, int)}, {"strict": False}, MismatchError, r"target has shape \(4,\)"),
        ({"ids": jnp.zeros(4, jnp.int32)}, {"strict": False}, MismatchError, r"target has shape \(4,\)"),
        ({"ids": P()}, {"names": 3}, UsageError, "Cannot use names=3: expected a mapping or a function"),
        ({"ids": P()}, {"names": lambda name: [name]}, UsageError, "it gives \\['ids'\\], expected a tensor's name"),
        ({"ids": P()}, {"names": {"ids": 3}}, UsageError, "it gives 3, expected a tensor's name"),
        ({"ids": P()}, {"strict": "no"}, UsageError, "expected True or False"),
        ({"ids": P()}, {"strict": False, "transpose": {"ids": (1,)}}, UsageError, "expected each dim once"),
        ({"embed.weight": P()}, {"strict": False, "transpose": {"embed.weight": {0, 1}}}, UsageError, "each dim once"),
        ({"layers": {"0.proj": P()}, "layers.0": {"proj": P()}}, {"strict": False}, UsageError, TWICE),
    ],
)
def test_what_does_not_fit_is_refused(path, targets, options, error, message):
    mesh = jax.make_mesh((2, 4), ("data", "model"))
    with pytest.raises(error, match=message):
        shardload.load_arrays(path, targets, **{"mesh": mesh} | options)


def test_a_shape_that_does_not_divide_is_refused(path):
    three = jax.sharding.Mesh(jax.devices()[:3], ("x",))
    with pytest.raises(LayoutError, match=r"its shape \(8,\) does not divide into \(3,\) parts. Split another dim"):
        shardload.load_arrays(path, {"ids": P("x")}, mesh=three, strict=False)
    with pytest.raises(SourceNotFoundError):
        shardload.load_arrays(path.with_name("nothing.safetensors"), {})


@pytest.mark.slow
def test_keras_is_not_imported(path):
    code = f"""
import sys, jax, shardload
mesh = jax.make_mesh((1,), ("x",))
assert len(shardload.inspect({str(path)!r}).tensors) == 5
assert len(shardload.load_arrays({str(path)!r}, jax.sharding.PartitionSpec(), mesh=mesh)) == 5
assert "keras" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_small_array_is_dispatched_once_with_the_callers_own_sharding(tmp_path, mesh, monkeypatch):
    values = {f"t{i}": np.full((8, 4), i, np.float32) for i in range(300)}
    save_file(values, tmp_path / "model.safetensors")
    calls = {"make_array_from_callback": 0, "make_array_from_single_device_arrays": 0, "device_put": 0}
    for name in calls:
        original = getattr(jax, name)

        def counted(*args, _name=name, _original=original, **options):
            calls[_name] += 1
            return _original(*args, **options)

        monkeypatch.setattr(jax, name, counted)
    wanted = [NamedSharding(mesh, P("model")), NamedSharding(mesh, P()), SingleDeviceSharding(jax.devices()[3])]
    found = shardload.load_arrays(tmp_path, {name: wanted[i % 3] for i, name in enumerate(values)})
    assert calls == {"make_array_from_callback": 300, "make_array_from_single_device_arrays": 0, "device_put": 0}
    for i, (name, value) in enumerate(values.items()):
        assert found[name].sharding is wanted[i % 3]
        assert_holds(found[name], value, wanted[i % 3])


def test_one_table_serves_a_model_and_a_part_of_it(tmp_path, mesh):
    kinds = ("q_proj", "k_proj", "up_proj")
    stored = {f"h.{i}.{k}": np.arange(16, dtype=np.float32).reshape(4, 4) + i for i in range(2) for k in kinds}
    save_file(stored | {"norm": np.ones(4, np.float32)}, tmp_path / "m.safetensors")
    names = {f"layers.{i}.{k[:-5]}.kernel": f"h.{i}.{k}" for i in range(2) for k in kinds}
    options = {"mesh": mesh, "names": names, "transpose": dict.fromkeys(names, (1, 0))}
    whole = shardload.load_arrays(tmp_path / "m.safetensors", dict.fromkeys((*names, "norm"), P()), **options)
    for part in (["layers.0.q.kernel", "layers.1.up.kernel"], ["layers.1.k.kernel", "norm"]):
        found = shardload.load_arrays(tmp_path / "m.safetensors", dict.fromkeys(part, P()), strict=False, **options)
        assert all(np.array_equal(found[name], whole[name]) for name in part)
    assert np.array_equal(found["layers.1.k.kernel"], stored["h.1.k_proj"].T)


@pytest.mark.parametrize(
    ("key", "target"),
    [("layers.0.q.kernl", "layers.0.q.kernel"), ("params.w", "w"), ("w", "w.value"), ("a/w", "a.w")],
)
def test_a_key_that_may_be_a_misspelt_target_is_refused(key, target, tmp_path):
    save_file({target: np.eye(4), "b": np.eye(4)}, tmp_path / "m.safetensors")
    targets, order = dict.fromkeys((target, "b"), HERE), {"b": (0, 1), key: (1, 0)}
    with pytest.raises(UsageError, match=f"no target is called '{key}', but one '{target}', which has no entry"):
        shardload.load_arrays(tmp_path / "m.safetensors", targets, transpose=order)
    order[target] = (0, 1)  # then the key is another name
    assert len(shardload.load_arrays(tmp_path / "m.safetensors", targets, transpose=order, dtype="float32")) == 2


@pytest.mark.parametrize("ending", [".safetensors", ".weights.h5", ".gguf"])
def test_tensors_without_elements_load_from_every_format(ending, tmp_path):
    path = tmp_path / f"m{ending}"
    empty = {"blk.0.attn_norm.weight": np.zeros((0,), "f4"), "blk.0.ffn_down.weight": np.zeros((0, 4), "f4")}
    if ending == ".gguf":
        write_gguf(path, empty)
    elif ending == ".safetensors":
        save_file(empty, path)
    else:
        with h5py.File(path, "w") as file:
            for number, value in enumerate(empty.values()):
                file[f"layers/dense/vars/{number}"] = value
    for target in (P(), P("batch"), SingleDeviceSharding(jax.devices()[1])):
        found = shardload.load_arrays(path, lambda _, shape, *, to=target: None if np.prod(shape) else to, mesh="2x4")
        assert sorted(value.shape for value in found.values()) == [(0,), (0, 4)]
    host = shardload.load_arrays(path, {name: np.ones(value.shape) for name, value in found.items()}, strict=False)
    assert all(type(value) is np.ndarray and not value.size for value in host.values())


@pytest.mark.parametrize(
    ("targets", "options", "told"),
    [
        (lambda name: None, {}, "takes the name and shape of an array, and its dtype as well"),
        (lambda name, shape: P(), {"transpose": lambda name: None}, "takes the name of a target and the shape"),
        (lambda name, shape: P(), {"names": lambda: ""}, "takes the name of a target$"),
    ],
)
def test_functions_with_other_arguments_are_refused(targets, options, told, tmp_path):
    save_file({"a": np.ones((2, 2), np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(UsageError, match=f"^Cannot call the function .*{told}"):
        shardload.load_arrays(tmp_path / "m.safetensors", targets, mesh="1x1", **options)


@pytest.mark.parametrize(
    ("target", "error", "says"),
    [
        ({"a": True}, UnsupportedError, r"a number of the same kind \(bool, int, float\)"),
        (object(), MismatchError, r"no tensor for 1 target:\n  the target itself"),
    ],
    ids=["a number of another kind", "no tree"],
)
def test_a_target_that_is_none_is_told(target, error, says, tmp_path):
    save_file({"a": np.asarray(7, np.int32)}, tmp_path / "m.safetensors")
    with pytest.raises(error, match=says):
        shardload.load_arrays(tmp_path / "m.safetensors", target)
