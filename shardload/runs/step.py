"""One step: its record ``shardload/step.json``, its number, and what a list of steps says of it.

No other module reads or writes ``step.json``. The file may come from an older version or be manipulated: a field that
is missing or of the wrong type is read as if absent.

A step's folder name is compared with the number in ``step.json``, which the digests protect. In a copied or renamed
folder, the two differ.

9/shardload/step.json  {"step": 4, …}      step 4 in folder 9: refused, since it would pass for a newer step
final/                 {"step": 4, …}      a name that is not a number: accepted
9/                     {"epoch": 1, …}     no number stored: nothing to compare
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from shardload.errors import DamagedError, ShardloadError
from shardload.loaders.orbax.loader import OWN_FOLDER
from shardload.runs.digest_list import Damage
from shardload.stores import json_files
from shardload.stores.local import located
from shardload.stores.location import Location

STEP_FILE = f"{OWN_FOLDER}/step.json"
VERSION = 1
# JSON integers have any length, and float() raises OverflowError for one beyond about 1.8e308.
_LARGEST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The content of ``step.json``; docs/reference/step-folder.md explains each field."""

    version: int = VERSION
    step: int | None = None
    # Where training was.
    epoch: int | None = None
    batch: int | None = None
    epoch_done: bool = False
    # By which metric the step ranks, among which steps, and which of those the run found damaged.
    logs: dict[str, float] = field(default_factory=dict)
    monitor: str | None = None
    mode: str = "auto"
    best: float | None = None
    best_of: str = "folder"
    run: str | None = None
    damaged: tuple[int, ...] = ()
    ranks: bool = True
    keep_best: int | None = None
    # What the step contains.
    save_weights_only: bool = False
    save_trainable_only: bool = False
    variables: tuple[str, ...] | None = None
    left_out: int = 0
    callbacks: tuple[Mapping[str, Any], ...] = ()
    metadata: Any = None
    # Where and with what it was saved.
    mesh: Mapping[str, Any] | None = None
    devices: int | None = None
    processes: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    saved_unix_s: float | None = None

    @classmethod
    def read(cls, folder: str | os.PathLike[str] | Location) -> StepRecord:
        """Read ``step.json`` in a step's folder; raise if the file is missing or is not a JSON object."""
        return cls.of_json(json_files.read_object(located(folder) / STEP_FILE))

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> StepRecord:
        """Build a record from a JSON object that may be damaged: missing fields and wrong types get default values."""
        damaged, callbacks, variables = found.get("damaged"), found.get("callbacks"), found.get("variables")
        logs, mesh, versions = found.get("logs"), found.get("mesh"), found.get("versions")
        numbers = {name: _number(value) for name, value in logs.items()} if isinstance(logs, dict) else {}
        return cls(
            version=_integer(found.get("version")) or VERSION,
            step=_integer(found.get("step")),
            epoch=_count(found.get("epoch")),
            batch=_count(found.get("batch")),
            epoch_done=bool(found.get("epoch_done")),
            logs={name: number for name, number in numbers.items() if number is not None},
            monitor=_text(found.get("monitor")),
            mode=_text(found.get("mode")) or "auto",
            best=_number(found.get("best")),
            best_of=_text(found.get("best_of")) or "folder",
            run=_text(found.get("run")),
            damaged=tuple(n for n in damaged if type(n) is int) if isinstance(damaged, list) else (),
            ranks=found.get("ranks") is not False,
            keep_best=_integer(found.get("keep_best")),
            save_weights_only=bool(found.get("save_weights_only")),
            save_trainable_only=bool(found.get("save_trainable_only")),
            variables=tuple(filter(_text, variables)) if isinstance(variables, list) else None,
            left_out=_count(found.get("left_out")) or 0,
            callbacks=tuple(c for c in callbacks if isinstance(c, dict)) if isinstance(callbacks, list) else (),
            metadata=found.get("metadata"),
            mesh=mesh if isinstance(mesh, dict) else None,
            devices=_count(found.get("devices")),
            processes=_count(found.get("processes")),
            versions=versions if isinstance(versions, dict) else {},
            saved_unix_s=_number(found.get("saved_unix_s")),
        )

    def ranks_by(self, monitor: str) -> bool:
        """Whether the step can be ranked by ``monitor``: its logs have this metric, measured over a complete epoch."""
        return self.ranks and not math.isnan(self.logs.get(monitor, math.nan))


def _text(found: Any) -> str | None:
    return found if isinstance(found, str) else None


def _integer(found: Any) -> int | None:
    # Not isinstance: true is an int in Python, but not a number in JSON.
    return found if type(found) is int else None


def _count(found: Any) -> int | None:
    """Return a count from ``step.json`` if it is an integer from 0 to below 2**63, as all counts are; else ``None``."""
    return found if type(found) is int and 0 <= found < 1 << 63 else None


def _number(found: Any) -> float | None:
    # bool is an int in Python, and a number beyond the limit cannot come from a metric.
    usable = isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < _LARGEST
    # Python writes and reads infinities in JSON as Infinity, although the standard has none.
    return float(found) if usable or found in (math.inf, -math.inf) else None


NAME = re.compile(r"0|[1-9][0-9]{0,17}")
"""Matches the name of a step's folder: a number of at most 18 digits, so that it fits into 64 bits."""


def _other_number(folder: str | os.PathLike[str] | Location) -> tuple[int, int] | None:
    """Return the number in a step's folder name and that in its ``step.json`` if the two differ, else ``None``."""
    with suppress(ShardloadError, OSError):  # an unreadable record is reported as damage elsewhere
        where = located(folder)
        stated = StepRecord.read(where).step
        for name in (where.name, where.resolved().name):  # a link's name, then its target's
            if stated is not None and NAME.fullmatch(name) and int(name) != stated:
                return int(name), stated
    return None


def number_damage(folder: str | os.PathLike[str] | Location) -> list[Damage]:
    """Return the defect that a step's folder is named by another number than ``step.json`` has, or an empty list."""
    if (numbers := _other_number(folder)) is None:
        return []
    return [Damage(STEP_FILE, f"{mismatch(numbers[1])}. {_advice(numbers[1])}", step=str(numbers[0]))]


def check_folder_number(folder: str | os.PathLike[str] | Location) -> None:
    """Raise if the name of a step's folder differs from the number in it: the folder was copied or renamed."""
    if (numbers := _other_number(folder)) is not None:
        named, stated = numbers
        raise DamagedError(
            f"Cannot use {folder} as step {named}: it contains step {stated}, so the folder was "
            f"copied or renamed. {_advice(stated)}"
        )


def mismatch(stated: int) -> str:
    """Say what is wrong with a copied or renamed folder, as a phrase; ``stated`` is the number in its ``step.json``."""
    return f"contains step {stated}: copied or renamed"


def _advice(stated: int) -> str:
    return f"Rename it to {stated}; a copy needs a name that is not a number"


@dataclass(frozen=True, slots=True)
class StepInfo:
    """What is known about a step from its file names and ``step.json``, without reading its data."""

    step: int
    path: Path
    ours: bool
    """Whether shardload saved the step, with digests; else Keras' own callback or plain Orbax saved it."""
    best_by: str | None = None
    """For the best step in its folder, the metric and its value: ``val_loss=0.25 (lower is better)``. Else ``None``."""
    n_bytes: int = 0
    """The total size of the step's files in bytes."""
    saved_s: float = 0.0
    """Time at which the step was saved, in seconds since 1970."""
    problems: str | None = None
    """What is wrong with the step, as far as it shows without reading arrays; ``None`` if nothing is."""
    record: StepRecord | None = None
    """The content of ``step.json``; ``None`` if the file is missing or unreadable."""
    url: str | None = None
    """The URL of a remote step; ``path`` is then the URL, too."""
    remote: Location | None = field(default=None, repr=False, compare=False)
    """The folder from which a remote step is read; ``None`` if the step is local, or cannot be read."""

    @classmethod
    def of_record(
        cls,
        step: int,
        path: Path,
        record: StepRecord | None,
        *,
        ours: bool,
        n_bytes: int,
        changed_s: float = 0.0,
        problems: str | None = None,
    ) -> StepInfo:
        """Describe a step from its record in ``step.json``, if there is one, and from its files' sizes and times."""
        # The digests protect the number in step.json; anyone can rename the folder.
        if problems is None and record is not None and record.step not in (None, step):
            problems = mismatch(record.step)
        saved_s = (record and record.saved_unix_s) or changed_s
        return cls(step, path, ours, None, n_bytes, saved_s, problems, record)

    @property
    def location(self) -> Location:
        """The step's folder, local or remote."""
        return self.remote or located(self.path)

    @property
    def best(self) -> bool:
        """Whether the step has the best value of the monitored metric among the existing steps."""
        return self.best_by is not None

    @property
    def recorded(self) -> StepRecord:
        """The content of ``step.json``, or a record with default values if there is none."""
        return self.record or StepRecord()

    @property
    def epoch(self) -> int | None:
        """The epoch in which the step was saved, counted from 0."""
        return self.recorded.epoch

    @property
    def batch(self) -> int | None:
        """How many batches of `epoch` were complete when the step was saved."""
        return self.recorded.batch

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics in the logs of ``fit`` when the step was saved."""
        return self.recorded.logs

    @property
    def saved_as(self) -> int:
        """The number that the step was saved under; not that of its folder, which may have been copied or renamed."""
        return self.step if self.recorded.step is None else self.recorded.step

    @property
    def run(self) -> str | None:
        """Random name of the training run that saved the step; ``None`` if unknown."""
        return self.recorded.run

    @property
    def hides_rank(self) -> bool:
        """Whether damage hides the metrics of the step, so that it may be the best one, or not."""
        return self.ours and self.record is None and self.problems is not None

    @property
    def folder(self) -> Path | str:
        """The folder that contains the step: a path, or of a remote step the URL."""
        return self.path.parent if self.url is None else self.url.rpartition("/")[0]

    @property
    def where(self) -> str:
        """The URL or path of the step, for messages."""
        return self.url or str(self.path)


def with_best(found: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the same steps, the best one marked: its ``best_by`` names the monitored metric and its value."""
    last, best = ranking_record(found), next(iter(best_first(found)), None)
    if last is None or best is None:
        return list(found)
    monitor = last.monitor or ""
    better = "higher" if _is_higher_better(last.mode, monitor) else "lower"
    best_by = f"{monitor}={best.metrics[monitor]:.6g} ({better} is better)"
    return [replace(info, best_by=best_by) if info.step == best.step else info for info in found]


def best_first(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the steps that have a value of the metric that `ranking_record` chooses, best first."""
    if (last := ranking_record(steps)) is None:
        return []
    runs = [last.run] if last.best_of == "run" else None
    return ranked(steps, monitor=last.monitor or "", mode=last.mode, runs=runs)


def ranked(
    steps: Iterable[StepInfo], *, monitor: str, mode: str, runs: Collection[str | None] | None = None
) -> list[StepInfo]:
    """Return the steps that have a value of ``monitor``, best first; with ``runs``, only steps that these runs saved.

    Of steps with equal values, the earlier comes first, but copies (renamed folders) come after all originals.
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
    """Return the ``step.json`` whose metric and direction say which step of a folder is the best, or ``None``.

    It is that of the newest step that was saved with ``keep_best``. Only if there is no such step, it is that of the
    newest step with a monitored metric: a callback without ``keep_best`` has a default metric, which must not override
    the choice of another callback. The result is ``None`` if no step has one.
    """
    monitored = [info.recorded for info in steps if info.recorded.monitor is not None]
    promised = [record for record in monitored if record.keep_best]
    return next(reversed(promised or monitored), None)
