"""Quantised Hugging Face folders as plain ones: each weight is dequantised row by row while it is read.

    x.qweight, x.qzeros, x.scales, x.g_idx   ─►   x.weight (Decoded), as if the folder had stored it

Everything behind the manifest (names, layouts, plans, conversion) knows nothing of codes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.quantised import schemes
from shardload.loaders.quantised.modelopt import settings_beside
from shardload.loaders.quantised.parts import FIELD
from shardload.loaders.quantised.rows import Dequantised
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
    return replace(manifest, tensors=tensors, config=_as_plain(manifest.config), notes=(*manifest.notes, *found.notes))


def require_known(manifest: Manifest) -> None:
    """Raise if the folder's weights are quantised by a known method, but cannot be dequantised.

    Raises:
        SourceError: When tensors of a weight are missing, or have other shapes or dtypes than they should have.
        UnsupportedError: When the configuration has a setting that is not known.
    """
    _found(manifest)


def planned_as_plain(manifest: Manifest) -> tuple[Manifest, str | None]:
    """Return a manifest, of a configuration alone, without its quantisation, and what that is called, if it is known.

    Raises:
        UnsupportedError: When the configuration has a setting that is not known.
    """
    settings = manifest.config.get(FIELD)
    name = schemes.method_name(manifest, settings) if isinstance(settings, Mapping) else None
    return (manifest if name is None else replace(manifest, config=_as_plain(manifest.config))), name


def is_dequantised(manifest: Manifest) -> bool:
    """Whether weights of a manifest are dequantised while they are read."""
    return any(
        isinstance(t.storage, Decoded) and isinstance(t.storage.reader, Dequantised) for t in manifest.tensors.values()
    )


def _as_plain(config: Mapping[str, Any]) -> Mapping[str, Any]:
    return {key: value for key, value in config.items() if key != FIELD}


def _found(manifest: Manifest) -> schemes.QuantisedWeights | None:
    settings = manifest.config.get(FIELD)
    # Only the tensors say whether it is worth a look for another file.
    if settings is None and any(name.endswith(".weight_scale") for name in manifest.tensors):
        settings = settings_beside(manifest.location)
    return schemes.found(manifest, settings) if isinstance(settings, Mapping) else None
