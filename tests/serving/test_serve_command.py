"""`shardload serve` as an operator runs it: what it refuses, says, and does at the end."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import eventually, served


@pytest.fixture
def root(tmp_path):
    (tmp_path / "models").mkdir()
    save_file({"x": np.zeros(24 << 20, np.float32)}, tmp_path / "models" / "model.safetensors")
    return tmp_path / "models"


def refused(*options):
    """The message of a server that does not start."""
    command = [sys.executable, "-m", "shardload", "serve", *map(str, options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode in (1, 2) and done.stdout == "" and "Traceback" not in done.stderr
    return done.stderr


def test_what_is_said_at_the_beginning(root, tmp_path):
    (root / "x.json").symlink_to(tmp_path)
    with served("--root", root) as server:
        assert re.fullmatch(r"1 checkpoint, 96\.0 MiB at http://127\.0\.0\.1:\d+\n", server.told)
        assert server.end() == 0
        assert "x.json is not served: it is a link to" in server.log[0]


def test_names_that_the_server_needs_are_told_at_the_start_and_when_they_come(tmp_path):
    for name in ("one", "two", "ui"):
        (tmp_path / name).mkdir()
        save_file({"x": np.zeros(4)}, tmp_path / name / "model.safetensors")
    with served("--root", tmp_path) as server:
        assert len(json.loads(server.get("/api/v1/checkpoints")[2])["checkpoints"]) == 2
        shutil.copytree(tmp_path / "ui", tmp_path / "metrics")
        eventually(
            lambda: server.get("/metrics/model.safetensors")[0] == 404 and any("'metrics'" in x for x in server.log)
        )
        for _ in range(3):
            server.get("/another/")
        assert server.end() == 0
    told = [line for line in server.log if "is not served" in line]
    assert [re.search(r"/(\w+) is not served", line)[1] for line in told] == ["ui", "metrics"]
    assert all("it is the server's own. Rename it" in line for line in told)


def test_roots_and_addresses_that_cannot_be(root, tmp_path):
    assert "name at least one folder" in refused()
    assert "--root takes a folder" in refused("--root", tmp_path / "missing")
    assert "expected HOST:PORT" in refused("--root", root, "--listen", "8600")
    assert "--listen takes another address" in refused(
        "--root", root, "--listen", "192.0.2.1:0", "--token-file", tokens(tmp_path)
    )
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "Address already in use" in refused("--root", root, "--listen", f"127.0.0.1:{taken.getsockname()[1]}")


def tokens(folder, text="a-token-of-this-server\n", mode=0o600):
    (folder / "tokens").write_text(text)
    (folder / "tokens").chmod(mode)
    return folder / "tokens"


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]"])
def test_other_machines_need_a_token(root, host):
    assert "without a token" in refused("--root", root, "--listen", f"{host}:0")


@pytest.mark.parametrize(
    ("text", "mode", "message"),
    [
        ("a-token-of-this-server", 0o644, "chmod 600"),
        ("short", 0o600, "Cannot use line 1 of"),
        ("# none\n", 0o600, "contains no token"),
        ("a-token-of-this-server\ntwo words are no token", 0o600, "Cannot use line 2 of"),
    ],
)
def test_files_of_tokens(root, tmp_path, text, mode, message):
    found = refused("--root", root, "--token-file", tokens(tmp_path, text, mode))
    assert message in found and "a-token" not in found and "words" not in found


def test_a_file_of_tokens_that_is_not_there(root, tmp_path):
    found = refused("--root", root, "--token-file", tmp_path / "none")
    assert f"There is no file {tmp_path / 'none'}. Check the path, or create it" in found
    assert "download" not in found


def test_certificates(root, tmp_path):
    (tmp_path / "cert.pem").write_text("no certificate")
    found = refused("--root", root, "--tls-cert", tmp_path / "cert.pem")
    assert "Cannot use the certificate" in found and "PEM" in found
    assert "without --tls-cert" in refused("--root", root, "--tls-key", tmp_path / "cert.pem")


def test_what_is_being_sent_at_the_end_is_finished(root):
    with served("--root", root) as server:
        with asking(server) as asked:
            found = len(asked.recv(1 << 16))
            server.process.send_signal(signal.SIGTERM)
            with pytest.raises(ConnectionError):
                for _ in range(1000):
                    socket.create_connection(asked.getpeername(), timeout=5).close()
                    time.sleep(0.02)
            assert server.process.poll() is None
            while part := asked.recv(1 << 20):
                found += len(part)
        assert found > (root / "model.safetensors").stat().st_size
        assert server.process.wait(timeout=30) == 0


def test_a_client_that_takes_nothing_is_not_waited_for_longer_than_said(root):
    with served("--root", root, "--grace", 1) as server, asking(server) as asked:
        assert asked.recv(1)
        assert server.end() == 0


def asking(server):
    host, _, port = server.place.rpartition(":")
    asked = socket.create_connection((host, int(port)), timeout=30)
    asked.sendall(b"GET /models/model.safetensors HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    return asked


def test_a_log_whose_reader_left_ends_no_server(root):
    with served("--root", root, reads_log=False) as server:
        for _ in range(3):
            assert server.get("/")[0] == 200
        assert server.process.poll() is None
