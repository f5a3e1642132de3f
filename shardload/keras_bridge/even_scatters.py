"""Scatters whose updates XLA splits into equal parts only, because it gets those wrong that it has to pad.

XLA (JAX 0.10.2) pads an array that a mesh does not divide, such as token ids without the last of each row, and does not
mask the padding in a scatter: on a mesh of two or more axes, it adds the padding to row 0. So does the gradient of a
lookup, which is a scatter, and so do `segment_sum`, `bincount` and ``x.at[ids].max(y)``. Inside `even_scatters`,
dims that all devices together divide stay as XLA likes them; others are split over those axes of the batch and of
sequences that divide them::

    table[ids[:, :-1]]  ─►  ids and rows: ("data", None) instead of ("data", "sequence")
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardload.keras_bridge.patches import Patches, replacing
from shardload.sharding.mesh import MeshSpec

_FREE = PartitionSpec.UNCONSTRAINED


class _EvenOn(NamedTuple):
    mesh: MeshSpec
    batch_axes: tuple[str, ...]
    on: jax.sharding.Mesh


# Part of the key under which JAX keeps traces: one made outside of the block, such as that of `jax.numpy.take` in a
# search, has none of the constraints.
_EVEN_ON: Any = jax.make_user_context(None)


@contextmanager
def even_scatters(distribution: Any) -> Iterator[None]:
    """Trace scatters and lookups inside the block as described above, on the mesh of a `MeshParallel` or the like.

    Under no distribution, or another one, nothing changes.
    """
    if not getattr(distribution, "lays_out_each_batch", False):
        yield
        return
    mesh = distribution.device_mesh.backend_mesh
    with _PATCHES.applied(), _EVEN_ON(_EvenOn(distribution.mesh, tuple(distribution.batch_axes), mesh)):
        yield


@replacing
def _scatter(original: Any, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
    window = params["dimension_numbers"].update_window_dims
    rows = [dim for dim in range(updates.ndim) if dim not in window]
    return original(operand, _even(indices, range(indices.ndim - 1)), _even(updates, rows), **params)


@replacing
def _gather(original: Any, operand: Any, indices: Any, **params: Any) -> Any:
    # Its gradient may be traced after the block has ended, and takes over the layouts of indices and result.
    window = params["dimension_numbers"].offset_dims
    found = original(operand, _even(indices, range(indices.ndim - 1)), **params)
    return _even(found, [dim for dim in range(found.ndim) if dim not in window])


def _even(value: Any, rows: Sequence[int]) -> Any:
    """Return an array whose dims ``rows`` are constrained to axes that divide them, where others would not."""
    placed: _EvenOn | None = _EVEN_ON.value
    # Inside of `jax.shard_map`, arrays are parts on one device.
    if placed is None or not isinstance(value, jax.core.Tracer) or jax.sharding.get_abstract_mesh().manual_axes:
        return value
    along = [axis for axis in placed.mesh.axes_of("sequence") if axis not in placed.batch_axes]
    axes = [placed.batch_axes, along] if len(rows) > 1 else [(*placed.batch_axes, *along)]
    spec: list[Any] = [_FREE] * value.ndim
    for position, dim in enumerate(rows):
        if value.shape[dim] % placed.mesh.size:
            spec[dim] = placed.mesh.splitting(value.shape[dim], axes[position] if position < len(axes) else ()) or None
    if all(entry is _FREE for entry in spec):
        return value
    return jax.lax.with_sharding_constraint(value, NamedSharding(placed.on, PartitionSpec(*spec)))


_SCATTERS = (
    jax.lax.scatter_p,
    jax.lax.scatter_add_p,
    jax.lax.scatter_sub_p,
    jax.lax.scatter_mul_p,
    jax.lax.scatter_min_p,
    jax.lax.scatter_max_p,
)
_PATCHES = Patches(
    lambda: [
        (jax.lax.gather_p, "bind", _gather),
        *((primitive, "bind", _scatter) for primitive in _SCATTERS),
    ]
)
