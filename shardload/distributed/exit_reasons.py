"""Record why a run of several processes ended: in the folder of the steps or, without one, on stderr.

exit of this process     noticed by a helper process (`watchdog`)
exit of another one      noticed by the heartbeat (`heartbeat`)
failure of a save        recorded by the code that raises it
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
    """A recorder for failures of this process, in one folder; inactive in a run of one process.

    Args:
        folder: The folder of the steps; without it, failures are only written to stderr.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._beside: subprocess.Popen[str] | None = None

    def begin(self) -> None:
        """Start the helper process that watches this process, and record lost processes."""
        if processes.count() == 1 or self._beside is not None:
            return
        if self.folder is not None:
            processes.heartbeat().when_lost(self.write)
        process, pid = str(processes.index()), str(os.getpid())
        me = [str(self.folder or ""), process, pid, platform.node(), processes.coordinator()]
        with suppress(OSError):  # without resources for another process, the other processes still notice the exit
            self._beside = subprocess.Popen(
                # -I -S: nothing that the user has installed or set for Python can delay or break the helper.
                [sys.executable, "-I", "-S", str(watchdog.__file__), *me],
                stdin=subprocess.PIPE,
                text=True,
                start_new_session=True,  # survive a signal to the process group
                cwd="/",
            )
            weakref.finalize(self, _end, self._beside)  # also runs at interpreter exit

    def note(self, doing: str) -> None:
        """Send the current activity to the helper process, for the report of an unexpected exit."""
        if self._beside is not None and self._beside.stdin is not None:
            with suppress(OSError):
                self._beside.stdin.write(f"{doing}\n")
                self._beside.stdin.flush()

    def rest(self) -> None:
        """Announce that this process may exit, so that its exit is not reported."""
        self.note(watchdog.END)

    def write(self, cause: str) -> None:
        """Record a cause of failure, flushed to disk."""
        if processes.count() > 1 and self.folder is not None:
            watchdog.write_down(str(self.folder), {"process": processes.index(), "cause": cause})


def _end(helper: subprocess.Popen[str]) -> None:
    with suppress(OSError, ValueError):
        helper.communicate(f"{watchdog.END}\n", timeout=5)
