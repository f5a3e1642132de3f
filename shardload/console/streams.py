"""Keep stdout for results only.

While a command runs, file descriptor 1 points to stderr, so that output of libraries, from Python or C++, cannot
mix with the results; the real stdout is saved and written once, at the end::

    fd 1 ── dup ──► Results ── the table, or one JSON object ──► stdout
    fd 2 ──────────────┬── notes, progress ────────────────────► stderr
    (prints, C++ logs) ┘
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from shardload.interrupts import message_of
from shardload.reports import printable
from shardload.stores import local

_wrote_object = [False]
"""Whether this command has begun to write its JSON object to stdout; in a list, so that functions can change it."""
READER_LEFT = 141
"""Exit code if the reader of stdout (``| head``) closed it: the one that shells report for SIGPIPE, 128 + 13."""


class ReaderLeftError(Exception):
    """The reader closed stdout (``| head``), so no message can be delivered."""


class OutputError(Exception):
    """Results could not be written to stdout, because the disk is full, say, or stdout is closed."""


class Results:
    """Writes a command's results to the real stdout, which nothing else can write to."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def interrupted(self, number: int, *, as_json: bool) -> None:
        """Report that a signal (Ctrl-C) ended the command; called in a thread of its own, right before the exit."""
        message = message_of(number)
        # If this is one of several processes: this exit is expected, and is to be reported here only.
        if (reasons := sys.modules.get("shardload.processes.exit_reasons")) is not None:
            reasons.exit_recorder().leave()
        # os.write, because the main thread may hold the locks of Python's streams.
        with contextlib.suppress(OSError):
            if as_json:
                error = {"type": KeyboardInterrupt.__name__, "message": message, "exit_code": 128 + number}
                os.write(self.stream.fileno(), f"{json.dumps({'error': error}, indent=2)}\n".encode())
            # Erase the progress bar and show the cursor again.
            clear = b"\r\x1b[2K\x1b[?25h" if os.isatty(2) else b""
            os.write(2, clear + f"{message}\n".encode())
        # An atexit function does this otherwise, but os._exit runs none.
        local.remove_private_folders()

    @property
    def width(self) -> int | None:
        """Columns of the terminal that stdout is; ``None`` if it is none, such as a file or pipe."""
        return shutil.get_terminal_size().columns if self.stream.isatty() else None

    @property
    def unicode(self) -> bool:
        """Whether stdout's encoding can represent all Unicode characters, such as lines of tables."""
        return (self.stream.encoding or "utf-8").lower().startswith("utf")

    def text(self, text: str) -> None:
        """Write text to stdout unchanged, and flush it."""
        with _write_errors(self.stream):
            self.stream.write(text)
            self.stream.flush()

    def json(self, value: Mapping[str, Any]) -> None:
        """Write the one JSON object of this command to stdout."""
        text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)  # parsers of JSON refuse NaN
        _wrote_object[0] = True
        self.text(text + "\n")

    def table(self, renderable: Any) -> None:
        """Write a table or another object that rich can render; in colour only if stdout is a terminal."""
        from rich.console import Console

        # In a file, 100 columns and no colour on any machine. On a terminal, None leaves NO_COLOR to rich.
        watched = self.stream.isatty()
        console = Console(
            file=self.stream, highlight=False, width=None if watched else 100, no_color=not watched or None
        )
        # Captured, so that `text` meets the errors of writing, and without rich's padding to the full width.
        with console.capture() as captured:
            console.print(renderable)
        lines = captured.get().splitlines()
        self.text("".join(f"{line.rstrip()}\n" for line in lines))


def has_object() -> bool:
    """Whether this command has begun to write its JSON object to stdout; an error must not write a second one then."""
    return _wrote_object[0]


@contextlib.contextmanager
def results() -> Iterator[Results]:
    """Yield a writer of results to stdout; inside the block, all other output goes to stderr."""
    try:
        kept = os.dup(sys.stdout.fileno())
    # stdout was replaced by an object in memory, as notebooks and tests do: redirect Python's output, at least.
    except (OSError, ValueError):
        real = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield Results(real)
        return
    # backslashreplace: a table must not fail because the terminal's encoding lacks a character.
    encoding = sys.stdout.encoding or "utf-8"
    with os.fdopen(kept, "w", encoding=encoding, errors="backslashreplace", newline="") as stream:
        # What was printed before belongs to stdout.
        fd = sys.stdout.fileno()
        sys.stdout.flush()
        # Without a stderr, output stays where it goes.
        with contextlib.suppress(OSError):
            os.dup2(2, fd)
        try:
            yield Results(stream)
        finally:
            # What libraries printed belongs to stderr; their buffers would otherwise be written to stdout later.
            # C's stdout is buffered until it is full or the process ends. CDLL(None) is the process itself, C library
            # included; not on Windows.
            with contextlib.suppress(OSError, AttributeError, TypeError):
                sys.stdout.flush()
                ctypes.CDLL(None).fflush(None)
            os.dup2(kept, fd)


@contextlib.contextmanager
def _write_errors(stream: TextIO) -> Iterator[None]:
    # In both cases, what is left in the buffer would raise again when Python flushes it at exit.
    try:
        yield
    except BrokenPipeError as error:
        abandon(stream)
        raise ReaderLeftError from error
    except OSError as error:
        abandon(stream)
        raise OutputError(f"Cannot write the result to stdout: {error.strerror or error}.") from error


def begin_command() -> None:
    """Forget what an earlier command wrote, if a program calls `main` twice; raise an error if stdout is closed."""
    _wrote_object[0] = False
    if sys.stdout is None:
        raise OutputError("Cannot write the result to stdout: it is closed.")


def flush_stdout() -> None:
    """Flush what typer printed to stdout (help, version); raise if stdout cannot be written."""
    with _write_errors(sys.stdout):
        sys.stdout.flush()


def abandon(stream: TextIO) -> None:
    """Redirect a stream that failed to the null device; what is in its buffer would otherwise raise again at exit."""
    with contextlib.suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)


def note(message: str) -> None:
    """Print ``message`` on stderr after "note:", wrapped between words if stderr is a terminal."""
    # Messages have names from checkpoints in them, which could have escape sequences.
    text = f"note: {printable(message)}"
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr is not None and sys.stderr.isatty():
            width = shutil.get_terminal_size().columns
            text = textwrap.fill(text, max(20, width), break_long_words=False, break_on_hyphens=False)
        print(text, file=sys.stderr, flush=True)  # noqa: T201 - this is where notes go
