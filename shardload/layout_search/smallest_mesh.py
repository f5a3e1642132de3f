"""Search layouts on meshes of more and more devices, until a step fits.

.on(1x1, limit), .on(1x2, limit), .on(2x1, limit), … ─► the plan on the smallest mesh that fits
"""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, Unpack

from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.search_arguments import (
    EVERYTHING,
    Saving,
    StepOptions,
    check_built,
    check_options,
    check_positive,
)
from shardload.layout_search.searching import BATCH_PER_POSITION, LayoutSearch, traced_step
from shardload.layout_search.tracing import rows_of
from shardload.layouts.model_variables import nbytes
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.units import check_kind

MAX_DEVICES = 4096
"""The most devices that the search for the smallest mesh tries."""


def search_smallest_mesh(
    model: Any, device_memory_bytes: int, *, max_devices: int = MAX_DEVICES, **options: Unpack[StepOptions]
) -> LayoutPlan | None:
    """Find the smallest mesh on which a step fits, with the layouts that make it fastest there.

    Tries meshes of 1, 2, 4, … devices, in all shapes ``batch`` x ``model``. Of several shapes that fit, the fastest is
    taken. The batch has the same rows on all meshes, so with a larger ``batch`` axis each device has fewer of them.

    Examples:
        ```python
        plan = shardload.parallel.search_smallest_mesh(model, 200 << 10, batch=16, optimizer="adamw")
        print(plan)
        ```

    Args:
        model: A built Keras model.
        device_memory_bytes: Hard limit for weights, gradients, slots and activations of each device.
        max_devices: The largest number of devices to try.

    Keyword Args:
        inputs (Any): First argument of the model's ``call``, as in `search`; with ``batch`` rows (8) by default.
        arguments (Mapping[str, Any] | None): Further arguments of ``call``, by name.
        batch (int | None): Rows of the default inputs, over all devices.
        sequence (int | None): Length of open dims of the default inputs (512).
        optimizer (Any): Plan a training step with this optimizer; by default, plan inference.
        hardware (Hardware | None): Rates of devices and links.
        kv_cache (tuple[int, int] | str | None): Rows and tokens of a KV cache to count, as in `search`.

    Returns:
        The plan on that mesh, or ``None`` if no mesh has enough memory.

    Raises:
        LayoutError: When the model cannot be traced, or ``hardware`` has rates of axes that these meshes do not have.
        UsageError: When an argument is of the wrong kind.
    """
    check_options("search_smallest_mesh", options, StepOptions)
    check_built(model)
    for argument, value in (("device_memory_bytes", device_memory_bytes), ("max_devices", max_devices)):
        check_kind(argument, value, Integral, "a positive integer")
    check_positive(device_memory_bytes=device_memory_bytes, max_devices=max_devices)
    step = traced_step(model, MeshSpec(DEFAULT_AXES, (1, 1)), options, rows=BATCH_PER_POSITION)
    return smallest_mesh_plan(step, device_memory_bytes, int(max_devices))


def smallest_mesh_plan(
    search: LayoutSearch, device_memory_bytes: int, max_devices: int, *, saving: Saving = EVERYTHING
) -> LayoutPlan | None:
    """Return the plan on the smallest mesh on which a traced step fits into memory, or ``None`` if it fits on none."""
    if search.optimizer_memory.update_bytes >= device_memory_bytes:
        return None  # no layout makes this smaller
    recorded, slots = search.recorded, search.optimizer_memory.slots
    rows = math.gcd(*(rows_of(search.inputs) - {1})) or 1  # an input of one row stays whole
    lengths = {int(n) for variable in recorded.variables for n in variable.shape}
    state = 0
    for at, variable in enumerate(recorded.variables):
        # A trained weight has a gradient of its own size.
        state += nbytes(variable) * (2 if recorded.training and at < recorded.trainable else 1)
        state += sum(s.nbytes for s in slots.get(id(variable), ()) if s.follows != "nothing")
    # No mesh has less on each device than all state, split evenly.
    fewest = state // max(device_memory_bytes, 1)
    for devices in (1 << n for n in range(max_devices.bit_length())):
        if devices < fewest:
            continue
        # More devices can need more memory, where a dim does not divide any more, and still more devices less again.
        sizes = [(batch, devices // batch) for batch in (1 << n for n in range(devices.bit_length()))]
        # Only meshes whose axes divide the rows, and the length of some dim.
        useful = [(b, m) for b, m in sizes if rows % b == 0 and (m == 1 or any(n % m == 0 for n in lengths))]
        meshes = (MeshSpec(DEFAULT_AXES, one) for one in useful)
        plan, _ = search.fastest_of(meshes, device_memory_bytes, saving=saving)
        if plan is not None:
            return plan
    return None


def mesh_shapes(devices: int, rows: int) -> tuple[MeshSpec, ...]:
    """Return the meshes ``batch`` x ``model`` of so many devices whose batch axis divides ``rows``."""
    sizes = [n for n in range(1, devices + 1) if devices % n == 0 and rows % n == 0]
    return tuple(MeshSpec(DEFAULT_AXES, (batch, devices // batch)) for batch in sizes)
