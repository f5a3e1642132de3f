"""List the tensors that a checkpoint would have, from its configuration alone, without weight files.

    Hugging Face   config.json               ─► the tensors that transformers would save; for an unknown ``model_type``,
                                                those of a KerasHub preset of the same model
    KerasHub       config.json, task.json    ─► the tensors that KerasHub would save, from a model built without values

No file contains these tensors, so ``Manifest.files`` is empty: such a checkpoint can be planned, but not loaded.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.families.registry import model_type_of
from shardload.hub import building, kerashub
from shardload.hub.building import describe_failure
from shardload.hub.config_forms import transformers_tensors
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.layer_settings import ATTRIBUTES_ENTRY, add_arguments, attributes_of
from shardload.keras_bridge.model_state import optimizer_variables_of, own_layers
from shardload.keras_bridge.saving import saved_layout
from shardload.keras_bridge.variables import stored_dtype
from shardload.loaders import quantised, spec_of
from shardload.loaders.contents import CONFIG
from shardload.loaders.hf_folder import SPEC as HUGGING_FACE
from shardload.loaders.hub_preset import TASK, TASK_PREFIX, describe_folder
from shardload.manifest import Extent, Manifest, Tensor
from shardload.stores.local import located, temporary_folder
from shardload.stores.location import Location

_MAX_BYTES = 16 << 40
"""More bytes than any model has. Without a limit, a plan for a damaged configuration would fill the memory."""


def hugging_face(config: Mapping[str, Any], where: Location, *, stored: Any) -> Manifest:
    """Return the manifest (tensors of dtype ``stored``) of a Hugging Face folder that has this configuration only."""
    # A name is enough, also bfloat16: ml_dtypes, which JAX imports, registers its types with NumPy.
    dtype = np.dtype(stored)
    specs = [(spec.name, spec.shape, dtype) for spec in transformers_tensors(config)]
    return Manifest(where, HUGGING_FACE.name, placed(specs, where), {}, config)


def with_tensors(described: Manifest, *, ignore_config: Sequence[str] = ()) -> Manifest:
    """Return the manifest of a checkpoint without weights, with the tensors that it would have: for a plan."""
    with describe_failure(described):
        if spec_of(described).is_hugging_face and model_type_of(described.config).tensors is not None:
            found = _of_hugging_face(described)
        else:
            preset = _as_preset(described, ignore_config) if spec_of(described).is_hugging_face else described
            found = replace(preset, tensors=placed(_saved(preset), described.location))
    if found.nbytes > _MAX_BYTES:
        raise SourceError(
            f"Cannot plan {described.source}: its configuration describes {found.nbytes >> 40:,} TiB of weights, "
            f"expected at most {_MAX_BYTES >> 40} TiB. Correct the configuration"
        )
    return found


def _of_hugging_face(described: Manifest) -> Manifest:
    name = building.checkpoint_dtype(described)
    try:
        found = hugging_face(described.config, described.location, stored=name)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"Cannot plan {described.source}, which has no weights: {error}. Download its weights to that folder"
        ) from error
    except SourceError as error:
        raise SourceError(f"Cannot plan {described.source}, which has no weights: {error}") from error
    plain, method = quantised.planned_as_plain(replace(found, tensors={}))
    if method is None:
        return found  # of a method that cannot be loaded at all, building the model says so
    note = f"planned as plain weights in {name}: of {method} codes, a load reads fewer bytes"
    return replace(plain, tensors=found.tensors, notes=(note,))


def _as_preset(described: Manifest, ignore_config: Sequence[str]) -> Manifest:
    """Return the manifest of a KerasHub preset of the model that Hugging Face's ``config.json`` describes."""
    with abstract(), tempfile.TemporaryDirectory() as folder:
        save_description(building.build_model(described, ignore_config=ignore_config), Path(folder), extra={})
        found = describe_folder(located(folder))
    note = (
        f"planned as a KerasHub preset of the same model: the tensors of model_type "
        f"{described.config['model_type']!r:.60} are not known without its weights"
    )
    return replace(found, location=described.location, notes=(note,))


def _saved(described: Manifest) -> Iterator[tuple[str, tuple[int, ...], np.dtype[Any]]]:
    """Yield name, shape and dtype of what KerasHub saves for a preset: the backbone's tensors and the task's own."""
    with abstract():
        model = building.build_model(described)
        backbone = backbone_of(model)
        layout = saved_layout(backbone)
        if layout.computing:  # of DINOv2, the position embeddings
            raise UnsupportedError(
                f"Cannot plan {described.source}, which has no weights: {type(layout.computing[0][1]).__name__} "
                "computes the tensors that it saves, so they are not known. Download its weights to that folder"
            )
        found = dict(layout.variables)
        head = {} if backbone is model else saved_layout(model, skip=own_layers(backbone)).variables
        if head:  # KerasHub compiles every new task, and saves the optimizer with it
            slots = {f"optimizer/vars/{i}": variable for i, variable in enumerate(optimizer_variables_of(model))}
            found |= {TASK_PREFIX + name: variable for name, variable in {**head, **slots}.items()}
        for name, variable in found.items():
            yield name, tuple(variable.shape), stored_dtype(variable)


def placed(specs: Iterable[tuple[str, tuple[int, ...], np.dtype[Any]]], where: Location) -> dict[str, Tensor]:
    """Return tensors of these names, shapes and dtypes, as if in one file at ``where``: a plan needs offsets."""
    # The plan sorts reads by file and offset, so even tensors without a file need distinct ones.
    found: dict[str, Tensor] = {}
    offset = 0
    for name, shape, dtype in specs:
        found[name] = Tensor(name, shape, dtype, Extent(where, offset))
        offset += found[name].nbytes
    return found


def save_description(
    model: Any, folder: Path, *, extra: Mapping[str, Any], task: bool = True, preprocessor: Any = None
) -> None:
    """Write KerasHub's files other than weights: ``config.json``, ``metadata.json``, and ``task.json`` for a task.

    ``config.json`` gets the entries ``extra``, which KerasHub ignores; ``task.json`` describes ``preprocessor``, if
    given. With ``task=False``, no ``task.json`` is written, and the checkpoint is that of a backbone.
    """
    saver = kerashub.preset_saver(folder)
    backbone = backbone_of(model)
    attributes = attributes_of(backbone)
    saver._save_metadata(backbone)
    for name, described in ((CONFIG, backbone), (TASK, model)):
        if name == TASK and (described is backbone or not task):
            continue
        saver._save_serialized_object(described, config_file=name)
        # KerasHub writes the file, and what its classes do not serialise is added.
        written = json.loads((folder / name).read_text(encoding="utf-8"))
        inner = written["config"] if described is backbone else written["config"]["backbone"]["config"]
        add_arguments(inner, backbone)
        if described is not backbone and preprocessor is not None:
            written["config"]["preprocessor"] = _serialised(saver, preprocessor)
        entries = {**extra, **({ATTRIBUTES_ENTRY: attributes} if attributes else {})} if described is backbone else {}
        (folder / name).write_text(json.dumps({**written, **entries}, indent=4), encoding="utf-8")


def _serialised(saver: Any, layer: Any) -> dict[str, Any]:
    with temporary_folder() as folder:
        # The saver joins this path to its own folder, which an absolute path overrides.
        path = folder / "layer.json"
        saver._save_serialized_object(layer, config_file=str(path))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
