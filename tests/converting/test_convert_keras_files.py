"""Keras' own files: shards with an index, presets of tasks with a head, states that Keras leaves out."""

import json
import signal

import hub_folders
import keras
import keras_hub
import numpy as np
import pytest
import warm_start
from by_hand import check_same
from conversions import ROOT, held, killed, same
from hub_folders import build
from same_models import zero_new_adapters

import shardload
from shardload.errors import UnsupportedError, WriteError
from shardload.loaders import open_manifest


@pytest.fixture(scope="module")
def preset(presets):
    return presets["gemma2_9b"]


def described(path):
    return keras.saving.deserialize_keras_object(json.loads(path.read_text()))


@pytest.mark.slow
def test_keras_reads_shards_and_names_them_as_we_do(preset, tmp_path):
    report = shardload.convert(preset, tmp_path / "ours" / "m.weights.json", max_shard_bytes="256KiB")
    assert report.format == "keras-sharded-h5"
    model = described(tmp_path / "ours" / "m.json")
    model.load_weights(tmp_path / "ours" / "m.weights.json")
    check_same(model, shardload.load(preset, mesh="1x1", task=False))
    (tmp_path / "keras").mkdir()
    model.save_weights(tmp_path / "keras" / "m.weights.json", max_shard_size=report.n_bytes / 2**30)
    shardload.convert(preset, tmp_path / "again" / "m.weights.json", max_shard_bytes=report.n_bytes)
    theirs, ours = (json.loads((tmp_path / at / "m.weights.json").read_text()) for at in ("keras", "again"))
    assert ours == theirs


@pytest.mark.slow
def test_shards_are_cut_where_keras_cuts_them(tmp_path):
    layers = [keras.layers.Dense(n, dtype="bfloat16" if n % 2 else None) for n in (34, 31, 30, 32)]
    model = keras.Sequential([keras.Input((30,)), *layers])
    model.save(tmp_path / "model.keras")
    (tmp_path / "keras").mkdir()
    model.save_weights(tmp_path / "keras" / "m.weights.json", max_shard_size=4100 / 2**30)
    shardload.convert(tmp_path / "model.keras", tmp_path / "ours" / "m.weights.json", max_shard_bytes=4100)
    theirs, ours = (json.loads((tmp_path / at / "m.weights.json").read_text()) for at in ("keras", "ours"))
    assert ours == theirs
    assert any(isinstance(shards, list) and len(shards) > 1 for shards in ours["weight_map"].values())
    names = {path.name for path in (tmp_path / "ours").glob("*.h5")}
    assert names == {path.name for path in (tmp_path / "keras").glob("*.h5")}
    for name in names:
        held_by = [open_manifest(tmp_path / at / name).tensors for at in ("keras", "ours")]
        assert list(held_by[0]) == list(held_by[1])
    again = keras.models.clone_model(model)
    again.load_weights(tmp_path / "ours" / "m.weights.json")
    check_same(model, again)


@pytest.mark.slow
def test_shards_are_a_source_and_a_tensor_may_be_larger_than_one(preset, tmp_path):
    shardload.convert(preset, tmp_path / "m.weights.json", max_shard_bytes=1)
    assert len(list(tmp_path.glob("*.h5"))) == len(shardload.inspect(preset).tensors) + 2  # of the optimizer
    shardload.convert(tmp_path / "m.weights.json", tmp_path / "back", to="h5")
    assert same(preset, tmp_path / "back")


@pytest.mark.slow
def test_the_command_takes_a_shard_size(preset, tmp_path):
    arguments = ["convert", preset, tmp_path / "m.weights.json", "--max-shard-bytes", "256KiB", "--json"]
    done = warm_start.run(["-m", "shardload", *arguments], cwd=ROOT, check=True)
    assert json.loads(done.stdout)["format"] == "keras-sharded-h5"
    assert len(shards_of(tmp_path / "m.weights.json")) > 2


def test_a_preset_in_shards(preset, tmp_path):
    shardload.convert(preset, tmp_path / "out", to="h5", max_shard_bytes="256KiB")
    assert len(list((tmp_path / "out").glob("model_*.weights.h5"))) > 2
    assert same(preset, tmp_path / "out")
    found = keras_hub.models.GemmaBackbone.from_preset(str(tmp_path / "out"), dtype="bfloat16")
    check_same(found, shardload.load(preset, mesh="1x1", task=False))


def test_shards_of_two_checkpoints_are_never_mixed(presets, preset, tmp_path):
    index = tmp_path / "m.weights.json"
    shardload.convert(preset, index, max_shard_bytes="64KiB")
    before = {path.name for path in tmp_path.iterdir()}
    with pytest.raises(WriteError, match="already exists"):
        shardload.convert(presets["gemma_2b"], index, max_shard_bytes="1MiB")
    assert {path.name for path in tmp_path.iterdir()} == before
    shardload.convert(presets["gemma_2b"], index, max_shard_bytes="1MiB", overwrite=True)
    after = {path.name for path in tmp_path.iterdir()}
    assert after < before
    assert after == {"m.json", "m.weights.json", *shards_of(index)}
    shardload.convert(index, tmp_path / "back", to="h5")
    assert same(presets["gemma_2b"], tmp_path / "back")


def test_a_shard_of_somebody_else_stays(preset, tmp_path):
    (tmp_path / "m_00001.weights.h5").write_text("precious")
    for overwrite in (False, True):
        with pytest.raises(WriteError, match=r"m_00001\.weights\.h5(: it is not a checkpoint| already exists)"):
            shardload.convert(preset, tmp_path / "m.weights.json", max_shard_bytes="256KiB", overwrite=overwrite)
    assert [path.name for path in tmp_path.iterdir()] == ["m_00001.weights.h5"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m.weights.json", pytest.param("m", marks=pytest.mark.slow)])
def test_another_shard_size_begins_anew(name, preset, tmp_path):
    """What a killed run had done was cut otherwise."""
    killed(preset, tmp_path / name, "h5" if name.endswith("json") else "safetensors", done=2)
    to = None if name.endswith("json") else "safetensors"
    assert shardload.convert(preset, tmp_path / name, to=to, max_shard_bytes="64KiB").resumed == 0
    assert len(list(tmp_path.rglob("m*_000*.h5" if to is None else "model-*.safetensors"))) > 3
    shardload.convert(tmp_path / name, tmp_path / "back", to="h5")
    assert same(preset, tmp_path / "back")


@pytest.mark.slow
@pytest.mark.parametrize(("links", "moment"), [(True, 3), (False, 1)])
def test_killed_while_shards_get_their_names(links, moment, preset, tmp_path):
    """Between two shards; on a file system with second names, and on one without."""
    code = f"""
import os, signal, sys
import conftest, shardload
from shardload.converting import publishing
if not {links}:
    def refuse(*names): raise PermissionError(1, "no")
    publishing.os.link = refuse
link, count = publishing._link, [0]
def killed(made, name):
    if count[0] == {moment}: os.kill(os.getpid(), signal.SIGKILL)
    count[0] += 1
    link(made, name)
publishing._link = killed
shardload.convert({str(preset)!r}, {str(tmp_path / "m.weights.json")!r}, max_shard_bytes="64KiB")
"""
    assert warm_start.run(["-c", code], cwd=ROOT).returncode == -signal.SIGKILL
    assert not (tmp_path / "m.weights.json").exists()
    assert len(list(tmp_path.glob("m_*"))) == moment
    if links:
        report = shardload.convert(preset, tmp_path / "m.weights.json", max_shard_bytes="64KiB")
        assert report.resumed == report.tensors
    else:
        with pytest.raises(WriteError, match=r"m_00000.* already exists"):
            shardload.convert(preset, tmp_path / "m.weights.json", max_shard_bytes="64KiB")
        shardload.convert(preset, tmp_path / "m.weights.json", max_shard_bytes="64KiB", overwrite=True)
    shardload.convert(tmp_path / "m.weights.json", tmp_path / "back", to="h5")
    assert same(preset, tmp_path / "back")
    assert not (tmp_path / ".m.weights.json.converting").exists()


def shards_of(index):
    listed = json.loads(index.read_text())["weight_map"].values()
    return {name for names in listed for name in (names if isinstance(names, list) else [names])}


# ---- tasks with weights of their own ------------------------------------------------------------


def classifier(dropout=0.0):
    backbone = keras_hub.models.BertBackbone(40, 2, 2, 16, 24, dropout=dropout, max_sequence_length=12)
    return keras_hub.models.BertTextClassifier(backbone=backbone, num_classes=3, dropout=dropout)


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "preset"
    classifier().save_to_preset(str(path))
    return path


def from_preset(path):
    return keras_hub.models.TextClassifier.from_preset(str(path), dtype="float32")


@pytest.mark.slow
@pytest.mark.parametrize("via", ["h5", "orbax"])
def test_a_classifier_s_head_is_in_the_preset(via, task, tmp_path):
    shardload.convert(task, tmp_path / "via", to=via)
    shardload.convert(tmp_path / "via", tmp_path / "back", to="h5")
    assert {"task.json", "task.weights.h5", "model.weights.h5"} <= {path.name for path in (tmp_path / "back").iterdir()}
    check_same(from_preset(tmp_path / "back"), from_preset(task))
    check_same(shardload.load(tmp_path / "back", mesh="1x8"), from_preset(task))
    theirs, ours = (open_manifest(path / "task.weights.h5").tensors for path in (task, tmp_path / "back"))
    assert sorted(ours) == sorted(theirs)


def test_a_classifier_in_one_file(task, tmp_path):
    shardload.convert(task, tmp_path / "m.weights.h5")
    found = classifier()
    found.optimizer = None  # Keras would miss its state
    found.load_weights(tmp_path / "m.weights.h5")
    check_same(found, from_preset(task))
    assert type(described(tmp_path / "m.json")) is type(found)


@pytest.mark.slow
def test_a_masked_lm_shares_its_embedding(tmp_path):
    model = keras_hub.models.BertMaskedLM(backbone=classifier().backbone)
    model.save_to_preset(str(tmp_path / "preset"))
    shardload.convert(tmp_path / "preset", tmp_path / "step", to="orbax")
    shardload.convert(tmp_path / "step", tmp_path / "back", to="h5")
    check_same(keras_hub.models.MaskedLM.from_preset(str(tmp_path / "back"), dtype="float32"), model)


@pytest.mark.slow
def test_an_image_classifier_from_hugging_face(tmp_path):
    path = hub_folders.write(tmp_path / "hf", "vit", build(tmp_path / "hf", "vit"), unwanted=False)
    shardload.convert(path, tmp_path / "out", to="h5")
    wanted = hub_folders.reference(path, build(path, "vit"), "vit")
    check_same(keras_hub.models.ImageClassifier.from_preset(str(tmp_path / "out"), dtype="float32"), wanted)


# ---- what Keras leaves out ----------------------------------------------------------------------


def test_lora_goes_to_orbax_as_it_loads_and_is_refused_for_hdf5(tmp_path):
    """Keras saves the kernel with the factors in it, and loads factors that add nothing."""
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8, lora_rank=2), keras.layers.Dense(3)])
    model.layers[0].lora_kernel_a.assign(np.ones((8, 2)))
    model.layers[0].lora_kernel_b.assign(np.ones((2, 8)))
    model.save(tmp_path / "model.keras")
    shardload.convert(tmp_path / "model.keras", tmp_path / "step", to="orbax")
    wanted, found = (shardload.load(tmp_path / name, mesh="1x1") for name in ("model.keras", "step"))
    assert any(np.any(v.value) for v in found.weights if v.path.endswith("lora_kernel_a"))  # so that it trains
    zero_new_adapters(wanted)
    zero_new_adapters(found)
    check_same(found, wanted)
    with pytest.raises(UnsupportedError, match=r"lora_kernel_a.*the format orbax"):
        shardload.convert(tmp_path / "model.keras", tmp_path / "out.weights.h5")


def test_states_of_seed_generators_are_left_out_as_keras_does(tmp_path):
    layers = [keras.layers.Dense(5), keras.layers.Dropout(0.3), keras.layers.Dense(2)]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "theirs.weights.h5")
    report = shardload.convert(tmp_path / "model.keras", tmp_path / "ours.weights.h5")
    assert any("seed generators" in note for note in report.notes)
    assert held(tmp_path / "ours.weights.h5").keys() == held(tmp_path / "theirs.weights.h5").keys()
    again = keras.models.clone_model(model)
    again.load_weights(tmp_path / "ours.weights.h5")
    check_same(again, model)


def test_the_optimizer_of_a_keras_archive_is_left_out_and_told(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)])
    model.compile("adam", "mse")
    model.fit(np.ones((8, 6)), np.ones((8, 2)), verbose=0)
    model.save(tmp_path / "model.keras")
    for out in ("out.weights.h5", "out.weights.json"):
        report = shardload.convert(tmp_path / "model.keras", tmp_path / out)
        assert report.tensors == 4
        assert any(note.startswith("10 tensors of optimizer") for note in report.notes)
        again = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(2)])
        again.load_weights(tmp_path / out)
        check_same(again, model)
        (tmp_path / "out.json").unlink()


@pytest.mark.slow
def test_a_preset_keeps_the_states_of_its_backbone(tmp_path):
    classifier(dropout=0.1).save_to_preset(str(tmp_path / "preset"))
    shardload.convert(tmp_path / "preset", tmp_path / "one", to="orbax")
    shardload.convert(tmp_path / "one", tmp_path / "two", to="h5")
    shardload.convert(tmp_path / "two", tmp_path / "three", to="orbax")
    steps = (held(tmp_path / name) for name in ("one", "three"))
    # In no order: their names count on from whatever was made before in this process.
    one, three = ({tensors[name].tobytes() for name in tensors if "seed" in name} for tensors in steps)
    assert len(one) == len(three) > 3
    assert len(one - three) == 1  # the head's
    assert from_preset(tmp_path / "two") is not None


def test_the_numbers_of_an_optimizer_that_never_trained_are_written_as_by_keras_and_no_loss(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    model.save_weights(tmp_path / "keras.weights.h5")
    shardload.save_as(model, tmp_path / "ours.weights.h5")
    names = [set(shardload.inspect(tmp_path / f"{name}.weights.h5").tensors) for name in ("keras", "ours")]
    assert names[0] == names[1] >= {"optimizer/vars/0", "optimizer/vars/1"}
    model.save(tmp_path / "untrained.keras")
    assert not shardload.convert(tmp_path / "untrained.keras", tmp_path / "untrained.weights.h5").notes
    model.fit(np.ones((2, 4)), np.ones((2, 3)), verbose=0)
    model.save(tmp_path / "trained.keras")
    report = shardload.convert(tmp_path / "trained.keras", tmp_path / "trained.weights.h5")
    assert any("of optimizer and metrics left out" in note for note in report.notes)
