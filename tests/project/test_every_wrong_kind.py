"""Each argument of each public function, given values of every wrong kind: it works, or is an error of shardload."""

import inspect
import itertools
import typing

import grain
import jax
import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardload
from shardload import callbacks, data, optimizers, parallel
from shardload.callbacks.checkpointer import Checkpointer
from shardload.comparing import diff
from shardload.errors import ShardloadError
from shardload.synth import synth
from shardload.verifying import verify

P = jax.sharding.PartitionSpec
X = np.ones((8, 8), np.float32)
HLO = "ENTRY main { ROOT x = f32[8]{0} all-reduce(y), replica_groups={{0,1,2,3,4,5,6,7}} }"


def dense():
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])


def compiled():
    model = dense()
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    return model


class Unknown:
    """Of no kind that anything expects."""


WRONG = (
    lambda: 3, lambda: "x", lambda: None, lambda: [["a"], None], lambda: {1: 2}, Unknown,
    lambda: (number for number in [1]), lambda: keras.Model, lambda: lambda: 1, lambda: float("nan"), lambda: b"x",
    lambda: np.ones(3), dense,
)  # fmt: skip
_numbers = itertools.count()


def new():
    return f"new{next(_numbers)}"


def placed():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return {"x": jax.device_put(X, jax.sharding.NamedSharding(mesh, P("x"))), "axis_name": "x", "mesh": mesh}


def checked():
    model = dense()
    return {"model": model, "choice": parallel.choose(model, "1x8"), "inputs": X}


def save(**arguments):
    Checkpointer(new()).save(**arguments)


def cached(directory, size):
    with shardload.cache(directory, size=size):
        pass


# A function, and arguments that it works with.
CALLS = {
    "AutoShardDistribution": (shardload.AutoShardDistribution, lambda: {"mesh": "2x4"}),
    "Checkpointer": (Checkpointer, lambda: {"directory": new()}),
    "Checkpointer.save": (save, lambda: {"step": 0, "model": compiled()}),
    "Hardware": (parallel.Hardware, dict),
    "OrbaxCheckpoint": (callbacks.OrbaxCheckpoint, lambda: {"directory": new()}),
    "REKLS": (optimizers.REKLS, dict),
    "StoredAs": (shardload.StoredAs, lambda: {"tensors": "a.{i}", "dims": "n -> i n"}),
    "TensorParallelKeras": (shardload.TensorParallelKeras, lambda: {"model": dense(), "device_count": 2}),
    "TensorParallelOptimizer": (optimizers.TensorParallelOptimizer, lambda: {"base_optimizer": "adam"}),
    "TpRekls": (optimizers.TpRekls, dict),
    "abstract": (shardload.abstract, dict),
    "all_gather": (parallel.all_gather, lambda: {**placed(), "axis": 0}),
    "all_reduce": (parallel.all_reduce, placed),
    "autoconfig": (parallel.autoconfig, lambda: {"model": dense(), "device_count": 2}),
    "cache": (cached, lambda: {"directory": new(), "size": "1GiB"}),
    "check_numbers": (parallel.check_numbers, checked),
    "check_placement": (parallel.check_placement, lambda: {k: v for k, v in checked().items() if k != "inputs"}),
    "choose": (parallel.choose, lambda: {"model": dense(), "mesh": "1x8"}),
    "collectives_in": (parallel.collectives_in, lambda: {"text": HLO, "mesh": "1x8"}),
    "compile_step": (parallel.compile_step, checked),
    "convert": (shardload.convert, lambda: {"src": "m.keras", "dst": new(), "to": "h5"}),
    "devices_of": (parallel.devices_of, lambda: {"ids": ["cpu:0"]}),
    "diff": (diff, lambda: {"first": "a.safetensors", "second": "a.safetensors"}),
    "fast": (shardload.fast, dict),
    "fit": (parallel.fit, lambda: {"model": dense(), "mesh": "1x8", "device_memory_bytes": 1 << 30}),
    "follow": (shardload.follow, lambda: {"model": dense(), "source": "run"}),
    "generate": (shardload.generate, lambda: {"model": dense(), "prompts": "x"}),
    "get_best_devices": (parallel.get_best_devices, lambda: {"count": 1}),
    "initialise": (shardload.initialise, lambda: {"target": dense()}),
    "inspect": (shardload.inspect, lambda: {"source": "m.keras"}),
    "layout_rule": (shardload.layout_rule, lambda: {"layer_class": Unknown}),
    "list_devices": (parallel.list_devices, dict),
    "load": (shardload.load, lambda: {"source": "m.keras", "mesh": "1x1"}),
    "load_adapter": (shardload.load_adapter, lambda: {"model": dense(), "adapter": "adapter"}),
    "load_arrays": (shardload.load_arrays, lambda: {"source": "a.safetensors", "targets": {"a": P()}, "mesh": "x=8"}),
    "load_weights": (shardload.load_weights, lambda: {"model": dense(), "source": "m.weights.h5", "mesh": "1x1"}),
    "plan": (shardload.plan, lambda: {"source": "m.keras"}),
    "reduce_scatter": (parallel.reduce_scatter, lambda: {**placed(), "axis": 0}),
    "report": (shardload.report, lambda: {"model": dense()}),
    "restore": (shardload.restore, lambda: {"model": dense(), "directory": "run"}),
    "resumable": (data.resumable, lambda: {"dataset": grain.MapDataset.range(16)}),
    "save": (shardload.save, lambda: {"model": compiled(), "directory": new(), "step": 0}),
    "save_arrays": (shardload.save_arrays, lambda: {"tree": {"a": X}, "path": f"{new()}.safetensors"}),
    "save_as": (shardload.save_as, lambda: {"model": dense(), "path": f"{new()}.weights.h5"}),
    "search": (parallel.search, lambda: {"model": dense(), "mesh": "1x8", "inputs": X}),
    "search_compiled": (parallel.search_compiled, lambda: {"model": dense(), "mesh": "1x8", "inputs": X}),
    "search_smallest_mesh": (
        parallel.search_smallest_mesh,
        lambda: {"model": dense(), "inputs": X, "device_memory_bytes": 1 << 30},
    ),
    "shard_optimizer": (shardload.shard_optimizer, lambda: {"target": compiled()}),
    "smallest_mesh": (parallel.smallest_mesh, lambda: {"model": dense(), "device_memory_bytes": 1 << 30}),
    "split_tensor_for_parallelism": (
        parallel.split_tensor_for_parallelism,
        lambda: {"tensor": X, "index": 0, "device_count": 2, "dim": 0},
    ),
    "state_bytes": (optimizers.state_bytes, lambda: {"shape": (8, 8)}),
    "synth": (synth, lambda: {"name": "gpt2_base", "directory": "synth", "scale": 0.01, "overwrite": True}),
    "tokenizer": (shardload.tokenizer, lambda: {"source": "m.keras"}),
    "verify": (verify, lambda: {"source": "a.safetensors"}),
}
SLOW = {"check_numbers": {"inputs", "target", "kwargs"}, "search_compiled": {"optimizer", "batch_axis"}}
"""The arguments to try of functions that take seconds where a value is good."""
RESULTS = {
    *(
        "AdapterReport",
        "Collective",
        "CompiledStep",
        "ComparedArray",
        "ConvertReport",
        "Counts",
        "FastReport",
        "Follower",
        "LayoutChoice",
    ),
    *("LayoutPlan", "LoadReport", "MeshFit", "Misplaced", "NumbersCheck", "ParallelismInfo", "PlanReport"),
    *("SetupReport", "ShardloadError", "SlotLayout", "SlotReport", "Tokenizer", "VariableLayout"),
    *("Origin", "Position", "Reading", "follow_data", "resumable_of_fit", "stop_following"),  # of the callback
}
"""Classes of results: functions return them, and users never construct them."""


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, model = tmp_path_factory.mktemp("wrong"), compiled()
    model.save(folder / "m.keras")
    model.save_weights(folder / "m.weights.h5")
    save_file({"a": X}, folder / "a.safetensors")
    shardload.save(model, folder / "run", step=0)
    return folder


def test_no_public_function_is_forgotten():
    for module in (shardload, parallel, optimizers, callbacks, data):
        names = {name for name in module.__all__ if not inspect.ismodule(getattr(module, name))}
        assert names <= CALLS.keys() | RESULTS


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_kind_works_or_is_refused(name, files, monkeypatch):
    monkeypatch.chdir(files)
    function, arguments = CALLS[name]
    signature = inspect.signature(Checkpointer.save if function is save else function)
    known = [n for n, p in signature.parameters.items() if n != "self" and p.kind is not p.VAR_KEYWORD]
    if any(str(p.annotation).startswith("Unpack[") for p in signature.parameters.values()):
        (options,) = typing.get_args(typing.get_type_hints(function)["options"])
        known += options.__annotations__
    for argument, wrong in itertools.product(known, WRONG):
        if argument not in SLOW.get(name, {argument}):
            continue
        given = wrong()
        try:
            function(**{**arguments(), argument: given})
        except ShardloadError as error:
            assert len(str(error)) > 20
        except Exception as error:
            raise AssertionError(f"{name}({argument}={given!r:.60}): {type(error).__name__}: {error}") from error
