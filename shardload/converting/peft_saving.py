"""A live model's LoRA as a folder that PEFT loads: factors by Hugging Face's names, and what else was trained.

    kernel, lora_kernel_a, lora_kernel_b   ─►   base_model.model.<module>.lora_A.weight (rank, in), .lora_B.weight
    a trainable bias of such a layer       ─►   base_model.model.<module>.base_layer.bias, bias="lora_only"
    any other trainable weight             ─►   base_model.model.<module>.weight, modules_to_save

A fused tensor (phi3's ``qkv_proj``) gets the factors of its kernels side by side, with zeros where others are. So does
a kernel with a dim of heads: see `shardload.mapping.lora_views`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.converting.computing import StoredValue
from shardload.converting.hub_sites import HubSites, Site, hub_sites
from shardload.converting.plans import ConversionPlan, Copy
from shardload.errors import UnsupportedError
from shardload.families.registry import model_type_of
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.lora import lora_layers
from shardload.keras_bridge.variables import value_of
from shardload.loaders import safetensors
from shardload.loaders.file_pieces import TensorPlace, Wanted
from shardload.loaders.hf_folder import BARE
from shardload.loaders.peft import is_tied
from shardload.loaders.peft.folder import CONFIG_FILE, EMBEDDING, LINEAR, PREFIX, WEIGHTS_FILE
from shardload.manifest import View, c_strides
from shardload.mapping.lora_views import KernelDims
from shardload.units import plural


@dataclass(slots=True)
class _Written:
    """What is collected for the folder."""

    tensors: dict[str, NDArray[Any]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    """Module with factors → its rank."""
    scales: dict[str, float] = field(default_factory=dict)
    larger: list[str] = field(default_factory=list)
    """Modules whose rank is larger than that of Keras' factors."""
    saved: set[str] = field(default_factory=set)
    """Modules that are stored as a whole."""
    has_biases: bool = False


def peft_plan(model: Any) -> ConversionPlan:
    """Plan the folder of PEFT for a model of KerasHub with LoRA; raise if PEFT has no place for what was trained."""
    layers = lora_layers(model)
    if not layers:
        raise UnsupportedError(
            f"Cannot save {model.name!r} with to='peft': it has no LoRA. Call enable_lora first, or choose safetensors"
        )
    if not all(value_of(v).is_fully_addressable for v in model.variables):
        raise UnsupportedError(
            f"Cannot save {model.name!r} with to='peft': several processes each have a part of it. Save a step with "
            "shardload.save, restore it in one process, and save that"
        )
    sites = hub_sites(model)
    placed = {id(site.twin.layer) for site in sites.sites if site.twin.can_have_lora}
    if lost := next((layer for layer in layers if id(layer) not in placed), None):
        raise _no_place(model, lost.path)
    found = _Written()
    for name in dict.fromkeys(site.tensor.name for site in sites.sites):
        _add_factors(found, sites, name)
    _add_trained(found, model, sites)
    config = _config(found, model, sites)
    copies = tuple(_copy(name, value) for name, value in found.tensors.items())

    def make(folder: Path) -> tuple[TensorPlace, ...]:
        folder.mkdir()
        (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2), encoding="utf-8")
        wanted = [copy.wanted for copy in copies]
        total = sum(one.nbytes for one in wanted)
        return safetensors.write_skeleton(folder, wanted, shard_bytes=max(total, 1), single=WEIGHTS_FILE)

    notes: tuple[str, ...] = ()
    if found.larger:
        notes = (
            f"{plural(len(found.larger), 'module')} got a rank that is larger by the number of heads, with the same "
            f"product: {found.larger[0]!r} has rank {found.ranks[found.larger[0]]}",
        )
    return ConversionPlan(BARE.name, copies, make, {}, notes=notes)


def _no_place(model: Any, path: str) -> UnsupportedError:
    return UnsupportedError(
        f"Cannot save {model.name!r} with to='peft': {path!r} is trained, but has no place in Hugging Face's tensors. "
        "Write the merged model with merge_lora=True, or save a step with shardload.save"
    )


def _copy(name: str, value: NDArray[Any]) -> Copy:
    view = View(name, 0, value.shape, c_strides(value.shape))
    return Copy(Wanted(name, value.shape, value.dtype), StoredValue(None, value.dtype, array=value), view)


def _add_factors(found: _Written, sites: HubSites, name: str) -> None:
    """Add the factors of a tensor: those of all kernels that are parts of it, side by side."""
    matrix = sites.manifest.tensors[name].shape
    own = [site for site in sites.of(name) if site.twin.can_have_lora and site.twin.has_lora]
    if not own:
        return
    module, is_embedding = name.removesuffix(".weight"), own[0].twin.attribute == "_embeddings"
    if is_embedding and is_tied(sites.manifest):
        raise UnsupportedError(
            f"Cannot save LoRA of {own[0].twin.layer.path!r} with to='peft': it is also the output layer, and PEFT "
            "adds factors to the embedding alone. Write the merged model with merge_lora=True"
        )
    parts = []
    scale = own[0].twin.scale
    for site in own:
        dims = KernelDims.of(site.view, (matrix[0], matrix[1])) if len(matrix) == 2 else None
        if dims is None:
            raise UnsupportedError(
                f"Cannot save LoRA of {site.twin.layer.path!r} with to='peft': it is not of a matrix"
            )
        a, b = (np.asarray(value_of(v)) for v in site.twin.factors)
        left, right = dims.matrix_factors(a, b, (matrix[0], matrix[1]))
        parts.append((left * np.float32(site.twin.scale / scale), right))
        if left.shape[1] > b.shape[0] and module not in found.larger:
            found.larger.append(module)
    left, right = np.concatenate([one for one, _ in parts], 1), np.concatenate([one for _, one in parts])
    is_transposed = is_embedding or model_type_of(sites.manifest.config).has_conv1d
    a, b = (left.T, right.T) if is_transposed else (right, left)
    for ending, value in zip(EMBEDDING if is_embedding else LINEAR, (a, b), strict=True):
        found.tensors[f"{PREFIX}{module}{ending}"] = np.ascontiguousarray(value)
    found.ranks[module], found.scales[module] = left.shape[1], scale


def _add_trained(found: _Written, model: Any, sites: HubSites) -> None:
    """Add the trainable weights that are no factors: biases of layers with LoRA, and whole modules."""
    by_variable = {id(site.twin.own): site for site in sites.sites}
    factors = {id(v) for site in sites.sites if site.twin.has_lora for v in site.twin.factors}
    for variable in model.trainable_variables:
        if id(variable) in factors:
            continue
        site = by_variable.get(id(variable))
        if site is None or not sites.cover(site.tensor.name):
            raise _no_place(model, variable.path)
        module, _, leaf = site.tensor.name.rpartition(".")
        if module in found.ranks:
            found.has_biases = True
            found.tensors[f"{PREFIX}{module}.base_layer.{leaf}"] = _whole(sites.of(site.tensor.name))
        elif module not in found.saved:
            found.saved.add(module)
            for name in (f"{module}.weight", f"{module}.bias"):
                if name in sites.manifest.tensors:
                    found.tensors[PREFIX + name] = _whole(sites.of(name))


def _whole(sites: Sequence[Site]) -> NDArray[Any]:
    """Return the value of a Hugging Face tensor from the variables that have its elements."""
    tensor, values = sites[0].tensor, [np.asarray(value_of(site.twin.own)) for site in sites]
    found = np.empty(tensor.size, values[0].dtype)
    for site, value in zip(sites, values, strict=True):
        strides = tuple(step * found.itemsize for step in site.view.strides)
        np.lib.stride_tricks.as_strided(found[site.view.offset :], site.view.shape, strides)[...] = value
    return found.reshape(tensor.shape)


def _config(found: _Written, model: Any, sites: HubSites) -> dict[str, Any]:
    """Return ``adapter_config.json``; rank and alpha of most modules, and patterns for the others."""
    alphas = {module: found.scales[module] * rank for module, rank in found.ranks.items()}
    rank = Counter(found.ranks.values()).most_common(1)[0][0]
    alpha = Counter(alphas.values()).most_common(1)[0][0]
    source = sites.manifest if sites.manifest.files else None
    is_task = backbone_of(model) is not model
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if is_task and type(model).__name__.endswith("CausalLM") else None,
        "base_model_name_or_path": source.source if source is not None else "",
        "r": rank,
        "lora_alpha": _number(alpha),
        "rank_pattern": {module: own for module, own in found.ranks.items() if own != rank},
        "alpha_pattern": {module: _number(own) for module, own in alphas.items() if own != alpha},
        "target_modules": _targets(found.ranks, list(sites.manifest.tensors)),
        "modules_to_save": sorted(found.saved) or None,
        "bias": "lora_only" if found.has_biases else "none",
        "fan_in_fan_out": model_type_of(sites.manifest.config).has_conv1d,
        "lora_dropout": 0.0,
        "use_rslora": False,
        "use_dora": False,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _number(value: float) -> int | float:
    return int(value) if value == int(value) else value


def _targets(modules: Mapping[str, Any], tensors: Sequence[str]) -> list[str]:
    """Return last parts of names if these mean exactly the given modules, else the whole names."""
    ends = {module.rpartition(".")[2] for module in modules}
    of_model = {name.removesuffix(".weight") for name in tensors if name.endswith(".weight")}
    meant = {module for module in of_model if module.rpartition(".")[2] in ends}
    return sorted(ends if meant == modules.keys() else modules)
