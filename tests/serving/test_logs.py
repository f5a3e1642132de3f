"""What a server writes to stderr: a line for each request, error and note, for people or for programs."""

import contextlib
import http.client
import json
import logging
import re
import shutil
import socket
import ssl
import urllib.request
import warnings

import numpy as np
import pytest
from object_server import ObjectServer
from safetensors.numpy import save_file
from serving import eventually, served

from shardload.console.request_log import RequestLog, json_line, text_line
from shardload.serving.limits import LineRate

FILE = "/models/model.safetensors"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "models").mkdir()
    save_file({"x": np.zeros(1 << 10, np.float32)}, tmp_path / "models" / "model.safetensors")
    return tmp_path


def objects(server):
    """The lines of a server that has ended."""
    return [json.loads(line) for line in server.log]


def test_each_line_is_an_object_from_the_first_to_the_last(root):
    shutil.copytree(root / "models", root / "ui")
    with served("--root", root, "--log-json") as server:
        server.get(FILE, Range="bytes=0-9", X_Request_Id="mine")
        assert server.end() == 0
    note, started, asked, stopping, stopped = objects(server)
    assert all(each.pop("unix_s") > 1e9 for each in (note, started, asked, stopping, stopped))
    assert note.pop("level") == "warning" and "ui is not served" in note["note"]
    assert started.pop("version") and started == {"level": "info", "event": "started", "address": server.address}
    assert asked.pop("seconds") >= 0
    assert asked == {
        "level": "info", "request": "mine", "client": "127.0.0.1", "method": "GET", "path": FILE,
        "range": "bytes=0-9", "status": 206, "bytes": 10,
    }  # fmt: skip
    assert stopping == {"level": "info", "event": "stopping", "requests": 0, "grace_s": 30.0}
    assert stopped.pop("seconds") >= 0 and stopped == {"level": "info", "event": "stopped"}


def test_lines_for_people_have_a_date_and_a_zone(root):
    with served("--root", root) as server:
        server.get(FILE)
        assert server.end() == 0
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d \S", line) for line in server.log)
    first, asked, stopping, stopped = (line.partition(" ")[2] for line in server.log)
    assert re.fullmatch(rf"started: shardload \S+ at {server.address}\n", first)
    assert f"GET {FILE}: 200, " in asked
    assert "stopping: " in stopping and re.fullmatch(r"stopped after \d+\.\d s\n", stopped)


@pytest.mark.parametrize("shown", [json_line, text_line])
def test_warnings_and_lines_of_libraries_are_lines_of_the_log(shown, capfd):
    log = RequestLog(shown)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with log.taking_all():
            warnings.warn("the disk is full", RuntimeWarning, stacklevel=1)
            logging.getLogger("asyncio").error("Task failed", exc_info=ValueError("why"))
        log.close()
        assert warnings.showwarning.__module__ == "warnings"
    first, second = capfd.readouterr().err.splitlines()
    if shown is json_line:
        assert [json.loads(line)["level"] for line in (first, second)] == ["warning", "error"]
    assert "the disk is full" in first and "RuntimeWarning" not in first
    assert "asyncio: Task failed" in second and "ValueError: why" in second


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        ({"status": 200}, "info"),
        ({"status": 404}, "info"),
        ({"status": 401}, "warning"),
        ({"status": 200, "problem": "cut off"}, "warning"),
        ({"status": 502}, "error"),
        ({"job": "1", "state": "done", "verdict": "verified"}, "info"),
        ({"job": "1", "state": "done", "verdict": "damaged"}, "error"),
        ({"job": "1", "state": "failed", "problem": "why"}, "error"),
        ({"problem": "cannot look for new checkpoints"}, "warning"),
        ({"problem": "server: it failed", "level": "error"}, "error"),
    ],
)
def test_levels(facts, level, capfd):
    log = RequestLog(json_line)
    log.note(facts)
    log.close()
    assert json.loads(capfd.readouterr().err)["level"] == level


def test_a_request_whose_client_has_left_is_a_line(capfd):
    log = RequestLog(text_line)
    asked = {"request": "r", "method": "GET", "path": "/x", "status": 200, "bytes": 0, "seconds": 0.0}
    log.note(asked)
    log.note({"request": "without its other facts"})  # a fault of the server must not end its log
    log.note({"client": "10.0.0.1"} | asked)
    log.close()
    first, second, third = capfd.readouterr().err.splitlines()
    assert "r - GET /x: 200" in first and "KeyError('method')" in second and "r 10.0.0.1 GET /x: 200" in third


def errors(server, kind, **headers):
    return server.metric(f'shardload_errors_total{{kind="{kind}"}}', **headers)


def test_probes_and_scrapes_are_no_lines_and_lists_tell_their_bytes(root):
    with served("--root", root, "--log-json") as server:
        for path in ("/healthz", "/readyz", "/metrics", "/metrics"):
            assert server.get(path)[0] == 200
        n_bytes = len(server.get("/api/v1/checkpoints")[2])
        assert server.get("/api/v1/checkpoints", method="HEAD")[0] == 200
        n_refused = len(server.get("/nothing")[2])
        server.end()
    asked = [each for each in objects(server) if "request" in each]
    assert [each["bytes"] for each in asked] == [n_bytes, 0, n_refused]
    assert {each["path"] for each in asked} == {"/api/v1/checkpoints", "/nothing"}


def test_wrong_and_missing_tokens_are_counted_and_told_apart(root, tmp_path):
    (tmp_path / "tokens").write_text("a-token-of-this-server")
    (tmp_path / "tokens").chmod(0o600)
    right = {"Authorization": "Bearer a-token-of-this-server"}
    with served("--root", root, "--token-file", tmp_path / "tokens") as server:
        status, headers, body = server.get(FILE, Authorization="Bearer of-another-server")
        assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert body == b"This is not a token of this server.\n"
        for given in ({}, {"Authorization": "Basic YTpi"}):
            assert b"Send a token of this server: Authorization: Bearer" in server.get(FILE, **given)[2]
        assert server.get("/", Accept="text/html")[0] == 401  # a form for it, so no error
        assert server.get("/", Accept="text/html", Authorization="Bearer wrong")[0] == 401
        assert (errors(server, "token", **right), errors(server, "no token", **right)) == (2, 2)


def ask_plainly(server, data):
    host, _, port = server.place.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as asked:
        asked.sendall(data)
        with contextlib.suppress(ConnectionError):
            while asked.recv(1 << 12):
                pass


def test_connections_that_never_speak_tls_are_counted_and_told(root, certificate):
    context = ssl.create_default_context()  # it does not know the authority
    with served("--root", root, *certificate.options) as server:
        for _ in range(3):
            ask_plainly(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        ask_plainly(server, b"\x16\x03\x01\x00\x05hello")
        host, _, port = server.place.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as plain, pytest.raises(ssl.SSLError):
            context.wrap_socket(plain, server_hostname="127.0.0.1")
        trusting = ssl.create_default_context(cafile=certificate.path)

        def counted(kind):
            with urllib.request.urlopen(f"{server.address}/metrics", context=trusting, timeout=30) as answer:
                found = re.search(rf'shardload_errors_total{{kind="{kind}"}} (\S+)', answer.read().decode())
            return found and float(found[1])

        assert eventually(lambda: counted("tls") == 2) and counted("plain http") == 3
        server.end()
    told = [line.partition(" ")[2] for line in server.log if "127.0.0.1 " in line]
    assert [line for line in told if "plain http" in line] == ["127.0.0.1 plain http: it sent http, expected https\n"]
    assert len([line for line in told if "tls: the handshake failed: " in line]) == 1


def test_connections_that_are_too_many_are_counted_and_told(root):
    with served("--root", root, "--max-connections", 2) as server:
        host, _, port = server.place.rpartition(":")
        kept = [socket.create_connection((host, int(port)), timeout=10) for _ in range(2)]
        for _ in range(3):
            assert server.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        for each in kept:
            each.close()
        eventually(lambda: b" 200 OK" in server.raw(b"GET /healthz HTTP/1.0\r\nHost: localhost\r\n\r\n"))
        assert errors(server, "connections") >= 3
        server.end()
    assert len([line for line in server.log if "127.0.0.1 connections: closed at once" in line]) == 1


def test_a_flood_is_one_line_in_ten_seconds():
    now = [100.0]
    lines = LineRate(now=lambda: now[0])
    assert [lines.left_out("tls") for _ in range(4)] == [0, None, None, None]
    assert lines.left_out("connections") == 0
    now[0] += 10
    assert [lines.left_out("tls") for _ in range(2)] == [3, None]


def test_the_line_of_a_request_that_a_source_fails_says_why(tmp_path):
    folder = tmp_path / "bucket" / "models" / "m"
    folder.mkdir(parents=True)
    save_file({"x": np.zeros(9 << 20, np.uint8)}, folder / "model.safetensors")
    with (
        contextlib.closing(ObjectServer(tmp_path / "bucket")) as bucket,
        served("--root", "s3://bucket/models", "--log-json", env=bucket.environment()) as server,
    ):
        bucket.status["models/m/model.safetensors"] = 403
        assert server.get("/m/model.safetensors", X_Request_Id="first")[0] == 502
        assert errors(server, "source") == 1
        bucket.status.clear()
        bucket.fault = refuses_the_second_block
        with pytest.raises(http.client.IncompleteRead):
            server.get("/m/model.safetensors", X_Request_Id="second")
        server.end()
    [first] = [each for each in objects(server) if each.get("request") == "first"]
    assert (first["status"], first["level"]) == (502, "error")
    assert first["problem"].startswith("s3://bucket/models/m/model.safetensors") and "403" in first["problem"]
    [second] = [each for each in objects(server) if each.get("request") == "second"]
    assert second["problem"].startswith("cut off: the source failed: s3://bucket/models/m/model.safetensors")
    assert not [each for each in objects(server) if "problem" in each and "request" not in each]


def refuses_the_second_block(handler, key):
    if handler.headers.get("Range", "").startswith(f"bytes={8 << 20}-"):
        handler.refuse(403, "AccessDenied", {})
        return True
    return False
