"""Every format loads from a store without a local file as it does from this machine, bit for bit.

Whether the store is remote and whether it verifies are two properties, and each format is loaded with either.
"""

import json
import zipfile

import gguf_pairs
import h5py
import keras
import keras_hub
import npz_format
import numpy as np
import pytest
import quantised_folders
from by_hand import check_same
from memory_store import MemoryStore, RemoteMemoryStore, VerifyingMemoryStore
from object_server import ObjectServer
from safetensors.numpy import load_file, save_file

import shardload
from shardload.errors import BudgetError, DamagedError, SourceNotFoundError, TransferError, UnsupportedError
from shardload.loaders import open_manifest, registry
from shardload.manifest import Decoded
from shardload.stores import remote
from shardload.stores.location import Location
from shardload.stores.remote import location_of
from shardload.stores.store import UNIT_BYTES
from shardload.transfer.read_tensor import read_rows, read_tensor
from shardload.verifying import verify


def small_model():
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(64, name="one")(inputs)
    built = keras.Model(inputs, keras.layers.Dense(8, name="two")(hidden))
    built.set_weights([np.random.default_rng(0).normal(size=v.shape).astype("float32") for v in built.weights])
    return built


def safetensors_file(folder, model):
    save_file({v.path: np.asarray(v.value) for v in model.weights}, folder / "model.safetensors")
    return folder / "model.safetensors"


def weights_h5(folder, model):
    model.save_weights(folder / "model.weights.h5")
    return folder / "model.weights.h5"


def compressed_h5(folder, model):
    path = weights_h5(folder, model)
    with h5py.File(path, "r+") as file:
        value = file["layers/dense/vars/0"][...]
        del file["layers/dense/vars/0"]
        file["layers/dense/vars"].create_dataset("0", data=value, chunks=(1, 16), compression="gzip")
    assert any(isinstance(t.storage, Decoded) for t in open_manifest(path).tensors.values())
    return path


def sharded_h5(folder, model):
    (folder / "sharded").mkdir()
    model.save_weights(folder / "sharded" / "model.weights.json", max_shard_size=2.5e-6)
    return folder / "sharded"


def keras_archive(folder, model):
    model.save(folder / "model.keras")
    return folder / "model.keras"


def zipped_again(folder, model):
    """An archive that was unzipped and zipped again, as a person's tools do; Keras reads it."""
    path = folder / "again.keras"
    kept = zipfile.ZipFile(keras_archive(folder, model))
    with kept, zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name in reversed(kept.namelist()):
            file.writestr(name, kept.read(name))
    check_same(keras.saving.load_model(path), model)
    return path


def npz(folder, model):
    npz_format.save(model, folder / "model.npz")
    return folder / "model.npz"


KERAS = [safetensors_file, weights_h5, compressed_h5, sharded_h5, keras_archive, zipped_again, npz]


@pytest.fixture
def known_npz():
    registry.register(npz_format.SPEC)
    yield
    registry.unregister(npz_format.SPEC.name)


def assert_equal_manifests(local, stored):
    assert (stored.format, stored.config, dict(stored.metadata)) == (local.format, local.config, dict(local.metadata))
    assert [file.name for file in stored.files] == [file.name for file in local.files]
    assert list(stored.files.values()) == list(local.files.values())
    assert list(stored.tensors) == list(local.tensors)
    for name, tensor in local.tensors.items():
        found = read_tensor(stored, name)
        assert (found.shape, found.dtype) == (tensor.shape, tensor.dtype)
        assert found.tobytes() == read_tensor(local, name).tobytes()
        end = max(0, tensor.rows - 1), tensor.rows
        assert read_rows(stored.tensors[name], *end).tobytes() == read_rows(tensor, *end).tobytes()


@pytest.mark.usefixtures("known_npz")
@pytest.mark.parametrize("store", [MemoryStore, RemoteMemoryStore, VerifyingMemoryStore])
@pytest.mark.parametrize("write", KERAS)
def test_keras_models(write, store, tmp_path):
    original = small_model()
    path = write(tmp_path, original)
    place = store.copy_of(path)
    assert_equal_manifests(open_manifest(path), open_manifest(place))
    for mesh in ("1x1", "2x4"):
        filled = keras.models.clone_model(original)
        report = shardload.load_weights(filled, place, mesh=mesh)
        assert report.source.startswith(str(place))
        assert (report.missing, report.unused) == ((), ())
        check_same(filled, original)


@pytest.mark.usefixtures("known_npz")
@pytest.mark.parametrize("write", KERAS)
def test_a_flipped_byte_in_a_store_that_verifies(write, tmp_path):
    original = small_model()
    place = VerifyingMemoryStore.copy_of(write(tmp_path, original))
    largest = max(place.store.files, key=lambda key: len(place.store.files[key]))
    place.store.flip(largest, len(place.store.files[largest]) // 2)
    with pytest.raises(DamagedError, match=f"verifying://{largest} from byte 0 is damaged"):
        shardload.load_weights(keras.models.clone_model(original), place, mesh="1x2")


def large_model():
    """Two kernels of 16 MiB, and biases."""
    model = keras.Sequential([keras.Input((1024,)), keras.layers.Dense(4096), keras.layers.Dense(1024)])
    model.set_weights([np.random.default_rng(0).random(v.shape, np.float32) for v in model.weights])
    return model


@pytest.mark.parametrize("write", [safetensors_file, weights_h5, keras_archive])
@pytest.mark.parametrize("mesh", ["1x1", "1x8"])
def test_a_remote_store_is_asked_in_advance_for_large_ranges(write, mesh, tmp_path):
    original = large_model()
    place = RemoteMemoryStore.copy_of(write(tmp_path, original))
    open_manifest(place)
    headers = len(place.store.reads)
    place.store.reads.clear()
    filled = keras.models.clone_model(original)
    report = shardload.load_weights(filled, place, mesh=mesh)
    assert all(map(np.array_equal, original.get_weights(), filled.get_weights()))
    store, needed = place.store, sum(v.value.nbytes for v in original.weights)
    assert sum(stop - start for _, start, stop in store.reads[headers:]) <= 1 << 20  # headers only
    fetched = sum(stop - start for _, start, stop in store.ahead)
    assert needed <= fetched == report.bytes.read <= 1.01 * needed
    assert len(store.ahead) <= needed / (4 * UNIT_BYTES) + 4 and store.most_pending >= 4
    assert report.bytes.needed == needed
    store.ahead.clear()
    with pytest.raises(BudgetError, match=r"Cannot load from a remote store .* Raise it to at least 16MiB"):
        shardload.load_weights(filled, place, mesh=mesh, host_memory_bytes="8MiB")
    assert not store.ahead


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("write", [safetensors_file, weights_h5, compressed_h5, keras_archive, sharded_h5])
def test_a_folder_in_an_object_store_without_digests(write, scheme, tmp_path, monkeypatch):
    original = small_model() if write in (compressed_h5, sharded_h5) else large_model()
    (tmp_path / "models").mkdir()
    path = write(tmp_path / "models", original)
    server = ObjectServer(tmp_path)
    try:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        place = location_of(f"{getattr(server, scheme)}/models") / path.name
        assert_equal_manifests(open_manifest(path), open_manifest(place))
        server.requests.clear()
        filled = keras.models.clone_model(original)
        shardload.load_weights(filled, place, mesh="1x8")
    finally:
        server.close()
    assert all(map(np.array_equal, original.get_weights(), filled.get_weights()))
    assert server.bytes_sent <= sum(v.value.nbytes for v in original.weights) * 1.01 + (6 << 20)
    assert sum(sent > 1 for *_, sent in server.requests) <= 24


@pytest.mark.parametrize("budget", ["2MiB", "64MiB"])
def test_a_store_that_verifies_is_read_once_in_whole_units(budget, tmp_path, monkeypatch):
    original = large_model()
    place = VerifyingMemoryStore.copy_of(safetensors_file(tmp_path, original))
    filled = keras.models.clone_model(original)
    report = shardload.load_weights(filled, place, mesh="1x8", host_memory_bytes=budget)
    assert all(map(np.array_equal, original.get_weights(), filled.get_weights()))
    assert report.bytes.needed <= report.bytes.read <= report.bytes.needed + UNIT_BYTES
    assert report.host_bytes.peak_staging <= report.host_bytes.budget
    place.store.flip(place.key, len(place.store.files[place.key]) - 5)
    with pytest.raises(DamagedError, match="from byte 33554432 is damaged"):
        shardload.load_weights(filled, place, mesh="1x8", host_memory_bytes=budget, atomic=True)


def test_an_archive_builds_its_model(tmp_path):
    original = small_model()
    loaded = shardload.load(MemoryStore.copy_of(keras_archive(tmp_path, original)), mesh="1x2")
    assert all(map(np.array_equal, original.get_weights(), loaded.get_weights()))


def test_a_url_whose_scheme_names_a_store(tmp_path, monkeypatch):
    original = small_model()
    place = MemoryStore.copy_of(weights_h5(tmp_path, original))
    monkeypatch.setitem(remote.SCHEMES, "memory", lambda url: Location(place.store, url.partition("://")[2]))
    filled = keras.models.clone_model(original)
    report = shardload.load_weights(filled, "memory://model.weights.h5", mesh="1x2")
    assert report.source == "memory://model.weights.h5"
    assert all(map(np.array_equal, original.get_weights(), filled.get_weights()))
    assert shardload.inspect("memory://model.weights.h5").source == report.source
    assert [found.verdict for found in verify("memory://model.weights.h5")] == ["readable"]
    with pytest.raises(UnsupportedError, match="Cannot read memory://run, expected a path, or an address at s3://"):
        shardload.restore(filled, "memory://run")


def sharded_folder(folder):
    """A Hugging Face folder in two shards with an index."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    placed = {name: f"model-{1 + i % 2:05}-of-00002.safetensors" for i, name in enumerate(tensors)}
    for shard in set(placed.values()):
        save_file({n: tensors[n] for n in tensors if placed[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return folder


@pytest.mark.parametrize("store", [MemoryStore, RemoteMemoryStore, VerifyingMemoryStore])
@pytest.mark.parametrize("kind", ["Q8_0", "folder", "parts"])
def test_hugging_face_models(kind, store, tmp_path):
    parts = {"split_max_tensors": 8} if kind == "parts" else {}
    file, folder = gguf_pairs.write(tmp_path, "llama", "Q8_0", **parts)
    path = {"Q8_0": file, "folder": folder, "parts": tmp_path}[kind]
    if kind == "folder":
        sharded_folder(folder)
    place = store.copy_of(path)
    assert_equal_manifests(open_manifest(path), open_manifest(place))
    expected = shardload.load(path, task=False, mesh="1x2")
    filled = keras_hub.models.Llama3Backbone.from_config(expected.get_config())
    shardload.load_weights(filled, place, mesh="1x2")
    check_same(filled, expected)


@pytest.mark.parametrize("store", [MemoryStore, RemoteMemoryStore, VerifyingMemoryStore])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("packed 4 asymmetric", {"quantized": "keep"}),
        ("gptq 4 in another order", {"quantized": "keep"}),
        ("bitsandbytes int8", {"quantized": "keep"}),
        ("nvfp4", {}),
        ("fp8 blocks", {"quantize": "int4"}),
    ],
)
def test_quantised_folders(method, options, store, tmp_path):
    sizes = {"num_hidden_layers": 1, "intermediate_size": 64}
    folder, _ = quantised_folders.write(tmp_path, method, architectures=["LlamaForCausalLM"], **sizes)
    expected, found = (
        shardload.load(source, task=False, mesh="1x2", **options) for source in (folder, store.copy_of(folder))
    )
    check_same(found, expected)


def test_a_preset_folder(tmp_path):
    gguf_pairs.write(tmp_path, "llama", "F32")
    shardload.load(tmp_path / "hf", task=False).save_to_preset(tmp_path / "preset")
    place = MemoryStore.copy_of(tmp_path / "preset")
    assert_equal_manifests(open_manifest(tmp_path / "preset"), open_manifest(place))


def test_a_step_needs_files_on_this_machine(tmp_path):
    from saved_steps import save_step

    step = save_step(small_model(), tmp_path / "run", 7)
    with pytest.raises(
        UnsupportedError, match=r"Cannot open memory://7/pytree/manifest.ocdbt in place.*Copy the checkpoint"
    ):
        open_manifest(MemoryStore.copy_of(step))


def test_a_file_that_changes_after_its_headers_were_read(tmp_path):
    place = MemoryStore.copy_of(safetensors_file(tmp_path, small_model()))
    manifest = open_manifest(place)
    name = next(iter(manifest.tensors))
    place.store.files[place.key] = place.store.files[place.key][:-2000]
    with pytest.raises(TransferError, match=r"memory://model\.safetensors ends before"):
        for name in manifest.tensors:
            read_tensor(manifest, name)
    del place.store.files[place.key]
    with pytest.raises(SourceNotFoundError, match=r"There is no file memory://model\.safetensors"):
        read_tensor(manifest, name)
