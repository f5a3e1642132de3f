"""The pages in a real browser, at two widths, in light and dark: `make browser` runs this."""

import json
import subprocess
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from object_server import ObjectServer
from safetensors.numpy import save_file
from serving import served

from shardload.synth import synth

VISIT = Path(__file__).parents[1] / "support" / "page_visit.py"
TOKEN = "a-token-of-this-server"


def hole(path, n_bytes):
    """A checkpoint that takes very long to read, and no space on the disk."""
    header = json.dumps({"x": {"dtype": "U8", "shape": [n_bytes], "data_offsets": [0, n_bytes]}}).encode()
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + n_bytes)


def test_a_person_clicks_through_the_pages(request, tmp_path):
    python = request.config.getoption("--browser")
    if not python:
        pytest.skip("needs --browser: run make browser")
    root, pictures, tokens = tmp_path / "root", tmp_path / "pictures", tmp_path / "tokens"
    pictures.mkdir()
    tokens.write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    synth("gemma2_9b", scale=0.01, directory=root)
    save_file({"x": np.zeros(64 << 20, np.uint8)}, root / "large.safetensors")
    hole(root / "hole.safetensors", 200 << 30)
    for name in ("one", "two", "three", "four"):  # one for each window
        (tmp_path / "bucket" / name).mkdir(parents=True)
        save_file({"x": np.zeros(3 << 20, np.uint8)}, tmp_path / "bucket" / name / "model.safetensors")
    options = ("--root", root, "--token-file", tokens, "--root", "s3://bucket", "--cache", tmp_path / "cache")
    options += ("--cache-size", "1GiB", "--pin", "two", "--peer", "http://127.0.0.1:1")
    with closing(ObjectServer(tmp_path / "bucket")) as bucket, served(*options, env=bucket.environment()) as server:
        paths = ("gemma2_9b-x0.01", pictures, "/large.safetensors", "hole.safetensors")
        command = [python, VISIT, server.address, TOKEN, *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == []
    assert len(list(pictures.iterdir())) == 4 * 12
    print(f"pictures of the pages are in {pictures}")  # noqa: T201 - to be looked at
