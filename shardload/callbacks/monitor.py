"""Compare the values of one metric, and keep the best one so far.

As in Keras' callbacks, except that NaN and infinities are never an improvement: no later value could beat them.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from shardload.errors import UsageError
from shardload.keras_bridge.training import metric_direction
from shardload.units import check_choice

Mode = Literal["min", "max"]


class Monitor:
    """One metric from the logs of ``fit``.

    Args:
        name: Its name in the logs, such as ``val_loss``.
        mode: ``min``, ``max``, or ``auto``: use the direction of the model's metric of that name.
        threshold: The initial value to beat, if any.
    """

    def __init__(self, name: str, *, mode: str = "auto", threshold: float | None = None) -> None:
        check_choice("mode", mode, ("auto", "min", "max"))
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
                f"Check the name{_similar(self.name, _metrics_of(model))}, or pass "
                "mode='max' or mode='min'"
            )
        return found

    def begin(self, found: float | None, model: Any) -> bool:
        """Set the value to beat to the better of threshold and ``found``; return whether it is ``found``."""
        self.best = self._threshold
        return self.note(found, model)

    def value_in(self, logs: Mapping[str, float]) -> float | None:
        """Return the metric's value, or ``None`` if the logs lack it."""
        return logs.get(self.name)

    def absent_from(self, logs: Mapping[str, float]) -> str:
        """Return a sentence that names the metrics in the logs, for a warning that this one is not among them."""
        names = f"The logs have {', '.join(sorted(logs)) or 'no metrics'}"
        # A batch has no validation metrics, so with save_freq=N no save would ever see this one.
        if self.name.startswith("val_") and self.name.removeprefix("val_") in logs:
            return (
                f"{names}: fit() computes {self.name} at the end of an epoch, from validation_data. Pass both "
                "save_freq='epoch' and validation_data"
            )
        return f"{names}{_similar(self.name, logs)}"

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


def _metrics_of(model: Any) -> list[str]:
    names = {"loss", *(str(metric.name) for metric in getattr(model, "metrics", ()))}
    return [f"{prefix}{name}" for name in sorted(names) for prefix in ("", "val_")]


def _similar(name: str, known: Iterable[str]) -> str:
    """Return a hint at the known metric with the most similar name, if there is one."""
    close = difflib.get_close_matches(name, set(known) - {name}, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
