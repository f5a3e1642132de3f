"""Save steps to a bucket: write them to a local folder, upload their files, and the record last.

    staging disk/7-ab12cd34/step/    the step as Orbax writes it
              ├────► s3://bucket/run/.staging/7-ab12cd34.json     step 7 is being written or removed
              ├────► s3://bucket/run/7/…                          all files, several at once
              └────► s3://bucket/run/7/shardload/digests.json     the record: from now on, step 7 exists

A bucket has no rename. A step exists when its record does: listings take no other folder for a step of shardload. The
record is created only if there is none, so of two writers one fails. To remove a step, its record is deleted first.

What a dead process has left is found by the objects in ``.staging/``, of which each names a step. Nothing else is
deleted: a folder without a record that no object names may be a user's own. `Ownership` keeps other runs out.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from shardload import processes
from shardload.errors import SaveError, ShardloadError, SourceNotFoundError, StepExistsError, UsageError, WriteError
from shardload.loaders.orbax.loader import OWN_FOLDER
from shardload.runs.digest_list import DIGESTS_FILE
from shardload.runs.digests import Digests
from shardload.runs.ownership import OwnedByOtherError, Ownership
from shardload.runs.publish import Root, Staging, remove_staging, remove_stale
from shardload.runs.step import NAME
from shardload.stores.uploads import PROBE, TakenError, Uploads
from shardload.units import format_bytes

STAGING_VARIABLE = "SHARDLOAD_STAGING"
_MARKS = ".staging"
_MARK = re.compile(r"(0|[1-9][0-9]{0,17})-[0-9a-f]+\.json")
_COMMITTED = "commit_success.txt"
"""By this file of its own, Orbax tells on gs:// that a checkpoint is complete."""
_GIVING_UP_S = 10.0
"""For how long the requests that clean up after a failure are repeated."""
_OWNED: dict[str, tuple[Ownership, int]] = {}
"""URL → what this process owns, and how many savers use it."""
_SAVING: set[tuple[str, int]] = set()
_SAVED: set[tuple[str, int]] = set()
"""URL and number of each step that this process saves, or has saved."""
_TWO_SAVERS = (
    "This process saves it. Save under another number, or remove it first. Two callbacks of one fit() cannot share a "
    "folder: give one of them all rules (max_to_keep, keep_best, keep_every_steps, …), or each its own folder"
)
_LOCK = threading.Lock()


class RemoteRoot:
    """A folder in a bucket in which steps are saved."""

    def __init__(self, url: str) -> None:
        """Open a run's folder; raise before training if it is not writable, or there is no room for staging."""
        self.uploads = Uploads(url)
        self.leftovers: dict[int, list[str]] = {}
        """Step → the objects that say so, of failed saves whose files could not be deleted."""
        self._owns = False
        staging_disk()
        with self._explained(f"save steps to {self.place}"):
            self.uploads.check()

    @property
    def place(self) -> str:
        """The URL of the folder of the steps."""
        return self.uploads.url

    @property
    def local(self) -> None:
        """Nothing: there is no folder on this machine for what is not part of a step."""
        return

    def check(self, step: int | str = "?") -> None:
        """Raise a `SaveError` if another run has begun to save to this folder."""
        with _LOCK:
            owned = _OWNED.get(self.place)
        if owned is None:
            return
        with self._explained(f"save step {step} to {self.place}"):
            owned[0].check()

    def clear_up(self) -> None:
        """Become the owner of the folder, and remove what killed processes left in it and on this machine."""
        self._own()
        remove_stale(staging_disk())
        with self._explained(f"remove unfinished steps from {self.place}"):
            names = self.uploads.sizes(_MARKS)
            # Of a process that could write them, but not delete them.
            self.uploads.delete(probe for name in names if (probe := f"{_MARKS}/{name}").startswith(PROBE))
            for mark in filter(_MARK.fullmatch, names):
                token = mark.removesuffix(".json")
                step = int(mark.partition("-")[0])
                with _LOCK:  # another saver of this process may be at work
                    is_stale = (self.place, step) not in _SAVING
                if is_stale:
                    marks = [*(n for n in names if n.startswith(f"{token}/")), mark]
                    self._clear(step, [f"{_MARKS}/{name}" for name in marks])

    def begin(self, step: int, *, n_bytes: int) -> RemoteStaging:
        """Begin a step of ``n_bytes`` on this process; raise if it exists already, or the local disk has no room."""
        if isinstance(step, bool) or not isinstance(step, int) or not NAME.fullmatch(str(step)):
            raise UsageError(f"Cannot save step {step!r}: expected a non-negative integer of at most 18 digits")
        self._own()
        self._check_room(step, n_bytes)
        token = f"{step}-{secrets.token_hex(4)}"
        with self._explained(f"save step {step} to {self.place}"), self._saving(step):
            if step in self.leftovers:
                self._clear(step, self.leftovers[step])
                del self.leftovers[step]
            self._refuse_existing(step)
            self.uploads.put(f"{_MARKS}/{token}.json", b"{}", only_new=True)
            return RemoteStaging(self, step, token, Staging.begin(Root(staging_disk()), step))

    def join(self, token: str, *, n_bytes: int) -> RemoteStaging:
        """Begin on this process a step that process 0 has begun: `RemoteStaging.tell` has told the token."""
        remove_stale(staging_disk())
        step = int(token.partition("-")[0])
        self._check_room(step, n_bytes)
        return RemoteStaging(self, step, token, Staging.begin(Root(staging_disk()), step))

    def remove(self, step: int) -> None:
        """Remove a step: its record first. If killed in between, `clear_up` of the next run removes the rest."""
        mark = f"{_MARKS}/{step}-{secrets.token_hex(4)}.json"
        with self._explained(f"remove step {step} from {self.place}"):
            self.check(step)
            if not self.uploads.sizes(str(step)):
                raise SourceNotFoundError(f"Cannot remove step {step} from {self.place}: there is no such step")
            self.uploads.put(mark, b"{}")
            self.uploads.delete([f"{step}/{DIGESTS_FILE}"])
            self._clear(step, [mark])

    def finish(self) -> None:
        """End the ownership, unless other savers of this process use the folder."""
        if self._owns:
            self._owns = False
            with _LOCK:
                owned, users = _OWNED.pop(self.place)
                if users > 1:
                    _OWNED[self.place] = owned, users - 1
                    return
            owned.release()

    def shown(self, step: int) -> str:
        """Return the URL of a step."""
        return f"{self.place}/{step}"

    def _own(self) -> None:
        if self._owns:
            return
        with _LOCK, self._explained(f"save steps to {self.place}"):
            owned, users = _OWNED.get(self.place, (None, 0))
            if owned is None:
                owned = Ownership(self.uploads)
                owned.take()
            _OWNED[self.place] = owned, users + 1
            self._owns = True

    def _check_room(self, step: int, n_bytes: int) -> None:
        disk = staging_disk()
        free = shutil.disk_usage(disk).free
        if n_bytes > free:
            made = SaveError(
                f"Cannot save step {step} to {self.shown(step)}: {format_bytes(n_bytes)} are staged in {disk} before "
                f"they are uploaded, but only {format_bytes(free)} are free there. Free some room, or set "
                f"{STAGING_VARIABLE} to a folder on another disk"
            )
            made.errno = errno.ENOSPC
            raise made

    @contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """Note that this process saves a step; raise if another saver of it does, before their files are mixed."""
        with _LOCK:
            if (self.place, step) in _SAVING:
                raise StepExistsError(f"Cannot save step {step}: {self.shown(step)} is being saved. {_TWO_SAVERS}")
            _SAVING.add((self.place, step))
        try:
            yield
        except BaseException:
            self.end(step)
            raise

    def end(self, step: int, *, is_saved: bool = False) -> None:
        """Note that this process no longer saves a step."""
        with _LOCK:
            _SAVING.discard((self.place, step))
            if is_saved:
                _SAVED.add((self.place, step))

    def _refuse_existing(self, step: int) -> None:
        found = self.uploads.sizes(str(step), trusts_none=True)  # a web page would refuse the write that follows
        if DIGESTS_FILE in found:
            is_own = (self.place, step) in _SAVED
            way_out = _TWO_SAVERS if is_own else "Remove it, resume from it, or save to another folder"
            raise StepExistsError(
                f"Cannot save step {step}: {self.shown(step)} exists, and a saved step is never overwritten. {way_out}"
            )
        if found:
            raise StepExistsError(
                f"Cannot save step {step}: {self.shown(step)} has other files ({next(iter(found))}). Remove them, or "
                "save to another folder"
            )

    def _clear(self, step: int, marks: list[str]) -> None:
        """Delete the files of a step that has no record, and then the objects that say so."""
        found = self.uploads.sizes(str(step))
        if DIGESTS_FILE not in found:
            self.check(step)
            _delete_files(self.uploads, step, found)
        self.uploads.delete(marks)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except OwnedByOtherError as error:
            raise SaveError(
                f"Cannot {what}: {error}, and two runs cannot share a folder. End one of them, or give each its own"
            ) from error
        except (SaveError, StepExistsError, SourceNotFoundError, UsageError):
            raise
        except ShardloadError as error:
            made = SaveError(f"Cannot {what}: {str(error).rstrip('. ')}")
            made.errno = getattr(error, "errno", None) or errno.EIO
            raise made from error


class RemoteStaging:
    """The local folder in which one process writes its part of a step, to be uploaded."""

    is_shared = False
    """Each process has its own folder, perhaps on a machine of its own."""

    def __init__(self, root: RemoteRoot, step: int, token: str, local: Staging) -> None:
        self.root, self.step = root, step
        self._token, self._local = token, local
        self._number: int | None = None

    @property
    def path(self) -> Path:
        """The folder to write the step to."""
        return self._local.path

    @property
    def shown(self) -> str:
        """What errors call the place that the step is written to: its URL."""
        return self.root.shown(self.step)

    @property
    def path_for_orbax(self) -> Path:
        """The path by which Orbax finds `path`, equal on all processes."""
        # Orbax compares the paths of all processes. By this one, each finds its own folder.
        return self.path if self._number is None else Path(f"/proc/self/fd/{self._number}/{self.path.name}")

    def numbered(self, least: int) -> int:
        """Open the folder as a file descriptor of at least this number, and return the number."""
        self._close()
        folder = os.open(self._local.home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._number = fcntl.fcntl(folder, fcntl.F_DUPFD_CLOEXEC, least)
        finally:
            os.close(folder)
        return self._number

    def _close(self) -> None:
        if self._number is not None:
            os.close(self._number)
            self._number = None

    def tell(self) -> str:
        """Return what the other processes need to `RemoteRoot.join`."""
        return self._token

    def part(self, process: int) -> Path:
        """Return the folder for the digests of the files that one process wrote; process 0 merges all of them."""
        return self._local.part(process)

    def check(self) -> None:
        """Raise if the local folder was removed or replaced."""
        self._local.check()

    def hand_over(self, part: Digests) -> None:
        """Upload the files of this process; to process 0, hand over their digests as an object."""
        files = {f"{self.step}/{name}": self.path / name for name in part.files if name != _COMMITTED}
        own = {name: path for name, path in files.items() if name.startswith(f"{self.step}/{OWN_FOLDER}/")}
        with self._explained():
            # First: until the record is there, they show that this is no step of Orbax.
            self._upload(own)
            self._upload({name: path for name, path in files.items() if name not in own})
            if not processes.is_first():
                self._upload({self._key_of_part(processes.index()): self.part(processes.index()) / DIGESTS_FILE})

    def take_over(self) -> None:
        """Fetch the digests of the other processes, and note the sizes of their files as files without content."""
        for process in range(1, processes.count()):
            with self._explained():
                found = self.root.uploads.read(self._key_of_part(process))
            if found is None:
                raise SaveError(f"Cannot save step {self.step}: the digests of process {process} are missing")
            folder = self.part(process)
            (folder / OWN_FOLDER).mkdir(parents=True)
            (folder / DIGESTS_FILE).write_bytes(found[0])
            for name, digest in Digests.read(folder).files.items():
                path = self.path / name
                if not path.exists():
                    path.parent.mkdir(parents=True, exist_ok=True)
                    with path.open("xb") as file:
                        file.truncate(digest.n_bytes)

    def publish(self) -> str:
        """Compare the names and sizes in the bucket with the digests, and create the record; return the step's URL."""
        self.check()
        self._local.check_complete()
        with self._explained():
            digests = Digests.read(self.path)
            if _COMMITTED in digests.files:  # once all other files are there
                self._upload({f"{self.step}/{_COMMITTED}": self.path / _COMMITTED})
            expected = {name: found.n_bytes for name, found in digests.files.items()}
            if (found := self.root.uploads.sizes(str(self.step))) != dict(sorted(expected.items())):
                [first, *_] = sorted(set(found.items()) ^ set(expected.items()))
                raise SaveError(
                    f"Cannot save step {self.step} to {self.shown}: {first[0]} was not uploaded as it "
                    "was written, or another program writes there. Earlier steps are untouched"
                )
            self.root.check(self.step)
            record = (self.path / DIGESTS_FILE).read_bytes()
            try:
                self.root.uploads.put(f"{self.step}/{DIGESTS_FILE}", record, only_new=True)
            except TakenError as error:
                raise StepExistsError(
                    f"Cannot save step {self.step}: another run saved {self.shown} meanwhile, and two "
                    "runs cannot share a folder. Give this run its own folder, or end the other one"
                ) from error
        with suppress(ShardloadError):  # the step is saved: the next run deletes what is left in .staging
            self.root.uploads.delete(self._marks())
        self.root.end(self.step, is_saved=True)
        self._finish()
        return self.shown

    def discard(self) -> None:
        """Remove the local folder, and on process 0 what was uploaded."""
        record = self.path / DIGESTS_FILE
        mine = record.read_bytes() if record.is_file() else None
        try:
            if processes.is_first():
                self._take_back(Uploads(self.root.place, most_s=_GIVING_UP_S), mine)
        except ShardloadError:  # the next save of this step, or the next run, removes what stays
            self.root.leftovers.setdefault(self.step, []).extend(self._marks())
        finally:
            self.root.end(self.step)
            self._finish()

    def _take_back(self, uploads: Uploads, mine: bytes | None) -> None:
        self.root.check(self.step)
        found = uploads.read(f"{self.step}/{DIGESTS_FILE}")
        if found is None or found[0] == mine:  # else the step is another run's
            uploads.delete([f"{self.step}/{DIGESTS_FILE}"])
            _delete_files(uploads, self.step, uploads.sizes(str(self.step)))
        uploads.delete(self._marks())

    def _upload(self, files: dict[str, Path]) -> None:
        self.root.uploads.put_files(files, check=_check_others)

    def _marks(self) -> list[str]:
        parts = [self._key_of_part(process) for process in range(1, processes.count())]
        return [*parts, f"{_MARKS}/{self._token}.json"]

    def _key_of_part(self, process: int) -> str:
        return f"{_MARKS}/{self._token}/digests-{process}.json"

    def _finish(self) -> None:
        self._close()
        self._local.discard()
        remove_staging(self._local.root.path)

    @contextmanager
    def _explained(self) -> Iterator[None]:
        with self.root._explained(f"save step {self.step} to {self.shown}"):
            yield


def _delete_files(uploads: Uploads, step: int, names: Iterable[str]) -> None:
    """Delete the files of a step without a record; shardload's last, as they show that it is no step of Orbax."""
    found = set(names)
    own = {name for name in found if name.startswith(f"{OWN_FOLDER}/")}
    for group, rest in ((found - own, own), (own, set())):
        uploads.delete(f"{step}/{name}" for name in sorted(group))
        # A web page, such as one to log in to a proxy, looks like the answer that objects are deleted.
        if left := uploads.sizes(str(step)).keys() - rest:
            raise WriteError(
                f"Cannot delete {uploads.shown(f'{step}/{min(left)}')}: the store says that it is deleted, but lists "
                "it. Check what answers at its address, such as a proxy"
            )


def _check_others() -> None:
    """Raise if another process of this run was lost, or its call failed."""
    if processes.count() > 1:
        processes.heartbeat().check()
        processes.call.check()


def staging_disk() -> Path:
    """Return the folder on this machine in which steps are written before they are uploaded; make it if missing."""
    given = os.environ.get(STAGING_VARIABLE)
    folder = Path(given or tempfile.gettempdir()).absolute() / f"shardload-staging-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, "it belongs to another user")
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        made = WriteError(
            f"Cannot stage files for an upload in {folder}: {error.strerror or error}. Set {STAGING_VARIABLE} to a "
            "folder that this user may write to"
        )
        made.errno = error.errno
        raise made from error
    return folder
