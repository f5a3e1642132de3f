"""Find the fields in which a configuration and the model built from it differ.

The checks inspect the model's layers, not its constructor: they detect a class that ignores an argument, and accept it
once KerasHub fixes that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.hub import built, rope
from shardload.hub.families import (
    BOTH_WAYS,
    PARTLY,
    ROPE,
    TANH,
    WINDOW,
    Config,
    Family,
    family_of,
    obeyed,
    text_of,
    windows_of,
)

SMALL_EPSILON = 1e-4
"""Largest epsilon that is set on layers if the constructor has no parameter for it: the change is small."""
_GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu")


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field whose value differs in the model."""

    field: str
    says: str
    """The value in the configuration, in words."""
    has: str
    """The value in the model, in words."""
    names: tuple[str, ...]
    """Field names that ignore this difference."""
    mend: Callable[[], None] | None = None
    """Sets the value on the layers, if the change is small and the constructor cannot do it."""


def differences(config: Config, backbone: Any) -> Iterator[FieldDifference]:
    """Yield the differences between a configuration and a built backbone.

    Args:
        config: ``config.json``.
        backbone: A KerasHub backbone, abstract or not.

    Raises:
        SourceError: When the configuration contradicts itself.
    """
    if config.get("model_type") == "t5gemma":
        yield from _windows_of_t5gemma(config)
    family, text = family_of(config), text_of(config)
    yield from _directions(config, text, backbone)
    yield from _only(text, family.only or {} if family else PARTLY.get(str(config.get("model_type")), {}))
    if family is None:
        return
    yield from _epsilon(text, family, backbone)
    yield from _activation(text, family, backbone)
    yield from _rotations(text, family, backbone)
    yield from _windows(text, family, backbone)
    if family.caps:
        yield from _caps(text, backbone)
        yield from _scalar(text, backbone)
    if config.get("model_type") == "esm" and config.get("rope_theta", 1e4) != backbone.max_wavelength:
        yield FieldDifference("rope_theta", str(config["rope_theta"]), str(backbone.max_wavelength), ROPE)
    if config.get("model_type") == "bart" and (said := config.get("decoder_attention_heads", 16)) != backbone.num_heads:
        yield FieldDifference(
            "decoder_attention_heads", str(said), str(backbone.num_heads), ("decoder_attention_heads",)
        )


def limits(config: Config) -> Iterator[str]:
    """Yield features that the model lacks and that transformers lacks too, or applies only to longer texts."""
    family, text = family_of(config), text_of(config)
    if family is None or family.theta is None:
        return
    if rope.is_gemma_3(config) and (cap := text.get("attn_logit_softcapping")) is not None:
        yield f"attn_logit_softcapping: the source says {cap}, which transformers does not apply to Gemma 3; left out"
    if rope.rotation(text, rope.FULL, default_theta=family.theta, head_dim=None).kind == "dynamic":
        longest = text.get("max_position_embeddings")
        yield (
            f"{rope.field_of(text)}: dynamic scaling begins after {longest} tokens, and KerasHub does not scale; "
            "results for longer texts differ from those of transformers"
        )


def untied(config: Config, backbone: Any) -> Iterator[str]:
    """Yield a note if the configuration ties an output layer that is stored separately; only transformers 5 uses it."""
    if config.get("tie_word_embeddings") is True and getattr(backbone, "tie_word_embeddings", None) is False:
        yield (
            "tie_word_embeddings: the source says True, but stores an output layer that differs from the embedding; "
            "it is used, as by transformers 5 (4 leaves it out)"
        )


def _directions(config: Config, text: Config, backbone: Any) -> Iterator[FieldDifference]:
    """Compare whether tokens attend to later ones: transformers 5 respects ``is_causal`` in every mask, 4 in none."""
    decoder = config.get("decoder")
    said = (decoder if isinstance(decoder, Mapping) else text).get("is_causal")
    if said is not None and not said and config.get("model_type") not in BOTH_WAYS:
        yield FieldDifference("is_causal", str(said), "True", ("is_causal",))
    if config.get("model_type") == "gemma3_text":
        field = "use_bidirectional_attention"
        wanted = bool(config.get(field))
        held = {bool(getattr(built.attention_of(block, field), field, False)) for block in built.blocks(backbone)}
        if held - {wanted}:
            yield FieldDifference(field, str(wanted), str(not wanted), (field,))


def _windows_of_t5gemma(config: Config) -> Iterator[FieldDifference]:
    """Yield T5Gemma's windows: KerasHub's encoder has none, and its decoder's window is one token too long."""
    for part, has in (("encoder", "no window"), ("decoder", "one token more")):
        said = config.get(part)
        said = said if isinstance(said, Mapping) else {}
        types = said.get("layer_types")
        window, longest = said.get("sliding_window", 4096), said.get("max_position_embeddings") or np.inf
        if window and window < longest and (types is None or rope.SLIDING in types):
            yield FieldDifference("sliding_window", f"{window} in the {part}", f"{has} there", WINDOW)


def _epsilon(config: Config, family: Family, backbone: Any) -> Iterator[FieldDifference]:
    if family.epsilon is None:
        return
    field, default = family.epsilon
    said = config.get(field)
    said = default if said is None else said
    other = [layer for layer in built.normalisations(backbone) if layer.epsilon != said]
    if not other:
        return

    def mend() -> None:
        for layer in other:
            layer.epsilon = said

    held = other[0].epsilon
    small = isinstance(said, float) and 0 < said <= SMALL_EPSILON and held <= SMALL_EPSILON
    yield FieldDifference(field, f"{said:g}", f"{held:g} in {len(other)} layers", (field,), mend if small else None)


def _activation(config: Config, family: Family, backbone: Any) -> Iterator[FieldDifference]:
    if family.activation is None:
        return
    field, default = family.activation
    said = str(config.get(field) or default)
    if family.has_activation == TANH and config.get("model_type") == "gemma" and said == "gelu":
        said = TANH  # like transformers: Gemma's first configurations meant the tanh form
    wanted = _function(said)
    found = list(built.activations(backbone))
    if not found and family.has_activation is not None:
        held = _function(family.has_activation)
        if wanted is None or not _alike(wanted, held):
            yield FieldDifference(field, said, family.has_activation, (field,))
        return
    other = [(layer, name, held) for layer, name, held in found if wanted is None or not _alike(wanted, held)]
    if not other:
        return

    def mend() -> None:
        for layer, name, _ in other:
            setattr(layer, name, wanted)

    held = other[0][2]
    close = wanted is not None and float(np.abs(built.at_points(wanted) - built.at_points(held)).max()) < _CLOSE
    held_name = getattr(held, "__name__", str(held))
    yield FieldDifference(field, said, held_name, (field,), mend if close and said in _GELUS else None)


_CLOSE = 1e-3
"""The two forms of GELU differ by up to 4.7e-4."""


@functools.cache
def _function(name: str) -> Any:
    """Return Keras' function for an activation's name in transformers; ``None`` if Keras has none."""
    import keras

    def gelu_tanh(x: Any) -> Any:
        return keras.activations.gelu(x, approximate=True)

    known = {"gelu": keras.activations.gelu, "silu": keras.activations.silu, "swish": keras.activations.silu}
    known |= dict.fromkeys(("gelu_new", TANH, "gelu_fast"), gelu_tanh)
    known |= {name: getattr(keras.activations, name) for name in ("relu", "tanh", "sigmoid")}
    return known.get(name)


def _alike(one: Any, other: Any) -> bool:
    return one is other or bool(np.allclose(built.at_points(one), built.at_points(other), rtol=1e-5, atol=1e-6))


def _only(config: Config, only: Mapping[str, tuple[Any, ...]]) -> Iterator[FieldDifference]:
    for field, values in only.items():
        if field in config and config[field] not in values:
            yield FieldDifference(field, str(config[field])[:80], str(values[0]), (field,))


def _rotations(config: Config, family: Family, backbone: Any) -> Iterator[FieldDifference]:
    if family.theta is None:
        return
    head_dim, blocks = head_dim_of(backbone), built.blocks(backbone)
    windows = family.windows(config, len(blocks)) if family.windows else [None] * len(blocks)
    seen: dict[tuple[str, str], None] = {}
    for i, block in enumerate(blocks):
        kind = rope.SLIDING if windows[i] and rope.is_gemma_3(config) else rope.FULL
        key = (kind, built.rotary_key(block))
        if key in seen:
            continue
        seen[key] = None
        theta = 1e4 if kind == rope.SLIDING else family.theta
        said = rope.rotation(config, kind, default_theta=theta, head_dim=head_dim)
        held = built.turns_of(block, head_dim)
        if held is None or _turns_alike(said, held):
            continue
        yield FieldDifference(rope.field_of(config), str(said), f"{_described(held)} from layer {i} on", ROPE)
        return


def _turns_alike(said: rope.Rotation, held: tuple[Any, Any, float]) -> bool:
    angles, scales, error = held
    if said.kind == "longrope" and said.parameters.get("long_factor") != said.parameters.get("short_factor"):
        return False  # short texts agree, long ones do not
    return (
        said.angles is not None
        and len(said.angles) == len(angles)
        and bool(np.allclose(angles, said.angles, rtol=error, atol=0))
        and bool(np.allclose(scales, said.scale, rtol=error, atol=0))
    )


def _described(held: tuple[Any, Any, float]) -> str:
    angles, scales, _ = held
    return f"slowest turn {angles[-1]:.3g} per token, scaled by {scales[0]:.3g}"


def _windows(config: Config, family: Family, backbone: Any) -> Iterator[FieldDifference]:
    blocks = built.blocks(backbone)
    said = windows_of(config, family, len(blocks))
    held = [obeyed(window, config) for window in map(built.window_of, blocks)]
    other = [i for i in range(len(blocks)) if said[i] != held[i]]
    if other:
        i = other[0]
        yield FieldDifference(
            "sliding_window",
            f"{said[i] or 'no window'} in layer {i}",
            f"{held[i] or 'no window'} there ({len(other)} of {len(blocks)} layers differ)",
            WINDOW,
        )


def _caps(config: Config, backbone: Any) -> Iterator[FieldDifference]:
    second = config.get("model_type") == "gemma2"  # for Gemma 3, transformers does not apply the scores' cap
    attention = next((built.attention_of(block, "logit_soft_cap") for block in built.blocks(backbone)), None)
    pairs = (
        ("attn_logit_softcapping", 50.0 if second else None, getattr(attention, "logit_soft_cap", None)),
        ("final_logit_softcapping", 30.0 if second else None, getattr(backbone, "final_logit_soft_cap", None)),
    )
    for field, default, held in pairs:
        said = config.get(field, default) if second or field != "attn_logit_softcapping" else None
        if said != held:
            yield FieldDifference(field, str(said), str(held), (field,))


def _scalar(config: Config, backbone: Any) -> Iterator[FieldDifference]:
    """Compare ``query_pre_attn_scalar``, whose root divides the scores; KerasHub supports two values."""
    field = "query_pre_attn_scalar"
    head_dim, per_head = head_dim_of(backbone), int(backbone.hidden_dim) // _heads_of(backbone)
    said = config.get(field, 256)
    found = [built.attention_of(block, "query_head_dim_normalize") for block in built.blocks(backbone)]
    held = {bool(layer.query_head_dim_normalize) for layer in found if layer is not None}
    wanted = said == head_dim
    values = {head_dim if normalised else per_head for normalised in held}
    if values <= {said}:
        return

    def mend() -> None:
        for layer in found:
            layer.query_head_dim_normalize = wanted

    has = ", ".join(map(str, sorted(values)))
    yield FieldDifference(field, str(said), has, (field,), mend if said in (head_dim, per_head) else None)


def head_dim_of(backbone: Any) -> int:
    """Return the number of features of one attention head."""
    held = getattr(backbone, "head_dim", None)
    return int(held or backbone.hidden_dim // _heads_of(backbone))


def _heads_of(backbone: Any) -> int:
    return int(getattr(backbone, "num_query_heads", None) or backbone.num_attention_heads)
