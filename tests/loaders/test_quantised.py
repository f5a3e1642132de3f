"""Quantised Hugging Face folders load as the plain folder of what their codes mean, bit for bit, on any mesh."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import quantised_folders
from object_server import ObjectServer
from quantised_folders import METHODS, held
from safetensors.numpy import save_file

import shardload
from shardload.errors import ShardloadError, SourceError, UnsupportedError

WIDE = {"intermediate_size": 96}


def bits(value):
    value = np.asarray(value)
    return value.view(f"u{value.dtype.itemsize}")


def same_weights(ours, theirs):
    for found, expected in zip(ours.weights, theirs.weights, strict=True):
        assert found.path == expected.path
        assert np.array_equal(bits(found.value), bits(expected.value)), found.path


@pytest.mark.parametrize("method", METHODS)
def test_every_weight_is_what_its_codes_mean(method, tmp_path):
    folder, plain = quantised_folders.write(tmp_path, method, **WIDE)
    same_weights(shardload.load(folder, dtype="float32"), shardload.load(plain, dtype="float32"))


@pytest.mark.parametrize("mesh", ["1x8", "2x4", "1x3"])
@pytest.mark.parametrize("model_type", ["gemma2", "qwen3"])
@pytest.mark.parametrize("method", ["fp8 blocks", "packed 3 asymmetric", "gptq 4", "awq", "nf4 nested"])
def test_shards_are_those_of_the_plain_folder(method, model_type, mesh, tmp_path):
    folder, plain = quantised_folders.write(tmp_path, method, model_type, **WIDE)
    ours, theirs = (shardload.load(source, mesh=mesh, dtype="bfloat16") for source in (folder, plain))
    same_weights(ours, theirs)
    for found, expected in zip(ours.weights, theirs.weights, strict=True):
        assert found.value.sharding == expected.value.sharding


@pytest.mark.parametrize("method", METHODS)
def test_any_rows_can_be_read(method, tmp_path):
    folder, plain = quantised_folders.write(tmp_path, method, **WIDE)
    expected = held(plain / "model.safetensors")
    rng, tried = np.random.default_rng(1), 0
    for name, tensor in shardload.inspect(folder).tensors.items():
        if name.endswith("_proj.weight"):
            assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype)
            for start, stop in np.sort(rng.integers(0, tensor.rows + 1, (8, 2))):
                found = tensor.storage.reader.read_rows(int(start), int(stop))
                assert np.array_equal(bits(found), bits(expected[name][start:stop])), (name, start, stop)
                tried += 1
    assert tried


@pytest.mark.parametrize("method", METHODS)
def test_bytes_are_counted_as_stored(method, tmp_path):
    folder, _ = quantised_folders.write(tmp_path, method, **WIDE)
    tensors = held(folder / "model.safetensors")
    read_before = re.compile(r"\.((weight_)?g_idx|weight_shape|input_(global_)?scale|weight_format|quant_state\..*)$")
    stored = sum(value.nbytes for name, value in tensors.items() if not read_before.search(name))
    plan = shardload.plan(folder, mesh="1x8")
    in_order = "another order" not in method
    assert plan.bytes.read == stored if in_order else plan.bytes.read > stored
    assert any("14 weights dequantised from" in note for note in plan.notes)


def edited(folder, edit, **settings):
    """The folder with other tensors, and other settings of its quantization_config."""
    tensors = held(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


LAYER = "model.layers.0.mlp.up_proj"
DAMAGED = {
    ("fp8 blocks", "weight_scale_inv"): lambda v: v[:-1],
    ("fp8 tensor", "weight_scale"): lambda v: np.ones(5, np.float32),
    ("float8 channels", "weight_scale"): lambda v: v[:-1],
    ("int8 asymmetric", "weight_zero_point"): lambda v: v[:-1],
    ("packed 4", "weight_scale"): lambda v: v[:, :-1],
    ("packed 4", "weight_packed"): lambda v: v[:, :-1],
    ("packed 4", "weight_shape"): lambda v: np.array([-96, 1 << 50]),
    ("int8 channels", "weight_scale"): None,
    ("packed 3 asymmetric", "weight_zero_point"): None,
    ("packed 8 in another order", "weight_g_idx"): lambda v: v + 1,
    ("nvfp4", "weight_global_scale"): None,
    ("nvfp4", "weight_scale"): lambda v: v[:, :-1],
    ("gptq 4", "scales"): None,
    ("gptq 4", "qzeros"): lambda v: v[:-1],
    ("gptq 3 in another order", "g_idx"): lambda v: v - 1,
    ("awq", "qzeros"): None,
    ("nf4 nested", "weight"): lambda v: v[:-1],
    ("nf4 nested", "weight.nested_absmax"): lambda v: v[:0],
    ("nf4 nested", "weight.quant_map"): lambda v: v[:-1],
    ("nf4", "weight.quant_state.bitsandbytes__nf4"): lambda v: v[:-9],
    ("nf4 nested", "weight.quant_state.bitsandbytes__nf4"): lambda v: said(v, nested_offset=10**400),
    ("nf4 nested", "weight.absmax"): lambda v: v[:-1],
    ("nf4", "weight.quant_map"): lambda v: v.astype(np.float16),
    ("bitsandbytes int8", "SCB"): lambda v: v.astype(np.float16),
}


def said(stored, **entries):
    """The JSON in a tensor with other entries."""
    return np.frombuffer(json.dumps({**json.loads(stored.tobytes()), **entries}).encode(), np.uint8)


@pytest.mark.parametrize(
    "entries", [{"shape": []}, {"shape": [96, -32]}, {"blocksize": 2}, {"blocksize": None}, {"shape": 7}]
)
def test_a_state_that_says_nonsense_is_refused(entries, tmp_path):
    folder, _ = quantised_folders.write(tmp_path, "nf4", **WIDE)
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"
    edited(folder, lambda tensors: tensors.update({name: said(tensors[name], **entries)}))
    with pytest.raises(SourceError, match="does not describe a weight"):
        shardload.load(folder)


@pytest.mark.parametrize(("method", "part"), DAMAGED)
def test_tensors_that_do_not_fit_together_are_refused(method, part, tmp_path):
    folder, _ = quantised_folders.write(tmp_path, method, **WIDE)
    change = DAMAGED[method, part]

    def edit(tensors):
        value = tensors.pop(f"{LAYER}.{part}")
        if change is not None:
            tensors[f"{LAYER}.{part}"] = np.ascontiguousarray(change(value))

    edited(folder, edit)
    for use in (shardload.load, shardload.plan):
        with pytest.raises(SourceError, match=f"do not fit together: .*{LAYER}"):
            use(folder)
    assert shardload.inspect(folder).tensors  # lists what is there


UNKNOWN = {
    ("gptq 4", "bits"): 4.0,
    ("gptq 8, second version", "bits"): 5,
    ("fp8 tensor", "expert_dtype"): "fp4",
    ("packed 4", "format"): "marlin-24",
    ("gptq 4", "checkpoint_format"): "marlin",
    ("gptq 4", "dynamic"): {"-:.*up_proj": {}},
    ("awq", "version"): "gemv",
    ("fp8 blocks", "fmt"): "e5m2",
    ("fp8 blocks", "weight_block_size"): [0, 16],
    ("fp8 blocks", "a_new_setting"): 1,
    ("packed 4", "transform_config"): {"R1": {}},
    ("packed 4", "sparsity_config"): {"format": "sparse-24-bitmask"},
    ("packed 4", "config_groups"): {},
    ("nf4", "bnb_5bit"): True,
}


@pytest.mark.parametrize(("method", "setting"), UNKNOWN)
def test_a_setting_that_is_not_known_is_refused_by_its_name(method, setting, tmp_path):
    folder, _ = quantised_folders.write(tmp_path, method, **WIDE)
    edited(folder, lambda tensors: None, **{setting: UNKNOWN[method, setting]})
    with pytest.raises(UnsupportedError, match=rf"quantization_config in config.json sets .*{setting}"):
        shardload.load(folder)
    assert f"{LAYER}.weight" not in shardload.inspect(folder).tensors or method.startswith(("fp8", "nf4"))


AS_WRITTEN = {
    "fp8 blocks": {
        "modules_to_not_convert": ["lm_head"], "modules_to_convert": None, "activation_scheme": "dynamic",
        "dequantize": False, "scale_fmt": "float", "expert_dtype": "fp8",
    },
    "gptq 4": {
        "tokenizer": None, "dataset": None, "damp_percent": 0.1, "act_group_aware": True, "sym": True,
        "true_sequential": True, "format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}, "backend": "auto",
        "model_seqlen": None, "block_name_to_quantize": None, "module_name_preceding_first_block": None,
        "batch_size": 1, "pad_token_id": None, "max_input_length": None, "cache_block_outputs": True,
        "modules_in_block_to_quantize": None, "checkpoint_format": "gptq", "dynamic": None, "lm_head": False,
        "activation": None, "method": "gptq", "pack_dtype": "int32", "rotation": None,
    },
    "awq": {
        "modules_to_not_convert": None, "tokenizer": None, "dataset": None, "damp_percent": 0.1, "desc_act": False,
        "act_group_aware": True, "sym": True, "true_sequential": True, "format": "gemm", "meta": None,
        "backend": "auto", "batch_size": 1, "cache_block_outputs": True, "modules_in_block_to_quantize": None,
    },
    "nf4 nested": {
        "_load_in_8bit": False, "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None, "load_in_8bit": False,
        "llm_int8_enable_fp32_cpu_offload": False, "llm_int8_has_fp16_weight": False, "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": "float32", "bnb_4bit_quant_storage": "uint8",
    },
    "packed 4": {
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.3,
        "moe_sparsity_config": None, "sparsity_config": {}, "transform_config": {}, "version": "0.12.2",
    },
}  # fmt: skip
"""Method → settings that transformers 5.23, gptqmodel 7.7 and compressed-tensors 0.20 also write."""


@pytest.mark.parametrize("method", AS_WRITTEN)
def test_settings_as_the_libraries_write_them_are_known(method, tmp_path):
    folder, plain = quantised_folders.write(tmp_path, method, **WIDE)
    edited(folder, lambda tensors: None, **AS_WRITTEN[method])
    same_weights(shardload.load(folder, dtype="float32"), shardload.load(plain, dtype="float32"))


def test_plain_tensors_are_refused_as_quantised_only_in_name_or_loaded_on_request(tmp_path):
    _, plain = quantised_folders.write(tmp_path, "gptq 4", **WIDE)
    config = json.loads((plain / "config.json").read_text())
    (plain / "config.json").write_text(
        json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 5}})
    )
    with pytest.raises(UnsupportedError, match="If its tensors are plain weights all the same, pass ignore_config"):
        shardload.load(plain)
    assert shardload.load(plain, ignore_config=["quantization_config"])


def test_layers_that_are_left_out_stay_as_they_are(tmp_path):
    folder, plain = quantised_folders.write(tmp_path, "packed 4", **WIDE)
    value = np.random.default_rng(3).normal(size=(96, 32)).astype(np.float32)

    def edit(tensors):
        for name in [name for name in tensors if name.startswith(f"{LAYER}.")]:
            del tensors[name]
        tensors[f"{LAYER}.weight"] = value

    edited(folder, edit, ignore=["re:.*up_proj"])
    weights = held(plain / "model.safetensors") | {f"{LAYER}.weight": value}
    save_file(weights, plain / "model.safetensors")
    same_weights(shardload.load(folder, dtype="float32"), shardload.load(plain, dtype="float32"))


def test_groups_of_layers_have_their_own_settings(tmp_path):
    folder, plain = quantised_folders.write(tmp_path, "packed 4", **WIDE)
    codes, weight = quantised_folders.packed(LAYER, (96, 32), bits=8, size=32)

    def edit(tensors):
        tensors |= codes

    groups = METHODS["packed 4"][1]["config_groups"]
    other = {**groups["group_0"]["weights"], "num_bits": 8, "group_size": 32}
    edited(
        folder, edit, config_groups={**groups, "group_1": {"targets": [r"re:.*layers\.0.*up_proj"], "weights": other}}
    )
    save_file(held(plain / "model.safetensors") | {f"{LAYER}.weight": weight}, plain / "model.safetensors")
    same_weights(shardload.load(folder, dtype="float32"), shardload.load(plain, dtype="float32"))


def test_scales_of_a_quantised_cache_are_left_out_with_a_note(tmp_path):
    folder, _ = quantised_folders.write(tmp_path, "float8 channels", **WIDE)
    names = [f"model.layers.{i}.self_attn.{part}_scale" for i in range(2) for part in "kv"]
    edited(folder, lambda tensors: tensors.update(dict.fromkeys(names, np.ones(1, np.float32))))
    notes = shardload.report(shardload.load(folder)).notes
    assert any("left out 4 scales of a quantised KV cache" in note for note in notes)


@pytest.mark.parametrize("to", ["safetensors", "preset"])
def test_converted_in_a_dtype_a_folder_is_plain(to, tmp_path):
    folder, plain = quantised_folders.write(tmp_path / "hf", "gptq 4", **WIDE)
    shardload.convert(folder, tmp_path / "out", to=to, dtype="float32")
    same_weights(shardload.load(tmp_path / "out"), shardload.load(plain, dtype="float32"))
    assert "quantization_config" not in (tmp_path / "out" / "config.json").read_text()


def test_converted_without_one_it_is_copied(tmp_path):
    folder, _ = quantised_folders.write(tmp_path / "hf", "gptq 4", **WIDE)
    shardload.convert(folder, tmp_path / "out", to="safetensors")
    ours, theirs = (held(source / "model.safetensors") for source in (tmp_path / "out", folder))
    assert {*ours} == {*theirs} and all(np.array_equal(ours[name], theirs[name]) for name in ours)
    assert "quantization_config" in (tmp_path / "out" / "config.json").read_text()


@pytest.mark.parametrize("bits_of_code", range(1, 9))
def test_codes_of_any_width_are_unpacked(bits_of_code):
    from shardload.loaders.quantised.codes import unpacked

    codes = np.random.default_rng(0).integers(0, 1 << bits_of_code, (3, 64))
    words = quantised_folders.words(codes, bits_of_code)
    assert np.array_equal(unpacked(words, bits_of_code)[:, :64], codes)


def test_random_damage_is_an_error_of_ours_or_harmless(tmp_path):
    rng = np.random.default_rng(5)
    for i, method in enumerate(METHODS):
        folder, _ = quantised_folders.write(tmp_path / str(i), method, **WIDE)
        tensors = held(folder / "model.safetensors")
        names = sorted(name for name in tensors if name.startswith(LAYER))
        for _ in range(6):
            changed, name = dict(tensors), names[rng.integers(len(names))]
            value = changed[name]
            kind = rng.integers(4)
            if kind == 0:
                del changed[name]
            elif kind == 1 and value.ndim:
                changed[name] = np.ascontiguousarray(value[: rng.integers(0, len(value))])
            elif kind == 2:
                changed[name] = np.ascontiguousarray(value.reshape(-1).view(np.uint8))
            else:
                dtype = [np.int8, np.float16, ml_dtypes.float8_e4m3fn, np.int64][rng.integers(4)]
                changed[name] = np.zeros(value.shape, dtype)
            save_file(changed, folder / "model.safetensors")
            try:
                shardload.plan(folder)
            except ShardloadError as error:
                assert str(folder) in str(error)


@pytest.mark.parametrize("method", ["gptq 4", "gptq 3 in another order", "awq", "packed 4", "nf4 nested"])
def test_short_pieces_of_a_remote_folder_are_requested_together(method, tmp_path, monkeypatch):
    sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 384}
    quantised_folders.write(tmp_path / "served" / "hf", method, **sizes)
    server = ObjectServer(tmp_path / "served")
    try:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        ours = shardload.load(f"{server.s3}/hf", mesh="1x8", dtype="float32")
    finally:
        server.close()
    same_weights(ours, shardload.load(tmp_path / "served" / "hf" / "plain", dtype="float32"))
    stored = (tmp_path / "served" / "hf" / "model.safetensors").stat().st_size
    assert server.bytes_sent <= 1.2 * stored + (1 << 20)
    assert sum(sent > 1 for *_, sent in server.requests) <= 8
