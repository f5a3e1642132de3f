"""Whole models from nested Hugging Face folders: `shardload.load` equals KerasHub's ``from_preset``, bit for bit."""

import json
import pkgutil
import re
import shutil
from pathlib import Path

import hub_folders
import hub_nested
import keras
import numpy as np
import pytest
from by_hand import check_same
from initial_values import zeros_for_random
from safetensors.numpy import load_file, save_file

import shardload
from shardload.errors import MismatchError, UnsupportedError
from shardload.hub import kerashub
from shardload.keras_bridge.model_state import own_layers
from shardload.manifest import Manifest
from shardload.stores.local import located

pytestmark = pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning")  # KerasHub's T5

INDEXED = {"gemma3n", "qwen3_5"}
"""KerasHub loads Gemma 3n only where there is an index; with one, Qwen 3.5's converter looks at all names."""
FAST = {"dinov3_vit", "gemma3_text embedding", "gemma4_text", "gemma4_assistant", "qwen3_5_moe vision experts"}
EVERY = [pytest.param(name, marks=[] if name in FAST else pytest.mark.slow) for name in hub_nested.CONFIGS]


def folder(tmp_path, name):
    return hub_nested.write(tmp_path / "hf", name, files=2 if name in INDEXED else 1)


LIKE_KERASHUB = ("rope_parameters", "sliding_window")
"""Fields that KerasHub reads otherwise than the small folders say; here KerasHub is what to equal."""


def same_as_kerashub(source, cls, *, task, mesh):
    model = shardload.load(source, mesh=mesh, task=task, ignore_config=LIKE_KERASHUB)
    with zeros_for_random():
        reference = cls.from_preset(str(source), **({"preprocessor": None} if task else {}))
    assert type(model) is type(reference)
    report = shardload.report(model)
    assert not report.missing and not report.unused
    check_same(model, reference)
    return report


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_equals_from_preset(name, tmp_path, monkeypatch):
    from keras_hub.models import Backbone, Gemma4AssistantCausalLM

    hub_nested.shrink_mobilenet(monkeypatch)
    task = name == "gemma4_assistant"
    mesh = ("1x2", "2x2")[list(hub_nested.CONFIGS).index(name) % 2]
    same_as_kerashub(folder(tmp_path, name), Gemma4AssistantCausalLM if task else Backbone, task=task, mesh=mesh)


def test_every_converter_has_a_folder():
    from keras_hub.src.utils import transformers

    types = {name.split()[0] for name in (*hub_folders.CONFIGS, *hub_nested.CONFIGS)}
    manifests = [Manifest(located("/m"), "hf-safetensors", {}, {}, {"model_type": t}) for t in types]
    converters = [kerashub.converter(manifest) for manifest in manifests]
    # shardload's own, which are not modules, take the place of some.
    tested = {getattr(one, "__name__", "").rpartition(".")[2] or "convert_gpt_oss" for one in converters}
    there = {module.name for module in pkgutil.iter_modules(transformers.__path__) if "convert_" in module.name}
    assert tested == there


def test_every_architecture_is_documented():
    text = (Path(__file__).parents[2] / "docs/reference/families.md").read_text()
    listed = set(re.findall(r"`([\w-]+)`", text.partition("## Hugging Face architectures")[2].partition("\n## ")[0]))
    assert {name.split()[0] for name in (*hub_folders.CONFIGS, *hub_nested.CONFIGS)} <= listed


@pytest.mark.parametrize("part", ["2_Dense", "3_Dense"])
def test_an_embedder_without_its_heads_is_refused(part, tmp_path):
    source = folder(tmp_path, "gemma3_text embedding")
    shutil.rmtree(source / part)
    with pytest.raises(MismatchError, match=r"missing from the checkpoint: .*embedding_projection/kernel"):
        shardload.load(source, mesh="1x2", task=False)


def gelus(tower):
    """The activation layers of a MobileNet."""
    found = [layer for layer in own_layers(tower) if isinstance(layer, keras.layers.Activation)]
    return [layer for layer in found if getattr(layer.activation, "__name__", "") != "linear"]


@pytest.mark.slow
def test_biases_a_converter_never_asks_for_stay_zero_and_are_noted(tmp_path, monkeypatch):
    hub_nested.shrink_mobilenet(monkeypatch)
    model = shardload.load(folder(tmp_path, "gemma3n"), mesh="1x2", task=False)
    activation, note = sorted(shardload.report(model).notes)
    assert "act_layer: set to gelu_pytorch_tanh on the layers" in activation
    points = np.linspace(-3, 3, 7, dtype=np.float32)
    computed = {np.asarray(layer.activation(points)).tobytes() for layer in gelus(model.vision_encoder)}
    assert computed == {np.asarray(keras.activations.gelu(points, approximate=True)).tobytes()}
    assert re.fullmatch(r"initial zeros or ones remain in 19 variables, .* no tensor .*: conv_stem/.*/bias …", note)


@pytest.mark.slow
@pytest.mark.parametrize("stored", ["all layers", "without shared ones"])
def test_gemma_3n_as_transformers_5_writes_it(stored, tmp_path, monkeypatch):
    """A bias that KerasHub's converter forgets is loaded, and keys that no layer computes with may be lacking."""
    hub_nested.shrink_mobilenet(monkeypatch)
    source = hub_nested.write(tmp_path / "hf", "gemma3n")
    config = json.loads((source / "config.json").read_text()) | {"architectures": ["Gemma3nForConditionalGeneration"]}
    text = config["text_config"]
    del text["rope_theta"]
    text["rope_parameters"] = {"full_attention": {"rope_type": "default", "rope_theta": 5e5}}
    text |= {"num_kv_shared_layers": 1, "layer_types": ["full_attention"] * 2}
    (source / "config.json").write_text(json.dumps(config))
    (path,) = source.glob("*.safetensors")
    shared = r".*layers\.1\.self_attn\.(k_proj|v_proj|k_norm)\.weight"
    kept = {n: v for n, v in load_file(path).items() if stored == "all layers" or not re.fullmatch(shared, n)}
    bias = np.arange(8, dtype=np.float32)
    save_file({**kept, "model.vision_tower.timm_model.conv_stem.conv.bias": bias}, path)
    model = shardload.load(source, mesh="1x2")
    assert model.rope_theta == 5e5
    assert np.array_equal(model.vision_encoder.get_layer("conv_stem").conv.bias, bias)
    notes = "\n".join(shardload.report(model).notes)
    assert "Built as a backbone, without a head" in notes
    assert ("in 3 variables, which the model never computes with" in notes) == (stored != "all layers")


@pytest.mark.slow
@pytest.mark.parametrize(
    "rope",
    [{"full_attention": {"rope_type": "linear", "factor": 2.0}}, {"sliding_attention": {"rope_theta": 1e5}}],
)
def test_positions_of_gemma_3n_that_its_class_lacks_are_refused(rope, tmp_path, monkeypatch):
    hub_nested.shrink_mobilenet(monkeypatch)
    source = folder(tmp_path, "gemma3n")
    config = json.loads((source / "config.json").read_text())
    config["text_config"]["rope_parameters"] = rope
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="rope_parameters is rotary positions of type"):
        shardload.load(source, mesh="1x2")


@pytest.mark.slow
def test_a_random_weight_a_converter_never_asks_for_is_refused(tmp_path, monkeypatch):
    """KerasHub leaves T5Gemma's own output layer at its random values."""
    monkeypatch.setitem(hub_nested.CONFIGS["t5gemma"], "tie_word_embeddings", False)
    with pytest.raises(MismatchError, match="missing from the checkpoint: decoder_token_embedding/reverse_embeddings"):
        shardload.load(folder(tmp_path, "t5gemma"), mesh="1x2", ignore_config=LIKE_KERASHUB)


@pytest.mark.slow
def test_a_preset_whose_layer_recomputes_what_it_stores(tmp_path):
    """DINOv2 interpolates one table from another: while building, while loading, and whatever the file has for it."""
    from keras_hub.models import Backbone, DINOV2Backbone

    sizes = {"patch_size": 16, "num_layers": 1, "hidden_dim": 16, "num_heads": 2, "intermediate_dim": 32}
    saved = DINOV2Backbone(**sizes, image_shape=(32, 32, 3), position_embedding_shape=(64, 64))
    saved.save_to_preset(str(tmp_path))
    loaded = shardload.load(tmp_path, mesh="1x2")
    check_same(loaded, Backbone.from_preset(str(tmp_path)))
    assert any("DINOV2Embedding" in note and "does not read these" in note for note in shardload.report(loaded).notes)
    larger = DINOV2Backbone(**sizes, image_shape=(48, 48, 3), position_embedding_shape=(64, 64))
    assert shardload.load_weights(larger, tmp_path, mesh="1x2").unused == ()
    saved = DINOV2Backbone(**sizes, image_shape=(48, 48, 3), position_embedding_shape=(64, 64))
    saved.load_weights(tmp_path / "model.weights.h5")
    check_same(larger, saved)
