import json
import os
from functools import partial

import numpy as np
import pytest
from checkpoints import assert_same, small_arrays
from jax.sharding import PartitionSpec
from memory_store import MemoryStore
from safetensors.numpy import save_file

import shardload
from shardload.comparing import diff
from shardload.errors import SourceError, SourceNotFoundError, UnsafeSourceError, UnsupportedError
from shardload.loaders import open_manifest
from shardload.resolve.opening import open_source
from shardload.stores.local import located
from shardload.verifying import verify

A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NO_NAMES = (3, None, "", "a\0b", ["x"], "x" * 300, "é" * 200, "\ud800")


@pytest.fixture
def folder(tmp_path):
    """Two shards, an index and a config."""
    arrays = small_arrays()
    names = sorted(arrays)
    placed = {name: A if i < 3 else B for i, name in enumerate(names)}
    for shard in (A, B):
        save_file({n: arrays[n] for n in names if placed[n] == shard}, tmp_path / shard)
    (tmp_path / "config.json").write_text('{"model_type": "gemma3_text", "vocab_size": 7}')
    write_index(tmp_path, placed)
    return tmp_path


def write_index(folder, weight_map):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def read_index(folder):
    return json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]


def test_indexed_folder(folder):
    manifest = open_manifest(folder)
    assert manifest.format == "hf-safetensors"
    assert manifest.config["model_type"] == "gemma3_text"
    assert [path.name for path in manifest.files] == [A, B]
    assert not manifest.notes
    assert_same(manifest, small_arrays())


def test_single_file_folder(tmp_path):
    save_file(small_arrays(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert_same(open_manifest(tmp_path), small_arrays())


def test_folder_and_index_without_config(folder):
    (folder / "config.json").unlink()
    assert open_manifest(folder).format == "safetensors"
    assert_same(open_manifest(folder / "model.safetensors.index.json"), small_arrays())


def test_two_checkpoints_in_one_folder_are_refused(folder):
    save_file(small_arrays(), folder / "model.safetensors")
    with pytest.raises(SourceError, match=r"Cannot tell which checkpoint .* 2 shards, and model.safetensors is not"):
        open_manifest(folder)


def test_missing_shard_is_listed(folder):
    (folder / B).unlink()
    with pytest.raises(SourceNotFoundError, match=rf"lists 2 shards, but .* lacks 1 of them.*{B}"):
        open_manifest(folder)


def test_tensor_in_the_other_shard(folder):
    write_index(folder, dict.fromkeys(read_index(folder), A))
    with pytest.raises(SourceError, match=rf"in {A}, but that file does not contain it; it is in none"):
        open_manifest(folder)
    write_index(folder, read_index(folder) | {"model.count": B})
    with pytest.raises(SourceError, match=rf"'model.count' in {B}, .* it is in {A}"):
        open_manifest(folder)


def test_tensors_the_index_leaves_out_are_named(folder):
    weight_map = read_index(folder)
    del weight_map["model.count"]
    write_index(folder, weight_map)
    manifest = open_manifest(folder)
    assert "model.count" not in manifest.tensors
    assert manifest.notes == (
        f"left out 1 unlisted tensor: model.safetensors.index.json does not assign 'model.count' to {A}",
    )
    assert open_manifest(folder / "model.safetensors.index.json").notes == manifest.notes
    for source in (folder, located(folder)):
        assert open_source(source, None).notes == manifest.notes


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "//etc/passwd", "../x.safetensors", "./../x", "sub/../x", "..", "a\\b.safetensors", "s/a\\b",
     "C:x", "C:/x", "a/" * 10_000],
)  # fmt: skip
def test_index_may_not_leave_the_folder(folder, name):
    write_index(folder, {"a": name, "b": A})
    with pytest.raises(UnsafeSourceError, match="may only point into its own folder"):
        open_manifest(folder)


def move_into_subfolders(folder, spelling="{}/{}"):
    """Move each shard into a folder of its own, and say so in the index."""
    places = {A: "sub", B: "sub/deep"}
    for shard, place in places.items():
        (folder / place).mkdir()
        (folder / shard).rename(folder / place / shard)
    write_index(folder, {name: spelling.format(places[shard], shard) for name, shard in read_index(folder).items()})


@pytest.mark.parametrize("spelling", ["{}/{}", "./{}/{}", "{}//{}", "{}/./{}", ".//{}/{}"])
def test_an_index_may_list_files_in_subfolders(spelling, folder):
    move_into_subfolders(folder, spelling)
    index = folder / "model.safetensors.index.json"
    for source in (folder, index, MemoryStore.copy_of(folder)):
        assert_same(open_manifest(source), small_arrays())
    assert [found.verdict for found in verify(folder)] != ["damaged"]
    (folder / "sub" / "deep" / B).unlink()
    with pytest.raises(SourceNotFoundError, match=f"lacks 1 of them: sub/deep/{B}"):
        open_manifest(folder)


def test_a_subfolder_that_is_a_link_out_of_the_folder_is_refused(folder, tmp_path_factory):
    move_into_subfolders(folder)
    elsewhere = tmp_path_factory.mktemp("elsewhere") / "sub"
    (folder / "sub").rename(elsewhere)
    (folder / "sub").symlink_to(elsewhere)
    with pytest.raises(UnsafeSourceError, match="symbolic link that leaves its folder"):
        open_manifest(folder)
    (folder / "sub").unlink()
    elsewhere.rename(folder / "kept")
    (folder / "sub").symlink_to("kept")
    assert_same(open_manifest(folder), small_arrays())


@pytest.mark.parametrize("subfolders", [False, True])
def test_hugging_face_cache_layout(subfolders, folder, tmp_path_factory):
    if subfolders:
        move_into_subfolders(folder)
    snapshot = tmp_path_factory.mktemp("hub") / "models--google--gemma" / "snapshots" / "abc"
    blobs = snapshot.parents[1] / "blobs"
    blobs.mkdir(parents=True)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        place, blob = snapshot / file.relative_to(folder), blobs / f"digest-of-{file.name}"
        place.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blob)
        place.symlink_to(blob if subfolders else f"../../blobs/{blob.name}")
    assert_same(open_manifest(snapshot), small_arrays())


@pytest.mark.parametrize(
    ("weight_map", "says"),
    [({"a": name}, "file name|should name files") for name in NO_NAMES]
    + [(each, "weight_map") for each in (None, {}, [], "x")],
)
def test_index_must_name_files(folder, weight_map, says):
    write_index(folder, weight_map)
    with pytest.raises(SourceError, match=says):
        open_manifest(folder)


def test_a_link_farm_and_a_store_of_contents_are_folders_of_people(folder, tmp_path_factory):
    shared = tmp_path_factory.mktemp("shared")
    for file in list(folder.iterdir()):
        target = shared / ("0123abcd" if file.name == A else file.name)
        file.rename(target)
        file.symlink_to(target)
    assert_same(open_manifest(folder), small_arrays())
    (shared / "0123abcd").write_text("root:x:0:0")
    with pytest.raises(SourceError, match=A):  # not tensors
        open_manifest(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_a_link_to_a_file_of_another_name_is_refused(name, folder, tmp_path_factory):
    private = tmp_path_factory.mktemp("home") / "id_rsa"
    (folder / name).rename(private)
    (folder / name).symlink_to(private)
    with pytest.raises(UnsafeSourceError, match="symbolic link that leaves its folder"):
        open_manifest(folder)


def test_a_link_to_what_is_no_file_is_refused(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("elsewhere") / A
    os.mkfifo(elsewhere)
    for target in (elsewhere, elsewhere.parent):
        (folder / A).unlink()
        (folder / A).symlink_to(target)
        with pytest.raises(UnsafeSourceError, match="symbolic link that leaves its folder"):
            open_manifest(folder)


def test_symbolic_link_loop(folder):
    (folder / A).unlink()
    (folder / A).symlink_to(A)
    with pytest.raises((SourceError, SourceNotFoundError), match=A):
        open_manifest(folder)


def test_pickles_are_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(UnsupportedError, match="convert them with safetensors"):
        open_manifest(tmp_path)
    with pytest.raises(UnsupportedError, match="pickle"):
        open_manifest(tmp_path / "pytorch_model.bin")


@pytest.mark.parametrize("described", [True, False])
def test_all_parts_without_an_index_are_one_checkpoint(described, folder):
    (folder / "model.safetensors.index.json").unlink()
    if not described:
        (folder / "config.json").unlink()
    for source in (folder, folder / A, folder / B):
        manifest = open_manifest(source)
        assert [path.name for path in manifest.files] == [A, B]
        assert_same(manifest, small_arrays())


def test_parts_may_be_counted_from_0(folder):
    (folder / "model.safetensors.index.json").unlink()
    first = (folder / A).rename(folder / "model-00000-of-00002.safetensors")
    (folder / B).rename(folder / A)
    for source in (folder, folder / A):
        assert_same(open_manifest(source), small_arrays())
    (folder / A).unlink()
    with pytest.raises(SourceNotFoundError, match=rf"lacks 1 of them: {A}"):
        open_manifest(folder)
    first.rename(folder / A)
    with pytest.raises(SourceNotFoundError, match=rf"lacks 1 of them: {B}"):
        open_manifest(folder)


@pytest.mark.parametrize(
    "name",
    ["model-{}-of-2.safetensors", "model_0000{}_of_00002.safetensors", "model.0000{}-of-00002.safetensors",
     "model-0000{}-OF-00002.safetensors", "model-0000{}-of-00002 (1).safetensors"],
)  # fmt: skip
def test_parts_are_parts_in_every_spelling(name, tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / name.format(1))
    for source in (tmp_path, tmp_path / name.format(1)):
        with pytest.raises(SourceNotFoundError, match=r"is one of 2 parts, but .* lacks 1 of them: model.0*2"):
            open_manifest(source)
    save_file({"b": np.zeros(2)}, tmp_path / name.format(2))
    for source in (tmp_path, tmp_path / name.format(1), tmp_path / name.format(2)):
        assert {*open_manifest(source).tensors} == {"a", "b"}


def test_a_part_that_was_downloaded_twice(tmp_path):
    names = [A, B, A.replace(".", " (1).")]
    for name in names:
        save_file({name[:11]: np.zeros(2)}, tmp_path / name)
    with pytest.raises(SourceError, match="are the same part by their names"):
        open_manifest(tmp_path)
    (tmp_path / A).unlink()
    assert len(open_manifest(tmp_path).tensors) == 2


@pytest.mark.parametrize("left", [A, B])
@pytest.mark.parametrize("described", [True, False])
def test_a_part_is_no_checkpoint(left, described, folder):
    missing = A if left == B else B
    for name in (missing, "model.safetensors.index.json", *(() if described else ("config.json",))):
        (folder / name).unlink()
    whole = partial(shardload.load_arrays, targets=PartitionSpec(), mesh="1x1")
    for source in (folder, folder / left):
        for call in (shardload.inspect, whole, lambda source: diff(source, source)):
            with pytest.raises(SourceNotFoundError, match=f"is one of 2 parts, but .* lacks 1 of them: {missing}"):
                call(source)
        assert [found.verdict for found in verify(source)] == ["damaged"]


def test_a_part_of_an_index_opens_what_it_lists(folder):
    (folder / "config.json").unlink()
    save_file({"other": np.zeros(2)}, folder / "other-00001-of-00001.safetensors")
    assert_same(open_manifest(folder / B), small_arrays())
    assert [*open_manifest(folder / "other-00001-of-00001.safetensors").tensors] == ["other"]
    (folder / A).unlink()
    with pytest.raises(SourceNotFoundError, match=rf"lists 2 shards, but .* lacks 1 of them: {A}"):
        open_manifest(folder / B)


def test_several_files_are_one_checkpoint(tmp_path):
    arrays = small_arrays()
    half = sorted(arrays)[::2]
    save_file({name: arrays[name] for name in half}, tmp_path / "one.safetensors")
    save_file({name: arrays[name] for name in arrays if name not in half}, tmp_path / "two.safetensors")
    assert_same(open_manifest(tmp_path), arrays)
    save_file({half[0]: arrays[half[0]]}, tmp_path / "two.safetensors")
    with pytest.raises(SourceError, match=r"Two tensors are named .*one\.safetensors and .*two\.safetensors"):
        open_manifest(tmp_path)


def test_numbers_of_parts_may_differ_in_width(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "model-00001-of-000002.safetensors")
    with pytest.raises(SourceNotFoundError, match="lacks 1 of them: model-00002-of-000002"):
        open_manifest(tmp_path)
    save_file({"b": np.zeros(2)}, tmp_path / "model-00002-of-000002.safetensors")
    assert {*open_manifest(tmp_path).tensors} == {"a", "b"}


def test_an_impossible_number_of_a_part_is_refused(tmp_path):
    save_file({"a": np.zeros(2)}, tmp_path / "model-00003-of-00002.safetensors")
    with pytest.raises(SourceError, match="is part 3 of 2 according to its name"):
        open_manifest(tmp_path)
    (tmp_path / "model-00003-of-00002.safetensors").rename(tmp_path / "model-00001-of-999999.safetensors")
    with pytest.raises(SourceNotFoundError, match=r"lacks 999998 of them: .* …"):
        open_manifest(tmp_path)


def test_a_dot_before_names_in_an_index_is_accepted(folder):
    write_index(folder, {name: f"./{shard}" for name, shard in read_index(folder).items()})
    assert_same(open_manifest(folder), small_arrays())


CONFIGS = {
    "not utf-8": (b'{"model_type": "\xff"}', "not UTF-8"),
    "not json": (b"{", "does not parse"),
    "array": (b"[1]", "JSON object, but contains a list"),
    "deep": (b'{"a": "some text", "b":' * 100_000 + b"0" + b"}" * 100_000, "too deeply"),
    "cut": (b'{"a": "some text", "b":' * 100_000, "closing brace"),
    "dense": (b'{"a":[' + b"[]," * 100_000 + b"0]}", "100002 brackets and braces in 300009 bytes"),
    "huge int": (b'{"a":' + b"1" * 5000 + b"}", "does not parse"),
    "twice": (b'{"model_type": "a", "model_type": "b"}', "'model_type' appears twice"),
    "unknown": (b'{"hidden_size": 3}', "should describe a model by"),
    "timm": (b'{"architecture": "resnet"}', "timm"),
}


@pytest.mark.parametrize(("raw", "message"), CONFIGS.values(), ids=CONFIGS)
def test_bad_configs(folder, raw, message):
    (folder / "config.json").write_bytes(raw)
    with pytest.raises((SourceError, UnsupportedError), match=rf"config\.json.*{message}"):
        open_manifest(folder)


def test_huge_json_is_not_read(folder):
    with (folder / "config.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(UnsafeSourceError, match="at most 33554432"):
        open_manifest(folder)


def test_config_without_model_type_when_insisted(folder):
    (folder / "config.json").write_text('{"architecture": "x"}')
    with pytest.raises(SourceError, match="'model_type'"):
        open_manifest(folder, format="hf-safetensors")


def test_duplicate_between_shards_keeps_the_indexed_one(folder):
    extra = {"model.count": np.array(9, np.int64)}
    arrays = small_arrays()
    save_file({n: arrays[n] for n, s in read_index(folder).items() if s == B} | extra, folder / B)
    manifest = open_manifest(folder)
    (note,) = manifest.notes
    assert note.endswith(f"does not assign 'model.count' to {B}")
    assert_same(manifest, arrays)
