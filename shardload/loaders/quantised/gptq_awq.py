"""GPTQ and AWQ: codes of the transposed weight, several in a word."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from shardload.loaders.quantised.columns import PackedColumns
from shardload.loaders.quantised.parts import Parts, Weights, order_of_groups
from shardload.units import plural

_GPTQ_SETTINGS = {
    "quant_method", "method", "bits", "w_bit", "group_size", "q_group_size", "desc_act", "sym", "zero_point",
    "checkpoint_format", "format", "version", "pack_dtype", "lm_head", "modules_to_not_convert",
    # How the codes were found, or how others run them:
    "damp_percent", "damp_auto_increment", "true_sequential", "static_groups", "act_group_aware", "hyb_act", "mse",
    "model_name_or_path", "model_file_base_name", "meta", "quantizer", "dataset", "tokenizer", "batch_size",
    "pad_token_id", "model_seqlen", "max_input_length", "modules_in_block_to_quantize", "block_name_to_quantize",
    "module_name_preceding_first_block", "cache_block_outputs", "backend", "use_exllama", "disable_exllama",
    "exllama_config", "use_cuda_fp16", "do_fuse", "fuse_max_seq_len", "modules_to_fuse",
}  # fmt: skip
"""Of GPTQ and AWQ: transformers writes the same ones for both."""


def gptq(parts: Parts) -> tuple[str, Weights]:
    """Return the format's name and the weights of a GPTQ checkpoint."""
    parts.check_known(parts.settings, _GPTQ_SETTINGS)
    form = parts.settings.get("checkpoint_format") or parts.settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise parts.unknown("checkpoint_format", form)
    if (word := parts.settings.get("pack_dtype", "int32")) != "int32":
        raise parts.unknown("pack_dtype", word)
    bits = _bits(parts, (2, 3, 4, 8))
    stems = list(parts.ending_in(".qweight", ".qzeros"))
    made = {stem: _columns(parts, stem, bits, zeros_less_one=form == "gptq") for stem in stems}
    # With desc_act, groups are in no order. Without it, some writers leave them out; settings may be wrong, though.
    if parts.settings.get("desc_act") or any(weight.groups is not None for weight in made.values()):
        for stem in stems:
            parts.need(f"{stem}.g_idx", None, kinds="i")
    return f"GPTQ ({plural(bits, 'bit')})", {f"{stem}.weight": weight for stem, weight in made.items()}


def awq(parts: Parts) -> tuple[str, Weights]:
    """Return the format's name and the weights of an AWQ checkpoint."""
    parts.check_known(parts.settings, _GPTQ_SETTINGS)
    form = str(parts.settings.get("version") or parts.settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise parts.unknown("version", form)
    bits = _bits(parts, (4,))
    stems = parts.ending_in(".qweight", ".qzeros")
    made: Weights = {f"{stem}.weight": _columns(parts, stem, bits, is_awq=True) for stem in stems}
    return f"AWQ ({plural(bits, 'bit')})", made


def _bits(parts: Parts, supported: Collection[int]) -> int:
    found = parts.settings.get("bits", parts.settings.get("w_bit"))
    if not isinstance(found, int) or found not in supported:
        raise parts.unknown("bits", found)
    return found


def _columns(
    parts: Parts, stem: str, bits: int, *, zeros_less_one: bool = False, is_awq: bool = False
) -> PackedColumns:
    codes = parts.need(f"{stem}.qweight", None, kinds="i")
    if len(codes.shape) != 2 or codes.dtype != np.int32:
        raise parts.wrong(f"'{stem}.qweight' is {codes.dtype} of {codes.shape}, expected a matrix of int32")
    columns, rows = codes.shape
    rows, columns = (rows * 32 // bits, columns) if is_awq else (rows, columns * 32 // bits)
    size = parts.settings.get("group_size", parts.settings.get("q_group_size", 128))
    size = columns if size == -1 else size
    if not isinstance(size, int) or size < 1:
        raise parts.unknown("group_size", size)
    n_groups = -(-columns // size)
    scales = parts.need(f"{stem}.scales", (n_groups, rows), kinds="f")
    zeros = parts.need(f"{stem}.qzeros", (n_groups, -(-rows * bits // 32)), kinds="i")
    if zeros.dtype != np.int32 or scales.dtype.itemsize < 2:
        raise parts.wrong(f"'{stem}.qzeros' is {zeros.dtype} and '{stem}.scales' {scales.dtype}")
    groups = None if is_awq else order_of_groups(parts, f"{stem}.g_idx", columns, size)
    return PackedColumns(
        (rows, columns), np.dtype(np.float32), codes, scales, zeros, bits, size, is_awq, groups, zeros_less_one
    )
