"""One load by all processes of a `jax.distributed` run: done only when it is done on each of them."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn

import keras

from shardload import _processes, loading
from shardload.reports import ByteCounts, HostBytes


@dataclass(frozen=True, slots=True)
class Share:
    """What one process read for its devices."""

    process: int
    bytes: ByteCounts
    host_bytes: HostBytes
    total_s: float
    """Wall clock, seconds."""


def run(source: str | os.PathLike[str], **options: Any) -> tuple[loading.Loaded, tuple[Share, ...]]:
    """Load on every process, each reading what its devices need.

    Args:
        source: As for `shardload.load`; every process must see it.
        **options: Those of `shardload.loading.run`.

    Returns:
        What was loaded, its report counting the bytes that all processes read and the most that one staged; and the
        share of each process.

    Raises:
        ProcessLostError: When a process has ended or went silent.
        ShardloadError: On all processes, when it failed on one.
    """
    channel = _processes.Channel()
    # Seeds that no checkpoint holds are drawn as a model is built, and all processes need the same.
    keras.utils.set_random_seed(channel.first(lambda: random.getrandbits(31)))
    heard = False

    def meet() -> None:
        nonlocal heard
        try:
            channel.together(lambda: None)
        except BaseException:
            heard = True
            raise

    try:
        loaded = loading.run(source, on_filled=meet, **options)
    except BaseException as error:
        if not heard:
            _tell(channel, error)
        raise
    said = channel.together(lambda: _account(loaded))
    shares = tuple(
        Share(i, ByteCounts(**word["bytes"]), HostBytes(**word["host_bytes"]), word["total_s"])
        for i, word in enumerate(said)
    )
    report = replace(
        loaded.report,
        bytes=ByteCounts(sum(s.bytes.needed for s in shares), sum(s.bytes.read for s in shares)),
        host_bytes=max((s.host_bytes for s in shares), key=lambda host: host.peak_staging),
    )
    return replace(loaded, report=report), shares


def _tell(channel: _processes.Channel, error: BaseException) -> None:
    """Tell the others, who wait where all meet next."""

    def fail() -> NoReturn:
        raise error

    with suppress(BaseException):
        channel.together(fail)


def _account(loaded: loading.Loaded) -> dict[str, Any]:
    report = loaded.report
    return {
        "bytes": asdict(report.bytes),
        "host_bytes": asdict(report.host_bytes),
        "total_s": report.seconds.total,
    }
