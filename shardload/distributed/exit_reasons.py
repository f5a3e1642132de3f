"""Says why a run of several processes came to its end: in the folder of the steps, or where it only loads, on stderr.

of this process     a helper process sees it end (`watchdog`)
of another one      the heartbeat misses it (`heartbeat`)
of a save           the code that raises it records it
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path

from shardload.distributed import processes, watchdog


class ExitRecorder:
    """Keeps the account of one folder for this process; there is nothing to keep in a run of one.

    Args:
        folder: Of the steps; without one, what happens is only said on stderr.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._beside: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        """Have this process watched, and the others listened for."""
        if processes.count() == 1 or self._beside is not None:
            return
        if self.folder is not None:
            processes.heartbeat().when_lost(self.write)
        me = [str(self.folder or ""), str(processes.index()), str(os.getpid()), platform.node()]
        me.append(processes.coordinator())
        with suppress(OSError):  # no room for one more process: the others still notice
            self._beside = subprocess.Popen(
                [sys.executable, "-I", "-S", str(watchdog.__file__), *me],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # what kills the group of a process should leave its witness
                cwd="/",
            )
            weakref.finalize(self, _end, self._beside)  # also runs when the interpreter ends

    def note(self, doing: str) -> None:
        """What this process is about, in case it is the last thing it does."""
        if self._beside is not None and self._beside.stdin is not None:
            with suppress(OSError):
                self._beside.stdin.write(f"{doing}\n")
                self._beside.stdin.flush()

    def rest(self) -> None:
        """This process may end now, with nothing said."""
        self.note(watchdog.END)

    def write(self, cause: str) -> None:
        """Write a cause down, flushed to disk."""
        if processes.count() > 1 and self.folder is not None:
            watchdog.write_down(str(self.folder), {"process": processes.index(), "cause": cause})


def _end(helper: subprocess.Popen[str]) -> None:
    with suppress(OSError, ValueError):
        helper.communicate(f"{watchdog.END}\n", timeout=5)
