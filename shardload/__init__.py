"""Load any checkpoint straight into a sharded Keras model on JAX.

    model  = shardload.load("gemma3_270m", mesh="1x8", dtype="bfloat16")
    report = shardload.load_weights(model, "model.weights.h5")
    plan   = shardload.plan("gemma2_9b", mesh="4x8")
    with shardload.fast(): model = keras_hub.models.CausalLM.from_preset("gemma2_9b_en")
    with shardload.abstract(): model = build()
    shardload.restore(model, "checkpoints", step="best")
    shardload.convert("gemma2_9b", "gemma2-hf", to="safetensors")
    shardload.save_as(model, "gemma3-hf", to="safetensors")
    shardload.generate(model, "The capital of France is")
    shardload.shard_optimizer(model)

Everything here is imported on first use: ``import shardload`` itself loads neither JAX nor Keras. Keras chooses its
backend when it is imported; if that comes later and ``KERAS_BACKEND`` is not set, it gets JAX.
"""

from __future__ import annotations

import atexit
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

from shardload import errors
from shardload.errors import ShardloadError

if TYPE_CHECKING:
    from shardload import callbacks, data, optimizers
    from shardload.accelerating import fast
    from shardload.adapting import AdapterReport, load_adapter
    from shardload.callbacks.checkpointer import Checkpointer, save
    from shardload.converting import ConvertReport, convert, save_arrays, save_as
    from shardload.following import Follower, follow
    from shardload.keras_bridge.abstraction import abstract, initialise
    from shardload.layouts.rules import layout_rule
    from shardload.loading import load, load_weights, plan, report
    from shardload.optimizers.sharding import shard_optimizer
    from shardload.parallel.distribution import AutoShardDistribution
    from shardload.parallel.tensor_parallel import TensorParallelKeras
    from shardload.pipeline.arrays import load_arrays
    from shardload.pipeline.stored_as import StoredAs
    from shardload.reports import LoadReport, PlanReport
    from shardload.reports.calls import FastReport
    from shardload.resolve.opening import inspect
    from shardload.restoring import restore
    from shardload.stores.cache_choice import cache
    from shardload.text.generation import generate
    from shardload.text.sources import tokenizer
    from shardload.text.tokenizer import Tokenizer

    __version__: str

__all__ = [
    "AdapterReport",
    "AutoShardDistribution",
    "Checkpointer",
    "ConvertReport",
    "FastReport",
    "Follower",
    "LoadReport",
    "PlanReport",
    "ShardloadError",
    "StoredAs",
    "TensorParallelKeras",
    "Tokenizer",
    "abstract",
    "cache",
    "callbacks",
    "convert",
    "data",
    "errors",
    "fast",
    "follow",
    "generate",
    "initialise",
    "inspect",
    "layout_rule",
    "load",
    "load_adapter",
    "load_arrays",
    "load_weights",
    "optimizers",
    "parallel",
    "plan",
    "report",
    "restore",
    "save",
    "save_arrays",
    "save_as",
    "shard_optimizer",
    "tokenizer",
]

_HOMES = {
    "AdapterReport": "adapting",
    "AutoShardDistribution": "parallel.distribution",
    "Checkpointer": "callbacks.checkpointer",
    "ConvertReport": "converting",
    "FastReport": "reports.calls",
    "Follower": "following",
    "LoadReport": "reports",
    "PlanReport": "reports",
    "StoredAs": "pipeline.stored_as",
    "TensorParallelKeras": "parallel.tensor_parallel",
    "Tokenizer": "text.tokenizer",
    "abstract": "keras_bridge.abstraction",
    "cache": "stores.cache_choice",
    "convert": "converting",
    "fast": "accelerating",
    "follow": "following",
    "generate": "text.generation",
    "initialise": "keras_bridge.abstraction",
    "inspect": "resolve.opening",
    "layout_rule": "layouts.rules",
    "load": "loading",
    "load_adapter": "adapting",
    "load_arrays": "pipeline.arrays",
    "load_weights": "loading",
    "plan": "loading",
    "report": "loading",
    "restore": "restoring",
    "save": "callbacks.checkpointer",
    "save_arrays": "converting",
    "save_as": "converting",
    "shard_optimizer": "optimizers.sharding",
    "tokenizer": "text.sources",
}

_MODULES = ("callbacks", "data", "optimizers", "parallel")

# Keras reads this variable when it is imported, and cannot change its backend afterwards.
if "keras" not in sys.modules:
    os.environ.setdefault("KERAS_BACKEND", "jax")


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name == "__version__":  # from pyproject.toml, by the metadata of the installed package
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version(__name__)
        except PackageNotFoundError:  # imported from a source tree that was never installed
            return "0+unknown"
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _HOMES:
        hint = errors.did_you_mean(name, __all__)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}.{hint}".removesuffix("."))
    # Let the other processes notice if this one is killed in the imports that follow, which take seconds.
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        importlib.import_module(f"{__name__}.processes").begin()
    try:
        module = importlib.import_module(f"{__name__}.{_HOMES[name]}")
    except ImportError as error:
        if (better := errors.BackendError.explaining(error)) is error:
            raise
        raise better from error
    # From now on, Python finds the name without calling this function.
    value = getattr(module, name)
    globals()[name] = value
    return value


@atexit.register  # if JAX was imported first, this runs before its shutdown, which waits for other processes
def _leave() -> None:
    """Tell other processes of a `jax.distributed` run not to wait for this one, if it ends without using shardload."""
    jax = sys.modules.get("jax")
    if jax is not None and jax.distributed.is_initialized():
        importlib.import_module(f"{__name__}.processes").leave_unheard()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
