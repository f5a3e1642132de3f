"""Calls that shardload makes for Keras: ``load_model`` and ``load_weights`` of Keras, ``from_preset`` of KerasHub.

Keras' or KerasHub's own code builds the model without values; it is filled here, and left as Keras would leave it.
KerasHub's calls that would load weights are collected instead of made; they tell what to load, and whether the head of
a task is part of it. Then everything is loaded at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import keras

from shardload.keras_bridge import abstraction
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.entry_points import (
    EntryCall,
    calls_to,
    conversions_to,
    model_from_config,
    saved_config,
    step_of,
)
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import refresh_derived, state_of
from shardload.keras_bridge.recording import record_variables
from shardload.keras_bridge.saving import load_assets as load_assets_of_folder
from shardload.keras_bridge.tracking import without_walking_vocabularies
from shardload.keras_bridge.variables import is_abstract, release_from_mesh
from shardload.layouts.choice import current_devices
from shardload.loading import Loaded, run_load_weights
from shardload.mapping.assets import load_assets, staged_assets
from shardload.pipeline.request import LoadWeightsRequest
from shardload.reports import LoadReport
from shardload.resolve import hubs
from shardload.resolve.opening import open_source
from shardload.sharding.devices import MeshDevices
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.text.sources import record_text_source


class NotSupported(Exception):  # noqa: N818 - not an error: Keras makes the call
    """Why Keras is to make a call."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A call that shardload made."""

    result: Any
    """What Keras would return."""
    report: LoadReport


def local_path(path: Any) -> Path:
    """Return an existing local path as an absolute one.

    Raises:
        NotSupported: When it is a file object, an address, or does not exist.
    """
    if not isinstance(path, str | os.PathLike):
        raise NotSupported(f"its source is a {type(path).__name__}, expected a path")
    text = os.fspath(path)
    if "://" in text:
        raise NotSupported("its source is not on this machine")
    if not (found := Path(text)).exists():
        raise NotSupported("its source does not exist")
    return found.absolute()


def fill(model: Any, path: Path) -> Loaded:
    """Load weights into a model, where Keras would put them: in its layouts, or on the default device."""
    # Without a distribution, a mesh of one device; `finish` makes the values ordinary arrays again.
    if current_devices(model) is None:
        one = MeshSpec(DEFAULT_AXES, (1, 1))
        record_of(model).devices = MeshDevices(one, (_default_device(),))
    return run_load_weights(LoadWeightsRequest(model=model, source=path, as_keras=True))


def finish(model: Any, loaded: Loaded, *, created: Sequence[Any] = (), committed: bool = False) -> None:
    """Give all remaining variables their initial values, and take those without a layout off the mesh.

    Args:
        model: What the call returns.
        loaded: What was loaded into it, or into its backbone.
        created: References to the variables that its construction created.
        committed: Whether JAX refuses to combine the values with arrays on other devices, as those that Orbax reads.
    """
    abstraction.initialise(model)
    # What the model does not list: a preprocessor's or a local layer's variables, if they are still in use.
    left = [variable for ref in created if (variable := ref()) is not None and is_abstract(variable)]
    abstraction.initialise(left)
    # A list: `any` of a generator would stop at the first one that was released.
    released = [release_from_mesh(variable, committed=committed) for variable in state_of(model)]
    if any(released):
        refresh_derived(model)
    record_of(model).report = loaded.report
    record_text_source(model, loaded.manifest)


def _default_device() -> Any:
    # An array tells: JAX's default may be a context, a setting or the first device, and a device or a platform's name.
    return next(iter(jax.numpy.zeros(()).devices()))


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
        with staged_assets(loaded.manifest, check=checker) as folder:
            load_assets(model, loaded.manifest, folder)
    # Orbax restores to a device, so its arrays are committed to it; values from files of Keras are not.
    finish(model, loaded, created=created, committed=is_step)
    return Filled(model, loaded.report)


def _load_folder(model: Any, assets: Path) -> None:
    """Let the layers of a model that was saved as a folder read their files."""
    for _, layer, error in load_assets_of_folder(model, assets):
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


HEAD, BACKBONE = "head", "backbone"


@dataclass(slots=True)
class _Collected:
    """What KerasHub would have loaded."""

    loader: Any
    parts: dict[str, tuple[Any, Path]] = field(default_factory=dict)
    """By part: the object to fill, and the folder of its weights."""
    n_weights: int = 0
    """Number of weights that the backbone had when KerasHub would have loaded them."""

    def call(self, call: EntryCall) -> Any:
        """Collect a call that loads weights; make all others."""
        if call.kind != "weights":
            return call.original()
        found = call.arguments
        # KerasHub loads a task's file without its backbone, which has a file of its own.
        self._add(HEAD if found.get("objects_to_skip") else BACKBONE, found["model"], local_path(found["filepath"]))
        return None

    def convert(self, part: str, target: Any) -> None:
        """Collect a conversion of Hugging Face weights."""
        # KerasHub fetches a file from the Hugging Face Hub when a tensor in it is read; here all files are needed.
        preset = str(self.loader.preset)
        self._add(part, target, hubs.fetch(preset) if preset.startswith("hf://") else local_path(preset))

    def _add(self, part: str, target: Any, path: Path) -> None:
        if part in self.parts:
            raise NotSupported("it loads several parts")
        self.parts[part] = (target, path if path.is_dir() else path.parent)
        if part == BACKBONE:
            self.n_weights = len(target.weights)

    def target(self, made: Any) -> tuple[Any, Path]:
        """Return the object to fill and the folder of its weights.

        Raises:
            NotSupported: When it is not the whole model, nor its backbone.
        """
        if BACKBONE not in self.parts:
            raise NotSupported("it loads no weights of a backbone")
        backbone, folder = self.parts[BACKBONE]
        if backbone is not backbone_of(made):
            raise NotSupported("it loads the weights of another object than its backbone")
        # KerasHub would not have loaded weights that were created later.
        if self.n_weights != len(backbone.weights):
            raise NotSupported("its backbone is not built when KerasHub loads the weights")
        if HEAD not in self.parts:
            return backbone, folder
        if self.parts[HEAD] != (made, folder):
            raise NotSupported("its weights are in several folders")
        return made, folder


def preset_call(call: EntryCall) -> Filled:
    """Build a backbone or task of KerasHub as KerasHub does, and load the weights that it would load."""
    if not call.arguments["load_weights"]:
        raise NotSupported("load_weights=False: there is nothing to load")
    loader = call.arguments["loader"]
    collected = _Collected(loader)
    intercepted = calls_to(collected.call), conversions_to(loader, collected.convert)
    with record_variables() as created, intercepted[0], intercepted[1], without_walking_vocabularies():
        made = call.original()
    loaded = fill(*collected.target(made))
    finish(made, loaded, created=created)
    return Filled(made, loaded.report)
