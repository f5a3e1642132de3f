"""What an error suggests works: each case fails, its message names the way out, and the way out is taken."""

from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec, SingleDeviceSharding
from safetensors.numpy import save_file

import shardload
from shardload.errors import ShardloadError


class ComputesWhatItSaves(keras.layers.Dense):
    def save_own_variables(self, store):
        store["0"] = np.asarray(self.kernel) * 2


def model_of(layer=None):
    return keras.Sequential([keras.Input((4,)), layer or keras.layers.Dense(8)])


def target(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=SingleDeviceSharding(jax.devices()[0]))


@pytest.fixture(scope="module")
def at(tmp_path_factory):
    """Paths of checkpoints to fail with, and a folder for results."""
    folder = tmp_path_factory.mktemp("ways_out")
    model = model_of()
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    shardload.save(model, folder / "steps", step=3)
    save_file({"a": np.zeros((4, 8), np.float32)}, folder / "a.safetensors")
    save_file({"n": np.array([2**40])}, folder / "n.safetensors")
    (folder / "wrong.safetensors").write_bytes((folder / "m.weights.h5").read_bytes())
    np.save(folder / "a.npy", np.zeros(3))
    found = SimpleNamespace(**{name: folder / name for name in ("m.keras", "steps", "out")})
    found.folder, found.model, found.keras = folder, model, folder / "m.keras"
    return found


def as_64_bits(at):
    with jax.enable_x64(True):
        assert int(shardload.load_arrays(at.folder / "n.safetensors", {"n": target((1,), "int64")})["n"][0]) == 2**40


def convert_npy(at):
    save_file({"name": np.load(at.folder / "a.npy")}, at.folder / "new.safetensors")
    shardload.inspect(at.folder / "new.safetensors")


CASES = {
    "a live model has no names at Hugging Face: its weights": (
        lambda at: shardload.save_as(at.model, at.out, to="safetensors"),
        r"Choose the name out\.weights\.h5, or save",
        lambda at: shardload.save_as(at.model, at.folder / "out.weights.h5"),
    ),
    "a live model has no names at Hugging Face: a step": (
        lambda at: shardload.save_as(at.model, at.out, to="safetensors"),
        r"save a step: shardload\.save\(model, directory, step=0\)",
        lambda at: shardload.save(at.model, at.folder / "saved", step=0),
    ),
    "a live model that HDF5 cannot hold": (
        lambda at: shardload.save_as(model_of(ComputesWhatItSaves(8)), at.folder / "c.weights.h5"),
        r"Call Keras' model\.save_weights\(path\)",
        lambda at: model_of(ComputesWhatItSaves(8)).save_weights(at.folder / "computes.weights.h5"),
    ),
    "save_as has no orbax": (
        lambda at: shardload.save_as(at.model, at.out, to="orbax"),
        r"Call shardload\.save\(model, directory, step=0\)",
        lambda at: shardload.save(at.model, at.folder / "for_orbax", step=0),
    ),
    "a file without names at Hugging Face": (
        lambda at: shardload.convert(at.keras, at.out, to="safetensors"),
        r"Choose the name out\.weights\.h5 or the format orbax",
        lambda at: (
            shardload.convert(at.keras, at.folder / "two.weights.h5"),
            shardload.convert(at.keras, at.folder / "orbax", to="orbax"),
        ),
    ),
    "no preset of a model of your own": (
        lambda at: shardload.convert(at.keras, at.out, to="h5"),
        r"Name the target NAME\.weights\.h5",
        lambda at: shardload.convert(at.keras, at.folder / "NAME.weights.h5"),
    ),
    "a folder with the name of a file": (
        lambda at: shardload.convert(at.keras, at.folder / "x.safetensors"),
        r"Remove \.safetensors and pass to=.*'orbax'",
        lambda at: shardload.convert(at.keras, at.folder / "x", to="orbax"),
    ),
    "a folder with the name of a file, from save_as": (
        lambda at: shardload.save_as(at.model, at.folder / "y.safetensors"),
        r"Remove \.safetensors and pass to=.*, or name it y\.weights\.h5",
        lambda at: shardload.save_as(at.model, at.folder / "y.weights.h5"),
    ),
    "shards of one file": (
        lambda at: shardload.convert(at.keras, at.folder / "z.weights.h5", max_shard_bytes="1MiB"),
        r"name it z\.weights\.json",
        lambda at: shardload.convert(at.keras, at.folder / "z.weights.json", max_shard_bytes="1MiB"),
    ),
    "a policy of Keras for single tensors": (
        lambda at: shardload.convert(at.keras, at.folder / "p.weights.h5", dtype="mixed_bfloat16"),
        "Cannot write in the dtype 'mixed_bfloat16'. Choose bfloat16, float16, float32, float64",
        lambda at: [
            shardload.save_as(at.model, at.folder / f"p{dtype}.weights.h5", dtype=dtype)
            for dtype in ("bfloat16", "float16", "float32", "float64", "bf16")
        ],
    ),
    "a dtype to load in": (
        lambda at: shardload.load(at.keras, dtype="int8"),
        "Choose bfloat16, .* policy of Keras such as mixed_bfloat16",
        lambda at: shardload.load(at.keras, dtype="mixed_bfloat16"),
    ),
    "a dtype of arrays": (
        lambda at: shardload.load_arrays(at.folder / "a.safetensors", lambda name, shape: None, dtype="int8"),
        "Choose bfloat16, .*float64, .*float8_e4m3fn",
        lambda at: shardload.load_arrays(
            at.folder / "a.safetensors", {"a": SingleDeviceSharding(jax.devices()[0])}, dtype="float8_e4m3fn"
        ),
    ),
    "a step that this process saved": (
        lambda at: shardload.save(at.model, at.steps, step=3),
        "This process saved it. Save under another number",
        lambda at: shardload.save(at.model, at.steps, step=4),
    ),
    "integers that do not fit": (
        lambda at: shardload.load_arrays(at.folder / "n.safetensors", {"n": target((1,), "int32")}),
        r"Choose int64, with jax\.config\.update\('jax_enable_x64', True\)",
        as_64_bits,
    ),
    "an order of dims": (
        lambda at: shardload.load_arrays(at.folder / "a.safetensors", {"a": target((8, 4), "float32")}),
        "Pass transpose=",
        lambda at: shardload.load_arrays(
            at.folder / "a.safetensors", {"a": target((8, 4), "float32")}, transpose={"a": (1, 0)}
        ),
    ),
    "a spec without a mesh": (
        lambda at: shardload.load_arrays(at.folder / "a.safetensors", {"a": PartitionSpec(None, "x")}),
        "Pass mesh=",
        lambda at: shardload.load_arrays(at.folder / "a.safetensors", {"a": PartitionSpec(None, "x")}, mesh="x=8"),
    ),
    "an ending of another format": (
        lambda at: shardload.inspect(at.folder / "wrong.safetensors"),
        "insist with format='keras-h5'",
        lambda at: shardload.inspect(at.folder / "wrong.safetensors", format="keras-h5"),
    ),
    "a size without a unit": (
        lambda at: shardload.load(at.keras, host_memory_bytes="12"),
        "Write 12GiB",
        lambda at: shardload.load(at.keras, host_memory_bytes="12GiB"),
    ),
    "a budget of a few bytes": (
        lambda at: shardload.load(at.keras, host_memory_bytes=1024),
        "Raise it to at least 64KiB",
        lambda at: shardload.load(at.keras, host_memory_bytes="64KiB"),
    ),
    "a step that is not there": (
        lambda at: shardload.restore(model_of(), at.steps, step=2),
        'or step="latest"',
        lambda at: shardload.restore(model_of(), at.steps, step="latest"),
    ),
    "weights without a model": (
        lambda at: shardload.load(at.folder / "m.weights.h5"),
        r"call shardload\.load_weights\(model, source\)",
        lambda at: shardload.load_weights(model_of(), at.folder / "m.weights.h5"),
    ),
    "weights of another model": (
        lambda at: shardload.load_weights(model_of(), at.folder / "a.safetensors"),
        "Pass strict=False",
        lambda at: shardload.load_weights(model_of(), at.folder / "a.safetensors", strict=False),
    ),
    "an array of NumPy": (
        lambda at: shardload.inspect(at.folder / "a.npy"),
        r'save_file\(\{"name": numpy\.load\(path\)\}',
        convert_npy,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_way_out_of_an_error_works(at, case):
    fails, message, works = CASES[case]
    with pytest.raises(ShardloadError, match=message):
        fails(at)
    works(at)
