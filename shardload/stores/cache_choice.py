"""Which cache of ranges the reads from remote stores use: `cache`, or SHARDLOAD_CACHE and SHARDLOAD_CACHE_SIZE."""

from __future__ import annotations

import functools
import os
import threading
from pathlib import Path
from types import TracebackType

from shardload.errors import UsageError, suggests_arguments
from shardload.stores.local import expanded, local_target
from shardload.stores.range_cache import RangeCache
from shardload.units import byte_count, check_kind

FOLDER_VARIABLE = "SHARDLOAD_CACHE"
SIZE_VARIABLE = "SHARDLOAD_CACHE_SIZE"
DEFAULT_SIZE = "100GiB"
"""Most bytes of a cache whose user gave no size: a few large models. No default can know the disk."""


class CacheInUse:
    """What `cache` returns: in a ``with`` block, the cache is used until its end, when all that it keeps is written."""

    def __init__(self, before: list[RangeCache | None], used: RangeCache | None) -> None:
        self._before, self._used = before, used

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _choices:
            _chosen[:] = self._before
        if self._used is not None:
            self._used.settle()


@suggests_arguments
def cache(directory: str | os.PathLike[str] | None, *, size: int | str = DEFAULT_SIZE) -> CacheInUse:
    """Keep what is read from remote stores in a folder on this machine, for the next start.

    Reads of objects at ``s3://``, ``gs://``, ``http(s)://`` and ``hf://`` addresses look there first, and what they
    fetch is stored there, from this call on. In a ``with`` statement, it is for the block only. Several processes may
    share the folder. Without a call, the environment variables ``SHARDLOAD_CACHE`` and ``SHARDLOAD_CACHE_SIZE`` decide.

    Examples:
        ```python
        shardload.cache("/mnt/nvme/shardload", size="200GiB")
        model = shardload.load("s3://bucket/gemma-2-9b")
        ```

    Args:
        directory: A folder that only you can write to; it is created if it does not exist. ``None``: no cache, even if
            the environment names one.
        size: Most bytes in the folder, as an int or text such as ``"200GiB"``; 100 GiB by default. If it is full, the
            objects that were not used for longest are removed.

    Raises:
        UsageError: When the folder is a file, belongs to another user or can be written to by others, or the size is
            not a number of bytes.
    """
    found = None if directory is None else _opened(directory, size, argument="size")
    with _choices:
        before = _chosen.copy()
        _chosen[:] = [found]
    return CacheInUse(before, found)


_chosen: list[RangeCache | None] = []
"""The cache that `cache` chose, or ``None`` if it chose none; empty before its first call."""
_choices = threading.Lock()


def current_cache() -> RangeCache | None:
    """Return the cache that reads use now; ``None`` if there is none."""
    with _choices:
        chosen = _chosen.copy()
    if chosen:
        return chosen[0]
    directory = os.environ.get(FOLDER_VARIABLE)
    if not directory:
        return None
    return _opened(directory, os.environ.get(SIZE_VARIABLE) or DEFAULT_SIZE, argument=SIZE_VARIABLE)


def chosen_directory(directory: str | os.PathLike[str] | None) -> Path:
    """Return the folder of the cache that a command is about: ``directory``, else that of the environment."""
    found = directory or os.environ.get(FOLDER_VARIABLE)
    if not found:
        raise UsageError(
            f"Cannot find the cache: no folder was given, expected --cache DIR or the variable {FOLDER_VARIABLE}"
        )
    return cache_directory(found)


def _opened(directory: str | os.PathLike[str], size: int | str, *, argument: str) -> RangeCache:
    return _open(cache_directory(directory), byte_count(argument, size, least=1))


def cache_directory(directory: str | os.PathLike[str]) -> Path:
    """Return the path of a cache's folder as its user wrote it; raise `UsageError` for a URL or something else."""
    check_kind("directory", directory, str | os.PathLike, "a path")
    path = expanded(local_target(directory))
    if not os.fspath(directory):
        raise UsageError("Cannot use '' as the cache, expected the path of a folder")
    return path.absolute()


@functools.cache
def _open(directory: Path, limit_bytes: int) -> RangeCache:
    # One for each folder and size in a process: it has a thread, and knows what is stored.
    return RangeCache(directory, limit_bytes)
