"""The devices of a mesh, from a caller's argument (``"1x8"``, a `jax.sharding.Mesh`) or a model's variables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import jax
import numpy as np

from shardload.errors import MeshError, UsageError
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.typing import MeshLike
from shardload.units import plural


@dataclass(frozen=True, slots=True)
class MeshDevices:
    """A mesh, and the device at each of its positions."""

    mesh: MeshSpec
    devices: tuple[Any, ...]
    """The `jax.Device` at each position, row-major; ``None`` for each device of a plan, which need not exist."""

    def __post_init__(self) -> None:
        if len(self.devices) != self.mesh.size:
            raise MeshError(
                f"The mesh {self.mesh} has {plural(self.mesh.size, 'position')}, but "
                f"{plural(len(self.devices), 'device')} were given. Give one device for each position"
            )


def mesh_spec(mesh: MeshLike | MeshSpec | None, *, axes: str | None = None) -> MeshSpec:
    """Return the axes (`MeshSpec`) of any form of mesh that a caller may pass, a Keras distribution included."""
    mesh = mesh_of(mesh)
    match mesh:
        case MeshSpec():
            return mesh
        case str() | int():
            return MeshSpec.parse(str(mesh), axes=axes)
        case tuple() | list():
            return MeshSpec.parse("x".join(map(str, mesh)), axes=axes)
        case Mapping():
            return MeshSpec.parse(",".join(f"{axis}={size}" for axis, size in mesh.items()), axes=axes)
        case jax.sharding.Mesh():
            return MeshSpec(tuple(map(str, mesh.axis_names)), tuple(mesh.devices.shape))
    # A keras.distribution.DeviceMesh, detected without importing Keras.
    if mesh is not None and hasattr(mesh, "axis_names") and hasattr(mesh, "devices"):
        return MeshSpec(tuple(mesh.axis_names), tuple(np.shape(mesh.devices)))
    raise MeshError(f"Cannot read a mesh from {mesh!r}. Write '1x8', 'data=2,model=4', or pass a jax.sharding.Mesh")


def mesh_of(found: Any) -> Any:
    """Return the device mesh of a Keras distribution or LayoutMap; return anything else unchanged."""
    return found.device_mesh if has_mesh(found) else found


def has_mesh(found: Any) -> bool:
    """Whether ``found`` brings its own mesh of devices: an instance of a Keras distribution or LayoutMap."""
    return hasattr(found, "device_mesh") and not isinstance(found, type)


def resolve_devices(
    mesh: MeshLike | MeshSpec | None = None, *, axes: str | None = None, devices: Sequence[Any] | None = None
) -> MeshDevices:
    """Return a mesh with its devices: those given, else the mesh's own, else JAX's first ones.

    Without a mesh, all devices are along the ``model`` axis. Raises a `UsageError` for ``devices`` that are not JAX's.
    """
    mesh, named = mesh_of(mesh), named_devices(mesh, devices)
    if mesh is None:
        found = available() if named is None else named
        return MeshDevices(MeshSpec(DEFAULT_AXES, (1, len(found))), found)
    spec = mesh_spec(mesh, axes=axes)
    if named is not None:
        return MeshDevices(spec, named)
    found = available()
    if spec.size > len(found):
        platform = found[0].platform
        fix = (
            f"Before JAX is first used, call jax.config.update('jax_num_cpu_devices', {spec.size}) to simulate them"
            if platform == "cpu"
            else "Use a smaller mesh, or simulate one on the CPU with JAX_PLATFORMS=cpu (--platform cpu)"
        )
        raise MeshError(
            f"The mesh {spec} needs {plural(spec.size, 'device')}, but this process has {len(found)} ({platform}). "
            f"{fix}."
        )
    # The first ones: a smaller mesh leaves devices idle.
    return MeshDevices(spec, found[: spec.size])


def device_list(devices: Any) -> tuple[jax.Device, ...] | None:
    """Return a caller's ``devices``, a sequence or an array of `jax.Device`, as a tuple; ``None`` stays ``None``."""
    if devices is None:
        return None
    flat = devices.flat if isinstance(devices, np.ndarray) else devices
    found = tuple(flat) if isinstance(flat, Iterable) else ()
    if not found or not all(isinstance(device, jax.Device) for device in found):
        raise UsageError(f"Cannot use devices={devices!r:.60}: expected a list of devices such as jax.devices()[:4]")
    return found


def available() -> tuple[Any, ...]:
    """Return JAX's devices. The first call starts JAX; if that fails, the error says what is installed."""
    try:
        return tuple(jax.devices())
    except (RuntimeError, AssertionError) as error:
        raise not_started(error) from error


def not_started(error: Exception) -> MeshError:
    """Build the error for a JAX backend that failed to start.

    If CUDA was requested and there is no GPU, JAX raises an `AssertionError` without message.
    """
    if "timed out" in str(error) and jax.distributed.is_initialized():
        return MeshError(
            f"JAX could not start: {error}. With jax.distributed, it waits for every process: one of them has ended, "
            "or has not come to its first use of a device"
        )
    asked = jax.config.jax_platforms
    # Drop JAX's own advice: the advice below also names --platform.
    cause = str(error).split(" (set JAX_PLATFORMS")[0].split(" (you may need")[0].strip().rstrip(".")
    cause = cause or "no such device was found on this machine"
    here = ", ".join(["cpu", *sorted(point.name for point in metadata.entry_points(group="jax_plugins"))])
    wanted = f" with JAX_PLATFORMS={asked}" if asked else ""
    return MeshError(
        f"JAX could not start{wanted}: {cause}. Installed here: {here}. To use the CPU, which can simulate any mesh, "
        "set JAX_PLATFORMS=cpu before JAX is imported (--platform cpu on the command line)"
    )


def local_positions(devices: MeshDevices) -> tuple[int, ...]:
    """Return the mesh positions that this process loads: those whose device belongs to no other process."""
    # `None` is a device that is only planned for: a plan covers all positions.
    found = tuple(i for i, d in enumerate(devices.devices) if d is None or d.process_index == jax.process_index())
    if not found:
        raise MeshError(
            f"The mesh {devices.mesh} has none of the {plural(jax.local_device_count(), 'device')} of this process "
            f"({jax.process_index()} of {jax.process_count()}). Use a larger mesh, of "
            f"{plural(jax.device_count(), 'device')}, or pass the devices to use with devices="
        )
    return found


def named_devices(mesh: Any, devices: Sequence[Any] | None) -> tuple[Any, ...] | None:
    """Return the devices that a caller passed, as ``devices`` or in ``mesh``, or ``None``; does not start JAX."""
    if devices is not None:
        return device_list(devices)
    mesh = mesh_of(mesh)
    if isinstance(mesh, jax.sharding.Mesh):
        return tuple(mesh.devices.flat)
    # Keras names devices as text ("cpu:0"); its `backend_mesh` has the `jax.Device`s.
    return tuple(mesh.backend_mesh.devices.flat) if hasattr(mesh, "backend_mesh") else None


def check_shares(devices: MeshDevices) -> None:
    """Raise a `MeshError` unless each process has an equal block of a mesh, as JAX distributes data only over these."""
    # The process of each position, in the shape of the mesh; then the coordinates of each process's positions.
    indices = np.array([device.process_index for device in devices.devices]).reshape(devices.mesh.sizes)
    parts = [np.nonzero(indices == process) for process in range(jax.process_count())]
    counts = [len(part[0]) for part in parts]
    # A part is a block if its lengths along the axes multiply to its number of positions.
    kinds = {tuple(len(set(along)) for along in part) for part in parts}
    if len(kinds) == 1 and counts[0] and math.prod(*kinds) == counts[0]:
        return
    if len(set(counts)) > 1:
        shares = ", ".join(f"process {i} has {n}" for i, n in enumerate(counts[:8])) + (" …" * (len(counts) > 8))
        what = f"of its {plural(devices.mesh.size, 'device')} {shares}"
    else:
        what = f"the {plural(counts[0], 'device')} of a process do not form a block"
    raise MeshError(
        f"The mesh {devices.mesh} cannot be shared evenly by {plural(len(parts), 'process')}: {what}. Use a mesh "
        f"with a whole number of rows or columns for each process, for example 1x{jax.device_count()}, or pass devices="
    )


def abstract_devices(spec: MeshSpec) -> MeshDevices:
    """Return a mesh with ``None`` in place of devices: for planning, where the devices need not exist."""
    return MeshDevices(spec, (None,) * spec.size)
