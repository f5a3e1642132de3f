"""A live model in every format: bits compared with what a conversion of its source writes; errors; what stays."""

import json
import os
import random
import re

import hub_folders
import jax
import keras
import keras_hub
import numpy as np
import pytest
from by_hand import check_same
from conversions import held, same
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import numbers_of_a_process
from process_runs import Run, told
from progress_calls import AfterShare
from transformers_cross import folders

import shardload
from shardload.comparing import diff
from shardload.converting import live_source
from shardload.converting.live_source import boxes_of_run, local_boxes_of, reader_of_box
from shardload.errors import UninitialisedError, UnsupportedError, UsageError, WriteError
from shardload.synth import synth

MESH = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("a", "b"))


def values(model):
    return [np.asarray(v.value) for v in model.variables]


def equal(one, two):
    return all(a.dtype == b.dtype and a.tobytes() == b.tobytes() for a, b in zip(one, two, strict=True))


@pytest.fixture(scope="module")
def gemma(presets):
    return shardload.load(presets["gemma3_1b"], mesh="1x8")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("gemma3_1b", "2x4"),
        ("llama3.2_1b", "1x8"),
        pytest.param("gemma2_9b", "1x8", marks=pytest.mark.slow),
        pytest.param("gemma_2b", "8x1", marks=pytest.mark.slow),
    ],
)
def test_a_hugging_face_folder_is_what_converting_the_source_gives(name, mesh, presets, made, tmp_path):
    model = shardload.load(presets[name], mesh=mesh)
    report = shardload.save_as(model, tmp_path / "out", to="safetensors")
    assert same(made[name, "safetensors"], tmp_path / "out")
    assert report.tensors == len(shardload.inspect(tmp_path / "out").tensors)
    assert (report.source, report.format) == (model.name, "hf-safetensors")
    tokenizer, fields = report.notes
    assert tokenizer.startswith("no tokenizer was written")
    assert fields.startswith("config.json lacks max_position_embeddings, bos_token_id, eos_token_id, pad_token_id, ")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out/config.json").read_bytes() == (made[name, "safetensors"] / "config.json").read_bytes()
    assert equal(values(shardload.load(tmp_path / "out", mesh="1x8")), values(model))


def test_keras_hub_reads_a_preset(gemma, presets, tmp_path):
    shardload.save_as(gemma, tmp_path / "out", to="preset", max_shard_bytes="1MiB")
    assert same(presets["gemma3_1b"], tmp_path / "out")
    found = keras_hub.models.Backbone.from_preset(str(tmp_path / "out"), dtype="bfloat16")
    assert equal(values(found), values(gemma.backbone))


@pytest.mark.parametrize("name", ["out.weights.h5", "out.weights.json"])
def test_keras_loads_its_files_into_the_model_that_was_saved(name, presets, gemma, tmp_path):
    shardload.save_as(gemma, tmp_path / name)
    other = shardload.load(presets["gemma3_1b"], mesh="1x8")
    for variable in other.trainable_variables:
        variable.assign(variable.value * 0)
    other.load_weights(tmp_path / name)
    assert equal(values(other), values(gemma))
    assert equal(values(shardload.load(tmp_path / name)), values(gemma))


def test_any_keras_model_goes_to_a_file(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dropout(0.5)])
    model.compile("adam", "mse")
    model.fit(np.ones((4, 6)), np.ones((4, 5)), verbose=0)
    report = shardload.save_as(model, tmp_path / "m.weights.h5")
    assert [note.split(" left out")[0].split(" (")[0] for note in report.notes] == [
        "the state of the optimizer was",
        "left out, as in Keras: 1 state of seed generators",
    ]
    assert equal(values(shardload.load(tmp_path / "m.weights.h5"))[:2], values(model)[:2])
    with pytest.raises(UnsupportedError, match=r"not a KerasHub model. Name the target NAME\.weights\.h5"):
        shardload.save_as(model, tmp_path / "out", to="preset")
    with pytest.raises(UnsupportedError, match="Hugging Face, which has no names for its tensors"):
        shardload.save_as(model, tmp_path / "out", to="safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.json", "m.weights.h5"]


class Head(keras.layers.Layer):
    """Logits from the table of an embedding, which both layers have as an attribute."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def build(self, shape):
        self.table = self.embedding.embeddings

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table))


def normalised():
    layer = keras.layers.SpectralNormalization(keras.layers.Dense(8))
    return keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(2)])


def tied():
    ids, embedding = keras.Input((3,), dtype="int32"), keras.layers.Embedding(7, 4)
    return keras.Model(ids, Head(embedding)(embedding(ids)))


@pytest.mark.parametrize("make", [normalised, tied])
@pytest.mark.parametrize("ending", [".weights.h5", ".weights.json"])
def test_a_variable_of_two_layers_is_written_under_both_as_keras_does(make, ending, tmp_path):
    model = make()
    model.save_weights(tmp_path / "keras.weights.h5")
    shardload.save_as(model, tmp_path / f"live{ending}")
    sources = ["live"]
    if make is normalised:  # Keras cannot describe a layer that takes another one
        shardload.save(model, tmp_path / "step", step=1)
        shardload.convert(tmp_path / "step", tmp_path / f"step{ending}")
        sources.append("step")
    keras_tensors = shardload.inspect(tmp_path / "keras.weights.h5").tensors.keys()
    for name in sources:
        path = tmp_path / f"{name}{ending}"
        assert shardload.inspect(path).tensors.keys() == keras_tensors
        by_keras, by_us = make(), make()
        by_keras.load_weights(path)
        shardload.load_weights(by_us, path)
        assert equal(values(by_keras), values(model))
        assert equal(values(by_us), values(model))


FAMILIES = ("smollm3", "qwen2_moe", "distilbert", "vit")


@pytest.mark.parametrize("model_type", [FAMILIES[0], *(pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES[1:])])
def test_other_families_go_back_to_the_folder_they_came_from(model_type, tmp_path):
    source = tmp_path / "hf"
    source.mkdir()
    hub_folders.write(source, model_type, hub_folders.build(source, model_type), unwanted=False)
    (source / "generation_config.json").write_text('{"top_k": 3}')
    model = shardload.load(source, dtype="float32", mesh="1x2")
    kernel = model.trainable_variables[1]
    kernel.assign(kernel.value + 1)
    report = shardload.save_as(model, tmp_path / "out", to="safetensors")
    copied = "config.json, generation_config.json, tokenizer_config.json"
    assert report.notes[0] == f"{copied} for Hugging Face come from {source}"
    (source / "generation_config.json").unlink()
    (source / "tokenizer_config.json").unlink()
    alone = shardload.save_as(model, tmp_path / "alone", to="safetensors")
    assert alone.notes[0] == f"config.json for Hugging Face comes from {source}"
    (source / "generation_config.json").write_text('{"top_k": 3}')
    assert [found.what for found in diff(source, tmp_path / "out").differences] == ["values"]
    assert equal(values(shardload.load(tmp_path / "out")), values(model))
    assert (tmp_path / "out" / "generation_config.json").read_bytes() == b'{"top_k": 3}'
    config = json.loads((source / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == config


def test_what_no_view_inverts_is_refused_where_no_family_declares_it(tmp_path, monkeypatch):
    monkeypatch.setattr("shardload.converting.transformers.exports", dict)
    model = shardload.load(folders.build(folders.read_family("qwen3_5_moe")["qwen3_5_moe, text"], tmp_path / "hf"))
    match = r"one to one with the Hugging Face tensors of model_type 'qwen3_5_moe'"
    with pytest.raises(UnsupportedError, match=match):
        shardload.save_as(model, tmp_path / "out", to="safetensors")


def test_the_configuration_states_the_dtype_that_was_written(tmp_path):
    source = synth("qwen3_0.6b", scale=0.02, directory=tmp_path, format="safetensors")
    model = shardload.load(source, dtype="float32")
    shardload.save_as(model, tmp_path / "out", to="safetensors")
    assert json.loads((source / "config.json").read_text())["torch_dtype"] == "bfloat16"
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    assert equal(values(shardload.load(tmp_path / "out")), values(model))


def test_a_folder_that_says_other_than_the_model_is_no_template(tmp_path):
    source = synth("qwen3_0.6b", scale=0.02, directory=tmp_path, format="safetensors")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    model = shardload.load(source, ignore_config=("hidden_act",))
    report = shardload.save_as(model, tmp_path / "out", to="safetensors")
    assert not any("for Hugging Face come from" in note for note in report.notes)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["hidden_act"] == "silu"


class Own(keras.Model):
    def __init__(self, width):
        super().__init__()
        self.dense = keras.layers.Dense(int(width))

    def call(self, inputs):
        return self.dense(inputs)


def test_a_model_that_keras_cannot_describe(tmp_path):
    model, other = Own(np.array(3)), Own(3)
    for one in (model, other):
        one(np.ones((2, 4)))
    report = shardload.save_as(model, tmp_path / "own.weights.h5")
    assert report.notes[0].startswith("own.json was not written, because Keras cannot describe this model: Object Own")
    assert [path.name for path in tmp_path.iterdir()] == ["own.weights.h5"]
    other.load_weights(tmp_path / "own.weights.h5")
    assert equal(values(other), values(model))


@pytest.mark.parametrize("mode", ["int8", pytest.param("int4", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["gemma3, vision", "blip-2, opt"])
def test_what_a_quantised_model_cannot_be_saved_as_names_ways_that_work(name, mode, tmp_path):
    """KerasHub's configurations of these leave out that layers of the vision tower are quantised."""
    fixture = folders.read_family(name.partition(",")[0])[name]
    model = shardload.load(folders.build(fixture, tmp_path / "hf"), mesh="1x2", quantize=mode)
    layer = r"because the model's own configuration leaves out that this layer is quantised\."
    for to, why in (("preset", layer), ("safetensors", rf"is quantised \({mode}.*\)\.")):
        with pytest.raises(UnsupportedError, match=why) as found:
            shardload.save_as(model, tmp_path / "out", to=to)
        assert "shardload.save(model, directory, step=0)" in str(found.value)
        assert not re.search("orbax|please report", str(found.value))
        assert len(str(found.value)) < 600
    shardload.save(model, tmp_path / "steps", step=0)
    assert equal(values(shardload.load(tmp_path / "steps", mesh="2x2")), values(model))
    model.save_weights(tmp_path / "out.weights.h5")


@pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method:UserWarning")
def test_quantised_kernels_are_no_weights_of_hugging_face(presets, tmp_path):
    model = shardload.load(presets["gemma2_9b"]).backbone
    model.quantize("int8")
    with pytest.raises(UnsupportedError, match=r"its layer 'token_embedding' is quantised \(int8\)"):
        shardload.save_as(model, tmp_path / "out", to="safetensors")
    shardload.save_as(model, tmp_path / "out", to="preset")
    found = shardload.load(tmp_path / "out", task=False)  # Keras gives scales another dtype when it builds them
    assert all(np.array_equal(*map(np.float32, pair)) for pair in zip(values(found), values(model), strict=True))
    model.enable_lora(2)
    with pytest.raises(UnsupportedError, match=r"Cannot merge LoRA into .*quantised"):
        shardload.save_as(model, tmp_path / "lora", to="preset", merge_lora=True)


def test_a_model_is_saved_while_it_trains(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
    model.compile("sgd", "mse")
    saved = []

    def save(batch, logs):
        shardload.save_as(model, tmp_path / f"{batch}.weights.h5")
        saved.append(values(model))

    callback = keras.callbacks.LambdaCallback(on_train_batch_end=save)
    model.fit(np.ones((6, 6)), np.ones((6, 5)), batch_size=2, verbose=0, callbacks=[callback])
    for batch, weights in enumerate(saved):
        assert equal(values(shardload.load(tmp_path / f"{batch}.weights.h5")), weights)
    assert len({weights[0].tobytes() for weights in saved}) == 3


def small_bert():
    return keras_hub.models.BertBackbone(64, 2, 2, 8, 16, max_sequence_length=16)


def texts(count):
    ids = np.ones((count, 8), int)
    return {"token_ids": ids, "segment_ids": ids * 0, "padding_mask": ids}


def test_a_classifier_that_was_trained(tmp_path):
    model = keras_hub.models.BertTextClassifier(backbone=small_bert(), num_classes=3)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(texts(4), np.zeros(4, int), verbose=0, shuffle=False)
    shardload.save_as(model, tmp_path / "out", to="preset")  # without the slots of Adam, which KerasHub would refuse
    check_same(keras_hub.models.TextClassifier.from_preset(str(tmp_path / "out")), model)
    check_same(shardload.load(tmp_path / "out"), model)
    with pytest.raises(UnsupportedError, match="2 of its weights"):
        shardload.save_as(model, tmp_path / "hf", to="safetensors")


def test_floats_are_cast_if_asked(gemma, tmp_path):
    shardload.save_as(gemma, tmp_path / "out", to="safetensors", dtype="float32")
    assert {tensor.dtype.name for tensor in shardload.inspect(tmp_path / "out").tensors.values()} == {"float32"}
    assert equal(values(shardload.load(tmp_path / "out", dtype="bfloat16")), values(gemma))


def test_lora_is_merged_only_if_asked(presets, tmp_path):
    model = shardload.load(presets["gemma2_9b"], mesh="1x8", dtype="float32")
    model.backbone.enable_lora(4)
    for variable in model.trainable_variables:
        variable.assign(keras.random.normal(variable.shape, seed=1))
    before = values(model)
    with pytest.raises(UnsupportedError, match=r"LoRA is enabled in 4 of its layers.*merge_lora=True"):
        shardload.save_as(model, tmp_path / "out", to="safetensors")
    report = shardload.save_as(model, tmp_path / "out", to="safetensors", merge_lora=True)
    assert any("LoRA was merged into 4 kernels" in note for note in report.notes)
    assert equal(values(model), before)
    model.backbone.save_weights(tmp_path / "keras.weights.h5")  # merges too
    plain = shardload.load(presets["gemma2_9b"], dtype="float32").backbone
    plain.load_weights(tmp_path / "keras.weights.h5")
    for one, two in zip(values(shardload.load(tmp_path / "out").backbone), values(plain), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-6, atol=1e-6)
    assert not same(presets["gemma2_9b"], tmp_path / "out")


@pytest.mark.parametrize(
    ("error", "kind", "match"),
    [
        (KeyboardInterrupt(), KeyboardInterrupt, None),
        (OSError(28, "No space left on device"), WriteError, "the disk is full"),
        (ValueError("a bug"), ValueError, "a bug"),
    ],
)
def test_nothing_stays_of_a_save_that_failed(error, kind, match, gemma, tmp_path):
    with pytest.raises(kind, match=match):
        shardload.save_as(gemma, tmp_path / "out", to="safetensors", progress=AfterShare(error, 0.5))
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_is_replaced_only_if_asked(gemma, tmp_path):
    shardload.save_as(gemma, tmp_path / "out", to="safetensors")
    with pytest.raises(WriteError, match=r"already exists. Replace it with overwrite=True"):
        shardload.save_as(gemma, tmp_path / "out", to="preset")
    with pytest.raises(KeyboardInterrupt):
        progress = AfterShare(KeyboardInterrupt, 0.5)
        shardload.save_as(gemma, tmp_path / "out", to="preset", overwrite=True, progress=progress)
    assert shardload.inspect(tmp_path / "out").format == "hf-safetensors"
    shardload.save_as(gemma, tmp_path / "out", to="preset", overwrite=True)
    assert shardload.inspect(tmp_path / "out").format == "keras-hub-preset"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_nothing_of_the_model_or_the_session_changes(presets, tmp_path):
    model = shardload.load(presets["llama3.2_1b"], mesh="1x8")
    before = random.getstate(), np.random.get_state()[1].tolist()
    shardload.save_as(model, tmp_path / "out", to="safetensors")
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before
    arrays = [v.value for v in model.variables]
    cached = [a for array in arrays for a in (array, *(s.data for s in array.addressable_shards))]
    assert all(array._npy_value is None for array in cached)  # JAX's copy on the host


def test_arguments_that_cannot_be(gemma, tmp_path):
    for arguments, match in (
        ({"to": "gguf"}, "to='gguf': expected one of safetensors, h5, preset"),
        ({"to": "orbax"}, r"Call shardload\.save\(model"),
        ({}, "Cannot tell the format of out"),
        ({"to": "safetensors", "merge_lora": "yes"}, "merge_lora='yes'"),
        ({"to": "safetensors", "host_memory_bytes": 1}, "at least 256KiB"),
        ({"to": "safetensors", "max_shard_bytes": "big"}, "max_shard_bytes"),
        ({"to": "safetensors", "dtype": "float7"}, "float7"),
    ):
        with pytest.raises(UsageError, match=match):
            shardload.save_as(gemma, tmp_path / "out", **arguments)
    with pytest.raises(UsageError, match="a preset is a folder"):
        shardload.save_as(gemma, tmp_path / "out.weights.h5", to="preset")
    with pytest.raises(UsageError, match="Cannot use path=None"):
        shardload.save_as(gemma, None)
    with shardload.abstract():
        abstract = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
    for model, name, error, match in (
        (gemma, "tuned.gguf", UsageError, r"or name it tuned\.weights\.h5"),
        (gemma, "out.keras", UsageError, r"\.keras files can only be read"),
        ([1], "out.weights.h5", UsageError, "expected a Keras model"),
        (keras.Sequential([keras.layers.Dense(2)]), "out.weights.h5", UnsupportedError, "has not been built"),
        (abstract, "out.weights.h5", UninitialisedError, r"it has no value. Load a checkpoint into the model"),
    ):
        with pytest.raises(error, match=match):
            shardload.save_as(model, tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_that_is_not_writable(gemma, tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(WriteError, match="Permission denied"):
        shardload.save_as(gemma, tmp_path / "out", to="safetensors")
    tmp_path.chmod(0o700)


@given(shape=st.lists(st.integers(1, 4), max_size=4), ends=st.tuples(st.integers(0, 256), st.integers(0, 256)))
def test_boxes_of_a_run_are_its_elements_in_order(shape, ends):
    numbers = np.arange(int(np.prod(shape))).reshape(shape)
    start, stop = sorted(min(end, numbers.size) for end in ends)
    found = [numbers[box.slices].ravel() for box in boxes_of_run(shape, start, stop)]
    assert np.concatenate([*found, []]).tolist() == list(range(start, stop))


@settings(deadline=None, max_examples=40)
@given(
    spec=st.sampled_from([(), ("a",), ("b", "a"), (None, "b"), (("a", "b"),), (None, None, "a"), ("a", None, "b")]),
    ends=st.tuples(st.integers(0, 256), st.integers(0, 256)),
)
def test_a_region_is_read_as_numpy_reads_it(spec, ends):
    numbers = np.arange(256, dtype=np.int32).reshape(8, 4, 8)
    array = jax.device_put(numbers, jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec(*spec)))
    [region] = local_boxes_of(array)
    start, stop = sorted(ends)
    assert reader_of_box(region, numbers.dtype)(start, stop).tolist() == list(range(start, stop))
    assert reader_of_box(region, np.dtype("float32"))(start, stop).view("float32").tolist() == list(range(start, stop))


def test_devices_with_memory_of_their_own_are_read_in_slices(gemma, made, tmp_path, monkeypatch):
    monkeypatch.setattr(live_source, "is_on_host", lambda data: False)
    shardload.save_as(gemma, tmp_path / "out", to="safetensors", host_memory_bytes="256KiB")
    assert same(made["gemma3_1b", "safetensors"], tmp_path / "out")


def test_what_a_killed_save_left_is_removed(gemma, tmp_path):
    left = tmp_path / ".out.converting"
    (left / "result").mkdir(parents=True)
    (left / "journal.jsonl").write_text('{"plan": "another"}\n{"places": []}\n')
    shardload.save_as(gemma, tmp_path / "out", to="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_values_that_were_donated_to_a_computation(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5)])
    model.variables[0].value.delete()
    with pytest.raises(UninitialisedError, match="its array was donated"):
        shardload.save_as(model, tmp_path / "m.weights.h5")


def test_states_of_a_backbone_s_seed_generators_are_in_its_folders(tmp_path):
    model = small_bert()
    model(texts(1), training=True)
    wanted = sorted(np.asarray(v.value).tolist() for v in model.variables if "seed" in v.path)
    for to in ("preset", "safetensors"):
        shardload.save_as(model, tmp_path / to, to=to)
        shardload.convert(tmp_path / to, tmp_path / f"{to}-step", to="orbax")
        seeds = [t for name, t in held(tmp_path / f"{to}-step").items() if "seed" in name]
        assert sorted(seed.tolist() for seed in seeds) == wanted


def test_replaces_the_folder_the_model_came_from(tmp_path):
    source = synth("gemma3_1b", scale=0.02, directory=tmp_path)
    model = shardload.load(source)
    before = values(model)
    shardload.save_as(model, source, to="preset", overwrite=True)
    assert equal(values(shardload.load(source)), before)


@pytest.mark.parametrize("name", ["m.weights.h5", "m.weights.json"])
def test_a_file_without_a_description_has_none_of_another_model_next_to_it(name, tmp_path):
    target, description = tmp_path / name, tmp_path / "m.json"
    layer = keras.layers.Dense(8)
    once, twice = (keras.Sequential([keras.Input((8,)), *[layer] * n]) for n in (1, 2))
    shardload.save_as(once, target)
    target.unlink()
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(WriteError, match=r"m\.json next to it describes a model.*overwrite=True"):
        shardload.save_as(twice, target)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    shardload.save_as(twice, target, overwrite=True)
    assert target.exists() and not description.exists()
    description.write_text('{"notes": "of the user"}')
    shardload.save_as(twice, target, overwrite=True)
    assert description.read_text() == '{"notes": "of the user"}'


MIB = 1 << 20

_CHILD = """
small, large, folder, to, budget = sys.argv[1:]
shardload.save_as(shardload.load(small, mesh="1x8"), folder + "/small", to=to)  # what is imported and warmed up once
model = shardload.load(large, mesh="1x8")
resident = forget_peak()
report = shardload.save_as(model, folder + "/large", to=to, host_memory_bytes=int(budget))
print(peak() - resident, report.n_bytes, max(v.value.nbytes for v in model.variables))
"""


@pytest.mark.slow
@pytest.mark.parametrize("to", ["safetensors", "preset"])
def test_a_process_grows_by_the_budget_and_not_by_a_tensor(to, tmp_path):
    small, large = (synth("gemma2_9b", scale=scale, directory=tmp_path) for scale in (0.02, 0.24))
    budget = 16 * MIB
    growth, n_bytes, largest = numbers_of_a_process(_CHILD, small, large, tmp_path, to, budget)
    assert largest > budget + 32 * MIB
    assert n_bytes > 300 * MIB
    assert growth <= budget + 32 * MIB


@pytest.fixture(scope="module")
def preset(presets):
    return presets["gemma2_9b"]


def saved_by_two(do, preset, folder):
    """The exit codes, and what each process told."""
    with Run(2, 4, "1x8", do, preset, folder, module="save_as_child") as run:
        outputs = [one.communicate(timeout=150)[0] for one in run.started]
    codes = [one.returncode for one in run.started]
    events = [told(output) for output in outputs]
    assert all(one and one[0]["spread"] > 10 for one in events), outputs
    return codes, events


@pytest.mark.slow
def test_two_processes_write_their_own_shards(preset, tmp_path):
    codes, events = saved_by_two("all", preset, tmp_path)
    assert codes == [0, 0]
    assert events[0][-1]["tensors"] == events[1][-1]["tensors"]
    shardload.convert(preset, tmp_path / "converted", to="safetensors")
    assert same(tmp_path / "converted", tmp_path / "safetensors")
    assert same(preset, tmp_path / "preset")
    assert same(preset, tmp_path / "alone")
    shardload.convert(preset, tmp_path / "converted.weights.h5")
    one, two = (shardload.load(tmp_path / f"{name}.weights.h5") for name in ("converted", "one"))
    assert equal(values(one), values(two.backbone))
    merged, plain = (shardload.inspect(tmp_path / name).tensors for name in ("lora", "safetensors"))
    assert merged.keys() == plain.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("do", "match"),
    [
        ("raise", "ProcessFailedError: On process 1: ValueError: the cable was cut"),
        ("kill", "ProcessLostError: Process 1"),
        ("disagree", "disagree about the arguments. dtype: process 0 has 'float32', process 1 has 'float16'"),
        ("wrong", "UsageError: On process 1: .*host_memory_bytes"),
        ("apart", "WriteError: On process 1: .*Give a folder that all processes share"),
    ],
)
def test_what_goes_wrong_on_one_process_leaves_nothing(do, match, preset, tmp_path):
    codes, events = saved_by_two(do, preset, tmp_path)
    assert 0 not in codes
    assert re.search(match, events[0][-1]["error"])
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
