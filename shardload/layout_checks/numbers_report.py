"""The report of `shardload.parallel.check_numbers`: results compared with one device, and misplaced variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from shardload.errors import DisagreementError
from shardload.layout_search.plan_checks import ComparedNumbers
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, plural

_SHOWN = 5
"""Differences that an error or a summary lists."""


@dataclass(frozen=True, slots=True)
class ComparedArray:
    """One array that the sharded model computed, compared with the same array on one device."""

    name: str
    """``output``, ``loss``, ``gradient of dense/kernel``, ``dense/kernel after 5 steps`` …"""
    dtype: str
    elements: int
    largest: float
    """Largest absolute value on one device."""
    max_abs: float
    """Largest absolute difference; infinite if one of the two is not finite where the other is."""
    allowed: float
    """Largest absolute difference that rounding explains."""
    undefined: int = 0
    """Elements that cannot be compared: NaN on one device too, infinite where no element is finite, or made infinite or
    NaN by rounding alone."""

    @property
    def max_rel(self) -> float:
        """The largest difference, relative to the largest value."""
        return self.max_abs / self.largest if self.largest else (math.inf if self.max_abs else 0.0)

    @property
    def differs(self) -> bool:
        """Whether there is a difference that rounding does not explain."""
        return self.max_abs > self.allowed

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference, and every element could be compared."""
        return not self.differs and not self.undefined

    def __str__(self) -> str:
        if self.undefined and not self.differs:
            return (
                f"{self.name} ({self.dtype}): {self.undefined:,} of {plural(self.elements, 'element')} cannot be "
                "compared: NaN or infinite on one device too, or after rounding there"
            )
        return (
            f"{self.name} ({self.dtype}): differs by {self.max_abs:.2e} of {self.largest:.2e}, allowed "
            f"{self.allowed:.2e}"
        )


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A variable whose shards are not the planned ones."""

    path: str
    planned: str
    """The planned layout, as text."""
    found: str
    """The actual sharding, as text."""
    planned_bytes: int
    """Bytes on each device."""
    found_bytes: int
    """Bytes on the device with most."""

    def __str__(self) -> str:
        return (
            f"{self.path}: planned {self.planned} with {plural(self.planned_bytes, 'byte')} per device, found "
            f"{self.found} with {self.found_bytes:,}"
        )


@dataclass(frozen=True, slots=True)
class NumbersCheck:
    """Whether a sharded model computes the same as one device, and whether its shards are where the plan puts them."""

    mesh: MeshSpec
    comparisons: tuple[ComparedArray, ...]
    misplaced: tuple[Misplaced, ...]
    variables: int
    """Variables whose shards were compared with the plan."""
    device_bytes: int
    """Bytes of these variables on each device, as planned."""
    found_device_bytes: Mapping[int, int]
    """Bytes that their shards take, by the id of the device."""
    movements: int = 3
    """How often rounding was measured: 3 times, or 15 where the first three did not explain a difference."""

    @property
    def wrong(self) -> tuple[ComparedArray, ...]:
        """Comparisons whose difference rounding does not explain, or that could not be compared, the largest first."""
        found = [c for c in self.comparisons if not c.agrees]
        return tuple(sorted(found, key=lambda c: -c.max_rel))

    @property
    def ok(self) -> bool:
        """Whether everything agrees."""
        return not self.wrong and not self.misplaced

    def raise_if_wrong(self) -> NumbersCheck:
        """Return this check if everything agrees.

        Raises:
            DisagreementError: Otherwise, with the largest differences and the misplaced variables.
        """
        if self.ok:
            return self
        lines = [str(found) for found in (*self.wrong, *self.misplaced)]
        more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise DisagreementError(
            f"Cannot rely on this layout on {self.mesh}: {', '.join(self._problems())}:\n  "
            + "\n  ".join(lines[:_SHOWN])
            + more
        )

    def _problems(self) -> list[str]:
        differ = sum(c.differs for c in self.wrong)
        undefined, results = len(self.wrong) - differ, plural(len(self.comparisons), "result")
        found = {
            f"{differ} of {results} differ from one device by more than rounding": differ,
            f"{undefined} of {results} cannot be compared, as they are not finite on one device either, or not "
            "after rounding (check the values of the model and the inputs)": undefined,
            f"{len(self.misplaced)} of {plural(self.variables, 'variable')} are not where they were planned": len(
                self.misplaced
            ),
        }
        return [problem for problem, count in found.items() if count]

    def for_plan(self) -> ComparedNumbers:
        """Return what a plan records of this check."""
        shares = [c.max_abs / c.allowed if c.allowed else (math.inf if c.max_abs else 0.0) for c in self.comparisons]
        return ComparedNumbers(
            len(self.comparisons),
            tuple(c.name for c in self.wrong),
            # JSON has no infinity, and a result that differs that much is listed in `wrong`.
            max((share for share in shares if math.isfinite(share)), default=0.0),
            self.variables,
            tuple(m.path for m in self.misplaced),
            self.device_bytes,
        )

    def summary(self) -> str:
        """Return a few lines for people."""
        lines = [
            f"{self._verdict()} one device on {self.mesh}: {plural(len(self.comparisons), 'result')} compared, "
            f"{len(self.wrong)} wrong",
            f"{plural(self.variables, 'variable')} where planned, {format_bytes(self.device_bytes)} on each device"
            if not self.misplaced
            else f"{len(self.misplaced)} of {plural(self.variables, 'variable')} NOT where planned",
        ]
        # Of each kind of result, show the one that comes closest to its tolerance: the last of its name in this order.
        kinds = {c.name.partition(" of ")[0].partition("/")[0]: c for c in sorted(self.comparisons, key=_share)}
        shown = self.wrong[:_SHOWN] or tuple(kinds.values())
        return "\n".join([*lines, *(f"  {found}" for found in (*shown, *self.misplaced[:_SHOWN]))])

    def _verdict(self) -> str:
        if any(c.differs for c in self.wrong):
            return "DIFFERENT from"
        return "NOT COMPARABLE with" if self.wrong else "equal to"

    def to_json(self) -> dict[str, Any]:
        """Return an object for programs."""
        return {
            "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            "ok": self.ok,
            "comparisons": [
                # JSON has no infinity or NaN.
                {n: v if not isinstance(v, float) or math.isfinite(v) else None for n, v in asdict(c).items()}
                | {"agrees": c.agrees}
                for c in self.comparisons
            ],
            "misplaced": [asdict(found) for found in self.misplaced],
            "variables": self.variables,
            "device_bytes": self.device_bytes,
            "movements": self.movements,
            "found_device_bytes": {str(device): n for device, n in self.found_device_bytes.items()},
        }


def _share(found: ComparedArray) -> float:
    """How much of what is allowed a difference takes."""
    return found.max_abs / found.allowed if found.allowed else found.max_abs
