"""The current layout of an existing model, which a load without ``mesh`` keeps.

every value on one device              ─► a 1x1 mesh on that device
layouts or values over one mesh        ─► that mesh and those layouts; values on one device count as replicated
every value lost to a failed load      ─► their previous mesh (`ModelRecord.devices`)
no values                              ─► no current mesh: the load chooses one
"""

from __future__ import annotations

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
    if meshes:
        mesh = meshes.pop()
        spec = MeshSpec(tuple(map(str, mesh.axis_names)), tuple(mesh.devices.shape))
        return MeshDevices(spec, tuple(mesh.devices.flat))
    # Values on several single devices count as on the first: a load moves them all to one.
    first = min((d for s in shardings for d in s.device_set), key=lambda d: d.id)
    return MeshDevices(MeshSpec(DEFAULT_AXES, (1, 1)), (first,))


def _sharding(variable: Any) -> Any:
    # The layout that a variable has been given counts first: an abstract variable has no value.
    wanted = sharding_of(variable)
    return value_of(variable).sharding if wanted is None and has_value(variable) else wanted


def current_layout(model: Any, devices: MeshDevices) -> LayoutChoice:
    """Return the layouts that the variables have on the model's current mesh."""
    by_id = {}
    for key, variable in all_variables(model).items():
        sharding = _sharding(variable)
        spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else ()
        layout = Layout.of_spec(devices.mesh, spec, len(variable.shape))
        by_id[key] = VariableLayout.of(variable, layout, KEEP_LAYOUT)
    return LayoutChoice(devices.mesh, KEEP_LAYOUT, by_id)
