"""Twins of models, the meshes a case runs on, and whether weights are equal bit for bit."""

import jax
import numpy as np

import shardload
from shardload.keras_bridge.variables import sharding_of, value_of

MESHES = ("1x8", "2x4", "8x1", "1x3", "1x1")
"""All of them under ``pytest --every-mesh`` (``make test-full``); else one for each case, in turn, so that every mesh
meets every format: each test has five cases or more."""
DTYPES = ("float32", "bfloat16")


def bits(variable, dtype=None):
    value = np.asarray(value_of(variable))
    value = value if dtype is None else value.astype(dtype)
    return value.dtype, value.shape, value.tobytes()


def assert_same(model, reference, *, widened=False):
    assert len(model.weights) == len(reference.weights)
    for ours, theirs in zip(model.weights, reference.weights, strict=True):
        assert bits(ours) == bits(theirs, ours.dtype if widened else None), ours.path


def assert_on(model, mesh):
    """Every weight lives on all devices of the mesh, in the very layout the report counts, and no device has more."""
    rows, columns = map(int, mesh.split("x"))
    expected = set(jax.devices()[: rows * columns])
    held = dict.fromkeys((d.id for d in expected), 0)
    for variable in shardload.report(model) and model.weights:
        array = value_of(variable)
        assert array.sharding.device_set == expected, variable.path
        assert array.sharding.is_equivalent_to(sharding_of(variable), array.ndim)
        for shard in array.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert set(held.values()) == {shardload.report(model).devices[0].bytes}


def twin(model):
    """The same model built anew from its configuration, as a user would."""
    return type(model).from_config(model.get_config())


def abstract_twin(model):
    with shardload.abstract():
        return twin(model)
