"""A tensor of a GGML type that shardload does not know is listed, and refused only when it is asked for."""

import re
import struct

import gguf
import numpy as np
import pytest
from checkpoints import write_gguf
from jax.sharding import PartitionSpec

import shardload
from shardload.comparing import diff
from shardload.console.listing import as_json, as_text
from shardload.errors import SourceError, TruncatedSourceError, UnsupportedError
from shardload.loaders import open_manifest
from shardload.manifest import UnreadableRows
from shardload.verifying import verify

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
    found = open_manifest(with_unknown(tmp_path / "x.gguf", shape=(32, 0)))
    assert found.tensors["lm_head.weight"].stored_bytes == 0


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
