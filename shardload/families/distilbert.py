"""DistilBERT."""

from __future__ import annotations

from shardload.families.parts.checks import Checks
from shardload.families.record import Family, ModelType

DISTILBERT = ModelType(
    name="distilbert",
    defaults={"vocab_size": 30522, "dim": 768, "hidden_dim": 3072, "n_layers": 6, "n_heads": 12}
    | {"max_position_embeddings": 512, "dropout": 0.1},
    checks=Checks(None, ("activation", "gelu")),
    attends_both_ways=True,
    prefix="distilbert",
    heads=r"vocab_(transform|layer_norm|projector)\.|(pre_)?classifier\.|qa_outputs\.",
)
FAMILY = Family(name="distilbert", title="DistilBERT", model_types=(DISTILBERT,))
