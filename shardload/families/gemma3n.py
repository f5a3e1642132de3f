"""Gemma 3n, with images and sound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from shardload.families.parts.checks import ROPE, TANH, Checks, FieldDifference
from shardload.families.parts.config import Config
from shardload.families.parts.rope import FULL, SLIDING, Rotary, rotation
from shardload.families.record import LATER, Family, ModelType, Part

_ROTARY = Rotary(1e6, sliding_theta=1e4)


def _adapt(config: dict[str, Any]) -> None:
    """Set the base of full attention as transformers 4 writes it, which KerasHub reads; transformers 5 nests it."""
    text = config.get("text_config")
    if isinstance(text, dict) and "rope_theta" not in text:
        text["rope_theta"] = rotation(text, FULL, _ROTARY, head_dim=None).theta


def _differences(config: Config) -> Iterator[FieldDifference]:
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return
    full, sliding = (rotation(text, kind, _ROTARY, head_dim=None) for kind in (FULL, SLIDING))
    if full.kind != "default":
        yield FieldDifference("rope_parameters", str(full), "no scaling", ROPE)
    if (sliding.kind, sliding.theta) != ("default", _ROTARY.sliding_theta):
        yield FieldDifference("rope_parameters", f"{sliding} (in windows)", "no scaling, base 10000", ROPE)


def _forgotten(backbone: Any) -> Iterator[tuple[Any, str]]:
    if backbone.vision_encoder is not None:
        stem = backbone.vision_encoder.get_layer("conv_stem")
        yield stem.conv.bias, "model.vision_tower.timm_model.conv_stem.conv.bias"


def _uncomputed(config: Config) -> str | None:
    """Return which keys and values the last layers share with earlier ones; transformers 5 does not store their own."""
    text = config.get("text_config")
    count, shared = (text.get(key) for key in ("num_hidden_layers", "num_kv_shared_layers")) if text else (0, 0)
    if not (isinstance(count, int) and isinstance(shared, int) and 0 < shared < count <= _MOST_LAYERS):
        return None
    layers = "|".join(map(str, range(count - shared, count)))
    return rf"(.+\.)?language_model\.layers\.({layers})\.self_attn\.(k_proj|v_proj|k_norm)\.weight"


_MOST_LAYERS = 1000
GEMMA_3N = ModelType(
    name="gemma3n",
    lacks={
        Part.EXPORT: "KerasHub's vision tower has 121 biases more, which training would change",
        Part.GGUF: LATER,
        Part.SIZE: LATER,
    },
    adapt=_adapt,
    checks=Checks(tower_activation=("vision_encoder", TANH)),  # timm's MobileNet V5 computes GELU with tanh
    differences=_differences,
    forgotten=_forgotten,
    uncomputed=_uncomputed,
    without_task="the constructor of KerasHub's Gemma3nCausalLM makes a constant of the embedding's initial values",
)
FAMILY = Family(name="gemma3n", title="Gemma 3n", model_types=(GEMMA_3N,))
