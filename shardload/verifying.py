"""Check that a checkpoint can be read completely and, if it has digests, that its bytes match them.

a shardload step         every file against its digests                 verified
a folder of steps        each of its steps
any other checkpoint     headers checked, every tensor read to its end  readable: no digests to compare with
... on a hub             whole files against the hub's SHA-256          verified, if the hub tells that of each file
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from shardload.errors import LimitError, MissingExtraError, ShardloadError, TransferError, UnsupportedError
from shardload.loaders import open_manifest
from shardload.manifest import Decoded, EncodedRows, Extent, Tensor, UnreadableRows, partial_text
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.reports import printable
from shardload.reports.markup import ShownAsText
from shardload.resolve import resolve
from shardload.runs import digests
from shardload.runs.listing import is_ours, list_steps, remote_steps
from shardload.runs.step import STEP_FILE, StepInfo, StepRecord
from shardload.stores.location import Location
from shardload.stores.store import PendingBytes, RemoteFile
from shardload.transfer.read_tensor import read_rows, row_ranges, stored_chunks
from shardload.units import format_bytes, plural

_READ_BYTES = 8 << 20
"""Most bytes of a tensor in memory at once: verifying reads them only to see that they can be read."""
_AHEAD = 4
"""Most such pieces of a file that are requested at once, to be compared with the SHA-256 of a hub."""
_SHOWN = 20
"""Most problems, and most notes, that a `Verdict` lists; it states how many more there are."""


@dataclass(frozen=True, slots=True)
class Verdict(ShownAsText):
    """The result of verifying a checkpoint."""

    path: str
    verdict: Literal["verified", "readable", "damaged"]
    """``verified``: all bytes match their digests. ``readable``: complete and well-formed, but there are no digests.
    ``damaged``: bytes are missing or wrong."""
    tensors: int | None
    """Number of tensors that were read; ``None`` if whole files were compared with their digests instead."""
    n_bytes: int
    problems: tuple[str, ...]
    left_out: int = 0
    """Number of the model's weights that the checkpoint, a partial step, does not store."""
    notes: tuple[str, ...] = ()
    """Sentences on what could not be checked."""

    @property
    def is_good(self) -> bool:
        """Whether no damage was found: the verdict is ``verified`` or ``readable``."""
        return self.verdict != "damaged"

    def to_json(self) -> dict[str, Any]:
        """Return the verdict as a dict for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        what = format_bytes(self.n_bytes)
        what += "" if self.tensors is None else f", {plural(self.tensors, 'tensor')}"
        what += f", {partial_text(self.left_out)}" if self.left_out else ""
        found = {"readable": "no digests; all headers and sizes right"}.get(self.verdict, self.verdict)
        lines = (f"          {printable(text)}" for text in (*self.problems, *self.notes))
        return "\n".join((f"{found:9} {printable(self.path)} ({what})", *lines))


class Verdicts(ShownAsText, list[Verdict]):
    """Verdicts on all that was verified; ``str(verdicts)`` is what `shardload verify` prints."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def verify(source: str | os.PathLike[str], *, progress: ProgressLike = None) -> Verdicts:
    """Read a checkpoint, or all steps of a run, to the end.

    Raise `LimitError` if a limit of this process (files, memory) prevents reading: the checkpoint may be undamaged.
    """
    shown = as_progress(progress)
    try:
        return Verdicts(_verdicts(source, shown))
    except LimitError:
        raise
    except OSError as error:
        if limit := LimitError.explaining(error, f"verify {source}"):
            raise limit from error
        raise
    finally:
        shown.stop()


def _verdicts(source: str | os.PathLike[str], shown: Progress) -> list[Verdict]:
    resolved = resolve(source)
    if resolved.remote is not None:
        if not resolved.remote.exists():
            resolved.remote.open()  # raises: there is nothing to verify
        found = remote_steps(resolved.remote)
        return [_remote(info, shown) for info in found] or [_readable(resolved.remote, shown)]
    path = Path(resolved.path)
    if is_ours(path):
        return [_local(path, shown)]
    if steps := list_steps(path) if path.is_dir() else []:
        return [_local(info.path, shown) if info.ours else _readable(info.location, shown) for info in steps]
    return [_readable(resolved.location, shown)]


def _remote(info: StepInfo, shown: Progress) -> Verdict:
    if not info.ours:
        return _readable(info.location, shown)
    if info.remote is None:
        return Verdict(info.where, "damaged", None, info.n_bytes, (str(info.problems),))
    return _with_digests(info.remote, info.where, info.n_bytes, shown, left_out=info.recorded.left_out)


def _local(path: Path, shown: Progress) -> Verdict:
    found = _with_digests(path, str(path), _size(path), shown)
    has_record = found.is_good and (path / STEP_FILE).is_file()  # a converted step has none
    return replace(found, left_out=StepRecord.read(path).left_out) if has_record else found


def _with_digests(place: Any, name: str, n_bytes: int, shown: Progress, *, left_out: int = 0) -> Verdict:
    shown.start(n_bytes, f"Verifying {name}")
    problems = tuple(str(found) for found in digests.find_damage(place, progress=shown.advance))
    return Verdict(name, "damaged" if problems else "verified", None, n_bytes, _shortened(problems), left_out)


def _size(path: Path) -> int:
    """Return the size in bytes of a file, or the sum for all files in a folder."""
    files = path.rglob("*") if path.is_dir() else [path]
    return sum(p.stat().st_size for p in files if p.is_file())


def _readable(path: Location, shown: Progress) -> Verdict:
    try:
        manifest = open_manifest(path)
    # Not a checkpoint at all, a limit of this process, or a package that is missing: it may be whole.
    except (UnsupportedError, LimitError, MissingExtraError):
        raise
    except ShardloadError as error:
        if isinstance(error, TransferError) and path.store.is_remote:
            raise
        n_bytes = 0 if path.store.is_remote else _size(path.local_path())
        return Verdict(str(path), "damaged", None, n_bytes, (str(error),))
    size = sum(t.stored_bytes for t in manifest.tensors.values())
    shown.start(size, f"Verifying {path}")
    # Go on after a damaged tensor: the user wants to know of all of them.
    told = {file for file in manifest.files if file.store.sha256(file.key) is not None}
    problems = [problem for file in manifest.files if file in told and (problem := _differs(file, shown))]
    for tensor in manifest.tensors.values():
        if isinstance(tensor.storage, Extent) and tensor.storage.path in told:
            continue  # all bytes of the file were read
        try:
            for n_bytes in _read(tensor):
                shown.advance(n_bytes)
        except (LimitError, MissingExtraError):
            raise
        except (ShardloadError, OSError) as error:
            if isinstance(error, TransferError) and path.store.is_remote:
                raise  # a store that does not respond says nothing about the checkpoint
            if limit := LimitError.explaining(error, f"read {path}"):
                raise limit from error
            problems.append(f"tensor {tensor.name!r}: {error}")
    notes = tuple(
        f"tensor {name!r} has an unknown size, so it may be incomplete: {rows.why}"
        for name, tensor in manifest.tensors.items()
        if isinstance(tensor.storage, Decoded)
        and isinstance(rows := tensor.storage.reader, UnreadableRows)
        and not rows.is_size_known
    )
    counts, shortened = (len(manifest.tensors), size), _shortened(tuple(problems))
    good: Literal["verified", "readable"] = "verified" if told and len(told) == len(manifest.files) else "readable"
    return Verdict(str(path), "damaged" if problems else good, *counts, shortened, notes=_shortened(notes))


def _differs(path: Location, shown: Progress) -> str | None:
    """Read a file of a hub, and return how its SHA-256 differs from the hub's; ``None`` if it does not."""
    found, expected = hashlib.sha256(), path.store.sha256(path.key)
    with closing(path.open()) as opened:
        file, pending = cast("RemoteFile", opened), deque[PendingBytes]()
        for start in range(0, file.n_bytes + _AHEAD * _READ_BYTES, _READ_BYTES):
            if start < file.n_bytes:
                pending.append(file.begin(start, start + _READ_BYTES))
            if len(pending) == _AHEAD or (pending and start >= file.n_bytes):
                found.update(data := pending.popleft().result())
                shown.advance(len(data))
    if found.hexdigest() == expected:
        return None
    return f"the SHA-256 of {path} is {found.hexdigest()}, expected {expected}"


def _read(tensor: Tensor) -> Iterator[int]:
    """Read a tensor to its end, block by block; yield for each block how many bytes it has in the file."""
    if isinstance(tensor.storage, Decoded) and isinstance(rows := tensor.storage.reader, EncodedRows):
        yield from (stored.nbytes for stored in stored_chunks(rows, limit_bytes=_READ_BYTES))
        return
    for start, stop in row_ranges(tensor, limit_bytes=_READ_BYTES):
        read_rows(tensor, start, stop)
        # Stored bytes, in proportion to the rows: decoded rows have more bytes than the file.
        yield tensor.stored_bytes * stop // tensor.rows - tensor.stored_bytes * start // tensor.rows


def _shortened(problems: tuple[str, ...]) -> tuple[str, ...]:
    rest = len(problems) - _SHOWN
    return problems if rest <= 0 else (*problems[:_SHOWN], f"… and {rest} more")
