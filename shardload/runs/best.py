"""Find the value that a new step has to beat: the best of the undamaged steps in the folder, of the runs that count.

    best_of="folder"    all runs that saved to the folder
    best_of="run"       this run and the steps it resumed; Keras' own callbacks compare like this

It is determined each time ``fit`` begins, because earlier steps may have been removed or damaged in the meantime.
`Monitor` compares the values as Keras' callbacks do, except that NaN and infinities are never an improvement: no later
value could beat them.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardload.errors import UsageError
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.training import metric_direction
from shardload.processes import Channel
from shardload.runs.digests import verify
from shardload.runs.retention import BestRule, recorded_damage
from shardload.runs.step import StepInfo
from shardload.units import check_choice

READ_BYTES = 4 << 30
"""Steps up to this size are read completely before they count, which takes seconds; of larger ones, names and sizes."""


class Best:
    """The best value so far, and the steps it is compared with.

    Args:
        monitor: The monitored metric.
        of: ``"folder"`` or ``"run"``.
        rule: The name of the callback's argument that requires the best value, if any.
    """

    def __init__(self, monitor: Monitor, *, of: Literal["folder", "run"], rule: str | None) -> None:
        self.monitor, self.of, self.rule = monitor, of, rule
        self.comparison = BestRule(monitor.name, None)
        self.run = ""

    def begin(
        self, model: Any, steps: Sequence[StepInfo], folder: Path, resumed: StepInfo | None, *, channel: Channel
    ) -> list[str]:
        """Determine the value to beat, on process 0 for all processes; return notices for the user, one per line."""
        self.run = channel.first(lambda: _run_of(model, folder, resumed))
        record_of(model).runs[folder] = self.run
        direction = self.monitor.direction(model)
        known = recorded_damage(steps) & {info.step for info in steps}
        if direction is None:  # no rule needs a direction
            self.comparison = BestRule(self.monitor.name, None, damaged=known)
            return []
        # The step that was resumed counts as this run's own past, even if an earlier run saved it.
        family: set[str | None] = {self.run} if resumed is None else {self.run, resumed.run}
        by = BestRule(self.monitor.name, direction, family if self.of == "run" else None)
        # Without a rule nothing depends on the best step, so do not spend seconds on reading it.
        read_bytes = 0 if self.rule is None else READ_BYTES
        found = Found(**channel.first(lambda: asdict(find_best(steps, by, read_bytes=read_bytes))))
        # The best step was just read completely: if an older record calls it damaged, it has been repaired since.
        if self.rule is not None:
            known.discard(found.step)
        self.comparison = replace(by, damaged=known | {step for step, *_ in found.damaged})
        # The user's threshold is better, so no step is what later values are compared with.
        if not self.monitor.begin(found.value, model):
            found = replace(found, value=None)
        if self.rule is None:
            return []
        return list(_notices(found, by, rule=self.rule, folder=folder, family=family, resumed=resumed))

    def record(self) -> dict[str, Any]:
        """Return the fields that each step stores about the best value."""
        mode = self.comparison.mode or "auto"
        return {
            "monitor": self.monitor.name,
            "mode": mode,
            "best": self.monitor.best,
            "best_of": self.of,
            "run": self.run,
            "damaged": sorted(self.comparison.damaged),
        }


@dataclass(frozen=True, slots=True)
class Found:
    """The best value in a folder so far. Serializable as JSON, so that process 0 can send it to the others."""

    value: float | None = None
    step: int = -1
    run: str | None = None
    damaged: list[tuple[int, float | None, str]] = field(default_factory=list)
    """Steps that are or may be better but do not count: number, value if known, and a description of the damage."""


def find_best(steps: Sequence[StepInfo], by: BestRule, *, read_bytes: int) -> Found:
    """Return the best undamaged step, and the damaged steps ranked above it. Reads steps up to ``read_bytes`` only."""
    unknown = (info for info in steps if info.hides_rank)
    damaged: list[tuple[int, float | None, str]] = [(info.step, None, str(info.problems)) for info in unknown]
    for info in by.best(info for info in steps if info.ours):
        value = info.metrics[by.monitor]
        if (what := _damage(info, read_bytes)) is None:
            return Found(value, info.step, info.run, damaged)
        damaged.append((info.step, value, what))
    return Found(damaged=damaged)


def _damage(info: StepInfo, read_bytes: int) -> str | None:
    if info.problems is not None or info.n_bytes > read_bytes:
        return info.problems
    return next((str(found) for found in verify(info.path)), None)


def _run_of(model: Any, folder: Path, resumed: StepInfo | None) -> str:
    """Return the run of a model: of the step it resumed, of its last ``fit`` in this process, or a new one."""
    found = record_of(model).runs.get(folder) if resumed is None else resumed.run
    return found or secrets.token_hex(8)


def _notices(
    found: Found, by: BestRule, *, rule: str, folder: Path, family: set[str | None], resumed: StepInfo | None
) -> Iterator[str]:
    for step, value, what in found.damaged:
        metric = by.monitor if value is None else f"{by.monitor}={value:.6g}"
        yield f"{metric} of step {step} does not count: {what}"
    if found.value is None:
        return
    best = f"{rule} compares with {by.monitor}={found.value:.6g} of step {found.step}"
    if found.run not in family:
        yield f"{best}, which another run saved in {folder}. To ignore other runs, pass best_of='run' or another folder"
    elif resumed is not None and found.step > resumed.step:
        yield (
            f"{best}, which was saved after step {resumed.step}, from which this run continues. To ignore it, save to "
            f"another folder, or remove {folder / str(found.step)}"
        )


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
