"""Sources whose values must be decoded or computed: the result loads like the source, bit for bit."""

import json
import re
import weakref

import gguf_pairs
import hub_folders
import keras
import keras_hub
import numpy as np
import pytest
import warm_start
from by_hand import check_same
from conversions import ROOT, killed, lines_done
from gguf_fixture import gemma3_gguf  # noqa: F401 - a fixture
from hub_folders import build

import shardload
from shardload.errors import UnsupportedError
from shardload.keras_bridge.variables import value_of
from shardload.synth import synth
from shardload.transfer import read_tensor

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning"),  # KerasHub's Swin
    # KerasHub leaves the vocabulary open when it builds a tokenizer.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

FORMATS = ("h5", "safetensors", "orbax")
GGUF = [
    *(("gemma2", "Q8_0", to) for to in FORMATS),
    *(("llama", "Q4_K_M", "orbax"), ("llama", "F16", "safetensors"), ("qwen3", "Q5_1", "safetensors")),
    *(pytest.param("qwen2", "BF16", to, marks=pytest.mark.slow) for to in FORMATS),
    *(pytest.param("gemma3_text", "Q4_0", to, marks=pytest.mark.slow) for to in FORMATS),
]
COMPUTING = [
    *(("mixtral", to) for to in ("h5", "orbax")),
    *(("xlm-roberta", "h5"), ("dinov2", "orbax")),
    *(pytest.param(name, to, marks=pytest.mark.slow) for name in ("qwen2_moe", "qwen3_moe") for to in ("h5", "orbax")),
    *(pytest.param(name, "h5", marks=pytest.mark.slow) for name in ("swin", "gpt_oss")),
]


def folder_of(tmp_path, model_type, dtype="bfloat16"):
    """A small Hugging Face folder of one of KerasHub's architectures."""
    return hub_folders.write(tmp_path / "hf", model_type, build(tmp_path / "hf", model_type), dtype, unwanted=False)


def assert_same_model(first, second):
    """Whether two checkpoints load alike: paths, dtypes and bits of every weight."""
    ours, theirs = (shardload.load(path, mesh="1x1", task=False) for path in (first, second))
    assert len(ours.weights) > 3
    for one, two in zip(ours.weights, theirs.weights, strict=True):
        a, b = (np.asarray(value_of(v)) for v in (one, two))
        assert (path_of(one), a.dtype, a.tobytes()) == (path_of(two), b.dtype, b.tobytes())


def path_of(variable):
    """Without the model's name, and without the numbers that Keras gives to names used before."""
    return [re.sub(r"_\d+$", "", part) for part in variable.path.split("/")[1:]]


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "kind", "to"), GGUF)
def test_gguf_decodes_to_what_loading_it_gives(model_type, kind, to, tmp_path):
    file, _ = gguf_pairs.write(tmp_path, model_type, kind)
    shardload.convert(file, tmp_path / "out", to=to)
    assert_same_model(file, tmp_path / "out")
    assert {t.dtype.name for t in shardload.inspect(tmp_path / "out").tensors.values()} == {"bfloat16"}


@pytest.mark.slow
def test_gguf_as_a_preset_is_what_keras_hub_makes_of_the_dequantised_folder(tmp_path):
    file, folder = gguf_pairs.write(tmp_path, "gemma2", "Q4_K_M")
    shardload.convert(file, tmp_path / "out", to="h5", dtype="float32")
    reference = keras_hub.models.GemmaBackbone.from_preset(str(folder), dtype="float32")
    check_same(keras_hub.models.GemmaBackbone.from_preset(str(tmp_path / "out"), dtype="float32"), reference)


@pytest.mark.slow
def test_gguf_for_hugging_face_says_which_model_it_is(tmp_path):
    file, _ = gguf_pairs.write(tmp_path, "qwen3", "Q8_0")
    shardload.convert(file, tmp_path / "out", to="safetensors")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    wanted = gguf_pairs.config_of("qwen3")
    same = ("model_type", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size")
    assert {key: config[key] for key in same} == {key: wanted[key] for key in same}
    assert config["torch_dtype"] == "bfloat16"


@pytest.mark.slow
def test_real_gguf_in_little_memory(gemma3_gguf, tmp_path):  # noqa: F811
    report = shardload.convert(gemma3_gguf, tmp_path / "out", to="safetensors", host_memory_bytes="8MiB")
    assert any("tokenizer" in note for note in report.notes)
    assert_same_model(gemma3_gguf, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "to"), COMPUTING)
def test_what_a_converter_computes_is_what_loading_gives(model_type, to, tmp_path):
    folder = folder_of(tmp_path, model_type)
    report = shardload.convert(folder, tmp_path / "out", to=to)
    assert_same_model(folder, tmp_path / "out")
    # The loader dequantises GPT-OSS' codes, row by row; no converter computes them.
    assert any("computes" in note for note in report.notes) == (model_type != "gpt_oss")


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", ["safetensors", "gguf"])
def test_mistral_keeps_its_values(source, to, tmp_path):
    if source == "gguf":
        path, _ = gguf_pairs.write(tmp_path, "mistral", "Q4_K_M")
    else:
        path = synth("mistral_7b", scale=0.02, directory=tmp_path, format="safetensors")
    report = shardload.convert(path, tmp_path / "out", to=to)
    assert_same_model(path, tmp_path / "out")
    # What KerasHub reads of it is told where the folder is new, not a copy.
    is_written_unrounded = (source, to) == ("gguf", "safetensors")
    assert any("rounds these tensors to float16" in note for note in report.notes) == is_written_unrounded


def test_rows_that_the_model_does_not_use_are_left_out_and_told(tmp_path):
    folder = folder_of(tmp_path, "roberta")
    report = shardload.convert(folder, tmp_path / "out", to="h5")
    assert_same_model(folder, tmp_path / "out")
    told = "the model uses 704 of the 768 elements of tensor 'roberta.embeddings.position_embeddings.weight'"
    assert any(note.startswith(told) for note in report.notes)


def test_merged_experts_are_taken_apart(tmp_path):
    source = folder_of(tmp_path, "mixtral")
    shardload.convert(source, tmp_path / "preset", to="h5")
    shardload.convert(tmp_path / "preset", tmp_path / "out", to="safetensors")
    assert_same_model(source, tmp_path / "out")


def test_a_layer_that_computes_what_it_saves_is_refused_for_hdf5(tmp_path):
    message = r"DINOV2Embedding at 'layers/dinov2_embedding' saves arrays.*Keras' model.save_weights"
    with pytest.raises(UnsupportedError, match=message):
        shardload.convert(folder_of(tmp_path, "dinov2"), tmp_path / "out", to="h5")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


@pytest.mark.slow
def test_computed_values_are_cast_once(tmp_path):
    """DINOv2's converter interpolates from a variable, which has the asked-for dtype while loading."""
    folder = folder_of(tmp_path, "dinov2", "float32")
    shardload.convert(folder, tmp_path / "out", to="orbax", dtype="float16")
    wanted = shardload.load(folder, mesh="1x1", dtype="float16")
    check_same(shardload.load(tmp_path / "out", mesh="1x1"), wanted)


def test_keras_reads_merged_experts(tmp_path):
    folder = folder_of(tmp_path, "mixtral", "float32")
    shardload.convert(folder, tmp_path / "out", to="h5")
    found = keras_hub.models.MixtralBackbone.from_preset(str(tmp_path / "out"), dtype="float32")
    check_same(found, hub_folders.reference(folder, build(folder, "mixtral"), "mixtral"))


def test_one_layer_s_experts_are_in_memory_at_a_time(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, "mixtral")
    live, most = {}, [0]

    def read(manifest, name):
        value = read_tensor.read_tensor(manifest, name)
        live[name] = value.nbytes
        weakref.finalize(value, live.pop, name)
        most[0] = max(most[0], sum(live.values()))
        return value

    monkeypatch.setattr("shardload.converting.computing.read_tensor", read)
    shardload.convert(folder, tmp_path / "out", to="orbax")
    experts = [t.nbytes for n, t in shardload.inspect(folder).tensors.items() if ".experts." in n]
    # Two layers; the next one's first is read before the last goes.
    assert 0 < most[0] <= sum(experts) / 2 + max(experts)


def test_integers_a_layer_narrows(tmp_path):
    """TensorFlow counts in int64, JAX in int32: the layer's hook looks at the values."""
    import h5py

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Counted()])
    model.layers[1].count.assign(7)
    model.save_weights(tmp_path / "m.weights.h5")
    (tmp_path / "m.json").write_text(json.dumps(keras.saving.serialize_keras_object(model)))
    with h5py.File(tmp_path / "m.weights.h5", "r+") as file:
        del file["layers/counted/vars/0"]
        file["layers/counted/vars/0"] = np.int64(7)
    shardload.convert(tmp_path / "m.weights.h5", tmp_path / "step", to="orbax")
    again = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), Counted()])
    shardload.load_weights(again, tmp_path / "step")
    assert int(again.layers[1].count.value) == 7
    np.testing.assert_array_equal(again.layers[0].kernel, model.layers[0].kernel)


@keras.saving.register_keras_serializable("convert_tests")
class Counted(keras.layers.Layer):
    """Counts, as TensorFlow's layers do."""

    def build(self, shape):
        self.count = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False)

    def call(self, x):
        return x


@pytest.mark.slow
def test_killed_while_computing_it_goes_on(tmp_path):
    folder = folder_of(tmp_path, "mixtral")
    done = len(lines_done(killed(folder, tmp_path / "out", "orbax", name="expert_feedforward_gate_dense")))
    # Names of some layers count on from those made before in the same process, so this is another one too.
    command = ["-m", "shardload", "convert", folder, tmp_path / "out", "--to", "orbax", "--json"]
    assert json.loads(warm_start.run(command, cwd=ROOT, check=True).stdout)["resumed"] == done
    assert_same_model(folder, tmp_path / "out")
