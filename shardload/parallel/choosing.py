"""Choose layouts for a model, find a mesh on which it fits, and search layouts with a check by compiling the step.

`choose`: a layout for every variable of a model::

    "auto", "keras_hub", "replicated", rules, a LayoutMap ─► layouts.choosing
    a distribution of keras.distribution                  ─► the layouts that it gives to variables
    "search"                                              ─► layout_search ─► a plan
    a plan, or its file                                   ─► layout_search.given_layouts

`search_compiled`: a search, checked by compiling the planned step without weights::

    limit ─► search ─► plan ─► compile ─► fits: the plan, with what was compiled
               ▲                  │ over the limit: a lower limit for the estimate, at most `_ATTEMPTS` times
               └──────────────────┘
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Unpack, cast

from shardload.errors import DoesNotFitError, LayoutError, UsageError
from shardload.keras_bridge import distributions
from shardload.layout_checks.compiled_step import CompiledStep, compile_step
from shardload.layout_search.given_layouts import choose_by_plan
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.plan_parts import Attempt
from shardload.layout_search.search_arguments import SearchOptions
from shardload.layout_search.searching import MeshSearch, search
from shardload.layout_search.smallest_mesh import MAX_DEVICES
from shardload.layouts import model_variables
from shardload.layouts.choice import LayoutChoice
from shardload.layouts.choosing import MODES, choose_by_distribution, choose_by_rules, rules_in_file
from shardload.layouts.kv_cache import KvCache
from shardload.sharding.devices import mesh_spec
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.typing import LayoutLike, MeshLike
from shardload.units import check_kind, format_bytes, format_bytes_down, format_bytes_up, is_integer, plural


def choose(model: Any, mesh: MeshLike | MeshSpec, layout: LayoutLike = "auto") -> LayoutChoice:
    """Choose a layout for every variable of a built model.

    Reads layer objects, shapes and dtypes only, so the variables may have no values yet.

    Examples:
        ```python
        choice = shardload.parallel.choose(model, "data=2,model=4")
        for variable in model.variables:
            print(variable.path, choice.of(variable))
        ```

    Args:
        model: A built Keras model.
        mesh: The mesh, such as ``"data=2,model=4"``; what its axes split follows from their names
            (`shardload.sharding.mesh`).
        layout: ``auto``, ``keras_hub`` (the backbone class' own ``get_layout_map``), ``replicated``, ``search`` (see
            `shardload.parallel.search`), a plan of that search or the path of its JSON file, a mapping of rules, a
            ``LayoutMap`` or a distribution of ``keras.distribution``, or the path of a rules file (see
            `shardload.layouts.rules`).

    Raises:
        LayoutError: When the mode is unknown, the class has no map, or a rule cannot be applied.
        UsageError: When ``model`` is not a Keras model.
    """
    model_variables.check_model(model, to="choose layouts for")
    mesh = mesh_spec(mesh)
    if distributions.is_distribution(layout):
        own = mesh_spec(cast("MeshLike", layout))
        if own != mesh:
            raise LayoutError(
                f"Cannot use this {type(layout).__name__} on the mesh {mesh}: its own is {own}. Use its own mesh"
            )
        if (shared := distributions.layout_of_models(layout)) is None:
            return choose_by_distribution(model, mesh, layout)
        layout = shared
    if isinstance(layout, str) and layout == "search":
        return choose_by_plan(model, mesh, search(model, mesh))
    if (plan := given_plan(layout)) is not None:
        return choose_by_plan(model, mesh, plan)
    return choose_by_rules(model, mesh, layout)


def given_plan(layout: Any) -> LayoutPlan | None:
    """Return the plan that a ``layout`` argument is, or names by its JSON file; ``None`` for other kinds of layouts."""
    if isinstance(layout, LayoutPlan):
        return layout
    if isinstance(layout, str | os.PathLike) and Path(layout).suffix == ".json" and Path(layout).exists():
        return LayoutPlan.load(layout)
    return None


def check_layout(layout: Any) -> None:
    """Raise if a layout given as text or a path is neither the name of a layout nor a file with a plan or rules."""
    if isinstance(layout, str) and not layout:
        modes = ", ".join(MODES)
        raise LayoutError(f"Cannot use layout='': expected {modes}, or the path of a file with a plan or rules")
    if isinstance(layout, str | os.PathLike) and str(layout) not in MODES and given_plan(layout) is None:
        rules_in_file(layout)


# ---- tensor parallelism on one axis ------------------------------------------------------------------


def autoconfig(model: Any, device_count: int, layout: LayoutLike = "auto") -> LayoutChoice:
    """Return the layout of each variable of a model for ``device_count`` devices, with its reason.

    Reads layers, einsum equations, shapes and dtypes only: the variables may have no values, and the devices need not
    exist. ``choice.of(variable)`` is a variable's layout, ``choice.by_id[id(variable)].rule`` the reason, and
    ``choice.fallbacks`` lists what did not divide.

    Examples:
        ```python
        choice = shardload.parallel.autoconfig(model, device_count=8)
        print(choice.summary())
        ```

    Args:
        model: A built Keras model.
        device_count: Number of devices.
        layout: How to choose layouts, such as ``auto`` or a plan; see `shardload.parallel.choose`.

    Raises:
        UsageError: When ``device_count`` is not a positive integer.
        LayoutError: As in `shardload.parallel.choose`, and when a plan is for another number of devices, or for a mesh
            of several axes.
    """
    return choose(model, mesh_for(layout, device_count), layout)


def mesh_for(layout: LayoutLike, device_count: int) -> MeshSpec:
    """Return the mesh for tensor parallelism: of a plan with one axis, its own; else ``1xN`` for N devices."""
    plan, mesh = given_plan(layout), tensor_parallel_mesh(device_count)
    if plan is None:
        return mesh
    own = plan.mesh
    # Axes of one position split nothing, so `batch=1,model=4` counts as one axis.
    if sum(size > 1 for size in own.sizes) > 1:
        raise LayoutError(
            f"Cannot use the plan for {own} for tensor parallelism: it has several axes, expected one, such as 1x"
            f"{own.size}. Use AutoShardDistribution(layout=plan), or plan again"
        )
    if own.size != device_count:
        raise LayoutError(
            f"Cannot use the plan for {own} on {plural(device_count, 'device')}: expected {own.size}. Use "
            f"{own.size}, or plan again"
        )
    return own


def tensor_parallel_mesh(device_count: int) -> MeshSpec:
    """Return the mesh of ``device_count`` devices along the ``model`` axis; each of them gets the whole batch."""
    if not (is_integer(device_count) and device_count >= 1):
        raise UsageError(f"Cannot use device_count={device_count!r}: expected a positive integer")
    return MeshSpec(DEFAULT_AXES, (1, int(device_count)))


# ---- does it fit? ------------------------------------------------------------------------------------

_RESERVED_SHARE = 0.1
"""Least fraction of device memory that weights, and a KV cache that was asked for, leave free: for activations, the
runtime, and a KV cache that was not."""


@dataclass(frozen=True, slots=True)
class MeshFit:
    """A mesh, with the bytes of a model's weights on each device, and the bytes that weights may use there."""

    mesh: MeshSpec
    device_bytes: int
    """Bytes of the model's weights on each device of the mesh."""
    usable_bytes: int
    """Bytes of a device's memory that weights and cache may use; the rest is for activations and the runtime."""
    cache_bytes: int = 0
    """Bytes of the KV cache on each device, if one was asked for."""

    @property
    def fits(self) -> bool:
        """Whether the weights, and the KV cache, fit into the usable memory of a device."""
        return self.device_bytes + self.cache_bytes <= self.usable_bytes


def belongs_to_a_mesh(layout: Any) -> bool:
    """Whether a layout is for one mesh only: a LayoutMap or a distribution of Keras, a `LayoutPlan` or its file."""
    if isinstance(layout, str | os.PathLike):
        return Path(layout).suffix == ".json"
    return hasattr(layout, "device_mesh") or isinstance(layout, LayoutPlan)


_WeightBytes = Callable[[LayoutChoice], int]
"""A function that returns the bytes of the weights on each device under the layouts of a model."""


def fit(
    model: Any, mesh: MeshSpec, device_memory_bytes: int, *, layout: Any = "auto", cache: KvCache | None = None
) -> MeshFit:
    """Compute whether the weights of ``model``, and its KV cache if given, fit if 10 % of each device stays free."""
    return fit_weights(model, mesh, device_memory_bytes, layout=layout, cache=cache)


def fit_weights(
    model: Any,
    mesh: MeshSpec,
    device_memory_bytes: int,
    *,
    layout: Any,
    cache: KvCache | None,
    weight_bytes: _WeightBytes = attrgetter("device_bytes"),
) -> MeshFit:
    """Return the same as `fit`, for weights of which a device stores ``weight_bytes``, not those of ``model``."""
    is_number = isinstance(device_memory_bytes, int | float) and not isinstance(device_memory_bytes, bool)
    if not is_number or not math.isfinite(device_memory_bytes):
        raise UsageError(
            f"Cannot use device_memory_bytes={device_memory_bytes!r:.60}: expected the bytes of one device, such as "
            "16 << 30"
        )
    check_kind("cache", cache, KvCache | None, "the KvCache of the model")
    choice = choose(model, mesh, layout)
    cached = 0 if cache is None else cache.bytes_under(choice)
    return MeshFit(choice.mesh, weight_bytes(choice), int(device_memory_bytes * (1 - _RESERVED_SHARE)), cached)


def smallest_mesh(
    model: Any, device_memory_bytes: int, *, layout: Any = "auto", cache: KvCache | None = None
) -> MeshFit | None:
    """Return the smallest of the meshes 1x1, 1x2, 1x4, … that ``model`` fits on, or ``None`` if it fits on none.

    Args:
        model: A built model; its variables may have no values.
        device_memory_bytes: Memory of one device.
        layout: How to choose layouts; see `choose`. A LayoutMap belongs to one mesh and cannot be used here.
        cache: A KV cache that has to fit too, as `shardload.plan` finds it for ``kv_cache``.

    Raises:
        LayoutError: As `choose` does.
    """
    return smallest_fit(lambda mesh: fit(model, mesh, device_memory_bytes, layout=layout, cache=cache))


def smallest_fit(fit_on: Callable[[MeshSpec], MeshFit]) -> MeshFit | None:
    """Return the fit on the smallest of the meshes 1x1, 1x2, 1x4, …, by a function that returns the one on a mesh."""
    devices, whole = 1, None
    while devices <= MAX_DEVICES:
        found = fit_on(MeshSpec(DEFAULT_AXES, (1, devices)))
        if found.fits:
            return found
        # Stop where nothing divides any more. A doubling that saves nothing is not enough to stop: one variable may be
        # whole from there on while others still divide.
        if whole is None:
            whole = found.device_bytes + found.cache_bytes
        elif found.device_bytes + found.cache_bytes >= whole:
            return None
        devices *= 2
    return None


# ---- compiled searches -------------------------------------------------------------------------------

_ATTEMPTS = 4
"""How many plans `search_compiled` compiles at most; if none of their steps fits the memory limit, it gives up."""
_HEADROOM = 0.99
"""If a compiled step needs too much, the next search gets a lower limit, times this factor: else its compiled step
could exceed the real limit by a little again."""
_ROUNDING = 1.005
"""A failed search names the least bytes that any plan needs. To get that plan, search again with these bytes times this
factor as the limit: the solver is not exact, and could fail with the bytes themselves."""

_WHOLE_GRADIENTS = (
    "XLA for CPU adds up whole gradients of weights that are stored split; XLA for accelerators does not. In Python, "
    "search_compiled(devices=...) compiles for other devices"
)
_PlanForLimit = Callable[[int | None], LayoutPlan]
"""A search as a function: from the most bytes that a device may use (``None``: no limit) to the best plan."""


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """A plan from a search, with its step as compiled by XLA, whose memory was compared with the limit."""

    plan: LayoutPlan
    step: CompiledStep


def search_compiled(
    model: Any,
    mesh: MeshLike | MeshSpec,
    *,
    target: Any = None,
    loss: Any = None,
    devices: Sequence[Any] | None = None,
    **options: Unpack[SearchOptions],
) -> LayoutPlan:
    """Search layouts, and check them by compiling the step; if it needs too much memory, try another plan.

    The estimate of a search decides which layouts are tried, the compiled program decides which one is returned.
    Nothing is allocated, and the model may have no values.

    Examples:
        ```python
        plan = shardload.parallel.search_compiled(model, "data=2,model=4", batch=16, optimizer="adamw")
        print(plan.compiled.total_bytes)
        ```

    Args:
        model: A built Keras model.
        mesh: The mesh, such as ``"data=2,model=4"`` (see `search`).
        target: What the loss compares the outputs with, as an array or shape.
        loss: As for Keras' ``compile``; by default the model's own (see `compile_step`).
        devices: One for each mesh position; those of ``jax.experimental.topologies`` compile for another machine.

    Keyword Args:
        inputs (Any): First argument of the model's ``call``, as arrays or shapes; by default as for `search`.
        arguments (Mapping[str, Any] | None): Further arguments of ``call``, by name.
        batch (int | None): Rows of the default inputs, over all devices.
        sequence (int | None): Length of open dims of the default inputs (512).
        optimizer (Any): Plan and compile a training step with this optimizer; ``None``: inference.
        device_memory_bytes (int | None): The limit that the compiled step must keep; without one, the first plan is
            returned.
        pins (LayoutMap | Mapping[str, Any] | LayoutPlan | None): Layouts that are fixed; see `search`.
        hardware (Hardware | None): Rates of devices and links.
        batch_axis (str | None): The axis that splits the batch; by default the mesh's.

    Returns:
        The plan, with its compiled step and the attempts before it in `LayoutPlan.compiled`.

    Raises:
        DoesNotFitError: When no plan that was tried compiles to a step within the limit.
        LayoutError: As `search` does.
        UsageError: As `search` does.
        MeshError: As `compile_step` does.
    """
    limit = options.get("device_memory_bytes")
    # Traced once, so that the search and the compiled step see the same batch.
    search = MeshSearch("search_compiled", model, mesh, options)

    def compiled(plan: LayoutPlan) -> CompiledStep:
        return compile_step(
            model,
            plan,
            search.step.inputs,
            training=options.get("optimizer"),
            target=target,
            loss=loss,
            kwargs=options.get("arguments"),
            devices=devices,
        )

    return first_that_fits(search.within, compiled, None if limit is None else int(limit)).plan


def first_that_fits(
    searched: _PlanForLimit, compiled: Callable[[LayoutPlan], CompiledStep], limit: int | None
) -> CheckedPlan:
    """Search plans with ever lower limits, and compile their steps, until a compiled step needs at most ``limit``."""
    plan, attempts = _first(searched, limit), list[Attempt]()
    while True:
        step = compiled(plan)
        if limit is None or step.fits(limit):
            check = replace(step.for_plan(), attempts=tuple(attempts))
            return CheckedPlan(replace(plan, compiled=check, device_memory_bytes=limit), step)
        attempts.append(Attempt(plan.device.total, step.total_bytes))
        following = _next(searched, plan, step, limit) if len(attempts) < _ATTEMPTS else None
        if following is None:
            least = min(attempt.compiled_bytes for attempt in attempts)
            stored = plan.training and any(v.stored for v in plan.variables)
            raise DoesNotFitError(
                f"No layout on {plan.mesh} was found whose compiled step needs at most {format_bytes_down(limit)} per "
                f"device. For {step.platform}, {', '.join(map(str, attempts))}: at least {format_bytes(least - limit)} "
                f"too much. Use a larger mesh, a smaller batch, or a limit of {format_bytes_up(least)}"
                + (f". {_WHOLE_GRADIENTS}" if step.platform == "cpu" and stored else ""),
                least_bytes=least,
            )
        plan = following


def _first(searched: _PlanForLimit, limit: int | None) -> LayoutPlan:
    """Return the best plan for a memory limit or, if none is estimated to fit, the plan that needs least memory.

    Estimates can be too high, so the compiled step of that plan may fit.
    """
    try:
        return searched(limit)
    except DoesNotFitError as error:
        plan = _least(searched, error)
        if limit is None or plan is None:
            raise
        # Weights and slots are exact. Only activations and gradients can turn out smaller than estimated.
        if plan.device.weights + plan.device.slots <= limit:
            return plan
        # Without the hint to compile, which is what was about to happen.
        too_large = f"{error.problem}. Weights and slots alone are too large"
        raise DoesNotFitError(too_large, least_bytes=error.least_bytes) from None


def _next(searched: _PlanForLimit, plan: LayoutPlan, step: CompiledStep, limit: int) -> LayoutPlan | None:
    """Search again, with a limit lowered by how much ``step`` exceeds its estimate; ``None`` if no plan needs less."""
    try:
        found: LayoutPlan | None = searched(int(plan.device.total * limit / step.total_bytes * _HEADROOM))
    except DoesNotFitError as error:
        found = _least(searched, error)
    # A plan that is estimated to need as much would compile to as much again.
    return found if found is not None and found.device.total < plan.device.total else None


def _least(searched: _PlanForLimit, error: DoesNotFitError) -> LayoutPlan | None:
    """Search again for the plan that needs least memory: ``error`` of the last search says how many bytes it needs."""
    try:
        return searched(int(error.least_bytes * _ROUNDING))
    except DoesNotFitError:
        return None
