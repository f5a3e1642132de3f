"""Numbers of NumPy are taken wherever Python's are."""

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.synth import synth

DATA = np.ones((8, 3), np.float32), np.ones((8, 2), np.float32)


def compiled():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, name="dense")])
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("numbers") / "run"
    shardload.save(compiled(), folder, step=np.int64(8), epoch=np.int32(1))
    return folder


TAKES = {
    "restore(step)": lambda run, _: shardload.restore(compiled(), run, step=np.int64(8)),
    "load(step)": lambda run, _: shardload.load(run, step=np.int32(8)),
    "load_weights(step)": lambda run, _: shardload.load_weights(compiled(), run, step=np.uint8(8)),
    "Checkpointer.restore(step)": lambda run, _: shardload.Checkpointer(run).restore(compiled(), step=np.int64(8)),
    "load(host_memory_bytes)": lambda run, _: shardload.load(run, host_memory_bytes=np.int64(1 << 26)),
    "load(strict)": lambda run, _: shardload.load(run, strict=np.True_),
    "load(mesh)": lambda run, _: shardload.load(run, mesh=(np.int64(1), np.int64(2))),
    "plan(device_memory_bytes)": lambda run, _: shardload.plan(run, device_memory_bytes=np.int64(1 << 30)),
    "convert(max_shard_bytes)": lambda run, out: shardload.convert(
        run, out / "out.weights.json", max_shard_bytes=np.int64(1 << 26)
    ),
    "TensorParallelKeras(device_count)": lambda run, _: shardload.TensorParallelKeras(
        compiled(), device_count=np.int64(2)
    ),
    "get_best_devices(count)": lambda run, _: shardload.parallel.get_best_devices(np.int64(1)),
    "synth": lambda run, out: synth("gpt2_base", directory=out, seed=np.int64(1), scale=np.float32(0.02)),
}


@pytest.mark.parametrize("takes", TAKES)
def test_arguments_may_be_numbers_of_numpy(takes, run, tmp_path):
    assert TAKES[takes](run, tmp_path)


@pytest.mark.parametrize(
    "given",
    [
        {"save_freq": np.int64(1), "max_to_keep": np.int64(2), "keep_every_steps": np.int32(2)},
        {"monitor": "loss", "keep_best": np.int64(1), "initial_value_threshold": np.float32(9)},
        {"keep_every_hours": np.float32(1), "max_to_keep": 1, "async_timeout_s": np.float32(60)},
        {"initial_epoch": np.int64(0), "save_best_only": np.True_, "monitor": "loss", "verbose": np.int64(0)},
    ],
)
def test_the_callback_takes_numbers_of_numpy(given, tmp_path):
    compiled().fit(*DATA, batch_size=4, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, **given)])
    model = compiled()
    last = shardload.runs.listing.list_steps(tmp_path)[-1].step
    model.fit(*DATA, batch_size=4, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=np.int64(last))])
    assert int(model.optimizer.iterations) == 4


@pytest.mark.parametrize("value", [np.int32(7), np.int64(7), np.float32(0.5), np.float16(0.5), np.True_])
def test_a_scalar_of_numpy_is_a_target(value, tmp_path):
    save_file({"value": np.asarray(value)}, tmp_path / "m.safetensors")
    for target in ({"value": type(value)(0)}, type(value)(0)):
        found = shardload.load_arrays(tmp_path / "m.safetensors", target)["value"]
        assert type(found) is type(value) and found == value


def test_a_scalar_of_numpy_for_an_array_is_refused(tmp_path):
    save_file({"value": np.ones(3, np.float32)}, tmp_path / "m.safetensors")
    with pytest.raises(shardload.errors.MismatchError, match=r"its target has shape \(\), but"):
        shardload.load_arrays(tmp_path / "m.safetensors", {"value": np.float32(0)})
