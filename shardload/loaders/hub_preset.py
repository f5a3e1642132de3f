"""KerasHub preset folders.

    config.json           the backbone, serialised by Keras ("registered_name")
    model.weights.h5      or model.weights.json and shards
    task.json             the task, if the preset is a task
    task.weights.h5       the task's weights outside its backbone; their tensors are named "task:…" here
    metadata.json         versions

A folder saved by ``keras.saving.save_model(…, zipped=False)`` has the same first two files and opens the same way.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from shardload.errors import SourceError, SourceNotFoundError
from shardload.loaders import keras_h5
from shardload.loaders.contents import CONFIG, FolderContent, listing, member
from shardload.loaders.extents import checked_tensors
from shardload.loaders.registry import FormatSpec
from shardload.manifest import Manifest
from shardload.stores.json_files import read_object
from shardload.stores.location import Location

WEIGHTS = "model.weights.h5"
SHARDED_WEIGHTS = "model.weights.json"
TASK = "task.json"
TASK_WEIGHTS = "task.weights.h5"
METADATA = "metadata.json"
TASK_PREFIX = "task:"


def open_folder(folder: Location) -> Manifest:
    """Return the manifest of a preset folder: the backbone's tensors, and those of the task if it has one."""
    names, described = folder.names(), describe_folder(folder)
    if WEIGHTS in names:
        parts = [keras_h5.open_file(member(folder, WEIGHTS, named_by=str(folder)))]
    elif SHARDED_WEIGHTS in names:
        parts = [keras_h5.open_index(member(folder, SHARDED_WEIGHTS, named_by=str(folder)))]
    else:
        raise SourceNotFoundError(
            f"{folder} is a Keras preset without weights: it contains neither {WEIGHTS} nor {SHARDED_WEIGHTS}, but "
            f"{listing(folder)}. Download the preset's weights into it"
        )
    if TASK_WEIGHTS in names:
        # A backbone and its task are one manifest, so that one plan reads both files. Paths start at the root of each
        # file (`layers/…`), so one of the two needs a prefix.
        task = keras_h5.open_file(member(folder, TASK_WEIGHTS, named_by=str(folder)))
        renamed = [replace(tensor, name=TASK_PREFIX + tensor.name) for tensor in task.tensors.values()]
        parts.append(replace(task, tensors={tensor.name: tensor for tensor in renamed}))
    files = {path: size for part in parts for path, size in part.files.items()}
    tensors = checked_tensors([tensor for part in parts for tensor in part.tensors.values()], files=files)
    return replace(described, tensors=tensors, files=files)


def describe_folder(folder: Location) -> Manifest:
    """Return the manifest of a preset's configuration files alone: it describes the model, but has no tensors."""
    config = _read(folder, CONFIG)
    if not any(isinstance(config.get(key), str) for key in ("registered_name", "class_name")):
        raise SourceError(f"{folder / CONFIG} should name a Keras class as 'registered_name', but does not")
    names, wanted = folder.names(), {"task": TASK, "keras_metadata": METADATA}
    metadata = {key: _read(folder, name) for key, name in wanted.items() if name in names}
    return Manifest(folder, "keras-hub-preset", {}, {}, config, metadata)


def _read(folder: Location, name: str) -> dict[str, Any]:
    return read_object(member(folder, name, named_by=str(folder)))


def is_preset(content: FolderContent) -> bool:
    """Whether a folder's ``config.json`` was written by Keras, as in a preset, and not by Hugging Face."""
    # Keras leaves `registered_name` empty for its own classes, such as `Functional`.
    return not content.config.keys().isdisjoint(("registered_name", "class_name"))


SPEC = FormatSpec(
    name="keras-hub-preset",
    description="a KerasHub preset folder",
    is_folder=is_preset,
    open_folder=open_folder,
    describe_folder=describe_folder,
    described_by="keras-hub",
    tensor_names="keras",
    tokenizer="keras-hub",
    keras_files=".",
    transformers_files="transformers",
)
