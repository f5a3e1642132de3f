"""Find the quantised weights of a Hugging Face folder: which stored tensors make up a weight, and how.

The configuration names the method and its settings, the tensors' names tell the weights, and shapes have to agree::

    fp8, compressed-tensors   x.weight, x.weight_scale or x.weight_scale_inv         one code for each weight
    compressed-tensors        x.weight_packed, x.weight_scale, …                     several in a word, or NVFP4
    gptq, awq                 x.qweight, x.qzeros, x.scales, x.g_idx                 several in a word, transposed
    bitsandbytes              x.weight, x.weight.absmax, … or x.weight, x.SCB        two in a byte, or int8

A setting that is not known here is refused by its name: it may change what the codes mean.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.quantised.rows import (
    BFLOAT16,
    Dequantised,
    Float4Blocks,
    Float4Rows,
    PackedColumns,
    PackedRows,
    Scaled,
    dtype_of_weights,
    read,
)
from shardload.manifest import Extent, Manifest, Tensor
from shardload.units import plural

FIELD = "quantization_config"
"""The field of ``config.json`` that says how weights are quantised."""
_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale")
"""Tensors of a quantised layer that quantise activations, not weights."""
_CACHE = re.compile(r"\.(k_scale|v_scale|q_scale|prob_scale|[kv]_zero_point|[kv]_proj\.output_scale)$")
"""Names of scales of a quantised KV cache."""


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """The quantised weights of a checkpoint."""

    method: str
    """As a note calls it: ``GPTQ (4 bits)``."""
    weights: Mapping[str, Dequantised]
    """Name of each weight → what reads it."""
    used: frozenset[str]
    """Names of stored tensors that are no weights by themselves."""
    notes: tuple[str, ...] = ()


class Parts:
    """The stored tensors of a checkpoint while its weights are made of them; notes which are used."""

    def __init__(self, manifest: Manifest, settings: Mapping[str, Any]) -> None:
        """Begin with the tensors of a manifest, and the settings of its ``quantization_config``."""
        self.manifest, self.settings = manifest, settings
        self.tensors = manifest.tensors
        self.used: set[str] = set()

    def ending_in(self, ending: str) -> Iterator[str]:
        """Yield what precedes ``ending`` in each tensor's name that has it."""
        yield from [name.removesuffix(ending) for name in self.tensors if name.endswith(ending)]

    def get(self, name: str) -> Tensor | None:
        """Return a tensor if there is one of this name."""
        if (found := self.tensors.get(name)) is not None:
            self.used.add(name)
        return found

    def need(self, name: str, shape: tuple[int, ...] | None, *, kinds: str) -> Tensor:
        """Return a tensor of this shape (any, if ``None``) and of one of these kinds of dtypes (i, u, f)."""
        found = self.get(name)
        if found is None:
            raise self.wrong(f"it lacks {name!r}")
        if not isinstance(found.storage, Extent) or _kind(found.dtype) not in kinds:
            raise self.wrong(f"{name!r} is stored as {found.dtype}")
        if shape is not None and found.shape != shape:
            raise self.wrong(f"{name!r} has the shape {found.shape}, expected {shape}")
        return found

    def wrong(self, what: str) -> SourceError:
        """Return the error for tensors that do not make up a weight."""
        return SourceError(
            f"{self.manifest.source} has quantised weights that do not fit together: {what}. Download it again"
        )

    def unknown(self, name: str, value: Any) -> UnsupportedError:
        """Return the error for a setting that is not known."""
        return UnsupportedError(
            f"Cannot load {self.manifest.source}: {FIELD} in config.json sets {self.settings.get('quant_method')} "
            f"quantisation with {name}={value!r:.100}, which is not supported. Load the unquantised checkpoint of this "
            "model, or a GGUF file of it"
        )

    def check_known(
        self, names: Collection[str], settings: Mapping[str, Any] | None = None, *, within: str = ""
    ) -> None:
        """Raise if a setting has another name than these, and a value that says something."""
        for name, value in (self.settings if settings is None else settings).items():
            if name not in names and value not in (None, False, [], {}, ""):
                raise self.unknown(within + name, value)


def _kind(dtype: np.dtype[Any]) -> str:
    return dtype.kind if dtype.kind in "iu" else "f"


def found(manifest: Manifest, settings: Mapping[str, Any]) -> QuantisedWeights | None:
    """Return the quantised weights that the settings and the tensors' names tell; ``None`` if there are none.

    Raises:
        SourceError: When tensors of a weight are missing, or have other shapes or dtypes.
        UnsupportedError: When a setting is not known.
    """
    method = str(settings.get("quant_method", ""))
    make = _METHODS.get(method)
    if make is None:
        return None
    parts = Parts(manifest, settings)
    name, weights = make(parts)
    if not weights:
        return None
    for weight in weights:
        stem = weight.removesuffix(".weight")
        parts.used.update(each for part in _ACTIVATIONS if (each := f"{stem}.{part}") in manifest.tensors)
    cache = [each for each in manifest.tensors if _CACHE.search(each)]
    parts.used.update(cache)
    notes = [f"{plural(len(weights), 'weight')} dequantised from {name}"]
    if cache:
        notes.append(f"left out {plural(len(cache), 'scale')} of a quantised KV cache")
    for weight in weights.keys() & manifest.tensors.keys() - parts.used:
        raise parts.wrong(f"it has {weight!r} twice, as codes and as a plain tensor")
    return QuantisedWeights(name, weights, frozenset(parts.used), tuple(notes))


# ---- FP8 ---------------------------------------------------------------------------------------------


def _fp8(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    """Fine-grained FP8 of DeepSeek and ``transformers``, and FP8 with one scale for a tensor."""
    parts.check_known(
        (
            "quant_method",
            "fmt",
            "activation_scheme",
            "weight_block_size",
            "modules_to_not_convert",
            "ignored_layers",
            "modules_to_convert",
            "dequantize",
            "scale_fmt",
            "ignore",
            "kv_cache_scheme",
            "kv_cache_quant_method",
        )
    )
    if (form := parts.settings.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise parts.unknown("fmt", form)
    block = parts.settings.get("weight_block_size")
    weights: dict[str, Dequantised] = {}
    for ending in (".weight_scale_inv", ".weight_scale"):
        for stem in parts.ending_in(ending):
            weights[f"{stem}.weight"] = _scaled(parts, stem, ending, block, dtype=np.dtype(np.float32))
    return "FP8" + (f" (blocks of {block[0]}x{block[1]})" if block else ""), weights


def _scaled(parts: Parts, stem: str, ending: str, block: Any, *, dtype: np.dtype[Any] | None) -> Scaled:
    codes = parts.need(f"{stem}.weight", None, kinds="if")
    if codes.dtype.itemsize != 1 or len(codes.shape) not in (2, 3):
        raise parts.wrong(
            f"'{stem}.weight' has dtype {codes.dtype} and shape {codes.shape}, expected a matrix of 8-bit codes"
        )
    scales = parts.need(f"{stem}{ending}", None, kinds="f" if codes.dtype.kind == "i" else "fu")
    if scales.dtype == np.uint8:
        raise parts.wrong(f"'{stem}{ending}' is stored as uint8")
    rows, columns = codes.shape[-2:]
    sizes = _block_sizes(parts, block)
    allowed = {(), (1,), (1, 1), (rows,), (rows, 1)}
    if sizes is not None:
        allowed = {(-(-rows // sizes[0]), -(-columns // sizes[1]))}
    if len(codes.shape) == 3 or scales.shape not in allowed:
        expected = " or ".join(map(str, sorted(allowed)))
        raise parts.wrong(
            f"'{stem}{ending}' has the shape {scales.shape} beside codes of {codes.shape}, expected {expected}"
        )
    zeros = parts.get(f"{stem}.weight_zero_point")
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype.kind not in "iu"):
        raise parts.wrong(
            f"'{stem}.weight_zero_point' is {zeros.dtype} of {zeros.shape}, expected integers of {scales.shape}"
        )
    block_rows = sizes[0] if sizes is not None else 1
    return Scaled(codes.shape, dtype or dtype_of_weights(scales), codes, scales, zeros, block_rows=block_rows)


def _block_sizes(parts: Parts, block: Any) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and 0 < n < 1 << 31 for n in block):
        raise parts.unknown("weight_block_size", block)
    return block[0], block[1]


# ---- compressed-tensors ------------------------------------------------------------------------------


def _compressed_tensors(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    known = (
        "quant_method",
        "format",
        "config_groups",
        "ignore",
        "kv_cache_scheme",
        "quantization_status",
        "global_compression_ratio",
        "version",
    )
    sparse = parts.settings.get("sparsity_config") or {}
    if sparse and not (isinstance(sparse, Mapping) and sparse.get("format") in (None, "dense")):
        raise parts.unknown("sparsity_config", sparse)
    parts.check_known((*known, "sparsity_config"))
    groups = parts.settings.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise parts.unknown("config_groups", groups)
    schemes = [_scheme(parts, name, group) for name, group in groups.items()]
    weights: dict[str, Dequantised] = {}
    for stem in parts.ending_in(".weight_packed"):
        scheme = _scheme_of(parts, stem, schemes)
        make = _nvfp4 if scheme.settings.get("type") == "float" else _packed
        weights[f"{stem}.weight"] = make(parts, stem, scheme)
    for stem in parts.ending_in(".weight_scale"):
        if f"{stem}.weight" in weights:
            continue
        scheme = _scheme_of(parts, stem, schemes)
        strategy, block = scheme.settings.get("strategy"), None
        if strategy == "block":
            block = scheme.settings.get("block_structure")
        elif strategy not in ("tensor", "channel", None):
            raise parts.unknown("strategy", strategy)
        weights[f"{stem}.weight"] = _scaled(parts, stem, ".weight_scale", block, dtype=None)
    return f"compressed-tensors ({parts.settings.get('format')})", weights


@dataclass(frozen=True, slots=True)
class _Scheme:
    targets: tuple[str, ...]
    settings: Mapping[str, Any]


def _scheme(parts: Parts, name: str, group: Any) -> _Scheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    targets = group.get("targets") if isinstance(group, Mapping) else None
    if (
        not isinstance(weights, Mapping)
        or not isinstance(targets, list)
        or not all(isinstance(t, str) for t in targets)
    ):
        raise parts.unknown(f"config_groups[{name!r}]", group)
    known = (
        "num_bits",
        "type",
        "symmetric",
        "group_size",
        "strategy",
        "block_structure",
        "dynamic",
        "actorder",
        "scale_dtype",
        "zp_dtype",
        "observer",
        "observer_kwargs",
    )
    parts.check_known(known, weights, within=f"config_groups[{name!r}].weights.")
    if weights.get("dynamic"):
        raise parts.unknown("weights.dynamic", weights["dynamic"])
    return _Scheme(tuple(targets), weights)


def _scheme_of(parts: Parts, module: str, schemes: list[_Scheme]) -> _Scheme:
    """Return the scheme of a module: one whose targets name it, else the one for layers of its class."""
    if len(schemes) == 1:
        return schemes[0]
    named = [one for one in schemes if any(_names(target, module) for target in one.targets)]
    by_class = [one for one in schemes if any(re.fullmatch(r"[A-Z]\w*", target) for target in one.targets)]
    for candidates in (named, by_class):
        if len(candidates) == 1 or (candidates and all(one.settings == candidates[0].settings for one in candidates)):
            return candidates[0]
    raise parts.unknown(
        "config_groups", f"several groups for {module}" if named or by_class else f"no group for {module}"
    )


def _names(target: str, module: str) -> bool:
    try:
        return re.match(target[3:], module) is not None if target.startswith("re:") else module.endswith(target)
    except re.error:
        return False


def _packed(parts: Parts, stem: str, scheme: _Scheme) -> PackedRows:
    bits, strategy = scheme.settings.get("num_bits"), scheme.settings.get("strategy")
    if not isinstance(bits, int) or not 1 <= bits <= 8 or scheme.settings.get("type", "int") != "int":
        raise parts.unknown("num_bits", bits)
    if strategy not in ("group", "channel", "tensor"):
        raise parts.unknown("strategy", strategy)
    codes = parts.need(f"{stem}.weight_packed", None, kinds="i")
    rows, columns = _stored_shape(parts, f"{stem}.weight_shape")
    if codes.shape != (rows, -(-columns * bits // 32)) or codes.dtype != np.int32:
        raise parts.wrong(
            f"'{stem}.weight_packed' is {codes.dtype} of {codes.shape}, expected int32 for {plural(bits, 'bit')} of "
            f"each of {(rows, columns)}"
        )
    size = scheme.settings.get("group_size") if strategy == "group" else columns
    if not isinstance(size, int) or size < 1:
        raise parts.unknown("group_size", size)
    n_groups = -(-columns // size)
    scales = parts.need(f"{stem}.weight_scale", (1,) if strategy == "tensor" else (rows, n_groups), kinds="f")
    zeros = None
    if not scheme.settings.get("symmetric", True):
        zeros = parts.need(f"{stem}.weight_zero_point", (-(-rows * bits // 32), n_groups), kinds="i")
    groups = _groups(parts, f"{stem}.weight_g_idx", columns, n_groups)
    if columns % size and groups is None and n_groups > 1:
        raise parts.wrong(f"'{stem}.weight' has {columns} columns, which groups of {size} do not divide")
    return PackedRows((rows, columns), dtype_of_weights(scales), codes, scales, bits, zeros, groups)


def _nvfp4(parts: Parts, stem: str, scheme: _Scheme) -> Float4Rows:
    size = scheme.settings.get("group_size")
    if scheme.settings.get("num_bits") != 4 or size != 16 or not scheme.settings.get("symmetric", True):
        raise parts.unknown("group_size", size)
    codes = parts.need(f"{stem}.weight_packed", None, kinds="u")
    if len(codes.shape) != 2 or codes.dtype != np.uint8:
        raise parts.wrong(f"'{stem}.weight_packed' has the shape {codes.shape}, expected a matrix of uint8")
    rows, columns = codes.shape[0], codes.shape[1] * 2
    scales = parts.need(f"{stem}.weight_scale", (rows, -(-columns // size)), kinds="f")
    divisor = parts.need(f"{stem}.weight_global_scale", None, kinds="f")
    if divisor.size != 1 or divisor.dtype != np.float32 or columns % size:
        raise parts.wrong(f"'{stem}.weight_global_scale' is {divisor.dtype} of {divisor.shape}, expected one float32")
    return Float4Rows((rows, columns), BFLOAT16, codes, scales, divisor)


def _stored_shape(parts: Parts, name: str) -> tuple[int, int]:
    """Return the two numbers that a tensor has: the shape of a weight, which packing does not keep."""
    stored = parts.need(name, (2,), kinds="i")
    rows, columns = (int(n) for n in read(stored))
    if not (0 < rows < 1 << 40 and 0 < columns < 1 << 40):
        raise parts.wrong(f"{name!r} says {(rows, columns)}")
    return rows, columns


def _groups(parts: Parts, name: str, columns: int, n_groups: int) -> Tensor | None:
    """Return the tensor with the group of each column, if there is one and the groups are not in order."""
    if name not in parts.tensors:
        return None
    stored = parts.need(name, (columns,), kinds="i")
    found = read(stored)
    if found.size and not 0 <= found.min() <= found.max() < n_groups:
        raise parts.wrong(f"{name!r} names groups {found.min()} to {found.max()}, expected 0 to {n_groups - 1}")
    size = -(-columns // n_groups)
    return None if np.array_equal(found, np.arange(columns) // size) else stored


# ---- GPTQ and AWQ ------------------------------------------------------------------------------------


def _gptq(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    parts.check_known(
        (
            "quant_method",
            "bits",
            "group_size",
            "desc_act",
            "sym",
            "checkpoint_format",
            "format",
            "damp_percent",
            "true_sequential",
            "static_groups",
            "model_name_or_path",
            "model_file_base_name",
            "meta",
            "lm_head",
            "pack_dtype",
            "dataset",
            "tokenizer",
            "modules_in_block_to_quantize",
            "block_name_to_quantize",
            "module_name_preceding_first_block",
            "batch_size",
            "pad_token_id",
            "use_cuda_fp16",
            "model_seqlen",
            "max_input_length",
            "use_exllama",
            "exllama_config",
            "cache_block_outputs",
            "backend",
            "act_group_aware",
            "disable_exllama",
            "is_marlin_format",
            "quantizer",
            "damp_auto_increment",
            "mse",
            "hyb_act",
            "version",
        )
    )
    form = parts.settings.get("checkpoint_format") or parts.settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise parts.unknown("checkpoint_format", form)
    if parts.settings.get("is_marlin_format"):
        raise parts.unknown("is_marlin_format", True)
    if (word := parts.settings.get("pack_dtype", "int32")) != "int32":
        raise parts.unknown("pack_dtype", word)
    bits = parts.settings.get("bits")
    if bits not in (2, 3, 4, 8):
        raise parts.unknown("bits", bits)
    made: dict[str, Dequantised] = {
        f"{stem}.weight": _columns(parts, stem, bits, added=int(form == "gptq")) for stem in parts.ending_in(".qweight")
    }
    return f"GPTQ ({plural(bits, 'bit')})", made


def _awq(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    parts.check_known(
        (
            "quant_method",
            "bits",
            "group_size",
            "zero_point",
            "version",
            "format",
            "modules_to_not_convert",
            "backend",
            "do_fuse",
            "exllama_config",
            "fuse_max_seq_len",
            "modules_to_fuse",
            "w_bit",
            "q_group_size",
            "meta",
            "checkpoint_format",
            "sym",
            "desc_act",
            "lm_head",
            "pack_dtype",
            "quantizer",
        )
    )
    form = str(parts.settings.get("version") or parts.settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise parts.unknown("version", form)
    bits = parts.settings.get("bits", parts.settings.get("w_bit", 4))
    if bits != 4:
        raise parts.unknown("bits", bits)
    made: dict[str, Dequantised] = {
        f"{stem}.weight": _columns(parts, stem, bits, is_awq=True) for stem in parts.ending_in(".qweight")
    }
    return f"AWQ ({plural(bits, 'bit')})", made


def _columns(parts: Parts, stem: str, bits: int, *, added: int = 0, is_awq: bool = False) -> PackedColumns:
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
    groups = None if is_awq else _groups(parts, f"{stem}.g_idx", columns, n_groups)
    return PackedColumns((rows, columns), np.dtype(np.float32), codes, scales, zeros, bits, size, is_awq, groups, added)


# ---- bitsandbytes ------------------------------------------------------------------------------------


def _bitsandbytes(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    parts.check_known(
        (
            "quant_method",
            "_load_in_4bit",
            "_load_in_8bit",
            "load_in_4bit",
            "load_in_8bit",
            "bnb_4bit_compute_dtype",
            "bnb_4bit_quant_storage",
            "bnb_4bit_quant_type",
            "bnb_4bit_use_double_quant",
            "llm_int8_threshold",
            "llm_int8_skip_modules",
            "llm_int8_enable_fp32_cpu_offload",
            "llm_int8_has_fp16_weight",
        )
    )
    weights: dict[str, Dequantised] = {}
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
        parts.get(f"{stem}.weight_format")
        weights[f"{stem}.weight"] = Scaled(
            codes.shape, np.dtype(np.float32), codes, scales, block_rows=1, factor=7.874015718698502e-3
        )
    kind = "4 bits" if any(isinstance(one, Float4Blocks) for one in weights.values()) else "8 bits"
    return f"bitsandbytes ({kind})", weights


def _float4_blocks(parts: Parts, name: str, state: str) -> Float4Blocks:
    stored = parts.need(state, None, kinds="u")
    if len(stored.shape) != 1 or stored.dtype != np.uint8 or stored.nbytes > 4096:
        raise parts.wrong(f"{state!r} is {stored.dtype} of {stored.shape}, expected a few bytes of JSON")
    try:
        said = json.loads(read(stored).tobytes().decode())
        shape, block = tuple(said["shape"]), said["blocksize"]
        nested_block, offset = said.get("nested_blocksize", 0), said.get("nested_offset", 0.0)
        numbers = all(isinstance(n, int) and 0 < n < 1 << 40 for n in (*shape, block))
        if not numbers or not isinstance(nested_block, int) or not isinstance(offset, (int, float)) or block % 2:
            raise ValueError(f"it says {said!r:.200}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise parts.wrong(f"{state!r} does not describe a weight: {error}") from error
    size = math.prod(shape)
    codes = parts.need(name, None, kinds="iuf")
    if codes.nbytes != -(-size // 2) or math.prod(codes.shape[1:]) != 1:
        raise parts.wrong(f"{name!r} has {plural(codes.nbytes, 'byte')}, expected {-(-size // 2)} for {shape}")
    n_blocks = -(-size // block)
    table = parts.need(f"{name}.quant_map", (16,), kinds="f")
    if f"{name}.nested_absmax" not in parts.tensors:
        scales = parts.need(f"{name}.absmax", (n_blocks,), kinds="f")
        made = Float4Blocks(shape, np.dtype(np.float32), codes, table, scales, block)
    else:
        if nested_block < 1:
            raise parts.wrong(f"{state!r} does not say the nested_blocksize")
        scales = parts.need(f"{name}.absmax", (n_blocks,), kinds="u")
        nested = parts.need(f"{name}.nested_absmax", (-(-n_blocks // nested_block),), kinds="f")
        nested_table = parts.need(f"{name}.nested_quant_map", (256,), kinds="f")
        made = Float4Blocks(
            shape, np.dtype(np.float32), codes, table, scales, block, nested, nested_table, nested_block, float(offset)
        )
    tables = [part for part in (table, made.nested_scales, made.nested_table) if part is not None]
    if any(part.dtype != np.float32 for part in tables):
        raise parts.wrong(f"the tables of {name!r} are not float32")
    return made


_METHODS: dict[str, Callable[[Parts], tuple[str, dict[str, Dequantised]]]] = {
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
}
