"""The result of a search: a layout for every variable with its reason, and the time and memory that a step needs.

A `LayoutPlan` is a plain value. It can be printed, compared with another plan, saved as JSON and read back on another
machine, applied to a model (``layout=plan``), and exported for programs that do not use shardload.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from shardload.errors import LayoutError, UsageError, WriteError, did_you_mean
from shardload.keras_bridge.layer_layouts import CallLayouts
from shardload.keras_bridge.recomputation import Recompute
from shardload.keras_bridge.variables import numbered
from shardload.layout_search.plan_page import plan_page
from shardload.layout_search.plan_parts import (
    ComparedNumbers,
    CompiledCheck,
    Decision,
    DeviceBytes,
    PlanCheck,
    PlannedExchange,
    PlannedVariable,
)
from shardload.layout_search.plan_pictures import PlanPicture, variable_rows
from shardload.reports.markup import picture_html
from shardload.sharding.layout import Layout, Spec
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import local_target, replace_text
from shardload.typing import PathLike
from shardload.units import format_bytes, plural

_FORMAT = "shardload layout plan, version 1"
_ATTENTION = {
    "stored": "its scores count as stored, as XLA does; if a fused kernel runs it, as on GPU, use --fused-attention",
    "fused": "a fused kernel runs it, so its scores do not count as stored",
}
_WRITTEN = "Use a file as LayoutPlan.save wrote it, or plan again"


@dataclass(frozen=True, slots=True)
class LayoutPlan:
    """Layouts of all variables of a model on a mesh, found by search."""

    model: str
    """Name of the model."""
    mesh: MeshSpec
    batch_axes: tuple[str, ...]
    """The mesh axes that split the batch."""
    training: bool
    inputs: str
    """Shapes and dtypes of the inputs of the planned step, as text."""
    variables: tuple[PlannedVariable, ...]
    """The variables with their layouts, in the order of ``model.variables``."""
    device: DeviceBytes
    device_memory_bytes: int | None
    """Most bytes per device that the plan may need. ``None`` if there is no limit: time x memory is then minimised."""
    step_s: float
    """Estimated seconds of one step, without the work that takes the same time under every plan."""
    exchanges: tuple[PlannedExchange, ...]
    decisions: tuple[Decision, ...]
    constants: Mapping[str, Any]
    """Rates of devices and links with which the search estimated times, by the names of the fields of `Hardware`."""
    notes: tuple[str, ...] = ()
    remat: Mapping[str, Recompute] = field(default_factory=dict)
    """For each kind of blocks (layers that the model repeats) that recomputes values in the backward pass, by the name
    of its class: ``full``, or ``matmuls`` for all but products with weights."""
    sequence_axes: tuple[str, ...] = ()
    """Mesh axes that split activations along their sequence where they split no other dim of these; usually none."""
    call_layouts: tuple[CallLayouts, ...] = ()
    """Layouts at both ends of layers with weights, if activations are split along their sequence."""
    attention: Literal["", "stored", "fused"] = ""
    """Whether the scores of attention count as stored, or as kept in a fused kernel; empty for a step without them."""
    compiled: CompiledCheck | None = None
    """Memory and collectives of the planned step as XLA compiled it; ``None`` if it was not compiled."""
    numbers: ComparedNumbers | None = None
    """How results of a sample batch under the plan differ from one device's results; ``None`` if not compared."""

    @property
    def names(self) -> tuple[str, ...]:
        """A name for each variable: its path. If several share a path, the second has ``#2`` appended, and so on."""
        return tuple(numbered(v.path for v in self.variables))

    @property
    def exchanged_bytes(self) -> int:
        """Bytes that collectives exchange in one step: those of their results on one device, added up."""
        return sum(e.nbytes for e in self.exchanges)

    def with_checks(
        self, *, compiled: PlanCheck[CompiledCheck] | None = None, numbers: PlanCheck[ComparedNumbers] | None = None
    ) -> LayoutPlan:
        """Return a copy of the plan that includes the results of checks, for `summary` and `to_json`.

        Args:
            compiled: What `shardload.parallel.compile_step` returned for this plan.
            numbers: What `shardload.parallel.check_numbers` returned for it.

        Raises:
            LayoutError: When a check is about another mesh.
            UsageError: When an argument is not a check.
        """
        for check, made_by in ((compiled, "compile_step"), (numbers, "check_numbers")):
            if check is not None and not hasattr(check, "mesh"):
                raise UsageError(f"Cannot add {check!r:.60} to a plan: expected what {made_by} returns")
            # A plan may divide an axis of the mesh that was checked in two.
            if check is not None and check.mesh.parts_in(self.mesh) is None:
                raise LayoutError(
                    f"Cannot add a check on {check.mesh} to a plan for {self.mesh}. Check this plan on its own mesh"
                )
        return dataclasses.replace(
            self,
            compiled=self.compiled if compiled is None else compiled.for_plan(),
            numbers=self.numbers if numbers is None else numbers.for_plan(),
        )

    def layouts(self) -> Iterator[tuple[PlannedVariable, Layout]]:
        """Yield pairs of a variable of the plan and its `Layout` on the plan's mesh."""
        return ((v, Layout(self.mesh, v.spec)) for v in self.variables)

    def why(self, path: str) -> str:
        """Return a text that explains the layout of a variable: its reason, and the decisions about its dims.

        Args:
            path: Its path, or one of `names`; a path that several variables have explains all of them.

        Raises:
            LayoutError: When the plan has no such variable.
        """
        named = list(zip(self.names, self.variables, strict=True))
        found = [(name, v) for name, v in named if path in (name, v.path)]
        if not found:
            raise LayoutError(
                f"Cannot explain {path!r}: the plan of {self.model!r} has no variable of that path. Use one of "
                f"plan.names.{did_you_mean(path, self.names)}"
            )
        limited, lines = self.device_memory_bytes is not None, []
        for name, v in found:
            own = [d for d in self.decisions if any(dim.startswith(f"{name}[") for dim in d.dims)]
            lines.append(f"{name} {v.shape}: {Layout(self.mesh, v.spec)}, {v.reason}")
            lines += [f"  {decision.line(limited=limited)}" for decision in own]
        return "\n".join(lines)

    def summary(self, *, ascii_only: bool = False) -> str:
        """Return the plan as text for people: memory and its limit, collectives, and layouts of variables."""
        picture = self._picture()
        milliseconds = float(f"{self.step_s * 1e3:.4g}")  # an estimate: four digits, and no exponent
        lines = [f"{picture.title}, inputs {self.inputs}", *picture.memory_lines("#" if ascii_only else "█")]
        lines.append(f"a step: about {milliseconds:g} ms, {format_bytes(self.exchanged_bytes)} of collective results")
        for e in self.exchanges:
            done = f"{plural(e.count, e.kind)} over {e.axis}"
            lines.append(f"  {done}: {format_bytes(e.nbytes)}, {e.seconds * 1e3:.3f} ms")
        for kind, mode in self.remat.items():
            what = "everything" if mode == "full" else "all but products with weights"
            lines.append(f"recomputed in the backward pass: {what} in each {kind}")
        if self.sequence_axes:
            axes = "+".join(self.sequence_axes)
            lines.append(f"between products with weights, activations are split along their sequence over {axes}")
        if self.attention:
            lines.append(f"attention: {_ATTENTION[self.attention]}")
        lines += [*picture.layout_lines(), f"cost constants: {self._rates}", *(f"note: {note}" for note in self.notes)]
        if self.compiled is not None:
            lines.append(self.compiled.line(self.device_memory_bytes))
        if self.numbers is not None:
            lines.append(self.numbers.line())
        return "\n".join(lines)

    def to_svg(self) -> str:
        """Return an SVG picture: the memory used per device with the limit, and which dims of variables are split.

        It has no dependencies and follows the reader's light or dark theme.
        """
        return self._picture().svg()

    def to_html(self) -> str:
        """Return the plan as a page of HTML that needs no other file and opens no connection.

        It shows memory and collectives as bars, and a tree of all variables to sort and search: how each is split, and
        why, with what the opposite decisions cost.
        """
        facts = [("A step", f"about {self.step_s * 1e3:.4g} ms, {format_bytes(self.exchanged_bytes)} of collectives")]
        facts += [("Attention", _ATTENTION[self.attention])] if self.attention else []
        facts += [("Note", note) for note in self.notes]
        facts += [("Compiled", self.compiled.line(self.device_memory_bytes))] if self.compiled is not None else []
        facts += [("Compared", self.numbers.line())] if self.numbers is not None else []
        facts.append(("Cost constants", self._rates))
        named = tuple(zip(self.names, self.variables, strict=True))
        return plan_page(self._picture(), named, self.decisions, self.exchanges, facts=facts).html()

    @property
    def _rates(self) -> str:
        return ", ".join(f"{name} {rate:g}" for name, rate in self.constants.items() if isinstance(rate, float))

    def _picture(self) -> PlanPicture:
        title = f"{self.model} on {self.mesh}, {'training' if self.training else 'inference'}"
        rows = variable_rows(self.variables, self.names, self.mesh)
        return PlanPicture(title, self.inputs, self.mesh, self.device, self.device_memory_bytes, rows)

    def __str__(self) -> str:
        return self.summary()

    def _repr_html_(self) -> str:
        """Return the picture as HTML, which a notebook shows instead of the plan."""
        # As an image, so that its style is no style of the notebook.
        return picture_html(self.to_svg(), f"Layout plan of {self.model} on {self.mesh}")

    # ---- comparing, saving, exporting ------------------------------------------------------------

    def diff(self, other: LayoutPlan | PathLike) -> tuple[str, ...]:
        """Return a line for each variable whose layout differs from another plan's, or that only one plan has.

        The first line has the meshes, if they differ.

        Args:
            other: A plan, or the path of one that was saved.

        Raises:
            LayoutError: When the file is not a plan.
            UsageError: When ``other`` is neither.
        """
        if not isinstance(other, LayoutPlan | str | os.PathLike):
            raise UsageError(
                f"Cannot compare a plan with {other!r:.60}: expected a LayoutPlan, or the path of a saved one"
            )
        if not isinstance(other, LayoutPlan):
            other = LayoutPlan.load(other)
        lines = [] if self.mesh == other.mesh else [f"mesh: {self.mesh} -> {other.mesh}"]
        mine, theirs = (
            {name: layout for name, (_, layout) in zip(plan.names, plan.layouts(), strict=True)}
            for plan in (self, other)
        )
        for path in dict.fromkeys((*mine, *theirs)):
            a, b = mine.get(path), theirs.get(path)
            if a is None or b is None or a.spec != b.spec:
                lines.append(f"{path}: {a or 'absent'} -> {b or 'absent'}")
        return tuple(lines)

    def to_json(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible data."""
        return {
            "format": _FORMAT,
            **dataclasses.asdict(self),
            "constants": dict(self.constants),
            "remat": dict(self.remat),
        }

    @classmethod
    def from_json(cls, data: Any) -> LayoutPlan:
        """Return the plan whose data `to_json` returned."""
        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise LayoutError(f"Cannot read the plan: its format is not {_FORMAT!r}. {_WRITTEN}")
        try:
            # JSON has lists for tuples and objects for dataclasses. The file is untrusted: a wrong key or type is a
            # LayoutError below.
            known = {**data, "mesh": MeshSpec(tuple(data["mesh"]["axes"]), tuple(data["mesh"]["sizes"]))}
            known["variables"] = tuple(PlannedVariable.from_json(v) for v in data["variables"])
            known["device"] = DeviceBytes(**data["device"])
            known["exchanges"] = tuple(PlannedExchange(**e) for e in data["exchanges"])
            known["decisions"] = tuple(Decision(**{**d, "dims": tuple(d["dims"])}) for d in data["decisions"])
            # Plans of older versions name one axis.
            known["batch_axes"] = tuple(data["batch_axes"] if "batch_axes" in data else [known.pop("batch_axis")])
            known["notes"] = tuple(data["notes"])
            # Plans of older versions have neither.
            known["sequence_axes"] = tuple(data.get("sequence_axes", ()))
            known["call_layouts"] = tuple(map(CallLayouts.from_json, data.get("call_layouts", ())))
            for name, kind in (("compiled", CompiledCheck), ("numbers", ComparedNumbers)):
                known[name] = kind.from_json(found) if (found := data.get(name)) is not None else None
            known.pop("format")
            return cls(**known)
        except KeyError as error:
            raise LayoutError(f"Cannot read the plan: it has no {error}. {_WRITTEN}") from error
        except (TypeError, AttributeError, ValueError) as error:
            # Python's own words: "… got an unexpected keyword argument 'modl'".
            raise LayoutError(f"Cannot read the plan: a key or type is wrong ({error}). {_WRITTEN}") from error

    def save(self, path: PathLike) -> None:
        """Write the plan to a JSON file, and create its parent folders where they are missing.

        Raises:
            WriteError: When the file cannot be written.
        """
        file = local_target(_as_path(path, to="write the plan"))
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            replace_text(file, json.dumps(self.to_json(), indent=1) + "\n")
        except OSError as error:
            raise WriteError(
                f"Cannot write the plan {str(file)!r}: {error.strerror}. Use the path of a file in a folder that can "
                "be written to"
            ) from error

    @classmethod
    def load(cls, path: PathLike) -> LayoutPlan:
        """Read a plan that `save` wrote.

        Raises:
            LayoutError: When the file is not a plan, or cannot be read.
        """
        file = _as_path(path, to="read the plan")
        try:
            data = json.loads(file.read_text())
        except FileNotFoundError as error:
            raise LayoutError(f"Cannot read the plan {str(file)!r}: there is no such file") from error
        except OSError as error:
            raise LayoutError(
                f"Cannot read the plan {str(file)!r}: {error.strerror}, expected the file that LayoutPlan.save wrote"
            ) from error
        except ValueError as error:
            raise LayoutError(f"Cannot read the plan {str(file)!r}: it is not JSON ({error})") from error
        return cls.from_json(data)

    def to_layout_map(self, device_mesh: Any) -> Any:
        """Return a ``keras.distribution.LayoutMap`` with a key for each split variable: ``^path$``, for this path only.

        Args:
            device_mesh: A ``keras.distribution.DeviceMesh`` with the plan's axes.

        Raises:
            LayoutError: When the mesh is not the plan's, or variables of one path have different layouts.
            UsageError: When ``device_mesh`` is not a Keras mesh.
        """
        from keras.distribution import DeviceMesh, LayoutMap

        if not isinstance(device_mesh, DeviceMesh):
            raise UsageError(
                f"Cannot export the plan to a LayoutMap on {device_mesh!r:.60}: expected a mesh with devices. Pass "
                f"keras.distribution.DeviceMesh({self.mesh.sizes}, {list(self.mesh.axes)}, devices)"
            )
        own = MeshSpec(tuple(device_mesh.axis_names), tuple(device_mesh.shape))
        if own != self.mesh:
            raise LayoutError(
                f"Cannot export the plan for {self.mesh} to a LayoutMap on {own}: the meshes differ. Use {self.mesh}"
            )
        found = LayoutMap(device_mesh)
        specs: dict[str, Spec] = {}
        for variable, layout in self.layouts():
            if (other := specs.setdefault(variable.path, variable.spec)) != variable.spec:
                raise LayoutError(
                    f"Cannot export the plan of {self.model!r} to a LayoutMap: several variables have the path "
                    f"{variable.path!r}, one with {Layout(self.mesh, other)}, one with {layout}, and a LayoutMap "
                    "expects one layout for each path. Give layers different names, or use layout=plan"
                )
        for path, spec in specs.items():
            # What no key matches is replicated by Keras anyway.
            if any(spec):
                # Escaped and anchored: the key is for this path and no other, by re.search too.
                found[f"^{re.escape(path)}$"] = tuple(map(_entry, spec))
        return found

    def partition_specs(self) -> dict[str, Any]:
        """Return a ``jax.sharding.PartitionSpec`` for every variable, by name (see `names`)."""
        from jax.sharding import PartitionSpec

        return {name: PartitionSpec(*map(_entry, v.spec)) for name, v in zip(self.names, self.variables, strict=True)}


def _entry(axes: tuple[str, ...]) -> Any:
    return axes if len(axes) > 1 else axes[0] if axes else None


def _as_path(path: Any, *, to: str) -> Path:
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"Cannot {to} {path!r:.60}: expected the path of a file")
    return Path(path)
