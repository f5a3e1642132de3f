"""Models from configurations: the right class, dtype and inputs for each kind of checkpoint; no weights read."""

import json
import os
import subprocess
import sys

import keras
import keras_hub
import models
import numpy as np
import pytest

from shardload.errors import MissingExtraError, SourceError, UnsupportedError
from shardload.hub import building, kerashub
from shardload.manifest import Extent, Manifest, Tensor
from shardload.stores.local import located

LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 16, "intermediate_size": 32,
    "tie_word_embeddings": False, "rope_theta": 500000.0,
}  # fmt: skip


def described(source, format, config, *, dtype="float32", metadata=None):
    """A manifest with forty small tensors: what a loader would make of the headers."""
    tensors = {f"t{i}": Tensor(f"t{i}", (2,), np.dtype(dtype), Extent(located(source), 0)) for i in range(40)}
    return Manifest(located(source), format, tensors, {}, config, metadata or {})


def preset(folder, **kwargs):
    """The manifest of a KerasHub preset folder."""
    config = json.loads((folder / "config.json").read_text())
    task = folder / "task.json"
    metadata = {"task": json.loads(task.read_text())} if task.exists() else {}
    return described(folder, "keras-hub-preset", config, metadata=metadata, **kwargs)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "llama", "gpt2"])
def test_preset_task_equals_the_saved_one(family, tmp_path):
    saved = models.causal_lm(family, "bfloat16")
    saved.save_to_preset(str(tmp_path))
    built = building.build_model(preset(tmp_path))
    assert type(built) is type(saved)
    # Keras numbers the names of sub-layers as they are made, so paths differ: compare their order and shapes.
    assert [(v.shape, v.dtype) for v in built.weights] == [(v.shape, v.dtype) for v in saved.weights]
    assert built.backbone.get_config() == saved.backbone.get_config()


@pytest.mark.parametrize(("make", "family"), [(models.build, "bert"), (models.causal_lm, "gpt2")])
def test_preset_without_task_or_with_one_that_is_declined_is_a_backbone(make, family, tmp_path):
    make(family).save_to_preset(str(tmp_path))
    built = building.build_model(preset(tmp_path), task=make is models.build)
    assert type(built).__name__ == {"bert": "BertBackbone", "gpt2": "GPT2Backbone"}[family]


def test_preset_dtype_is_overridden_throughout(tmp_path):
    models.causal_lm("gemma3", "float32").save_to_preset(str(tmp_path))
    assert {v.dtype for v in building.build_model(preset(tmp_path), dtype="bfloat16").weights} == {"bfloat16"}


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
def test_quantised_preset_keeps_its_scheme(tmp_path):
    saved = models.causal_lm("gemma2", "bfloat16")
    saved.quantize("int8")
    saved.save_to_preset(str(tmp_path))
    for dtype in (None, "float32"):
        built = building.build_model(preset(tmp_path), dtype=dtype)
        assert sum(v.dtype == "int8" for v in built.weights) == sum(v.dtype == "int8" for v in saved.weights) > 0


def test_classifier_keeps_its_head(tmp_path):
    saved = keras_hub.models.BertTextClassifier(backbone=models.build("bert"), num_classes=3, preprocessor=None)
    saved.save_to_preset(str(tmp_path))
    assert building.build_model(preset(tmp_path)).output_shape == (None, 3)


@pytest.mark.slow
def test_transformers_causal_lm_takes_its_own_dtype():
    built = building.build_model(described("/m", "hf-safetensors", {**LLAMA, "torch_dtype": "bfloat16"}))
    assert type(built) is keras_hub.models.Llama3CausalLM
    assert {v.dtype for v in built.weights if "seed" not in v.path} == {"bfloat16"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "expected"),
    [("LlamaForCausalLM", "Llama3CausalLM"), ("LlamaModel", "Llama3Backbone"), (None, "Llama3CausalLM")],
)
def test_transformers_architecture_decides_the_class(architecture, expected):
    config = {**LLAMA, "architectures": [architecture] if architecture else []}
    assert type(building.build_model(described("/m", "hf-safetensors", config))).__name__ == expected


def test_image_classifier_has_its_labels():
    config = {"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 16}
    config |= {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
    config |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "qkv_bias": True}
    config |= {"layer_norm_eps": 1e-6, "id2label": {"0": "cat", "1": "dog", "2": "fox"}}
    built = building.build_model(described("/m", "hf-safetensors", config))
    assert isinstance(built, keras_hub.models.ViTImageClassifier)
    assert built.output_shape == (None, 3)


@pytest.mark.parametrize(
    ("format", "config", "stored", "expected"),
    [
        ("hf-safetensors", {"torch_dtype": "bfloat16"}, "float32", "bfloat16"),
        ("hf-safetensors", {"dtype": "torch.float16"}, "float32", "float16"),
        ("hf-safetensors", {"text_config": {"dtype": "bfloat16"}}, "float32", "bfloat16"),
        ("hf-safetensors", {}, "float16", "float16"),
        ("keras-h5", {}, "bfloat16", "bfloat16"),
        ("keras-h5", {}, "int8", "float32"),
        ("gguf", {}, "float32", "bfloat16"),
    ],
)
def test_dtype_is_the_checkpoints_own(format, config, stored, expected):
    assert building.checkpoint_dtype(described("/m", format, config, dtype=stored)) == expected


def archive(model, tmp_path):
    path = tmp_path / "m.keras"
    model.save(path)
    import zipfile

    return described(path, "keras-archive", json.loads(zipfile.ZipFile(path).read("config.json")))


def test_archive_comes_back_compiled(tmp_path):
    saved = models.build("conv")
    saved.compile("adam", "mse")
    built = building.build_model(archive(saved, tmp_path))
    assert [w.path for w in built.weights] == [w.path for w in saved.weights]
    assert type(built.optimizer) is keras.optimizers.Adam


def test_archive_dtype_reaches_every_layer(tmp_path):
    built = building.build_model(archive(models.build("conv"), tmp_path), dtype="bfloat16")
    assert {w.dtype for w in built.weights} == {"bfloat16"}


def test_archive_with_code_is_refused(tmp_path):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Lambda(lambda x: x + 1)(inputs))
    with pytest.raises(UnsupportedError, match=r"m\.keras.*lambda.*shardload\.load\(source, safe_mode=False\)"):
        building.build_model(archive(model, tmp_path))


@pytest.mark.filterwarnings("ignore:The object being serialized includes a `lambda`:UserWarning")
def test_a_lambda_as_loss_is_refused_naming_the_way_out(tmp_path):
    saved = models.build("conv")
    saved.compile("sgd", loss=lambda wanted, found: keras.ops.mean(wanted - found))
    manifest = archive(saved, tmp_path)
    with pytest.raises(UnsupportedError, match=r"lambda.*safe_mode=False\).*compile=False") as refused:
        building.build_model(manifest)
    assert "custom_objects" not in str(refused.value)
    assert building.build_model(manifest, safe_mode=False).loss.__name__ == "<lambda>"
    assert not building.build_model(manifest, compile=False).compiled


def test_unknown_class_asks_for_custom_objects(tmp_path):
    class Mine(keras.layers.Layer):
        def call(self, x):
            return x

    inputs = keras.Input((2,))
    manifest = archive(keras.Model(inputs, Mine()(inputs)), tmp_path)
    with pytest.raises(UnsupportedError, match="custom_objects"):
        building.build_model(manifest)
    assert isinstance(building.build_model(manifest, custom_objects={"Mine": Mine}).layers[1], Mine)


ESM = {"model_type": "esm", "position_embedding_type": "rotary"}  # for vocab_size transformers has no default
REFUSED = {
    "unknown model type": ({"model_type": "rwkv"}, UnsupportedError, r"'rwkv'.*gemma3_text.*qwen2"),
    "a field is missing": (ESM, SourceError, "lacks 'vocab_size'"),
    "more layers than tensors": ({**LLAMA, "num_hidden_layers": 10**9}, SourceError, "num_hidden_layers=1000000000"),
}


@pytest.mark.parametrize(("config", "error", "says"), REFUSED.values(), ids=REFUSED)
def test_what_a_configuration_lacks_is_named_before_building(config, error, says):
    with pytest.raises(error, match=says):
        building.build_model(described("/m", "hf-safetensors", config))


def test_weights_alone_say_how_to_fill_a_model(tmp_path):
    with pytest.raises(UnsupportedError, match="load_weights"):
        building.build_model(described(tmp_path / "x.weights.h5", "keras-h5", {}))


def test_weights_with_a_configuration_beside_them(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(keras.saving.serialize_keras_object(models.build("gpt2"))))
    built = building.build_model(described(tmp_path / "x.weights.h5", "keras-h5", {}))
    assert type(built) is keras_hub.models.GPT2Backbone


@pytest.mark.parametrize(
    ("text", "message"), [("[" * 200_000 + "}", "brackets"), ('{"class_name": 1, "class_name": 2}', "twice")]
)
def test_the_configuration_beside_weights_is_not_trusted(text, message, tmp_path):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(SourceError, match=message):
        building.build_model(described(tmp_path / "x.weights.h5", "keras-h5", {}))


def test_converter_is_kerashubs_module():
    manifest = described("/m.gguf", "gguf", {"model_type": "gemma3_text"})
    assert kerashub.converter(manifest).__name__.endswith("convert_gemma3")


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "keras_hub", None)
    with pytest.raises(MissingExtraError, match=r"shardload\[hub\]"):
        building.build_model(described("/m", "hf-safetensors", LLAMA))


class NeedsAnother(keras.layers.Layer):
    def __init__(self, **options):
        super().__init__(**options)
        import no_such_module  # noqa: F401


UPGRADE = r"No module named 'keras_hub\.no_such_part'.*--upgrade --force-reinstall 'shardload\[hub\]'"


@pytest.mark.parametrize(
    ("module", "name", "message"),
    [
        (None, "NeedsAnother", "'no-such-module', which is not installed. Install the package that provides it"),
        ("keras_nlp.models", None, "'keras-nlp', which is not installed"),
        ("keras_hub.no_such_part", None, UPGRADE),
    ],
)
def test_a_missing_module_is_named_instead_of_custom_objects(module, name, message):
    config = keras.saving.serialize_keras_object(keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]))
    layer = {"module": module, "class_name": name or "Bert", "config": {}, "registered_name": name}
    config["config"]["layers"][1] = layer
    manifest = described("/m.keras", "keras-archive", config)
    with pytest.raises(MissingExtraError, match=message) as caught:
        building.build_model(manifest, custom_objects={"NeedsAnother": NeedsAnother})
    assert "custom_objects" not in str(caught.value)


@pytest.mark.parametrize("then", ["raise", "raise ImportError('kagglehub failed to import')"])
def test_a_part_of_the_extra_that_is_missing_is_named(then, monkeypatch, tmp_path):
    (tmp_path / "keras_hub.py").write_text(f"try:\n import no_such_module\nexcept ImportError:\n {then}")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keras_hub")
    with pytest.raises(MissingExtraError, match=r"'no-such-module', which is not installed.*'shardload\[hub\]'"):
        kerashub.keras_hub()


def test_kerashub_is_imported_without_a_home(monkeypatch, tmp_path):
    # A stand-in, because KerasHub is imported already: kagglehub, which it imports, asks for the home folder at once.
    (tmp_path / "keras_hub.py").write_text("from pathlib import Path; HOME = Path.home()")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "keras_hub")
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os, "getuid", lambda: 1 << 30)
    assert str(kerashub.keras_hub().HOME) == os.devnull
    assert "HOME" not in os.environ


def test_importing_the_module_imports_nothing_heavy():
    code = "import sys, shardload.hub.kerashub; print([m for m in ('keras', 'jax', 'keras_hub') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
