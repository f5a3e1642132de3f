"""Damaged files that are mostly tensors, as real checkpoints are: opening takes less memory than the file has bytes.

`test_fuzz_loaders` and `test_fuzz_keras` damage files that are nothing but headers, where text becomes larger Python
objects; here the promise is literal: no more bytes than the file has. So it is for the process's resident peak, beside
what `malloc` and libhdf5 keep anyway.
"""

import functools
import json
import struct
import zipfile

import h5py
import keras
import numpy as np
import pytest
from checkpoints import assert_same, write_gguf
from fuzzing import RESIDENT_FLOOR_BYTES, Child, changed, check_places, damaged, fuzz, measured, put
from hub_folders import config_of
from hypothesis import strategies as st
from safetensors.numpy import save_file

from shardload.errors import SourceError
from shardload.loaders import open_manifest

ROWS = 1 << 18
"""Of four float32: 4 MiB of zeros, which are never damaged."""
GRAIN = 64
"""Bytes looked at together when what is not zero is searched."""
child = None


@pytest.fixture(autouse=True, scope="module")
def _child(tmp_path_factory):
    global child  # noqa: PLW0603 - Hypothesis runs bodies that take no fixtures
    child = Child()
    warm = tmp_path_factory.mktemp("warm") / "x.h5"
    write("earliest", warm)
    child.grown_by_opening(warm)
    yield
    child.close()


def write(kind, path):
    """An undamaged file of one kind."""
    big, small = np.zeros((ROWS, 4), np.float32), np.ones(8, np.float32)
    match kind:
        case "safetensors":
            save_file({"model.big.weight": big, "model.norm.weight": small}, path, metadata={"format": "pt"})
        case "gguf":
            write_gguf(path, {"token_embd.weight": big.reshape(-1, 32), "blk.0.attn_norm.weight": small})
        case "earliest" | "latest":
            with h5py.File(path, "w", libver=kind) as file:
                file["layers/embedding/vars/0"] = big
                for i in range(3):
                    file[f"layers/dense_{i}/vars/0"] = small
                file.create_dataset("chunked", data=np.ones((8, 4)), chunks=(2, 4), compression="gzip")
        case "keras":
            write("earliest", path.with_suffix(".h5"))
            with zipfile.ZipFile(path, "w") as file:
                for name, text in {"metadata.json": "{}", "config.json": '{"class_name": "Sequential"}'}.items():
                    file.writestr(zipfile.ZipInfo(name), text)
                file.writestr(zipfile.ZipInfo("model.weights.h5"), path.with_suffix(".h5").read_bytes())


@functools.cache
def headers(path):
    """Where the file is not zero, as flat positions: its headers, and a few numbers."""
    raw = np.frombuffer(path.read_bytes(), np.uint8)
    grains = np.pad(raw, (0, -len(raw) % GRAIN)).reshape(-1, GRAIN).any(axis=1)
    found = np.flatnonzero(np.repeat(grains, GRAIN))
    return found[found < len(raw)], raw


def within_its_size(path):
    """Open it here, where what Python allocates is counted, and in the child, whose resident peak is."""
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    manifest, peak = measured(path, {})
    assert peak <= size, f"{peak} bytes allocated for a file of {size}"
    grown = child.grown_by_opening(path)
    assert grown <= size + RESIDENT_FLOOR_BYTES, f"{grown} bytes resident for a file of {size}"
    if manifest is not None:
        check_places(manifest)
    return manifest


@pytest.mark.parametrize("kind", ["safetensors", "gguf", "earliest", "latest", "keras"])
def test_headers_of_an_undamaged_file_are_small(tmp_path, kind):
    write(kind, tmp_path / f"seed.{kind}")
    at, raw = headers(tmp_path / f"seed.{kind}")
    assert len(at) < 16384 < ROWS * 16 < len(raw)


def test_a_header_as_long_as_the_tensors_is_not_read(tmp_path):
    path = tmp_path / "x.weights.h5"
    write("earliest", path)
    raw = bytearray(path.read_bytes())
    raw[96 + 8 : 96 + 12] = struct.pack("<I", 3 << 20)  # the root group's object header, of which 512 bytes are read
    path.write_bytes(raw)
    with pytest.raises(SourceError, match=r"object at byte 608 or before it should take 3145232 bytes"):
        open_manifest(path)
    assert within_its_size(path) is None


@pytest.mark.parametrize(("libver", "track_order"), [("latest", False), ("earliest", True)])
def test_groups_with_dense_link_storage_are_read(tmp_path, libver, track_order):
    values = {f"layers/dense_{i}/vars": np.full(3, i, np.float32) for i in range(60)}
    with h5py.File(tmp_path / "x.weights.h5", "w", libver=libver, track_order=track_order) as file:
        for name, value in values.items():
            file.create_group(name, track_order=track_order)["0"] = value
    assert_same(open_manifest(tmp_path / "x.weights.h5"), {f"{name}/0": value for name, value in values.items()})


def test_a_model_of_many_layers_saved_by_keras_opens(tmp_path):
    model = keras.Sequential([keras.Input((2,)), *(keras.layers.Dense(2) for _ in range(60))])
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    model.save_weights(tmp_path / "x.weights.h5")
    model.save(tmp_path / "x.keras")
    for name in ("x.weights.h5", "x.keras"):
        assert sum(n.startswith("layers/") for n in open_manifest(tmp_path / name).tensors) == 120


@pytest.mark.parametrize("length", [3 << 20, 1 << 20])
def test_a_safetensors_header_that_ends_in_the_tensors_is_not_read(tmp_path, length):
    path = tmp_path / "x.safetensors"
    write("safetensors", path)
    raw = bytearray(path.read_bytes())
    raw[:8] = struct.pack("<Q", length)
    path.write_bytes(raw)
    with pytest.raises(SourceError, match="header should end with a closing brace, but ends with"):
        open_manifest(path)
    assert measured(path, {})[1] < 1 << 16


def damaging(kind, name, *, share=1):
    """The test that damages a file of that kind and opens it under that name."""

    def damage(tmp_path, data):
        seed, path = tmp_path / f"seed.{kind}", tmp_path / name
        if not seed.exists():
            write(kind, seed)
            path.write_bytes(seed.read_bytes())
        at, raw = headers(seed)
        found = np.frombuffer(data.draw(damaged(raw[at].tobytes(), hot=len(at))), np.uint8)[: len(at)]
        with path.open("r+b") as file:  # in place: copying megabytes would take longer than opening them
            whole = np.memmap(file, np.uint8, "r+")
            whole[at] = 0
            whole[at[: len(found)]] = found
            del whole
        return within_its_size(path)

    return fuzz(share=share, data=st.data())(damage)


test_safetensors = damaging("safetensors", "x.safetensors")
test_gguf = damaging("gguf", "x.gguf")
test_hdf5 = damaging("earliest", "x.weights.h5", share=0.5)
test_latest_hdf5 = damaging("latest", "x.weights.h5", share=0.5)
test_archive = damaging("keras", "x.keras")


@fuzz(data=st.data())
def test_documents_beside_shards(tmp_path, data):
    if not (tmp_path / "a.safetensors").exists():
        write("safetensors", tmp_path / "a.safetensors")
    weight_map = dict.fromkeys(["model.big.weight", "model.norm.weight"], "a.safetensors")
    documents = {"model.safetensors.index.json": {"weight_map": weight_map}, "config.json": config_of("gemma2")}
    which = data.draw(st.sampled_from([*documents]))
    for name, document in documents.items():
        text = json.dumps(data.draw(changed(document)) if name == which else document).encode("utf-8", "surrogatepass")
        put(tmp_path / name, data.draw(damaged(text)) if name == which else text)
    return within_its_size(tmp_path)
