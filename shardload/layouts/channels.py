"""Roles of the variables of convolutions and of recurrent cells."""

from __future__ import annotations

from typing import Any

from shardload.layouts.model_variables import is_kind
from shardload.layouts.role import Dim, Follows, Role, Wants


def conv_roles(layer: Any, own: dict[str, Any]) -> dict[int, Role]:
    """Split a convolution by its output channels, else by its input channels; its bias follows."""
    kernel = own["kernel"]
    last = len(kernel.shape) - 1
    # A depthwise kernel ends in (channels, multiplier), a transposed one in (outputs, inputs): there the next to last
    # is the one to split.
    first, second = ("output channels", "input channels") if is_kind(layer, "BaseConv") else ("channels",) * 2
    order = (last, last - 1) if is_kind(layer, "BaseConv") else (last - 1, last)
    found: dict[int, Role] = {
        id(kernel): Wants("channels", (Dim(order[0], first), Dim(order[1], second))),
    }
    # A depthwise bias has channels x multiplier entries: it follows only if the multiplier is 1.
    if (bias := own.get("bias")) is not None and bias.shape[0] == kernel.shape[order[0]]:
        found[id(bias)] = Follows("bias", kernel, (order[0],))
    return found


def separable_roles(own: dict[str, Any]) -> dict[int, Role]:
    """Split the second kernel by its output channels; where a pair splits it by its inputs, the first one follows."""
    pointwise, depthwise = own["pointwise_kernel"], own["depthwise_kernel"]
    inputs, outputs = len(pointwise.shape) - 2, len(pointwise.shape) - 1
    found: dict[int, Role] = {
        id(pointwise): Wants("column", (Dim(outputs, "output channels"), Dim(inputs, "input channels"))),
        id(depthwise): Follows("depthwise", pointwise, (*(None,) * inputs, inputs, None)),
    }
    if "bias" in own:
        found[id(own["bias"])] = Follows("bias", pointwise, (outputs,))
    return found


def recurrent_roles(own: dict[str, Any]) -> dict[int, Role]:
    """Split both kernels by their outputs: each device has its units, and gathers all of them for the next step."""
    features = (Dim(1, "output features"), Dim(0, "input features"))
    found: dict[int, Role] = {id(v): Wants("column", features) for v in own.values() if len(v.shape) == 2}
    if "bias" in own and "kernel" in own:
        found[id(own["bias"])] = Follows("bias", own["kernel"], (1,))
    return found
