"""Every format, family and dtype loads bit for bit as the reference reader loads it, on any mesh."""

import warnings

import keras
import keras_hub
import models
import numpy as np
import pytest
from initial_values import zeros_for_random
from twins import DTYPES, MESHES, abstract_twin, assert_on, assert_same, twin

import shardload
from shardload.keras_bridge.variables import value_of
from shardload.synth import synth

pytestmark = [
    pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning"),  # norms stay float
    # The reference's own remark on int8 presets; that every weight is equal is what these tests show.
    pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning"),
]

FAMILIES = ("gemma1", "gemma2", "gemma3", "llama", "gpt2", "bert", "conv")


def saved(family, dtype):
    """A seeded model as somebody would have saved it; int8 by Keras' own quantisation."""
    with zeros_for_random():
        model = models.randomise(models.build(family, "bfloat16" if dtype == "int8" else dtype))
    if dtype == "int8":
        model.quantize("int8")
    return model


def assert_filled_as_by_keras(original, path, meshes):
    with zeros_for_random():
        reference = twin(original)
    reference.load_weights(path)
    for mesh in meshes:
        model = abstract_twin(original)
        report = shardload.load_weights(model, path, mesh=mesh)
        assert_same_on(mesh, model, reference)
        assert (report.missing, report.unused) == ((), ())


def assert_same_on(mesh, model, reference, **options):
    assert_same(model, reference, **options)
    assert_on(model, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_weights_h5_equals_keras_load_weights(family, dtype, tmp_path, meshes):
    path = tmp_path / "model.weights.h5"
    original = saved(family, dtype)
    original.save_weights(path)
    assert_filled_as_by_keras(original, path, meshes)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_sharded_weights_equal_keras_load_weights(family, tmp_path, meshes):
    path = tmp_path / "model.weights.json"
    original = saved(family, "bfloat16")
    original.save_weights(path, max_shard_size=6.5e-6 if family == "conv" else 1e-4)  # GB
    assert len(list(tmp_path.glob("*.h5"))) > 1
    assert_filled_as_by_keras(original, path, meshes)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_keras_archive_equals_keras_load_model(family, dtype, tmp_path, meshes):
    path = tmp_path / "model.keras"
    saved(family, dtype).save(path)
    with zeros_for_random():
        reference = keras.saving.load_model(path)
    for mesh in meshes:
        assert_same_on(mesh, shardload.load(path, mesh=mesh), reference)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*DTYPES, "int8"])
@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "conv"])
def test_preset_equals_keras_hub_from_preset(family, dtype, tmp_path, meshes):
    original = saved(family, dtype)
    original.save_to_preset(tmp_path / "preset")
    # KerasHub 0.32 cannot read back the int8 presets it writes (ReversibleEmbedding expects other variables), and
    # makes everything float32 unless told otherwise.
    with zeros_for_random():
        reference = original if dtype == "int8" else type(original).from_preset(str(tmp_path / "preset"), dtype=dtype)
    for mesh in meshes:
        # The configuration Keras saves asks for float32 scales where the file holds bfloat16 ones.
        assert_same_on(mesh, shardload.load(tmp_path / "preset", mesh=mesh), reference, widened=dtype == "int8")


HUGGING_FACE = {
    "gemma_2b": "GemmaBackbone", "gemma2_2b": "GemmaBackbone", "gemma3_270m": "Gemma3Backbone",
    "llama3_8b": "Llama3Backbone", "mistral_7b": "MistralBackbone", "gpt2_base": "GPT2Backbone",
    "bert_base": "BertBackbone",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", HUGGING_FACE)
def test_hugging_face_folder_equals_keras_hub_from_preset(name, dtype, tmp_path, meshes):
    folder = synth(name, format="safetensors", scale=0.02, dtype="bfloat16", directory=tmp_path / name)
    with zeros_for_random():
        reference = getattr(keras_hub.models, HUGGING_FACE[name]).from_preset(str(folder), dtype=dtype)
    for mesh in meshes:
        assert_same_on(mesh, shardload.load(folder, mesh=mesh, dtype=dtype, task=False), reference)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_bare_safetensors_into_a_model_that_stands(dtype, tmp_path):
    from safetensors.numpy import save_file

    reference = saved("llama", dtype)
    save_file({v.path: np.asarray(value_of(v)) for v in reference.weights}, tmp_path / "x.safetensors")
    for mesh in MESHES:
        model = abstract_twin(reference)
        shardload.load_weights(model, tmp_path / "x.safetensors", mesh=mesh)
        assert_same(model, reference)
        assert_on(model, mesh)


@pytest.mark.slow
def test_a_cast_is_what_keras_would_have_rounded_to_and_is_reported(tmp_path):
    saved("gpt2", "float32").save_weights(tmp_path / "model.weights.h5")
    reference = models.build("gpt2", "bfloat16")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        reference.load_weights(tmp_path / "model.weights.h5")
    model = abstract_twin(reference)
    report = shardload.load_weights(model, tmp_path / "model.weights.h5", mesh="1x8")
    assert_same(model, reference)
    assert len(report.cast) == len(model.weights)
    assert {(c.stored, c.loaded) for c in report.cast} == {("float32", "bfloat16")}
