"""Find the smallest mesh on which a model fits with searched layouts."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from numbers import Integral
from typing import Any

from shardload.errors import DoesNotFitError
from shardload.layout_search.hardware import Hardware
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.optimizer_memory import OptimizerNeeds
from shardload.layout_search.searching import (
    BATCH_PER_POSITION,
    LayoutSearch,
    check_built,
    check_positive,
)
from shardload.layout_search.tracing import Recorded, check_rows, input_specs, rows_of
from shardload.layouts.roles import nbytes
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.units import check_kind

MAX_DEVICES = 4096
"""The most devices that the search for the smallest mesh tries."""


def search_smallest_mesh(
    model: Any,
    device_memory_bytes: int,
    *,
    inputs: Any = None,
    arguments: Mapping[str, Any] | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    optimizer: Any = None,
    hardware: Hardware | None = None,
    max_devices: int = MAX_DEVICES,
) -> LayoutPlan | None:
    """Find the smallest mesh on which a step fits, with the layouts that make it fastest there.

    Tries 1, 2, 4, … devices as ``batch`` times ``model``; of several shapes that fit, the fastest is taken. The batch
    is the same on all of them, so every device of a larger ``batch`` axis has fewer rows of it.

    Args:
        model: A built Keras model.
        device_memory_bytes: As in `search`.
        inputs: As in `search`; with ``batch`` rows (8) by default.
        arguments: As in `search`.
        batch: As in `search`.
        sequence: As in `search`.
        optimizer: As in `search`.
        hardware: As in `search`.
        max_devices: The largest number of devices to try.

    Returns:
        The plan on that mesh, or ``None`` where none of them has enough memory.

    Raises:
        LayoutError: When the model cannot be traced, or the hardware has rates of other axes.
        UsageError: When an argument is of the wrong kind.
    """
    check_built(model)
    for argument, value in (("device_memory_bytes", device_memory_bytes), ("max_devices", max_devices)):
        check_kind(argument, value, Integral, "a positive integer")
    check_positive(batch=batch, sequence=sequence, device_memory_bytes=device_memory_bytes, max_devices=max_devices)
    hardware = Hardware.of(hardware)
    hardware.check(MeshSpec(DEFAULT_AXES, (1, 1)))
    if inputs is None:
        inputs = input_specs(model, batch=batch or BATCH_PER_POSITION, sequence=sequence)
    check_rows(model, inputs, batch)
    search = LayoutSearch(model, inputs, arguments=arguments, optimizer=optimizer, hardware=hardware)
    return smallest_mesh_plan(search, device_memory_bytes, max_devices)


def smallest_mesh_plan(search: LayoutSearch, device_memory_bytes: int, max_devices: int) -> LayoutPlan | None:
    """Return the plan on the smallest mesh on which a traced step fits, or ``None``; see `search_smallest_mesh`.

    Args:
        search: The traced step.
        device_memory_bytes: Hard limit for each device.
        max_devices: The largest number of devices to try.
    """
    if search.needs.update_bytes >= device_memory_bytes:
        return None  # no layout makes this smaller
    lengths = {int(n) for variable in search.recorded.variables for n in variable.shape}
    for devices in _powers(max_devices, start=_fewest(search.recorded, search.needs, device_memory_bytes)):
        found = []
        # More devices can need more memory, where a dim does not divide any more, and still more devices less again.
        for mesh in _shapes(devices, rows=_rows(search.inputs), lengths=lengths):
            with suppress(DoesNotFitError):
                found.append(search.on(mesh, device_memory_bytes=device_memory_bytes))
        if found:
            return min(found, key=lambda plan: plan.step_s)
    return None


def _fewest(recorded: Recorded, needs: OptimizerNeeds, device_memory_bytes: int) -> int:
    """Return a lower bound on the number of devices: all state, split evenly over them."""
    total = 0.0
    for at, variable in enumerate(recorded.variables):
        trained = recorded.training and at < recorded.trainable
        # A trained weight has a gradient of its own size.
        total += nbytes(variable) * (2 if trained else 1)
        total += sum(s.nbytes for s in needs.slots.get(id(variable), ()) if s.follows != "nothing")
    return int(total // max(device_memory_bytes, 1))


def _powers(most: int, *, start: int) -> Iterator[int]:
    devices = 1
    while devices <= most:
        if devices >= start:
            yield devices
        devices *= 2


def _shapes(devices: int, *, rows: int, lengths: Collection[int]) -> Iterator[MeshSpec]:
    """Yield the meshes of ``devices`` devices whose axes split something.

    Args:
        devices: A power of two.
        rows: What the batch axis must divide.
        lengths: Of the dims of all variables: the other axis must divide one of them.
    """
    batch = 1
    while batch <= devices:
        model = devices // batch
        if rows % batch == 0 and (model == 1 or any(n % model == 0 for n in lengths)):
            yield MeshSpec(DEFAULT_AXES, (batch, model))
        batch *= 2


def _rows(inputs: Any) -> int:
    """Return what a batch axis must divide; an input of one row stays whole."""
    return math.gcd(*(rows_of(inputs) - {1})) or 1
