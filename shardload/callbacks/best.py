"""Find the value that a new step has to beat: the best of the undamaged steps in the folder, of the runs that count.

    best_of="folder"    all runs that saved to the folder
    best_of="run"       this run and the steps it resumed; Keras' own callbacks compare like this

It is determined each time ``fit`` begins, because earlier steps may have been removed or damaged in the meantime.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardload.callbacks.monitor import Monitor
from shardload.callbacks.retention import BestRule, recorded_damage
from shardload.keras_bridge.model_records import record_of
from shardload.processes import Channel
from shardload.steps.digests import verify
from shardload.steps.step_info import StepInfo

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
