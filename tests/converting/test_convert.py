"""Every format into every other, bits compared; what is refused; what a killed conversion leaves and goes on from."""

import concurrent.futures
import contextlib
import dataclasses
import errno
import json
import re
import time

import jax
import keras
import numpy as np
import pytest
from by_hand import check_same
from checkpoints import flip, largest_file
from conversions import FAMILIES, FORMATS, held, killed, lines_done, same
from hub_folders import keeping_values
from initial_values import zeros_for_random
from keras_hub.src.utils.preset_utils import KerasPresetLoader
from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader
from orbax.checkpoint import v1 as ocp
from progress_calls import Counted
from safetensors import safe_open
from saved_steps import let_save

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.converting.publishing import ConversionFolder, staged, working_folder
from shardload.errors import DamagedError, MismatchError, UnsupportedError, UsageError, WriteError
from shardload.loaders.orbax.zarr import ZarrCodec
from shardload.runs import publish
from shardload.synth import synth
from shardload.verifying import verify

ROUND = (("safetensors", "orbax"), ("orbax", "h5"), ("h5", "safetensors"))
WEIGHTS = ("trainable_variables", "non_trainable_variables")


@pytest.mark.parametrize("name", FAMILIES)
def test_h5_is_what_it_was(name, presets, made):
    assert same(presets[name], made[name, "h5"])
    before, after = presets[name], made[name, "h5"]
    assert (before / "config.json").read_bytes() == (after / "config.json").read_bytes()
    assert (before / "task.json").read_bytes() == (after / "task.json").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "via", "to"),
    [("gemma2_9b", via, to) for via in FORMATS for to in FORMATS]
    + [(name, *pair) for name in FAMILIES if name != "gemma2_9b" for pair in ROUND],
)
def test_every_pair_keeps_every_bit(name, via, to, made, tmp_path):
    report = shardload.convert(made[name, via], tmp_path / "out", to=to)
    assert same(made[name, to], tmp_path / "out")
    assert report.tensors == len(shardload.inspect(tmp_path / "out").tensors)
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_keras_hub_reads_the_same_weights_from_hugging_face_and_from_its_preset(name, presets, made):
    path = made[name, "safetensors"]
    loader = TransformersPresetLoader(str(path), json.loads((path / "config.json").read_text()))
    with zeros_for_random():
        theirs = loader.load_backbone(loader.check_backbone_class(), True, dtype="bfloat16")
    preset = KerasPresetLoader(str(presets[name]), json.loads((presets[name] / "config.json").read_text()))
    assert_same_trainable(preset.load_backbone(type(theirs), True, dtype="bfloat16"), theirs)


def assert_same_trainable(ours, theirs):
    for one, two in zip(ours.trainable_variables, theirs.trainable_variables, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint16), np.asarray(two).view(np.uint16), one.path)


PRESETS = ("mistral_7b", "qwen2.5_0.5b", "qwen3_8b", "gpt2_base", "bert_base", "qwen2.5_7b", "qwen3_0.6b")


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_keras_hub_reads_what_was_a_preset(name, tmp_path):
    preset = synth(name, scale=0.02, directory=tmp_path)
    shardload.convert(preset, tmp_path / "hf", to="safetensors")
    wanted = synth(name, scale=0.02, directory=tmp_path / "hub", format="safetensors")
    assert shapes_of(tmp_path / "hf") == shapes_of(wanted)
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    loader = TransformersPresetLoader(str(tmp_path / "hf"), config)
    with zeros_for_random(), keeping_values():
        theirs = loader.load_backbone(loader.check_backbone_class(), True, dtype="bfloat16")
    assert_same_trainable(shardload.load(preset, mesh="1x1", task=False), theirs)
    shardload.convert(tmp_path / "hf", tmp_path / "back", to="h5")
    assert same(preset, tmp_path / "back")


def test_a_report_is_one_line_and_prints_its_notes(tmp_path):
    report = shardload.convert(synth("gpt2", scale=0.02, directory=tmp_path), tmp_path / "out", to="safetensors")
    report = dataclasses.replace(report, notes=("the optimizer was left out",), resumed=2)
    assert re.fullmatch(
        r"<ConvertReport /\S+/out \(hf-safetensors\): \d+ tensors, \S+ [KM]iB, 1 note; .*>", repr(report)
    )
    first, second = str(report).splitlines()
    assert first.startswith(report.target) and "2 were copied" in first and second == "note: the optimizer was left out"


def test_safetensors_reads_what_synth_would_have_written_in_shape(made, tmp_path):
    source = synth("gemma2_9b", scale=0.02, directory=tmp_path, format="safetensors")
    with safe_open(made["gemma2_9b", "safetensors"] / "model.safetensors", "np") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert found == shapes_of(source)
    wanted = dict(shardload.inspect(source).config)
    wanted.pop("shardload")
    assert shardload.inspect(made["gemma2_9b", "safetensors"]).config.items() >= wanted.items()


def shapes_of(path):
    return {name: tensor.shape for name, tensor in shardload.inspect(path).tensors.items()}


def test_plain_orbax_reads_its_own(made):
    tree = ocp.load_checkpointables(made["gemma2_9b", "orbax"])["pytree"]
    arrays = {"/".join(k.key for k in keys): np.asarray(a) for keys, a in jax.tree_util.tree_leaves_with_path(tree)}
    ours = held(made["gemma2_9b", "orbax"])
    assert arrays.keys() == ours.keys()
    assert all(arrays[name].tobytes() == ours[name].tobytes() for name in ours)


@pytest.mark.slow
def test_orbax_in_several_chunks_with_a_padded_one(presets, made, tmp_path, monkeypatch):
    monkeypatch.setattr("shardload.loaders.orbax.saving.CHUNK_BYTES", 10_000)
    shardload.convert(presets["gemma2_9b"], tmp_path / "out", to="orbax", host_memory_bytes=1 << 20)
    assert same(made["gemma2_9b", "orbax"], tmp_path / "out")
    assert len(list((tmp_path / "out" / "pytree").rglob("c/1/*"))) > 5
    shardload.convert(tmp_path / "out", tmp_path / "back", to="h5")
    assert same(made["gemma2_9b", "h5"], tmp_path / "back")


@pytest.mark.slow
def test_compressed_chunks_are_decoded_once(presets, made, tmp_path, monkeypatch):
    """Columns of a matrix that is written by rows, in blocks smaller than a chunk."""
    model = shardload.load(presets["gemma2_9b"], mesh="1x8")
    model.compile("sgd", "mse")
    let_save(OrbaxCheckpoint(tmp_path / "run", compression="zstd"), model)
    decoded = []
    decode = ZarrCodec.decode
    monkeypatch.setattr(ZarrCodec, "decode", lambda self, stored: decoded.append(stored) or decode(self, stored))
    shardload.convert(tmp_path / "run", tmp_path / "out.weights.h5", host_memory_bytes=1 << 20)
    weights = [t.storage for n, t in shardload.inspect(tmp_path / "run").tensors.items() if n.split("/")[0] in WEIGHTS]
    chunks = [getattr(storage, "extents", [storage]) for storage in weights]
    count = 3  # the optimizer's count of steps, read to know whether it has trained; then both of its variables
    assert len(decoded) == count + sum(map(len, chunks)) and max(map(len, chunks)) == 8
    shardload.convert(tmp_path / "run", tmp_path / "hf", to="safetensors")
    assert same(made["gemma2_9b", "safetensors"], tmp_path / "hf")


def test_a_step_loads_onto_a_mesh_and_verifies(made):
    path = made["gemma2_9b", "orbax"]
    assert [v.verdict for v in verify(path)] == ["verified"]
    kernel = shardload.load(path, mesh="1x8").backbone.get_layer("decoder_block_0").gating_ffw.kernel
    stored = held(path)[f"trainable_variables/{kernel.path}"]
    np.testing.assert_array_equal(np.asarray(kernel).view(np.uint16), stored.view(np.uint16))


@pytest.mark.slow
def test_one_keras_file_with_its_description(presets, tmp_path):
    report = shardload.convert(presets["gemma2_9b"], tmp_path / "one.weights.h5")
    assert report.format == "keras-h5"
    assert any("left out" in note for note in report.notes)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["one.json", "one.weights.h5"]
    shardload.convert(tmp_path / "one.weights.h5", tmp_path / "back", to="h5")
    assert same(presets["gemma2_9b"], tmp_path / "back")
    model = keras.saving.deserialize_keras_object(json.loads((tmp_path / "one.json").read_text()))
    model.load_weights(tmp_path / "one.weights.h5")


def test_shards_and_their_index(presets, made, tmp_path):
    shardload.convert(presets["gemma2_9b"], tmp_path / "out", to="safetensors", max_shard_bytes="256KiB")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    assert same(made["gemma2_9b", "safetensors"], tmp_path / "out")


def test_casting_changes_floats_and_what_the_descriptions_say(presets, tmp_path):
    shardload.convert(presets["gemma2_9b"], tmp_path / "out", to="safetensors", dtype="float32")
    shardload.convert(tmp_path / "out", tmp_path / "back", to="h5", dtype="bfloat16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["torch_dtype"] == "float32"
    assert {t.dtype.name for t in shardload.inspect(tmp_path / "out").tensors.values()} == {"float32"}
    assert same(presets["gemma2_9b"], tmp_path / "back")


# KerasHub leaves the vocabulary open when it tries to build a tokenizer.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_tokenizer_files_go_along(presets, tmp_path):
    shardload.convert(presets["gemma2_9b"], tmp_path / "preset", to="h5")
    (tmp_path / "preset" / "assets" / "tokenizer").mkdir(parents=True)
    (tmp_path / "preset" / "assets" / "tokenizer" / "vocabulary.spm").write_bytes(b"words")
    shardload.convert(tmp_path / "preset", tmp_path / "hf", to="safetensors")
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == b"words"
    shardload.convert(tmp_path / "hf", tmp_path / "step", to="orbax")
    shardload.convert(tmp_path / "step", tmp_path / "back", to="h5")
    assert (tmp_path / "back" / "assets" / "tokenizer" / "vocabulary.spm").read_bytes() == b"words"
    assert (tmp_path / "back" / "transformers" / "tokenizer.model").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_0.6b", "qwen2.5_0.5b"])
def test_what_came_from_hugging_face_goes_back(name, tmp_path):
    first = synth(name, scale=0.02, directory=tmp_path, format="safetensors")
    shardload.convert(first, tmp_path / "step", to="orbax")
    shardload.convert(tmp_path / "step", tmp_path / "back", to="safetensors")
    assert same(first, tmp_path / "back")


def test_any_keras_model_goes_between_orbax_and_a_file(tmp_path):
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.BatchNormalization()])
    model.save(tmp_path / "model.keras")
    shardload.convert(tmp_path / "model.keras", tmp_path / "step", to="orbax")
    shardload.convert(tmp_path / "step", tmp_path / "back.weights.h5")
    again = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.BatchNormalization()])
    again.load_weights(tmp_path / "back.weights.h5")
    check_same(again, model)
    with pytest.raises(UnsupportedError, match="not a KerasHub model"):
        shardload.convert(tmp_path / "step", tmp_path / "hf", to="safetensors")


def test_the_description_beside_a_file_is_not_overwritten_either(presets, tmp_path):
    (tmp_path / "q.json").write_text("precious")
    with pytest.raises(WriteError, match=r"q\.json already exists.*overwrite"):
        shardload.convert(presets["gemma2_9b"], tmp_path / "q.weights.h5")
    assert (tmp_path / "q.json").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["q.json"]
    (tmp_path / "q.json").unlink()
    shardload.convert(presets["gemma2_9b"], tmp_path / "q.weights.h5")
    (tmp_path / "q.weights.h5").unlink()
    shardload.convert(presets["gemma2_9b"], tmp_path / "q.weights.h5")  # the same description may stay


def test_whoever_comes_second_starts_again_instead_of_writing_it_twice(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("precious")
    with pytest.raises(WriteError, match="already exists"), staged(tmp_path / "out", folder=True, overwrite=False):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_without_locks_a_conversion_goes_on(tmp_path, monkeypatch):
    def refuse(fd, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(publish.fcntl, "flock", refuse)
    with staged(tmp_path / "out.weights.h5", folder=False, overwrite=False) as staging:
        staging.begin("a plan")
        staging.result.write_text("made")
        staging.publish(sidecars={}, overwrite=False)
    assert [path.name for path in tmp_path.iterdir()] == ["out.weights.h5"]


def test_killed_between_the_two_renames_the_old_one_is_not_lost(presets, tmp_path):
    (tmp_path / ".out.converting" / "replaced").mkdir(parents=True)
    (tmp_path / ".out.converting" / "replaced" / "mine").write_text("precious")
    with pytest.raises(WriteError, match="already exists"):
        shardload.convert(presets["gemma2_9b"], tmp_path / "out", to="h5")
    assert (tmp_path / "out" / "mine").read_text() == "precious"


def test_a_finished_part_outlives_a_target_that_is_taken(tmp_path):
    target = tmp_path / "out.weights.h5"
    with staged(target, folder=False, overwrite=False) as staging:
        staging.begin("a plan")
        staging.result.write_text("made")
        staging.note_places(())
    target.write_text("of another program")
    with pytest.raises(WriteError, match="already exists"), staged(target, folder=False, overwrite=False):
        pass
    assert staging.result.read_text() == "made"


def test_arguments_that_cannot_be(presets, tmp_path):
    preset = presets["gemma2_9b"]
    for target, options, match in (
        (
            tmp_path / "out",
            {},
            r"Cannot tell the format of out. Pass to='preset', 'safetensors' or 'orbax' \(--to\), or",
        ),
        (tmp_path / "out", {"to": "gguf"}, "Cannot convert with to='gguf': expected one of preset, h5"),
        (tmp_path / "out.weights.h5", {"to": "orbax"}, "the name is that of a Keras file"),
        (preset / "out", {"to": "orbax"}, "one contains the other"),
        (tmp_path / "out", {"to": "orbax", "host_memory_bytes": 1}, "at least 256KiB"),
    ):
        with pytest.raises(UsageError, match=match):
            shardload.convert(preset, target, **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_folder_that_is_no_checkpoint_is_never_said_to_be_replaceable(overwrite, presets, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    match = "out already exists, and is no checkpoint that can be replaced. Choose another name"
    match = r"Cannot replace .*out: it is not a checkpoint. Remove it yourself" if overwrite else match
    with pytest.raises(WriteError, match=match):
        shardload.convert(presets["gemma2_9b"], tmp_path / "out", to="safetensors", overwrite=overwrite)
    with pytest.raises(WriteError, match=match):
        shardload.save_as(shardload.load(presets["gemma2_9b"]), tmp_path / "out", to="preset", overwrite=overwrite)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"


def test_a_configuration_hugging_face_cannot_say_is_refused(presets, tmp_path):
    shardload.convert(presets["gemma2_9b"], tmp_path / "one", to="h5")
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    config["config"]["layer_norm_epsilon"] = 1e-3
    (tmp_path / "one" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"rms_norm_eps is 0\.001.*Choose the format h5 or .* the format orbax"):
        shardload.convert(tmp_path / "one", tmp_path / "out", to="safetensors")


@pytest.mark.slow
def test_a_flipped_bit_in_a_step_is_not_copied(made, presets, tmp_path):
    shardload.convert(presets["gemma_2b"], tmp_path / "step", to="orbax")
    flip(largest_file(tmp_path / "step", "c/0/*"), 100, 4)
    counted = Counted()
    with pytest.raises(DamagedError, match="damaged"):
        shardload.convert(tmp_path / "step", tmp_path / "out", to="h5", progress=counted)
    assert counted.ended
    assert not (tmp_path / "out").exists()


def test_a_tensor_nobody_takes_is_an_error(tmp_path):
    path = synth("gemma2_9b", scale=0.02, directory=tmp_path, format="safetensors")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(MismatchError, match="would be lost"):
        shardload.convert(path, tmp_path / "out", to="h5")


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_killed_it_goes_on_and_a_torn_tensor_is_copied_again(to, presets, made, tmp_path):
    target, home = tmp_path / "out", tmp_path / ".out.converting"

    def refused():
        with pytest.raises(WriteError, match="another process"):
            shardload.convert(presets["gemma2_9b"], target, to=to)

    journal = killed(presets["gemma2_9b"], target, to, done=4, meanwhile=refused)
    assert not target.exists()
    done = len(lines_done(journal))
    tear(home / "result", journal)
    assert shardload.convert(presets["gemma2_9b"], target, to=to).resumed == done - 1
    assert same(made["gemma2_9b", to], target)
    assert not home.exists()


@pytest.mark.slow
def test_another_plan_begins_anew(presets, made, tmp_path):
    killed(presets["gemma2_9b"], tmp_path / "out", "orbax")
    assert shardload.convert(presets["gemma2_9b"], tmp_path / "out", to="safetensors").resumed == 0
    assert same(made["gemma2_9b", "safetensors"], tmp_path / "out")


def tear(result, journal):
    """Zero the first tensor's bytes, and add half a line to the journal."""
    lines = [json.loads(line) for line in journal.read_text().splitlines()]
    first = next(line["done"] for line in lines if "done" in line)
    place = next(p for p in lines[1]["places"] if p["name"] == first)
    path, offset, _, count = place["pieces"][0]
    with (result / path).open("r+b") as file:
        file.seek(offset)
        file.write(b"\0" * count)
    with journal.open("a") as file:
        file.write('{"done": "ha')


def test_a_folder_is_removed_while_threads_of_a_failed_save_still_write_to_it(tmp_path):
    staging = ConversionFolder(working_folder(tmp_path / "out"), tmp_path / "out")
    ends = time.monotonic() + 0.1

    def write():
        while time.monotonic() < ends:
            with contextlib.suppress(OSError):
                staging.result.mkdir(parents=True, exist_ok=True)
                (staging.result / f"{time.monotonic_ns()}").touch()

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        writing = [pool.submit(write) for _ in range(4)]
        staging.result.mkdir(parents=True, exist_ok=True)
        assert not staging.kept()
        for each in writing:
            each.result()
    assert not list(tmp_path.iterdir())
