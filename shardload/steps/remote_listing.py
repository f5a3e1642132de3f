"""List the steps at a URL and read their records. Fetches digests and ``step.json``, no data.

s3://bucket/run          the store lists its names; a step is recognized as in `listing`
s3://bucket/run/7        a single step, recognized by its digests
http://host/run          HTTP cannot list: give the step's number or its own URL
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Literal

from shardload.errors import DamagedError, SourceError, SourceNotFoundError, UnsupportedError
from shardload.steps.digest_list import DIGESTS_FILE, OWN_FOLDER
from shardload.steps.listing import ORBAX_FILE, StepInfo, described, with_best
from shardload.steps.number import NAME, check_number
from shardload.steps.record import STEP_FILE, StepRecord
from shardload.steps.remote_store import RemoteStep, open_step
from shardload.stores.remote import Folder
from shardload.stores.remote_failures import COPY_FIRST

THREADS = 8
"""Steps queried concurrently: each costs a few round trips."""
_ONLY_STEPS = "Only training steps can be read remotely"


def list_remote(url: str) -> list[StepInfo]:
    """Return the steps at a URL in ascending order, or the step itself if the URL is the URL of a step.

    Raises:
        SourceNotFoundError: If the URL has no content.
        UnsupportedError: If the store cannot list.
        TransferError: If the store does not respond.
    """
    root = Folder(url)
    if (itself := _itself(root)) is not None:
        return [itself]
    numbers = _numbers(root)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="shardload-steps") as pool:
        found = list(pool.map(lambda number: _look(root.child(str(number)), numbers[number]), sorted(numbers)))
    return with_best(found)


def find_remote(url: str, step: Literal["latest", "best"] | int) -> StepInfo | list[StepInfo]:
    """Return the requested step if it can be found without reading all steps, else all steps.

    Raises:
        SourceNotFoundError: If there is no such step.
        UnsupportedError: If the store cannot list, and the request requires it.
        TransferError: If the store does not respond.
    """
    root = Folder(url)
    # A number needs no listing: one request is enough, and HTTP servers cannot list.
    if not isinstance(step, str) and (stored := open_step(child := root.child(str(step)))) is not None:
        return _info(child, stored)
    if (itself := _itself(root)) is not None:
        return [itself]
    if not root.can_list and not isinstance(step, str):
        # That it is not from shardload explains more than that something is missing.
        _refuse_foreign(child)
        raise SourceNotFoundError(
            f"There is no step at {child.url}: it has no {DIGESTS_FILE}. Check the address and the number"
        )
    # Open only the newest, even if it is damaged: an older step must not silently pass for the latest.
    if step == "latest" and (numbers := _numbers(root)):
        return _look(root.child(str(max(numbers))), numbers[max(numbers)])
    return list_remote(url)


def knows_others(url: str, step: StepInfo) -> bool:
    """Whether ``url`` is a parent folder whose steps can be listed."""
    return url.rstrip("/") != step.url and Folder(url).can_list


def _itself(root: Folder) -> StepInfo | None:
    stored = open_step(root)
    return None if stored is None else _info(root, stored)


def _numbers(root: Folder) -> dict[int, bool]:
    """Return the step numbers, each with whether shardload saved that step."""
    if not root.can_list:
        _refuse_foreign(root)
        _refuse_file(root)
        if NAME.fullmatch(root.name):
            raise SourceNotFoundError(
                f"There is no step at {root.url}: it has no {DIGESTS_FILE}. Check the address. {_ONLY_STEPS}"
            )
        raise UnsupportedError(
            f"{root.url} has no {DIGESTS_FILE}, so it is not a step itself, and HTTP servers do not list their files. "
            f"Give the address of the step itself ({root.url}/100), or its number (step=100). {_ONLY_STEPS}"
        )
    names = root.names()
    if not names:
        _refuse_file(root)
        raise SourceNotFoundError(f"There is nothing at {root.url}. Check the address. {_ONLY_STEPS}")
    if ORBAX_FILE in names:
        if any(name.startswith(f"{OWN_FOLDER}/") for name in names):
            raise DamagedError(f"Step {root.name} at {root.url} is damaged: {DIGESTS_FILE} is missing")
        raise foreign(root.url)
    found: dict[int, bool] = {}
    for name in names:
        folder, _, rest = name.partition("/")
        if NAME.fullmatch(folder) and (rest == ORBAX_FILE or rest.startswith(f"{OWN_FOLDER}/")):
            # Both marks may appear, in any order; one of shardload's files makes it a shardload step.
            found[int(folder)] = found.get(int(folder), False) or rest.startswith(f"{OWN_FOLDER}/")
    return found


def _look(folder: Folder, ours: bool) -> StepInfo:
    if not ours:
        return StepInfo(int(folder.name), Path(folder.url), ours=False, url=folder.url)
    try:
        stored = open_step(folder)
    except DamagedError as error:
        return _bad(folder, str(error))
    return _bad(folder, f"{DIGESTS_FILE} is missing") if stored is None else _info(folder, stored)


def _bad(folder: Folder, problem: str) -> StepInfo:
    return StepInfo(int(folder.name), Path(folder.url), ours=True, url=folder.url, problems=problem)


def _info(folder: Folder, stored: RemoteStep) -> StepInfo:
    record = problems = None
    try:
        # A converted step is saved without one.
        if STEP_FILE in stored.saved.digests.files:
            # Fetch it once: opened in place, each of the reads below would be a request.
            stored.local_path(STEP_FILE)
            record = StepRecord.read(stored.root)
    except (SourceError, SourceNotFoundError) as error:
        problems = f"{STEP_FILE} cannot be read: {error}"
    number = int(folder.name) if NAME.fullmatch(folder.name) else (record and record.step)
    found = described(number or 0, Path(folder.url), record, ours=True, n_bytes=stored.n_bytes, problems=problems)
    return replace(found, url=folder.url, remote=stored.root)


def _refuse_foreign(folder: Folder) -> None:
    """Raise for a checkpoint that shardload did not save."""
    if folder.read_small(ORBAX_FILE, limit=1 << 20) is not None:
        raise foreign(folder.url)


def _refuse_file(folder: Folder) -> None:
    """Raise for the address of a file, such as the weights of a model."""
    if folder.is_file():
        raise UnsupportedError(
            f"Cannot read {folder.url}: it is a file, and {_ONLY_STEPS[0].lower()}{_ONLY_STEPS[1:]}. Copy it to this "
            "machine first (aws s3 cp, gcloud storage cp, wget), and read it there"
        )


def foreign(url: str) -> UnsupportedError:
    """Return the error for a remote step that shardload did not save."""
    return UnsupportedError(
        f"{url} was not saved by shardload: it has no digests, so its data cannot be verified. {COPY_FIRST}"
    )


def prepared(info: StepInfo) -> StepInfo:
    """Return a step after fetching all files that opening it requires.

    Raises:
        UnsupportedError: If shardload did not save it.
        DamagedError: If it has no digests, a small file is damaged, or the number is another step's.
        TransferError: If the store does not respond.
    """
    if info.url is not None:
        if not info.ours:
            raise foreign(info.url)
        if info.remote is None:
            raise DamagedError(f"Step {info.step} at {info.url} is damaged: {info.problems}")
        info.remote.local_path()
        check_number(info.remote)
    return info
