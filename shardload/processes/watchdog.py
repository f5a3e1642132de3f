"""A helper process for each process of a run; it records an exit that was not announced.

    training process ──pipe──► helper process       killed, aborted by JAX, out of memory: the pipe is closed
                       "end" ─► nothing to report   without "end" ─► a line in FOLDER/.failures.jsonl, flushed to disk
                                                                     (without a folder: on stderr only)

A killed process cannot report its exit; if process 0 is gone, JAX aborts all others at once. The helper runs as a
separate program (``python -I -S watchdog.py``), imports only the standard library, takes 10 MB and sleeps all the time.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
import time

_FILE = ".failures.jsonl"
END = "end"
_TAIL_BYTES = 64 << 10
_ANSWER_S = 5.0
"""Seconds to wait for an answer of the coordination service, which shows whether process 0 still runs."""
_DRAIN_S = 2.0
"""Time limit for reading the last output of the process: a program that the process started may keep the pipe open."""
_FATAL = re.compile(rb"F\d{4} ")
"""Beginning of the line with which JAX's C++ code (Abseil) logs a fatal error; the stack trace follows it."""
_BEFORE = re.compile(rb"E\d{4} \S+ +\d+ coordination_service")
"""Beginning of an error that JAX's coordination service logs before JAX aborts the process with a fatal error.
Like the stack trace of the abort, it is not printed if the helper's own message explains the abort."""
_RECENT_S = 120.0
"""An exit within this many seconds of another process' failure counts as its result: JAX aborts processes that wait."""
_SETTLE_S = 10.0
"""Most seconds to wait for the helper of another process to record the failure that also ended this process."""

_FIRST_GONE = "process 0 has ended, and JAX, whose coordination service it ran at {}, ended the others"


def write_down(folder: str, record: dict[str, object]) -> None:
    """Append a record, as a line, to the list of failures in the folder, flushed to disk; ignore a missing folder."""
    at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    line = (json.dumps({"at": at, "unix_s": time.time(), **record}) + "\n").encode()
    try:
        fd = os.open(os.path.join(folder, _FILE), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)  # noqa: PTH118
    except OSError:
        return
    try:
        # A single write with O_APPEND, so that lines of several processes do not mix.
        os.write(fd, line)
        os.fsync(fd)
    finally:
        os.close(fd)


def written_since(folder: str, unix_s: float) -> list[dict[str, object]]:
    """Return the failures noted in the folder after ``unix_s``, oldest first (of the last 64 KiB; no invalid lines)."""
    try:
        with open(os.path.join(folder, _FILE), "rb") as file:  # noqa: PTH118, PTH123
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            # The first line may be cut, where the last 64 KiB begin.
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict) and isinstance(record.get("cause"), str):
            when = record.get("unix_s")
            if isinstance(when, (int, float)) and when > unix_s:
                found.append(record)
    return found


def watch(folder: str, process: int, pid: int, host: str, coordinator: str = "", *, output: int | None = None) -> None:
    """Follow the status lines of a process on stdin until it ends; record why, if it ended unexpectedly.

    The folder is that of the training steps, or empty; ``coordinator`` is the ``host:port`` of the coordination
    service, and ``output`` a pipe with what the process writes to its file descriptor 2.
    """
    held: list[bytes] = []
    passing_on = threading.Thread(target=_pass_on, args=(output, held), daemon=True)
    if output is not None:
        passing_on.start()
    said, began = "", time.time()
    # The pipe is closed when the process is gone, however it ended.
    for line in sys.stdin:
        said = line.strip()
    if output is not None:
        passing_on.join(_DRAIN_S)
    if said != END and not folder:
        is_first_gone = process > 0 and not _answers(coordinator)
        if not is_first_gone:
            os.write(2, b"".join(held))
        why = "most likely it was killed"
        if is_first_gone:
            why = _FIRST_GONE.format(coordinator)
        elif any(map(_FATAL.match, held)):
            why = "JAX ended it, most likely because another process was lost; its own report is above"
        doing = f"ended unexpectedly while {said or 'training'}"
        sys.stderr.write(f"shardload: Process {process} ({host} pid {pid}) {doing}: {why}. Start all processes again\n")
    elif said != END:
        doing = said or "training"
        since = max(began, time.time() - _RECENT_S)
        # Without the first process, the others end at once: what watches it may still be writing down why.
        before = written_since(folder, since)
        is_first_gone = process > 0 and not _of_others(before, process) and not _answers(coordinator)
        if is_first_gone:
            until = time.monotonic() + _SETTLE_S
            while not _of_others(before, process) and time.monotonic() < until:
                time.sleep(0.1)
                before = written_since(folder, since)
        why = f"as {_FIRST_GONE.format(coordinator)}," if is_first_gone else "most likely killed,"
        why = "after the failure recorded above" if before else why
        what = f"Process {process} ({host} pid {pid}) exited unexpectedly, {why} while {doing}"
        write_down(folder, {"process": process, "cause": what})
        # Once more, as JAX has printed a stack trace since: the first failure of another process, else its own.
        cause = "".join(f". The cause: {found['cause']}" for found in (_of_others(before, process) or before)[:1])
        sys.stderr.write(f"shardload: {what}{cause}. Earlier steps are untouched\n")


def _of_others(failures: list[dict[str, object]], process: int) -> list[dict[str, object]]:
    return [found for found in failures if found.get("process") != process]


def _pass_on(output: int, held: list[bytes]) -> None:
    """Copy lines from a pipe to stderr, except those of an abort by JAX: append these to ``held``.

    They are the fatal error with all lines after it, and the errors of the coordination service that come before it.
    The caller may print them later, if nothing else explains the abort.
    """
    is_fatal = False
    with open(output, "rb") as lines:
        for line in lines:
            is_fatal = is_fatal or _FATAL.match(line) is not None
            if is_fatal or _BEFORE.match(line):
                held.append(line)
            else:
                os.write(2, line)


def _answers(coordinator: str) -> bool:
    """Whether the coordination service runs.

    The kernel still connects to a process that is being ended; only one that runs sends the first bytes of HTTP/2.
    """
    host, _, port = coordinator.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S) as connection:
            return bool(connection.recv(1))
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    given = sys.argv[6:]
    watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:6], output=int(given[0]) if given else None)
