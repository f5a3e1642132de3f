"""Damaged safetensors and GGUF headers: a manifest that keeps its promises, or one of our errors; never more.

Promises: every extent lies in its file, no two overlap, and opening allocates in proportion to the file (`fuzzing`).
"""

import json
import struct
import sys

import h5py
import numpy as np
import pytest
from checkpoints import small_arrays, write_gguf
from fuzzing import RESIDENT_FLOOR_BYTES, Child, Format, anything, big, changed, check, damaged, fuzz, put
from hypothesis import strategies as st
from safetensors.numpy import save

from shardload.loaders import open_manifest
from shardload.manifest import Extent, UnreadableRows
from shardload.transfer.read_tensor import stored_chunks


def read_decoded(manifest):
    """Rows that a GGUF header promised are there: reading raises nothing. Of unknown types, the bytes are there."""
    for tensor in manifest.tensors.values() if manifest else ():
        if isinstance(reader := getattr(tensor.storage, "reader", None), UnreadableRows):
            assert sum(chunk.size for chunk in stored_chunks(reader, limit_bytes=1 << 20)) == reader.stored_bytes
        elif not isinstance(tensor.storage, Extent):
            assert tensor.storage.reader.read_rows(0, tensor.rows).shape == tensor.shape
    return manifest


def safetensors_bytes():
    return save(small_arrays(), metadata={"format": "pt"})


@fuzz(share=0.35, data=st.data())
def test_damaged_safetensors(tmp_path, data):
    raw = safetensors_bytes()
    path = put(tmp_path / "x.safetensors", data.draw(damaged(raw, hot=8 + int.from_bytes(raw[:8], "little"))))
    return check(path, factor=Format.SAFETENSORS, format=data.draw(st.sampled_from([None, "safetensors"])))


@fuzz(share=0.3, data=st.data())
def test_structured_safetensors(tmp_path, data):
    raw = safetensors_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps(data.draw(changed(json.loads(raw[8:start])))).encode("utf-8", "surrogatepass")
    path = put(tmp_path / "x.safetensors", struct.pack("<Q", len(header)) + header + raw[start:])
    return check(path, factor=Format.SAFETENSORS)


@st.composite
def honest_header(draw):
    """Tensors end to end, sometimes with one number off by a little."""
    header, at = {}, 0
    for i in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        stop = at + int(np.prod(shape)) * 4
        start = at + draw(st.sampled_from([0] * 8 + [-4, 4]))
        header[f"t{i}"] = {"dtype": "F32", "shape": shape, "data_offsets": [start, stop]}
        at = stop
    return header, max(0, at + draw(st.sampled_from([0] * 8 + [-1, 1])))


@fuzz(share=0.35, drawn=honest_header())
def test_nearly_honest_safetensors_agree_with_the_reference(tmp_path, drawn):
    from safetensors import SafetensorError, deserialize

    header, size = drawn
    raw = json.dumps(header).encode()
    path = put(tmp_path / "x.safetensors", struct.pack("<Q", len(raw)) + raw + bytes(size))
    try:
        expected = {name: tuple(found["shape"]) for name, found in deserialize(path.read_bytes())}
    except SafetensorError:
        expected = None
    manifest = check(path, factor=Format.SAFETENSORS)
    found = None if manifest is None else {name: tensor.shape for name, tensor in manifest.tensors.items()}
    assert found == expected
    return manifest


@fuzz(data=st.data())
def test_damaged_index(tmp_path, data):
    if not (shard := tmp_path / "a.safetensors").exists():
        shard.write_bytes(safetensors_bytes())
    shards = st.sampled_from(["a.safetensors", "../a.safetensors", "/etc/passwd", "b.safetensors", ".", ""])
    weight_map = dict.fromkeys(small_arrays(), "a.safetensors")
    weight_map |= data.draw(st.dictionaries(st.sampled_from([*weight_map, "none"]), shards | anything, max_size=1))
    document = json.dumps(data.draw(changed({"weight_map": weight_map, "metadata": {"total_size": 9}}))).encode()
    if data.draw(st.booleans()):
        document = data.draw(damaged(document))
    check(put(tmp_path / "model.safetensors.index.json", document), factor=Format.JSON)
    return check(tmp_path, factor=Format.JSON)


def gguf_bytes(tmp_path):
    import gguf

    q8 = gguf.GGMLQuantizationType.Q8_0
    tensors = {
        "rope_freqs.weight": np.ones(8, np.float32),
        "blk.0.attn_q.weight": np.ones((32, 32), np.float32),
        "blk.0.ffn_up.weight": (gguf.quantize(np.ones((4, 32), np.float32), q8), q8),
    }
    extra = lambda w: (w.add_token_list(["a", "b"]), w.add_rope_scaling_factor(8.0))  # noqa: E731
    return write_gguf(tmp_path / "seed.gguf", tensors, theta=5e5, extra=extra).read_bytes()


@fuzz(share=0.5, data=st.data())
def test_damaged_gguf(tmp_path, data):
    if not (seed := tmp_path / "seed.gguf").exists():
        gguf_bytes(tmp_path)
    path = put(tmp_path / "x.gguf", data.draw(damaged(seed.read_bytes(), hot=900)))
    return read_decoded(check(path, factor=Format.GGUF, format=data.draw(st.sampled_from([None, "gguf"]))))


string = st.binary(max_size=6) | st.sampled_from([b"general.architecture", b"llama", b"general.alignment"])


@st.composite
def gguf_array(draw, levels=12):
    """An array, more often of arrays than of anything else, whose count may be wrong."""
    kind, count = draw(st.integers(0, 13) | st.just(9)), draw(st.integers(0, 8))
    counted = draw(st.just(count) | big.map(abs).filter(lambda n: n < 2**64))
    items = [draw(gguf_array(levels=levels - 1)) for _ in range(min(count, 2))] if kind == 9 and levels else []
    return struct.pack("<IQ", kind, len(items) if items and draw(st.booleans()) else counted) + b"".join(items)


@st.composite
def gguf_value(draw):
    kind = draw(st.integers(0, 13))
    if kind == 8:
        text = draw(string)
        return struct.pack("<IQ", kind, len(text)) + text
    if kind == 9:
        return struct.pack("<I", kind) + draw(gguf_array())
    return struct.pack("<I", kind) + draw(st.binary(min_size=1, max_size=8))


PAIRS = {
    b"general.architecture": struct.pack("<IQ", 8, 5) + b"llama",
    b"llama.attention.head_count": struct.pack("<II", 4, 2),
    b"llama.embedding_length": struct.pack("<II", 4, 32),
    b"llama.feed_forward_length": struct.pack("<II", 4, 64),
    b"llama.block_count": struct.pack("<II", 4, 1),
    b"llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
}
TENSORS = [(b"token_embd.weight", [2, 4], 0, 0), (b"blk.0.attn_norm.weight", [32], 8, 32)]
numbers = st.integers(0, 2**64 - 1) | st.integers(0, 64)


@fuzz(
    share=0.5,
    pairs=st.dictionaries(st.sampled_from([*PAIRS]) | string, gguf_value(), max_size=1),
    tensors=st.lists(st.tuples(string, st.lists(numbers, max_size=5), st.integers(0, 42), st.integers(0, 256))).map(
        lambda found: TENSORS + found[2:]
    ),
    tail=st.sampled_from([bytes(96), bytes(40)]) | st.binary(max_size=64),
)
def test_structured_gguf(tmp_path, pairs, tensors, tail):
    pairs = PAIRS | pairs
    raw = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs))
    raw += b"".join(struct.pack("<Q", len(key)) + key + value for key, value in pairs.items())
    for name, dims, kind, offset in tensors:
        raw += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    return read_decoded(check(put(tmp_path / "x.gguf", raw + bytes(-len(raw) % 32) + tail), factor=Format.GGUF))


HEADER_FACTOR, LIBHDF5_KEEPS_BYTES = 18, 16 << 20
"""libhdf5 takes 5 KB for an object header of 300 bytes and keeps what is freed, up to 16 MiB, for the next ones."""
NAMES = [b"%x" % i for i in range(1 << 16)]


def safetensors(entries):
    header = b"{" + entries + b"}"
    return struct.pack("<Q", len(header)) + header


def gguf(pairs, tensors=()):
    entries = PAIRS | dict(pairs)
    raw = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors) + 1, len(entries))
    raw += b"".join(struct.pack("<Q", len(key)) + key + value for key, value in entries.items())
    raw += struct.pack("<Q", 17) + b"token_embd.weight" + struct.pack("<IQQIQ", 2, 0, 8, 0, 0)
    return raw + b"".join(struct.pack("<Q", len(name)) + name + rest for name, rest in tensors) + bytes(64)


def array(kind, count):
    return struct.pack("<IIQ", 9, kind, count)


ENTRY = b'"%s":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}'
SAFETENSORS = {
    "tensors": lambda: b",".join(ENTRY % (name, b"0") for name in NAMES[:20000]),
    "dims": lambda: b",".join(ENTRY % (name, b"0" + b",999" * 31) for name in NAMES[:5000]),
    "metadata": lambda: b'"__metadata__":{' + b",".join(b'"%s":""' % name for name in NAMES) + b"}",
    "wide text": lambda: b'"__metadata__":{"a":"' + b"x" * 1000000 + '\U0001f600"}'.encode(),
}
UNUSED = struct.pack("<IQIQ", 1, 0, 0, 0)
LAYERS = [(b"blk.%d.ffn_up.bias" % i, UNUSED) for i in range(20000)]
GGUF = {
    "keys": lambda: gguf((name, struct.pack("<IB", 0, 200)) for name in NAMES[:30000]),
    "small numbers": lambda: gguf((name, array(1, 1024) + b"\x80" * 1024) for name in NAMES[:500]),
    "strings": lambda: gguf((name, array(8, 1024) + struct.pack("<Q2s", 2, b"ab") * 1024) for name in NAMES[:100]),
    "vocabulary": lambda: gguf({b"k": array(8, 300000) + struct.pack("<Q2s", 2, b"ab") * 300000}),
    "tensors": lambda: gguf([], LAYERS),
    "arrays of arrays": lambda: gguf({b"k": array(9, 20000) + (struct.pack("<IQ", 1, 20) + b"\x80" * 20) * 20000}),
    "arrays of empty arrays": lambda: gguf(
        {
            b"k": array(9, 8000) + struct.pack("<IQ", 1, 0) * 8000,
            b"l": array(1, 160000) + bytes(160000),  # more arrays than that are refused
        }
    ),
    "no model": lambda: gguf([], [(b"v.%d.ffn_up.bias" % i, UNUSED) for i in range(20000)]),
    "at last no model": lambda: gguf([], [*LAYERS, (b"v.ffn_up.bias", UNUSED)]),
    "quantised": lambda: gguf([], [(b"blk.%d.ffn_up.bias" % i, struct.pack("<IQIQ", 1, 0, 8, 0)) for i in range(9000)]),
}
JSON = {
    "lists": b"[],", "objects": b"{},", "nested": b'{"":{"":0}},', "just not too dense": b'{"abcdefghi":-9},',
    "numbers in lists": b"[-9,-9,-9,-9,-9],", "numbers": b"-9,", "floats": b"1e1,", "strings": b'"ab",',
}  # fmt: skip
"""Repeated to a megabyte; the first three are refused before they are parsed."""


@pytest.mark.slow
@pytest.mark.parametrize("what", SAFETENSORS)
def test_safetensors(what, tmp_path):
    check(put(tmp_path / "x.safetensors", safetensors(SAFETENSORS[what]())), factor=Format.SAFETENSORS)


@pytest.mark.slow
@pytest.mark.parametrize("what", GGUF)
def test_gguf(what, tmp_path):
    assert check(put(tmp_path / "x.gguf", GGUF[what]()), factor=Format.GGUF)


@pytest.mark.slow
@pytest.mark.parametrize("what", JSON)
def test_json(what, tmp_path):
    content = b'{"weight_map":[' + JSON[what] * (1000000 // len(JSON[what])) + b"0]}"
    check(put(tmp_path / "m.safetensors.index.json", content), factor=Format.JSON)


def test_json_keys(tmp_path):
    content = b'{"weight_map":{' + b",".join(b'"%s":"a"' % name for name in NAMES) + b"}}"
    check(put(tmp_path / "m.safetensors.index.json", content), factor=Format.JSON)


LONGER = {
    "x.safetensors": lambda n: safetensors(b",".join(ENTRY % (name, b"0") for name in NAMES[:n])),
    "x.gguf": lambda n: gguf([], LAYERS[:n]),
}


@pytest.mark.parametrize("name", LONGER)
def test_twice_the_tensors_take_twice_the_calls(name, tmp_path):
    (tmp_path / name).write_bytes(LONGER[name](10))
    open_manifest(tmp_path / name)  # imports on first use are not counted
    once, twice = (calls_to_open(tmp_path / name, LONGER[name](n)) for n in (1000, 2000))
    assert 1000 < once < twice < 2.01 * once


def calls_to_open(path, content):
    """Calls, of Python's functions and of those in C, that opening takes: its time, but the same on every machine."""
    path.write_bytes(content)
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        open_manifest(path)
    finally:
        sys.setprofile(None)
    return calls


def groups(file):
    for name in NAMES[:5000]:
        file.create_group(name)


def scalars(file):
    for name in NAMES[:5000]:
        file[name] = np.float32(0)


def layers(file):
    for i in range(1000):
        file[f"layers/dense_{i}/vars/0"] = np.ones((16, 16), np.float32)


def chain(file):
    file["/".join("a" * 200) + "/x"] = np.float32(0)


def legacy(file):
    names = [b"%x" % i for i in range(2000)]
    for start in range(0, len(names), 1000):
        file.attrs[f"layer_names{start // 1000}"] = np.asarray(names[start : start + 1000])
    for name in names:
        file[b"%s/%s" % (name, name)] = np.float32(0)
        file[name].attrs["weight_names"] = np.asarray([name])


@pytest.mark.slow
@pytest.mark.parametrize("libver", ["earliest", "latest"])
@pytest.mark.parametrize("content", [groups, scalars, layers, chain, legacy])
def test_hdf5(content, libver, tmp_path):
    with h5py.File(tmp_path / "x.weights.h5", "w", libver=libver) as file:
        content(file)
    with h5py.File(tmp_path / "warm.weights.h5", "w", libver=libver) as file:
        file["x"] = np.float32(0)
    child = Child()
    child.grown_by_opening(tmp_path / "warm.weights.h5")  # libhdf5 sets itself up
    grown = child.grown_by_opening(tmp_path / "x.weights.h5")
    child.close()
    size = (tmp_path / "x.weights.h5").stat().st_size
    assert grown <= min(RESIDENT_FLOOR_BYTES + HEADER_FACTOR * size, LIBHDF5_KEEPS_BYTES + Format.HDF5 * size)
    check(tmp_path / "x.weights.h5", factor=Format.HDF5)
