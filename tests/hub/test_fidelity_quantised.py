"""Quantised folders that cannot be dequantised, and PEFT folders, are refused by name; what Keras quantised loads."""

import json

import keras
import ml_dtypes
import models
import numpy as np
import pytest
import small_folders
from hub_folders import config_of
from safetensors.numpy import save_file

import shardload
from shardload.errors import SourceError, UnsupportedError
from shardload.hub.config_forms import transformers_tensors

LAYER = "model.layers.0.self_attn.q_proj"
FLOAT8 = ml_dtypes.float8_e4m3fn
OPTION = "quantization_config"

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")


def scales(value, suffix):
    return {f"{LAYER}.weight": value.astype(FLOAT8), f"{LAYER}.{suffix}": np.ones((1, 1), np.float32)}


def codes(value, dtype, suffix):
    return {f"{LAYER}.weight": value.astype(dtype), f"{LAYER}.{suffix}": np.ones(3, np.float32)}


def packed(value, *suffixes):
    found = {f"{LAYER}.{suffix}": np.ones(value.shape, np.int32) for suffix in suffixes}
    return {**found, f"{LAYER}.weight": None}


STORED = {
    "fp8 of another kind": (lambda v: scales(v, "weight_scale_inv"), {"quant_method": "fp8", "fmt": "e5m2"}, "fp8"),
    "fp8 without configuration": (lambda v: scales(v, "weight_scale"), None, "fp8"),
    "float8 without scales": (lambda v: {f"{LAYER}.weight": v.astype(FLOAT8)}, None, "float8"),
    "gptq": (lambda v: packed(v, "qweight", "qzeros", "scales", "g_idx"), {"quant_method": "gptq"}, "gptq"),
    "gptq without configuration": (lambda v: packed(v, "qweight", "scales"), None, "gptq or awq"),
    "awq": (lambda v: packed(v, "qweight", "qzeros", "scales"), {"quant_method": "awq", "version": "gemv"}, "awq"),
    "bitsandbytes without configuration": (lambda v: codes(v, np.int8, "SCB"), None, "bitsandbytes"),
    "compressed-tensors": (
        lambda v: packed(v, "weight_packed", "weight_scale"),
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        "compressed-tensors",
    ),
    "mxfp4 without configuration": (lambda v: packed(v, "proj_blocks", "proj_scales"), None, "mxfp4"),
    "only said": (lambda v: {}, {"quant_method": "hqq"}, "hqq"),
    "int8 and its scale": (lambda v: codes(v, np.int8, "weight_scale"), None, "compressed-tensors"),
}


def tensors(config):
    rng = np.random.default_rng(0)
    return {s.name: rng.normal(size=s.shape).astype(np.float32) for s in transformers_tensors(config)}


def write(folder, changes=None, **entries):
    """A Llama folder with some of its tensors replaced or removed."""
    config = {**config_of("llama"), "architectures": ["LlamaForCausalLM"], **entries}
    held = tensors(config)
    held |= changes(held[f"{LAYER}.weight"]) if changes else {}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({k: v for k, v in held.items() if v is not None}, folder / "model.safetensors")
    return folder


def quantised(tmp_path, kind):
    changes, told, method = STORED[kind]
    return write(tmp_path / "hf", changes, **({"quantization_config": told} if told else {})), method


@pytest.mark.parametrize("kind", STORED)
def test_a_quantised_folder_is_refused_by_its_method(kind, tmp_path):
    folder, method = quantised(tmp_path, kind)
    with pytest.raises(UnsupportedError, match=rf"(quantised with|sets) {method}\b.*GGUF"):
        shardload.plan(folder)


USES = {
    "load": lambda folder, model, out: shardload.load(folder, mesh="1x1", strict=False),
    "plan": lambda folder, model, out: shardload.plan(folder),
    "convert": lambda folder, model, out: shardload.convert(folder, out, to="h5"),
    "load_weights": lambda folder, model, out: shardload.load_weights(model, folder, strict=False),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_everything_that_takes_weights_refuses_it_and_inspect_does_not(use, tmp_path):
    folder, _ = quantised(tmp_path, "gptq")
    with shardload.abstract():
        model = models.build("llama")
    with pytest.raises(UnsupportedError, match="gptq"):
        use(folder, model, tmp_path / "out")
    assert f"{LAYER}.qweight" in shardload.inspect(folder).tensors


def test_modelopt_says_so_in_a_file_of_its_own(tmp_path):
    folder = write(tmp_path / "hf")
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    with pytest.raises(UnsupportedError, match=r"hf_quant_config\.json sets modelopt NVFP4"):
        shardload.plan(folder)


def test_plain_tensors_load_where_only_the_configuration_says_quantised(tmp_path):
    folder, _ = quantised(tmp_path, "only said")
    told = {"ignore_config": (OPTION,)}
    model = shardload.load(folder, mesh="1x1", **told)
    for report in (
        shardload.plan(folder, **told),
        shardload.report(model),
        shardload.load_weights(model, folder, **told),
        shardload.convert(folder, tmp_path / "preset", to="h5", **told),
    ):
        ignored = "quantization_config ignored: quantization_config in config.json sets hqq"
        assert any(ignored in note for note in report.notes)


@pytest.mark.parametrize("flags", [{"load_in_4bit": False, "load_in_8bit": False}, {}])
def test_bitsandbytes_that_quantises_nothing_loads(flags, tmp_path):
    folder = write(tmp_path / "hf", quantization_config={"quant_method": "bitsandbytes", **flags})
    assert not shardload.plan(folder).missing
    said = {"quant_method": "bitsandbytes", **flags}
    folder = write(tmp_path / "hf", lambda v: codes(v, np.uint8, "weight.absmax"), quantization_config=said)
    with pytest.raises(SourceError, match=rf"it lacks '{LAYER}.weight.quant_state.bitsandbytes__nf4'"):
        shardload.plan(folder)


def test_codes_are_refused_whatever_is_ignored(tmp_path):
    folder, _ = quantised(tmp_path, "fp8 without configuration")
    with pytest.raises(UnsupportedError, match="fp8"):
        shardload.load(folder, mesh="1x1", ignore_config=(OPTION,), strict=False)


@pytest.fixture
def dense():
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3, name="hidden", use_bias=False)(inputs))


def test_float8_is_no_weight_of_a_float_variable_unless_the_caller_says_so(dense, tmp_path):
    value = np.arange(12, dtype=np.float32).reshape(4, 3).astype(FLOAT8)
    save_file({"hidden/kernel": value}, file := tmp_path / "model.safetensors")
    for strict in (True, False):
        with pytest.raises(UnsupportedError, match="float8"):
            shardload.load_weights(dense, file, strict=strict)
    notes = shardload.load_weights(dense, file, ignore_config=(OPTION,)).notes
    assert any("1 tensor in float8 ('hidden/kernel' …)" in note for note in notes)
    np.testing.assert_array_equal(dense.weights[0].numpy(), value.astype(np.float32))


def test_codes_in_a_bare_file_are_refused_where_the_model_takes_none_of_them(dense, tmp_path):
    held = {"hidden.qweight": np.ones((1, 3), np.int32), "hidden.scales": np.ones((1, 3), np.float16)}
    save_file(held, file := tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedError, match="gptq or awq"):
        shardload.load_weights(dense, file, strict=False)


@pytest.mark.parametrize("scheme", ["int8", "float8"])
def test_what_keras_quantised_loads(scheme, dense, tmp_path):
    other = keras.models.clone_model(dense)
    for model in (dense, other):
        model.quantize(scheme)
    dense.save_weights(file := tmp_path / "model.weights.h5")
    assert not shardload.load_weights(other, file).missing


# ---- adapters -----------------------------------------------------------------------------------


def adapter(folder, base="meta-llama/Llama-3.2-1B"):
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": base}))
    name = f"base_model.model.{LAYER}.lora_A.weight"
    save_file({name: np.ones((2, 4), np.float32)}, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("file", ["", "adapter_model.safetensors"])
def test_an_adapter_is_refused_with_the_model_it_belongs_to(file, dense, tmp_path):
    source = adapter(tmp_path / "peft") / file
    for use in (shardload.load, shardload.plan, lambda s: shardload.load_weights(dense, s, strict=False)):
        with pytest.raises(UnsupportedError, match=r"PEFT adapter of 'meta-llama/Llama-3\.2-1B'.*--adapter"):
            use(source)
    assert len(shardload.inspect(source).tensors) == 1
    with pytest.raises(UnsupportedError, match="PEFT adapter"):  # not "has all weights"
        shardload.convert(source, tmp_path / "out", to="preset", base="gemma3_270m")


def test_an_adapter_that_names_no_model_is_refused_all_the_same(tmp_path):
    with pytest.raises(UnsupportedError, match="contains a PEFT adapter, expected"):
        shardload.plan(adapter(tmp_path / "peft", base=None))


def test_an_adapter_beside_a_model_is_refused_unless_its_weights_are_wanted_without_it(tmp_path):
    folder = small_folders.write(tmp_path / "hf", "bert")
    (folder / "adapter_config.json").write_text("{}")
    assert shardload.plan(folder)  # left over: there is no adapter
    adapter(folder)
    for use in (shardload.plan, shardload.load):
        with pytest.raises(UnsupportedError, match=r"next to the weights .*merge it.*ignore_config=\('adapter_"):
            use(folder, mesh="1x1")
    report = shardload.report(shardload.load(folder, mesh="1x1", ignore_config="adapter_config"))
    assert "adapter_config ignored: the model has the weights without the PEFT adapter" in report.notes


def test_the_command_line_takes_the_option(tmp_path, capsys):
    from shardload.cli import main

    folder, _ = quantised(tmp_path, "only said")
    assert main(["plan", str(folder)]) == 1
    assert "--ignore-config quantization_config" in capsys.readouterr().err
    assert main(["plan", str(folder), "--ignore-config", OPTION]) == 0
