"""A live model as the source of a conversion: its values are on devices, and its configuration files are made from it.

    model ─► value of every variable: an array on devices; a kernel with LoRA is merged when it is read
          ─► KerasHub's configuration, and tokenizer files: from its preprocessor, else from the loaded checkpoint

Values are read a block at a time. A box is a part of an array, given by one index range for each dim:

    shards of this process ─► boxes ─► read(start, stop): elements of one box, in row-major order
     ┌──┬──┐                  ┌─────┐
     │a │b │  a, b are here   │a  b │  shards that make up one box are read as one, so that runs are long
     └──┴──┘                  └─────┘

A `jax.Array` that was converted to NumPy keeps that copy in host memory. So a temporary `jax.Array` over the same
buffers is converted instead, and dropped at once: no copy of a saved model stays on the host.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from shardload.converting import transformers
from shardload.converting.adapters import merge_note
from shardload.converting.companions import (
    TRANSFORMERS,
    Companions,
    Preprocessing,
    companions_of,
    preprocessing_of,
    write_description,
)
from shardload.converting.computing import StoredValue
from shardload.converting.source import NAMES_SHOWN, Source
from shardload.converting.strided_copy import Read, bits
from shardload.errors import ShardloadError, UninitialisedError
from shardload.hub import building
from shardload.hub.kerashub import text_classes
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.lora import LoraKernel
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.variables import has_value, stored_dtype, unique, value_of
from shardload.loaders import spec_of
from shardload.loaders.contents import CONFIG
from shardload.loaders.hub_preset import METADATA, TASK, describe_folder
from shardload.loaders.hub_preset import SPEC as PRESET
from shardload.manifest import Manifest
from shardload.reports.facts import NoteKind, of_kind
from shardload.sharding.layout import Bounds
from shardload.stores.local import located
from shardload.units import plural

_DESCRIPTIONS = (CONFIG, TASK, METADATA)


def live_source(model: Any, kernels: Sequence[LoraKernel], folder: Path, *, files: bool) -> Source:
    """Return a live model as the source of a conversion.

    While it is used, `keras_bridge.lora.hidden` must make its layers look like layers without LoRA. ``kernels``: all
    kernels with LoRA factors, to be merged. ``files``: whether the target needs KerasHub's configuration and tokenizer
    files. They are written to ``folder``, which must exist as long as the source is used.
    """
    merged = {id(found.kernel): found for found in kernels}
    factors = frozenset(id(v) for found in kernels for v in (found.a, found.b))
    values = {id(v): _value(v, merged.get(id(v))) for v in unique(model.variables) if id(v) not in factors}
    found = Source(
        Manifest(located(folder), PRESET.name, {}, {}),
        model,
        values,
        Companions(),
        Preprocessing(),
        (*((merge_note(kernels),) if kernels else ()), *_heads_of_adapters(model)),
        is_live=True,
        merged=factors,
    )
    return _with_files(found, folder) if files and found.is_hub else found


def _heads_of_adapters(model: Any) -> tuple[str, ...]:
    """Return the notes of a model's load on heads that adapters trained and that the model lacks."""
    report = record_of(model).report
    return () if report is None else of_kind(report.notes, NoteKind.HEAD_OF_ADAPTER)


def _value(variable: Any, kernel: LoraKernel | None) -> StoredValue:
    if not has_value(variable):
        raise UninitialisedError(
            f"Cannot save variable {variable.path!r}: it has no value. Load a checkpoint into the model, or call "
            "shardload.initialise(model), first; in a callback of fit, save self.model, not a part of it"
        )
    if value_of(variable).is_deleted():
        raise UninitialisedError(
            f"Cannot save variable {variable.path!r}: its array was donated to a computation. Assign the current "
            "values to the model's variables first"
        )
    dtype = stored_dtype(variable)
    if kernel is not None:
        return StoredValue(variable, dtype, live=kernel.merged)
    array = value_of(variable)
    is_whole_here = array.is_fully_addressable or array.is_fully_replicated
    # Small state goes to JSON files, which are made from arrays on the host.
    if transformers.is_weight(variable) or not is_whole_here:
        return StoredValue(variable, dtype, live=partial(value_of, variable))
    # A replicated array may have devices of other processes too, and then only its local copies can be read.
    local = array.addressable_data(0) if array.is_fully_replicated else array
    return StoredValue(variable, dtype, array=np.array(_uncached(local)))


def _with_files(source: Source, folder: Path) -> Source:
    """Return ``source``, a model in memory, with the files that a checkpoint of it has next to its weights.

    KerasHub's configuration files and preprocessor are written to ``folder``, from the model as it is now. The other
    files, such as Hugging Face's tokenizer files, are those of the checkpoint that the model was loaded from, if it
    still exists and fits the model.
    """
    # `origin` is the source that the model was loaded from, if it still describes the model.
    model, loaded = source.model, record_of(source.model).text_source
    kept, notes = Companions(), list(source.notes)
    origin = loaded if loaded is not None and _describes(loaded, source.backbone) else None
    layer = Preprocessing(getattr(model, "preprocessor", None))
    if loaded is not None and loaded.location.exists() and (origin is not None or layer.layer is None):
        kept = companions_of(loaded)
        layer = preprocessing_of(model, loaded, kept)
        notes += [*kept.notes, *layer.notes]
    if origin is not None and kept.transformers:
        names = sorted(kept.transformers, key=lambda name: (name != CONFIG, name))
        if len(names) >= NAMES_SHOWN:
            names[NAMES_SHOWN - 1 :] = [plural(len(names) - NAMES_SHOWN + 1, "other file")]
        come = "comes" if len(kept.transformers) == 1 else "come"
        notes.append(f"{', '.join(names)} for Hugging Face {come} from {origin.source}")
    elif layer.layer is None and not kept.transformers and text_classes(model)[1] is not None:
        notes.append("no tokenizer was written: the model has no preprocessor, and was not loaded with a tokenizer")
    # KerasHub's files are made from the model; of those from its source, all but old descriptions are kept.
    write_description(model, layer, folder)
    made = companions_of(source.manifest).keras
    others = {name: found for name, found in kept.transformers.items() if origin is not None or name != CONFIG}
    keras = {name: path for name, path in kept.keras.items() if name not in _DESCRIPTIONS}
    with abstraction.abstract():
        fresh = building.build_model(describe_folder(located(folder))) if TASK in made else None
    return replace(
        source,
        companions=Companions({**keras, **made}, others),
        preprocessing=layer,
        notes=tuple(notes),
        origin=origin,
        fresh=fresh,
        described_as=kept.config(TRANSFORMERS) or {},
    )


def _describes(loaded: Manifest, backbone: Any) -> bool:
    """Whether the Hugging Face folder that a model was loaded from still fits its backbone: its files can be reused."""
    # The tensors of a quantised folder are codes, and no template. A part's configuration may say so too.
    has_folder = spec_of(loaded).tokenizer == "hugging-face"  # a GGUF file has its tokenizer in the header
    if not has_folder or "quantization_config" in str(loaded.config):
        return False
    try:
        with abstraction.abstract():
            again = building.build_model(loaded, task=False)
    except ShardloadError:  # loaded with ignore_config, or into a model of the user's
        return False
    return type(again) is type(backbone) and transformers.differing(backbone, again) is None


@dataclass(frozen=True, slots=True, eq=False)
class Shard:
    """The part of an array that one device stores, and its box: the index range that it covers in each dim."""

    box: Bounds
    data: jax.Array


@dataclass(frozen=True, slots=True, eq=False)
class LocalBox:
    """Shards that together fill one box of an array (an index range for each dim), so that they can be read as one."""

    box: Bounds
    shards: tuple[Shard, ...]


def local_boxes_of(array: jax.Array) -> tuple[LocalBox, ...]:
    """Return the boxes (index ranges) of an array that this process writes: of each replicated shard, only one copy."""
    shards = []
    for shard in array.addressable_shards:
        if not shard.replica_id:
            ends = [part.indices(n) for part, n in zip(shard.index, array.shape, strict=True)]
            shards.append(Shard(Bounds(tuple(a for a, _, _ in ends), tuple(b for _, b, _ in ends)), shard.data))
    if not shards:
        return ()
    start = tuple(map(min, zip(*(s.box.start for s in shards), strict=True)))
    stop = tuple(map(max, zip(*(s.box.stop for s in shards), strict=True)))
    # Shards never overlap, so they fill the box around them exactly if the sizes agree.
    whole = Bounds(start, stop)
    if whole.size == sum(s.box.size for s in shards):
        return (LocalBox(whole, tuple(shards)),)
    return tuple(LocalBox(s.box, (s,)) for s in shards)


def reader_of_box(region: LocalBox, dtype: np.dtype[Any]) -> Read:
    """Return a function that reads elements of a box from devices and casts them to ``dtype``.

    It returns them as integers with the same bits, because bfloat16 and float8 cannot be written to files directly.
    """
    stored = np.dtype(region.shards[0].data.dtype)
    raw = np.dtype(f"u{stored.itemsize}") if stored.itemsize in (1, 2, 4, 8) else stored

    def read(start: int, stop: int) -> NDArray[Any]:
        out = np.empty(stop - start, raw)
        at = 0
        for box in boxes_of_run(region.box.shape, start, stop):
            part = out[at : at + box.size].reshape(box.shape)
            at += box.size
            wanted = box.relative_to(tuple(-start for start in region.box.start))  # relative to the array
            for shard in region.shards:
                if (overlap := wanted.intersect(shard.box)) is not None:
                    value = _host_part(shard.data, overlap.relative_to(shard.box.start))
                    part[overlap.relative_to(wanted.start).slices] = value.view(raw)
        return out if dtype == stored else bits(out.view(stored).astype(dtype))

    return read


def boxes_of_run(shape: Sequence[int], start: int, stop: int) -> Iterator[Bounds]:
    """Cut elements ``[start, stop)`` of an array, in row-major order, into boxes: each can be read as one slice."""
    if start == stop:
        return
    if not shape:
        yield Bounds((), ())
        return
    # A run is the end of a row, whole rows, and the start of a row; the two partial rows are split in turn.
    #     · · · ■ ■   before
    #     ■ ■ ■ ■ ■
    #     ■ ■ · · ·   after
    length, rest = shape[0], tuple(shape[1:])
    inner = math.prod(rest)
    (first, before), (last, after) = divmod(start, inner), divmod(stop, inner)
    if first == last:
        yield from _inside(first, rest, before, after)
        return
    if before:
        yield from _inside(first, rest, before, inner)
        first += 1
    if first < last:
        yield Bounds((first, *(0 for _ in rest)), (min(last, length), *rest))
    if after:
        yield from _inside(last, rest, 0, after)


def _inside(row: int, rest: tuple[int, ...], start: int, stop: int) -> Iterator[Bounds]:
    for box in boxes_of_run(rest, start, stop):
        yield Bounds((row, *box.start), (row + 1, *box.stop))


def is_on_host(data: jax.Array) -> bool:
    """Whether an array is in CPU memory, so that NumPy can view it without a copy."""
    return all(device.platform == "cpu" for device in data.devices())


def _host_part(data: jax.Array, box: Bounds) -> NDArray[Any]:
    """Return a box of one device's array as a NumPy array: a view if the array is on a CPU, else a copy of the box."""
    if box.shape == data.shape:
        return _uncached(data)
    if is_on_host(data):
        return _uncached(data)[box.slices]
    # Compiled once per shape: an ordinary slice has its position in the program, and would compile for each block.
    return np.asarray(jax.lax.dynamic_slice(data, box.start, box.shape))


def _uncached(data: jax.Array) -> NDArray[Any]:
    """Convert a `jax.Array` to a NumPy array, without leaving a host copy cached in the `jax.Array`."""
    alias = jax.make_array_from_single_device_arrays(
        data.shape, data.sharding, [s.data for s in data.addressable_shards]
    )
    return np.asarray(alias)
