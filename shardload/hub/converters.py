"""Converters that families declare, in the form of KerasHub's own.

KerasHub calls a module of functions; here it is an `OwnConverter` with the same names, so that nothing after
`converter_of` tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardload.families.registry import model_type_of
from shardload.manifest import Manifest


@dataclass(frozen=True, slots=True)
class OwnConverter:
    """The functions and the class that KerasHub's loader looks for in a converter's module."""

    backbone_cls: Any
    """KerasHub's class."""
    convert_backbone_config: Callable[..., dict[str, Any]]
    convert_weights: Callable[..., Any]
    convert_tokenizer: Callable[..., Any]


def converter_of(manifest: Manifest, models: Any) -> OwnConverter | None:
    """Return the converter for a checkpoint, or ``None`` if KerasHub has one.

    Args:
        manifest: The checkpoint.
        models: ``keras_hub.models``.
    """
    declared = model_type_of(manifest.config).converter
    if declared is None or not declared.applies(manifest.tensors):
        return None
    cls = getattr(models, declared.backbone)
    return OwnConverter(cls, declared.arguments, declared.port_weights, declared.tokenizer)
