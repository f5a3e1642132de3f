"""Constructor arguments that make a KerasHub backbone compute what a configuration describes.

KerasHub's converters pass only some of them. A check after the build finds arguments that a constructor ignores.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from shardload.families.parts import rope
from shardload.families.parts.checks import Checks
from shardload.families.parts.config import Config
from shardload.families.registry import model_type_of
from shardload.hub.fields import text_of


def arguments(config: Config, parameters: Collection[str]) -> dict[str, Any]:
    """Return constructor arguments that make a backbone match the configuration.

    Args:
        config: ``config.json``.
        parameters: Names of the constructor's parameters.

    Returns:
        Arguments that override the arguments from KerasHub's converter.

    Raises:
        SourceError: When the configuration contradicts itself.
    """
    # Passed when the model is built, a setting is part of what Keras saves; set on layers later, it would be lost.
    checks, text = model_type_of(config).checks, text_of(config)
    if checks is None:
        return {}
    found: dict[str, Any] = {}
    if checks.epsilon is not None and (epsilon := text.get(checks.epsilon[0])) is not None:
        found |= dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps"), epsilon)
    if checks.rotary is not None:
        rotation = rope.rotation(text, rope.FULL, checks.rotary, head_dim=None)
        found |= _rotary_arguments(rotation, stretched=checks.rotary.stretched)
    if checks.windows is not None:
        found |= _window_arguments(text, checks)
    if checks.caps is not None and not checks.caps.has_scores:
        found["attention_logit_soft_cap"] = None  # the class applies it, transformers does not
    found |= {name: text[field] for field, name in checks.arguments.items() if text.get(field) is not None}
    # Classes name the same setting differently, so each spelling is offered.
    return {name: value for name, value in found.items() if name in parameters}


def _rotary_arguments(rotation: rope.Rotation, *, stretched: str) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(("rope_max_wavelength", "rope_theta"), rotation.theta)
    if rotation.kind == "llama3":
        found |= {
            "rope_frequency_adjustment_factor": rotation.parameters["factor"],
            "rope_low_freq_factor": rotation.parameters["low_freq_factor"],
            "rope_high_freq_factor": rotation.parameters["high_freq_factor"],
            "rope_pretraining_sequence_length": rotation.parameters["original_max_position_embeddings"],
        }
    if rotation.kind == stretched:
        names = ("rope_scaling_factor", "rope_position_scaling_factor", "global_rope_scaling_factor")
        found |= dict.fromkeys(names, rotation.parameters["factor"])
    return found


def _window_arguments(config: Config, checks: Checks) -> dict[str, Any]:
    """Return the window shared by all windowed layers; `fields` checks later which layers have it."""
    assert checks.windows is not None
    windows = checks.windows(config, int(config["num_hidden_layers"]))
    sizes = {size for size in windows if size}
    if len(sizes) > 1:  # the constructors take one size; `fields` refuses the model
        return {}
    size = next(iter(sizes), None)
    if size is None:
        no_size = {"sliding_window_size": None} if checks.has_unsized_windows else {}
        return {"use_sliding_window_attention": False, "sliding_window": None, **no_size}
    return {"use_sliding_window_attention": True, "sliding_window_size": size, "sliding_window": size}
