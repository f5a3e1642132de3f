"""Loaders: one file per format, each turning headers into a `Manifest` and nothing more.

    path ─► recognise (magic bytes, folder contents) ─► keras_h5 │ keras_sharded │ keras_archive │ hub_preset
                                                        │ hf_folder │ safetensors │ gguf │ orbax ─► Manifest

No loader reads tensor data while opening, and none trusts a header: whatever a `Manifest` says lies inside its files.
"""

from __future__ import annotations

from shardload.loaders._recognise import FORMATS, open_manifest, recognise

__all__ = ["FORMATS", "open_manifest", "recognise"]
