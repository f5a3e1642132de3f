"""Fixtures, and the Hugging Face folders they describe.

A fixture is a folder without its weights, as JSON that a person can read::

    {"written_by": "transformers 5.23.0", "class": "LlamaForCausalLM",
     "json": {"config.json": {…}},
     "files": {"model.safetensors": {"model.norm.weight": "F32 32", "model.embed_tokens.weight": "F32 64x32", …}},
     "copies": {"lm_head.weight": "model.embed_tokens.weight"},    tensors with the bytes of another one
     "exact": {"embeddings.position_ids": [0, 1, 2, …]},           buffers, whose values matter
     "inputs": {"input_ids": [[…], […]]},                          as PyTorch names them
     "outputs": {"logits": {"shape": [2, 12, 64], "scale": 3.1, "sample": [0.12345678, …]}},
     "pytorch": {"missing": [], "unexpected": []}}                 what PyTorch said when it loaded the folder

Weights come from `weights.values`. Fixtures lie in one file per family, ``fixtures/FAMILY.json.gz``.
"""

from __future__ import annotations

import base64
import gzip
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np

from transformers_cross import weights

FIXTURES = Path(__file__).parent / "fixtures"
SAMPLED = 64
"""Numbers kept of an output, at most."""


def sample(array: np.ndarray) -> dict[str, Any]:
    """Numbers of an output, spread over all of it, and its scale: the largest magnitude in it."""
    flat = np.asarray(array, np.float32).ravel()
    kept = [float(f"{x:.8g}") for x in flat[positions(flat.size)]]
    return {"shape": list(array.shape), "scale": float(f"{np.abs(flat).max():.4g}"), "sample": kept}


def positions(size: int) -> np.ndarray:
    """Which numbers of a flattened output are kept."""
    return np.sort(np.random.RandomState(size).permutation(size)[:SAMPLED])


def read_family(family: str, folder: Path = FIXTURES) -> dict[str, Any]:
    """Fixtures by name of the case."""
    found: dict[str, Any] = json.loads(gzip.decompress((folder / f"{family}.json.gz").read_bytes()))
    return found


def write_family(family: str, fixtures: dict[str, Any], folder: Path = FIXTURES) -> None:
    """The same fixtures always make the same bytes."""
    text = "{\n" + ",\n".join(f"{json.dumps(k)}: {json.dumps(fixtures[k])}" for k in sorted(fixtures)) + "\n}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{family}.json.gz").write_bytes(gzip.compress(text.encode(), 9, mtime=0))


def build(fixture: dict[str, Any], folder: Path) -> Path:
    """Write the folder that a fixture describes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in fixture["json"].items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content, indent=2), encoding="utf-8")
    for file, tensors in fixture["files"].items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_safetensors(path, tensors, fixture)
    _write_index(fixture, folder)
    return folder


def _write_index(fixture: dict[str, Any], folder: Path) -> None:
    """The index of all shards, where there are several."""
    shards = {file: tensors for file, tensors in fixture["files"].items() if "-of-" in file}
    if not shards:
        return
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum((folder / file).stat().st_size for file in shards)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")


def _write_safetensors(path: Path, tensors: dict[str, str], fixture: dict[str, Any]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    blobs, end = [], 0
    for name, text in tensors.items():
        dtype, shape = parse(text)
        if (stored := fixture.get("stored", {}).get(name)) is not None:
            blob = base64.b64decode(stored)
        else:
            blob = weights.to_bytes(tensor_values(name, shape, dtype, fixture), dtype)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(blob)]}
        blobs.append(blob)
        end += len(blob)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(blobs))


def tensor_values(name: str, shape: tuple[int, ...], dtype: str, fixture: dict[str, Any]) -> np.ndarray:
    """The values a fixture gives one of its tensors."""
    if (exact := fixture.get("exact", {}).get(name)) is not None:
        return np.broadcast_to(np.asarray(exact), shape) if np.ndim(exact) == 0 else np.reshape(exact, shape)
    drawn_as = fixture.get("copies", {}).get(name, name)
    if dtype in weights.INTEGERS:
        return weights.draw(drawn_as, shape).astype(np.int64) % 120  # as an F8_E4M3 none of them is NaN
    return weights.values(drawn_as, shape)


def parse(text: str) -> tuple[str, tuple[int, ...]]:
    """Dtype and shape of a tensor: ``"F32 64x32"``; a scalar is ``"F32"``."""
    dtype, _, shape = text.partition(" ")
    return dtype, tuple(int(n) for n in shape.split("x")) if shape else ()


def describe(dtype: str, shape: tuple[int, ...] | list[int]) -> str:
    """The text `parse` reads."""
    return f"{dtype} {'x'.join(map(str, shape))}".rstrip()
