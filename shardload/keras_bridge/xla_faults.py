"""Layouts that keep XLA from partitioning operations wrong: scatters and convolutions (JAX 0.10.2, also without Keras).

* **Scatters.** XLA pads an array that a mesh does not divide, such as token ids without the last of each row, and does
  not mask the padding in a scatter: on a mesh of two or more axes, it adds the padding to row 0. So does the gradient
  of a lookup, which is a scatter, and so do `segment_sum`, `bincount` and ``x.at[ids].max(y)``. XLA may split as it
  likes what all axes together divide, and dims that the table has, too (``take_along_axis``): their padding falls into
  the table's. Other dims are split over those axes of the batch and of sequences that divide them::

      table[ids[:, :-1]]  ─►  ids and rows: ("data", None) instead of ("data", "sequence")

* **Convolutions.** Where an axis of the mesh splits neither rows, windows nor channels, XLA adds up its copies: the
  kernel's gradient of a convolution in groups is too large. If a dim of its windows is split, other convolutions are
  wrong as well. So dims of windows are whole, unless rows and a sequence take up the mesh; and in a convolution in
  groups, each device convolves its own rows::

      x ("data", None, None), kernel  ─►  shard_map over "data": x * kernel  ─►  y ("data", None, None)
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding, PartitionSpec

from shardload.keras_bridge.patches import Patches, replacing
from shardload.sharding.mesh import MeshSpec

_FREE = PartitionSpec.UNCONSTRAINED


class _OnMesh(NamedTuple):
    mesh: MeshSpec
    batch_axes: tuple[str, ...]
    devices: jax.sharding.Mesh

    @property
    def sequence_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.axes_of("sequence") if axis not in self.batch_axes)

    @property
    def used_axes(self) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh.axes if self.mesh.axis_size(axis) > 1)

    def constrained(self, value: Any, dims: dict[int, Any]) -> Any:
        """Return an array of which some dims have these axes, and XLA chooses those of the others."""
        if not dims:
            return value
        spec = PartitionSpec(*(dims.get(dim, _FREE) for dim in range(value.ndim)))
        return jax.lax.with_sharding_constraint(value, NamedSharding(self.devices, spec))


# Part of the key under which JAX keeps traces: one made outside of the block, such as that of `jax.numpy.take` in a
# search, has none of the constraints.
_ON_MESH: Any = jax.make_user_context(None)


@contextmanager
def avoiding_xla_faults(distribution: Any) -> Iterator[None]:
    """Trace operations inside the block as described above, on the mesh of a `MeshParallel` or the like.

    Under no distribution, or another one, nothing changes.
    """
    if not getattr(distribution, "lays_out_each_batch", False):
        yield
        return
    devices = distribution.device_mesh.backend_mesh
    with _PATCHES.applied(), _ON_MESH(_OnMesh(distribution.mesh, tuple(distribution.batch_axes), devices)):
        yield


def _mesh_of_trace() -> _OnMesh | None:
    # Inside of `jax.shard_map`, arrays are parts on one device.
    on: _OnMesh | None = None if jax.sharding.get_abstract_mesh().manual_axes else _ON_MESH.value
    return on


@replacing
def _scatter(original: Any, operand: Any, indices: Any, updates: Any, **params: Any) -> Any:
    of = params["dimension_numbers"]
    rows = [dim for dim in range(updates.ndim) if dim not in of.update_window_dims]
    shared = of.scatter_indices_batching_dims
    indices = _even(indices, range(indices.ndim - 1), shared)
    return original(operand, indices, _even(updates, rows, shared), **params)


@replacing
def _gather(original: Any, operand: Any, indices: Any, **params: Any) -> Any:
    # Its gradient may be traced after the block has ended, and takes over the layouts of indices and result.
    of = params["dimension_numbers"]
    shared = of.start_indices_batching_dims
    found = original(operand, _even(indices, range(indices.ndim - 1), shared), **params)
    return _even(found, [dim for dim in range(found.ndim) if dim not in of.offset_dims], shared)


def _even(value: Any, rows: Sequence[int], shared: Sequence[int]) -> Any:
    """Return an array whose dims ``rows`` are constrained to axes that divide them, where others would not.

    ``shared`` has the positions in ``rows`` of dims that the table has, too.
    """
    on = _mesh_of_trace()
    if on is None or len(on.used_axes) < 2 or not isinstance(value, jax.core.Tracer):
        return value
    # Which axes may split a dim that they do not all divide together.
    axes = [on.batch_axes, on.sequence_axes] if len(rows) > 1 else [(*on.batch_axes, *on.sequence_axes)]
    dims = {}
    for position, dim in enumerate(rows):
        if position not in shared and value.shape[dim] % on.devices.size:
            some = axes[position] if position < len(axes) else ()
            dims[dim] = on.mesh.splitting(value.shape[dim], some) or None
    if len(rows) > 1 and rows[1] in dims and not {0, 1} & {*shared}:
        n_parts = math.prod(map(on.mesh.axis_size, on.batch_axes))
        if not value.shape[rows[0]] % n_parts and not value.shape[rows[1]] % (on.devices.size // n_parts):
            # With rows split over the axes of the batch, XLA may split a sequence as it likes over the others.
            dims[rows[0]] = on.batch_axes
            del dims[rows[1]]
    return on.constrained(value, dims)


@replacing
def _convolve(original: Any, lhs: Any, rhs: Any, **params: Any) -> Any:
    on = _mesh_of_trace()
    groups, (of_lhs, of_rhs, of_result) = params["feature_group_count"], params["dimension_numbers"]
    if on is None or len(on.used_axes) < (1 if groups > 1 else 2):
        return original(lhs, rhs, **params)
    rows = on.mesh.splitting(lhs.shape[of_lhs[0]], [axis for axis in on.batch_axes if axis in on.used_axes])
    if groups > 1:
        # XLA ends the process where it would split a group. Then channels are whole, else as it likes.
        whole = 1 if groups % math.prod(on.mesh.axis_size(axis) for axis in on.mesh.axes if axis not in rows) else 2
        lhs = on.constrained(lhs, {of_lhs[0]: rows or None, **dict.fromkeys(of_lhs[whole:])})
        if whole == 1:
            rhs = on.constrained(rhs, {of_rhs[0]: None})
        found = _by_rows(original, on, lhs, rhs, axes=rows, params=params) if rows else original(lhs, rhs, **params)
        return on.constrained(found, {of_result[0]: rows or None, **dict.fromkeys(of_result[whole:])})
    if len(on.used_axes) == 2 and {*on.used_axes} <= {*on.batch_axes[:1], *on.sequence_axes}:
        # Rows and sequence take up the mesh. In Keras, rows are the first dim, but in the gradient of a kernel, whose
        # operands have been laid out here.
        if of_lhs[0] != 0:
            return original(lhs, rhs, **params)
        if rows:
            found = original(on.constrained(lhs, {0: rows}), rhs, **params)
            return on.constrained(found, {of_result[0]: rows})
    # Not the kernel: what is constrained is kept for the backward pass, and a kernel may be gathered for this use only.
    found = original(on.constrained(lhs, dict.fromkeys(of_lhs[2:])), rhs, **params)
    return on.constrained(found, dict.fromkeys(of_result[2:]))


def _by_rows(original: Any, on: _OnMesh, lhs: Any, rhs: Any, *, axes: tuple[str, ...], params: dict[str, Any]) -> Any:
    """Convolve each device's rows on that device: so the kernel's gradient is computed there, too, then added up."""
    # Each position along the axes has a kernel of its own, so that XLA adds up the gradients, outside of the function:
    # of a sum inside, in bfloat16, XLA for CPU ends the process.
    kernels = jax.numpy.broadcast_to(rhs, (math.prod(map(on.mesh.axis_size, axes)), *rhs.shape))
    return _convolution_by_rows(original, on.devices, axes, tuple(params.items()))(lhs, kernels)


@functools.lru_cache
def _convolution_by_rows(
    original: Any, devices: jax.sharding.Mesh, axes: tuple[str, ...], params: tuple[tuple[str, Any], ...]
) -> Any:
    of_lhs, _, of_result = dict(params)["dimension_numbers"]

    def rows(dims: Sequence[int]) -> PartitionSpec:
        return PartitionSpec(*(axes if dim == dims[0] else None for dim in range(len(dims))))

    # XLA chooses the layouts along the other axes. JAX runs such a function only when it is compiled.
    return jax.jit(
        jax.shard_map(
            lambda lhs, kernels: original(lhs, kernels[0], **dict(params)),
            mesh=devices,
            in_specs=(rows(of_lhs), PartitionSpec(axes)),
            out_specs=rows(of_result),
            axis_names={*axes},
            check_vma=False,
        )
    )


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
        (jax.lax.conv_general_dilated_p, "bind", _convolve),
        *((primitive, "bind", _scatter) for primitive in _SCATTERS),
    ]
)
