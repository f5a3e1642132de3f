"""Make the target's files, copy or compute each missing tensor, and record it in the journal."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.converting.checking import check_result
from shardload.converting.computing import compute
from shardload.converting.plans import ConversionPlan, Copy
from shardload.converting.publishing import ConversionFolder, digest
from shardload.converting.source import Source
from shardload.converting.strided_copy import PieceWriter, Read, copy_view, parts_of, reader_of, reader_of_value
from shardload.errors import WriteError
from shardload.loaders.file_pieces import TensorPlace
from shardload.manifest import View, c_strides
from shardload.progress import Progress
from shardload.units import format_bytes, spare_bytes

_COMPUTING = ("keras", "keras-hub", "numpy")
"""Packages whose versions affect computed values."""


def write_all(
    source: Source, plan: ConversionPlan, staging: ConversionFolder, *, block_bytes: int, progress: Progress
) -> int:
    """Make the files and fill in the missing tensors; return how many tensors an earlier run had finished."""
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
    """Run the steps that compute values, and write the values."""
    by_variable = {id(copy.value.variable): copy for copy in copies}
    dtypes = {key: copy.wanted.dtype for key, copy in by_variable.items()}
    # A tensor is complete, and noted, once the last of the variables that share it is.
    left = Counter(copy.wanted.name for copy in copies)

    def done(variable: Any) -> None:
        copy = by_variable[id(variable)]
        left[copy.wanted.name] -= 1
        if not left[copy.wanted.name]:
            work.note(copy)

    for step in {id(c.value.step): c.value.step for c in copies}.values():
        assert step is not None
        # Several steps may compute one variable; only the last one's value counts (`computed_by`).
        final = {key for key, copy in by_variable.items() if copy.value.step is step}
        compute(
            step,
            source.manifest,
            {key: dtype for key, dtype in dtypes.items() if key in final},
            values=source.values.values(),
            write=lambda variable, value: work.put(by_variable[id(variable)], value),
            done=done,
        )


@dataclass(frozen=True, slots=True)
class _Work:
    """The target of the copies, and the block size."""

    staging: ConversionFolder
    places: Mapping[str, TensorPlace]
    block_bytes: int
    progress: Progress

    def is_done(self, copy: Copy) -> bool:
        """Whether an earlier run copied it, and the bytes in the files still match its digest."""
        # Nothing is flushed before the end: after a power failure the journal may list values that never reached disk.
        known = self.staging.done.get(copy.wanted.name)
        return known is not None and self._digest(copy) == known

    def note(self, copy: Copy) -> None:
        """Record it in the journal."""
        # Digest the file: values are written in the source's order, and a digest needs the target's.
        self.staging.note_done(copy.wanted.name, self._digest(copy))

    def copy(self, copy: Copy) -> None:
        """Copy a view of a stored tensor, or an array."""
        value, dtype = copy.value, copy.wanted.dtype
        if value.tensor is None or value.view is None:
            self.put(copy, np.asarray(value.array if value.live is None else value.live()))
            return
        # A block is in memory as read and as cast: the wider dtype decides how many elements it may have.
        item_bytes = max(dtype.itemsize, value.tensor.dtype.itemsize)
        for tensor, source, target in parts_of(value.tensor, value.view, copy.view):
            self._move(copy, reader_of(tensor, dtype), source, target, item_bytes)

    def put(self, copy: Copy, value: NDArray[Any]) -> None:
        """Write a value that is in memory."""
        dtype = copy.wanted.dtype
        source = View("", 0, value.shape, c_strides(value.shape))
        self._move(copy, reader_of_value(value, dtype), source, copy.view, dtype.itemsize)

    def _move(self, copy: Copy, read: Read, source: View, target: View, item_bytes: int) -> None:
        with PieceWriter(self.staging.result, self.places[copy.wanted.name], written=self.progress.advance) as writer:
            copy_view(read, writer.write, source, target, block_elements=max(1, self.block_bytes // item_bytes))

    def _digest(self, copy: Copy) -> str:
        return digest(self.staging.result, self.places[copy.wanted.name], copy.wanted.dtype.itemsize)


def identity(source: Source, plan: ConversionPlan, target: Path) -> str:
    """Return a digest of everything that determines the output."""
    # A file replaced by one of the same size and time of change differs in its inode or ctime.
    files = [
        (str(path), s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino)
        for path in source.files
        for s in [path.local_path().stat()]
    ]
    copies = [
        (c.wanted.name, c.wanted.shape, c.wanted.dtype.name, str(c.view), c.value.view and str(c.value.view))
        for c in plan.copies
    ]
    versions = [_version(name) for name in _COMPUTING] if any(c.value.step or c.value.live for c in plan.copies) else []
    # The 2 is a version: raise it if the same plan would write other bytes, so that no older journal is continued.
    text = json.dumps([2, source.manifest.source, files, str(target), plan.format, plan.shard_bytes, copies, versions])
    return hashlib.sha256(text.encode()).hexdigest()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_room(target: Path, plan: ConversionPlan) -> None:
    """Refuse a plan that the disk has no room for."""
    # The working folder is next to the target, on the same file system: otherwise one rename could not publish it.
    free = shutil.disk_usage(target.parent).free
    spare = spare_bytes(plan.nbytes)
    if free < plan.nbytes + spare:
        raise WriteError(
            f"Cannot write {target.name}: it needs {format_bytes(plan.nbytes)} and {format_bytes(spare)} to "
            f"spare, but {target.parent} has {format_bytes(free)} free. Free some space, or choose another folder."
        )
