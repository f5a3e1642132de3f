"""BART."""

from __future__ import annotations

from shardload.families.parts.checks import Checks, SameAttribute
from shardload.families.parts.config import Config
from shardload.families.record import Family, ModelType

_PARTS = ("encoder", "decoder")


def _lacking(config: Config, name: str) -> str | None:
    """Refuse an encoder and a decoder of different sizes."""
    for size in ("layers", "attention_heads", "ffn_dim"):
        pair = [f"{part}_{size}" for part in _PARTS]
        if all(key in config for key in pair) and config[pair[0]] != config[pair[1]]:
            values = " and ".join(f"{key}={config[key]}" for key in pair)
            return f"config.json sets {values}, but {name} uses one number for both"
    return None


BART = ModelType(
    name="bart",
    defaults={"vocab_size": 50265, "d_model": 1024, "num_hidden_layers": 12, "max_position_embeddings": 1024}
    | {f"{part}_layers": 12 for part in _PARTS}
    | {f"{part}_attention_heads": 16 for part in _PARTS}
    | {f"{part}_ffn_dim": 4096 for part in _PARTS}
    | {"dropout": 0.1},
    renamed={"num_hidden_layers": "encoder_layers"},
    lacking=_lacking,
    checks=Checks(
        None,
        ("activation_function", "gelu"),
        attributes={"decoder_attention_heads": SameAttribute("num_heads", 16, ("decoder_attention_heads",))},
    ),
    only={"scale_embedding": (False, None)},
    heads=r"classification_head\.|qa_outputs\.",
)
FAMILY = Family(name="bart", title="BART", model_types=(BART,))
