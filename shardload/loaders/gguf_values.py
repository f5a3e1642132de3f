"""Typed access to the key-values of a GGUF header."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.gguf_header import GgufHeader
from shardload.units import plural

Config = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Values:
    """Typed access to the key-values of one header."""

    header: GgufHeader
    path: str
    rope_factors: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Name of a tensor (``rope_freqs``) → the factor by which each rotary frequency is slowed down."""

    @property
    def architecture(self) -> str:
        """``general.architecture``; empty if the file has none."""
        found = self.header.values.get("general.architecture")
        return found if isinstance(found, str) else ""

    def has(self, key: str) -> bool:
        """Whether the key exists under the architecture's prefix."""
        return f"{self.architecture}.{key}" in self.header.values

    def number(self, key: str, default: Any = ...) -> Any:
        """Return a number under the architecture's prefix; per-layer arrays must be uniform."""
        full = f"{self.architecture}.{key}"
        found = self.header.values.get(full, default)
        # Compared as text: 1 and True differ, and NaN equals itself.
        if isinstance(found, list) and found and len(set(map(repr, found))) == 1:
            found = found[0]
        # `...` marks a key without default, as `None` is a default.
        if found is ...:
            raise SourceError(f"{self.path} should contain the key {full!r}, as every {self.architecture} model does")
        if found is not default and (isinstance(found, bool) or not isinstance(found, int | float)):
            raise UnsupportedError(
                f"{self.path}: {full!r} should be one number for all layers, but is {str(found)[:80]}"
            )
        return shortest(found) if isinstance(found, float) else found

    def count(self, key: str) -> int:
        """Return a positive integer under the architecture's prefix."""
        found = self.number(key)
        if not isinstance(found, int) or not 0 < found < 1 << 31:
            raise SourceError(
                f"{self.path}: '{self.architecture}.{key}' should be a positive integer, but is {found!r}"
            )
        return found

    def each(self, key: str, layers: int) -> list[int]:
        """Return a setting of every layer: a list in the header, or one number for all."""
        found = self.header.values.get(f"{self.architecture}.{key}")
        if not isinstance(found, list):
            return [self.count(key)] * layers
        if len(found) != layers or not all(isinstance(one, int) and 0 <= one < 1 << 31 for one in found):
            raise SourceError(
                f"{self.path}: '{self.architecture}.{key}' should have one integer for each of "
                f"{plural(layers, 'layer')}, but is {str(found)[:80]}"
            )
        # A pattern may be a list of booleans.
        return [int(one) for one in found]

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Return a tensor's shape; ``None`` if the file does not contain the tensor."""
        return next((info.shape for info in self.header.tensors if info.name == name), None)

    def rows(self, name: str) -> int | None:
        """Return the length of a tensor's dim 0; ``None`` if the file does not contain the tensor."""
        found = self.shape(name)
        return None if found is None else found[0]


def shortest(value: float) -> float:
    """Return the shortest decimal that is the same float32: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))
