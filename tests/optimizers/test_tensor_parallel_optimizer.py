"""The coordinated optimizer is the plain one under a distribution."""

import keras
import numpy as np
import pytest
from small_regression import distribution, on_mesh, regression, slot_bytes, train

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MeshError, UsageError
from shardload.optimizers import TensorParallelOptimizer, shard_optimizer

K = keras.optimizers
BASES = {
    "adam": lambda: K.Adam(0.01, use_ema=True, global_clipnorm=0.05),
    "sgd": lambda: K.SGD(K.schedules.ExponentialDecay(0.1, 2, 0.5), momentum=0.9),
    "muon": lambda: K.Muon(0.01),
    "accumulating": lambda: K.Adam(0.01, gradient_accumulation_steps=2),
    "loss scale": lambda: K.LossScaleOptimizer(K.Adam(0.01)),
}


@pytest.mark.parametrize("shard", [True, False])
@pytest.mark.parametrize("name", BASES)
def test_it_is_the_plain_optimizer_under_the_distribution(name, shard):
    results = []
    for wrap in (lambda o: o, lambda o: TensorParallelOptimizer(o, device_count=8, shard_optimizer_states=shard)):
        with distribution("2x4").scope():
            model = regression(wrap(BASES[name]()))
            if shard:
                shard_optimizer(model.optimizer, axis=("model", "batch"))
            results.append([*train(model), *map(np.asarray, model.optimizer.variables), slot_bytes(model.optimizer)])
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_slots_are_split_over_every_device():
    model = on_mesh(regression(TensorParallelOptimizer("adam", 8)), "2x4")
    train(model)
    assert slot_bytes(model.optimizer) == 2 * sum(v.value.nbytes for v in model.trainable_variables) // 8
    assert model.optimizer.slot_report.device_bytes == slot_bytes(model.optimizer)


def test_without_sharding_slots_follow_their_weights():
    model = on_mesh(regression(TensorParallelOptimizer("adam", 4, shard_optimizer_states=False)), "2x4")
    train(model)
    here = sum(v.value.addressable_shards[0].data.nbytes for v in model.trainable_variables)
    assert slot_bytes(model.optimizer) == 2 * here and model.optimizer.slot_report is None


def test_it_has_the_interface_of_the_pull_request():
    optimizer = TensorParallelOptimizer(base_optimizer="adam", device_count=4, tensor_parallel_config=object())
    assert type(optimizer.base_optimizer) is K.Adam
    assert (optimizer.device_count, optimizer.shard_optimizer_states) == (4, True)
    assert TensorParallelOptimizer.from_config(optimizer.get_config()).get_config() == optimizer.get_config()
    assert type(TensorParallelOptimizer({"class_name": "sgd", "config": {}}).base_optimizer) is K.SGD
    optimizer.learning_rate = 0.5
    assert float(optimizer.base_optimizer.learning_rate) == float(optimizer.learning_rate) == 0.5
    assert optimizer.iterations is optimizer.base_optimizer.iterations
    assert float(TensorParallelOptimizer(K.Adam(loss_scale_factor=4.0)).scale_loss(1.0)) == 4


def test_gradients_are_applied_outside_of_fit():
    def update(optimizer):
        model = on_mesh(regression(optimizer), "2x4")
        for _ in range(2):
            grads = [0.5 * np.ones(v.shape, "float32") for v in model.trainable_variables]
            optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
        return [np.asarray(v) for v in model.weights]

    for one, other in zip(update(K.Adam(0.01)), update(TensorParallelOptimizer(K.Adam(0.01))), strict=True):
        np.testing.assert_array_equal(one, other)


def test_one_weight_is_updated_as_by_the_base():
    found = []
    for optimizer in (K.Adam(0.01), TensorParallelOptimizer(K.Adam(0.01))):
        weight = keras.Variable(np.ones((4, 4), "float32"))
        optimizer.build([weight])
        optimizer.update_step(np.full((4, 4), 0.5, "float32"), weight, 0.01)
        found.append(np.asarray(weight))
    np.testing.assert_array_equal(*found)


def test_averages_are_put_into_the_weights():
    model = regression(TensorParallelOptimizer(K.Adam(0.01, use_ema=True)))
    train(model, epochs=1)
    average = model.optimizer.base_optimizer.variables[2]
    average.assign(np.full(average.shape, 3.0, "float32"))
    model.optimizer.finalize_variable_values(model.trainable_variables)
    np.testing.assert_array_equal(model.trainable_variables[0], average)


@pytest.mark.parametrize("plain", [True, False])
def test_its_steps_are_restored(tmp_path, plain):
    model = on_mesh(regression(TensorParallelOptimizer(K.Adam(0.01))), "2x4")
    train(model, epochs=1, callbacks=[OrbaxCheckpoint(tmp_path)])
    again = regression(K.Adam(0.01) if plain else TensorParallelOptimizer(K.Adam(0.01)))
    shardload.restore(again, tmp_path, mesh="8x1")
    for one, other in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_saved_model_has_it(tmp_path):
    model = regression(TensorParallelOptimizer(K.Adam(0.01)))
    train(model, epochs=1)
    model.save(tmp_path / "model.keras")
    again = keras.saving.load_model(tmp_path / "model.keras")
    assert isinstance(again.optimizer, TensorParallelOptimizer)
    for one, other in zip(again.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)


def test_another_number_of_devices_is_refused():
    model = on_mesh(regression(TensorParallelOptimizer("adam", 3)), "2x4")
    said = r"over 3 devices: its weights are on the mesh .*, expected device_count=4 or 8"
    with pytest.raises(MeshError, match=said):
        train(model)
    with pytest.raises(MeshError, match=r"over 2 devices: its weights are on no mesh, expected device_count=1\."):
        train(regression(TensorParallelOptimizer("adam", 2)))


@pytest.mark.parametrize("source", ["step", "step's folder", "archive"])
def test_the_mesh_may_come_with_the_state(tmp_path, source):
    trained = regression("adam")
    train(trained, epochs=1)
    shardload.save(trained, tmp_path / "run", step=1)
    trained.save(tmp_path / "model.keras")

    def load(model, **options):
        if source == "step":
            return shardload.restore(model, tmp_path / "run", **options)
        path = tmp_path / "run" / "1" if source == "step's folder" else tmp_path / "model.keras"
        return shardload.load_weights(model, path, **options)

    model = regression(TensorParallelOptimizer("adam", 8))
    load(model, mesh="2x4")
    assert model.optimizer.slot_report.device_bytes == slot_bytes(model.optimizer)
    for one, other in zip(model.optimizer.variables, trained.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one, other)
    train(model, epochs=1)
    other = regression(TensorParallelOptimizer("adam", 3))
    said = r"over 3 devices: its weights are on the mesh .*, expected device_count=4 or 8"
    with pytest.raises(MeshError, match=said):
        load(other, mesh="2x4")
    assert not other.optimizer.built
    load(other := regression(TensorParallelOptimizer("adam", 8)))  # a mesh may still come
    with pytest.raises(MeshError, match=r"over 8 devices: its weights are on .*, expected device_count=1\."):
        train(other)


def test_gradients_of_shards_are_refused():
    optimizer = TensorParallelOptimizer("adam")
    with pytest.raises(UsageError, match="Cannot apply a list of gradients for each shard"):
        optimizer.apply_gradients([[(1.0, None)], [(1.0, None)]], shard_models=[None, None])
    with pytest.raises(UsageError, match="Cannot use base_optimizer=3: expected an optimizer of Keras"):
        TensorParallelOptimizer(3)
