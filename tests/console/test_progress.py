import io
import os
import pty
import subprocess
import sys

import pytest

from shardload import progress

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
    assert "Loading [a] name" in drawn
    assert "1,000/1,000 bytes" in drawn


def test_the_cursor_comes_back():
    drawn = on_a_terminal()
    assert drawn.rindex("\x1b[?25h") > drawn.rindex("\x1b[?25l")


def test_no_progress_draws_nothing():
    assert on_a_terminal("enabled=False") == ""


def test_a_pipe_sees_nothing():
    done = subprocess.run([sys.executable, "-c", LOAD.format(arguments="")], capture_output=True, check=True)
    assert done.stderr == b""


@pytest.mark.parametrize("stderr", [None, io.StringIO()])
def test_without_a_terminal_progress_is_silent(stderr, monkeypatch):
    monkeypatch.setattr(sys, "stderr", stderr)
    with progress.on_stderr() as shown:
        assert isinstance(shown, progress.Silent)


def test_silence_takes_every_call():
    silent = progress.Silent()
    silent.start(0, "nothing")
    silent.advance(5)
    silent.stop()


def test_a_bar_takes_calls_in_any_order():
    bar = progress.TerminalProgress()
    bar.advance(1)
    bar.stop()
