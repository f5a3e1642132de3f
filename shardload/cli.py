"""The ``shardload`` command.

    argv ─► app (typer: names, options, help, completion) ─► commands ─► engine (the rest of shardload, lazily)
                                                               │
    stdout ◄── results: the table, generated text, or one JSON object ◄──┤
    stderr ◄── progress, notes, and one paragraph when something fails ◄─┘

Exit codes: 0 done · 1 failed, or a plan that does not fit · 2 usage · 130 interrupted · 141 stdout's reader left ·
143 SIGTERM · 129 SIGHUP.
This module is only the outermost frame: every run ends with one of these codes and never with a traceback
(``SHARDLOAD_TRACEBACK=1`` shows it). It imports nothing heavy, so that an early Ctrl-C is caught as well.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from collections.abc import Sequence

from shardload.interrupts import INTERRUPTED, drop, end_with, ignore_at_exit, raise_interrupt_safely, raised


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        arguments: Arguments after the program's name; ``sys.argv[1:]`` by default.

    Returns:
        The exit code.
    """
    is_process = arguments is None
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stderr is None:  # started with 2>&-
        sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - lives as long as the process
    if is_process:
        ignore_at_exit()
    try:
        # Until the process ends: the default handlers would end it without a result, or with another exit code.
        with raise_interrupt_safely(restore=not is_process):
            code = _run(arguments)
            if is_process:
                end_with(code, _tidy)
            return code
    except BaseException as error:
        if is_process:
            drop()
        if isinstance(error, SystemExit):  # raised by typer: completion, or --help whose reader left
            code = 141 if isinstance(error.__context__, BrokenPipeError) else int(error.code or 0)
        else:
            from shardload.console.failures import tell

            code = tell(error, json_wanted="--json" in arguments)
        # Without unloading modules that its threads may still be using: Python would stop these somewhere inside of C++
        # (of 77 interrupted runs of `verify`, five ended in a segmentation fault).
        if is_process and isinstance(error, KeyboardInterrupt):
            atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(code)
    if is_process:
        end_with(code, _tidy)
    return code


def _tidy(_: int) -> None:
    """Remove this process's private folders, as `atexit` would, before a signal ends the process."""
    from shardload.stores.local import remove_private_folders

    remove_private_folders()


def _run(arguments: list[str]) -> int:
    # Imported here: typer and rich take a moment, in which Ctrl-C must already end with one line.
    from shardload.console import completion, streams
    from shardload.console.app import command

    streams.begin_command()
    if completion.answered(arguments):
        return 0
    code = command().main(arguments, prog_name="shardload", standalone_mode=False)
    streams.flush_stdout()
    if code == INTERRUPTED:  # typer turns the exception into its exit code
        raise raised()
    return int(code or 0)
