"""What a save in the background reads: the arrays of one moment, whatever training does to them afterwards."""

from unittest.mock import Mock

import jax
import jax.numpy as jnp
import keras
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload import Checkpointer
from shardload.runs.snapshot import pinned_copies, snapshot


def sharding(*spec):
    return NamedSharding(Mesh(np.array(jax.devices()).reshape(2, 4), ("batch", "model")), PartitionSpec(*spec))


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize("spec", [(), ("model",), (None, "model"), ("model", "batch")])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool", "float8_e4m3fn", "int4", "complex64"])
def test_arrays_outlive_a_step_that_takes_their_memory(spec, dtype):
    values = np.random.default_rng(0).integers(0, 2, (64, 256)).astype(jnp.dtype(dtype))
    state = {"a": [jax.device_put(values, sharding(*spec))], "b": jax.device_put(values)}
    held = snapshot({"pytree": state})
    step = jax.jit(lambda s: jax.tree.map(lambda a: a * 0, s), donate_argnums=0)
    kept_shardings = jax.tree.map(lambda a: a.sharding, state)
    for _ in range(3):
        state = step(state)
    taken = held.take()["pytree"]
    assert jax.tree.map(lambda a: a.sharding, taken) == kept_shardings
    for array in jax.tree.leaves(taken):
        assert array.dtype == values.dtype and np.asarray(array).tobytes() == values.tobytes()


def test_nothing_is_copied_and_nothing_held_longer():
    array = jax.device_put(jnp.arange(1 << 20, dtype="float32"), sharding("model"))
    before = pointers(array)
    held = snapshot({"pytree": {"a": array}})
    assert pointers(held.take()["pytree"]["a"]) == before and held.take() == {}


def test_what_can_change_is_copied():
    array, numbers = np.arange(4.0), {"list": [1, 2.5, "text", None, (True, b"x")]}
    held = snapshot({"pytree": {"a": array, **numbers}})
    array[:] = 0
    numbers["list"][0] = 7
    taken = held.take()["pytree"]
    assert taken["a"].tolist() == [0, 1, 2, 3]
    assert taken["list"] == [1, 2.5, "text", None, (True, b"x")]


@pytest.mark.parametrize(
    "thing", [object(), iter([]), ml_dtypes, {1, 2}, bytearray(b"x")], ids=lambda t: type(t).__name__
)
def test_what_only_its_handler_knows_is_not_held(thing):
    assert snapshot({"pytree": {"a": np.zeros(2)}, "mine": {"deep": [thing]}}) is None


@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_containers_that_jax_does_not_look_into_are_not_held(kind):
    one = type("Own", (kind,), {})({"a": np.zeros(2)} if kind is dict else [np.zeros(2)])
    assert snapshot({"mine": {"deep": one}}) is None and snapshot({"mine": one}) is None


def test_random_keys_and_memory_of_another_kind_are_not_held():
    assert snapshot({"pytree": jax.random.key(0)}) is None
    pinned = NamedSharding(sharding().mesh, PartitionSpec(), memory_kind="pinned_host")
    assert snapshot({"pytree": jax.device_put(jnp.zeros(8), pinned)}) is None


def test_numbers_that_another_thread_would_narrow_are_not_held():
    with jax.enable_x64(True):
        assert snapshot({"pytree": jnp.array([2**40])}) is None


@pytest.fixture
def pins_on_cpus(monkeypatch):
    """CPU devices have pinned memory, too, so that what happens on GPUs can be tested with them."""
    monkeypatch.setattr("shardload.runs.snapshot.PINNED_PLATFORMS", {"cpu"})


@pytest.mark.usefixtures("pins_on_cpus")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "float8_e4m3fn"])
def test_pinned_copies_outlive_a_step_that_takes_the_arrays(dtype):
    values = np.random.default_rng(0).integers(0, 2, (64, 256)).astype(jnp.dtype(dtype))
    state = {"split": jax.device_put(values, sharding("model", "batch")), "one": jax.device_put(values), "n": 3}
    held = snapshot({"pytree": state, "numpy": np.arange(3)})
    step = jax.jit(lambda arrays: jax.tree.map(lambda a: a * 0, arrays), donate_argnums=0)
    step({name: state.pop(name) for name in ("split", "one")})
    taken = held.take()
    assert taken["numpy"].tolist() == [0, 1, 2] and taken["pytree"]["n"] == 3
    for name in ("split", "one"):
        array = taken["pytree"][name]
        assert array.sharding.memory_kind == "pinned_host" and np.asarray(array).tobytes() == values.tobytes()


@pytest.mark.usefixtures("pins_on_cpus")
def test_replicas_are_not_pinned_and_kept_as_views():
    array = jax.device_put(jnp.arange(64.0), sharding("model"))  # two replicas of each part
    before = pointers(array)
    assert pointers(snapshot({"pytree": {"a": array}}).take()["pytree"]["a"]) == before


def test_nothing_is_pinned_where_memory_is_short(monkeypatch):
    array = jax.device_put(jnp.zeros(1 << 20))
    monkeypatch.setenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "0")
    assert pinned_copies([array]) is None and pinned_copies([]) == []
    monkeypatch.delenv("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB")
    full = Mock(side_effect=jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: no pinned memory"))
    monkeypatch.setattr(jax, "device_put", full)
    assert pinned_copies([array]) is None


@pytest.mark.usefixtures("pins_on_cpus")
def test_a_step_of_pinned_copies_is_restored_bit_for_bit(tmp_path):
    model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)
    expected = [np.asarray(v.value) for v in model.variables]
    with Checkpointer(tmp_path / "run") as saver:
        saver.save(1, model)
        model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0)
        saver.wait()
        saver.restore(model)
    for variable, value in zip(model.variables, expected, strict=True):
        assert variable.value.sharding.memory_kind != "pinned_host"
        assert np.asarray(variable.value).tobytes() == value.tobytes()
