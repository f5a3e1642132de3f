"""Quantised Hugging Face folders as plain ones: each weight is dequantised row by row while it is read.

    x.qweight, x.qzeros, x.scales, x.g_idx   ─►   x.weight (Decoded), as if the folder had stored it

Everything behind the manifest (names, layouts, plans, conversion) knows nothing of codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.quantised import schemes
from shardload.manifest import Decoded, Manifest, Tensor


def dequantised(manifest: Manifest) -> Manifest:
    """Return the manifest of a folder with each quantised weight as one tensor, and without its codes and scales.

    One whose weights cannot be dequantised is returned as it is, so that it can be listed; `require_known` says why.
    """
    try:
        found = _found(manifest)
    except (SourceError, UnsupportedError):
        return manifest
    if found is None:
        return manifest
    tensors = {name: tensor for name, tensor in manifest.tensors.items() if name not in found.used}
    for name, reader in found.weights.items():
        tensors[name] = Tensor(name, reader.shape, reader.dtype, Decoded(reader))
    config = {key: value for key, value in manifest.config.items() if key != schemes.FIELD}
    return replace(manifest, tensors=tensors, config=config, notes=(*manifest.notes, *found.notes))


def require_known(manifest: Manifest) -> None:
    """Raise if the folder's weights are quantised by a known method, but cannot be dequantised.

    Raises:
        SourceError: When tensors of a weight are missing, or have other shapes or dtypes than they should have.
        UnsupportedError: When the configuration has a setting that is not known.
    """
    _found(manifest)


def _found(manifest: Manifest) -> schemes.QuantisedWeights | None:
    settings = manifest.config.get(schemes.FIELD)
    return schemes.found(manifest, settings) if isinstance(settings, Mapping) else None
