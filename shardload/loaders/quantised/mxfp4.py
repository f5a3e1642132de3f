"""MXFP4 of GPT-OSS: fused experts, stored transposed, in blocks of 32 columns.

experts.down_proj_blocks   (experts, out, in / 32, 16), two codes in a byte
experts.down_proj_scales   (experts, out, in / 32), exponents     ─►   experts.down_proj   (experts, in, out)
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from shardload.loaders.quantised.experts import FusedExperts, as_matrix
from shardload.loaders.quantised.float4 import Float4Rows
from shardload.loaders.quantised.parts import Parts, Weights, exponents
from shardload.loaders.quantised.rows import BFLOAT16

_SETTINGS = {"quant_method", "modules_to_not_convert", "dequantize"}
_GROUP = 32
"""Columns that share a scale."""


def mxfp4(parts: Parts) -> tuple[str, Weights]:
    """Return the format's name and the weights of GPT-OSS' checkpoints."""
    parts.check_known(parts.settings, _SETTINGS)
    scales = [stem for stem in parts.ending_in("_scales") if parts.tensors[f"{stem}_scales"].dtype == np.uint8]
    return "MXFP4", {stem: _experts(parts, stem) for stem in dict.fromkeys([*parts.ending_in("_blocks"), *scales])}


def _experts(parts: Parts, stem: str) -> FusedExperts:
    blocks = parts.need(f"{stem}_blocks", None, kinds="u")
    if len(blocks.shape) != 4 or blocks.shape[3] * 2 != _GROUP or blocks.dtype != np.uint8:
        raise parts.wrong(
            f"'{stem}_blocks' is {blocks.dtype} of {blocks.shape}, expected uint8 of (experts, out, groups, 16)"
        )
    n_experts, n_out, n_groups, _ = blocks.shape
    scales = parts.need(f"{stem}_scales", (n_experts, n_out, n_groups), kinds="u")
    n_in = n_groups * _GROUP
    codes = replace(blocks, shape=(n_experts * n_out, n_in // 2))
    rows = Float4Rows((n_experts * n_out, n_in), BFLOAT16, codes, exponents(parts, as_matrix(scales)), _GROUP)
    return FusedExperts((n_experts, n_in, n_out), BFLOAT16, rows, transposed=True)
