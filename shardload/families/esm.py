"""ESM: proteins."""

from __future__ import annotations

from shardload.families.parts.checks import ROPE, Checks, SameAttribute
from shardload.families.parts.config import BASE, DROPOUT, Config
from shardload.families.record import Family, ModelType


def _lacking(config: Config, name: str) -> str | None:
    if (positions := config.get("position_embedding_type", "absolute")) == "rotary":
        return None
    return (
        f"config.json sets position_embedding_type={positions!r}, but {name} counts absolute positions from 0, "
        "and transformers from pad_token_id + 1; expected 'rotary'"
    )


ESM = ModelType(
    name="esm",
    defaults=BASE | DROPOUT | {"max_position_embeddings": 1026, "position_embedding_type": "absolute"},
    lacking=_lacking,
    checks=Checks(
        ("layer_norm_eps", 1e-12),
        attributes={"rope_theta": SameAttribute("max_wavelength", 1e4, ROPE)},
        arguments={"rope_theta": "max_wavelength"},
    ),
    only={"token_dropout": (False, None), "is_decoder": (False, None)},
    attends_both_ways=True,
    heads=r"lm_head\.|classifier\.|(esm\.)?contact_head\.",
    has_pooler_outside=True,
)
FAMILY = Family(name="esm", title="ESM", model_types=(ESM,))
