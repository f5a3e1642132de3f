"""What is a checkpoint of which format; those of other libraries are refused with the call that converts them."""

import io
import json
import os
import shutil
import sys
import zipfile

import h5py
import npz_format
import numpy as np
import pytest
from checkpoints import assert_same, small_arrays, write_gguf
from safetensors.numpy import load_file, save_file
from saved_steps import save_step

import shardload
from shardload.errors import SourceError, SourceNotFoundError, UnsupportedError
from shardload.loaders import open_manifest, recognise, register, registry


@pytest.fixture
def files(tmp_path):
    """One small file of each single-file format, without an ending."""
    save_file(small_arrays(), tmp_path / "safetensors")
    with h5py.File(tmp_path / "keras-h5", "w") as file:
        file["x"] = np.ones(3)
    write_gguf(tmp_path / "gguf", {})
    return tmp_path


@pytest.mark.parametrize("format", ["safetensors", "keras-h5", "gguf"])
def test_content_tells_without_an_ending(files, format):
    assert open_manifest(files / format).format == format
    assert open_manifest(str(files / format), format=format).format == format


def test_user_block_tells_too(tmp_path):
    with h5py.File(tmp_path / "x", "w", userblock_size=2048) as file:
        file["x"] = np.ones(3)
    assert open_manifest(tmp_path / "x").format == "keras-h5"


@pytest.mark.parametrize("format", ["safetensors", "keras-h5", "gguf"])
@pytest.mark.parametrize("ending", [".safetensors", ".weights.h5", ".gguf", ".keras", ".weights.json"])
def test_an_ending_that_lies(files, format, ending):
    path = files / format
    path.rename(path.with_name("x" + ending))
    path = path.with_name("x" + ending)
    if ending.split(".")[-1] in {"safetensors": "safetensors", "keras-h5": "h5", "gguf": "gguf"}[format]:
        assert open_manifest(path).format == format
    else:
        with pytest.raises(SourceError, match=rf"ends like .* its content is .*format='{format}'"):
            open_manifest(path)
        assert open_manifest(path, format=format).format == format


def test_insisting_on_another_format(files):
    with pytest.raises(SourceError, match=r"should be a \.gguf file, but its content is a \.safetensors"):
        open_manifest(files / "safetensors", format="gguf")
    with pytest.raises(UnsupportedError, match="Unknown format 'pickle'; supported formats: keras-h5"):
        open_manifest(files / "safetensors", format="pickle")


CONTENT = {
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "git lfs pull"),
    "html": (b"<!DOCTYPE html><html>", "web page"),
    "empty": (b"", "empty"),
    "noise": (bytes(range(200)), r"begins with .* which matches no known format. Supported formats: a Keras"),
    "pickle": (b"\x80\x04\x95\x00", "pickle"),
    "json": (b'{"a": 1}', "no 'weight_map'"),
    "one byte": (b"\x01", "begins with"),
    "zip": (b"PK\x03\x04" + b"\0" * 40, "damaged zip"),
    "gguf": (b"GGUF", "truncated"),
}


@pytest.mark.parametrize("content", ["lfs", "html"])
@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"model_type": "bert"}, "model.safetensors"),
        ({"registered_name": "keras_hub>BertBackbone"}, "model.weights.h5"),
    ],
)
def test_what_a_download_left_in_a_folder(tmp_path, config, name, content):
    raw, message = CONTENT[content]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(SourceError, match=rf"{name} is a .*{message}"):
        open_manifest(tmp_path)


@pytest.mark.parametrize("ending", ["", ".safetensors", ".h5", ".bin"])
@pytest.mark.parametrize(("raw", "message"), CONTENT.values(), ids=CONTENT)
def test_what_is_not_a_checkpoint(tmp_path, raw, message, ending):
    path = tmp_path / f"x{ending}"
    path.write_bytes(raw)
    with pytest.raises((SourceError, UnsupportedError), match=rf"{message}|its content is"):
        open_manifest(path)


def test_no_file(tmp_path):
    with pytest.raises(SourceNotFoundError, match="There is no file"):
        open_manifest(tmp_path / "none.safetensors")
    with pytest.raises(SourceNotFoundError, match="There is no file"):
        open_manifest(tmp_path / "none" / "x")
    with pytest.raises(SourceError, match="NUL"):
        open_manifest("a\0b")


def test_a_path_too_long_for_any_file_system():
    with pytest.raises(SourceError, match=r"Cannot open .*: File name too long"):
        open_manifest("x" * 5000)


def test_a_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match="not a regular file"):
        open_manifest(tmp_path / "x.safetensors")


def test_folders_hold_one_checkpoint(files):
    (files / "safetensors").unlink()
    (files / "keras-h5").unlink()
    (files / "gguf").rename(files / "a.gguf")
    assert open_manifest(files).format == "gguf"
    write_gguf(files / "b.gguf", {})
    with pytest.raises(SourceError, match=r"contains 2 checkpoints of that format \(a.gguf, b.gguf\); open one"):
        open_manifest(files)
    with h5py.File(files / "c.weights.h5", "w") as file:
        file["x"] = np.ones(3)
    with pytest.raises(SourceError, match="several formats"):
        open_manifest(files)
    assert open_manifest(files, format="keras-h5").format == "keras-h5"


def test_folder_of_one_safetensors(tmp_path):
    save_file(small_arrays(), tmp_path / "adapter.safetensors")
    assert_same(open_manifest(tmp_path), small_arrays())


@pytest.mark.parametrize(
    ("format", "names"),
    [
        ("safetensors", ["x.safetensors"]),
        ("safetensors", ["x-1-of-2.safetensors", "x-2-of-2.safetensors"]),
        ("keras-h5", ["x.weights.h5"]),
        ("gguf", ["x.gguf"]),
    ],
)
def test_files_that_systems_leave_in_a_folder_do_not_count(files, tmp_path, format, names):
    folder = tmp_path / "copied"
    folder.mkdir()
    for litter in (".DS_Store", "desktop.ini"):
        (folder / litter).write_bytes(b"\0\0\0\1Bud1")
    for i, name in enumerate(names):
        if i:
            save_file({"other": np.ones(3)}, folder / name)
        else:
            shutil.copy(files / format, folder / name)
        (folder / f"._{name}").write_bytes(b"\0\5\x16\7" + bytes(200))
    manifest = open_manifest(folder)
    assert manifest.format == format and {path.name for path in manifest.files} == set(names)


def test_folder_without_checkpoint(tmp_path):
    with pytest.raises(UnsupportedError, match=r"contains no checkpoint; found: nothing\. Supported formats"):
        open_manifest(tmp_path)
    with pytest.raises(SourceNotFoundError, match=r"should contain a \.gguf file"):
        open_manifest(tmp_path, format="gguf")


def test_folder_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(_self):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(SourceError, match=r"Cannot list the folder .*: Permission denied"):
        open_manifest(tmp_path)


def test_a_folder_where_a_file_should_be(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(SourceError, match=r"config\.json should be a file, but it is a folder"):
        open_manifest(tmp_path)


def test_importing_loaders_is_light():
    import subprocess

    code = "import sys, shardload.loaders; print([m for m in ('jax', 'keras', 'h5py', 'gguf') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize("text", ['{"lr": 0.1}', '{"architecture": "resnet50"}', '{"lr"', '{"model_type": "bert"}'])
def test_settings_of_a_run_next_to_its_steps_do_not_describe_a_model(text, tmp_path):
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    save_step(model, tmp_path, 7)
    (tmp_path / "config.json").write_text(text)
    assert recognise(tmp_path).is_step
    assert open_manifest(tmp_path).source.endswith("/7")


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
    "PyTorch checkpoint": ["pytorch_model.bin", "vocab.txt"],
    "NumPy array": ["kernel.npy", "bias.npy"],
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
    for name in ("x.ckpt", "x.bin", "x.index"):
        save_file(ARRAYS, tmp_path / name)
        assert set(open_manifest(tmp_path / name).tensors) == {"a", "b"}


def test_a_format_of_another_package_is_asked_first(tmp_path):
    np.savez(tmp_path / "x.npz", **ARRAYS)
    assert open_manifest(tmp_path / "x.npz").format == "numpy"
    register(npz_format.SPEC)
    try:
        with pytest.raises(shardload.errors.SourceError, match=r"has no model\.json"):
            open_manifest(tmp_path / "x.npz")
    finally:
        registry.unregister(npz_format.SPEC.name)


def test_the_advice_for_numpy_is_right(tmp_path):
    np.save(tmp_path / "x.npy", ARRAYS["b"])
    save_file({"name": np.load(tmp_path / "x.npy")}, tmp_path / "y.safetensors")
    np.testing.assert_array_equal(load_file(tmp_path / "y.safetensors")["name"], ARRAYS["b"])
