"""The documentation site in a real browser, at two widths, in light and dark: `make browser` runs this."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VISIT = ROOT / "tests" / "support" / "site_visit.py"
PICTURED = [
    "/",
    "/tutorials/load-your-first-model/",
    "/how-to/save-and-restore/",
    "/reference/cli/",
    "/reference/api/load/",
    "/performance/",
    "/how-to/troubleshooting/",
]
SEARCHES = {
    "out of memory": "/how-to/troubleshooting",
    "Slurm": "/how-to/load-on-slurm/",
    "GGUF": "/reference/",
    "resume": "/how-to/",
    "RESOURCE_EXHAUSTED": "/how-to/troubleshooting",
    "no space left": "/how-to/troubleshooting-saving/",
    "unused tensors": "/how-to/troubleshooting-models/",
    "DeepSeek": "/explanation/faq/",
}
"""What people look for → how the address of one of the first three pages found begins."""


def test_a_reader_finds_everything_in_a_browser(request, tmp_path):
    python = request.config.getoption("--browser")
    if not python:
        pytest.skip("needs --browser: run make browser")
    site, pictures = tmp_path / "site", tmp_path / "pictures"
    pictures.mkdir()
    build = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", site]
    subprocess.run(build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, check=True)
    wanted = json.dumps({"pictures": PICTURED, "searches": SEARCHES})
    command = [python, VISIT, site, pictures, wanted]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == []
    assert len(list(pictures.iterdir())) == 4 * len(PICTURED)
    print(f"pictures of the pages are in {pictures}")  # noqa: T201 - to be looked at
