"""How far a load has come.

A load calls ``start`` once with all bytes it will read, ``advance`` as they arrive, ``stop`` at the end,
also when it fails. Calls come from one thread. `TerminalProgress` draws a bar on stderr::

    Loading gemma3_270m ━━━━━━━━━━━━━━━━━━━━╸━━━━━━━━━━━  291.5/511.4 MB  1.1 GB/s  0:00:01

`on_stderr` picks it only where a person can see it; everywhere else progress is `Silent`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import rich.progress


class Progress(Protocol):
    """What a load tells about itself."""

    def start(self, total_bytes: int, description: str) -> None:
        """Begin a stage that will handle ``total_bytes`` (0: not known); a second call begins the next stage."""
        ...

    def advance(self, n_bytes: int) -> None:
        """``n_bytes`` more are done."""
        ...

    def stop(self) -> None:
        """The load is over, well or not; may be called twice, or without ``start``."""
        ...


class Silent:
    """Progress that is not shown."""

    def start(self, total_bytes: int, description: str) -> None:
        """Nothing happens."""

    def advance(self, n_bytes: int) -> None:
        """Nothing happens."""

    def stop(self) -> None:
        """Nothing happens."""


class TerminalProgress:
    """A bar with bytes, rate and remaining time, drawn on stderr; it clears itself at the end."""

    def __init__(self) -> None:
        self._bar: rich.progress.Progress | None = None
        self._task: rich.progress.TaskID | None = None

    def start(self, total_bytes: int, description: str) -> None:
        """Show a bar of ``total_bytes``, or one without an end where that is 0."""
        self.stop()
        self._bar = _bar()
        # Descriptions hold names of files; brackets in them are not markup.
        self._task = self._bar.add_task(description.replace("[", r"\["), total=total_bytes or None)
        self._bar.start()

    def advance(self, n_bytes: int) -> None:
        """Move the bar by ``n_bytes``."""
        if self._bar is not None and self._task is not None:
            self._bar.advance(self._task, n_bytes)

    def stop(self) -> None:
        """Clear the bar and give the cursor back."""
        bar, self._bar, self._task = self._bar, None, None
        if bar is not None:
            bar.stop()


def _bar() -> rich.progress.Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=None),
        progress.DownloadColumn(),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True),
        refresh_per_second=5,  # drawing competes with the loading threads for the interpreter
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
    )


@contextmanager
def on_stderr(*, enabled: bool = True) -> Iterator[Progress]:
    """A bar where stderr is a terminal and ``enabled``, silence elsewhere; stopped at the end."""
    watched = enabled and sys.stderr is not None and sys.stderr.isatty()
    progress: Progress = TerminalProgress() if watched else Silent()
    try:
        yield progress
    finally:
        progress.stop()
