import json

import ml_dtypes
import numpy as np
import pytest
from checkpoints import assert_same, read_tensor, small_arrays, write_safetensors
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file, save_file

import shardload
from shardload.console.listing import as_text
from shardload.errors import SourceError, TruncatedSourceError, UnsafeSourceError, UnsupportedError
from shardload.loaders import open_manifest
from shardload.verifying import verify


def entry(start=0, stop=4, shape=(1,), dtype="F32", **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, stop], **more}


def test_every_bit_equals_the_reference_reader(tmp_path):
    save_file(small_arrays(), tmp_path / "a.safetensors", metadata={"format": "pt", "a}b": '{"'})
    manifest = open_manifest(tmp_path / "a.safetensors")
    assert manifest.format == "safetensors"
    assert manifest.metadata == {"format": "pt", "a}b": '{"'}
    assert_same(manifest, load_file(tmp_path / "a.safetensors"))


def test_metadata_may_be_null(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"__metadata__": None, "a": entry()}, b"\0" * 4)
    assert load_file(path).keys() == open_manifest(path).tensors.keys() == {"a"}


def test_tensors_come_in_file_order(tmp_path):
    header = {"b": entry(0, 4), "a": entry(8, 12), "c": entry(4, 8)}
    path = write_safetensors(tmp_path / "x.safetensors", header, b"\0" * 12)
    assert list(open_manifest(path).tensors) == ["b", "c", "a"]


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "bfloat16"])
def test_small_floats(tmp_path, dtype):
    save_file({"x": np.arange(4).astype(getattr(ml_dtypes, dtype))}, tmp_path / "a.safetensors")
    assert open_manifest(tmp_path / "a.safetensors").tensors["x"].dtype == dtype


@pytest.mark.parametrize("first", [0x7B, 0x20, 0x0A])
def test_a_header_whose_length_looks_like_json(tmp_path, first):
    raw = json.dumps({"a": entry()}).encode()
    path = write_safetensors(tmp_path / "x", None, b"\0" * 4, raw_header=raw.ljust(256 + first))
    assert list(open_manifest(path).tensors) == ["a"]


def test_padding_and_no_tensors(tmp_path):
    assert not open_manifest(write_safetensors(tmp_path / "x.safetensors", None, raw_header=b"{}      ")).tensors


LIES = {
    "hole": ({"a": entry(4, 8)}, "leaves a hole after the header"),
    "hole between": ({"a": entry(0, 2, dtype="U8", shape=(2,)), "b": entry(4, 8)}, "leaves a hole after tensor 'a'"),
    "overlap": ({"a": entry(0, 4), "b": entry(2, 6)}, "'b' start at byte .* overlaps tensor 'a'"),
    "trailing": ({"a": entry(0, 4)}, r"covers the file up to byte \d+, but it has \d+"),
    "backwards": ({"a": entry(4, 0)}, "end before they start"),
    "negative": ({"a": entry(-4, 0)}, "end before they start"),
    "size": ({"a": entry(0, 8, shape=(3,))}, r"shape \(3,\) of F32, which is 12 bytes, but .* 8 bytes"),
    "dtype": ({"a": entry(dtype="F31")}, "dtype 'F31'; supported dtypes: BOOL"),
    "dtype type": ({"a": entry(dtype=["F32"])}, "dtype"),
    "shape type": ({"a": entry(shape=[1.0])}, "list of integers"),
    "shape bool": ({"a": entry(shape=[True])}, "list of integers"),
    "shape sign": ({"a": entry(shape=[-1])}, "from 0 to"),
    "shape overflow": ({"a": entry(0, 0, shape=[0, 1 << 64])}, r"from 0 to 2\*\*63"),
    "shape product": ({"a": entry(0, 0, shape=[1 << 62, 1 << 62])}, "which is .* bytes"),
    "rank": ({"a": entry(0, 4, shape=[1] * 65)}, "65 dims"),
    "offsets type": ({"a": entry(0, "4")}, "two data_offsets"),
    "missing key": ({"a": {"dtype": "F32", "shape": [1]}}, "dtype, shape and data_offsets"),
    "missing key for another": ({"a": {"dtype": "F32", "shape": [1], "more": 1}}, "dtype, shape and data_offsets"),
    "not an object": ({"a": 3}, "not a short object"),
    "metadata": ({"__metadata__": {"a": 1}}, "not a string"),
    "metadata shape": ({"__metadata__": [1]}, "does not parse"),
}


@pytest.mark.parametrize(("header", "message"), LIES.values(), ids=LIES)
def test_lies_name_file_and_tensor(tmp_path, header, message):
    path = write_safetensors(tmp_path / "x.safetensors", header, b"\0" * 8)
    with pytest.raises(SourceError, match=rf"x\.safetensors.*{message}"):
        open_manifest(path)


@pytest.mark.parametrize("more", ["a word", "} {", 1, None, {"by": {"whom": ["x"]}}, [{}]])
def test_other_keys_of_a_tensor_are_ignored_as_by_the_library(tmp_path, more):
    header = {"a": {"comment": more} | entry(0, 4), "b": entry(4, 8, comment=more)}
    path = write_safetensors(tmp_path / "x.safetensors", header, np.arange(2, dtype=np.float32).tobytes())
    manifest = open_manifest(path)
    for name, value in load_file(path).items():
        np.testing.assert_array_equal(read_tensor(manifest.tensors[name]), value)


RAW = {
    "long comment": b'{"a":{"comment":{"x":"' + b"y" * 5000 + b'"},"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "twice": b'{"a":%s,"a":%s}',
    "metadata twice": b'{"__metadata__":{},"__metadata__":{}}',
    "key twice": b'{"a":{"dtype":"F32","dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
    "metadata key twice": b'{"__metadata__":{"x":"1","x":"2"}}',
    "deep": b'{"a":' + b"[" * 100_000,
    "deep entry": b'{"a":{"shape":' + b"[" * 3000 + b"]" * 3000 + b"}}",
    "huge int": b'{"a":{"dtype":"F32","shape":[' + b"9" * 4400 + b'],"data_offsets":[0,4]}}',
    "long entry": b'{"a":{"dtype":"F32","shape":[' + b"1," * 4000 + b'1],"data_offsets":[0,4]}}',
    "not utf-8": b'{"\xff":1}',
    "half a character": b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    "unfinished": b'{"a"',
    "trailing text": b"{} x",
    "trailing comma": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},}',
    "array": b"{[]}",
    "nan": b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}',
}


@pytest.mark.parametrize("name", RAW)
def test_malformed_headers(tmp_path, name):
    raw = RAW[name].replace(b"%s", json.dumps(entry()).encode())
    path = write_safetensors(tmp_path / "x.safetensors", None, b"\0" * 8, raw_header=raw)
    with pytest.raises(SourceError, match=r"header|valid Unicode"):
        open_manifest(path)


def test_truncated_data(tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": entry(0, 400, shape=(100,))}, b"\0" * 399)
    with pytest.raises(TruncatedSourceError, match=r"tensor 'a' should end at byte \d+, but the file has \d+ bytes"):
        open_manifest(path)


@pytest.mark.parametrize(
    ("length", "error", "says"),
    [(1000, TruncatedSourceError, "1000 bytes at offset 8"), (1 << 60, UnsafeSourceError, "at most 100000000")],
)
def test_header_longer_than_the_file_or_beyond_the_cap(tmp_path, length, error, says):
    path = write_safetensors(tmp_path / "x.safetensors", {}, length=length)
    with pytest.raises(error, match=says):
        open_manifest(path, format="safetensors")


@pytest.mark.parametrize(("dtype", "n_bytes"), [("F4", 4), ("F6_E2M3", 6), ("F6_E3M2", 6)])
def test_packed_dtypes_are_listed_and_refused_when_asked_for(dtype, n_bytes, tmp_path):
    header = {"a": entry(0, n_bytes, (8,), dtype), "b": entry(n_bytes, n_bytes + 2, (2,), "U8")}
    path = write_safetensors(tmp_path / "x.safetensors", header, bytes(n_bytes) + b"\1\2")
    found = open_manifest(path)
    assert {name: t.stored_bytes for name, t in found.tensors.items()} == {"a": n_bytes, "b": 2}
    assert "a " in as_text(found)
    assert shardload.load_arrays(path, {"b": PartitionSpec()}, mesh="1x1", strict=False)["b"].tolist() == [1, 2]
    with pytest.raises(UnsupportedError, match=f"Cannot read tensor 'a' of .*: its dtype {dtype} packs several"):
        shardload.load_arrays(path, PartitionSpec(), mesh="1x1")
    assert [each.verdict for each in verify(path)] == ["readable"]


@pytest.mark.parametrize(("shape", "offsets"), [((8,), (0, 8)), ((7,), (0, 4))])
def test_packed_dtypes_take_whole_bytes(shape, offsets, tmp_path):
    path = write_safetensors(tmp_path / "x.safetensors", {"a": entry(*offsets, shape, "F4")}, bytes(offsets[1]))
    with pytest.raises(SourceError, match=r"tensor 'a' the shape"):
        open_manifest(path)


@pytest.mark.parametrize("space", [" ", "\n", "\t\r\n "])
@pytest.mark.parametrize("name", ["x.safetensors", "x"])
def test_white_space_before_the_header_is_read_as_the_library_does(space, name, tmp_path):
    made = write_safetensors(tmp_path / "made", {"a": entry(0, 2, (2,), "U8")}, b"\1\2").read_bytes()
    length = int.from_bytes(made[:8], "little")
    header = space.encode() + made[8 : 8 + length]
    (tmp_path / name).write_bytes(len(header).to_bytes(8, "little") + header + made[8 + length :])
    assert load_file(tmp_path / name)["a"].tolist() == [1, 2]
    assert read_tensor(open_manifest(tmp_path / name).tensors["a"]).tolist() == [1, 2]
