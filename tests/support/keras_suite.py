"""Run a module of Keras' own tests, from the installed wheel, in a process of its own, with one of our plugins."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import keras

SRC = Path(keras.__file__).parent / "src"


def run(module: str, folder: Path, *, plugin: str) -> dict[str, dict]:
    """What became of each test of a module below `SRC`, by its name, as the plugin has it."""
    copy = shutil.copy(SRC / module, folder)
    (folder / "pytest.ini").write_text("[pytest]\n")
    told = {"KERAS_SUITE_RESULTS": str(folder / "results.json")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-W",
        "ignore",
        "-p",
        "no:cacheprovider",
        "-p",
        plugin,
    ]
    done = subprocess.run(
        [*command, copy], cwd=folder, env=os.environ | told, capture_output=True, text=True, check=False
    )
    assert (folder / "results.json").is_file(), done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())
