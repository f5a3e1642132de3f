"""Damaged headers, thousands a format: a manifest that keeps its promises, or one of our errors; never more.

Promises: every extent lies in its file, no two overlap, and opening allocates in proportion to the file.
"""

import io
import itertools
import json
import struct
import tracemalloc
import zipfile
from pathlib import Path

import h5py
import ml_dtypes
import numpy as np
import pytest
from checkpoints import small_arrays, write_gguf
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save

from shardload.errors import ShardloadError
from shardload.loaders import open_manifest
from shardload.manifest import Extent

CASES, MORE_CASES = 200, 1200
"""Examples per test in the fast run, and once more in the full one."""
PEAK_FLOOR_BYTES = 4 << 20
"""A 1 MiB window of GGUF, imports on first use, tracebacks."""
PEAK_FACTOR = 32
"""Python objects per byte of header: an entry of 50 bytes becomes a Tensor, an Extent, a shape and a name."""


def fuzz(**strategies):
    """Run a test body on many examples: a few in the fast run, thousands a format in the full one."""

    def decorate(body):
        @pytest.mark.parametrize("cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)])
        def test(tmp_path, cases):
            @settings(
                max_examples=cases, deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck]
            )
            @given(**strategies)
            def run(**drawn):
                body(tmp_path, **drawn)

            run()

        return test

    return decorate


def check(path, **options):
    """Open a path; whatever happens must be what we promise."""
    size = sum(file.stat().st_size for file in ([path] if path.is_file() else path.iterdir()))
    tracemalloc.start()
    try:
        manifest = open_manifest(path, **options)
    except ShardloadError as error:
        assert str(error)
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak <= PEAK_FLOOR_BYTES + PEAK_FACTOR * size
    spans = {}
    for tensor in manifest.tensors.values():
        if isinstance(tensor.storage, Extent):
            start, stop = tensor.storage.offset, tensor.storage.offset + tensor.nbytes
            assert 0 <= start <= stop <= manifest.files[tensor.storage.path]
            assert manifest.files[tensor.storage.path] == Path(tensor.storage.path).stat().st_size
            if tensor.nbytes:
                spans.setdefault(tensor.storage.path, []).append((start, stop))
        else:
            assert tensor.stored_bytes <= sum(manifest.files[path] for path in tensor.storage.reader.paths)
    for found in spans.values():
        found.sort()
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(found))
    return manifest


def read_decoded(manifest):
    """Rows that a GGUF header promised are there: reading raises nothing."""
    for tensor in manifest.tensors.values() if manifest else ():
        if not isinstance(tensor.storage, Extent):
            assert tensor.storage.reader.read_rows(0, tensor.rows).shape == tensor.shape


@st.composite
def damaged(draw, raw, *, hot=None):
    """``raw`` after a few flips, overwritten runs, splices, cuts or insertions; mostly in its first ``hot`` bytes."""
    data = bytearray(raw)
    for _ in range(draw(st.integers(1, 4))):
        reach = len(data) if hot is None or draw(st.integers(0, 9)) == 0 else min(hot, len(data))
        at = draw(st.integers(0, max(0, reach - 1)))
        match draw(st.sampled_from(["flip", "byte", "run", "number", "splice", "cut", "trim", "insert"])):
            case "flip":
                data[at : at + 1] = bytes(b ^ (1 << draw(st.integers(0, 7))) for b in data[at : at + 1])
            case "byte":
                data[at : at + 1] = bytes([draw(st.integers(0, 255))])
            case "run":
                data[at : at + 8] = bytes([draw(st.sampled_from([0, 127, 128, 255]))]) * len(data[at : at + 8])
            case "number":
                data[at : at + 8] = struct.pack("<Q", draw(st.integers(0, 2**64 - 1)))
            case "splice":
                source = draw(st.integers(0, max(0, reach - 1)))
                count = draw(st.integers(1, 64))
                data[at : at + count] = data[source : source + count]
            case "cut":
                del data[at : at + draw(st.integers(1, len(data) or 1))]
            case "trim":
                del data[len(data) - draw(st.integers(0, min(200, len(data)))) :]
            case "insert":
                data[at:at] = draw(st.binary(max_size=16))
    return bytes(data)


def safetensors_bytes():
    return save(small_arrays(), metadata={"format": "pt"})


@fuzz(data=st.data())
def test_damaged_safetensors(tmp_path, data):
    raw = safetensors_bytes()
    path = tmp_path / "x.safetensors"
    path.write_bytes(data.draw(damaged(raw, hot=8 + int.from_bytes(raw[:8], "little"))))
    check(path, format=data.draw(st.sampled_from([None, "safetensors"])))


big = st.one_of(st.integers(-2, 20), st.integers(-(2**70), 2**70))
scalars = st.one_of(st.none(), st.booleans(), big, st.floats(), st.text(max_size=5))
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
entries = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F4", "F99", "BOOL"]) | anything,
        "shape": st.lists(big, max_size=5) | anything,
        "data_offsets": st.tuples(big, big).map(list) | anything,
        "more": anything,
    },
)


@fuzz(
    header=st.dictionaries(st.text(max_size=8) | st.just("__metadata__"), entries | anything, max_size=5),
    tail=st.binary(max_size=64),
)
def test_structured_safetensors(tmp_path, header, tail):
    raw = json.dumps(header).encode("utf-8", "surrogatepass")
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + tail)
    check(path)


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


@fuzz(drawn=honest_header())
def test_nearly_honest_safetensors_agree_with_the_reference(tmp_path, drawn):
    from safetensors import SafetensorError, deserialize

    header, size = drawn
    raw = json.dumps(header).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(size))
    try:
        expected = {name: tuple(found["shape"]) for name, found in deserialize(path.read_bytes())}
    except SafetensorError:
        expected = None
    manifest = check(path)
    found = None if manifest is None else {name: tensor.shape for name, tensor in manifest.tensors.items()}
    assert found == expected


@fuzz(data=st.data())
def test_damaged_index(tmp_path, data):
    if not (shard := tmp_path / "a.safetensors").exists():
        shard.write_bytes(safetensors_bytes())
    names = st.sampled_from([*small_arrays(), "none"]) | st.text(max_size=5)
    shards = st.sampled_from(["a.safetensors", "../a.safetensors", "/etc/passwd", "b.safetensors", ".", ""])
    weight_map = data.draw(st.dictionaries(names, shards | anything, max_size=6) | anything)
    document = json.dumps(data.draw(st.just({"weight_map": weight_map}) | anything)).encode()
    if data.draw(st.booleans()):
        document = data.draw(damaged(document))
    index = tmp_path / "model.safetensors.index.json"
    index.write_bytes(document)
    check(index)
    check(tmp_path)


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


@fuzz(data=st.data())
def test_damaged_gguf(tmp_path, data):
    if not (seed := tmp_path / "seed.gguf").exists():
        gguf_bytes(tmp_path)
    path = tmp_path / "x.gguf"
    path.write_bytes(data.draw(damaged(seed.read_bytes(), hot=900)))
    read_decoded(check(path, format=data.draw(st.sampled_from([None, "gguf"]))))


string = st.binary(max_size=6) | st.sampled_from([b"general.architecture", b"llama", b"general.alignment"])


@st.composite
def gguf_value(draw):
    kind = draw(st.integers(0, 13))
    if kind == 8:
        text = draw(string)
        return struct.pack("<IQ", kind, len(text)) + text
    if kind == 9:
        return struct.pack(
            "<IIQ", kind, draw(st.integers(0, 13)), draw(st.integers(0, 8) | big.map(abs).filter(lambda n: n < 2**64))
        )
    return struct.pack("<I", kind) + draw(st.binary(min_size=1, max_size=8))


@fuzz(
    pairs=st.lists(st.tuples(string, gguf_value()), max_size=5),
    tensors=st.lists(
        st.tuples(
            string,
            st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 64), max_size=5),
            st.integers(0, 42),
            st.integers(0, 256),
        ),
        max_size=4,
    ),
    tail=st.binary(max_size=64),
)
def test_structured_gguf(tmp_path, pairs, tensors, tail):
    raw = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(pairs))
    raw += b"".join(struct.pack("<Q", len(key)) + key + value for key, value in pairs)
    for name, dims, kind, offset in tensors:
        raw += struct.pack("<Q", len(name)) + name + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)
    path = tmp_path / "x.gguf"
    path.write_bytes(raw + tail)
    read_decoded(check(path))


def h5_bytes(libver):
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=libver) as file:
        for i in range(3):
            file[f"layers/dense_{i}/vars/0"] = np.ones((4, i + 1), np.float32)
        file.create_dataset("half", data=np.ones(4, ml_dtypes.bfloat16)).attrs["dtype"] = "bfloat16"
        file.create_dataset("chunked", data=np.ones((8, 4)), chunks=(2, 4), compression="gzip")
    return buffer.getvalue()


@fuzz(libver=st.sampled_from(["earliest", "latest"]), data=st.data())
def test_damaged_h5(tmp_path, libver, data):
    if not (seed := tmp_path / f"{libver}.bin").exists():
        seed.write_bytes(h5_bytes(libver))
    path = tmp_path / "x.h5"
    path.write_bytes(data.draw(damaged(seed.read_bytes())))
    check(path, format=data.draw(st.sampled_from([None, "keras-h5"])))


@fuzz(data=st.data())
def test_damaged_archive(tmp_path, data):
    if not (seed := tmp_path / "seed.bin").exists():
        with zipfile.ZipFile(seed, "w") as file:
            file.writestr("metadata.json", "{}", zipfile.ZIP_DEFLATED)
            file.writestr("config.json", '{"class_name": "Sequential"}')
            file.writestr("model.weights.h5", h5_bytes("earliest")[:9000] + bytes(100))
    raw = seed.read_bytes()
    head, tail = raw[:300], raw[-400:]
    which = data.draw(st.sampled_from(["head", "tail", "all"]))
    if which == "head":
        found = data.draw(damaged(head)) + raw[300:]
    elif which == "tail":
        found = raw[:-400] + data.draw(damaged(tail))
    else:
        found = data.draw(damaged(raw))
    path = tmp_path / "x.keras"
    path.write_bytes(found)
    check(path)


@fuzz(data=st.data())
def test_damaged_sharded_index(tmp_path, data):
    if not (shard := tmp_path / "a.weights.h5").exists():
        shard.write_bytes(h5_bytes("earliest"))
    groups = st.sampled_from([f"/layers/dense_{i}/vars" for i in range(3)] + ["/", ""]) | st.text(max_size=5)
    shards = st.sampled_from(["a.weights.h5", "../x", "b.weights.h5"]) | st.lists(st.just("a.weights.h5")) | anything
    weight_map = data.draw(st.dictionaries(groups, shards, max_size=5) | anything)
    document = json.dumps({"weight_map": weight_map, "metadata": data.draw(anything)}).encode()
    path = tmp_path / "m.weights.json"
    path.write_bytes(data.draw(damaged(document)) if data.draw(st.booleans()) else document)
    check(path)
