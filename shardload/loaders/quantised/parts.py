"""The stored tensors that weights are made of: looked up by name, and checked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.quantised.rows import Dequantised, read
from shardload.manifest import Extent, Manifest, Tensor

FIELD = "quantization_config"
"""The field of ``config.json`` that says how weights are quantised."""
Weights = dict[str, Dequantised]
"""Name of each weight → what reads it."""


class Parts:
    """The stored tensors of a checkpoint, of which weights are made, and which of them are used so far."""

    def __init__(self, manifest: Manifest, settings: Mapping[str, Any]) -> None:
        """Begin with the tensors of a manifest, and the settings of its ``quantization_config``."""
        self.manifest, self.settings = manifest, settings
        self.tensors = manifest.tensors
        self.used: set[str] = set()
        self.lacked: list[SourceError] = []
        """Errors about tensors that are missing."""

    def ending_in(self, *endings: str) -> Iterator[str]:
        """Yield what precedes one of the endings in each tensor's name that has it, once for each."""
        found = [name.removesuffix(end) for end in endings for name in self.tensors if name.endswith(end)]
        yield from dict.fromkeys(found)

    def get(self, name: str) -> Tensor | None:
        """Return a tensor if there is one of this name."""
        if (found := self.tensors.get(name)) is not None:
            self.used.add(name)
        return found

    def need(self, name: str, shape: tuple[int, ...] | None, *, kinds: str) -> Tensor:
        """Return a tensor of this shape (any, if ``None``) and of one of these kinds of dtypes (i, u, f)."""
        found = self.get(name)
        if found is None:
            raise self.lacking(name)
        if not isinstance(found.storage, Extent) or _kind(found.dtype) not in kinds:
            raise self.wrong(f"{name!r} is stored as {found.dtype}")
        if not found.size:
            raise self.wrong(f"{name!r} is empty: its shape is {found.shape}")
        if shape is not None and found.shape != shape:
            raise self.wrong(f"{name!r} has the shape {found.shape}, expected {shape}")
        return found

    def need_number(self, name: str) -> Tensor:
        """Return a tensor of one float32."""
        found = self.need(name, None, kinds="f")
        if found.size != 1 or found.dtype != np.float32:
            raise self.wrong(f"{name!r} is {found.dtype} of {found.shape}, expected one float32")
        return found

    def lacking(self, name: str) -> SourceError:
        """Return the error for a tensor that a weight needs and that is not there."""
        self.lacked.append(error := self.wrong(f"it lacks {name!r}"))
        return error

    def wrong(self, what: str) -> SourceError:
        """Return the error for tensors that do not make up a weight."""
        return SourceError(
            f"{self.manifest.source} has quantised weights that do not fit together: {what}. Download it again, or "
            "load the unquantised checkpoint of this model"
        )

    def unknown(self, name: str, value: Any) -> UnsupportedError:
        """Return the error for a setting that is not known."""
        return UnsupportedError(
            f"Cannot load {self.manifest.source}: {FIELD} in config.json sets {self.settings.get('quant_method')} "
            f"quantisation with {name}={value!r:.100}, which is not supported. Load the unquantised checkpoint of this "
            "model, or a GGUF file of it"
        )

    def check_known(self, settings: Mapping[str, Any], names: Collection[str], *, within: str = "") -> None:
        """Raise if a setting has another name than these, and a value that says something."""
        for name, value in settings.items():
            if name not in names and value not in (None, False, [], {}, ""):
                raise self.unknown(within + name, value)


def _kind(dtype: np.dtype[Any]) -> str:
    return dtype.kind if dtype.kind in "iu" else "f"


def exponents(parts: Parts, stored: Tensor) -> Tensor:
    """Return bytes as what they stand for in MX formats: powers of two, from 2 ** -127 on."""
    if stored.dtype != np.uint8:
        raise parts.wrong(f"{stored.name!r} is {stored.dtype}, expected exponents in uint8")
    return replace(stored, dtype=np.dtype(ml_dtypes.float8_e8m0fnu))


def order_of_groups(parts: Parts, name: str, columns: int, size: int, *, needed: bool = False) -> Tensor | None:
    """Return the tensor with the group of each column; ``None`` if the groups are in order.

    They are in order where there is no such tensor; if it is ``needed``, they are not, and one must be there.
    """
    if name not in parts.tensors and not needed:
        return None
    stored, n_groups = parts.need(name, (columns,), kinds="i"), -(-columns // size)
    found = read(stored)
    if found.size and not 0 <= found.min() <= found.max() < n_groups:
        raise parts.wrong(f"{name!r} names groups {found.min()} to {found.max()}, expected 0 to {n_groups - 1}")
    return None if np.array_equal(found, np.arange(columns) // size) else stored
