"""A source, opened: its manifest, what checks the bytes that are read of it, and what to tell about it."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from shardload.errors import SourceError, UsageError
from shardload.loaders import folder_of, open_manifest, spec_of
from shardload.loaders.registry import names as format_names
from shardload.manifest import Manifest
from shardload.resolve import Resolved, resolve
from shardload.resolve.stores import open_remote
from shardload.steps.digests import Checker
from shardload.steps.listing import is_ours, latest_of_ours
from shardload.stores.remote import is_url

_UNVERIFIED = "not saved by shardload: unverified, as it has no digests"


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """What the headers of a source say, and whether its bytes can be verified."""

    manifest: Manifest
    checker: Checker | None
    """Of a training step with digests."""
    notes: tuple[str, ...]


def open_source(
    source: str | os.PathLike[str], format: str | None, *, described: bool = False, verify: bool = True
) -> OpenedSource:
    """Find and open a source.

    Args:
        source: A path, name, handle or address.
        format: Name of a format, to insist on it.
        described: Take the folder of a file where that describes the file's model.
        verify: Whether its tensors are about to be read.

    Raises:
        UsageError: When there is no such format.
        SourceNotFoundError: When the name resolves to nothing.
        SourceError: When the checkpoint contradicts itself.
    """
    if format is not None and format not in (known := format_names()):
        raise UsageError(f"There is no format {format!r}; there are {', '.join(known)}")
    if is_url(source):
        found, manifest = open_remote(str(source), format=format)
        return _noted(found, manifest, Checker.of_step(found.path) if verify else None, verify=verify)
    found = _resolve(source, format, described=described)
    try:
        manifest = open_manifest(found.path, format=format)
    except SourceError:
        if verify and (step := latest_of_ours(found.path)) is not None:
            Checker.of_step(step)  # says what is damaged, if that is why
        raise
    if not verify or not spec_of(manifest).is_step or not is_ours(manifest.source):
        return _noted(found, manifest, None, verify=verify)
    checker = Checker.of_step(manifest.source)
    # Opened again: some values were taken from its small files before those were checked.
    return _noted(found, open_manifest(manifest.source, format=format), checker, verify=verify)


def _resolve(source: str | os.PathLike[str], format: str | None, *, described: bool) -> Resolved:
    """Where the source is; where its model is described beside it and that is wanted, the folder with both."""
    found = resolve(source)
    if not described or (folder := folder_of(found.path, format=format)) is None:
        return found
    told = f"config.json in {folder} describes the model of {Path(found.path).name}: loaded the folder"
    return replace(found, path=str(folder), note="; ".join(note for note in (found.note, told) if note))


def _noted(found: Resolved, manifest: Manifest, checker: Checker | None, *, verify: bool) -> OpenedSource:
    unverified = verify and spec_of(manifest).is_step and checker is None
    notes = (found.note, _UNVERIFIED if unverified else "")
    return OpenedSource(manifest, checker, tuple(note for note in notes if note))
