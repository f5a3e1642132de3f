"""Collectives against what the shards of every device say, on meshes of one, two and three axes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardload.errors import LayoutError, MeshError, UnsupportedError, UsageError
from shardload.parallel import (
    all_gather,
    all_reduce,
    devices_of,
    get_best_devices,
    list_devices,
    reduce_scatter,
    split_tensor_for_parallelism,
)

SHAPE = (16, 24)
MESHES = {"1-D": {"model": 8}, "2-D": {"data": 2, "model": 4}, "3-D": {"data": 2, "model": 2, "expert": 2}}
SPECS = {
    "1-D": [P(), P("model"), P(None, "model")],
    "2-D": [P(), P("data", "model"), P("model", "data"), P(None, ("data", "model")), P("data"), P("model")],
    "3-D": [P("data", ("model", "expert")), P(("expert", "data"), "model"), P(None, "model"), P("data")],
}
AXES = {"1-D": ["model"], "2-D": ["model", "data", ("data", "model")], "3-D": ["model", ("expert", "data")]}
CASES = [(name, spec, axes) for name in MESHES for spec, axes in itertools.product(SPECS[name], AXES[name])]


def in_turn(cases, *values):
    """Each case with every second value: each value meets every mesh and all axes, and the rest is `full`."""
    return [
        pytest.param(*case, value, marks=[] if (i // 2 + j) % 2 == 0 else pytest.mark.full)
        for i, case in enumerate(cases)
        for j, value in enumerate(values)
    ]


LAST: dict[str, str] = {}
REDUCE = {"sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min}


def mesh_of(name):
    sizes = MESHES[name]
    return Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))


def placed(name, spec, seed=0):
    value = np.random.default_rng(seed).normal(size=SHAPE).astype("float32")
    array = jax.device_put(value, NamedSharding(mesh_of(name), spec))
    for shard in array.addressable_shards:
        np.testing.assert_array_equal(shard.data, value[shard.index])
    return array


def by_device(array):
    return {shard.device: np.asarray(shard.data) for shard in array.addressable_shards}


def groups(mesh, axes):
    """The devices that combine, in the order of the axes, which are the caller's."""
    axes = (axes,) if isinstance(axes, str) else axes
    rest = [name for name in mesh.axis_names if name not in axes]
    order = np.transpose(mesh.devices, [mesh.axis_names.index(name) for name in (*rest, *axes)])
    return order.reshape(-1, np.prod([mesh.shape[name] for name in axes]))


def assert_each(result, wanted):
    found = by_device(result)
    assert found.keys() == wanted.keys()
    for device, value in wanted.items():
        np.testing.assert_allclose(found[device], value, rtol=1e-5, atol=1e-5)


def axes_of(array):
    return {name for entry in array.sharding.spec for name in ([entry] if isinstance(entry, str) else entry or ())}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "spec", "axes", "op"), in_turn(CASES, *REDUCE))
def test_all_reduce(name, spec, axes, op):
    x = placed(name, spec)
    before, wanted = by_device(x), {}
    for group in groups(x.sharding.mesh, axes):
        wanted |= dict.fromkeys(group, REDUCE[op](np.stack([before[device] for device in group]), axis=0))
    result = all_reduce(x, op, axes)
    assert_each(result, wanted)
    assert axes_of(result) == axes_of(x) - {axes, *axes} and result.sharding.mesh == x.sharding.mesh


@pytest.mark.parametrize(("name", "spec", "axes", "axis"), in_turn(CASES, 0, -1))
def test_all_gather(name, spec, axes, axis):
    x = placed(name, spec)
    before, wanted = by_device(x), {}
    for group in groups(x.sharding.mesh, axes):
        wanted |= dict.fromkeys(group, np.concatenate([before[device] for device in group], axis=axis))
    result = all_gather(x, axis, axes)
    assert_each(result, wanted)
    assert axes_of(result) == axes_of(x) - {axes, *axes}


@pytest.mark.parametrize(("name", "spec", "axes", "op"), in_turn(CASES, "sum", "mean"))
def test_reduce_scatter(name, spec, axes, op):
    x = placed(name, spec)
    before, wanted = by_device(x), {}
    size = groups(x.sharding.mesh, axes).shape[1]
    if next(iter(before.values())).shape[1] % size:
        with pytest.raises(LayoutError, match=r"Cannot divide dim 1 of shards of shape .* into"):
            reduce_scatter(x, 1, axes, op=op)
        return
    for group in groups(x.sharding.mesh, axes):
        total = REDUCE[op](np.stack([before[device] for device in group]), axis=0)
        wanted |= dict(zip(group, np.split(total, size, axis=1), strict=True))
    result = reduce_scatter(x, 1, axes, op=op)
    assert_each(result, wanted)
    assert axes_of(result) == axes_of(x) | ({axes} if isinstance(axes, str) else {*axes})


# ---- derivatives ---------------------------------------------------------------------------------


@pytest.fixture
def one_mesh_shape(name):
    """JAX 0.10 reads the sharding of an operation that it compiled for another mesh shape as one of that mesh."""
    if LAST.get("name") != name:
        jax.clear_caches()
    LAST["name"] = name


def whole(sharding, collective, result, x):
    """The same on one device: shards cut, combined and joined with jnp, as ``result`` has them."""
    shards = {device: x[index] for device, index in sharding.devices_indices_map(x.shape).items()}
    found = {}
    for group in groups(sharding.mesh, collective.keywords["axis_name"]):
        parts = [shards[device] for device in group]
        if collective.func is all_gather:
            found |= dict.fromkeys(group, jnp.concatenate(parts, axis=collective.keywords["axis"]))
        else:
            total = sum(parts) / (len(parts) if collective.keywords.get("op") == "mean" else 1)
            each = [total] * len(parts)
            if collective.func is reduce_scatter:
                each = jnp.split(total, len(parts), axis=collective.keywords["axis"])
            found |= dict(zip(group, each, strict=True))
    joined = jnp.zeros(result.shape)
    for device, index in result.sharding.devices_indices_map(result.shape).items():
        joined = joined.at[index].set(found[device])
    return joined


DIFFERENTIATED = {
    "sum": functools.partial(all_reduce, op="sum"),
    "mean": functools.partial(all_reduce, op="mean"),
    "gather": functools.partial(all_gather, axis=1),
    "scatter": functools.partial(reduce_scatter, axis=0),
}
SOME = [c for c in CASES if c[0] != "1-D"][::5] + CASES[:3]
"""On every mesh, over all of its axes."""


@pytest.mark.sample(2)
@pytest.mark.parametrize("collective", DIFFERENTIATED)
@pytest.mark.parametrize(
    ("name", "spec", "axes"), SOME + [pytest.param(*c, marks=pytest.mark.full) for c in CASES if c not in SOME]
)
@pytest.mark.slow
@pytest.mark.usefixtures("one_mesh_shape")
def test_gradients(name, spec, axes, collective):
    x, collective = placed(name, spec), DIFFERENTIATED[collective]
    run = functools.partial(collective, axis_name=axes)
    size = groups(x.sharding.mesh, axes).shape[1]
    if collective.func is reduce_scatter and x.addressable_shards[0].data.shape[0] % size:
        with pytest.raises(LayoutError):
            jax.grad(lambda x: run(x).sum())(x)
        return
    result = run(x)
    factor = np.random.default_rng(1).normal(size=result.shape).astype("float32")
    found = jax.grad(lambda x: jnp.sum(run(x) ** 2 * factor))(x)
    expected = jax.jit(jax.grad(lambda one: jnp.sum(whole(x.sharding, run, result, one) ** 2 * factor)))
    np.testing.assert_allclose(found, expected(jnp.asarray(np.asarray(x))), rtol=1e-4, atol=1e-4)
    assert found.sharding.is_equivalent_to(x.sharding, x.ndim)


@pytest.mark.parametrize(("op", "factor"), [("sum", 4), ("mean", 1)])
def test_gradients_of_an_array_that_is_on_no_mesh(op, factor):
    mesh = jax.sharding.Mesh(np.reshape(jax.devices(), (2, 4)), ("data", "model"))
    found = jax.grad(lambda x: all_reduce(x, op, "model", mesh=mesh).sum())(jnp.ones((4, 4)))
    assert (np.asarray(found) == factor).all()
    found = jax.grad(lambda x: (reduce_scatter(x, 0, "model", mesh=mesh) ** 2).sum())(jnp.ones((4, 4)))
    assert (np.asarray(found) == 2 * 4 * 4).all()  # each of the four replicas counts


@pytest.mark.parametrize("op", ["max", "min"])
def test_what_has_no_derivative_says_so(op):
    with pytest.raises(UnsupportedError, match=rf"Cannot differentiate all_reduce\(op='{op}'\)"):
        jax.grad(lambda x: all_reduce(x, op).sum())(placed("1-D", P("model")))


# ---- where they run ------------------------------------------------------------------------------


def test_a_sum_over_replicas_counts_each():
    x = placed("2-D", P("data"))
    np.testing.assert_allclose(all_reduce(x), 4 * np.asarray(x), rtol=1e-6)
    np.testing.assert_array_equal(all_reduce(x, "mean"), x)
    assert all_gather(x, 1).shape == (16, 96)


def test_inside_shard_map_they_are_the_primitives():
    x = placed("2-D", P("data", "model"))
    mesh = x.sharding.mesh

    def step(shard):
        assert shard.shape == (8, 6)
        return all_reduce(shard), all_gather(shard, 1), reduce_scatter(all_gather(shard, 1), 1)

    specs = {"in_specs": P("data", "model"), "out_specs": (P("data"), P("data"), P("data", "model"))}
    total, gathered, scattered = jax.shard_map(step, mesh=mesh, **specs, check_vma=False)(x)
    np.testing.assert_allclose(total, all_reduce(x), rtol=1e-6)
    np.testing.assert_array_equal(gathered, x)
    np.testing.assert_allclose(scattered, 4 * np.asarray(x), rtol=1e-6)


def test_an_axis_outside_the_enclosing_shard_map_is_refused():
    x = placed("2-D", P("data", "model"))
    known = {"in_specs": P("data"), "out_specs": P(), "axis_names": {"data"}, "check_vma": False}
    run = jax.shard_map(lambda s: all_reduce(s, axis_name=("data", "model")), mesh=x.sharding.mesh, **known)
    with pytest.raises(MeshError, match=r"the enclosing shard_map has data only\. Add model to its axis_names"):
        jax.jit(run)(x)


def test_inside_jit_the_caller_says_how_it_is_split():
    x = placed("2-D", P("data", "model"))
    known = functools.partial(all_reduce, mesh=x.sharding.mesh, spec=P("data", "model"))
    result = jax.jit(known)(x)
    np.testing.assert_allclose(result, all_reduce(x), rtol=1e-6)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: known(x).sum()))(x), np.ones(SHAPE))
    with pytest.raises(UsageError, match=r"Cannot find the sharding of an array inside jax\.jit"):
        jax.jit(all_reduce)(x)
    explicit = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Explicit,) * 2)
    typed = jax.device_put(np.asarray(x), NamedSharding(explicit, P("data", "model")))
    np.testing.assert_allclose(jax.jit(all_reduce)(typed), result, rtol=1e-6)


@pytest.mark.parametrize("value", [np.ones((4, 8), "float32"), jnp.ones((4, 8))])
def test_an_array_on_no_mesh_is_replicated_over_the_callers(value):
    mesh = mesh_of("2-D")
    np.testing.assert_array_equal(all_reduce(value, mesh=mesh), 4 * np.ones((4, 8)))
    assert reduce_scatter(value, 1, mesh=mesh).sharding.spec == P(None, "model")
    with pytest.raises(UsageError, match=r"it has no NamedSharding\. Pass mesh="):
        all_reduce(value)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x: all_reduce(x, "median"), UsageError, "Cannot reduce by op='median'. Choose sum, mean, max, min"),
        (
            lambda x: all_reduce(x, axis_name="modle"),
            MeshError,
            "Cannot run over 'modle': the mesh has the axes data, model",
        ),
        (lambda x: all_reduce(x, axis_name=()), UsageError, r"Cannot use axis_name=\(\)"),
        (lambda x: all_reduce(x, axis_name=("model", "model")), UsageError, "expected the name of a mesh axis"),
        (lambda x: all_reduce(x, mesh=mesh_of("1-D")), UsageError, "Leave mesh out, or move the array"),
        (lambda x: all_gather(x, 2), UsageError, r"Cannot use dim 2 of an array of shape \(16, 24\)"),
        (lambda x: all_gather(x, True), UsageError, "Cannot use dim True"),
        (lambda x: reduce_scatter(x, 0, op="max"), UsageError, "Cannot reduce_scatter by op='max'"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call(placed("2-D", P("data", "model")))


# ---- splitting by hand ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [np.asarray, jnp.asarray])
@pytest.mark.parametrize(("length", "count"), [(8, 4), (10, 4), (3, 8), (0, 2), (7, 1)])
def test_parts_are_those_of_array_split(length, count, make):
    value = make(np.arange(3 * length).reshape(3, length))
    wanted = np.array_split(np.asarray(value), count, axis=1)
    for index in range(count):
        for dim in (1, -1):
            part = split_tensor_for_parallelism(value, index, count, dim)
            assert type(part) is type(value)
            np.testing.assert_array_equal(part, wanted[index])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((4, 4, 0), "Cannot return part 4 of 4"),
        ((-1, 4, 0), "index=-1: expected an integer of at least 0"),
        ((0, 0, 0), "device_count=0: expected an integer of at least 1"),
        ((0, 2, 2), "Cannot use dim 2"),
        ((0.5, 2, 0), "index=0.5"),
    ],
)
def test_bad_parts(arguments, message):
    with pytest.raises(UsageError, match=message):
        split_tensor_for_parallelism(np.ones((4, 4)), *arguments)


# ---- devices by id -------------------------------------------------------------------------------


def test_devices_have_ids():
    ids = list_devices()
    assert ids == list_devices("CPU") == [f"cpu:{i}" for i in range(8)]
    assert get_best_devices(3) == ids[:3] and get_best_devices(0) == get_best_devices(-1) == []
    assert devices_of(["cpu:7", "CPU:0"]) == [jax.devices()[7], jax.devices()[0]]


def test_devices_that_are_not_there():
    with pytest.warns(UserWarning, match="9 devices were requested, but there are only 8"):
        assert len(get_best_devices(9)) == 8
    with pytest.raises(MeshError, match=r"Cannot find the device 'cpu:8'\. There are cpu:0, cpu:1"):
        devices_of(["cpu:8"])
    with pytest.raises(MeshError, match="Cannot list devices of type 'abacus'"):
        list_devices("abacus")
