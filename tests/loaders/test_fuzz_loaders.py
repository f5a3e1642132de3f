"""Damaged safetensors and GGUF headers: a manifest that keeps its promises, or one of our errors; never more.

Promises: every extent lies in its file, no two overlap, and opening allocates in proportion to the file (`fuzzing`).
"""

import json
import struct

import numpy as np
from checkpoints import small_arrays, write_gguf
from fuzzing import Format, anything, big, changed, check, damaged, fuzz, put
from hypothesis import strategies as st
from safetensors.numpy import save

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
    path = tmp_path / "x.safetensors"
    put(path, data.draw(damaged(raw, hot=8 + int.from_bytes(raw[:8], "little"))))
    return check(path, factor=Format.SAFETENSORS, format=data.draw(st.sampled_from([None, "safetensors"])))


@fuzz(share=0.3, data=st.data())
def test_structured_safetensors(tmp_path, data):
    raw = safetensors_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.dumps(data.draw(changed(json.loads(raw[8:start])))).encode("utf-8", "surrogatepass")
    path = tmp_path / "x.safetensors"
    put(path, struct.pack("<Q", len(header)) + header + raw[start:])
    return check(path, factor=Format.SAFETENSORS)


@st.composite
def honest_header(draw):
    """Tensors end to end, sometimes with one number off by a little."""
    header, at = {}, 0
    for i in range(draw(st.integers(0, 4))):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        stop = at + int(np.prod(shape)) * 4
        header[f"t{i}"] = {
            "dtype": "F32",
            "shape": shape,
            "data_offsets": [at + draw(st.sampled_from([0] * 8 + [-4, 4])), stop],
        }
        at = stop
    return header, max(0, at + draw(st.sampled_from([0] * 8 + [-1, 1])))


@fuzz(share=0.35, drawn=honest_header())
def test_nearly_honest_safetensors_agree_with_the_reference(tmp_path, drawn):
    from safetensors import SafetensorError, deserialize

    header, size = drawn
    raw = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    put(path, struct.pack("<Q", len(raw)) + raw + bytes(size))
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
    index = tmp_path / "model.safetensors.index.json"
    put(index, document)
    check(index, factor=Format.JSON)
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
    path = tmp_path / "x.gguf"
    put(path, data.draw(damaged(seed.read_bytes(), hot=900)))
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
    path = tmp_path / "x.gguf"
    put(path, raw + bytes(-len(raw) % 32) + tail)
    return read_decoded(check(path, factor=Format.GGUF))
