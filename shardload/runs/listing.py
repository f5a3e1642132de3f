"""List the steps in a folder or at a URL, and find the step that "latest" or "best" stands for.

A step is a folder that is named by its number, without leading zeros, and contains one of these::

    shardload/               shardload saved the step; if its digests are missing, it is listed as damaged
    _CHECKPOINT_METADATA     plain Orbax or Keras saved the step: a foreign step, readable but without digests

At a URL::

    s3://bucket/run          the store lists its names; digests and ``step.json`` of each step are fetched
    s3://bucket/run/7        a single step, recognized by its digests
    http://host/run          the links of the server's index page; without one, give the step's number or its own URL

Listing reads no arrays. Only `alternative` reads local steps completely, to find an undamaged one.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from shardload.errors import (
    DamagedError,
    LimitError,
    ShardloadError,
    SourceError,
    SourceNotFoundError,
    UnsafeSourceError,
    UnsupportedError,
    UsageError,
)
from shardload.loaders.orbax.loader import OWN_FOLDER, possible_steps, step_number
from shardload.loaders.recognition import describe_folder, recognise
from shardload.runs.digest_list import FileTree, name_damage, scan
from shardload.runs.digests import DIGESTS_FILE, Checker, find_damage
from shardload.runs.remote_store import RemoteStep, open_step
from shardload.runs.step import (
    NAME,
    STEP_FILE,
    StepInfo,
    StepRecord,
    best_first,
    check_folder_number,
    ranking_record,
    with_best,
)
from shardload.stores.announced import steps_tag
from shardload.stores.local import expanded, located, without_file_scheme
from shardload.stores.location import Location
from shardload.stores.objects import Version
from shardload.stores.remote import RemoteStore, remote_place
from shardload.stores.web_folders import FILE_ENDINGS
from shardload.units import is_integer, plural

_ORBAX_FILE = "_CHECKPOINT_METADATA"
TREE_FILE = "_METADATA"
_MAX_STEPS = 5000
"""Most steps at an address that are asked about for a list, as each takes a request or two."""
_ANNOUNCED = "announced"
_THREADS = 8
"""Number of remote steps that are queried at once: a query of one step takes a few round trips."""


def list_steps(root: str | os.PathLike[str]) -> list[StepInfo]:
    """Return the steps in ``root`` in ascending order, or the step itself if ``root`` is the URL of a step."""
    if not isinstance(root, (str, os.PathLike)) or not os.fspath(root):
        raise UsageError(f"Cannot list the steps in {root!r}: expected a path or URL")
    root = without_file_scheme(root)
    if (remote := remote_place(root)) is not None:
        return _remote_steps(remote)
    base = expanded(root)
    try:
        # Of Orbax's other names, only those of its own steps are taken: ours are called by their bare number.
        names = possible_steps(entry.name for entry in base.iterdir())
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


def steps_of_run(folder: Path | str) -> list[StepInfo]:
    """Return the steps in the folder that a run saves to, in ascending order.

    Unlike for `list_steps`, a folder in a bucket may be empty, as it exists only with its first object.
    """
    place = remote_place(folder)
    return list_steps(folder) if place is None else _looked(place, _remote_numbers(place, is_run=True) or {})


def listed_state(root: str | os.PathLike[str]) -> tuple[Any, ...] | None:
    """Return what changes whenever a step in ``root`` is published or removed, by one list of names.

    ``None`` if that cannot be told so, as of most HTTP servers, or if there is nothing.
    """
    if (place := remote_place(root)) is not None:
        if not _store(place).can_list:
            tag = steps_tag(_store(place).requests, place.key)
            return None if tag is None else (_ANNOUNCED, tag)
        numbers = _remote_numbers(place, is_run=True) or {}
        return tuple((step, numbers[step].record) for step in sorted(numbers))
    base = expanded(without_file_scheme(root))
    try:
        names = [entry.name for entry in os.scandir(base) if step_number(entry.name) is not None]
    except OSError:
        return None
    return tuple((name, _stamp(base / name / DIGESTS_FILE)) for name in sorted(names))


def changes_within(root: str | os.PathLike[str], state: tuple[Any, ...] | None, wait_s: int) -> bool | None:
    """Whether the `listed_state` becomes another one, as a server says at once; ``None`` if nothing says so."""
    place = remote_place(root)
    if place is None or state is None or state[:1] != (_ANNOUNCED,):
        return None
    tag = steps_tag(_store(place).requests, place.key, known=state[1], wait_s=wait_s)
    return None if tag is None else tag != state[1]


def _stamp(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        facts = path.stat()
        return facts.st_ino, facts.st_mtime_ns
    return None


def find_step(root: str | os.PathLike[str] | Location, step: Literal["latest", "best"] | int) -> StepInfo:
    """Return the step that "latest", "best" or a number means; raise an error that lists the steps if there is none.

    ``root`` may be a location in a remote store that was opened already.
    """
    # `is_integer` refuses bool: True == 1, so step=True would find step 1.
    if not (step in ("latest", "best") if isinstance(step, str) else is_integer(step)):
        raise UsageError(f'Cannot find step {step!r}: expected "latest", "best" or a number')
    step = step if isinstance(step, str) else int(step)
    root = root if isinstance(root, Location) else without_file_scheme(root)
    remote = root if isinstance(root, Location) else remote_place(root)
    steps = list_steps(str(root)) if remote is None else _remote_steps(remote, step)
    if not steps:
        raise SourceNotFoundError(
            f"{root} contains no steps. Check the path: steps are folders named 0, 1, 2, …{why_no_steps(str(root))}"
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
        last = ranking_record(steps)
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


def is_ours(folder: str | os.PathLike[str] | Location) -> bool:
    """Whether shardload saved a step in this folder of any name. A subfolder ``shardload`` does not prove it."""
    path = located(folder)
    # A source checkout of this project has a folder shardload/, too.
    marked = (path / OWN_FOLDER).is_folder() and (path / _ORBAX_FILE).is_file()
    return marked or (path / DIGESTS_FILE).is_file()


def latest_of_ours(path: str | os.PathLike[str]) -> Path | None:
    """Return ``path`` if it is a step, else the latest step in it; ``None`` if shardload did not save that step."""
    if is_ours(path):
        return Path(path)
    steps = list_steps(path) if Path(path).is_dir() else []
    return steps[-1].path if steps and steps[-1].ours else None


def _look(path: Path) -> StepInfo | None:
    """Return what a listing shows of the step in a local folder, without reading arrays; ``None`` if it is no step."""
    try:
        ours = (path / OWN_FOLDER).is_dir()
        if not path.is_dir() or not (ours or (path / _ORBAX_FILE).is_file()):
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
                    digests = checker.saved.digests
                    if has_record := STEP_FILE in digests.files:
                        checker.check_whole(STEP_FILE)
                    problems += [f"{found.path} {found.what}" for found in name_damage(digests, tree, path.name)[:1]]
            record = StepRecord.read(path) if has_record else None
        except LimitError:
            raise
        except (ShardloadError, OSError) as error:
            if limit := LimitError.explaining(error, f"read {path}"):
                raise limit from error
            problems.append(f"{STEP_FILE} cannot be read: {error}")
    number, n_bytes = step_number(path.name) or 0, tree.n_bytes
    return StepInfo.of_record(
        number, path, record, ours=ours, n_bytes=n_bytes, changed_s=changed_s, problems="; ".join(problems) or None
    )


def _existing(steps: Sequence[StepInfo]) -> str:
    shown = ", ".join(str(info.step) for info in steps[-10:])
    return f"It has {plural(len(steps), 'step')}: {'…, ' if len(steps) > 10 else ''}{shown}"


def _remote_steps(place: Location, wanted: str | int | None = None) -> list[StepInfo]:
    """Return the steps at a URL in ascending order; only ``wanted`` ("latest" or a number) if that saves requests."""
    # A number needs no listing: one request is enough, and many HTTP servers cannot list.
    if isinstance(wanted, int) and (found := _step_at(place / str(wanted))) is not None:
        return [found]
    if (itself := open_step(place)) is not None:
        sizes = _store(place).requests.sizes(place.key) if wanted is None and _store(place).can_list else None
        return [_remote_info(itself, sizes)]
    return _steps_below(place, wanted)


def _steps_below(place: Location, wanted: str | int | None) -> list[StepInfo]:
    numbers = _remote_numbers(place)
    if numbers is None:
        if (found := _foreign(place)) is not None:
            return [found]
        raise _no_list(place, wanted)
    # Open only the newest, even if it is damaged: an older step must not silently pass for the latest.
    while wanted == "latest" and numbers:
        listed = numbers.pop(last := max(numbers))
        if (newest := _look_remotely(place, last, listed)) is not None:
            return [newest]
        if not listed.ours:
            return []
    if len(numbers) > _MAX_STEPS:
        raise UnsafeSourceError(
            f"Cannot list the steps at {place}: it names {len(numbers)} numbered folders, expected at most "
            f"{_MAX_STEPS}, as each is asked about. Give the address of a step, its number, or step='latest'"
        )
    return _looked(place, numbers)


def _looked(place: Location, numbers: Mapping[int, _ListedStep]) -> list[StepInfo]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="shardload-steps") as pool:
        looked = pool.map(lambda number: _look_remotely(place, number, numbers[number]), sorted(numbers))
        return with_best([found for found in looked if found is not None])


def _step_at(folder: Location) -> StepInfo | None:
    """Return the step in a folder of a store, if its files show that there is one; for HTTP, also a foreign one."""
    if (stored := open_step(folder)) is not None:
        return _remote_info(stored)
    return None if _store(folder).can_list else _foreign(folder)


def _foreign(folder: Location) -> StepInfo | None:
    """Return the step that Orbax or Keras saved in a folder of a store; ``None`` if there is none."""
    requests = _store(folder).requests
    if requests.read_small((folder / _ORBAX_FILE).key, limit=1 << 20) is None:
        return None
    n_bytes = sum(requests.sizes(folder.key).values()) if requests.can_list else 0
    number = int(folder.name) if NAME.fullmatch(folder.name) else 0
    return StepInfo(number, Path(str(folder)), ours=False, n_bytes=n_bytes, url=str(folder), remote=folder)


def remote_steps(place: Location, wanted: Literal["latest"] | None = None) -> list[StepInfo]:
    """Return the steps at a place that may have any checkpoint, or the newest one; none if there are no steps.

    An address that ends like a file is not asked about.
    """
    if not isinstance(place.store, RemoteStore) or place.key.lower().endswith(FILE_ENDINGS):
        return []
    if (itself := open_step(place)) is not None:
        return [_remote_info(itself)]
    has_some = any(NAME.fullmatch(name) for name in place.store.listed(place.key) or ())
    return _steps_below(place, wanted) if has_some else []


def _store(place: Location) -> RemoteStore:
    assert isinstance(place.store, RemoteStore)
    return place.store


@dataclass(frozen=True, slots=True)
class _ListedStep:
    """What a store's list of a run's folder says about one step."""

    ours: bool | None
    """Whether shardload saved the step; ``None`` if the list does not tell."""
    sizes: Mapping[str, int] | None = None
    """The size of each file, if the store lists them."""
    record: Version | None = None
    """The version of the step's digests, if the store lists them: another one for each step of the same number."""


def _remote_numbers(place: Location, *, is_run: bool = False) -> dict[int, _ListedStep] | None:
    """Return the number of each step at a URL, with what the store's list says about it.

    ``None`` if the store cannot list what is there, or the URL is itself that of a step which shardload did not save.
    Where nothing is, raise, unless the URL ``is_run``: the folder that a run saves to.
    """
    store = _store(place)
    if not store.can_list:
        names = store.listed(place.key)
        return (
            None
            if names is None or _ORBAX_FILE in names
            else {int(n): _ListedStep(None) for n in names if NAME.fullmatch(n)}
        )
    versions = store.requests.versions(place.key)
    if not versions and not is_run:
        raise _no_list(place, None)
    if _ORBAX_FILE in versions:
        if any(name.startswith(f"{OWN_FOLDER}/") for name in versions):
            raise DamagedError(f"Step {place.name} at {place} is damaged: {DIGESTS_FILE} is missing")
        return None
    inside: dict[int, dict[str, Version]] = {}
    for name, version in versions.items():
        folder, _, rest = name.partition("/")
        if NAME.fullmatch(folder):
            inside.setdefault(int(folder), {})[rest] = version
    # A step of shardload exists once its record does, which is written last; until then, other files show whose it is.
    found = {
        step: _ListedStep(True, {name: version.size for name, version in files.items()}, files[DIGESTS_FILE])
        for step, files in inside.items()
        if DIGESTS_FILE in files
    }
    for step, files in inside.items():
        if _ORBAX_FILE in files and not any(name.startswith(f"{OWN_FOLDER}/") for name in files):
            found[step] = _ListedStep(False)
    return found


def _no_list(place: Location, wanted: str | int | None) -> Exception:
    """Return the error for a URL at which no steps are found."""
    store, url = _store(place), str(place)
    if place.key and store.requests.exists(place.key):
        return SourceNotFoundError(
            f"Cannot find steps at {url}: it is a file, expected the folder of a training run. Other checkpoints are "
            f"loaded by shardload.load, or shardload.load_weights(model, {url!r})"
        )
    if isinstance(wanted, int):
        where = place / str(wanted)
        return SourceNotFoundError(
            f"There is no step at {where}: it has no {DIGESTS_FILE}. Check the address and the number"
        )
    if store.can_list:
        return SourceNotFoundError(f"There is nothing at {url}. Check the address")
    if NAME.fullmatch(place.name):
        return SourceNotFoundError(f"There is no step at {url}: it has no {DIGESTS_FILE}. Check the address")
    return UnsupportedError(
        f"{url} has no {DIGESTS_FILE}, so it is not a step itself, and the HTTP server shows no list of steps there. "
        f"Check the address, or give that of the step itself ({url}/100)"
    )


def _look_remotely(place: Location, number: int, listed: _ListedStep) -> StepInfo | None:
    """Return what is known of a step in a store; ``None`` if there is none, or none any more."""
    found = _looked_at(place, number, listed)
    removed = found is not None and listed.ours and found.problems and _is_removed(place / str(number))
    return None if removed else found


def _is_removed(folder: Location) -> bool:
    """Whether a step that a list had is gone by now: its record is deleted first, then what this one lists."""
    return DIGESTS_FILE not in _store(folder).requests.sizes(folder.key)


def _looked_at(place: Location, number: int, listed: _ListedStep) -> StepInfo | None:
    folder, ours, problem = place / str(number), listed.ours, f"{DIGESTS_FILE} is missing"
    try:
        if ours is not False and (stored := open_step(folder)) is not None:
            return _remote_info(stored, listed.sizes)
    except DamagedError as error:
        ours, problem = True, str(error)
    if not ours:
        return _foreign(folder)
    return StepInfo(number, Path(str(folder)), ours=True, url=str(folder), problems=problem)


def _remote_info(stored: RemoteStep, sizes: Mapping[str, int] | None = None) -> StepInfo:
    record = problems = None
    try:
        # A converted step is saved without one.
        if STEP_FILE in stored.saved.digests.files:
            # Fetch it once: opened in place, each of the reads below would be a request.
            stored.local_path(STEP_FILE)
            record = StepRecord.read(stored.root)
    except (SourceError, SourceNotFoundError) as error:
        problems = f"{STEP_FILE} cannot be read: {error}"
    # Listed once more: a step that was saved meanwhile may have had only some of its files in the first list.
    if sizes and not problems and stored.name_damage(sizes) and (damage := stored.name_damage()):
        problems = f"{damage[0].path} {damage[0].what}"
    url, name = str(stored.root), stored.root.name
    number = int(name) if NAME.fullmatch(name) else (record and record.step)
    n_bytes = stored.n_bytes
    found = StepInfo.of_record(number or 0, Path(url), record, ours=True, n_bytes=n_bytes, problems=problems)
    return replace(found, url=url, remote=stored.root)


def prepared(info: StepInfo) -> StepInfo:
    """Make a step ready to be loaded, and return it: of a remote step, fetch the small files that loaders open."""
    if info.url is not None and info.ours:
        if info.remote is None:
            raise DamagedError(f"Step {info.step} at {info.url} is damaged: {info.problems}")
        info.remote.local_path()
        check_folder_number(info.remote)
    return info


def why_no_steps(root: str | os.PathLike[str]) -> str:
    """Return a hint to append to an error: why ``root``, a URL or a checkpoint itself, contains no steps; else ""."""
    if remote_place(root) is not None:
        return ""
    path = expanded(without_file_scheme(root)).absolute()
    if any((path / name).exists() for name in (OWN_FOLDER, _ORBAX_FILE, TREE_FILE)):
        if path.name.isascii() and path.name.isdigit():
            return f". It looks like a step itself: give its folder {path.parent} and step={path.name}"
        return ". It looks like a single checkpoint of Orbax: use shardload.load_weights, or shardload load"
    with suppress(ShardloadError):
        found = recognise(path)
        # A configuration without weights may be that of a run that has not saved a step yet.
        if found.describe_folder is not None and describe_folder(path) is None:
            return f". It is {found.description}: use shardload.load_weights, or shardload load"
    return ""


Which = int | Literal["latest", "best"]


@dataclass(frozen=True, slots=True)
class Alternative:
    """The step to use instead of a damaged one. Serializable as JSON: process 0 sends it to the other processes."""

    step: int | None
    """Number of the step that ``fallback="previous"`` restores; ``None`` if there is no such step."""
    advice: str
    """A sentence that says which step to use instead, for the error message about the damaged step."""


def alternative(
    directory: str | os.PathLike[str], which: Which, *, bad: StepInfo | None, tried: Collection[int]
) -> Alternative:
    """Find a step to use instead of the damaged step ``bad``: for ``fallback="previous"``, or to name in the error.

    For ``which="best"``, this is the best of the other undamaged steps, else the newest undamaged one before ``bad``.
    ``bad`` is ``None`` if damaged metrics hide which step is the best. All steps in ``tried`` were found to be damaged.
    """
    # HTTP cannot list, and the URL of a single step says nothing about the steps next to it.
    place = remote_place(directory)
    if bad is not None and place is not None and not (_store(place).can_list and str(place) != bad.url):
        return Alternative(None, "Other steps cannot be listed there: pass the URL of an earlier one, if there is one.")
    # Remote steps are not read here, so the message must not promise that one is good.
    good = " good one" if place is None else ""
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
    """Return the first undamaged step. To find out, local steps are read completely; remote ones are not read."""
    return next((s for s in steps if s.problems is None and (s.url is not None or not find_damage(s.path))), None)
