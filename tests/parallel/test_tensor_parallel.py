"""`TensorParallelKeras` is the model itself, spread over devices: its interface, and what it says of itself."""

import json
import subprocess
import sys

import jax
import keras
import models
import numpy as np
import pytest

import shardload
from shardload.errors import BackendError, LayoutError, MeshError, UnsupportedError, UsageError
from shardload.keras_bridge.variables import relocate
from shardload.parallel import autoconfig, search

LOSS = {"a": "mse", "b": ["mse", "mse"]}


def nested(seed=0, *, compiled=True):
    """Two outputs in a dict, one of them a list; dropout where activations are split."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(64, activation="gelu", name="up")(inputs)
    hidden = keras.layers.Dropout(0.5, seed=1)(hidden)
    out = keras.layers.Dense(8, name="down")(hidden)
    model = keras.Model(inputs, {"a": out, "b": [hidden, keras.layers.Dense(4, name="head")(out)]}, name="nested")
    if compiled:
        model.compile("adam", LOSS)
    return model


def batch(rows=16):
    x = np.random.default_rng(0).normal(size=(rows, 8)).astype("float32")
    return x, {"a": x[:, ::-1].copy(), "b": [np.ones((rows, 64)), np.zeros((rows, 4))]}


def assert_equal(found, expected, *, rtol=1e-5):
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


def test_it_trains_evaluates_and_predicts_like_the_model():
    plain, wrapped, (x, y) = nested(), shardload.TensorParallelKeras(nested(compiled=False), 4), batch()
    assert not wrapped.compiled
    wrapped.compile("adam", LOSS)
    losses = [m.fit(x, y, epochs=3, shuffle=False, verbose=0).history["loss"] for m in (plain, wrapped)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert_equal(wrapped.predict(x, verbose=0), plain.predict(x, verbose=0))
    assert_equal(wrapped.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0))
    assert_equal(wrapped(x), plain(x))
    assert_equal(wrapped.train_on_batch(x, y), plain.train_on_batch(x, y))
    assert int(wrapped.optimizer.iterations) == 4
    assert wrapped.compiled and isinstance(wrapped, keras.Model)


def test_there_is_one_value_of_each_variable():
    model = nested(compiled=False)
    before = [id(v) for v in model.variables]
    wrapped = shardload.TensorParallelKeras(model, world_size=8)
    assert [id(v) for v in wrapped.variables] == before
    assert wrapped.count_params() == model.count_params()
    on_devices = sum(s.data.nbytes for v in (model.layers[1].kernel,) for s in v.value.addressable_shards)
    assert on_devices == model.layers[1].kernel.value.nbytes
    info = wrapped.get_parallelism_info()
    choice = autoconfig(model, 8)
    assert info["weight_bytes_per_device"] == sum(choice.by_id[i].device_bytes for i in before) < info["weight_bytes"]
    assert (info["world_size"], info["device_ids"][7], info["distributed_backend"]) == (8, "cpu:7", "jax")
    assert (info["split_weights"], info["replicated_weights"]) == (3, 4)


def test_it_is_saved_and_loaded_with_its_optimizer(tmp_path):
    wrapped, (x, y) = shardload.TensorParallelKeras(nested(), 4), batch()
    wrapped.fit(x, y, verbose=0)
    wrapped.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    assert (type(again), again.world_size, again.name) == (type(wrapped), 4, wrapped.name)
    for one, other in zip(wrapped.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.value, other.value)
    assert_equal(again.predict(x, verbose=0), wrapped.predict(x, verbose=0))
    for one, other in zip(wrapped.weights, again.weights, strict=True):
        assert again.layouts.of(other).spec == wrapped.layouts.of(one).spec


@pytest.mark.parametrize("mesh", ["1x4", "model=4"])
def test_it_takes_a_plan_for_one_axis(mesh):
    plain, (x, _) = nested(compiled=False), batch()
    plan = search(plain, mesh, batch=6)
    expected = plain.predict(x, verbose=0)
    wrapped = shardload.TensorParallelKeras(nested(compiled=False), layout=plan)
    assert (wrapped.world_size, wrapped.layouts.mesh, wrapped.layouts.mode) == (4, plan.mesh, "search")
    assert [wrapped.layouts.of(v).spec for v in wrapped.model.variables] == [v.spec for v in plan.variables]
    assert_equal(wrapped.predict(x, verbose=0), expected)
    again = shardload.TensorParallelKeras.from_config(json.loads(json.dumps(wrapped.get_config())))
    assert again.get_config()["layout"] == wrapped.get_config()["layout"] == plan.to_json()


def test_a_wrapper_with_a_plan_is_loaded_by_another_process(tmp_path):
    plain, (x, _) = nested(compiled=False), batch()
    search(plain, "1x4", batch=6).save(tmp_path / "plan.json")
    wrapped = shardload.TensorParallelKeras(plain, layout=tmp_path / "plan.json")
    expected = wrapped.predict(x, verbose=0)
    wrapped.save(tmp_path / "m.keras")
    (tmp_path / "plan.json").unlink()
    np.save(tmp_path / "x.npy", x)
    subprocess.run([sys.executable, "-c", LOADED_ELSEWHERE, tmp_path], check=True)
    with np.load(tmp_path / "found.npz") as found:
        assert (str(found["mesh"]), found["bytes"]) == ("batch=1,model=4", wrapped.layouts.device_bytes)
        np.testing.assert_array_equal(found["a"], expected["a"])


LOADED_ELSEWHERE = """
import sys
import jax, keras, numpy as np
from shardload import TensorParallelKeras
jax.config.update("jax_num_cpu_devices", 8)
folder = sys.argv[1]
model = keras.saving.load_model(f"{folder}/m.keras")
found = model.predict(np.load(f"{folder}/x.npy"), verbose=0)["a"]
np.savez(f"{folder}/found.npz", a=found, mesh=str(model.layouts.mesh), bytes=model.layouts.device_bytes)
"""


def test_a_plan_for_other_devices_or_axes_is_refused(tmp_path):
    plan = search(nested(compiled=False), "1x4", batch=6)
    wrapped = shardload.TensorParallelKeras(nested(compiled=False), layout=plan)
    for refused in (wrapped.auto_detect_parallelism, lambda: autoconfig(nested(compiled=False), 8, plan)):
        with pytest.raises(LayoutError, match=r"the plan for batch=1,model=4 on 8 devices: expected 4\. Use 4, or"):
            refused()
    assert wrapped.get_config()["layout"] == plan.to_json() and wrapped.world_size == 4
    with pytest.raises(LayoutError, match=r"batch=2,model=2 for tensor parallelism: it has several axes, expected one"):
        shardload.TensorParallelKeras(nested(compiled=False), layout=search(nested(), "2x2", batch=6))
    config = wrapped.get_config()
    config["layout"] |= {"mesh": {"axes": ("batch", "model"), "sizes": (1, 16)}}
    with pytest.warns(UserWarning, match="saved on 16 devices, and is loaded on 8, with layout='auto'"):
        assert shardload.TensorParallelKeras.from_config(config).layouts.mode == "auto"


def test_its_weights_are_files_of_the_plain_model(tmp_path):
    plain, wrapped, (x, _) = nested(1), shardload.TensorParallelKeras(nested(2), 4), batch()
    plain.save_weights(tmp_path / "m.weights.h5")
    wrapped.load_weights(tmp_path / "m.weights.h5")
    assert_equal(wrapped.predict(x, verbose=0), plain.predict(x, verbose=0))
    wrapped.save_weights(tmp_path / "w.weights.h5")
    shardload.load_weights(nested(3, compiled=False), tmp_path / "w.weights.h5")


def test_functions_of_this_package_take_it_as_the_model(tmp_path):
    wrapped, other = shardload.TensorParallelKeras(nested(), 4), shardload.TensorParallelKeras(nested(1), 8)
    x, y = batch()
    wrapped.fit(x, y, verbose=0, callbacks=[shardload.callbacks.OrbaxCheckpoint(tmp_path / "fit")])
    shardload.save(wrapped, tmp_path / "loop", step=1)
    for folder in ("fit", "loop"):
        shardload.restore(other, tmp_path / folder)
        assert_equal(other.predict(x, verbose=0), wrapped.predict(x, verbose=0))
    assert int(other.optimizer.iterations) == 1 and other.validate_tensor_parallelism_setup()
    shardload.save_as(wrapped, tmp_path / "m.weights.h5")
    plain = nested(2, compiled=False)
    shardload.load_weights(plain, tmp_path / "m.weights.h5")
    shardload.load_weights(other, tmp_path / "m.weights.h5", items="weights")
    assert shardload.report(other).missing == ()
    assert_equal(plain.predict(x, verbose=0), other.predict(x, verbose=0))


def test_a_file_from_more_devices_is_loaded_on_those_that_exist(tmp_path):
    config = shardload.TensorParallelKeras(nested(compiled=False), 4).get_config()
    with pytest.warns(UserWarning, match="was saved on 16 devices, and is loaded on 8"):
        assert shardload.TensorParallelKeras.from_config(config | {"device_count": 16}).world_size == 8


def test_a_layout_without_a_configuration_is_not_saved():
    mesh = keras.distribution.DeviceMesh((1, 4), ["batch", "model"], devices=np.array(jax.devices()[:4]))
    layout_map = keras.distribution.LayoutMap(mesh)
    layout_map["up/kernel"] = (None, "model")
    wrapped = shardload.TensorParallelKeras(nested(), 4, layout=layout_map)
    assert wrapped.layouts.mode == "layout_map"
    with pytest.raises(UnsupportedError, match=r"have no configuration \(LayoutMap\).*wrapper\.model\.save"):
        wrapped.get_config()


@pytest.mark.parametrize("backend", ["torch", "pytorch", "tensorflow", "horovod", "nccl"])
def test_other_backends_are_refused_with_the_way_out(backend):
    with pytest.raises(BackendError, match=f"distributed_backend='{backend}'.*JAX only.*distributed_backend='auto'"):
        shardload.TensorParallelKeras(nested(compiled=False), distributed_backend=backend)


def test_contradicting_arguments_are_refused():
    model = nested(compiled=False)
    for error, match, arguments in (
        (UsageError, "Supported: 'auto', 'jax'", {"distributed_backend": "mpi"}),
        (UsageError, "'fallback': XLA moves data .* simulated devices on CPU", {"distributed_backend": "fallback"}),
        (UsageError, "device_count=2 and world_size=4", {"device_count": 2, "world_size": 4}),
        (UsageError, "expected a positive integer", {"device_count": 0}),
        (UsageError, "give as many ids", {"device_count": 3, "device_ids": ["cpu:0"]}),
        (MeshError, r"this process has 8 devices.*'jax_num_cpu_devices', 9", {"device_count": 9}),
        (MeshError, "'cpu:77'", {"device_ids": ["cpu:77"]}),
    ):
        with pytest.raises(error, match=match):
            shardload.TensorParallelKeras(model, **arguments)
    with pytest.raises(UsageError, match=r"expected a keras\.Model"):
        shardload.TensorParallelKeras(keras.layers.Dense(2))
    with pytest.raises(UsageError, match="is not built"):
        shardload.TensorParallelKeras(keras.Sequential([keras.layers.Dense(2)]))


@pytest.mark.parametrize("ids", [["cpu:5", "cpu:2"], [5, 2], None])
def test_devices_by_id_in_the_order_of_the_shards(ids):
    ids = [jax.devices()[5], jax.devices()[2]] if ids is None else ids
    wrapped = shardload.TensorParallelKeras(nested(compiled=False), device_ids=ids)
    assert (wrapped.device_ids, wrapped.world_size) == (["cpu:5", "cpu:2"], 2)
    kernel = wrapped.model.get_layer("up").kernel.value
    assert next(s for s in kernel.addressable_shards if s.device.id == 5).index == (slice(None), slice(0, 32))


def test_detecting_devices_spreads_over_all_of_them():
    wrapped, (x, y) = shardload.TensorParallelKeras(nested(), 2), batch()
    expected = wrapped.predict(x, verbose=0)
    wrapped.fit(x, y, verbose=0)
    assert wrapped.auto_detect_parallelism() is True
    assert (wrapped.world_size, wrapped.auto_detect_parallelism()) == (8, False)
    assert {len(v.value.sharding.device_set) for v in wrapped.optimizer.variables} == {8}
    assert jax.tree.structure(wrapped.predict(x, verbose=0)) == jax.tree.structure(expected)
    assert wrapped.validate_tensor_parallelism_setup()


@pytest.mark.parametrize("shape", [(16,), (None, 16), None])
def test_the_check_makes_inputs_of_a_sequential_model(shape):
    layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(16)]
    model = keras.Sequential([*([] if shape is None else [keras.Input(shape)]), *layers])
    if shape is None:
        model.build((None, 16))
    assert shardload.TensorParallelKeras(model, 8).validate_tensor_parallelism_setup()


def test_the_check_compares_values_shardings_and_bytes():
    wrapped, (x, y) = shardload.TensorParallelKeras(nested(), 4), batch()
    wrapped.fit(x, y, verbose=0)
    report = wrapped.validate_tensor_parallelism_setup()
    assert report and report.overall_status == "PASSED"
    assert [check.name for check in report.checks] == ["shardings", "bytes", "split", "outputs"]
    assert 0 <= report.max_difference < 1e-5
    info = wrapped.get_parallelism_info()
    on_device = info["weight_bytes_per_device"] + info["other_bytes_per_device"]
    assert report.device_bytes == dict.fromkeys(info["device_ids"], on_device)


def test_the_check_finds_a_variable_that_was_moved():
    wrapped = shardload.TensorParallelKeras(nested(compiled=False), 4)
    kernel = wrapped.model.get_layer("up").kernel
    relocate(kernel, jax.sharding.NamedSharding(kernel.value.sharding.mesh, jax.sharding.PartitionSpec()))
    report = wrapped.validate_tensor_parallelism_setup()
    assert not report
    assert [check.name for check in report.checks if not check.passed] == ["shardings", "bytes"]
    assert [check.name for check in report.checks if check.passed] == ["split", "outputs"]
    assert "FAIL  shardings: up/kernel is NamedSharding" in str(report)


def test_the_check_accepts_no_output_that_is_not_a_number():
    wrapped = shardload.TensorParallelKeras(nested(compiled=False), 4)
    kernel = wrapped.model.get_layer("up").kernel
    kernel.assign(kernel.value * np.nan)
    report = wrapped.validate_tensor_parallelism_setup()
    assert {check.name: check.passed for check in report.checks}["outputs"] is False


def test_nothing_split_is_no_tensor_parallelism():
    inputs = keras.Input((3,))
    wrapped = shardload.TensorParallelKeras(keras.Model(inputs, keras.layers.Dense(5)(inputs)), 8)
    report = wrapped.validate_tensor_parallelism_setup()
    assert not report and "FAIL  split: 0 variables split, 2 replicated over 8 devices" in str(report)


def test_a_model_that_is_not_functional_needs_a_sample():
    class Own(keras.Model):
        def __init__(self):
            super().__init__()
            self.up, self.down = keras.layers.Dense(64), keras.layers.Dense(8)

        def call(self, x, training=None):
            return self.down(self.up(x))

    model, (x, _) = Own(), batch()
    expected = model(x)
    wrapped = shardload.TensorParallelKeras(model, 8)
    assert_equal(wrapped(x), expected)
    with pytest.raises(UsageError, match=r"not functional.*validate_tensor_parallelism_setup\(x\)"):
        wrapped.validate_tensor_parallelism_setup()
    assert wrapped.validate_tensor_parallelism_setup(x)


def test_a_train_step_of_the_model_is_kept():
    class Counting(keras.Model):
        def train_step(self, *args, **kwargs):
            steps.append(1)
            return super().train_step(*args, **kwargs)

    steps, inputs = [], keras.Input((8,))
    wrapped = shardload.TensorParallelKeras(Counting(inputs, keras.layers.Dense(8)(inputs)), 8)
    wrapped.compile("sgd", "mse")
    wrapped.fit(batch()[0], batch()[0], verbose=0)
    assert steps


def test_it_is_a_layer_of_other_models():
    wrapped, (x, _) = shardload.TensorParallelKeras(nested(compiled=False), 4), batch()
    inputs = keras.Input((8,))
    outer = keras.Model(inputs, wrapped(inputs)["a"] * 2)
    assert_equal(outer.predict(x, verbose=0), wrapped.predict(x, verbose=0)["a"] * 2)


def test_it_has_the_attributes_of_the_model_and_no_others(capsys):
    wrapped = shardload.TensorParallelKeras(nested(), 4)
    assert wrapped.input_shape == (None, 8) and wrapped.get_layer("up") is wrapped.model.get_layer("up")
    assert not hasattr(wrapped, "generate")
    wrapped.summary()
    assert "up (Dense)" in capsys.readouterr().out
    assert [m.name for m in wrapped.metrics] == [m.name for m in wrapped.model.metrics]


@pytest.mark.slow
def test_it_generates_like_the_model():
    plain = models.causal_lm("gpt2")
    prompt = models.tokens(plain, batch=2, length=8)
    prompt["padding_mask"][:, 4:] = 0
    expected = plain.generate(prompt, stop_token_ids=None)["token_ids"]
    wrapped = shardload.TensorParallelKeras(plain, 4)
    np.testing.assert_array_equal(wrapped.generate(prompt, stop_token_ids=None)["token_ids"], expected)


def test_rules_are_by_the_identity_of_variables():
    model = nested(compiled=False)
    for layer in model.layers[1:]:
        for variable in layer.variables:
            variable._path = "same/path"
    choice = autoconfig(model, 4)
    assert list(choice.rules.values()) == [found.rule for found in choice.variables] and "same/path#2" in choice.rules
    up, down = model.get_layer("up"), model.get_layer("down")
    assert (str(choice.of(up.kernel)), choice.by_id[id(up.kernel)].rule) == ("(-, model)", "column")
    assert (str(choice.of(down.kernel)), choice.by_id[id(down.kernel)].rule) == ("(model, -)", "row")
    assert str(choice.of(up.bias)) == "(model)" and choice.of(down.bias).is_replicated
    with pytest.raises(UsageError, match=r"device_count=1\.5"):
        autoconfig(model, 1.5)


# ---- dropout --------------------------------------------------------------------------------------


def dropped(device_count, *, seed=7):
    """The masks of a dropout on split activations and of one on replicated ones."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    split = keras.layers.Dense(64, use_bias=False, kernel_initializer="ones", name="up")(inputs)
    split = keras.layers.Dropout(0.5, seed=seed)(split)
    whole = keras.layers.Dense(8, use_bias=False, kernel_initializer="ones", name="down")(split)
    whole = keras.layers.Dropout(0.5, seed=seed + 1)(whole)
    model = keras.Model(inputs, [split, whole])
    if device_count:
        model = shardload.TensorParallelKeras(model, device_count)
    weights = [v.value for v in model.trainable_variables], [v.value for v in model.non_trainable_variables]
    return jax.jit(lambda w, x: model.stateless_call(*w, x, training=True)[0])(weights, np.ones((4, 8), "float32"))


def test_dropout_differs_between_devices_where_activations_are_split():
    split, _ = dropped(4)
    shards = [np.asarray(s.data) != 0 for s in split.addressable_shards]
    assert {shard.shape for shard in shards} == {(4, 16)}
    assert len({shard.tobytes() for shard in shards}) == 4 and 0.3 < np.mean(shards) < 0.7


def test_dropout_is_equal_where_activations_are_replicated():
    _, whole = dropped(4)
    shards = [np.asarray(s.data) for s in whole.addressable_shards]
    assert {shard.shape for shard in shards} == {(4, 8)}
    assert all(np.array_equal(shard, shards[0]) for shard in shards)
    assert 0 < np.mean(shards[0] != 0) < 1


def test_dropout_is_that_of_one_device_and_of_its_seed():
    for one, other, third in zip(dropped(0), dropped(4), dropped(4, seed=8), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)
        assert not np.array_equal(np.asarray(one) != 0, np.asarray(third) != 0)
    np.testing.assert_array_equal(dropped(8)[0], dropped(8)[0])
