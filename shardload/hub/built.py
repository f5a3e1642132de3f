"""Find the settings of a built KerasHub backbone: they are read from its layers, not from constructor arguments.

Some constructors accept an argument that no layer uses (Gemma's ``query_head_dim_normalize``, Llama's
``rope_position_scaling_factor``). So settings come from the attributes that layers read when called or, for rotary
positions and activations, from calling the layers.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import keras
import numpy as np
from numpy.typing import NDArray

from shardload.families.registry import families
from shardload.keras_bridge.layer_settings import set_attribute
from shardload.keras_bridge.model_state import own_layers
from shardload.units import plural

_ROTARY = ("rotary_embedding_layer", "rope_layer", "rotary_embedding")
_ACTIVATIONS = ("activation", "act_layer")
_POINTS = np.array([-4.0, -2.0, -1.0, -0.5, 0.25, 0.5, 1.0, 3.0], np.float32)
"""Inputs at which two activation functions are evaluated, to find out whether they are the same."""


def transformer_layers_of(backbone: Any) -> list[Any]:
    """Return a backbone's transformer layers, first to last; empty if its class has no ``transformer_layers``."""
    found = getattr(backbone, "transformer_layers", ())
    return [block for one in found for block in (one if isinstance(one, list | tuple) else (one,))]


def layers(backbone: Any) -> list[Any]:
    """Return all layers of a backbone, at any depth, except those in its encoders of images and sound."""
    # The configuration's fields describe the text model; encoders of images and sound have their own.
    others = [getattr(backbone, name, None) for name in ("vision_encoder", "audio_encoder")]
    apart = {id(layer) for other in others if other is not None for layer in own_layers(other)}
    return [layer for layer in own_layers(backbone) if id(layer) not in apart]


def attention_of(block: Any, attribute: str) -> Any:
    """Return the layer inside a block, mostly the attention layer, that has ``attribute``; ``None`` if none has it.

    The block itself comes last: its attribute may be just a copy of the constructor's argument, which nothing uses.
    """
    return next((layer for layer in _inner_first(block) if hasattr(layer, attribute)), None)


def _inner_first(block: Any) -> list[Any]:
    """Return the layers inside a block, then the block itself: the order in which to look for a setting."""
    return [*(layer for layer in own_layers(block) if layer is not block), block]


def windows_of(blocks: Sequence[Any]) -> list[int | None]:
    """Return each block's window: how many tokens a token attends to, including itself; ``None`` for all tokens."""
    checked: dict[str, bool] = {}  # blocks mostly differ in their weights only
    return [_window_of(block, checked) for block in blocks]


def _window_of(block: Any, checked: dict[str, bool]) -> int | None:
    for layer in _inner_first(block):
        # Such a layer may still have a size: KerasHub's Gemma gives one to layers that attend to everything.
        if getattr(layer, "use_sliding_window_attention", None) is False:
            return None
        for name in ("sliding_window_size", "sliding_window"):
            if hasattr(layer, name):
                size = getattr(layer, name)
                key = f"{type(layer)} {name} {settings_text(layer)}"
                # Asking a layer compiles a program, so layers of equal settings are asked once.
                if size and key not in checked:
                    checked[key] = _is_obeyed(layer, name)
                return int(size) + _beyond(layer) if size and checked[key] else None
    return None


def set_window(block: Any, window: int | None) -> None:
    """Let a block's tokens attend to ``window`` tokens, including themselves; ``None`` for all."""
    for layer in _inner_first(block):
        if hasattr(layer, "sliding_window"):
            set_attribute(layer, "sliding_window", None if window is None else window - _beyond(layer))


def _beyond(layer: Any) -> int:
    """Return what to add to a layer's window size: 1 if the size leaves out the attending token itself, else 0."""
    return int(any(type(layer).__name__ in family.windows_without_self for family in families()))


def dense_experts_note(model: Any) -> str | None:
    """Return a note if a model has experts that all compute every token, whichever the router chose; else ``None``."""
    dense = {name for family in families() for name in family.dense_experts}
    found = next((layer for layer in layers(model) if type(layer).__name__ in dense), None)
    return found and (
        f"dense dispatch: KerasHub's {type(found).__name__} computes every expert for every token. Compute "
        f"and activations are those of all {plural(found.num_experts, 'expert')}, and no all-to-all moves tokens "
        "between devices"
    )


def _is_obeyed(layer: Any, name: str) -> bool:
    """Whether a layer applies its window, found by a call: KerasHub's Qwen models ignore it with fused attention."""
    if not hasattr(layer, "_compute_attention") or not hasattr(layer, "_mask_sliding_window"):
        return True
    # Queries of zeros weigh all visible tokens equally.
    alike = np.zeros((1, 4, getattr(layer, "num_query_heads", 1), 8), np.float32)
    values = np.broadcast_to(np.eye(4, 8, dtype=np.float32)[None, :, None, :], alike.shape)
    causal = np.tril(np.ones((1, 4, 4), bool))
    before = getattr(layer, name)

    def masked(queries: Any, values: Any) -> Any:
        return layer._compute_attention(queries, queries, values, attention_mask=causal)

    setattr(layer, name, 2)
    try:
        found = np.asarray(_compiled(masked, alike, values), np.float32)
    except Exception:  # a class with another signature cannot be checked: trust the attribute
        return True
    finally:
        setattr(layer, name, before)
    # Values are one-hot: feature 0 of the last token is the weight it gives to the first, outside a window of two.
    return bool(found.reshape(4, -1)[3, 0] == 0)


def turns_of(block: Any, head_dim: int) -> tuple[NDArray[np.float64], NDArray[np.float64], float] | None:
    """Return how a block's rotary layer rotates pairs of features; ``None`` if the block has no rotary positions.

    The first array has the angle of each pair in radians per token. The second has the factor by which the layer
    multiplies the length of each pair: 1 in most models. The number is the relative error to allow when the arrays are
    compared with configured values: 1e-4, or 1e-2 if they were measured on a layer that computes in half precision.
    """
    layer = rotary_of(block)
    if layer is None:
        return None
    if hasattr(layer, "rope_theta") and hasattr(layer, "inv_freq"):  # SmolLM3: a variable, which has no value yet
        dims = int(head_dim * layer.partial_rotary_factor)
        return float(layer.rope_theta) ** -(np.arange(0, dims, 2) / dims), np.ones(dims // 2), 1e-4
    # Most models: no need to compile anything.
    if (plain := _plain_angles(layer, head_dim)) is not None:
        return plain, np.ones(len(plain)), 1e-4
    # Any other layer: turn unit vectors at position 1. Pairs are features i and i + head_dim / 2, as in GPT-NeoX.
    unit = np.zeros((1, 2, 1, head_dim), np.float32)
    unit[..., : head_dim // 2] = 1.0
    turned = np.asarray(_compiled(layer.call, unit), np.float64)[0, 1, 0]
    cos, sin = turned[: head_dim // 2], turned[head_dim // 2 :]
    return np.arctan2(sin, cos), np.hypot(sin, cos), 1e-4 if layer.compute_dtype == "float32" else 1e-2


def _plain_angles(layer: Any, head_dim: int) -> NDArray[np.float64] | None:
    """Compute the angles of KerasHub's common rotary layers from their attributes; ``None`` for any other layer."""
    name = type(layer).__name__
    if name not in ("RotaryEmbedding", "LlamaRotaryEmbedding") or layer.rope_type != "linear":
        return None
    if name == "LlamaRotaryEmbedding" and (layer.frequency_adjustment_factor is not None or layer.scaling_factor != 1):
        return None
    rotated = layer.denominator_dim or head_dim
    turns = np.arange(0, head_dim, 2) / rotated
    return float(layer.max_wavelength) ** -turns / float(layer.scaling_factor)


def settings_text(layer: Any) -> str:
    """Return a layer's public settings as text. Layers with the same text behave alike: one of them is measured."""
    public = ((k, v) for k, v in vars(layer).items() if not k.startswith("_") and k != "name")
    return repr(sorted((k, v) for k, v in public if isinstance(v, int | float | str | None)))


def rotary_of(block: Any) -> Any:
    """Return the layer that rotates a block's queries and keys by their positions; ``None`` if there is none."""
    return next((found for name in _ROTARY if (found := getattr(attention_of(block, name), name, None))), None)


def normalisations(backbone: Any) -> list[Any]:
    """Return the normalisation layers of a backbone: those with an ``epsilon``, which they add to a variance."""
    return [layer for layer in layers(backbone) if isinstance(getattr(layer, "epsilon", None), int | float)]


def activations(backbone: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield (layer, name of its attribute, function) for each activation function of a backbone, such as GELU."""
    for layer in layers(backbone):
        for name in _ACTIVATIONS:
            value = getattr(layer, name, None)
            function = keras.activations.get(value) if isinstance(value, str) else value
            is_plain = getattr(function, "__name__", "linear") in ("linear", "softmax")
            # BERT's pooler always uses tanh, whatever hidden_act says.
            if callable(function) and not is_plain and "pool" not in layer.name:
                yield layer, name, function


@functools.lru_cache(maxsize=16)
def at_points(function: Any) -> NDArray[np.float64]:
    """Return an activation's values at a few fixed inputs, by which two activations are compared."""
    return np.asarray(_compiled(function, _POINTS), np.float64)


def _compiled(function: Any, *arrays: Any) -> Any:
    """Run ``function`` under ``jax.jit``, which compiles it once instead of operation by operation."""
    return jax.jit(function)(*arrays)
