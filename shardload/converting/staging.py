"""Where a conversion works until it is done: beside the target, locked, with a journal to go on from.

    .model.converting/         beside ``model``
      lock                     held (flock) by the process that converts; the kernel lets go when it dies
      journal.jsonl            {"plan": …} {"places": […]} {"done": "layers/dense/vars/0", "xxh3": "9f3c…"} …
      result                   becomes ``model`` by one rename

A plan is everything that decides what is written. Another plan than the journal's begins anew; of the same one, tensors
that are done are read back, and those whose digest is no longer the same are copied again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardload.errors import WriteError
from shardload.steps._digest_list import hasher
from shardload.steps._tree import sync, sync_all
from shardload.stores.local import opened, read_exact
from shardload.writers import Place

READ_BYTES = 8 << 20


class Staging:
    """The working folder of one conversion; make it with `staged`."""

    def __init__(self, home: Path, target: Path) -> None:
        self.target = target
        self.result = home / "result"
        self.places: tuple[Place, ...] | None = None
        """Where tensors go, once the files were made."""
        self.done: dict[str, str] = {}
        """Digest of each tensor that was copied."""
        self._home = home
        self._journal = home / "journal.jsonl"

    def begin(self, plan: str) -> None:
        """Take up what an earlier run left, if it was to write the same; else start from nothing."""
        lines = list(self._lines())
        if not lines or lines[0].get("plan") != plan or not self.result.exists():
            self._start(plan)
            return
        for line in lines[1:]:
            if "places" in line:
                self.places = tuple(map(Place.of_json, line["places"]))
            else:
                self.done[line["done"]] = line["xxh3"]
        if self.places is None:
            self._start(plan)
            return
        # Half a line at the end would swallow what is appended next.
        draft = self._journal.with_suffix(".tmp")
        draft.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
        draft.replace(self._journal)

    def note_places(self, places: tuple[Place, ...]) -> None:
        """The files are made; from here on a conversion can be taken up."""
        self.places = places
        self._append({"places": [place.to_json() for place in places]})

    def note_done(self, name: str, digest: str) -> None:
        """A tensor was copied."""
        self.done[name] = digest
        self._append({"done": name, "xxh3": digest})

    def publish(self, *, beside: dict[Path, Path], overwrite: bool) -> None:
        """Flush everything to disk and give the result its name.

        Args:
            beside: Small files that go with it, finished → name; they come first.
            overwrite: Replace what has the name.
        """
        if self.result.is_dir():
            sync_all(self.result)
        else:
            sync(self.result)
        for made, name in beside.items():
            sync(made)
            made.replace(name)
        old = self._home / "replaced"
        if os.path.lexists(self.target):
            if not overwrite:
                raise exists(self.target)
            if self.target.is_dir() and not self.target.is_symlink():
                self.target.rename(old)
            elif self.result.is_dir():
                self.target.unlink()
        self.result.replace(self.target)
        sync(self.target.parent)
        shutil.rmtree(self._home)

    def _start(self, plan: str) -> None:
        self.places, self.done = None, {}
        self._journal.unlink(missing_ok=True)
        for left in self._home.iterdir():
            if left.name != "lock":
                shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
        self._append({"plan": plan})

    def _append(self, line: dict[str, Any]) -> None:
        with self._journal.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def _lines(self) -> Iterator[dict[str, Any]]:
        """Whole lines; whoever was killed while writing one left half of it."""
        if not self._journal.exists():
            return
        for line in self._journal.read_text(encoding="utf-8").split("\n")[:-1]:
            try:
                found = json.loads(line)
            except ValueError:
                return
            if isinstance(found, dict):
                yield found


def home_of(target: Path) -> Path:
    """The working folder for a target."""
    return target.with_name(f".{target.name}.converting")


def exists(target: Path) -> WriteError:
    """What to say when something has the target's name."""
    return WriteError(
        f"{target} is there already. Replace it with overwrite=True (--overwrite), or choose another name"
    )


@contextlib.contextmanager
def staged(target: Path, *, overwrite: bool) -> Iterator[Staging]:
    """The working folder, alone in it.

    Raises:
        WriteError: When another process converts to the same target or has just done so, or nothing can be written
            there.
    """
    home = home_of(target)
    try:
        home.mkdir(parents=True, exist_ok=True)
        lock = os.open(home / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise WriteError(f"Cannot write to {home}: {error.strerror or error}") from error
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WriteError(
                f"Another process is writing {target} right now ({home} is locked); wait for it"
            ) from error
        if not _is_still(home / "lock", lock):
            raise WriteError(f"Another process has just written {target}; start again to see what there is to do")
        if (home / "replaced").exists() and not os.path.lexists(target):
            (home / "replaced").rename(target)  # killed between the two renames of an overwrite
        if os.path.lexists(target) and not overwrite:
            shutil.rmtree(home)
            raise exists(target)
        yield Staging(home, target)
    finally:
        os.close(lock)


def _is_still(path: Path, fd: int) -> bool:
    """Whether a lock file is the one that was opened: whoever held it before removes it with the folder."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def digest(root: Path, place: Place, item_bytes: int) -> str:
    """xxh3-64 of the bytes a tensor has in its files now."""
    found = hasher()
    buffer = memoryview(bytearray(READ_BYTES))
    for piece in place.pieces:
        if not piece.count:
            continue
        path = root / piece.path
        with opened(path) as (fd, _):
            end = piece.offset + piece.count * item_bytes
            for start in range(piece.offset, end, READ_BYTES):
                block = buffer[: min(READ_BYTES, end - start)]
                read_exact(fd, block, start, str(path))
                found.update(block)
    return str(found.hexdigest())
