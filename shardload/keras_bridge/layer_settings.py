"""Settings of layers that a configuration omits: dtype policies, frozen and quantised layers, LoRA.

Functional models store most of it, layer by layer; subclassed ones and KerasHub's store only how they were constructed,
not later changes. A step therefore stores these settings next to its leaves, and `apply_settings` applies them to the
rebuilt model::

    "form": {
        "": {"policy": "mixed_bfloat16"},                     the model's own, Keras' global one at its creation
        "layers/dense": {"trainable": false, "lora": {"rank": 4, "alpha": 16}},
        "layers/dense_1": {"frozen": ["kernel"], "policy": "int8_from_float32", "quantization": "int8"},
    }

Paths are those of `state_keys`. Settings that cannot be reproduced (custom quantisers, a policy set
after a layer was built) raise an error that names the layer, because the rebuilt model would compute differently.
`with_dtype` replaces the dtype policies of a whole configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import keras

from shardload.errors import SourceError, UnsupportedError
from shardload.keras_bridge.model_state import named_weights, policy_name
from shardload.keras_bridge.recording import quantize_without_values
from shardload.keras_bridge.saving import saved_objects

_INT8 = "int8"
_MAX_RANK = 1 << 20  # structure.json is untrusted input, and no real rank is larger


def settings_of(model: Any) -> dict[str, dict[str, Any]]:
    """Return the changed settings of the layers of ``model``, by path; unchanged layers are omitted."""
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
    mode = _quantization_of(layer)
    # Only Keras' default int8 can be redone on a kernel without values; `_quantise` shows any other text in its error.
    if mode is not None:
        settings["quantization"] = mode if mode == _INT8 and _has_plain_int8(layer) else f"{mode}, not as by default"
    if getattr(layer, "lora_enabled", False):
        settings["lora"] = {"rank": int(layer.lora_rank), "alpha": float(layer.lora_alpha)}
    return settings


class _PolicyDiffersError(UnsupportedError):
    """A layer was built with a different dtype policy than the saved one."""


def with_saved_policy(make: Callable[[], Any], saved: Any, dtype: Any, *, has_dtype: bool) -> Any:
    """Return the result of ``make``, called under the global dtype policy of the saved model.

    A step does not store that policy. It was either the model's own, or today's, with the model's own given explicitly.
    Both are tried; the policies of the layers decide.

    Args:
        make: Builds the model and calls `apply_settings`; may be called twice.
        saved: As for `apply_settings`.
        dtype: A policy that the caller requests instead.
        has_dtype: Whether the model's configuration contains a policy for the model.

    Raises:
        UnsupportedError: When a layer has a different policy under both.
    """
    top = saved.get("", {}) if isinstance(saved, Mapping) else {}
    wanted = dtype if dtype is not None else top.get("policy") if isinstance(top, Mapping) else None
    try:
        own = None if wanted is None else keras.dtype_policies.get(wanted)
    except ValueError as error:
        raise SourceError(f"structure.json has an invalid dtype policy: {wanted!r:.80}") from error
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
    """Apply saved settings to the layers of a model just built inside `shardload.abstract`.

    Args:
        model: Built, without values, not compiled.
        saved: The result of `settings_of`, read back; untrusted input. Paths that the model lacks are skipped: its
            weights will not match either, with a clearer error.
        any_policy: Accept layers whose dtype policy differs from the saved one, because another dtype was requested.

    Raises:
        SourceError: When ``saved`` is not valid.
        UnsupportedError: When a setting cannot be reproduced.
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
        if not any_policy and _uses_policy(layer):
            _check_policy(path, layer, settings.get("policy", known.get("", {}).get("policy")))
        if lora := settings.get("lora"):
            _enable_lora(path, layer, lora)
        frozen = set(settings.get("frozen", ()))
        for name, variable in named_weights(layer):
            wanted = name not in frozen if frozen else settings.get("trainable", True)
            if variable.trainable is not wanted:
                variable.trainable = wanted


def enable_saved_lora(model: Any, saved: Any) -> None:
    """Enable LoRA as in saved settings, and apply no other setting; call it inside `shardload.abstract`.

    Raises:
        SourceError: When ``saved`` is not valid.
    """
    known = {path: _validated(path, settings) for path, settings in _mapping("", saved).items()}
    for path, layer in saved_objects(model):
        if lora := known.get(path, {}).get("lora"):
            _enable_lora(path, layer, lora)


def _quantise(path: str, layer: Any, mode: str | None) -> None:
    has = _quantization_of(layer)
    if mode == _INT8 and _quantizes(layer):
        quantize_without_values(layer)
    elif mode is not None and has is None:
        raise UnsupportedError(_refusal(path, f"it was quantised ({mode}), but its configuration is not"))


def _check_policy(path: str, layer: Any, wanted: str | None) -> None:
    has = policy_name(layer)
    if None not in (has, wanted) and has != wanted:
        raise _PolicyDiffersError(
            _refusal(path, f"it had the dtype policy {wanted!r}, but its configuration gives {has!r}")
        )


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
        raise SourceError(f"structure.json has invalid settings for the layer {path!r}: {dict(settings)!r:.80}")
    return settings


def _mapping(path: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise SourceError(f"structure.json has invalid settings for the layer {path!r}: {found!r:.80}")
    return found


def _has_kernel(layer: Any) -> bool:
    """Whether a layer has its own kernel to quantise; models pass quantisation on to their layers."""
    return isinstance(layer, keras.Layer) and type(layer).quantize not in (keras.Layer.quantize, keras.Model.quantize)


def _has_plain_int8(layer: Any) -> bool:
    """Whether a layer has its own kernel, quantised by Keras' own quantisers."""
    if not _has_kernel(layer):
        return False
    config = getattr(layer, "quantization_config", None)
    return config is None or config.get_config() == keras.quantizers.Int8QuantizationConfig().get_config()


def _quantization_of(layer: Any) -> str | None:
    """Return the quantisation mode of a layer with its own kernel: ``int8``, ``int4`` and so on."""
    mode: str | None = layer.quantization_mode if _has_kernel(layer) else None
    return mode


def _quantizes(layer: Any) -> bool:
    """Whether a layer can be quantised, or already is."""
    return _has_kernel(layer) and layer.quantization_mode in (None, _INT8)


def _uses_policy(layer: Any) -> bool:
    """Whether a layer's dtype policy matters: not for input layers, nor for objects that are not layers."""
    return isinstance(layer, keras.Layer) and not isinstance(layer, keras.layers.InputLayer)


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
    """Replace every floating-point dtype policy in a Keras configuration; quantised ones keep their scheme.

    Args:
        config: The result of ``serialize_keras_object``.
        dtype: Name of a floating-point dtype or policy, or an object with a ``name``; ``None`` changes nothing.
    """
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
