"""From Hugging Face to Hugging Face: a copy, which needs no model.

Every tensor keeps its name, shape, dtype and bits, whatever it is: a weight, a buffer, a second copy of the embedding,
a quantisation code. Every small file keeps its bytes. So the copy works for families that KerasHub lacks, and differs
from its source only where an argument asks for it: another dtype (then quantised weights are dequantised), tensors left
out, shards of another size.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from shardload.converting.companions import KERAS, Companions, Preprocessing, companions_of, copy_files, is_weights
from shardload.converting.computing import StoredValue
from shardload.converting.plans import ConversionPlan, Copy
from shardload.converting.source import Source, some
from shardload.errors import UnsupportedError, UsageError
from shardload.hub import quantised
from shardload.keras_bridge.layer_settings import with_dtype
from shardload.loaders import open_manifest, safetensors, spec_of
from shardload.loaders.contents import CONFIG, member
from shardload.loaders.file_pieces import TensorPlace, Wanted
from shardload.loaders.hf_folder import BARE, open_as_stored
from shardload.loaders.hf_folder import SPEC as HUGGING_FACE
from shardload.loaders.peft.folder import CONFIG_FILE, WEIGHTS_FILE
from shardload.manifest import Decoded, Manifest, UnreadableRows, View
from shardload.stores.local import located
from shardload.transfer.casts import is_float

_PARTS = re.compile(r"\d+_\w+/model\.safetensors|adapter_model\.safetensors")
"""Files with weights besides the model's own: layers of sentence-transformers, and an adapter of PEFT."""


def is_copy(manifest: Manifest, to: str) -> bool:
    """Whether source and target of a conversion are both Hugging Face folders, so that tensors are only copied."""
    return spec_of(manifest) == HUGGING_FACE and to == "safetensors"


def source_of(manifest: Manifest, *, ignore: Sequence[str] = (), dequantise: bool = False) -> Source:
    """Return a Hugging Face folder as a source to copy: without a model, and without tensors that ``ignore`` names.

    Quantised weights are copied as codes and scales, unless ``dequantise``: then as ``manifest`` has them.
    """
    if not dequantise and any(isinstance(t.storage, Decoded) for t in manifest.tensors.values()):
        manifest = open_as_stored(manifest.location)
    for pattern in ignore:
        if not any(fnmatchcase(name, pattern) for name in manifest.tensors):
            raise UsageError(f"ignore={pattern!r} matches no tensor of {manifest.source}. Remove or correct it")
    tensors = manifest.tensors.items()
    kept = {name: tensor for name, tensor in tensors if not any(fnmatchcase(name, pattern) for pattern in ignore)}
    if not kept:
        raise UsageError(f"ignore={list(ignore)} matches every tensor of {manifest.source}. Remove or correct it")
    for tensor in kept.values():
        if isinstance(tensor.storage, Decoded) and isinstance(tensor.storage.reader, UnreadableRows):
            raise UnsupportedError(
                f"Cannot copy tensor {tensor.name!r} of {manifest.source}: several elements of {tensor.dtype} share a "
                f"byte. Leave it out: ignore=[{tensor.name!r}] (--ignore {tensor.name})"
            )
    left_out = [name for name in manifest.tensors if name not in kept]
    notes = (f"{some(left_out)} left out on request",) if left_out else ()
    found = companions_of(manifest)
    listed = {str(path) for path in manifest.files}
    parts = {name: path for name, path in _parts(manifest.location.local_folder()).items() if str(path) not in listed}
    # An adapter next to the weights that is merged into them must not be applied again.
    is_merged = str(manifest.location / WEIGHTS_FILE) in listed
    own = {n: path for n, path in found.transformers.items() if not (is_merged and n == CONFIG_FILE)}
    companions = replace(found, transformers={**own, **parts})
    notes = (*manifest.notes, *notes, *found.notes, *_other_weights(manifest, companions))
    return Source(replace(manifest, tensors=kept), None, {}, companions, Preprocessing(), notes)


def plan_of(source: Source, *, dtype: str | None, shard_bytes: int | None) -> ConversionPlan:
    """Plan the copy of a Hugging Face folder, with floats cast to ``dtype`` and ``shard_bytes`` per file, if given."""
    manifest, companions = source.manifest, source.companions
    copies = []
    for tensor in manifest.tensors.values():
        view, own = View.whole(tensor), tensor.dtype
        wanted = Wanted(tensor.name, tensor.shape, np.dtype(dtype) if dtype is not None and is_float(own) else own)
        copies.append(Copy(wanted, StoredValue(None, own, tensor, view), view))
    rewritten = {}  # the files that state a dtype
    if dtype is not None:
        try:
            quantised.check(manifest, ignore=(quantised.ADAPTER,))
        except UnsupportedError as error:
            raise UnsupportedError(
                f"Cannot cast {manifest.source} to {dtype}: its tensors are quantised or those of an adapter, expected "
                "plain weights. Omit dtype (--dtype) to copy them as they are"
            ) from error
        stating = {CONFIG: in_dtype(manifest.config, dtype)}
        for name in (CONFIG, "task.json"):
            if (config := companions.config(KERAS, name)) is not None:
                stating[f"{KERAS}/{name}"] = with_dtype(config, dtype)
        rewritten = {name: json.dumps(config, indent=2).encode() for name, config in stating.items()}
    elif any(isinstance(tensor.storage, Decoded) for tensor in manifest.tensors.values()):
        rewritten = {CONFIG: json.dumps(manifest.config, indent=2).encode()}  # without quantisation, if it was merged
    metadata = {**safetensors.PYTORCH, **manifest.metadata}

    def make(folder: Path) -> tuple[TensorPlace, ...]:
        folder.mkdir()
        copy_files(companions.transformers, folder)
        copy_files(companions.keras, folder / KERAS)
        copy_files(rewritten, folder)
        tensors = [copy.wanted for copy in copies]
        limit = shard_bytes or safetensors.SHARD_BYTES
        return safetensors.write_skeleton(folder, tensors, shard_bytes=limit, metadata=metadata)

    uncast = [name for name in companions.transformers if _PARTS.fullmatch(name)] if dtype else []
    notes = (f"{some(uncast)} copied in the dtype of the source",) if uncast else ()
    return ConversionPlan(manifest.format, tuple(copies), make, {}, notes=notes, shard_bytes=shard_bytes, is_copy=True)


def _parts(folder: Path) -> dict[str, Path]:
    """Return other weights files to copy along, by relative path: a PEFT adapter, layers of sentence-transformers."""
    found = {}
    for path in (*sorted(folder.glob("*/model.safetensors")), folder / "adapter_model.safetensors"):
        name = path.relative_to(folder).as_posix()
        if _PARTS.fullmatch(name) and path.is_file():
            # A link may lead out of the folder only to tensors: a private file has no such header.
            open_manifest(member(located(path.parent), path.name, named_by=str(folder)), format=BARE.name)
            found[name] = path
    return found


def _other_weights(manifest: Manifest, companions: Companions) -> tuple[str, ...]:
    """Return a note if the copy leaves out other files with weights: the model in another format, or other steps."""
    folder = manifest.location.local_folder()
    copied = {Path(str(path)) for path in manifest.files} | {folder / name for name in companions.transformers}
    others = [
        path.relative_to(folder).as_posix()
        for path in sorted(folder.rglob("*"))
        if is_weights(path.name) and path.is_file() and path not in copied
    ]
    shown = [name for name in others if not (name.startswith((".", f"{KERAS}/")) or name.endswith(".index.json"))]
    return (f"{some(shown)} left out: weights outside of the checkpoint",) if shown else ()


def in_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return a Hugging Face configuration with ``dtype`` in every entry that states a dtype."""
    found = {key: in_dtype(value, dtype) if isinstance(value, Mapping) else value for key, value in config.items()}
    names = {"torch_dtype", "dtype"} & found.keys()  # transformers 4 writes torch_dtype, 5 writes dtype
    return {**found, **dict.fromkeys(names, dtype)}
