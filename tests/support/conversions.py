"""Presets of small families in every format, and conversions as processes of their own."""

import time
from pathlib import Path

import warm_start

import shardload
from shardload.comparing import diff
from shardload.transfer.read_tensor import read_tensor

FAMILIES = ("gemma_2b", "gemma2_9b", "gemma3_1b", "llama3.2_1b")
FORMATS = ("h5", "safetensors", "orbax")
ROOT = Path(__file__).parents[2]


def held(path):
    manifest = shardload.inspect(path)
    return {name: read_tensor(manifest, name) for name in manifest.tensors}


def same(first, second):
    found = diff(first, second)
    return not found.differences and found.equal > 10


def killed(source, target, to, *, done=1, name="", meanwhile=lambda: None):
    """Convert in a process that is killed once it has done tensors with such names; returns its journal."""
    child = warm_start.start(["-m", "convert_child", source, target, to, "0.2"], cwd=ROOT)
    journal, end = target.with_name(f".{target.name}.converting") / "journal.jsonl", time.monotonic() + 90
    while not journal.exists() or sum(name in line for line in lines_done(journal)) < done:
        assert child.poll() is None, "the conversion ended before it could be killed"
        assert time.monotonic() < end
        time.sleep(0.05)
    meanwhile()
    child.kill()
    child.wait()
    return journal


def lines_done(journal):
    return [line for line in journal.read_text().split("\n")[:-1] if '"done"' in line]
