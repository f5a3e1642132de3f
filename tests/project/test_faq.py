"""What the page of questions promises and no other test shows."""

import subprocess
import sys

import pytest

from shardload.synth import synth

WATCHED = """
import sys

def watch(event, arguments):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto", "socket.sendmsg"):
        raise AssertionError(f"{event}{arguments}")

sys.addaudithook(watch)
import shardload

source, folder = sys.argv[1:]
model = shardload.load(source)
shardload.save(model, f"{folder}/run", step=1)
shardload.restore(model, f"{folder}/run")
shardload.convert(source, f"{folder}/preset", to="preset")
"""


@pytest.mark.slow
def test_files_of_this_machine_are_loaded_saved_and_converted_without_a_connection(tmp_path):
    source = synth("gemma2_2b", format="safetensors", scale=0.02, directory=tmp_path)
    command = [sys.executable, "-c", WATCHED, str(source), str(tmp_path)]
    done = subprocess.run(command, text=True, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "run" / "1").is_dir() and (tmp_path / "preset").is_dir()


def test_the_watch_sees_a_connection():
    code = WATCHED.partition("import shardload")[0] + "import socket; socket.create_connection(('127.0.0.1', 1))"
    done = subprocess.run([sys.executable, "-c", code], text=True, capture_output=True, check=False)
    assert "AssertionError: socket." in done.stderr
