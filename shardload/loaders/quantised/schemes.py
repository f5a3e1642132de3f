"""Find the quantised weights of a Hugging Face folder: which stored tensors make up a weight, and how.

The configuration names the method and its settings, the tensors' names tell the weights, and shapes have to agree::

    fp8, compressed-tensors   x.weight, x.weight_scale or x.weight_scale_inv         one code for each weight
    compressed-tensors        x.weight_packed, x.weight_scale, …                     several in a word, or NVFP4
    modelopt                  x.weight, x.weight_scale, x.weight_scale_2             float8, or NVFP4
    mxfp4                     x_blocks, x_scales                                     experts of GPT-OSS
    gptq, awq                 x.qweight, x.qzeros, x.scales, x.g_idx                 several in a word, transposed
    bitsandbytes              x.weight, x.weight.absmax, … or x.weight, x.SCB        two in a byte, or int8

A setting that is not known here is refused by its name: it may change what the codes mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardload.errors import SourceError
from shardload.loaders.quantised.bitsandbytes import bitsandbytes
from shardload.loaders.quantised.compressed_tensors import compressed_tensors
from shardload.loaders.quantised.fp8 import fp8
from shardload.loaders.quantised.gptq_awq import awq, gptq
from shardload.loaders.quantised.modelopt import modelopt
from shardload.loaders.quantised.mxfp4 import mxfp4
from shardload.loaders.quantised.parts import Parts, Weights
from shardload.loaders.quantised.rows import Dequantised
from shardload.manifest import Manifest, Tensor
from shardload.units import plural

_ACTIVATIONS = ("input_scale", "input_zero_point", "input_global_scale", "activation_scale", "output_scale")
"""Tensors of a quantised layer that quantise activations, not weights."""
_CACHE = re.compile(r"\.(k_scale|v_scale|q_scale|prob_scale|[kv]_zero_point|[kv]_proj\.output_scale)$")
"""Names of scales of a quantised KV cache."""


class DequantisedNote(str):
    """The note on what is dequantised, which is not true of weights whose codes are kept."""


@dataclass(frozen=True, slots=True)
class QuantisedWeights:
    """The quantised weights of a checkpoint."""

    weights: Mapping[str, Dequantised]
    """Name of each weight → what reads it."""
    used: frozenset[str]
    """Names of the stored tensors that they are made of, and of scales that are left out."""
    notes: tuple[str, ...]


def method_name(manifest: Manifest, settings: Mapping[str, Any]) -> str | None:
    """Return what the settings of a checkpoint without tensors name (``GPTQ (4 bits)``); ``None`` if not known.

    Raises:
        UnsupportedError: When a setting is not known.
    """
    method = settings.get("quant_method")
    if not isinstance(method, str) or method not in _METHODS:
        return None
    return _METHODS[method][1](Parts(manifest, settings))[0]


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
    parts = Parts(manifest, settings)
    if not any(name.endswith(endings) for name in manifest.tensors):
        # Plain tensors, although the configuration says otherwise; float8 may be plain ones that were cast.
        if codes := [name for name in manifest.tensors if _are_codes(manifest.tensors[name], with_float8=False)]:
            raise _without_scales(parts, method, codes[0])
        return None
    name, weights = make(parts)
    for weight in weights:
        stem = weight.removesuffix(".weight")
        each = {f"{stem}.{part}" for part in _ACTIVATIONS} | {f"{stem}_activation_scale"}
        parts.used.update(each & manifest.tensors.keys())
    cache = [each for each in manifest.tensors if _CACHE.search(each)]
    parts.used.update(cache)
    for other in [name for name in manifest.tensors if name not in parts.used]:
        if other in weights:
            raise parts.wrong(f"it has {other!r} twice, as codes and as a plain tensor")
        if _are_codes(manifest.tensors[other], with_float8=True):
            raise _without_scales(parts, method, other)
    notes: list[str] = [DequantisedNote(f"{plural(len(weights), 'weight')} dequantised from {name}")]
    if cache:
        notes.append(f"left out {plural(len(cache), 'scale')} of a quantised KV cache")
    return QuantisedWeights(weights, frozenset(parts.used), tuple(notes))


def _are_codes(tensor: Tensor, *, with_float8: bool) -> bool:
    """Whether a tensor that no weight is made of looks like codes; other integers are masks and counters."""
    if tensor.dtype.kind in "iu":
        return tensor.name.endswith(".weight")
    is_float8 = tensor.dtype.name.startswith("float8") and len(tensor.shape) > 1
    return with_float8 and is_float8 and not re.search(r"(scale|zero_point)[^.]*$", tensor.name)


def _without_scales(parts: Parts, method: str, name: str) -> SourceError:
    """Return the error for codes without what their method names scales."""
    dtype = parts.tensors[name].dtype
    match method, dtype.kind if dtype.kind in "iu" else "f":
        case "fp8", "f":
            is_inverse = any(used.endswith("_scale_inv") for used in parts.used)
            return parts.lacking(f"{name}_scale_inv" if is_inverse else f"{name}_scale")
        case (("compressed-tensors" | "modelopt"), _):
            return parts.lacking(f"{name}_scale")
        case "bitsandbytes", "i":
            return parts.lacking(f"{name.removesuffix('.weight')}.SCB")
        case "bitsandbytes", "u":
            kind = parts.settings.get("bnb_4bit_quant_type")
            return parts.lacking(f"{name}.quant_state.bitsandbytes__{kind if kind == 'fp4' else 'nf4'}")
    return parts.wrong(f"{name!r} has codes ({dtype}) without scales")


_METHODS: dict[str, tuple[tuple[str, ...], Callable[[Parts], tuple[str, Weights]]]] = {
    "fp8": (("_scale_inv", ".weight_scale"), fp8),
    "mxfp4": (("_blocks", "_scales"), mxfp4),
    "modelopt": ((".weight_scale",), modelopt),
    "compressed-tensors": ((".weight_packed", ".weight_scale"), compressed_tensors),
    "gptq": ((".qweight", ".qzeros"), gptq),
    "awq": ((".qweight", ".qzeros"), awq),
    "bitsandbytes": ((".SCB", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"), bitsandbytes),
}
"""Method → endings of names that only its tensors have, and a function that makes its weights."""
