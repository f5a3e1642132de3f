"""List the steps in a folder, and resolve "latest" and "best" to a step. Reads names and ``step.json``, no data.

A step is a folder named by digits without leading zeros that contains ``shardload/`` (saved by shardload) or Orbax's
``_CHECKPOINT_METADATA`` (a foreign step: readable, but without digests). Other folders, such as empty ones, are never
steps. A shardload step without digests is listed with a problem: treated as a foreign step, it
would be used unchecked.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from shardload.errors import DamagedError, LimitError, ShardloadError, SourceError, SourceNotFoundError, UsageError
from shardload.loaders.orbax import number_of, numbered
from shardload.steps.digest_list import name_damage
from shardload.steps.digests import DIGESTS_FILE, OWN_FOLDER, Checker
from shardload.steps.file_tree import FileTree, scan
from shardload.steps.number import NAME, mismatch
from shardload.steps.record import STEP_FILE, StepRecord
from shardload.stores.local import expanded, located, without_file_scheme
from shardload.stores.location import Location
from shardload.stores.remote import is_url, refuse_other_urls
from shardload.units import is_integer, plural

ORBAX_FILE = "_CHECKPOINT_METADATA"
TREE_FILE = "_METADATA"
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


def list_steps(root: str | os.PathLike[str]) -> list[StepInfo]:
    """Return the steps in ``root`` in ascending order; for a URL, see `shardload.steps.remote_listing`.

    Raises:
        UsageError: If ``root`` is not a path.
        SourceNotFoundError: If the folder does not exist.
        SourceError: If the folder, or a subfolder that may be a step, cannot be read.
    """
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        raise UsageError(f"Cannot list the steps in {root!r}: expected a path or URL")
    root = without_file_scheme(root)
    if is_url(root):
        # Imported here: remote_listing imports this module, and local steps need none of it.
        from shardload.steps.remote_listing import list_remote

        return list_remote(str(root))
    refuse_other_urls(root)
    base = expanded(root)
    try:
        # Of Orbax's other names, only those of its own steps are taken: ours are called by their bare number.
        names = numbered(entry.name for entry in base.iterdir())
    except NotADirectoryError as error:
        raise SourceNotFoundError(
            f"Cannot find steps in {base}: it is a file, expected the folder of a training run. A model or weights "
            f"saved as a file are loaded by shardload.load_weights(model, {str(root)!r}), or shardload.load"
        ) from error
    except FileNotFoundError as error:
        raise SourceNotFoundError(
            f"Cannot list the steps in {base}: there is no such folder. Check the path"
        ) from error
    except OSError as error:
        if limit := LimitError.explaining(error, f"list the steps in {base}"):
            raise limit from error
        raise SourceError(f"Cannot list the steps in {base}: {error.strerror}") from error
    found = [info for name in names if (info := _look(base / name)) is not None]
    return with_best(sorted((i for i in found if not i.ours or NAME.fullmatch(i.path.name)), key=lambda i: i.step))


def with_best(found: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the same steps, with the best one marked if there is one."""
    best = next((info.step for info in best_first(found)), None)
    return [replace(info, best_by=_best_by(info, found)) if info.step == best else info for info in found]


def _best_by(best: StepInfo, found: Sequence[StepInfo]) -> str:
    last = _ranking(found)
    assert last is not None  # with_best found a best step, so some step has a metric
    monitor = last.monitor or ""
    better = "higher" if _is_higher_better(last.mode, monitor) else "lower"
    return f"{monitor}={best.metrics[monitor]:.6g} ({better} is better)"


def best_first(steps: Sequence[StepInfo]) -> list[StepInfo]:
    """Return the steps that have the monitored metric, best first: of all runs or of the newest, as `_ranking` says."""
    if (last := _ranking(steps)) is None:
        return []
    runs = [last.run] if last.best_of == "run" else None
    return ranked(steps, monitor=last.monitor or "", mode=last.mode, runs=runs)


def find_step(root: str | os.PathLike[str], step: Literal["latest", "best"] | int) -> StepInfo:
    """Return the step for "latest", "best" or a number.

    Raises:
        UsageError: If ``step`` is neither "latest", "best" nor a number.
        SourceNotFoundError: If there is no such step; lists the existing steps.
        DamagedError: If "best" is requested and the record of a step that may be the best cannot be trusted.
    """
    # True == 1: without the check for bool, step=True would find step 1.
    if not isinstance(step, str):
        if not is_integer(step):
            raise UsageError(f'Cannot find step {step!r}: expected "latest", "best" or a number')
        step = int(step)
    elif step not in ("latest", "best"):
        raise UsageError(f'Cannot find step {step!r}: expected "latest", "best" or a number')
    root = without_file_scheme(root)
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
            f"{root} contains no steps. Check the path: steps are folders named 0, 1, 2, …{why_no_steps(root)}"
        )
    if step == "latest":
        return steps[-1]
    # A step whose metrics are unreadable may be the best one; to pass over it would be a silent guess.
    if step == "best" and (unknown := [info for info in steps if info.hides_rank]):
        also = f"; nor do {', '.join(str(info.step) for info in unknown[1:])}" if len(unknown) > 1 else ""
        raise DamagedError(
            f"Cannot determine the best step in {root}: step {unknown[0].step} has no readable metrics "
            f"({unknown[0].problems}){also}. {_existing(steps)}. Take one by its number, or remove the folder "
            f"{unknown[0].where}"
        )
    for info in steps:
        if info.best if step == "best" else info.step == step:
            return info
    if step == "best":
        last = _ranking(steps)
        metric = "the monitored metric" if last is None else repr(last.monitor)
        logged = sorted({name for info in steps for name in info.metrics})
        saved = f" Saved metrics: {', '.join(logged)}; name one as monitor= of OrbaxCheckpoint." if logged else ""
        raise SourceNotFoundError(
            f"No step in {root} was saved with a value of {metric}.{saved} "
            f'{_existing(steps)}. Take one by its number, or step="latest"'
        )
    elsewhere = next(
        (f" The folder {info.step} contains it: rename it to {step}." for info in steps if info.saved_as == step), ""
    )
    raise SourceNotFoundError(
        f'{root} has no step {step}.{elsewhere} {_existing(steps)}. Take one of those, or step="latest"'
    )


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder, under any name, is a shardload step; a subfolder ``shardload`` alone is not enough."""
    path = Path(folder)
    # A source checkout of this project has a folder shardload/, too.
    marked = (path / OWN_FOLDER).is_dir() and (path / ORBAX_FILE).is_file()
    return marked or (path / DIGESTS_FILE).is_file()


def latest_of_ours(path: str | os.PathLike[str]) -> Path | None:
    """Return ``path`` if it is a shardload step, else the latest step in it if shardload saved that one."""
    if is_ours(path):
        return Path(path)
    steps = list_steps(path) if Path(path).is_dir() else []
    return steps[-1].path if steps and steps[-1].ours else None


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


def _look(path: Path) -> StepInfo | None:
    """Return the step in a folder named by digits; ``None`` if the folder is not a step."""
    try:
        ours = (path / OWN_FOLDER).is_dir()
        if not path.is_dir() or not (ours or (path / ORBAX_FILE).is_file()):
            return None
    except OSError as error:
        # Passing over the folder would make an older step the latest.
        raise SourceError(
            f"Cannot read {path}, which may be a step: {error.strerror}. Grant this user read access, or move it away"
        ) from error
    problems = []
    tree, changed_s = FileTree({}, (), {}), 0.0
    try:
        tree, changed_s = scan(path), path.stat().st_mtime
    except OSError as error:
        if limit := LimitError.explaining(error, f"list {path}"):
            raise limit from error
        problems.append(f"cannot be listed: {error.strerror}")
    if ours and not (path / DIGESTS_FILE).is_file():
        problems.append(f"{DIGESTS_FILE} is missing")
    record, has_record = None, True
    if ours:
        try:
            # This record decides which step is the best, and so which steps are removed. With a problem found already,
            # it is still read, unchecked, to show what is known about the step.
            if not problems:
                with Checker(path) as checker:
                    # A converted step is saved without one.
                    if has_record := STEP_FILE in checker.digests.files:
                        checker.check_whole(STEP_FILE)
                    problems += [
                        f"{found.path} {found.what}" for found in name_damage(checker.digests, tree, path.name)[:1]
                    ]
            record = StepRecord.read(path) if has_record else None
        except LimitError:
            raise
        except (ShardloadError, OSError) as error:
            if limit := LimitError.explaining(error, f"read {path}"):
                raise limit from error
            problems.append(f"{STEP_FILE} cannot be read: {error}")
    problem = "; ".join(problems) or None
    return described(
        number_of(path.name) or 0, path, record, ours=ours, n_bytes=tree.n_bytes, changed_s=changed_s, problems=problem
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


def _ranking(steps: Sequence[StepInfo]) -> StepRecord | None:
    """Return the record that defines "best": of the newest step with ``keep_best``, else with a metric.

    A callback without ``keep_best`` has a default metric, too; that must not override another callback's rule.
    """
    monitored = [info.recorded for info in steps if info.recorded.monitor is not None]
    promised = [record for record in monitored if record.keep_best]
    return next(reversed(promised or monitored), None)


def _existing(steps: Sequence[StepInfo]) -> str:
    shown = ", ".join(str(info.step) for info in steps[-10:])
    return f"It has {plural(len(steps), 'step')}: {'…, ' if len(steps) > 10 else ''}{shown}"


def why_no_steps(root: str | os.PathLike[str]) -> str:
    """Return a sentence for the case that ``root`` is a URL, a step, or another checkpoint of Orbax; else nothing."""
    if is_url(root):
        return ". Only training steps are read from remote stores: copy other checkpoints to this machine first"
    path = expanded(without_file_scheme(root)).absolute()
    if any((path / name).exists() for name in (OWN_FOLDER, ORBAX_FILE, TREE_FILE)):
        if path.name.isascii() and path.name.isdigit():
            return f". It looks like a step itself: give its folder {path.parent} and step={path.name}"
        return ". It looks like a single checkpoint of Orbax: use shardload.load_weights, or shardload load"
    return ""
