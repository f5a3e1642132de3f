"""Open a source: find it, read its headers, and return a manifest, notes, and a checker for the bytes read later."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shardload.errors import SourceError, SourceNotFoundError, UnsupportedError, UsageError, suggests_arguments
from shardload.families.registry import model_type_of
from shardload.loaders import describe_folder, folder_of, open_manifest, open_variant, spec_of
from shardload.loaders.contents import CONFIG
from shardload.loaders.orbax.loader import SPEC, open_orbax
from shardload.loaders.peft import Weighted
from shardload.loaders.registry import names as format_names
from shardload.manifest import Manifest
from shardload.resolve import Resolved, resolve
from shardload.resolve.architectures import lookup
from shardload.runs.digests import Checker
from shardload.runs.listing import find_step, is_ours, latest_of_ours, prepared, remote_steps
from shardload.runs.step import StepInfo
from shardload.stores.json_files import read_optional
from shardload.stores.location import Location, nowhere

_HUGGING_FACE = "hf-safetensors"
"""Format in which an architecture is planned when none of its weights are on this machine."""
_UNLISTED = "The server shows no list of this folder, so only usual names were looked for: give the address of a file"
_UNVERIFIED = "not saved by shardload: unverified, as it has no digests"


@dataclass(frozen=True, slots=True)
class OpenedSource:
    """An opened source: its manifest (what its headers say), a checker of its bytes, and notes for people."""

    manifest: Manifest
    checker: Checker | None
    """Verifies the bytes of a training step that has digests; ``None`` for other sources."""
    notes: tuple[str, ...]
    adapters: tuple[Weighted, ...] = ()
    """Adapters of PEFT that are merged into the manifest."""


def open_source(
    source: str | os.PathLike[str] | Location,
    format: str | None,
    *,
    described: bool = False,
    verify: bool = True,
    weights: bool = True,
    step: int | str = "latest",
    ignore_config: Sequence[str] = (),
) -> OpenedSource:
    """Find the checkpoint that a source refers to, and read its headers.

    Args:
        source: A path, name, handle or address; or a location in any store.
        format: Name of the format that the source must have; ``None`` for any.
        described: Whether the model's configuration is needed, too. Then, instead of a single weights file, its whole
            folder is opened if the ``config.json`` in that folder describes the model in the file.
        verify: Return a checker for the bytes, if the source has digests; false if only headers are read.
        weights: Whether its weights are needed; otherwise an architecture or a configuration is enough.
        step: Which step of a folder of training steps to open: a number, ``"latest"`` or ``"best"``.
        ignore_config: Names of fields of a Hugging Face ``config.json``. A plan without weights may build a KerasHub
            model from it, to list the tensors; in these fields, the model may differ from the configuration.
    """
    known = format_names()
    if format is not None and not (isinstance(format, str) and format in known):
        raise UsageError(f"Unknown format {format!r}; supported formats: {', '.join(known)}")
    # 1. A location: a store that the caller provides.
    if isinstance(source, Location):
        return _of_location(source, format, described=described)
    resolved = find_source(source, weights=weights, step=step, format=format)
    # 2. A training step in a store.
    if resolved.location.store.is_verifying:
        checker = Checker.of_step(resolved.location) if verify else None
        return _noted(resolved, open_orbax(resolved.location), checker, verify=verify)
    # 3. A checkpoint on this machine, in a store, or in a hub; for a plan, a description of one is enough.
    resolved = _described(resolved, format, described=described, weights=weights)
    if not weights and (without := _without_weights(resolved, format, ignore_config)) is not None:
        return without
    where = resolved.location
    try:
        variant = open_variant(where, format=format) if described and resolved.architecture is None else None
        manifest = variant or open_manifest(where, format=format)
    except SourceNotFoundError as error:
        named = not weights and Path(source).name == CONFIG  # other files in its folder do not matter
        without = _without_weights(resolved, format, ignore_config, with_weights=True) if named else None
        if without is not None:
            return without
        if where.store.is_listed(where.key):
            raise
        raise SourceNotFoundError(f"{error}. {_UNLISTED}") from error
    except UnsupportedError as error:
        if where.store.is_listed(where.key):
            raise
        raise UnsupportedError(f"{error}. {_UNLISTED}") from error
    except SourceError:
        # Headers of a damaged step contradict themselves in many ways: digests tell damage from a bad checkpoint.
        if verify and not where.store.is_remote and (damaged := latest_of_ours(resolved.path)) is not None:
            Checker.of_step(damaged)  # raises a clearer error if damage is the cause
        raise
    if not verify or not spec_of(manifest).is_step or not is_ours(manifest.location):
        return _noted(resolved, manifest, None, verify=verify)
    checker = Checker.of_step(manifest.location)
    # Open again, because the first manifest contains values from small files that were not verified yet.
    return _noted(resolved, open_manifest(manifest.location, format=format), checker, verify=verify)


def find_source(
    source: str | os.PathLike[str],
    *,
    weights: bool = True,
    step: int | str = "latest",
    format: str | None = None,
) -> Resolved:
    """Find the checkpoint that a source refers to; arguments are as for `open_source`.

    A step that shardload saved in a remote store is returned as a store of its own, which verifies what is read.
    """
    # A folder of steps opens as its latest one; other steps have to be found first.
    if not (isinstance(step, str) and step == "latest"):
        root = resolve(source)
        number: Any = step  # `find_step` checks it
        found = prepared(find_step(root.remote or root.path, number))
        return Resolved(found.where, _title(found), remote=found.remote)
    resolved = resolve(source, weights=weights)
    if resolved.remote is None or format not in (None, SPEC.name):
        return resolved
    steps = remote_steps(resolved.remote, "latest")
    if not steps or not steps[-1].ours:
        return resolved
    info = prepared(steps[-1])
    return Resolved(info.where, _title(info), remote=info.location)


def _title(info: StepInfo) -> str | None:
    return f"step {info.step}, verified" if info.url is not None and info.ours else None


def _of_location(source: Location, format: str | None, *, described: bool) -> OpenedSource:
    folder = folder_of(source, format=format) if described else None
    variant = open_variant(source, format=format) if described and folder is None else None
    manifest = variant or open_manifest(folder or source, format=format)
    return OpenedSource(manifest, None, manifest.notes)


def _described(resolved: Resolved, format: str | None, *, described: bool, weights: bool) -> Resolved:
    """Return the folder of a weights file, if that describes its model and ``described`` is true."""
    if resolved.architecture is not None:
        return resolved
    where = resolved.location
    if not weights and where.name == CONFIG and where.is_file():
        return _at(resolved, where.parent)
    if not described or (folder := folder_of(where, format=format)) is None:
        return resolved
    note = f"config.json in {folder} describes the model of {where.name}: loaded the folder"
    return _at(replace(resolved, note="; ".join(filter(None, (resolved.note, note)))), folder)


def _at(resolved: Resolved, where: Location) -> Resolved:
    return replace(resolved, path=str(where), remote=where if where.store.is_remote else None)


def _without_weights(
    resolved: Resolved, format: str | None, ignore_config: Sequence[str], *, with_weights: bool = False
) -> OpenedSource | None:
    """Open a source by its configuration alone, to plan a load before the weights are on this machine.

    The result is ``None`` if there is no configuration. It is also ``None`` for a folder that contains weights, because
    the caller should open those; but ``with_weights`` allows weights in the folder, and does not look at them.
    """
    from shardload.hub.described import with_tensors

    if resolved.architecture is not None:
        config = {**lookup(resolved.architecture)[1], "torch_dtype": "bfloat16"}
        manifest = Manifest(nowhere(resolved.architecture), _HUGGING_FACE, {}, {}, config)
        note = f"planned from the architecture: no weights of {resolved.architecture} are on this machine"
    else:
        # A Hugging Face ``config.json`` may have another name, ``my8b.json``.
        where = resolved.location
        read = read_optional(where) if where.name.endswith(".json") and where.is_file() else None
        is_config = isinstance(read, dict) and isinstance(read.get("model_type"), str) and "weight_map" not in read
        of_file = Manifest(nowhere(resolved.path), _HUGGING_FACE, {}, {}, read or {}) if is_config else None
        described = of_file or describe_folder(where, with_weights=with_weights)
        if described is None:
            return None
        manifest = described
        lacking = f"{'its weights are not' if with_weights else 'no weights are'} in {resolved.path}"
        if not with_weights and not where.store.is_listed(where.key):
            lacking = f"no weights of a usual name are in {resolved.path}. {_UNLISTED}"
        note = f"planned from its configuration: {lacking if of_file is None else f'{resolved.path} alone'}"
        # Keras nests the configuration of a layer in "config", multimodal models that of the language model.
        nested = (manifest.config.get(key) for key in ("config", "text_config"))
        parts = (manifest.config, *(part for part in nested if isinstance(part, Mapping)))
        if all(part.get(key) is None for part in parts for key in ("dtype", "torch_dtype")):
            assumed = model_type_of(manifest.config).unstated_dtype
            note += f". It states no dtype: sizes are for {assumed}; pass dtype (--dtype) for another"
            if assumed != "float32":
                manifest = replace(manifest, config={**manifest.config, "torch_dtype": assumed})
    if format not in (None, manifest.format):
        raise SourceError(
            f"Cannot plan {manifest.source} as {format}: it has no weights, and its configuration describes "
            f"{spec_of(manifest).description}. Leave out format (--format)"
        )
    manifest = with_tensors(manifest, ignore_config=ignore_config)
    return OpenedSource(manifest, None, tuple(filter(None, (resolved.note, note, *manifest.notes))))


def _noted(resolved: Resolved, manifest: Manifest, checker: Checker | None, *, verify: bool) -> OpenedSource:
    unverified = verify and spec_of(manifest).is_step and checker is None
    notes = (resolved.note, _UNVERIFIED if unverified else "", *manifest.notes)
    return OpenedSource(manifest, checker, tuple(note for note in notes if note))


@suggests_arguments
def inspect(source: str | os.PathLike[str], *, format: str | None = None) -> Manifest:
    """Read the headers of a checkpoint and return its manifest: names, shapes and dtypes of its tensors.

    Examples:
        ```python
        manifest = shardload.inspect("model.weights.h5")
        for name, tensor in manifest.tensors.items():
            print(name, tensor.shape, tensor.dtype)
        ```

    Args:
        source: A path, name, preset or handle, as for `load`; also single safetensors and h5 files.
        format: Name of the format that the checkpoint must have, such as ``gguf``; any by default.

    Raises:
        SourceNotFoundError: When the name resolves to nothing.
        SourceError: When the checkpoint contradicts itself.
    """
    return open_source(source, format, verify=False).manifest
