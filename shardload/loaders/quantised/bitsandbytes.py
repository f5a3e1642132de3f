"""bitsandbytes: NF4 and FP4 in blocks that run over the ends of rows, and int8."""

from __future__ import annotations

import json
import math
import re

import numpy as np

from shardload.loaders.quantised.float4 import Float4Blocks
from shardload.loaders.quantised.parts import Parts, Weights
from shardload.loaders.quantised.rows import Scaled, read
from shardload.units import plural

_BITSANDBYTES_SETTINGS = {
    "quant_method", "_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_threshold",
    "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
}  # fmt: skip
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""How many weights can share a scale in bitsandbytes."""


def bitsandbytes(parts: Parts) -> tuple[str, Weights]:
    """Return the format's name and the weights of a bitsandbytes checkpoint."""
    parts.check_known(parts.settings, _BITSANDBYTES_SETTINGS)
    weights: Weights = {}
    for state in [name for name in parts.tensors if re.search(r"\.quant_state\.bitsandbytes__(nf4|fp4)$", name)]:
        name = state.rpartition(".quant_state.")[0]
        weights[name] = _float4_blocks(parts, name, state)
    for stem in parts.ending_in(".SCB"):
        codes = parts.need(f"{stem}.weight", None, kinds="i")
        if len(codes.shape) != 2 or codes.dtype != np.int8:
            raise parts.wrong(f"'{stem}.weight' is {codes.dtype} of {codes.shape}, expected a matrix of int8")
        scales = parts.need(f"{stem}.SCB", (codes.shape[0],), kinds="f")
        if scales.dtype != np.float32:
            raise parts.wrong(f"'{stem}.SCB' is {scales.dtype}, expected float32")
        _check_in_rows(parts, f"{stem}.weight_format")
        weights[f"{stem}.weight"] = Scaled(
            codes.shape, np.dtype(np.float32), codes, scales, (1, codes.shape[1]), factor=7.874015718698502e-3
        )
    is_four = parts.settings.get("load_in_4bit") or parts.settings.get("_load_in_4bit")
    kind = "4 bits" if is_four or any(isinstance(one, Float4Blocks) for one in weights.values()) else "8 bits"
    return f"bitsandbytes ({kind})", weights


def _check_in_rows(parts: Parts, name: str) -> None:
    """Raise if int8 codes are stored as kernels of some GPUs need them, as older versions of bitsandbytes did."""
    if parts.get(name) is None:
        return
    stored = parts.need(name, None, kinds="iu")
    if stored.size != 1 or (found := int(read(stored).reshape(()))):
        raise parts.wrong(f"{name!r} is {found if stored.size == 1 else stored.shape}, expected 0 (codes in rows)")


def _float4_blocks(parts: Parts, name: str, state: str) -> Float4Blocks:
    stored = parts.need(state, None, kinds="u")
    if len(stored.shape) != 1 or stored.dtype != np.uint8 or stored.nbytes > 4096:
        raise parts.wrong(f"{state!r} is {stored.dtype} of {stored.shape}, expected a few bytes of JSON")
    try:
        said = json.loads(read(stored).tobytes().decode())
        shape, block = tuple(said["shape"]), said["blocksize"]
        nested_block, offset = said.get("nested_blocksize", 0), float(said.get("nested_offset", "nan"))
        numbers = all(isinstance(n, int) and 0 < n < 1 << 40 for n in shape)
        if not shape or not numbers or not isinstance(nested_block, int) or block not in _BLOCKS:
            raise ValueError(f"it says {said!r:.200}")
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise parts.wrong(f"{state!r} does not describe a weight: {error}") from error
    size = math.prod(shape)
    codes = parts.need(name, None, kinds="iuf")
    if codes.nbytes != -(-size // 2) or math.prod(codes.shape[1:]) != 1:
        raise parts.wrong(f"{name!r} has {plural(codes.nbytes, 'byte')}, expected {-(-size // 2)} for {shape}")
    n_blocks = -(-size // block)
    table = parts.need(f"{name}.quant_map", (16,), kinds="f")
    if not {f"{name}.nested_absmax", f"{name}.nested_quant_map"} & parts.tensors.keys() and not nested_block:
        scales = parts.need(f"{name}.absmax", (n_blocks,), kinds="f")
        made = Float4Blocks(shape, np.dtype(np.float32), codes, table, scales, block)
    else:
        if nested_block < 1 or math.isnan(offset):
            raise parts.wrong(f"{state!r} does not say the nested_{'blocksize' if nested_block < 1 else 'offset'}")
        scales = parts.need(f"{name}.absmax", (n_blocks,), kinds="u")
        nested = parts.need(f"{name}.nested_absmax", (-(-n_blocks // nested_block),), kinds="f")
        nested_table = parts.need(f"{name}.nested_quant_map", (256,), kinds="f")
        made = Float4Blocks(
            shape, np.dtype(np.float32), codes, table, scales, block, nested, nested_table, nested_block, offset
        )
    tables = [part for part in (table, made.nested_scales, made.nested_table) if part is not None]
    if any(part.dtype != np.float32 for part in tables):
        raise parts.wrong(f"the tables of {name!r} are not float32")
    return made
