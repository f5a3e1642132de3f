"""Which steps a folder holds, and which of them a word like "latest" means. Reads names and ``step.json``, no data.

A step is a folder named by digits without leading zeros that holds something only a step holds: ``shardload/`` (one of
ours) or Orbax's ``_CHECKPOINT_METADATA`` (a foreign one: readable, but nothing vouches for its bytes). Bare and
empty folders are never steps. A shardload step that lost its digests stays one, with a problem: taken for a foreign
one it would be used unchecked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardload.errors import DamagedError, ShardloadError, SourceError, SourceNotFoundError, UsageError
from shardload.steps._number import NAME, holds
from shardload.steps.digest_list import name_damage
from shardload.steps.digests import DIGESTS_FILE, OWN_FOLDER, Checker
from shardload.steps.file_tree import FileTree, scan
from shardload.steps.record import STEP_FILE, StepRecord
from shardload.stores.local import expanded
from shardload.stores.remote import is_url

ORBAX_FILE = "_CHECKPOINT_METADATA"
TREE_FILE = "_METADATA"
_EMPTY = StepRecord()


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step, as far as names and ``step.json`` tell."""

    step: int
    path: Path
    ours: bool
    """Saved by shardload, so it has digests; else by Keras' own callback or plain Orbax."""
    best_by: str | None = None
    """By what it is the best of the steps that are there, if it is: ``val_loss=0.25 (lower is better)``."""
    n_bytes: int = 0
    """All its files."""
    saved_s: float = 0.0
    """When it was saved, in seconds since 1970."""
    problems: str | None = None
    """What is wrong with it at first sight; `shardload.steps.digests.verify` looks closely."""
    record: StepRecord | None = None
    """What ``step.json`` says; None where it cannot be read, or is not there."""
    url: str | None = None
    """Its address, where it is a remote one; ``path`` then is a folder that stands for it."""
    mirror: Any = field(default=None, repr=False, compare=False)
    """Keeps that folder, see `shardload.steps.remote_cache`."""

    @property
    def best(self) -> bool:
        """Whether it has the best value of the monitored metric among the steps that are there."""
        return self.best_by is not None

    @property
    def said(self) -> StepRecord:
        """Its record; an empty one where there is none."""
        return self.record or _EMPTY

    @property
    def epoch(self) -> int | None:
        """Counted from 0."""
        return self.said.epoch

    @property
    def batch(self) -> int | None:
        """Batches of the epoch that were done."""
        return self.said.batch

    @property
    def metrics(self) -> dict[str, float]:
        """The logs at that step."""
        return self.said.logs

    @property
    def holds(self) -> int:
        """The number it was saved under; another one than ``step`` where its folder was copied or renamed."""
        return self.step if self.said.step is None else self.said.step

    @property
    def run(self) -> str | None:
        """The name of the run that saved it."""
        return self.said.run

    @property
    def hides_rank(self) -> bool:
        """Whether damage hides how good it is."""
        return self.ours and self.record is None and self.problems is not None

    @property
    def where(self) -> str:
        """What to call it: its address or its path."""
        return self.url or str(self.path)

    def naming(self) -> AbstractContextManager[None]:
        """Errors raised in the block call it `where`."""
        return nullcontext() if self.mirror is None else self.mirror.naming()

    def at(self, url: str, mirror: Any) -> StepInfo:
        """The same step, known to be a remote one."""
        return replace(self, url=url, mirror=mirror)


def list_steps(root: str | os.PathLike[str]) -> list[StepInfo]:
    """The steps in ``root``, ascending; of an address as `shardload.steps.remote_listing` finds them.

    Raises:
        UsageError: When ``root`` is not a path.
        SourceNotFoundError: When there is no such folder.
        SourceError: When it, or a folder that may be a step, cannot be looked into.
    """
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        raise UsageError(f"The folder of the steps is a path; got {root!r}")
    if is_url(root):
        from shardload.steps.remote_listing import list_remote

        return list_remote(str(root))
    base = expanded(root)
    try:
        names = [entry.name for entry in base.iterdir() if NAME.fullmatch(entry.name)]
    except (FileNotFoundError, NotADirectoryError) as error:
        raise SourceNotFoundError(f"There is no folder {base}, so it holds no steps. Check the path") from error
    except OSError as error:
        raise SourceError(f"The folder {base} cannot be listed: {error.strerror}") from error
    found = [info for name in sorted(names, key=int) if (info := _look(base / name)) is not None]
    return with_best(found)


def with_best(found: Sequence[StepInfo]) -> list[StepInfo]:
    """The same steps, of which one may be marked as the best."""
    best = next((info.step for info in best_first(found)), None)
    return [replace(info, best_by=_best_by(info, found)) if info.step == best else info for info in found]


def _best_by(best: StepInfo, found: Sequence[StepInfo]) -> str:
    last = _ranking(found)
    assert last is not None  # it made one the best
    monitor = last.monitor or ""
    better = "higher" if _is_higher_better(last.mode, monitor) else "lower"
    return f"{monitor}={best.metrics[monitor]:.6g} ({better} is better)"


def best_first(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Those of all runs, or of the newest one's, that say how good they are: as the callback of `_ranking` has it."""
    if (last := _ranking(steps)) is None:
        return []
    runs = [last.run] if last.best_of == "run" else None
    return ranked(steps, monitor=last.monitor or "", mode=last.mode, runs=runs)


def find_step(root: str | os.PathLike[str], step: Literal["latest", "best"] | int) -> StepInfo:
    """The step meant by a word or a number.

    Raises:
        UsageError: When ``step`` is neither "latest", "best" nor a number.
        SourceNotFoundError: When there is no such step; says which there are.
        DamagedError: When the best is asked for and a step's own record of how good it is cannot be trusted.
    """
    if step not in ("latest", "best") and (isinstance(step, bool) or not isinstance(step, int)):
        raise UsageError(f'step should be "latest", "best" or a number, but is {step!r}')
    if is_url(root):
        from shardload.steps.remote_listing import find_remote

        found = find_remote(str(root), step)
        if isinstance(found, StepInfo):
            return found
        steps = found
    else:
        steps = list_steps(root)
    if not steps:
        raise SourceNotFoundError(
            f"{root} holds no steps. Check the path: steps are folders named 0, 1, 2, …{_nested(root)}"
        )
    if step == "latest":
        return steps[-1]
    if step == "best" and (unknown := [info for info in steps if info.hides_rank]):
        also = f"; nor do {', '.join(str(info.step) for info in unknown[1:])}" if len(unknown) > 1 else ""
        raise DamagedError(
            f"Cannot determine the best step in {root}: step {unknown[0].step} does not say how good it is "
            f"({unknown[0].problems}){also}. {_existing(steps)}. Take one by its number, or remove the folder "
            f"{unknown[0].where}"
        )
    for info in steps:
        if info.best if step == "best" else info.step == step:
            return info
    if step == "best":
        last = _ranking(steps)
        metric = "the monitored metric" if last is None else repr(last.monitor)
        raise SourceNotFoundError(
            f"No step in {root} says how good it is: none was saved with a value of {metric}. "
            f'{_existing(steps)}. Take one by its number, or step="latest"'
        )
    elsewhere = next(
        (f" The folder {info.step} holds it: rename that to {step}." for info in steps if info.holds == step), ""
    )
    raise SourceNotFoundError(
        f'{root} has no step {step}.{elsewhere} {_existing(steps)}. Take one of those, or step="latest"'
    )


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder of any name is a shardload step; a folder ``shardload`` in it is not enough."""
    path = Path(folder)
    marked = (path / OWN_FOLDER).is_dir() and (path / ORBAX_FILE).is_file()
    return marked or (path / DIGESTS_FILE).is_file()


def latest_of_ours(path: str | os.PathLike[str]) -> Path | None:
    """``path`` itself if it is a shardload step, or the latest step in it if that is one."""
    if is_ours(path):
        return Path(path)
    steps = list_steps(path) if Path(path).is_dir() else []
    return steps[-1].path if steps and steps[-1].ours else None


def better(value: float, than: float, *, mode: str, monitor: str = "") -> bool:
    """Whether a metric improved, as Keras' callbacks see it: "auto" goes by the metric's name."""
    return value > than if _is_higher_better(mode, monitor) else value < than


def ranked(
    steps: Iterable[StepInfo], *, monitor: str, mode: str, runs: Collection[str | None] | None = None
) -> list[StepInfo]:
    """Steps from the best to the worst; those that do not say how good they are, are left out.

    Args:
        steps: Of equally good ones the original comes before a copy, and the earlier before the later.
        monitor: The metric to rank them by.
        mode: ``min``, ``max``, or ``auto``: as `better`.
        runs: Rank the steps of these runs only.
    """
    sign = -1 if _is_higher_better(mode, monitor) else 1
    known = [info for info in steps if info.said.ranks_by(monitor) and (runs is None or info.run in runs)]
    return sorted(known, key=lambda info: (sign * info.metrics[monitor], info.holds != info.step, info.step))


def _is_higher_better(mode: str, monitor: str) -> bool:
    if mode in ("min", "max"):
        return mode == "max"
    return monitor.endswith(("acc", "accuracy", "auc")) or "fmeasure" in monitor


def _look(path: Path) -> StepInfo | None:
    """The step in a folder named by digits; None when it is not a step."""
    try:
        ours = (path / OWN_FOLDER).is_dir()
        if not path.is_dir() or not (ours or (path / ORBAX_FILE).is_file()):
            return None
    except OSError as error:  # passing it over would make an older step the latest
        raise SourceError(
            f"{path} may be a step, but cannot be looked into: {error.strerror}. Let this user read it, or move it away"
        ) from error
    problems = []
    tree, changed_s = FileTree({}, (), {}), 0.0
    try:
        tree, changed_s = scan(path), path.stat().st_mtime
    except OSError as error:
        problems.append(f"cannot be listed: {error.strerror}")
    if ours and not (path / DIGESTS_FILE).is_file():
        problems.append(f"{DIGESTS_FILE} is missing")
    record = None
    if ours:
        try:
            if not problems:  # what is best, and so what is removed, goes by these
                with Checker(path) as checker:
                    checker.check_whole(STEP_FILE)
                    problems += [
                        f"{found.path} {found.what}" for found in name_damage(checker.digests, tree, path.name)[:1]
                    ]
            record = StepRecord.read(path)
        except (ShardloadError, OSError) as error:
            problems.append(f"{STEP_FILE} cannot be read: {error}")
    problem = "; ".join(problems) or None
    return described(
        int(path.name), path, record, ours=ours, n_bytes=tree.n_bytes, changed_s=changed_s, problems=problem
    )


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
    """A step as its ``step.json`` tells of it."""
    if problems is None and record is not None and record.step not in (None, step):
        problems = holds(record.step)
    return StepInfo(
        step=step,
        path=path,
        ours=ours,
        n_bytes=n_bytes,
        saved_s=(record and record.saved_unix_s) or changed_s,
        problems=problems,
        record=record,
    )


def _ranking(steps: Sequence[StepInfo]) -> StepRecord | None:
    """The step whose callback says what "best" means: the newest that was told to keep the best, or the newest of all.

    A callback without such a rule has a metric too, by default; that must not change what another one promised.
    """
    monitored = [info.said for info in steps if info.said.monitor is not None]
    promised = [said for said in monitored if said.keep_best]
    return next(reversed(promised or monitored), None)


def _existing(steps: Sequence[StepInfo]) -> str:
    shown = ", ".join(str(info.step) for info in steps[-10:])
    return f"It has {len(steps)} step{'s' if len(steps) > 1 else ''}: {'…, ' if len(steps) > 10 else ''}{shown}"


def _nested(root: str | os.PathLike[str]) -> str:
    """A way out when ``root`` is a step itself."""
    if is_url(root):
        return ""
    path = expanded(root).absolute()
    if any((path / name).exists() for name in (OWN_FOLDER, ORBAX_FILE, TREE_FILE)):
        if path.name.isascii() and path.name.isdigit():
            return f". It looks like a step itself: give its folder {path.parent} and step={path.name}"
        return ". It looks like a single checkpoint of Orbax: use shardload.load_weights, or shardload load"
    return ""
