"""What a quantised folder stores, read by plain NumPy, and Keras' own layers filled with it: the oracle of kept codes.

The elements of codes, zeros and scales are written as the weights of plain folders, which are loaded as usual: that
gives them in the order of Keras' kernels, with nothing of what is tested.
"""

import json

import keras
import numpy as np
from quantised_folders import AWQ_COLUMN_OF_CODE, held
from safetensors.numpy import save_file

import shardload
from shardload.keras_bridge.model_state import own_layers

BITSANDBYTES = np.float32(7.874015718698502e-3)


def nibbles(words, bits):
    """Codes in words, along the last dim, lowest bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    codes = words.view(np.uint32)[..., None] >> shifts & np.uint32((1 << bits) - 1)
    return codes.reshape(*words.shape[:-1], -1).astype(np.int64)


def _columns(name, tensors, settings):
    """GPTQ and AWQ."""
    words, stored_zeros, scales = (tensors[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales"))
    bits, size = settings["bits"], settings["group_size"]
    if settings["quant_method"] == "awq":
        codes, zeros = (
            nibbles(w, 4).reshape(len(w), -1, 8)[..., np.argsort(AWQ_COLUMN_OF_CODE)].reshape(len(w), -1)
            for w in (words, stored_zeros)
        )
    else:
        codes = nibbles(np.ascontiguousarray(words.T), bits).T
        if settings.get("checkpoint_format", "gptq") == "gptq":  # 1 less
            ones = sum(1 << at for at in range(0, 32, bits))
            stored_zeros = (stored_zeros.view(np.uint32) + np.uint32(ones)).view(np.int32)
        zeros = nibbles(stored_zeros, bits)
    groups = tensors.get(f"{name}.g_idx", np.arange(len(codes)) // (len(codes) if size == -1 else size))
    return codes.T, zeros.T, scales.T, groups


def _packed(name, tensors):
    rows, columns = (int(n) for n in tensors[f"{name}.weight_shape"])
    words, scales = tensors[f"{name}.weight_packed"], tensors[f"{name}.weight_scale"]
    bits = 32 * words.shape[1] // columns
    codes = nibbles(words, bits)[:, :columns]
    zeros = np.full(scales.shape, 1 << (bits - 1))
    if (stored := tensors.get(f"{name}.weight_zero_point")) is not None:
        zeros = nibbles(np.ascontiguousarray(stored.T), bits).T[:rows]
    groups = tensors.get(f"{name}.weight_g_idx", np.arange(columns) * scales.shape[1] // columns)
    return codes, zeros, scales, groups


def _bytes(name, tensors):
    """int8 of compressed-tensors and bitsandbytes."""
    codes = tensors[f"{name}.weight"].astype(np.int64) + 128
    scales = tensors.get(f"{name}.weight_scale")
    scales = tensors[f"{name}.SCB"][:, None] * BITSANDBYTES if scales is None else scales
    zeros = tensors.get(f"{name}.weight_zero_point", np.zeros_like(scales)).astype(np.int64) + 128
    return codes, zeros, scales, np.zeros(codes.shape[1], np.int64)


def stored_parts(folder):
    """Name of each quantised weight → codes, zeros, scales and ids of groups, each for each element; and the rest."""
    tensors = held(folder / "model.safetensors")
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    readers = {
        ".qweight": lambda name: _columns(name, tensors, settings),
        ".weight_packed": lambda name: _packed(name, tensors),
        ".weight_scale": lambda name: _bytes(name, tensors),
        ".SCB": lambda name: _bytes(name, tensors),
    }
    found = {}
    for ending, read in readers.items():
        for name in [n.removesuffix(ending) for n in tensors if n.endswith(ending)]:
            if f"{name}.weight" not in found:
                codes, zeros, scales, groups = read(name)
                ids = np.arange(len(codes))[:, None] * (groups.max() + 1) + groups
                found[f"{name}.weight"] = (codes, zeros[:, groups], scales[:, groups], ids)
    parts = tuple(name.removesuffix(".weight") + "." for name in found)
    return found, {name: value for name, value in tensors.items() if not name.startswith(parts) or ".bias" in name}


def kernels_of_elements(folder, to):
    """Path of each kernel → its codes, zeros, scales and ids of groups, each in the kernel's shape."""
    found, rest = stored_parts(folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config")
    models = []
    for number in range(4):
        plain = to / str(number)
        plain.mkdir(parents=True)
        (plain / "config.json").write_text(json.dumps(config))
        values = {name: np.ascontiguousarray(parts[number], np.float32) for name, parts in found.items()}
        save_file(
            {n: np.ascontiguousarray(v, np.float32) for n, v in (rest | values).items()}, plain / "model.safetensors"
        )
        models.append(shardload.load(plain, dtype="float32", mesh="1x1"))
    paths = [v.path for v in models[0].weights]
    arrays = [[np.asarray(v.value) for v in model.weights] for model in models]
    return dict(zip(paths, zip(*arrays, strict=True), strict=True))


def own_layer(layer, elements):
    """Keras' own layer in the mode of ``layer``, filled with codes, zeros and scales of each element of its kernel."""
    own = type(layer).from_config(layer.get_config())
    own.build(layer.get_build_config()["input_shape"])
    transposed = layer.quantization_mode == "gptq"
    held_codes = kernel_of(own)
    rows = held_codes.shape[1 if transposed else 0]
    codes, zeros, scales, ids = (each.reshape(rows, -1) for each in elements)
    _, first, group_of_row = np.unique(ids[:, 0], return_index=True, return_inverse=True)
    assert np.array_equal(ids, ids[first][group_of_row]), "rows of a group differ in other columns"
    values = {
        "kernel_scale": scales[first],
        "kernel_zero": zeros[first].astype(np.int64),
        "g_idx": group_of_row,
    }
    if transposed:
        values |= {name: values[name].T for name in ("kernel_scale", "kernel_zero")}
        codes = codes.T.astype(np.uint8)
        if codes.shape != held_codes.shape:
            codes = np.asarray(keras.quantizers.pack_int4(codes, axis=0, dtype="uint8")[0])
        values["quantized_kernel"] = codes
    else:
        values["kernel_zero"] -= 8
        values["kernel"] = np.asarray(keras.quantizers.pack_int4((codes - 8).astype(np.int8), axis=-1)[0])
    names = own.variable_serialization_spec[layer.quantization_mode]
    if layer.bias is not None:
        values["bias"] = np.asarray(layer.bias.value)
    kept = [values[name] for name in names if name in values]
    own.load_own_variables({str(i): value for i, value in enumerate(kept)})
    return own


def packed_layers(model):
    """The layers of a model that Keras calls quantised."""
    return [layer for layer in own_layers(model) if getattr(layer, "quantization_mode", None) is not None]


def kernel_of(layer):
    """The variable that Keras calls the kernel of a layer: codes, in any shape."""
    return next(variable for variable in layer.variables if variable.path.endswith("/kernel"))


def assert_layers_are_keras_own(model, elements, *, outputs):
    """Assert that packed layers have the variables of Keras' own, bit for bit, and with ``outputs``, its results."""
    layers = packed_layers(model)
    for layer in layers:
        own = own_layer(layer, elements[kernel_of(layer).path])
        assert len(own.variables) == len(layer.variables)
        for a, b in zip(layer.variables, own.variables, strict=True):
            left, right = np.asarray(a.value), np.asarray(b.value)
            assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()), a.path
        shape = [n or 3 for n in layer.get_build_config()["input_shape"]]
        x = np.random.default_rng(0).normal(size=shape).astype(layer.compute_dtype)
        left, right = np.asarray(layer(x)), np.asarray(own(x))
        if outputs:
            assert left.tobytes() == right.tobytes(), layer.path
        else:  # the sums of products have another order
            np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-4)
    return layers
