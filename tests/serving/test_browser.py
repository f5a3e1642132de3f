"""The pages in a real browser, at two widths, in light and dark: `make browser` runs this."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import served

from shardload.synth import synth

VISIT = Path(__file__).parents[1] / "support" / "page_visit.py"
TOKEN = "a-token-of-this-server"


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
    with served("--root", root, "--token-file", tokens) as server:
        command = [python, VISIT, server.address, TOKEN, "gemma2_9b-x0.01", "/large.safetensors", pictures]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == []
    assert len(list(pictures.iterdir())) == 4 * 8
    print(f"pictures of the pages are in {pictures}")  # noqa: T201 - to be looked at
