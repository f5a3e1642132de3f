"""Loaders: one module per format, which turns a checkpoint's headers into a `Manifest` and declares a `FormatSpec`.

    path ─► recognise (first bytes, folder contents) ─► FormatSpec ─► open_file │ open_folder ─► Manifest
                 `recognition`                            `registry`     one loader module

No loader reads tensor data while opening, and none trusts a header: all byte ranges in a `Manifest` are inside files.
"""

from __future__ import annotations

from shardload.loaders.recognition import describe_folder, folder_of, open_manifest, open_variant, recognise
from shardload.loaders.registry import FormatSpec, register, spec_of

__all__ = [
    "FormatSpec",
    "describe_folder",
    "folder_of",
    "open_manifest",
    "open_variant",
    "recognise",
    "register",
    "spec_of",
]
