"""Models split over several GGUF files, as the gguf package writes them: opened by any part or by their folder."""

import gguf
import gguf_pairs
import jax
import numpy as np
import pytest
from checkpoints import finish_gguf, write_gguf
from gguf_tokenizers import add_pieces

import shardload
from shardload.errors import SourceError, SourceNotFoundError, UnsafeSourceError
from shardload.loaders import open_manifest
from shardload.resolve import candidates, resolve
from shardload.transfer.read_tensor import read_tensor

SPLITS = {
    "by tensors": {"split_max_tensors": 5},
    "by size": {"split_max_size": 300_000},
    "first part without tensors": {"split_max_tensors": 8, "small_first_shard": True},
}


@pytest.fixture
def whole(tmp_path):
    """The same model in one file."""
    (tmp_path / "whole").mkdir()
    return open_manifest(gguf_pairs.write(tmp_path / "whole", "llama", "Q8_0")[0])


@pytest.fixture
def folder(tmp_path):
    """A folder with a model in parts, and nothing else."""
    (tmp_path / "parts").mkdir()
    return tmp_path / "parts"


def split(folder, **options):
    """The parts of a model, in order; ``by tensors`` unless options say otherwise."""
    gguf_pairs.write(folder, "llama", "Q8_0", **(options or SPLITS["by tensors"]))
    return sorted(folder.glob("*.gguf"))


def part(path, places, tensors=(), extra=None):
    """One part of any content, written by the reference writer."""
    writer = gguf.GGUFWriter(str(path), "llama")
    for key, value in zip(("no", "count", "tensors.count"), places, strict=True):
        writer.add_int32(f"split.{key}", value)
    if extra is not None:
        extra(writer)
    for name in tensors:
        writer.add_tensor(name, np.zeros((4, 32), np.float32))
    finish_gguf(writer)


@pytest.mark.parametrize("how", SPLITS)
def test_every_way_to_name_it_opens_all_of_it(how, folder, whole):
    parts = split(folder, **SPLITS[how])
    assert len(parts) > 2
    for source in (*parts, folder):
        found = shardload.inspect(source)
        assert found.source == str(parts[0])
        assert [str(file) for file in found.files] == [str(each) for each in parts]
        assert list(found.files.values()) == [each.stat().st_size for each in parts]
        assert (found.config, set(found.tensors)) == (whole.config, set(whole.tensors))
    for name in whole.tensors:
        assert read_tensor(found, name).tobytes() == read_tensor(whole, name).tobytes()


def test_beside_a_configuration(folder, whole):
    (folder / "config.json").write_text('{"model_type": "llama"}')
    split(folder)
    assert set(open_manifest(folder).tensors) == set(whole.tensors)


def test_the_tokenizer_is_in_the_first_part(folder, monkeypatch):
    described = gguf_pairs.describe
    monkeypatch.setattr(gguf_pairs, "describe", lambda writer, config: (described(writer, config), add_pieces(writer)))
    parts = split(folder)
    ids = shardload.tokenizer(parts[0]).encode("hello world")
    assert ids
    assert shardload.tokenizer(parts[-1]).encode("hello world") == ids


def test_arrays_of_all_parts(folder, whole):
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    arrays = shardload.load_arrays(split(folder)[1], device)
    for name in whole.tensors:
        np.testing.assert_array_equal(np.asarray(arrays[name]), read_tensor(whole, name))


def test_missing_parts(folder):
    parts = split(folder)
    parts[0].unlink()
    parts[2].unlink()
    for source in (parts[1], folder):
        with pytest.raises(
            SourceNotFoundError, match=r"one of 5 parts, but .*parts lacks 2 of them: .*-00001-of-.*-00003-"
        ):
            open_manifest(source)


def test_parts_that_were_renamed(folder):
    parts = split(folder)
    spare = folder / "spare"
    for source, target in ((parts[1], spare), (parts[2], parts[1]), (spare, parts[2])):
        source.rename(target)
    with pytest.raises(SourceError, match=r"-00002-of-00005\.gguf has split\.no 2, expected 1 from its name"):
        open_manifest(parts[0])
    with pytest.raises(
        SourceError, match=r"is part 3 of 5 according to its header, expected a name that ends in -00003"
    ):
        open_manifest(parts[1])
    renamed = parts[0].rename(folder / "model.gguf")
    with pytest.raises(
        SourceError, match=r"expected a name that ends in -00001-of-00005\.gguf.*llama-gguf-split --merge"
    ):
        open_manifest(renamed)


def test_a_truncated_part(folder):
    parts = split(folder)
    parts[3].write_bytes(parts[3].read_bytes()[:-100])
    with pytest.raises(SourceError, match=r"-00004-of-00005\.gguf is truncated: tensor"):
        open_manifest(parts[0])


FOREIGN = {
    "another count": (((1, 3, 2), ["blk.0.ffn_up.weight"]), r"split\.count 3, expected 2"),
    "another total": (((1, 2, 9), ["blk.0.ffn_up.weight"]), r"split\.tensors\.count 9, expected 2"),
    "fewer tensors": (((1, 2, 2), []), r"contain 1 tensor, expected 2"),
    "a tensor twice": (((1, 2, 2), ["token_embd.weight"]), r"both contain the tensor 'token_embd\.weight'"),
    "other metadata": (
        ((1, 2, 2), ["blk.0.ffn_up.weight"], lambda w: w.add_block_count(7)),
        r"belong to different models: llama\.block_count is '7' and '1'",
    ),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_a_part_of_another_model(what, folder):
    made, message = FOREIGN[what]

    def describe(writer):
        writer.add_uint16("split.no", 0)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", 2)

    first = write_gguf(folder / "m-00001-of-00002.gguf", {}, extra=describe)
    part(folder / "m-00002-of-00002.gguf", *made)
    with pytest.raises(SourceError, match=message):
        open_manifest(first)


@pytest.mark.parametrize("key", ["split.no", "split.tensors.count"])
def test_counts_that_are_no_numbers(key, folder):
    def describe(writer):
        writer.add_uint16("split.count", 2)
        for each in ("split.no", "split.tensors.count"):
            writer.add_string(each, "?") if each == key else writer.add_uint16(each, 0)

    first = write_gguf(folder / "m-00001-of-00002.gguf", {}, extra=describe)
    part(folder / "m-00002-of-00002.gguf", (1, 2, 0))
    with pytest.raises(SourceError, match=f"{key}' should be a whole number"):
        open_manifest(first)


def test_two_models_in_one_folder(folder):
    split(folder)
    part(folder / "other-00002-of-00002.gguf", (1, 2, 0))
    with pytest.raises(SourceError, match=r"2 checkpoints of that format \(model-00001-of-00005\.gguf, other-00001-"):
        open_manifest(folder)


def test_parts_may_be_links_to_files_only(folder, tmp_path):
    parts = split(folder)
    known = set(open_manifest(parts[0]).tensors)
    outside = parts[1].rename(tmp_path / "elsewhere")
    parts[1].symlink_to(outside)
    assert set(open_manifest(parts[0]).tensors) == known
    parts[1].unlink()
    parts[1].symlink_to(tmp_path)
    with pytest.raises(UnsafeSourceError, match="symbolic link that leaves its folder"):
        open_manifest(parts[0])


def test_the_root_lists_a_model_once(folder, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_HOME", str(folder))
    first = split(folder)[0]
    assert [name for name in candidates() if name.startswith("model")] == [first.stem]
    assert resolve(first.stem).path == str(first)


def test_a_name_that_claims_parts_which_the_header_does_not_know_is_refused(folder):
    path = folder / "m-00001-of-00002.gguf"
    part(path, (0, 1, 1), ["a"])
    with pytest.raises(SourceError, match=r"part 1 of 2 according to its name, but its header has no split\.count"):
        shardload.inspect(path)
