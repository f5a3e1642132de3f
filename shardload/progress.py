"""Progress of a load.

A load calls ``start`` with all bytes it will read, ``advance`` as they arrive, ``stop`` at the end, also when it
fails. Other work has several stages, such as verifying and converting, and calls ``start`` for each. Calls come from
one thread. On a terminal, `TerminalProgress` draws a bar on stderr::

    Loading gemma3_270m ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━  291.5/511.4 MiB  1.1 GB/s  0:00:01

In logs, `LineProgress` writes a line every ten seconds, or a JSON object with the same facts::

    Loading gemma2_9b: 8.4 GiB of 17.2 GiB, 0.85 GB/s, 11.10 s left
    {"progress": {"stage": "Loading gemma2_9b", "bytes": 9019431322, "total_bytes": 18468560240, …}}

`on_stderr` chooses for the command, `as_progress` for callers in Python.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from shardload.errors import UsageError, without_secrets
from shardload.reports import printable
from shardload.units import format_bytes, format_rate, format_seconds

if TYPE_CHECKING:
    import rich.console
    import rich.progress

INTERVAL_S = 10.0
"""Seconds between two lines in a log; a load that takes less writes no line."""


class Progress(Protocol):
    """Interface by which a load, conversion or comparison reports its progress."""

    def start(self, total_bytes: int, description: str) -> None:
        """Begin a stage of the work, such as verifying, with ``total_bytes`` (0: unknown); it ends the one before."""

    def advance(self, n_bytes: int) -> None:
        """Report that ``n_bytes`` more of the current stage are done."""

    def stop(self) -> None:
        """Report the end of the work, also after an error; may be called twice, or without ``start``."""


ProgressLike: TypeAlias = Progress | bool | Literal["bar", "lines", "json"] | None
"""Type of ``progress``: ``True`` for a bar or lines, whichever suits stderr; the name of one; or an object."""


class Silent:
    """Progress that shows nothing, for calls without ``progress``."""

    def start(self, total_bytes: int, description: str) -> None:
        """Do nothing."""

    def advance(self, n_bytes: int) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class TerminalProgress:
    """Progress as a bar with bytes, rate and remaining time, drawn on stderr; it clears itself at the end."""

    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def start(self, total_bytes: int, description: str) -> None:
        """Show a bar of ``total_bytes``, or an indeterminate one if that is 0."""
        self.stop()
        from rich import progress

        console = _console()
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(bar_width=None),
            progress.DownloadColumn(binary_units=True),  # as in reports
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console,
            disable=not _can_draw(console),  # a log would get blank lines
            refresh_per_second=5,  # drawing competes with the loading threads for the interpreter
            transient=True,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        # Descriptions contain file names; brackets in them are not markup.
        self._task = self._bar.add_task(without_secrets(description).replace("[", r"\["), total=total_bytes or None)
        self._bar.start()

    def advance(self, n_bytes: int) -> None:
        """Move the bar by ``n_bytes``."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, n_bytes)

    def stop(self) -> None:
        """Clear the bar and restore the cursor."""
        bar, self._bar, self._task = self._bar, None, None
        if bar is not None:
            bar.stop()


@dataclass(frozen=True, slots=True)
class ProgressLine:
    """What a line in a log says: how far a stage of the work (verifying, loading) has come, and how fast."""

    stage: str
    done_bytes: int
    total_bytes: int | None
    """Bytes of the whole stage; ``None`` if unknown."""
    bytes_per_s: float
    """Bytes per second since the previous line."""
    elapsed_s: float
    """Seconds since the stage began."""

    @property
    def left_s(self) -> float | None:
        """Estimated seconds until the stage ends, at the present rate; ``None`` if they cannot be estimated."""
        if self.total_bytes is None or not self.bytes_per_s:
            return None
        return max(0, self.total_bytes - self.done_bytes) / self.bytes_per_s

    def __str__(self) -> str:
        total = "" if self.total_bytes is None else f" of {format_bytes(self.total_bytes)}"
        counted = [f"{format_bytes(self.done_bytes)}{total}"] if self.done_bytes or total else []
        if not self.done_bytes:
            rate = [f"{format_seconds(self.elapsed_s)} so far"]
        else:
            rate = [format_rate(self.bytes_per_s / 1e9)]
            rate += [] if self.left_s is None else [f"{format_seconds(self.left_s)} left"]
        return f"{printable(self.stage)}: {', '.join([*counted, *rate])}"

    def to_json(self) -> dict[str, Any]:
        """Return the line as an object for `json.dumps`."""
        return {
            "stage": self.stage,
            "bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "bytes_per_s": round(self.bytes_per_s),
            "left_s": None if self.left_s is None else round(self.left_s, 3),
            "elapsed_s": round(self.elapsed_s, 3),
        }


class _Stage:
    """The current stage of the work: its bytes are counted by one thread and read by another, which writes lines."""

    def __init__(self, description: str, total_bytes: int | None, now_s: float) -> None:
        self.description, self.total_bytes, self.begun_s = description, total_bytes, now_s
        self.done_bytes = 0
        self._before = (0, now_s)

    def line(self, now_s: float) -> ProgressLine:
        done, (before, before_s) = self.done_bytes, self._before
        self._before = (done, now_s)
        rate = (done - before) / max(now_s - before_s, 1e-9)
        return ProgressLine(self.description, done, self.total_bytes, rate, now_s - self.begun_s)


class LineProgress:
    """Progress as lines on stderr, at regular intervals. A thread writes them: a load may not report for minutes."""

    def __init__(
        self, *, as_json: bool = False, every_s: float | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._as_json, self._clock = as_json, clock
        self._every_s = INTERVAL_S if every_s is None else every_s
        self._stage: _Stage | None = None
        self._ended: threading.Event | None = None

    def start(self, total_bytes: int, description: str) -> None:
        """Begin a stage of the work (verifying, loading); the first one starts the thread that writes lines."""
        self._stage = _Stage(without_secrets(description), total_bytes or None, self._clock())
        if self._ended is None:
            self._ended = threading.Event()
            # A daemon: it must not keep a program from ending.
            threading.Thread(target=self._run, args=(self._ended,), name="shardload-progress", daemon=True).start()

    def advance(self, n_bytes: int) -> None:
        """Add ``n_bytes`` to the bytes done in this stage."""
        if self._stage is not None:
            self._stage.done_bytes += n_bytes

    def stop(self) -> None:
        """Stop writing lines."""
        self._stage, ended, self._ended = None, self._ended, None
        if ended is not None:
            ended.set()

    def write(self) -> None:
        """Write a line now, if a stage is running."""
        if (stage := self._stage) is None or sys.stderr is None:
            return
        line = stage.line(self._clock())
        text = json.dumps({"progress": line.to_json()}) if self._as_json else str(line)
        # A load must not fail because its log cannot be written. One write: lines of threads must not mix.
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _run(self, ended: threading.Event) -> None:
        while not ended.wait(self._every_s):
            self.write()


def _console() -> rich.console.Console:
    from rich.console import Console

    return Console(stderr=True)


def _can_draw(console: rich.console.Console) -> bool:
    return console.is_interactive or console.is_jupyter


def as_progress(wanted: ProgressLike) -> Progress:
    """Convert the argument ``progress`` of a public function to the object to report to."""
    # By identity, as 0 == False and 1 == True: numbers are refused below.
    if wanted is None or wanted is False:
        return Silent()
    if wanted is True:
        return TerminalProgress() if _can_draw(_console()) else LineProgress()
    if not isinstance(wanted, str):
        if all(callable(getattr(wanted, name, None)) for name in ("start", "advance", "stop")):
            return wanted
    elif wanted == "bar":
        return TerminalProgress()
    elif wanted in ("lines", "json"):
        return LineProgress(as_json=wanted == "json")
    raise UsageError(
        f"Cannot use progress={wanted!r:.60}. Supported: True for a bar on a terminal and a line every ten seconds "
        "elsewhere; 'bar', 'lines' or 'json' for one of them; or an object with the methods start(total_bytes, "
        "description), advance(n_bytes) and stop()"
    )


@contextmanager
def on_stderr(*, enabled: bool = True, as_json: bool = False) -> Iterator[Progress]:
    """Yield an object that shows progress on stderr, as a bar on a terminal and lines elsewhere; stop it at the end."""
    # stderr is None under pythonw, or when it was closed before Python started.
    progress: Progress = Silent()
    if enabled and sys.stderr is not None:
        drawn = not as_json and sys.stderr.isatty()
        progress = TerminalProgress() if drawn else LineProgress(as_json=as_json)
    try:
        yield progress
    finally:
        progress.stop()
