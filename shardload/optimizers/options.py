"""The arguments of the optimizer, checked."""

from __future__ import annotations

import inspect
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import keras
import numpy as np

from shardload.errors import UsageError
from shardload.optimizers.matrices import MatrixRules
from shardload.optimizers.rekls_math import DECAYS, DECOMPOSITIONS, Settings
from shardload.units import dtype_name, parse_bytes

AdamwFor = Sequence[str] | Callable[[Any], bool]
"""Regular expressions for paths, or a function of a variable."""
RMS = "rms"
"""An ``init_factor``: the root mean square of each matrix's first gradient."""
WHOLE_BYTES = 1 << 30
"""Default of ``whole_bytes``: less than a device's share of a large model's state, enough for a whole small model."""
SMALLEST = float(np.finfo(np.float32).tiny)
"""Least number that float32 has in full precision."""
BFLOAT16_NOISE = 2.0**-8
"""Precision of bfloat16."""
_CHOICES: dict[str, tuple[Any, ...]] = {
    "weight_decay_method": DECAYS,
    "decomposition": DECOMPOSITIONS,
    "decompositions": ("dealt", "repeated"),
    "factor_dtype": ("float32", "bfloat16"),
    "uneven": ("error", "replicate"),
    "skip_first_update": (True, False),
    "limit_updates": (True, False),
}
_INTEGERS = ("precondition_frequency", "max_dimension")
_LIMITS = {
    "beta_1": 1.0,
    "beta_2": 1.0,
    "factor_beta": 1.0,
    "relative_epsilon": 1.0,
    "rank_tolerance": 1.0,
    "adamw_ratio": math.inf,
}
"""Arguments that are numbers from 0 up to, but not including, the limit."""


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of `shardload.optimizers.REKLS`, which documents them.

    Raises:
        UsageError: When an argument is not among its choices, out of range, or of another type.
    """

    beta_1: float
    beta_2: float
    factor_beta: float
    epsilon: float
    weight_decay_method: str
    precondition_frequency: int
    decomposition: str
    decompositions: str
    max_dimension: int
    factor_dtype: str
    skip_first_update: bool
    init_factor: float | str
    relative_epsilon: float
    limit_updates: bool
    rank_tolerance: float
    adamw_for: AdamwFor
    adamw_ratio: float
    row_dims: Mapping[str, Sequence[int]]
    whole_bytes: int
    uneven: str

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            # The type first: 1 equals True, and `in` compares an array element by element.
            if not isinstance(value := getattr(self, name), str | bool) or value not in choices:
                _refuse(name, value, f"one of {', '.join(map(str, choices))}")
        for name, limit in _LIMITS.items():
            check_number(name, getattr(self, name), below=limit)
        for name in _INTEGERS:
            value = getattr(self, name)
            if not _is_integer(value) or value < 1:
                _refuse(name, value, "an integer of at least 1")
        check_number("epsilon", self.epsilon)
        # It keeps 0 / (√0 + ε) from being NaN, for elements that never had a gradient; XLA counts subnormals as 0.
        if self.epsilon < SMALLEST:
            _refuse("epsilon", self.epsilon, f"a number of at least {SMALLEST:.3g}")
        if not self.starts_at_rms:
            check_number("init_factor", self.init_factor, otherwise=f", or {RMS!r}")
        _check_patterns(self.adamw_for, self.row_dims)

    def settings(self, weight_decay: float | None) -> Settings:
        """Return the constants of the arithmetic."""
        return Settings(
            beta_1=self.beta_1,
            beta_2=self.beta_2,
            factor_beta=self.factor_beta,
            epsilon=self.epsilon,
            weight_decay=weight_decay or 0.0,
            decay=self.weight_decay_method,
            skip_first_update=self.skip_first_update,
            starts_at_rms=self.starts_at_rms,
            relative_epsilon=self.relative_epsilon,
            limits_updates=self.limit_updates,
            rank_tolerance=self.least_share,
        )

    @property
    def least_share(self) -> float:
        """Smallest eigenvalue of an active direction, as a share of the largest."""
        # Smaller eigenvalues of a factor in bfloat16 are rounding noise of the factor itself.
        is_exact = self.factor_dtype == "float32" or not self.rank_tolerance
        return self.rank_tolerance if is_exact else max(self.rank_tolerance, BFLOAT16_NOISE)

    @property
    def starts_at_rms(self) -> bool:
        """Whether eigenvalues come from each matrix's first gradient."""
        return isinstance(self.init_factor, str) and self.init_factor == RMS

    @property
    def rules(self) -> MatrixRules:
        """Which variables are matrices, by path and shape; a function in ``adamw_for`` comes first."""
        patterns = () if callable(self.adamw_for) else tuple(self.adamw_for)
        dims = {pattern: tuple(found) for pattern, found in self.row_dims.items()}
        return MatrixRules(self.max_dimension, patterns, dims)


def check_number(name: str, value: Any, *, below: float = math.inf, otherwise: str = "") -> None:
    """Check that an argument is a real number, at least 0 and below a limit.

    Raises:
        UsageError: When it is not; ``otherwise`` names other accepted values.
    """
    # To Python, a bool is a Real. NaN fails every comparison.
    is_real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_real or not 0 <= float(value) < below or _in_float32(value) >= below:
        limit = "a finite number of at least 0" if below == math.inf else f"a number of at least 0 and below {below:g}"
        _refuse(name, value, limit + otherwise)


def _in_float32(value: Any) -> float:
    """Return a number as the arithmetic sees it: 0.99999999 is 1."""
    with np.errstate(over="ignore"):
        return float(np.float32(value))


def canonical_dtype(wanted: Any) -> Any:
    """Return the name of a dtype, ``"float32"`` for ``jnp.float32``; anything else unchanged: `Options` refuses it."""
    try:
        return dtype_name(wanted)
    except UsageError:
        return wanted


def check_bytes(name: str, value: Any) -> int:
    """Return an argument in bytes, given as an int or as text.

    Raises:
        UsageError: When it is neither.
    """
    try:
        return parse_bytes(value)
    except ValueError:
        _refuse(name, value, "a number of bytes, or text like '4GiB'")


def check_rate(learning_rate: Any) -> Any:
    """Return a learning rate in a form that Keras accepts: a number as ``float``, a schedule or a function unchanged.

    Raises:
        UsageError: When it is a negative number, a class, a function that needs arguments, or anything else.
    """
    if isinstance(learning_rate, keras.optimizers.schedules.LearningRateSchedule) or _needs_nothing(learning_rate):
        return learning_rate
    otherwise = ", a LearningRateSchedule, or a function without arguments"
    # Keras refuses ints and NumPy's float32, which are not subclasses of float.
    check_number("learning_rate", learning_rate, otherwise=otherwise)
    return float(learning_rate)


def _check_patterns(adamw_for: Any, row_dims: Any) -> None:
    if not callable(adamw_for) and not (_is_sequence(adamw_for) and all(map(_is_pattern, adamw_for))):
        _refuse("adamw_for", adamw_for, "a list of regular expressions, or a function of a variable")
    known = isinstance(row_dims, Mapping) and all(map(_is_pattern, row_dims))
    if not known or not all(_is_sequence(dims) and all(map(_is_integer, dims)) for dims in row_dims.values()):
        _refuse("row_dims", row_dims, "a dict of regular expressions and lists of dims, such as {'query/kernel': (0,)}")


def _is_sequence(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _needs_nothing(value: Any) -> bool:
    """Whether a value is a function that Keras can call without arguments."""
    # A schedule's class is callable too, but calling it gives a schedule, not a number.
    if not callable(value) or isinstance(value, type):
        return False
    try:
        inspect.signature(value).bind()
    except TypeError:
        return False
    except ValueError:  # a function in C without a signature
        return True
    return True


def _is_integer(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_pattern(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(re.compile(value))
    except re.error:
        return False


def _refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise UsageError(f"Cannot create REKLS with {name}={value!r:.60}: expected {expected}")
