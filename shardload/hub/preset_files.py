"""Write the files of a KerasHub preset that describe a model: all but weights and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardload.hub import kerashub
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.loaders.hub_preset import CONFIG, TASK
from shardload.stores.local import temporary_folder


def save_description(
    model: Any, folder: Path, *, extra: Mapping[str, Any], task: bool = True, preprocessor: Any = None
) -> None:
    """Write KerasHub's files other than weights: ``config.json``, ``metadata.json``, and ``task.json`` for a task.

    Args:
        model: A task or a backbone; needs no weights.
        folder: Where to write.
        extra: Additional top-level entries for ``config.json``, which KerasHub keeps and ignores.
        task: Write ``task.json``; without it, the checkpoint is a backbone's.
        preprocessor: The preprocessor that ``task.json`` names, if the task has none.
    """
    from shardload.keras_bridge.set_attributes import ENTRY, add_arguments, attributes_of  # imports Keras

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
            written["config"]["preprocessor"] = _described(saver, preprocessor)
        entries = {**extra, **({ENTRY: attributes} if attributes else {})} if described is backbone else {}
        (folder / name).write_text(json.dumps({**written, **entries}, indent=4), encoding="utf-8")


def _described(saver: Any, layer: Any) -> dict[str, Any]:
    with temporary_folder() as folder:
        # The saver joins this path to its own folder, which an absolute path overrides.
        path = folder / "layer.json"
        saver._save_serialized_object(layer, config_file=str(path))
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found
