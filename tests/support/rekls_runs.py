"""Variables on meshes, and steps of REKLS on them."""

import jax
import keras
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.keras_bridge.variables import relocate
from shardload.optimizers import REKLS


def mesh_of(*sizes, axes=("data", "model")):
    return Mesh(np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes), axes[-len(sizes) :])


def weight(shape, *, mesh=None, spec=(), seed=0, dtype="float32", name="kernel"):
    variable = keras.Variable(np.random.default_rng(seed).normal(size=shape), dtype=dtype, name=name)
    if mesh is not None:
        relocate(variable, NamedSharding(mesh, PartitionSpec(*spec)))
    return variable


def gradients(shape, count=5):
    return np.random.default_rng(7).normal(size=(count, *shape)).astype("float32")


def trained(variables, *, steps=5, **options):
    """Take steps with gradients that depend on the shapes alone; return the optimizer."""
    optimizer = REKLS(1e-2, **options)
    optimizer.build(variables)
    kept = [*optimizer.variables, *variables]
    n = len(optimizer.variables)
    if isinstance(on_mesh := variables[0].value.sharding, NamedSharding):  # counters and rates, as fit moves them
        for variable in kept:
            if not isinstance(variable.value.sharding, NamedSharding):
                relocate(variable, NamedSharding(on_mesh.mesh, PartitionSpec()))
    state, weights = [v.value for v in kept[:n]], [v.value for v in kept[n:]]
    shardings = [v.value.sharding for v in kept]

    def one_step(state, weights, grads):
        weights, state = optimizer.stateless_apply(state, grads, weights)
        return state, weights

    # Compiled, as in fit: an eager step traces the whole update again.
    compiled = jax.jit(one_step, out_shardings=(shardings[:n], shardings[n:]))
    for step in range(steps):
        state, weights = compiled(state, weights, [gradients(tuple(v.shape))[step % 5] for v in variables])
    for variable, value in zip(kept, [*state, *weights], strict=True):
        variable.assign(value)
    return optimizer


def values(optimizer, variables):
    """Return the bits of all variables and state."""
    return [np.asarray(v.value) for v in (*variables, *optimizer.variables)]


def same(one, other):
    return len(one) == len(other) and all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))
