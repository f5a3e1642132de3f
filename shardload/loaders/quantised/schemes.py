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
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
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


_FP8_SETTINGS = {
    "quant_method", "fmt", "activation_scheme", "weight_block_size", "modules_to_not_convert", "ignored_layers",
    "modules_to_convert", "dequantize", "scale_fmt", "expert_dtype", "ignore", "kv_cache_scheme",
    "kv_cache_quant_method",
}  # fmt: skip
_COMPRESSED_SETTINGS = {
    "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status",
    "global_compression_ratio", "version", "sparsity_config",
}  # fmt: skip
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized", "mixed-precision",
)  # fmt: skip
_GROUP_SETTINGS = {"targets", "weights", "input_activations", "output_activations", "format"}
_WEIGHTS_SETTINGS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip
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
_BITSANDBYTES_SETTINGS = {
    "quant_method", "_load_in_4bit", "_load_in_8bit", "load_in_4bit", "load_in_8bit", "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage", "bnb_4bit_quant_type", "bnb_4bit_use_double_quant", "llm_int8_threshold",
    "llm_int8_skip_modules", "llm_int8_enable_fp32_cpu_offload", "llm_int8_has_fp16_weight",
}  # fmt: skip
_BLOCKS = (32, 64, 128, 256, 512, 1024, 2048, 4096)
"""How many weights can share a scale in bitsandbytes."""


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """The quantised weights of a checkpoint."""

    weights: Mapping[str, Dequantised]
    """Name of each weight → what reads it."""
    used: frozenset[str]
    """Names of the stored tensors that they are made of, and of scales that are left out."""
    notes: tuple[str, ...]


class Parts:
    """The stored tensors of a checkpoint, of which weights are made, and which of them are used so far."""

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
            f"{self.manifest.source} has quantised weights that do not fit together: {what}. Download it again, or "
            "load the unquantised checkpoint of this model"
        )

    def unknown(self, name: str, value: Any) -> UnsupportedError:
        """Return the error for a setting that is not known."""
        return UnsupportedError(
            f"Cannot load {self.manifest.source}: {FIELD} in config.json sets {self.settings.get('quant_method')} "
            f"quantisation with {name}={value!r:.100}, which is not supported. Load the unquantised checkpoint of this "
            "model, or a GGUF file of it"
        )

    def check_known(self, settings: Mapping[str, Any], names: Collection[str], *, within: str = "") -> None:
        """Raise if a setting has another name than these, and a value that says something."""
        for name, value in settings.items():
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
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        return None
    endings, make = _METHODS[method]
    if not any(name.endswith(endings) for name in manifest.tensors):
        return None  # plain tensors, whatever the configuration says
    parts = Parts(manifest, settings)
    name, weights = make(parts)
    for weight in weights:
        stem = weight.removesuffix(".weight")
        parts.used.update(each for part in _ACTIVATIONS if (each := f"{stem}.{part}") in manifest.tensors)
    cache = [each for each in manifest.tensors if _CACHE.search(each)]
    parts.used.update(cache)
    for other in manifest.tensors.keys() - parts.used:
        if other in weights:
            raise parts.wrong(f"it has {other!r} twice, as codes and as a plain tensor")
        if other.endswith(".weight") and manifest.tensors[other].dtype.kind in "iu":
            raise parts.wrong(f"{other!r} has codes ({manifest.tensors[other].dtype}) without scales")
    notes = [f"{plural(len(weights), 'weight')} dequantised from {name}"]
    if cache:
        notes.append(f"left out {plural(len(cache), 'scale')} of a quantised KV cache")
    return QuantisedWeights(weights, frozenset(parts.used), tuple(notes))


# ---- FP8 ---------------------------------------------------------------------------------------------


def _fp8(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    """Fine-grained FP8 of DeepSeek and ``transformers``, and FP8 with one scale for a tensor."""
    parts.check_known(parts.settings, _FP8_SETTINGS)
    for name, supported in (("fmt", ("e4m3", "float8_e4m3fn")), ("expert_dtype", ("fp8",))):
        if (value := parts.settings.get(name, supported[0])) not in supported:
            raise parts.unknown(name, value)
    block = parts.settings.get("weight_block_size")
    weights: dict[str, Dequantised] = {}
    for ending in (".weight_scale_inv", ".weight_scale"):
        for stem in parts.ending_in(ending):
            weights[f"{stem}.weight"] = _scaled(parts, stem, ending, block, dtype=np.dtype(np.float32))
    return "FP8" + (f" (blocks of {block[0]}x{block[1]})" if block else ""), weights


def _scaled(parts: Parts, stem: str, ending: str, block: Any, *, dtype: np.dtype[Any] | None) -> Scaled:
    codes = parts.need(f"{stem}.weight", None, kinds="if")
    if codes.dtype.itemsize != 1 or len(codes.shape) != 2:
        raise parts.wrong(f"'{stem}.weight' is {codes.dtype} of {codes.shape}, expected a matrix of 8-bit codes")
    scales = parts.need(f"{stem}{ending}", None, kinds="f")
    rows, columns = codes.shape
    if block is None:
        size, allowed = (1, columns), {(), (1,), (1, 1), (rows,), (rows, 1)}
    else:
        size = _block_size(parts, block)
        allowed = {(-(-rows // size[0]), -(-columns // size[1]))}
    if scales.shape not in allowed:
        expected = " or ".join(map(str, sorted(allowed)))
        raise parts.wrong(
            f"'{stem}{ending}' has the shape {scales.shape} for codes of {codes.shape}, expected {expected}"
        )
    zeros = parts.get(f"{stem}.weight_zero_point")
    if zeros is not None and (zeros.shape != scales.shape or zeros.dtype.kind not in "iu"):
        raise parts.wrong(
            f"'{stem}.weight_zero_point' is {zeros.dtype} of {zeros.shape}, expected integers of {scales.shape}"
        )
    return Scaled(codes.shape, dtype or dtype_of_weights(scales), codes, scales, size, zeros)


def _block_size(parts: Parts, block: Any) -> tuple[int, int]:
    if not isinstance(block, list) or len(block) != 2 or not all(isinstance(n, int) and 0 < n < 1 << 31 for n in block):
        raise parts.unknown("weight_block_size", block)
    return block[0], block[1]


# ---- compressed-tensors ------------------------------------------------------------------------------


def _compressed_tensors(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    parts.check_known(parts.settings, _COMPRESSED_SETTINGS)
    sparse = parts.settings.get("sparsity_config") or {}
    if not isinstance(sparse, Mapping) or sparse.get("format", "dense") not in (None, "dense"):
        raise parts.unknown("sparsity_config", sparse)
    form, groups = parts.settings.get("format"), parts.settings.get("config_groups")
    if form not in _FORMATS:
        raise parts.unknown("format", form)
    if not isinstance(groups, Mapping) or not groups:
        raise parts.unknown("config_groups", groups)
    schemes = [_settings_of_group(parts, f"config_groups[{name!r}]", group) for name, group in groups.items()]
    weights: dict[str, Dequantised] = {}
    for stem in parts.ending_in(".weight_packed"):
        weights[f"{stem}.weight"] = _fitting(parts, stem, schemes, _packed)
    for stem in parts.ending_in(".weight_scale"):
        if f"{stem}.weight" not in weights:
            weights[f"{stem}.weight"] = _fitting(parts, stem, schemes, _scaled_by_settings)
    return f"compressed-tensors ({form})", weights


def _settings_of_group(parts: Parts, name: str, group: Any) -> Mapping[str, Any]:
    """Return the settings for the weights of one of the ``config_groups``."""
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise parts.unknown(name, group)
    parts.check_known(group, _GROUP_SETTINGS, within=f"{name}.")
    parts.check_known(weights, _WEIGHTS_SETTINGS, within=f"{name}.weights.")
    if weights.get("dynamic"):
        raise parts.unknown(f"{name}.weights.dynamic", weights["dynamic"])
    if group.get("format") not in (None, *_FORMATS):
        raise parts.unknown(f"{name}.format", group["format"])
    return weights


def _fitting(
    parts: Parts,
    stem: str,
    schemes: Sequence[Mapping[str, Any]],
    make: Callable[[Parts, str, Mapping[str, Any]], Dequantised],
) -> Dequantised:
    """Make a weight by the settings of its group. Of several groups, it is the one that the tensors' shapes fit.

    A group also names its layers, by patterns and by classes of PyTorch, which a checkpoint does not tell.
    """
    if len(schemes) == 1:
        return make(parts, stem, schemes[0])
    made: dict[Hashable, Dequantised] = {}
    for scheme in schemes:
        with suppress(SourceError, UnsupportedError):
            weight = make(parts, stem, scheme)
            made.setdefault(weight.encoding, weight)
    if len(made) != 1:
        raise parts.wrong(f"'{stem}.weight' fits {'several' if made else 'none'} of the config_groups")
    return next(iter(made.values()))


def _scaled_by_settings(parts: Parts, stem: str, settings: Mapping[str, Any]) -> Scaled:
    strategy = settings.get("strategy")
    if strategy not in ("tensor", "channel", "block", None):
        raise parts.unknown("strategy", strategy)
    block = settings.get("block_structure", ()) if strategy == "block" else None
    return _scaled(parts, stem, ".weight_scale", block, dtype=None)


def _packed(parts: Parts, stem: str, settings: Mapping[str, Any]) -> Dequantised:
    if settings.get("type", "int") != "int":
        return _nvfp4(parts, stem, settings)
    bits, strategy = settings.get("num_bits"), settings.get("strategy")
    if not isinstance(bits, int) or not 1 <= bits <= 8:
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
    size = settings.get("group_size") if strategy == "group" else columns
    if not isinstance(size, int) or size < 1:
        raise parts.unknown("group_size", size)
    if columns % size:
        raise parts.wrong(f"'{stem}.weight' has {plural(columns, 'column')}, which groups of {size} do not divide")
    n_groups = columns // size
    scales = parts.need(f"{stem}.weight_scale", (1,) if strategy == "tensor" else (rows, n_groups), kinds="f")
    zeros = None
    if not settings.get("symmetric", True):
        zeros = parts.need(f"{stem}.weight_zero_point", (-(-rows * bits // 32), n_groups), kinds="i")
    groups = _groups(parts, f"{stem}.weight_g_idx", columns, size)
    return PackedRows((rows, columns), dtype_of_weights(scales), codes, scales, bits, size, zeros, groups)


def _nvfp4(parts: Parts, stem: str, settings: Mapping[str, Any]) -> Float4Rows:
    size = settings.get("group_size")
    if settings.get("num_bits") != 4 or size != 16 or not settings.get("symmetric", True):
        raise parts.unknown("group_size", size)
    codes = parts.need(f"{stem}.weight_packed", None, kinds="u")
    if len(codes.shape) != 2 or codes.dtype != np.uint8 or codes.shape[1] % 8:
        raise parts.wrong(f"'{stem}.weight_packed' is {codes.dtype} of {codes.shape}, expected uint8 for groups of 16")
    rows, columns = codes.shape[0], codes.shape[1] * 2
    scales = parts.need(f"{stem}.weight_scale", (rows, columns // 16), kinds="f")
    divisor = parts.need(f"{stem}.weight_global_scale", None, kinds="f")
    if divisor.size != 1 or divisor.dtype != np.float32:
        raise parts.wrong(f"'{stem}.weight_global_scale' is {divisor.dtype} of {divisor.shape}, expected one float32")
    return Float4Rows((rows, columns), BFLOAT16, codes, scales, divisor)


def _stored_shape(parts: Parts, name: str) -> tuple[int, int]:
    """Return the two numbers that a tensor has: the shape of a weight, which packing does not keep."""
    stored = parts.need(name, (2,), kinds="i")
    rows, columns = (int(n) for n in read(stored))
    if not (0 < rows < 1 << 40 and 0 < columns < 1 << 40):
        raise parts.wrong(f"{name!r} says {(rows, columns)}")
    return rows, columns


def _groups(parts: Parts, name: str, columns: int, size: int) -> Tensor | None:
    """Return the tensor with the group of each column, if there is one and the groups are not in order."""
    if name not in parts.tensors:
        return None
    stored, n_groups = parts.need(name, (columns,), kinds="i"), -(-columns // size)
    found = read(stored)
    if found.size and not 0 <= found.min() <= found.max() < n_groups:
        raise parts.wrong(f"{name!r} names groups {found.min()} to {found.max()}, expected 0 to {n_groups - 1}")
    return None if np.array_equal(found, np.arange(columns) // size) else stored


# ---- GPTQ and AWQ ------------------------------------------------------------------------------------


def _gptq(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    parts.check_known(parts.settings, _GPTQ_SETTINGS)
    form = parts.settings.get("checkpoint_format") or parts.settings.get("format") or "gptq"
    if form not in ("gptq", "gptq_v2"):
        raise parts.unknown("checkpoint_format", form)
    if (word := parts.settings.get("pack_dtype", "int32")) != "int32":
        raise parts.unknown("pack_dtype", word)
    bits = _bits(parts, (2, 3, 4, 8))
    made: dict[str, Dequantised] = {
        f"{stem}.weight": _columns(parts, stem, bits, added=int(form == "gptq")) for stem in parts.ending_in(".qweight")
    }
    return f"GPTQ ({plural(bits, 'bit')})", made


def _awq(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    parts.check_known(parts.settings, _GPTQ_SETTINGS)
    form = str(parts.settings.get("version") or parts.settings.get("format") or "gemm").lower()
    if form != "gemm":
        raise parts.unknown("version", form)
    bits = _bits(parts, (4,))
    made: dict[str, Dequantised] = {
        f"{stem}.weight": _columns(parts, stem, bits, is_awq=True) for stem in parts.ending_in(".qweight")
    }
    return f"AWQ ({plural(bits, 'bit')})", made


def _bits(parts: Parts, supported: Collection[int]) -> int:
    found = parts.settings.get("bits", parts.settings.get("w_bit"))
    if not isinstance(found, int) or found not in supported:
        raise parts.unknown("bits", found)
    return found


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
    groups = None if is_awq else _groups(parts, f"{stem}.g_idx", columns, size)
    return PackedColumns((rows, columns), np.dtype(np.float32), codes, scales, zeros, bits, size, is_awq, groups, added)


# ---- bitsandbytes ------------------------------------------------------------------------------------


def _bitsandbytes(parts: Parts) -> tuple[str, dict[str, Dequantised]]:
    parts.check_known(parts.settings, _BITSANDBYTES_SETTINGS)
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
            codes.shape, np.dtype(np.float32), codes, scales, (1, codes.shape[1]), factor=7.874015718698502e-3
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
        nested_block, offset = said.get("nested_blocksize", 0), float(said.get("nested_offset", 0.0))
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
            shape, np.dtype(np.float32), codes, table, scales, block, nested, nested_table, nested_block, offset
        )
    tables = [part for part in (table, made.nested_scales, made.nested_table) if part is not None]
    if any(part.dtype != np.float32 for part in tables):
        raise parts.wrong(f"the tables of {name!r} are not float32")
    return made


_METHODS: dict[str, tuple[tuple[str, ...], Callable[[Parts], tuple[str, dict[str, Dequantised]]]]] = {
    "fp8": ((".weight_scale_inv", ".weight_scale"), _fp8),
    "compressed-tensors": ((".weight_packed", ".weight_scale"), _compressed_tensors),
    "gptq": ((".qweight",), _gptq),
    "awq": ((".qweight",), _awq),
    "bitsandbytes": ((".SCB", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"), _bitsandbytes),
}
"""Method → endings of names that only its tensors have, and a function that makes its weights."""
