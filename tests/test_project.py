"""The project around the package: its version, its links, its make targets."""

import re
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

import shardload

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_the_version_is_that_of_pyproject():
    assert shardload.__version__ == PROJECT["version"]
    assert "__version__" in dir(shardload)


def test_a_source_tree_that_is_not_installed_has_an_unknown_version(monkeypatch):
    def missing(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert shardload.__version__ == "0+unknown"


def test_the_version_is_looked_up_on_first_use():
    code = "import shardload, sys; assert 'importlib.metadata' not in sys.modules; print(shardload.__version__)"
    subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)


@pytest.mark.parametrize("link", ["Homepage", "Documentation", "Changelog", "Issues"])
def test_the_package_links_to_its_project(link):
    assert PROJECT["urls"][link].startswith("https://github.com/shardload/shardload")


def test_make_help_describes_every_target():
    shown = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True).stdout
    declared = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    assert {line.split(maxsplit=1)[0] for line in shown.splitlines()} == set(declared)
    assert all(len(line.split()) > 1 for line in shown.splitlines())
