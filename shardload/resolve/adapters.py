"""Open adapters of PEFT, and merge them into an opened checkpoint that has Hugging Face's names."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from shardload.errors import UsageError
from shardload.loaders import spec_of
from shardload.loaders.peft import Weighted, merged
from shardload.loaders.peft.folder import open_adapter
from shardload.manifest import Manifest
from shardload.resolve import resolve
from shardload.resolve.opening import OpenedSource
from shardload.units import is_real


def weighted_folders(adapter: Any) -> tuple[tuple[str | os.PathLike[str], float], ...]:
    """Return the argument ``adapter`` as pairs of a folder and its weight, checked; empty for ``None``."""
    expected = "the folder of a PEFT adapter, a list of such folders, or a mapping from folders to weights"
    if adapter is None:
        return ()
    if isinstance(adapter, str | os.PathLike):
        pairs: list[tuple[Any, Any]] = [(adapter, 1.0)]
    elif isinstance(adapter, Mapping):
        pairs = list(adapter.items())
    elif isinstance(adapter, Iterable):
        pairs = [(folder, 1.0) for folder in adapter]
    else:
        raise UsageError(f"Cannot use adapter={adapter!r:.60}: expected {expected}")
    for folder, weight in pairs:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise UsageError(f"Cannot use adapter={adapter!r:.60}: expected {expected}")
        if not is_real(weight) or not math.isfinite(weight):
            raise UsageError(f"Cannot use the adapter {folder} with weight {weight!r:.60}: expected a finite number")
    if not pairs:
        raise UsageError(f"Cannot use adapter={adapter!r:.60}: it is empty, expected {expected}")
    return tuple((folder, float(weight)) for folder, weight in pairs)


def open_adapters(folders: Iterable[tuple[str | os.PathLike[str], float]]) -> tuple[Weighted, ...]:
    """Open the headers of adapters; see `shardload.loaders.peft.folder.open_adapter` for what is raised."""
    return tuple(Weighted(open_adapter(resolve(folder).location), weight) for folder, weight in folders)


def can_merge(manifest: Manifest) -> bool:
    """Whether the tensors of a checkpoint have the names that adapters use, so that they are merged while read."""
    return spec_of(manifest).tensor_names == "hugging-face"


def with_adapters(opened: OpenedSource, adapters: tuple[Weighted, ...], *, dtype: Any = None) -> OpenedSource:
    """Return an opened checkpoint with adapters merged into it, if it `can_merge`; else ``opened`` itself.

    ``dtype``: dtype or policy of the model's variables; ``None``: that of each stored weight.
    """
    if not adapters or not can_merge(opened.manifest):
        return opened
    found = merged(opened.manifest, adapters, dtype=merge_dtype(dtype))
    added = found.notes[len(opened.manifest.notes) :]
    return replace(opened, manifest=found, notes=(*opened.notes, *added), adapters=adapters)


def merge_dtype(dtype: Any) -> np.dtype[Any] | None:
    """Return the dtype to round merged weights to: that of the variables, or float32, which a load casts again."""
    if dtype is None or (isinstance(dtype, str) and dtype in ("bfloat16", "float16", "float32", "float64")):
        return None if dtype is None else np.dtype(dtype)
    return np.dtype(np.float32)
