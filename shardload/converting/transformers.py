"""The Hugging Face target: a KerasHub backbone's configuration, and the tensor for each of its variables.

KerasHub's converters only read Hugging Face checkpoints. So a converter is run on the names and shapes of the tensors
that a checkpoint of this configuration would have, and the resulting mapping is used in the other direction: elements
that would be read into a variable are written from that variable. Every element must come from exactly one variable; a
fused tensor (GPT-2's queries, keys and values) comes from several.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.converting.plans import NoPlaceError
from shardload.errors import UnsupportedError
from shardload.families.registry import exports
from shardload.hub import building, described, fields
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.variables import stored_dtype
from shardload.loaders.file_pieces import Wanted
from shardload.manifest import Manifest, Tensor
from shardload.mapping.converters import map_hub
from shardload.mapping.outside import sort_unused
from shardload.stores.location import nowhere
from shardload.transfer.planning import Binding

_Config = dict[str, Any]
UNKNOWN = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of config.json that KerasHub's classes lack: they are copied from the source, or left out."""
_NOT_COMPARED = ("name", "dtype", "trainable", "dropout")
"""Settings in which two backbones may differ and still count as equal: Hugging Face's configuration cannot express
them, and they do not affect weights."""


def config_of(backbone: Any, dtype: str, *, known: Mapping[str, Any] | None = None) -> _Config:
    """Return the content of Hugging Face's ``config.json`` for a KerasHub backbone; raise if it cannot describe it.

    ``dtype``: dtype of the written weights. ``known``: configuration of the source in Hugging Face's form. The longest
    text and the ids of special tokens are taken from it, because KerasHub's backbones do not know them.
    """
    kind = type(backbone).__name__
    if (export := exports().get(kind)) is None:
        raise NoPlaceError(f"Cannot write {kind} for Hugging Face, expected one of {', '.join(exports())}")
    # The longest text and token ids are never guessed: wrong ones would be silently obeyed.
    known = {name: value for name, value in (known or {}).items() if name in UNKNOWN}
    try:
        config = {**known, **export.config(backbone, _Layers(backbone)), "torch_dtype": dtype}
    except UnsupportedError as error:
        raise NoPlaceError(str(error)) from error
    # The functions below write few of a backbone's settings, so KerasHub must read the same backbone from the result.
    try:
        with abstraction.abstract():
            again = building.build_model(stand_in(config), task=False)
    except UnsupportedError as error:
        raise NoPlaceError(f"Cannot describe {kind} in a Hugging Face configuration: {error}") from error
    if (key := differing(backbone, again)) is not None:
        wanted, found = backbone.get_config()[key], again.get_config().get(key)
        raise NoPlaceError(
            f"Cannot describe {kind} with {key}={wanted!r} in a Hugging Face configuration: KerasHub would read "
            f"{key}={found!r}"
        )
    # Settings of layers are in no backbone's configuration; `unlike` notes those that loading sets.
    if large := [d for d in fields.differences(config, backbone) if d.fix is None]:
        raise NoPlaceError(
            f"Cannot describe {kind} in a Hugging Face configuration, which would state another value than the model "
            f"computes with: {large[0].field} is {large[0]}"
        )
    return config


@dataclass(frozen=True, slots=True)
class _Layers:
    """Settings for ``config.json`` that are read from a backbone's layers, because its configuration lacks them."""

    backbone: Any

    @property
    def epsilon(self) -> float:
        return fields.epsilon_of(self.backbone)

    @property
    def activation(self) -> str:
        if (name := fields.activation_of(self.backbone)) is None:
            kind = type(self.backbone).__name__
            raise UnsupportedError(
                f"Cannot describe {kind} in a Hugging Face configuration: no name for its activation"
            )
        return name


def unlike(config: Mapping[str, Any], backbone: Any) -> tuple[str, ...]:
    """Return a note for each field of the written ``config.json`` whose value is not that of the backbone."""
    return tuple(
        f"{d.field}: {d.configured} in config.json, but {d.actual} in this model, so results of the written one differ"
        for d in fields.differences(config, backbone)
    )


def differing(backbone: Any, other: Any) -> str | None:
    """Return the name of a setting that affects weights and in which two backbones differ; ``None`` without one."""
    # Gemma 3 has an image_size even without the vision encoder that would use it.
    unused = {"image_size"} if getattr(backbone, "vision_encoder", None) is None else set()
    wanted, found = _compared(backbone.get_config()), _compared(other.get_config())
    return next((key for key in wanted if key not in unused and wanted[key] != found.get(key)), None)


def _compared(config: Mapping[str, Any]) -> _Config:
    """Return a backbone's configuration to compare: without settings that do not affect weights, at any depth."""
    return {
        key: _compared(value) if isinstance(value, Mapping) else value
        for key, value in config.items()
        if key not in _NOT_COMPARED
    }


def is_written(backbone: Any) -> bool:
    """Whether shardload can make Hugging Face's ``config.json`` for KerasHub backbones of this class."""
    return type(backbone).__name__ in exports()


def stand_in(config: Mapping[str, Any]) -> Manifest:
    """Return the manifest (tensor names, shapes) that a checkpoint of this Hugging Face configuration would have."""
    try:
        return described.hugging_face(config, nowhere(str(config["model_type"])), stored=np.float32)
    except UnsupportedError as error:
        kind = config["model_type"]
        raise NoPlaceError(f"Cannot write model_type {kind!r} for Hugging Face") from error


def views_of(model: Any, manifest: Manifest, *, leave_out: Container[int] = ()) -> tuple[Binding, ...]:
    """Return, for each variable, the Hugging Face tensor and the elements of it that the variable fills.

    ``manifest``: the tensors of such a checkpoint, as `stand_in` derives them from a configuration, or as a folder has
    them, which may also have tensors outside of the model. ``leave_out``: ``id`` of variables that are not written.
    """
    mapping = map_hub(model, manifest)
    missing = [v.path for v in mapping.missing_variables if id(v) not in leave_out]
    # A stand-in lists exactly the model's tensors; a folder (it has files) may contain buffers and copies as well.
    # The load has compared their values.
    found = sort_unused(mapping, manifest, model, compare=False).outside if manifest.files else ()
    outside = {each.tensor for each in found if not each.is_weight}
    unused = [name for name in mapping.unused if name not in outside]
    problems = [*map(str, mapping.mismatched), *missing, *unused, *(c.owner for c in mapping.computed)]
    by_tensor: dict[str, list[Binding]] = {}
    for binding in mapping.bindings:
        by_tensor.setdefault(binding.view.tensor, []).append(binding)
    stored = {name: tensor for name, tensor in manifest.tensors.items() if name not in outside}
    problems += [name for name, tensor in stored.items() if not covers(by_tensor.get(name, ()), tensor)]
    if problems:
        kind = type(backbone_of(model)).__name__
        raise NoPlaceError(
            f"Cannot match the variables of {kind} one to one with the Hugging Face tensors of model_type "
            f"{manifest.config['model_type']!r}: {problems[0]}"
        )
    return tuple(binding for name in stored for binding in by_tensor[name])


def wanted(bindings: Iterable[Binding], shapes: Mapping[str, Tensor], dtypes: Mapping[int, Any]) -> dict[str, Wanted]:
    """Return the tensors to write, by name; each has the dtype of the variables that fill it."""
    found: dict[str, Wanted] = {}
    for b in bindings:
        name, dtype = b.view.tensor, dtypes[id(b.variable)]
        known = found.setdefault(name, Wanted(name, shapes[name].shape, dtype))
        if known.dtype != dtype:
            raise UnsupportedError(
                f"Cannot write {name!r} for Hugging Face: its variables are {known.dtype} and {dtype} "
                f"({b.variable.path!r}). Choose one dtype with --dtype"
            )
    return found


def covers(bindings: Sequence[Binding], tensor: Tensor) -> bool:
    """Whether the variables in ``bindings`` fill each element of a tensor exactly once, so that it can be written."""
    # Marking takes a byte per element. Nearly all tensors have one view, and its strides tell without marks.
    if len(bindings) == 1:
        view, expected = bindings[0].view, 1
        # Sorted by stride, its dims leave no gap and no overlap.
        for n, stride in sorted(zip(view.shape, view.strides, strict=True), key=lambda d: d[1]):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return expected == tensor.size and view.offset == 0
    seen = np.zeros(tensor.size, np.bool_)
    for binding in bindings:
        view = binding.view
        # as_strided() does not check bounds, and the next line writes through it.
        last = view.offset + sum((n - 1) * t for n, t in zip(view.shape, view.strides, strict=True))
        if 0 in view.shape or min(view.strides, default=1) <= 0 or last >= tensor.size:
            return False
        np.lib.stride_tricks.as_strided(seen[view.offset :], view.shape, view.strides)[...] = True
    # As many elements as the tensor has, and none left out: so none twice.
    return sum(math.prod(b.view.shape) for b in bindings) == tensor.size and bool(seen.all())


def is_weight(variable: Any) -> bool:
    """Whether a variable is a weight: trainable, or too large to be mere state (a seed, a counter)."""
    return bool(variable.trainable) or stored_dtype(variable).itemsize * int(np.prod(variable.shape)) > _MAX_STATE


_MAX_STATE = 1024
"""Most bytes of a variable that counts as state, and so may be stored in a JSON file."""
