"""One step of REKLS as one traced function: matrices together, other variables element by element.

    any gradient not finite         ─► nothing changes; ``skipped`` counts it
    gradients are only accumulated  ─► nothing changes, nothing is computed
    otherwise                       ─► matrices: `update`; other variables: AdamW

`dealing.batched` says which matrices each device updates alone. All others are updated by all devices together. W is
the weight of a matrix, G its gradient, L and R are its factors, Q and λ their eigenpairs, M and V Adam's moments::

    each device alone:
    shards of all matrices  ─► some whole matrices on each device ─► their update there ─► shards of all matrices

    all devices together:
    shards of G, M, V, Q, λ ─► all-gather ─► the arithmetic of `rekls_math` on whole arrays, on every device alike
    shards of L, R, W       ─► element by element, with the device's slice of what the arithmetic gives
    whole L, R              ─► each device decomposes its share of all factors ─► eigenpairs to all devices

Only one batch of matrices is whole at a time. Each batch is a `jax.lax.cond`, because XLA frees its memory at its end;
barriers between batches have no effect on CPU.

Gathers are written out in a `jax.shard_map`: XLA's partitioner would split the inner products, and rounding would then
depend on the layout. State has the same bits for every way to split W on one mesh; W may differ in its last bit,
because XLA fuses the last sums in different ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from shardload.optimizers import rekls_math
from shardload.optimizers.dealing import (
    Batch,
    collect_dealt,
    decompose_dealt,
    decompose_repeated,
    gather_shards,
    shard,
    spread_dealt,
    stacked,
)
from shardload.optimizers.matrices import MatrixView
from shardload.optimizers.rekls_math import Array, Eigenpairs, Moments, Settings, Sides


class MatrixState(NamedTuple):
    """A weight matrix and its optimizer state. `Matrix.specs` has the `PartitionSpec` of each array in its place."""

    weight: Any
    """The weight matrix W, of the variable's own shape and dtype."""
    moments: Moments
    """Adam's first and second moment, in the shape of the weight, float32."""
    factors: Sides
    """The factors L and R, in the dtype in which they are stored between steps."""
    pairs: Sides
    """Eigenvalues and eigenvectors of the two factors, float32."""


@dataclass(frozen=True, slots=True)
class Matrix:
    """What is compiled into the update of one matrix: all that it depends on, besides its arrays."""

    view: MatrixView
    specs: MatrixState
    """How each array is split over the mesh. Without a mesh, the `PartitionSpec`s are empty."""
    decays: bool


@dataclass(frozen=True, slots=True)
class JointPlan:
    """What is compiled into the update of all matrices: a change of any field makes JAX compile it again."""

    matrices: tuple[Matrix, ...]
    settings: Settings
    batches: tuple[Batch, ...]
    mesh: Mesh | None
    """The mesh that all matrices are on; `None` on one device, where nothing has to be gathered."""
    frequency: int = 1
    """Factors are decomposed in step 1, step 1 + frequency, and so on."""
    decomposition: str = "eigh"
    """``"eigh"``: exact each time. ``"qr"``: exact when a factor is first not 0, then one step of QR iteration."""
    dealt: bool = True
    """Whether each decomposition runs on one device of the mesh, not on all of them."""


class StepNumbers(NamedTuple):
    """Numbers that differ from step to step: traced scalars, so that all steps run the same compiled program."""

    rate: Array
    """Learning rate, float32."""
    number: Array
    """Number of the step, from 1, float32."""
    runs: Array
    """Whether the step changes anything, bool: not if it only accumulates gradients, or if one is not finite."""


def update(
    plan: JointPlan, states: Sequence[MatrixState], gradients: Sequence[Array], step: StepNumbers
) -> tuple[list[MatrixState], Array]:
    """Update all matrices by one step; return their states, and how many factors kept their old eigenpairs."""
    if not plan.matrices:
        return [], jnp.int32(0)
    local = partial(_local, plan)
    if plan.mesh is None:
        return local(list(states), list(gradients), step)
    specs = [matrix.specs for matrix in plan.matrices]
    run = jax.shard_map(
        local,
        mesh=plan.mesh,
        in_specs=(specs, [each.weight for each in specs], PartitionSpec()),
        out_specs=(specs, PartitionSpec()),
        # The check of replication would fail: it does not know that all_gather returns the same everywhere.
        check_vma=False,
    )
    found: tuple[list[MatrixState], Array] = run(list(states), list(gradients), step)
    return found


def _local(
    plan: JointPlan, states: list[MatrixState], gradients: list[Array], step: StepNumbers
) -> tuple[list[MatrixState], Array]:
    """Inside `jax.shard_map`, update this device's shards of all matrices, one batch of matrices after the other."""
    after, failures = list(states), jnp.int32(0)
    for batch in plan.batches:
        part = replace(plan, matrices=tuple(plan.matrices[place] for place in batch.places))
        run = partial(_update_each_on_one if batch.is_dealt else _update_everywhere, part, step=step)
        stay = lambda own, _: (own, jnp.int32(0))  # noqa: E731
        shards = [states[place] for place in batch.places], [gradients[place] for place in batch.places]
        # A skipped step needs a cond anyway; one for each batch also bounds the lifetime of its whole arrays.
        found, failed = jax.lax.cond(step.runs, run, stay, *shards)
        for place, state in zip(batch.places, found, strict=True):
            after[place] = state
        failures += failed
    return after, failures


def _update_each_on_one(
    plan: JointPlan, states: list[MatrixState], gradients: list[Array], step: StepNumbers
) -> tuple[list[MatrixState], Array]:
    """Inside `jax.shard_map`, update matrices of one kind: each device makes equally many whole and updates them."""
    mesh, specs = plan.mesh, plan.matrices[0].specs
    assert mesh is not None
    # Shards of all matrices ─► whole matrices, `count` on each device ─► the update without a mesh ─► shards again.
    stacks = stacked(list(zip(states, gradients, strict=True)))
    own, own_gradients = collect_dealt(stacks, (specs, specs.weight), mesh)
    count = len(states) // mesh.size
    whole = replace(plan.matrices[0], specs=jax.tree.map(lambda _: PartitionSpec(), specs))
    alone = replace(plan, matrices=(whole,) * count, mesh=None)
    found, failed = _update_everywhere(alone, _unstacked(own, count), _unstacked(own_gradients, count), step)
    shards = spread_dealt(stacked(found), specs, mesh)
    # Each device counted its own matrices only.
    return _unstacked(shards, len(states)), jax.lax.psum(failed, tuple(mesh.axis_names))


def _unstacked(stacks: Any, count: int) -> list[Any]:
    return [jax.tree.map(lambda stack, place=place: stack[place], stacks) for place in range(count)]


def _update_everywhere(
    plan: JointPlan, states: list[MatrixState], gradients: list[Array], step: StepNumbers
) -> tuple[list[MatrixState], Array]:
    """Update the matrices of one batch on every device: it gathers them whole, and keeps its shards of the results."""
    inputs = zip(plan.matrices, states, gradients, strict=True)
    ones = [_OneMatrix(matrix, plan.settings, state, gradient, step) for matrix, state, gradient in inputs]
    olds = [one.old_pairs() for one in ones]
    # Asked before the factors change: a matrix whose factors are still zeros moves in the next step only.
    move = _moving(plan, states)
    factors, failed = zip(*(one.new_factors(old) for one, old in zip(ones, olds, strict=True)), strict=True)
    news, kept = _decomposed(plan, factors, olds, step)
    after = [one.moved(*each) for one, *each in zip(ones, factors, olds, news, strict=True)]
    chosen = [
        new._replace(weight=jnp.where(moves, new.weight, old.weight), moments=_choose(moves, new.moments, old.moments))
        for moves, new, old in zip(move, after, states, strict=True)
    ]
    return chosen, sum(failed) + kept


def _moving(plan: JointPlan, states: Sequence[MatrixState]) -> Array:
    """Return for each matrix whether its weights move: with ``skip_first_update``, not while its factors are 0."""
    if not plan.settings.skip_first_update:
        return jnp.ones(len(states), bool)
    own = jnp.stack([jnp.array([jnp.any(x != 0) for x in jax.tree.leaves(state.factors)]).any() for state in states])
    if plan.mesh is None:
        return own
    # One small reduction for all matrices: a shard of zeros does not mean that the factor is zero elsewhere.
    found: Array = jax.lax.pmax(own.astype(jnp.int32), tuple(plan.mesh.axis_names)) > 0
    return found


@dataclass(frozen=True, slots=True)
class _OneMatrix:
    """One matrix while it is updated: this device's shards, and methods that compute new ones from them."""

    matrix: Matrix
    settings: Settings
    state: MatrixState
    gradient: Array
    step: StepNumbers

    def old_pairs(self) -> Sides:
        """Gather the shards of the eigenpairs from before the step, and return them whole."""
        found: Sides = gather_shards(self.state.pairs, self.matrix.specs.pairs)
        return found

    def whole_gradient(self, *, when: Sequence[str]) -> Array:
        """Return the whole gradient as a matrix; add weight decay if its method is in ``when``, as in ``("l2",)``."""
        # Decay is added to the shard, so that W itself is never gathered.
        own = self.gradient.astype(jnp.float32)
        for method in when:
            own = rekls_math.l2_gradient(own, self.state.weight, self.settings, when=method, decays=self.matrix.decays)
        found: Array = self.matrix.view.matrix(gather_shards(own, self.matrix.specs.weight))
        return found

    def new_factors(self, old: Sides) -> tuple[Sides, Array]:
        """Return shards of the new factors, and how many of the two did not change because of NaN or infinity."""
        whole = self.whole_gradient(when=("l2_before_factors",))
        added = rekls_math.contributions(whole, old, self.settings)
        failed = jnp.int32(0)
        found: list[Array | None] = []
        for factor, addition, spec in zip(self.state.factors, added, self.matrix.specs.factors, strict=True):
            if factor is None:
                found.append(None)
                continue
            # Of the whole contribution, so that all devices decide alike.
            own, finite = factor.astype(jnp.float32), jnp.isfinite(addition).all()
            new = rekls_math.blended(own, shard(addition, spec), self.step.number, self.settings.factor_beta)
            found.append(jnp.where(finite, new.astype(factor.dtype), factor))
            failed += ~finite
        return Sides(*found), failed

    def moved(self, factors: Sides, old: Sides, new: Sides) -> MatrixState:
        """Return the shards of the weight and its state after a step; ``old`` and ``new`` are whole eigenpairs."""
        state, specs, view = self.state, self.matrix.specs, self.matrix.view
        # Moments start one step later if the first update is skipped. Its own result is dropped, but must not be 0 / 0.
        count = self.step.number - self.settings.skip_first_update
        moments, direction = rekls_math.moments_and_direction(
            Moments(*map(view.matrix, gather_shards(state.moments, specs.moments))),
            self.whole_gradient(when=("l2_before_factors", "l2")),
            (old, new),
            step=jnp.maximum(count, 1),
            settings=self.settings,
        )
        weight = rekls_math.moved(
            state.weight.astype(jnp.float32),
            shard(view.array(direction), specs.weight),
            self.step.rate,
            self.settings,
            decays=self.matrix.decays,
        ).astype(state.weight.dtype)
        own = shard(Moments(*map(view.array, moments)), specs.moments)
        return MatrixState(weight, own, factors, shard(new, specs.pairs))


def _decomposed(
    plan: JointPlan, factors: Sequence[Sides], olds: Sequence[Sides], step: StepNumbers
) -> tuple[list[Sides], Array]:
    """Return the whole eigenpairs of all factors, and how many decompositions gave NaN or infinity.

    Old eigenpairs stay where a decomposition failed, and in all steps that decompose nothing (``frequency``).
    """
    # A side that is the identity has None, which is no leaf: the three lists are of the same factors.
    is_pair = lambda x: isinstance(x, Eigenpairs)  # noqa: E731
    old, structure = jax.tree.flatten(list(olds), is_leaf=is_pair)
    shards = jax.tree.leaves(list(factors))
    specs = jax.tree.leaves([matrix.specs.factors for matrix in plan.matrices])

    def run() -> tuple[list[Eigenpairs], Array]:
        whole = [x.astype(jnp.float32) for x in gather_shards(shards, specs)]
        found = _decompose(plan, whole, old)
        finite = [rekls_math.is_finite(pair) for pair in found]
        # Every basis is an eigenbasis of zeros, and their eigenvalues would replace ``init_factor``.
        taken = [is_finite & jnp.any(factor != 0) for is_finite, factor in zip(finite, whole, strict=True)]
        chosen = [_choose(*each) for each in zip(taken, found, old, strict=True)]
        return chosen, jnp.sum(~jnp.array(finite), dtype=jnp.int32)

    if plan.frequency == 1:
        found, kept = run()
    else:
        is_due = (step.number - 1) % plan.frequency == 0
        found, kept = jax.lax.cond(is_due, run, lambda: (old, jnp.int32(0)))
    pairs: list[Sides] = jax.tree.unflatten(structure, found)
    return pairs, kept


def _decompose(plan: JointPlan, factors: list[Array], old: list[Eigenpairs]) -> list[Eigenpairs]:
    def decompose(stack: Array, pairs: Eigenpairs) -> Eigenpairs:
        if plan.decomposition == "eigh":
            return rekls_math.eigenpairs(stack)
        iterated = rekls_math.power_iteration(stack, pairs)
        # Q is still the identity before a factor's first decomposition: too far away for one iteration.
        is_first = jnp.all(pairs.vectors == jnp.eye(stack.shape[-1]), (-2, -1)) & jnp.any(stack != 0, (-2, -1))

        def exact() -> Eigenpairs:
            chosen: Eigenpairs = jax.vmap(_choose)(is_first, rekls_math.eigenpairs(stack), iterated)
            return chosen

        found: Eigenpairs = jax.lax.cond(is_first.any(), exact, lambda: iterated)
        return found

    if plan.mesh is None or not plan.dealt:
        return decompose_repeated(factors, old, decompose)
    return decompose_dealt(factors, old, decompose, axes=tuple(plan.mesh.axis_names), devices=plan.mesh.size)


def _choose(which: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(which, a, b), new, old)


class AdamwState(NamedTuple):
    """A variable that REKLS updates by AdamW, not as a matrix, and its optimizer state."""

    weight: Array
    moments: Moments
    """Adam's moments, float32."""


class Counters(NamedTuple):
    """The numbers of `Counts` as int32 scalars: updates, skipped steps, and factors that kept their eigenpairs."""

    steps: Array
    skipped: Array
    kept: Array


@dataclass(frozen=True, slots=True)
class Counts:
    """Numbers for users: updates since the optimizer was built, and what was skipped because of NaN or infinity."""

    steps: int
    """Updates of the weights. Keras' ``iterations`` also counts those that are skipped."""
    skipped_steps: int
    """Steps whose gradients were not finite: they changed nothing."""
    kept_eigenpairs: int
    """How often a factor kept its old eigenpairs, because its decomposition or the factor itself was not finite."""


class WholeState(NamedTuple):
    """All arrays that a step of REKLS changes: matrices and other variables with their state, and counters."""

    matrices: list[MatrixState]
    others: list[AdamwState]
    counters: Counters


class Gradients(NamedTuple):
    """The gradients of all weights, in the same order as in `WholeState`."""

    matrices: list[Array]
    others: list[Array]


@dataclass(frozen=True, slots=True)
class WholePlan:
    """What a compiled step of REKLS depends on besides the arrays: a step with another plan is compiled again."""

    joint: JointPlan
    decays: tuple[bool, ...]
    """Whether weight decay applies to each of the variables that get AdamW, in the order of the state."""
    adamw_ratio: float
    """Factor on the learning rate for the variables that get AdamW."""


@partial(jax.jit, static_argnames=("plan",))
def whole_step(plan: WholePlan, state: WholeState, gradients: Gradients, rate: Array, due: Array) -> WholeState:
    """Return the state after a step. If not ``due``, Keras only accumulates gradients, and the state is unchanged."""
    # One flag for all variables: a step updates all of them or none.
    finite = jnp.array([jnp.isfinite(g).all() for g in (*gradients.matrices, *gradients.others)]).all()
    rate = jnp.asarray(rate, jnp.float32)
    steps, skipped, kept = state.counters
    # Traced, not a Python `if`: accumulating and updating steps share one compiled program.
    runs = due & finite
    step = StepNumbers(rate, (steps + 1).astype(jnp.float32), runs)
    matrices, failed = update(plan.joint, state.matrices, gradients.matrices, step)

    def adamw() -> list[AdamwState]:
        others_rate = plan.adamw_ratio * step.rate
        return [
            _adamw(own, gradient, others_rate, step.number, plan.joint.settings, decays=decays)
            for own, gradient, decays in zip(state.others, gradients.others, plan.decays, strict=True)
        ]

    others: list[AdamwState] = jax.lax.cond(runs, adamw, lambda: state.others)
    counters = Counters(steps + runs, skipped + (due & ~finite), kept + failed)
    return WholeState(matrices, others, counters)


def _adamw(
    state: AdamwState, gradient: Array, rate: Array, number: Array, settings: Settings, *, decays: bool
) -> AdamwState:
    weight, own = state.weight.astype(jnp.float32), gradient.astype(jnp.float32)
    # Without factors, both l2 methods are the same.
    for when in ("l2", "l2_before_factors"):
        own = rekls_math.l2_gradient(own, weight, settings, when=when, decays=decays)
    moments, direction = rekls_math.adam(state.moments, own, number, settings)
    moved: Any = rekls_math.moved(weight, direction, rate, settings, decays=decays)
    return AdamwState(moved.astype(state.weight.dtype), moments)
