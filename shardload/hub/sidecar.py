"""The configuration in a file next to Keras' weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shardload.errors import SourceError
from shardload.loaders import spec_of
from shardload.manifest import Manifest


def config_beside(manifest: Manifest) -> dict[str, Any] | None:
    """Return ``NAME.json`` next to ``NAME.weights.h5``, or the folder's ``config.json``, if it describes a model."""
    path = Path(manifest.source)
    # The first ending of a format is that of its weights; a format without one keeps the whole name.
    stem = path.name.removesuffix((*spec_of(manifest).endings, "")[0])
    for candidate in (path.with_name(f"{stem}.json"), path.with_name("config.json")):
        if candidate != path and candidate.is_file():
            try:
                config = json.loads(candidate.read_text(encoding="utf-8"))
            except ValueError as error:
                raise SourceError(
                    f"Cannot read {candidate}: it is not valid JSON: {error}. Correct or remove it"
                ) from error
            if isinstance(config, dict) and "class_name" in config:
                return config
    return None
