"""Models split over several GGUF files, opened by any part or their folder; tensors of GGML types unknown to us."""

import re
import struct

import gguf
import gguf_pairs
import jax
import numpy as np
import pytest
from checkpoints import finish_gguf, write_gguf
from gguf_tokenizers import add_pieces
from jax.sharding import PartitionSpec

import shardload
from shardload.comparing import diff
from shardload.console.listing import as_json, as_text
from shardload.errors import SourceError, SourceNotFoundError, TruncatedSourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders import open_manifest
from shardload.manifest import UnreadableRows
from shardload.resolve import candidates, resolve
from shardload.transfer.read_tensor import read_tensor
from shardload.verifying import verify

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
    arrays = shardload.load_arrays(split(folder)[1], jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    for name in whole.tensors:
        np.testing.assert_array_equal(np.asarray(arrays[name]), read_tensor(whole, name))


def test_missing_parts(folder):
    parts = split(folder)
    parts[0].unlink()
    parts[2].unlink()
    lacks = r"one of 5 parts, but .*parts lacks 2 of them: .*-00001-of-.*-00003-"
    for source in (parts[1], folder):
        with pytest.raises(SourceNotFoundError, match=lacks):
            open_manifest(source)


def test_parts_that_were_renamed(folder):
    parts = split(folder)
    spare = folder / "spare"
    for source, target in ((parts[1], spare), (parts[2], parts[1]), (spare, parts[2])):
        source.rename(target)
    other = r"is part 3 of 5 according to its header, expected a name that ends in -00003"
    first = r"expected a name that ends in -00001-of-00005\.gguf.*llama-gguf-split --merge"
    with pytest.raises(SourceError, match=r"-00002-of-00005\.gguf has split\.no 2, expected 1 from its name"):
        open_manifest(parts[0])
    with pytest.raises(SourceError, match=other):
        open_manifest(parts[1])
    with pytest.raises(SourceError, match=first):
        open_manifest(parts[0].rename(folder / "model.gguf"))


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


@pytest.mark.parametrize(("made", "message"), FOREIGN.values(), ids=FOREIGN)
def test_a_part_of_another_model(made, message, folder):
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
    parts[1].symlink_to(parts[1].rename(tmp_path / "elsewhere"))
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


REFUSED = r"Cannot read tensor 'lm_head.weight' of .*x.gguf: its GGML type \d+ is unknown\. Quantise the model again"
Q1_0, MADE_UP = 41, 99


def patched(path, name, *, number=MADE_UP, shape=None, offset=None):
    """A file in which the entry of a tensor says something else."""
    raw = bytearray(path.read_bytes())
    at = raw.index(name.encode()) + len(name)
    (rank,) = struct.unpack_from("<I", raw, at)
    struct.pack_into("<I", raw, at + 4 + 8 * rank, number)
    if shape is not None:
        struct.pack_into(f"<{rank}Q", raw, at + 4, *shape)
    if offset is not None:
        struct.pack_into("<Q", raw, at + 8 + 8 * rank, offset)
    path.write_bytes(raw)
    return path


def with_unknown(path, **changes):
    """`lm_head.weight` is of an unknown type: 8 rows of 34 bytes, and padding; a tensor before it, and one after."""
    codes = np.arange(8 * 34, dtype=np.uint8).reshape(8, 34), gguf.GGMLQuantizationType.Q8_0
    write_gguf(path, {"output.weight": codes, "blk.0.ffn_up.weight": np.ones((2, 32), np.float32)})
    return patched(path, "output.weight", **changes)


@pytest.mark.parametrize("number", [Q1_0, MADE_UP])
def test_it_is_listed_with_the_number_of_its_type(number, tmp_path):
    found = open_manifest(with_unknown(tmp_path / "x.gguf", number=number))
    assert {name: t.stored_bytes for name, t in found.tensors.items()} == {
        "model.embed_tokens.weight": 1024,
        "lm_head.weight": 288,
        "model.layers.0.mlp.up_proj.weight": 256,
    }
    assert f"at most 288 B, unreadable: its GGML type {number} is unknown" in as_text(found)
    (facts,) = as_json(found, match="lm_head.weight")["tensors"]
    assert (facts["storage"], facts["why"]) == ("unreadable", f"its GGML type {number} is unknown")


def test_verify_reads_it_and_says_that_its_size_is_unknown(tmp_path):
    (verdict,) = verify(with_unknown(tmp_path / "x.gguf"))
    assert (verdict.verdict, verdict.tensors, verdict.n_bytes) == ("readable", 3, 1024 + 288 + 256)
    (note,) = verdict.notes
    assert note == "tensor 'lm_head.weight' has an unknown size, so it may be incomplete: its GGML type 99 is unknown"


def test_other_tensors_are_loaded(tmp_path):
    path = with_unknown(tmp_path / "x.gguf")
    names = {"embedding": "model.embed_tokens.weight", "up": "model.layers.0.mlp.up_proj.weight"}
    found = shardload.load_arrays(path, dict.fromkeys(names, PartitionSpec()), mesh="1x1", names=names, strict=False)
    assert (found["embedding"] == 0).all() and (found["up"] == 1).all()


def test_what_needs_it_is_refused_with_the_way_out(tmp_path):
    path = with_unknown(tmp_path / "x.gguf")
    calls = (
        lambda: shardload.load_arrays(path, PartitionSpec(), mesh="1x1"),
        lambda: shardload.load(path, mesh="1x1", strict=False),
        lambda: shardload.plan(path),
    )
    for call in calls:
        with pytest.raises(UnsupportedError, match=REFUSED):
            call()


def test_equal_bytes_are_equal(tmp_path):
    assert diff(with_unknown(tmp_path / "1.gguf"), with_unknown(tmp_path / "2.gguf")).equal == 3


def test_other_bytes_are_named_and_the_rest_is_compared(tmp_path):
    one, two = (with_unknown(tmp_path / name) for name in ("1.gguf", "2.gguf"))
    two.write_bytes(two.read_bytes().replace(bytes(range(100)), bytes(range(1, 101)), 1))
    three = patched(write_gguf(tmp_path / "3.gguf", {"output.weight": np.ones((8, 32), np.float32)}), "output.weight")
    (found,) = (compared := diff(one, two)).differences
    assert (found.name, found.what, compared.equal) == ("lm_head.weight", "stored bytes", 2)
    assert re.match(
        r"1 tensor could not be compared by value \('lm_head.weight'\): Cannot read a tensor of .*1.gguf: its GGML "
        r"type 99 is unknown\. Quantise",
        compared.notes[-1],
    )
    assert {d.name: d.what for d in diff(one, three).differences} == {
        "lm_head.weight": "stored bytes",
        "model.layers.0.mlp.up_proj.weight": "only in the first",
    }


def test_the_last_tensor_ends_with_the_file(tmp_path):
    path = patched(write_gguf(tmp_path / "x.gguf", {"output.weight": np.ones((2, 8), np.float32)}), "output.weight")
    assert open_manifest(path).tensors["lm_head.weight"].stored_bytes == 64


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"offset": 1024 + 288}, SourceError, "tensors 'output.weight' and 'blk.0.ffn_up.weight' overlap"),
        ({"offset": 1 << 20}, TruncatedSourceError, "is truncated: tensor 'output.weight' should end at"),
        ({"shape": (1 << 62, 1 << 62)}, SourceError, "is truncated: tensor 'output.weight' should end at"),
    ],
)
def test_a_tensor_without_room_is_refused(changes, kind, message, tmp_path):
    with pytest.raises(kind, match=message):
        open_manifest(with_unknown(tmp_path / "x.gguf", **changes))


def test_an_empty_one_takes_no_room(tmp_path):
    tensors = open_manifest(with_unknown(tmp_path / "x.gguf", shape=(32, 0))).tensors
    assert tensors["lm_head.weight"].stored_bytes == 0


def test_stacked_experts_share_its_bytes(tmp_path):
    def experts(writer):
        writer.add_expert_count(3)
        writer.add_expert_used_count(1)
        writer.add_expert_feed_forward_length(4)

    stack = {"blk.0.ffn_up_exps.weight": np.ones((3, 4, 32), np.float32)}
    path = write_gguf(tmp_path / "x.gguf", stack, arch="qwen3moe", extra=experts)
    found = open_manifest(patched(path, "blk.0.ffn_up_exps.weight")).tensors
    stored = [found[f"model.layers.0.mlp.experts.{i}.up_proj.weight"].storage.reader for i in range(3)]
    assert all(isinstance(reader, UnreadableRows) and reader.stored_bytes == 512 for reader in stored)
