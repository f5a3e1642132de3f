"""Restore the files that layers save besides variables (vocabularies) into a new model.

.keras archive    members below assets/                      ─┐
training step     item "assets": a tree of arrays of bytes   ─┴► a temporary folder ─► each layer's load_assets
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardload.errors import SourceError, UnsafeSourceError
from shardload.keras_bridge.saving import load_assets as load_keras_assets
from shardload.loaders import spec_of
from shardload.loaders.folder import descendant
from shardload.loaders.orbax import open_orbax
from shardload.manifest import Manifest
from shardload.mapping.stored_values import stored_values, unstored_hook
from shardload.stores.local import located, temporary_folder
from shardload.transfer.byte_source import Verifier, check_tensor
from shardload.transfer.read_tensor import read_rows, row_ranges

ITEM = "assets"
"""The item of a step; Keras' own name for it."""
_ROWS_BYTES = 1 << 20
"""Bytes copied at once, so that a large file is never in memory as a whole."""


def load_assets(model: Any, manifest: Manifest, *, check: Verifier | None = None) -> None:
    """Load the files that layers of ``model`` saved; does nothing for formats without files.

    Args:
        model: Built from ``manifest`` and filled, because hooks may use the values of variables.
        manifest: Any format.
        check: The checkpoint's digests.

    Raises:
        SourceError: When a layer cannot load its files.
        UnsafeSourceError: When a file's path leaves its directory, or its declared size far exceeds what is stored.
        DamagedError: When bytes do not match their digest.
        WriteError: When it has such files, and no folder for temporary files can be written.
    """
    # To disk, because `load_assets` of a layer takes a folder.
    files = _files(manifest, check)
    # Only if there are any: most checkpoints have none, and a container may have no folder for temporary files.
    if (first := next(files, None)) is None:
        return
    with temporary_folder("shardload-assets-") as made:
        folder = made.resolve()
        _write(itertools.chain([first], files), manifest, folder)
        for layer, error in load_keras_assets(model, folder):
            # They may belong to values that steps of earlier versions lack: the weights of a vocabulary (``tf_idf``).
            lacking = unstored_hook(model, layer, stored_values(manifest)) if spec_of(manifest).is_step else None
            why = lacking or f"{type(error).__name__}: {error}"
            raise SourceError(
                f"Cannot load the files that {layer!r} saved in {manifest.source}: {why}. Build the "
                "model yourself, set its vocabulary (adapt(), set_vocabulary()), then call "
                "shardload.load_weights(model, source)"
            ) from error


def has_assets(manifest: Manifest) -> bool:
    """Whether layers saved files in a checkpoint; reads no content."""
    return next(_files(manifest, None), None) is not None


def read_assets(manifest: Manifest) -> dict[str, Any]:
    """Return the files that layers saved as nested arrays of uint8, unverified; raises like `load_assets`."""
    files = _files(manifest, None)
    if (first := next(files, None)) is None:
        return {}
    # To disk, where a name that leaves its folder is refused.
    with temporary_folder("shardload-assets-") as made:
        folder = made.resolve()
        _write(itertools.chain([first], files), manifest, folder)
        return _nested(folder)


def _nested(folder: Path) -> dict[str, Any]:
    return {
        path.name: _nested(path) if path.is_dir() else np.frombuffer(path.read_bytes(), np.uint8)
        for path in sorted(folder.iterdir())
    }


def _write(files: Iterable[tuple[str, Any]], manifest: Manifest, folder: Path) -> None:
    """Write the files below ``folder``."""
    for name, write in files:
        path = descendant(located(folder), name, named_by=manifest.source).local_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        # x: two members with one name would overwrite each other.
        with path.open("xb") as file:
            write(file)


def _files(manifest: Manifest, check: Verifier | None) -> Iterator[tuple[str, Any]]:
    spec = spec_of(manifest)
    if spec.assets is not None:
        yield from spec.assets(manifest.location)
    elif spec.is_step and (item := manifest.location / ITEM).is_folder():
        yield from _of_step(open_orbax(item), check)


def _of_step(manifest: Manifest, check: Verifier | None) -> Iterator[tuple[str, Any]]:
    for name, keys in manifest.metadata["tree"].items():
        tensor = manifest.tensors[name]
        if tensor.dtype.name != "uint8" or len(tensor.shape) != 1:
            raise SourceError(
                f"Cannot read the file {name!r} in {manifest.source}: it is stored as {tensor.dtype} {tensor.shape}, "
                "expected a one-dimensional array of uint8"
            )
        # Keys are joined with slashes below, so the key "../b" could leave the folder.
        if any("/" in key for key in keys):
            raise UnsafeSourceError(
                f"Cannot read the file {name!r} in {manifest.source}: a part of its name has a slash"
            )
        if check is not None:
            check_tensor(check, tensor)

        def write(file: BinaryIO, tensor: Any = tensor) -> None:
            for start, stop in row_ranges(tensor, limit_bytes=_ROWS_BYTES):
                file.write(read_rows(tensor, start, stop).tobytes())

        yield "/".join(keys), write
