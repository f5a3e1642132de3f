"""Search layouts for a model on a mesh.

options ─► checked inputs ─► LayoutSearch: the step, traced once ─► .on(mesh, limit) ─► LayoutPlan
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack

from shardload.errors import DoesNotFitError, UnsupportedError, UsageError, did_you_mean
from shardload.keras_bridge.recomputation import Recompute
from shardload.layout_search.dim_groups import DimGroups
from shardload.layout_search.given_layouts import fixed_specs
from shardload.layout_search.hardware import Hardware
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.linear_program import (
    Demand,
    Solution,
    optimum,
    splits_part_of_axis,
)
from shardload.layout_search.optimizer_memory import checked_optimizer, memory_of_optimizer
from shardload.layout_search.plan_building import memory_of, plan_of_solution
from shardload.layout_search.plan_parts import DeviceBytes
from shardload.layout_search.problem import Problem
from shardload.layout_search.problem_making import divided_mesh, make_problem
from shardload.layout_search.search_arguments import (
    EVERYTHING,
    Remat,
    Saving,
    SearchOptions,
    StepOptions,
    batch_axes_of,
    check_built,
    check_options,
    check_positive,
    checked_saving,
)
from shardload.layout_search.tracing import (
    Traced,
    check_rows,
    input_specs,
    record_program,
    trace,
)
from shardload.layouts.kv_cache import KvCache
from shardload.sharding.devices import mesh_spec
from shardload.sharding.layout import Spec
from shardload.sharding.mesh import MeshSpec
from shardload.stores.event_loop import collector_paused
from shardload.typing import LayoutMap, MeshLike
from shardload.units import format_bytes_up, rows_and_tokens

BATCH_PER_POSITION = 8
"""Rows of the batch for each position along the batch axis, if the caller gives neither inputs nor a batch size."""
_MOST_MIXED = 2
"""A search tries to recompute different values in blocks of different kinds if it has at most so many kinds."""


def search(model: Any, mesh: MeshLike | MeshSpec, **options: Unpack[SearchOptions]) -> LayoutPlan:
    """Find the layouts that make a step fastest within a memory limit, for any Keras model.

    Traces the model on shapes, finds which dims must be split alike, and lets a mixed-integer linear program choose
    for all axes and weights together. No value is read and nothing is compiled; variables may have no values.

    Without ``device_memory_bytes`` no limit is known, and replicating everything would often be fastest: the search
    then returns the plan with the least product of step time and bytes of weights on each device.

    Examples:
        ```python
        plan = shardload.parallel.search(model, "data=2,model=4", batch=16, optimizer="adamw")
        print(plan)
        ```

    Args:
        model: A built Keras model.
        mesh: The mesh, such as ``"data=2,model=4"``. Axes called ``data`` and ``fsdp`` split the first dim of the
            inputs; with a memory limit they may also split the storage of weights, which are then gathered for use.

    Keyword Args:
        inputs (Any): The first argument of the model's ``call``, as arrays or ``jax.ShapeDtypeStruct``. By default,
            the inputs that a functional model declares: dims that it leaves open have the length ``batch`` (the first
            dim) or ``sequence`` (all others).
        arguments (Mapping[str, Any] | None): Further arguments of ``call``, by name.
        batch (int | None): Rows of the default inputs, over all devices; a model that fixes another number is an error.
        sequence (int | None): Length of open dims of the default inputs (512); one that no input has is an error.
        optimizer (Any): Plan a training step with this optimizer, a name or an instance; by default, plan inference.
        device_memory_bytes (int | None): Hard limit for weights, gradients, slots and activations of each device.
        pins (LayoutMap | Mapping[str, Any] | LayoutPlan | None): Layouts that are fixed, as rules:
            ``{"embedding/embeddings": ("model", None)}``, also with a ``PartitionSpec`` for each variable; a
            `keras.distribution.LayoutMap`; or another plan of the model on this mesh. What `shardload.layout_rule` says
            of a layer class is fixed too.
        hardware (Hardware | None): Rates of devices and links.
        kv_cache (tuple[int, int] | str | None): Rows and tokens of a KV cache to count, in a plan of inference:
            ``(8, 4096)`` or ``"8x4096"``.
        batch_axis (str | Sequence[str] | None): The axis or axes that split the batch; by default, all of the mesh that
            are called ``data``, ``fsdp`` and the like.
        remat (str | Mapping[str, str]): What blocks, the layers that the model repeats, compute again in the backward
            pass instead of keeping it: ``none``, ``matmuls`` (all but products with weights) or ``full``; or that for
            each kind, by the name of its class. By default ``auto``: what is fastest within the limit; without one,
            ``none``.
        sequence_parallel (str | bool): Whether the axes for weights split activations along their sequence between the
            products with weights, in training (Megatron's sequence parallelism). By default ``"auto"``: if a step does
            not fit as it is.

    Raises:
        DoesNotFitError: When no layout keeps the limit; the message says which limit is enough.
        LayoutError: When the model cannot be traced, or a pin is impossible or matches nothing.
        UsageError: When an argument is of the wrong kind.
    """
    return MeshSearch("search", model, mesh, options).within(options.get("device_memory_bytes"))


class MeshSearch:
    """A search for layouts on one mesh, for a step that is traced once: call `within` with any memory limits."""

    def __init__(self, caller: str, model: Any, mesh: MeshLike | MeshSpec, options: SearchOptions) -> None:
        """Check the options of `search`, and trace the step; ``caller`` is the public function that errors name."""
        check_options(caller, options, SearchOptions)
        check_built(model)
        self.mesh = mesh_spec(mesh)
        check_positive(device_memory_bytes=options.get("device_memory_bytes"))
        self.mesh.check_no_stages()
        self.batch_axes = batch_axes_of(self.mesh, options.get("batch_axis"))
        self.pins = options.get("pins")
        self.saving = checked_saving(options.get("remat", "auto"), options.get("sequence_parallel", "auto"))
        rows = BATCH_PER_POSITION * math.prod(map(self.mesh.axis_size, self.batch_axes))
        self.step = traced_step(model, self.mesh, options, rows=rows)

    def within(self, limit: int | None) -> LayoutPlan:
        """Return the best plan that needs at most ``limit`` bytes on each device."""
        return self.step.on(
            self.mesh, device_memory_bytes=limit, pins=self.pins, batch_axes=self.batch_axes, saving=self.saving
        )


def traced_step(model: Any, mesh: MeshSpec, options: StepOptions, *, rows: int) -> LayoutSearch:
    """Check the options of a step, and return a search for it; ``rows`` is the batch size if the options state none."""
    batch, sequence, inputs = options.get("batch"), options.get("sequence"), options.get("inputs")
    check_positive(batch=batch, sequence=sequence)
    hardware = Hardware.of(options.get("hardware"))
    hardware.check(mesh)
    if inputs is None:
        inputs = input_specs(model, batch=batch or rows, sequence=sequence)
    check_rows(model, inputs, batch, sequence)
    arguments, optimizer = options.get("arguments"), options.get("optimizer")
    wanted = options.get("kv_cache")
    cache_size = None if wanted is None else rows_and_tokens(wanted)
    return LayoutSearch(
        model, inputs, arguments=arguments, optimizer=optimizer, hardware=hardware, cache_size=cache_size
    )


class LayoutSearch:
    """Searches layouts for one step of a model, on any mesh: JAX records the step once for all searches."""

    def __init__(
        self,
        model: Any,
        inputs: Any,
        *,
        arguments: Mapping[str, Any] | None = None,
        optimizer: Any = None,
        hardware: Hardware | None = None,
        cache_size: tuple[int, int] | None = None,
    ) -> None:
        """Let JAX record a step of the model on shapes: a training step if there is an optimizer, else inference.

        ``cache_size`` has rows and tokens of a KV cache to count.
        """
        if cache_size is not None and optimizer is not None:
            raise UsageError("Cannot count a KV cache in a step of training: leave out kv_cache (--kv-cache)")
        self.cache_size = cache_size
        optimizer = None if optimizer is None else checked_optimizer(optimizer)
        self.model, self.inputs, self.hardware = model, inputs, Hardware.of(hardware)
        with collector_paused():
            self.recorded = record_program(model, inputs, training=optimizer is not None, arguments=arguments)
        self.optimizer_memory = memory_of_optimizer(optimizer, model.trainable_variables)

    @functools.cached_property
    def _kv_cache(self) -> KvCache | UnsupportedError | None:
        """The KV cache to count; the error is the reason why a cache that is asked for cannot be counted."""
        if self.cache_size is None:
            return None
        rows, tokens = self.cache_size
        try:
            return KvCache.of(self.model, rows=rows, tokens=tokens)
        except UnsupportedError as error:
            return error

    @functools.cached_property
    def _traced(self) -> Traced:
        return trace(self.recorded)

    @functools.cached_property
    def _dim_groups(self) -> DimGroups:
        return DimGroups(self._traced)

    def on(
        self,
        mesh: MeshSpec,
        *,
        device_memory_bytes: int | None,
        batch_axes: Sequence[str] | None = None,
        pins: LayoutMap | Mapping[str, Any] | LayoutPlan | None = None,
        saving: Saving = EVERYTHING,
    ) -> LayoutPlan:
        """Return the best plan for the step on a mesh, within ``device_memory_bytes`` per device unless ``None``."""
        if isinstance(pins, LayoutPlan) and mesh.parts_in(pins.mesh) is not None:
            mesh = pins.mesh
        axes = mesh.batch_axes if batch_axes is None else tuple(batch_axes)
        limit = None if device_memory_bytes is None else int(device_memory_bytes)  # JSON has no integers of NumPy
        plan = self._plan(self._fastest(_Asked(mesh, axes, fixed_specs(self.model, mesh, pins), limit), saving))
        return replace(plan, notes=(*plan.notes, *self._without_effect(saving, plan)))

    def _without_effect(self, saving: Saving, plan: LayoutPlan) -> Iterator[str]:
        """Yield notes on what was asked for, and is not in the plan."""
        training = self.recorded.training
        if isinstance(self._kv_cache, UnsupportedError):
            yield f"the KV cache is not counted: {self._kv_cache}"
        if saving.sequence_parallel is True and not plan.sequence_axes:
            yield (
                "no sequence is split between products: "
                + (
                    "either no axis for weights divides one, or they all split other dims of activations"
                    if training
                    else "that is for training steps"
                )
            )
        if saving.remat in ("matmuls", "full") and not plan.remat:
            yield "nothing is recomputed: " + (
                "the model repeats no layer that has layers in it" if training else "that is for training steps"
            )

    def fastest_of(
        self, meshes: Iterable[MeshSpec], device_memory_bytes: int | None, *, saving: Saving = EVERYTHING
    ) -> tuple[LayoutPlan | None, tuple[TriedMesh, ...]]:
        """Return the best plan on the mesh of ``meshes`` where it is fastest, and what was found on each.

        The plan is ``None`` if it fits on none. Without a limit, the best plan has the least product of the time of a
        step and the bytes of weights on a device, as on one mesh.
        """
        found, tried = list[_Fastest](), list[TriedMesh]()
        for mesh in meshes:
            asked = _Asked(mesh, mesh.batch_axes, fixed_specs(self.model, mesh, None), device_memory_bytes)
            try:
                # What does not fit if everything is done to save memory does not fit otherwise.
                if saving == EVERYTHING and self.recorded.training and device_memory_bytes is not None:
                    self._fastest(asked, Saving("full", sequence_parallel=True))
                found.append(self._fastest(asked, saving))
                tried.append(TriedMesh(mesh, found[-1].memory.total, found[-1].step_s))
            except DoesNotFitError as error:
                tried.append(TriedMesh(mesh, error.least_bytes, None))
        limited = device_memory_bytes is not None
        best = min(found, key=lambda one: one.step_s * (1 if limited else one.memory.weights), default=None)
        return None if best is None else self._plan(best), tuple(tried)

    def _plan(self, found: _Fastest) -> LayoutPlan:
        with collector_paused():
            return plan_of_solution(
                self.model,
                found.problem,
                found.demand,
                found.solution,
                inputs=self.inputs,
                batch_axes=found.asked.batch_axes,
                limit=found.asked.limit,
            )

    def _fastest(self, asked: _Asked, saving: Saving) -> _Fastest:
        """Return the fastest solution within the limit, of all ways to save memory; raise if none fits."""
        mesh = asked.mesh
        mesh.check_no_stages()
        with collector_paused():
            divided = divided_mesh(self._traced, mesh, batch_axes=asked.batch_axes)
            found, failed = list[_Fastest](), list[DoesNotFitError]()
            for kinds, split_sequence in self._ways(saving, divided, asked, failed):
                try:
                    found.append(self._solved(divided, asked, kinds, split_sequence))
                except DoesNotFitError as error:
                    failed.append(error)
                # Nothing is faster than to recompute nothing, unless weights are stored split to make room.
                if found and not any(option.stored for option in found[-1].solution.options):
                    break
            if not found:
                raise self._with_advice(min(failed, key=lambda error: error.least_bytes), divided, asked, saving)
            best = min(found, key=lambda one: one.step_s)
            # Parts of an axis are of use only if one of them splits a weight without the other.
            if divided != mesh and not splits_part_of_axis(best.problem, best.solution, mesh.parts_in(divided) or {}):
                with suppress(DoesNotFitError):
                    return self._solved(mesh, asked, best.problem.lifetimes.remat, best.problem.sequence is not None)
            return best

    def _ways(
        self, saving: Saving, mesh: MeshSpec, asked: _Asked, failed: Sequence[DoesNotFitError]
    ) -> Iterator[tuple[Mapping[str, Recompute], bool]]:
        """Yield what to try: what blocks recompute, and whether activations are split along their sequence.

        ``failed`` has the errors of what was tried so far.
        """
        limited, split = asked.limit is not None, saving.sequence_parallel
        may_split = self._may_split_sequence(mesh, asked)
        for kinds in self._rematerialised(saving.remat, limited=limited):
            if split != "auto":
                yield kinds, split and may_split
                continue
            # First as XLA does it by itself. If that does not fit, a split of the sequence needs less memory, and no
            # more time where sums are scattered.
            if not (failed and may_split and self.hardware.reduce_scatter):
                yield kinds, False
            if failed and may_split:
                yield kinds, True

    def _may_split_sequence(self, mesh: MeshSpec, asked: _Asked) -> bool:
        """Whether a step of training has activations with a sequence that axes for weights can split."""
        axes = [a for a in mesh.axes_of("model") if a not in asked.batch_axes]
        parts = math.prod(map(mesh.axis_size, axes))
        program = self._traced.program
        lengths = [math.prod(map(program.length, program.factors(dim))) for dim in self._traced.sequences]
        return self._traced.training and parts > 1 and any(n % parts == 0 for n in lengths)

    def _with_advice(self, error: DoesNotFitError, mesh: MeshSpec, asked: _Asked, saving: Saving) -> DoesNotFitError:
        """Return the error of a search, which says what would need less if less was tried than there is."""
        everything = next(self._rematerialised("full", limited=True))
        may_split = self._may_split_sequence(mesh, asked)
        tries_all = saving.remat in ("auto", "full") or not everything
        if (tries_all and (saving.sequence_parallel or not may_split)) or asked.limit is None:
            return error
        try:
            self._solved(mesh, asked, everything, may_split)
            needed = asked.limit
        except DoesNotFitError as other:
            needed = other.least_bytes
        if needed >= error.least_bytes:
            return error
        flags = " ".join(
            ["--remat auto"] * (not tries_all) + ["--sequence-parallel auto"] * (not saving.sequence_parallel)
        )
        said = f"{error.problem}. With everything done to save memory, it needs {format_bytes_up(needed)} ({flags})"
        if needed == asked.limit:
            said = f"{error.problem}. It fits with {flags}"
        return DoesNotFitError(said, least_bytes=error.least_bytes)

    def _rematerialised(self, remat: Remat, *, limited: bool) -> Iterator[Mapping[str, Recompute]]:
        """Yield what to try: for each kind of blocks, whether and what it recomputes."""
        kinds = sorted({*self._traced.blocks.values()}) if self._traced.training else []
        if isinstance(remat, Mapping):
            if unknown := [kind for kind in remat if kind not in kinds and self._traced.training]:
                raise UsageError(
                    f"Cannot recompute {unknown[0]!r:.60}: the model repeats no block of that class."
                    + (did_you_mean(str(unknown[0]), kinds) or (f" It repeats {', '.join(kinds)}" if kinds else ""))
                )
            yield {kind: mode for kind, mode in remat.items() if mode != "none"}
        elif remat in ("matmuls", "full"):
            yield dict.fromkeys(kinds, remat)
        elif remat == "none" or not limited or not kinds:
            yield {}
        else:
            # Alike for all kinds, then mixed, if there are few.
            modes: tuple[Literal["none", "matmuls", "full"], ...] = ("none", "matmuls", "full")
            alike = [dict.fromkeys(kinds, mode) for mode in modes]
            mixed = itertools.product(modes, repeat=len(kinds)) if 1 < len(kinds) <= _MOST_MIXED else ()
            tried = [*alike, *(one for m in mixed if (one := dict(zip(kinds, m, strict=True))) not in alike)]
            for one in tried:
                yield {kind: mode for kind, mode in one.items() if mode != "none"}

    def _solved(
        self,
        mesh: MeshSpec,
        asked: _Asked,
        remat: Mapping[str, Recompute],
        split_sequence: bool,
    ) -> _Fastest:
        """Search on a mesh that may have parts of the axes of the mesh that was asked for."""
        parts = asked.mesh.parts_in(mesh) or {}
        divided = {
            key: tuple(tuple(itertools.chain(*(parts[axis] for axis in axes))) for axes in spec)
            for key, spec in asked.pins.items()
        }
        problem = make_problem(
            self._traced,
            self._dim_groups,
            mesh,
            self.hardware.on(mesh, parts),
            batch_axes=asked.batch_axes,
            pins=divided,
            optimizer=self.optimizer_memory,
            asked=asked.mesh,
            remat=remat,
            split_sequence=split_sequence,
            kv_cache=self._kv_cache if isinstance(self._kv_cache, KvCache) else None,
        )
        return _Fastest(asked, problem, *optimum(problem, asked.limit))


@dataclass(frozen=True, slots=True)
class TriedMesh:
    """What a search found on one of several meshes."""

    mesh: MeshSpec
    device_bytes: int
    """Bytes that a device needs; if that exceeds the limit, the least that was found."""
    step_s: float | None
    """Estimated seconds of a step, with the work that takes the same time under every layout; ``None`` if it does not
    fit."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a search on a mesh is asked for."""

    mesh: MeshSpec
    batch_axes: tuple[str, ...]
    pins: Mapping[int, Spec]
    limit: int | None


@dataclass(frozen=True, slots=True)
class _Fastest:
    """What a search on a mesh found."""

    asked: _Asked
    problem: Problem
    demand: Demand
    solution: Solution

    @property
    def memory(self) -> DeviceBytes:
        """What a device needs at the moment of a step at which it needs most."""
        return memory_of(self.problem, self.solution)

    @property
    def step_s(self) -> float:
        """Seconds of a step, with the work that takes the same time under every layout."""
        return self.solution.seconds + self.problem.fixed_s
