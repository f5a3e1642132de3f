"""NVIDIA's ModelOpt: FP8, MXFP8 and NVFP4.

``config.json`` names the algorithm, or, in older folders, only ``hf_quant_config.json``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shardload.loaders.quantised.float4 import Float4Rows
from shardload.loaders.quantised.fp8 import with_scales
from shardload.loaders.quantised.parts import Parts, Weights
from shardload.loaders.quantised.rows import Dequantised
from shardload.stores.json_files import read_optional
from shardload.stores.location import Location

FILE = "hf_quant_config.json"
_SETTINGS = {
    "quant_method", "quant_algo", "config_groups", "ignore", "exclude_modules", "producer", "group_size",
    "kv_cache_scheme", "kv_cache_quant_algo",
}  # fmt: skip
_FP8 = {"FP8": None, "FP8_PER_CHANNEL_PER_TOKEN": None, "MXFP8": [1, 32]}
"""Algorithm → rows and columns that share a scale; ``None``: a row, or all."""
_NVFP4 = ("NVFP4", "W4A16_NVFP4")
_GROUP = 16
"""Columns that share a scale in NVFP4."""


def settings_beside(folder: Location) -> dict[str, Any] | None:
    """Return the settings of a folder whose own file alone says that ModelOpt quantised it; ``None`` without one."""
    found = read_optional(folder / FILE)
    settings = found.get("quantization") if isinstance(found, Mapping) else None
    return {"quant_method": "modelopt", **settings} if isinstance(settings, Mapping) and settings else None


def modelopt(parts: Parts) -> tuple[str, Weights]:
    """Return the format's name and the weights of a checkpoint that ModelOpt exported."""
    parts.check_known(parts.settings, _SETTINGS)
    algorithm = parts.settings.get("quant_algo")
    if algorithm not in (*_FP8, *_NVFP4):
        raise parts.unknown("quant_algo", algorithm)
    if (size := parts.settings.get("group_size")) not in (None, 0, _GROUP if algorithm in _NVFP4 else 32):
        raise parts.unknown("group_size", size)
    weights: Weights = {}
    for stem in parts.ending_in(".weight_scale"):
        name = f"{stem}.weight"
        if algorithm in _NVFP4:
            weights[name] = _nvfp4(parts, stem)
        else:
            dtype = np.dtype(np.float32)
            weights[name] = with_scales(parts, name, f"{name}_scale", _FP8[algorithm], dtype=dtype)
    return f"ModelOpt ({algorithm})", weights


def _nvfp4(parts: Parts, stem: str) -> Dequantised:
    codes = parts.need(f"{stem}.weight", None, kinds="u")
    if len(codes.shape) != 2 or codes.dtype != np.uint8 or codes.shape[1] % (_GROUP // 2):
        raise parts.wrong(f"'{stem}.weight' is {codes.dtype} of {codes.shape}, expected uint8 for groups of {_GROUP}")
    rows, columns = codes.shape[0], codes.shape[1] * 2
    scales = parts.need(f"{stem}.weight_scale", (rows, columns // _GROUP), kinds="f")
    factor = parts.need_number(f"{stem}.weight_scale_2")
    dtype = np.dtype(np.float32)
    return Float4Rows((rows, columns), dtype, codes, scales, _GROUP, factor=factor, signs_zeros=False)
