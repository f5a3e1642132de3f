"""Read rotary positions from a Hugging Face configuration: the angle by which each pair of features rotates per token.

A configuration has one of three forms, and `rotation` makes a `Rotation` of each by transformers' rules::

    transformers 4   rope_theta, rope_scaling {rope_type | type, factor, …}
    transformers 5   rope_parameters {rope_theta, rope_type, factor, …}
    Gemma 3          one of these for each kind of layer; transformers 4 has rope_local_base_freq for sliding ones
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.errors import SourceError
from shardload.families.parts.config import Config
from shardload.units import plural

Angles = NDArray[np.float64]
SLIDING = "sliding_attention"
FULL = "full_attention"
_CORRECT = "Correct it in the model's configuration"


@dataclass(frozen=True, slots=True)
class Rotary:
    """How to read the rotary positions of one ``model_type``: defaults of omitted fields, and special rules."""

    theta: float
    """Default of ``rope_theta``, the base of the frequencies."""
    sliding_theta: float | None = None
    """Default of the base in layers with a sliding window; ``None`` if all layers of a model share one base."""
    is_partial: bool = False
    """Whether the field ``partial_rotary_factor``, the fraction of a head's features that rotate, counts even if the
    configuration sets no scaling of positions. If it sets one (``yarn``), the field counts for every ``model_type``."""
    stretched: str = "linear"
    """Kind of scaling (``linear``, ``yarn``) that KerasHub's class applies if its constructor gets a scaling factor."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """The rotary embedding that one layer applies to queries and keys."""

    kind: str
    """Kind of scaling, as configured: ``default`` (none), ``linear``, ``yarn``, ``llama3``, … or any unknown text."""
    theta: float
    parameters: Config
    """Settings of this kind of scaling, by their names in the configuration: ``factor``, ``beta_fast``, …"""
    angles: Angles | None
    """Angle in radians by which each pair of features rotates per token; ``None`` if kind or head dim is unknown."""
    scale: float = 1.0
    """Factor that sine and cosine are multiplied by: other than 1 only with ``yarn`` and ``longrope``."""

    def __str__(self) -> str:
        factor = self.parameters.get("factor")
        stretched = "" if self.kind == "default" or factor is None else f" with factor {factor}"
        return f"rotary positions of type {self.kind}{stretched}, base {self.theta:g}"


def rotation(config: Config, layer_type: str, rotary: Rotary, *, head_dim: int | None) -> Rotation:
    """Return the rotary embedding of one kind of layers (`FULL`, `SLIDING`); without ``head_dim``, it has no angles."""
    has_kinds = rotary.sliding_theta is not None
    default_theta = rotary.sliding_theta if has_kinds and layer_type == SLIDING else rotary.theta
    parameters = dict(parameters_of(config, layer_type, has_kinds=has_kinds))
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    kind = "longrope" if kind == "su" else kind  # its name in Phi-3's first configurations
    beside = "rope_local_base_freq" if has_kinds and layer_type == SLIDING else "rope_theta"
    theta = parameters.get("rope_theta") or config.get(beside) or default_theta
    longest = config.get("max_position_embeddings")
    original = config.get("original_max_position_embeddings") or longest  # Phi-3 has it outside rope_scaling
    # Rules compare the length a model was first trained with and its present one.
    parameters.setdefault("original_max_position_embeddings", original)
    parameters["max_position_embeddings"] = longest
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind == "default" and not rotary.is_partial:
        partial = 1.0
    base = _number("rope_theta", theta)
    rule = _RULES.get(str(kind))
    if rule is None or head_dim is None:
        return Rotation(str(kind), base, parameters, None)
    dims = int(head_dim * _number("partial_rotary_factor", partial))
    with np.errstate(all="ignore"):  # a hostile base gives NaN, which equals nothing
        plain = np.float64(base) ** -(np.arange(0, dims, 2) / max(dims, 1))
        angles, scale = rule(plain, base, parameters)
    return Rotation(str(kind), base, parameters, angles, scale)


def parameters_of(config: Config, layer_type: str, *, has_kinds: bool) -> Config:
    """Return the entries about rotary positions that hold for layers of one kind (`FULL` or `SLIDING`).

    With ``has_kinds``, the kinds differ: entries that name no kind hold for full attention only.
    """
    old, new = config.get("rope_scaling"), config.get("rope_parameters")
    if isinstance(new, Mapping) and any(isinstance(new.get(key), Mapping) for key in (FULL, SLIDING)):
        # transformers 5, for models whose kinds of layers differ: an entry for each kind.
        found = new.get(layer_type)
        return found if isinstance(found, Mapping) else {}
    if has_kinds:  # a flat entry belongs to full attention
        return old if layer_type == FULL and isinstance(old, Mapping) else {}
    # A folder may have both forms; rope_scaling wins, and what it lacks (rope_theta) comes from rope_parameters.
    found = old or new
    return {**(new if isinstance(new, Mapping) else {}), **found} if isinstance(found, Mapping) else {}


def field_of(config: Config) -> str:
    """Return, for messages, which field of a configuration scales positions (``rope_scaling``, ``rope_parameters``)."""
    return "rope_scaling" if config.get("rope_scaling") else "rope_parameters"


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise SourceError(f"Cannot read rotary positions: {name} is {str(value)[:80]!r}, expected a number. {_CORRECT}")
    try:
        return float(value)
    except OverflowError as error:
        raise SourceError(f"Cannot read rotary positions: {name} is too large for a float. {_CORRECT}") from error


def _of(parameters: Config, name: str) -> float:
    return _number(name, parameters.get(name))


def _llama3(plain: Angles, base: float, parameters: Config) -> tuple[Angles, float]:
    low, high, factor = (_of(parameters, name) for name in ("low_freq_factor", "high_freq_factor", "factor"))
    # How often a pair turns within the first training length: fast pairs stay, slow ones are divided, others blended.
    turns = _of(parameters, "original_max_position_embeddings") * plain / (2 * np.pi)
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return (1 - smooth) * plain / factor + smooth * plain, 1.0


def _stretch(parameters: Config) -> tuple[float, float]:
    """Return how many tokens a model was first trained with, and the factor by which that length was extended."""
    length = _of(parameters, "original_max_position_embeddings")
    if parameters.get("factor"):
        return length, _of(parameters, "factor")
    return length, _of(parameters, "max_position_embeddings") / length


def _yarn(plain: Angles, base: float, parameters: Config) -> tuple[Angles, float]:
    # Pairs with more than beta_fast turns within the first training length stay, those with fewer than beta_slow are
    # divided by the factor, and a linear ramp over the pairs blends the two.
    length, factor = _stretch(parameters)
    dims = 2 * len(plain)

    # The index of the pair with this many turns, as a fraction: length / base**(2 * index / dims) = turns * 2 * pi.
    def dimension(turns: float) -> float:
        return float(dims * np.log(length / (turns * 2 * np.pi)) / (2 * np.log(base)))

    low = dimension(_number("beta_fast", parameters.get("beta_fast") or 32))
    high = dimension(_number("beta_slow", parameters.get("beta_slow") or 1))
    if parameters.get("truncate", True):
        low, high = float(np.floor(low)), float(np.ceil(high))
    low, high = max(low, 0.0), min(high, dims - 1.0)
    ramp = np.clip((np.arange(len(plain)) - low) / (high - low if high != low else 0.001), 0, 1)
    angles = ramp * plain / factor + (1 - ramp) * plain
    if parameters.get("attention_factor") is not None:
        return angles, _of(parameters, "attention_factor")

    # The temperature that the YaRN paper recommends; models with two strengths divide one by the other.
    def scale(strength: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return angles, scale(_of(parameters, "mscale")) / scale(_of(parameters, "mscale_all_dim"))
    return angles, scale(1.0)


def _longrope(plain: Angles, base: float, parameters: Config) -> tuple[Angles, float]:
    length, factor = _stretch(parameters)
    short = parameters.get("short_factor")
    if not isinstance(short, list) or len(short) != len(plain):
        count = plural(len(plain), "number")
        raise SourceError(f"Cannot read rotary positions: short_factor is not a list of {count}. {_CORRECT}")
    # For texts that are no longer than those of the first training; `fields` compares long_factor, for longer texts.
    divisors = np.array([_number("short_factor", one) for one in short])
    scale = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 and length > 1 else 1.0
    if parameters.get("attention_factor") is not None:
        scale = _of(parameters, "attention_factor")
    return plain / divisors, scale


_RULES: Mapping[str, Callable[[Angles, float, Config], tuple[Angles, float]]] = {
    "default": lambda plain, base, parameters: (plain, 1.0),
    "linear": lambda plain, base, parameters: (plain / _of(parameters, "factor"), 1.0),
    "dynamic": lambda plain, base, parameters: (plain, 1.0),  # up to max_position_embeddings tokens
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
