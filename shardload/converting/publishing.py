"""The name of a target: what it may replace, the working folder next to it, and the rename that publishes the result.

    .model.converting/         next to ``model``
      lock                     locked (flock) by the converting process, and unlocked by the system if it dies
      journal.jsonl            {"plan": …} {"places": […]} {"done": "layers/dense/vars/0", "xxh3": "9f3c…"} …
      result                   becomes ``model`` by one rename

"plan" is a digest of everything that determines the output. If it is not the journal's, the conversion starts over;
otherwise it continues: finished tensors are read back, and those whose digest differs are copied again. Replacing a
folder removes everything in it, so this is only done if its content is a checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shardload.converting.companions import is_weights
from shardload.converting.plans import ConversionPlan
from shardload.errors import WAYS_OUT, ProcessLostError, SaveError, ShardloadError, WriteError, errno_of
from shardload.interrupts import defer_interrupt
from shardload.loaders import recognise
from shardload.loaders.contents import FolderContent
from shardload.loaders.file_pieces import TensorPlace
from shardload.loaders.peft.folder import CONFIG_FILE, WEIGHTS_FILE
from shardload.runs.digest_list import hasher, is_empty, sync, sync_all
from shardload.runs.publish import LOCK_FILE, FolderLock, remove_for_good
from shardload.stores.json_files import read_optional
from shardload.stores.local import LocalFile, located, working_folder
from shardload.units import format_bytes, spare_bytes

_READ_BYTES = 8 << 20
_RESULT = "result"
"""Name that the result has in the working folder until it is complete."""


class ConversionFolder:
    """The working folder of one conversion: the unfinished result, and a journal of the tensors that are finished."""

    def __init__(self, home: Path, target: Path) -> None:
        self.target = target
        self.result = home / _RESULT
        self.places: tuple[TensorPlace, ...] | None = None
        """For each tensor, the file and offset to write it to; ``None`` until the result's files exist."""
        self.is_published = False
        """Whether the complete result has been moved to the target's name."""
        self.done: dict[str, str] = {}
        """For each complete tensor, by name, the digest of its bytes."""
        self._home = home
        self._journal = home / "journal.jsonl"

    def begin(self, plan: str) -> None:
        """Keep what an earlier run wrote if its journal has the same ``plan`` (a digest); otherwise start over."""
        lines = list(self._lines())
        if not lines or lines[0].get("plan") != plan or not self.result.exists():
            self._start(plan)
            return
        for line in lines[1:]:
            if "places" in line:
                self.places = tuple(map(TensorPlace.of_json, line["places"]))
            else:
                self.done[line["done"]] = line["xxh3"]
        if self.places is None or not all((self.result / x.path).exists() for p in self.places for x in p.pieces):
            self._start(plan)
            return
        # Rewrite the journal: a half-written last line would merge with the next one.
        draft = self._journal.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        draft.replace(self._journal)

    def is_of(self, plan: str) -> bool:
        """Whether the journal has this plan's digest: if not, this process sees another folder than process 0."""
        return next(self._lines(), {}).get("plan") == plan

    def note_places(self, places: tuple[TensorPlace, ...]) -> None:
        """Record the file and offset of each tensor in the journal, once all files exist: a later run can continue."""
        self.places = places
        self._append({"places": [place.to_json() for place in places]})

    def note_done(self, name: str, digest: str) -> None:
        """Record in the journal that a tensor is complete."""
        self.done[name] = digest
        self._append({"done": name, "xxh3": digest})

    def kept(self) -> bool:
        """Return whether a later run can continue from this folder; if not, remove the folder."""
        with contextlib.suppress(OSError):  # the caller reports disk errors
            if self.result.exists() and any("places" in line for line in self._lines()):
                return True
        self.discard()
        return False

    def discard(self) -> None:
        """Remove this folder, unless a checkpoint to be replaced was moved into it, which would be lost."""
        if not (self._home / "replaced").exists():
            remove_for_good(self._home)  # threads of Orbax may still write

    def flush(self) -> None:
        """Flush the result's files to disk."""
        sync_all(self.result) if self.result.is_dir() else sync(self.result)

    def publish(self, *, sidecars: dict[Path, Path], removed: Path | None = None, overwrite: bool) -> None:
        """Flush the result to disk and move it to the target's name; what has this name already is replaced.

        ``sidecars``: small files next to the target, path in the working folder → final path; they are moved before the
        result. ``removed``: a file next to the target that describes another model, to be removed.
        """
        folder = self.result.is_dir()
        self.flush()
        # Again: since the first check, hours may have passed and the name may have been taken.
        check_free(self.target, folder=folder, overwrite=overwrite)
        with defer_interrupt():
            _place(sidecars, removed)  # first, so that a target never lacks its description
            if os.path.lexists(self.target) and not (folder and is_empty(self.target)):
                if self.target.is_dir() and not self.target.is_symlink():
                    self.target.rename(self._home / "replaced")  # `staged` restores it if this run is killed now
                elif folder:
                    self.target.unlink()
            self.result.replace(self.target)
            self.is_published = True
            # A rename lasts through a power failure only once its folder is flushed. Then the replaced one may go.
            sync(self.target.parent)
            shutil.rmtree(self._home)

    def publish_index(self, *, sidecars: dict[Path, Path], removed: Path | None = None, overwrite: bool) -> None:
        """Move a result of several files to their final names: first the shards, and last the index that lists them.

        If the file system has hard links, each shard also keeps its name in the working folder until the end, so that a
        killed run can be continued. The index of a replaced checkpoint is removed first, so that no index ever lists
        shards of two checkpoints. ``sidecars`` and ``removed``: as for `publish`.
        """
        self.flush()
        check_free(self.target, folder=False, overwrite=overwrite)
        index = self.result / self.target.name
        shards = sorted(path for path in self.result.iterdir() if path != index)
        for shard in shards:
            _check_shard(self.target.with_name(shard.name), shard, overwrite=overwrite)
        old = listed_shards(self.target)
        with defer_interrupt():
            self.target.unlink(missing_ok=True)
            _place(sidecars, removed)
            for made in shards:
                _link(made, self.target.with_name(made.name))
            # The shards' names must be on disk before the index that lists them.
            sync(self.target.parent)
            index.replace(self.target)
            self.is_published = True
            for name in old - {shard.name for shard in shards}:
                self.target.with_name(name).unlink(missing_ok=True)
            sync(self.target.parent)
            shutil.rmtree(self._home)

    def _start(self, plan: str) -> None:
        self.places, self.done = None, {}
        self._journal.unlink(missing_ok=True)
        # Keep the lock: another process could lock a new file of its name, and both would think they own the folder.
        for left in self._home.iterdir():
            if left.name != LOCK_FILE:
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        self._append({"plan": plan})

    def _append(self, line: dict[str, Any]) -> None:
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Yield the journal's complete lines; a process killed while writing leaves half a line at the end."""
        if not self._journal.exists():
            return
        for line in self._journal.read_text(encoding="utf-8").split("\n")[:-1]:
            try:
                found = json.loads(line)
            except ValueError:
                return
            if isinstance(found, dict):
                yield found


def _place(sidecars: Mapping[Path, Path], removed: Path | None) -> None:
    if removed is not None:
        removed.unlink()
    for made, name in sidecars.items():
        sync(made)
        made.replace(name)


def _link(made: Path, name: Path) -> None:
    # link() cannot replace an existing file and rename() can, so link under another name first.
    draft = made.with_name(f"{made.name}.named")
    try:
        draft.unlink(missing_ok=True)
        os.link(made, draft)
    except OSError:  # no hard links on this file system
        made.replace(name)
        return
    draft.replace(name)
    draft.unlink(missing_ok=True)  # rename() keeps it if both names are already one file


def listed_shards(index: Path) -> set[str]:
    """Return the files to delete when a new checkpoint replaces an old one: the shards that the old index lists.

    Only names that Keras gives to shards of this index count: a hostile index could name any file. If the index cannot
    be read, there are none.
    """
    try:
        found = read_optional(index)["weight_map"].values()
        names = {name for listed in found for name in (listed if isinstance(listed, list) else [listed])}
    except (KeyError, TypeError, AttributeError):  # missing, or not an index of Keras
        return set()
    # The names may come from a hostile file, and these files are deleted.
    pattern = re.escape(index.name.removesuffix(".weights.json")) + r"_\d{5}\.weights\.h5"
    return {name for name in names if isinstance(name, str) and re.fullmatch(pattern, name)}


@contextlib.contextmanager
def staged(target: Path, *, folder: bool, overwrite: bool) -> Iterator[ConversionFolder]:
    """Create, lock and yield a target's working folder; raise if another process locked it or the target exists."""
    home = working_folder(target)
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = FolderLock.take(home)
    except OSError as error:
        with contextlib.suppress(OSError):  # missing or not empty
            home.rmdir()
        raise write_error(target, error.errno or errno.EIO) from error
    try:
        if lock.state == "taken":  # where the file system has no locks, go on without
            raise WriteError(
                f"Cannot write {target}: another process is writing it ({home} is locked). Wait for that process"
            )
        if not lock.is_in_place:  # the previous owner removed it with the folder
            raise WriteError(f"Cannot write {target}: another process has just written it. Check it, then start again")
        # An earlier run was killed between the two renames of an overwrite: restore what it was about to replace.
        if (home / "replaced").exists() and not os.path.lexists(target):
            (home / "replaced").rename(target)
        staging = ConversionFolder(home, target)
        try:
            check_free(target, folder=folder, overwrite=overwrite)
        except WriteError:
            staging.kept()
            raise
        yield staging
    finally:
        lock.release()


def tensor_digest(root: Path, place: TensorPlace, item_bytes: int) -> str:
    """Read a tensor's bytes from the target's files and return their xxh3-64 digest, to note it in the journal."""
    found = hasher()
    buffer = memoryview(bytearray(_READ_BYTES))
    for piece in place.pieces:
        # The offset of an empty tensor means nothing: HDF5 gives it no space.
        if not piece.count:
            continue
        with contextlib.closing(LocalFile(root / piece.path)) as file:
            end = piece.offset + piece.count * item_bytes
            for start in range(piece.offset, end, _READ_BYTES):
                block = buffer[: min(_READ_BYTES, end - start)]
                file.read_into(block, start)
                found.update(block)
    return str(found.hexdigest())


def _exists(target: Path, *, is_replaceable: bool = True) -> WriteError:
    if not is_replaceable:
        return WriteError(f"{target} already exists, and is no checkpoint that can be replaced. Choose another name")
    return WriteError(f"{target} already exists. Replace it with overwrite=True (--overwrite), or choose another name")


def write_error(target: Path, number: int, n_bytes: int | None = None) -> WriteError:
    """Return the error to raise if the system refused, with errno ``number``, to write ``n_bytes`` of tensors."""
    why = "the disk is full" if number == errno.ENOSPC else os.strerror(number)
    size = f", for {format_bytes(n_bytes)} of tensors" if n_bytes and number in _ROOM else ""
    made = WriteError(f"Cannot write {target}: {why}{size}. {WAYS_OUT.get(number, 'Choose another place')}.")
    made.errno = number
    return made


_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_free(target: Path, *, folder: bool, overwrite: bool) -> None:
    """Raise `WriteError` if the target exists and may not be replaced. ``folder``: whether the result is a folder."""
    if not os.path.lexists(target) or (folder and is_empty(target)):
        return
    # overwrite= is only suggested where it would help. A dangling link does not exist() and leads to nothing to lose.
    is_replaceable = not target.exists() or (_is_checkpoint(target) and (folder or not target.is_dir()))
    if not overwrite:
        raise _exists(target, is_replaceable=is_replaceable)
    if target.is_dir() and not folder:
        raise WriteError(
            f"Cannot replace {target}: it is a folder, and the result is a file. Remove it, or choose another name"
        )
    if not is_replaceable:
        raise WriteError(f"Cannot replace {target}: it is not a checkpoint. Remove it yourself, or choose another name")


def _check_undescribed(path: Path, target: Path, *, overwrite: bool) -> None:
    """Raise `WriteError` if ``path``, a file next to the target, describes another model and may not be removed."""
    if _describes_model(path) and not overwrite:
        raise WriteError(
            f"Cannot write {target}: {path.name} next to it describes a model, and would be taken for the description "
            "of this one. Remove it with overwrite=True (--overwrite), or choose another name"
        )


def _describes_model(path: Path) -> bool:
    found = read_optional(path) if path.is_file() else None
    return isinstance(found, dict) and "class_name" in found


def _check_shard(path: Path, made: Path, *, overwrite: bool) -> None:
    # The same file under both names: an earlier run was killed while it published shards as second links.
    if not (made.exists() and path.exists() and path.samefile(made)):
        check_free(path, folder=False, overwrite=overwrite)


def _is_checkpoint(path: Path) -> bool:
    if (path / CONFIG_FILE).is_file() and (path / WEIGHTS_FILE).is_file():  # an adapter of PEFT
        return True
    try:
        found = recognise(path)
    except ShardloadError:
        return False
    if path.is_file():
        return True
    if found.is_step:
        folder = located(path)
        return found.is_folder(FolderContent(folder, folder.names()))  # a single step, not a training run's folder
    # Many programs write a config.json; only next to weights does it make the folder a checkpoint.
    described = found.open_folder is not None and found.described_by is not None
    return described and any(is_weights(e.name) and e.is_file() for e in path.iterdir())


def check_others(plan: ConversionPlan, target: Path, *, overwrite: bool) -> None:
    """Raise `WriteError` if a file that belongs next to the target exists with other content, and must be kept."""
    for name, content in plan.sidecars.items():
        path = target.with_name(name)
        if not os.path.lexists(path) or (path.is_file() and path.read_bytes() == content):
            continue
        if not overwrite:
            raise _exists(path)
        if not _describes_model(path):
            raise WriteError(
                f"Cannot replace {path}: it does not describe a model. Remove it yourself, or choose another name"
            )
    if plan.undescribed:
        _check_undescribed(target.with_name(plan.undescribed), target, overwrite=overwrite)
    for name in plan.shards:
        _check_shard(target.with_name(name), working_folder(target) / _RESULT / name, overwrite=overwrite)


def check_room(target: Path, plan: ConversionPlan) -> None:
    """Raise `WriteError` if the disk has too little free space for the plan's tensors."""
    # The working folder is next to the target, on the same file system: otherwise one rename could not publish it.
    free = shutil.disk_usage(target.parent).free
    spare = spare_bytes(plan.nbytes)
    if free < plan.nbytes + spare:
        raise WriteError(
            f"Cannot write {target.name}: it needs {format_bytes(plan.nbytes)} and {format_bytes(spare)} to "
            f"spare, but {target.parent} has {format_bytes(free)} free. Free some space, or choose another folder."
        )


def publish(plan: ConversionPlan, staging: ConversionFolder, *, overwrite: bool) -> None:
    """Flush a finished result and the small files next to it to disk, and move them to their final names."""
    sidecars = {}
    for name, content in plan.sidecars.items():
        made = staging.result.with_name(f"sidecar-{name}")
        made.write_bytes(content)
        sidecars[made] = staging.target.with_name(name)
    other = staging.target.with_name(plan.undescribed) if plan.undescribed else None
    if other is not None:  # again: since the first check, hours may have passed
        _check_undescribed(other, staging.target, overwrite=overwrite)
    removed = other if other is not None and _describes_model(other) else None
    (staging.publish_index if plan.shards else staging.publish)(sidecars=sidecars, removed=removed, overwrite=overwrite)


def explained(error: BaseException, target: Path, n_bytes: int) -> BaseException:
    """Return the exception to raise instead of ``error``, which stopped a write: a full disk gets a clear message."""
    if isinstance(error, ProcessLostError):
        return error
    number = errno_of(error) if isinstance(error, Exception) else None
    # A SaveError comes from Orbax's writer and names a step; the user asked for a conversion.
    if not isinstance(error, SaveError) and isinstance(error, ShardloadError):
        return error
    if number in WAYS_OUT:  # HDF5 mentions it in the text of a RuntimeError
        return write_error(target, number or 0, n_bytes)
    if isinstance(error, OSError):
        why = str(error.strerror or error) if number is None else os.strerror(number)
        return WriteError(f"Cannot write {target}: {why}.")
    return error
