"""Which step is the best, and which steps stay when old ones are removed.

A new step is the best if its metric is better than that of all undamaged steps saved before. ``best_of``, an
argument of the callbacks, says which of these count::

    best_of="folder"    the steps of all runs that saved to the folder
    best_of="run"       the steps of this run and of the run that it resumed; Keras' own callbacks compare like this

The value to beat is determined again when ``fit`` begins, because steps may have been removed or damaged since. NaN and
infinities never count as the best: no later value could beat them.

`Retention` counts and removes only undamaged steps saved by shardload; users remove all others themselves. The best
steps of another callback or run stay, too: one callback for the latest steps and one for the best can share a folder.
"""

from __future__ import annotations

import difflib
import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardload.errors import SaveError, ShardloadError, UsageError
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.training import metric_direction
from shardload.processes import Channel
from shardload.runs.digests import find_damage
from shardload.runs.listing import steps_of_run
from shardload.runs.publish import Root
from shardload.runs.remote_root import RemoteRoot
from shardload.runs.step import StepInfo, ranked
from shardload.units import check_choice, is_integer, is_real

_READ_BYTES = 4 << 30
"""A step of at most this many bytes is read and verified before it counts as the best; a larger one is not read."""


class Best:
    """Tracks the best value of a metric that any step has, so that a callback can tell whether a new step is better.

    ``of`` is the callback's ``best_of``. ``rule`` is the argument that needs the best step, such as ``keep_best``, for
    notices. With ``None``, nothing depends on the best step. A step is then taken as the best without reading its
    files, which would show whether it is damaged.
    """

    def __init__(self, monitor: Monitor, *, of: Literal["folder", "run"], rule: str | None) -> None:
        self.monitor, self.of, self.rule = monitor, of, rule
        self.comparison = BestRule(monitor.name, None)
        self.run = ""

    def begin(
        self, model: Any, steps: Sequence[StepInfo], folder: Path | str, resumed: StepInfo | None, *, channel: Channel
    ) -> list[str]:
        """When ``fit`` begins, process 0 finds the value to beat and sends it to all; return sentences for the user."""
        # The run of the step that was resumed, of the model's last ``fit`` in this process, or a new one.
        runs = record_of(model).runs
        known_run = runs.get(folder) if resumed is None else resumed.run
        self.run = runs[folder] = channel.first(lambda: known_run or secrets.token_hex(8))
        direction = self.monitor.direction(model)
        known = _recorded_damage(steps) & {info.step for info in steps}
        if direction is None:  # no rule needs a direction
            self.comparison = BestRule(self.monitor.name, None, damaged=known)
            return []
        # The step that was resumed counts as this run's own past, even if an earlier run saved it.
        family: set[str | None] = {self.run} if resumed is None else {self.run, resumed.run}
        by = BestRule(self.monitor.name, direction, family if self.of == "run" else None)
        # Without a rule nothing depends on the best step, so do not spend seconds on reading it.
        read_bytes = 0 if self.rule is None else _READ_BYTES
        found = Found(**channel.first(lambda: asdict(_find_best(steps, by, read_bytes=read_bytes))))
        # The best step was just read completely: if an older record calls it damaged, it has been repaired since.
        if self.rule is not None:
            known.discard(found.step)
        self.comparison = replace(by, damaged=known | {step for step, *_ in found.damaged})
        self.monitor.best = self.monitor.threshold
        # The user's threshold is better, so no step is what later values are compared with.
        if not self.monitor.note(found.value, model):
            found = replace(found, value=None)
        if self.rule is None:
            return []
        return list(_notices(found, by, rule=self.rule, folder=folder, family=family, resumed=resumed))

    def record(self) -> dict[str, Any]:
        """Return what ``step.json`` of a new step says about ranking: metric, direction, best value, damaged steps."""
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
    """The best undamaged step that process 0 found in a folder. It sends this to the other processes, as JSON."""

    value: float | None = None
    step: int = -1
    run: str | None = None
    damaged: list[tuple[int, float | None, str]] = field(default_factory=list)
    """Damaged steps that may be better, for a notice to the user: number, metric's value if known, what is wrong."""


def _find_best(steps: Sequence[StepInfo], by: BestRule, *, read_bytes: int) -> Found:
    """Return the best undamaged step and damaged ones that may be better; verify steps of up to ``read_bytes`` only."""
    unknown = (info for info in steps if info.hides_rank)
    damaged: list[tuple[int, float | None, str]] = [(info.step, None, str(info.problems)) for info in unknown]
    for info in by.best(info for info in steps if info.ours):
        value, damage = info.metrics[by.monitor], info.problems
        # A remote step is not read: that would take its time, and the store guarantees what was uploaded.
        if damage is None and info.url is None and info.n_bytes <= read_bytes:
            damage = next((str(found) for found in find_damage(info.path)), None)
        if damage is None:
            return Found(value, info.step, info.run, damaged)
        damaged.append((info.step, value, damage))
    return Found(damaged=damaged)


def _notices(
    found: Found, by: BestRule, *, rule: str, folder: Path | str, family: set[str | None], resumed: StepInfo | None
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
            f"another folder, or remove {folder}/{found.step}"
        )


Mode = Literal["min", "max"]


class Monitor:
    """The metric that ranks steps, such as ``val_loss``, and its best value so far, at first ``threshold``."""

    def __init__(self, name: str, *, mode: str = "auto", threshold: float | None = None) -> None:
        check_choice("mode", mode, ("auto", "min", "max"))
        self.name, self.mode = name, mode
        try:
            # A float of Python, which JSON has; `float` itself would also read texts.
            self.best = self.threshold = None if threshold is None else threshold.__float__()
        except (AttributeError, TypeError) as error:
            raise UsageError(
                f"Cannot use initial_value_threshold={threshold!r:.60}: expected a number or None"
            ) from error

    def direction(self, model: Any) -> Mode | None:
        """Return "min" if lower values are better, "max" if higher, ``None`` if neither ``mode`` nor the model says."""
        if self.mode in ("min", "max"):
            return "min" if self.mode == "min" else "max"
        metric = self.name.removeprefix("val_")
        return "min" if metric == "loss" else metric_direction(model, metric)

    def require_direction(self, model: Any) -> Mode:
        """Return "min" if lower values are better, "max" if higher; raise if neither ``mode`` nor the model says."""
        if (found := self.direction(model)) is not None:
            return found
        names = {"loss", *(str(metric.name) for metric in getattr(model, "metrics", ()))}
        known = [f"{prefix}{name}" for name in sorted(names) for prefix in ("", "val_")]
        raise UsageError(
            f"Cannot tell from the model's metrics whether a higher or a lower {self.name!r} is better. "
            f"Check the name{_similar(self.name, known)}, or pass mode='max' or mode='min'"
        )

    def absent_from(self, logs: Mapping[str, float]) -> str:
        """Return a sentence that names the metrics in the logs, for a warning that the monitored metric is missing."""
        names = f"The logs have {', '.join(sorted(logs)) or 'no metrics'}"
        # A batch has no validation metrics, so with save_freq=N no save would ever see this one.
        if self.name.startswith("val_") and self.name.removeprefix("val_") in logs:
            return (
                f"{names}: fit() computes {self.name} at the end of an epoch, from validation_data. Pass both "
                "save_freq='epoch' and validation_data"
            )
        return f"{names}{_similar(self.name, logs)}"

    def improves(self, value: float, model: Any) -> bool:
        """Whether ``value`` is better than the best value of the metric so far; NaN and infinities never are."""
        if not math.isfinite(value):
            return False
        if self.best is None or math.isnan(self.best):
            return True
        return value < self.best if self.require_direction(model) == "min" else value > self.best

    def note(self, value: float | None, model: Any) -> bool:
        """Make ``value`` the best value of the metric if it is better than the best so far; return whether it is."""
        if value is None or not self.improves(value, model):
            return False
        self.best = value
        return True


def plain_logs(logs: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics in the logs of ``fit`` as Python floats; entries that are not single numbers are left out."""
    found = {}
    for name, value in (logs or {}).items():
        try:
            found[str(name)] = float(value)
        except (TypeError, ValueError):
            continue
    return found


def _similar(name: str, known: Iterable[str]) -> str:
    """Return a hint for an error message, ``(did you mean 'val_loss'?)``; "" if no known metric has a similar name."""
    close = difflib.get_close_matches(name, set(known) - {name}, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


@dataclass(frozen=True, slots=True)
class BestRule:
    """What "best" means for a callback: by which metric, in which direction, among which steps."""

    monitor: str
    mode: Literal["min", "max"] | None
    """Whether lower or higher values of the metric are better; ``None`` if unknown."""
    runs: Collection[str | None] | None = None
    """Names of the runs whose steps are compared; ``None`` compares the steps of all runs in the folder."""
    damaged: Collection[int] = ()
    """Numbers of steps that this or an earlier run found to be damaged, although some look intact in a listing."""

    def covers(self, info: StepInfo) -> bool:
        """Whether this rule applies to a step: one of its runs saved the step, with the same metric and direction."""
        ours = self.runs is None or info.run in self.runs
        return ours and (info.recorded.monitor, info.recorded.mode) == (self.monitor, self.mode)

    def best(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """Return the steps that this rule compares, best first: those of its runs that have a value of its metric."""
        return ranked(steps, monitor=self.monitor, mode=self.mode or "min", runs=self.runs)


@dataclass(frozen=True, slots=True)
class Retention:
    """Which steps stay when old ones are removed: those that at least one of up to four rules keeps."""

    latest: int | None
    """Number of newest steps to keep; ``None`` keeps all steps, also those that other rules would delete."""
    best: int | None = None
    """How many steps stay because they have the best values of the monitored metric; ``None`` keeps none for that."""
    every_steps: int | None = None
    """Keep the first step at or after each multiple of this number: with 1000, the first of 1000 to 1999, and so on."""
    every_hours: float | None = None
    """Keep the oldest step, then each step saved at least this many hours after the previously kept one."""

    def __post_init__(self) -> None:
        names = {"latest": "max_to_keep", "best": "keep_best", "every_steps": "keep_every_steps"}
        for name, argument in names.items():
            value = getattr(self, name)
            if value is not None and not (is_integer(value) and value >= 1):
                raise UsageError(f"Cannot use {argument}={value!r:.60}: expected a positive integer or None")
            # Stored in the step, as JSON, which has no integers of NumPy.
            object.__setattr__(self, name, None if value is None else int(value))
        hours = self.every_hours
        if hours is not None and not (is_real(hours) and hours > 0):
            raise UsageError(f"Cannot use keep_every_hours={self.every_hours!r:.60}: expected more than 0, or None")

    def removable(self, steps: Sequence[StepInfo], *, newest: int, by: BestRule) -> list[int]:
        """Return the numbers of the steps to remove, oldest first: all but ``newest`` and those that a rule keeps."""
        if self.latest is None:
            return []
        damaged = {*by.damaged, *_recorded_damage(steps)}
        ours = [s for s in steps if s.ours and s.problems is None and s.step not in damaged]
        # The union of all rules. The newest stays even if it does not rank: a resume needs it.
        keep = {newest, *(s.step for s in ours[-self.latest :])}
        keep.update(s.step for s in by.best(ours)[: self.best or 0])
        # Steps that this callback ranks follow its own rule; of the others, keep what their callbacks promised to keep.
        keep.update(_promised(s for s in ours if not (self.best and by.covers(s))))
        if self.every_steps is not None:
            # Steps below the first multiple do not count.
            first = {s.step // self.every_steps: s.step for s in reversed(ours)}
            keep.update(step for multiple, step in first.items() if multiple > 0)
        if self.every_hours is not None:
            due_s = -math.inf
            for s in ours:
                if s.saved_s >= due_s:
                    keep.add(s.step)
                    due_s = s.saved_s + self.every_hours * 3600
        return [s.step for s in ours if s.step not in keep]


def remover(retention: Retention, root: Root | RemoteRoot, *, by: BestRule) -> Callable[[int, Any], None]:
    """Return a function that is called after each save: it removes the steps in ``root`` that no rule keeps."""

    def remove(step: int, path: Path | str) -> None:
        # Nothing to remove: do not even list the steps, so that an unreadable one does not fail the save.
        if retention.latest is None:
            return
        try:
            for old in retention.removable(steps_of_run(root.place), newest=step, by=by):
                root.remove(old)
        except ShardloadError as error:
            raise SaveError(f"the steps beyond max_to_keep={retention.latest} could not be removed: {error}") from error

    return remove


def _recorded_damage(steps: Iterable[StepInfo]) -> set[int]:
    """Return the numbers of the steps that earlier runs found to be damaged, as they recorded in each ``step.json``."""
    return {step for info in steps for step in info.recorded.damaged}


def _promised(steps: Iterable[StepInfo]) -> Iterator[int]:
    """Yield the numbers of the steps that must stay, because the callbacks that saved them keep the best steps.

    For each metric and direction, these are the n best steps; n is ``keep_best`` in the newest of their ``step.json``.
    """
    groups: dict[tuple[str, str], list[StepInfo]] = {}
    for info in steps:
        if info.recorded.monitor is not None and info.recorded.keep_best is not None:
            groups.setdefault((info.recorded.monitor, info.recorded.mode), []).append(info)
    for (monitor, mode), group in groups.items():
        yield from (s.step for s in ranked(group, monitor=monitor, mode=mode)[: group[-1].recorded.keep_best])
