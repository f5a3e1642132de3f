"""Where KerasHub looks for a checkpoint's files other than weights."""

from __future__ import annotations

import os

from shardload.manifest import Manifest


def preset_path(manifest: Manifest) -> str:
    """Return the checkpoint's path if it exists, else one without files.

    KerasHub would take a path that does not exist for the name of a preset, and ask hubs for it.
    """
    return manifest.source if manifest.location.exists() else os.devnull
