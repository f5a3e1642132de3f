"""The Hugging Face target: a KerasHub backbone's configuration, and the tensor for each of its variables.

KerasHub's converters only read Hugging Face checkpoints. So a converter is run on the names and shapes of the tensors
that a checkpoint of this configuration would have, and the resulting mapping is used in the other direction: elements
that would be read into a variable are written from that variable. Every element must come from exactly one variable; a
fused tensor (GPT-2's queries, keys and values) comes from several.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.converting.plans import NoPlaceError
from shardload.errors import UnsupportedError
from shardload.families.parts.conversion import VariablePart, ZeroRows
from shardload.families.registry import exports
from shardload.hub import building, described, fields
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_state import own_layers
from shardload.keras_bridge.variables import stored_dtype
from shardload.loaders.file_pieces import Wanted
from shardload.manifest import Manifest, Tensor, View, c_strides
from shardload.mapping.converters import map_hub
from shardload.mapping.outside import sort_unused
from shardload.sharding.layout import Bounds
from shardload.stores.location import nowhere
from shardload.transfer.geometry import within

_Config = dict[str, Any]
UNKNOWN = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Fields of config.json that KerasHub's classes lack: they are copied from the source, or left out."""
UNKNOWN_OF_IMAGES = (
    *("image_token_index", "boi_token_index", "eoi_token_index"),
    *("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
    *("boi_token_id", "eoi_token_id", "audio_token_id", "boa_token_id", "eoa_token_index"),
)
"""The same, of models that read images, and maybe sound."""
_NOT_COMPARED = ("name", "dtype", "trainable", "dropout", "build_config")
"""Settings in which two backbones may differ and still count as equal: Hugging Face's configuration cannot express
them, and they do not affect weights. Keras adds ``build_config`` to a layer of another only if it is built already."""


def config_of(backbone: Any, dtype: str, *, known: Mapping[str, Any] | None = None) -> _Config:
    """Return the content of Hugging Face's ``config.json`` for a KerasHub backbone; raise if it cannot describe it.

    ``dtype``: dtype of the written weights. ``known``: configuration of the source in Hugging Face's form. The longest
    text and the ids of special tokens are taken from it, because KerasHub's backbones do not know them.
    """
    kind = type(backbone).__name__
    if (export := exports().get(kind)) is None:
        raise NoPlaceError(f"Cannot write {kind} for Hugging Face, expected one of {', '.join(exports())}")
    # The longest text and token ids are never guessed: wrong ones would be silently obeyed.
    known = {name: value for name, value in (known or {}).items() if name in (*UNKNOWN, *UNKNOWN_OF_IMAGES)}
    try:
        # As JSON has it: a list that a Keras layer tracks refers to the layer.
        described = json.loads(json.dumps(dict(export.config(backbone, _Layers(backbone)))))
        config = {**known, **described, "torch_dtype": dtype}
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
            f"Cannot describe {kind} with {key}={wanted!r:.200} in a Hugging Face configuration: KerasHub would read "
            f"{key}={found!r:.200}"
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
    return {key: _comparable(value) for key, value in config.items() if key not in _NOT_COMPARED}


def _comparable(value: Any) -> Any:
    """Return a setting to compare: in JSON, a tuple is a list."""
    if isinstance(value, Mapping):
        return _compared(value)
    return [_comparable(one) for one in value] if isinstance(value, list | tuple) else value


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


@dataclass(frozen=True, slots=True, eq=False)
class FilledElements:
    """The Hugging Face tensor that a variable, or a part of it, fills, and which elements of the tensor."""

    variable: Any
    """``None`` for elements that no variable has, and that are zero."""
    view: View
    box: Bounds | None = None
    """The part of the variable that is in this tensor, if it has several; the view is valid for indices in it only."""

    @property
    def filled(self) -> View:
        """The elements of the tensor that the variable, or its part, fills."""
        return within(self.view, self.box)


def _place_of_part(part: VariablePart) -> FilledElements:
    shape, box = tuple(part.variable.shape), Bounds(part.start, part.stop)
    first = sum(i * stride for i, stride in zip(part.start, part.strides, strict=True))
    return FilledElements(part.variable, View(part.tensor, part.offset - first, shape, part.strides), box)


def _place_of_zeros(zeros: ZeroRows, manifest: Manifest) -> FilledElements:
    shape = manifest.tensors[zeros.tensor].shape
    rows = shape[0] if zeros.rows is None else zeros.rows
    return FilledElements(None, View(zeros.tensor, 0, (rows, *shape[1:]), c_strides(shape)))


def _declared(backbone: Any, manifest: Manifest) -> list[FilledElements]:
    """Return where the parts of variables are that KerasHub's converter computes, and what is zero."""
    if (export := exports().get(type(backbone).__name__)) is None:
        return []
    # A folder has values where a stand-in has zeros.
    zeros = () if manifest.files else export.zeros
    parts = (_place_of_part(part) for part in export.parts(backbone))
    return [*parts, *(_place_of_zeros(one, manifest) for one in zeros)]


def lacking(places: Sequence[FilledElements], backbone: Any) -> tuple[str, ...]:
    """Return notes on what Hugging Face's class has and KerasHub's lacks."""
    zeros = dict.fromkeys(place.view.tensor for place in places if place.variable is None)
    notes = (f"zeros were written for what KerasHub's class lacks: {', '.join(zeros)}",) if zeros else ()
    if not exports()[type(backbone).__name__].without_pooler:
        return notes
    return (*notes, "no pooler was written, because KerasHub's class has none: transformers makes a random one")


def derived_from_others(backbone: Any) -> set[int]:
    """Return the ``id`` of each variable of a backbone that is computed from others, and that no tensor has."""
    export = exports().get(type(backbone).__name__)
    return set() if export is None else {id(variable) for variable in export.derived(backbone)}


def same_in(backbone: Any) -> tuple[tuple[Any, Any], ...]:
    """Return pairs of variables of a backbone that have one tensor: the first is written to it."""
    export = exports().get(type(backbone).__name__)
    return () if export is None else export.same(backbone)


def views_of(model: Any, manifest: Manifest, *, leave_out: Container[int] = ()) -> tuple[FilledElements, ...]:
    """Return, for each variable, the Hugging Face tensor and the elements of it that the variable fills.

    ``manifest``: the tensors of such a checkpoint, as `stand_in` derives them from a configuration, or as a folder has
    them, which may also have tensors outside of the model. ``leave_out``: ``id`` of variables that are not written.
    """
    require_floats(model)
    mapping, declared = map_hub(model, manifest), _declared(backbone_of(model), manifest)
    known = {id(place.variable) for place in declared} | derived_from_others(backbone_of(model))
    computed = [c.owner for c in mapping.computed if not all(id(v) in known for v in c.variables)]
    missing = [v.path for v in mapping.missing_variables if id(v) not in leave_out]
    # A stand-in lists exactly the model's tensors; a folder (it has files) may contain buffers and copies as well.
    # The load has compared their values.
    found = sort_unused(mapping, manifest, model, compare=False).outside if manifest.files else ()
    outside = {each.tensor for each in found if not each.is_weight}
    zeros = {place.view.tensor for place in declared if place.variable is None}
    unused = [name for name in mapping.unused if name not in outside | zeros]
    problems = [*map(str, mapping.mismatched), *missing, *unused, *computed]
    by_tensor: dict[str, list[FilledElements]] = {}
    seconds = {id(variable) for _, variable in same_in(backbone_of(model))}
    bound = (FilledElements(b.variable, b.view) for b in mapping.bindings if id(b.variable) not in seconds)
    for place in (*bound, *declared):
        by_tensor.setdefault(place.view.tensor, []).append(place)
    stored = {name: tensor for name, tensor in manifest.tensors.items() if name not in outside}
    problems += [
        name for name, tensor in stored.items() if not covers([p.filled for p in by_tensor.get(name, ())], tensor)
    ]
    if problems:
        kind = type(backbone_of(model)).__name__
        raise NoPlaceError(
            f"Cannot match the variables of {kind} one to one with the Hugging Face tensors of model_type "
            f"{manifest.config['model_type']!r}: {problems[0]}"
        )
    return tuple(place for name in stored for place in by_tensor[name])


def require_floats(model: Any) -> None:
    """Raise `NoPlaceError` if a layer of the model is quantised: Hugging Face's tensors are floats."""
    for layer in own_layers(model):
        if (mode := getattr(layer, "quantization_mode", None)) is not None:
            raise NoPlaceError(
                f"Cannot write {type(backbone_of(model)).__name__} for Hugging Face: its layer {layer.path!r} is "
                f"quantised ({mode})"
            )


def wanted(
    places: Sequence[FilledElements], shapes: Mapping[str, Tensor], dtypes: Mapping[int, Any]
) -> dict[str, Wanted]:
    """Return the tensors to write, by name; each has the dtype of the variables that fill it, zeros the most used."""
    found: dict[str, Wanted] = {}
    counts = Counter(dtypes[id(p.variable)] for p in places if p.variable is not None)
    for b in sorted(places, key=lambda place: place.variable is None):
        name = b.view.tensor
        if b.variable is None:
            found.setdefault(name, Wanted(name, shapes[name].shape, counts.most_common(1)[0][0]))
            continue
        dtype = dtypes[id(b.variable)]
        known = found.setdefault(name, Wanted(name, shapes[name].shape, dtype))
        if known.dtype != dtype:
            raise UnsupportedError(
                f"Cannot write {name!r} for Hugging Face: its variables are {known.dtype} and {dtype} "
                f"({b.variable.path!r}). Choose one dtype with --dtype"
            )
    return found


def covers(views: Sequence[View], tensor: Tensor) -> bool:
    """Whether variables with these ``views`` fill each element of a tensor exactly once, so that it can be written."""
    # Marking takes a byte per element. Nearly all tensors have one view, and its strides tell without marks.
    if len(views) == 1:
        view, expected = views[0], 1
        # Sorted by stride, its dims leave no gap and no overlap.
        for n, stride in sorted(zip(view.shape, view.strides, strict=True), key=lambda d: d[1]):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return expected == tensor.size and view.offset == 0
    seen = np.zeros(tensor.size, np.bool_)
    for view in views:
        # as_strided() does not check bounds, and the next line writes through it.
        last = view.offset + sum((n - 1) * t for n, t in zip(view.shape, view.strides, strict=True))
        if 0 in view.shape or min(view.strides, default=1) <= 0 or last >= tensor.size:
            return False
        np.lib.stride_tricks.as_strided(seen[view.offset :], view.shape, view.strides)[...] = True
    # As many elements as the tensor has, and none left out: so none twice.
    return sum(math.prod(view.shape) for view in views) == tensor.size and bool(seen.all())


def is_weight(variable: Any) -> bool:
    """Whether a variable is a weight: trainable, or too large to be mere state (a seed, a counter)."""
    return bool(variable.trainable) or stored_dtype(variable).itemsize * int(np.prod(variable.shape)) > _MAX_STATE


_MAX_STATE = 1024
"""Most bytes of a variable that counts as state, and so may be stored in a JSON file."""
