"""Which of two values of a metric is better, and the best one so far.

As in Keras' callbacks, but NaN and infinities never are an improvement: taken for the best, nothing may ever beat them.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any, Literal

from shardload.errors import UsageError
from shardload.keras_bridge.training import metric_direction

Mode = Literal["min", "max"]


class Monitor:
    """One metric in the logs of ``fit``.

    Args:
        name: Its name there, ``val_loss``.
        mode: ``min``, ``max``, or ``auto``: ask the model's metric of that name.
        threshold: The value to beat at first, if any.
    """

    def __init__(self, name: str, *, mode: str = "auto", threshold: float | None = None) -> None:
        if mode not in ("auto", "min", "max"):
            warnings.warn(f"OrbaxCheckpoint mode {mode!r} is unknown, fallback to auto mode.", stacklevel=3)
            mode = "auto"
        self.name = name
        self.mode = mode
        self.best = self._threshold = threshold

    def direction(self, model: Any) -> Mode | None:
        """Which way is better; ``None`` where neither ``mode`` nor the model tells."""
        if self.mode in ("min", "max"):
            return "min" if self.mode == "min" else "max"
        metric = self.name.removeprefix("val_")
        return "min" if metric == "loss" else metric_direction(model, metric)

    def require_direction(self, model: Any) -> Mode:
        """As `direction`.

        Raises:
            UsageError: When it is not known.
        """
        found = self.direction(model)
        if found is None:
            raise UsageError(
                f"Whether a high or a low {self.name!r} is better cannot be told from the model's metrics. "
                "Pass mode='max' or mode='min'"
            )
        return found

    def begin(self, found: float | None, model: Any) -> bool:
        """Compare from now on with the threshold, or with what was found if that is harder to beat; whether it is."""
        self.best = self._threshold
        return self.note(found, model)

    def value_in(self, logs: Mapping[str, float]) -> float | None:
        """The metric's value, ``None`` where the logs lack it."""
        return logs.get(self.name)

    def improves(self, value: float, model: Any) -> bool:
        """Whether ``value`` beats the best so far."""
        if not math.isfinite(value):
            return False
        if self.best is None or math.isnan(self.best):
            return True
        return value < self.best if self.require_direction(model) == "min" else value > self.best

    def note(self, value: float | None, model: Any) -> bool:
        """Make ``value`` the best if it is better; whether it was."""
        if value is None or not self.improves(value, model):
            return False
        self.best = value
        return True


def plain_logs(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """The scalars among the logs as Python floats."""
    found = {}
    for name, value in (logs or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return found
