"""Mark a folder as in use by a ``flock`` on a file in it; the kernel unlocks the file when the process dies."""

from __future__ import annotations

import errno
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LOCK_FILE = "lock"
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""What flock reports if another process has the lock; EACCES comes from NFS."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class FolderLock:
    """The lock file of a staging folder, opened by this process."""

    home: Path
    fd: int
    state: Literal["held", "taken", "unsupported"]
    """Who has the lock: this process, another one, or none, because the file system has no locks."""

    @classmethod
    def take(cls, home: Path, *, wait: bool = False) -> FolderLock:
        """Open the lock file of ``home``, creating it if needed, and lock it if it is free.

        Args:
            home: The folder.
            wait: Wait until the lock is free.

        Raises:
            OSError: If the lock file cannot be opened.
        """
        # O_CLOEXEC: a child process that inherited the open file would keep the lock after this process died.
        fd = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            # flock, not lockf: it belongs to this open file, so this process can also conflict with itself.
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno in _TAKEN:
                return cls(home, fd, "taken")
            if error.errno in _UNSUPPORTED:
                return cls(home, fd, "unsupported")
            os.close(fd)
            raise
        return cls(home, fd, "held")

    @property
    def is_in_place(self) -> bool:
        """Whether the folder still contains this lock file, and was not removed or replaced."""
        try:
            # One can lock a file just after another process has removed it; such a lock protects nothing.
            return os.path.samestat((self.home / LOCK_FILE).stat(follow_symlinks=False), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def release(self) -> None:
        """Release the lock. Call it once only."""
        os.close(self.fd)
