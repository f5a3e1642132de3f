"""Values go from a Hugging Face folder to the model as they are, whatever KerasHub's converter casts them to.

The tensors get values outside of float16's range: infinite or zero, if a converter's cast to float16 were made.
"""

import hub_folders
import hub_nested
import keras_hub
import numpy as np
import pytest
from by_hand import check_same
from gguf_pairs import write as write_gguf
from safetensors.numpy import load_file, save_file

import shardload
from shardload.keras_bridge.variables import value_of
from shardload.loaders import open_manifest
from shardload.mapping.converters import map_hub

pytestmark = pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning")  # KerasHub's Swin

EXTREMES = {
    "float32": (1e5, -3e38, 3e-9, 1e-40, 1 / 3),
    "bfloat16": (1e5, -3e38, 3e-9, 1e-40, 0.334),
    "float16": (65504, -6e-8, 1 / 3),
}
"""By dtype; 1e-40 and -6e-8 are subnormal."""
ARITHMETIC = {
    "dinov2": {"interpolated_position_embeddings"},
    "xlm-roberta": {"embeddings"},  # adds the embedding of a token type
}
"""By family: last parts of the variables whose values its converter computes."""
FAST = {"mistral", "mixtral", "gpt2", "qwen3_5_moe vision experts"}
FAMILIES = [
    pytest.param(module, name, marks=[] if name in FAST else pytest.mark.slow, id=name)
    for module in (hub_folders, hub_nested)
    for name in module.CONFIGS
]


def with_extremes(folder, dtype):
    """Give every tensor of floating-point numbers the dtype, and first the values that other dtypes lack."""
    for file in folder.rglob("*.safetensors"):
        tensors = load_file(file)
        for name, value in tensors.items():
            if value.dtype.kind == "f" and value.size:
                cast = value.astype(np.dtype(dtype))
                n = min(cast.size, len(EXTREMES[dtype]))
                cast.reshape(-1)[:n] = np.array(EXTREMES[dtype][:n]).astype(cast.dtype)
                tensors[name] = cast
        save_file(tensors, file)
    return folder


def bits(array):
    return np.ascontiguousarray(array).view(f"u{array.itemsize}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("module", "name"), FAMILIES)
def test_no_converter_changes_a_value(module, name, dtype, tmp_path, monkeypatch):
    hub_nested.shrink_mobilenet(monkeypatch)
    folder = with_extremes(write(tmp_path, module, name), dtype)
    options = {"ignore_config": ("rope_parameters", "sliding_window", "is_causal"), "task": name == "gemma4_assistant"}
    model = shardload.load(folder, mesh="1x2", dtype=dtype, **options)
    stored = [value.reshape(-1) for file in folder.rglob("*.safetensors") for value in load_file(file).values()]
    found = map_hub(model, open_manifest(folder)).provided
    # Some parts of KerasHub's models are always float32, which has all values of bfloat16.
    dtypes = {np.asarray(value_of(variable)).dtype for variable in found}
    known = {kind: np.unique(np.concatenate([bits(s.astype(kind)) for s in stored])) for kind in dtypes}
    for variable in found:
        value = np.asarray(value_of(variable))
        among = known[value.dtype]
        nearest = among[np.searchsorted(among, bits(value)).clip(max=len(among) - 1)]
        assert is_computed(name, variable) or np.array_equal(nearest, bits(value)), variable.path
    assert len(found) > sum(is_computed(name, v) for v in found)


def write(folder, module, name):
    if module is hub_nested:
        return hub_nested.write(folder, name, files=2 if name in ("gemma3n", "qwen3_5") else 1)
    made = hub_folders.build(folder, name, abstract=name == "swin")
    return hub_folders.write(folder, name, made, unwanted=False)


def is_computed(name, variable):
    return variable.path.split("/")[-1] in ARITHMETIC.get(name, ())


# ---- Mistral, whose converter casts every tensor to float16 ----------------------------------------


@pytest.fixture(params=EXTREMES)
def mistral(request, tmp_path):
    folder = with_extremes(write(tmp_path / "mistral", hub_folders, "mistral"), request.param)
    return folder, request.param


PARTS = {
    "self_attention_layernorm/scale": "input_layernorm",
    "feedforward_layernorm/scale": "post_attention_layernorm",
    "self_attention/query/kernel": "self_attn.q_proj",
    "self_attention/key/kernel": "self_attn.k_proj",
    "self_attention/value/kernel": "self_attn.v_proj",
    "self_attention/attention_output/kernel": "self_attn.o_proj",
    "feedforward_gate_dense/kernel": "mlp.gate_proj",
    "feedforward_intermediate_dense/kernel": "mlp.up_proj",
    "feedforward_output_dense/kernel": "mlp.down_proj",
}


def tensor_of(path):
    """The name of the tensor whose transpose fills a variable of Mistral."""
    outside = {"token_embedding/embeddings": "model.embed_tokens", "token_embedding/reverse_embeddings": "lm_head"}
    outside |= {"sequence_output_layernorm/scale": "model.norm"}
    if path in outside:
        return f"{outside[path]}.weight"
    layer, _, part = path.partition("/")
    return f"model.layers.{layer.rpartition('_')[2]}.{PARTS[part]}.weight"


def check_values(model, folder):
    """Compare with the file's tensors, rearranged here by hand."""
    stored, weights = load_file(folder / "model.safetensors"), getattr(model, "backbone", model).trainable_variables
    assert {tensor_of(v.path) for v in weights} == set(stored)
    for variable in weights:
        value = stored[tensor_of(variable.path)]
        value = value if variable.path == "token_embedding/embeddings" else value.T
        found, value = np.asarray(value_of(variable)), value.reshape(variable.shape)
        np.testing.assert_array_equal(bits(found), bits(value), variable.path)


@pytest.mark.parametrize("mesh", ["1x1", "2x4", "1x8"])
def test_mistral_loads_exactly_without_computing(mistral, mesh):
    folder, dtype = mistral
    model = shardload.load(folder, mesh=mesh, dtype=dtype)
    check_values(model, folder)
    assert shardload.report(model).computed == shardload.plan(folder, mesh=mesh, dtype=dtype).computed == ()


def test_mistral_loads_exactly_into_an_existing_model(mistral):
    folder, dtype = mistral
    model = hub_folders.build(folder, "mistral", dtype)
    shardload.load_weights(model, folder, mesh="1x2")
    check_values(model, folder)


@pytest.mark.parametrize("to", ["preset", "out.weights.h5", "out.weights.json", "safetensors", "orbax"])
def test_mistral_converts_exactly(mistral, to, tmp_path):
    folder, dtype = mistral
    target = tmp_path / to
    report = shardload.convert(folder, target, to="h5" if "." in to else to)
    assert not any("comput" in note for note in report.notes)
    model = hub_folders.build(folder, "mistral", dtype)
    shardload.load_weights(model, target, mesh="1x2")
    check_values(model, folder)


def test_mistral_is_saved_exactly_for_hugging_face(mistral, tmp_path):
    folder, dtype = mistral
    shardload.save_as(shardload.load(folder, mesh="1x2", dtype=dtype), tmp_path / "out", to="safetensors")
    saved = load_file(tmp_path / "out" / "model.safetensors")
    for name, value in load_file(folder / "model.safetensors").items():
        np.testing.assert_array_equal(bits(saved[name]), bits(value), name)


@pytest.mark.parametrize("kind", ["BF16", "Q4_K_M"])
def test_mistral_s_gguf_loads_exactly(kind, tmp_path):
    file, folder = write_gguf(tmp_path, "mistral", kind)
    check_values(shardload.load(file, mesh="1x2", dtype="float32"), folder)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_fast_rounds_as_kerashub_and_says_so(mistral):
    folder, dtype = mistral
    with shardload.fast() as report:
        found = keras_hub.models.Backbone.from_preset(str(folder), dtype=dtype)
    check_same(found, keras_hub.models.Backbone.from_preset(str(folder), dtype=dtype))
    notes = "\n".join(report.calls[0].load.notes)
    assert ("rounds 'model.embed_tokens.weight' and 20 other tensors to float16" in notes) == (dtype != "float16")
