"""Run modules of Keras' own tests, from the installed wheel, in a process of their own, with one of our plugins."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import keras

SRC = Path(keras.__file__).parent / "src"


def run(modules: Iterable[str], folder: Path, *, plugin: str) -> dict[str, dict[str, dict]]:
    """What became of each test of modules below `SRC`, by module and name, as the plugin has it."""
    copies = {module: Path(shutil.copy(SRC / module, folder)) for module in modules}
    (folder / "pytest.ini").write_text("[pytest]\n")
    told = {"KERAS_SUITE_RESULTS": str(folder / "results.json")}
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "no:cacheprovider", "-p", plugin]
    done = subprocess.run(
        [*command, *copies.values()], cwd=folder, env=os.environ | told, capture_output=True, text=True, check=False
    )
    assert (folder / "results.json").is_file(), done.stdout + done.stderr
    results = json.loads((folder / "results.json").read_text())
    return {module: results.get(copy.name, {}) for module, copy in copies.items()}
