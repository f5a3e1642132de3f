"""A case, and what many configurations share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]

DECODER: Config = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "tie_word_embeddings": False,
}  # fmt: skip
ENCODER: Config = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 40, "pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2,
}  # fmt: skip
IMAGES: Config = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4,
}  # fmt: skip
TIED: Config = {"tie_word_embeddings": True}
HEAD_DIM: Config = {"head_dim": 8}
KV_1: Config = {"num_key_value_heads": 1}
KV_3: Config = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48}
KV_4: Config = {"num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64}
EXPERTS: Config = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
LABELS: Config = {"num_labels": 3}
SLIDING, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True)
class Case:
    """One folder."""

    family: str
    variant: str
    cls: str
    """The class of `transformers` that saves it."""
    config: Config
    writer: int = 5
    """The version of `transformers` that writes it."""
    dtype: str = "float32"
    sharded: bool = False
    edits: tuple[str, ...] = ()
    """What happens to the folder after it was saved: names in `edits`."""
    ask: str = "text"
    """What kind of input it takes; see `inputs`."""
    reference: bool = True
    """Whether PyTorch can be asked."""
    mesh: str = ""
    """The mesh it is loaded on; one device where empty."""

    @property
    def name(self) -> str:
        """Of the fixture and of the table's row."""
        return f"{self.family}, {self.variant}"
