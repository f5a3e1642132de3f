"""Restore the files that layers save besides variables (vocabularies) into a model, new or existing.

.keras archive    members below assets/                      ─┐
training step     item "assets": a tree of arrays of bytes   ─┴► a temporary folder ─► each layer's load_assets

The folder is written and verified before a model is changed. Layers read it when their weights are loaded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shardload.errors import SourceError, UnsafeSourceError, public_name
from shardload.keras_bridge.extra_state import has_empty_vocabulary, is_empty_vocabulary, unadapted_layers
from shardload.keras_bridge.saving import load_layer_assets as load_keras_assets
from shardload.keras_bridge.saving import objects_with_files
from shardload.loaders import spec_of
from shardload.loaders.contents import descendant
from shardload.loaders.orbax.loader import open_orbax
from shardload.manifest import Manifest
from shardload.mapping.state_tree import renamed_key
from shardload.mapping.stored_values import stored_values, unstored_hook
from shardload.reports.facts import Note, NoteKind
from shardload.stores.local import located, temporary_folder
from shardload.transfer.byte_source import Verifier, check_tensor
from shardload.transfer.read_tensor import read_rows, row_ranges

_ITEM = "assets"
"""Name of the folder in a training step with the files that layers save; Keras' own callback uses the same name."""
_ROWS_BYTES = 1 << 20
"""Number of bytes of a stored file to copy at a time, so that a large file is never in memory as a whole."""


@contextmanager
def staged_assets(manifest: Manifest, *, check: Verifier | None = None) -> Iterator[Path | None]:
    """Copy the files that layers saved into a temporary folder; yield the folder, or ``None`` if there are no files.

    Damaged files are thus found before the model changes: ``check`` compares the bytes with their checksums. Refuses a
    file whose path leaves its folder, or whose declared size far exceeds what is stored.
    """
    files = _files(manifest, check)
    # Only if there are any: most checkpoints have none, and a container may have no folder for temporary files.
    if (first := next(files, None)) is None:
        yield None
        return
    # To disk, because `load_assets` of a layer takes a folder.
    with temporary_folder("shardload-assets-") as made:
        folder = made.resolve()
        _write(itertools.chain([first], files), manifest, folder)
        yield folder


def load_assets(model: Any, manifest: Manifest, folder: Path | None) -> None:
    """Load the files that layers saved, from ``folder``, into a model that was built from the same checkpoint.

    Call it after its weights are loaded: a layer may need them to load its files.
    """
    if folder is None:
        return
    for path, layer, error in load_keras_assets(model, folder):
        # Saved before it was adapted, so the model that was saved had no vocabulary either.
        if has_empty_vocabulary(layer) and (not (folder / path).exists() or is_empty_vocabulary(layer, folder / path)):
            continue
        # They may belong to values that steps of earlier versions lack: the weights of a vocabulary (``tf_idf``).
        lacking = unstored_hook(model, layer, stored_values(manifest)) if spec_of(manifest).is_step else None
        why = lacking or f"{public_name(error)}: {error}"
        raise SourceError(
            f"Cannot load the files that {layer!r} saved in {manifest.source}: {why}. Build the "
            "model yourself, set its vocabulary (adapt(), set_vocabulary()), then call "
            "shardload.load_weights(model, source)"
        ) from error


def restore_assets(
    model: Any, manifest: Manifest, folder: Path | None, *, rename: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Replace the vocabularies and other files of an existing model's layers by those in ``folder``; return notes.

    These were saved with the weights that the model gets. ``rename`` maps prefixes of stored paths to the model's.
    """
    if folder is None:
        return ()
    folders = ["", *(path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_dir())]
    stored = {renamed_key(path, rename or {}): path for path in folders}
    notes, taken = [], set()
    for path, layer in objects_with_files(model):
        if (source := stored.get(path)) is None:
            continue
        taken.add(source)
        if is_empty_vocabulary(layer, folder / source):
            continue
        own = _own_files(layer)
        names = {path.name for path in (folder / source).iterdir() if path.is_file()}
        # Further folders in it belong to other layers.
        if own and names <= own.keys() and all(_content(folder / source / name) == own[name] for name in own):
            continue
        had_files = any(own.values()) and not has_empty_vocabulary(layer)
        what = f"the files of {type(layer).__name__} at {path or 'the root'!r} (a vocabulary)"
        try:
            layer.load_assets(str(folder / source))
        except Exception as error:  # of any kind: this may be a user's hook
            notes.append(f"{what} were not loaded: load_assets raised {public_name(error)}: {error}")
            continue
        if had_files:
            notes.append(f"{what} differed from the stored ones, which replaced them, as the weights belong to them")
    untaken = [path for path in stored.values() if path and not taken & {path, *map(Path.as_posix, Path(path).parents)}]
    if left := [path for path in untaken if any(map(Path.is_file, (folder / path).iterdir()))]:
        notes.append(f"files of layers that the model does not have were not loaded: {', '.join(left)}")
    return tuple(Note(text, NoteKind.ASSETS) for text in notes)


def empty_vocabularies(model: Any, source: str) -> tuple[str, ...]:
    """Return a note for the report for each lookup layer (`StringLookup`) that still has no vocabulary after a load."""
    return tuple(
        Note(
            f"{type(layer).__name__} at {path or 'the root'!r} has no vocabulary, as {source} contains none for it: "
            "call its adapt() or set_vocabulary()",
            NoteKind.ASSETS,
        )
        for path, layer in unadapted_layers(model)
    )


def _own_files(layer: Any) -> dict[str, bytes]:
    """Return name → content of the files that a layer would save now, to compare; empty if ``save_assets`` fails."""
    with temporary_folder("shardload-assets-") as made:
        try:
            layer.save_assets(str(made))
        except Exception:  # of any kind: it may have nothing to save yet
            return {}
        return {path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()}


def _content(file: Path) -> bytes | None:
    return file.read_bytes() if file.is_file() else None


def has_assets(manifest: Manifest) -> bool:
    """Whether a checkpoint contains files that layers saved; does not read them."""
    return next(_files(manifest, None), None) is not None


def read_assets(manifest: Manifest) -> dict[str, Any]:
    """Return the files that layers saved, as nested dicts of uint8 arrays; check paths and sizes, but not the bytes."""
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
    """Write files below ``folder``; each is given as a name and a function that writes the content to an open file."""
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
    elif spec.is_step and (item := manifest.location / _ITEM).is_folder():
        yield from _of_step(open_orbax(item), check)


def _of_step(manifest: Manifest, check: Verifier | None) -> Iterator[tuple[str, Any]]:
    for name, keys in manifest.metadata["tree"].items():
        tensor = manifest.tensors[name]
        if tensor.dtype.name != "uint8" or len(tensor.shape) != 1:
            raise SourceError(
                f"Cannot read the file {name!r} in {manifest.source}: it is stored as {tensor.dtype} {tensor.shape}, "
                "expected a one-dimensional array of uint8. The step is damaged; restore another one"
            )
        # Keys are joined with slashes below, so the key "../b" could leave the folder.
        if unsafe := [key for key in keys if "/" in key]:
            raise UnsafeSourceError(
                f"Cannot read the file {name!r} in {manifest.source}: its path has the part {unsafe[0]!r}, expected "
                "names without a slash, which could leave the folder. Use a checkpoint from a source that you trust"
            )
        if check is not None:
            check_tensor(check, tensor)

        def write(file: BinaryIO, tensor: Any = tensor) -> None:
            for start, stop in row_ranges(tensor, limit_bytes=_ROWS_BYTES):
                file.write(read_rows(tensor, start, stop).tobytes())

        yield "/".join(keys), write
