"""Decide which steps to keep: a step stays if any rule keeps it; without a limit for the latest steps, all stay.

Only undamaged steps saved by shardload are counted and removed. Users remove damaged and foreign steps
themselves. The best steps that another callback or run keeps also stay, so one callback for the latest
steps and one for the best steps can share a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardload.errors import SaveError, ShardloadError, UsageError
from shardload.runs.listing import list_steps
from shardload.runs.publish import remove_step
from shardload.runs.step import StepInfo, ranked
from shardload.units import is_integer, is_real


@dataclass(frozen=True, slots=True)
class BestRule:
    """The definition of "best" that a callback uses."""

    monitor: str
    mode: Literal["min", "max"] | None
    """Which direction is better; ``None`` if unknown."""
    runs: Collection[str | None] | None = None
    """The runs whose steps are compared; ``None`` compares all."""
    damaged: Collection[int] = ()
    """Steps that look intact but are damaged."""

    def covers(self, info: StepInfo) -> bool:
        """Whether a step was saved under the same definition, so that this callback ranks it."""
        ours = self.runs is None or info.run in self.runs
        return ours and (info.recorded.monitor, info.recorded.mode) == (self.monitor, self.mode)

    def best(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """Return the steps that can be compared, best first."""
        return ranked(steps, monitor=self.monitor, mode=self.mode or "min", runs=self.runs)


@dataclass(frozen=True, slots=True)
class Retention:
    """A retention policy: the union of up to four rules."""

    latest: int | None
    """How many of the newest steps stay; ``None`` keeps all."""
    best: int | None = None
    """How many of the best steps by the monitored metric stay."""
    every_steps: int | None = None
    """Keep the first step at or after each multiple of this number."""
    every_hours: float | None = None
    """Keep the oldest step, then each step saved at least this long after the previously kept one."""

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
        """Return the steps that no rule keeps, oldest first; never the newest.

        Args:
            steps: All existing steps, in ascending order.
            newest: The step that was just saved.
            by: The definition of "best".
        """
        if self.latest is None:
            return []
        damaged = {*by.damaged, *recorded_damage(steps)}
        ours = [s for s in steps if s.ours and s.problems is None and s.step not in damaged]
        # The union of all rules. The newest stays even if it does not rank: a resume needs it.
        keep = {newest, *(s.step for s in ours[-self.latest :])}
        keep.update(s.step for s in by.best(ours)[: self.best or 0])
        # Steps that this callback ranks follow its own rule; of the others, keep what their callbacks promised to keep.
        keep.update(_promised(s for s in ours if not (self.best and by.covers(s))))
        keep.update(_spaced(ours, self.every_steps), _in_time(ours, self.every_hours))
        return [s.step for s in ours if s.step not in keep]


def remover(retention: Retention, root: Path, *, by: BestRule) -> Callable[[int, Path], None]:
    """Return a function to call after each save, which removes the steps that no rule keeps.

    Raises:
        SaveError: When called: if the steps cannot be listed, or a step cannot be removed.
    """

    def remove(step: int, path: Path) -> None:
        # Nothing to remove: do not even list the steps, so that an unreadable one does not fail the save.
        if retention.latest is None:
            return
        try:
            for old in retention.removable(list_steps(root), newest=step, by=by):
                remove_step(root, old)
        except ShardloadError as error:
            raise SaveError(f"the steps beyond max_to_keep={retention.latest} could not be removed: {error}") from error

    return remove


def recorded_damage(steps: Iterable[StepInfo]) -> set[int]:
    """Return the steps recorded as damaged in other steps, since a run that reads no data would not notice."""
    return {step for info in steps for step in info.recorded.damaged}


def _promised(steps: Iterable[StepInfo]) -> Iterator[int]:
    """Yield the best steps by each metric that some callback keeps the best of; the newest such step says how many."""
    groups: dict[tuple[str, str], list[StepInfo]] = {}
    for info in steps:
        if info.recorded.monitor is not None and info.recorded.keep_best is not None:
            groups.setdefault((info.recorded.monitor, info.recorded.mode), []).append(info)
    for (monitor, mode), group in groups.items():
        yield from (s.step for s in ranked(group, monitor=monitor, mode=mode)[: group[-1].recorded.keep_best])


def _spaced(steps: Iterable[StepInfo], every: int | None) -> list[int]:
    if every is None:
        return []
    first: dict[int, int] = {}
    for info in steps:
        first.setdefault(info.step // every, info.step)
    # Steps below the first multiple do not count.
    return [step for multiple, step in first.items() if multiple > 0]


def _in_time(steps: Iterable[StepInfo], hours: float | None) -> list[int]:
    kept: list[StepInfo] = []
    for info in steps if hours is not None else ():
        if not kept or info.saved_s >= kept[-1].saved_s + (hours or 0) * 3600:
            kept.append(info)
    return [info.step for info in kept]
