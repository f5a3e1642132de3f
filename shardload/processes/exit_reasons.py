"""Record why a run of several processes ended: in the folder of the training steps (saved states), else on stderr.

exit of this process     noticed by a helper process (`watchdog`)
exit of another process  noticed by the heartbeat (`heartbeats`)
failure of a save        recorded by the code that raises it
"""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from shardload import processes
from shardload.processes import watchdog


class ExitRecorder:
    """Records why this process failed, in the folder of the training steps (saved states), else on stderr."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._beside: subprocess.Popen[str] | None = None
        self._finalize: Callable[[], object] = lambda: None

    def begin(self, *, holds_back: bool = False) -> None:
        """Start the helper process that watches this process, and record lost processes.

        When process 0 has ended, JAX aborts this process with a stack trace; ``holds_back`` keeps it out of stderr.
        Only shardload's commands use it, because it replaces file descriptor 2 and ``sys.stderr``.
        """
        if processes.count() == 1 or self._beside is not None:
            return
        if self.folder is not None:
            processes.heartbeat().when_lost(self.write)
        process, pid = str(processes.index()), str(os.getpid())
        me = [str(self.folder or ""), process, pid, platform.node(), processes.coordinator()]
        read, write = os.pipe() if holds_back else (None, None)
        with suppress(OSError):  # without resources for another process, the other processes still notice the exit
            self._beside = subprocess.Popen(
                # -I -S: nothing that the user has installed or set for Python can delay or break the helper.
                [sys.executable, "-I", "-S", str(watchdog.__file__), *me, *([] if read is None else [str(read)])],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # survive a signal to the process group
                cwd="/",
                pass_fds=() if read is None else (read,),
            )
            stderr = None if write is None else _divert(write)
            self._finalize = weakref.finalize(self, _end, self._beside, stderr)  # also runs at interpreter exit
        for pipe in (read, write):
            if pipe is not None:
                os.close(pipe)

    def note(self, doing: str) -> None:
        """Tell the helper process what this process does, for its report if this process exits unexpectedly."""
        if self._beside is not None and self._beside.stdin is not None:
            with suppress(OSError):
                self._beside.stdin.write(f"{doing}\n")
                self._beside.stdin.flush()

    def rest(self) -> None:
        """Tell the helper process that this process may exit now, so that its exit is not reported."""
        self.note(watchdog.END)

    def leave(self) -> None:
        """End the helper process right before `os._exit`; restore stderr, so that one more line can be written."""
        self._finalize()

    def write(self, cause: str) -> None:
        """Add the cause of a failure to the list in the folder of the training steps, flushed to disk."""
        if processes.count() > 1 and self.folder is not None:
            watchdog.write_down(str(self.folder), {"process": processes.index(), "cause": cause})


@functools.cache
def exit_recorder() -> ExitRecorder:
    """Return the recorder for loads in this process. It has no folder, so failures are written to stderr only."""
    return ExitRecorder()


def _divert(pipe: int) -> int:
    """Send only what C++ code writes to stderr into a pipe; return a new descriptor of the real stderr."""
    sys.stderr.flush()
    real = os.dup(2)
    os.dup2(pipe, 2)
    sys.stderr = open(  # noqa: SIM115 - lives as long as the process
        real, "w", buffering=1, encoding=sys.stderr.encoding, errors="backslashreplace", closefd=False
    )
    return real


def _end(helper: subprocess.Popen[str], stderr: int | None) -> None:
    with suppress(OSError, ValueError):
        if stderr is not None:
            os.dup2(stderr, 2)  # closes the pipe, whose end the helper awaits
        helper.communicate(f"{watchdog.END}\n", timeout=5)
