"""Search layouts, compile the planned step without weights, and search again as long as it is over the limit.

    limit ─► search ─► plan ─► compile ─► fits: the plan, with what was compiled
               ▲                  │ over the limit: a lower limit for the estimate, at most `ATTEMPTS` times
               └──────────────────┘

An estimate may also be too high: where no layout fits by the estimate, the one that needs least is compiled too, if its
weights and slots alone fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

from shardload.errors import DoesNotFitError
from shardload.layout_checks.compiled_step import CompiledStep, compile_step
from shardload.layout_search.layout_plan import LayoutPlan
from shardload.layout_search.plan_parts import Attempt
from shardload.layout_search.searching import MeshSearch, SearchOptions
from shardload.sharding.mesh import MeshSpec
from shardload.typing import MeshLike
from shardload.units import format_bytes, format_bytes_down, format_bytes_up

ATTEMPTS = 4
"""How many plans are compiled before the search gives up."""
HEADROOM = 0.99
"""Factor on a lowered limit, beyond the ratio, so that rounding does not cost one more attempt."""
ROUNDING = 1.005
"""Factor on the least memory to find its plan again, which allows for the tolerance of the solver."""

WHOLE_GRADIENTS = (
    "XLA for CPU adds up whole gradients of weights that are stored split; XLA for accelerators does not. In Python, "
    "search_compiled(devices=...) compiles for other devices"
)


@dataclass(frozen=True, slots=True)
class CheckedPlan:
    """A plan, with its compiled step."""

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
    """Search layouts, and check them by compiling the step; over the limit, take the next plan.

    The estimate of a search decides which layouts are tried, the compiled program decides which one is returned.
    Nothing is allocated, and the model may have no values.

    Args:
        model: As for `search`.
        mesh: As for `search`.
        target: As for `compile_step`.
        loss: As for `compile_step`.
        devices: As for `compile_step`: those of ``jax.experimental.topologies`` compile for another machine.

    Keyword Args:
        inputs (Any): As for `search`.
        arguments (Mapping[str, Any] | None): As for `search`.
        batch (int | None): As for `search`.
        sequence (int | None): As for `search`.
        optimizer (Any): As for `search`; ``None`` compiles inference.
        device_memory_bytes (int | None): The limit that the compiled step must keep; without one, the first plan is
            returned.
        pins (LayoutMap | Mapping[str, Any] | LayoutPlan | None): As for `search`.
        hardware (Hardware | None): As for `search`.
        batch_axis (str | None): As for `search`.

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
    searched: Callable[[int | None], LayoutPlan],
    compiled: Callable[[LayoutPlan], CompiledStep],
    limit: int | None,
) -> CheckedPlan:
    """Search and compile until a compiled step keeps the limit."""
    plan, attempts = _first(searched, limit), list[Attempt]()
    while True:
        step = compiled(plan)
        if limit is None or step.fits(limit):
            check = replace(step.for_plan(), attempts=tuple(attempts))
            return CheckedPlan(replace(plan, compiled=check, device_memory_bytes=limit), step)
        attempts.append(Attempt(plan.device.total, step.total_bytes))
        following = _next(searched, plan, step, limit) if len(attempts) < ATTEMPTS else None
        if following is None:
            raise _does_not_fit(plan, step, attempts, limit)
        plan = following


def _first(searched: Callable[[int | None], LayoutPlan], limit: int | None) -> LayoutPlan:
    """Return the plan for a limit; where the estimate says that none fits, the one that needs least."""
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


def _next(
    searched: Callable[[int | None], LayoutPlan], plan: LayoutPlan, step: CompiledStep, limit: int
) -> LayoutPlan | None:
    """Search with the limit lowered by the ratio of what was estimated to what was compiled."""
    found: LayoutPlan | None
    try:
        found = searched(int(plan.device.total * limit / step.total_bytes * HEADROOM))
    except DoesNotFitError as error:
        found = _least(searched, error)
    # A plan that is estimated to need as much would compile to as much again.
    return found if found is not None and found.device.total < plan.device.total else None


def _least(searched: Callable[[int | None], LayoutPlan], error: DoesNotFitError) -> LayoutPlan | None:
    """Return the plan that needs least, of which an error reports the bytes."""
    try:
        return searched(int(error.least_bytes * ROUNDING))
    except DoesNotFitError:
        return None


def _does_not_fit(plan: LayoutPlan, step: CompiledStep, attempts: Sequence[Attempt], limit: int) -> DoesNotFitError:
    least = min(attempt.compiled_bytes for attempt in attempts)
    stored = plan.training and any(v.stored for v in plan.variables)
    return DoesNotFitError(
        f"No layout on {plan.mesh} was found whose compiled step needs at most {format_bytes_down(limit)} per device. "
        f"For {step.platform}, {', '.join(map(str, attempts))}: at least {format_bytes(least - limit)} too much. Use a "
        f"larger mesh, a smaller batch, or a limit of {format_bytes_up(least)}"
        + (f". {WHOLE_GRADIENTS}" if step.platform == "cpu" and stored else ""),
        least_bytes=least,
    )
