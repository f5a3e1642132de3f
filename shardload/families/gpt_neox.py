"""GPT-NeoX."""

from __future__ import annotations

from shardload.families.record import Family

FAMILY = Family(
    name="gpt_neox",
    title="GPT-NeoX",
    gguf_refused={"gptneox": "KerasHub's GPTNeoX uses the embedding as output layer; these models have a separate one"},
)
