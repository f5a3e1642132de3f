"""Which steps stay. A step stays if any rule wants it; without a limit on the latest ones, all stay.

Only shardload's own steps whose files look whole are counted and removed. Users remove damaged steps and those of other
programs themselves. The best steps that another callback or another run promised to keep stay as well: one for the
latest steps and one for the best may share a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardload.errors import SaveError, ShardloadError, UsageError
from shardload.steps.listing import StepInfo, list_steps, ranked
from shardload.steps.publish import remove_step


@dataclass(frozen=True, slots=True)
class BestRule:
    """What "best" means to a callback."""

    monitor: str
    mode: Literal["min", "max"] | None
    """Which way is better; ``None`` where it is not known."""
    runs: Collection[str | None] | None = None
    """The runs whose steps are compared; ``None``: all."""
    damaged: Collection[int] = ()
    """Steps that look whole and are not."""

    def covers(self, info: StepInfo) -> bool:
        """Whether a step was ranked in this way when it was saved, so that the rule for the best is this callback's."""
        ours = self.runs is None or info.run in self.runs
        return ours and (info.said.monitor, info.said.mode) == (self.monitor, self.mode)

    def best(self, steps: Iterable[StepInfo]) -> list[StepInfo]:
        """Steps that can be compared, the best first."""
        return ranked(steps, monitor=self.monitor, mode=self.mode or "min", runs=self.runs)


@dataclass(frozen=True, slots=True)
class Retention:
    """The union of up to four rules."""

    latest: int | None
    """So many of the newest; ``None``: all."""
    best: int | None = None
    """So many of the best by the monitored metric."""
    every_steps: int | None = None
    """The first step at or after each multiple of this."""
    every_hours: float | None = None
    """The oldest step, and then each one that was saved at least so long after the one kept before it."""

    def __post_init__(self) -> None:
        names = {"latest": "max_to_keep", "best": "keep_best", "every_steps": "keep_every_steps"}
        for name, argument in names.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{argument} should be a whole number from 1 on, or None, but is {value!r}")
        if self.every_hours is not None and not self.every_hours > 0:
            raise UsageError(f"keep_every_hours should be more than 0, or None, but is {self.every_hours!r}")

    def removable(self, steps: Sequence[StepInfo], *, newest: int, by: BestRule) -> list[int]:
        """Steps no rule wants, oldest first; never the newest.

        Args:
            steps: All that are there, ascending.
            newest: The one just saved.
            by: What "best" means.
        """
        if self.latest is None:
            return []
        damaged = {*by.damaged, *recorded_damage(steps)}
        ours = [s for s in steps if s.ours and s.problems is None and s.step not in damaged]
        keep = {newest, *(s.step for s in ours[-self.latest :])}
        keep.update(s.step for s in by.best(ours)[: self.best or 0])
        keep.update(_promised(s for s in ours if not (self.best and by.covers(s))))
        keep.update(_spaced(ours, self.every_steps), _in_time(ours, self.every_hours))
        return [s.step for s in ours if s.step not in keep]


def remover(retention: Retention, root: Path, *, by: BestRule) -> Callable[[int, Path], None]:
    """What is called with each new step and removes those no rule wants any more.

    Raises:
        SaveError: When called: which steps there are cannot be told, or a step's files cannot be removed.
    """

    def remove(step: int, path: Path) -> None:
        if retention.latest is None:  # all stay, also those that cannot be looked into
            return
        try:
            for old in retention.removable(list_steps(root), newest=step, by=by):
                remove_step(root, old)
        except ShardloadError as error:
            raise SaveError(
                f"older steps could not be removed, as max_to_keep={retention.latest} wants: {error}"
            ) from error

    return remove


def recorded_damage(steps: Iterable[StepInfo]) -> set[int]:
    """Steps that other ones say were damaged when they were saved; a run that reads no data would not notice."""
    return {step for info in steps for step in info.said.damaged}


def _promised(steps: Iterable[StepInfo]) -> Iterator[int]:
    """The best steps by each metric whose callback keeps the best, as many as it said when it last saved one."""
    groups: dict[tuple[str, str], list[StepInfo]] = {}
    for info in steps:
        if info.said.monitor is not None and info.said.keep_best is not None:
            groups.setdefault((info.said.monitor, info.said.mode), []).append(info)
    for (monitor, mode), group in groups.items():
        yield from (s.step for s in ranked(group, monitor=monitor, mode=mode)[: group[-1].said.keep_best])


def _spaced(steps: Iterable[StepInfo], every: int | None) -> list[int]:
    if every is None:
        return []
    first: dict[int, int] = {}
    for info in steps:
        first.setdefault(info.step // every, info.step)
    return [step for multiple, step in first.items() if multiple > 0]


def _in_time(steps: Iterable[StepInfo], hours: float | None) -> list[int]:
    kept: list[StepInfo] = []
    for info in steps if hours is not None else ():
        if not kept or info.saved_s >= kept[-1].saved_s + (hours or 0) * 3600:
            kept.append(info)
    return [info.step for info in kept]
