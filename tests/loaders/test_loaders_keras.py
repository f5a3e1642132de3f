import gc
import itertools
import json
import re
import struct
import tracemalloc
import zipfile
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace

import h5py
import keras
import ml_dtypes
import numpy as np
import pytest
from by_hand import check_same
from checkpoints import assert_same, flip, read_tensor
from memory_store import MemoryStore

import shardload
from shardload.errors import (
    MismatchError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
    UnsupportedError,
    WriteError,
)
from shardload.loaders import keras_archive, open_manifest
from shardload.manifest import Decoded, Extent
from shardload.stores import local
from shardload.stores.local import located


def model(dtype="float32"):
    """A small model with several kinds of variables, seeded ones among them."""
    keras.utils.set_random_seed(3)
    return keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, dtype=dtype),
            keras.layers.BatchNormalization(dtype=dtype),
            keras.layers.Dropout(0.5, dtype=dtype),
            keras.layers.Dense(4, dtype=dtype),
        ]
    )


def stored_arrays(path):
    """Every dataset, as Keras' own store reads it."""
    arrays = {}

    def visit(name, node):
        if isinstance(node, h5py.Dataset):
            value = np.array(node)
            arrays[name] = value.view(ml_dtypes.bfloat16) if node.attrs.get("dtype") == "bfloat16" else value

    with h5py.File(path) as file:
        file.visititems(visit)
    return arrays


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_weights_h5(tmp_path, dtype):
    model(dtype).save_weights(tmp_path / "m.weights.h5")
    manifest = open_manifest(tmp_path / "m.weights.h5")
    assert manifest.format == "keras-h5"
    assert "layers/dense_1/vars/0" in manifest.tensors
    assert all(isinstance(tensor.storage, Extent) for tensor in manifest.tensors.values())
    assert_same(manifest, stored_arrays(tmp_path / "m.weights.h5"))


def test_values_are_what_keras_loads(tmp_path):
    saved = model()
    saved.save_weights(tmp_path / "m.weights.h5")
    tensors = open_manifest(tmp_path / "m.weights.h5").tensors
    np.testing.assert_array_equal(read_tensor(tensors["layers/dense/vars/0"]), saved.layers[0].kernel)


def test_file_order_is_by_offset(tmp_path):
    model().save_weights(tmp_path / "m.weights.h5")
    offsets = [t.storage.offset for t in open_manifest(tmp_path / "m.weights.h5").tensors.values()]
    assert offsets == sorted(offsets)


def test_optimizer_state_is_listed(tmp_path):
    built = model()
    built.compile("adam", "mse")
    built.train_on_batch(np.ones((2, 8)), np.ones((2, 4)))
    built.save_weights(tmp_path / "m.weights.h5")
    assert_same(open_manifest(tmp_path / "m.weights.h5"), stored_arrays(tmp_path / "m.weights.h5"))
    assert "optimizer/vars/0" in open_manifest(tmp_path / "m.weights.h5").tensors


def test_archive_is_read_in_place(tmp_path):
    model("bfloat16").save(tmp_path / "m.keras")
    manifest = open_manifest(tmp_path / "m.keras")
    assert manifest.format == "keras-archive"
    assert manifest.config["class_name"] == "Sequential"
    assert manifest.metadata["keras_version"] == keras.__version__
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        archive.extract("model.weights.h5", tmp_path)
    assert set(manifest.files) == {located(tmp_path / "m.keras")}
    assert_same(manifest, stored_arrays(tmp_path / "model.weights.h5"))


def test_unzipped_archive_is_a_folder(tmp_path):
    keras.saving.save_model(model(), tmp_path / "m", zipped=False)
    manifest = open_manifest(tmp_path / "m")
    assert manifest.format == "keras-hub-preset"
    assert_same(manifest, stored_arrays(tmp_path / "m" / "model.weights.h5"))


@pytest.fixture
def sharded(tmp_path):
    model().save_weights(tmp_path / "m.weights.json", max_shard_size=6e-7)
    return tmp_path / "m.weights.json"


def test_sharded_weights(sharded):
    manifest = open_manifest(sharded)
    assert manifest.format == "keras-sharded-h5"
    assert len(manifest.files) > 1
    arrays = {}
    for shard in manifest.files:
        arrays |= stored_arrays(str(shard))
    assert_same(manifest, arrays)
    assert_same(open_manifest(sharded.parent), arrays)


def test_a_part_stands_for_all_parts(sharded):
    manifest = open_manifest(sharded)
    for shard in manifest.files:
        found = open_manifest(shard.local_path())
        assert found.tensors == manifest.tensors
        assert found.format == "keras-sharded-h5"
    list(manifest.files)[1].local_path().unlink()
    with pytest.raises(SourceNotFoundError, match=r"lacks 1 of them.*m_0000"):
        open_manifest(next(iter(manifest.files)).local_path())


def test_a_part_without_its_index_is_refused(sharded):
    parts = [file.local_path() for file in open_manifest(sharded).files]
    sharded.unlink()
    lacks = r"one of several parts, but .* lacks their index m\.weights\.json"
    for part in parts[1:]:
        with pytest.raises(SourceNotFoundError, match=lacks):
            open_manifest(part)
    part.rename(part.with_name("part.weights.h5"))
    assert open_manifest(part.with_name("part.weights.h5")).tensors


def test_a_number_in_a_name_may_be_that_of_a_step(tmp_path):
    model().save_weights(tmp_path / "w_00003.weights.h5")
    assert_same(open_manifest(tmp_path / "w_00003.weights.h5"), stored_arrays(tmp_path / "w_00003.weights.h5"))


def edit(path, change):
    document = json.loads(path.read_text())
    change(document["weight_map"])
    path.write_text(json.dumps(document))


def test_sharded_missing_shard(sharded):
    next(iter(open_manifest(sharded).files)).local_path().unlink()
    with pytest.raises(SourceNotFoundError, match=r"lacks 1 of them.*m_0000"):
        open_manifest(sharded)


def test_a_dot_before_names_in_the_map_is_accepted(sharded):
    before = open_manifest(sharded)
    dotted = lambda names: [f"./{name}" for name in (names if isinstance(names, list) else [names])]  # noqa: E731
    edit(sharded, lambda groups: groups.update({group: dotted(names) for group, names in groups.items()}))
    assert open_manifest(sharded).tensors == before.tensors


def test_sharded_map_that_lies(sharded):
    original = sharded.read_text()
    shards = sorted(file.name for file in open_manifest(sharded).files)
    edit(sharded, lambda m: m.update({"/layers/none/vars": shards[0]}))
    with pytest.raises(SourceError, match=rf"variables of 'layers/none/vars' in {shards[0]}, but"):
        open_manifest(sharded)
    sharded.write_text(original)
    edit(sharded, lambda m: m.pop("/layers/dense_1/vars"))
    with pytest.raises(SourceError, match=r"contains variables of 'layers/dense_1/vars', which .* lists in no file"):
        open_manifest(sharded)


@pytest.mark.parametrize("name", ["../x.weights.h5", "/etc/passwd"])
def test_sharded_map_may_not_leave_the_folder(sharded, name):
    edit(sharded, lambda m: m.update({"/layers/dense/vars": ["m_00000.weights.h5", name]}))
    with pytest.raises(UnsafeSourceError, match="may only point into its own folder"):
        open_manifest(sharded)


def test_a_sharded_map_may_list_files_in_subfolders(sharded):
    before = open_manifest(sharded)
    first = next(iter(before.files)).name
    (sharded.parent / "sub").mkdir()
    (sharded.parent / first).rename(sharded.parent / "sub" / first)
    sharded.write_text(sharded.read_text().replace(first, f"sub/{first}"))
    for source in (sharded, MemoryStore.copy_of(sharded.parent) / sharded.name):
        found = open_manifest(source)
        assert {file.name for file in found.files} == {file.name for file in before.files}
        assert found.tensors.keys() == before.tensors.keys()


@pytest.mark.parametrize("shards", [3, [], [3], {}])
def test_sharded_map_must_name_files(sharded, shards):
    edit(sharded, lambda m: m.update({"/layers/dense/vars": shards}))
    with pytest.raises(SourceError, match="file names"):
        open_manifest(sharded)


def test_preset_with_task(tmp_path):
    model().save_weights(tmp_path / "model.weights.h5")
    model().save_weights(tmp_path / "task.weights.h5")
    (tmp_path / "config.json").write_text(
        '{"registered_name": "keras_hub>GemmaBackbone", "class_name": "GemmaBackbone"}'
    )
    (tmp_path / "task.json").write_text('{"class_name": "GemmaCausalLM"}')
    (tmp_path / "metadata.json").write_text('{"keras_version": "3"}')
    manifest = open_manifest(tmp_path)
    arrays = stored_arrays(tmp_path / "model.weights.h5")
    assert_same(manifest, arrays | {f"task:{name}": value for name, value in arrays.items()})
    assert manifest.metadata == {"task": {"class_name": "GemmaCausalLM"}, "keras_metadata": {"keras_version": "3"}}
    assert manifest.config["class_name"] == "GemmaBackbone"


def test_preset_without_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"registered_name": "x"}')
    with pytest.raises(SourceNotFoundError, match=r"without weights.*contains neither model\.weights\.h5"):
        open_manifest(tmp_path)


@pytest.mark.slow
def test_real_hub_preset(tmp_path):
    import keras_hub

    sizes = {"num_layers": 1, "num_query_heads": 2, "num_key_value_heads": 1, "hidden_dim": 8, "intermediate_dim": 8}
    backbone = keras_hub.models.GemmaBackbone(vocabulary_size=16, head_dim=4, **sizes)
    backbone.save_to_preset(str(tmp_path))
    manifest = open_manifest(tmp_path)
    assert manifest.format == "keras-hub-preset"
    assert manifest.parameters == backbone.count_params()
    assert_same(manifest, stored_arrays(tmp_path / "model.weights.h5"))


# --- foreign HDF5 ---


@pytest.fixture
def h5(tmp_path):
    """A file to write foreign datasets into; ``reopen`` closes it and opens its manifest."""
    file = h5py.File(tmp_path / "x.h5", "w")
    file.reopen = lambda: (file.close(), open_manifest(tmp_path / "x.h5"))[1]
    yield file
    file.close()


FOREIGN = {
    "gzip": {"chunks": (3, 4), "compression": "gzip"},
    "chunked": {"chunks": (4, 2)},
    "shuffled": {"chunks": (5, 5), "compression": "gzip", "shuffle": True, "fletcher32": True},
    "big-endian": {"dtype": ">f4"},
    "big-endian integers": {"dtype": ">i2", "chunks": (2, 5)},
}


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_datasets_are_decoded(h5, name):
    value = np.arange(50).reshape(10, 5).astype(np.float32)
    dtype = h5.create_dataset("a/b", data=value, **FOREIGN[name]).dtype.newbyteorder("<")
    tensor = h5.reopen().tensors["a/b"]
    assert isinstance(tensor.storage, Decoded)
    assert tensor.dtype == dtype
    rows = tensor.storage.reader.read_rows(2, 7)
    assert rows.dtype == dtype
    assert rows.flags.c_contiguous
    np.testing.assert_array_equal(rows, value[2:7])
    assert tensor.storage.reader.row_alignment == FOREIGN[name].get("chunks", (1,))[0]


def test_compact_and_chunked_bfloat16(h5):
    value = np.arange(6).astype(ml_dtypes.bfloat16).reshape(3, 2)
    h5.create_dataset("chunked", data=value, chunks=(1, 2)).attrs["dtype"] = "bfloat16"
    plist = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    plist.set_layout(h5py.h5d.COMPACT)
    node = h5py.h5d.create(h5.id, b"compact", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((3, 2)), dcpl=plist)
    h5py.Dataset(node)[:] = np.ones((3, 2))
    tensors = h5.reopen().tensors
    assert read_tensor(tensors["chunked"]).tobytes() == value.tobytes()
    assert read_tensor(tensors["chunked"]).dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(read_tensor(tensors["compact"]), np.ones((3, 2), np.float32))


@pytest.mark.parametrize("user_block", [0, 512, 4096])
def test_user_block_scalars_and_empty(tmp_path, user_block):
    arrays = {
        "scalar": np.float32(3),
        "empty": np.zeros((0, 3), np.float32),
        "bool": np.array([True, False]),
        "int8": np.arange(-3, 3, dtype=np.int8),
        "vector": np.arange(6, dtype=np.float64),
    }
    with h5py.File(tmp_path / "x.h5", "w", userblock_size=user_block) as file:
        for name, value in arrays.items():
            file[name] = value
    assert_same(open_manifest(tmp_path / "x.h5"), {name: np.asarray(value) for name, value in arrays.items()})


def test_rows_can_be_read_from_many_threads(h5):
    from concurrent.futures import ThreadPoolExecutor

    value = np.arange(4000.0).reshape(1000, 4)
    h5.create_dataset("x", data=value, chunks=(10, 4), compression="gzip")
    reader = h5.reopen().tensors["x"].storage.reader
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda i: reader.read_rows(i * 10, i * 10 + 15), range(98)))
    for i, rows in enumerate(found):
        np.testing.assert_array_equal(rows, value[i * 10 : i * 10 + 15])


def test_rows_of_a_file_that_changed(h5):
    h5.create_dataset("x", data=np.ones((8, 4)), chunks=(2, 4))
    tensor = h5.reopen().tensors["x"]
    with h5py.File(str(tensor.storage.reader.paths[0]), "w") as file:
        file["x"] = np.ones((2, 2))
    with pytest.raises(TransferError, match=r"dataset 'x' had the shape \(8, 4\)"):
        tensor.storage.reader.read_rows(0, 1)


def put(value):
    """Write that as ``x``."""
    return lambda file: file.update({"x": value})


def many_links_to_much(file):
    file["a"] = np.ones(5 << 20, np.uint8)
    for i in range(17):
        file["x" if i == 16 else f"b/{i}"] = file["a"]


def groups_that_double(file):
    file["g0/y"] = 1
    for i in range(40):
        file[f"g{i + 1}/a"] = file[f"g{i + 1}/x"] = file[f"g{i}"]


def virtual(file):
    layout = h5py.VirtualLayout((3,), "f4")
    layout[:] = h5py.VirtualSource("other.h5", "y", (3,))
    file.create_virtual_dataset("x", layout)


def bomb(file):
    file.create_dataset("x", (1 << 40,), "f4", chunks=(1 << 10,), compression="gzip")[0] = 1


def wide_bomb(file):
    file.create_dataset("x", data=np.zeros(80 << 20, np.uint8), chunks=(80 << 20,), compression="gzip")


PASSWORDS = [("/etc/passwd", 0, 12)]
UNSAFE = {
    "external_link": (put(h5py.ExternalLink("other.h5", "/y")), "link"),
    "many_links_to_much": (many_links_to_much, "at most 16 times"),
    "groups_that_double": (groups_that_double, "too many second links"),
    "link_cycle": (lambda file: file.update({"a/b/x": file.create_group("a")}), "cycle of links"),
    "virtual": (virtual, "other files"),
    "external_storage": (lambda file: file.create_dataset("x", (3,), "f4", external=PASSWORDS), "other files"),
    "bomb": (bomb, "may expand at most"),
    "wide_bomb": (wide_bomb, "may expand at most"),
    "never_written": (lambda file: file.create_dataset("x", (1 << 40,), "f4"), "stores none"),
}


@pytest.mark.parametrize("options", [{}, {"fillvalue": 2.5}, {"chunks": (64, 8), "compression": "gzip"}])
@pytest.mark.parametrize("written", [True, False])
def test_zeros_are_weights_however_little_they_take(tmp_path, options, written):
    with h5py.File(tmp_path / "w.h5", "w") as file:
        made = file.create_dataset("x", (70_000, 8), "f4", **options)
        if written:
            made[...] = 0
        expected = made[...]
    assert read_tensor(open_manifest(tmp_path / "w.h5").tensors["x"]).tobytes() == expected.tobytes()


@pytest.mark.slow
def test_zeros_that_gzip_made_a_thousandth_of_are_read(tmp_path):
    with h5py.File(tmp_path / "w.h5", "w") as file:
        file.create_dataset("x", data=np.zeros((80, 1 << 20), np.uint8), chunks=(8, 1 << 20), compression=9)
    assert not read_tensor(open_manifest(tmp_path / "w.h5").tensors["x"]).any()


@pytest.mark.parametrize(("build", "says"), UNSAFE.values(), ids=UNSAFE)
@pytest.mark.parametrize("user_block", [0, 512])
def test_what_reaches_out_or_blows_up_is_refused(tmp_path, build, says, user_block):
    with h5py.File(tmp_path / "w.h5", "w", userblock_size=user_block) as file:
        build(file)
    with pytest.raises(UnsafeSourceError, match=rf"w\.h5.*'(.*/)?[axy]'.*{says}"):
        open_manifest(tmp_path / "w.h5")


def mislabelled_opaque(file):
    file.create_dataset("x", data=np.zeros(3, "V4")).attrs["dtype"] = "bfloat16"


LEFT_OUT = {
    "strings": (put(["a", "b"]), "does not contain numbers"),
    "compound": (put(np.zeros(3, [("a", "f4"), ("b", "i4")])), "does not contain numbers"),
    "opaque": (put(np.zeros(3, "V2")), "2-byte elements of an unknown type"),
    "mislabelled_opaque": (mislabelled_opaque, "4-byte elements of an unknown type"),
    "null": (put(h5py.Empty("f4")), "null dataset"),
    "named_type": (put(np.dtype("f4")), "neither a group nor a dataset"),
    "soft_link": (put(h5py.SoftLink("/w")), "soft link"),
    "dangling_soft_link": (put(h5py.SoftLink("/nowhere")), "soft link"),
    "soft_link_to_itself": (put(h5py.SoftLink("/x")), "soft link"),
}


@pytest.mark.parametrize(("build", "says"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_what_contains_no_numbers_is_left_out(h5, build, says):
    h5["w"] = np.arange(3)
    build(h5)
    manifest = h5.reopen()
    assert list(manifest.tensors) == ["w"]
    assert re.fullmatch(rf"left out 'x': .*{says}.*", "".join(manifest.notes))


def test_an_error_says_what_was_left_out(tmp_path):
    model, path = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)]), tmp_path / "m.weights.h5"
    model.save_weights(path)
    with h5py.File(path, "a") as file:
        del file["layers/dense/vars/1"]
        file["layers/dense/vars/1"] = np.zeros(3, "V1")
    with pytest.raises(MismatchError, match=r"left out 'layers/dense/vars/1': it contains 1-byte elements"):
        shardload.load_weights(model, path)


@pytest.mark.parametrize(
    ("many", "libver", "track_order"),
    [
        *itertools.product([3, 9, 400], ["earliest", "latest"], [False, True]),
        pytest.param(20_000, "latest", True, marks=pytest.mark.slow),
        pytest.param(20_000, "latest", False, marks=pytest.mark.full),
        pytest.param(20_000, "earliest", True, marks=pytest.mark.full),
        pytest.param(20_000, "earliest", False, marks=pytest.mark.full),
    ],
)
def test_groups_of_any_size_and_format(tmp_path, libver, track_order, many):
    path, expected = tmp_path / "w.h5", {}
    with h5py.File(path, "w", libver=libver, userblock_size=1024, track_order=track_order) as file:
        group = file.create_group("layers/all", track_order=track_order)
        for i in range(many):
            name = f"{'long' * (i % 50)}{i}"
            kwargs = {"chunks": (2,), "compression": "gzip"} if i % 100 == 0 else {}
            group.create_dataset(name, data=np.arange(i, i + 5, dtype=[">f4", "<f8"][i % 2]), **kwargs)
            expected[f"layers/all/{name}"] = group[name][()].astype(["f4", "f8"][i % 2])
        expected["again"] = expected["layers/all/0"]
        expected["layers/any/0"] = expected["layers/all/0"]
        file["again"], file["layers/any/0"] = group["0"], group["0"]
    manifest = open_manifest(path)
    assert manifest.notes == ()
    assert_same(manifest, expected)


def test_keras_and_shardload_read_a_file_that_others_wrote(tmp_path):
    layers = lambda: (keras.layers.Dense(8) for _ in range(3))  # noqa: E731
    saved, theirs, ours = (keras.Sequential([keras.Input((8,)), *layers()]) for _ in range(3))
    plain, path = tmp_path / "plain.weights.h5", tmp_path / "n.weights.h5"
    saved.save_weights(plain)
    with h5py.File(plain) as old, h5py.File(path, "w", libver="latest") as new:
        for name in old:
            old.copy(name, new)
        for i in range(20):
            new[f"notes/{i}"] = h5py.SoftLink("/nowhere")
            new[f"texts/{i}"] = ["a", "b"]
        first = new["layers/dense/vars"]
        del new["layers/dense_1/vars"]
        new["layers/dense_1/vars"] = first
        new["layers/dense_2/vars/0"].attrs["unit"] = "none"
    theirs.load_weights(path)
    report = shardload.load_weights(ours, path, mesh="1x1")
    check_same(ours, theirs)
    assert any("'texts/0'" in note for note in report.notes)


def test_no_attribute_value_is_read(h5, monkeypatch):
    # libhdf5 1.14 hangs or crashes on damaged heaps, which is where string attributes live.
    h5.create_dataset("x", data=np.ones(3, ml_dtypes.bfloat16)).attrs["dtype"] = "bfloat16"
    monkeypatch.setattr(h5py.AttributeManager, "__getitem__", lambda *_: pytest.fail("read an attribute"))
    assert h5.reopen().tensors["x"].dtype == ml_dtypes.bfloat16


def test_deep_groups(h5):
    h5["/".join("d" * 200) + "/x"] = np.ones(2)
    assert len(h5.reopen().tensors) == 1


def test_groups_too_deep_for_any_model(h5):
    h5["/".join("d" * 2000) + "/x"] = np.ones(2)
    with pytest.raises(UnsafeSourceError, match="nests groups more than 256 deep"):
        h5.reopen()


def test_truncated_h5(tmp_path):
    model().save_weights(tmp_path / "m.weights.h5")
    raw = (tmp_path / "m.weights.h5").read_bytes()
    for length in (9, 100, 700, len(raw) // 2, len(raw) - 1):
        (tmp_path / "t.h5").write_bytes(raw[:length])
        with pytest.raises(SourceError, match=r"t\.h5"):
            open_manifest(tmp_path / "t.h5")


# --- zip tricks ---


def archive(path, method=None, *, weights=None):
    """A `.keras` file; with a method, all its members are compressed, as a person's tools write it."""
    model().save_weights(path.with_suffix(".weights.h5"))
    with zipfile.ZipFile(path, "w", method or zipfile.ZIP_STORED) as file:
        if method:
            file.writestr("assets/", b"")
        file.writestr("metadata.json", '{"keras_version": "3"}', method or zipfile.ZIP_DEFLATED)
        file.writestr("config.json", '{"class_name": "Sequential"}')
        file.writestr("model.weights.h5", weights or path.with_suffix(".weights.h5").read_bytes())
    return path


def test_deflated_json_is_fine(tmp_path):
    manifest = open_manifest(archive(tmp_path / "m.keras"))
    assert manifest.metadata == {"keras_version": "3"}
    assert_same(manifest, stored_arrays(tmp_path / "m.weights.h5"))


METHODS = [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


@contextmanager
def opening_takes_less_than(size):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < size
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("method", METHODS)
def test_an_archive_archive(tmp_path, method):
    manifest = open_manifest(archive(tmp_path / "m.keras", method))
    assert (manifest.config, manifest.metadata) == ({"class_name": "Sequential"}, {"keras_version": "3"})
    assert all(isinstance(tensor.storage, Extent) for tensor in manifest.tensors.values())
    assert_same(manifest, stored_arrays(tmp_path / "m.weights.h5"))
    (copy,) = manifest.files
    assert str(copy) == f"{tmp_path / 'm.keras'}:model.weights.h5"
    folder = copy.local_path().parent
    assert folder.stat().st_mode & 0o777 == 0o700
    del manifest, copy
    gc.collect()
    assert not folder.exists()


@pytest.mark.parametrize("method", METHODS)
def test_unpacking_takes_little_memory(tmp_path, method):
    raw = (np.random.default_rng(0).bytes(1 << 14) + bytes(1 << 20)) * 24
    path = archive(tmp_path / "m.keras", method, weights=raw)
    refused = pytest.raises(SourceError, match=r"m\.keras:model\.weights\.h5 is damaged HDF5")
    with opening_takes_less_than(12 << 20), refused:  # the dictionary of LZMA takes 8 MiB, the content 24
        open_manifest(path)


@pytest.mark.parametrize("method", METHODS)
def test_a_member_with_more_than_it_declares_is_not_unpacked(tmp_path, method):
    path = archive(tmp_path / "m.keras", method, weights=bytes(64 << 20))
    # The directory declares 100 bytes.
    raw, declared = path.read_bytes(), struct.pack("<I", 64 << 20)
    assert declared in raw
    path.write_bytes(raw.replace(declared, struct.pack("<I", 100)))
    with opening_takes_less_than(4 << 20), pytest.raises(SourceError, match="does not match its checksum"):
        open_manifest(path)


@pytest.mark.parametrize("method", METHODS)
def test_a_bomb_is_refused_before_it_is_unpacked(tmp_path, method, monkeypatch):
    monkeypatch.setattr(keras_archive, "write_private_copy", lambda *_, **__: pytest.fail("unpacked"))
    path = archive(tmp_path / "m.keras", method, weights=bytes(34 << 20))
    with pytest.raises(UnsafeSourceError, match=r"declares 35651584 bytes.*expand at most 100 times"):
        open_manifest(path)


@pytest.mark.parametrize("method", METHODS)
def test_damage_in_compressed_weights_is_found(tmp_path, method):
    path = archive(tmp_path / "m.keras", method)
    info = zipfile.ZipFile(path).getinfo("model.weights.h5")
    flip(path, info.header_offset + 46 + info.compress_size // 2, 0xFF)
    with pytest.raises(SourceError, match=r"m\.keras is (a )?damaged"):
        open_manifest(path)


def test_no_room_for_compressed_weights(tmp_path, monkeypatch):
    path = archive(tmp_path / "m.keras", zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(local.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(WriteError, match=r"Cannot unpack .*m\.keras:model\.weights\.h5: .* 10 bytes free.*TMPDIR"):
        open_manifest(path)
    monkeypatch.undo()
    monkeypatch.setattr(local.tempfile, "mkdtemp", lambda prefix: Path("/proc/x").mkdir())
    with pytest.raises(WriteError, match=r"Cannot unpack .*TMPDIR"):
        open_manifest(path)


def test_a_huge_dictionary_of_lzma_is_refused(tmp_path):
    path = archive(tmp_path / "m.keras", zipfile.ZIP_LZMA, weights=bytes(1 << 20))
    raw = bytearray(path.read_bytes())
    info = zipfile.ZipFile(path).getinfo("model.weights.h5")
    at = info.header_offset + 30 + len("model.weights.h5") + 5
    raw[at : at + 4] = struct.pack("<I", 0xFFFFFFFF)
    path.write_bytes(raw)
    with pytest.raises(SourceError, match="damaged HDF5"):  # unpacked: the content is shorter than the dictionary
        open_manifest(path)
    info.file_size = 65 << 20
    refused = pytest.raises(UnsupportedError, match="dictionary has 4294967295 bytes")
    with closing(located(path).open()) as file, refused:
        next(keras_archive.member_blocks(located(path), file, info, start=at - 5))


def test_an_unknown_compression(tmp_path):
    path = archive(tmp_path / "m.keras", zipfile.ZIP_DEFLATED)
    raw = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        for found in re.finditer(mark, bytes(raw)):
            struct.pack_into("<H", raw, found.start() + at, 97)
    path.write_bytes(raw)
    with pytest.raises(UnsupportedError, match="compressed by method 97, expected deflate, bzip2, LZMA or none"):
        open_manifest(path)


def test_zip64_and_data_descriptor(tmp_path):
    model().save_weights(tmp_path / "m.weights.h5")
    with (tmp_path / "m.keras").open("wb") as file:
        # A file that cannot seek makes zipfile write sizes behind the data.
        target = zipfile.ZipFile(SimpleNamespace(write=file.write, flush=file.flush), "w")
        target.writestr("metadata.json", b"{}")
        target.writestr("config.json", b"{}")
        with target.open("model.weights.h5", "w", force_zip64=True) as member:
            member.write((tmp_path / "m.weights.h5").read_bytes())
        target.close()
    assert_same(open_manifest(tmp_path / "m.keras"), stored_arrays(tmp_path / "m.weights.h5"))


def repeated(path):
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(path, "a") as file:
        file.writestr("config.json", "{}")


def directory_entries(raw):
    return [found.start() for found in re.finditer(b"PK\x01\x02", raw)]


def overlapping(path):
    raw = bytearray(path.read_bytes())
    _, second, third = directory_entries(raw)
    struct.pack_into("<I", raw, third + 42, struct.unpack_from("<I", raw, second + 42)[0] + 4)
    path.write_bytes(raw)


def swollen(path):
    raw = bytearray(path.read_bytes())
    struct.pack_into("<II", raw, directory_entries(raw)[1] + 20, 500, 500)
    path.write_bytes(raw)


def rewritten(change):
    return lambda path: path.write_bytes(change(path.read_bytes()))


TRICKS = {
    "repeated": (repeated, "under 3 names"),
    "prefixed": (rewritten(lambda raw: b"PK\x03\x04" + b"#" * 508 + raw), "before its first member"),
    "renamed": (rewritten(lambda raw: raw.replace(b"config.json", b"config.jsom", 1)), "must agree"),
    "overlapping": (overlapping, "overlap"),
    "swollen": (swollen, "overlap"),
}


@pytest.mark.parametrize(("trick", "says"), TRICKS.values(), ids=TRICKS)
def test_zip_tricks_are_refused(tmp_path, trick, says):
    path = archive(tmp_path / "m.keras")
    trick(path)
    with pytest.raises(UnsafeSourceError, match=rf"m\.keras.*{says}"):
        open_manifest(path)


def test_json_bomb_in_an_archive(tmp_path):
    path = tmp_path / "m.keras"
    model().save_weights(tmp_path / "m.weights.h5")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("config.json", b" " * (40 << 20))
        file.writestr("metadata.json", b"{}")
        file.write(tmp_path / "m.weights.h5", "model.weights.h5", zipfile.ZIP_STORED)
    with pytest.raises(UnsafeSourceError, match=r"expand at most 1000 times"):
        open_manifest(path)


def test_encrypted_member(tmp_path):
    path = archive(tmp_path / "m.keras")
    raw = bytearray(path.read_bytes())
    for at in directory_entries(raw):
        raw[at + 8] |= 1
    path.write_bytes(raw)
    with pytest.raises(UnsupportedError, match="encrypted"):
        open_manifest(path)


@pytest.mark.parametrize("cut", [10, 100, 2000, -1, -30])
def test_truncated_archive(tmp_path, cut):
    path = archive(tmp_path / "m.keras")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SourceError, match=r"m\.keras"):
        open_manifest(path)


def test_other_zips(tmp_path):
    kinds = {"model.weights.npz": UnsupportedError, "a/data.pkl": UnsupportedError, "x.txt": SourceError}
    for name, kind in kinds.items():
        with zipfile.ZipFile(tmp_path / "m.keras", "w") as file:
            file.writestr(name, b"x")
        with pytest.raises(kind, match=r"npz|pickle|not a Keras archive"):
            open_manifest(tmp_path / "m.keras")


def test_archive_whose_weights_are_not_hdf5(tmp_path):
    with pytest.raises(SourceError, match="damaged HDF5"):
        open_manifest(archive(tmp_path / "m.keras", weights=b"x" * 999))
