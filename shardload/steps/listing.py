"""Which steps a folder holds, and which of them a word like "latest" means. Reads names and ``step.json``, no data.

A step is a folder named by digits without leading zeros that holds something only a step holds: ``shardload/`` (one of
ours) or Orbax's ``_CHECKPOINT_METADATA`` (a foreign one: readable, but nothing vouches for its bytes). Bare and
empty folders are never steps. A step of ours that lost its digests stays one of ours, with a problem: taken for a
foreign one it would be believed unchecked.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shardload.errors import DamagedError, ShardloadError, SourceError, SourceNotFoundError, UsageError
from shardload.loaders import _json
from shardload.steps._tree import scan
from shardload.steps.digests import DIGESTS_FILE, OWN_FOLDER, Checker
from shardload.stores.remote import is_url

STEP_FILE = f"{OWN_FOLDER}/step.json"
ORBAX_FILE = "_CHECKPOINT_METADATA"
TREE_FILE = "_METADATA"

NAME = re.compile(r"0|[1-9][0-9]{0,17}")
"""At most 18 digits: any such number fits 64 bits."""


@dataclass(frozen=True, slots=True)
class StepInfo:
    """One step, as far as names and ``step.json`` tell."""

    step: int
    path: Path
    ours: bool
    """Saved by shardload, so it has digests; else by Keras' own callback or plain Orbax."""
    epoch: int | None = None
    batch: int | None = None
    """Batches of the epoch that were done."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The logs at that step."""
    best: bool = False
    """Whether it has the best value of the monitored metric among the steps that are there."""
    n_bytes: int = 0
    """All its files."""
    saved_s: float = 0.0
    """When it was saved, in seconds since 1970."""
    problems: str | None = None
    """What is wrong with it at first sight; `shardload.steps.digests.verify` looks closely."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """All of ``step.json``."""
    url: str | None = None
    """Its address, where it is a remote one; ``path`` then is a folder that stands for it."""
    mirror: Any = field(default=None, repr=False, compare=False)
    """Keeps that folder, see `shardload.steps._mirror`."""

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
    """The steps in ``root``, ascending; of an address as `shardload.steps._remote_listing` finds them.

    Raises:
        UsageError: When ``root`` is no path.
        SourceNotFoundError: When there is no such folder.
        SourceError: When it, or a folder that may be a step, cannot be looked into.
    """
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        raise UsageError(f"The folder of the steps is a path; got {root!r}")
    if is_url(root):
        from shardload.steps._remote_listing import list_remote

        return list_remote(str(root))
    base = Path(root)
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
    best = _best(found)
    return [replace(info, best=True) if info.step == best else info for info in found]


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
        from shardload.steps._remote_listing import find_remote

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
    if step == "best" and (unknown := [info for info in steps if info.ours and not info.details]):
        raise DamagedError(
            f"Which step in {root} is best cannot be told: of step {unknown[0].step}, {unknown[0].problems}. "
            f"{_existing(steps)}. Take one by its number, or remove the folder {unknown[0].where}"
        )
    for info in steps:
        if info.best if step == "best" else info.step == step:
            return info
    if step == "best":
        raise SourceNotFoundError(
            f"No step in {root} says how good it is: none was saved with a value of the monitored metric. "
            f'{_existing(steps)}. Take one by its number, or step="latest"'
        )
    raise SourceNotFoundError(f'{root} has no step {step}. {_existing(steps)}. Take one of those, or step="latest"')


def is_ours(folder: str | os.PathLike[str]) -> bool:
    """Whether a folder, whatever its name, is a step of ours; holding a folder ``shardload`` is not enough."""
    path = Path(folder)
    marked = (path / OWN_FOLDER).is_dir() and (path / ORBAX_FILE).is_file()
    return marked or (path / DIGESTS_FILE).is_file()


def latest_of_ours(path: str | os.PathLike[str]) -> Path | None:
    """The step of ours that ``path`` is, or the latest step in it if that is ours."""
    if is_ours(path):
        return Path(path)
    steps = list_steps(path) if Path(path).is_dir() else []
    return steps[-1].path if steps and steps[-1].ours else None


def better(value: float, than: float, *, mode: str, monitor: str = "") -> bool:
    """Whether a metric improved, as Keras' callbacks see it: "auto" goes by the metric's name."""
    if mode not in ("min", "max"):
        mode = "max" if monitor.endswith(("acc", "accuracy", "auc")) or "fmeasure" in monitor else "min"
    return value > than if mode == "max" else value < than


def _look(path: Path) -> StepInfo | None:
    """What a folder named by digits is; None when it is no step."""
    try:
        ours = (path / OWN_FOLDER).is_dir()
        if not path.is_dir() or not (ours or (path / ORBAX_FILE).is_file()):
            return None
    except OSError as error:  # passing it over would make an older step the latest
        raise SourceError(
            f"{path} may be a step, but cannot be looked into: {error.strerror}. Let this user read it, or move it away"
        ) from error
    problems = []
    n_bytes, changed_s = 0, 0.0
    try:
        n_bytes, changed_s = scan(path).n_bytes, path.stat().st_mtime
    except OSError as error:
        problems.append(f"cannot be listed: {error.strerror}")
    if ours and not (path / DIGESTS_FILE).is_file():
        problems.append(f"{DIGESTS_FILE} is missing")
    details: dict[str, Any] = {}
    if ours:
        try:
            if not problems:
                with Checker(path) as checker:  # what is best, and so what is removed, goes by it
                    checker.check_whole(STEP_FILE)
            details = _json.read_object(path / STEP_FILE)
        except (ShardloadError, OSError) as error:
            problems.append(f"{STEP_FILE} cannot be read: {error}")
    problem = "; ".join(problems) or None
    return described(int(path.name), path, details, ours=ours, n_bytes=n_bytes, changed_s=changed_s, problems=problem)


def described(
    step: int,
    path: Path,
    details: Mapping[str, Any],
    *,
    ours: bool,
    n_bytes: int,
    changed_s: float = 0.0,
    problems: str | None = None,
) -> StepInfo:
    """A step as its ``step.json`` tells of it."""
    return StepInfo(
        step=step,
        path=path,
        ours=ours,
        epoch=_whole(details.get("epoch")),
        batch=_whole(details.get("batch")),
        metrics=_numbers(details.get("logs")),
        n_bytes=n_bytes,
        saved_s=_number(details.get("saved_unix_s")) or changed_s,
        problems=problems,
        details=details,
    )


def _best(steps: Sequence[StepInfo]) -> int | None:
    """The step with the best value of what the latest step monitors; the earliest of equals."""
    monitored = [info for info in steps if isinstance(info.details.get("monitor"), str)]
    if not monitored:
        return None
    monitor, mode = monitored[-1].details["monitor"], str(monitored[-1].details.get("mode"))
    best: StepInfo | None = None
    for info in steps:
        value = info.metrics.get(monitor, math.nan)
        if math.isnan(value):
            continue
        if best is None or better(value, best.metrics[monitor], mode=mode, monitor=monitor):
            best = info
    return None if best is None else best.step


def _number(found: Any) -> float | None:
    usable = isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < 1e300
    return float(found) if usable or found in (math.inf, -math.inf) else None


def _whole(found: Any) -> int | None:
    return found if isinstance(found, int) and not isinstance(found, bool) else None


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    return {name: number for name, value in found.items() if (number := _number(value)) is not None}


def _existing(steps: Sequence[StepInfo]) -> str:
    shown = ", ".join(str(info.step) for info in steps[-10:])
    return f"It has {len(steps)} step{'s' if len(steps) > 1 else ''}: {'…, ' if len(steps) > 10 else ''}{shown}"


def _nested(root: str | os.PathLike[str]) -> str:
    """A way out when ``root`` is a step itself."""
    if is_url(root):
        return ""
    path = Path(root).absolute()
    if any((path / name).exists() for name in (OWN_FOLDER, ORBAX_FILE, TREE_FILE)):
        if path.name.isascii() and path.name.isdigit():
            return f". It looks like a step itself: give its folder {path.parent} and step={path.name}"
        return ". It looks like a single checkpoint of Orbax: use shardload.load_weights, or shardload load"
    return ""
