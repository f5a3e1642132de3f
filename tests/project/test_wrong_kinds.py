"""Arguments of a wrong kind are a `UsageError` with the name, what was given and what is expected; numbers agree."""

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardload
from shardload import parallel
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import UsageError
from shardload.pipeline.request import LoadRequest
from shardload.synth import synth


def dense():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])


NOWHERE = "./there/is/nothing"
WRONG = {
    "fast": (lambda: shardload.fast(1), r"Cannot call fast\(\): too many positional arguments"),
    "load_arrays": (lambda: shardload.load_arrays(NOWHERE), r"Cannot call load_arrays\(source, targets, .*'targets'"),
    "convert": (lambda: shardload.convert(NOWHERE), r"Cannot call convert\(src, dst, .*argument: 'dst'"),
    "a long signature": (
        lambda: OrbaxCheckpoint(verbose=1),
        r"Cannot call OrbaxCheckpoint\(directory, monitor=…, [a-z_=…, ]*=…, …\): missing a required argument: 'dir",
    ),
    "dst": (lambda: shardload.convert(NOWHERE, 3), "Cannot use dst=3: expected a path"),
    "ignore": (lambda: shardload.load(NOWHERE, ignore=3), "Cannot use ignore=3: expected a list of tensor names"),
    "ignore of plan": (lambda: shardload.plan(NOWHERE, ignore=None), "Cannot use ignore=None: expected a list"),
    "ignore_config": (lambda: shardload.load(NOWHERE, ignore_config=3), "Cannot use ignore_config=3: expected a list"),
    "keep_every_hours": (
        lambda: shardload.Checkpointer("run", keep_every_hours="1"),
        "Cannot use keep_every_hours='1': expected more than 0, or None",
    ),
    "save_weights_only": (
        lambda: OrbaxCheckpoint("run", save_weights_only="no"),
        "Cannot use save_weights_only='no': expected True or False",
    ),
    "save_on_background": (
        lambda: shardload.Checkpointer("run", save_on_background="no"),
        "Cannot use save_on_background='no': expected True or False",
    ),
    "metadata": (
        lambda: OrbaxCheckpoint("run", metadata=lambda step: {}),
        "Cannot call metadata=.* with 2 arguments: too many positional arguments",
    ),
    "post_finalization": (
        lambda: OrbaxCheckpoint("run", post_finalization=lambda: None),
        "Cannot call post_finalization=.* with 2 arguments: too many positional arguments",
    ),
    "variables": (lambda: shardload.Checkpointer("run", variables=3), "Cannot use variables=3: expected patterns"),
    "initialise": (lambda: shardload.initialise(3), "Cannot use 3: expected a model, or variables"),
    "initialise a list": (lambda: shardload.initialise([3]), r"Cannot use \[3\]: expected a model, or variables"),
    "axis_name": (lambda: parallel.all_reduce(np.ones(8), axis_name=3), "Cannot use axis_name=3: expected the name"),
    "op": (lambda: parallel.all_reduce(np.ones(8), op=["sum"]), r"Cannot reduce by op=\['sum'\]\. Choose sum"),
    "mesh": (lambda: parallel.all_reduce(np.ones(8), mesh="1x8"), "Cannot use mesh='1x8': expected a jax"),
    "count": (lambda: parallel.get_best_devices("2"), "Cannot use count='2': expected a number of devices"),
    "device_type": (lambda: parallel.get_best_devices(1, device_type=3), "Cannot use device_type=3: expected 'cpu'"),
    "ids": (lambda: parallel.devices_of(3), "Cannot use the devices 3: expected ids such as 'cpu:0'"),
    "device_ids": (
        lambda: shardload.TensorParallelKeras(dense(), device_ids=1),
        "Cannot use device_ids=1: expected a list of devices",
    ),
    "model": (
        lambda: parallel.check_numbers(3, None, 0),
        "Cannot compare 3: expected a model, or a function that builds",
    ),
    "steps": (
        lambda: parallel.check_numbers(dense(), None, 0, steps="2"),
        "Cannot compare a model after steps='2': expected a positive",
    ),
    "kwargs": (
        lambda: parallel.compile_step(dense(), lambda model: parallel.choose(model, "1x8"), 0, kwargs=3),
        "Cannot use kwargs=3: expected a dictionary",
    ),
    "choice": (
        lambda: parallel.check_numbers(dense(), lambda: 1, 0),
        "Cannot call choice=.* with 1 argument: too many",
    ),
    "device_memory_bytes": (
        lambda: parallel.fit(dense(), "1x8", device_memory_bytes="16"),
        "Cannot use device_memory_bytes='16': expected the bytes of one device",
    ),
    "text": (lambda: parallel.collectives_in(3, "1x8"), "Cannot find collectives in 3: expected the text of a program"),
    "inputs": (
        lambda: parallel.compile_step(dense(), lambda model: parallel.choose(model, "1x8"), "x"),
        "Cannot use inputs='x': expected arrays of numbers, or their shapes",
    ),
    "inputs of another shape": (
        lambda: parallel.compile_step(dense(), lambda model: parallel.choose(model, "1x8"), np.ones(3)),
        r"Cannot call 'sequential\w*' with inputs=float32\[3\]: ValueError: Invalid input shape",
    ),
    "target": (
        lambda: parallel.check_numbers(
            dense(), lambda model: parallel.choose(model, "1x8"), np.ones((8, 8)), target=np.ones(3), training="sgd"
        ),
        r"Cannot compute the loss of outputs and target=float32\[3\]: ValueError",
    ),
    "a choice": (
        lambda: shardload.Checkpointer("run", mode=np.ones(3)),
        r"Cannot use mode=array\(.*: expected 'auto', 'min' or 'max'",
    ),
    "names": (
        lambda: shardload.load_weights(dense(), NOWHERE, names={1: 2}),
        r"Cannot use names=\{1: 2\}: expected a mapping from names to names",
    ),
    "a class as model": (
        lambda: shardload.save(keras.Model, "run", step=0),
        "Cannot use <class .*Model'> as model: expected a Keras model, got type",
    ),
    "a pytree as model": (
        lambda: shardload.save({"a": np.ones(8)}, "run", step=0),
        r"Cannot use a dict as model: expected a Keras model\. For a pytree of arrays, there are shardload",
    ),
    "a model as function": (
        lambda: shardload.load_arrays(NOWHERE, np.ones(8), transpose=dense()),
        "Cannot use transpose=<Sequential .*: expected a mapping or a function",
    ),
    "callable variables": (
        lambda: shardload.save(dense(), "run", step=0, variables=lambda: True),
        "Cannot call variables=.* with 1 argument: too many",
    ),
    "one_slash": (
        lambda: synth("gpt2_base", directory="gs:/bucket/out"),
        r"Cannot write to gs:/+bucket/out: it is a URL \(gs\)",
    ),
}


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_kind_is_named_with_what_is_expected(case, tmp_path):
    call, message = WRONG[case]
    with pytest.raises(UsageError, match=message) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    assert not list(tmp_path.iterdir())


def test_a_save_that_fails_keeps_folders_that_were_there(tmp_path):
    (tmp_path / "there").mkdir()
    with pytest.raises(UsageError):
        shardload.save(dense(), tmp_path / "there" / "a" / "b", step=-1)
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_a_quantised_dtype_of_a_plain_model_is_no_matter_of_custom_objects(tmp_path):
    dense().save(tmp_path / "m.keras")
    with pytest.raises(shardload.errors.UnsupportedError, match=r"saved quantised\. Load this one with dtype"):
        shardload.load(tmp_path / "m.keras", mesh="1x1", dtype="int8_from_float32")


def test_text_as_a_target_is_not_called_a_tuple(tmp_path):
    save_file({"a": np.zeros(8, np.float32)}, tmp_path / "a.safetensors")
    with pytest.raises(UsageError, match=r"Cannot place 'a' by 'x': it is text, expected a target"):
        shardload.load_arrays(tmp_path / "a.safetensors", {"a": "x"}, mesh="x=8")


def test_one_of_something_is_singular(tmp_path):
    keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)]).save(tmp_path / "one.keras")
    report = shardload.report(shardload.load(tmp_path / "one.keras", mesh="1x1"))
    assert ": 1 variable, 8 bytes" in repr(report) and "0 variables sharded" in str(report)
    assert ": 1 tensor, 2 parameters, 8 bytes" in repr(shardload.inspect(tmp_path / "one.keras"))
    with shardload.abstract():
        empty = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, use_bias=False)])
    with pytest.raises(shardload.errors.UninitialisedError, match="no value for 1 variable: "):
        shardload.save(empty, tmp_path / "run", step=0)


def test_a_generator_is_read_once(tmp_path):
    """A check that reads it leaves nothing for the call."""
    assert [device.id for device in parallel.devices_of(f"cpu:{i}" for i in (1, 2))] == [1, 2]
    with pytest.raises(UsageError, match="Cannot use variables=<generator"):
        OrbaxCheckpoint(tmp_path, variables=(name for name in ["*kernel"]))
    request = LoadRequest(source="x", ignore=(name for name in ["a.*", "b"]), ignore_config=(n for n in ["rope_theta"]))
    for _ in range(2):
        assert request.matching.ignore == ("a.*", "b")
        assert request.matching.ignore_config == request.construction.ignore_config == ("rope_theta",)
