"""Progress of a load.

A load calls ``start`` once with all bytes it will read, ``advance`` as they arrive, ``stop`` at the end,
also when it fails. Calls come from one thread. `TerminalProgress` draws a bar on stderr::

    Loading gemma3_270m ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━  291.5/511.4 MiB  1.1 GB/s  0:00:01

`on_stderr` uses it only if stderr is a terminal; otherwise progress is `Silent`. In Python, ``progress=True`` draws it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from shardload.errors import UsageError

if TYPE_CHECKING:
    import rich.progress


class Progress(Protocol):
    """The progress calls that a load makes."""

    def start(self, total_bytes: int, description: str) -> None:
        """Begin a stage of ``total_bytes`` (0: unknown); a second call begins the next stage."""
        ...

    def advance(self, n_bytes: int) -> None:
        """Add ``n_bytes`` to the bytes done."""
        ...

    def stop(self) -> None:
        """End the load, successful or not; may be called twice, or without ``start``."""
        ...


ProgressLike: TypeAlias = Progress | bool | Literal["bar"] | None
"""What callers may pass: ``True`` or ``"bar"`` for a bar on stderr, or an object of their own."""


class Silent:
    """Progress without output."""

    def start(self, total_bytes: int, description: str) -> None:
        """Do nothing."""

    def advance(self, n_bytes: int) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class TerminalProgress:
    """A bar with bytes, rate and remaining time, drawn on stderr; it clears itself at the end."""

    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def start(self, total_bytes: int, description: str) -> None:
        """Show a bar of ``total_bytes``, or an indeterminate one if that is 0."""
        self.stop()
        self._bar = _bar()
        # Descriptions contain file names; brackets in them are not markup.
        self._task = self._bar.add_task(description.replace("[", r"\["), total=total_bytes or None)
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


def _bar() -> rich.progress.Progress:
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.DownloadColumn(binary_units=True),  # as in reports
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=console,
        disable=not (console.is_interactive or console.is_jupyter),  # a log would get blank lines
        refresh_per_second=5,  # drawing competes with the loading threads for the interpreter
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


def as_progress(wanted: ProgressLike) -> Progress:
    """Return the progress that a caller wants.

    Raises:
        UsageError: If it is none of `ProgressLike`.
    """
    # By identity, as 0 == False and 1 == True: numbers are refused below.
    if wanted is None or wanted is False:
        return Silent()
    if wanted is True or wanted == "bar":
        return TerminalProgress()
    if not isinstance(wanted, str) and all(callable(getattr(wanted, m, None)) for m in ("start", "advance", "stop")):
        return wanted
    raise UsageError(
        f"Cannot use progress={wanted!r:.60}. Supported: True or 'bar' for a bar on stderr, or an object with the "
        "methods start(total_bytes, description), advance(n_bytes) and stop()"
    )


@contextmanager
def on_stderr(*, enabled: bool = True) -> Iterator[Progress]:
    """Yield a bar if ``enabled`` and stderr is a terminal, else silent progress; stop it at the end."""
    # stderr is None under pythonw, or when it was closed before Python started.
    watched = enabled and sys.stderr is not None and sys.stderr.isatty()
    progress: Progress = TerminalProgress() if watched else Silent()
    try:
        yield progress
    finally:
        progress.stop()
