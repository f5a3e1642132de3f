"""A step as its file names and ``step.json`` describe it, and which of several is the best."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from shardload.steps.number import mismatch
from shardload.steps.record import StepRecord
from shardload.stores.local import located
from shardload.stores.location import Location

_EMPTY = StepRecord()


@dataclass(frozen=True, slots=True)
class StepInfo:
    """A step as described by its file names and ``step.json``."""

    step: int
    path: Path
    ours: bool
    """Whether shardload saved it, so that it has digests; else Keras' own callback or plain Orbax did."""
    best_by: str | None = None
    """For the best of the existing steps, the metric and its value: ``val_loss=0.25 (lower is better)``."""
    n_bytes: int = 0
    """The total size of its files."""
    saved_s: float = 0.0
    """The time of the save in seconds since 1970."""
    problems: str | None = None
    """Problems found without reading the data; `shardload.steps.digests.verify` reads all of it."""
    record: StepRecord | None = None
    """The content of ``step.json``; ``None`` if the file is missing or unreadable."""
    url: str | None = None
    """The URL of a remote step; ``path`` is then the URL, too."""
    remote: Location | None = field(default=None, repr=False, compare=False)
    """The folder of a remote step; ``None`` if it cannot be read."""

    @property
    def location(self) -> Location:
        """The step's folder, local or remote."""
        return self.remote or located(self.path)

    @property
    def best(self) -> bool:
        """Whether it has the best value of the monitored metric among the existing steps."""
        return self.best_by is not None

    @property
    def recorded(self) -> StepRecord:
        """The record, or an empty record if there is none."""
        return self.record or _EMPTY

    @property
    def epoch(self) -> int | None:
        """The epoch, counted from 0."""
        return self.recorded.epoch

    @property
    def batch(self) -> int | None:
        """The number of completed batches in the epoch."""
        return self.recorded.batch

    @property
    def metrics(self) -> dict[str, float]:
        """The logs at this step."""
        return self.recorded.logs

    @property
    def saved_as(self) -> int:
        """The number it was saved under; differs from ``step`` if its folder was copied or renamed."""
        return self.step if self.recorded.step is None else self.recorded.step

    @property
    def run(self) -> str | None:
        """The name of the run that saved it."""
        return self.recorded.run

    @property
    def hides_rank(self) -> bool:
        """Whether damage hides the metrics of this step."""
        return self.ours and self.record is None and self.problems is not None

    @property
    def where(self) -> str:
        """The URL or path, for messages."""
        return self.url or str(self.path)


def described(
    step: int,
    path: Path,
    record: StepRecord | None,
    *,
    ours: bool,
    n_bytes: int,
    changed_s: float = 0.0,
    problems: str | None = None,
) -> StepInfo:
    """Build a `StepInfo` from the content of ``step.json``."""
    # The digests protect the number in step.json; anyone can rename the folder.
    if problems is None and record is not None and record.step not in (None, step):
        problems = mismatch(record.step)
    return StepInfo(
        step=step,
        path=path,
        ours=ours,
        n_bytes=n_bytes,
        saved_s=(record and record.saved_unix_s) or changed_s,
        problems=problems,
        record=record,
    )


def with_best(found: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the same steps, with the best one marked if there is one."""
    best = next((info.step for info in best_first(found)), None)
    return [replace(info, best_by=_best_by(info, found)) if info.step == best else info for info in found]


def _best_by(best: StepInfo, found: Sequence[StepInfo]) -> str:
    last = ranking_record(found)
    assert last is not None  # with_best found a best step, so some step has a metric
    monitor = last.monitor or ""
    better = "higher" if _is_higher_better(last.mode, monitor) else "lower"
    return f"{monitor}={best.metrics[monitor]:.6g} ({better} is better)"


def best_first(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the steps that have the monitored metric, best first; see `ranking_record`."""
    if (last := ranking_record(steps)) is None:
        return []
    runs = [last.run] if last.best_of == "run" else None
    return ranked(steps, monitor=last.monitor or "", mode=last.mode, runs=runs)


def ranked(
    steps: Iterable[StepInfo], *, monitor: str, mode: str, runs: Collection[str | None] | None = None
) -> list[StepInfo]:
    """Return the steps ranked from best to worst, without steps that lack the metric.

    Args:
        steps: The steps. Of equal ones, the original precedes a copy and the earlier precedes the later.
        monitor: The metric to rank by.
        mode: ``min``, ``max``, or ``auto``: decide by the metric's name.
        runs: Rank the steps of these runs only.
    """
    # Negate the value instead of reversing the order, which would also reverse the order of equal ones.
    sign = -1 if _is_higher_better(mode, monitor) else 1
    known = [info for info in steps if info.recorded.ranks_by(monitor) and (runs is None or info.run in runs)]
    return sorted(known, key=lambda info: (sign * info.metrics[monitor], info.saved_as != info.step, info.step))


def _is_higher_better(mode: str, monitor: str) -> bool:
    if mode in ("min", "max"):
        return mode == "max"
    # Keras asks the model's metrics, but a list of steps has no model. Keras 2 maximized metrics with these names.
    return monitor.endswith(("acc", "accuracy", "auc")) or "fmeasure" in monitor


def ranking_record(steps: Sequence[StepInfo]) -> StepRecord | None:
    """Return the record that defines "best": of the newest step with ``keep_best``, else with a metric.

    A callback without ``keep_best`` has a default metric, too; that must not override another callback's rule.
    """
    monitored = [info.recorded for info in steps if info.recorded.monitor is not None]
    promised = [record for record in monitored if record.keep_best]
    return next(reversed(promised or monitored), None)
