"""What a user asks for: a request for each public function, with the function's parameters as its fields.

    LoadRequest(mesh=…, …)  as written ─► compared between processes ─► check ─► placement, matching, … ─► stages

A request has the values as the user wrote them. Its parts, such as `Placement`, are made from them and have each value
in one form (sizes as bytes, dtypes by name). Making a part checks it, and the stages of a load get parts only, so no
stage sees an unchecked value. `check` makes all parts before anything is opened. Processes that load together first
compare what their users wrote: a process that raised an error before this would leave the others waiting.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeAlias, cast, get_args

import jax
import keras

from shardload.errors import BackendError, UnsupportedError, UsageError
from shardload.hub import fidelity
from shardload.keras_bridge.quantising import check_quantisable, quantisation_config
from shardload.mapping.stored_state import Items
from shardload.pipeline.warm_up import WarmUp
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.resolve.adapters import weighted_folders
from shardload.sharding.devices import device_list, has_mesh, mesh_of
from shardload.sharding.mesh import planned_mesh
from shardload.transfer.casts import ENABLE_64_BITS
from shardload.transfer.direct_io import Io
from shardload.transfer.owners import Replicas
from shardload.typing import AdapterLike, DTypeLike, LayoutLike, MeshLike, PathLike
from shardload.units import (
    UNIT_NEEDED,
    byte_count,
    check_choice,
    check_kind,
    check_name_map,
    dtype_name,
    rows_and_tokens,
)

Quantized = Literal["dequantize", "keep"]
"""What becomes of weights that are quantised in a Hugging Face folder."""
OnFailure = Literal["raise", "tell", "restore"]
"""What a failed load does. ``raise``: only raise the error, because the caller has no model yet. ``tell``: also say
in the error which values the model has now. ``restore``: put back the old values, which are kept during the load."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The mesh, layout and devices that a caller requests for a model."""

    mesh: MeshLike | None = None
    axes: str | None = None
    layout: LayoutLike | None = None
    """The requested layout; ``None`` keeps the model's current layout, or means ``"auto"`` if it has none."""
    devices: tuple[Any, ...] | None = None

    @classmethod
    def of(
        cls, mesh: MeshLike | None, axes: str | None, layout: LayoutLike | None, devices: Sequence[Any] | None
    ) -> Placement:
        """Return a call's arguments, checked. A Keras distribution given as mesh or layout serves as both."""
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
    """The part of a request that says how to build the model that a checkpoint describes."""

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
    """The part of a request that says which tensors go to which variables, and which differences are accepted."""

    strict: bool = True
    ignore: tuple[str, ...] = ()
    ignore_config: tuple[str, ...] = ()
    names: Mapping[str, str] | None = None
    rename: Mapping[str, str] | None = None
    items: Items = "all"
    is_restore: bool = False
    """Whether to match tensors with variables by place in the model, as `restore` does for its steps, not by name."""
    builds: bool = False
    """Whether the model is built from the checkpoint's description: then unused tensors such as buffers are no
    error."""
    reads_values: bool = True
    """Whether values may be read to find out if unused tensors are copies or zeros; a plan reads headers only."""
    as_keras: bool = False
    """Whether Keras' rules apply: unused tensors are accepted, and optimizers get only the slots (state for each
    weight) that Keras would build."""

    def __post_init__(self) -> None:
        _check_flag("strict", self.strict)
        check_name_map("names", self.names)
        check_name_map("rename", self.rename)


def _check_flag(name: str, value: Any) -> None:
    # Text such as "no" is true, and would turn on what it says is off.
    check_kind(name, value, bool, "True or False")


@dataclass(frozen=True, kw_only=True)
class _Arguments:
    """Arguments that all requests have (though `shardload.plan` has no ``devices``, ``progress`` or ``warm_up``)."""

    mesh: MeshLike | None = None
    axes: str | None = None
    layout: LayoutLike | None = None
    host_memory_bytes: int | str | None = None
    devices: Sequence[Any] | None = None
    progress: ProgressLike = None
    warm_up: Mapping[str, Any] | None = None
    replicas: Replicas = "auto"

    compared_names: ClassVar[tuple[str, ...]] = ()
    """Names of arguments that must be equal on all processes. Mesh, layout and dtype are not among them: what follows
    from them is compared, because they can be written in several ways."""
    text_steps: ClassVar[tuple[str, ...]] = ("generate",)
    """Names that ``warm_up`` may have besides those of Keras' own steps."""

    def __post_init__(self) -> None:
        # A generator can be read only once, and these are read by several stages.
        for name in ("ignore", "ignore_config"):
            if isinstance(given := getattr(self, name, None), Iterator):
                object.__setattr__(self, name, tuple(given))

    @cached_property
    def placement(self) -> Placement:
        """The mesh, layout and devices that the arguments request, checked."""
        return Placement.of(self.mesh, self.axes, self.layout, self.devices)

    @cached_property
    def budget_bytes(self) -> int | None:
        """Most bytes of tensors in host memory at once; ``None`` lets the plan choose."""
        wanted = self.host_memory_bytes
        return None if wanted is None else byte_count("host_memory_bytes", wanted)

    @cached_property
    def warming(self) -> WarmUp:
        """The steps to compile during the load, checked."""
        return WarmUp.of(self.warm_up, more=self.text_steps)

    @cached_property
    def reading(self) -> Replicas:
        """How processes get bytes that several of them need, checked."""
        check_choice("replicas", self.replicas, get_args(Replicas))
        return self.replicas

    @cached_property
    def reporter(self) -> Progress:
        """The object that shows the load's progress."""
        return as_progress(self.progress)


@dataclass(frozen=True, kw_only=True)
class _Building(_Arguments):
    """Arguments of functions that build the model: `shardload.load` and `shardload.plan`."""

    source: PathLike
    dtype: DTypeLike | None = None
    ignore: Sequence[str] = ()
    task: bool = True
    format: str | None = None
    ignore_config: Sequence[str] = ()
    quantize: Any = None
    quantized: Quantized = "dequantize"

    @cached_property
    def quantisation(self) -> Any:
        """Keras' configuration of the quantisation, checked; ``None`` if the model is not to be quantised."""
        return None if self.quantize is None else quantisation_config(self.quantize)

    @cached_property
    def keeps_codes(self) -> bool:
        """Whether weights that are quantised are to stay so, checked."""
        check_choice("quantized", self.quantized, get_args(Quantized))
        if self.quantized == "keep" and self.quantize is not None:
            raise UsageError(
                f"Cannot use quantize={self.quantize!r:.60} with quantized='keep': expected one of them. quantize= "
                "makes new codes of the weights, 'keep' uses those of the checkpoint"
            )
        return self.quantized == "keep"


@dataclass(frozen=True, kw_only=True)
class _Filling(_Arguments):
    """Arguments of functions that fill a given model: `shardload.load_weights` and `shardload.restore`."""

    model: Any
    names: Mapping[str, str] | None = None
    strict: bool = True
    atomic: bool = False

    @property
    def on_failure(self) -> OnFailure:
        """What becomes of the model's values if the load fails half-way: restored, or described in the error."""
        return "restore" if self.atomic else "tell"


@dataclass(frozen=True, kw_only=True)
class LoadRequest(_Building):
    """One call of `shardload.load`: its arguments, under the same names."""

    function: ClassVar[str] = "load"
    model: ClassVar[None] = None
    on_failure: ClassVar[OnFailure] = "raise"
    """A load that fails half-way only raises its error: the load built the model, so the caller has none to restore."""

    compared_names = (
        *("step", "strict", "atomic", "ignore", "ignore_config"),
        *("task", "compile", "safe_mode", "custom_objects", "replicas", "quantized"),
    )

    strict: bool = True
    custom_objects: Mapping[str, Any] | None = None
    safe_mode: bool = True
    compile: bool = True
    atomic: bool = False
    step: int | str = "latest"
    io: Io = "buffered"
    adapter: AdapterLike | None = None

    @property
    def loads_optimizer(self) -> bool:
        """Whether to load the state of the optimizer, if the checkpoint has it."""
        return self.compile and self.quantize is None and not self.keeps_codes

    @cached_property
    def adapters(self) -> tuple[tuple[PathLike, float], ...]:
        """The folders of adapters and their weights, checked."""
        return weighted_folders(self.adapter)

    @property
    def adapter_names(self) -> str:
        """Names and weights of the adapters, which are equal on all processes; paths may differ."""
        try:
            return ", ".join(f"{weight:g} x {Path(folder).name}" for folder, weight in self.adapters)
        except UsageError:  # `check` raises it, on all processes
            return ""

    @cached_property
    def construction(self) -> Construction:
        """The arguments that say how to build the model, checked."""
        return Construction(
            dtype=float_dtype(self.dtype),
            task=self.task,
            ignore_config=fidelity.checked_fields(self.ignore_config),
            custom_objects=self.custom_objects,
            safe_mode=self.safe_mode,
            compile=self.compile,
        )

    @cached_property
    def matching(self) -> Matching:
        """The arguments that say how to match tensors with variables, checked."""
        ignore, fields = ignored_names(self.ignore), fidelity.checked_fields(self.ignore_config)
        return Matching(strict=self.strict, ignore=ignore, ignore_config=fields, builds=True)

    def check(self) -> None:
        """Raise if an argument is of the wrong kind or out of range: `Placement` and the other parts check theirs."""
        _check_flag("atomic", self.atomic)
        check_choice("io", self.io, get_args(Io))
        check_backend()
        _ = self.construction, self.matching, self.budget_bytes, self.reading, self.placement, self.reporter
        _ = self.warming, self.quantisation, self.adapters
        if self.keeps_codes and self.adapters:
            raise UsageError(
                "Cannot use adapter with quantized='keep': it is merged into floats. Leave out quantized='keep' "
                "(--quantized keep); with quantize='int4' (--quantize int4), the merged weights are packed again. "
                "shardload.load_adapter puts LoRA only onto layers that Keras keeps in int4, not in GPTQ's mode"
            )


@dataclass(frozen=True, kw_only=True)
class LoadWeightsRequest(_Filling):
    """One call of `shardload.load_weights`: its arguments, under the same names."""

    function: ClassVar[str] = "load_weights"
    compared_names = ("step", "items", "names", "strict", "atomic", "ignore_config", "replicas")

    source: PathLike
    format: str | None = None
    ignore_config: Sequence[str] = ()
    items: Literal["all", "weights"] = "all"
    step: int | str = "latest"
    io: Io = "buffered"
    quantize: Any = None
    keeps_codes: ClassVar[bool] = False
    as_keras: bool = False
    """Whether Keras' rules apply, by which unused tensors are no error: set for calls of Keras that `shardload.fast`
    replaces; not public."""

    @property
    def loads_optimizer(self) -> bool:
        """Whether to load the state of the optimizer, if the checkpoint has it."""
        return self.items != "weights" and self.quantize is None

    @cached_property
    def quantisation(self) -> Any:
        """Keras' configuration of the quantisation, checked; ``None`` if the model is not to be quantised."""
        return None if self.quantize is None else quantisation_config(self.quantize)

    @cached_property
    def matching(self) -> Matching:
        """The arguments that say how to match tensors with variables, checked."""
        check_choice("items", self.items, ("all", "weights"))
        fields = fidelity.checked_fields(self.ignore_config)
        return Matching(
            strict=self.strict, ignore_config=fields, names=self.names, items=self.items, as_keras=self.as_keras
        )

    def check(self) -> None:
        """Raise if an argument is of the wrong kind or out of range, or the model is not built or has no weights."""
        _check_flag("atomic", self.atomic)
        check_choice("io", self.io, get_args(Io))
        _ = self.matching, self.budget_bytes, self.reading
        # Keras' `load_weights` (``as_keras``) fills models whose layers are only partly built.
        check_keras_model(self.model, built=not self.as_keras)
        if self.quantisation is not None:
            check_quantisable(self.model)
        _ = self.placement, self.reporter, self.warming


@dataclass(frozen=True, kw_only=True)
class PlanRequest(_Building):
    """One call of `shardload.plan`: its arguments, under the same names; and ``progress``, for a search for layouts."""

    device_memory_bytes: int | str | None = None
    hosts: int | None = None
    kv_cache: tuple[int, int] | str | None = None

    @cached_property
    def device_budget_bytes(self) -> int | None:
        """The memory of one device in bytes; ``None`` if the caller did not give it."""
        wanted = self.device_memory_bytes
        return None if wanted is None else byte_count("device_memory_bytes", wanted, least=UNIT_NEEDED)

    @cached_property
    def cache_size(self) -> tuple[int, int] | None:
        """Rows and tokens of the KV cache to count; ``None`` if the caller asked for none."""
        return None if self.kv_cache is None else rows_and_tokens(self.kv_cache)

    @cached_property
    def construction(self) -> Construction:
        """The arguments that say how to build the model, checked."""
        dtype, fields = float_dtype(self.dtype), fidelity.checked_fields(self.ignore_config)
        return Construction(dtype=dtype, task=self.task, ignore_config=fields)

    @cached_property
    def matching(self) -> Matching:
        """The arguments that say how to match tensors with variables, checked."""
        ignore, fields = ignored_names(self.ignore), fidelity.checked_fields(self.ignore_config)
        return Matching(ignore=ignore, ignore_config=fields, builds=True, reads_values=False)

    def check(self) -> None:
        """Raise if an argument is of the wrong kind or out of range."""
        check_backend()
        if self.hosts is not None and (type(self.hosts) is not int or self.hosts < 1):
            raise UsageError(f"Cannot use hosts={self.hosts!r}: expected a number of hosts, such as 2")
        _ = self.construction, self.matching, self.budget_bytes, self.device_budget_bytes, self.cache_size
        _ = self.reading, self.quantisation, self.keeps_codes
        _ = self.placement, self.reporter


@dataclass(frozen=True, kw_only=True)
class RestoreRequest(_Filling):
    """One call of `shardload.restore`: its arguments, under the same names."""

    function: ClassVar[str] = "restore"
    io: ClassVar[Io] = "buffered"
    loads_optimizer: ClassVar[bool] = True
    quantisation: ClassVar[None] = None
    keeps_codes: ClassVar[bool] = False
    text_steps: ClassVar[tuple[str, ...]] = ()
    compared_names = ("step", "items", "rename", "names", "strict", "atomic", "fallback", "replicas")

    directory: PathLike
    step: int | Literal["latest", "best"] = "latest"
    items: Items = "all"
    optimizer: Any = None
    rename: Mapping[str, str] | None = None
    fallback: Literal["previous"] | None = None

    @property
    def source(self) -> PathLike:
        """The argument ``directory``, the folder of the steps, under the name that it has in other requests."""
        return self.directory

    @cached_property
    def matching(self) -> Matching:
        """The arguments that say how to match tensors with variables, checked."""
        check_choice("items", self.items, get_args(Items))
        return Matching(strict=self.strict, names=self.names, rename=self.rename, items=self.items, is_restore=True)

    def check(self) -> None:
        """Raise if an argument is of the wrong kind or out of range, or the model is not built or has no weights."""
        check_choice("fallback", self.fallback, (None, "previous"))
        _check_flag("atomic", self.atomic)
        _ = self.matching, self.budget_bytes, self.reading
        check_keras_model(self.model)
        _ = self.placement, self.reporter, self.warming


JointRequest: TypeAlias = LoadRequest | LoadWeightsRequest | RestoreRequest
"""Requests of the calls that all processes of a `jax.distributed` run make together."""


def check_keras_model(model: Any, *, built: bool = True) -> None:
    """Raise unless ``model`` is a Keras model with weights to fill; with ``built``, all its layers must be built."""
    if isinstance(model, type) or not hasattr(model, "weights"):
        if isinstance(model, (dict, list, tuple)):  # its text would be the values of arrays
            raise UsageError(
                f"Cannot use a {type(model).__name__} as model: expected a Keras model. For a pytree of arrays, there "
                "are shardload.save_arrays and load_arrays"
            )
        raise UsageError(f"Cannot use {model!r:.60} as model: expected a Keras model, got {type(model).__name__}")
    check_backend()
    if built and not getattr(model, "built", True):
        raise UnsupportedError(
            f"The model {model.name!r} has not been built. Call it on a batch of inputs, or model.build(input_shape), "
            "first"
        )
    if not model.weights:
        raise UnsupportedError(
            f"The model {model.name!r} has no weights. If its layers create them when it is called, call it on a batch "
            "of inputs first"
        )


def check_backend() -> None:
    """Raise if Keras was imported with another backend than JAX, which cannot be changed afterwards."""
    if (found := keras.config.backend()) != "jax":
        raise BackendError(found)


def ignored_names(ignore: Sequence[str]) -> tuple[str, ...]:
    """Return the argument ``ignore`` (patterns of tensor names) as a tuple; raise `UsageError` if it is not a list."""
    # A string is a sequence of strings: ignore="head" would ignore tensors called "h", "e", "a" and "d".
    is_list = isinstance(ignore, Iterable) and not isinstance(ignore, str)
    found = tuple(ignore) if is_list else ()  # first, because a generator can be read only once
    if not is_list or not all(isinstance(pattern, str) for pattern in found):
        raise UsageError(f"Cannot use ignore={ignore!r:.60}: expected a list of tensor names, such as ['score.*']")
    return found


def float_dtype(wanted: DTypeLike | None) -> Any:
    """Check the argument ``dtype`` and return its canonical name; return ``None`` or a Keras dtype policy unchanged."""
    name = dtype_name(wanted)
    if name == "float64" and not jax.config.jax_enable_x64:
        raise UsageError(f"Cannot load as float64: JAX has 64-bit dtypes disabled. {ENABLE_64_BITS}, or choose float32")
    return name
