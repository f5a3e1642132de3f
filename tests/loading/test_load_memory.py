"""What a load holds at any moment, on device 0 and on the host, measured from outside."""

import functools
import gc
import json
import math
import shutil

import hub_folders
import jax
import keras
import numpy as np
import pytest
from memory import Sampling, held, numbers_of_a_process, scratch_taken, watch
from safetensors.numpy import load_file, save_file

import shardload
from shardload.keras_bridge.variables import stored_dtype
from shardload.pipeline import filling, load
from shardload.pipeline.request import Construction
from shardload.synth import synth
from shardload.transfer import execution

MIB = 1 << 20
BUDGET = MIB
"""Smaller than every kernel of `stack`, so that all of them are read in pieces."""
LAYERS, WIDTH = 8, 1024


def stack():
    """Kernels of 4 MiB."""
    inputs = x = keras.Input((WIDTH,))
    for i in range(LAYERS):
        x = keras.layers.Dense(WIDTH, name=f"dense_{i}")(x)
    return keras.Model(inputs, x)


def abstract_stack():
    with shardload.abstract():
        return stack()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """The same weights in one file and in eight, and as a Hugging Face folder, whose kernels are transposed."""
    folder = tmp_path_factory.mktemp("memory")
    model, rng = stack(), np.random.default_rng(0)
    for variable in model.weights:
        variable.assign(rng.normal(size=variable.shape).astype("float32"))
    model.save_weights(folder / "one.weights.h5")
    model.save_weights(folder / "eight.weights.json", max_shard_size=4.5e-3)  # GB
    tensors = {v.path: np.asarray(v.value) for v in model.weights}
    save_file(tensors, folder / "one.safetensors")
    many = folder / "eight"
    many.mkdir()
    weight_map = {name: f"model-{int(name[6]) + 1:05}-of-00008.safetensors" for name in tensors}  # dense_0/kernel
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, many / file)
    (many / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert [len(list(folder.glob(f))) for f in ("eight*.h5", "eight/*.safetensors")] == [LAYERS, LAYERS]
    one = synth("llama3_8b", format="safetensors", scale=0.06, directory=folder).rename(folder / "hf_one")
    (folder / "hf_eight").mkdir()
    shutil.copy(one / "config.json", folder / "hf_eight")
    hub_folders.save(folder / "hf_eight", load_file(one / "model.safetensors"), 8)
    return folder, tensors


def split(dim):
    mesh = keras.distribution.DeviceMesh((1, 8), ["batch", "model"], devices=jax.devices())
    layouts = keras.distribution.LayoutMap(mesh)
    layouts[".*/kernel"] = ("model", None) if dim == 0 else (None, "model")
    return layouts


@pytest.fixture
def sampling(monkeypatch):
    return watch(monkeypatch)


@pytest.fixture
def scratch(monkeypatch):
    return scratch_taken(monkeypatch)


def assert_bounded(report, sampling, scratch, *, budget=BUDGET):
    assert sampling.most() <= report.devices[0].bytes + budget // 16
    assert len(sampling.samples) > 2 * report.variables
    assert report.host_bytes.budget == budget
    assert report.host_bytes.peak_staging <= 1.1 * budget
    assert sum(scratch) <= 1.1 * budget


FILES = ["one.safetensors", "eight", "one.weights.h5", "eight.weights.json"]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("file", FILES)
def test_device_zero_and_staging_are_bounded(file, dim, checkpoints, sampling, scratch):
    folder, tensors = checkpoints
    model = abstract_stack()
    report = shardload.load_weights(
        model, folder / file, mesh="1x8", layout=split(dim), host_memory_bytes=BUDGET, progress=sampling
    )
    assert_bounded(report, sampling, scratch)
    assert report.devices[0].bytes < sum(t.nbytes for t in tensors.values()) / 7.5
    for variable in model.weights:
        np.testing.assert_array_equal(variable.value, tensors[variable.path])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["hf_one", "hf_eight"])
def test_transposed_and_cast_weights_are_bounded(name, dtype, checkpoints, sampling, scratch):
    folder = checkpoints[0] / name
    assert len(list(folder.glob("*.safetensors"))) == (1 if name == "hf_one" else 8)
    model = shardload.load(folder, mesh="1x8", dtype=dtype, task=False, host_memory_bytes=BUDGET, progress=sampling)
    report = shardload.report(model)
    assert_bounded(report, sampling, scratch)
    assert report.layout.sharded > report.variables // 2
    assert max(math.prod(v.shape) * stored_dtype(v).itemsize for v in model.weights) > BUDGET


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("file", ["one.safetensors", "eight"])
def test_uploaded_pieces_are_bounded(file, dim, checkpoints, sampling, monkeypatch):
    """As on accelerators: kernels larger than the budget go up in pieces, into shards that are there already."""
    folder, tensors = checkpoints
    monkeypatch.setattr(filling.execution, "execute", functools.partial(execution.execute, placement="upload"))
    model = abstract_stack()
    report = shardload.load_weights(
        model, folder / file, mesh="1x8", layout=split(dim), host_memory_bytes=BUDGET, progress=sampling
    )
    assert sampling.most() <= report.devices[0].bytes + BUDGET // 2
    assert report.host_bytes.peak_staging <= 1.1 * BUDGET
    for variable in model.weights:
        np.testing.assert_array_equal(variable.value, tensors[variable.path])


@pytest.mark.parametrize("name", ["eight", "hf_one"])
def test_the_smallest_budget_holds_too(name, checkpoints, sampling, scratch):
    if name == "eight":
        model = abstract_stack()
    else:
        model = load.build(shardload.inspect(checkpoints[0] / name), Construction(task=False))
    report = shardload.load_weights(model, checkpoints[0] / name, mesh="1x8", host_memory_bytes="64KiB")
    assert_bounded(report, sampling, scratch, budget=64 << 10)


def test_the_default_budget_is_more_than_is_used(checkpoints, sampling, scratch):
    folder, _ = checkpoints
    report = shardload.load_weights(abstract_stack(), folder / "one.safetensors", mesh="1x8", layout=split(1))
    assert report.host_bytes.budget == 256 * MIB
    assert report.host_bytes.peak_staging + sum(scratch) < 64 * MIB


def test_reloading_a_live_model_never_holds_it_twice(checkpoints, sampling):
    folder, _ = checkpoints
    model = abstract_stack()
    shardload.load_weights(model, folder / "one.safetensors", mesh="1x8", layout=split(0))
    again = Sampling()
    report = shardload.load_weights(model, folder / "one.safetensors", host_memory_bytes=BUDGET, progress=again)
    kernel = WIDTH * WIDTH * 4 // 8
    assert again.most() <= 2 * kernel  # what is being replaced just now
    assert report.devices[0].bytes > 4 * kernel


# ---- nothing random, nothing compiled, nothing left ----------------------------------------------

_compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: _compiled.append(event) if "backend_compile" in event else None
)


@pytest.fixture
def initialised(monkeypatch):
    """Names of initialisers that were called."""
    called = []

    def recorded(cls, original):
        def call(self, *args, **named):
            called.append(cls.__name__)
            return original(self, *args, **named)

        return call

    for cls in {c for c in vars(keras.initializers).values() if isinstance(c, type)}:
        if "__call__" in vars(cls):
            monkeypatch.setattr(cls, "__call__", recorded(cls, cls.__call__))
    return called


def test_the_counters_count(initialised):
    before = len(_compiled)
    stack()
    assert initialised.count("GlorotUniform") + initialised.count("VarianceScaling") == LAYERS
    jax.jit(lambda x: x * 3 + len(_compiled))(np.ones(17))
    assert len(_compiled) > before


@pytest.mark.parametrize("mesh", ["1x8", "2x4", "1x1"])
def test_build_and_load_call_no_initialiser_compile_nothing_and_leave_only_weights(mesh, checkpoints, initialised):
    # The first load of a process compiles two programs that do not depend on the mesh; not what this is about.
    shardload.load(checkpoints[0] / "hf_one", mesh="1x4", task=False)
    gc.collect()
    before, compiled = held(), len(_compiled)
    model = shardload.load(checkpoints[0] / "hf_one", mesh=mesh, task=False)
    assert (initialised, _compiled[compiled:]) == ([], [])
    gc.collect()
    now, report = held(), shardload.report(model)
    on = {d.id: d.bytes for d in report.devices}
    assert {d: now[d] - before[d] for d in now} == {d: on.get(d, 0) for d in now}
    assert report.parameters == model.count_params()


def test_a_model_that_stands_abstractly_holds_no_byte(initialised):
    gc.collect()
    before, compiled = held(), len(_compiled)
    with shardload.abstract():
        model = stack()
        model.compile("adam", "mse")
        model.optimizer.build(model.trainable_variables)
    assert held() == before
    assert (initialised, _compiled[compiled:]) == ([], [])


# ---- the whole process ---------------------------------------------------------------------------

_CHILD = """
small, large, layout, budget = sys.argv[1:]
shardload.load(small, mesh="1x8", layout=layout, task=False)  # what is imported and warmed up once
resident = number("VmRSS") << 10
model = shardload.load(large, mesh="1x8", layout=layout, task=False, host_memory_bytes=int(budget))
print(peak() - resident, shardload.report(model).weight_bytes)
"""


@pytest.mark.slow
@pytest.mark.parametrize("format", ["safetensors", "h5"])
@pytest.mark.parametrize("budget", [4 * MIB, 64 * MIB])
def test_a_process_grows_by_weights_and_budget(format, budget, tmp_path):
    small = synth("llama3_8b", format=format, scale=0.02, directory=tmp_path / "small")
    large = synth("llama3_8b", format=format, scale=0.24, directory=tmp_path / "large")
    growth, weight_bytes = numbers_of_a_process(_CHILD, small, large, "auto", budget)
    assert weight_bytes > 250 * MIB
    assert growth <= weight_bytes + budget + 24 * MIB
