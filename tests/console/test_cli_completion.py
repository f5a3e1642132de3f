"""What the shell offers after TAB, through the protocol and through bash itself."""

import sys

import pytest
from cli_fakes import COMMAND, environment, run

from shardload import resolve
from shardload.cli import main


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


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_a_script(shell):
    done = run((*COMMAND, "--show-completion", shell), _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert done.code == 0
    assert "_SHARDLOAD_COMPLETE" in done.stdout


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("shardload pl", ["plan"]),
        ("shardload load --lay", ["--layout"]),
        ("shardload load x --mesh 2", ["2x2", "2x4", "2x8"]),
        ("shardload load x --layout ", ["auto", "replicated", "keras_hub", "search"]),
        ("shardload plan x --layout s", ["search"]),
        ("shardload plan x --train a", ["adam", "adamw", "adafactor"]),
        ("shardload plan x --dtype b", ["bfloat16"]),
        ("shardload synth gemma2_7", ["gemma2_7b"]),
        ("shardload load gemma2_9", ["gemma2_9b"]),
        ("shardload inspect ./no-such", []),
    ],
)
def test_offers(line, offered, complete):
    assert complete(line) == offered


def test_checkpoints_in_the_root_are_offered(tmp_path, complete, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path))
    (tmp_path / "mine.weights.h5").touch()
    (tmp_path / "my_folder").mkdir()
    (tmp_path / "my_notes.txt").touch()
    (tmp_path / ".hidden").mkdir()
    assert complete("shardload load m") == ["mine", "my_folder", "mistral_7b"]


def test_a_root_that_cannot_be_read_does_not_disturb_the_prompt(complete, monkeypatch):
    def refuse():
        raise PermissionError("no")

    monkeypatch.setattr(resolve, "root", refuse)
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
    assert "gemma2_9b" in done.stdout
    assert done.stderr == "[]\n"


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
    path = f"{tmp_path}:{environment()['PATH']}"
    done = run(("bash", "-c", script), PATH=path, _TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION="1")
    assert (done.stdout, done.stderr) == ("8x1\n", "")


@pytest.mark.slow
def test_installing_writes_into_the_home_it_was_given(tmp_path):
    home = {"HOME": str(tmp_path), "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = run((*COMMAND, "--install-completion", "bash"), **home)
    assert done.code == 0
    assert "completion installed in" in done.stdout
    assert (tmp_path / ".bashrc").read_text()
