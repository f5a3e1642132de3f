"""Find the fields in which a configuration and the model built from it differ.

The checks inspect the model's layers, not its constructor: they detect a class that ignores an argument, and accept
that class once KerasHub fixes it.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from shardload.families.parts import rope
from shardload.families.parts.checks import ROPE, TANH, WINDOW, Checks, FieldDifference
from shardload.families.parts.config import Config
from shardload.families.registry import family_of, model_type_of, model_types
from shardload.hub import built
from shardload.hub.config_forms import completed
from shardload.keras_bridge.layer_settings import gelu_tanh, set_attribute
from shardload.units import plural

_SMALL_EPSILON = 1e-4
"""Largest epsilon that may be set on built layers. Files that Keras writes lose such a change, so it must be small."""
_GELUS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "gelu_fast", "quick_gelu")


def known_fields() -> set[str]:
    """Return the names of all fields that are checked for any model: those that ``ignore_config`` accepts."""
    known = {*ROPE, *WINDOW, "is_causal", "query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"}
    for kind in model_types().values():
        known.update(kind.only)
        if kind.checks is not None:
            known.update(kind.checks.attributes)
            known.update(named[0] for named in (kind.checks.epsilon, kind.checks.activation) if named)
            known.update({"act_layer"} if kind.checks.tower_activation else ())
    return known


def text_of(config: Config) -> Config:
    """Return the configuration of the text model, with defaults: the field ``text_config``, or all if there is none."""
    nested = config.get("text_config")
    # Gemma 3's text part may omit its model_type.
    text = {"model_type": f"{config.get('model_type')}_text", **nested} if isinstance(nested, Mapping) else config
    return completed(text)


def differences(config: Config, backbone: Any) -> Iterator[FieldDifference]:
    """Yield the fields in which a configuration and a built backbone differ; the backbone's weights need no values."""
    known, text = model_type_of(config), text_of(config)
    yield from known.differences(config)
    yield from _directions(config, text, backbone)
    for field, values in known.only.items():
        # A field that is null counts as set: versions of transformers read it in different ways.
        if field in text and text[field] not in values:
            yield FieldDifference(field, str(text[field])[:80], str(values[0]), (field,))
    if (checks := known.checks) is None:
        return
    yield from _epsilon(text, checks, backbone)
    yield from _activation(text, checks, backbone)
    yield from _activation_of_tower(checks, backbone)
    yield from _rotations(text, checks, backbone)
    yield from _windows(text, checks, backbone)
    yield from _caps(text, checks, backbone)
    for field, same in checks.attributes.items():
        if (wanted := config.get(field, same.default)) != (actual := getattr(backbone, same.attribute)):
            yield FieldDifference(field, str(wanted), str(actual), same.names)


def epsilon_of(backbone: Any) -> float:
    """Return the epsilon that most normalisation layers of a backbone compute with."""
    found = Counter(layer.epsilon for layer in built.normalisations(backbone))
    return float(found.most_common(1)[0][0])


def activation_of(backbone: Any) -> str | None:
    """Return transformers' name of a backbone's first activation; ``None`` if transformers has no name for it."""
    return _name_of(next(function for _, _, function in built.activations(backbone)))


def limits(config: Config) -> Iterator[str]:
    """Yield a note on each configured feature that the model lacks, but that changes results of long texts at most."""
    family, checks, text = family_of(config), model_type_of(config).checks, text_of(config)
    if family is None or checks is None or checks.rotary is None:
        return
    ignores_cap = checks.caps is not None and not checks.caps.has_scores
    if ignores_cap and (cap := text.get("attn_logit_softcapping")) is not None:
        yield f"attn_logit_softcapping: {cap} is left out, because transformers does not apply it to {family.title}"
    rotation = rope.rotation(text, rope.FULL, checks.rotary, head_dim=None)
    parameters = rotation.parameters
    if rotation.kind == "longrope" and parameters.get("long_factor") != parameters.get("short_factor"):
        longest = parameters["original_max_position_embeddings"]
        yield (
            f"{rope.field_of(text)}: texts longer than {plural(longest, 'token')} use other rotary factors; if "
            "prompt and answer together come near that length, generate() may choose other factors than "
            "transformers, and results differ"
        )
    if rotation.kind == "dynamic":
        longest = text.get("max_position_embeddings")
        yield (
            f"{rope.field_of(text)}: transformers scales positions dynamically beyond position {longest}, "
            "KerasHub does not, so results for longer texts differ"
        )


def untied(config: Config, backbone: Any) -> Iterator[str]:
    """Yield a note if the configuration ties embeddings, but the model uses a stored output layer that differs."""
    if config.get("tie_word_embeddings") is True and getattr(backbone, "tie_word_embeddings", None) is False:
        yield (
            "tie_word_embeddings: true in the configuration, but the stored output layer differs from the embedding "
            "and is used, as in transformers 5 (version 4 leaves it out)"
        )


def _directions(config: Config, text: Config, backbone: Any) -> Iterator[FieldDifference]:
    """Yield the differing fields among those that say whether a token attends to later ones (``is_causal``, …)."""
    decoder = config.get("decoder")
    causal = (decoder if isinstance(decoder, Mapping) else text).get("is_causal")
    known = model_type_of(config)
    if causal is not None and not causal and not known.attends_both_ways:
        yield FieldDifference("is_causal", str(causal), "True", ("is_causal",))
    for field in known.checks.attention_flags if known.checks else ():
        wanted = bool(config.get(field))
        actual = {
            bool(getattr(built.attention_of(block, field), field, False))
            for block in built.transformer_layers_of(backbone)
        }
        if actual - {wanted}:
            yield FieldDifference(field, str(wanted), str(not wanted), (field,))


def _epsilon(config: Config, checks: Checks, backbone: Any) -> Iterator[FieldDifference]:
    if checks.epsilon is None:
        return
    field, default = checks.epsilon
    wanted = config.get(field)
    wanted = default if wanted is None else wanted
    wrong = [layer for layer in built.normalisations(backbone) if layer.epsilon != wanted]
    if not wrong:
        return

    def fix() -> None:
        for layer in wrong:
            set_attribute(layer, "epsilon", wanted)

    # Only a small change may be set on layers: files that Keras writes lack it, and a large one would be lost.
    actual = wrong[0].epsilon
    small = isinstance(wanted, float) and 0 < wanted <= _SMALL_EPSILON and actual <= _SMALL_EPSILON
    yield FieldDifference(
        field, f"{wanted:g}", f"{actual:g} in {plural(len(wrong), 'layer')}", (field,), fix if small else None
    )


def _activation(config: Config, checks: Checks, backbone: Any) -> Iterator[FieldDifference]:
    if checks.activation is None:
        return
    field, default = checks.activation
    configured = str(config.get(field) or default)
    configured = checks.activation_names.get(configured, configured)
    wanted = _function(configured)
    # No attribute to compare: the class computes one fixed activation.
    named = checks.activation_layer
    found = [one for one in built.activations(backbone) if named is None or one[0].name == named]
    if not found and checks.has_activation is not None:
        if wanted is None or not _alike(wanted, _function(checks.has_activation)):
            yield FieldDifference(field, configured, checks.has_activation, (field,))
        return
    yield from _other_activation(field, configured, found)


def _activation_of_tower(checks: Checks, backbone: Any) -> Iterator[FieldDifference]:
    if checks.tower_activation is None:
        return
    attribute, name = checks.tower_activation
    if (tower := getattr(backbone, attribute, None)) is not None:
        yield from _other_activation("act_layer", name, list(built.activations(tower)))


def _other_activation(field: str, configured: str, found: Sequence[tuple[Any, str, Any]]) -> Iterator[FieldDifference]:
    wanted = _function(configured)
    wrong = [one for one in found if wanted is None or not _alike(wanted, one[2])]
    if not wrong:
        return

    def fix() -> None:
        for layer, name, _ in wrong:
            set_attribute(layer, name, wanted)

    actual = wrong[0][2]
    close = wanted is not None and float(np.abs(built.at_points(wanted) - built.at_points(actual)).max()) < _CLOSE
    title = _name_of(actual) or str(getattr(actual, "__name__", actual))
    yield FieldDifference(field, configured, title, (field,), fix if close and configured in _GELUS else None)


_CLOSE = 1e-3
"""Largest difference between values of two activations for one to be set in place of the other on built layers: the two
forms of GELU differ by 4.7e-4."""
_NAMED = ("gelu", "gelu_new", "silu", "relu", "tanh", "sigmoid")
"""Activations that an export can name, as transformers names them: of several names (``silu``, ``swish``), one."""


@functools.cache
def _function(name: str) -> Any:
    """Return Keras' function for an activation's name in transformers; ``None`` if Keras has none."""
    # transformers has several names for two functions: the exact GELU and its tanh form.
    known = {"gelu": keras.activations.gelu, "silu": keras.activations.silu, "swish": keras.activations.silu}
    known |= dict.fromkeys(("gelu_new", TANH, "gelu_fast"), gelu_tanh)
    known |= {name: getattr(keras.activations, name) for name in ("relu", "tanh", "sigmoid")}
    return known.get(name)


def _name_of(function: Any) -> str | None:
    return next((name for name in _NAMED if _alike(_function(name), function)), None)


def _alike(one: Any, other: Any) -> bool:
    return one is other or bool(np.allclose(built.at_points(one), built.at_points(other), rtol=1e-5, atol=1e-6))


def _rotations(config: Config, checks: Checks, backbone: Any) -> Iterator[FieldDifference]:
    if checks.rotary is None:
        return
    head_dim, blocks = head_dim_of(backbone), built.transformer_layers_of(backbone)
    windows = checks.windows(config, len(blocks)) if checks.windows else [None] * len(blocks)
    seen: set[tuple[str, str]] = set()  # most blocks are alike, and measuring one takes a compilation
    for i, block in enumerate(blocks):
        kind = rope.SLIDING if windows[i] and checks.rotary.sliding_theta is not None else rope.FULL
        layer = built.rotary_of(block)
        key = (kind, built.settings_text(layer) if layer is not None else "")
        if key in seen:
            continue
        seen.add(key)
        wanted = rope.rotation(config, kind, checks.rotary, head_dim=head_dim)
        measured = built.turns_of(block, head_dim)
        # Divisors of the angles in long texts, which Phi-3 has.
        long_factors = getattr(layer, "inverese_freq_long_factor", None)
        if measured is None or _turns_alike(wanted, *measured, long_factors=long_factors):
            continue
        angles, scales, _ = measured
        slowest = f"{angles[-1]:.3g} radians per token at the slowest, scaled by {scales[0]:.3g}"
        yield FieldDifference(rope.field_of(config), str(wanted), f"{slowest} from layer {i} on", ROPE)
        return


def _turns_alike(
    wanted: rope.Rotation, angles: rope.Angles, scales: rope.Angles, error: float, *, long_factors: Any
) -> bool:
    long = wanted.parameters.get("long_factor")
    if wanted.kind == "longrope" and long != wanted.parameters.get("short_factor") and long != long_factors:
        return False  # short texts agree, long ones do not
    # Below float16's smallest number, which turns a text of 100,000 tokens by a hundredth, all angles are alike.
    smallest = 1e-7 if error > 1e-3 else 0
    return (
        wanted.angles is not None
        and len(wanted.angles) == len(angles)
        and bool(np.allclose(angles, wanted.angles, rtol=error, atol=smallest))
        and bool(np.allclose(scales, wanted.scale, rtol=error, atol=0))
    )


def _windows(config: Config, checks: Checks, backbone: Any) -> Iterator[FieldDifference]:
    blocks = built.transformer_layers_of(backbone)
    # A window that the longest text fits into is none: on both sides, so that it never counts as a difference.
    windows = checks.windows(config, len(blocks)) if checks.windows else [None] * len(blocks)
    wanted = [_obeyed(window, config) for window in windows]
    actual = [_obeyed(window, config) for window in built.windows_of(blocks)]
    wrong = [i for i in range(len(blocks)) if wanted[i] != actual[i]]
    if wrong:

        def fix() -> None:
            for block, window in zip(blocks, wanted, strict=True):
                built.set_window(block, window)

        i = wrong[0]
        yield FieldDifference(
            "sliding_window",
            f"{wanted[i] or 'no window'} (layer {i})",
            f"{actual[i] or 'no window'} ({len(wrong)} of {plural(len(blocks), 'layer')} differ)",
            WINDOW,
            fix if checks.sets_windows else None,
        )


def _obeyed(window: int | None, config: Config) -> int | None:
    """Return the size of a window that has an effect; ``None`` without a window or if the longest text fits into it."""
    if not window:
        return None
    # A bidirectional window extends by half its size to each side.
    reach = window // 2 + 1 if config.get("use_bidirectional_attention") else window
    return int(window) if reach < (config.get("max_position_embeddings") or np.inf) else None


def _caps(config: Config, checks: Checks, backbone: Any) -> Iterator[FieldDifference]:
    if (caps := checks.caps) is None:
        return
    attention = next(
        (built.attention_of(block, "logit_soft_cap") for block in built.transformer_layers_of(backbone)), None
    )
    pairs = (
        ("attn_logit_softcapping", caps.scores, getattr(attention, "logit_soft_cap", None)),
        ("final_logit_softcapping", caps.logits, getattr(backbone, "final_logit_soft_cap", None)),
    )
    for field, default, actual in pairs:
        wanted = config.get(field, default) if caps.has_scores or field != "attn_logit_softcapping" else None
        if wanted != actual:
            yield FieldDifference(field, str(wanted), str(actual), (field,))
    yield from _scalar(config, backbone)


def _scalar(config: Config, backbone: Any) -> Iterator[FieldDifference]:
    """Yield ``query_pre_attn_scalar``, by whose root attention scores are divided, if the model has another value."""
    field = "query_pre_attn_scalar"
    head_dim, per_head = head_dim_of(backbone), int(backbone.hidden_dim) // _heads_of(backbone)
    wanted = config.get(field, 256)
    found = [built.attention_of(block, "query_head_dim_normalize") for block in built.transformer_layers_of(backbone)]
    actual = {head_dim if layer.query_head_dim_normalize else per_head for layer in found if layer is not None}
    if actual <= {wanted}:
        return

    def fix() -> None:
        for layer in found:
            set_attribute(layer, "query_head_dim_normalize", wanted == head_dim)

    text = ", ".join(map(str, sorted(actual)))
    yield FieldDifference(field, str(wanted), text, (field,), fix if wanted in (head_dim, per_head) else None)


def head_dim_of(backbone: Any) -> int:
    """Return the number of features of one attention head."""
    return int(getattr(backbone, "head_dim", None) or backbone.hidden_dim // _heads_of(backbone))


def _heads_of(backbone: Any) -> int:
    return int(getattr(backbone, "num_query_heads", None) or backbone.num_attention_heads)
