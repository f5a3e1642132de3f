"""What a configuration does not say of a model: which layers are frozen, quantised, or have LoRA.

Functional models say all of it, layer by layer; subclassed ones and KerasHub's say how they were made, not what was
done to them afterwards. A step therefore keeps it beside its leaves, and `take_form` does the same to the model made
anew::

    "form": {"layers/dense": {"trainable": false, "quantization": "int8", "lora": {"rank": 4, "alpha": 4}}}

Paths are those of `state_keys`. Layers that were quantised in other ways than Keras' own int8 are left as they are
made; their tensors then do not match, and loading says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardload import _keras
from shardload.errors import SourceError

_INT8 = "int8"
_MAX_RANK = 1 << 20


def form_of(model: Any) -> dict[str, dict[str, Any]]:
    """What was done to the layers of ``model``, by path; layers that are as they were made are left out."""
    found = {}
    for path, layer in _keras.saved_objects(model):
        if done := _done_to(layer):
            found[path] = done
    return found


def _done_to(layer: Any) -> dict[str, Any]:
    done: dict[str, Any] = {}
    if getattr(layer, "trainable", True) is False:
        done["trainable"] = False
    if getattr(layer, "quantization_mode", None) == _INT8 and _keras.has_plain_int8(layer):
        done["quantization"] = _INT8
    if getattr(layer, "lora_enabled", False):
        done["lora"] = {"rank": int(layer.lora_rank), "alpha": float(layer.lora_alpha)}
    return done


def take_form(model: Any, form: Any) -> None:
    """Do to the layers of a model just made, inside `shardload.abstract`, what had been done to those saved.

    Args:
        model: Built, without values.
        form: What `form_of` gave, read back; foreign input. Paths the model does not have are passed over: its
            weights will not match, which says more.

    Raises:
        SourceError: When ``form`` is not what `form_of` makes.
    """
    known = {path: _checked(path, done) for path, done in _mapping("", form).items()}
    layers = _keras.saved_objects(model)
    for path, layer in layers:  # from the outside in: to freeze a layer freezes all that is in it
        wanted = known.get(path, {}).get("trainable", True)
        if getattr(layer, "trainable", wanted) is not wanted:
            layer.trainable = wanted
    for path, layer in layers:
        done = known.get(path, {})
        if done.get("quantization") == _INT8:
            _keras.quantize_without_values(layer)
        lora = done.get("lora")
        if lora and hasattr(layer, "enable_lora") and not getattr(layer, "lora_enabled", False):
            layer.enable_lora(lora["rank"], lora_alpha=lora["alpha"])


def _checked(path: str, said: Any) -> Mapping[str, Any]:
    done = _mapping(path, said)
    lora = done.get("lora")
    if lora is not None:
        rank, alpha = _mapping(path, lora).get("rank"), lora.get("alpha")
        if type(rank) is not int or not 0 < rank <= _MAX_RANK or not isinstance(alpha, (int, float)):
            raise SourceError(f"structure.json gives {path!r} a LoRA of rank {rank!r} and alpha {alpha!r}")
    if not isinstance(done.get("trainable", True), bool):
        raise SourceError(f"structure.json says trainable={done['trainable']!r} of {path!r}")
    return done


def _mapping(path: str, found: Any) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise SourceError(f"structure.json should say what was done to the layer {path!r}, but says {found!r:.80}")
    return found
