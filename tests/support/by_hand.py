"""The whole load in a few lines of NumPy, as an oracle for names and assignment: no plan, no transfer.

`fill` reads each binding's view from the file, puts it on eight devices in a layout of its own choosing and
hands it to the Assigner; `check_same` compares two models bit for bit.
"""

from __future__ import annotations

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.variables import current_value, set_sharding, sharding_of
from shardload.manifest import Extent
from shardload.mapping.assign import Assigner


def mesh(shape=(2, 4)):
    return jax.sharding.Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("batch", "model"))


def sharding_for(variable, over):
    """The last dim that divides goes over ``model``; everything else is replicated."""
    size = over.shape["model"]
    split = next((d for d in reversed(range(len(variable.shape))) if variable.shape[d] % size == 0), None)
    return NamedSharding(over, PartitionSpec(*("model" if d == split else None for d in range(len(variable.shape)))))


def lay_out(model, over):
    for variable in state_of(model):
        set_sharding(variable, sharding_for(variable, over))
    return model


def read_tensor(manifest, name):
    tensor = manifest.tensors[name]
    if isinstance(tensor.storage, Extent):
        flat = np.fromfile(str(tensor.storage.path), np.uint8, count=tensor.nbytes, offset=tensor.storage.offset)
        return flat.view(tensor.dtype).reshape(tensor.shape)
    return tensor.storage.reader.read_rows(0, tensor.rows).reshape(tensor.shape)


def read_view(manifest, view):
    whole = read_tensor(manifest, view.tensor).reshape(-1)[view.offset :]
    return np.lib.stride_tricks.as_strided(whole, view.shape, [s * whole.itemsize for s in view.strides])


def assigner(mapping, manifest, **options):
    def place(variable, host):
        sharding = sharding_of(variable)
        return jax.device_put(host.copy(), sharding) if sharding is not None else jax.numpy.array(host)

    return Assigner(mapping, lambda name: read_tensor(manifest, name), place, **options)


def arrays(mapping, manifest):
    """Name and finished array of each binding, one at a time."""
    for binding in mapping.bindings:
        host = np.ascontiguousarray(read_view(manifest, binding.view)).reshape(binding.view.shape)
        host = np.asarray(jax.numpy.asarray(host).astype(binding.dtype))
        sharding = sharding_of(binding.variable)
        yield binding.name, jax.device_put(host, sharding) if sharding is not None else jax.numpy.array(host)


def fill(mapping, manifest, **options):
    """Load all of it; checks that every variable that is not computed holds the very buffers it was given."""
    loading = assigner(mapping, manifest, **options)
    given = {}
    for name, array in arrays(mapping, manifest):
        given[name] = pointers(array)
        loading.starting(name)
        loading.ready(name, array)
    loading.finish()
    computed = {name for step in mapping.computed for name in step.names}
    for binding in mapping.bindings:
        if binding.name not in computed:
            assert pointers(current_value(binding.variable)) == given[binding.name]
    for variable in mapping.provided:
        sharding = sharding_of(variable)
        assert sharding is None or current_value(variable).sharding.is_equivalent_to(
            sharding, current_value(variable).ndim
        )


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def check_same(model, reference, *, state=False):
    """Every weight equal, bit for bit, dtype included."""
    pick = state_of if state else (lambda m: m.weights)
    ours, theirs = pick(model), pick(reference)
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        mine, yours = np.asarray(current_value(one)), np.asarray(current_value(other))
        assert mine.dtype == yours.dtype and mine.shape == yours.shape, one.path
        assert mine.tobytes() == yours.tobytes(), f"{one.path} differs"
