"""Files of Keras 2, as Keras' own code for them writes them."""

import h5py
import keras
import numpy as np
import pytest
from checkpoints import assert_same
from keras.src.legacy.saving import legacy_h5_format
from legacy_h5 import write_model, write_variable, write_weights

from shardload.errors import SourceError, UnsupportedError
from shardload.loaders import open_manifest, recognise
from shardload.manifest import Decoded, Extent


def model():
    keras.utils.set_random_seed(3)
    first, last = keras.layers.Dense(16, name="b"), keras.layers.Dense(4, name="a")
    norm = keras.layers.BatchNormalization(name="norm")
    return keras.Sequential([keras.Input((8,)), first, keras.layers.Dropout(0.5, name="drop"), norm, last])


def datasets(path):
    found = {}
    with h5py.File(path) as file:
        file.visititems(lambda name, node: found.update({name: node[()]} if isinstance(node, h5py.Dataset) else {}))
    return {name: np.asarray(value) for name, value in found.items()}


@pytest.mark.parametrize("name", ["m.h5", "m.hdf5", "m.weights.h5", "m"])
def test_weights(tmp_path, name):
    path = write_weights(tmp_path / name, model())
    manifest = open_manifest(path)
    assert manifest.format == "keras-legacy-h5"
    assert recognise(path).name == "keras-legacy-h5"
    assert open_manifest(path, format="keras-legacy-h5").tensors.keys() == manifest.tensors.keys()
    assert_same(manifest, datasets(path))
    assert all(isinstance(tensor.storage, Extent) for tensor in manifest.tensors.values())
    assert list(manifest.metadata["layers"]) == ["b", "norm", "a"]
    assert [len(names) for names in manifest.metadata["layers"].values()] == [2, 4, 2]
    norm = [name.rpartition("/")[2] for name in manifest.metadata["layers"]["norm"]]
    assert norm == ["gamma", "beta", "moving_mean", "moving_variance"]
    assert manifest.metadata["top_level_weights"] == []


def test_a_folder_with_one(tmp_path):
    write_weights(tmp_path / "tf_model.h5", model())
    assert open_manifest(tmp_path).format == "keras-legacy-h5"


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_a_whole_model(tmp_path):
    saved = model()
    saved.compile("adam", "mse")
    saved.train_on_batch(np.ones((2, 8)), np.ones((2, 4)))
    write_model(tmp_path / "m.h5", saved)
    manifest = open_manifest(tmp_path / "m.h5")
    assert_same(manifest, datasets(tmp_path / "m.h5"))
    assert list(manifest.metadata["layers"]) == ["b", "norm", "a"]
    assert manifest.metadata["layers"]["b"][0].startswith("model_weights/b/")
    assert any(name.startswith("optimizer_weights/") for name in manifest.tensors)


def test_names_in_several_attributes(tmp_path, monkeypatch):
    monkeypatch.setattr(legacy_h5_format, "HDF5_OBJECT_HEADER_LIMIT", 100)
    path = write_weights(tmp_path / "m.h5", model())
    with h5py.File(path) as file:
        assert "weight_names0" in file["norm"].attrs
    assert [len(names) for names in open_manifest(path).metadata["layers"].values()] == [2, 4, 2]
    monkeypatch.setattr(legacy_h5_format, "HDF5_OBJECT_HEADER_LIMIT", 8)
    with h5py.File(tmp_path / "n.h5", "w") as file:
        file.create_group("x")
        file.create_group("y")
        legacy_h5_format.save_attributes_to_hdf5_group(file, "layer_names", [b"x" * 5, b"y" * 5])
        assert "layer_names0" in file.attrs
    with pytest.raises(SourceError, match="lists the layer 'xxxxx', but has no such group"):
        open_manifest(tmp_path / "n.h5")


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_names_of_variable_length(tmp_path, monkeypatch):
    fixed = open_manifest(write_weights(tmp_path / "m.h5", model()))
    model().save(tmp_path / "whole.h5")
    variable = open_manifest(write_variable(tmp_path / "v.h5", model()))
    assert list(map(len, variable.metadata["layers"].values())) == list(map(len, fixed.metadata["layers"].values()))
    assert list(open_manifest(tmp_path / "whole.h5").metadata["layers"]) == ["b", "norm", "a"]
    # libhdf5 never reads them.
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", lambda *_: pytest.fail("read an attribute"))
    assert open_manifest(tmp_path / "v.h5").metadata == variable.metadata


def test_compressed_datasets(tmp_path):
    with h5py.File(tmp_path / "m.h5", "w") as file:
        file.attrs["layer_names"] = np.asarray([b"dense"])
        file.create_dataset("dense/dense/kernel:0", data=np.ones((8, 4)), chunks=(4, 4), compression="gzip")
        file["dense"].attrs["weight_names"] = np.asarray([b"dense/kernel:0"])
    manifest = open_manifest(tmp_path / "m.h5")
    assert isinstance(manifest.tensors["dense/dense/kernel:0"].storage, Decoded)
    assert manifest.metadata == {"layers": {"dense": ["dense/dense/kernel:0"]}}


def layers(*names):
    return lambda file: file.attrs.update(layer_names=np.asarray(names))


def weights(names):
    return lambda file: file["a"].attrs.update(weight_names=names)


def soft_link(file):
    file["a/l"] = h5py.SoftLink("/a/k")
    weights(np.asarray([b"l"]))(file)


def dense_attributes(file):
    for number in range(99):
        file["a"].attrs[f"x{number}"] = np.bytes_("x" * 999)


WRONG = {
    "twice": (layers(b"a", b"a"), "layer 'a' twice"),
    "absent_layer": (layers(b"a", b"../a"), r"lists the layer '\.\./a', but has no such group"),
    "absent_weight": (weights(np.asarray([b"none"])), "lists the weight 'a/none' but has no such dataset"),
    "repeated_weight": (weights(np.asarray([b"k", b"k"])), "lists the weight 'a/k' twice"),
    "variable_length": (weights(["k", "gone"]), "lists the weight 'a/gone' but has no such dataset"),
    "numbers": (weights([1, 2]), r"'weight_names' has no list of strings.*save_weights"),
    "soft_link": (soft_link, "lists the weight 'a/l' but has no such dataset"),
    "dense_attributes": (dense_attributes, "'a' has many attributes, stored densely"),
}


@pytest.mark.parametrize(("damage", "says"), WRONG.values(), ids=WRONG)
def test_lists_that_lie(tmp_path, damage, says):
    with h5py.File(tmp_path / "m.h5", "w", libver="latest" if damage is dense_attributes else "earliest") as file:
        file["a/k"] = np.ones(3)
        file["a"].attrs["weight_names"] = np.asarray([b"k"])
        file.attrs["layer_names"] = np.asarray([b"a"])
        damage(file)
    with pytest.raises((SourceError, UnsupportedError), match=says):
        open_manifest(tmp_path / "m.h5")


def test_a_file_in_the_newest_format(tmp_path):
    saved = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, name=f"{i}") for i in range(12))])
    new = open_manifest(write_weights(tmp_path / "n.h5", saved, fixed=False, libver="latest"))
    assert new.metadata == open_manifest(write_weights(tmp_path / "o.h5", saved)).metadata
    with h5py.File(tmp_path / "whole.h5", "w", libver="latest") as file, h5py.File(tmp_path / "n.h5") as old:
        for i in range(12):
            file[f"model_weights{i or ''}"] = 0 if i else h5py.SoftLink("/x")
        del file["model_weights"]
        old.copy("/", file, "model_weights")
    assert list(open_manifest(tmp_path / "whole.h5").metadata["layers"]) == [f"{i}" for i in range(12)]


def test_a_legacy_file_in_a_preset_is_refused(tmp_path):
    write_weights(tmp_path / "model.weights.h5", model())
    (tmp_path / "config.json").write_text('{"registered_name": "keras_hub>GemmaBackbone"}')
    with pytest.raises(UnsupportedError, match=r"as a part of another checkpoint.*file of Keras 2"):
        open_manifest(tmp_path)
