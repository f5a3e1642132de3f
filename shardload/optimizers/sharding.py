"""ZeRO-1: spread the state of an optimizer over the axis that splits the batch.

A slot follows its weight, so all devices along the batch axis have a copy of it. Once spread, each has a part::

    mesh batch=2,model=4      weight (-, model)   Adam's two slots follow it    2 x 1/4 on each device
                                                  spread over batch             2 x 1/8 on each device

XLA then updates one part of the weight on each device and gathers the parts: one all-gather for each weight and step.
Layouts of weights and gradients do not change, and neither do results.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras

from shardload.errors import LayoutError, UsageError, suggests_arguments
from shardload.keras_bridge import optimizer_slots
from shardload.keras_bridge.binding import binding_of, forget_compiled
from shardload.keras_bridge.optimizer_slots import SlotSpread, layout_of, place_slot
from shardload.keras_bridge.variables import stored_dtype
from shardload.optimizers.slot_report import SlotLayout, SlotReport
from shardload.sharding.layout import Layout, why_not_spread
from shardload.sharding.mesh import MeshSpec
from shardload.units import check_kind

_OWN_SHAPE = "its shape differs from that of its weight"


@suggests_arguments
def shard_optimizer(target: Any, *, axis: str | Sequence[str] | None = None) -> SlotReport:
    """Spread the slots of any Keras optimizer over the batch axis too, as ZeRO-1 does. Results stay the same.

    Existing slots move now; slots created later, also by `shardload.restore`, are spread as they are created. The
    optimizer keeps its class, and what it saves does not depend on the spread.

    Args:
        target: A compiled model, whose optimizer is built if its weights are on a mesh; or an optimizer that no
            model has trained with yet.
        axis: One or more mesh axes; by default the one that splits the batch. ``()`` makes slots follow their weights
            again.

    Returns:
        The layout of each slot before and after, and why some cannot be spread.

    Raises:
        UsageError: If ``target`` has no optimizer.
        LayoutError: If the optimizer is built for weights that are on no mesh.
        MeshError: If the mesh has no such axis.
    """
    if not isinstance(axis, list | tuple):
        check_kind("axis", axis, str | None, "the name of a mesh axis, or a list of names")
    optimizer, model = _optimizer_of(target)
    axes = (axis,) if isinstance(axis, str) else None if axis is None else tuple(axis)
    return spread_slots(optimizer, SlotSpread("batch" if axes is None else axes), model=model)


def spread_slots(optimizer: Any, chosen: SlotSpread, *, model: Any = None) -> SlotReport:
    """Spread the slots of an optimizer as chosen; see `shard_optimizer`."""
    batch_axis = _batch_axis(model)
    weights = _weights(optimizer, model)
    mesh = _mesh(optimizer, weights)
    axes = () if mesh is None else chosen.on(mesh, batch_axis)
    # Raises for an unknown axis, before anything changes.
    for name in axes:
        if mesh is not None:
            mesh.axis_size(name)
    optimizer_slots.set_spread(optimizer, chosen if chosen.axes else None)
    if mesh is None:
        return SlotReport(optimizer.name, None, chosen.axes if isinstance(chosen.axes, tuple) else ())
    if model is not None and not optimizer.built:
        _build(optimizer, model)
        # Again: a MultiOptimizer may find its optimizers, by a function of the variable, only while it is built.
        optimizer_slots.set_spread(optimizer, chosen if chosen.axes else None)
    slots = tuple(_place(slot, weight, axes) for slot, weight in optimizer_slots.slots_in(optimizer))
    # A compiled train step has the old layouts of its arguments in it.
    if model is not None:
        forget_compiled(model)
    return SlotReport(optimizer.name, mesh, axes, (*slots, *_others(optimizer, mesh)))


def _optimizer_of(target: Any) -> tuple[Any, Any]:
    if hasattr(target, "apply_gradients"):
        return target, None
    optimizer = getattr(target, "optimizer", None)
    if optimizer is not None:
        return optimizer, target
    if isinstance(target, keras.Model):
        raise UsageError(
            f"Cannot shard the optimizer of {target.name!r}: the model is not compiled. Call compile() first, or pass "
            "the optimizer"
        )
    raise UsageError(f"Cannot shard the optimizer of {target!r:.60}: expected a compiled model or a Keras optimizer")


def _batch_axis(model: Any) -> str | None:
    binding = None if model is None else binding_of(model)
    return None if binding is None else str(binding.distribution.batch_dim_name)


def _weights(optimizer: Any, model: Any) -> list[Any]:
    if model is not None and not optimizer.built:
        return list(model.trainable_variables) if getattr(model, "built", False) else []
    return [weight for _, weight in optimizer_slots.slots_in(optimizer)]


def _mesh(optimizer: Any, weights: Sequence[Any]) -> MeshSpec | None:
    """Return the mesh of the weights; ``None`` while the optimizer has no slots and no weight is on a mesh."""
    layouts = [layout_of(weight) for weight in weights]
    found = next((layout for layout in layouts if layout is not None), None)
    if found is None and optimizer.built and weights:
        raise LayoutError(
            f"Cannot spread the slots of {optimizer.name!r}: its weights, such as {weights[0].path!r}, are on no mesh. "
            "Load the model with mesh='8x1', or build it under a distribution of keras.distribution"
        )
    return None if found is None else found.mesh


def _build(optimizer: Any, model: Any) -> None:
    binding = binding_of(model)
    if binding is None:
        optimizer.build(model.trainable_variables)
        return
    with binding.scope():
        optimizer.build(model.trainable_variables)


def _place(slot: Any, weight: Any, axes: Sequence[str]) -> SlotLayout:
    before, shape = layout_of(weight), tuple(map(int, slot.shape))
    if before is None:
        raise LayoutError(
            f"Cannot spread {slot.path!r}: its weight {weight.path!r} is on no mesh, expected the mesh of the other "
            "weights. Load the whole model with one mesh"
        )
    after = SlotSpread(tuple(axes)).applied(before, shape)
    place_slot(slot, weight, after)
    return SlotLayout(slot.path, shape, _nbytes(slot), before, after, why_not_spread(before, shape, axes))


def _others(optimizer: Any, mesh: MeshSpec) -> list[SlotLayout]:
    """Return the state that is not of its weight's shape: Adafactor's rows and columns."""
    # Keras creates these without a reference to a weight, so there is no layout to spread.
    slots = {id(slot) for slot, _ in optimizer_slots.slots_in(optimizer)}
    others = [v for v in optimizer.variables if id(v) not in slots and len(v.shape)]
    found = []
    for variable in others:
        layout = layout_of(variable) or Layout.replicated(mesh, len(variable.shape))
        shape = tuple(map(int, variable.shape))
        found.append(SlotLayout(variable.path, shape, _nbytes(variable), layout, layout, _OWN_SHAPE))
    return found


def _nbytes(variable: Any) -> int:
    return stored_dtype(variable).itemsize * math.prod(map(int, variable.shape))
