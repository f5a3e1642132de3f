"""Convert a checkpoint to another format in bounded memory.

For source and target alike, it is known which elements of which tensor have the value of a variable, so the same code
copies between any two formats. Values keep their dtype and bits unless another dtype is requested. The target's files
are made first, without values; then each tensor is copied or computed, and recorded in a journal, so that a conversion
that was interrupted can continue.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardload.converting import adapters, hugging_face_copy
from shardload.converting.checking import check_result
from shardload.converting.computing import compute
from shardload.converting.plans import ConversionPlan, ConvertReport, Copy
from shardload.converting.publishing import (
    ConversionFolder,
    check_free,
    check_others,
    check_room,
    explained,
    publish,
    staged,
    tensor_digest,
)
from shardload.converting.source import Source, open_with_model
from shardload.converting.strided_copy import PieceWriter, Read, copy_view, parts_of, reader_of, reader_of_value
from shardload.converting.targets import (
    CONVERT_HOST_MEMORY,
    Target,
    block_bytes_of,
    is_file_name,
    plan_for,
    shard_bytes_for,
    target_of,
)
from shardload.converting.uploading import remote_target
from shardload.errors import DamagedError, UsageError, suggests_arguments
from shardload.hub import fidelity
from shardload.keras_bridge.lora import hidden, lora_layers
from shardload.loaders import open_manifest, spec_of
from shardload.loaders.file_pieces import TensorPlace
from shardload.loaders.peft import Weighted, merged
from shardload.loaders.registry import spec_named
from shardload.manifest import Manifest, View, c_strides
from shardload.mapping.replaced import replaced_notes
from shardload.pipeline.request import ignored_names
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.resolve.adapters import can_merge, merge_dtype, open_adapters, weighted_folders
from shardload.resolve.opening import find_source
from shardload.runs import digests
from shardload.runs.listing import is_ours
from shardload.stores.clients import Address, is_bucket
from shardload.stores.local import local_target, working_folder
from shardload.stores.location import Fingerprint, Location
from shardload.transfer.geometry import within
from shardload.typing import AdapterLike, DTypeLike, PathLike
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
    adapter: AdapterLike | None = None,
) -> ConvertReport:
    """Write a checkpoint in another format, tensor by tensor.

    From Hugging Face to Hugging Face, it is a copy: all tensors and small files, whatever the model is.

    An interrupted conversion continues where it stopped when it is started again. The target appears under its
    name only when it is complete and flushed to disk.

    Examples:
        ```python
        report = shardload.convert("gemma-2-2b", "gemma2-preset", to="preset")
        print(report.tensors, report.n_bytes)
        ```

    Args:
        src: Any source that `shardload.load` accepts and that describes its model.
        dst: Path of the target: a folder, a file that ends in ``.weights.h5``, or an index that ends in
            ``.weights.json``, with its shards. Or its address in a bucket (``s3://``, ``gs://``), to which it is
            uploaded once it is complete on this machine.
        to: ``"preset"`` (a KerasHub preset), ``"h5"`` (the same, or Keras' files if ``dst`` ends like one),
            ``"safetensors"`` (a Hugging Face folder) or ``"orbax"``; required unless ``dst`` ends like one of Keras'
            files.
        dtype: Dtype of the floating-point tensors; by default each keeps its own, and decoded (GGUF) or computed
            tensors have the dtype that `shardload.load` gives them.
        host_memory_bytes: Bytes of tensors in memory at once, or text like ``"512MiB"``, which is the default.
        max_shard_bytes: Most bytes of tensors per file, or text like ``"2GiB"``; a larger tensor gets its own file.
            5 GB by default for safetensors, 5 GiB for ``.weights.json``; a preset is split only if this is given.
        overwrite: Replace an existing checkpoint at ``dst``.
        progress: As for `shardload.load`.
        ignore: Names of tensors to leave out, as for `shardload.load`; with ``base``, names of its tensors. A copy
            from Hugging Face to Hugging Face can leave out any tensor.
        ignore_config: As for `shardload.load`.
        merge_lora: Merge the factors of LoRA into the kernels, which is arithmetic: in float32, rounded once to the
            dtype of the kernel. A source with LoRA is refused otherwise, unless ``to`` is ``"orbax"``.
        base: For a partial step (``save_trainable_only``): the checkpoint with the other weights of its model.
        adapter: As for `shardload.load`: adapters of PEFT to merge into the weights. Weights of a quantised folder are
            written dequantised.

    Raises:
        UsageError: When an argument is invalid.
        SourceNotFoundError: When ``src`` does not exist.
        SourceError: When it contradicts itself or is damaged.
        MismatchError: When its tensors do not match its model (not checked from Hugging Face to Hugging Face).
        UnsupportedError: When the target format cannot represent it.
        WriteError: When ``dst`` exists already, or cannot be written.
    """
    if is_bucket(dst):
        check_kind("overwrite", overwrite, bool, "True or False")
        began = time.monotonic()
        _refuse_overlap(src, str(dst))
        with remote_target(str(dst), overwrite=overwrite, progress=as_progress(progress)) as remote:
            report = convert(
                src,
                remote.path,
                to=to,
                dtype=dtype,
                host_memory_bytes=host_memory_bytes,
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
                progress=progress,
                ignore=ignore,
                ignore_config=ignore_config,
                merge_lora=merge_lora,
                base=base,
                adapter=adapter,
            )
        return replace(report, target=remote.url, seconds=time.monotonic() - began)
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
    folders = weighted_folders(adapter)
    check_free(target, folder=not is_file_name(target), overwrite=overwrite)
    # Recorded as they are opened, and compared before the result is published.
    with Fingerprint.opening():
        found = find_source(src)
        opened = open_manifest(found.location)
        adapters.check_base(opened, base)
        options = _Opening(name, ignored_names(ignore), ignore_config, open_adapters(folders))
        # Merging a step's LoRA needs the model; adapters of PEFT have Hugging Face's names.
        if hugging_face_copy.is_copy(opened, kind) and not merge_lora:
            source = options.copied(opened)
        else:
            source = options.built(found.location, base)
        files = Fingerprint.of(source.files)
    # Overwriting removes the target's folder: one that is or contains the source would take the source with it.
    two = target.resolve()
    read = [*(m.location for m in source.manifests), *(one.adapter.location for one in source.adapted)]
    for own in (Path(str(location)) for location in read if not location.store.is_remote):
        one = own.resolve()
        if one == two or two in one.parents or one in two.parents:
            raise UsageError(
                f"Cannot convert {own} to {target}: one contains the other. Choose a target outside the source"
            )
    with_lora = [] if source.model is None else lora_layers(source.model)
    adapters.refuse_adapters(source, with_lora, kind, merge_lora=merge_lora)
    source = adapters.with_merged_lora(source, with_lora) if merge_lora else source
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
    counts, seconds = (len(plan.tensors), plan.nbytes, resumed), time.monotonic() - began
    return ConvertReport(source.manifest.source, str(target), plan.format, *counts, seconds, notes, preparing_s)


@dataclass(frozen=True, slots=True)
class _Opening:
    """How to open the source of a conversion: the dtype to write, what to leave out, and adapters of PEFT to merge."""

    dtype: str | None
    ignore: tuple[str, ...]
    ignore_config: Sequence[str]
    adapters: tuple[Weighted, ...]

    def copied(self, opened: Manifest) -> Source:
        """Return a Hugging Face folder as a source to copy, without a model."""
        fidelity.checked_fields(self.ignore_config)
        if self.adapters:
            opened = merged(opened, self.adapters, dtype=merge_dtype(self.dtype))
        dequantise = self.dtype is not None or bool(self.adapters)
        source = hugging_face_copy.source_of(opened, ignore=self.ignore, dequantise=dequantise)
        notes = (*source.notes, *replaced_notes(opened, self.adapters))
        return replace(source, adapted=self.adapters, notes=notes)

    def built(self, location: Location, base: PathLike | None) -> Source:
        """Return a checkpoint with its model, or a partial step with that of its base."""
        weights = location if base is None else find_source(base).location
        source = open_with_model(
            weights,
            dtype=self.dtype,
            ignore=self.ignore,
            ignore_config=self.ignore_config,
            adapters=self.adapters,
        )
        if self.adapters and not can_merge(source.manifest):
            source = adapters.with_peft(source, self.adapters)
        source = replace(source, adapted=self.adapters)
        return source if base is None else adapters.on_base(source, location)


def _refuse_overlap(src: PathLike, dst: str) -> None:
    """Raise if the target in a bucket is the source, or one contains the other."""
    found = find_source(src).location
    if not found.store.is_remote:
        return
    one, two = (f"{Address.parse(text).url.rstrip('/')}/" for text in (str(found), dst))
    if one.startswith(two) or two.startswith(one):
        raise UsageError(f"Cannot convert {found} to {dst}: one contains the other. Choose a target outside the source")


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
    """Write the whole target and move it to its final name; return how many tensors an earlier run had finished."""
    with staged(target, folder=not is_file_name(target), overwrite=overwrite) as staging:
        try:
            resumed = write_all(source, plan, staging, block_bytes=block_bytes, progress=shown)
            files.check()  # a source that changed during the copy would give a mixture
            if spec_named(plan.format).is_step:
                digests.Digests.compute(staging.result).write(staging.result)
            check_result(plan, source, staging)
            publish(plan, staging, overwrite=overwrite)
        except BaseException as error:
            told = explained(error, target, plan.nbytes)
            # What is left, and how to continue.
            if staging.is_published:
                told.add_note(f"{staging.target} is complete.")
            elif staging.kept():
                told.add_note(
                    f"The finished part is in {working_folder(staging.target)}. Start the same conversion again to "
                    "continue, or remove that folder."
                )
            raise told from error
        finally:
            shown.stop()
    return resumed


def _check_digests(source: Source, progress: Progress) -> None:
    """Raise `DamagedError` if the source is a step saved by shardload whose bytes do not match its digests."""
    for manifest in source.manifests:
        path = manifest.location
        if spec_of(manifest).is_step and is_ours(path):
            progress.start(sum(manifest.files.values()), f"Verifying {path}")
            try:
                damage = digests.find_damage(path, progress=progress.advance)
            finally:
                progress.stop()
            if damage:
                raise DamagedError(f"Cannot convert {path}: it is damaged: {damage[0]}. See: shardload verify {path}")


def write_all(
    source: Source, plan: ConversionPlan, staging: ConversionFolder, *, block_bytes: int, progress: Progress
) -> int:
    """Write all tensors to new files or those of an interrupted run; return how many that run had written."""
    staging.begin(identity(source, plan, staging.target))
    if staging.places is None:
        check_room(staging.target, plan)
        places = plan.make(staging.result)
        check_result(plan, source, staging)  # before hours of copying
        staging.note_places(places)
    assert staging.places is not None
    work = _Work(staging, {place.name: place for place in staging.places}, block_bytes, progress)
    progress.start(plan.nbytes, f"Converting to {staging.target.name}")
    # Computed values come last, step by step, because one step computes values of many tensors.
    rest: list[Copy] = []
    n_resumed = 0
    for parts in plan.tensors.values():
        if work.is_done(parts[0]):
            progress.advance(parts[0].wanted.nbytes)
            n_resumed += 1
            continue
        computed = [part for part in parts if part.value.step is not None]
        for part in parts:
            if part.value.step is None:
                work.copy(part)
        if not computed:
            work.note(parts[0])
        rest += computed
    _compute(source, rest, work)
    return n_resumed


def _compute(source: Source, copies: list[Copy], work: _Work) -> None:
    """Run each KerasHub converter and layer's loading hook that computes values of ``copies``, and write the values."""
    by_variable: dict[int, list[Copy]] = {}
    for copy in copies:
        by_variable.setdefault(id(copy.value.variable), []).append(copy)
    # A tensor is complete, and noted, once the last of the variables that share it is.
    left = Counter(copy.wanted.name for copy in copies)

    def done(variable: Any) -> None:
        for copy in by_variable[id(variable)]:
            left[copy.wanted.name] -= 1
            if not left[copy.wanted.name]:
                work.note(copy)

    def write(variable: Any, value: NDArray[Any]) -> None:
        for copy in by_variable[id(variable)]:
            work.put(copy, value)

    for step in {id(c.value.step): c.value.step for c in copies}.values():
        assert step is not None
        # Several steps may compute one variable; only the last one's value counts (`computed_by`).
        compute(
            step,
            source.manifest,
            {key: of[0].wanted.dtype for key, of in by_variable.items() if of[0].value.step is step},
            values=source.values.values(),
            write=write,
            done=done,
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """Writes tensors into the target's files, in blocks of ``block_bytes``; records finished ones in the journal."""

    staging: ConversionFolder
    places: Mapping[str, TensorPlace]
    block_bytes: int
    progress: Progress

    def is_done(self, copy: Copy) -> bool:
        """Whether an earlier run wrote this tensor, and its bytes in the files still match the journal's digest."""
        # Nothing is flushed before the end: after a power failure the journal may list values that never reached disk.
        known = self.staging.done.get(copy.wanted.name)
        return known is not None and self._digest(copy) == known

    def note(self, copy: Copy) -> None:
        """Record in the journal that this tensor is complete, with the digest of its bytes."""
        # Digest the file: values are written in the source's order, and a digest needs the target's.
        self.staging.note_done(copy.wanted.name, self._digest(copy))

    def copy(self, copy: Copy) -> None:
        """Write the value of a variable that is available as it is: a view of a stored tensor, or an array."""
        value, dtype = copy.value, copy.wanted.dtype
        if value.tensor is None or value.view is None:
            self.put(copy, np.asarray(value.array if value.live is None else value.live()))
            return
        # A block is in memory as read and as cast: the wider dtype decides how many elements it may have.
        item_bytes = max(dtype.itemsize, value.tensor.dtype.itemsize)
        for tensor, source, target in parts_of(value.tensor, within(value.view, copy.box), within(copy.view, copy.box)):
            self._move(copy, reader_of(tensor, dtype), source, target, item_bytes)

    def put(self, copy: Copy, value: NDArray[Any]) -> None:
        """Write an array in host memory to the elements of a target's tensor that ``copy`` describes."""
        dtype = copy.wanted.dtype
        part = value if copy.box is None else value[copy.box.slices]
        source = View("", 0, part.shape, c_strides(part.shape))
        self._move(copy, reader_of_value(part, dtype), source, within(copy.view, copy.box), dtype.itemsize)

    def _move(self, copy: Copy, read: Read, source: View, target: View, item_bytes: int) -> None:
        with PieceWriter(self.staging.result, self.places[copy.wanted.name], written=self.progress.advance) as writer:
            copy_view(read, writer.write, source, target, block_elements=max(1, self.block_bytes // item_bytes))

    def _digest(self, copy: Copy) -> str:
        return tensor_digest(self.staging.result, self.places[copy.wanted.name], copy.wanted.dtype.itemsize)


def _version(path: Location) -> tuple[int, ...]:
    if path.store.is_remote:
        found = path.identity()
        return found.size, *found.version
    state = path.local_path().stat()
    return state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino


def identity(source: Source, plan: ConversionPlan, target: Path) -> str:
    """Return a digest of all that determines what a conversion writes: only an equal one continues an earlier run."""
    # A file replaced by one of the same size and time of change differs in its inode or ctime.
    files = [(str(path), *_version(path)) for path in source.files]
    copies = [
        (c.wanted.name, c.wanted.shape, c.wanted.dtype.name, str(c.view), c.value.view and str(c.value.view))
        for c in plan.copies
    ]
    # Packages whose versions affect computed values; `None` for one that is not installed.
    packages = ("keras", "keras-hub", "numpy") if any(c.value.step or c.value.live for c in plan.copies) else ()
    versions = [next((d.version for d in metadata.distributions(name=name)), None) for name in packages]
    # The 2 is a version: raise it if the same plan would write other bytes, so that no older journal is continued.
    versions += [f"{one.weight} of {one.adapter.location}" for one in source.adapted]
    text = json.dumps([2, source.manifest.source, files, str(target), plan.format, plan.shard_bytes, copies, versions])
    return hashlib.sha256(text.encode()).hexdigest()
