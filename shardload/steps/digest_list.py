"""The list of digests of a step: how it is made, written, read and compared with the names on disk.

    7/pytree/ocdbt.process_0/d/ab12    |--1 MiB--|--1 MiB--|--1 MiB--|-rest-|
    7/shardload/digests.json            "9f3c…"   "01aa…"   "77de…"   "c0de…"   and the size; and one of itself

It is written last and read first. A path in ``digests.json`` is somebody else's word: it may not leave the folder, and
a symbolic link in a step is damage.

xxh3 finds accidents (flipped bits, lost blocks, stale sectors), not forgeries: it is not a cryptographic hash.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardload.errors import DamagedError, SourceError, SourceNotFoundError
from shardload.steps.file_tree import FileTree, scan, sync
from shardload.stores import file_access, json_files
from shardload.stores.file_access import UNIT_BYTES

OWN_FOLDER = "shardload"
DIGESTS_FILE = f"{OWN_FOLDER}/digests.json"

READ_UNITS = 8
"""Units read in one go: 8 MiB amortise the system call and stay within a core's cache share."""
TASK_UNITS = 64
"""Units per task: large files are spread over the threads, small ones cost one task each."""
THREADS = 4
"""xxh3 does tens of GiB/s on one core; the threads hide the latency of reading."""

_HEX = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """What one file held when it was saved."""

    n_bytes: int
    units: tuple[str, ...]
    """xxh3-64 in hexadecimal of each MiB, the last one shorter; none for an empty file."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One thing that is wrong with a step."""

    path: str
    """The file, relative to the step's folder."""
    what: str
    """A phrase that goes on after the file's name."""
    offset: int | None = None
    """Where in the file, in bytes; None when it is about the whole file."""
    step: str = ""
    """The name of the step's folder."""

    def __str__(self) -> str:
        where = "" if self.offset is None else f" from byte {self.offset}"
        return f"step {self.step}: {self.path}{where} {self.what}"


@dataclass(frozen=True, slots=True)
class DigestTask:
    """Some units of one file."""

    path: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of every file of a step, except of ``shardload/digests.json`` itself."""

    files: Mapping[str, FileDigest]
    """By path relative to the step's folder, with ``/``."""

    @classmethod
    def compute(cls, folder: str | os.PathLike[str], *, of: Callable[[str], bool] | None = None) -> Digests:
        """Digests of what lies in ``folder`` now, by reading it back.

        Args:
            folder: The step's folder.
            of: Which files, by name; all by default.

        Raises:
            SourceError: When something in it is not a regular file.
            OSError: When it cannot be read.
        """
        tree = scan(folder)
        for name, what in tree.others.items():
            raise SourceError(f"{os.fspath(folder)}/{name} is {what}; a step holds regular files only")
        wanted = of or (lambda _: True)
        sizes = {name: size for name, size in tree.files.items() if name != DIGESTS_FILE and wanted(name)}
        pieces = [piece for name, size in sizes.items() for piece in pieces_of(name, size)]
        units: dict[str, list[str]] = {name: [] for name in sizes}
        with ThreadPoolExecutor(THREADS, thread_name_prefix="shardload-digest") as pool:
            # map keeps the order, so the pieces of a file arrive from its start to its end
            for piece, found in zip(
                pieces, pool.map(lambda p: digest_piece(folder, p, sizes[p.path]), pieces), strict=True
            ):
                units[piece.path] += found
        return cls({name: FileDigest(size, tuple(units[name])) for name, size in sizes.items()})

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write ``shardload/digests.json``: wholly or not at all, and flushed to disk.

        Raises:
            OSError: When it cannot be written.
        """
        target = Path(folder, DIGESTS_FILE)
        target.parent.mkdir(exist_ok=True)
        body = self._body()
        draft = target.with_suffix(".tmp")
        draft.write_bytes(_canonical(body | {"self": _hash(_canonical(body))}))
        sync(draft)
        draft.replace(target)

    @classmethod
    def read(cls, folder: str | os.PathLike[str]) -> Digests:
        """The digests a step was saved with, proved by their own digest.

        Raises:
            SourceNotFoundError: When the folder has none, so it is not a shardload step.
            DamagedError: When they are not what was written.
        """
        path = Path(folder, DIGESTS_FILE)
        if path.is_symlink() or path.parent.is_symlink():
            raise DamagedError(f"Step {step_name(folder)}: {path} is a symbolic link, which no step holds")
        try:
            found = json_files.read_object(path)
        except SourceNotFoundError as error:
            raise SourceNotFoundError(
                f"{os.fspath(folder)} has no {DIGESTS_FILE}: shardload did not save it, or it was damaged"
            ) from error
        except SourceError as error:
            raise _bad_list(folder, error) from error
        body = {key: value for key, value in found.items() if key != "self"}
        if found.get("self") != _hash(_canonical(body)):
            raise _bad_list(folder, "its own digest does not match its content")
        return cls(_parse_files(body, folder))

    def check_names(self, folder: str | os.PathLike[str]) -> list[Damage]:
        """What is missing, unexpected or of another size, without reading any file.

        Raises:
            OSError: When a folder of the step cannot be listed.
        """
        return name_damage(self, scan(folder), step_name(folder))

    def _body(self) -> dict[str, Any]:
        files = {name: {"bytes": f.n_bytes, "units": list(f.units)} for name, f in self.files.items()}
        return {"version": 1, "algorithm": "xxh3_64", "unit_bytes": UNIT_BYTES, "files": files}


def step_name(folder: str | os.PathLike[str]) -> str:
    """The name of a step's folder, symbolic links resolved."""
    return Path(os.path.realpath(folder)).name


def hasher() -> Any:
    """An xxh3-64 hash to feed."""
    import xxhash

    return xxhash.xxh3_64()


def _hash(data: bytes | memoryview) -> str:
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(data))


def _canonical(body: Mapping[str, Any]) -> bytes:
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def pieces_of(name: str, size: int) -> Iterator[DigestTask]:
    """A file of ``size`` bytes in pieces of at most `TASK_UNITS` units."""
    total = -(-size // UNIT_BYTES)
    for first in range(0, total, TASK_UNITS):
        yield DigestTask(name, first, min(TASK_UNITS, total - first))


def digest_piece(folder: str | os.PathLike[str], piece: DigestTask, size: int) -> list[str]:
    """The digest of each unit of a piece, reading a few units at a time."""
    path = Path(folder, piece.path)
    found: list[str] = []
    stop = min((piece.first + piece.count) * UNIT_BYTES, size)
    buffer = memoryview(bytearray(min(READ_UNITS * UNIT_BYTES, stop - piece.first * UNIT_BYTES)))
    with file_access.opened(path) as file:
        for start in range(piece.first * UNIT_BYTES, stop, READ_UNITS * UNIT_BYTES):
            block = buffer[: min(READ_UNITS * UNIT_BYTES, stop - start)]
            file.read_unchecked(block, start)
            found += [_hash(block[at : at + UNIT_BYTES]) for at in range(0, len(block), UNIT_BYTES)]
    return found


def name_damage(digests: Digests, tree: FileTree, step: str) -> list[Damage]:
    """Files that are missing, unexpected, or of another size than was saved."""
    damage = [
        Damage(name, f"is unexpected: {what}, which no step holds", None, step) for name, what in tree.others.items()
    ]
    for name, expected in digests.files.items():
        found = tree.files.get(name)
        if found is None and name not in tree.others:
            damage.append(Damage(name, "is missing", None, step))
        elif found is not None and found != expected.n_bytes:
            damage.append(size_damage(name, found, expected.n_bytes, step))
    unexpected = tree.files.keys() - digests.files.keys() - {DIGESTS_FILE}
    return damage + [
        Damage(name, "is unexpected: it was not saved with the step", None, step) for name in sorted(unexpected)
    ]


def size_damage(name: str, found: int, expected: int, step: str) -> Damage:
    """Describe a file whose size differs from what was saved."""
    verb = "was truncated" if found < expected else "has grown"
    return Damage(name, f"{verb}: it has {found} bytes, but was saved with {expected}", min(found, expected), step)


def flip_damage(name: str, first: int, last: int, step: str) -> Damage:
    """Describe a digest mismatch in bytes ``first`` to ``last`` of a file."""
    return Damage(
        name, f"is damaged: somewhere in the {last - first} bytes from there, it is not what was saved", first, step
    )


def _bad_list(folder: str | os.PathLike[str], why: str | SourceError) -> DamagedError:
    """What is wrong with ``digests.json``; a `SourceError` names the file already."""
    where = "" if isinstance(why, SourceError) else f"{Path(folder, DIGESTS_FILE)}: "
    return DamagedError(
        f"Step {step_name(folder)} is damaged: {where}{why}. Without its digests nothing in the step can be checked; "
        "restore an earlier step, or copy this one again"
    )


def _parse_files(body: Mapping[str, Any], folder: str | os.PathLike[str]) -> dict[str, FileDigest]:
    known = {"version": 1, "algorithm": "xxh3_64", "unit_bytes": UNIT_BYTES}
    for key, expected in known.items():
        if body.get(key) != expected:
            raise _bad_list(folder, f"{key} should be {expected!r}, but is {body.get(key)!r}")
    files = body.get("files")
    if not isinstance(files, dict):
        raise _bad_list(folder, "it lists no files")
    return {name: _parse_file(name, entry, folder) for name, entry in files.items()}


def _parse_file(name: str, entry: Any, folder: str | os.PathLike[str]) -> FileDigest:
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise _bad_list(folder, f"the path {name!r} leads out of the step's folder, or is not a path")
    size, units = (entry.get("bytes"), entry.get("units")) if isinstance(entry, dict) else (None, None)
    if type(size) is not int or size < 0 or not isinstance(units, list) or len(units) != -(-size // UNIT_BYTES):
        raise _bad_list(folder, f"the entry of {name!r} has no size, or not one digest per MiB of it")
    if not all(isinstance(unit, str) and _HEX.fullmatch(unit) for unit in units):
        raise _bad_list(folder, f"the entry of {name!r} contains something other than an xxh3-64 digest in hexadecimal")
    return FileDigest(size, tuple(units))
