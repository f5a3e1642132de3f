"""Save a live model in another program's format.

Every file of the target is made and checked before any value is written. Then each process writes its own shards of
every tensor: no process sends values to another. If there are several processes, process 0 makes and publishes the
target, inside a folder that all processes share.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from shardload import processes
from shardload.converting.checking import check_result
from shardload.converting.live_source import LocalBox, live_source, local_boxes_of, reader_of_box
from shardload.converting.peft_saving import peft_plan
from shardload.converting.plans import ConversionPlan, ConvertReport, Copy
from shardload.converting.publishing import (
    ConversionFolder,
    check_free,
    check_others,
    check_room,
    explained,
    publish,
    staged,
)
from shardload.converting.source import Source
from shardload.converting.strided_copy import PieceWriter, Read, copy_view, reader_of_value
from shardload.converting.targets import (
    CONVERT_HOST_MEMORY,
    added_format,
    block_bytes_of,
    is_file_name,
    plan_for,
    shard_bytes_for,
    target_of,
    target_stem,
    without_ending,
)
from shardload.converting.uploading import remote_target
from shardload.errors import UnsupportedError, UsageError, WriteError, suggests_arguments
from shardload.keras_bridge.lora import hidden, lora_kernels, lora_layers
from shardload.keras_bridge.model_state import plain_model
from shardload.keras_bridge.recording import seeded
from shardload.keras_bridge.variables import unique, value_of
from shardload.loaders.file_pieces import TensorPlace
from shardload.manifest import View, c_strides
from shardload.pipeline.request import check_keras_model
from shardload.processes.agreement import Topic
from shardload.processes.joint_call import Alone, Call, joint
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.sharding.layout import Bounds
from shardload.stores.clients import is_bucket
from shardload.stores.local import local_target, temporary_folder, working_folder
from shardload.transfer.geometry import address
from shardload.typing import DTypeLike, PathLike
from shardload.units import check_kind, plain_dtype_name

SaveTarget = Literal["safetensors", "h5", "preset", "peft"]
SAVE_TARGETS: tuple[SaveTarget, ...] = get_args(SaveTarget)


@suggests_arguments
def save_as(
    model: Any,
    path: PathLike,
    *,
    to: SaveTarget | None = None,
    dtype: DTypeLike | None = None,
    merge_lora: bool = False,
    host_memory_bytes: int | str = CONVERT_HOST_MEMORY,
    max_shard_bytes: int | str | None = None,
    overwrite: bool = False,
    progress: ProgressLike = None,
) -> ConvertReport:
    """Write the current weights of a model in the format of Hugging Face, KerasHub or Keras.

    Shards go from the devices to the files block by block: the host never has a copy of the model or of a large tensor.
    The target appears under its name only when it is complete and flushed to disk; an error, Ctrl-C or a full disk
    leaves nothing behind.

    If the model is sharded over several processes of a `jax.distributed` run, every process must make the call, with
    the same path in a folder that all share. Each writes its own shards. A model on the devices of one process is
    saved by that process alone.

    Examples:
        ```python
        model = shardload.load("gemma3_270m", mesh="1x8")
        shardload.save_as(model, "tuned-hf", to="safetensors")
        shardload.save_as(model, "tuned.weights.h5")
        ```

    Args:
        model: A built Keras model. It is not changed; do not train it during the call.
        path: Path of the target: a folder, a file that ends in ``.weights.h5``, or an index that ends in
            ``.weights.json``, with its shards. Or its address in a bucket (``s3://``, ``gs://``), to which it is
            uploaded once it is complete on this machine.
        to: ``"safetensors"`` (a Hugging Face folder), ``"preset"`` (a KerasHub preset) or ``"h5"`` (Keras' files; a
            folder is a preset); required unless ``path`` ends like one of Keras' files. A model that does not come
            from KerasHub can only be written as Keras' files. ``"peft"``: a folder with the LoRA adapter alone, which
            PEFT and `shardload.load` put onto the base model; biases and other weights that were trained are in it too.
        dtype: Dtype of the floating-point tensors; by default each keeps its own, and every bit.
        merge_lora: Merge the factors of LoRA into the kernels, which is arithmetic: in float32, rounded once to the
            dtype of the kernel. Otherwise a model with LoRA is refused, because only ``"peft"`` has a place for
            factors.
        host_memory_bytes: As for `shardload.convert`.
        max_shard_bytes: As for `shardload.convert`.
        overwrite: Replace an existing checkpoint at ``path``.
        progress: As for `shardload.load`.

    Returns:
        The report; its ``source`` is the name of the model.

    Raises:
        UsageError: When an argument is invalid, or ``model`` is not a Keras model.
        UnsupportedError: When the model is not built, or the target format cannot represent it; with LoRA, without
            ``merge_lora``.
        UninitialisedError: When a variable has no value.
        WriteError: When ``path`` exists already, or cannot be written.
        DisagreementError: When the processes of a `jax.distributed` run request different saves.
        ProcessLostError: When another process ended, or does not respond.
    """
    model = plain_model(model)
    if is_bucket(path):
        if processes.are_several() and _is_spread(model):
            raise UnsupportedError(
                f"Cannot save to {path}: several processes each have a part of the model, expected a path that all of "
                "them share. Save a step with shardload.save, which takes the address, and convert that"
            )
        check_kind("overwrite", overwrite, bool, "True or False")
        with remote_target(str(path), overwrite=overwrite, progress=as_progress(progress)) as remote:
            report = save_as(
                model,
                remote.path,
                to=to,
                dtype=dtype,
                merge_lora=merge_lora,
                host_memory_bytes=host_memory_bytes,
                max_shard_bytes=max_shard_bytes,
                overwrite=overwrite,
                progress=progress,
            )
        return replace(report, target=remote.url)
    # Of the path only the name must be equal on all processes, as hosts may mount the folder elsewhere.
    name = Path(path).name if isinstance(path, str | os.PathLike) else None
    compared = {"path": name, "to": to, "dtype": dtype, "max_shard_bytes": max_shard_bytes}
    compared |= {"merge_lora": merge_lora, "overwrite": overwrite}
    together: AbstractContextManager[Call] = nullcontext(Alone())
    if processes.are_several() and _is_spread(model):
        together = joint("save_as", path, compared, doing="saving")
    with together as call:
        return _save(
            model,
            path,
            call,
            to=to,
            dtype=dtype,
            merge_lora=merge_lora,
            block_bytes=block_bytes_of(host_memory_bytes),
            max_shard_bytes=max_shard_bytes,
            overwrite=overwrite,
            progress=as_progress(progress),
        )


def _is_spread(model: Any) -> bool:
    """Whether other processes have parts of a model."""
    try:
        if hasattr(model, "jax_state_sync"):
            model.jax_state_sync()  # during fit, variables have no values until Keras gives them back
        return not all(value_of(variable).is_fully_addressable for variable in unique(model.variables))
    except Exception:  # no model, or one without values: the save itself raises the error
        return False


def _save(
    model: Any,
    path: PathLike,
    call: Call,
    *,
    to: SaveTarget | None,
    dtype: DTypeLike | None,
    merge_lora: bool,
    block_bytes: int,
    max_shard_bytes: int | str | None,
    overwrite: bool,
    progress: Progress,
) -> ConvertReport:
    began = time.monotonic()
    check_kind("path", path, str | os.PathLike, "a path")
    if isinstance(to, str) and to == "peft":
        unused = {"dtype": dtype, "max_shard_bytes": max_shard_bytes, "merge_lora": merge_lora or None}
        return _save_adapter(model, path, call, unused, overwrite=overwrite, block_bytes=block_bytes, progress=progress)
    check_kind("merge_lora", merge_lora, bool, "True or False")
    check_kind("overwrite", overwrite, bool, "True or False")
    if not os.fspath(path):
        raise UsageError("Cannot save to an empty path. Give a folder, or NAME.weights.h5")
    target = Path(os.path.abspath(local_target(path)))  # noqa: PTH100  a link is replaced, not followed
    kind = target_of(target, _format_to_convert(target, to))
    name = None if dtype is None else plain_dtype_name(dtype, doing="write")
    shard_bytes = shard_bytes_for(target, kind, max_shard_bytes)
    check_keras_model(model)
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # during fit, variables have no values until Keras gives them back
    with_lora = lora_layers(model)
    if with_lora and not merge_lora:
        raise UnsupportedError(
            f"Cannot save {model.name!r}: LoRA is enabled in {len(with_lora)} of its layers, and the target has no "
            "place for the factors. Pass merge_lora=True to write merged weights, to='peft' to write the factors, or "
            "save a step with shardload.save"
        )
    kernels = lora_kernels(with_lora)
    # The folder receives KerasHub's files of the model, which the source refers to until they are copied.
    with temporary_folder() as folder, hidden(with_lora):
        # Describing this model builds others; their initialisers must not advance the user's random state.
        with seeded(0), ExitStack() as on_error:
            on_error.callback(progress.stop)
            progress.start(0, f"Preparing {target.name}")
            source = live_source(model, kernels, folder, files=not is_file_name(target))
            plan = plan_for(source, target, kind, dtype=name, shard_bytes=shard_bytes)
            on_error.pop_all()
        facts = {
            parts[0].wanted.name: f"{parts[0].wanted.dtype} {parts[0].wanted.shape}" for parts in plan.tensors.values()
        }
        call.require([Topic("the model", lambda: facts, "Build the same model on every process")])
        preparing_s = time.monotonic() - began
        write_live(plan, target, call, progress, source=source, overwrite=overwrite, block_bytes=block_bytes)
    counts, seconds = (len(plan.tensors), plan.nbytes, 0), time.monotonic() - began
    notes = (*source.notes, *plan.notes)
    return ConvertReport(str(model.name), str(target), plan.format, *counts, seconds, notes, preparing_s)


def _save_adapter(
    model: Any,
    path: PathLike,
    call: Call,
    unused: Mapping[str, Any],
    *,
    overwrite: bool,
    block_bytes: int,
    progress: Progress,
) -> ConvertReport:
    """Write the LoRA of a model as a folder of PEFT. ``unused``: arguments that must be ``None``, as it has neither."""
    began = time.monotonic()
    if given := next((name for name, value in unused.items() if value is not None), None):
        raise UsageError(f"Cannot use {given}= with to='peft', which writes factors as they are. Omit it")
    check_kind("overwrite", overwrite, bool, "True or False")
    target = Path(os.path.abspath(local_target(path)))  # noqa: PTH100  a link is replaced, not followed
    if not os.fspath(path) or is_file_name(target) or target.suffix.lower() in (".safetensors", ".bin"):
        raise UsageError(f"Cannot save {os.fspath(path)!r} with to='peft': it is a folder. Give the name of a folder")
    check_keras_model(model)
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # during fit, variables have no values until Keras gives them back
    plan = peft_plan(model)
    preparing_s = time.monotonic() - began
    write_live(plan, target, call, progress, source=None, overwrite=overwrite, block_bytes=block_bytes)
    counts, seconds = (len(plan.tensors), plan.nbytes, 0), time.monotonic() - began
    return ConvertReport(str(model.name), str(target), "peft", *counts, seconds, plan.notes, preparing_s)


def _format_to_convert(target: Path, to: str | None) -> str | None:
    """Check ``to``, and return what conversions call this format; ``None``: the file's name tells the format."""
    check_kind("to", to, str | None, f"one of {', '.join(SAVE_TARGETS)}")
    if to == "orbax":
        raise UsageError(
            "Cannot save with to='orbax': Orbax checkpoints are steps. Call shardload.save(model, directory, step=0)"
        )
    if (spec := added_format(target)) is not None and to in (None, spec.name):
        return spec.name
    if to is not None and to not in SAVE_TARGETS:
        raise UsageError(f"Cannot save with to={to!r}: expected one of {', '.join(SAVE_TARGETS)}")
    if to is None and not is_file_name(target) and not target.name.lower().endswith(".keras"):
        raise UsageError(
            f"Cannot tell the format of {target.name}. {without_ending(target)} to='safetensors' or to='preset', or "
            f"name it {target_stem(target)}.weights.h5"
        )
    if to == "preset" and is_file_name(target):
        raise UsageError(
            f"Cannot save {target.name} with to='preset': a preset is a folder. Remove to= for Keras' files, or choose "
            "the name of a folder"
        )
    return "h5" if to == "preset" else to


def write_live(
    plan: ConversionPlan,
    target: Path,
    call: Call,
    progress: Progress,
    *,
    source: Source | None,
    overwrite: bool,
    block_bytes: int,
) -> None:
    """Write values that are on devices: process 0 makes and publishes the files, each process writes its own shards.

    ``source``: the live model that the result must load into; ``None`` for arrays without a model.
    """
    staging = ConversionFolder(working_folder(target), target)
    # `_make` locks the folder on process 0 only; the stack keeps the lock until the result is published.
    with ExitStack() as stack:
        try:
            made = call.first(lambda: _make(plan, staging, stack, source=source, overwrite=overwrite), "the files")
            if not staging.is_of(made["run"]):
                raise WriteError(
                    f"Cannot write {target}: process {processes.index()} does not see the files that process 0 made in "
                    f"{working_folder(target)}. Give a folder that all processes share"
                )
            places = {place.name: place for place in map(TensorPlace.of_json, made["places"])}
            shown = call.watched(progress)
            shown.start(plan.nbytes if call.is_alone else 0, f"Saving {target.name}")
            for copy in plan.copies:
                item_bytes = max(copy.wanted.dtype.itemsize, copy.value.dtype.itemsize)
                block = max(1, block_bytes // item_bytes)
                with PieceWriter(staging.result, places[copy.wanted.name], written=shown.advance) as writer:
                    for box, read in _parts(copy, is_alone=call.is_alone):
                        part = View("", 0, box.shape, c_strides(box.shape))
                        to = View("", address(copy.view, box.start), box.shape, copy.view.strides)
                        copy_view(read, writer.write, part, to, block_elements=block)
            # fsync() flushes what this host wrote: on a shared file system, process 0 cannot do it for the others.
            if not call.is_alone:
                staging.flush()
            call.meet("all values are written")
            call.first(lambda: publish(plan, staging, overwrite=overwrite), "the publishing")
        except BaseException as error:
            raise explained(error, target, plan.nbytes) from error
        finally:
            progress.stop()


def _make(
    plan: ConversionPlan, staging: ConversionFolder, stack: ExitStack, *, source: Source | None, overwrite: bool
) -> dict[str, Any]:
    """Make all files of the target, with space for the values, and check that readers could load the model from it."""
    target = staging.target
    is_folder = not (plan.is_file or is_file_name(target))
    check_free(target, folder=is_folder, overwrite=overwrite)
    check_others(plan, target, overwrite=overwrite)
    stack.enter_context(staged(target, folder=is_folder, overwrite=overwrite))
    stack.push(lambda kind, *_: staging.discard() if kind is not None else None)
    # Values of a live model cannot be recognised later, so no run may continue another: a random plan fits no journal.
    run = uuid.uuid4().hex
    staging.begin(run)
    check_room(target, plan)
    places = plan.make(staging.result)
    staging.note_places(places)
    # Before any value is written, because headers tell all that can be wrong.
    with seeded(0):
        check_result(plan, source, staging)
    return {"run": run, "places": [place.to_json() for place in places]}


def _parts(copy: Copy, *, is_alone: bool) -> Iterator[tuple[Bounds, Read]]:
    """Yield each box (index ranges) of a variable that this process writes, with a function that reads its elements."""
    value, dtype = copy.value, copy.wanted.dtype
    # A merged kernel is computed by all processes together, so none may return before this call.
    array = None if value.live is None else value.live()
    if not is_alone and not processes.is_first() and (array is None or array.is_fully_addressable):
        return
    if array is None:
        box = Bounds.whole(copy.view.shape) if copy.box is None else copy.box
        yield box, reader_of_value(np.asarray(value.array)[box.slices], dtype)
        return
    for region in local_boxes_of(array):
        if copy.box is None:
            yield region.box, reader_of_box(region, dtype)
        elif (both := region.box.intersect(copy.box)) is not None:
            yield both, reader_of_box(LocalBox(both, region.shards), dtype)
