"""Compare the values of one metric, and keep the best one so far.

As in Keras' callbacks, except that NaN and infinities are never an improvement: no later value could beat them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from shardload.errors import UsageError
from shardload.keras_bridge.training import metric_direction

Mode = Literal["min", "max"]


class Monitor:
    """One metric from the logs of ``fit``.

    Args:
        name: Its name in the logs, such as ``val_loss``.
        mode: ``min``, ``max``, or ``auto``: use the direction of the model's metric of that name.
        threshold: The initial value to beat, if any.
    """

    def __init__(self, name: str, *, mode: str = "auto", threshold: float | None = None) -> None:
        if mode not in ("auto", "min", "max"):
            raise UsageError(f"Cannot use mode={mode!r:.60}: expected 'auto', 'min' or 'max'")
        self.name = name
        self.mode = mode
        self.best = self._threshold = threshold

    def direction(self, model: Any) -> Mode | None:
        """Return which direction is better; ``None`` if neither ``mode`` nor the model defines it."""
        if self.mode in ("min", "max"):
            return "min" if self.mode == "min" else "max"
        metric = self.name.removeprefix("val_")
        return "min" if metric == "loss" else metric_direction(model, metric)

    def require_direction(self, model: Any) -> Mode:
        """Return the same as `direction`.

        Raises:
            UsageError: If the direction is unknown.
        """
        found = self.direction(model)
        if found is None:
            raise UsageError(
                f"Cannot tell from the model's metrics whether a higher or a lower {self.name!r} is better. "
                "Pass mode='max' or mode='min'"
            )
        return found

    def begin(self, found: float | None, model: Any) -> bool:
        """Set the value to beat to the better of threshold and ``found``; return whether it is ``found``."""
        self.best = self._threshold
        return self.note(found, model)

    def value_in(self, logs: Mapping[str, float]) -> float | None:
        """Return the metric's value, or ``None`` if the logs lack it."""
        return logs.get(self.name)

    def improves(self, value: float, model: Any) -> bool:
        """Whether ``value`` beats the best value so far."""
        if not math.isfinite(value):
            return False
        if self.best is None or math.isnan(self.best):
            return True
        return value < self.best if self.require_direction(model) == "min" else value > self.best

    def note(self, value: float | None, model: Any) -> bool:
        """Make ``value`` the best value if it is better; return whether it was."""
        if value is None or not self.improves(value, model):
            return False
        self.best = value
        return True


def plain_logs(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the scalars among the logs as Python floats."""
    found = {}
    for name, value in (logs or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return found
