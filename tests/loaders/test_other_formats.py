"""Checkpoints of other libraries: recognised, and refused with the call that converts them."""

import io
import zipfile

import npz_format
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import shardload
from shardload.errors import UnsupportedError
from shardload.loaders import open_manifest, register, registry

ARRAYS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.asfortranarray(np.ones((2, 5), np.float16))}


def zipped(*members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for name in members:
            file.writestr(name, b"\x80\x02}q\x00.")
    return buffer.getvalue()


FILES = {
    "x.npy": (b"\x93NUMPY\x01\x00v\x00{", r"NumPy array .*numpy\.load"),
    "npy": (b"\x93NUMPY\x01\x00v\x00{", r"NumPy array .*numpy\.load"),
    "x.npz": (zipped("a.npy", "b.npy"), r"NumPy archive .*dict\(numpy\.load\(path\)\)"),
    "npz": (zipped("a.npy", "b.npy"), r"NumPy archive .*dict\(numpy\.load\(path\)\)"),
    "flax_model.msgpack": (b"\xde\x00\x10\xa1a", r"Flax's msgpack.*msgpack_restore"),
    "checkpoint_100": (b"\x82\xa1a", r"Flax's msgpack.*msgpack_restore"),
    "checkpoint": (b'model_checkpoint_path: "ckpt-1"\n', r"TensorFlow checkpoint.*load_checkpoint\(prefix\)"),
    "ckpt-1.index": (b"\0\0\x02\x04\x02\x08\x01\x1a", r"TensorFlow checkpoint.*load_checkpoint\(prefix\)"),
    "ckpt-1.data-00000-of-00001": (b"\0" * 99, r"TensorFlow checkpoint.*load_checkpoint\(prefix\)"),
    "saved_model.pb": (b"\x08\x01\x12\xff", r"SavedModel.*tf_keras\.models\.load_model\(folder\)"),
    "model.onnx": (b"\x08\x07\x12\x07pytorch", r"ONNX model.*onnx\.load"),
    **{
        f"x{ending}": (zipped("archive/data.pkl", "archive/data/0"), r"PyTorch .*pickle.*safetensors\.torch\.save_file")
        for ending in (".bin", ".pt", ".pth", ".ckpt", "")
    },
    "old.bin": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9", r"pickle.*safetensors\.torch\.save_file"),
    "empty.npz": (zipped("a.npy"), r"NumPy archive .*dict\(numpy\.load\(path\)\)"),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("call", [open_manifest, shardload.inspect])
def test_a_file_says_how_to_convert_it(tmp_path, name, call):
    raw, message = FILES[name]
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(UnsupportedError, match=message) as raised:
        call(tmp_path / name)
    assert str(tmp_path / name) in str(raised.value)


FOLDERS = {
    "TensorFlow checkpoint": ["checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"],
    "TensorFlow SavedModel": ["saved_model.pb", "keras_metadata.pb", "fingerprint.pb"],
    "Flax's msgpack": ["flax_model.msgpack", "tokenizer.model"],
    "PyTorch checkpoint": ["pytorch_model.bin", "vocab.txt"],
    "NumPy array": ["kernel.npy", "bias.npy"],
    "NumPy archive": ["weights.npz"],
    "ONNX model": ["model.onnx"],
}


@pytest.mark.parametrize("noun", FOLDERS)
def test_a_folder_says_how_to_convert_it(tmp_path, noun):
    for name in FOLDERS[noun]:
        (tmp_path / name).write_bytes(b"\x08")
    with pytest.raises(UnsupportedError, match=rf"Cannot read {tmp_path}: it is an? {noun}|is {noun}.*new"):
        shardload.inspect(tmp_path)


def test_a_hugging_face_folder_with_flax_weights_only(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "flax_model.msgpack").write_bytes(b"\xde")
    with pytest.raises(UnsupportedError, match=r"Flax's msgpack.*safetensors\.flax\.save_file"):
        open_manifest(tmp_path)


def test_the_prefix_of_a_tensorflow_checkpoint(tmp_path):
    (tmp_path / "ckpt-1.index").write_bytes(b"\0\0\x02")
    with pytest.raises(UnsupportedError, match="TensorFlow checkpoint"):
        shardload.inspect(tmp_path / "ckpt-1")


def test_names_alone_do_not_refuse_what_can_be_read(tmp_path):
    for name in ("x.npz", "x.ckpt", "x.bin", "x.index", "x.msgpack"):
        save_file(ARRAYS, tmp_path / name)
        assert set(open_manifest(tmp_path / name).tensors) == {"a", "b"}


def test_a_format_of_another_package_is_asked_first(tmp_path):
    np.savez(tmp_path / "x.npz", **ARRAYS)
    with pytest.raises(UnsupportedError, match="NumPy archive"):
        open_manifest(tmp_path / "x.npz")
    register(npz_format.SPEC)
    try:
        with pytest.raises(shardload.errors.SourceError, match=r"has no model\.json"):
            open_manifest(tmp_path / "x.npz")
    finally:
        registry.unregister(npz_format.SPEC.name)


def test_the_advice_for_numpy_is_right(tmp_path):
    np.savez(tmp_path / "x.npz", **ARRAYS)
    np.save(tmp_path / "x.npy", ARRAYS["b"])
    save_file(dict(np.load(tmp_path / "x.npz")), tmp_path / "z.safetensors")
    save_file({"name": np.load(tmp_path / "x.npy")}, tmp_path / "y.safetensors")
    assert {name: value.tolist() for name, value in load_file(tmp_path / "z.safetensors").items()} == {
        name: value.tolist() for name, value in ARRAYS.items()
    }
    assert load_file(tmp_path / "y.safetensors")["name"].tolist() == ARRAYS["b"].tolist()
