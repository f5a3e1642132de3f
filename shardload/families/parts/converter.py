"""Converters for models that KerasHub has a class for, but no converter.

A converter only names tensors and views them: hooks transpose and reshape without copies, and `shardload.mapping` reads
the bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardload.families.parts.config import Config


@dataclass(frozen=True, slots=True)
class Converter:
    """What KerasHub's converters state as functions of a module."""

    backbone: str
    """Name of KerasHub's class."""
    arguments: Callable[[Config], dict[str, Any]]
    """From ``config.json`` to the class's arguments."""
    port_weights: Callable[[Any, Any, Config], Any]
    """Ports each weight: backbone, loader, ``config.json``."""
    tokenizer: Callable[..., Any]
    """From the folder's files to KerasHub's tokenizer: its class, the folder, further arguments."""
    applies: Callable[[Collection[str]], bool] = lambda names: True
    """Whether it is for a checkpoint with tensors of these names; KerasHub's converter is for the others."""


def byte_pairs(folder: str, *, with_added: bool = False) -> tuple[dict[str, int], list[str]]:
    """Return the vocabulary and the merges in the ``tokenizer.json`` of a folder, as KerasHub's tokenizers take them.

    Args:
        folder: Path of the folder.
        with_added: Whether to add the tokens that the file lists separately.
    """
    described = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))
    model = described["model"]
    added = described.get("added_tokens", ()) if with_added else ()
    # Older versions of tokenizers write a merge as one text, newer ones as a pair.
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    return {**model["vocab"], **{token["content"]: token["id"] for token in added}}, merges
