"""Choose a step to use instead of a damaged one, and write the advice for the error message.

    step="latest", a number    the newest undamaged step before the damaged one
    step="best"                the best undamaged other step, as ranked by `find_step`

A local step is read completely before it counts as undamaged; for remote steps only the listing is read.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from shardload.steps.digests import verify
from shardload.steps.listing import list_steps
from shardload.steps.step_info import StepInfo, best_first
from shardload.stores.remote import remote_store

Which = int | Literal["latest", "best"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """The step to use instead of a damaged one. Serializable as JSON, so that process 0 can send it to the others."""

    step: int | None
    """The step that ``fallback="previous"`` restores, if any."""
    advice: str
    """A sentence for the error message."""


def alternative(
    directory: str | os.PathLike[str], which: Which, *, bad: StepInfo | None, tried: Collection[int]
) -> Alternative:
    """Find a step to use instead of a damaged one.

    Args:
        directory: The folder or URL of the steps.
        which: The requested step, as for `find_step`.
        bad: The damaged step; ``None`` if damage hides which step is the best.
        tried: The numbers of all steps already found to be damaged.
    """
    # HTTP cannot list, and the URL of a single step says nothing about the steps next to it.
    store = remote_store(directory)
    if bad is not None and store is not None and not (store.can_list and store.url != bad.url):
        return Alternative(None, "Other steps cannot be listed there: pass the URL of an earlier one, if there is one.")
    # Remote steps are not read here, so the message must not promise that one is good.
    good = " good one" if store is None else ""
    steps = list_steps(directory)
    others = [info for info in reversed(steps) if info.ours and info.step not in tried]
    if which != "best":
        found = _first_good(info for info in others if bad is None or info.step < bad.step)
        return _take(found, f"newest{good} before it") if found else Alternative(None, "No earlier step is undamaged.")
    ranks = {info.step: rank for rank, info in enumerate(best_first(steps))}
    ranked = sorted((info for info in others if info.step in ranks), key=lambda info: ranks[info.step])
    if found := _first_good(ranked):
        return _take(found, f"next best{good}" if bad else f"best{good} of the others")
    # Only named, never taken by fallback: a step without the metric may be worse than every ranked one.
    newest = _first_good(info for info in others if info.step not in ranks)
    unranked = f" Step {newest.step} is the newest{good}: pass step={newest.step}." if newest else ""
    return Alternative(None, f"No other undamaged step has a value of the monitored metric.{unranked}")


def _take(found: StepInfo, rank: str) -> Alternative:
    return Alternative(found.step, f"Step {found.step} is the {rank}: pass step={found.step}, or fallback='previous'.")


def _first_good(steps: Iterable[StepInfo]) -> StepInfo | None:
    """Return the first undamaged step; remote steps are not read completely, only their listing."""
    return next((s for s in steps if s.problems is None and (s.url is not None or not verify(s.path))), None)
