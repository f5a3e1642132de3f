"""Small checkpoints by three writers, each in a root of its own, and the model they are restored into.

ours        two steps by `shardload.callbacks.OrbaxCheckpoint`, with digests, random seeds and a data position
keras       two steps by Keras' own callback
v1-…, v0    plain Orbax: zarr 2 and 3, OCDBT or a folder for each array, compressed or not, arrays in shards
nodes       the same arrays in an OCDBT store whose B-tree has several levels and is not compressed
"""

import functools
import shutil

import jax
import keras
import numpy as np
import orbax.checkpoint as v0
import tensorstore as ts
from jax.sharding import NamedSharding, PartitionSpec
from orbax.checkpoint import v1

from shardload.callbacks import OrbaxCheckpoint

PLAIN = {
    f"v1-zarr{3 if zarr3 else 2}{'-ocdbt' * ocdbt}{'-zstd' * zstd}": {
        "use_zarr3": zarr3, "use_ocdbt": ocdbt, "use_compression": zstd
    }
    for zarr3 in (False, True) for ocdbt in (False, True) for zstd in (False, True)
}  # fmt: skip
SEEDS = ("ours", "keras", *PLAIN, "v1-shards", "v0", "nodes")


def model_of(seed=0):
    """Some of its variables have more than the 1 KiB that OCDBT keeps inline."""
    keras.utils.set_random_seed(seed)
    inputs = keras.Input((8,), name="x")
    hidden = keras.layers.Dense(96, name="wide")(inputs)
    hidden = keras.layers.Dropout(0.1, seed=3, name="drop")(hidden)
    model = keras.Model(inputs, keras.layers.Dense(4, name="last")(hidden), name="whole")
    model.compile("adam", "mse")
    return model


def write(name, root):
    """Write a seed's steps below ``root``."""
    match name:
        case "ours":
            _fit(OrbaxCheckpoint(root, save_freq="epoch", data_iterator=_Place(), compression="none"))
        case "keras":
            _fit(keras.callbacks.OrbaxCheckpoint(directory=str(root), save_freq="epoch"))
        case "v0":
            v0.PyTreeCheckpointer().save(root / "7", _tree())
        case "nodes":
            _save(root / "7", use_zarr3=True, use_ocdbt=True, use_compression=True)
            _in_small_nodes(root / "7" / "pytree")
        case "v1-shards":
            storage = v1.options.ArrayOptions.Saving.StorageOptions(chunk_byte_size=512)
            _save(root / "7", use_zarr3=True, use_ocdbt=False, use_compression=True, storage_options=storage)
        case _:
            _save(root / "7", **PLAIN[name])


class _Place:
    def get_state(self):
        return {"shard": 3, "offsets": [1, 2]}

    def set_state(self, state):
        pass


def _fit(callback):
    x = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    model_of().fit(x, x[:, :4], epochs=2, batch_size=4, verbose=0, callbacks=[callback])


@functools.cache
def _tree():
    mesh = jax.make_mesh((8,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    state = model_of().get_state_tree()
    weights = {name: state[name] for name in ("trainable_variables", "non_trainable_variables")}
    spread = jax.device_put(
        np.arange(2048, dtype="float32").reshape(32, 64), NamedSharding(mesh, PartitionSpec("model"))
    )
    return {**weights, "spread": spread, "step": 7, "half": np.ones((5, 3), "float16"), "none": None, "empty": {}}


def _save(path, **options):
    with v1.Context(array_options=v1.options.ArrayOptions(saving=v1.options.ArrayOptions.Saving(**options))):
        v1.save_checkpointables(path, {"pytree": _tree()})


def _in_small_nodes(item):
    """Write a store anew: plain nodes of a few hundred bytes, so that damage in them means something."""
    old = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/"}).result()
    values = {key: old.read(key).result().value for key in old.list().result()}
    for name in ("manifest.ocdbt", "d", "ocdbt.process_0"):
        path = item / name
        path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)
    config = {"compression": None, "max_inline_value_bytes": 100, "max_decoded_node_bytes": 700}
    new = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{item}/", "config": config}).result()
    with ts.Transaction() as transaction:
        for key, value in values.items():
            new.with_transaction(transaction)[key] = value
