"""The arguments of the optimizer that say how it works, checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardload.errors import UsageError
from shardload.optimizers.matrices import Selection
from shardload.optimizers.rekls_math import DECAYS, DECOMPOSITIONS, Settings

AdamwFor = Sequence[str] | Callable[[Any], bool]
"""Regular expressions for paths, or a function of a variable."""
_CHOICES: dict[str, tuple[str, ...]] = {
    "weight_decay_method": DECAYS,
    "decomposition": DECOMPOSITIONS,
    "decompositions": ("dealt", "repeated"),
    "factor_dtype": ("float32", "bfloat16"),
    "uneven": ("error", "replicate"),
}
_RANGES: dict[str, tuple[float, float]] = {"beta_1": (0, 1), "beta_2": (0, 1), "factor_beta": (0, 1)}
"""From the first to below the second."""


@dataclass(frozen=True, slots=True)
class Options:
    """Arguments of `shardload.optimizers.REKLS`, which documents them.

    Raises:
        UsageError: When one is not among its choices, or out of range.
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
    init_factor: float
    adamw_for: AdamwFor
    adamw_ratio: float
    row_dims: Mapping[str, Sequence[int]]
    uneven: str

    def __post_init__(self) -> None:
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                _refuse(name, getattr(self, name), f"one of {', '.join(choices)}")
        for name, (low, high) in _RANGES.items():
            if not low <= getattr(self, name) < high:
                _refuse(name, getattr(self, name), f"at least {low} and below {high}")
        for name in ("precondition_frequency", "max_dimension"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                _refuse(name, value, "an integer of at least 1")
        if not self.epsilon > 0:
            _refuse("epsilon", self.epsilon, "a number above 0")
        if isinstance(self.adamw_for, str):
            _refuse("adamw_for", self.adamw_for, "a list of regular expressions, or a function of a variable")

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
        )

    @property
    def selection(self) -> Selection:
        """Which variables are matrices, by path and shape; a function in ``adamw_for`` comes first."""
        patterns = () if callable(self.adamw_for) else tuple(self.adamw_for)
        dims = {pattern: tuple(found) for pattern, found in self.row_dims.items()}
        return Selection(self.max_dimension, patterns, dims)


def _refuse(name: str, value: Any, expected: str) -> None:
    raise UsageError(f"Cannot create REKLS with {name}={value!r:.60}: expected {expected}")
