"""The current layout of an existing model, which a load without ``mesh`` keeps.

every value on one device              ─► a 1x1 mesh on that device
layouts or values over one mesh        ─► that mesh and those layouts; values on one device count as replicated
every value lost to a failed load      ─► their previous mesh (`ModelRecord.devices`)
no values                              ─► no current mesh: the load chooses one
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from shardload.errors import MeshError
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.variables import has_value, sharding_of, value_of
from shardload.layouts.choice import KEEP_LAYOUT, LayoutChoice, VariableLayout
from shardload.layouts.model_variables import all_variables
from shardload.sharding.devices import MeshDevices
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.units import plural


def current_devices(model: Any) -> MeshDevices | None:
    """Return the mesh that a model is on, ``None`` if it is on none yet.

    Raises:
        MeshError: When its variables are spread over several meshes.
    """
    shardings = [s for v in all_variables(model).values() if (s := _sharding(v)) is not None]
    meshes = {s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)}
    if len(meshes) > 1:
        raise MeshError(
            f"The variables of {model.name!r} are spread over {plural(len(meshes), 'mesh')}; say which one with mesh="
        )
    if not shardings:
        return record_of(model).devices
    return _of_mesh(meshes.pop()) if meshes else _of_devices(shardings)


def _sharding(variable: Any) -> Any:
    # The layout that a variable has been given counts first: an abstract variable has no value to look at.
    wanted = sharding_of(variable)
    return value_of(variable).sharding if wanted is None and has_value(variable) else wanted


def _of_mesh(mesh: jax.sharding.Mesh) -> MeshDevices:
    return MeshDevices(MeshSpec(tuple(map(str, mesh.axis_names)), tuple(mesh.devices.shape)), tuple(mesh.devices.flat))


def _of_devices(shardings: Sequence[Any]) -> MeshDevices:
    # Values on several single devices count as on the first: a load moves them all to one.
    found = sorted({d for s in shardings for d in s.device_set}, key=lambda d: d.id)
    return MeshDevices(MeshSpec(DEFAULT_AXES, (1, 1)), tuple(found[:1]))


def current_layout(model: Any, devices: MeshDevices) -> LayoutChoice:
    """Return the layouts that the variables have on the model's current mesh."""
    variables = all_variables(model).items()
    by_id = {key: VariableLayout.of(v, _layout(v, devices.mesh), KEEP_LAYOUT) for key, v in variables}
    return LayoutChoice(devices.mesh, KEEP_LAYOUT, by_id)


def _layout(variable: Any, mesh: MeshSpec) -> Layout:
    rank, sharding = len(variable.shape), _sharding(variable)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return Layout.replicated(mesh, rank)
    return Layout.of_spec(mesh, sharding.spec, rank)
