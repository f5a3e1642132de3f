"""Quantised folders whose codes are kept: uneven sizes, layouts, memory, saving, LoRA, and what is refused."""

import copy
import functools
import json

import numpy as np
import peft_folders
import pytest
import quantised_folders
from kept_layers import assert_layers_are_keras_own, kernel_of, kernels_of_elements, packed_layers
from memory import watch
from safetensors.numpy import load_file, save_file

import shardload
from shardload.errors import UnsupportedError, UsageError
from shardload.keras_bridge.model_state import own_layers
from shardload.pipeline import filling
from shardload.transfer import execution

UNEVEN = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 16}
"""Three heads, and one of keys: eight devices divide neither."""
ODD = {**UNEVEN, "intermediate_size": 77}
"""With one scale for each output, nothing has to be a multiple of anything."""
GROUPS = {**UNEVEN, "intermediate_size": 112}
"""Groups of 16: an eighth of 112 rows ends inside one."""
LONG_HEADS = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64}
"""Keras takes the longest dim of a kernel for that of the model, which it is not here."""
IDS = {"token_ids": np.arange(12).reshape(2, 6), "padding_mask": np.ones((2, 6), int)}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "gemma2": "Gemma2ForCausalLM", "qwen2": "Qwen2ForCausalLM"}
CASES = [
    *((method, ODD) for method in ("packed 4 channels", "int8 channels", "int8 asymmetric", "bitsandbytes int8")),
    *((method, GROUPS) for method in ("packed 4", "packed 4 asymmetric", "packed 8 in another order", "awq")),
    *((method, GROUPS) for method in ("gptq 4", "gptq 4 in another order", "gptq 8, second version")),
]


def write(folder, method, family="llama", **sizes):
    """A folder of a causal language model with one layer."""
    sizes = {"intermediate_size": 48, "num_hidden_layers": 1, **sizes}
    if family == "gemma2":
        sizes["query_pre_attn_scalar"] = sizes.get("head_dim", 8)
    quantised, _ = quantised_folders.write(folder, method, family, architectures=[ARCHITECTURES[family]], **sizes)
    return quantised


def keep(source, **kwargs):
    return shardload.load(source, quantized="keep", dtype="float32", **kwargs)


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize(("method", "sizes"), CASES)
def test_uneven_sizes_on_any_mesh(method, sizes, family, tmp_path):
    assert_kept(method, sizes, family, tmp_path)


@pytest.mark.parametrize("method", ["gptq 4 in another order", "packed 4"])
def test_heads_longer_than_the_model_is_wide(method, tmp_path):
    assert_kept(method, LONG_HEADS, "gemma2", tmp_path)


def assert_kept(method, sizes, family, tmp_path):
    folder = write(tmp_path / "quantised", method, family, **sizes)
    elements = kernels_of_elements(folder, tmp_path / "elements")
    for mesh in ("1x1", "1x8", "2x4", "1x3"):
        found = keep(folder, mesh=mesh)
        assert len(assert_layers_are_keras_own(found, elements, outputs=mesh == "1x1")) == 7, mesh
        report = shardload.report(found)
        assert report.weight_bytes == sum(np.asarray(v.value).nbytes for v in found.weights)
        share = sum(v.value.addressable_shards[0].data.nbytes for v in found.weights)
        assert report.devices[0].bytes == share


@pytest.mark.sample(2)
@pytest.mark.parametrize("method", ["gptq 4 in another order", "packed 4", "int8 asymmetric"])
def test_codes_are_uploaded_to_devices_with_memory_of_their_own(method, tmp_path, monkeypatch):
    folder = write(tmp_path / "quantised", method, "gemma2", **GROUPS)
    elements = kernels_of_elements(folder, tmp_path / "elements")
    monkeypatch.setattr(filling.execution, "execute", functools.partial(execution.execute, placement="upload"))
    assert_layers_are_keras_own(keep(folder, mesh="2x4"), elements, outputs=False)


# ---- layouts -----------------------------------------------------------------------------------------


def specs_of(model, part):
    return {v.path.split("/", 2)[-1]: tuple(v.value.sharding.spec) for v in model.weights if part in v.path}


SPLIT = {
    ".*feedforward_intermediate_dense/kernel": (None, "model"),
    ".*feedforward_output_dense/kernel": ("model", None),
}


def test_a_rule_for_a_kernel_splits_the_dim_that_it_means(tmp_path):
    folder = write(tmp_path, "gptq 4 in another order", intermediate_size=96)
    model = keep(folder, mesh="1x3", layout=SPLIT)
    [first, last] = [
        next(x for x in packed_layers(model) if x.name.startswith(f"feedforward_{n}")) for n in ("int", "out")
    ]
    assert first.dtype_policy.name == last.dtype_policy.name == "gptq/4/16_from_float32"
    # Keras stores (⌈out/2⌉, in) under the name of a kernel (in, out).
    assert first.quantized_kernel.shape == (48, 32)
    assert tuple(first.quantized_kernel.value.sharding.spec) == ("model", None)
    assert tuple(first.kernel_scale.value.sharding.spec) == ("model", None)
    assert tuple(first.kernel_zero.value.sharding.spec) == ("model", None)
    assert tuple(first.g_idx.value.sharding.spec) == (None,)
    assert tuple(last.quantized_kernel.value.sharding.spec) == (None, "model")
    assert tuple(last.g_idx.value.sharding.spec) == ("model",)
    # A column may be of any group, so each device has all scales.
    assert tuple(last.kernel_scale.value.sharding.spec) == (None, None)


@pytest.mark.parametrize(("method", "size", "scale"), [("packed 4", 96, "model"), ("packed 4", 48, None)])
def test_scales_are_split_where_no_group_is_cut(method, size, scale, tmp_path):
    model = keep(write(tmp_path, method, intermediate_size=size), mesh="1x2", layout=SPLIT)
    last = next(layer for layer in packed_layers(model) if layer.name == "feedforward_output_dense")
    assert last.dtype_policy.name == "int4/16_from_float32"
    assert tuple(kernel_of(last).value.sharding.spec) == ("model", None)
    assert tuple(last.kernel_scale.value.sharding.spec) == (scale, None)


def test_packed_dims_that_do_not_divide_are_reported(tmp_path):
    model = keep(write(tmp_path, "int8 channels", intermediate_size=60), mesh="1x4", layout=SPLIT)
    assert not any("packed shape" in note for note in shardload.report(model).notes)
    model = keep(write(tmp_path / "4", "packed 4 channels", intermediate_size=60), mesh="1x4", layout=SPLIT)
    assert "its packed shape (32, 30) does not divide" in str(shardload.report(model))


def test_modules_that_the_configuration_leaves_out_stay_floats(tmp_path):
    folder = write(tmp_path, "gptq 4")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.down_proj"
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        del tensors[f"{name}.{part}"]
    tensors[f"{name}.weight"] = load_file(folder / "plain" / "model.safetensors")[f"{name}.weight"]
    save_file(tensors, folder / "model.safetensors")
    model = keep(folder, mesh="1x8")
    floats = [layer for layer in own_layers(model) if layer.name == "feedforward_output_dense"]
    assert [layer.quantization_mode for layer in floats] == [None]
    assert np.array_equal(floats[0].kernel, tensors[f"{name}.weight"].T)
    assert "6 weights kept packed" in str(shardload.report(model))


# ---- bytes and memory --------------------------------------------------------------------------------

MIB = 1 << 20


@pytest.mark.parametrize("method", ["gptq 4 in another order", "packed 4 asymmetric", "int8 channels"])
@pytest.mark.parametrize("placement", ["adopt", "upload"])
def test_devices_store_their_shares_and_the_host_keeps_its_budget(method, placement, tmp_path, monkeypatch):
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "head_dim": 64}
    folder = write(tmp_path, method, **sizes)
    monkeypatch.setattr(filling.execution, "execute", functools.partial(execution.execute, placement=placement))
    planned = shardload.plan(folder, mesh="1x8", dtype="float32", quantized="keep", host_memory_bytes=2 * MIB)
    seen = watch(monkeypatch)
    model = keep(folder, mesh="1x8", host_memory_bytes=2 * MIB, progress=seen)
    report = shardload.report(model)
    stored = (folder / "model.safetensors").stat().st_size
    assert report.bytes.read == report.bytes.needed == planned.bytes.read
    assert 0.98 * stored < report.bytes.read <= stored
    assert 0 < report.host_bytes.peak_staging <= 2 * MIB
    share = report.devices[0].bytes
    assert share == planned.devices[0].bytes
    assert share < shardload.plan(folder, mesh="1x8", dtype="float32").devices[0].bytes / 2
    assert seen.most() <= share + (MIB if placement == "upload" else 0)


def test_a_plan_counts_packed_bytes(tmp_path):
    folder = write(tmp_path, "gptq 4", hidden_size=128, head_dim=32, intermediate_size=512)
    floats, kept = (
        shardload.plan(folder, mesh="1x8", quantized=q, dtype="bfloat16", device_memory_bytes="1MiB", kv_cache="1x64")
        for q in ("dequantize", "keep")
    )
    assert kept.parameters == floats.parameters
    assert kept.weight_bytes < floats.weight_bytes / 2
    assert kept.devices[0].bytes < floats.devices[0].bytes / 2
    assert kept.bytes == floats.bytes
    assert kept.kv_cache == floats.kv_cache


def test_rounded_scales_are_reported(tmp_path):
    folder = write(tmp_path, "gptq 4")
    assert "scales of float16 were rounded to bfloat16" in str(
        shardload.report(shardload.load(folder, dtype="bfloat16", quantized="keep"))
    )
    for dtype in ("float16", "float32"):
        model = shardload.load(folder, dtype=dtype, quantized="keep")
        assert not any("were rounded" in note for note in shardload.report(model).notes)


# ---- what becomes of the models ----------------------------------------------------------------------


@pytest.fixture(scope="module", params=["packed 4", "gptq 4 in another order", "int8 asymmetric"])
def kept(request, tmp_path_factory):
    folder = write(tmp_path_factory.mktemp("kept"), request.param, "gemma2", intermediate_size=48)
    model = keep(folder, mesh="2x4")
    return folder, model, model.predict(IDS, verbose=0)


def assert_equal(found, model, outputs):
    for a, b in zip(found.weights, model.weights, strict=True):
        left, right = np.asarray(a.value), np.asarray(b.value)
        assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()), a.path
    np.testing.assert_allclose(found.predict(IDS, verbose=0), outputs, rtol=1e-4, atol=1e-4)


def test_steps_are_saved_and_restored_on_another_mesh(kept, tmp_path):
    folder, model, outputs = kept
    shardload.save(model, tmp_path / "steps", step=1)
    assert_equal(shardload.load(tmp_path / "steps", mesh="1x8"), model, outputs)
    again = keep(folder, mesh="1x3")
    for variable in again.weights:
        variable.assign(np.zeros(variable.shape, variable.dtype))
    shardload.restore(again, tmp_path / "steps")
    assert_equal(again, model, outputs)


def test_a_preset_is_one_that_keras_loads(kept, tmp_path):
    _, model, outputs = kept
    shardload.save_as(model, tmp_path / "preset", to="preset")
    assert_equal(shardload.load(tmp_path / "preset", mesh="1x8"), model, outputs)
    assert_equal(type(model).from_preset(str(tmp_path / "preset"), preprocessor=None), model, outputs)


@pytest.mark.filterwarnings("ignore:`compile")
def test_a_copy_is_packed_too(kept):
    _, model, outputs = kept
    assert_equal(copy.deepcopy(model), model, outputs)


def test_lora_on_top(tmp_path):
    folder = write(tmp_path / "base", "packed 4", "qwen2", intermediate_size=48)
    adapter = peft_folders.write(tmp_path / "adapter", folder, ["down_proj"])
    model = keep(folder, mesh="2x4")
    shardload.load_adapter(model, adapter)
    merged = shardload.load(folder / "plain", adapter=adapter, dtype="float32").predict(IDS, verbose=0)
    np.testing.assert_allclose(model.predict(IDS, verbose=0), merged, rtol=0.01, atol=0.01 * np.abs(merged).max())
    codes = write(tmp_path / "bytes", "int8 channels", "qwen2", intermediate_size=48)
    with pytest.raises(UnsupportedError, match=r"is in the mode gptq, in which Keras computes no LoRA"):
        shardload.load_adapter(keep(codes), adapter)


# ---- what is refused ---------------------------------------------------------------------------------


def test_arguments_that_exclude_each_other(tmp_path):
    folder = write(tmp_path, "packed 4")
    with pytest.raises(UsageError, match=r"Cannot use quantize='int8' with quantized='keep'"):
        keep(folder, quantize="int8")
    with pytest.raises(UsageError, match=r"Cannot use adapter with quantized='keep'"):
        keep(folder, adapter=tmp_path / "adapter")
    with pytest.raises(UsageError, match=r"quantized"):
        shardload.load(folder, quantized="packed")


def test_an_adapter_is_merged_into_what_is_not_kept(tmp_path):
    folder = write(tmp_path / "base", "gptq 4 in another order", "qwen2", intermediate_size=48)
    adapter = peft_folders.write(tmp_path / "adapter", folder, ["down_proj"])
    with pytest.raises(UsageError, match=r"Leave out quantized='keep' .* with quantize='int4' .* not in GPTQ's mode"):
        keep(folder, adapter=adapter)
    plain = shardload.load(folder / "plain", adapter=adapter, dtype="float32").get_weights()
    merged = shardload.load(folder, adapter=adapter, dtype="float32").get_weights()
    assert all(map(np.array_equal, merged, plain))
    assert shardload.load(folder, adapter=adapter, quantize="int4")


def test_folders_without_codes(tmp_path):
    folder = write(tmp_path, "packed 4")
    with pytest.raises(UnsupportedError, match=r"it has no weights that are quantised .* Leave out quantized='keep'"):
        keep(folder / "plain")


def test_weights_of_other_layers(tmp_path):
    folder = write(tmp_path, "packed 4", tie_word_embeddings=False)
    tensors = load_file(folder / "model.safetensors")
    head, _ = quantised_folders.packed("lm_head", (48, 32), size=16)
    tensors.pop("lm_head.weight", None)
    save_file(tensors | head, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"Cannot keep 'lm_head.weight' packed: .* is no kernel of a Dense"):
        keep(folder)


def test_blocks_of_rows_are_no_groups(tmp_path):
    folder = write(tmp_path, "int8 channels")
    config = json.loads((folder / "config.json").read_text())
    group = config["quantization_config"]["config_groups"]["group_0"]["weights"]
    group |= {"strategy": "block", "block_structure": [16, 16]}
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        rows, columns = tensors[name.removesuffix("_scale")].shape
        tensors[name] = np.ones((-(-rows // 16), -(-columns // 16)), np.float32)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UnsupportedError, match=r"it has scales for blocks of several rows"):
        keep(folder)
