"""Settings that must be made before JAX and Keras are imported.

KERAS_BACKEND           Keras chooses its backend when it is imported
TensorFlow              is hidden, because KerasHub would import it, which takes 4 s and 600 MB for nothing
C++ log levels          XLA and gRPC read them when their libraries are loaded
JAX_PLATFORMS, devices  JAX fixes its platform and the number of CPU devices when it is first used
"""

from __future__ import annotations

import functools
import os
import sys
import warnings
from collections.abc import Callable
from enum import StrEnum
from importlib import metadata
from typing import Any

from shardload.console import failures
from shardload.console.launch import GiveUp, Processes
from shardload.errors import MeshError
from shardload.sharding.mesh import MeshSpec
from shardload.units import plural

_MAX_SIMULATED = 1024
"""Most CPU devices that one process simulates: starting this many takes a second, and more would show nothing new."""
_TELL: GiveUp = functools.partial(failures.tell, json_wanted=False)


class Platform(StrEnum):
    """Values of the option ``--platform``: the kind of devices to load onto."""

    CPU = "cpu"
    GPU = "gpu"
    TPU = "tpu"


def set_up_jax(*, note: Callable[[str], None]) -> None:
    """Make Keras run on JAX, without TensorFlow and with few log lines; call before Keras or JAX is imported."""
    configured = os.environ.get("KERAS_BACKEND", "jax")
    if configured != "jax":
        note(f"KERAS_BACKEND is {configured!r}, but sharded loading needs JAX; using 'jax' for this command.")
    os.environ["KERAS_BACKEND"] = "jax"
    if os.environ.get("SHARDLOAD_KEEP_TENSORFLOW", "0") in ("", "0"):
        # For a name that is None in sys.modules, `import` raises ModuleNotFoundError. What is imported already stays.
        modules: dict[str, Any] = sys.modules
        for package in ("tensorflow", "tensorflow_text"):
            modules.setdefault(package, None)
    for variable, level in (("TF_CPP_MIN_LOG_LEVEL", "3"), ("GLOG_minloglevel", "3"), ("GRPC_VERBOSITY", "ERROR")):
        os.environ.setdefault(variable, level)
    # `python -W` asks for warnings; others would stand between a user and the results.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def provide_devices(
    mesh: MeshSpec | None,
    *,
    platform: Platform | None,
    note: Callable[[str], None],
    processes: Processes | None = None,
    give_up: GiveUp = _TELL,
) -> Processes | None:
    """Start JAX with the devices that a mesh needs; if the platform is the CPU, simulate that many devices.

    Returns ``processes``, completed with what JAX found out. If the other processes do not connect, calls ``give_up``
    and then ends this process.
    """
    # The order is JAX's: the platform before its import; the peers and the number of CPU devices before it starts.
    if platform is not None:
        os.environ["JAX_PLATFORMS"] = _jax_platforms(platform)
    needed = mesh.size if mesh is not None else 1
    if processes is not None and mesh is not None:
        processes.devices_of(mesh)  # raises before the wait for the others
    import jax

    if processes is not None:
        processes = processes.meet(note=note, give_up=give_up)
    own = processes.devices_of(mesh) if processes is not None and mesh is not None else needed
    simulated = _simulate(jax, min(own or needed, _MAX_SIMULATED))
    if processes is not None:
        # Imported after meet(), which must be the first use of JAX.
        from shardload.processes.joint_call import start_jax

        start_jax()
    try:
        devices = list(jax.devices())
    # JAX raises an AssertionError if CUDA is requested and there is no GPU.
    except (RuntimeError, AssertionError) as error:
        from shardload.sharding.devices import not_started

        raise not_started(error) from error
    found = devices[0].platform
    if platform is not None and found != platform:
        raise MeshError(f"Cannot use --platform {platform}: JAX found only {found} devices on this machine.")
    if len(devices) < needed:
        raise MeshError(_too_few(needed, mesh, devices))
    if processes is not None and len(devices) != needed:
        raise MeshError(
            f"The mesh {mesh} needs {plural(needed, 'device')}, but the processes "
            f"have {len(devices)}, and all must be used. Use a mesh of that size"
        )
    if found == "cpu" and simulated:
        note(f"simulating {needed} CPU devices for the mesh {mesh}; no accelerator is used.")
    return processes


def _jax_platforms(platform: Platform) -> str:
    """Return the value of ``JAX_PLATFORMS`` for ``--platform``. It always includes the CPU, for work on the host."""
    match platform:
        case Platform.CPU:
            return "cpu"
        case Platform.TPU:
            return "tpu,cpu"
    # JAX's own alias "gpu" requires both CUDA and ROCm.
    plugins = " ".join(point.name for point in metadata.entry_points(group="jax_plugins"))
    for kind in ("cuda", "rocm"):
        if kind in plugins:
            return f"{kind},cpu"
    raise MeshError(
        "Cannot use --platform gpu: JAX has no GPU plugin here. Install one, for example with "
        "pip install 'jax[cuda13]', or simulate the mesh with --platform cpu."
    )


def _simulate(jax: Any, needed: int) -> bool:
    """Make JAX simulate ``needed`` CPU devices; return false if it has as many already, or is started and cannot."""
    if needed <= max(int(jax.config.jax_num_cpu_devices), 1):
        return False
    try:
        jax.config.update("jax_num_cpu_devices", needed)
    # JAX is already running, in a program that called `main` itself.
    except RuntimeError:
        return False
    return True


def _too_few(needed: int, mesh: MeshSpec | None, devices: list[Any]) -> str:
    found = devices[0].platform
    has = f"there {'is' if len(devices) == 1 else 'are'} {plural(len(devices), f'{found} device')}"
    here = f"The mesh {mesh} needs {plural(needed, 'device')}"
    if found == "cpu" and needed > _MAX_SIMULATED:
        return (
            f"{here}; on the CPU at most {_MAX_SIMULATED} can be simulated. Use a smaller mesh, or `shardload plan`, "
            "which takes a mesh of any size."
        )
    if found == "cpu":
        return f"{here}, but {has}, and JAX is already running. Use a smaller mesh."
    return (
        f"{here}, but {has} here. Use a mesh of at most {len(devices)}, or add --platform cpu to simulate "
        f"{plural(needed, 'device')}."
    )
