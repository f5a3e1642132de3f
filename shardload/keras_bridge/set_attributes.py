"""Attributes that were set on built layers, because the constructor of their model does not pass them on.

KerasHub's classes do not serialise them, so the configuration of a rebuilt model would give other numbers. Files that
shardload writes store them, by the paths of `state_keys`::

    "shardload_attributes": {"layers/transformer_encoder_layer/_self_attention_layer_norm": {"epsilon": 1e-12}}
"""

from __future__ import annotations

import inspect
import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras

from shardload.errors import SourceError, UnsupportedError
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import own_layers
from shardload.keras_bridge.saving import saved_objects, serialised_model

ENTRY = "shardload_attributes"
"""Name of the entry in a configuration; Keras and KerasHub ignore it."""


def gelu_tanh(x: Any) -> Any:
    """The tanh form of GELU."""
    return keras.activations.gelu(x, approximate=True)


_ACTIVATIONS = {"gelu": keras.activations.gelu, "gelu_tanh": gelu_tanh}


def _is_epsilon(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value) and 0 < value < 1


def _is_window(value: Any) -> bool:
    return value is None or (type(value) is int and 0 < value < 1 << 40)


def _is_activation(value: Any) -> bool:
    return isinstance(value, str) and value in _ACTIVATIONS


# A configuration is untrusted input: it can set these attributes only, to these values.
_VALID: Mapping[str, Callable[[Any], bool]] = {
    "epsilon": _is_epsilon,
    "sliding_window": _is_window,
    "query_head_dim_normalize": lambda value: isinstance(value, bool),
    "activation": _is_activation,
    "act_layer": _is_activation,
}


def set_attribute(layer: Any, name: str, value: Any) -> None:
    """Set an attribute of a layer, and remember to save it."""
    setattr(layer, name, value)
    record_of(layer).set_attributes.add(name)


def attributes_of(model: Any) -> dict[str, dict[str, Any]]:
    """Return what was set on the layers of ``model``, by path."""
    found = {path: _attributes(layer, record_of(layer).set_attributes) for path, layer in saved_objects(model)}
    return {path: attributes for path, attributes in found.items() if attributes}


def _attributes(layer: Any, names: Iterable[str]) -> dict[str, Any]:
    # A program may have set another value since, which no file can store.
    stored = {name: _stored(getattr(layer, name, None)) for name in sorted(names)}
    return {name: value for name, value in stored.items() if _VALID[name](value)}


def _stored(value: Any) -> Any:
    return next((name for name, function in _ACTIVATIONS.items() if value is function), value)


def serialised_with_attributes(model: Any) -> str:
    """Return `serialised_model` with what the model's class leaves out: arguments, and what was set on layers.

    Raises:
        UnsupportedError: When Keras would describe another model.
    """
    _refuse_repeated_layers(model)
    found = json.loads(serialised_model(model))
    backbone = backbone_of(model)
    inner = found["config"] if backbone is model else found["config"].get("backbone", {}).get("config")
    if isinstance(inner, dict):
        add_arguments(inner, backbone)
    attributes = attributes_of(model)
    return json.dumps({**found, ENTRY: attributes} if attributes else found)


def _refuse_repeated_layers(model: Any) -> None:
    for one in own_layers(model):
        # `Sequential.get_config` lists each layer once, so a model rebuilt from it calls it once.
        if isinstance(one, keras.Sequential) and (
            twice := [layer for layer, n in Counter(one.layers).items() if n > 1]
        ):
            raise UnsupportedError(
                f"Keras describes each layer of the Sequential {one.name!r} once, but it has {twice[0].name!r} several "
                "times. Build it as a functional model, keras.Model(inputs, outputs)"
            )


def add_arguments(config: dict[str, Any], backbone: Any) -> None:
    """Add constructor arguments that KerasHub's class does not serialise to its configuration, in place."""
    taken = inspect.signature(type(backbone).__init__).parameters
    for name in _NOT_SERIALISED:
        if name in taken and (value := getattr(backbone, name, None)) is not None:
            config.setdefault(name, value)


_NOT_SERIALISED = ("tie_word_embeddings", "router_aux_loss_coefficient")
"""Of Llama, which would build an output layer without weights, and of QwenMoe."""


def lost_arguments(backbone: Any) -> dict[str, tuple[Any, Any]]:
    """Return arguments that files of Keras lack: their values, and what a backbone rebuilt from such a file has."""
    taken, config = inspect.signature(type(backbone).__init__).parameters, backbone.get_config()
    values = {name: getattr(backbone, name, None) for name in _NOT_SERIALISED if name in taken and name not in config}
    return {name: (value, taken[name].default) for name, value in values.items() if value != taken[name].default}


def apply_attributes(model: Any, saved: Any) -> None:
    """Set what `attributes_of` found on the layers of a rebuilt model; skips paths and attributes that it lacks.

    Raises:
        SourceError: When ``saved`` is not valid.
    """
    for layer, name, value in _saved_on(model, saved):
        set_attribute(layer, name, value)


def differing_attributes(model: Any, saved: Any) -> tuple[str, ...]:
    """Return the names of attributes that a model's layers have with other values than the saved one's.

    Raises:
        SourceError: When ``saved`` is not valid.
    """
    found = {name for layer, name, value in _saved_on(model, saved) if not _equal(getattr(layer, name), value)}
    return tuple(sorted(found))


def _equal(one: Any, other: Any) -> bool:
    return bool(one == other) or (callable(one) and _stored(one) == _stored(other))


def _saved_on(model: Any, saved: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield each layer that has a saved attribute, the attribute, and its saved value."""
    known = {path: _validated(path, attributes) for path, attributes in _mapping("", saved).items()}
    for path, layer in saved_objects(model) if known else ():
        for name, value in known.get(path, {}).items():
            if hasattr(layer, name):
                yield layer, name, _ACTIVATIONS[value] if isinstance(value, str) else value


def _validated(path: str, found: Any) -> Mapping[str, Any]:
    attributes = _mapping(path, found)
    if wrong := [name for name, value in attributes.items() if name not in _VALID or not _VALID[name](value)]:
        raise SourceError(
            f"The configuration has an invalid attribute for the layer {path!r:.80}: "
            f"{wrong[0]!r:.40} = {attributes[wrong[0]]!r:.40}"
        )
    return attributes


def _mapping(path: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise SourceError(f"The configuration has invalid attributes for the layer {path!r:.80}: {found!r:.80}")
    return found
