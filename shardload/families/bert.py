"""BERT."""

from __future__ import annotations

from typing import Any

from shardload.families.parts.checks import Checks
from shardload.families.parts.config import BASE, DROPOUT
from shardload.families.parts.outside import OPTIONAL_POOLER
from shardload.families.record import Family, ModelType

DEFAULTS = BASE | DROPOUT | {"vocab_size": 30522, "max_position_embeddings": 512, "type_vocab_size": 2}
# If the type is null, transformers 4 adds no positions; 5 ignores the field and adds absolute positions.
ONLY: dict[str, tuple[Any, ...]] = {"is_decoder": (False, None), "position_embedding_type": ("absolute",)}


def _published(*, hidden: int, layers: int, heads: int) -> dict[str, Any]:
    return {
        "model_type": "bert",
        "architectures": ["BertModel"],
        "vocab_size": 30522,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 512,
        "type_vocab_size": 2,
    }


BERT = ModelType(
    name="bert",
    defaults=DEFAULTS,
    checks=Checks(("layer_norm_eps", 1e-12), ("hidden_act", "gelu"), arguments={"type_vocab_size": "num_segments"}),
    only=ONLY,
    attends_both_ways=True,
    prefix="bert",
    heads=r"cls\.|classifier\.|qa_outputs\.",
    optional_part=OPTIONAL_POOLER,
)
FAMILY = Family(
    name="bert",
    title="BERT",
    model_types=(BERT,),
    sizes={
        "bert_base": _published(hidden=768, layers=12, heads=12),
        "bert_large": _published(hidden=1024, layers=24, heads=16),
    },
)
