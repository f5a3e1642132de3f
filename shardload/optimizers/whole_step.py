"""One step of the optimizer, for matrices and all other variables, as one traced function; or no step at all.

any gradient not finite         ─► nothing changes; ``skipped`` counts it
gradients are only accumulated  ─► nothing changes, nothing is computed
otherwise                       ─► matrices: `joint_update`; others: AdamW, element by element
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from shardload.optimizers import rekls_math
from shardload.optimizers.joint_update import JointPlan, MatrixState, StepNumbers, update
from shardload.optimizers.rekls_math import Array, Moments, Settings


class AdamwState(NamedTuple):
    """A variable that gets AdamW, and its state."""

    weight: Array
    moments: Moments
    """float32."""


class Counters(NamedTuple):
    """int32 scalars, since the optimizer was built."""

    steps: Array
    skipped: Array
    kept: Array


@dataclass(frozen=True, slots=True)
class Counts:
    """What did not go as planned, since the optimizer was built."""

    steps: int
    """Updates of the weights. Keras' ``iterations`` also counts those that are skipped."""
    skipped_steps: int
    """Steps whose gradients were not finite: they changed nothing."""
    kept_eigenpairs: int
    """Factors that kept their old eigenpairs, because a decomposition or the factor itself was not finite."""


class WholeState(NamedTuple):
    """Everything that a step changes."""

    matrices: list[MatrixState]
    others: list[AdamwState]
    counters: Counters


class Gradients(NamedTuple):
    """In the order of `WholeState`."""

    matrices: list[Array]
    others: list[Array]


@dataclass(frozen=True, slots=True)
class WholePlan:
    """Everything about a step but the arrays."""

    joint: JointPlan
    decays: tuple[bool, ...]
    """Whether weight decay applies, for each of the other variables."""
    adamw_ratio: float
    """Multiplies the learning rate of the other variables."""


@partial(jax.jit, static_argnames=("plan",))
def whole_step(plan: WholePlan, state: WholeState, gradients: Gradients, rate: Array, due: Array) -> WholeState:
    """Return the state after a step.

    Args:
        plan: The static part.
        state: Whole arrays.
        gradients: In the shapes of the weights.
        rate: Learning rate.
        due: Whether this call updates the weights, bool; if not, gradients are only accumulated and nothing changes.
    """
    # One flag for all variables: a step updates all of them or none.
    finite = jnp.array([jnp.isfinite(g).all() for g in (*gradients.matrices, *gradients.others)]).all()
    rate = jnp.asarray(rate, jnp.float32)
    steps, skipped, kept = state.counters
    # Traced, not a Python `if`: accumulating and updating steps share one compiled program.
    runs = due & finite
    step = StepNumbers(rate, (steps + 1).astype(jnp.float32), runs)
    matrices, failed = update(plan.joint, state.matrices, gradients.matrices, step)
    others: list[AdamwState] = jax.lax.cond(
        runs, lambda: _adamw(plan, state.others, gradients.others, step), lambda: state.others
    )
    counters = Counters(steps + runs, skipped + (due & ~finite), kept + failed)
    return WholeState(matrices, others, counters)


def _adamw(
    plan: WholePlan, states: Sequence[AdamwState], gradients: Sequence[Array], step: StepNumbers
) -> list[AdamwState]:
    rate = plan.adamw_ratio * step.rate
    return [
        _adamw_of_one(state, gradient, rate, step.number, plan.joint.settings, decays=decays)
        for state, gradient, decays in zip(states, gradients, plan.decays, strict=True)
    ]


def _adamw_of_one(
    state: AdamwState, gradient: Array, rate: Array, number: Array, settings: Settings, *, decays: bool
) -> AdamwState:
    weight, own = state.weight.astype(jnp.float32), gradient.astype(jnp.float32)
    # Without factors, both l2 methods are the same.
    for when in ("l2", "l2_before_factors"):
        own = rekls_math.l2_gradient(own, weight, settings, when=when, decays=decays)
    moments, direction = rekls_math.adam(state.moments, own, number, settings)
    moved: Any = rekls_math.moved(weight, direction, rate, settings, decays=decays)
    return AdamwState(moved.astype(state.weight.dtype), moments)
