"""ZeRO-1: spread the state of an optimizer over the axis that splits the batch.

A slot (state of one weight, such as Adam's first moment) has its weight's layout, so all devices along the batch axis
have a copy of it. Once the slot is spread, each device has a part::

    mesh batch=2,model=4      weight (-, model)   Adam's two slots follow it    2 x 1/4 on each device
                                                  spread over batch             2 x 1/8 on each device

XLA then updates one part of the weight on each device and gathers the parts: one all-gather for each weight and step.
Layouts of weights and gradients do not change, and neither do results.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import keras

from shardload.errors import LayoutError, UsageError, suggests_arguments
from shardload.keras_bridge import optimizer_slots
from shardload.keras_bridge.binding import binding_of, forget_compiled
from shardload.keras_bridge.optimizer_slots import SlotSpread, place_slot, variable_layout
from shardload.keras_bridge.variables import stored_dtype
from shardload.reports.markup import ShownAsText
from shardload.sharding.layout import Layout, why_not_spread
from shardload.sharding.mesh import MeshSpec
from shardload.units import check_kind, format_bytes, plural

_OWN_SHAPE = "its shape differs from that of its weight"


@suggests_arguments
def shard_optimizer(target: Any, *, axis: str | Sequence[str] | None = None) -> SlotReport:
    """Spread the slots of any Keras optimizer over the batch axis too, as ZeRO-1 does. Results stay the same.

    Slots are state with the shape of a weight, such as Adam's moments. Existing slots move now; later ones, also of
    `shardload.restore`, are spread as they are created. The optimizer keeps its class, and what it saves does not
    depend on the spread.

    Examples:
        ```python
        shardload.restore(model, "checkpoints", mesh="2x4")
        print(shardload.shard_optimizer(model))
        ```

    Args:
        target: A compiled model, or an optimizer that no model has trained with yet. If the weights of the model are
            on a mesh and its optimizer has no slots yet, this call creates them, already spread.
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
    model = None if hasattr(target, "apply_gradients") else target
    optimizer = target if model is None else getattr(model, "optimizer", None)
    if optimizer is None and isinstance(target, keras.Model):
        raise UsageError(
            f"Cannot shard the optimizer of {target.name!r}: the model is not compiled. Call compile() first, or pass "
            "the optimizer"
        )
    if optimizer is None:
        what = "expected a compiled model or a Keras optimizer"
        raise UsageError(f"Cannot shard the optimizer of {target!r:.60}: {what}")
    axes = (axis,) if isinstance(axis, str) else None if axis is None else tuple(axis)
    return spread_slots(optimizer, SlotSpread("batch" if axes is None else axes), model=model)


def spread_slots(optimizer: Any, chosen: SlotSpread, *, model: Any = None) -> SlotReport:
    """Spread the slots of an optimizer over the mesh axes that ``chosen`` names, and report the layouts."""
    binding = None if model is None else binding_of(model)
    mesh = _mesh(optimizer, model)
    batch_axes = None if binding is None else binding.distribution.batch_axes
    axes = () if mesh is None else chosen.on(mesh, batch_axes)
    # Raises for an unknown axis, before anything changes.
    for name in axes:
        if mesh is not None:
            mesh.axis_size(name)
    optimizer_slots.set_spread(optimizer, chosen if chosen.axes else None)
    if mesh is None:
        return SlotReport(optimizer.name, None, chosen.axes if isinstance(chosen.axes, tuple) else ())
    if model is not None and not optimizer.built:
        with nullcontext() if binding is None else binding.scope():
            optimizer.build(model.trainable_variables)
        # Again: a MultiOptimizer may find its optimizers, by a function of the variable, only while it is built.
        optimizer_slots.set_spread(optimizer, chosen if chosen.axes else None)
    slots = tuple(_place(slot, weight, axes) for slot, weight in optimizer_slots.slots_in(optimizer))
    # A compiled train step has the old layouts of its arguments in it.
    if model is not None:
        forget_compiled(model)
    return SlotReport(optimizer.name, mesh, axes, (*slots, *_others(optimizer, mesh)))


def _mesh(optimizer: Any, model: Any) -> MeshSpec | None:
    """Return the mesh of the weights, or ``None`` if they are on none yet; raise if they are on none but have slots."""
    if model is not None and not optimizer.built:
        weights = list(model.trainable_variables) if getattr(model, "built", False) else []
    else:
        weights = [weight for _, weight in optimizer_slots.slots_in(optimizer)]
    layouts = [variable_layout(weight) for weight in weights]
    found = next((layout for layout in layouts if layout is not None), None)
    if found is None and optimizer.built and weights:
        raise LayoutError(
            f"Cannot spread the slots of {optimizer.name!r}: its weights, such as {weights[0].path!r}, are on no mesh. "
            "Load the model with mesh='8x1', or build it under a distribution of keras.distribution"
        )
    return None if found is None else found.mesh


def _place(slot: Any, weight: Any, axes: Sequence[str]) -> SlotLayout:
    before, shape = variable_layout(weight), tuple(map(int, slot.shape))
    if before is None:
        raise LayoutError(
            f"Cannot spread {slot.path!r}: its weight {weight.path!r} is on no mesh, expected the mesh of the other "
            "weights. Load the whole model with one mesh"
        )
    after = SlotSpread(tuple(axes)).applied(before, shape)
    place_slot(slot, weight, after)
    return SlotLayout(slot.path, shape, _nbytes(slot), before, after, why_not_spread(before, shape, axes))


def _others(optimizer: Any, mesh: MeshSpec) -> list[SlotLayout]:
    """Return the layouts of state that is never spread: its shape is not that of its weight (Adafactor's rows)."""
    # Keras creates these without a reference to a weight, so there is no layout to spread.
    slots = {id(slot) for slot, _ in optimizer_slots.slots_in(optimizer)}
    others = [v for v in optimizer.variables if id(v) not in slots and len(v.shape)]
    found = []
    for variable in others:
        layout = variable_layout(variable) or Layout.replicated(mesh, len(variable.shape))
        shape = tuple(map(int, variable.shape))
        found.append(SlotLayout(variable.path, shape, _nbytes(variable), layout, layout, _OWN_SHAPE))
    return found


def _nbytes(variable: Any) -> int:
    return stored_dtype(variable).itemsize * math.prod(map(int, variable.shape))


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """How one variable of an optimizer's state is split over devices, before and after `shard_optimizer`."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the whole variable, over all devices."""
    before: Layout
    """The layout of the slot's weight, which the slot has, too, unless it is spread."""
    after: Layout
    why: str = ""
    """Why one of the requested mesh axes does not split the slot; empty if all of them do."""

    @property
    def is_spread(self) -> bool:
        """Whether the slot is split over more mesh axes than its weight."""
        return self.before != self.after

    @property
    def device_bytes_before(self) -> int:
        """Bytes of the slot on each device in the layout ``before``."""
        return self.nbytes // math.prod(self.before.parts)

    @property
    def device_bytes(self) -> int:
        """Bytes of the slot on each device in the layout ``after``, which it has now."""
        return self.nbytes // math.prod(self.after.parts)

    def to_json(self) -> dict[str, Any]:
        """Return the fields, with layouts as text, as a dict for `json.dumps`."""
        plain = {name: getattr(self, name) for name in ("path", "nbytes", "device_bytes_before", "device_bytes", "why")}
        return plain | {"shape": list(self.shape), "before": str(self.before), "after": str(self.after)}


@dataclass(frozen=True, slots=True)
class SlotReport(ShownAsText):
    """What `shardload.shard_optimizer` did to the slots of one optimizer."""

    optimizer: str
    mesh: MeshSpec | None
    """The mesh of the weights; ``None`` while no weight is on a mesh."""
    axes: tuple[str, ...]
    """The mesh axes over which slots are spread, besides those that split their weights."""
    slots: tuple[SlotLayout, ...] = ()
    """Each slot with its layout; empty while the optimizer is not built, as slots are spread when they are created."""

    @property
    def spread(self) -> tuple[SlotLayout, ...]:
        """Slots that are split over more mesh axes than their weight."""
        return tuple(slot for slot in self.slots if slot.is_spread)

    @property
    def not_spread(self) -> tuple[SlotLayout, ...]:
        """Slots that are not split over all of ``axes``; ``why`` of each slot says the reason."""
        return tuple(slot for slot in self.slots if slot.why)

    @property
    def device_bytes_before(self) -> int:
        """Bytes of all slots on each device, if each had the layout of its weight."""
        return sum(slot.device_bytes_before for slot in self.slots)

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots on each device now."""
        return sum(slot.device_bytes for slot in self.slots)

    def to_json(self) -> dict[str, Any]:
        """Return the whole report as a dict for `json.dumps`."""
        return {
            "optimizer": self.optimizer,
            "mesh": None if self.mesh is None else str(self.mesh),
            "axes": list(self.axes),
            "device_bytes_before": self.device_bytes_before,
            "device_bytes": self.device_bytes,
            "slots": [slot.to_json() for slot in self.slots],
        }

    def __str__(self) -> str:
        where = "no mesh yet" if self.mesh is None else f"{self.mesh}"
        axes = " and ".join(self.axes) or ("the batch axis" if self.mesh is None else "no further axis")
        if not self.slots:
            return f"{self.optimizer} on {where}: no slots yet; they will be spread over {axes} as they are created"
        lines = [
            f"{self.optimizer} on {where}: {len(self.spread)} of {plural(len(self.slots), 'slot')} spread over {axes}; "
            f"{format_bytes(self.device_bytes)} on each device instead of {format_bytes(self.device_bytes_before)}"
        ]
        # One line for each reason, which many layers share.
        for why, count in Counter(slot.why for slot in self.not_spread).items():
            first = next(slot.path for slot in self.not_spread if slot.why == why)
            others = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"not spread: {first}{others}: {why}")
        return "\n".join(lines)
