"""Where KerasHub looks for a checkpoint's files other than weights."""

from __future__ import annotations

import os

from shardload.manifest import Manifest


def preset_path(manifest: Manifest) -> str:
    """Return the checkpoint's path, or one without files if nothing is there: KerasHub looks for names in hubs."""
    return manifest.source if manifest.location.exists() else os.devnull
