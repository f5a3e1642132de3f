"""FP8: float8 codes as large as the weight, with a scale for the tensor, for each row, or for blocks."""

from __future__ import annotations

from typing import Any

import numpy as np

from shardload.loaders.quantised.experts import FusedExperts, as_matrix
from shardload.loaders.quantised.parts import Parts, Weights, exponents
from shardload.loaders.quantised.rows import Dequantised, Scaled, dtype_of_weights
from shardload.manifest import Tensor

_FP8_SETTINGS = {
    "quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
    "modules_to_convert", "dequantize", "scale_fmt", "expert_dtype", "ignore", "kv_cache_scheme",
    "kv_cache_quant_method",
}  # fmt: skip


def fp8(parts: Parts) -> tuple[str, Weights]:
    """Fine-grained FP8 of DeepSeek and ``transformers``, and FP8 with one scale for a tensor."""
    parts.check_known(parts.settings, _FP8_SETTINGS)
    for name, supported in (("fmt", ("e4m3", "float8_e4m3fn")), ("expert_dtype", ("fp8",))):
        if (value := parts.settings.get(name, supported[0])) not in supported:
            raise parts.unknown(name, value)
    block = parts.settings.get("weight_block_size")
    weights: Weights = {}
    for ending in ("_scale_inv", ".weight_scale"):
        for stem in parts.ending_in(ending):
            name = stem if ending == "_scale_inv" else f"{stem}.weight"
            weights[name] = with_scales(parts, name, f"{stem}{ending}", block, dtype=np.dtype(np.float32))
    return "FP8" + (f" (blocks of {block[0]}x{block[1]})" if block else ""), weights


def with_scales(
    parts: Parts, name: str, scale: str, block: Any, *, dtype: np.dtype[Any] | None, zeros: Tensor | None = None
) -> Dequantised:
    """Return the weight ``name`` of 8-bit codes, with the scales that the tensor ``scale`` has: a matrix, or experts.

    ``block`` says how many rows and columns share a scale; ``None``: a row of a matrix, or all of it. ``dtype`` is what
    weights are rounded to; ``None``: that of the scales. ``zeros`` are subtracted from the codes.
    """
    codes = parts.need(name, None, kinds="if")
    if codes.dtype.itemsize != 1 or len(codes.shape) not in (2, 3):
        raise parts.wrong(f"{name!r} is {codes.dtype} of {codes.shape}, expected a matrix, or several, of 8-bit codes")
    scales = _scales(parts, codes, scale)
    rows, columns = codes.shape[-2:]
    size = (1, columns) if block is None else _block_size(parts, block)
    blocks = (*codes.shape[:-2], -(-rows // size[0]), -(-columns // size[1]))
    allowed = {blocks}
    if block is None:
        allowed |= {(), (1,), (1, 1), (rows,)} if len(codes.shape) == 2 else {(codes.shape[0], 1, 1)}
    if scales.shape not in allowed:
        expected = " or ".join(map(str, sorted(allowed)))
        raise parts.wrong(f"{scale!r} has the shape {scales.shape} for codes of {codes.shape}, expected {expected}")
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype.kind not in "iu"):
        raise parts.wrong(f"'{name}_zero_point' is {zeros.dtype} of {zeros.shape}, expected integers of {scales.shape}")
    dtype = dtype or dtype_of_weights(scales)
    if len(codes.shape) == 2:
        return Scaled(codes.shape, dtype, codes, scales, size, zeros)
    if zeros is not None:
        raise parts.wrong(f"'{name}_zero_point' is for experts, which have none")
    size = size if scales.shape == blocks else (rows, columns)
    flat = as_matrix(codes)
    return FusedExperts(codes.shape, dtype, Scaled(flat.shape, dtype, flat, as_matrix(scales), size, rows_of_each=rows))


def _scales(parts: Parts, codes: Tensor, name: str) -> Tensor:
    found = parts.need(name, None, kinds="fu")
    if found.dtype.kind != "u":
        return found
    if codes.dtype.kind in "iu":
        raise parts.wrong(f"{name!r} is {found.dtype}, expected floating point")
    return exponents(parts, found)


def _block_size(parts: Parts, block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and 0 < n < 1 << 31 for n in block):
        raise parts.unknown("weight_block_size", block)
    return block[0], block[1]
