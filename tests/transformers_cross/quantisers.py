"""Quantise a plain folder with the library of each method, which also says what its codes mean.

A quantiser takes the folder and where to write, and returns the weights that the library itself makes of what it wrote.
Only `quantise` imports this module: it needs PyTorch and the libraries of ``requirements-quantisers.txt``.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
Quantiser = Callable[[Path, Path], Tensors]
_SPLIT = 16
"""Columns, or rows and columns, that share a scale where a method lets one choose: they divide all of the weights."""


def written_by(package: str) -> str:
    """Name and version of a library."""
    return f"{package} {importlib.metadata.version(package)}"


def _linear(tensors: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Names of the layers that are quantised."""
    yield from [name.removesuffix(".weight") for name in tensors if re.search(r"(_proj|\.w[123])\.weight$", name)]


def _write(plain: Path, out: Path, tensors: Tensors, settings: dict[str, Any]) -> None:
    out.mkdir(parents=True)
    config = json.loads((plain / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    kept = {name: value for name, value in load_file(plain / "model.safetensors").items() if name not in tensors}
    layers = {name.rpartition(".")[0] for name in tensors}
    replaced = {*(f"{layer}.weight" for layer in layers), *(name.removesuffix("_blocks") for name in tensors)}
    kept = {name: value for name, value in kept.items() if name not in replaced}
    save_file({name: value.contiguous() for name, value in {**kept, **tensors}.items()}, out / "model.safetensors")


def _loaded(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


def _weights(model: Any) -> Tensors:
    """The weights of quantised layers in a model that has them in floating point."""
    state = {name: value.detach() for name, value in model.state_dict().items()}
    return {f"{layer}.weight": state[f"{layer}.weight"] for layer in _linear(state)}


# ---- transformers ------------------------------------------------------------------------------------


def fp8(**settings: Any) -> Quantiser:
    """FP8 of transformers; its quantising asks for a GPU, the code that does it does not."""

    def quantise(plain: Path, out: Path) -> Tensors:
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

        config = transformers.FineGrainedFP8Config(**settings)
        operation = Fp8Quantize(type("Quantizer", (), {"quantization_config": config}))
        weights = load_file(plain / "model.safetensors")
        made: Tensors = {}
        fused = [name for name in weights if re.search(r"experts\.\w+_proj$", name)]
        for name in (*(f"{layer}.weight" for layer in _linear(weights)), *fused):
            made |= operation.convert({name: weights[name]})
        _write(plain, out, made, config.to_dict())
        if any("experts" in name for name in made):  # which transformers fuses when it loads them
            scales = {name: scale for name in made if (scale := f"{name}_scale_inv") in made}
            one = Fp8Dequantize(operation.hf_quantizer)
            return {
                name: one.convert({"weight": made[name], "weight_scale_inv": made[scale]})["weight"]
                for name, scale in scales.items()
            }
        again = transformers.FineGrainedFP8Config(**settings, dequantize=True)
        return _weights(_loaded(out, dtype=torch.float32, quantization_config=again))

    return quantise


def mxfp4(plain: Path, out: Path) -> Tensors:
    """Experts of GPT-OSS as random codes, since transformers quantises on GPUs alone; it says what they mean."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    made, meant = {}, {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if re.search(r"experts\.\w+_proj$", name):
            experts, into, wide = weight.shape
            blocks = torch.randint(0, 256, (experts, wide, into // 32, 16), dtype=torch.uint8)
            scales = torch.randint(110, 132, (experts, wide, into // 32), dtype=torch.uint8)
            made |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            meant[name] = convert_moe_packed_tensors(blocks, scales)
    _write(plain, out, made, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return meant


# ---- compressed-tensors ------------------------------------------------------------------------------


def compressed(*, activations: bool = False, **settings: Any) -> Quantiser:
    """compressed-tensors: a model is quantised with scales from its weights' extremes, compressed and saved."""

    def quantise(plain: Path, out: Path) -> Tensors:
        from compressed_tensors.compressors import ModelCompressor
        from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

        model = _loaded(plain, dtype=torch.bfloat16)
        group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, **settings}}
        if activations:
            kind = {name: settings[name] for name in ("num_bits", "type") if name in settings}
            group["input_activations"] = {"strategy": "token", "dynamic": True, "symmetric": True, **kind}
        config = QuantizationConfig(config_groups={"group_0": group}, ignore=["lm_head"])
        apply_quantization_config(model, config)
        for module in model.modules():
            if (scheme := getattr(module, "quantization_scheme", None)) is not None:
                _calibrate(module, scheme.weights)
        compressor = ModelCompressor.from_pretrained_model(model)
        compressor.compress_model(model)
        model.save_pretrained(out)
        compressor.update_config(out)
        return _weights(
            _loaded(
                out, dtype=torch.bfloat16, quantization_config=transformers.CompressedTensorsConfig(dequantize=True)
            )
        )

    return quantise


def _calibrate(module: Any, scheme: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = module.weight.detach()
    rows, columns = weight.shape
    height, width = {
        "tensor": (rows, columns), "channel": (1, columns), "block": scheme.block_structure,
    }.get(scheme.strategy, (1, scheme.group_size))  # fmt: skip
    blocks = weight.reshape(rows // height, height, columns // width, width)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    overall = None
    if hasattr(module, "weight_global_scale"):
        overall = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(overall)
    scale, zero = calculate_qparams(low, high, scheme, global_scale=overall)
    for name, value in (("weight_scale", scale), ("weight_zero_point", zero)):
        if hasattr(module, name):
            parameter = getattr(module, name)
            parameter.data = value.reshape(parameter.shape).to(parameter.dtype)


# ---- ModelOpt ----------------------------------------------------------------------------------------


def modelopt(algorithm: str) -> Quantiser:
    """ModelOpt's export, after it has seen a few tokens."""

    def quantise(plain: Path, out: Path) -> Tensors:
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export import export_hf_checkpoint

        model = _loaded(plain, dtype=torch.bfloat16)
        model = mtq.quantize(model, getattr(mtq, f"{algorithm}_CFG"), lambda model: model(torch.arange(12)[None]))
        export_hf_checkpoint(model, export_dir=out)
        stored = load_file(out / "model.safetensors")
        return {f"{layer}.weight": _of_modelopt(layer, stored) for layer in _linear(stored)}

    return quantise


def _of_modelopt(layer: str, stored: Tensors) -> torch.Tensor:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP8QTensor, NVFP4QTensor

    codes, scale = stored[f"{layer}.weight"], stored[f"{layer}.weight_scale"]
    found: torch.Tensor
    if codes.dtype == torch.uint8:
        shape = torch.Size((codes.shape[0], codes.shape[1] * 2))
        found = NVFP4QTensor(shape, torch.float32, codes).dequantize(
            dtype=torch.float32, scale=scale, double_scale=stored[f"{layer}.weight_scale_2"], block_sizes={-1: 16}
        )
    elif scale.dtype == torch.uint8:
        found = MXFP8QTensor(codes.shape, torch.float32, codes).dequantize(dtype=torch.float32, scale=scale)
    else:
        blocks = {-1: codes.shape[1]} if scale.ndim else {}
        found = FP8QTensor(codes.shape, torch.float32, codes).dequantize(
            dtype=torch.float32, scale=scale.reshape(-1, 1) if scale.ndim else scale, block_sizes=blocks
        )
    return found


# ---- bitsandbytes ------------------------------------------------------------------------------------


def bitsandbytes(**settings: Any) -> Quantiser:
    """bitsandbytes, by way of transformers."""

    def quantise(plain: Path, out: Path) -> Tensors:
        config = transformers.BitsAndBytesConfig(**settings)
        model = _loaded(plain, dtype=torch.float32, quantization_config=config, device_map="cpu")
        model.save_pretrained(out)
        again = _loaded(out, dtype=torch.float32, device_map="cpu")
        if not config.load_in_4bit:
            return _weights(again.dequantize(dtype=torch.float32))
        return {
            f"{layer}.weight": _of_four_bits(again.get_submodule(layer).weight) for layer in _linear(again.state_dict())
        }

    return quantise


def _of_four_bits(weight: Any) -> torch.Tensor:
    """By the code for all devices: that for CPUs (0.50.2) takes wrong scales for rows that are not whole blocks."""
    from bitsandbytes import functional
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    state = weight.quant_state
    scales = state.absmax
    if state.nested:
        scales = functional.dequantize_blockwise(scales, state.state2) + state.offset
    found: torch.Tensor = _dequantize_4bit_compute(
        weight.data.view(-1), scales, state.code, state.blocksize, state.shape, torch.float32
    )
    return found


# ---- GPTQ and AWQ ------------------------------------------------------------------------------------


def gptq(bits: int, *, sym: bool = True, desc_act: bool = False, form: str = "gptq") -> Quantiser:
    """gptqmodel: each layer packed by its class. Weights are only rounded: the codes come out as if GPTQ chose them."""

    def quantise(plain: Path, out: Path) -> Tensors:
        from gptqmodel.quantization import QuantizeConfig

        config = QuantizeConfig(
            bits=bits, group_size=_SPLIT, sym=sym, desc_act=desc_act, format=form, offload_to_disk=False
        )
        weights = load_file(plain / "model.safetensors")
        made, meant = {}, {}
        for layer in _linear(weights):
            codes, meant[f"{layer}.weight"] = _packed_by_gptqmodel(weights[f"{layer}.weight"], config, form)
            made |= {f"{layer}.{part}": value for part, value in codes.items()}
        _write(plain, out, made, json.loads(json.dumps(config.to_dict(), default=str)))
        return meant

    return quantise


def _packed_by_gptqmodel(weight: torch.Tensor, config: Any, form: str) -> tuple[Tensors, torch.Tensor]:
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    out, into = weight.shape
    # As gptqmodel: the zero is the middle, or where the group's least weight (0 at most) becomes 0.
    order = torch.randperm(into) if config.desc_act else torch.arange(into)
    g_idx = (order // _SPLIT).to(torch.int32)
    grouped = weight[:, torch.argsort(order)].reshape(out, -1, _SPLIT)
    largest, middle = 2**config.bits - 1, 2 ** (config.bits - 1)
    low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
    if config.sym:
        scales = (torch.maximum(-low, high) * 2 / largest).clamp(min=1e-5).half().float()
        zeros = torch.full_like(scales, middle)
    else:
        # Zeros of 0, of which the first version of the format takes 1, are in every third row.
        weight[::3].abs_()
        low[::3] = 0
        high = grouped.abs().amax(-1)
        scales = ((high - low) / largest).clamp(min=1e-5).half().float()
        zeros = torch.round(-low / scales).clamp(0, largest)
    layer = torch.nn.Linear(into, out, bias=False)
    layer.weight.data = weight
    packed = TorchLinear(
        bits=config.bits, group_size=_SPLIT, sym=config.sym, desc_act=config.desc_act, in_features=into,
        out_features=out, bias=False, pack_dtype=torch.int32, adapter=None, register_buffers=True,
    )  # fmt: skip
    packed.pack_original(layer, scales, zeros, g_idx)
    if form == "gptq":
        convert_gptq_v2_to_v1_format_module(packed, config)
    stored = {name: getattr(packed, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    if form == "gptq":
        convert_gptq_v1_to_v2_format_module(packed, config.bits, torch.int32)
    # In float32, where each product is exact.
    packed.scales = packed.scales.float()
    packed.post_init()
    return stored, packed.dequantize_weight().T.contiguous()


def awq(plain: Path, out: Path) -> Tensors:
    """autoawq: each layer rounded and packed by its classes, without the search for better scales."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.quantize.quantizer import AwqQuantizer
    from awq.utils.packing_utils import dequantize_gemm

    weights = load_file(plain / "model.safetensors")
    rounding = type("Rounding", (), {"group_size": _SPLIT, "w_bit": 4, "zero_point": True})()
    made, meant = {}, {}
    for name in _linear(weights):
        layer = torch.nn.Linear(*weights[f"{name}.weight"].T.shape, bias=False)
        rounded, scales, zeros = AwqQuantizer.pseudo_quantize_tensor(rounding, weights[f"{name}.weight"])
        layer.weight.data = rounded
        packed = WQLinear_GEMM.from_linear(layer, 4, _SPLIT, scales=scales.T.contiguous(), zeros=zeros.T.contiguous())
        made |= {f"{name}.{part}": getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
        # In float32, where each product is exact.
        meant[f"{name}.weight"] = dequantize_gemm(packed.qweight, packed.qzeros, packed.scales.float(), 4, _SPLIT).T
    settings = {"bits": 4, "group_size": _SPLIT, "zero_point": True, "version": "gemm", "quant_method": "awq"}
    _write(plain, out, made, settings)
    return meant


QUANTISERS: dict[str, tuple[str, Quantiser]] = {
    "fp8 blocks": ("transformers", fp8(weight_block_size=(_SPLIT, _SPLIT))),
    "fp8 blocks, scales of 8 bits": ("transformers", fp8(weight_block_size=(_SPLIT, _SPLIT), scale_fmt="ue8m0")),
    "fp8 tensor": ("transformers", fp8(weight_block_size=None)),
    "mxfp4 experts": ("transformers", mxfp4),
    "float8 channels": (
        "compressed-tensors",
        compressed(activations=True, num_bits=8, type="float", strategy="channel"),
    ),
    "float8 blocks": (
        "compressed-tensors",
        compressed(num_bits=8, type="float", strategy="block", block_structure=[_SPLIT, _SPLIT]),
    ),
    "int8 channels": ("compressed-tensors", compressed(activations=True, num_bits=8, strategy="channel")),
    "packed 8 asymmetric": ("compressed-tensors", compressed(num_bits=8, symmetric=False, strategy="channel")),
    "packed 4": ("compressed-tensors", compressed(strategy="group", group_size=_SPLIT)),
    "packed 4 asymmetric": ("compressed-tensors", compressed(symmetric=False, strategy="group", group_size=_SPLIT)),
    "packed 4 channels": ("compressed-tensors", compressed(strategy="channel")),
    "nvfp4": (
        "compressed-tensors",
        compressed(type="float", strategy="tensor_group", group_size=16, scale_dtype=torch.float8_e4m3fn),
    ),
    "mxfp4": (
        "compressed-tensors",
        compressed(type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
    ),
    "mxfp8": (
        "compressed-tensors",
        compressed(num_bits=8, type="float", strategy="group", group_size=32, scale_dtype=torch.uint8),
    ),
    "modelopt fp8": ("nvidia-modelopt", modelopt("FP8_DEFAULT")),
    "modelopt fp8 channels": ("nvidia-modelopt", modelopt("FP8_PER_CHANNEL_PER_TOKEN")),
    "modelopt mxfp8": ("nvidia-modelopt", modelopt("MXFP8_DEFAULT")),
    "modelopt nvfp4": ("nvidia-modelopt", modelopt("NVFP4_DEFAULT")),
    "gptq 4": ("gptqmodel", gptq(4)),
    "gptq 4 asymmetric": ("gptqmodel", gptq(4, sym=False, desc_act=True)),
    "gptq 3 asymmetric": ("gptqmodel", gptq(3, sym=False)),
    "gptq 2 asymmetric": ("gptqmodel", gptq(2, sym=False)),
    "gptq 8, second version": ("gptqmodel", gptq(8, sym=False, form="gptq_v2")),
    "awq": ("autoawq", awq),
    "nf4 nested": (
        "bitsandbytes",
        bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True),
    ),
    "fp4": ("bitsandbytes", bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4")),
    "bitsandbytes int8": ("bitsandbytes", bitsandbytes(load_in_8bit=True)),
}  # fmt: skip
"""Method → the package that writes its folders, and how."""
