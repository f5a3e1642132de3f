"""Settings and attributes of layers that a configuration omits: dtype policies, frozen and quantised layers, LoRA.

The configuration of a subclassed model, or one of KerasHub, tells only how it was constructed, not what was changed
later. So a saved step also stores these settings, and `apply_settings` applies them to the rebuilt model::

    "form": {
        "": {"policy": "mixed_bfloat16"},                     of the model: Keras' global policy when it was created
        "layers/dense": {"trainable": false, "lora": {"rank": 4, "alpha": 16}},
        "layers/dense_1": {"frozen": ["kernel"], "policy": "int8_from_float32", "quantization": "int8"},
    }

The keys are paths of layers. Settings that cannot be reproduced (custom quantisers, a policy set after a layer was
built) raise an error that names the layer, because the rebuilt model would compute differently.

Attributes that a model's constructor does not pass on to its layers (``epsilon``, say) can only be set on built layers.
KerasHub does not store them; files that shardload writes have them in the model's configuration.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import keras

from shardload.errors import SourceError, UnsupportedError
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.kept_layers import PACKED_NAME, packed_config
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import named_weights, own_layers, policy_name
from shardload.keras_bridge.quantising import (
    is_quantisable,
    mark_calibrated,
    quantisation_name,
    quantise_layer,
    with_own_policy,
)
from shardload.keras_bridge.saving import saved_objects, serialised_model

ATTRIBUTES_ENTRY = "shardload_attributes"
"""Key in a saved configuration under which shardload stores attributes of layers; Keras and KerasHub ignore it."""
_PLAIN_MODE = re.compile(rf"int8|int4/(-1|[1-9][0-9]{{0,8}})|{PACKED_NAME.pattern}")
"""Names of quantisations that can be redone on a kernel without values; `quantisation_name` gives them."""
_MAX_RANK = 1 << 20  # structure.json is untrusted input, and no real rank is larger


def settings_of(model: Any) -> dict[str, dict[str, Any]]:
    """Return path → settings, for layers that are frozen, quantised, or have LoRA or a dtype policy of their own."""
    found = {}
    usual = policy_name(model)
    for path, layer in saved_objects(model):
        if settings := _settings_of_layer(layer, usual=None if layer is model else usual):
            found[path] = settings
    return found


def _settings_of_layer(layer: Any, *, usual: str | None) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    trainable = getattr(layer, "trainable", True) is not False
    if not trainable:
        settings["trainable"] = False
    frozen = [name for name, variable in named_weights(layer) if not variable.trainable]
    # All weights of a frozen layer are frozen, so they are listed only where some are not.
    if frozen and (trainable or len(frozen) < len(named_weights(layer))):
        settings["frozen"] = frozen
    policy = policy_name(layer)
    if policy not in (None, usual):
        settings["policy"] = policy
    # Only Keras' defaults can be redone on a kernel without values; `_quantise` shows any other text in its error.
    if _has_kernel(layer) and (quantization := quantisation_name(layer)) is not None:
        settings["quantization"] = quantization
    if getattr(layer, "lora_enabled", False):
        settings["lora"] = {"rank": int(layer.lora_rank), "alpha": float(layer.lora_alpha)}
    return settings


class _PolicyDiffersError(UnsupportedError):
    """A rebuilt layer has another dtype policy than the saved one: `with_saved_policy` then tries another policy."""


def with_saved_policy(make: Callable[[], Any], saved: Any, dtype: Any, *, has_dtype: bool) -> Any:
    """Build a model by ``make``, under the global dtype policy that the saved model was built under; return it.

    A step does not store that global policy. So the policy of the model itself, from the settings ``saved``, is tried
    as the global one first. If ``make`` then fails because layers get other policies than the saved ones, it is called
    again under the global policy that is set now. With ``has_dtype``, the configuration states the model's policy, so
    the global one was probably different: the order is reversed. If ``dtype`` is given, only that policy is used.
    """
    top = saved.get("", {}) if isinstance(saved, Mapping) else {}
    wanted = dtype if dtype is not None else top.get("policy") if isinstance(top, Mapping) else None
    try:
        own = None if wanted is None else keras.dtype_policies.get(wanted)
    except ValueError as error:
        text = f"structure.json has an invalid dtype policy: {wanted!r:.80}. Restore another step"
        raise SourceError(text) from error
    now = keras.config.dtype_policy()
    if own is None or own.name == now.name:
        return make()
    # If the configuration contains the model's policy, that was explicit, so try today's global policy first.
    policies = [own] if dtype is not None else [now, own] if has_dtype else [own, now]
    *first, last = policies
    for policy in first:
        with suppress(_PolicyDiffersError), global_policy(policy):
            return make()
    with global_policy(last):
        return make()


def apply_settings(model: Any, saved: Any, *, any_policy: bool = False) -> None:
    """Apply saved settings (untrusted input) to the layers of a model that was just built in `shardload.abstract`.

    Settings of layers that the model lacks are skipped: loading the weights of these raises a clearer error later. If a
    layer has another dtype policy than the saved one, an error is raised, but not with ``any_policy``.
    """
    known = {path: _validated(path, settings) for path, settings in _mapping("", saved).items()}
    layers = saved_objects(model)
    # From the outside in: freezing a layer also freezes the layers in it.
    for path, layer in layers:
        wanted = known.get(path, {}).get("trainable", True)
        if getattr(layer, "trainable", wanted) is not wanted:
            layer.trainable = wanted
    for path, layer in layers:
        settings = known.get(path, {})
        _quantise(path, layer, settings.get("quantization"))
        # The policy of an input layer does not matter, and other objects have none.
        if not any_policy and isinstance(layer, keras.Layer) and not isinstance(layer, keras.layers.InputLayer):
            has, policy = policy_name(layer), settings.get("policy", known.get("", {}).get("policy"))
            if None not in (has, policy) and has != policy:
                raise _PolicyDiffersError(
                    _refusal(path, f"it had the dtype policy {policy!r}, but its configuration gives {has!r}")
                )
        if lora := settings.get("lora"):
            _enable_lora(path, layer, lora)
        frozen = set(settings.get("frozen", ()))
        for name, variable in named_weights(layer):
            wanted = name not in frozen if frozen else settings.get("trainable", True)
            if variable.trainable is not wanted:
                variable.trainable = wanted


def enable_saved_lora(model: Any, saved: Any) -> None:
    """Enable LoRA in the layers that have it in the settings ``saved``, and change nothing else; call in `abstract`."""
    known = {path: _validated(path, settings) for path, settings in _mapping("", saved).items()}
    for path, layer in saved_objects(model):
        if lora := known.get(path, {}).get("lora"):
            _enable_lora(path, layer, lora)


def _quantise(path: str, layer: Any, wanted: str | None) -> None:
    if wanted is None or not _has_kernel(layer):
        return
    mode = wanted.partition("/")[0]
    if mode == layer.quantization_mode:
        with_own_policy(layer)
        mark_calibrated(layer)
    elif layer.quantization_mode is None:
        if not _PLAIN_MODE.fullmatch(wanted) or not is_quantisable(layer):
            raise UnsupportedError(_refusal(path, f"it was quantised ({wanted}), but its configuration is not"))
        quantise_layer(layer, packed_config(wanted))


def _enable_lora(path: str, layer: Any, lora: Mapping[str, Any]) -> None:
    if not hasattr(layer, "enable_lora"):
        return
    if not getattr(layer, "lora_enabled", False):
        layer.enable_lora(lora["rank"], lora_alpha=lora["alpha"])
    elif layer.lora_alpha != lora["alpha"]:
        # Layers of Keras that are rebuilt from their configuration enable LoRA with its rank alone.
        layer.lora_alpha = lora["alpha"]


def _refusal(path: str, problem: str) -> str:
    return (
        f"Cannot rebuild the layer {path!r}: {problem}. Build the model yourself with the same settings, then call "
        "shardload.restore(model, directory)"
    )


def _validated(path: str, found: Any) -> Mapping[str, Any]:
    settings = _mapping(path, found)
    lora, frozen = settings.get("lora"), settings.get("frozen", [])
    valid = isinstance(settings.get("trainable", True), bool)
    valid &= isinstance(frozen, list) and all(isinstance(name, str) for name in frozen)
    valid &= all(isinstance(settings.get(key, ""), str) for key in ("policy", "quantization"))
    if lora is not None:
        rank, alpha = _mapping(path, lora).get("rank"), lora.get("alpha")
        valid &= type(rank) is int and 0 < rank <= _MAX_RANK and isinstance(alpha, (int, float))
    if not valid:
        shown = f"{dict(settings)!r:.80}. Restore another step"
        raise SourceError(f"structure.json has invalid settings for the layer {path!r}: {shown}")
    return settings


def _mapping(path: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        shown = f"{found!r:.80}. Restore another step"
        raise SourceError(f"structure.json has invalid settings for the layer {path!r}: {shown}")
    return found


def _has_kernel(layer: Any) -> bool:
    """Whether a layer can quantise a kernel of its own; false for models, which only quantise their layers."""
    return isinstance(layer, keras.Layer) and type(layer).quantize not in (keras.Layer.quantize, keras.Model.quantize)


@contextmanager
def global_policy(policy: Any) -> Iterator[None]:
    """Replace the global dtype policy inside the block."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)


def with_dtype(config: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Return a Keras configuration in which all dtype policies use ``dtype``; quantised policies stay quantised."""
    if dtype is None:
        return dict(config)
    name = str(getattr(dtype, "name", dtype))

    def rewrite(value: Any) -> Any:
        if isinstance(value, list):
            return [rewrite(v) for v in value]
        if not isinstance(value, Mapping):
            return value
        kind, inner = value.get("class_name"), value.get("config")
        if kind == "DTypePolicy" and isinstance(inner, Mapping):
            return {**value, "config": {**inner, "name": name}}
        # A quantised policy: int8 of float32 becomes int8 of the new dtype.
        if str(kind).endswith("DTypePolicy") and isinstance(inner, Mapping) and "source_name" in inner:
            return {**value, "config": {**inner, "source_name": name}}
        return {k: rewrite(v) for k, v in value.items()}

    changed: dict[str, Any] = rewrite(config)
    return changed


def gelu_tanh(x: Any) -> Any:
    """Compute the activation function GELU by its approximation with tanh."""
    return keras.activations.gelu(x, approximate=True)


_ACTIVATIONS = {"gelu": keras.activations.gelu, "gelu_tanh": gelu_tanh}


def _is_activation(value: Any) -> bool:
    return isinstance(value, str) and value in _ACTIVATIONS


# A configuration is untrusted input: it can set these attributes only, to these values.
_VALID: Mapping[str, Callable[[Any], bool]] = {
    "epsilon": lambda value: isinstance(value, float) and math.isfinite(value) and 0 < value < 1,
    "sliding_window": lambda value: value is None or (type(value) is int and 0 < value < 1 << 40),
    "query_head_dim_normalize": lambda value: isinstance(value, bool),
    "activation": _is_activation,
    "act_layer": _is_activation,
}


def set_attribute(layer: Any, name: str, value: Any) -> None:
    """Set an attribute of a built layer, and record its name, so that it is saved with the model (Keras would not)."""
    setattr(layer, name, value)
    record_of(layer).set_attributes.add(name)


def attributes_of(model: Any) -> dict[str, dict[str, Any]]:
    """Return layer path → attribute → value, for attributes set by `set_attribute`: they are saved with the model."""
    found = {}
    for path, layer in saved_objects(model):
        stored = {name: _stored(getattr(layer, name, None)) for name in sorted(record_of(layer).set_attributes)}
        # A program may have set another value since, which no file can store.
        if attributes := {name: value for name, value in stored.items() if _VALID[name](value)}:
            found[path] = attributes
    return found


def _stored(value: Any) -> Any:
    return next((name for name, function in _ACTIVATIONS.items() if value is function), value)


def serialised_with_attributes(model: Any) -> str:
    """Return the model's configuration as JSON, with arguments and attributes that Keras and KerasHub leave out."""
    for one in own_layers(model):
        # `Sequential.get_config` lists each layer once, so a model rebuilt from it calls it once.
        if isinstance(one, keras.Sequential) and (
            twice := [layer for layer, n in Counter(one.layers).items() if n > 1]
        ):
            raise UnsupportedError(
                f"Keras describes each layer of the Sequential {one.name!r} once, but it has {twice[0].name!r} several "
                "times. Build it as a functional model, keras.Model(inputs, outputs)"
            )
    found = json.loads(serialised_model(model))
    backbone = backbone_of(model)
    inner = found["config"] if backbone is model else found["config"].get("backbone", {}).get("config")
    if isinstance(inner, dict):
        add_arguments(inner, backbone)
    attributes = attributes_of(model)
    return json.dumps({**found, ATTRIBUTES_ENTRY: attributes} if attributes else found)


def add_arguments(config: dict[str, Any], backbone: Any) -> None:
    """Add to ``config`` the arguments of a backbone's constructor that KerasHub's own ``get_config`` leaves out."""
    taken = inspect.signature(type(backbone).__init__).parameters
    for name in _NOT_SERIALISED:
        if name in taken and (value := getattr(backbone, name, None)) is not None:
            config.setdefault(name, value)


_NOT_SERIALISED = ("tie_word_embeddings", "router_aux_loss_coefficient")
"""Arguments of backbones (of Llama, and of QwenMoe) that KerasHub's ``get_config`` leaves out."""


def lost_arguments(backbone: Any) -> dict[str, tuple[Any, Any]]:
    """Return name → (value, default) for arguments of a backbone that a model rebuilt from ``get_config`` lacks."""
    taken, config = inspect.signature(type(backbone).__init__).parameters, backbone.get_config()
    values = {name: getattr(backbone, name, None) for name in _NOT_SERIALISED if name in taken and name not in config}
    return {name: (value, taken[name].default) for name, value in values.items() if value != taken[name].default}


def apply_attributes(model: Any, saved: Any) -> None:
    """Set attributes that were saved with a model on the layers of the rebuilt model; skip those that a layer lacks."""
    for layer, name, value in _saved_on(model, saved):
        set_attribute(layer, name, value)


def differing_attributes(model: Any, saved: Any) -> tuple[str, ...]:
    """Return the names of attributes of layers that have other values in ``model`` than saved, for a note to users."""
    found = set()
    for layer, name, value in _saved_on(model, saved):
        own = getattr(layer, name)
        if own != value and not (callable(own) and _stored(own) == _stored(value)):
            found.add(name)
    return tuple(sorted(found))


def _saved_on(model: Any, saved: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (layer, attribute, saved value) for each saved attribute that a layer of ``model`` has."""
    known = {path: _valid_attributes(path, attributes) for path, attributes in _attributes_mapping("", saved).items()}
    for path, layer in saved_objects(model) if known else ():
        for name, value in known.get(path, {}).items():
            if hasattr(layer, name):
                yield layer, name, _ACTIVATIONS[value] if isinstance(value, str) else value


def _valid_attributes(path: str, found: Any) -> Mapping[str, Any]:
    attributes = _attributes_mapping(path, found)
    if wrong := [name for name, value in attributes.items() if name not in _VALID or not _VALID[name](value)]:
        raise SourceError(
            f"The configuration has an invalid attribute for the layer {path!r:.80}: "
            f"{wrong[0]!r:.40} = {attributes[wrong[0]]!r:.40}. Remove it from {ATTRIBUTES_ENTRY!r}"
        )
    return attributes


def _attributes_mapping(path: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        shown = f"{found!r:.80}. Remove them from {ATTRIBUTES_ENTRY!r}"
        raise SourceError(f"The configuration has invalid attributes for the layer {path!r:.80}: {shown}")
    return found
