"""Which steps stay. A step stays if any rule wants it; without a limit on the latest ones, all stay.

Only steps of ours whose files look whole are counted and removed: what another program wrote, and what is damaged, is
for people to remove.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardload.errors import SaveError, ShardloadError, UsageError
from shardload.steps.listing import StepInfo, list_steps
from shardload.steps.publish import remove_step


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

    def removable(
        self, steps: Sequence[StepInfo], *, newest: int, monitor: str, mode: Literal["min", "max"] | None
    ) -> list[int]:
        """Steps no rule wants, oldest first; never the newest.

        Args:
            steps: All that are there, ascending.
            newest: The one just saved.
            monitor: The metric "best" means.
            mode: Which way is better.
        """
        if self.latest is None:
            return []
        ours = [s for s in steps if s.ours and s.problems is None]
        keep = {newest, *(s.step for s in ours[-self.latest :])}
        keep.update(_best(ours, self.best, monitor, mode), _spaced(ours, self.every_steps))
        keep.update(_in_time(ours, self.every_hours))
        return [s.step for s in ours if s.step not in keep]


def remover(
    retention: Retention, root: Path, *, monitor: str, mode: Literal["min", "max"] | None
) -> Callable[[int, Path], None]:
    """What is called with each new step and removes those no rule wants any more.

    Raises:
        SaveError: When called: which steps there are cannot be told, or a step's files cannot be removed.
    """

    def remove(step: int, path: Path) -> None:
        if retention.latest is None:  # all stay, also those that cannot be looked into
            return
        try:
            for old in retention.removable(list_steps(root), newest=step, monitor=monitor, mode=mode):
                remove_step(root, old)
        except ShardloadError as error:
            raise SaveError(
                f"older steps could not be removed, as max_to_keep={retention.latest} wants: {error}"
            ) from error

    return remove


def _best(steps: Iterable[StepInfo], count: int | None, monitor: str, mode: str | None) -> list[int]:
    scored = [(s.metrics[monitor], s.step) for s in steps if not math.isnan(s.metrics.get(monitor, math.nan))]
    ranked = sorted(scored, key=lambda found: (-found[0] if mode == "max" else found[0], found[1]))
    return [step for _, step in ranked[: count or 0]]


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
