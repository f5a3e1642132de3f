"""Values and layouts of one Keras variable.

``_layout`` is a ``jax.sharding.NamedSharding`` or ``None``; see `shardload.keras_bridge.pending` for the states.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np
from jax._src.array import ArrayImpl

from shardload.errors import MismatchError
from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.pending import PendingValue
from shardload.processes.agreement import require_agreement
from shardload.sharding.layout import Layout
from shardload.transfer.placement import named_sharding


def has_value(variable: Variable) -> bool:
    """Whether the variable has an array now."""
    return variable._value is not None


def is_abstract(variable: Variable) -> bool:
    """Whether the variable was built without a value and has none yet."""
    return variable._value is None and isinstance(variable._initializer, PendingValue)


def stored_dtype(variable: Variable) -> np.dtype[Any]:
    """Return the dtype of the stored value, regardless of any autocast scope."""
    # Unless jax_enable_x64 is set, JAX stores a variable that Keras calls int64 or float64 in 32 bits.
    dtype: np.dtype[Any] = jax.dtypes.canonicalize_dtype(np.dtype(getattr(jax.numpy, variable._dtype)))
    return dtype


def set_layout(variable: Variable, layout: Layout, devices: Sequence[jax.Device]) -> None:
    """Set the variable's layout; an existing value stays where it is.

    Raises:
        LayoutError: When the layout does not divide the variable's shape.
        MeshError: When the numbers of devices and mesh positions differ.
    """
    layout.shard_shape(tuple(variable.shape))
    variable._layout = named_sharding(layout, devices)


def sharding_of(variable: Variable) -> Any:
    """Return the ``jax.sharding.Sharding`` for the variable's layout, ``None`` if it has no layout."""
    return getattr(variable._layout, "backend_layout", variable._layout)


def set_sharding(variable: Variable, sharding: Any) -> None:
    """Like `set_layout`, for an existing sharding."""
    variable._layout = sharding


def direct_assign(variable: Variable, array: jax.Array) -> None:
    """Make ``array`` the variable's value: the same buffers, no copy, no transfer.

    Raises:
        MismatchError: When shape, dtype or sharding differ from the variable's own.
    """
    wanted, sharding = stored_dtype(variable), sharding_of(variable)
    if tuple(array.shape) != tuple(variable.shape) or array.dtype != wanted:
        raise MismatchError(
            f"Cannot assign {array.dtype} {array.shape} to variable {variable.path!r}: expected {wanted} "
            f"{tuple(variable.shape)}"
        )
    if sharding is not None and not array.sharding.is_equivalent_to(sharding, array.ndim):
        raise MismatchError(
            f"Cannot assign an array on {array.sharding} to variable {variable.path!r}: expected {sharding}"
        )
    variable._value = array
    forget_initializer(variable)


def forget_initializer(variable: Variable) -> None:
    """Remove the recorded initialiser of a variable that has a value."""
    if variable._value is not None and isinstance(variable._initializer, PendingValue):
        variable._initializer = None


def drop_value(variable: Variable) -> None:
    """Release the variable's value, so that its memory is free before a load replaces it."""
    if variable._value is not None:
        variable._value = None
        # Without an initialiser: a loaded weight must not silently become a random one.
        variable._initializer = PendingValue(None, variable.path)


def value_of(variable: Variable) -> jax.Array:
    """Return the array the variable stores, regardless of any autocast scope."""
    # Reading a variable without a value raises the error that says what to do.
    if variable._value is None:
        variable.value  # noqa: B018
    array: jax.Array = variable._value
    return array


def relocate(variable: Variable, sharding: Any) -> None:
    """Set the variable's layout and move its value there, if it has one."""
    variable._layout = sharding
    # Not is_equivalent_to: an equivalent sharding of another mesh would clash with that mesh in one program.
    value = variable._value
    if value is None or value.sharding == sharding:
        return
    if value.is_fully_addressable and not sharding.is_fully_addressable:
        # device_put cannot move to devices of other processes; each process provides its own shards.
        host = np.asarray(value)
        require_agreement([host], variable.path, sharding)
        variable._value = jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])
    else:
        variable._value = jax.device_put(value, sharding)


def release_from_mesh(variable: Variable, *, committed: bool) -> bool:
    """Make a value on a mesh of one device an ordinary array with the same buffer, as Keras has it without a layout.

    Args:
        variable: Any variable; it stays unchanged if it has a layout or its value is on no mesh.
        committed: Whether JAX refuses to combine the array with arrays on other devices.

    Returns:
        Whether there was anything to do.
    """
    value = variable._value
    if variable._layout is not None or not isinstance(getattr(value, "sharding", None), jax.sharding.NamedSharding):
        return False
    # JAX has no public function for this: `device_put` on a device commits the array to it.
    (shard,) = value.addressable_shards
    variable._value = ArrayImpl(shard.data.aval, shard.data.sharding, [shard.data], committed=committed)
    return True


def unique(found: Iterable[Variable]) -> list[Variable]:
    """Return each variable once, by identity, in order of first appearance."""
    return list({id(v): v for v in found}.values())


def numbered(names: Iterable[str]) -> list[str]:
    """Make names unique: append ``#2``, ``#3`` and so on where they repeat."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return found


def initialise_eagerly(variable: Variable, initializer: Callable[..., Any]) -> None:
    """Initialise as Keras would, on one device or by the initialiser's own ``layout`` argument."""
    variable._value = None
    variable._initialize_with_initializer(initializer)
    variable._initializer = None


def current_value(variable: Variable) -> jax.Array | None:
    """Return the array the variable stores now, or ``None``."""
    value: jax.Array | None = variable._value
    return value


def restore_value(variable: Variable, value: jax.Array | None, initializer: Any) -> None:
    """Undo an assignment: restore the previous value and recorded initialiser."""
    variable._value = value
    variable._initializer = initializer
