"""The state of one variable: the Keras variables it consists of, and their shardings on the mesh of the variable."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardload.errors import LayoutError, UsageError
from shardload.keras_bridge.joint_optimizer import JointOptimizer, placement
from shardload.keras_bridge.keras_types import Variable
from shardload.optimizers.matrices import MatrixView
from shardload.optimizers.options import Options
from shardload.sharding.devices import mesh_spec
from shardload.sharding.layout import Layout
from shardload.units import plural

FACTOR_SLOTS = {
    "left_factors": "left_factor",
    "right_factors": "right_factor",
    "left_values": "left_eigenvalues",
    "right_values": "right_eigenvalues",
    "left_vectors": "left_eigenvectors",
    "right_vectors": "right_eigenvectors",
}
SLOTS = {"momentums": "momentum", "velocities": "velocity", **FACTOR_SLOTS}
"""Attributes of the optimizer, and the names of the Keras variables in them. Each is a list with an entry for every
variable, `None` where there is no such state."""


@dataclass(frozen=True, slots=True)
class NewSlot:
    """State to create."""

    slot: str
    """A key of `SLOTS`."""
    shape: tuple[int, ...]
    dtype: str
    sharding: NamedSharding | None


def check_variable(variable: Variable) -> None:
    """Check that a variable can be optimized.

    Raises:
        UsageError: When it is not a Keras variable, does not contain real floating-point numbers, or has no elements.
    """
    if not isinstance(variable, keras.Variable):
        raise UsageError(
            f"Cannot optimize an object of type {type(variable).__name__}: expected a keras.Variable, as in "
            "model.trainable_variables"
        )
    # By name, because NumPy does not count bfloat16 and float8 as floating. Complex dtypes have other names.
    dtype = str(variable.dtype)
    if "float" not in dtype:
        raise UsageError(
            f"Cannot optimize {variable.path!r} of dtype {dtype}: expected a floating-point dtype. Set trainable=False "
            "on its layer, or give it another optimizer with keras.optimizers.MultiOptimizer"
        )
    if 0 in variable.shape:
        raise UsageError(
            f"Cannot optimize {variable.path!r} of shape {tuple(variable.shape)}: expected dims of at least 1. Set "
            "trainable=False on its layer"
        )


def new_slots(variable: Variable, view: MatrixView | None, options: Options) -> Iterator[NewSlot]:
    """Yield the state of a variable: moments of its shape, and each factor with its eigenpairs, split along dim 0.

    Raises:
        LayoutError: When its devices do not divide the length of a factor, with ``uneven="error"``.
    """
    own = placement(variable)
    for slot in ("momentums", "velocities"):
        yield NewSlot(slot, tuple(variable.shape), "float32", own)
    for name, side in zip(("left", "right"), view.factor_sides if view else (), strict=False):
        if side is not None:
            split = _split_state(variable, own, side, options)
            square = (side, side)
            yield NewSlot(f"{name}_factors", square, options.factor_dtype, split)
            yield NewSlot(f"{name}_values", (side,), "float32", split)
            yield NewSlot(f"{name}_vectors", square, "float32", split)


def start_of_slot(slot: str, options: Options) -> Any:
    """Return the initializer of the state in an attribute, counters included.

    L and R start as zeros with every ``init_factor``: the update tells by them that a matrix had no gradient yet.
    """
    if slot.endswith("_vectors"):
        return keras.initializers.Identity()
    starts_at_zero = options.starts_at_rms or not slot.endswith("_values")
    return keras.initializers.Constant(0.0 if starts_at_zero else options.init_factor)


def _split_state(variable: Variable, own: NamedSharding | None, side: int, options: Options) -> NamedSharding | None:
    """Return the sharding of a factor, as `along_first`; with ``uneven="error"``, raise where that would replicate."""
    if own is None:
        return None
    layout = Layout.of_spec(mesh_spec(own.mesh), own.spec, len(variable.shape))
    parts = math.prod(layout.parts)
    if side % parts and options.uneven == "error":
        raise LayoutError(
            f"Cannot shard the factors of {variable.path!r} of shape {tuple(variable.shape)}: a factor of length "
            f"{side} does not divide into {plural(parts, 'part')}, as {own.spec} splits the variable. Replicate such "
            "factors with uneven='replicate', leave the variable to AdamW with adamw_for=, or choose another layout"
        )
    axes = along_first(layout, (side,)).spec[0]
    return NamedSharding(own.mesh, PartitionSpec(axes) if axes else PartitionSpec())


def along_first(layout: Layout, shape: tuple[int, ...]) -> Layout:
    """Return the layout of a factor or its eigenpairs: dim 0 split over all axes that split the variable.

    It is replicated if they do not divide dim 0.
    """
    # Along one dim, whatever dims of the variable the axes split: a factor's rows mix several of those.
    axes = tuple(axis for split in layout.spec for axis in split)
    found = Layout(layout.mesh, (axes, *((),) * (len(shape) - 1)))
    return found if found.divides(shape) else Layout.replicated(layout.mesh, len(shape))


def spec_of(variable: Variable) -> PartitionSpec:
    """Return how a variable is split over its mesh; a variable on no mesh counts as replicated."""
    found = placement(variable)
    return PartitionSpec() if found is None else found.spec


def common_mesh(optimizer: JointOptimizer, variables: Sequence[Variable]) -> Mesh | None:
    """Return the mesh of variables and their state; `None` on one device.

    Raises:
        LayoutError: When they are on different meshes.
    """
    meshes: dict[Mesh, str] = {}
    for variable in variables:
        if (found := placement(variable)) is not None:
            meshes.setdefault(found.mesh, variable.path)
    if len(meshes) > 1:
        (one, first), (other, second), *_ = meshes.items()
        raise LayoutError(
            f"Cannot update with {optimizer.name!r}: {first!r} is on the mesh {_shown(one)}, but {second!r} on "
            f"{_shown(other)}. Restore a step with shardload.restore(model, ..., mesh=...), which moves both, or "
            "compile the model with a new optimizer"
        )
    mesh = next(iter(meshes), None)
    # On one device there is nothing to gather, so the update needs no shard_map.
    return None if mesh is None or mesh.size == 1 else mesh


def _shown(mesh: Mesh) -> str:
    sizes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    return f"{sizes} of devices {mesh.devices.flat[0].id} to {mesh.devices.flat[-1].id}"
