"""``from_preset`` of KerasHub's backbones and tasks.

KerasHub's own code builds the model without values. Its calls that would load weights are collected instead of made;
they tell what to load, and whether the head of a task is part of it. Then everything is loaded at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardload.accelerating.filling import Filled, NotSupported, fill, finish, local_path
from shardload.keras_bridge.entry_points import EntryCall, calls_to, conversions_to
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.recording import record_variables
from shardload.keras_bridge.tracking import without_walking_vocabularies
from shardload.resolve import hubs

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
