"""What is written is opened by the rules of its readers before it gets its name."""

import json
from dataclasses import replace

import keras
import numpy as np
import pytest
import saving_models as made
from written_everywhere import SHARD_BYTES, check, load_by_keras, randomise, same, state

import shardload
from shardload.converting import keras_files
from shardload.errors import SaveError, UnsupportedError, WriteError
from shardload.keras_bridge import saving
from shardload.keras_bridge.saving import saved_layout
from shardload.loaders import safetensors
from shardload.loaders.orbax.loader import open_orbax
from shardload.runs import writer
from shardload.synth import synth


def without_last(model, **named):
    found = saved_layout(model, **named)
    last = [k for k in found.variables if k.endswith("/vars/0")][-1]
    return replace(found, variables={k: v for k, v in found.variables.items() if k != last})


def renamed(names):
    """The layout with these names for others."""

    def layout(model, **named):
        found = saved_layout(model, **named)
        return replace(found, variables={names.get(k, k): v for k, v in found.variables.items()})

    return layout


KERNEL, BIAS = "layers/dense/vars/0", "layers/dense/vars/1"
WRONG = {
    "another place": ({BIAS: "layers/dense/vars/2"}, f"nothing at '{BIAS}', expected float32 "),
    "another shape": ({KERNEL: BIAS, BIAS: KERNEL}, rf"float32 \(2,\) at '{KERNEL}', expected float32 \(4, 2\)"),
    "another group": ({BIAS: "layers/dense_9/vars/1"}, f"nothing at '{BIAS}', expected float32 "),
}


def plain():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])


@pytest.mark.parametrize("name", ["out.weights.h5", "out.weights.json"])
@pytest.mark.parametrize(("names", "message"), WRONG.values(), ids=WRONG)
def test_a_file_in_which_keras_would_not_find_its_weights_gets_no_name(names, message, name, tmp_path, monkeypatch):
    monkeypatch.setattr(keras_files, "saved_layout", renamed(names))
    with pytest.raises(UnsupportedError, match=f"Cannot write .* for Keras: it would find {message}"):
        shardload.save_as(plain(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_conversion_is_checked_before_values_are_copied(tmp_path, monkeypatch):
    shardload.save(plain(), tmp_path / "steps", step=0)
    monkeypatch.setattr(keras_files, "saved_layout", renamed({BIAS: "layers/dense/vars/7"}))
    with pytest.raises(UnsupportedError, match=rf"nothing at '{BIAS}', expected float32 \(2,\)"):
        shardload.convert(tmp_path / "steps", tmp_path / "out.weights.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["steps"]


def test_a_preset_is_compared_with_what_kerashub_would_save(tmp_path, monkeypatch):
    model = shardload.load(synth("gemma2_2b", scale=0.02, directory=tmp_path))
    key = next(key for key in saved_layout(model.backbone).variables if key.endswith("vars/0"))
    monkeypatch.setattr(keras_files, "saved_layout", renamed({key: f"{key}0"}))
    with pytest.raises(UnsupportedError, match=f"nothing at '{key}'"):
        shardload.save_as(model, tmp_path / "out", to="preset")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["preset", "h5"])
def test_a_synthetic_file_is_compared_with_what_keras_would_save(format, tmp_path, monkeypatch):
    monkeypatch.setattr(saving, "saved_layout", without_last)
    with pytest.raises(UnsupportedError, match=r"nothing at 'layers/.*/vars/0', expected bfloat16"):
        synth("gemma2_2b", scale=0.02, format=format, directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_synthetic_folder_is_read_back(tmp_path, monkeypatch):
    skeleton = safetensors.write_skeleton

    def doubled(folder, tensors, **named):
        return skeleton(folder, [replace(tensor, shape=(2, *tensor.shape)) for tensor in tensors], **named)

    monkeypatch.setattr(safetensors, "write_skeleton", doubled)
    with pytest.raises(WriteError, match=r"Cannot read back .*: it has other tensors than were written"):
        synth("gemma2_2b", scale=0.02, format="safetensors", directory=tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_step_is_compared_with_its_structure(tmp_path, monkeypatch):
    def without_bias(location):
        found = open_orbax(location)
        return replace(found, tensors={k: v for k, v in found.tensors.items() if not k.endswith("bias")})

    monkeypatch.setattr(writer, "open_orbax", without_bias)
    with pytest.raises(SaveError, match=r"dense.*/bias was not written as structure.json lists it"):
        shardload.save(plain(), tmp_path / "steps", step=0)
    assert not (tmp_path / "steps").exists()


def test_optimizers_in_attributes_that_were_not_built_are_written_as_by_keras(tmp_path):
    # `check` compares all names with those of Keras.
    assert check(made.undecided, tmp_path, without="no name").refused == {}
    assert shardload.save_as(made.undecided(), tmp_path / "again.weights.h5").notes == ()


def test_an_optimizer_in_another_that_was_not_built_is_written_as_by_keras(tmp_path):
    model = made.scaled()
    model.save_weights(tmp_path / "keras.weights.h5")
    assert shardload.save_as(model, tmp_path / "out.weights.h5").notes == ()
    one, two = (shardload.inspect(tmp_path / f"{name}.weights.h5").tensors for name in ("keras", "out"))
    assert one.keys() == two.keys()
    assert "optimizer/inner_optimizer/vars/1" in one
    assert "layers/sequential/optimizer/vars/1" in one


def test_what_hooks_store_below_their_group_comes_back_from_shards(tmp_path):
    model, index = made.around(made.InFolders)(), tmp_path / "out.weights.json"
    randomise(model)
    shardload.save_as(model, index, max_shard_bytes=16)
    listed = json.loads(index.read_text())["weight_map"]
    assert isinstance(listed["/layers/in_folders/vars"], list)
    assert not any(group.endswith("/in") for group in listed)
    by_keras = tmp_path / "keras.weights.json"
    model.save_weights(by_keras, max_shard_size=SHARD_BYTES / (1 << 30))
    for read, path in ((load_by_keras, index), (shardload.load_weights, index), (shardload.load_weights, by_keras)):
        found = made.around(made.InFolders)()
        read(found, path)
        assert same(found, model)


@pytest.mark.parametrize("make", [made.before_spectral, made.before_steps])
def test_a_layer_alone_and_in_a_wrapper_is_one_layer_again(make, tmp_path):
    model = make()
    randomise(model)
    model.save(tmp_path / "keras.keras")
    shardload.save(model, tmp_path / "step", step=0)
    assert shardload.save_as(model, tmp_path / "out.weights.h5").notes == ()
    assert same(keras.saving.load_model(tmp_path / "keras.keras"), model)
    for name in ("keras.keras", "step", "out.weights.h5"):
        found = shardload.load(tmp_path / name)
        assert same(found, model)
        x = np.ones((2, *model.input_shape[1:]), "float32")
        assert np.array_equal(found(x), model(x))


# Of Keras, about its own file.
@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")
@pytest.mark.parametrize("make", [made.after_spectral, made.after_steps, made.one_cell])
def test_weights_have_no_description_that_keras_builds_another_model_from(make, tmp_path):
    model, path = make(), tmp_path / "out.weights.h5"
    randomise(model)
    note = shardload.save_as(model, path).notes[0]
    assert "out.json was not written, because the model that Keras builds from it does not fit the file" in note
    assert [p.name for p in tmp_path.iterdir()] == ["out.weights.h5"]
    for read in (load_by_keras, shardload.load_weights):
        found = make()
        read(found, path)
        assert same(found, model)
    model.save(tmp_path / "keras.keras")
    with pytest.raises(ValueError, match="could not be loaded"):
        keras.saving.load_model(tmp_path / "keras.keras")
    shardload.save_as(model, path, overwrite=True)


def test_copies_of_shared_cells_stay_copies(tmp_path):
    model = made.copied_cells()
    randomise(model)
    shardload.save(model, tmp_path / "step", step=0)
    assert list(state(shardload.load(tmp_path / "step"))) == list(state(model))
    shardload.save_as(model, tmp_path / "out.weights.h5")
    assert same(shardload.load(tmp_path / "out.weights.h5"), model)
