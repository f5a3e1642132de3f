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

from shardload.loaders.quantised.bitsandbytes import bitsandbytes
from shardload.loaders.quantised.compressed_tensors import compressed_tensors
from shardload.loaders.quantised.fp8 import fp8
from shardload.loaders.quantised.gptq_awq import awq, gptq
from shardload.loaders.quantised.modelopt import modelopt
from shardload.loaders.quantised.mxfp4 import mxfp4
from shardload.loaders.quantised.parts import Parts, Weights
from shardload.loaders.quantised.rows import Dequantised
from shardload.manifest import Manifest
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
    if not any(name.endswith(endings) for name in manifest.tensors):
        return None  # plain tensors, although the configuration says otherwise
    parts = Parts(manifest, settings)
    name, weights = make(parts)
    for weight in weights:
        stem = weight.removesuffix(".weight")
        each = {f"{stem}.{part}" for part in _ACTIVATIONS} | {f"{stem}_activation_scale"}
        parts.used.update(each & manifest.tensors.keys())
    cache = [each for each in manifest.tensors if _CACHE.search(each)]
    parts.used.update(cache)
    for other in manifest.tensors.keys() - parts.used:
        if other in weights:
            raise parts.wrong(f"it has {other!r} twice, as codes and as a plain tensor")
        if other.endswith(".weight") and manifest.tensors[other].dtype.kind in "iu":
            raise parts.wrong(f"{other!r} has codes ({manifest.tensors[other].dtype}) without scales")
    notes: list[str] = [DequantisedNote(f"{plural(len(weights), 'weight')} dequantised from {name}")]
    if cache:
        notes.append(f"left out {plural(len(cache), 'scale')} of a quantised KV cache")
    return QuantisedWeights(weights, frozenset(parts.used), tuple(notes))


_METHODS: dict[str, tuple[tuple[str, ...], Callable[[Parts], tuple[str, Weights]]]] = {
    "fp8": (("_scale_inv", ".weight_scale"), fp8),
    "mxfp4": (("_blocks",), mxfp4),
    "modelopt": ((".weight_scale",), modelopt),
    "compressed-tensors": ((".weight_packed", ".weight_scale"), compressed_tensors),
    "gptq": ((".qweight",), gptq),
    "awq": ((".qweight",), awq),
    "bitsandbytes": ((".SCB", ".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4"), bitsandbytes),
}
"""Method → endings of names that only its tensors have, and a function that makes its weights."""
