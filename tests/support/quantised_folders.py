"""Hugging Face folders of small models, quantised in each method by plain NumPy, and what their weights are."""

import json

import ml_dtypes
import numpy as np
import small_folders
from safetensors.numpy import save_file

RNG = np.random.default_rng(7)
E4M3, BF16 = ml_dtypes.float8_e4m3fn, ml_dtypes.bfloat16
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
        *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
        *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ],
    np.float32,
)
AWQ_COLUMN_OF_CODE = (0, 2, 4, 6, 1, 3, 5, 7)


def held(file):
    """The tensors of a safetensors file; the library reads no float8."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, found = json.loads(content[8 : 8 + length]), {}
    header.pop("__metadata__", None)
    for name, entry in header.items():
        dtype = {"BF16": BF16, "F8_E4M3": E4M3}.get(entry["dtype"])
        dtype = dtype or np.dtype(f"{entry['dtype'][0].lower()}{int(entry['dtype'][1:]) // 8}")
        start, stop = (8 + length + at for at in entry["data_offsets"])
        found[name] = np.frombuffer(content[start:stop], dtype).reshape(entry["shape"])
    return found


def words(codes, bits):
    """Codes packed along the last dim, lowest bit first, into int32."""
    as_bits = (codes[..., None].astype(np.uint64) >> np.arange(bits, dtype=np.uint64)).astype(np.uint8) & 1
    flat = as_bits.reshape(*codes.shape[:-1], -1)
    missing = -flat.shape[-1] % 32
    flat = np.concatenate([flat, np.zeros((*flat.shape[:-1], missing), np.uint8)], -1)
    return np.packbits(flat, axis=-1, bitorder="little").view("<i4")


def of_blocks(scales, shape, block):
    """Each element's scale."""
    index = np.ix_(*(np.arange(n) // b for n, b in zip(shape, block, strict=True)))
    return scales[index]


def fp8(name, shape, *, block=None):
    codes = RNG.normal(size=shape).astype(E4M3)
    sizes = block or (1, shape[1])
    scales = RNG.uniform(0.5, 2, [-(-n // b) for n, b in zip(shape, sizes, strict=True)]).astype(np.float32)
    stored = {f"{name}.weight": codes, f"{name}.weight_scale{'_inv' if block else ''}": scales}
    return stored, codes.astype(np.float32) * of_blocks(scales, shape, sizes)


def fp8_of_tensor(name, shape):
    codes, scale = RNG.normal(size=shape).astype(E4M3), np.float32(0.37)
    stored = {f"{name}.weight": codes, f"{name}.weight_scale": np.array(scale), f"{name}.input_scale": np.ones(1, "f4")}
    return stored, codes.astype(np.float32) * scale


def channels(name, shape, *, dtype, symmetric=True):
    codes = RNG.integers(-128, 128, shape).astype(np.int8)
    scales = RNG.uniform(0.01, 0.02, (shape[0], 1)).astype(dtype)
    stored, zeros = {f"{name}.weight": codes, f"{name}.weight_scale": scales}, np.zeros((shape[0], 1), np.int8)
    if not symmetric:
        zeros = RNG.integers(-20, 20, (shape[0], 1)).astype(np.int8)
        stored[f"{name}.weight_zero_point"] = zeros
    return stored, (codes.astype(dtype) - zeros.astype(dtype)) * scales


def packed(name, shape, *, bits=4, size=None, symmetric=True, order=False):
    rows, columns = shape
    codes = RNG.integers(0, 1 << bits, shape)
    n_groups = columns // size if size else 1
    scales = RNG.uniform(0.01, 0.02, (rows, n_groups)).astype(BF16)
    groups = np.arange(columns) // (size or columns)
    stored = {
        f"{name}.weight_packed": words(codes, bits),
        f"{name}.weight_scale": scales,
        f"{name}.weight_shape": np.array(shape, np.int64),
    }
    if order:
        groups = RNG.permutation(groups)
        stored[f"{name}.weight_g_idx"] = groups.astype(np.int32)
    zeros = np.full((rows, n_groups), 1 << (bits - 1))
    if not symmetric:
        zeros = RNG.integers(0, 1 << bits, (rows, n_groups))
        stored[f"{name}.weight_zero_point"] = np.ascontiguousarray(words(zeros.T, bits).T)
    return stored, (codes - zeros[:, groups]).astype(BF16) * scales[:, groups]


def nvfp4(name, shape):
    rows, columns = shape
    codes = RNG.integers(0, 16, shape).astype(np.uint8)
    scales = RNG.uniform(10, 400, (rows, columns // 16)).astype(E4M3)
    divisor = np.array([777.0], np.float32)
    stored = {
        f"{name}.weight_packed": codes[:, ::2] | codes[:, 1::2] << 4,
        f"{name}.weight_scale": scales,
        f"{name}.weight_global_scale": divisor,
        f"{name}.input_global_scale": divisor,
    }
    each = np.repeat(scales.astype(np.float32) / divisor, 16, axis=1)
    return stored, (FLOAT4[codes] * each).astype(BF16)


def gptq(name, shape, *, bits=4, size=16, order=False, first=True):
    rows, columns = shape
    codes = RNG.integers(0, 1 << bits, (columns, rows))
    n_groups = columns // size
    zeros = RNG.integers(0, 1 << bits, (n_groups, rows))
    scales = RNG.uniform(0.01, 0.02, (n_groups, rows)).astype(np.float16)
    groups = np.arange(columns) // size
    groups = RNG.permutation(groups) if order else groups
    stored_zeros = words(zeros, bits)
    if first:  # 1 less each: code by code if they cross words, otherwise the word as one number
        ones = words(np.ones_like(zeros), bits)
        stored_zeros = words((zeros - 1) % 8, 3) if bits == 3 else stored_zeros - ones
    stored = {
        f"{name}.qweight": np.ascontiguousarray(words(codes.T, bits).T),
        f"{name}.qzeros": stored_zeros,
        f"{name}.scales": scales,
        f"{name}.g_idx": groups.astype(np.int32),
    }
    return stored, ((codes - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)).T


def awq(name, shape, *, size=16):
    rows, columns = shape
    codes, zeros = RNG.integers(0, 16, (columns, rows)), RNG.integers(0, 16, (columns // size, rows))
    scales = RNG.uniform(0.01, 0.02, (columns // size, rows)).astype(np.float16)

    def stored_order(values):
        return values.reshape(len(values), -1, 8)[..., AWQ_COLUMN_OF_CODE].reshape(values.shape)

    stored = {
        f"{name}.qweight": words(stored_order(codes), 4),
        f"{name}.qzeros": words(stored_order(zeros), 4),
        f"{name}.scales": scales,
    }
    groups = np.arange(columns) // size
    return stored, ((codes - zeros[groups]).astype(np.float32) * scales[groups].astype(np.float32)).T


def nf4(name, shape, *, nested=True, block=64):
    size = shape[0] * shape[1]
    codes = RNG.integers(0, 16, size).astype(np.uint8)
    n_blocks = -(-size // block)
    said = {"quant_type": "nf4", "blocksize": block, "dtype": "bfloat16", "shape": list(shape)}
    weight = f"{name}.weight"
    padded = np.append(codes, np.zeros(size % 2, np.uint8))
    stored = {weight: (padded[::2] << 4 | padded[1::2])[:, None], f"{weight}.quant_map": NF4}
    if nested:
        table = np.sort(RNG.uniform(-1, 1, 256)).astype(np.float32)
        inner = RNG.integers(0, 256, n_blocks).astype(np.uint8)
        outer = RNG.uniform(0.01, 0.02, -(-n_blocks // 256)).astype(np.float32)
        said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}
        scales = table[inner] * np.repeat(outer, 256)[:n_blocks] + np.float32(0.03)
        stored |= {f"{weight}.absmax": inner, f"{weight}.nested_absmax": outer, f"{weight}.nested_quant_map": table}
    else:
        scales = RNG.uniform(0.01, 0.02, n_blocks).astype(np.float32)
        stored[f"{weight}.absmax"] = scales
    stored[f"{weight}.quant_state.bitsandbytes__nf4"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    return stored, (NF4[codes] * np.repeat(scales, block)[:size]).reshape(shape)


def int8(name, shape):
    codes, scales = RNG.integers(-127, 128, shape).astype(np.int8), RNG.uniform(1, 2, shape[0]).astype(np.float32)
    stored = {f"{name}.weight": codes, f"{name}.SCB": scales, f"{name}.weight_format": np.array(0, np.uint8)}
    return stored, codes.astype(np.float32) * scales[:, None] * np.float32(7.874015718698502e-3)


def _group(**weights):
    settings = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "dynamic": False, **weights}
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": settings, "input_activations": None}}}


def _compressed(form, **weights):
    return {"quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"], **_group(**weights)}


METHODS = {
    # Blocks that divide neither rows nor columns.
    "fp8 blocks": (lambda n, s: fp8(n, s, block=(24, 40)), {"quant_method": "fp8", "weight_block_size": [24, 40]}),
    "fp8 tensor": (fp8_of_tensor, {"quant_method": "fp8", "activation_scheme": "static"}),
    "float8 channels": (fp8, _compressed("float-quantized", num_bits=8, type="float", strategy="channel")),
    "int8 channels": (
        lambda n, s: channels(n, s, dtype=BF16),
        _compressed("int-quantized", num_bits=8, strategy="channel"),
    ),
    "int8 asymmetric": (
        lambda n, s: channels(n, s, dtype=np.float16, symmetric=False),
        _compressed("int-quantized", num_bits=8, strategy="channel", symmetric=False),
    ),
    "packed 4": (lambda n, s: packed(n, s, size=16), _compressed("pack-quantized", group_size=16)),
    "packed 4 asymmetric": (
        lambda n, s: packed(n, s, size=16, symmetric=False),
        _compressed("pack-quantized", group_size=16, symmetric=False),
    ),
    "packed 4 channels": (packed, _compressed("pack-quantized", strategy="channel")),
    "packed 3 asymmetric": (
        lambda n, s: packed(n, s, bits=3, size=16, symmetric=False),
        _compressed("pack-quantized", num_bits=3, group_size=16, symmetric=False),
    ),
    "packed 8 in another order": (
        lambda n, s: packed(n, s, bits=8, size=16, order=True, symmetric=False),
        _compressed("pack-quantized", num_bits=8, group_size=16, symmetric=False, actorder="group"),
    ),
    "nvfp4": (
        nvfp4,
        _compressed("nvfp4-pack-quantized", type="float", group_size=16, strategy="tensor_group"),
    ),
    "gptq 4": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False}),
    "gptq 4 in another order": (
        lambda n, s: gptq(n, s, order=True),
        {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "sym": False},
    ),
    "gptq 3 in another order": (
        lambda n, s: gptq(n, s, bits=3, size=32, order=True),
        {"quant_method": "gptq", "bits": 3, "group_size": 32, "desc_act": True, "sym": False},
    ),
    "gptq 2": (lambda n, s: gptq(n, s, bits=2), {"quant_method": "gptq", "bits": 2, "group_size": 16}),
    "gptq 8, second version": (
        lambda n, s: gptq(n, s, bits=8, first=False),
        {"quant_method": "gptq", "bits": 8, "group_size": 16, "checkpoint_format": "gptq_v2"},
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm", "zero_point": True}),
    "nf4 nested": (nf4, {"quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True}),
    "nf4": (lambda n, s: nf4(n, s, nested=False), {"quant_method": "bitsandbytes", "load_in_4bit": True}),
    "bitsandbytes int8": (int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}),
}
"""Name → a function of a layer's name and its weight's shape, which returns the stored tensors and the weight, and
the ``quantization_config``."""


def write(folder, method, model_type="llama", **entries):
    """Write a quantised folder, and ``plain`` in it with the weights that it means; return both."""
    config = {**small_folders.config_of(model_type, **entries), "torch_dtype": "float32"}
    tensors = small_folders.tensors_of(config)
    make, settings = METHODS[method]
    stored, plain = {}, {}
    for name, value in tensors.items():
        if value.ndim == 2 and name.endswith("_proj.weight"):
            codes, weight = make(name.removesuffix(".weight"), value.shape)
            stored |= codes
            plain[name] = np.ascontiguousarray(weight)
        else:
            stored[name] = plain[name] = value
    for path, held, said in ((folder, stored, {"quantization_config": settings}), (folder / "plain", plain, {})):
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.json").write_text(json.dumps({**config, **said}))
        save_file({name: np.ascontiguousarray(value) for name, value in held.items()}, path / "model.safetensors")
    return folder, folder / "plain"
