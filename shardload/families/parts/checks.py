"""The fields of a configuration that change what a model computes, as transformers reads them.

A missing field means transformers' default. Fields and model types that are not listed are not checked; other checks
detect features with their own tensors (biases, tied heads, further layers).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from shardload.families.parts.config import Config
from shardload.families.parts.rope import SLIDING, Rotary

ROPE = ("rope_scaling", "rope_parameters", "rope_theta", "rope_local_base_freq")
WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "sliding_window_pattern")
TANH = "gelu_pytorch_tanh"
RMS_EPSILON = ("rms_norm_eps", 1e-6)
SILU = ("hidden_act", "silu")
_Windows = Callable[[Config, int], list[int | None]]
"""Returns the window of each layer from a configuration and the number of layers."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field whose value differs in the model."""

    field: str
    configured: str
    """The value in the configuration, for messages."""
    actual: str
    """The value in the model, for messages."""
    names: tuple[str, ...]
    """Field names that ignore this difference."""
    fix: Callable[[], None] | None = None
    """Sets the value on the layers, if the change is small and the constructor cannot do it."""

    def __str__(self) -> str:
        return f"{self.configured} in the configuration, but {self.actual} in the model"


@dataclass(frozen=True, slots=True)
class Caps:
    """Soft caps; models that have them also scale scores by ``query_pre_attn_scalar``."""

    scores: float | None
    """Default of ``attn_logit_softcapping``."""
    logits: float | None
    """Default of ``final_logit_softcapping``."""
    has_scores: bool = True
    """Whether transformers applies ``attn_logit_softcapping`` at all."""


@dataclass(frozen=True, slots=True)
class SameAttribute:
    """A field whose value an attribute of KerasHub's backbone must have."""

    attribute: str
    default: Any
    names: tuple[str, ...]
    """Field names that ignore a difference."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Settings of one ``model_type``, as transformers reads them."""

    epsilon: tuple[str, float] | None = None
    activation: tuple[str, str] | None = None
    rotary: Rotary | None = None
    """``None`` for models without rotary positions."""
    windows: _Windows | None = None
    """``None`` if all layers attend to everything."""
    has_activation: str | None = None
    """The activation that KerasHub computes if no layer has an attribute for it."""
    activation_names: Mapping[str, str] = field(default_factory=dict)
    """Configured activation → the one that transformers means by it."""
    caps: Caps | None = None
    sets_windows: bool = False
    """Whether windows are set on the layers, because KerasHub's constructor gives them to the wrong ones."""
    has_unsized_windows: bool = False
    """Whether the constructor takes ``None`` as the size of a window."""
    attention_flags: tuple[str, ...] = ()
    """Boolean fields that attributes of the same name on each attention layer must equal."""
    attributes: Mapping[str, SameAttribute] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Field → argument of the constructor that KerasHub's converter leaves out."""


# ---- sliding windows -----------------------------------------------------------------------------


def every_layer(config: Config, layers: int) -> list[int | None]:
    """Return the configured window for all layers."""
    return [config.get("sliding_window")] * layers


def if_used(config: Config, layers: int) -> list[int | None]:
    """Return the configured window for all layers if ``use_sliding_window`` is set."""
    return every_layer(config, layers) if config.get("use_sliding_window") else [None] * layers


def by_layer_type(default: Callable[[Config, int], bool], *, always: bool = True) -> _Windows:
    """Return a function for windows by ``layer_types``, or by ``default`` for older configurations without it.

    ``always`` says that windows apply without ``use_sliding_window``.
    """

    def windows(config: Config, layers: int) -> list[int | None]:
        if not always and not config.get("use_sliding_window"):
            return [None] * layers
        types = config.get("layer_types")
        if isinstance(types, list) and len(types) == layers:
            sliding = [kind == SLIDING for kind in types]
        else:
            sliding = [default(config, i) for i in range(layers)]
        return [config.get("sliding_window") if slides else None for slides in sliding]

    return windows


def first_slides(config: Config, i: int) -> bool:
    """Whether a layer slides: the first one does, the second attends to all tokens, and so on."""
    return i % 2 == 0


def after_first_layers(config: Config, i: int) -> bool:
    """Whether a layer slides: the first ``max_window_layers`` attend to all tokens."""
    return i >= int(config.get("max_window_layers", 28))
