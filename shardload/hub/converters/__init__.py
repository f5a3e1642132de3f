"""Converters for models that KerasHub has a class for, but no converter: in the form of KerasHub's own.

KerasHub calls a module of functions; here it is an `OwnConverter` with the same names, so that nothing after
`converter_of` tells them apart. A converter only names tensors and views them: hooks transpose and reshape without
copies, and `shardload.mapping` reads the bytes.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardload.manifest import Manifest

Config = Mapping[str, Any]
OWN: Mapping[str, str] = {
    "gpt_oss": "shardload.hub.converters.gpt_oss:CONVERTER",
    "bloom": "shardload.hub.converters.bloom:CONVERTER",
    "phi3": "shardload.hub.converters.phi3:CONVERTER",
}
"""``model_type`` → where its converter is."""


@dataclass(frozen=True, slots=True)
class OwnConverter:
    """The functions and the class that KerasHub's loader looks for in a converter's module."""

    backbone: str
    """Name of KerasHub's class."""
    convert_backbone_config: Callable[[Config], dict[str, Any]]
    """From ``config.json`` to the class's arguments."""
    convert_weights: Callable[[Any, Any, Config], Any]
    """Ports each weight: backbone, loader, ``config.json``."""
    convert_tokenizer: Callable[..., Any]
    """From the folder's files to KerasHub's tokenizer: its class, the folder, further arguments."""

    @property
    def backbone_cls(self) -> Any:
        """KerasHub's class."""
        from shardload.hub.kerashub import keras_hub

        return getattr(keras_hub().models, self.backbone)


def converter_of(manifest: Manifest) -> OwnConverter | None:
    """Return the converter for a checkpoint, or ``None`` if KerasHub has one."""
    model_type = manifest.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in OWN:
        return None
    if model_type == "gpt_oss" and not any(name.endswith(".experts.gate_up_proj") for name in manifest.tensors):
        return None  # its experts are MXFP4 codes, which KerasHub's own converter decodes
    found: OwnConverter = pkgutil.resolve_name(OWN[model_type])
    return found


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
