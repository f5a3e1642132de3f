"""Keras' files: weights in one HDF5 file, in shards with their index, and the folder of a KerasHub preset.

    NAME.weights.h5                                  all weights of the model
    NAME.weights.json  NAME_00000.weights.h5 …       all weights in shards; the .json file lists each shard's groups
    preset/            model.weights.h5 or .json     the backbone
                       task.weights.h5               the task's other weights (a classifier's head), if it has any

Tensors have Keras' own names. In plans (`Copy`), names of tensors in ``task.weights.h5`` start with "task:".
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shardload.converting.checking import description_fault
from shardload.converting.companions import CONFIG_ENTRY, STATE, TRANSFORMERS, copy_files, write_description
from shardload.converting.plans import ConversionPlan, Copy, NoPlaceError, whole
from shardload.converting.source import Source, made_now
from shardload.converting.transformers import is_weight
from shardload.errors import UnsupportedError, is_of_system, public_name
from shardload.keras_bridge.extra_state import assets_of
from shardload.keras_bridge.layer_settings import serialised_with_attributes, with_dtype
from shardload.keras_bridge.model_state import own_layers
from shardload.keras_bridge.saving import optimizers_of, saved_layout
from shardload.keras_bridge.weights_files import dataset
from shardload.loaders.file_pieces import TensorPlace, Wanted
from shardload.loaders.hub_preset import SHARDED_WEIGHTS, TASK_PREFIX, TASK_WEIGHTS, WEIGHTS
from shardload.loaders.hub_preset import SPEC as PRESET
from shardload.loaders.keras_h5 import SHARDED as KERAS_SHARDED
from shardload.loaders.keras_h5 import SPEC as KERAS_H5
from shardload.mapping.assets import has_assets
from shardload.mapping.roles import roles_of
from shardload.units import plural

_log = logging.getLogger(__name__)

ENDING = ".weights.h5"
INDEX_ENDING = ".weights.json"
_SHARD_BYTES = 5 << 30
"""Most bytes of one shard (a file) of a checkpoint, unless the caller gives a limit; Keras has the same default."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What Keras would write into a weights file for one model: tensors, groups, and what is left out."""

    weights: tuple[Copy, ...]
    names: Mapping[str, str]
    """HDF5 group's path → name of the layer or other object that is saved in it; Keras stores it with the group."""
    left: tuple[Any, ...]
    """Variables that Keras does not save: the states of seed generators."""
    optimizers: tuple[Copy, ...] = ()
    """Variables of optimizers that are not built (iterations, learning rate): without them in the file, Keras warns."""
    omitted: tuple[str, ...] = ()
    """Optimizers, as paths in the model, whose state is left out although Keras would write it."""

    @property
    def copies(self) -> tuple[Copy, ...]:
        """All tensors to write, with the variables that provide their values."""
        return (*self.weights, *self.optimizers)

    @property
    def tensors(self) -> list[Wanted]:
        """All tensors to write, named as in the file: without the prefix ``task:``, which names in plans may have."""
        return [replace(copy.wanted, name=copy.wanted.name.removeprefix(TASK_PREFIX)) for copy in self.copies]


def saved(
    root: Any,
    source: Source,
    dtypes: Mapping[int, Any],
    *,
    skip: Any = None,
    prefix: str = "",
    target: str = "an HDF5 file",
) -> Saved:
    """Return the tensors and HDF5 groups that Keras would write for a model; raise if a layer saves other things.

    ``root``: the model, or its backbone. ``dtypes``: ``id`` of each variable → dtype to write it in. ``skip``: a nested
    model whose layers are omitted, because another file has them. ``prefix`` is put before the names of the tensors.
    ``target`` says in messages what cannot be written.
    """
    skipped = [] if skip is None else own_layers(skip)
    layout = saved_layout(root, skip=skipped)
    if layout.computing:
        path, layer = layout.computing[0]
        raise NoPlaceError(
            f"Cannot write {target}: save_own_variables of {type(layer).__name__} at {path or 'the root'!r} saves "
            "arrays or numbers, or computes what it saves. Only variables can be written",
            instead=("keras",),
        )
    copies = tuple(whole(f"{prefix}{name}", source.values[id(v)], dtypes) for name, v in layout.variables.items())
    elsewhere = {id(v) for v in (*layout.variables.values(), *(() if skip is None else skip.variables))}
    left = [v for v in source.variables_of(root) if id(v) not in elsewhere]
    if weights := [v.path for v in left if is_weight(v)]:
        raise NoPlaceError(
            f"Cannot write {target}: no layer saves {plural(len(weights), 'variable')} ({weights[0]!r} …) with its "
            "save_own_variables",
            instead=("orbax",),
        )
    return _with_optimizers(Saved(copies, layout.names, tuple(left)), layout.optimizers, source, prefix=prefix)


def whole_model(
    source: Source, dtypes: Mapping[int, Any], *, target: str = "an HDF5 file"
) -> tuple[Saved, tuple[str, ...]]:
    """Return what Keras would write for a model into one file (see `saved`), and notes on what is left out."""
    found = saved(source.model, source, dtypes, target=target)
    notes: tuple[str, ...] = ()
    if found.omitted:
        notes += (f"the state of the optimizer {', '.join(found.omitted)} was left out: only weights are saved",)
    compiled = optimizers_of(source.model)
    # KerasHub compiles every new task, whatever its source has.
    if source.is_live or source.is_hub:
        found = _with_optimizers(found, compiled, source)
        if "optimizer" in found.omitted:
            why = "only weights are saved, so Keras warns when it loads them"
            notes = (f"the state of the optimizer was left out: {why}", *notes)
    else:
        found = replace(found, omitted=(*found.omitted, *compiled))
    return found, notes


def file(
    source: Source, dtypes: Mapping[int, Any], target: Path, dtype: str | None, shard_bytes: int | None
) -> ConversionPlan:
    """Plan the files that Keras writes for the model: ``….weights.h5``, or an index ``….weights.json`` with shards."""
    from shardload.loaders.hdf5 import writer as h5

    root = source.model
    found, notes = whole_model(source, dtypes)
    stem = target.name.removesuffix(ENDING).removesuffix(INDEX_ENDING)
    sidecars = {}
    try:
        described = with_dtype(model_config(root), dtype)
        if original := source.companions.config(TRANSFORMERS):
            described[CONFIG_ENTRY] = original
        # Whether layers of the model save files; KerasHub's tokenizers are none of them here.
        if not source.is_hub and (assets_of(root) is not None if source.is_live else has_assets(source.manifest)):
            notes += (
                f"{stem}.json was not written, because layers of the model have files (a vocabulary), and "
                f"{target.name} cannot store them. Load it into a model that your program builds with them, or keep a "
                "training step or a .keras file",
            )
        elif fault := description_fault(str(root.name), described, [copy.wanted for copy in found.weights]):
            notes += (
                f"{stem}.json was not written, because the model that Keras builds from it does not fit the file: "
                f"{fault}. Load the file into a model that your program builds",
            )
        else:
            sidecars[f"{stem}.json"] = json.dumps(described, indent=2).encode()
    except Exception as error:  # of any kind: a live model's own get_config, or none
        if not source.is_live or is_of_system(error):
            raise
        why = str(error).strip().partition("\n")[0] or public_name(error)
        notes += (f"{stem}.json was not written, because Keras cannot describe this model: {why}",)
    undescribed = None if sidecars else f"{stem}.json"
    others = [*source.companions.keras, *(set(source.companions.transformers) - {"config.json"})]
    notes += (f"{plural(len(others), 'other file')} left out: {others[0]} …",) if others else ()
    notes += _left_out(found.left)
    one_file = target.name.endswith(ENDING)
    limit = _SHARD_BYTES if shard_bytes is None else shard_bytes

    def make(path: Path) -> tuple[TensorPlace, ...]:
        if one_file:
            return h5.write_skeleton(path, found.tensors, names=found.names)
        path.mkdir()
        return h5.write_shards(path / target.name, found.tensors, names=found.names, shard_bytes=limit)

    return ConversionPlan(
        (KERAS_H5 if one_file else KERAS_SHARDED).name,
        found.copies,
        make,
        sidecars,
        undescribed,
        notes,
        () if one_file else h5.shard_names(target.name, found.tensors, shard_bytes=limit),
        is_keras_file=True,
        omitted=found.omitted,
    )


def preset(source: Source, dtypes: Mapping[int, Any], dtype: str | None, shard_bytes: int | None) -> ConversionPlan:
    """Plan a KerasHub preset: weights of the backbone and of the task, as ``save_to_preset`` writes them."""
    from shardload.loaders.hdf5 import writer as h5

    if not source.is_hub:
        raise UnsupportedError(
            f"Cannot write a KerasHub preset: {type(source.model).__name__} is not a KerasHub model. Name the target "
            f"NAME{ENDING}"
        )
    parts = [saved(source.backbone, source, dtypes)]
    if head_of(source):
        head = saved(source.model, source, dtypes, skip=source.backbone, prefix=TASK_PREFIX)
        # A reader builds the task as KerasHub compiles it: store that optimizer, not the one of a user's compile().
        compiled = source.model if source.fresh is None else source.fresh
        parts.append(_with_optimizers(head, optimizers_of(compiled), source, prefix=TASK_PREFIX))
    state = state_as_json(source, parts[0].left)

    def make(folder: Path) -> tuple[TensorPlace, ...]:
        folder.mkdir()
        keras_family(source, folder, dtype)
        if state:
            (folder / STATE).write_text(json.dumps(state), encoding="utf-8")
        copy_files(source.companions.transformers, folder / TRANSFORMERS)
        if shard_bytes is None:
            places = _file_in(folder, WEIGHTS, parts[0])
        else:
            backbone, names = parts[0].tensors, parts[0].names
            places = h5.write_shards(folder / SHARDED_WEIGHTS, backbone, names=names, shard_bytes=shard_bytes)
        return places + tuple(place for part in parts[1:] for place in _file_in(folder, TASK_WEIGHTS, part))

    notes = (*(note for part in parts[1:] for note in _left_out(part.left)), *source.preprocessing.notes)
    return ConversionPlan(PRESET.name, tuple(copy for part in parts for copy in part.copies), make, {}, notes=notes)


def _with_optimizers(found: Saved, optimizers: Mapping[str, Any], source: Source, *, prefix: str = "") -> Saved:
    """Return ``found`` with the variables of optimizers that have never trained: iterations, learning rate.

    Without these few variables in the file, Keras warns. Optimizers that have trained are only listed as omitted,
    because a conversion keeps weights, not the state of training.
    """
    new = {path: list(each.variables) for path, each in optimizers.items() if not each.built}
    # Only weights are converted, so the optimizer's variables have initial values unless the source knows them.
    unknown = [v for variables in new.values() for v in variables if id(v) not in source.values]
    values = {**source.values, **{id(v.variable): v for v in made_now(unknown)}}
    dtypes = {id(v): values[id(v)].dtype for variables in new.values() for v in variables}
    copies = tuple(
        whole(f"{prefix}{dataset(path, str(i))}", values[id(v)], dtypes)
        for path, variables in new.items()
        for i, v in enumerate(variables)
    )
    return replace(
        found,
        optimizers=(*found.optimizers, *copies),
        names={**found.names, **{f"{path}/vars": str(optimizers[path].name) for path in new}},
        omitted=(*found.omitted, *(path for path in optimizers if path not in new)),
    )


def head_of(source: Source) -> list[Any]:
    """Return the weights of a task outside of its backbone, such as a classifier's head."""
    own = {id(v) for v in source.backbone.variables}
    return [v for v in source.variables_of(source.model) if id(v) not in own and is_weight(v)]


def keras_family(source: Source, folder: Path, dtype: str | None) -> None:
    """Write KerasHub's configuration and tokenizer files: copies of the source's own, or new ones made by KerasHub."""
    folder.mkdir(exist_ok=True)
    kept = {name: path for name, path in source.companions.keras.items() if name != STATE}
    if "config.json" not in kept:
        write_description(source.model, source.preprocessing, folder)
    copy_files(kept, folder)
    if dtype is not None:
        for name in ("config.json", "task.json"):
            if (path := folder / name).is_file():
                found = json.loads(path.read_text(encoding="utf-8"))
                path.write_text(json.dumps(with_dtype(found, dtype), indent=4), encoding="utf-8")


def model_config(model: Any) -> dict[str, Any]:
    """Return a model's configuration as Keras serialises it, without compile settings, which belong to training."""
    found: dict[str, Any] = json.loads(serialised_with_attributes(model))
    found.pop("compile_config", None)
    return found


def state_as_json(source: Source, variables: Iterable[Any]) -> dict[str, Any]:
    """Return the content of ``state.json``: values of small variables (seeds), keyed by place in the model."""
    from shardload.transfer.read_tensor import read_rows

    roles = roles_of(source.backbone)
    found = {}
    for variable in variables:
        value = source.values[id(variable)]
        if value.step is not None:
            raise NoPlaceError(
                f"Cannot write {variable.path!r} to state.json: {value.step.owner} computes it", instead=("orbax",)
            )
        array = value.array
        if value.tensor is not None:  # small and never rearranged
            array = read_rows(value.tensor, 0, value.tensor.rows).reshape(variable.shape)
        array = np.asarray(array)
        found[roles[id(variable)].key] = {"dtype": array.dtype.name, "values": array.tolist()}
    return found


def _file_in(folder: Path, name: str, part: Saved) -> tuple[TensorPlace, ...]:
    from shardload.loaders.hdf5 import writer as h5

    # In its file, a tensor of a task has no prefix; in the plan it has, so that two files may have equal names.
    places = h5.write_skeleton(folder / name, part.tensors, names=part.names)
    return tuple(
        TensorPlace(copy.wanted.name, tuple(replace(piece, path=name) for piece in place.pieces))
        for copy, place in zip(part.copies, places, strict=True)
    )


def _left_out(variables: Sequence[Any]) -> tuple[str, ...]:
    if not variables:
        return ()
    first = variables[0].path
    return (f"left out, as in Keras: {plural(len(variables), 'state')} of seed generators ({first!r} …)",)
