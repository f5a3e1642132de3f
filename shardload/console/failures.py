"""Reports of failed commands, for people and for programs.

Every exception becomes a `Failure`: an exit code and one paragraph, on stderr. With ``--json`` stdout
carries ``{"error": {"type", "message", "exit_code"}}``, so that a program always finds one object there.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
import sys
import textwrap
import traceback
from dataclasses import dataclass
from typing import TextIO

from typer.exceptions import TyperException

from shardload.console import streams
from shardload.errors import WAYS_OUT, LimitError, MissingExtraError, ShardloadError, UsageError, errno_of, public_name
from shardload.interrupts import message_of, signal_of
from shardload.reports import printable

_TRACEBACK_VARIABLE = "SHARDLOAD_TRACEBACK"
_MAX_FOREIGN_MESSAGE = 600
"""Most characters to show of a message from outside of shardload: those of XLA may have pages."""
_EXTRA = re.compile(r"Got unexpected extra argument(?:\(s\))? \((.*)\)", re.S)
_JAX_VARIABLE = re.compile(
    r"invalid (?:truth )?value ['\"](.*)['\"] for (?:JAX flag|environment) '?(\w+)'?", re.I | re.S
)
"""Matches the error that JAX raises on import if an environment variable has a value that it does not accept."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What a failed command reports, on stderr and with ``--json`` also on stdout: an exit code and a message."""

    exit_code: int
    kind: str
    """Name of a public class of the exception, which ``--json`` reports as ``type``."""
    message: str
    """What went wrong, in one paragraph; empty if stdout was closed by its reader, who would not see it."""


def tell(error: BaseException, *, json_wanted: bool, stdout: TextIO | None = None) -> int:
    """Report an error on stderr, and with ``json_wanted`` as JSON on the real ``stdout``, too; return the exit code."""
    failure = failure_of(error)
    if os.environ.get(_TRACEBACK_VARIABLE, "0") not in ("", "0"):
        _to_stderr("".join(traceback.format_exception(error)))
    if failure.message:
        cause = error.__cause__ if isinstance(error, ShardloadError) else error
        label = "" if isinstance(cause, KeyboardInterrupt) else "Error: "
        _to_stderr(_paragraph(label + failure.message))
        # Of several processes: JAX may abort this one before it ends, which is not to be reported as well.
        if (reasons := sys.modules.get("shardload.processes.exit_reasons")) is not None:
            reasons.exit_recorder().rest()
    # Unless stdout is what failed, or it has the results: a signal may come after them.
    if json_wanted and not (streams.has_object() or isinstance(error, streams.ReaderLeftError | streams.OutputError)):
        _to_stdout(failure, stdout or sys.stdout)
    return failure.exit_code


def failure_of(error: BaseException) -> Failure:
    """Turn an exception into what the command reports: an exit code, and a paragraph with the exception's notes."""
    code, message = _code_and_message(error)
    notes = [str(note) for note in getattr(error, "__notes__", ())]
    if notes and message and message[-1] not in ".!?:":
        message += "."
    # A wrong command line is a wrong call; typer's classes are no part of what shardload promises.
    kind = UsageError.__name__ if isinstance(error, TyperException) else public_name(error)
    return Failure(code, kind, printable(" ".join([message, *notes]).strip(), keep="\n"))


def _code_and_message(error: BaseException) -> tuple[int, str]:
    # Special cases first: a UsageError is also a ShardloadError, which may be an OSError too.
    match error:
        case streams.ReaderLeftError():
            return streams.READER_LEFT, ""
        case KeyboardInterrupt():
            return 128 + signal_of(error), message_of(signal_of(error))
        case ShardloadError(__cause__=KeyboardInterrupt() as cause):
            return 128 + signal_of(cause), f"{message_of(signal_of(cause))} {error}"
        case TyperException():
            path = getattr(getattr(error, "ctx", None), "command_path", "shardload")
            # "Value error, " is pydantic's prefix of a failed check, which says nothing to a user, as its "Input".
            message = error.format_message().replace("Value error, ", "").replace("Input should be", "it must be")
            message = _EXTRA.sub(r"Unexpected argument: \1", message)
            end = "" if message.endswith("?") else "."
            return error.exit_code, f"{message.rstrip('.')}{end} Try: {path} --help"
        case UsageError():
            return 2, str(error)
        case ShardloadError() | streams.OutputError():
            # What helps against a limit of the system; errors of shardload say more about refused permissions.
            number = errno_of(error)
            advice = WAYS_OUT.get(number or 0, "") if number not in (errno.EACCES, errno.EPERM) else ""
            return 1, f"{str(error).rstrip('.')}. {advice}." if advice and advice not in str(error) else str(error)
        case MemoryError():
            return 1, "The machine ran out of memory, or this process's limit (ulimit -v). " + _LESS_MEMORY
        # Also a module that cannot be opened, which is installed.
        case _ if limit := LimitError.explaining(error, "run this command"):
            return 1, str(limit)
        # A module of shardload itself that is missing is a bug, or half an installation.
        case ImportError() if (error.name or "").partition(".")[0] != "shardload":
            return 1, str(MissingExtraError.explaining(error, needed_for="This command"))
        case OSError():
            return 1, _os_error(error)
        case ValueError() if refused := _JAX_VARIABLE.fullmatch(str(error)):
            return 2, (
                f"Cannot start JAX with {refused[2].upper()}={refused[1]}: it does not accept this value. Correct the "
                "environment variable, or unset it"
            )
    # JAX has one class for all errors of XLA; the status is in the text.
    if "RESOURCE_EXHAUSTED" in str(error):
        return 1, f"A device ran out of memory: {_one_line(error)} " + _LESS_MEMORY
    return 1, (
        f"Unexpected {public_name(error)}: {_one_line(error)} This is a bug in shardload or in a library under it. "
        f"Run the command again with {_TRACEBACK_VARIABLE}=1 to see where it happened, and report it together with "
        "that output."
    )


_LESS_MEMORY = (
    "Try --dtype bfloat16, a mesh with more devices, or a smaller --host-memory. "
    "`shardload plan` shows the memory of each device beforehand."
)


def _os_error(error: OSError) -> str:
    if error.errno is None:
        return f"{public_name(error)}: {_one_line(error)}"
    where = f": {error.filename}" if error.filename is not None else ""
    advice = f" {WAYS_OUT[error.errno]}." if error.errno in WAYS_OUT else ""
    return f"{error.strerror}{where}.{advice}"


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or "no message"
    text = text if len(text) <= _MAX_FOREIGN_MESSAGE else text[:_MAX_FOREIGN_MESSAGE] + " …"
    return text if text[-1] in ".!?…" else text + "."


def _paragraph(message: str) -> str:
    """Return a message for stderr: wrapped on a terminal, but one line in a file or pipe, so that grep finds it."""
    if not sys.stderr.isatty():
        return message + "\n"
    width = min(shutil.get_terminal_size().columns, 100)
    # Do not break paths and commands, so that they can be copied.
    lines = (textwrap.wrap(line, width, break_long_words=False, break_on_hyphens=False) for line in message.split("\n"))
    return "\n".join("\n".join(wrapped) for wrapped in lines) + "\n"


def _to_stderr(text: str) -> None:
    # A failure must not fail to be told: not by a closed stderr, nor by a character that its encoding lacks.
    with contextlib.suppress(OSError, ValueError):
        encoding = sys.stderr.encoding or "utf-8"
        sys.stderr.write(text.encode(encoding, "backslashreplace").decode(encoding))
        sys.stderr.flush()


def _to_stdout(failure: Failure, stdout: TextIO | None) -> None:
    if stdout is None:
        return
    error = {"type": failure.kind, "message": failure.message, "exit_code": failure.exit_code}
    try:
        stdout.write(json.dumps({"error": error}, indent=2) + "\n")
        stdout.flush()
    except (OSError, ValueError):
        streams.abandon(stdout)
