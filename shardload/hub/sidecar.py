"""The configuration in a file next to Keras' weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.stores.json_files import read_object


def config_beside(manifest: Manifest) -> dict[str, Any] | None:
    """Return ``NAME.json`` next to ``NAME.weights.h5``, or the folder's ``config.json``, if it describes a model.

    Raises:
        SourceError: If one of these files is not a JSON object, or is too large.
    """
    path = Path(manifest.source)
    # The first ending of a format is that of its weights; a format without one keeps the whole name.
    stem = path.name.removesuffix((*spec_of(manifest).endings, "")[0])
    for candidate in (path.with_name(f"{stem}.json"), path.with_name("config.json")):
        if candidate != path and candidate.is_file():
            config = read_object(candidate)
            if "class_name" in config:
                return config
    return None
