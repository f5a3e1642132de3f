"""Trees of other libraries as targets of `load_arrays`: modules, boxes, typed keys, numbers, formats."""

import dataclasses

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training import train_state as training
from jax.experimental.layout import Format, Layout
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from safetensors.numpy import save_file

import shardload
from shardload.errors import LayoutError, MismatchError, UnsupportedError, UsageError

HERE = SingleDeviceSharding(jax.devices()[0])
WEIGHT, BIAS = np.arange(32, dtype=np.float32).reshape(8, 4), np.arange(4, dtype=np.float32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Module:
    """As Equinox has them: called like a function, with functions and numbers among its leaves."""

    weight: object
    bias: object
    activation: object = jax.nn.relu
    rate: object = 0.5

    def __call__(self, x):
        return self.activation(x @ self.weight + self.bias)


class Box:
    """As Flax has them: one array in an attribute that checkpoints do not name."""

    def __init__(self, value):
        self.value = value


jax.tree_util.register_pytree_with_keys(
    Box, lambda box: (((jax.tree_util.GetAttrKey("value"), box.value),), None), lambda _, found: Box(*found)
)


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2, 4), ("data", "model"))


@pytest.fixture
def path(tmp_path):
    save_file({"weight": WEIGHT, "bias": BIAS}, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def struct(shape, dtype=jnp.float32, sharding=HERE):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def test_a_registered_module_is_a_tree_though_it_can_be_called(path, mesh):
    split = NamedSharding(mesh, P(None, "model"))
    found = shardload.load_arrays(path, Module(struct((8, 4), sharding=split), jnp.zeros(4)))
    assert isinstance(found, Module) and found.activation is jax.nn.relu and found.rate == 0.5
    assert found.weight.sharding == split and np.array_equal(found.weight, WEIGHT) and np.array_equal(found.bias, BIAS)
    with pytest.raises(MismatchError, match=r"'weight': its target has shape \(4, 8\)"):
        shardload.load_arrays(path, Module(struct((4, 8)), struct((4,))))
    with pytest.raises(MismatchError, match=r"no tensor for 1 target:\n  kernel"):
        shardload.load_arrays(path, {"kernel": struct((8, 4))})


def test_boxes_have_the_names_of_what_is_in_them(tmp_path, mesh):
    save_file({"params.kernel": WEIGHT, "params.bias": BIAS}, tmp_path / "m.safetensors")
    targets = {"params": {"kernel": Box(NamedSharding(mesh, P("data"))), "bias": Box(struct((4,)))}}
    found = shardload.load_arrays(tmp_path / "m.safetensors", targets)
    assert isinstance(found["params"]["kernel"], Box) and np.array_equal(found["params"]["kernel"].value, WEIGHT)
    ocp.save(tmp_path / "named", {"params": {"kernel": {"value": WEIGHT}, "bias": BIAS}})
    found = shardload.load_arrays(tmp_path / "named", targets)  # where the file names the box, that is its name
    assert np.array_equal(found["params"]["kernel"].value, WEIGHT)
    assert np.array_equal(found["params"]["bias"].value, BIAS)
    with pytest.raises(MismatchError, match=r"no tensor for 1 target:\n  params\.scale"):
        shardload.load_arrays(tmp_path / "m.safetensors", {"params": {"scale": Box(HERE)}}, strict=False)
    names = {"params.kernel.value": "params.bias"}
    found = shardload.load_arrays(
        tmp_path / "m.safetensors", {"params": {"kernel": Box(HERE)}}, names=names, strict=False
    )
    assert np.array_equal(found["params"]["kernel"].value, BIAS)


class Partitioned(Box):
    """As `nn.Partitioned`: a box that says how its array is split."""

    def get_partition_spec(self):
        return P(None, "model")


jax.tree_util.register_pytree_with_keys(
    Partitioned,
    lambda box: (((jax.tree_util.GetAttrKey("value"), box.value),), None),
    lambda _, found: Partitioned(*found),
)


@pytest.fixture(params=["orbax", "safetensors"])
def boxed(request, tmp_path):
    """A checkpoint with the names of boxes: of two layers, of which the second has other shapes."""
    if request.param == "orbax":
        layers = {"a": {"kernel": {"value": WEIGHT}, "bias": BIAS}, "b": {"kernel": {"value": WEIGHT.T}}}
        ocp.save(tmp_path / "boxed", {"params": layers})
        return tmp_path / "boxed"
    tensors = {"params.a.kernel.value": WEIGHT, "params.a.bias": BIAS, "params.b.kernel.value": WEIGHT.T.copy()}
    save_file(tensors, tmp_path / "boxed.safetensors")
    return tmp_path / "boxed.safetensors"


def of_layers(kernel, bias, other):
    return {"params": {"a": {"kernel": kernel, "bias": bias}, "b": {"kernel": other}}}


def test_trees_without_boxes_find_what_was_saved_with_them(boxed, mesh):
    split = NamedSharding(mesh, P(None, "model"))
    for targets in (
        of_layers(P(None, "model"), P(), P()),  # as of nn.get_partition_spec
        of_layers(split, HERE, HERE),  # as of nn.get_sharding
        of_layers(struct((8, 4), sharding=split), struct((4,)), struct((4, 8))),
        of_layers(jax.device_put(WEIGHT * 0, split), BIAS * 0, WEIGHT.T * 0),
    ):
        found = shardload.load_arrays(boxed, targets, mesh=mesh)["params"]
        assert found["a"]["kernel"].sharding == split and np.array_equal(found["a"]["kernel"], WEIGHT)
        assert np.array_equal(found["a"]["bias"], BIAS) and np.array_equal(found["b"]["kernel"], WEIGHT.T)
    slash = "." if boxed.suffix else "/"
    order = {slash.join(("params", "b", "kernel")): (1, 0)}
    found = shardload.load_arrays(boxed, of_layers(P(), P(), P()), mesh=mesh, transpose=order)
    assert np.array_equal(found["params"]["b"]["kernel"], WEIGHT)
    names = {"w": slash.join(("params", "a", "kernel"))}
    assert np.array_equal(shardload.load_arrays(boxed, {"w": HERE}, names=names, strict=False)["w"], WEIGHT)


def test_a_parameter_called_value_is_no_box(tmp_path, mesh):
    ocp.save(tmp_path / "net", {"head": {"value": WEIGHT, "scale": BIAS}})
    with pytest.raises(MismatchError, match=r"no tensor for 1 target:\n  head\n"):
        shardload.load_arrays(tmp_path / "net", {"head": P()}, mesh=mesh, strict=False)
    save_file({"head": BIAS, "head.value": WEIGHT}, tmp_path / "both.safetensors")
    found = shardload.load_arrays(tmp_path / "both.safetensors", {"head": P()}, mesh=mesh, strict=False)
    assert np.array_equal(found["head"], BIAS)


def test_dicts_of_boxes_find_what_was_saved_without(tmp_path, mesh):
    """As the metadata of Orbax has them: a box is a dict."""
    save_file({"a.kernel": WEIGHT}, tmp_path / "m.safetensors")
    found = shardload.load_arrays(tmp_path / "m.safetensors", {"a": {"kernel": {"value": P("data")}}}, mesh=mesh)
    assert np.array_equal(found["a"]["kernel"]["value"], WEIGHT)


@pytest.mark.parametrize(
    ("target", "suggested"),
    [
        ("params.a.kernl", None),  # kernel.value has one part more
        ("params.a.biass", "params.a.bias"),
        ("a.bias", "params.a.bias"),
        ("params.c.bias", None),  # of another layer
        ("params.layer_1.bias", None),
    ],
)
def test_no_tensor_of_another_layer_is_suggested(tmp_path, target, suggested):
    names = ("params.a.kernel.value", "params.a.bias", "params.b.bias", "params.layer_0.bias")
    save_file(dict.fromkeys(names, BIAS), tmp_path / "m.safetensors")
    with pytest.raises(MismatchError) as raised:
        shardload.load_arrays(tmp_path / "m.safetensors", {target: HERE}, strict=False)
    line = f"  {target}, did you mean {suggested!r}?" if suggested else f"  {target}"
    assert line in str(raised.value).splitlines()
    with pytest.raises(MismatchError) as raised:  # of another shape, or the tensor of another target
        shardload.load_arrays(tmp_path / "m.safetensors", {target: struct((5,))}, strict=False)
    assert "did you mean" not in str(raised.value)
    if suggested:
        with pytest.raises(MismatchError) as raised:
            shardload.load_arrays(tmp_path / "m.safetensors", {target: HERE, suggested: HERE}, strict=False)
        assert "did you mean" not in str(raised.value)


def test_arrays_of_numpy_come_back_as_such(path, mesh):
    targets = {"weight": np.zeros((8, 4), np.float64), "bias": np.zeros(4, np.float32)}
    found = shardload.load_arrays(path, targets)
    assert all(type(value) is np.ndarray for value in found.values()) and found["weight"].dtype == np.float64
    assert np.array_equal(found["weight"], WEIGHT) and np.array_equal(found["bias"], BIAS)
    assert found["bias"].flags.writeable and not targets["bias"].any()
    turned = shardload.load_arrays(path, {"weight": np.zeros((4, 8))}, transpose={"weight": (1, 0)}, strict=False)
    assert np.array_equal(turned["weight"], WEIGHT.T)
    with pytest.raises(MismatchError, match=r"'weight': its target has shape \(4, 8\)"):
        shardload.load_arrays(path, {"weight": np.zeros((4, 8))}, strict=False)
    with pytest.raises(MismatchError, match="Cannot cast tensor 'bias' from float32 to int32"):
        shardload.load_arrays(path, {"bias": np.zeros(4, np.int32)}, strict=False)
    mixed = shardload.load_arrays(path, {"weight": P("data"), "bias": np.zeros(4)}, mesh=mesh)
    assert isinstance(mixed["weight"], jax.Array) and type(mixed["bias"]) is np.ndarray
    found = shardload.load_arrays(path, Module(WEIGHT * 0, BIAS * 0))
    assert type(found.weight) is np.ndarray and np.array_equal(found.weight, WEIGHT)


def test_casts_to_arrays_of_numpy_are_those_to_other_arrays(tmp_path):
    values = {"large": np.array([1e6, 1], np.float32), "step": np.array(300, np.int64)}
    save_file(values, tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match="became infinite: large"):
        found = shardload.load_arrays(tmp_path / "m.safetensors", {"large": np.zeros(2, np.float16)}, strict=False)
    assert np.array_equal(found["large"], [np.inf, 1])
    found = shardload.load_arrays(tmp_path / "m.safetensors", {"step": np.zeros((), np.int16)}, strict=False)
    assert found["step"].shape == () and found["step"] == 300
    with pytest.raises(MismatchError, match="'step' as int8"):
        shardload.load_arrays(tmp_path / "m.safetensors", {"step": np.zeros((), np.int8)}, strict=False)


def test_a_tree_of_shapes_is_whole_on_each_device_of_a_mesh(path, mesh):
    """As of `jax.eval_shape`; boxes say more."""
    shapes = jax.eval_shape(lambda: {"weight": jnp.zeros((8, 4)), "bias": jnp.zeros(4, jnp.float16)})
    found = shardload.load_arrays(path, shapes, mesh=mesh)
    assert found["weight"].sharding == NamedSharding(mesh, P()) and np.array_equal(found["weight"], WEIGHT)
    assert found["bias"].dtype == jnp.float16
    boxes = {"weight": Partitioned(shapes["weight"]), "bias": shapes["bias"]}
    found = shardload.load_arrays(path, boxes, mesh=mesh)
    assert found["weight"].value.sharding == NamedSharding(mesh, P(None, "model"))
    with pytest.raises(LayoutError, match="the mesh has no axis 'model', only x, y"):
        shardload.load_arrays(path, boxes, mesh={"x": 2, "y": 4})


def test_shapes_on_an_abstract_mesh_take_the_mesh_that_is_given(path, mesh):
    """As of `jax.eval_shape` under `jax.set_mesh`: JAX has no devices there."""
    abstract = NamedSharding(mesh.abstract_mesh, P(None, "model"))
    shapes = {"weight": struct((8, 4), sharding=abstract), "bias": struct((4,))}
    found = shardload.load_arrays(path, shapes, mesh=mesh)
    assert found["weight"].sharding == NamedSharding(mesh, P(None, "model"))
    assert np.array_equal(found["weight"], WEIGHT)
    with pytest.raises(UsageError, match=r"'weight' by .*: its mesh is abstract, without devices\. Pass mesh="):
        shardload.load_arrays(path, shapes)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_typed_keys_come_back_as_from_orbax(tmp_path, mesh, impl):
    keys = {"one": jax.random.key(3, impl=impl), "many": jax.random.split(jax.random.key(4, impl=impl), 8)}
    ocp.save(tmp_path / "keys", keys)
    spread = NamedSharding(mesh, P(("data", "model")))
    targets = {"one": jax.random.key(0, impl=impl), "many": struct((8,), keys["many"].dtype, spread)}
    found = shardload.load_arrays(tmp_path / "keys", targets)
    for name, key in keys.items():
        assert found[name].dtype == key.dtype
        assert np.array_equal(jax.random.key_data(found[name]), jax.random.key_data(key))
    assert found["many"].sharding == spread
    with pytest.raises(MismatchError, match="its target has shape"):
        shardload.load_arrays(tmp_path / "keys", targets | {"many": targets["one"]})


@pytest.mark.parametrize("sharding", ["one", "split", "replicated"])
def test_wider_integers_load_where_their_values_fit(tmp_path, mesh, sharding):
    where = {"one": HERE, "split": NamedSharding(mesh, P("data")), "replicated": NamedSharding(mesh, P())}[sharding]
    scalar = HERE if sharding == "one" else NamedSharding(mesh, P())
    counts = np.array([[7, -8, 9], [1, 2, 3]], np.int64)
    save_file({"step": np.array(70000, np.int64), "counts": counts}, tmp_path / "m.safetensors")
    targets = {"step": struct((), jnp.int32, scalar), "counts": struct((2, 3), jnp.int8, where)}
    found = shardload.load_arrays(tmp_path / "m.safetensors", targets)
    assert (found["step"].dtype, int(found["step"])) == (jnp.int32, 70000) and found["counts"].sharding == where
    assert found["counts"].dtype == jnp.int8 and np.array_equal(found["counts"], counts)
    turned = {**targets, "counts": struct((3, 2), jnp.int8, scalar)}
    found = shardload.load_arrays(tmp_path / "m.safetensors", turned, transpose={"counts": (1, 0)})
    assert np.array_equal(found["counts"], counts.T)
    with pytest.raises(MismatchError, match=r"'step' as int16: .* int64 values from 70000 to 70000, expected -32768"):
        shardload.load_arrays(tmp_path / "m.safetensors", targets | {"step": struct((), jnp.int16)})
    with pytest.raises(MismatchError, match="as uint8"):
        shardload.load_arrays(tmp_path / "m.safetensors", targets | {"counts": struct((2, 3), jnp.uint8)})


def test_numbers_of_python_become_the_stored_ones(tmp_path):
    ocp.save(tmp_path / "state", {"step": 1 << 40, "rate": 0.25, "weight": WEIGHT})
    found = shardload.load_arrays(tmp_path / "state", {"step": 0, "rate": 0.0, "weight": HERE})
    assert found["step"] == 1 << 40 and type(found["step"]) is int and found["rate"] == 0.25
    with pytest.raises(UnsupportedError, match="Cannot place 'rate' by 3"):
        shardload.load_arrays(tmp_path / "state", {"step": 0, "rate": 3, "weight": HERE})


def test_devices_formats_and_float8(path):
    device = jax.devices()[3]
    found = shardload.load_arrays(path, device)
    assert all(array.devices() == {device} for array in found.values())
    wanted = Format(Layout((1, 0)), HERE)
    found = shardload.load_arrays(path, {"weight": wanted, "bias": device}, dtype="float8_e4m3fn")
    assert found["weight"].format.layout.major_to_minor == (1, 0) and found["bias"].devices() == {device}
    assert found["weight"].dtype == jnp.float8_e4m3fn
    for dtype in (jnp.float8_e5m2, np.dtype(jnp.float8_e5m2)):
        assert np.array_equal(shardload.load_arrays(path, HERE, dtype=dtype)["bias"], BIAS.astype(jnp.float8_e5m2))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_values_beyond_float8_are_told(tmp_path, dtype):
    save_file({"large": np.array([1e6, 1], np.float32), "small": BIAS}, tmp_path / "m.safetensors")
    with pytest.warns(UserWarning, match=r"range of the new dtype became infinite: large\. Load them in a wider"):
        shardload.load_arrays(tmp_path / "m.safetensors", HERE, dtype=dtype)


def test_what_is_no_target_is_told(path):
    with pytest.raises(UnsupportedError, match=r"by the class .*Array: expected a ShapeDtypeStruct"):
        shardload.load_arrays(path, {"weight": jax.Array, "bias": HERE})
    with pytest.raises(UsageError, match=r"Cannot use the class .*Array for targets: expected a tree or a function"):
        shardload.load_arrays(path, jax.Array)
    with pytest.raises(LayoutError, match=r"leaves a dim unconstrained. State an axis or None"):
        shardload.load_arrays(path, P(P.UNCONSTRAINED), mesh="1x8")


def test_modules_of_equinox(tmp_path):
    module = eqx.nn.MLP(2, 3, 4, 1, key=jax.random.key(0))
    arrays = jax.tree_util.tree_flatten_with_path(eqx.filter(module, eqx.is_array))[0]
    named = {jax.tree_util.keystr(p)[1:].replace("[", ".").replace("]", ""): np.asarray(v) + 1 for p, v in arrays}
    save_file(named, tmp_path / "m.safetensors")
    found = shardload.load_arrays(tmp_path / "m.safetensors", module)
    assert isinstance(found, eqx.nn.MLP) and found.activation is module.activation
    assert np.array_equal(found.layers[0].weight, module.layers[0].weight + 1)


def test_states_of_flax(tmp_path, mesh):
    layer = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    save_file({"kernel": WEIGHT, "bias": BIAS}, tmp_path / "m.safetensors")
    found = shardload.load_arrays(tmp_path / "m.safetensors", layer)
    assert isinstance(found, nnx.Linear) and np.array_equal(found.kernel[...], WEIGHT)
    found = shardload.load_arrays(tmp_path / "m.safetensors", nnx.state(layer))
    assert isinstance(found, nnx.State) and np.array_equal(found["kernel"][...], WEIGHT)
    for box in (linen.with_partitioning, linen.with_logical_partitioning):
        dense = linen.Dense(4, kernel_init=box(linen.initializers.zeros_init(), (None, "model")))
        variables = dense.init(jax.random.key(0), jnp.ones((1, 8)))
        found = shardload.load_arrays(tmp_path / "m.safetensors", variables["params"])
        assert np.array_equal(found["kernel"].value, WEIGHT) and isinstance(
            found["kernel"], flax.core.meta.AxisMetadata
        )
    ocp.save(tmp_path / "state", {"step": np.array(5, np.int64), "params": {"w": BIAS}, "opt_state": []})

    def make():
        return training.TrainState.create(apply_fn=None, params={"w": jnp.ones(4)}, tx=optax.sgd(1.0))

    assert shardload.load_arrays(tmp_path / "state", make(), strict=False).step == 5
    here = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), jax.eval_shape(make))
    found = shardload.load_arrays(tmp_path / "state", here, strict=False)
    assert (found.step.dtype, int(found.step)) == (jnp.int32, 5) and np.array_equal(found.params["w"], BIAS)
    dense = linen.Dense(4, kernel_init=linen.with_partitioning(linen.initializers.zeros_init(), (None, "model")))
    shapes = jax.eval_shape(dense.init, jax.random.key(0), jnp.ones((1, 8)))
    ocp.save(tmp_path / "boxed", jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes))
    plain = linen.meta.unbox(shapes)
    for targets in (linen.get_partition_spec(shapes), linen.get_sharding(shapes, mesh), shapes, plain):
        found = linen.meta.unbox(shardload.load_arrays(tmp_path / "boxed", targets, mesh=mesh))
        assert found["params"]["kernel"].sharding.spec == (P() if targets is plain else P(None, "model"))
    state = jax.tree.map(lambda leaf: leaf, nnx.state(layer))
    ocp.save(tmp_path / "nnx", state)
    found = shardload.load_arrays(tmp_path / "nnx", nnx.to_pure_dict(state))
    assert np.array_equal(found["kernel"], layer.kernel[...])


def test_an_abstract_model_of_nnx_is_loaded_without_its_other_state(tmp_path, mesh):
    class Net(nnx.Module):
        def __init__(self, rngs):
            split = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, "model"))
            self.layers = nnx.List([nnx.Linear(8, 4, kernel_init=split, rngs=rngs)])
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.layers[0](x))

    save_file({"layers.0.kernel": WEIGHT, "layers.0.bias": BIAS}, tmp_path / "m.safetensors")
    graph, shapes = nnx.get_abstract_model(lambda: Net(nnx.Rngs(0)), mesh)
    with pytest.raises(MismatchError, match=r"no tensor for 2 targets:\n  dropout\.rngs\.count"):
        shardload.load_arrays(tmp_path / "m.safetensors", shapes)
    params, _ = nnx.split_state(shapes, nnx.Param, ...)
    loaded = shardload.load_arrays(tmp_path / "m.safetensors", params)
    with jax.set_mesh(mesh):
        rest = nnx.state(Net(nnx.Rngs(1)), nnx.Not(nnx.Param))
    net = nnx.merge(graph, loaded, rest)
    assert net.layers[0].kernel.sharding == NamedSharding(mesh, P(None, "model"))
    assert np.array_equal(net.layers[0].kernel[...], WEIGHT) and net(np.ones((2, 8), np.float32)).shape == (2, 4)
