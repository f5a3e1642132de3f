"""Devices by id, ``"gpu:0"``, as in `keras.distribution` and in proposals for tensor parallelism in Keras."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from shardload.errors import MeshError, UsageError
from shardload.keras_bridge.caller import warn_caller
from shardload.units import is_integer, plural


def list_devices(device_type: str | None = None) -> list[str]:
    """Return the ids of all devices, those of other processes included.

    Args:
        device_type: ``"cpu"``, ``"gpu"`` or ``"tpu"``; JAX's default platform otherwise.

    Raises:
        MeshError: When there is no such platform here.
    """
    return [device_id(device) for device in _devices(device_type)]


def get_best_devices(count: int = 1, device_type: str | None = None) -> list[str]:
    """Return the ids of the devices to use for ``count`` parts: the first ones, which JAX lists by locality.

    Warns and returns all of them if there are fewer; returns an empty list for a count below one.

    Raises:
        MeshError: As in `list_devices`.
    """
    found = list_devices(device_type)
    if not is_integer(count):
        raise UsageError(f"Cannot use count={count!r:.60}: expected a number of devices")
    if count > len(found):
        warn_caller(f"{plural(count, 'device')} were requested, but there are only {len(found)}")
    return found[: max(0, count)]


def devices_of(ids: str | Sequence[str]) -> list[Any]:
    """Return the `jax.Device`s of ids, or of one id.

    Raises:
        MeshError: When there is no device with one of the ids.
    """
    found = []
    every_id: list[Any] = [ids] if isinstance(ids, str) or not isinstance(ids, Iterable) else list(ids)
    if not all(isinstance(wanted, str) for wanted in every_id):
        raise UsageError(f"Cannot use the devices {ids!r:.60}: expected ids such as 'cpu:0', or a list of them")
    for wanted in every_id:
        platform, _, number = wanted.lower().partition(":")
        every = {device_id(device): device for device in _devices(platform)}
        if (key := f"{platform}:{number}") not in every:
            raise MeshError(f"Cannot find the device {wanted!r}. There are {', '.join(every)}")
        found.append(every[key])
    return found


def device_id(device: Any) -> str:
    """Return the id of a `jax.Device`."""
    return f"{device.platform}:{device.id}"


def _devices(device_type: str | None) -> list[Any]:
    if not isinstance(device_type, str | None):
        raise UsageError(f"Cannot use device_type={device_type!r:.60}: expected 'cpu', 'gpu' or 'tpu'")
    try:
        return list(jax.devices(device_type and device_type.lower()))
    except RuntimeError as error:
        raise MeshError(f"Cannot list devices of type {device_type!r}: {error}") from error
