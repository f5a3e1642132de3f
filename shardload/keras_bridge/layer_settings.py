"""What a configuration does not say of a model: its dtype policy, and what is frozen, quantised, or has LoRA.

Functional models say most of it, layer by layer; subclassed ones and KerasHub's say how they were made, not what was
done to them afterwards. A step therefore keeps it beside its leaves, and `take_form` does the same to the model made
anew::

    "form": {
        "": {"policy": "mixed_bfloat16"},                     the model's own, Keras' global one when it was made
        "layers/dense": {"trainable": false, "lora": {"rank": 4, "alpha": 16}},
        "layers/dense_1": {"frozen": ["kernel"], "policy": "int8_from_float32", "quantization": "int8"},
    }

Paths are those of `state_keys`. What cannot be done again (layers quantised with quantisers of one's own, a policy set
after a layer was built) is refused, naming the layer: a model that computes otherwise is not the one that was saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras

from shardload.errors import SourceError, UnsupportedError
from shardload.keras_bridge.model_state import named_weights, policy_name
from shardload.keras_bridge.recording import quantize_without_values
from shardload.keras_bridge.saving import saved_objects

_INT8 = "int8"
_MAX_RANK = 1 << 20


def form_of(model: Any) -> dict[str, dict[str, Any]]:
    """What was done to the layers of ``model``, by path; layers that are as they were made are left out."""
    found = {}
    usual = policy_name(model)
    for path, layer in saved_objects(model):
        if done := _done_to(layer, usual=None if layer is model else usual):
            found[path] = done
    return found


def _done_to(layer: Any, *, usual: str | None) -> dict[str, Any]:
    done: dict[str, Any] = {}
    trainable = getattr(layer, "trainable", True) is not False
    if not trainable:
        done["trainable"] = False
    frozen = [name for name, variable in named_weights(layer) if not variable.trainable]
    if frozen and (trainable or len(frozen) < len(named_weights(layer))):
        done["frozen"] = frozen
    policy = policy_name(layer)
    if policy not in (None, usual):
        done["policy"] = policy
    mode = _quantization_of(layer)
    if mode is not None:
        done["quantization"] = mode if mode == _INT8 and _has_plain_int8(layer) else f"{mode}, not as by default"
    if getattr(layer, "lora_enabled", False):
        done["lora"] = {"rank": int(layer.lora_rank), "alpha": float(layer.lora_alpha)}
    return done


class _PolicyDiffersError(UnsupportedError):
    """A layer was made with another dtype policy than it had."""


def under_its_policy(make: Callable[[], Any], form: Any, dtype: Any, *, says_dtype: bool) -> Any:
    """What ``make`` makes, while Keras' global dtype policy is what it was for the saved model.

    Which one that was is not known: it may have been the model's own policy, or that was asked for and the global one
    is as now. Both are tried; what the layers had decides.

    Args:
        make: Makes the model and calls `take_form`; called twice if need be.
        form: As for `take_form`.
        dtype: A policy that was asked for instead.
        says_dtype: Whether the model's configuration has a policy for the model.

    Raises:
        UnsupportedError: When a layer has another policy under both.
    """
    top = form.get("", {}) if isinstance(form, Mapping) else {}
    wanted = dtype if dtype is not None else top.get("policy") if isinstance(top, Mapping) else None
    try:
        own = None if wanted is None else keras.dtype_policies.get(wanted)
    except ValueError as error:
        raise SourceError(f"structure.json has an invalid dtype policy: {wanted!r:.80}") from error
    now = keras.config.dtype_policy()
    if own is None or own.name == now.name:
        return make()
    policies = [own] if dtype is not None else [now, own] if says_dtype else [own, now]
    for last, policy in enumerate(policies, start=1 - len(policies)):
        with _global_policy(policy):
            try:
                return make()
            except _PolicyDiffersError:
                if not last:
                    raise
    raise AssertionError("the last one returns or raises")


def take_form(model: Any, form: Any, *, any_policy: bool = False) -> None:
    """Do to the layers of a model just made, inside `shardload.abstract`, what had been done to those saved.

    Args:
        model: Built, without values, not compiled.
        form: What `form_of` gave, read back; foreign input. Paths the model does not have are passed over: its
            weights will not match, which says more.
        any_policy: Layers may have other dtype policies than they had, as another dtype was asked for.

    Raises:
        SourceError: When ``form`` is not what `form_of` makes.
        UnsupportedError: When it cannot be done again.
    """
    known = {path: _checked(path, done) for path, done in _mapping("", form).items()}
    layers = saved_objects(model)
    for path, layer in layers:  # from the outside in: to freeze a layer freezes all that is in it
        wanted = known.get(path, {}).get("trainable", True)
        if getattr(layer, "trainable", wanted) is not wanted:
            layer.trainable = wanted
    for path, layer in layers:
        done = known.get(path, {})
        _quantise(path, layer, done.get("quantization"))
        if not any_policy and _computes(layer):
            _check_policy(path, layer, done.get("policy", known.get("", {}).get("policy")))
        if lora := done.get("lora"):
            _give_lora(path, layer, lora)
        frozen = set(done.get("frozen", ()))
        for name, variable in named_weights(layer):
            wanted = name not in frozen if frozen else done.get("trainable", True)
            if variable.trainable is not wanted:
                variable.trainable = wanted


def _quantise(path: str, layer: Any, mode: str | None) -> None:
    has = _quantization_of(layer)
    if mode == _INT8 and _quantizes(layer):
        quantize_without_values(layer)
    elif mode is not None and has is None:
        raise UnsupportedError(_refusal(path, f"was quantised ({mode}), which its configuration does not say"))


def _check_policy(path: str, layer: Any, wanted: str | None) -> None:
    has = policy_name(layer)
    if None not in (has, wanted) and has != wanted:
        raise _PolicyDiffersError(
            _refusal(path, f"had the dtype policy {wanted!r}, and is made with {has!r}, as nothing says otherwise")
        )


def _give_lora(path: str, layer: Any, lora: Mapping[str, Any]) -> None:
    if not hasattr(layer, "enable_lora"):
        return
    if not getattr(layer, "lora_enabled", False):
        layer.enable_lora(lora["rank"], lora_alpha=lora["alpha"])
    elif layer.lora_alpha != lora["alpha"]:  # Keras' Dense and Embedding forget it
        layer.lora_alpha = lora["alpha"]


def _refusal(path: str, what: str) -> str:
    return (
        f"The layer {path!r} {what}. Build the model yourself, as it was, and fill it: "
        "shardload.restore(model, directory)"
    )


def _checked(path: str, said: Any) -> Mapping[str, Any]:
    done = _mapping(path, said)
    lora = done.get("lora")
    if lora is not None:
        rank, alpha = _mapping(path, lora).get("rank"), lora.get("alpha")
        if type(rank) is not int or not 0 < rank <= _MAX_RANK or not isinstance(alpha, (int, float)):
            raise SourceError(f"structure.json gives {path!r} a LoRA of rank {rank!r} and alpha {alpha!r}")
    if not isinstance(done.get("trainable", True), bool):
        raise SourceError(f"structure.json says trainable={done['trainable']!r} of {path!r}")
    frozen = done.get("frozen", [])
    if not isinstance(frozen, list) or not all(isinstance(name, str) for name in frozen):
        raise SourceError(f"structure.json says that {frozen!r:.80} is frozen in {path!r}")
    if any(not isinstance(done.get(key, ""), str) for key in ("policy", "quantization")):
        raise SourceError(f"structure.json says of {path!r}: {dict(done)!r:.80}")
    return done


def _mapping(path: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise SourceError(f"structure.json should say what was done to the layer {path!r}, but says {found!r:.80}")
    return found


def _has_kernel(layer: Any) -> bool:
    """Whether a layer has a kernel of its own to quantise; models hand quantising on to their layers."""
    return isinstance(layer, keras.Layer) and type(layer).quantize not in (keras.Layer.quantize, keras.Model.quantize)


def _has_plain_int8(layer: Any) -> bool:
    """Whether a layer has a kernel of its own, and Keras' own quantisers for it."""
    if not _has_kernel(layer):
        return False
    config = getattr(layer, "quantization_config", None)
    return config is None or config.get_config() == keras.quantizers.Int8QuantizationConfig().get_config()


def _quantization_of(layer: Any) -> str | None:
    """How a layer that has a kernel of its own is quantised: ``int8``, ``int4`` and so on."""
    mode: str | None = layer.quantization_mode if _has_kernel(layer) else None
    return mode


def _quantizes(layer: Any) -> bool:
    """Whether a layer can be quantised, or is."""
    return _has_kernel(layer) and layer.quantization_mode in (None, _INT8)


def _computes(layer: Any) -> bool:
    """Whether a layer's dtype policy matters: not for input layers, nor for objects that are not layers."""
    return isinstance(layer, keras.Layer) and not isinstance(layer, keras.layers.InputLayer)


@contextmanager
def _global_policy(policy: Any) -> Iterator[None]:
    """Another global dtype policy for a while."""
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        yield
    finally:
        keras.config.set_dtype_policy(before)
