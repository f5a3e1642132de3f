"""The arithmetic of REKLS for one weight matrix W (m x n) with gradient G: pure functions of arrays on one device.

    G ─► factors      L ← β̂L + (1-β̂)/n · G inv(R) Gᵀ      R ← β̂R + (1-β̂)/m · Gᵀ inv(L) G     from the old eigenpairs
      ─► eigenpairs   L = Q_L diag(λ_L) Q_Lᵀ               R = Q_R diag(λ_R) Q_Rᵀ              descending
      ─► moments      Adam's, of Q_Lᵀ G Q_R: the gradient in coordinates of both eigenbases
      ─► step         W ← W - lr · Q_L U Q_Rᵀ               U = M̂ / (√V̂ + ε), 0 where M̂ and Q_Lᵀ G Q_R are noise

SOAP (https://arxiv.org/abs/2409.11321) with the factors of KL-Shampoo (https://arxiv.org/abs/2509.03378), after
NVIDIA Emerging-Optimizers, pull request 175. A side without a factor has the identity as its eigenbasis and ones as
eigenvalues; its factor and pair are `None`. Matrix products run at the highest precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

Array: TypeAlias = Any
"""A `jax.Array` or a tracer."""
DECAYS = ("decoupled", "independent", "palm", "l2", "l2_before_factors")
DECOMPOSITIONS = ("eigh", "qr")


class Eigenpairs(NamedTuple):
    """Eigenvalues and eigenvectors of a factor (a symmetric matrix), or of a stack of factors."""

    values: Array
    """Eigenvalues (n,), descending; after QR iteration, in the order of the pairs it started from."""
    vectors: Array
    """Eigenvectors (n, n), one per column."""


class Sides(NamedTuple):
    """One value for the rows of a matrix and one for its columns, such as factors; `None` without a factor."""

    left: Any
    right: Any


class Moments(NamedTuple):
    """Adam's two moments of the gradient, (m, n) each, in coordinates of the eigenbases."""

    first: Array
    second: Array


@dataclass(frozen=True, slots=True)
class Settings:
    """Constants of the algorithm, which are compiled into a step; `shardload.optimizers.REKLS` explains them."""

    beta_1: float = 0.9
    beta_2: float = 0.95
    factor_beta: float = 0.95
    epsilon: float = 1e-8
    weight_decay: float = 0.01
    decay: str = "decoupled"
    skip_first_update: bool = True
    starts_at_rms: bool = False
    """Whether the gradient's root mean square takes the place of eigenvalues that are still all 0."""
    relative_epsilon: float = 0.0
    """Gradients are divided by eigenvalues, but by nothing less than this share of the mean eigenvalue."""
    limits_updates: bool = False
    """Whether the elements of U, Adam's update before the learning rate, are clipped to `largest_update`."""
    rank_tolerance: float = 0.0
    """W moves along eigenvectors whose eigenvalue is at least this share of the largest; with 0, along all."""

    @property
    def largest_update(self) -> float:
        """Largest absolute value of an element of U, Adam's update before the learning rate; infinite without a bound.

        U is a weighted sum of past gradients divided by the root of a weighted sum of their squares; the Cauchy-Schwarz
        inequality bounds this quotient. Only where the eigenbases change can U exceed it, as the sum of squares is not
        converted to the new coordinates.
        """
        # The bound has the factor √Σ(b₁²/b₂)ᵏ over all past steps k: infinite unless b₁² < b₂.
        ratio = self.beta_1**2 / self.beta_2 if self.beta_2 else math.inf
        return (1 - self.beta_1) / math.sqrt((1 - self.beta_2) * (1 - ratio)) if ratio < 1 else math.inf


def product(*factors: Array) -> Array:
    """Multiply matrices from left to right at the highest precision, as rounding would drown small eigenvalues."""
    # By default, accelerators multiply float32 in bfloat16 or TF32, whose rounding drowns small eigenvalues.
    found = factors[0]
    for factor in factors[1:]:
        found = jnp.matmul(found, factor, precision=jax.lax.Precision.HIGHEST)
    return found


def kept_share(step: Array, beta: float) -> Array:
    """Return β̂, the share of a factor that an update keeps: 0 in step 1, towards ``beta`` later."""
    return 1 - (1 - beta) / (1 - beta**step)


def contributions(gradient: Array, pairs: Sides, settings: Settings) -> Sides:
    """Return what a gradient (m, n) adds to the factors L and R, each weighted by the other side's old eigenpairs."""

    def one(towards: Array, other: Eigenpairs | None) -> Array:
        # (G Q λ^-½)(G Q λ^-½)ᵀ is G inv(R) Gᵀ, in two products instead of three.
        if other is not None:
            towards = product(towards, other.vectors) / jnp.sqrt(divisors(other.values, gradient, settings))
        return product(towards, towards.T) / towards.shape[1]

    return Sides(one(gradient, pairs.right), one(gradient.T, pairs.left))


def divisors(values: Array, gradient: Array, settings: Settings) -> Array:
    """Return what to divide gradients by for each eigenvalue: itself, or the least divisor that the settings allow.

    If all eigenvalues are still 0 and ``starts_at_rms`` is set, the root mean square of the gradient G replaces them.
    The first addition to the factor L is then G Gᵀ / n divided by it, and has eigenvalues of its scale; so has R's.
    """
    # The values tell, not the step: an idle expert or LoRA's A gets its first gradient late.
    if settings.starts_at_rms:
        values = jnp.where(jnp.any(values > 0), values, root_mean_square(gradient))
    values = jnp.maximum(values, settings.epsilon)
    return jnp.maximum(values, settings.relative_epsilon * jnp.mean(values)) if settings.relative_epsilon else values


def root_mean_square(array: Array) -> Array:
    """Return sqrt(mean(x²)), also where x² overflows or underflows float32."""
    largest = jnp.max(jnp.abs(array))
    return largest * jnp.sqrt(jnp.mean(jnp.square(array / jnp.where(largest > 0, largest, 1))))


def blended(factor: Array, contribution: Array, step: Array, beta: float) -> Array:
    """Return a factor (or a shard of it) after one step: the moving average of the old one and ``contribution``."""
    keep = kept_share(step, beta)
    return keep * factor + (1 - keep) * contribution


def eigenpairs(factors: Array) -> Eigenpairs:
    """Decompose symmetric matrices (n, n) or (b, n, n), largest eigenvalue first; NaN if a decomposition fails."""

    def together(stack: Array) -> Eigenpairs:
        # eigh ascends.
        values, vectors = jnp.linalg.eigh(stack)
        return Eigenpairs(values[..., ::-1], vectors[..., ::-1])

    return _singly_on_cpu(together, factors)


_DEPENDENT = 1e-3
"""An image (factor times old eigenvector) counts as dependent on those before it if orthogonalization leaves at most
this share of its length, which is well above float32 noise (1e-7)."""
_ROUNDS = 8
"""Most orthogonalizations of the images of a factor: one is enough if none is dependent, else mostly two or three."""


def power_iteration(factors: Array, old: Eigenpairs) -> Eigenpairs:
    """Approximate `eigenpairs` by one step of QR iteration from the old ones: a fraction of the work.

    The pairs stay in their order, because Adam's second moment has one entry for each coordinate and is not reordered.
    """

    def together(stack: Array, start: Eigenpairs) -> Eigenpairs:
        vectors, is_noise = _orthogonalised(product(stack, start.vectors))
        # For given columns q, the Rayleigh quotients qᵀ L q are the closest there is to eigenvalues.
        quotients = jnp.sum(vectors * product(stack, vectors), axis=-2)
        return Eigenpairs(jnp.where(is_noise, 0, quotients), vectors)

    return _singly_on_cpu(together, factors, old)


def _orthogonalised(images: Array) -> tuple[Array, Array]:
    """Orthonormalize the columns of matrices (..., n, n); return them and whether each column is only rounding noise.

    A column is an image: a factor times an old eigenvector. If an image is nearly a combination of those before it,
    only rounding noise is left of it, which would spoil the images after it. So all such images are moved to the end,
    and the orthogonalization is repeated. The columns returned are in the order of ``images``.
    """
    lengths = jnp.linalg.norm(images, axis=-2)

    def factorised(order: Array) -> tuple[Array, Array, Array]:
        vectors, upper = jnp.linalg.qr(_columns(images, order))
        left = jnp.abs(jnp.diagonal(upper, axis1=-2, axis2=-1))
        return order, vectors, left <= _DEPENDENT * jnp.take_along_axis(lengths, order, -1)

    def is_mixed(state: tuple[Array, tuple[Array, Array, Array]]) -> Array:
        rounds, (_, _, depends) = state
        return (rounds < _ROUNDS) & jnp.any(depends[..., :-1] & ~depends[..., 1:])

    def again(state: tuple[Array, tuple[Array, Array, Array]]) -> tuple[Array, tuple[Array, Array, Array]]:
        rounds, (order, _, depends) = state
        return rounds + 1, factorised(jnp.take_along_axis(order, jnp.argsort(depends, stable=True), -1))

    # Long ones first, as the images of null vectors are short.
    start = jnp.int32(1), factorised(jnp.argsort(-lengths))
    order, vectors, depends = jax.lax.while_loop(is_mixed, again, start)[1]
    back = jnp.argsort(order)
    return _columns(vectors, back), jnp.take_along_axis(depends, back, -1)


def _columns(matrices: Array, order: Array) -> Array:
    """Return matrices (..., m, n) with their columns reordered by the indices ``order`` (..., n)."""
    return jnp.take_along_axis(matrices, order[..., None, :], -1)


def _singly_on_cpu(decompose: Callable[..., Eigenpairs], *stacks: Any) -> Eigenpairs:
    """Decompose a matrix or a stack (b, n, n); on CPU one by one, because jaxlib 0.10 hangs with simulated devices."""
    if stacks[0].ndim == 2:
        return decompose(*stacks)
    # Decided when the program is lowered, because tracing does not know the platform.
    found: Eigenpairs = jax.lax.platform_dependent(
        *stacks, cpu=lambda *all_stacks: jax.lax.map(lambda each: decompose(*each), all_stacks), default=decompose
    )
    return found


def is_finite(pair: Eigenpairs) -> Array:
    """Whether each of a stack of eigenpairs has only finite numbers; a failed decomposition gives NaN."""
    return jnp.isfinite(pair.values).all(-1) & jnp.isfinite(pair.vectors).all((-2, -1))


def into_basis(matrix: Array, pairs: Sides) -> Array:
    """Return a matrix X, such as the gradient, in coordinates of the eigenbases: Q_Lᵀ X Q_R."""
    rows = matrix if pairs.left is None else product(pairs.left.vectors.T, matrix)
    return rows if pairs.right is None else product(rows, pairs.right.vectors)


def out_of_basis(matrix: Array, pairs: Sides) -> Array:
    """Return a matrix X, given in coordinates of the eigenbases, in the coordinates of the weight: Q_L X Q_Rᵀ."""
    rows = matrix if pairs.left is None else product(pairs.left.vectors, matrix)
    return rows if pairs.right is None else product(rows, pairs.right.vectors.T)


def rotated(first: Array, old: Sides, new: Sides) -> Array:
    """Return the first moment in coordinates of the new eigenbases instead of the old. The second is never rotated."""
    return into_basis(out_of_basis(first, old), new)


def decayed(weight: Array, rate: Array, settings: Settings, *, decays: bool) -> Array:
    """Return the weight W after weight decay, or W as it is if the method adds decay to the gradient (``"l2"``)."""
    if not decays:
        return weight
    match settings.decay:
        case "decoupled":
            return weight - rate * settings.weight_decay * weight
        case "independent":
            return weight - settings.weight_decay * weight
        case "palm":
            return weight - rate * rate * settings.weight_decay * weight
        case _:
            return weight


def l2_gradient(gradient: Array, weight: Array, settings: Settings, *, when: str, decays: bool) -> Array:
    """Return the gradient, plus ``weight_decay`` times the weight if ``when`` is the decay method in ``settings``."""
    return gradient + settings.weight_decay * weight if decays and settings.decay == when else gradient


def adam(moments: Moments, gradient: Array, step: Array, settings: Settings) -> tuple[Moments, Array]:
    """Return Adam's new moments and its update U, not yet multiplied by the learning rate; ``step`` counts from 1."""
    first = settings.beta_1 * moments.first + (1 - settings.beta_1) * gradient
    second = settings.beta_2 * moments.second + (1 - settings.beta_2) * gradient * gradient
    unbiased = first / (1 - settings.beta_1**step), second / (1 - settings.beta_2**step)
    return Moments(first, second), unbiased[0] / (jnp.sqrt(unbiased[1]) + settings.epsilon)


def active(pairs: Sides, settings: Settings) -> Array:
    """Return where (m, n) gradients exceed noise: where both eigenvalues reach `rank_tolerance` times the largest."""

    def one(pair: Eigenpairs | None) -> Array:
        # Eigenvalues that are all 0, as before the first decomposition, say nothing: everything is active.
        return True if pair is None else pair.values >= settings.rank_tolerance * jnp.max(pair.values)

    return jnp.reshape(one(pairs.left), (-1, 1)) & one(pairs.right)


def moments_and_direction(
    moments: Moments, gradient: Array, pairs: tuple[Sides, Sides], *, step: Array, settings: Settings
) -> tuple[Moments, Array]:
    """Return the new moments and the direction Q_L U Q_Rᵀ, in which the weight W moves.

    ``pairs`` are the eigenpairs before and after this step; ``moments`` are in coordinates of the old ones. ``step`` is
    the number of the step in Adam's bias correction, from 1. With ``skip_first_update``, the first step is not counted.
    """
    old, new = pairs
    first, own = rotated(moments.first, old, new), into_basis(gradient, new)
    # In exact arithmetic both are 0 in the other directions. Adam would turn their rounding noise into full steps.
    if settings.rank_tolerance:
        first, own = jnp.where(active(new, settings), jnp.stack([first, own]), 0)
    found, direction = adam(Moments(first, moments.second), own, step, settings)
    # V is not rotated: where it is too small for the new coordinates, U is too large.
    if settings.limits_updates:
        direction = jnp.clip(direction, -settings.largest_update, settings.largest_update)
    return found, out_of_basis(direction, new)


def moved(weight: Array, direction: Array, rate: Array, settings: Settings, *, decays: bool) -> Array:
    """Return the weight W after weight decay and one step: the decayed W minus ``rate`` times ``direction``."""
    return decayed(weight, rate, settings, decays=decays) - rate * direction
