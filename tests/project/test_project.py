"""The project around the package: its version, its links, its make targets."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from packaging.requirements import Requirement

import shardload

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split())
WORKFLOWS = {path.stem: yaml.safe_load(path.read_text()) for path in (ROOT / ".github/workflows").glob("*.yml")}
FORMS = sorted(path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.stem != "config")


def test_the_version_is_that_of_pyproject():
    assert shardload.__version__ == PROJECT["version"] and "__version__" in dir(shardload)


def test_a_source_tree_that_is_not_installed_has_an_unknown_version(monkeypatch):
    monkeypatch.setattr(metadata, "version", Mock(side_effect=metadata.PackageNotFoundError("shardload")))
    assert shardload.__version__ == "0+unknown"


def test_the_version_is_looked_up_on_first_use():
    code = "import shardload, sys; assert 'importlib.metadata' not in sys.modules; print(shardload.__version__)"
    subprocess.run([sys.executable, "-S", "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)


@pytest.mark.parametrize("link", ["Homepage", "Documentation", "Changelog", "Issues"])
def test_the_package_links_to_its_project(link):
    assert PROJECT["urls"][link].startswith("https://github.com/shardload/shardload")


def test_make_help_describes_every_target():
    # `make test` sets MAKEFLAGS and MAKELEVEL.
    outside = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    shown = subprocess.run(["make", "help"], capture_output=True, text=True, cwd=ROOT, check=True, env=outside).stdout
    assert {line.split(maxsplit=1)[0] for line in shown.splitlines()} == TARGETS
    assert all(len(line.split()) > 1 for line in shown.splitlines())


def steps(workflow):
    return [step for job in workflow["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_only_runs_make_with_targets_that_exist(name):
    commands = [step["run"] for step in steps(WORKFLOWS[name]) if "run" in step]
    assert commands
    for command in commands:
        program, *targets = command.split()
        assert program == "make" and targets and set(targets) <= TARGETS, command


@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_may_only_read_and_ends(name):
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    assert all("timeout-minutes" in job for job in WORKFLOWS[name]["jobs"].values())
    assert all("@" in step["uses"] for step in steps(WORKFLOWS[name]) if "uses" in step)


def test_the_tests_run_on_the_oldest_python_that_is_allowed():
    jobs = WORKFLOWS["ci"]["jobs"]
    [oldest] = {s["with"]["python-version"] for s in jobs["test"]["steps"] if "setup-python" in s.get("uses", "")}
    assert [oldest, *jobs["sample"]["strategy"]["matrix"]["python"]] == ["3.11", "3.12", "3.13"]
    assert PROJECT["requires-python"] == f">={oldest}"
    assert jobs["test"]["strategy"]["matrix"]["part"] == [1, 2, 3, 4]
    assert {step["env"]["PART"] for step in jobs["test"]["steps"] if "env" in step} == {"${{ matrix.part }}/4"}


@pytest.mark.parametrize("name", ["newest", "nightly"])
def test_slow_workflows_have_a_schedule(name):
    assert WORKFLOWS[name][True]["schedule"]  # YAML reads the key "on" as a boolean


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_asks_for_what_is_needed(form):
    body = yaml.safe_load(form.read_text())["body"]
    fields = [field for field in body if field["type"] != "markdown"]
    assert any(field.get("validations", {}).get("required") for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)


def test_pre_commit_runs_the_tools_of_make_lint_and_make_types():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    tools = [f".venv/bin/{tool}" for tool in ("ruff", "ruff", "actionlint", "mypy")]
    assert [hook["entry"].split()[0] for hook in hooks] == tools


def program(path, *lines):
    path.parent.mkdir(exist_ok=True)
    path.write_text("\n".join(["#!/bin/sh", *lines]))
    path.chmod(0o755)


def newest_python(tmp_path):
    path = os.pathsep.join([str(tmp_path / "bin"), "/usr/bin", "/bin"])
    command = [ROOT / ".ci/newest-python"]
    return subprocess.run(command, env={"PATH": path}, capture_output=True, text=True, check=False).stdout.strip()


def test_the_newest_python_is_one_that_runs(tmp_path):
    program(tmp_path / "bin/python3.13", "echo pyenv: command not found >&2", "exit 127")
    program(tmp_path / "bin/python3.12", "echo 3.12")
    assert newest_python(tmp_path) == "3.12"
    program(tmp_path / "bin/python3.13", "echo 3.13")
    assert newest_python(tmp_path) == "3.13"


def test_the_newest_python_may_be_one_that_pyenv_has_not_selected(tmp_path):
    program(tmp_path / "bin/pyenv", 'test "$1 $2" = "whence python3.13" && echo 3.13.0')
    program(tmp_path / "bin/python3.13", 'test "$PYENV_VERSION" = 3.13.0 && echo 3.13')
    program(tmp_path / "bin/python3.12", "echo 3.12")
    assert newest_python(tmp_path) == "3.13"


def test_the_newest_dependencies_are_all_there_is_without_upper_bounds():
    command = [sys.executable, ROOT / ".ci/without-upper-bounds"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    extras = [line for name, lines in PROJECT["optional-dependencies"].items() if name != "docs" for line in lines]
    required = {Requirement(line).name for line in [*PROJECT["dependencies"], *extras]} - {PROJECT["name"]}
    assert {Requirement(line).name for line in shown} == required
    assert {bound.operator for line in shown for bound in Requirement(line).specifier} == {">=", "=="}


def test_the_sample_for_the_newest_dependencies_names_tests_that_exist():
    sample = re.search(r"^SAMPLE := ((?:.*\\\n)*.*)$", MAKEFILE, re.MULTILINE)[1].replace("\\\n", " ")
    for test in shlex.split(sample):
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}" in (ROOT / file).read_text(), test
