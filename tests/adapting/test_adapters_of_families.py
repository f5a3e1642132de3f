"""Each model that KerasHub converts: an adapter of PEFT is merged into it, and LoRA of it is written for PEFT."""

import json
import re

import hub_nested
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers_cross import folders

import shardload
from shardload.errors import UnsupportedError
from shardload.families import Part
from shardload.families.registry import model_types
from shardload.keras_bridge.model_state import own_layers

CASES = {
    **{name: f"{name}, base model" for name in ("albert", "bert", "distilbert", "esm", "vit", "deit", "swin")},
    **{name: f"{name}, base model" for name in ("dinov2", "dinov2_with_registers", "dinov3_vit", "t5gemma2")},
    **{name: f"{name}, tied" for name in ("gemma", "gemma2", "qwen2", "qwen3", "smollm3", "bloom", "gpt2")},
    **{name: f"{name}, 3 KV heads" for name in ("llama", "mistral", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss")},
    **{name: f"{name}, token types of zeros" for name in ("roberta", "xlm-roberta")},
    **{name: f"{name}, vision" for name in ("gemma3", "paligemma", "qwen3_5", "qwen3_5_moe")},
    "gemma3_text": "gemma3_text, 7 layers", "gemma4_text": "gemma4_text, two head_dims", "gemma4": "gemma4, vision",
    "phi3": "phi3, 1 KV head", "bart": "bart, LM", "t5gemma": "t5gemma, no sliding attention", "blip-2": "blip-2, opt",
    "metaclip_2": "metaclip_2, both",
}  # fmt: skip
MADE = "gemma4_assistant"
"""transformers 5.23 cannot build this class, so its folder is made from that of a text model."""
SMALL = "gemma3n"
"""A model of which `hub_nested` has a folder, and `transformers_cross` none."""
LINEAR = r".*(q_proj|query|c_attn|query_key_value|qkv_proj|q_lin|attention\.query)\.weight$"

QUERIES = r"query|^q_(proj|dense|dense_layer)$|^attention_projection$"
"""Layers by KerasHub's names: queries, or in Swin, which joins them with keys and values, what attention gives."""


def test_each_model_is_tried():
    known = {name for name, one in model_types().items() if not one.is_part and Part.ADAPTERS not in one.lacks}
    assert {*CASES, MADE, SMALL} == known


def tensors_of(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def write(folder, stem, tensors):
    folder.mkdir()
    save_file({name: np.array(value, order="C") for name, value in tensors.items()}, folder / f"{stem}.safetensors")


def assistant():
    """Two layers without keys and values of their own, and the projections from and to the model that it assists."""
    text = folders.read_family("gemma4_text")["gemma4_text, global_head_dim"]
    [tensors] = text["files"].values()
    made = {name: size for name, size in tensors.items() if not re.search(r"self_attn\.(k|v)_", name)}
    made |= {"pre_projection.weight": "F32 32x48", "post_projection.weight": "F32 24x32"}
    config = text["json"]["config.json"]
    described = {
        "model_type": MADE, "architectures": ["Gemma4AssistantForCausalLM"], "backbone_hidden_size": 24,
        "use_ordered_embeddings": False, "num_centroids": 4, "centroid_intermediate_top_k": 2,
        "text_config": config | {"num_kv_shared_layers": config["num_hidden_layers"]},
    }  # fmt: skip
    return text | {"json": {"config.json": described}, "files": {"model.safetensors": made}}


@pytest.fixture
def base(request, tmp_path, monkeypatch):
    if request.param == SMALL:
        hub_nested.shrink_mobilenet(monkeypatch)
        return hub_nested.write(tmp_path / "base", request.param)
    if request.param == MADE:
        return folders.build(assistant(), tmp_path / "base")
    return folders.build(folders.read_family(request.param)[CASES[request.param]], tmp_path / "base")


@pytest.mark.sample(6)
@pytest.mark.parametrize("base", [*CASES, MADE, SMALL], indirect=True)
def test_an_adapter_is_merged(base, tmp_path, request):
    tensors, rng = tensors_of(base), np.random.default_rng(0)
    names = [name for name in tensors if re.match(LINEAR, name)]
    is_conv1d = model_types()[request.node.callspec.params["base"]].has_conv1d
    factors = {}
    for name in names:
        out, inputs = tensors[name].shape[:: -1 if is_conv1d else 1]
        a, b = (rng.integers(-4, 4, shape).astype(np.float32) / 8 for shape in ((2, inputs), (out, 2)))
        module = f"base_model.model.{name.removesuffix('.weight')}"
        factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        product = 2 * (b @ a)  # exact, as factors have few bits
        tensors[name] = tensors[name] + (product.T if is_conv1d else product)
    adapter, merged = tmp_path / "adapter", tmp_path / "merged"
    write(adapter, "adapter_model", factors)
    targets = [name.removesuffix(".weight") for name in names]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": targets, "fan_in_fan_out": is_conv1d}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    write(merged, "model", tensors)
    (merged / "config.json").write_bytes((base / "config.json").read_bytes())
    found = shardload.load(base, adapter=adapter, mesh="1x2")
    wanted = shardload.load(merged, mesh="1x2")
    pairs = zip(wanted.weights, found.weights, strict=True)
    assert [one.path for one, other in pairs if one.numpy().tobytes() != other.numpy().tobytes()] == []


@pytest.mark.sample(6)
@pytest.mark.parametrize("base", [*CASES, MADE, SMALL], indirect=True)
def test_lora_is_written_for_peft(base, tmp_path):
    model = shardload.load(base, dtype="float32", mesh="1x2")
    rng = np.random.default_rng(0)
    every = [one for one in own_layers(model) if one.name]
    layers = [one for one in every if re.search(QUERIES, one.name) and hasattr(one, "enable_lora")]
    layers = [one for one in layers if len(one.kernel.shape) < 4]  # no convolutions (of Gemma 3n's tower)
    assert layers
    for layer in every:
        layer.trainable = any(layer is one for one in layers)
    for layer in layers:
        layer.enable_lora(2, lora_alpha=4)
        for factor in (layer.lora_kernel_a, layer.lora_kernel_b):
            factor.assign(rng.integers(-4, 4, factor.shape) / 8)
    shardload.save_as(model, tmp_path / "adapter", to="peft")
    again = shardload.load(base, dtype="float32", mesh="1x2", adapter=tmp_path / "adapter")
    merged = [one for one in own_layers(again) if one.name]
    for layer, other in zip(every, merged, strict=True):
        if layer in layers:
            assert np.array_equal(np.asarray(other.kernel), np.asarray(layer.kernel)), layer.path


def test_lora_of_a_layer_that_joins_tensors_is_refused(tmp_path):
    model = shardload.load(folders.build(folders.read_family("swin")[CASES["swin"]], tmp_path / "base"))
    model.stages[0].blocks[0].attn.qkv.enable_lora(2)
    with pytest.raises(UnsupportedError, match=r"Cannot save .* with to='peft': .*attention_qkv"):
        shardload.save_as(model, tmp_path / "adapter", to="peft")
