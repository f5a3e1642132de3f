"""One checkpoint format into another, in bounded memory: what a user calls.

    source ─► model (abstract) ─► value of every variable: a view of a stored tensor          `source.py`
                                  variable ─► a view of a tensor of the target                 `targets.py`
              every file of the target without its values                                      `writers/`
              copy, one tensor after the other, noted in a journal       `writing.py`, `strided_copy.py`, `staging.py`
              what loading computes instead, a layer at a time, the same steps compute         `computing.py`
              read the result's headers as any reader would ─► flush ─► one rename

Both sides are views of the same variables, so every pair of formats is the same copy. Values keep their dtype and bits
unless another dtype is asked for.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from shardload.converting.plans import Plan
from shardload.converting.replace_target import check_description, check_free, check_shard
from shardload.converting.source import Source, open_source
from shardload.converting.staging import RESULT, ConversionFolder, home_of, staged
from shardload.converting.targets import TARGETS, Target, is_file_name, plan_for, shard_bytes_for, target_of
from shardload.converting.writing import write_all
from shardload.errors import DamagedError, SaveError, ShardloadError, SourceError, UsageError, WriteError
from shardload.hub import kerashub
from shardload.keras_bridge import abstraction
from shardload.loaders import open_manifest, spec_of
from shardload.loaders.registry import spec_named
from shardload.mapping import map_weights
from shardload.progress import Progress, Silent
from shardload.resolve import resolve
from shardload.steps import digests
from shardload.steps.listing import is_ours
from shardload.steps.save_errors import errno_of
from shardload.stores.fingerprint import Fingerprint
from shardload.typing import DTypeLike, PathLike
from shardload.units import dtype_name, parse_bytes

DEFAULT_HOST_MEMORY = 512 << 20
"""Bytes of tensors in memory at once. Most tensors of a 9B model then pass in one piece; more is not faster."""
_COPIES = 4
"""Of a block, at the worst moment: as read, joined from chunks or cast, in the target's order."""
LEAST_HOST_MEMORY = 256 << 10


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
    """What the target lacks of the source, or has in another form."""

    def to_json(self) -> dict[str, Any]:
        """As one object."""
        return asdict(self)


def convert(
    src: PathLike,
    dst: PathLike,
    *,
    to: Target | None = None,
    dtype: DTypeLike | None = None,
    host_memory_bytes: int | str = DEFAULT_HOST_MEMORY,
    max_shard_bytes: int | str | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
    ignore_config: Sequence[str] = (),
) -> ConvertReport:
    """Write a checkpoint in another format, tensor by tensor.

    A conversion that was interrupted goes on where it stopped when it is started again. The target appears under its
    name only when it is complete and flushed to disk.

    Args:
        src: Anything `shardload.load` takes that describes its model.
        dst: What to make: a folder, a file that ends in ``.weights.h5``, or one that ends in ``.weights.json`` with its
            shards.
        to: ``"h5"`` (a KerasHub preset, or Keras' files), ``"safetensors"`` (a Hugging Face folder) or ``"orbax"``;
            needed unless ``dst`` ends like one of Keras' files.
        dtype: Dtype of the floating-point tensors; each keeps its own by default, and what is decoded (GGUF) or
            computed has the one `shardload.load` gives it.
        host_memory_bytes: Bytes of tensors in memory at once, or text like ``"512MiB"``.
        max_shard_bytes: Most bytes of tensors in one file, or text like ``"2GiB"``; a larger tensor has a file of its
            own. 5 GB by default for safetensors, 5 GiB for ``.weights.json``; a preset is cut only where this is given.
        overwrite: Replace a checkpoint that has the name ``dst``.
        progress: Told how many bytes were written.
        ignore_config: As for `shardload.load`.

    Raises:
        UsageError: When an argument cannot be.
        SourceNotFoundError: When there is no ``src``.
        SourceError: When it contradicts itself or is damaged.
        MismatchError: When its tensors are not those of its model.
        UnsupportedError: When the target format cannot hold it.
        WriteError: When ``dst`` is there already, or cannot be written.
    """
    began = time.monotonic()
    if not os.fspath(dst):
        raise UsageError("The target's name is empty. Say what to make: a folder, or NAME.weights.h5")
    target = Path(os.path.abspath(dst))  # noqa: PTH100  resolve() would follow a link that is to be replaced
    kind = target_of(target, to)
    name = None if dtype is None else str(dtype_name(dtype))
    block_bytes = _block_bytes(host_memory_bytes)
    shard_bytes = shard_bytes_for(target, kind, max_shard_bytes)
    check_free(target, folder=not is_file_name(target), overwrite=overwrite)
    found = resolve(src)
    source = open_source(found.path, dtype=name, ignore_config=ignore_config)
    _refuse_itself(Path(source.manifest.source), target)
    files = Fingerprint.of(source.manifest.files)
    plan = plan_for(source, target, kind, dtype=name, shard_bytes=shard_bytes)
    _check_others(plan, target, overwrite=overwrite)
    progress = progress or Silent()
    _check_digests(source, progress)
    with staged(target, folder=not is_file_name(target), overwrite=overwrite) as staging:
        try:
            resumed = write_all(source, plan, staging, block_bytes=block_bytes, progress=progress)
            files.check()
            _finish(source, plan, staging, overwrite=overwrite)
        except BaseException as error:
            raise _explained(error, staging) from error
        finally:
            progress.stop()
    notes = (*((found.note,) if found.note else ()), *source.notes, *plan.notes)
    seconds = time.monotonic() - began
    return ConvertReport(
        source.manifest.source, str(target), plan.format, len(plan.tensors), plan.nbytes, resumed, seconds, notes
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
        raise UsageError(
            f"Source {source} and target {target} overlap: one contains the other. Choose a target outside the source"
        )


def _check_others(plan: Plan, target: Path, *, overwrite: bool) -> None:
    """Files that go beside the target."""
    for name, content in plan.beside.items():
        check_description(target.with_name(name), content, overwrite=overwrite)
    for name in plan.shards:
        check_shard(target.with_name(name), home_of(target) / RESULT / name, overwrite=overwrite)


def _check_digests(source: Source, progress: Progress) -> None:
    """A step that was saved with digests is compared with them first: a flipped bit shall not be copied."""
    path = Path(source.manifest.source)
    if spec_of(source.manifest).is_step and is_ours(path):
        progress.start(sum(source.manifest.files.values()), "Verifying")
        if damage := digests.verify(path, progress=progress.advance):
            raise DamagedError(f"{path} is damaged: {damage[0]}. See: shardload verify {path}")


def _finish(source: Source, plan: Plan, staging: ConversionFolder, *, overwrite: bool) -> None:
    """Digests, a look at the result as any reader would take it, and the rename."""
    beside = {}
    for name, content in plan.beside.items():
        made = staging.result.with_name(f"beside-{name}")
        made.write_bytes(content)
        beside[made] = staging.target.with_name(name)
    if spec_named(plan.format).is_step:
        digests.Digests.compute(staging.result).write(staging.result)
    opened = staging.result / staging.target.name if plan.shards else staging.result
    _check_result(plan, opened, described=bool(beside))
    publish = staging.publish_index if plan.shards else staging.publish
    publish(beside=beside, overwrite=overwrite)


def _check_result(plan: Plan, result: Path, *, described: bool) -> None:
    """Open what was written: every tensor is there, and they are those of a model built from its own description."""
    manifest = open_manifest(result, format=plan.format)
    held = {t.name: (t.shape, t.dtype) for t in manifest.tensors.values()}
    wanted = {c.wanted.name: (c.wanted.shape, c.wanted.dtype) for c in plan.copies}
    if held != wanted:
        name = next(n for n in {**held, **wanted} if held.get(n) != wanted.get(n))
        raise SourceError(f"{result}: tensor {name!r} reads back as {held.get(name)}, but is {wanted.get(name)}")
    if described:  # a file alone builds no model
        return
    with abstraction.abstract():
        model = kerashub.build_model(manifest)
    mapping = map_weights(model, manifest)
    computed = mapping.computed and not spec_of(manifest).is_hugging_face  # there by KerasHub's converter, as from any
    if mapping.missing or mapping.mismatched or computed or mapping.unused:
        raise SourceError(
            f"{result}: the model built from it does not fit its tensors: "
            f"{[*mapping.missing, *map(str, mapping.mismatched), *mapping.unused][:3]}"
        )


def _explained(error: BaseException, staging: ConversionFolder) -> BaseException:
    """The same error, or the one to raise in its place, saying what is left and how to go on."""
    target = staging.target
    number = errno_of(error) if isinstance(error, Exception) else None
    if isinstance(error, SaveError) or not isinstance(error, ShardloadError):
        if number in (errno.ENOSPC, errno.EDQUOT):  # HDF5 has it in the text of a RuntimeError
            error = WriteError(f"Cannot write {target}: the disk is full. Make room.")
        elif isinstance(error, OSError):
            why = str(error.strerror or error) if number is None else os.strerror(number)
            error = WriteError(f"Cannot write {target}: {why}.")
    if staging.kept():
        error.add_note(
            f"What was done so far is in {home_of(target)}: the same conversion started again goes on from there; "
            "remove the folder to give up."
        )
    return error


__all__ = ["DEFAULT_HOST_MEMORY", "TARGETS", "ConvertReport", "Target", "convert"]
