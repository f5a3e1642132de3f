"""Falcon."""

from __future__ import annotations

from shardload.families.record import Family

FAMILY = Family(
    name="falcon",
    title="Falcon",
    gguf_refused={"falcon": "KerasHub's Falcon has ALiBi and biases, like Falcon-RW; llama.cpp's has neither"},
)
