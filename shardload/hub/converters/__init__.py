"""Converters for models that KerasHub has a class for, but no converter: in the form of KerasHub's own.

KerasHub calls a module of functions; here it is an `OwnConverter` with the same names, so that nothing after
`converter_of` tells them apart. A converter only names tensors and views them: hooks transpose and reshape without
copies, and `shardload.mapping` reads the bytes.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Config = Mapping[str, Any]
OWN: Mapping[str, str] = {
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


def converter_of(model_type: object) -> OwnConverter | None:
    """Return the converter of a ``model_type``, or ``None``."""
    if not isinstance(model_type, str) or model_type not in OWN:
        return None
    found: OwnConverter = pkgutil.resolve_name(OWN[model_type])
    return found
