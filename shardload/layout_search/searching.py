"""Search the layouts of a model on a mesh: the entry point of this package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any

from shardload.errors import DoesNotFitError, LayoutError
from shardload.layout_search.hardware import Hardware
from shardload.layout_search.layout_plan import DeviceBytes, LayoutPlan
from shardload.layout_search.optimizer_memory import checked_optimizer, needs_of
from shardload.layout_search.pins import fixed_specs
from shardload.layout_search.plan_building import make_plan
from shardload.layout_search.problem import Problem, make_problem
from shardload.layout_search.solution_memory import (
    MOMENTS,
    fastest_that_fits,
    peak,
    small_bytes,
    state_of,
    weight_bytes,
)
from shardload.layout_search.solving import Demand, Solution, solve
from shardload.layout_search.tracing import (
    Traced,
    check_rows,
    collector_paused,
    input_specs,
    record,
    trace,
)
from shardload.layouts.model_variables import check_model
from shardload.sharding.devices import mesh_spec
from shardload.sharding.mesh import MeshSpec
from shardload.typing import LayoutMap, MeshLike
from shardload.units import format_bytes, format_bytes_down, format_bytes_up

BATCH_PER_POSITION = 8
"""Rows of the default batch for each position of the batch axis."""
TRADE_OFFS = (1.02, 1.1, 1.25, 1.5, 2.0, 3.0, 4.0, 8.0, 16.0)
"""Multiples of the least memory for weights that are tried where no device memory is given."""


def search(
    model: Any,
    mesh: MeshLike | MeshSpec,
    *,
    inputs: Any = None,
    arguments: Mapping[str, Any] | None = None,
    batch: int | None = None,
    sequence: int | None = None,
    optimizer: Any = None,
    device_memory_bytes: int | None = None,
    pins: LayoutMap | Mapping[str, Any] | LayoutPlan | None = None,
    hardware: Hardware | None = None,
    batch_axis: str | None = None,
) -> LayoutPlan:
    """Find the layouts that make a step fastest within a memory limit, for any Keras model.

    Traces the model on shapes, finds which dims must be split alike, and lets a mixed-integer linear program choose
    for all axes and weights together. No value is read and nothing is compiled; variables may have no values.

    Without ``device_memory_bytes`` no limit is known, and replicating everything would often be fastest: the search
    then returns the plan with the least product of step time and bytes of weights on each device.

    Args:
        model: A built Keras model.
        mesh: The mesh, such as ``"data=2,model=4"``. An axis of kind ``batch`` splits the first dim of the inputs; with
            a memory limit it may also split the storage of weights, which are then gathered for use.
        inputs: The first argument of a call, as arrays or ``jax.ShapeDtypeStruct``; by default what a functional model
            declares, with ``batch`` rows and ``sequence`` for every other open dim (512).
        arguments: Other arguments of a call, by name.
        batch: Rows of the default inputs, over all devices; a model that fixes another number is an error.
        sequence: Length of open dims of the default inputs.
        optimizer: Plan a training step with this optimizer, a name or an instance; by default, plan inference.
        device_memory_bytes: Hard limit for weights, gradients, slots and activations of each device.
        pins: Layouts that are fixed, as rules: ``{"embedding/embeddings": ("model", None)}``, also with a
            ``PartitionSpec`` for each variable; a `keras.distribution.LayoutMap`; or another plan of the model on this
            mesh. What `shardload.layout_rule` says of a layer class is fixed too.
        hardware: Rates of devices and links.
        batch_axis: The axis that splits the batch; by default the mesh's.

    Raises:
        DoesNotFitError: When no layout keeps the limit; the message says which limit is enough.
        LayoutError: When the model cannot be traced, or a pin is impossible or matches nothing.
        UsageError: When an argument is of the wrong kind.
    """
    check_built(model)
    check_positive(batch=batch, sequence=sequence, device_memory_bytes=device_memory_bytes)
    mesh = mesh_spec(mesh)
    hardware = Hardware.of(hardware)
    hardware.check(mesh)
    axis = batch_axis_of(mesh, batch_axis)
    if inputs is None:
        inputs = default_inputs(model, mesh, batch=batch, sequence=sequence, batch_axis=axis)
    check_rows(model, inputs, batch)
    found = LayoutSearch(model, inputs, arguments=arguments, optimizer=optimizer, hardware=hardware)
    return found.on(mesh, batch_axis=axis, pins=pins, device_memory_bytes=device_memory_bytes)


class LayoutSearch:
    """Searches for the layouts of one step of a model, which is traced once for all meshes and limits."""

    def __init__(
        self,
        model: Any,
        inputs: Any,
        *,
        arguments: Mapping[str, Any] | None = None,
        optimizer: Any = None,
        hardware: Hardware | None = None,
    ) -> None:
        """Trace the step.

        Args:
            model: A built Keras model.
            inputs: The first argument of a call, as arrays or ``jax.ShapeDtypeStruct``.
            arguments: As for `search`.
            optimizer: As for `search`.
            hardware: As for `search`.

        Raises:
            LayoutError: When the model cannot be traced.
            UsageError: When an argument is of the wrong kind.
        """
        optimizer = None if optimizer is None else checked_optimizer(optimizer)
        self.model, self.inputs, self.hardware = model, inputs, Hardware.of(hardware)
        with collector_paused():
            self.recorded = record(model, inputs, training=optimizer is not None, arguments=arguments)
        self.needs = needs_of(optimizer, model.trainable_variables)
        self._traces: dict[frozenset[int], Traced] = {}

    def on(
        self,
        mesh: MeshSpec,
        *,
        device_memory_bytes: int | None,
        batch_axis: str | None = None,
        pins: LayoutMap | Mapping[str, Any] | LayoutPlan | None = None,
    ) -> LayoutPlan:
        """Return the best plan on a mesh.

        Args:
            mesh: The mesh.
            device_memory_bytes: Hard limit for each device, if there is one.
            batch_axis: The axis that splits the batch; by default the mesh's.
            pins: As for `search`.

        Raises:
            DoesNotFitError: When no layout keeps the limit.
            LayoutError: When a pin is impossible, pins contradict each other, or the mesh has no such axis.
        """
        axis = batch_axis_of(mesh, batch_axis)
        fixed = fixed_specs(self.model, mesh, pins)
        with collector_paused():
            traced = self._traced(mesh)
            problem = make_problem(traced, mesh, self.hardware, batch_axis=axis, pins=fixed, optimizer=self.needs)
            return _plan(self.model, problem, inputs=self.inputs, batch_axis=axis, limit=device_memory_bytes)

    def _traced(self, mesh: MeshSpec) -> Traced:
        """Return the program for the sizes of a mesh: 2x4 and 4x2 share one."""
        key = frozenset(mesh.sizes)
        if key not in self._traces:
            self._traces[key] = trace(self.recorded, divisors=mesh.sizes)
        return self._traces[key]


def default_inputs(
    model: Any, mesh: MeshSpec, *, batch: int | None, sequence: int | None, batch_axis: str | None = None
) -> Any:
    """Return the inputs to plan for where the caller gives none: those that a functional model declares.

    Args:
        model: The model.
        mesh: The mesh.
        batch: Rows; by default `BATCH_PER_POSITION` for each position of the batch axis.
        sequence: Length of open dims.
        batch_axis: The axis that splits the batch; by default the mesh's.

    Raises:
        LayoutError: When the model does not declare its inputs, or the mesh has no such axis.
    """
    rows = batch or BATCH_PER_POSITION * mesh.axis_size(batch_axis_of(mesh, batch_axis))
    return input_specs(model, batch=rows, sequence=sequence)


def batch_axis_of(mesh: MeshSpec, given: str | None) -> str:
    """Return the axis that splits the batch; by default the mesh's.

    Raises:
        LayoutError: When the mesh has no such axis.
    """
    if given is not None and not (isinstance(given, str) and given in mesh.axes):
        raise LayoutError(f"Cannot split the batch over {given!r}: the mesh {mesh} has no such axis")
    return mesh.batch_axis if given is None else given


def check_positive(**numbers: Any) -> None:
    """Check arguments that are positive integers, or ``None``.

    Raises:
        LayoutError: For the first that is neither.
    """
    for name, number in numbers.items():
        if number is not None and (isinstance(number, bool) or not isinstance(number, Integral) or number < 1):
            raise LayoutError(f"Cannot plan with {name}={number!r}: expected a positive integer")


def check_built(model: Any) -> None:
    """Check that a model has variables to plan.

    Raises:
        LayoutError: When it is not built.
        UsageError: When it is not a Keras model.
    """
    check_model(model, to="plan")
    # Keras counts a subclassed model as built after build(), even if its layers have to be called first.
    is_empty = not model.variables and any(not layer.built for layer in getattr(model, "layers", ()))
    if is_empty or not getattr(model, "built", True):
        raise LayoutError(
            f"Cannot plan {model.name!r}: it has no variables yet. Call it on a keras.Input or a batch once to build it"
        )


def _plan(model: Any, problem: Problem, *, inputs: Any, batch_axis: str, limit: int | None) -> LayoutPlan:
    limit = None if limit is None else int(limit)  # JSON takes no integers of NumPy
    demand = Demand(storage_axes=tuple(_storage_axes(problem.mesh, limit)))
    if limit is None:
        demand, solution = _best_product(problem, demand)
    else:
        demand, solution = _within(problem, demand, limit)
    return make_plan(model, problem, demand, solution, inputs=inputs, batch_axis=batch_axis, limit=limit)


def _storage_axes(mesh: MeshSpec, limit: int | None) -> Sequence[str]:
    # Under a limit any axis may store weights split. Without one, only an axis that is named for it.
    return [a for a in mesh.axes if mesh.axis_size(a) > 1 and (limit is not None or mesh.axis_kind(a) == "fsdp")]


# ---- which optimum -----------------------------------------------------------------------------------


def _best_product(problem: Problem, demand: Demand) -> tuple[Demand, Solution]:
    """Return the solution with the least product of step time and weight bytes per device."""
    # A product is not linear. So solve for time under rising limits of memory, and take the best product of the curve.
    least = _solved(problem, replace(demand, minimise="memory"))
    fewest = weight_bytes(problem, least)
    best: tuple[float, Demand, Solution] | None = None
    whole = sum(w.nbytes * len(w.members) for w in problem.weights)
    for factor in TRADE_OFFS:
        tried = replace(demand, state_limit_bytes=fewest * factor)
        found = _solved(problem, tried)
        product = found.seconds * weight_bytes(problem, found)
        # Of equal products, the first, which needs less memory.
        if best is None or product < best[0] * (1 - 1e-6):
            best = product, tried, found
        # Everything replicated is allowed now: a higher limit changes nothing.
        if fewest * factor >= whole:
            break
    assert best is not None
    return best[1], best[2]


def _solved(problem: Problem, demand: Demand) -> Solution:
    found = solve(problem, demand)
    if found is None:
        raise LayoutError(f"Cannot plan on {problem.mesh}: the pinned layouts contradict each other. Remove some")
    return found


def _within(problem: Problem, demand: Demand, limit: int) -> tuple[Demand, Solution]:
    """Return the fastest solution whose peak fits; only where there is none, small weights are stored split too."""
    demand, fastest = fastest_that_fits(problem, replace(demand, limit_bytes=float(limit)))
    if fastest is not None:
        return demand, fastest
    found, least = _least(problem, demand)
    if least.total <= limit:
        return demand, found
    # Small weights stay whole as long as possible; only if storing them split could suffice, start again with that.
    if not demand.small and least.total - small_bytes(problem, found) <= limit:
        return _within(problem, replace(demand, small=True, buffers=()), limit)
    raise _does_not_fit(problem, least, limit)


def _least(problem: Problem, demand: Demand) -> tuple[Solution, DeviceBytes]:
    """Minimise memory, adding moments of the program, and return the best solution on the way, with its needs."""
    demand = replace(demand, minimise="memory", limit_bytes=None)
    best: tuple[Solution, DeviceBytes] | None = None
    for _ in range(MOMENTS):
        found = _solved(problem, demand)
        activations, moment = peak(problem, found)
        needs = replace(state_of(problem, found), activations=activations)
        if best is None or needs.total < best[1].total:
            best = found, needs
        if moment in demand.buffers:
            break
        demand = replace(demand, buffers=(*demand.buffers, moment))
    assert best is not None
    return best


def _does_not_fit(problem: Problem, least: DeviceBytes, limit: int) -> DoesNotFitError:
    state = least.total - least.activations
    what, way_out = "activations", "Use a larger mesh, a smaller batch, or a limit of that size"
    # A larger mesh does not help: the update gathers state on every device.
    if least.activations <= problem.update_bytes:
        what = "memory for the optimizer's update, on any mesh"
        way_out = "Use a limit of that size, or let AdamW update more of the weights (REKLS: max_dimension, adamw_for)"
    return DoesNotFitError(
        f"No layout on {problem.mesh} needs at most {format_bytes_down(limit)} per device. The least found is "
        f"{format_bytes_up(least.total)}: {format_bytes(state)} of weights, gradients and slots, and "
        f"{format_bytes(least.activations)} of {what}. {way_out}",
        least_bytes=least.total,
        hint="; search_compiled (plan --compile) finds out whether the compiled step needs less",
    )
