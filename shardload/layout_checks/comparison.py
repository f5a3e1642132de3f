"""Compare results of a sharded model with those of one device: which differences does rounding explain?

Devices add partial sums in another order, so intermediate results are rounded differently. How far that moves a result
depends on the model, so the check measures it. It moves every weight and input by one unit in the last place of the
model's coarsest dtype, up or down at random (seeded), and runs the model again on one device. It does so three times,
or fifteen times if three runs do not explain a difference.

The tolerance of an array is 8 times its largest movement in these runs, and at least 8 units in the last place of its
largest value: 8 = √64 is how far 64 independent roundings add up. The loss is one sum over all n elements of the
output. The order of that sum alone moves the loss by √n roundings of float32, which the tolerance of a loss includes.

An element cannot be compared if it is NaN on one device already, or if it is finite in some of the runs there and not
in others. An array without a finite element cannot be compared at all. A result with elements that cannot be compared
counts as wrong. Infinite elements among finite ones, such as masked logits, must be equal in both results.

A missing reduction, a bias added on every device, or a wrong shard changes a result by about its own size: some 10⁵
times the tolerance in float32, and a few times in bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from shardload.keras_bridge.model_state import own_layers
from shardload.units import plural

_ROUNDINGS = 8
"""A result may differ by so many times the measured rounding. 64 independent roundings add up to about 8 times the size
of one, as the sum grows like a random walk: 8 = √64."""
_SAMPLES = 3
"""In how many runs weights and inputs are moved by a rounding, to see how far results move. One run is not enough: it
may hardly change a loss."""
_MOST_SAMPLES = 15
"""In how many runs weights are moved if `_SAMPLES` runs do not explain a difference. Rounding can move an activation
across the kink of a ReLU, or change which entry is the maximum. A gradient then jumps, and Adam turns a gradient that
was zero into a whole step. One run rarely crosses a given kink, but some of fifteen do."""

_Doubles: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class ComparedArray:
    """One array that the sharded model computed, compared with the same array on one device."""

    name: str
    """Name of the array: ``output``, ``loss``, ``gradient of dense/kernel``, ``dense/kernel after 5 steps`` …"""
    dtype: str
    elements: int
    largest: float
    """Largest absolute value in the array that one device computed; infinite and NaN elements do not count."""
    max_abs: float
    """Largest absolute difference of the two arrays; infinite if an element is finite in only one of them."""
    allowed: float
    """Largest absolute difference that rounding explains: the tolerance of this array."""
    undefined: int = 0
    """Number of elements that cannot be compared: they are NaN on one device too, rounding alone makes them infinite or
    NaN, or no element of the array is finite."""

    @property
    def max_rel(self) -> float:
        """The largest difference of the two arrays, divided by the largest absolute value on one device."""
        return self.max_abs / self.largest if self.largest else (math.inf if self.max_abs else 0.0)

    @property
    def share(self) -> float:
        """The largest difference of the two arrays, divided by the largest that rounding explains: above 1 is wrong."""
        return self.max_abs / self.allowed if self.allowed else (math.inf if self.max_abs else 0.0)

    @property
    def differs(self) -> bool:
        """Whether there is a difference that rounding does not explain."""
        return self.max_abs > self.allowed

    @property
    def agrees(self) -> bool:
        """Whether rounding explains the difference, and every element could be compared."""
        return not self.differs and not self.undefined

    def __str__(self) -> str:
        if self.undefined and not self.differs:
            return (
                f"{self.name} ({self.dtype}): {self.undefined:,} of {plural(self.elements, 'element')} cannot be "
                "compared: NaN or infinite on one device too, or after rounding there"
            )
        return (
            f"{self.name} ({self.dtype}): differs by {self.max_abs:.2e} of {self.largest:.2e}, allowed "
            f"{self.allowed:.2e}"
        )


def coarsest_eps(model: Any) -> float:
    """Return the size of a rounding in the coarsest dtype of a model: the distance from 1 to the next number in it."""
    dtypes = {str(v.dtype) for v in model.variables} | {str(layer.compute_dtype) for layer in own_layers(model)}
    return max([float(jnp.finfo(dtype).eps) for dtype in dtypes if "float" in dtype], default=0.0)


def nudged(values: Any, eps: float, *, seed: int) -> Any:
    """Return a tree of host arrays with every float moved by one rounding (``eps``), up or down at random."""
    coin = np.random.default_rng(seed)

    # One generator for the whole tree: every array gets signs of its own, the same ones in every run with this seed.
    def move(value: Any) -> Any:
        if not jnp.issubdtype(value.dtype, jnp.floating):
            return value
        signs = coin.integers(0, 2, value.shape) * 2 - 1
        with np.errstate(over="ignore"):
            moved = np.asarray(value.astype(np.float64) * (1 + eps * signs)).astype(value.dtype)
        return np.where(np.isfinite(moved), moved, value)  # the largest number, as masks have it, stays finite

    return jax.tree.map(move, values)


@dataclass(frozen=True, slots=True)
class Compared:
    """All arrays that the sharded model computed, each compared with the same array on one device."""

    arrays: tuple[ComparedArray, ...]
    movements: int
    """In how many runs weights and inputs were moved by a rounding, to see how far results move: 3 or 15."""


def compare_all(
    results: Mapping[str, Any],
    expected: Mapping[str, Any],
    moved: Callable[[Sequence[int]], list[Mapping[str, Any]]],
    *,
    eps: float,
    terms: Mapping[str, int] | None = None,
) -> Compared:
    """Compare each result of a sharded model with that of one device (``expected``), and allow for rounding.

    ``moved`` takes seeds. For each, it runs the model on one device, with weights and inputs that `nudged` moved by a
    rounding, and returns the results. Three seeds are tried; if they do not explain all differences, twelve more.
    ``terms`` has the number of float32 terms of each result that is one large sum, such as the loss.
    """
    runs: list[Mapping[str, Any]] = []

    def compared() -> tuple[ComparedArray, ...]:
        return tuple(
            compare(name, results[name], [run[name] for run in runs], value, eps=eps, terms=(terms or {}).get(name, 1))
            for name, value in expected.items()
        )

    runs += moved(range(_SAMPLES))
    arrays = compared()
    # Twelve more movements cost twelve more runs, so only for a difference that three do not explain.
    if any(each.differs for each in arrays):
        runs += moved(range(_SAMPLES, _MOST_SAMPLES))
        arrays = compared()
    return Compared(arrays, len(runs))


def compare(
    name: str, result: Any, moved: Sequence[Any], expected: Any, *, eps: float, terms: int = 1
) -> ComparedArray:
    """Compare a sharded model's result with that of one device, ``expected``: does rounding explain the difference?

    ``moved`` has results of one device for weights and inputs that `nudged` moved by a rounding (``eps``). How far they
    are from ``expected`` gives the tolerance. ``terms`` is how many float32 numbers a result adds up, if it is one
    large sum.
    """
    elements, dtype = math.prod(expected.shape), str(expected.dtype)
    # Integers and booleans (a seed, a counter) have no rounding: they are equal or not.
    if not jnp.issubdtype(expected.dtype, jnp.floating):
        return ComparedArray(name, dtype, elements, 1.0, float(not np.array_equal(result, expected)), 0.0)
    values = _doubles(expected)
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max(initial=0.0))
    # One rounding is at most half a unit in the last place.
    order = math.sqrt(terms) * float(np.finfo("float32").eps) / 2 * largest if terms > 1 else 0.0
    runs = [_doubles(each) for each in moved]
    # Elements that are finite with or without a movement only, or infinite otherwise.
    finite_or_same = [
        np.isfinite(each) & np.isfinite(values) | (each == values) | np.isnan(each) & np.isnan(values) for each in runs
    ]
    unstable = ~np.all(finite_or_same, axis=0)
    movement = max(_difference(each[~unstable], values[~unstable]) for each in runs)
    allowed = max(_ROUNDINGS * movement, _ROUNDINGS * eps * largest, order)
    # Where nothing is finite, equal infinities would agree without saying anything.
    undefined = int((np.isnan(values) | unstable).sum()) if finite.size else elements
    difference = _difference(_doubles(result)[~unstable], values[~unstable])
    return ComparedArray(name, dtype, elements, largest, difference, allowed, undefined)


def _difference(a: _Doubles, b: _Doubles) -> float:
    """Return the largest absolute difference of two arrays; infinite if they are not finite in the same elements."""
    finite = np.isfinite(a) & np.isfinite(b)
    same = np.array_equal(a[~finite], b[~finite], equal_nan=True)
    return float(np.abs(a[finite] - b[finite]).max(initial=0.0)) if same else math.inf


def _doubles(array: Any) -> _Doubles:
    return np.asarray(array).astype(np.float64)
