"""Compute, write and read the digests (hashes) of a step's files, and compare them with the files on disk.

    7/pytree/ocdbt.process_0/d/ab12    |--1 MiB--|--1 MiB--|--1 MiB--|-rest-|
    7/shardload/digests.json            "9f3c…"   "01aa…"   "77de…"   "c0de…"   plus each size, and its own digest

``digests.json`` is written last and read first. Its paths are not trusted: one that leads out of the step's folder is
refused. xxh3 detects accidents, such as flipped bits, but not tampering: it is not a cryptographic hash.

A step consists of regular files and folders only. `scan` follows no symbolic link; it returns links, pipes and devices
separately, and its caller refuses them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardload.errors import DamagedError, SourceError, SourceNotFoundError
from shardload.loaders.orbax.loader import OWN_FOLDER
from shardload.stores import json_files
from shardload.stores.local import located
from shardload.stores.location import Location, is_litter
from shardload.stores.store import UNIT_BYTES
from shardload.units import exact_bytes

DIGESTS_FILE = f"{OWN_FOLDER}/digests.json"

READ_UNITS = 8
"""How many MiB are read at once for hashing: enough to amortize the system call, few enough to stay in the cache."""
TASK_UNITS = 64
"""Most MiB that a thread hashes as one task: several threads share a larger file, a smaller file is one task."""
THREADS = 4
"""Number of threads that read and hash: one core could hash tens of GiB/s, but would often wait for reads."""

_SYNC_THREADS = 8
"""Number of threads that call `fsync` at once, so that the disk can write in the order that it prefers."""
_FORMAT: dict[str, Any] = {"version": 1, "algorithm": "xxh3_64", "unit_bytes": UNIT_BYTES}
_HEX = re.compile(r"[0-9a-f]{16}")


@dataclass(frozen=True, slots=True)
class FileDigest:
    """The size and the digests of one file at the time it was saved."""

    n_bytes: int
    units: tuple[str, ...]
    """xxh3-64 digest of each MiB (unit), in hexadecimal; the last unit may be shorter. An empty file has no units."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One defect of a step on disk: which file, what is wrong with it, and from which byte on."""

    path: str
    """The file, relative to the step's folder."""
    what: str
    """What is wrong with the file, as a phrase to print after the file's name: ``is missing``."""
    offset: int | None = None
    """Byte offset in the file at which the damage begins; ``None`` if the whole file is damaged."""
    step: str = ""
    """The name of the step's folder."""

    def __str__(self) -> str:
        where = "" if self.offset is None else f" from byte {self.offset}"
        return f"step {self.step}: {self.path}{where} {self.what}"


@dataclass(frozen=True, slots=True)
class DigestTask:
    """Work for one thread: hash the units (MiB) of a file from number ``first`` to ``first + count - 1``."""

    path: str
    first: int
    count: int


@dataclass(frozen=True, slots=True)
class Digests:
    """The digests of all files of a step except ``shardload/digests.json`` itself."""

    files: Mapping[str, FileDigest]
    """Digests of each file, by the file's path relative to the step's folder, separated by ``/``."""

    @classmethod
    def compute(cls, folder: str | os.PathLike[str], *, of: Callable[[str], bool] | None = None) -> Digests:
        """Read the files in ``folder`` and return their digests; ``of``, a function of the name, selects the files."""
        where, tree = located(folder), scan(folder)
        for name, what in tree.others.items():
            raise SourceError(f"{os.fspath(folder)}/{name} is {what}; a step can contain regular files only")
        sizes = {name: size for name, size in tree.files.items() if is_saved(name) and (of is None or of(name))}
        pieces = [piece for name, size in sizes.items() for piece in pieces_of(name, size)]
        units: dict[str, list[str]] = {name: [] for name in sizes}
        with ThreadPoolExecutor(THREADS, thread_name_prefix="shardload-digest") as pool:
            # map keeps the order, so the pieces of a file arrive in file order
            results = pool.map(lambda p: digest_piece(where, p, sizes[p.path]), pieces)
            for piece, found in zip(pieces, results, strict=True):
                units[piece.path] += found
        return cls({name: FileDigest(size, tuple(units[name])) for name, size in sizes.items()})

    def write(self, folder: str | os.PathLike[str]) -> None:
        """Write ``shardload/digests.json`` into the folder of a step, atomically, and flush it to disk."""
        target = Path(folder, DIGESTS_FILE)
        target.parent.mkdir(exist_ok=True)
        files = {name: {"bytes": f.n_bytes, "units": list(f.units)} for name, f in self.files.items()}
        body = _FORMAT | {"files": files}
        draft = target.with_suffix(".tmp")
        draft.write_bytes(canonical_json(body | {"self": hash_of(canonical_json(body))}))
        # Flush before the rename: after a crash, some file systems keep the new name with the old, empty content.
        sync(draft)
        draft.replace(target)

    @classmethod
    def read(cls, folder: str | os.PathLike[str] | Location) -> Digests:
        """Read ``digests.json`` of a step, and check its own digest. A missing file raises `SourceNotFoundError`."""
        path = located(folder) / DIGESTS_FILE
        # The check of all names reports links as well, but only after this file was read through one.
        if path.is_link() or path.parent.is_link():
            raise DamagedError(f"Step {step_name(folder)}: {path} is a symbolic link, which is not allowed in a step")
        try:
            found = json_files.read_object(path)
        except SourceNotFoundError as error:
            raise SourceNotFoundError(
                f"{folder} has no {DIGESTS_FILE}: shardload did not save it, or it was damaged"
            ) from error
        except SourceError as error:
            raise _bad_list(folder, error) from error
        body = {key: value for key, value in found.items() if key != "self"}
        if found.get("self") != hash_of(canonical_json(body)):
            raise _bad_list(folder, "its own digest does not match its content")
        for key, expected in _FORMAT.items():
            if body.get(key) != expected:
                raise _bad_list(folder, f"{key} is {body.get(key)!r}, expected {expected!r}")
        files = body.get("files")
        if not isinstance(files, dict):
            raise _bad_list(folder, "it lists no files")
        return cls({name: _parse_file(name, entry, folder) for name, entry in files.items()})

    def check_names(self, folder: str | os.PathLike[str]) -> list[Damage]:
        """Compare the files in ``folder`` with this list by name and size, without reading data; return all defects."""
        return name_damage(self, scan(folder), step_name(folder))


def is_saved(name: str) -> bool:
    """Whether digests cover a file: all but ``digests.json`` and the litter of file browsers, such as ``.DS_Store``."""
    return name != DIGESTS_FILE and not is_litter(name)


def step_name(folder: str | os.PathLike[str] | Location) -> str:
    """Return the name of a step's folder; of a symbolic link, the name of the folder that it leads to."""
    return located(folder).resolved().name


def hasher() -> Any:
    """Return a new xxh3-64 hash object."""
    import xxhash

    return xxhash.xxh3_64()


def hash_of(data: bytes | memoryview) -> str:
    """Return the xxh3-64 digest of some bytes, in hexadecimal."""
    import xxhash

    return str(xxhash.xxh3_64_hexdigest(data))


def canonical_json(body: Mapping[str, Any]) -> bytes:
    """Encode an object as JSON such that equal objects give equal bytes, for their digest."""
    # ASCII: a file name that is not UTF-8 reaches Python with lone surrogates, which only escapes can represent.
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode("ascii")


def pieces_of(name: str, size: int) -> Iterator[DigestTask]:
    """Split the hashing of a file of ``size`` bytes into tasks for several threads, of up to `TASK_UNITS` MiB each."""
    total = -(-size // UNIT_BYTES)
    for first in range(0, total, TASK_UNITS):
        yield DigestTask(name, first, min(TASK_UNITS, total - first))


def digest_piece(folder: Location, piece: DigestTask, size: int) -> list[str]:
    """Read the MiB of a task, `READ_UNITS` at a time, and return one digest for each."""
    found: list[str] = []
    stop = min((piece.first + piece.count) * UNIT_BYTES, size)
    # One buffer per task: all threads together need 32 MiB, however large the files are.
    buffer = memoryview(bytearray(min(READ_UNITS * UNIT_BYTES, stop - piece.first * UNIT_BYTES)))
    with closing((folder / piece.path).open()) as file:
        for start in range(piece.first * UNIT_BYTES, stop, READ_UNITS * UNIT_BYTES):
            block = buffer[: min(READ_UNITS * UNIT_BYTES, stop - start)]
            # Unchecked, because `read_into` of a remote file raises at the first damaged MiB, and all are listed.
            file.read_unchecked(block, start)
            found += [hash_of(block[at : at + UNIT_BYTES]) for at in range(0, len(block), UNIT_BYTES)]
    return found


def name_damage(digests: Digests, tree: FileTree, step: str) -> list[Damage]:
    """Return the files of a step that are missing, unexpected, or of another size than in the step's digests."""
    damage = [
        Damage(name, f"is unexpected: {what} is not allowed in a step", None, step)
        for name, what in tree.others.items()
    ]
    for name, expected in digests.files.items():
        found = tree.files.get(name)
        # A file that was replaced by a link is in the list already; it is not missing as well.
        if found is None and name not in tree.others:
            damage.append(Damage(name, "is missing", None, step))
        elif found is not None and found != expected.n_bytes:
            damage.append(size_damage(name, found, expected.n_bytes, step))
    unexpected = filter(is_saved, tree.files.keys() - digests.files.keys())
    return damage + [
        Damage(name, "is unexpected: it was not saved with the step", None, step) for name in sorted(unexpected)
    ]


def size_damage(name: str, found: int, expected: int, step: str) -> Damage:
    """Describe the defect of a file that has ``found`` bytes now, but was saved with ``expected`` bytes."""
    verb = "was truncated" if found < expected else "has grown"
    what = f"{verb}: it has {exact_bytes(found)}, but was saved with {exact_bytes(expected)}"
    return Damage(name, what, min(found, expected), step)


def flip_damage(name: str, first: int, last: int, step: str) -> Damage:
    """Describe the defect of a file whose bytes from ``first`` to before ``last`` do not match their digest."""
    return Damage(name, f"is damaged: the digest does not match the next {exact_bytes(last - first)}", first, step)


def _bad_list(folder: str | os.PathLike[str] | Location, why: str | SourceError) -> DamagedError:
    """Return the error to raise for an invalid ``digests.json``. If ``why`` is a `SourceError`, it names the file."""
    where = "" if isinstance(why, SourceError) else f"{located(folder) / DIGESTS_FILE}: "
    return DamagedError(
        f"Step {step_name(folder)} is damaged: {where}{why}. Without its digests nothing in the step can be checked; "
        "restore an earlier step, or copy this one again"
    )


def _parse_file(name: str, entry: Any, folder: str | os.PathLike[str] | Location) -> FileDigest:
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise _bad_list(folder, f"the path {name!r} leads out of the step's folder, or is not a path")
    size, units = (entry.get("bytes"), entry.get("units")) if isinstance(entry, dict) else (None, None)
    # Not isinstance: JSON's true is an int in Python. The number of units must match, as readers index by unit.
    if type(size) is not int or size < 0 or not isinstance(units, list) or len(units) != -(-size // UNIT_BYTES):
        raise _bad_list(folder, f"the entry of {name!r} needs a size and one digest per MiB")
    if not all(isinstance(unit, str) and _HEX.fullmatch(unit) for unit in units):
        raise _bad_list(folder, f"the entry of {name!r} contains a digest that is not xxh3-64 in hexadecimal")
    return FileDigest(size, tuple(units))


@dataclass(frozen=True, slots=True)
class FileTree:
    """Everything in a folder and its subfolders; names are relative to the folder, separated by ``/``."""

    files: dict[str, int]
    """Regular files and their sizes in bytes."""
    folders: tuple[str, ...]
    """Subfolders, parents first; without the folder itself."""
    others: dict[str, str]
    """Symbolic links, pipes, sockets and devices, each with a description of its kind."""

    @property
    def n_bytes(self) -> int:
        """The total size of all files."""
        return sum(self.files.values())


def scan(folder: str | os.PathLike[str]) -> FileTree:
    """List everything below ``folder``; raise if a folder cannot be listed."""
    files: dict[str, int] = {}
    folders: list[str] = []
    others: dict[str, str] = {}
    waiting = [""]
    while waiting:
        inside = waiting.pop()
        # Not os.walk: it silently skips folders that it cannot list.
        with os.scandir(os.path.join(folder, inside)) as entries:  # noqa: PTH118
            for entry in sorted(entries, key=lambda e: e.name):
                name = f"{inside}/{entry.name}" if inside else entry.name
                if entry.is_symlink():
                    others[name] = "a symbolic link"
                elif entry.is_dir(follow_symlinks=False):
                    folders.append(name)
                    waiting.append(name)
                elif entry.is_file(follow_symlinks=False):
                    files[name] = entry.stat(follow_symlinks=False).st_size
                else:
                    others[name] = "a pipe, socket or device"
    return FileTree(dict(sorted(files.items())), tuple(folders), others)


def is_empty(path: Path) -> bool:
    """Whether ``path`` is an empty folder and no symbolic link, so that a rename may replace it."""
    return path.is_dir() and not path.is_symlink() and next(path.iterdir(), None) is None


def sync(path: str | os.PathLike[str]) -> None:
    """Flush a file, or a folder's names, to disk. If this raises, data is not safe, even if a later call succeeds."""
    # A folder can only be opened for reading, and fsync accepts such a descriptor for files, too.
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sync_files(folder: Path, names: Iterable[str]) -> None:
    """Flush the named files of a folder to disk, several at once."""
    with ThreadPoolExecutor(_SYNC_THREADS, thread_name_prefix="shardload-sync") as pool:
        # list: map raises the error of a call only when its result is taken.
        list(pool.map(sync, [folder / name for name in names]))


def sync_all(folder: Path) -> None:
    """Flush all below ``folder``, and last ``folder`` itself, to disk: no name may be there before its content."""
    tree = scan(folder)
    sync_files(folder, tree.files)
    for name in reversed(tree.folders):
        sync(folder / name)
    sync(folder)
