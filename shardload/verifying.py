"""Check that a checkpoint can be read completely and, if it has digests, that its bytes match them.

a shardload step         every file against its digests                 verified
a folder of steps        each of its steps
any other checkpoint     headers checked, every tensor read to its end  readable: no digests to compare with
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from shardload.errors import LimitError, MissingExtraError, ShardloadError, SourceNotFoundError, UnsupportedError
from shardload.loaders import open_manifest
from shardload.manifest import Decoded, EncodedRows, Manifest, Tensor, UnreadableRows
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.resolve import resolve
from shardload.runs import digests
from shardload.runs.listing import foreign, is_ours, list_steps
from shardload.runs.step import STEP_FILE, StepInfo, StepRecord
from shardload.stores.remote import location_of
from shardload.transfer.read_tensor import read_rows, row_ranges, stored_chunks

READ_BYTES = 8 << 20
"""Bytes read at once, then discarded."""
SHOWN = 20
"""Most problems, and notes, listed per checkpoint."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of verifying a checkpoint."""

    path: str
    verdict: Literal["verified", "readable", "damaged"]
    """``readable``: complete and well-formed, but without digests to compare with."""
    tensors: int | None
    """Number of tensors read; ``None`` if whole files were compared."""
    n_bytes: int
    problems: tuple[str, ...]
    left_out: int = 0
    """Number of weights that a partial step does not store."""
    notes: tuple[str, ...] = ()
    """What could not be checked."""

    @property
    def is_good(self) -> bool:
        """Whether no damage was found."""
        return self.verdict != "damaged"

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object."""
        return asdict(self)


def verify(source: str | os.PathLike[str], *, progress: ProgressLike = None) -> list[Verdict]:
    """Read a checkpoint, or all steps of a run, to the end.

    Args:
        source: A step's folder, a folder of steps, or any source that `shardload.load` takes.
        progress: As for `shardload.load`.

    Raises:
        SourceNotFoundError: When the source does not exist.
        UnsupportedError: When its format is unknown.
        LimitError: When a limit of this process keeps it from being read: it may be whole.
    """
    shown = as_progress(progress)
    try:
        return _verdicts(source, shown)
    except LimitError:
        raise
    except OSError as error:
        if limit := LimitError.explaining(error, f"verify {source}"):
            raise limit from error
        raise
    finally:
        shown.stop()


def _verdicts(source: str | os.PathLike[str], shown: Progress) -> list[Verdict]:
    located = location_of(source)
    if located is not None and located.store.is_remote:  # only steps are verified there
        if not (steps := list_steps(source)):
            raise SourceNotFoundError(f"{source} contains no steps, and only steps can be read from remote stores")
        return [_remote(info, shown) for info in steps]
    path = Path(resolve(source).path)
    if is_ours(path):
        return [_with_digests(path, shown)]
    if steps := list_steps(path) if path.is_dir() else []:
        return [_with_digests(info.path, shown) if info.ours else _readable(info.path, shown) for info in steps]
    return [_readable(path, shown)]


def _remote(info: StepInfo, shown: Progress) -> Verdict:
    if not info.ours:
        raise foreign(info.where)
    if info.remote is None:
        return Verdict(info.where, "damaged", None, info.n_bytes, (str(info.problems),))
    shown.start(info.n_bytes, f"Verifying {info.where}")
    problems = tuple(str(found) for found in digests.find_damage(info.remote, progress=shown.advance))
    verdict: Literal["verified", "damaged"] = "damaged" if problems else "verified"
    left_out = info.recorded.left_out
    return Verdict(info.where, verdict, None, info.n_bytes, _shortened(problems), left_out)


def _with_digests(path: Path, shown: Progress) -> Verdict:
    size = _size(path)
    shown.start(size, f"Verifying {path}")
    damage = digests.find_damage(path, progress=shown.advance)
    problems = tuple(str(found) for found in damage)
    verdict: Literal["verified", "damaged"] = "damaged" if problems else "verified"
    has_record = not problems and (path / STEP_FILE).is_file()  # a converted step has none
    left_out = StepRecord.read(path).left_out if has_record else 0
    return Verdict(str(path), verdict, None, size, _shortened(problems), left_out)


def _size(path: Path) -> int:
    """Return the bytes of a file, or of all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(p.stat().st_size for p in files if p.is_file())


def _readable(path: Path, shown: Progress) -> Verdict:
    try:
        manifest = open_manifest(str(path))
    except UnsupportedError:  # not a checkpoint at all, rather than a damaged one
        raise
    # A limit of this process, or a package that is missing: the checkpoint may be whole.
    except (LimitError, MissingExtraError):
        raise
    except ShardloadError as error:
        return Verdict(str(path), "damaged", None, _size(path), (str(error),))
    size = sum(t.stored_bytes for t in manifest.tensors.values())
    shown.start(size, f"Verifying {path}")
    # Go on after a damaged tensor: the user wants to know of all of them.
    problems = []
    for tensor in manifest.tensors.values():
        try:
            _read(tensor, shown)
        except (LimitError, MissingExtraError):
            raise
        except (ShardloadError, OSError) as error:
            if limit := LimitError.explaining(error, f"read {path}"):
                raise limit from error
            problems.append(f"tensor {tensor.name!r}: {error}")
    verdict: Literal["readable", "damaged"] = "damaged" if problems else "readable"
    notes = tuple(_without_known_size(manifest))
    return Verdict(
        str(path), verdict, len(manifest.tensors), size, _shortened(tuple(problems)), notes=_shortened(notes)
    )


def _without_known_size(manifest: Manifest) -> Iterator[str]:
    for name, tensor in manifest.tensors.items():
        match tensor.storage:
            case Decoded(UnreadableRows(why=why, is_size_known=False)):
                yield f"tensor {name!r} has an unknown size, so it may be incomplete: {why}"


def _read(tensor: Tensor, shown: Progress) -> None:
    if isinstance(tensor.storage, Decoded) and isinstance(rows := tensor.storage.reader, EncodedRows):
        for stored in stored_chunks(rows, limit_bytes=READ_BYTES):
            shown.advance(stored.nbytes)
        return
    for start, stop in row_ranges(tensor, limit_bytes=READ_BYTES):
        read_rows(tensor, start, stop)
        # Stored bytes, in proportion to the rows: decoded rows have more bytes than the file.
        shown.advance(tensor.stored_bytes * stop // tensor.rows - tensor.stored_bytes * start // tensor.rows)


def _shortened(problems: tuple[str, ...]) -> tuple[str, ...]:
    if len(problems) <= SHOWN:
        return problems
    return (*problems[:SHOWN], f"… and {len(problems) - SHOWN} more")
