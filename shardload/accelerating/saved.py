"""``load_model`` and ``load_weights`` of Keras."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import keras

from shardload.accelerating.filling import Filled, NotSupported, fill, finish, local_path
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.entry_points import EntryCall, model_from_config, saved_config, step_of
from shardload.keras_bridge.saving import load_assets as load_assets_of_folder
from shardload.mapping.assets import load_assets
from shardload.resolve.opening import open_source


def model_call(call: EntryCall) -> Filled:
    """Build a model from its configuration without values, load them, and what its layers saved in files."""
    path = local_path(call.arguments["filepath"])
    # An archive and a folder have a config.json; an Orbax checkpoint has the configuration inside.
    checker, config = None, saved_config(path)
    if is_step := config is None:
        path = step_of(path) or path
        opened = open_source(path, "orbax")
        if not opened.manifest.config:
            raise NotSupported("the step contains no configuration of a model")
        checker, config = opened.checker, json.dumps(opened.manifest.config)
    with abstract() as created:
        model = model_from_config(config, call.arguments)
    if not isinstance(model, keras.Model):
        raise NotSupported(f"it is a {type(model).__name__}, expected a model")
    loaded = fill(model, path)
    # After the weights, as hooks may use them. Keras can also save a model as a folder instead of an archive.
    if not is_step and (path / "assets").is_dir():
        _load_folder(model, path / "assets")
    else:
        load_assets(model, loaded.manifest, check=checker)
    # Orbax restores to a device, so its arrays are committed to it; values from files of Keras are not.
    finish(model, loaded, created=created, committed=is_step)
    return Filled(model, loaded.report)


def _load_folder(model: Any, assets: Path) -> None:
    """Let the layers of a model that was saved as a folder read their files."""
    for layer, error in load_assets_of_folder(model, assets):
        raise NotSupported(f"{layer!r} cannot load its files") from error


def weights_call(call: EntryCall) -> Filled:
    """Load weights into an existing model. The result is None, as in Keras."""
    model: Any = call.arguments["model"]
    if call.arguments.get("objects_to_skip") is not None:
        raise NotSupported("objects_to_skip is given")
    if not model.built:
        raise NotSupported("the model has not been built")
    path = local_path(call.arguments["filepath"])
    step = step_of(path)
    loaded = fill(model, step or path)
    finish(model, loaded, committed=step is not None)
    return Filled(None, loaded.report)
