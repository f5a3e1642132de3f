"""What the shell offers after TAB, through the protocol and through bash itself."""

import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from cli_fakes import COMMAND, environment, run

from shardload import resolve, synth
from shardload.cli import main
from shardload.loaders import registry
from shardload.stores.range_files import CachedObject, CacheFolder


@pytest.fixture
def complete(capfd, monkeypatch):
    """What bash is offered at the end of a line."""

    def call(line: str) -> list[str]:
        monkeypatch.setenv("_SHARDLOAD_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", line)
        monkeypatch.setenv("COMP_CWORD", str(line.count(" ")))
        main([])
        out, err = capfd.readouterr()
        assert err == ""
        return out.split()

    return call


@pytest.mark.parametrize(("shell", "line"), [("bash", "complete -o"), ("zsh", "#compdef shardload"), ("fish", "-c")])
@pytest.mark.parametrize("form", ["--show-completion {}", "--show-completion={}"])
def test_each_shell_that_is_named_gets_its_script(shell, line, form, capfd):
    assert main(form.format(shell).split()) == 0
    out = capfd.readouterr().out
    assert f"_SHARDLOAD_COMPLETE=complete_{shell}" in out and line in out


def test_another_shell_is_refused(capfd):
    assert main(["--show-completion", "tcsh"]) == 2
    assert "Supported shells: bash, zsh, fish" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shardload pl", ["plan"]), ("shardload load --lay", ["--layout"]),
        ("shardload load x --mesh 2", ["2x2", "2x4", "2x8"]),
        ("shardload load x --layout ", ["auto", "replicated", "keras_hub", "search"]),
        ("shardload plan x --layout s", ["search"]), ("shardload plan x --train a", ["adam", "adamw", "adafactor"]),
        ("shardload plan x --dtype b", ["bfloat16"]), ("shardload synth gemma2_7", ["gemma2_7b"]),
        ("shardload load gemma2_9", ["gemma2_9b"]), ("shardload inspect ./no-such", []),
    ],
)  # fmt: skip
def test_offers(line, offered, complete):
    assert complete(line) == offered


def published(prefix: str) -> list[str]:
    """The names of published models that begin so, and their other names, in the order of the families."""
    known = [name for model in synth.names() for name in (model.name, *model.aliases)]
    return [name for name in known if name.startswith(prefix)]


def test_checkpoints_in_the_root_are_offered(tmp_path, complete, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path))
    (tmp_path / "mine.weights.h5").touch()
    (tmp_path / "my_folder").mkdir()
    (tmp_path / "my_notes.txt").touch()
    (tmp_path / ".hidden").mkdir()
    assert complete("shardload load m") == ["mine", "my_folder", *published("m")]


def test_formats_of_other_packages_are_not_imported(tmp_path, complete, monkeypatch):
    point = SimpleNamespace(name="npz", value="no_such_package:SPEC", load=lambda: pytest.fail("was imported"))
    monkeypatch.setattr(registry, "announced", lambda: {"npz": point})
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path))
    (tmp_path / "mine.weights.h5").touch()
    assert complete("shardload load m") == ["mine", *published("m")]


def test_a_root_that_cannot_be_read_does_not_disturb_the_prompt(complete, monkeypatch):
    monkeypatch.setattr(resolve, "root", Mock(side_effect=PermissionError("no")))
    assert complete("shardload load m") == []


@pytest.mark.slow
def test_completing_imports_nothing_heavy():
    code = (
        "import atexit, sys\n"
        "heavy = {'jax', 'keras', 'keras_hub', 'h5py', 'tensorstore'}\n"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules)), file=sys.stderr))\n"
        "from shardload.cli import main\nsys.exit(main([]))"
    )
    line = {"_SHARDLOAD_COMPLETE": "complete_bash", "COMP_WORDS": "shardload load gem", "COMP_CWORD": "2"}
    done = run((sys.executable, "-c", code), **line)
    assert "gemma2_9b" in done.stdout and done.stderr == "[]\n"


@pytest.mark.slow
def test_bash_itself_completes(tmp_path):
    """The script `--show-completion` prints, sourced by bash, with a `shardload` on its PATH."""
    launcher = tmp_path / "shardload"
    launcher.write_text(f'#!/bin/bash\nexec {COMMAND[0]} {COMMAND[1]} "{COMMAND[2]}" "$@"\n')
    launcher.chmod(0o755)
    script = (
        "source <(shardload --show-completion bash); COMP_WORDS=(shardload load x --mesh 8); COMP_CWORD=4; "
        '$(complete -p shardload | sed -E "s/.*-F ([^ ]+).*/\\1/") shardload 8 --mesh; echo "${COMPREPLY[@]}"'
    )
    done = run(("bash", "-c", script), PATH=f"{tmp_path}:{environment()['PATH']}")
    assert (done.stdout, done.stderr) == ("8x1\n", "")


@pytest.mark.slow
def test_installing_writes_into_the_home_it_was_given(tmp_path):
    done = run((*COMMAND, "--install-completion", "bash"), HOME=str(tmp_path))
    assert done.code == 0 and "completion installed in" in done.stdout
    assert (tmp_path / ".bashrc").read_text()


def test_addresses_in_the_cache_are_completed(complete, tmp_path):
    folder = CacheFolder(tmp_path)
    folder.write(CachedObject("s3://bucket/a.safetensors", "etag a", 4), 0, memoryview(b"data"))
    assert complete(f"shardload cache clear --cache {tmp_path} ") == ["s3://bucket/a.safetensors"]
    assert complete(f"shardload cache clear --cache {tmp_path}/none ") == []
