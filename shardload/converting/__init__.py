"""One checkpoint format into another, in bounded memory: what a user calls.

    source ─► model (abstract) ─► value of every variable: a view of a stored tensor          `source.py`
                                  variable ─► a view of a tensor of the target                 `targets.py`
              every file of the target without its values                                      `shardload.writers`
              copy, one tensor after the other, noted in a journal                             `moving.py`, `staging.py`
              read the result's headers as any reader would ─► flush ─► one rename

Both sides are views of the same variables, so every pair of formats is the same copy. Values keep their dtype and bits
unless another dtype is asked for.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardload import _hub, abstraction
from shardload._fingerprint import Fingerprint
from shardload.converting.moving import PieceWriter, move, reader_of, reader_of_value
from shardload.converting.source import Source, open_source
from shardload.converting.staging import Staging, digest, exists, home_of, staged
from shardload.converting.targets import TARGETS, Copy, Plan, Target, plan_for, target_of
from shardload.dtypes import dtype_name
from shardload.errors import DamagedError, SaveError, ShardloadError, SourceError, UsageError, WriteError
from shardload.loaders import open_manifest
from shardload.manifest import View
from shardload.names import map_weights
from shardload.progress import Progress, Silent
from shardload.resolve import resolve
from shardload.steps import digests
from shardload.steps._failures import errno_of
from shardload.steps.listing import is_ours
from shardload.units import format_bytes, parse_bytes
from shardload.writers import Place

DEFAULT_HOST_MEMORY = 512 << 20
"""Bytes of tensors in memory at once. Most tensors of a 9B model then pass in one piece; more is not faster."""
_COPIES = 4
"""Of a block, at the worst moment: as read, joined from chunks or cast, in the target's order."""
LEAST_HOST_MEMORY = 256 << 10
_SPARE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ConvertReport:
    """The account of one conversion."""

    source: str
    target: str
    format: str
    """Of the target, as `shardload.inspect` calls it."""
    tensors: int
    n_bytes: int
    """Of all tensors as written."""
    resumed: int
    """Tensors that an interrupted run had copied already."""
    seconds: float
    notes: tuple[str, ...]
    """Whatever of the source is not in the target, or not as it was."""

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


def convert(
    src: str | os.PathLike[str],
    dst: str | os.PathLike[str],
    *,
    to: Target | None = None,
    dtype: Any = None,
    host_memory_bytes: int | str = DEFAULT_HOST_MEMORY,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConvertReport:
    """Write a checkpoint in another format, tensor by tensor.

    A conversion that was interrupted goes on where it stopped when it is started again. The target appears under its
    name only when it is complete and flushed to disk.

    Args:
        src: Anything `shardload.load` takes that describes its model, except GGUF.
        dst: What to make: a folder, or a file that ends in ``.weights.h5``.
        to: ``"h5"`` (a KerasHub preset, or one file), ``"safetensors"`` (a Hugging Face folder) or ``"orbax"``; needed
            unless ``dst`` ends in ``.weights.h5``.
        dtype: Dtype of the floating-point tensors; each keeps its own by default.
        host_memory_bytes: Bytes of tensors in memory at once, or text like ``"512MiB"``.
        overwrite: Replace what has the name ``dst``.
        progress: Told how many bytes were written.

    Raises:
        UsageError: When an argument cannot be.
        SourceNotFoundError: When there is no ``src``.
        SourceError: When it contradicts itself or is damaged.
        MismatchError: When its tensors are not those of its model.
        UnsupportedError: When the target format cannot hold it.
        WriteError: When ``dst`` is there already, or cannot be written.
    """
    began = time.monotonic()
    target = Path(os.path.abspath(dst))  # noqa: PTH100  resolve() would follow a link that is to be replaced
    kind = target_of(target, to)
    name = None if dtype is None else str(dtype_name(dtype))
    block_bytes = _block_bytes(host_memory_bytes)
    if os.path.lexists(target) and not overwrite:
        raise exists(target)
    found = resolve(src)
    source = open_source(found.path)
    _refuse_itself(Path(source.manifest.source), target)
    files = Fingerprint.of(source.manifest.files)
    plan = plan_for(source, target, kind, dtype=name)
    if not overwrite:
        _refuse_others(plan, target)
    progress = progress or Silent()
    _check_digests(source, progress)
    with staged(target, overwrite=overwrite) as staging:
        try:
            resumed = _write(source, plan, staging, block_bytes=block_bytes, progress=progress)
            files.check()
            _finish(source, plan, staging, overwrite=overwrite)
        except BaseException as error:
            raise _explained(error, target) from error
        finally:
            progress.stop()
    notes = (*((found.note,) if found.note else ()), *source.notes, *plan.notes)
    seconds = time.monotonic() - began
    return ConvertReport(
        source.manifest.source, str(target), plan.format, len(plan.copies), plan.nbytes, resumed, seconds, notes
    )


def _block_bytes(host_memory_bytes: int | str) -> int:
    try:
        found = parse_bytes(host_memory_bytes)
    except ValueError as error:
        raise UsageError(f"host_memory_bytes: {error}") from error
    if found < LEAST_HOST_MEMORY:
        raise UsageError(
            f"host_memory_bytes should be at least {LEAST_HOST_MEMORY >> 10}KiB, but is {host_memory_bytes}"
        )
    return found // _COPIES


def _refuse_itself(source: Path, target: Path) -> None:
    one, two = source.resolve(), target.resolve()
    if one == two or two in one.parents or one in two.parents:
        raise UsageError(f"{target} and the source {source} lie in each other. Choose a place beside it")


def _refuse_others(plan: Plan, target: Path) -> None:
    """A file that goes with the target may be there already, but not with other content."""
    for name, content in plan.beside.items():
        path = target.with_name(name)
        if os.path.lexists(path) and not (path.is_file() and path.read_bytes() == content):
            raise exists(path)


def _check_digests(source: Source, progress: Progress) -> None:
    """A step that was saved with digests is compared with them first: a flipped bit shall not be copied."""
    path = Path(source.manifest.source)
    if source.manifest.format == "orbax" and is_ours(path):
        progress.start(sum(source.manifest.files.values()), "Verifying")
        if damage := digests.verify(path, progress=progress.advance):
            raise DamagedError(f"{path} is damaged: {damage[0]}. See: shardload verify {path}")


def _write(source: Source, plan: Plan, staging: Staging, *, block_bytes: int, progress: Progress) -> int:
    """Make the files, copy what is not there yet; returns how many tensors were."""
    staging.begin(_identity(source, plan, staging.target))
    if staging.places is None:
        _check_room(staging.target, plan)
        staging.note_places(plan.make(staging.result))
    assert staging.places is not None
    places = {place.name: place for place in staging.places}
    progress.start(plan.nbytes, f"Converting to {staging.target.name}")
    resumed = 0
    for copy in plan.copies:
        place = places[copy.wanted.name]
        item_bytes = copy.wanted.dtype.itemsize
        known = staging.done.get(copy.wanted.name)
        if known is not None and digest(staging.result, place, item_bytes) == known:
            resumed += 1
            progress.advance(copy.wanted.nbytes)
            continue
        _copy(copy, place, staging.result, block_bytes=block_bytes, progress=progress)
        staging.note_done(copy.wanted.name, digest(staging.result, place, item_bytes))
    return resumed


def _copy(copy: Copy, place: Place, root: Path, *, block_bytes: int, progress: Progress) -> None:
    value, dtype = copy.value, copy.wanted.dtype
    if value.tensor is not None and value.view is not None:
        read, view = reader_of(value.tensor, dtype), value.view
        item_bytes = max(dtype.itemsize, value.tensor.dtype.itemsize)
    else:
        assert value.array is not None
        read, item_bytes = reader_of_value(value.array, dtype), dtype.itemsize
        strides = tuple(s // max(1, value.array.itemsize) for s in _dense(value.array.shape, value.array.itemsize))
        view = View("", 0, value.array.shape, strides)
    with PieceWriter(root, place, written=progress.advance) as writer:
        move(read, writer.write, view, copy.view, block_elements=max(1, block_bytes // item_bytes))


def _identity(source: Source, plan: Plan, target: Path) -> str:
    """A digest of everything that decides what is written."""
    files = [
        (path, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
        for path in source.manifest.files
        for s in [Path(path).stat()]
    ]
    copies = [
        (c.wanted.name, c.wanted.shape, c.wanted.dtype.name, str(c.view), c.value.view and str(c.value.view))
        for c in plan.copies
    ]
    text = json.dumps([1, source.manifest.source, files, str(target), plan.format, copies])
    return hashlib.sha256(text.encode()).hexdigest()


def _check_room(target: Path, plan: Plan) -> None:
    free = shutil.disk_usage(target.parent).free
    if free < plan.nbytes + _SPARE_BYTES:
        raise WriteError(
            f"{target.name} needs {format_bytes(plan.nbytes)} and {format_bytes(_SPARE_BYTES)} to spare, but "
            f"{target.parent} has {format_bytes(free)} free. Make room, or choose another place."
        )


def _finish(source: Source, plan: Plan, staging: Staging, *, overwrite: bool) -> None:
    """Digests, a look at the result as any reader would take it, and the rename."""
    beside = {}
    for name, content in plan.beside.items():
        made = staging.result.with_name(name)
        made.write_bytes(content)
        beside[made] = staging.target.with_name(name)
    if plan.format == "orbax":
        digests.Digests.compute(staging.result).write(staging.result)
    _check_result(source, plan, staging.result, described=next(iter(beside), None))
    staging.publish(beside=beside, overwrite=overwrite)


def _check_result(source: Source, plan: Plan, result: Path, *, described: Path | None) -> None:
    """Open what was written: every tensor is there, and they are those of a model built from its own description."""
    manifest = open_manifest(result, format=plan.format)
    held = {t.name: (t.shape, t.dtype) for t in manifest.tensors.values()}
    wanted = {c.wanted.name: (c.wanted.shape, c.wanted.dtype) for c in plan.copies}
    if held != wanted:
        name = next(n for n in {**held, **wanted} if held.get(n) != wanted.get(n))
        raise SourceError(f"{result}: tensor {name!r} reads back as {held.get(name)}, but is {wanted.get(name)}")
    if described is not None:
        return
    with abstraction.abstract():
        model = _hub.build_model(manifest)
    mapping = map_weights(model, manifest)
    if mapping.missing or mapping.mismatched or mapping.computed or mapping.unused:
        raise SourceError(
            f"{result}: the model built from it does not fit its tensors: "
            f"{[*mapping.missing, *map(str, mapping.mismatched), *mapping.unused][:3]}"
        )


def _explained(error: BaseException, target: Path) -> BaseException:
    """The same error, or the one to raise in its place, saying what is left and how to go on."""
    number = errno_of(error) if isinstance(error, Exception) else None
    if isinstance(error, SaveError) or not isinstance(error, ShardloadError):
        if number in (errno.ENOSPC, errno.EDQUOT):  # HDF5 has it in the text of a RuntimeError
            error = WriteError(f"Cannot write {target}: the disk is full. Make room.")
        elif isinstance(error, OSError):
            why = str(error.strerror or error) if number is None else os.strerror(number)
            error = WriteError(f"Cannot write {target}: {why}.")
    if home_of(target).exists():
        error.add_note(
            f"What was done so far is in {home_of(target)}: the same conversion started again goes on from there; "
            "remove the folder to give up."
        )
    return error


def _dense(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides, step = [], item
    for n in reversed(shape):
        strides.append(step)
        step *= n
    return tuple(reversed(strides))


__all__ = ["DEFAULT_HOST_MEMORY", "TARGETS", "ConvertReport", "Target", "convert"]
