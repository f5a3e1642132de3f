"""The densest headers there can be cost no more memory than `fuzzing.Format` says; damaged small ones never show it."""

import struct
import sys

import h5py
import numpy as np
import pytest
from fuzzing import RESIDENT_FLOOR_BYTES, Child, Format, check

from shardload.loaders import open_manifest

HEADER_FACTOR, LIBHDF5_KEEPS_BYTES = 18, 16 << 20
"""libhdf5 takes 5 KB for an object header of 300 bytes and keeps what is freed, up to 16 MiB, for the next ones."""
NAMES = [b"%x" % i for i in range(1 << 16)]
KEYS = {
    b"llama.attention.head_count": struct.pack("<II", 4, 2),
    b"llama.embedding_length": struct.pack("<II", 4, 32),
    b"llama.feed_forward_length": struct.pack("<II", 4, 64),
    b"llama.block_count": struct.pack("<II", 4, 1),
    b"llama.attention.layer_norm_rms_epsilon": struct.pack("<If", 6, 1e-5),
    b"general.architecture": struct.pack("<IQ", 8, 5) + b"llama",
}


def safetensors(entries):
    header = b"{" + entries + b"}"
    return struct.pack("<Q", len(header)) + header


def gguf(pairs, tensors=()):
    entries = KEYS | dict(pairs)
    raw = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors) + 1, len(entries))
    raw += b"".join(struct.pack("<Q", len(key)) + key + value for key, value in entries.items())
    raw += struct.pack("<Q", 17) + b"token_embd.weight" + struct.pack("<IQQIQ", 2, 0, 8, 0, 0)
    return raw + b"".join(struct.pack("<Q", len(name)) + name + rest for name, rest in tensors) + bytes(64)


ENTRY = b'"%s":{"dtype":"U8","shape":[%s],"data_offsets":[0,0]}'
SAFETENSORS = {
    "tensors": lambda: b",".join(ENTRY % (name, b"0") for name in NAMES[:20000]),
    "dims": lambda: b",".join(ENTRY % (name, b"0" + b",999" * 31) for name in NAMES[:5000]),
    "metadata": lambda: b'"__metadata__":{' + b",".join(b'"%s":""' % name for name in NAMES) + b"}",
    "wide text": lambda: b'"__metadata__":{"a":"' + b"x" * 1000000 + '\U0001f600"}'.encode(),
}
GGUF = {
    "keys": lambda: gguf((name, struct.pack("<IB", 0, 200)) for name in NAMES[:30000]),
    "small numbers": lambda: gguf((name, struct.pack("<IIQ", 9, 1, 1024) + b"\x80" * 1024) for name in NAMES[:500]),
    "strings": lambda: gguf(
        (name, struct.pack("<IIQ", 9, 8, 1024) + struct.pack("<Q2s", 2, b"ab") * 1024) for name in NAMES[:100]
    ),
    "vocabulary": lambda: gguf([(b"k", struct.pack("<IIQ", 9, 8, 300000) + struct.pack("<Q2s", 2, b"ab") * 300000)]),
    "tensors": lambda: gguf([], [(b"blk.%d.ffn_up.bias" % i, struct.pack("<IQIQ", 1, 0, 0, 0)) for i in range(20000)]),
    "arrays of arrays": lambda: gguf(
        [(b"k", struct.pack("<IIQ", 9, 9, 20000) + (struct.pack("<IQ", 1, 20) + b"\x80" * 20) * 20000)]
    ),
    "arrays of empty arrays": lambda: gguf(
        {
            b"k": struct.pack("<IIQ", 9, 9, 8000) + struct.pack("<IQ", 1, 0) * 8000,
            b"l": struct.pack("<IIQ", 9, 1, 160000) + bytes(160000),  # more arrays than that are refused
        }
    ),
    "no model": lambda: gguf([], [(b"v.%d.ffn_up.bias" % i, struct.pack("<IQIQ", 1, 0, 0, 0)) for i in range(20000)]),
    "at last no model": lambda: gguf(
        [],
        [(b"blk.%d.ffn_up.bias" % i, struct.pack("<IQIQ", 1, 0, 0, 0)) for i in range(20000)]
        + [(b"v.ffn_up.bias", struct.pack("<IQIQ", 1, 0, 0, 0))],
    ),
    "quantised": lambda: gguf([], [(b"blk.%d.ffn_up.bias" % i, struct.pack("<IQIQ", 1, 0, 8, 0)) for i in range(9000)]),
}
JSON = {
    "lists": b"[],",
    "objects": b"{},",
    "nested": b'{"":{"":0}},',
    "just not too dense": b'{"abcdefghi":-9},',
    "numbers in lists": b"[-9,-9,-9,-9,-9],",
    "numbers": b"-9,",
    "floats": b"1e1,",
    "strings": b'"ab",',
}
"""Repeated to a megabyte; the first three are refused before they are parsed."""


@pytest.mark.slow
@pytest.mark.parametrize("what", SAFETENSORS)
def test_safetensors(what, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(safetensors(SAFETENSORS[what]()))
    check(tmp_path / "x.safetensors", factor=Format.SAFETENSORS)


@pytest.mark.slow
@pytest.mark.parametrize("what", GGUF)
def test_gguf(what, tmp_path):
    (tmp_path / "x.gguf").write_bytes(GGUF[what]())
    assert check(tmp_path / "x.gguf", factor=Format.GGUF)


@pytest.mark.slow
@pytest.mark.parametrize("what", JSON)
def test_json(what, tmp_path):
    index = tmp_path / "m.safetensors.index.json"
    index.write_bytes(b'{"weight_map":[' + JSON[what] * (1000000 // len(JSON[what])) + b"0]}")
    check(index, factor=Format.JSON)


def test_json_keys(tmp_path):
    index = tmp_path / "m.safetensors.index.json"
    index.write_bytes(b'{"weight_map":{' + b",".join(b'"%s":"a"' % name for name in NAMES) + b"}}")
    check(index, factor=Format.JSON)


LONGER = {
    "x.safetensors": lambda n: safetensors(b",".join(ENTRY % (name, b"0") for name in NAMES[:n])),
    "x.gguf": lambda n: gguf([], [(b"blk.%d.ffn_up.bias" % i, struct.pack("<IQIQ", 1, 0, 0, 0)) for i in range(n)]),
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
