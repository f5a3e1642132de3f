"""Write checkpoints with the exact architecture of published models and random weights from a seed.

Any size can be tried without a hub: the files have the names, shapes, dtypes and layout of the real
checkpoint, and Keras, KerasHub or safetensors can load them::

    preset        NAME/config.json, task.json, metadata.json, model.weights.h5      KerasHub
    h5            NAME.weights.h5 and NAME.json (the model's configuration)         Keras
    safetensors   NAME/config.json, model.safetensors or numbered shards + index    Hugging Face

Memory stays at a few hundred MB for any size (the model is built without buffers, weights pass through one
8 MiB chunk); a folder appears under its name only when it is complete.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardload.errors import WAYS_OUT, UnsupportedError, UsageError, WriteError
from shardload.families.parts.tensors import TensorSpec
from shardload.families.registry import model_type_of
from shardload.hub.config_forms import transformers_tensors
from shardload.loaders import safetensors
from shardload.loaders.file_pieces import Wanted
from shardload.progress import Progress, ProgressLike, as_progress
from shardload.resolve import root
from shardload.resolve.architectures import ArchitectureConfig, aliases, architectures, lookup, scaled
from shardload.stores.json_files import read_optional
from shardload.stores.local import local_target
from shardload.stores.location import nowhere
from shardload.units import check_kind, format_bytes, is_integer, plain_dtype_name, spare_bytes

Format = Literal["preset", "h5", "safetensors"]
FORMATS: tuple[Format, ...] = ("preset", "h5", "safetensors")
MAX_SEED = (1 << 32) - 1


@dataclass(frozen=True, slots=True)
class ArchitectureSummary:
    """One architecture that `synth` can write, as `names` lists it."""

    name: str
    aliases: tuple[str, ...]
    parameters: int
    nbytes: int
    """Bytes of all weights of the architecture in bfloat16."""


@dataclass(frozen=True, slots=True)
class _Job:
    """Everything that determines a checkpoint's bytes; `label` stores it there, so that an equal job can reuse them."""

    name: str
    config: ArchitectureConfig
    format: Format
    scale: float
    seed: int
    dtype: str

    @property
    def label(self) -> dict[str, Any]:
        """Return the configuration's entry that marks a checkpoint as synthetic, with the arguments that made it."""
        return {
            "synthetic": True,
            "architecture": self.name,
            "format": self.format,
            "scale": self.scale,
            "seed": self.seed,
            "dtype": self.dtype,
        }

    @property
    def nbytes(self) -> int:
        return _item_bytes(self.dtype) * sum(math.prod(s.shape) for s in transformers_tensors(self.config))


def names() -> list[ArchitectureSummary]:
    """Return the supported architectures with their sizes; imports nothing heavy."""
    found = []
    for name, config in architectures().items():
        parameters = sum(math.prod(spec.shape) for spec in transformers_tensors(config))
        others = tuple(alias for alias, of in aliases().items() if of == name)
        found.append(ArchitectureSummary(name, others, parameters, 2 * parameters))
    return found


def synth(
    name: str,
    *,
    format: Format = "preset",
    scale: float = 1.0,
    seed: int = 0,
    dtype: str = "bfloat16",
    directory: str | os.PathLike[str] | None = None,
    shard_bytes: int = safetensors.SHARD_BYTES,
    progress: ProgressLike = None,
    overwrite: bool = False,
) -> Path:
    """Write a checkpoint of an architecture with random weights; return its path.

    An existing checkpoint with the same architecture, format, scale, seed and dtype is reused.

    Args:
        name: An architecture of `names`, or an alias (``gemma2_7b`` is ``gemma2_9b``).
        format: ``preset``, ``h5`` or ``safetensors``.
        scale: Factor for the number of layers and all dims but heads. The name becomes ``NAME-x0.05``.
        seed: The same seed gives the same bytes.
        dtype: ``bfloat16``, ``float16`` or ``float32``.
        directory: Folder to write to; by default the checkpoint root, where ``shardload load NAME`` finds it.
        shard_bytes: Most bytes of one safetensors file; larger checkpoints are cut into several files.
        progress: As for `shardload.load`.
        overwrite: Replace a different checkpoint with the same name.

    Raises:
        SourceNotFoundError: When the architecture is unknown.
        WriteError: When there is no space, no permission, or something else with that name.
        UsageError: When the scale or the seed is out of range, or ``directory`` is a URL.
        UnsupportedError: When format or dtype is not supported.
    """
    shown = as_progress(progress)
    check_kind("name", name, str, "the name of an architecture")
    check_kind("format", format, str, f"one of {', '.join(FORMATS)}")
    check_kind("scale", scale, Real, "a number")
    check_kind("directory", directory, str | os.PathLike | None, "the path of a folder")
    check_kind("overwrite", overwrite, bool, "True or False")
    found, config = lookup(name)
    if format not in FORMATS:
        raise UnsupportedError(f"Cannot write the format {format!r}, expected one of {', '.join(FORMATS)}")
    if not 0 < scale <= 1:
        raise UsageError(f"scale={scale} is out of range, expected more than 0 and at most 1")
    if not is_integer(seed) or not 0 <= seed <= MAX_SEED:
        raise UsageError(f"seed={seed!r} is not valid, expected an integer from 0 to {MAX_SEED}")
    scale, seed, dtype = float(scale), int(seed), plain_dtype_name(dtype, doing="write")
    job = _Job(found, scaled(config, scale), format, scale, seed, dtype)
    folder = local_target(directory) if directory is not None else root()
    stem = found if scale == 1 else f"{found}-x{scale:g}"
    target = folder / (f"{stem}.weights.h5" if format == "h5" else stem)
    with _as_write_errors(folder):
        _recover(target)
    if target.exists():
        about = target / "config.json" if target.is_dir() else Path(f"{str(target).removesuffix('.weights.h5')}.json")
        described = read_optional(about)
        if isinstance(described, dict) and described.get("shardload") == job.label:
            return target
        if not overwrite:
            raise WriteError(
                f"{target} already exists with other content. Replace it with overwrite=True (--overwrite)"
            )
    # Only safetensors are cut into shards.
    largest = min(job.nbytes, shard_bytes) if job.format == "safetensors" else job.nbytes
    what = f"{stem} ({format_bytes(job.nbytes)}) "
    with _as_write_errors(folder, what), _workspace(folder, stem, job.nbytes, largest_file=largest) as work:
        shown.start(job.nbytes, f"Writing {stem}")
        try:
            _write(job, work, stem=stem, shard_bytes=shard_bytes, progress=shown)
        finally:
            shown.stop()
        _publish(work, target, job.format, stem)
    return target


def _write(job: _Job, work: Path, *, stem: str, shard_bytes: int, progress: Progress) -> None:
    if job.format == "safetensors":
        _write_safetensors(job, work, shard_bytes=shard_bytes, progress=progress)
    elif job.format == "preset":
        _write_keras(job, work, "model.weights.h5", progress=progress)
    else:
        _write_keras(job, work, f"{stem}.weights.h5", progress=progress)
        (work / "config.json").rename(work / f"{stem}.json")


def _write_safetensors(job: _Job, work: Path, *, shard_bytes: int, progress: Progress) -> None:
    # A tensor's number seeds its values, so a checkpoint has the same values however it is cut into files.
    from shardload.loaders import open_manifest

    specs = transformers_tensors(job.config)
    tensors = [Wanted(spec.name, spec.shape, np.dtype(job.dtype)) for spec in specs]
    places = safetensors.write_skeleton(work, tensors, shard_bytes=shard_bytes)
    for number, (spec, place) in enumerate(zip(specs, places, strict=True)):
        with (work / place.pieces[0].path).open("r+b", buffering=0) as file:
            file.seek(place.pieces[0].offset)
            _stream(file, spec, job, number=number, progress=progress)
    config = {**job.config, "torch_dtype": job.dtype, "shardload": job.label}
    (work / "config.json").write_text(json.dumps(config, indent=2))
    written = {name: (tensor.shape, tensor.dtype) for name, tensor in open_manifest(work).tensors.items()}
    if written != {t.name: (t.shape, t.dtype) for t in tensors}:
        raise WriteError(f"Cannot read back {work}: it has other tensors than were written. Write to another disk")


def _stream(file: Any, spec: TensorSpec, job: _Job, *, number: int, progress: Progress) -> None:
    """Write random values for one tensor at the file's current position; its ``number`` is a part of their seed."""
    size = math.prod(spec.shape)
    if spec.is_zero:  # as the new file is
        progress.advance(size * _item_bytes(job.dtype))
        return
    for chunk in random_values(size, dtype=job.dtype, near_one=spec.near_one, seed=(job.seed, number)):
        view = chunk.data.cast("B")
        while view:  # a raw write may be partial
            view = view[file.write(view) :]
        progress.advance(chunk.nbytes)


def _write_keras(job: _Job, work: Path, filename: str, *, progress: Progress) -> None:
    """Write the files of the formats ``preset`` and ``h5`` to ``work``, as KerasHub and Keras write them."""
    from shardload.hub import building, described
    from shardload.keras_bridge.abstraction import abstract
    from shardload.keras_bridge.hub_imports import backbone_of
    from shardload.keras_bridge.saving import saved_layout
    from shardload.keras_bridge.weights_files import check_for_keras, listed_by_keras
    from shardload.loaders.hdf5 import writer as h5

    with abstract():
        config = {**job.config, "torch_dtype": job.dtype}
        model = building.build_model(described.hugging_face(config, nowhere(job.name), stored=job.dtype))
    # Without task.json, an .h5's configuration describes the backbone, whose weights are all that the file has.
    described.save_description(model, work, extra={"shardload": job.label}, task=job.format == "preset")
    backbone = backbone_of(model)
    layout = saved_layout(backbone)
    tensors = [Wanted(name, tuple(v.shape), np.dtype(v.dtype)) for name, v in layout.variables.items()]
    places = h5.write_skeleton(work / filename, tensors, names=layout.names)
    check_for_keras(work / filename, listed_by_keras(backbone))
    numbers = {id(v): number for number, v in enumerate(backbone.variables)}  # seeds the values
    near_one = () if model_type_of(job.config).norms_minus_one else ("/scale", "/gamma")
    with (work / filename).open("r+b", buffering=0) as file:
        for place, variable in zip(places, layout.variables.values(), strict=True):
            file.seek(place.pieces[0].offset)
            spec = TensorSpec(place.name, tuple(variable.shape), variable.path.endswith(near_one))
            _stream(file, spec, job, number=numbers[id(variable)], progress=progress)


@contextlib.contextmanager
def _workspace(folder: Path, stem: str, nbytes: int, *, largest_file: int) -> Iterator[Path]:
    """Yield a temporary folder in ``folder`` to write the checkpoint to; always remove it afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    spare = spare_bytes(nbytes)
    if free < nbytes + spare:
        raise WriteError(
            f"Cannot write {stem}: it needs {format_bytes(nbytes)} and {format_bytes(spare)} to spare, but "
            f"{folder} has {format_bytes(free)} free. Free some space, or choose another folder (SHARDLOAD_HOME) or a "
            "smaller scale"
        )
    with _locked(folder, wait=True):
        # What killed runs left; a run that lives has locked its folder.
        for left in folder.glob(f".{glob.escape(stem)}.*.partial"):
            with _locked(left) as is_free:
                if is_free:
                    shutil.rmtree(left, ignore_errors=True)
        # On the target's file system, where publishing is a rename.
        work = Path(tempfile.mkdtemp(prefix=f".{stem}.", suffix=".partial", dir=folder))
        in_use = contextlib.ExitStack()
        in_use.enter_context(_locked(work))
    try:
        with in_use:
            # libhdf5 crashes if it reaches the limit of file sizes while writing. Growing a sparse file takes no space,
            # but fails beyond the limit of the process or the file system.
            with (work / "size").open("wb") as file:
                file.truncate(largest_file)
            (work / "size").unlink()
            yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path, *, wait: bool = False) -> Iterator[bool]:
    """Lock a folder against other calls of `synth`; yield whether that worked, as not every file system has locks."""
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        locked = True
    except OSError:
        locked = False
    try:
        yield locked
    finally:
        os.close(fd)


def _publish(work: Path, target: Path, format: Format, stem: str) -> None:
    """Move the complete checkpoint in ``work`` to its final name. If it is two files, the weights are moved last."""
    # A run that is killed between the two leaves a description alone, not weights without one.
    if format == "h5":
        (work / f"{stem}.json").replace(target.with_name(f"{stem}.json"))
        (work / target.name).replace(target)
        return
    work.chmod(0o755)  # mkdtemp makes folders for their owner only
    # rename() cannot replace a folder that has files, so the old one steps aside first.
    if target.exists():
        target.rename(_replaced(target))
    work.rename(target)
    _recover(target)


def _replaced(target: Path) -> Path:
    """Return the temporary name that an old checkpoint has while a new one takes its place."""
    return target.with_name(f".{target.name}.replaced")


def _recover(target: Path) -> None:
    """Restore the old checkpoint if a run was killed while replacing it; remove it if the new one is complete."""
    old = _replaced(target)
    if not target.exists() and old.exists():
        old.rename(target)
    elif old.exists():
        shutil.rmtree(old) if old.is_dir() and not old.is_symlink() else old.unlink()


@contextlib.contextmanager
def _as_write_errors(folder: Path, what: str = "") -> Iterator[None]:
    try:
        yield
    except WriteError:
        raise
    except OSError as error:
        advice = f"{WAYS_OUT[error.errno]}. The" if error.errno in WAYS_OUT else "The"
        made = WriteError(
            f"Cannot write {what}to {folder}: {error.strerror or error}. {advice} unfinished files were removed. To "
            "choose another folder, set SHARDLOAD_HOME, or pass directory= (--directory)"
        )
        made.errno = error.errno
        raise made from error


# ---- random weights at the speed of memory -------------------------------------------------------

_CHUNK_BYTES = 8 << 20
"""Bytes of random values made at a time: few enough to stay in the CPU cache, enough to make calls rare."""
# Seeded bits, shaped into floating-point numbers by two masks: bits that stay random, and bits that are set. A weight
# keeps a random sign, a random mantissa and the last bit of a fixed exponent:
#
#     bfloat16    s eeeeeee r mmmmmmm      |x| in [2**-7, 2**-5), mean 0, root mean square 0.019
#     near one    0 0111111 1 0000mmm      x in [1, 1.06)
#
# This is the usual initial spread of transformers (0.02), with every mantissa bit in use, so that a misplaced byte
# never goes unnoticed; drawing normals would take ten times as long.
_Masks = tuple[type[np.unsignedinteger[Any]], tuple[int, int], tuple[int, int]]
_MASKS: dict[str, _Masks] = {
    "bfloat16": (np.uint16, (0x80FF, 0x3C00), (0x0007, 0x3F80)),
    "float16": (np.uint16, (0x87FF, 0x2000), (0x003F, 0x3C00)),
    "float32": (np.uint32, (0x80FFFFFF, 0x3C000000), (0x0007FFFF, 0x3F800000)),
}
"""How random bits become random floats, for each dtype: an unsigned integer type of its width, two masks (bits that
stay random, bits that are set) for values around zero, and two for values around one."""
DTYPES = tuple(_MASKS)
"""Dtypes in which random weights can be written."""


def _item_bytes(dtype: str) -> int:
    if dtype not in _MASKS:
        raise UnsupportedError(f"Cannot write random weights as {dtype!r}, expected one of {', '.join(DTYPES)}")
    return np.dtype(_MASKS[dtype][0]).itemsize


def random_values(size: int, *, dtype: str, near_one: bool, seed: tuple[int, int]) -> Iterator[NDArray[Any]]:
    """Yield ``size`` random values in chunks of `_CHUNK_BYTES`, as unsigned integers with the bits of the values.

    ``near_one``: whether they are around one, as scales of norms are, or around zero. ``seed``: the seed of the
    checkpoint, and the number of the tensor in it.
    """
    width, around_zero, around_one = _MASKS[dtype]
    keep, base = map(width, around_one if near_one else around_zero)
    per_chunk = _CHUNK_BYTES // _item_bytes(dtype)
    # The fastest of NumPy's generators, used raw: no conversion to floats, only two masks.
    bits = np.random.SFC64(np.random.SeedSequence(seed))
    for start in range(0, size, per_chunk):
        count = min(per_chunk, size - start)
        # One word of the generator has eight bytes: four values of bfloat16, two of float32.
        words = -(-count * _item_bytes(dtype) // 8)
        values = bits.random_raw(words).view(width)[:count]
        np.bitwise_and(values, keep, out=values)
        np.bitwise_or(values, base, out=values)
        yield values


__all__ = ["FORMATS", "MAX_SEED", "ArchitectureSummary", "Format", "names", "synth"]
