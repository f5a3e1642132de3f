"""The steps of a run as a list that notebooks show as a table."""

from __future__ import annotations

import time
from collections.abc import Iterable

from shardload.manifest import partial_text
from shardload.reports import printable
from shardload.reports.aligned import aligned
from shardload.reports.markup import ShownAsText
from shardload.runs.step import StepInfo
from shardload.units import format_bytes, time_ago


class StepList(ShownAsText, list[StepInfo]):
    """Steps, the newest last; ``str(steps)`` is the table that `shardload steps` prints."""

    def __str__(self) -> str:
        return steps_table(self).rstrip() if self else "no steps"


def steps_table(steps: Iterable[StepInfo], *, width: int | None = None) -> str:
    """Return a table of steps, one line for each. ``width``: columns of the terminal."""
    head = ("step", "epoch", "metrics", "size", "age", "best", "state")
    return aligned([head, *map(_row, steps)], width=width)


def _row(info: StepInfo) -> tuple[str, ...]:
    metrics = " ".join(f"{name}={value:.4g}" for name, value in info.metrics.items())
    partial = f", {partial_text(info.recorded.left_out)}" if info.recorded.left_out else ""
    state = f"{info.problems or ('not read' if info.ours else 'unverified: not saved by shardload')}{partial}"
    # Stored from 0, but Keras prints epochs from 1.
    epoch = "-" if info.epoch is None else str(info.epoch + 1)
    cells = (
        str(info.step),
        epoch,
        metrics or "-",
        format_bytes(info.n_bytes),
        time_ago(time.time() - info.saved_s) if info.saved_s else "-",
    )
    return (*cells, "best" if info.best else "-", printable(state))
