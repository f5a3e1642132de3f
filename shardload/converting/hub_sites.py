"""Where in a live KerasHub model each Hugging Face tensor is: which variable of which layer, and which elements.

    model ─► Hugging Face's configuration ─► its twin: the same model without values, LoRA or quantisation
          ─► KerasHub's converter, recorded on the twin: q_proj.weight ─► view of the twin's kernel
          ─► layers in order: the same layer of the live model

The live model itself cannot be given to the converter: with LoRA or quantised, a layer has no kernel to assign to.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.converting import transformers
from shardload.errors import ShardloadError
from shardload.hub import building
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.lora import Twin, twins_of
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.recording import seeded
from shardload.loaders import spec_of
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.converters import map_hub


@dataclass(frozen=True, slots=True, eq=False)
class Site:
    """A variable of a model, and the elements of a Hugging Face tensor that it has."""

    twin: Twin
    tensor: Tensor
    view: View


@dataclass(frozen=True, slots=True, eq=False)
class HubSites:
    """All variables of a model that have a place in Hugging Face's tensors."""

    manifest: Manifest
    """Names, shapes and configuration of the model for Hugging Face."""
    sites: tuple[Site, ...]

    def of(self, name: str) -> list[Site]:
        """Return the variables with elements of a tensor."""
        return [site for site in self.sites if site.tensor.name == name]

    def cover(self, name: str) -> bool:
        """Whether variables have each element of a tensor exactly once."""
        views = [site.view for site in self.of(name)]
        return bool(views) and transformers.covers(views, self.manifest.tensors[name])


def hub_sites(model: Any) -> HubSites:
    """Return where each Hugging Face tensor is in a model of KerasHub; raise if Hugging Face cannot describe it."""
    backbone = backbone_of(model)
    with seeded(0), abstraction.abstract():
        manifest = _described(model, backbone)
        twin = building.build_model(manifest, task=False)
        views = {id(b.variable): b.view for b in map_hub(twin, manifest).bindings}
    found = tuple(
        Site(one, manifest.tensors[views[id(one.variable)].tensor], views[id(one.variable)])
        for one in twins_of(backbone, twin)
        if id(one.variable) in views
    )
    return HubSites(manifest, found)


def _described(model: Any, backbone: Any) -> Manifest:
    """Return the tensors that Hugging Face has for a model: those it was loaded from, if they describe it."""
    loaded = record_of(model).text_source or record_of(backbone).text_source
    if loaded is not None and spec_of(loaded).tensor_names == "hugging-face":
        try:
            again = building.build_model(loaded, task=False)
            if type(again) is type(backbone) and transformers.differing(backbone, again) is None:
                return loaded
        except ShardloadError:  # loaded with ignore_config, or into a model of the user's
            pass
    return transformers.stand_in(transformers.config_of(backbone, str(np.dtype(np.float32))))
