"""compressed-tensors: the groups of its configuration say how the weights of their layers are stored."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders.quantised.float4 import Float4Rows
from shardload.loaders.quantised.fp8 import with_scales
from shardload.loaders.quantised.parts import Parts, Weights, exponents, order_of_groups
from shardload.loaders.quantised.rows import BFLOAT16, Dequantised, PackedRows, dtype_of_weights, read
from shardload.manifest import Tensor
from shardload.units import plural

_COMPRESSED_SETTINGS = {
    "quant_method", "format", "config_groups", "ignore", "kv_cache_scheme", "quantization_status",
    "global_compression_ratio", "version", "sparsity_config",
}  # fmt: skip
_FORMATS = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
    "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision",
)  # fmt: skip
_GROUP_SETTINGS = {"targets", "weights", "input_activations", "output_activations", "format"}
_WEIGHTS_SETTINGS = {
    "num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "dynamic", "actorder", "scale_dtype",
    "zp_dtype", "observer", "observer_kwargs",
}  # fmt: skip


def compressed_tensors(parts: Parts) -> tuple[str, Weights]:
    """Return the format's name and the weights of a compressed-tensors checkpoint."""
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
    weights: Weights = {}
    for stem in parts.ending_in(".weight_packed"):
        weights[f"{stem}.weight"] = _fitting(parts, stem, schemes, _packed)
    for stem in parts.ending_in(".weight_scale"):
        if f"{stem}.weight" not in weights:
            if "pack" in form and f"{stem}.weight" not in parts.tensors:
                raise parts.lacking(f"{stem}.weight_packed")
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
    problems: list[SourceError | UnsupportedError] = []
    for scheme in schemes:
        try:
            weight = make(parts, stem, scheme)
        except (SourceError, UnsupportedError) as error:
            problems.append(error)
        else:
            made.setdefault(weight.encoding, weight)
    if not made and (lacked := next((error for error in problems if error in parts.lacked), None)):
        raise lacked  # a group that fits, but for this tensor
    if len(made) != 1:
        raise parts.wrong(f"'{stem}.weight' fits {'several' if made else 'none'} of the config_groups")
    return next(iter(made.values()))


def _scaled_by_settings(parts: Parts, stem: str, settings: Mapping[str, Any]) -> Dequantised:
    strategy = settings.get("strategy")
    if strategy not in ("tensor", "channel", "block", "group", None):
        raise parts.unknown("strategy", strategy)
    block = settings.get("block_structure", ()) if strategy == "block" else None
    if strategy == "group":
        block = [1, settings.get("group_size")]
    stored = parts.tensors[f"{stem}.weight_scale"]
    dtype = BFLOAT16 if stored.dtype == np.uint8 else None  # MXFP8
    zeros = _zeros_of_codes(parts, stem, settings)
    made = with_scales(parts, f"{stem}.weight", f"{stem}.weight_scale", block, dtype=dtype, zeros=zeros)
    if _is_reordered(settings):
        index, size = f"{stem}.weight_g_idx", settings["group_size"]  # it fits the scales
        if order_of_groups(parts, index, made.shape[-1], size, needed=True) is not None:
            raise parts.unknown("actorder", settings["actorder"])
    return made


def _zeros_of_codes(parts: Parts, stem: str, settings: Mapping[str, Any]) -> Tensor | None:
    """Return the zero points of codes that are not packed; of symmetric weights, all may be 0."""
    name = f"{stem}.weight_zero_point"
    if not settings.get("symmetric", True):
        return parts.need(name, None, kinds="iu")
    if parts.get(name) is not None and read(parts.need(name, None, kinds="iuf")).any():
        raise _contradiction(parts, name)
    return None


def _contradiction(parts: Parts, name: str) -> SourceError:
    weight = name.removesuffix("_zero_point")
    return parts.wrong(f"its config_groups say that {weight!r} is symmetric, but it has {name!r}")


def _is_reordered(settings: Mapping[str, Any]) -> bool:
    """Whether groups are in the order of activations, which only a stored index tells."""
    return settings.get("strategy") == "group" and settings.get("actorder") in ("group", "dynamic", True)


def _packed(parts: Parts, stem: str, settings: Mapping[str, Any]) -> Dequantised:
    if settings.get("type", "int") != "int":
        return _float4(parts, stem, settings)
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
    elif f"{stem}.weight_zero_point" in parts.tensors:
        raise _contradiction(parts, f"{stem}.weight_zero_point")
    groups = order_of_groups(parts, f"{stem}.weight_g_idx", columns, size, needed=_is_reordered(settings))
    return PackedRows((rows, columns), dtype_of_weights(scales), codes, scales, bits, size, zeros, groups)


def _float4(parts: Parts, stem: str, settings: Mapping[str, Any]) -> Float4Rows:
    """Make a weight of NVFP4 (groups of 16 columns, and a scale for all) or MXFP4 (groups of 32)."""
    size = settings.get("group_size")
    if settings.get("num_bits") != 4:
        raise parts.unknown("num_bits", settings.get("num_bits"))
    if size not in (16, 32) or not settings.get("symmetric", True):
        raise parts.unknown("group_size", size)
    codes = parts.need(f"{stem}.weight_packed", None, kinds="u")
    if len(codes.shape) != 2 or codes.dtype != np.uint8 or codes.shape[1] * 2 % size:
        raise parts.wrong(
            f"'{stem}.weight_packed' is {codes.dtype} of {codes.shape}, expected uint8 for groups of {size}"
        )
    rows, columns = codes.shape[0], codes.shape[1] * 2
    scales = parts.need(f"{stem}.weight_scale", (rows, columns // size), kinds="f" if size == 16 else "u")
    if size == 32:
        return Float4Rows((rows, columns), BFLOAT16, codes, exponents(parts, scales), size)
    divisor = parts.need_number(f"{stem}.weight_global_scale")
    return Float4Rows((rows, columns), BFLOAT16, codes, scales, size, divisor=divisor)


def _stored_shape(parts: Parts, name: str) -> tuple[int, int]:
    """Return the two numbers that a tensor has: the shape of a weight, which packing does not keep."""
    stored = parts.need(name, (2,), kinds="i")
    rows, columns = (int(n) for n in read(stored))
    if not (0 < rows < 1 << 40 and 0 < columns < 1 << 40):
        raise parts.wrong(f"{name!r} says {(rows, columns)}")
    return rows, columns
