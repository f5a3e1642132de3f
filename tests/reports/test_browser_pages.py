"""The pages of `--html` in a real browser, at two widths, in light and dark: `make browser` runs this."""

import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
from cli_fakes import shardload
from safetensors.numpy import save_file

VISIT = Path(__file__).parents[1] / "support" / "report_visit.py"
NAME = "gemma2_2b-x0.02"
SIZES = (1, np.inf, np.nan, 3, np.inf, 2, np.nan)


def written(file, code, *arguments, root):
    done = shardload(*arguments, "--html", str(file), "--json", SHARDLOAD_HOME=str(root))
    assert done.code == code, done.stderr
    return done.json


def not_finite_pair(folder):
    """Write two checkpoints, and return their paths: differences of NaN, infinity and numbers, and one without any."""
    for path, values in ((folder / "zeros.safetensors", [0] * len(SIZES)), (folder / "sizes.safetensors", SIZES)):
        layers = {f"layers.{i // 4}.query_{i}": np.float32([value, 0]) for i, value in enumerate(values)}
        save_file({**layers, path.stem: np.zeros(1)}, path)
        yield str(path)


def test_a_person_uses_the_pages_of_four_commands(request, tmp_path):
    python = request.config.getoption("--browser")
    if not python:
        pytest.skip("needs --browser: run make browser")
    root, pictures = tmp_path / "root", tmp_path / "pictures"
    pictures.mkdir()
    for seed, where in (("0", root), ("1", root / "other")):
        done = shardload("synth", "gemma2_2b", "--scale", "0.02", "--seed", seed, "--directory", str(where))
        assert done.code == 0, done.stderr
    files = [tmp_path / f"{name}.html" for name in ("load", "plan", "inspect", "diff", "not-finite")]
    load, plan, inspect, diff, not_finite = files
    other = str(root / "other" / NAME)
    loaded = written(load, 0, "load", NAME, "--mesh", "1x8", "--platform", "cpu", root=root)
    planned = written(plan, 0, "plan", NAME, "--mesh", "2x4", "--device-memory", "16GiB", root=root)
    stored = written(inspect, 0, "inspect", NAME, root=root)
    differing = written(diff, 1, "diff", NAME, other, root=root)
    written(not_finite, 1, "diff", *not_finite_pair(tmp_path), root=root)
    layers = sum("query" in each["name"] for each in loaded["layout"]["variables"])
    assert layers == sum("query" in each["name"] for each in planned["layout"]["variables"]) > 1
    counts = [sum("query" in each["name"] for each in found) for found in (stored["tensors"], differing["differences"])]
    headings = ("On each device", "On each device", "Bytes", "Elements", "Largest difference")
    visits = zip(files, headings, (layers, layers, *counts, len(SIZES)), strict=True)
    command = [python, VISIT, pictures, *(json.dumps([str(file), head, "query", n]) for file, head, n in visits)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == []
    assert len(list(pictures.iterdir())) == 5 * 4 * 4
    print(f"pictures of the pages are in {pictures}")  # noqa: T201 - to be looked at
