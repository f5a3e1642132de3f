"""The parts of a plan: variables, decisions, collectives (*exchanges*), memory, and the results of checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from shardload.sharding.layout import Spec
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, plural

_Record_co = TypeVar("_Record_co", covariant=True)


class PlanCheck(Protocol[_Record_co]):
    """The result of a check that a plan can store, such as a `shardload.parallel.CompiledStep`."""

    @property
    def mesh(self) -> MeshSpec:
        """The mesh of the plan that was checked."""
        ...

    def for_plan(self) -> _Record_co:
        """Return the results of the check as the record that `LayoutPlan.with_checks` stores in a plan."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedVariable:
    """One variable of a plan: its path, shape and layout, and the reason for the layout."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the whole value of the variable, over all devices."""
    spec: Spec
    stored: tuple[str, ...]
    """Axes that split the variable in storage only: devices gather it for use, as in fully sharded data parallelism."""
    trainable: bool
    reason: str
    gathered_as: str = ""
    """The dtype in which the variable is gathered, if it is stored split and only read in a smaller one; else empty."""

    @property
    def used(self) -> Spec:
        """The layout after the gather for use: ``spec`` without the axes in ``stored``, which split only storage."""
        return tuple(tuple(axis for axis in axes if axis not in self.stored) for axes in self.spec)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PlannedVariable:
        """Return the variable from its JSON object in a saved plan."""
        spec = tuple(tuple(axes) for axes in data["spec"])
        return cls(**{**data, "shape": tuple(data["shape"]), "spec": spec, "stored": tuple(data["stored"])})


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision of a plan: whether a mesh axis splits a group of dims, and what the opposite would cost."""

    axis: str
    split: bool
    length: int
    """Greatest common divisor of the lengths of ``dims``. An axis can split them if its size divides this number."""
    dims: tuple[str, ...]
    """The dims in the group, each as the variable's name (`LayoutPlan.names`) and an index: ``dense/kernel[1]``."""
    opposite_s: float | None
    """Seconds that a step takes longer with the opposite decision. Negative if the step is faster, but not by enough
    for the memory it needs. ``None`` if the opposite exceeds the memory limit, or contradicts other decisions."""

    def line(self, *, limited: bool) -> str:
        """Return the decision as a line for `LayoutPlan.why`; ``limited``: whether the plan has a memory limit."""
        done = "splits" if self.split else "does not split"
        if self.opposite_s is None and limited:
            otherwise = "the opposite does not keep the memory limit, or contradicts other decisions"
        elif self.opposite_s is None:
            otherwise = "the opposite contradicts other decisions"
        else:
            otherwise = f"the opposite takes {self.opposite_s * 1e3:+.3f} ms per step"
            if self.opposite_s < 0:
                # Without a limit, the plan is the fastest for its bytes of weights: what is faster needs more.
                saved = f"{-self.opposite_s * 1e3:.3f} ms per step"
                otherwise = f"the opposite saves {saved}, less than the memory that it needs for weights is worth"
        return f"axis {self.axis!r} {done} the {self.length} of {', '.join(self.dims[:3])}: {otherwise}"


@dataclass(frozen=True, slots=True)
class PlannedExchange:
    """All collectives of one kind, such as all-reduce, over one mesh axis in a step, as a plan estimates them."""

    kind: str
    axis: str
    """The mesh axis over which devices exchange data, or several axes joined by ``+``: ``batch+model``."""
    count: int
    nbytes: int
    """Bytes on each device of the results of all ``count`` collectives, added up."""
    seconds: float


@dataclass(frozen=True, slots=True)
class DeviceBytes:
    """Bytes that one device needs for a step, as estimated: at the moment of the step at which it needs most."""

    weights: int
    gradients: int
    slots: int
    activations: int
    """Bytes of the activations, with copies of weights that are gathered for use; or bytes that the optimizer's update
    needs besides the slots: whichever is more."""
    kv_cache: int = 0
    """Bytes of the KV cache, if the search was asked to count one."""

    @property
    def total(self) -> int:
        """Bytes of all parts together."""
        return self.weights + self.gradients + self.slots + self.activations + self.kv_cache


@dataclass(frozen=True, slots=True)
class Attempt:
    """A plan that a search rejected: its compiled step needs more memory than the limit. Bytes are per device."""

    planned_bytes: int
    compiled_bytes: int

    def __str__(self) -> str:
        return f"a plan for {format_bytes(self.planned_bytes)} compiled to {format_bytes(self.compiled_bytes)}"


@dataclass(frozen=True, slots=True)
class CompiledCheck:
    """Memory and collectives of the compiled step of a plan; bytes are those of one device."""

    kind: str
    """Which step was compiled: ``forward`` (inference), ``gradients``, or ``training`` (with an optimizer)."""
    platform: str
    """The platform that the step was compiled for, such as ``cpu``."""
    total_bytes: int
    argument_bytes: int
    temporary_bytes: int
    collectives: Mapping[str, tuple[int, int]]
    """For each kind of collective, such as ``all-gather``, how many run in a step, and the bytes of their results."""
    notes: tuple[str, ...] = ()
    attempts: tuple[Attempt, ...] = field(default=())
    """Plans that were compiled before this one, and rejected because their steps needed more memory than the limit."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CompiledCheck:
        """Return the check from its JSON object in a saved plan."""
        collectives = {kind: (int(count), int(nbytes)) for kind, (count, nbytes) in data["collectives"].items()}
        attempts = tuple(Attempt(**one) for one in data["attempts"])
        return cls(**{**data, "collectives": collectives, "notes": tuple(data["notes"]), "attempts": attempts})

    def line(self, limit: int | None) -> str:
        """Return the check as a line of a plan's summary: memory, ``limit`` if there is one, and collectives."""
        of = f" of {format_bytes(limit)}" if limit is not None else ""
        done = ", ".join(f"{plural(n, kind)} of {format_bytes(b)}" for kind, (n, b) in self.collectives.items())
        tried = f"; before it, {', '.join(map(str, self.attempts))}" if self.attempts else ""
        return f"compiled for {self.platform}: {format_bytes(self.total_bytes)}{of}; {done or 'no collectives'}{tried}"


@dataclass(frozen=True, slots=True)
class ComparedNumbers:
    """How the results of a sample batch under a plan differ from the results on one device."""

    results: int
    """Number of outputs, losses, gradients and variables that were compared."""
    wrong: tuple[str, ...]
    """Names of results that differ from one device's result by more than rounding, or cannot be compared."""
    largest_share: float
    """How close the worst result is to being wrong: its difference from one device, divided by the largest difference
    that rounding explains. Above 1 is wrong. Infinite ratios are left out; their results are in ``wrong``."""
    variables: int
    """Number of variables whose shards on the devices were compared with the planned ones."""
    misplaced: tuple[str, ...]
    """Paths of variables whose shards are not the planned ones."""
    device_bytes: int
    """Bytes of the compared variables on each device, as planned."""

    @property
    def ok(self) -> bool:
        """Whether all results agree with one device, and all shards are where the plan puts them."""
        return not self.wrong and not self.misplaced

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ComparedNumbers:
        """Return the comparison from its JSON object in a saved plan."""
        return cls(**{**data, "wrong": tuple(data["wrong"]), "misplaced": tuple(data["misplaced"])})

    def line(self) -> str:
        """Return the comparison as a line of a plan's summary: what agrees, or what is wrong."""
        placed = f"{plural(self.variables, 'variable')} where planned, {format_bytes(self.device_bytes)} on each device"
        results = plural(self.results, "result")
        said = f"{results} equal to one device"
        if self.ok:
            said += f", within {self.largest_share:.2f} of what rounding explains"
        if self.wrong:
            said = f"{len(self.wrong)} of {results} NOT equal to one device ({_first(self.wrong)})"
        if self.misplaced:
            of = plural(self.variables, "variable")
            placed = f"{len(self.misplaced)} of {of} NOT where planned ({_first(self.misplaced)})"
        return f"numbers: {said}; {placed}"


def _first(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
