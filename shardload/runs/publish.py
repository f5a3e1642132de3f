"""Publish a step: once all its bytes are on disk, one rename gives it its final name. Another rename removes it.

    root/.staging/7-ab12cd34/lock     locked (flock) by the writing process; unlocked by the kernel when it dies
    root/.staging/7-ab12cd34/step/    the step being written
                               └────► root/7        fsync of all files and folders, rename, fsync of root

If the process is killed before the rename, there is no step; after it, the step is complete. A staging folder whose
lock is free has no writer: `remove_stale` removes only such folders.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from shardload import processes
from shardload.errors import SaveError, ShardloadError, SourceNotFoundError, StepExistsError, UsageError, WriteError
from shardload.loaders.orbax.saving import failed_save, save_error
from shardload.runs.digest_list import is_empty, sync, sync_all, sync_files
from shardload.runs.digests import Digests
from shardload.runs.step import NAME
from shardload.stores.local import expanded

_STAGING = ".staging"
_STEP_FOLDER = "step"

_REMOVALS = 10
_REMOVAL_PAUSE_S = 0.05
"""Seconds to wait after each attempt to remove the folder of a failed save; ten attempts take half a second."""

_published: dict[Path, float] = {}
"""Path of each step that this process saved → time at which its run opened the folder. The error for an existing step
says with this who saved it."""
_MOVED = "Earlier steps may have moved with the folder"


class Root:
    """The folder in which steps are saved, identified by its inode, not only by its path.

    The folder stays open until garbage collection, so its inode number cannot be reused: a root that was removed or
    replaced is noticed before anything is written to it.
    """

    def __init__(self, path: str | os.PathLike[str], *, create: bool = False) -> None:
        """Open a run's folder; ``create`` makes it if missing, and raises before training if it is not writable."""
        # Resolve links now: if a link changes later, this run keeps its folder.
        self.path = expanded(path).resolve()
        self.opened_s = time.time()
        try:
            if create:
                missing = [folder for folder in (self.path, *self.path.parents) if not folder.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
                for folder in missing:  # a new folder is an entry of its parent, and must survive a power loss, too
                    sync(folder.parent)
            self.fd = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self.fd)
            if create and not os.access(self.path, os.W_OK | os.X_OK):
                # os.access does not say why: on a read-only disk, other permissions would not help.
                read_only = os.statvfs(self.path).f_flag & os.ST_RDONLY
                number = errno.EROFS if read_only else errno.EACCES
                raise OSError(number, os.strerror(number))
        except OSError as error:
            made = SaveError(
                f"Cannot save steps to {self.path}: {error.strerror}. Give a folder that this user may write to"
            )
            made.errno = error.errno
            raise made from error

    def check(self, step: int | str = "?") -> None:
        """Raise a `SaveError` if the path no longer leads to the folder that was opened; the message names ``step``."""
        try:
            found = self.path.stat()
        except (FileNotFoundError, NotADirectoryError) as error:
            why = "the folder was removed or renamed"
            raise failed_save(why, step=step, folder=self.path, number=errno.ENOENT, others=_MOVED) from error
        except OSError as error:
            raise save_error(error, step=step, folder=self.path) from error
        known = os.fstat(self.fd)
        if (found.st_dev, found.st_ino) != (known.st_dev, known.st_ino):
            why = "another folder has replaced the one that was opened"
            raise failed_save(why, step=step, folder=self.path, others=_MOVED)

    @property
    def place(self) -> Path:
        """The folder of the steps, as it is listed and shown."""
        return self.path

    @property
    def local(self) -> Path:
        """A folder on this machine for what is not part of a step, such as the list of failures."""
        return self.path

    def begin(self, step: int, *, n_bytes: int) -> Staging:
        """Create the staging folder of a step; see `Staging.begin`."""
        del n_bytes  # a full disk says so, and the folder may be on any
        return Staging.begin(self, step)

    def join(self, path: str, *, n_bytes: int) -> Staging:
        """Open the staging folder that process 0 created; see `Staging.join`."""
        del n_bytes
        return Staging.join(path)

    def clear_up(self) -> None:
        """Remove what killed processes left."""
        self.check()
        remove_stale(self.path)

    def remove(self, step: int) -> None:
        """Remove a step; see `remove_step`."""
        remove_step(self.path, step)

    def finish(self) -> None:
        """Remove the folder of staging folders, if it is empty."""
        remove_staging(self.path)


class Staging:
    """The hidden folder in which one step is written: readers do not see it before it is complete."""

    is_shared = True
    """Whether all processes of a run write to this one folder."""

    def __init__(self, root: Root, step: int, home: Path, lock: FolderLock | None) -> None:
        self.root = root
        self.step = step
        self.home = home
        self.path = home / _STEP_FOLDER
        """The folder to write the step to. Orbax creates it; `begin` does not."""
        self._lock = lock

    @classmethod
    def begin(cls, root: Root | str | os.PathLike[str], step: int) -> Staging:
        """Create the staging folder of a step, which no other process writes to; raise if the step exists already."""
        if isinstance(step, bool) or not isinstance(step, int) or not NAME.fullmatch(str(step)):
            raise UsageError(f"Cannot save step {step!r}: expected a non-negative integer of at most 18 digits")
        root = root if isinstance(root, Root) else Root(root)
        root.check(step)
        refuse_existing(root, step)
        try:
            lock = _locked_folder(root.path / _STAGING, step)
        except OSError as error:
            raise save_error(error, step=step, folder=root.path / _STAGING) from error
        return cls(root, step, lock.home, lock)

    @classmethod
    def join(cls, path: str | os.PathLike[str]) -> Staging:
        """Open a staging folder that another process created; only that process can publish or discard the folder."""
        home = Path(path).parent
        if not home.is_dir():
            raise SaveError(
                f"Cannot save in {home}: process 0 created that folder, but this process does not see it. Save to a "
                "folder on a file system that all processes share"
            )
        # root/.staging/7-ab12cd34: its name begins with the step, and the root is two levels up.
        return cls(Root(home.parent.parent), int(home.name.split("-")[0]), home, None)

    def check(self) -> None:
        """Raise if this folder, or the folder of all steps, was removed or replaced: Orbax may silently recreate it."""
        self.root.check(self.step)
        if self._lock is not None and not self._lock.is_in_place:
            why = f"the folder {self.home} was removed"
            raise failed_save(why, step=self.step, folder=self.path, number=errno.ENOENT)

    @property
    def shown(self) -> Path | str:
        """What errors call the place that the step is written to."""
        return self.path

    @property
    def path_for_orbax(self) -> Path:
        """The path by which Orbax finds `path`, equal on all processes."""
        return self.path

    def numbered(self, least: int) -> int:
        """Return a number for the processes to agree on, at least ``least``: here, it means nothing."""
        return least

    def tell(self) -> str:
        """Return what the other processes need to `Root.join` this folder."""
        return str(self.path)

    def part(self, process: int) -> Path:
        """Return the folder for the digests of the files that one process wrote; process 0 merges all of them."""
        return self.home / f"digests-{process}"

    def hand_over(self, part: Digests) -> None:
        """Flush the files of this process to disk, where several write: process 0 cannot do it for other machines."""
        if processes.count() > 1:
            sync_files(self.path, part.files)

    def take_over(self) -> None:
        """Do nothing: process 0 sees the files of all processes, and their digests, in this folder."""

    def publish(self) -> Path:
        """Flush all files to disk and rename the folder to its step number; raise if that step exists by now."""
        target = self.root.path / str(self.step)
        if self._lock is None:
            raise UsageError(f"Cannot publish {self.home} from this process: only the process that began the step can")
        try:
            self.check()
            self.check_complete()
            sync_all(self.path)
            # Again: flushing takes long enough for the folder to be removed or replaced.
            self.check()
            refuse_existing(self.root, self.step)
            # An empty folder at the target is not a step: rename replaces it. A non-empty one makes rename fail.
            os.rename(self.path, target)  # noqa: PTH104
            # Before fsync, which may fail: the step has its name already.
            _published[target] = self.root.opened_s
            # The name is an entry of the root: without this, a power loss could undo the rename.
            os.fsync(self.root.fd)
        except OSError as error:
            if isinstance(error, ShardloadError):  # SaveError is an OSError
                raise
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR) and os.path.lexists(target):
                raise _exists(self.root, self.step) from error
            raise save_error(error, step=self.step, folder=target) from error
        self._finish()
        return target

    def discard(self) -> None:
        """Remove the staging folder if it is still there, and then ``.staging`` itself if that is empty."""
        if self._lock is not None:
            remove_for_good(self.home)
            self._finish()
            remove_staging(self.root.path)

    def check_complete(self) -> None:
        """Before publishing, raise unless ``digests.json`` lists exactly the files on disk, with their sizes."""
        try:
            # Names and sizes only: the content was read to compute the digests, moments ago.
            damage = Digests.read(self.path).check_names(self.path)
        except ShardloadError as error:
            raise failed_save(f"it has no valid digests: {error}", step=self.step, folder=self.path) from error
        if damage:
            listed = "; ".join(str(found) for found in damage[:3])
            raise failed_save(f"it changed after its digests were made: {listed}", step=self.step, folder=self.path)

    def _finish(self) -> None:
        lock, self._lock = self._lock, None
        shutil.rmtree(self.home, ignore_errors=True)  # leftovers become stale once the lock is free
        if lock is not None:
            lock.release()


def remove_stale(root: str | os.PathLike[str]) -> list[Path]:
    """Remove the staging folders of writers that died, and return their paths; retry failed removals next time."""
    staging = Path(root).absolute() / _STAGING
    folders = sorted(staging.iterdir()) if staging.is_dir() else []
    # Each lock is held until its folder is gone, so that two processes do not remove the same one.
    stale = [lock for folder in folders if (lock := _stale_lock(folder)) is not None]
    for lock in stale:
        shutil.rmtree(lock.home, ignore_errors=True)
        lock.release()
    return [lock.home for lock in stale if not lock.home.exists()]


def remove_staging(root: str | os.PathLike[str]) -> None:
    """Remove the folder ``.staging`` if it is empty: no step is being written, and no dead writer left anything."""
    with suppress(OSError):
        (Path(root) / _STAGING).rmdir()


def remove_step(root: str | os.PathLike[str], step: int) -> None:
    """Remove a step: hide it by a rename, then delete its files. If killed in between, `remove_stale` deletes them."""
    base = Path(root).absolute()
    source = base / str(step)
    if not os.path.lexists(source):
        raise SourceNotFoundError(f"Cannot remove step {step} from {base}: there is no such step")
    try:
        lock = _locked_folder(base / _STAGING, step)
        home = lock.home
        try:
            # One rename hides the step: nobody sees it with some of its files deleted.
            os.rename(source, home / _STEP_FOLDER)  # noqa: PTH104
            # Before any file is deleted: else a power loss could bring the step back without some of its files.
            sync(base)
            # Remove only the link of a linked step: other runs may use the folder it leads to.
            if (home / _STEP_FOLDER).is_symlink():
                (home / _STEP_FOLDER).unlink()
            _remove_moved(home, step, base)
        finally:
            lock.release()
    except WriteError:
        raise
    except FileNotFoundError as error:
        if source.exists():
            raise WriteError(f"Cannot remove step {step} from {base}: {error}") from error
        return  # another process removed it at the same time
    except OSError as error:
        raise WriteError(f"Cannot remove step {step} from {base}: {error.strerror} ({error.filename})") from error


def _remove_moved(home: Path, step: int, base: Path) -> None:
    try:
        shutil.rmtree(home, ignore_errors=True)
        # Another process may have considered the folder stale, and created a new lock file in it.
        if home.exists():
            remove_for_good(home)
        if home.exists():
            shutil.rmtree(home)
    except OSError as error:
        if isinstance(error, FileNotFoundError):  # another process is removing it, too
            raise
        raise WriteError(
            f"Step {step} of {base} was removed, but its files cannot be deleted: {error.strerror} "
            f"({error.filename}). Delete the folder {home}"
        ) from error


def _locked_folder(staging: Path, step: int) -> FolderLock:
    """Create a new folder in ``staging`` and lock it; if another process removes it before that, start again."""
    while True:
        # Without parents=True: a root that was removed must not reappear as an empty folder.
        with suppress(FileExistsError):
            staging.mkdir()
        # Random, because two processes may write the same step at once; the later one to publish gets an error.
        home = staging / f"{step}-{secrets.token_hex(4)}"
        with suppress(FileNotFoundError):  # removed by `remove_stale`, or all of it by `remove_staging`
            home.mkdir()
            lock = FolderLock.take(home, wait=True)  # `remove_stale` may try it at this moment
            if lock.is_in_place:
                return lock
            lock.release()


def _stale_lock(folder: Path) -> FolderLock | None:
    """Lock a staging folder whose writer has died, for its removal, and return the lock; ``None`` for anything else."""
    if folder.is_symlink() or not folder.is_dir() or not re.fullmatch(r"[0-9]+-[0-9a-f]+", folder.name):
        return None  # not a staging folder of shardload
    try:
        lock = FolderLock.take(folder)
    except OSError:
        return None
    if lock.state == "held":  # without locks, nothing proves that a folder is stale
        return lock
    lock.release()
    return None


def remove_for_good(folder: Path) -> None:
    """Try several times to remove a folder that threads may still write to; raise nothing if it stays.

    After a failure, threads of Orbax run on for a moment: new files keep a folder from being removed, and the threads
    recreate missing parents. `remove_stale` removes files that they create after the last attempt.
    """
    for _ in range(_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        # Pause before looking, even after a success: a thread may just be recreating the folder.
        time.sleep(_REMOVAL_PAUSE_S)
        if not folder.exists():
            return


def refuse_existing(root: Root, step: int) -> None:
    """Raise if the root already contains a file or a non-empty folder with the step's name."""
    target = root.path / str(step)
    if os.path.lexists(target) and not is_empty(target):
        raise _exists(root, step)


def _exists(root: Root, step: int) -> StepExistsError:
    """Return the error for a step that exists already. The advice in it depends on who saved that step, and when."""
    target = root.path / str(step)
    # lstat: the name may be a link that leads nowhere.
    saved_s = os.lstat(target).st_mtime if os.path.lexists(target) else root.opened_s
    if _published.get(target) == root.opened_s or (target in _published and saved_s < root.opened_s):
        way_out = "This process saved it. Save under another number, or to another folder, or remove it first"
    elif target in _published:
        way_out = (
            "This process saved it. Two callbacks of one fit() cannot share a folder: give one of them all rules "
            "(max_to_keep, keep_best, keep_every_steps, …), or each its own folder"
        )
    elif saved_s < root.opened_s:
        way_out = "It was saved before this run. Remove it, resume from it, or save to another folder"
    else:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(saved_s))
        way_out = (
            f"Another run saved it meanwhile, at {when}: two runs cannot share a folder. Give this run its own folder, "
            "or end the other run and continue from its latest step with resume=True"
        )
    return StepExistsError(
        f"Cannot save step {step}: {target} exists, and a saved step is never overwritten. {way_out}"
    )


LOCK_FILE = "lock"
_TAKEN = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
"""Error numbers by which flock says that another process has the lock; EACCES comes from NFS."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


@dataclass(frozen=True, slots=True)
class FolderLock:
    """The lock file of a staging folder, opened by this process. While it is locked, the folder's writer is alive."""

    home: Path
    fd: int
    state: Literal["held", "taken", "unsupported"]
    """Who has the lock: this process ("held"), another one ("taken"), or none, as the file system has no locks."""

    @classmethod
    def take(cls, home: Path, *, wait: bool = False) -> FolderLock:
        """Open or create the lock file in ``home``, and lock it if it is free; with ``wait``, wait until it is free."""
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
        """Whether the folder still contains the lock file that this process opened: neither was removed or replaced."""
        try:
            # One can lock a file just after another process has removed it; such a lock protects nothing.
            return os.path.samestat((self.home / LOCK_FILE).stat(follow_symlinks=False), os.fstat(self.fd))
        except (FileNotFoundError, NotADirectoryError):
            return False

    def release(self) -> None:
        """Release the lock. Call it once only."""
        os.close(self.fd)
