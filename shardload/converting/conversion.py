"""Convert a checkpoint to another format in bounded memory.

Source and target are views of the same variables, so every pair of formats uses the same copy. Values keep their dtype
and bits unless another dtype is requested.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from shardload.converting import adapters, hugging_face_copy
from shardload.converting.checking import check_result
from shardload.converting.plans import ConversionPlan, ConvertReport
from shardload.converting.publishing import (
    ConversionFolder,
    check_free,
    check_others,
    explained,
    publish,
    staged,
)
from shardload.converting.source import Source, open_source
from shardload.converting.targets import (
    CONVERT_HOST_MEMORY,
    Target,
    block_bytes_of,
    is_file_name,
    plan_for,
    shard_bytes_for,
    target_of,
)
from shardload.converting.writing import write_all
from shardload.errors import (
    DamagedError,
    UsageError,
    suggests_arguments,
)
from shardload.hub import fidelity
from shardload.keras_bridge.lora import hidden, lora_layers
from shardload.loaders import open_manifest, spec_of
from shardload.loaders.registry import spec_named
from shardload.pipeline import arguments
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.resolve import resolve
from shardload.runs import digests
from shardload.runs.listing import is_ours
from shardload.stores.local import local_target, working_folder
from shardload.stores.location import Fingerprint
from shardload.typing import DTypeLike, PathLike
from shardload.units import check_kind, plain_dtype_name


@suggests_arguments
def convert(
    src: PathLike,
    dst: PathLike,
    *,
    to: Target | Literal["preset"] | None = None,
    dtype: DTypeLike | None = None,
    host_memory_bytes: int | str = CONVERT_HOST_MEMORY,
    max_shard_bytes: int | str | None = None,
    overwrite: bool = False,
    progress: ProgressLike = None,
    ignore: Sequence[str] = (),
    ignore_config: Sequence[str] = (),
    merge_lora: bool = False,
    base: PathLike | None = None,
) -> ConvertReport:
    """Write a checkpoint in another format, tensor by tensor.

    From Hugging Face to Hugging Face, it is a copy: all tensors and small files, whatever the model is.

    An interrupted conversion continues where it stopped when it is started again. The target appears under its
    name only when it is complete and flushed to disk.

    Args:
        src: Any source that `shardload.load` accepts and that describes its model.
        dst: Path of the target: a folder, a file that ends in ``.weights.h5``, or an index that ends in
            ``.weights.json``, with its shards.
        to: ``"preset"`` (a KerasHub preset), ``"h5"`` (the same, or Keras' files if ``dst`` ends like one),
            ``"safetensors"`` (a Hugging Face folder) or ``"orbax"``; required unless ``dst`` ends like one of Keras'
            files.
        dtype: Dtype of the floating-point tensors; by default each keeps its own, and decoded (GGUF) or computed
            tensors have the dtype that `shardload.load` gives them.
        host_memory_bytes: Bytes of tensors in memory at once, or text like ``"512MiB"``.
        max_shard_bytes: Most bytes of tensors per file, or text like ``"2GiB"``; a larger tensor gets its own file.
            5 GB by default for safetensors, 5 GiB for ``.weights.json``; a preset is split only if this is given.
        overwrite: Replace an existing checkpoint at ``dst``.
        progress: As for `shardload.load`.
        ignore: Tensors to leave out, as for `shardload.load`; of the base, if there is one. Of a copy, any tensors.
        ignore_config: As for `shardload.load`.
        merge_lora: Merge the factors of LoRA into the kernels, which is arithmetic: in float32, rounded once to the
            dtype of the kernel. A source with LoRA is refused otherwise, unless ``to`` is ``"orbax"``.
        base: For a partial step (``save_trainable_only``): the checkpoint with the other weights of its model.

    Raises:
        UsageError: When an argument is invalid.
        SourceNotFoundError: When ``src`` does not exist.
        SourceError: When it contradicts itself or is damaged.
        MismatchError: When its tensors do not match its model, which a copy does not build.
        UnsupportedError: When the target format cannot represent it.
        WriteError: When ``dst`` exists already, or cannot be written.
    """
    began = time.monotonic()
    # Check all that the arguments tell before anything is opened.
    check_kind("dst", dst, str | os.PathLike, "a path")
    check_kind("merge_lora", merge_lora, bool, "True or False")
    check_kind("overwrite", overwrite, bool, "True or False")
    if not os.fspath(dst):
        raise UsageError("Cannot convert to an empty path. Give a folder, or NAME.weights.h5")
    target = Path(os.path.abspath(local_target(dst)))  # noqa: PTH100  resolve() would follow a link that is to be replaced
    kind = target_of(target, to)
    name = None if dtype is None else plain_dtype_name(dtype, doing="write")
    block_bytes = block_bytes_of(host_memory_bytes)
    shard_bytes = shard_bytes_for(target, kind, max_shard_bytes)
    check_free(target, folder=not is_file_name(target), overwrite=overwrite)
    found = resolve(src)
    opened = open_manifest(found.path)
    adapters.check_base(opened, base)
    patterns = arguments.patterns(ignore)
    # Merging needs the model.
    if hugging_face_copy.is_copy(opened, kind) and not merge_lora:
        fidelity.checked_fields(ignore_config)
        source = hugging_face_copy.source_of(opened, ignore=patterns)
    else:
        source = _open(found.path, base, dtype=name, ignore=patterns, ignore_config=ignore_config)
    for manifest in source.manifests:
        _refuse_itself(Path(manifest.source), target)
    # Recorded before the first value is read, and compared before the result is published.
    files = Fingerprint.of(source.files)
    with_lora = [] if source.model is None else lora_layers(source.model)
    adapters.refuse_adapters(source, with_lora, kind, merge_lora=merge_lora)
    source = adapters.merged(source, with_lora) if merge_lora else source
    shown = as_progress(progress)
    # `merged` replaced the values of these kernels; hidden, their layers are described and stored as plain ones.
    with hidden(with_lora if merge_lora else ()):
        plan = plan_for(source, target, kind, dtype=name, shard_bytes=shard_bytes)
        check_others(plan, target, overwrite=overwrite)
        # Last of the checks, because it reads every byte; all others need headers only.
        _check_digests(source, shown)
        preparing_s = time.monotonic() - began
        resumed = _write(source, plan, target, files, overwrite=overwrite, block_bytes=block_bytes, shown=shown)
    notes = (*((found.note,) if found.note else ()), *source.notes, *plan.notes)
    seconds = time.monotonic() - began
    return ConvertReport(
        source.manifest.source,
        str(target),
        plan.format,
        len(plan.tensors),
        plan.nbytes,
        resumed,
        seconds,
        notes,
        preparing_s,
    )


def _open(
    path: str, base: PathLike | None, *, dtype: str | None, ignore: Sequence[str], ignore_config: Sequence[str]
) -> Source:
    """Open the source; a partial step on top of its base."""
    weights = path if base is None else resolve(base).path
    source = open_source(weights, dtype=dtype, ignore=ignore, ignore_config=ignore_config)
    return source if base is None else adapters.on_base(source, path)


def _write(
    source: Source,
    plan: ConversionPlan,
    target: Path,
    files: Fingerprint,
    *,
    overwrite: bool,
    block_bytes: int,
    shown: Progress,
) -> int:
    """Write and publish the target; return how many tensors an earlier run had finished."""
    with staged(target, folder=not is_file_name(target), overwrite=overwrite) as staging:
        try:
            resumed = write_all(source, plan, staging, block_bytes=block_bytes, progress=shown)
            files.check()  # a source that changed during the copy would give a mixture
            _finish(source, plan, staging, overwrite=overwrite)
        except BaseException as error:
            raise _with_way_on(explained(error, target, plan.nbytes), staging) from error
        finally:
            shown.stop()
    return resumed


def _refuse_itself(source: Path, target: Path) -> None:
    # Overwriting removes the target's folder: one that is or contains the source would take the source with it.
    one, two = source.resolve(), target.resolve()
    if one == two or two in one.parents or one in two.parents:
        raise UsageError(
            f"Cannot convert {source} to {target}: one contains the other. Choose a target outside the source"
        )


def _check_digests(source: Source, progress: Progress) -> None:
    """Verify a step that has digests before the copy, so that no flipped bit is copied."""
    for manifest in source.manifests:
        path = Path(manifest.source)
        if spec_of(manifest).is_step and is_ours(path):
            progress.start(sum(manifest.files.values()), f"Verifying {path}")
            try:
                damage = digests.find_damage(path, progress=progress.advance)
            finally:
                progress.stop()
            if damage:
                raise DamagedError(f"Cannot convert {path}: it is damaged: {damage[0]}. See: shardload verify {path}")


def _finish(source: Source, plan: ConversionPlan, staging: ConversionFolder, *, overwrite: bool) -> None:
    """Write digests for a step, check the result, and publish it."""
    if spec_named(plan.format).is_step:
        digests.Digests.compute(staging.result).write(staging.result)
    check_result(plan, source, staging)
    publish(plan, staging, overwrite=overwrite)


def _with_way_on(error: BaseException, staging: ConversionFolder) -> BaseException:
    """Add a note on what is left and how to continue."""
    if staging.is_published:
        error.add_note(f"{staging.target} is complete.")
    elif staging.kept():
        error.add_note(
            f"The finished part is in {working_folder(staging.target)}. Start the same conversion again to continue, "
            "or remove that folder."
        )
    return error
