"""What a user asks for: a request for each public function, with the function's parameters as its fields.

    LoadRequest(mesh=…, …)  as written ─► compared between processes ─► check ─► placement, matching, … ─► stages

A request has the values as the user wrote them; its parts have them in one form each (sizes as bytes, dtypes by name).
Making a part checks it, and stages are given parts, so no stage sees an unchecked value. `check` makes all parts before
anything is opened. Processes that load together compare what was written first: one that raised before that would
leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

from shardload.hub import fidelity
from shardload.mapping.stored_state import Items
from shardload.pipeline import arguments
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.sharding.devices import device_list, has_mesh, mesh_of
from shardload.sharding.mesh import planned_mesh
from shardload.typing import DTypeLike, LayoutLike, MeshLike, PathLike
from shardload.units import UNIT_NEEDED, check_choice, check_kind, check_names

OnFailure = Literal["raise", "tell", "restore"]
"""``raise``: only the error, as the caller has no model yet; ``tell``: add the state of the model to the error;
``restore``: keep the old values until the new ones are complete, and restore them."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a model goes."""

    mesh: MeshLike | None = None
    axes: str | None = None
    layout: LayoutLike | None = None
    """``None``: the model's current layout, ``"auto"`` if it has none."""
    devices: tuple[Any, ...] | None = None

    @classmethod
    def of(
        cls, mesh: MeshLike | None, axes: str | None, layout: LayoutLike | None, devices: Sequence[Any] | None
    ) -> Placement:
        """Check arguments: a distribution or layout map as mesh is the layout too, a layout with a mesh is the mesh."""
        check_kind("axes", axes, str | None, "text such as 'data,model'")
        if layout is None and has_mesh(mesh):
            layout = cast("LayoutLike", mesh)
        elif mesh is None and devices is None and has_mesh(layout) and mesh_of(layout) is not None:
            mesh = cast("MeshLike", layout)
        elif mesh is None:
            mesh = cast("MeshLike", planned_mesh(layout))
        return cls(mesh, axes, layout, device_list(devices))


@dataclass(frozen=True, slots=True, kw_only=True)
class Construction:
    """How to build the model that a checkpoint describes."""

    dtype: Any = None
    task: bool = True
    ignore_config: tuple[str, ...] = ()
    custom_objects: Mapping[str, Any] | None = None
    safe_mode: bool = True
    compile: bool = True

    def __post_init__(self) -> None:
        for name, value in (("task", self.task), ("compile", self.compile), ("safe_mode", self.safe_mode)):
            _check_flag(name, value)
        check_kind("custom_objects", self.custom_objects, Mapping | None, "a mapping")


@dataclass(frozen=True, slots=True, kw_only=True)
class Matching:
    """Which tensors go to which variables, and which differences are accepted."""

    strict: bool = True
    ignore: tuple[str, ...] = ()
    ignore_config: tuple[str, ...] = ()
    names: Mapping[str, str] | None = None
    rename: Mapping[str, str] | None = None
    items: Items = "all"
    is_restore: bool = False
    """Whether leaves of a step are matched by their structure, even if the step has names too."""
    builds: bool = False
    """Whether the model is built from the checkpoint's description: all other tensors are outside of it."""
    reads_values: bool = True
    """Whether values may be compared to explain tensors outside of the model; a plan reads headers only."""
    as_keras: bool = False
    """Follow Keras' rules: accept tensors that the model does not use, and build no slots that Keras would not."""

    def __post_init__(self) -> None:
        _check_flag("strict", self.strict)
        check_names("names", self.names)
        check_names("rename", self.rename)


def _check_flag(name: str, value: Any) -> None:
    # Text such as "no" is true, and would turn on what it says is off.
    check_kind(name, value, bool, "True or False")


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Arguments of all functions; `shardload.plan` has neither devices nor progress, but a search for layouts has."""

    mesh: MeshLike | None = None
    axes: str | None = None
    layout: LayoutLike | None = None
    host_memory_bytes: int | str | None = None
    devices: Sequence[Any] | None = None
    progress: ProgressLike = None

    def __post_init__(self) -> None:
        # A generator can be read only once, and these are read by several stages.
        for name in ("ignore", "ignore_config"):
            if isinstance(given := getattr(self, name, None), Iterator):
                object.__setattr__(self, name, tuple(given))

    @cached_property
    def placement(self) -> Placement:
        """Mesh, layout and devices."""
        return Placement.of(self.mesh, self.axes, self.layout, self.devices)

    @cached_property
    def budget_bytes(self) -> int | None:
        """Most bytes staged in host memory; ``None`` leaves it to the plan."""
        return arguments.byte_count("host_memory_bytes", self.host_memory_bytes)

    @cached_property
    def shown(self) -> Progress:
        """Progress to report to."""
        return as_progress(self.progress)


@dataclass(frozen=True, kw_only=True)
class LoadRequest(_Arguments):
    """One call of `shardload.load`: its arguments, under the same names."""

    function: ClassVar[str] = "load"
    model: ClassVar[None] = None
    on_failure: ClassVar[OnFailure] = "raise"
    """What to do with a half-loaded model."""

    source: PathLike
    dtype: DTypeLike | None = None
    strict: bool = True
    ignore: Sequence[str] = ()
    task: bool = True
    custom_objects: Mapping[str, Any] | None = None
    safe_mode: bool = True
    compile: bool = True
    atomic: bool = False
    format: str | None = None
    ignore_config: Sequence[str] = ()
    step: int | str = "latest"

    @property
    def compared(self) -> dict[str, Any]:
        """Arguments that must be written equally on all processes; mesh, layout and dtype are compared by effect."""
        return {
            "step": self.step,
            "strict": self.strict,
            "atomic": self.atomic,
            "ignore": self.ignore,
            "ignore_config": self.ignore_config,
            "task": self.task,
            "compile": self.compile,
            "safe_mode": self.safe_mode,
            "custom_objects": self.custom_objects,
        }

    @property
    def loads_optimizer(self) -> bool:
        """Whether to load the state of the optimizer, if the checkpoint has it."""
        return self.compile

    @cached_property
    def construction(self) -> Construction:
        """How to build the model."""
        return Construction(
            dtype=arguments.float_dtype(self.dtype),
            task=self.task,
            ignore_config=fidelity.checked_fields(self.ignore_config),
            custom_objects=self.custom_objects,
            safe_mode=self.safe_mode,
            compile=self.compile,
        )

    @cached_property
    def matching(self) -> Matching:
        """Which tensors go where."""
        ignore, fields = arguments.patterns(self.ignore), fidelity.checked_fields(self.ignore_config)
        return Matching(strict=self.strict, ignore=ignore, ignore_config=fields, builds=True)

    def check(self) -> None:
        """Make all parts.

        Raises:
            UsageError: When an argument is of the wrong kind or out of range.
            BackendError: When Keras does not run on JAX.
        """
        _check_flag("atomic", self.atomic)
        arguments.check_backend()
        _ = self.construction, self.matching, self.budget_bytes, self.placement, self.shown


@dataclass(frozen=True, kw_only=True)
class LoadWeightsRequest(_Arguments):
    """One call of `shardload.load_weights`: its arguments, under the same names."""

    function: ClassVar[str] = "load_weights"

    model: Any
    source: PathLike
    names: Mapping[str, str] | None = None
    strict: bool = True
    atomic: bool = False
    format: str | None = None
    ignore_config: Sequence[str] = ()
    items: Literal["all", "weights"] = "all"
    step: int | str = "latest"
    as_keras: bool = False
    """As in `Matching`; no argument of the function."""

    @property
    def compared(self) -> dict[str, Any]:
        """As for `LoadRequest`."""
        return {
            "step": self.step,
            "items": self.items,
            "names": self.names,
            "strict": self.strict,
            "atomic": self.atomic,
            "ignore_config": self.ignore_config,
        }

    @property
    def on_failure(self) -> OnFailure:
        """What to do with a half-loaded model."""
        return "restore" if self.atomic else "tell"

    @property
    def loads_optimizer(self) -> bool:
        """As for `LoadRequest`."""
        return self.items != "weights"

    @cached_property
    def matching(self) -> Matching:
        """Which tensors go where."""
        check_choice("items", self.items, ("all", "weights"))
        fields = fidelity.checked_fields(self.ignore_config)
        return Matching(
            strict=self.strict, ignore_config=fields, names=self.names, items=self.items, as_keras=self.as_keras
        )

    def check(self) -> None:
        """As for `LoadRequest`.

        Raises:
            UnsupportedError: When the model is not built, or has no weights.
        """
        _check_flag("atomic", self.atomic)
        _ = self.matching, self.budget_bytes
        # Keras' `load_weights` (``as_keras``) fills models whose layers are only partly built.
        arguments.check_model(self.model, built=not self.as_keras)
        _ = self.placement, self.shown


@dataclass(frozen=True, kw_only=True)
class PlanRequest(_Arguments):
    """One call of `shardload.plan`: its arguments, under the same names; and the progress of a search for layouts."""

    source: PathLike
    dtype: DTypeLike | None = None
    device_memory_bytes: int | str | None = None
    ignore: Sequence[str] = ()
    task: bool = True
    format: str | None = None
    ignore_config: Sequence[str] = ()

    @cached_property
    def device_budget_bytes(self) -> int | None:
        """Bytes of one device, if given."""
        return arguments.byte_count("device_memory_bytes", self.device_memory_bytes, least=UNIT_NEEDED)

    @cached_property
    def construction(self) -> Construction:
        """How to build the model."""
        dtype, fields = arguments.float_dtype(self.dtype), fidelity.checked_fields(self.ignore_config)
        return Construction(dtype=dtype, task=self.task, ignore_config=fields)

    @cached_property
    def matching(self) -> Matching:
        """Which tensors go where."""
        ignore, fields = arguments.patterns(self.ignore), fidelity.checked_fields(self.ignore_config)
        return Matching(ignore=ignore, ignore_config=fields, builds=True, reads_values=False)

    def check(self) -> None:
        """As for `LoadRequest`."""
        arguments.check_backend()
        _ = self.construction, self.matching, self.budget_bytes, self.device_budget_bytes, self.placement, self.shown


@dataclass(frozen=True, kw_only=True)
class RestoreRequest(_Arguments):
    """One call of `shardload.restore`: its arguments, under the same names."""

    function: ClassVar[str] = "restore"
    loads_optimizer: ClassVar[bool] = True

    model: Any
    directory: PathLike
    step: int | Literal["latest", "best"] = "latest"
    items: Items = "all"
    optimizer: Any = None
    rename: Mapping[str, str] | None = None
    names: Mapping[str, str] | None = None
    strict: bool = True
    atomic: bool = False
    fallback: Literal["previous"] | None = None

    @property
    def source(self) -> PathLike:
        """The folder of the steps."""
        return self.directory

    @property
    def compared(self) -> dict[str, Any]:
        """As for `LoadRequest`."""
        return {
            "step": self.step,
            "items": self.items,
            "rename": self.rename,
            "names": self.names,
            "strict": self.strict,
            "atomic": self.atomic,
            "fallback": self.fallback,
        }

    @property
    def on_failure(self) -> OnFailure:
        """What to do with a half-loaded model."""
        return "restore" if self.atomic else "tell"

    @cached_property
    def matching(self) -> Matching:
        """Which tensors go where."""
        check_choice("items", self.items, get_args(Items))
        return Matching(strict=self.strict, names=self.names, rename=self.rename, items=self.items, is_restore=True)

    def check(self) -> None:
        """As for `LoadWeightsRequest`."""
        check_choice("fallback", self.fallback, (None, "previous"))
        _check_flag("atomic", self.atomic)
        _ = self.matching, self.budget_bytes
        arguments.check_model(self.model)
        _ = self.placement, self.shown


JointRequest: TypeAlias = LoadRequest | LoadWeightsRequest | RestoreRequest
"""Requests of calls that all processes of a run make together."""
