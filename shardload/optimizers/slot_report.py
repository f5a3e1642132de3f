"""The layouts of an optimizer's state, before and after it was spread."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import Any

from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, plural


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """One variable of an optimizer that has the shape of a weight, or of its rows or columns."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the whole value."""
    before: Layout
    """The layout of its weight, which it has unless it is spread."""
    after: Layout
    """Its layout now."""
    why: str = ""
    """Why an axis does not split it; empty if every axis does."""

    @property
    def is_spread(self) -> bool:
        """Whether it is split over more axes than its weight."""
        return self.before != self.after

    @property
    def device_bytes_before(self) -> int:
        """Bytes on each device in the layout ``before``."""
        return self.nbytes // math.prod(self.before.parts)

    @property
    def device_bytes(self) -> int:
        """Bytes on each device now."""
        return self.nbytes // math.prod(self.after.parts)

    def to_json(self) -> dict[str, Any]:
        """Return an object for `json.dumps`."""
        plain = {name: getattr(self, name) for name in ("path", "nbytes", "device_bytes_before", "device_bytes", "why")}
        return plain | {"shape": list(self.shape), "before": str(self.before), "after": str(self.after)}


@dataclass(frozen=True, slots=True)
class SlotReport:
    """What `shardload.shard_optimizer` did to the slots of one optimizer."""

    optimizer: str
    """Its name."""
    mesh: MeshSpec | None
    """``None`` while no weight is on a mesh."""
    axes: tuple[str, ...]
    """The axes over which slots are spread."""
    slots: tuple[SlotLayout, ...] = ()
    """Empty while the optimizer is not built: its slots are spread as they are created."""

    @property
    def spread(self) -> tuple[SlotLayout, ...]:
        """Slots that are split over more axes than their weight."""
        return tuple(slot for slot in self.slots if slot.is_spread)

    @property
    def not_spread(self) -> tuple[SlotLayout, ...]:
        """Slots that an axis could not split; each says why."""
        return tuple(slot for slot in self.slots if slot.why)

    @property
    def device_bytes_before(self) -> int:
        """Bytes of all slots on each device, if they follow their weights."""
        return sum(slot.device_bytes_before for slot in self.slots)

    @property
    def device_bytes(self) -> int:
        """Bytes of all slots on each device now."""
        return sum(slot.device_bytes for slot in self.slots)

    def to_json(self) -> dict[str, Any]:
        """Return an object for `json.dumps`."""
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
