"""Constructor arguments that make a KerasHub backbone compute what a configuration describes.

KerasHub's converters pass only some of them. A check after the build finds arguments that a constructor ignores.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from shardload.hub import rope
from shardload.hub.families import Config, family_of, text_of


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
    family, text = family_of(config), text_of(config)
    if family is None:
        return {}
    found: dict[str, Any] = {}
    if family.epsilon is not None and (epsilon := text.get(family.epsilon[0])) is not None:
        found |= dict.fromkeys(("layer_norm_epsilon", "layer_norm_eps"), epsilon)
    if family.theta is not None:
        rotation = rope.rotation(text, rope.FULL, default_theta=family.theta, head_dim=None)
        found |= _rotary_arguments(rotation, stretched=_STRETCHED.get(str(config.get("model_type")), "linear"))
    if family.windows is not None:
        found |= _window_arguments(text, family.windows(text, int(text["num_hidden_layers"])))
    if rope.is_gemma_3(config):
        found["attention_logit_soft_cap"] = None  # the class applies it, transformers does not
    if config.get("model_type") == "bert" and text.get("type_vocab_size") is not None:
        found["num_segments"] = text["type_vocab_size"]
    if config.get("model_type") == "esm" and text.get("rope_theta") is not None:
        found["max_wavelength"] = text["rope_theta"]
    if config.get("model_type") == "gpt2" and text.get("n_inner") is not None:
        found["intermediate_dim"] = text["n_inner"]
    # Classes name the same setting differently, so each spelling is offered.
    return {name: value for name, value in found.items() if name in parameters}


_STRETCHED = {"gpt_oss": "yarn"}
"""``model_type`` → kind of rotary scaling that the constructor's factor means; linear for all others."""


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


def _window_arguments(config: Config, windows: Sequence[int | None]) -> dict[str, Any]:
    """Return the window shared by all windowed layers; `fields` checks later which layers have it."""
    sizes = {size for size in windows if size}
    if len(sizes) > 1:  # the constructors take one size; `fields` refuses the model
        return {}
    size = next(iter(sizes), None)
    if size is None:
        # Only these two constructors accept None as a size.
        no_size = {"sliding_window_size": None} if config.get("model_type") in ("qwen3", "qwen3_moe") else {}
        return {"use_sliding_window_attention": False, "sliding_window": None, **no_size}
    return {"use_sliding_window_attention": True, "sliding_window_size": size, "sliding_window": size}


def for_converter(config: Config) -> Config:
    """Return the configuration without entries that KerasHub's converters refuse, although the model supports them."""
    scaling = config.get("rope_scaling")
    kind = scaling.get("rope_type") or scaling.get("type") if isinstance(scaling, Mapping) else None
    # KerasHub's Llama converter raises for scalings other than llama3; `arguments` passes the linear factor.
    if config.get("model_type") != "llama" or kind in (None, "llama3"):
        return config
    return {key: value for key, value in config.items() if key != "rope_scaling"}
