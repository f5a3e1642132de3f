"""Declare which fields of a configuration to compare with the built model, because they change what it computes.

A field has the meaning that transformers gives it, and if it is missing, transformers' default. Fields that no family
lists here are not compared. Biases and output layers need no check: a difference in them shows as a missing tensor.
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
"""Takes a configuration and the number of layers; returns how many tokens the sliding window of each layer has,
``None`` for a layer that attends to all tokens."""


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of a configuration whose value differs from what the built model computes with."""

    field: str
    configured: str
    """The configured value as text, for messages."""
    actual: str
    """The value that the built model has, as text for messages."""
    names: tuple[str, ...]
    """Names that a user may write in ``ignore_config`` to accept this difference; one of them is enough."""
    fix: Callable[[], None] | None = None
    """Function that sets the configured value on the built layers; ``None`` if the difference cannot be repaired."""

    def __str__(self) -> str:
        return f"{self.configured} in the configuration, but {self.actual} in the model"


@dataclass(frozen=True, slots=True)
class Caps:
    """Defaults of Gemma's soft caps, if a configuration omits them: tanh keeps scores and logits below them."""

    scores: float | None
    """Default of ``attn_logit_softcapping``, the cap of attention scores; ``None``: no cap."""
    logits: float | None
    """Default of ``final_logit_softcapping``, the cap of the output layer's logits; ``None``: no cap."""
    has_scores: bool = True
    """Whether transformers applies ``attn_logit_softcapping`` to this model; if not, KerasHub must not either."""


@dataclass(frozen=True, slots=True)
class SameAttribute:
    """An attribute of KerasHub's backbone that must equal the field whose name is its key in `Checks.attributes`."""

    attribute: str
    default: Any
    """The field's value if the configuration omits it, as in transformers."""
    names: tuple[str, ...]
    """Names that a user may write in ``ignore_config`` to accept a difference; one of them is enough."""


@dataclass(frozen=True, slots=True)
class Checks:
    """Which fields of a configuration to compare with the built model, for all models of one ``model_type``."""

    epsilon: tuple[str, float] | None = None
    """The field with the epsilon of the norms, and transformers' default for it: ``("rms_norm_eps", 1e-6)``."""
    activation: tuple[str, str] | None = None
    """The field with the activation's name, and transformers' default for it: ``("hidden_act", "silu")``."""
    rotary: Rotary | None = None
    """How to read the rotary positions from the configuration; ``None`` for models without them."""
    windows: _Windows | None = None
    """Function that reads the sliding window of each layer from the configuration; ``None`` if no layer has one."""
    has_activation: str | None = None
    """Activation that KerasHub's class always computes (``silu``). Only for classes whose layers store no activation
    that could be read."""
    activation_names: Mapping[str, str] = field(default_factory=dict)
    """Configured activation → the one that it really means: Gemma's first files say ``gelu`` for GELU's tanh form."""
    activation_layer: str | None = None
    """Name of the layers with this activation; ``None``: it is that of all layers, also in other parts of the model."""
    tower_activation: tuple[str, str] | None = None
    """An encoder of images whose activation no field states: the backbone's attribute with it, and transformers' name
    of the activation. In ``ignore_config``, it is ``act_layer``."""
    caps: Caps | None = None
    sets_windows: bool = False
    """Whether to set windows on the built layers, because KerasHub's constructor gives them to the wrong layers."""
    has_unsized_windows: bool = False
    """Whether a model without windows is built with ``sliding_window_size=None``, which some constructors refuse."""
    attention_flags: tuple[str, ...] = ()
    """Boolean fields (``use_bidirectional_attention``) to compare with attributes of that name on attention layers."""
    attributes: Mapping[str, SameAttribute] = field(default_factory=dict)
    """Name of a field → the attribute of KerasHub's backbone that must have the same value."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Field (``type_vocab_size``) → argument of KerasHub's class (``num_segments``); its converter does not pass it."""


# ---- sliding windows -----------------------------------------------------------------------------


def every_layer(config: Config, layers: int) -> list[int | None]:
    """Return each layer's window, for models in which all layers have the same one: the field ``sliding_window``."""
    return [config.get("sliding_window")] * layers


def if_used(config: Config, layers: int) -> list[int | None]:
    """Return each layer's window: the field ``sliding_window`` if ``use_sliding_window`` is set, else ``None``."""
    return every_layer(config, layers) if config.get("use_sliding_window") else [None] * layers


def by_layer_type(default: Callable[[Config, int], bool], *, always: bool = True) -> _Windows:
    """Return a function that takes a configuration and returns each layer's window, as ``layer_types`` says.

    Without ``layer_types``, ``default(config, i)`` says whether layer ``i`` has a window. With ``always=False``, layers
    have windows only if ``use_sliding_window`` is set.
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
    """Whether layer ``i`` has a sliding window: the first one has, the second attends to all tokens, and so on."""
    return i % 2 == 0


def after_first_layers(config: Config, i: int) -> bool:
    """Whether layer ``i`` has a sliding window: all layers have one, except the first ``max_window_layers``."""
    return i >= int(config.get("max_window_layers", 28))
