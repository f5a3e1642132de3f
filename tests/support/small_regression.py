"""A two-layer model to train on meshes of eight devices, split as tensor parallelism does."""

import jax
import keras
import numpy as np

from shardload.keras_bridge.binding import bind
from shardload.keras_bridge.optimizer_slots import slots_in
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec

SPECS = {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None), "down/bias": (None,)}
"""By the end of a variable's path, the axis that splits each dim."""
MESHES = ("1x8", "2x4", "8x1")


def regression(optimizer, **compiling):
    """A compiled model of 560 weights, the same each time."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(24, "relu", name="up"), keras.layers.Dense(8, name="down")]
    model = keras.Sequential([keras.Input((16,)), *layers])
    model.compile(optimizer, "mse", **compiling)
    return model


def numbers():
    x = np.random.default_rng(0).normal(size=(32, 16)).astype("float32")
    return x, x[:, :8]


def train(model, *, epochs=2, **options):
    model.fit(*numbers(), batch_size=16, epochs=epochs, shuffle=False, verbose=0, **options)
    return [np.asarray(v) for v in model.weights]


def distribution(mesh):
    """Keras' ModelParallel with these layouts; in its scope models are built on the mesh."""
    sizes = MeshSpec.parse(mesh).sizes
    devices = np.array(jax.devices()[: int(np.prod(sizes))])
    layout_map = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(sizes, ["batch", "model"], devices))
    for path, axes in SPECS.items():
        layout_map[f".*{path}"] = axes
    return keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")


def on_mesh(model, mesh):
    """Bind a model to a mesh, as a load does."""
    spec = MeshSpec.parse(mesh)
    layouts = []
    for variable in model.variables:
        axes = next((axes for path, axes in SPECS.items() if variable.path.endswith(path)), ())
        layouts.append(Layout.of_spec(spec, axes, len(variable.shape)))
    bind(model, mesh=spec, devices=jax.devices()[: spec.size], layouts=layouts)
    return model


def slot_bytes(optimizer):
    """Bytes of all slots on the first device."""
    return sum(slot.value.addressable_shards[0].data.nbytes for slot, _ in slots_in(optimizer))


def slot_specs(optimizer):
    """For each slot, by its path, the mesh axes that split it, dim by dim."""
    return {s.path.partition("/")[2]: tuple(s.value.sharding.spec) for s, _ in slots_in(optimizer)}
