"""Damaged HDF5, Keras archives, KerasHub presets and Hugging Face folders; see `fuzzing` for what is promised.

Each file is opened twice: here, where the manifest is looked at, and in a process of its own, whose resident peak is
what libhdf5 took as well.
"""

import functools
import io
import json
import zipfile

import h5py
import ml_dtypes
import numpy as np
import pytest
from checkpoints import small_arrays
from fuzzing import RESIDENT_FLOOR_BYTES, Child, Format, anything, changed, damaged, fuzz, put
from fuzzing import check as check_here
from hub_folders import config_of
from hypothesis import strategies as st
from safetensors.numpy import save_file

child = warm = None


@pytest.fixture(autouse=True, scope="module")
def _child(tmp_path_factory):
    global child, warm  # noqa: PLW0603 - Hypothesis runs bodies that take no fixtures
    child = Child()
    warm = tmp_path_factory.mktemp("warm") / "x.h5"
    warm.write_bytes(h5_bytes("latest"))
    child.grown_by_opening(warm)
    yield
    child.close()


def check(path, *, factor):
    """`fuzzing.check`, after a look at the resident memory that opening takes."""
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    allowed = RESIDENT_FLOOR_BYTES + factor * size
    grown = child.grown_by_opening(path)
    if grown > allowed:
        # malloc gives free memory back when enough of it lies at its end; then any file takes it anew, again and again.
        usual = max(child.grown_by_opening(warm) for _ in range(3))
        grown = min(child.grown_by_opening(path) for _ in range(3)) - usual
    assert grown <= allowed, f"{grown} bytes resident for a file of {size}"
    return check_here(path, factor=factor)


@functools.cache
def h5_bytes(libver, *, noise=b"", many=0):
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=libver) as file:
        file["noise"] = np.frombuffer(noise, np.uint8)
        for i in range(3):
            file[f"layers/dense_{i}/vars/0"] = np.ones((4, i + 1), np.float32)
        for i in range(many):
            file[f"many/of_{i}"] = h5py.SoftLink("/half") if i % 3 else file["layers/dense_0"]
        file.create_dataset("half", data=np.ones(4, ml_dtypes.bfloat16)).attrs["dtype"] = "bfloat16"
        file.create_dataset("chunked", data=np.ones((8, 4)), chunks=(2, 4), compression="gzip")
    return buffer.getvalue()


@fuzz(libver=st.sampled_from(["earliest", "latest"]), data=st.data())
def test_damaged_h5(tmp_path, libver, data):
    return check(put(tmp_path / "x.weights.h5", data.draw(damaged(h5_bytes(libver)))), factor=Format.HDF5)


@fuzz(data=st.data(), many=st.sampled_from([12, 60]))
def test_damaged_dense_links(tmp_path, data, many):
    raw = h5_bytes("latest", many=many)
    # Most of the file is none of the structures of links.
    start = raw.find(data.draw(st.sampled_from([b"FRHP", b"BTHD", b"BTLF", b"FHDB"])))
    content = raw[:start] + data.draw(damaged(raw[start : start + 600])) + raw[start + 600 :]
    return check(put(tmp_path / "x.weights.h5", content), factor=Format.HDF5)


ARCHIVE = {
    "metadata.json": b"{}",
    "config.json": b'{"class_name": "Sequential"}',
    # With some bytes that do not compress, as in trained weights.
    "model.weights.h5": h5_bytes("earliest", noise=np.random.default_rng(0).bytes(2000)),
}


@functools.cache
def legacy_bytes(*, fixed):
    listed = np.asarray if fixed else list
    buffer = io.BytesIO()
    with h5py.File(buffer, "w") as file:
        file.attrs["model_config"] = b'{"class_name": "Sequential", "config": {"name": "s", "layers": []}}'
        file.attrs["training_config"] = np.bytes_(b'{"loss": "mse"}')
        file.attrs["layer_names"] = listed([b"dense_0", b"flat", b"dense_1", b"dense_2"])
        file.create_group("flat").attrs["weight_names"] = []
        for i in range(3):
            file[f"dense_{i}/dense_{i}/kernel:0"] = np.ones((4, i + 1), np.float32)
            file[f"dense_{i}"].attrs["weight_names"] = listed([f"dense_{i}/kernel:0".encode()])
    return buffer.getvalue()


@fuzz(data=st.data(), fixed=st.booleans())
def test_damaged_legacy_h5(tmp_path, data, fixed):
    return check(put(tmp_path / "x.h5", data.draw(damaged(legacy_bytes(fixed=fixed)))), factor=Format.HDF5)


METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


@fuzz(data=st.data(), weights=st.sampled_from(METHODS))
def test_damaged_archive(tmp_path, data, weights):
    if not (seed := tmp_path / f"seed{weights}.bin").exists():
        with zipfile.ZipFile(seed, "w") as file:
            for name, content in ARCHIVE.items():
                method = zipfile.ZIP_DEFLATED if name == "metadata.json" else weights
                file.writestr(zipfile.ZipInfo(name), content, method)  # always of the same date
    raw = seed.read_bytes()
    match data.draw(st.sampled_from(["head", "tail", "all"])):
        case "head":
            content = data.draw(damaged(raw[:300])) + raw[300:]
        case "tail":
            content = raw[:-400] + data.draw(damaged(raw[-400:]))
        case "all":
            content = data.draw(damaged(raw))
    return check(put(tmp_path / "x.keras", content), factor=Format.JSON)


@fuzz(data=st.data())
def test_damaged_sharded_index(tmp_path, data):
    for shard, groups in SHARDS.items():
        if not (file := tmp_path / shard).exists():
            with h5py.File(file, "w") as out:
                for group in groups:
                    out[f"{group}/0"] = np.ones(3, np.float32)
    weight_map = {f"/{group}": shard for shard, groups in SHARDS.items() for group in groups}
    files = st.sampled_from([*SHARDS, "../x", "c.weights.h5"]) | st.lists(st.sampled_from([*SHARDS])) | anything
    weight_map |= data.draw(st.dictionaries(st.sampled_from([*weight_map, "/", ""]), files, max_size=1))
    document = json.dumps(data.draw(changed({"weight_map": weight_map, "metadata": {"total_size": 9}}))).encode()
    content = data.draw(damaged(document)) if data.draw(st.booleans()) else document
    return check(put(tmp_path / "m.weights.json", content), factor=Format.JSON)


SHARDS = {"a.weights.h5": ["layers/dense_0/vars", "layers/dense_1/vars"], "b.weights.h5": ["layers/dense_2/vars"]}


@functools.cache
def preset_files():
    backbone = {"module": "keras_hub.models", "class_name": "GemmaBackbone", "registered_name": "keras_hub>Gemma"}
    config = {**backbone, "config": {"num_layers": 2, "dtype": {"class_name": "DTypePolicy", "config": {}}}}
    task = {**backbone, "class_name": "GemmaCausalLM", "config": {"backbone": config}}
    described = {"config.json": config, "task.json": task, "metadata.json": {"keras_version": "3.15.1"}}
    texts = {name: json.dumps(document).encode() for name, document in described.items()}
    return described, {**texts, "model.weights.h5": h5_bytes("earliest"), "task.weights.h5": h5_bytes("latest")}


@fuzz(data=st.data())
def test_damaged_preset(tmp_path, data):
    described, raw = preset_files()
    folder = tmp_path / "preset"
    if not folder.exists():
        folder.mkdir()
        for name, content in raw.items():
            put(folder / name, content)
    which = data.draw(st.sampled_from([*raw]))
    if which in described and data.draw(st.booleans()):
        found = json.dumps(data.draw(changed(described[which]))).encode("utf-8", "surrogatepass")
    else:
        found = data.draw(damaged(raw[which]))
    put(folder / which, found)
    manifest = check(folder, factor=Format.JSON)
    put(folder / which, raw[which])
    return manifest


@fuzz(data=st.data())
def test_damaged_hugging_face_config(tmp_path, data):
    if not (weights := tmp_path / "model.safetensors").exists():
        save_file(small_arrays(), weights)
    document = config_of(data.draw(st.sampled_from(["gemma2", "qwen3_moe", "bert"])))
    raw = json.dumps(data.draw(changed(document))).encode()
    put(tmp_path / "config.json", data.draw(damaged(raw)) if data.draw(st.booleans()) else raw)
    return check(tmp_path, factor=Format.JSON)
