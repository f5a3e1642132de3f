import io
import json
import os
import pty
import subprocess
import sys
import time

import numpy as np
import pytest
from cli_fakes import install, loads
from progress_calls import Counted
from safetensors.numpy import save_file

from shardload import progress
from shardload.cli import main
from shardload.comparing import diff
from shardload.console.app import command
from shardload.verifying import verify

LOAD = """
from shardload import progress
with progress.on_stderr({arguments}) as bar:
    bar.start(1000, "Loading [a] name")
    for _ in range(10):
        bar.advance(100)
    bar.stop()
"""


def on_a_terminal(arguments: str = "") -> str:
    """What a load with progress draws on a pseudo-terminal."""
    leader, follower = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", LOAD.format(arguments=arguments)], stderr=follower) as process:
        os.close(follower)
        drawn = b""
        try:
            while chunk := os.read(leader, 1 << 16):
                drawn += chunk
        except OSError:  # EIO: the other side is closed
            pass
        assert process.wait(timeout=60) == 0
    os.close(leader)
    return drawn.decode()


def test_a_terminal_sees_bytes_and_the_name_as_it_is():
    drawn = on_a_terminal()
    assert "Loading [a] name" in drawn and "1,000/1,000 bytes" in drawn


def test_the_cursor_comes_back():
    drawn = on_a_terminal()
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_no_progress_draws_nothing():
    assert on_a_terminal("enabled=False") == ""


def test_a_pipe_sees_nothing_of_a_short_load():
    done = subprocess.run([sys.executable, "-c", LOAD.format(arguments="")], capture_output=True, check=True)
    assert done.stderr == b""


def test_without_stderr_progress_is_silent(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    with progress.on_stderr() as shown:
        assert isinstance(shown, progress.Silent)


@pytest.mark.parametrize(("wanted", "kind"), [(True, "lines"), ("bar", "bar"), ("lines", "lines"), ("json", "lines")])
def test_in_python_true_is_what_suits_stderr(wanted, kind, monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    kinds = {"lines": progress.LineProgress, "bar": progress.TerminalProgress}
    assert isinstance(progress.as_progress(wanted), kinds[kind])


class Lines:
    """Lines in a log, at times that the test sets."""

    def __init__(self, monkeypatch, **options):
        self.now, self.log = 100.0, io.StringIO()
        monkeypatch.setattr(sys, "stderr", self.log)
        self.shown = progress.LineProgress(every_s=3600, clock=lambda: self.now, **options)

    def after(self, seconds):
        """The line that is written after so many seconds."""
        self.now += seconds
        self.shown.write()
        return self.log.getvalue().splitlines()[-1]


def test_a_line_says_stage_bytes_rate_and_time_left(monkeypatch):
    lines = Lines(monkeypatch)
    lines.shown.start(0, "Preparing \x1b[31mx")
    assert lines.after(20) == "Preparing \\x1b[31mx: 20.00 s so far"
    lines.shown.start(0, "Preparing https://me:secret@host/run")
    assert lines.after(20) == "Preparing https://…@host/run: 20.00 s so far"
    lines.shown.start(10 << 30, "Loading x")
    assert lines.after(10) == "Loading x: 0 B of 10.0 GiB, 10.00 s so far"
    lines.shown.advance(1 << 30)
    lines.shown.advance(1 << 30)
    assert lines.after(10) == "Loading x: 2.0 GiB of 10.0 GiB, 0.21 GB/s, 40.00 s left"
    # The rate is that since the last line.
    lines.shown.advance(4 << 30)
    assert lines.after(10) == "Loading x: 6.0 GiB of 10.0 GiB, 0.43 GB/s, 10.00 s left"
    assert lines.after(10) == "Loading x: 6.0 GiB of 10.0 GiB, 0 MB/s"
    lines.shown.start(0, "Comparing")
    lines.shown.advance(1 << 20)
    assert lines.after(1) == "Comparing: 1.0 MiB, 1.05 MB/s"


def test_a_line_for_machines_has_the_same_facts(monkeypatch):
    lines = Lines(monkeypatch, as_json=True)
    lines.shown.start(1000, "Loading x")
    lines.shown.advance(100)
    rate = {"bytes_per_s": 10, "left_s": 90.0, "elapsed_s": 10.0}
    told = {"stage": "Loading x", "bytes": 100, "total_bytes": 1000, **rate}
    assert json.loads(lines.after(10)) == {"progress": told}
    lines.shown.start(0, "Preparing x")
    assert json.loads(lines.after(5))["progress"]["total_bytes"] is None


def test_after_the_end_there_are_no_lines(monkeypatch):
    lines = Lines(monkeypatch)
    lines.shown.start(0, "Loading x")
    assert lines.after(10)
    lines.shown.stop()
    lines.shown.stop()
    lines.shown.write()
    assert len(lines.log.getvalue().splitlines()) == 1


def test_a_log_that_cannot_be_written_stops_no_load(monkeypatch):
    lines = Lines(monkeypatch)
    lines.log.close()
    lines.shown.start(0, "Loading x")
    lines.shown.write()


@pytest.fixture
def slow_load(capfd, monkeypatch):
    """Run `shardload load` with an engine that takes several intervals without a call."""

    def slow(source, *, progress, **options):
        progress.start(1000, f"Loading {source}")
        time.sleep(0.2)
        return loads(source)

    install(monkeypatch).load = slow
    monkeypatch.setattr(progress, "INTERVAL_S", 0.05)

    def call(*arguments):
        assert main(["load", "x", "--mesh", "1x1", "--platform", "cpu", "--json", *arguments]) == 0
        out, err = capfd.readouterr()
        assert json.loads(out)["format"] == "gguf"
        return err.splitlines()

    return call


def test_a_command_writes_lines_while_nothing_is_read(slow_load):
    lines = slow_load()
    assert len(lines) >= 2 and all(line.startswith("Loading x: 0 B of 1000 B, ") for line in lines)


def test_a_command_writes_objects_for_machines(slow_load):
    lines = [json.loads(line)["progress"] for line in slow_load("--log-json")]
    assert len(lines) >= 2 and {line["stage"] for line in lines} == {"Loading x"}


@pytest.mark.parametrize("more", [(), ("--log-json",)])
def test_without_progress_a_command_is_silent(more, slow_load):
    assert slow_load("--no-progress", *more) == []


def test_every_command_with_progress_has_it_for_machines_too():
    named = {name: {option for p in one.params for option in p.opts} for name, one in command().commands.items()}
    with_progress = {name for name, found in named.items() if "--no-progress" in found}
    logs_requests = {"serve"}
    assert with_progress == {name for name, found in named.items() if "--log-json" in found} - logs_requests
    assert with_progress == {"load", "plan", "synth", "verify", "diff", "convert"}


def test_verify_and_diff_say_how_much_there_is(tmp_path):
    path, counted = tmp_path / "model.safetensors", Counted()
    save_file({"a": np.zeros((1000, 10), "float32"), "b": np.zeros(5, "uint8")}, path)
    verify(path, progress=counted)
    assert (counted.stages, counted.ended) == ([[f"Verifying {path}", 40_005, 40_005]], True)
    diff(path, path, progress=counted)
    assert (counted.stages[-1], counted.ended) == (["Comparing", 40_005, 40_005], True)


def test_silence_takes_every_call():
    silent = progress.Silent()
    silent.start(0, "nothing")
    silent.advance(5)
    silent.stop()


def test_a_bar_takes_calls_in_any_order():
    bar = progress.TerminalProgress()
    bar.advance(1)
    bar.stop()
