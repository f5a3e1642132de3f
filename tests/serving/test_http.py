"""What a server answers: bytes of files, ranges of them, pages and lists, and nothing to who may not ask."""

import email
import json
import re
import socket
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from serving import eventually, served

FILE = "/models/model.safetensors"
TOKEN = "a-token-of-this-server"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("root")
    (made / "models").mkdir()
    save_file({"x": np.random.default_rng(0).random(300_000, np.float32)}, made / "models" / "model.safetensors")
    (made / "models" / "config.json").write_text("{}")
    (made / "models" / "a & <b>.json").write_text("{}")
    (made / "secret").write_text("password")
    return made


@pytest.fixture(scope="module")
def server(folder):
    with served("--root", folder) as found:
        yield found


@pytest.fixture(scope="module")
def data(folder):
    return (folder / FILE[1:]).read_bytes()


def test_bytes_of_a_file(server, data):
    status, headers, body = server.get(FILE)
    assert (status, body) == (200, data)
    assert headers["Content-Length"] == str(len(data)) and headers["Accept-Ranges"] == "bytes"
    assert server.get(FILE, method="HEAD")[::2] == (200, b"")
    status, headers, body = server.get(FILE, Range="bytes=1000-200999")
    assert (status, body) == (206, data[1000:201000])
    assert headers["Content-Range"] == f"bytes 1000-200999/{len(data)}"
    assert server.get(FILE, Range=f"bytes={len(data)}-")[0] == 416


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 1_200_000), min_size=4, max_size=20, unique=True).map(sorted))
def test_several_ranges(server, data, cuts):
    ranges = [(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    status, headers, body = server.get(FILE, Range="bytes=" + ",".join(f"{a}-{b - 1}" for a, b in ranges))
    assert status == 206 and int(headers["Content-Length"]) == len(body)
    message = email.message_from_bytes(f"Content-Type: {headers['Content-Type']}\r\n\r\n".encode() + body)
    assert message.get_content_type() == "multipart/byteranges"
    mark = message.get_boundary().encode()
    parts = body.split(b"\r\n--" + mark)[1:-1]
    found = [part.partition(b"\r\n\r\n")[2] for part in parts]
    assert found == [data[a:b] for a, b in ranges]
    said = [re.search(rb"Content-Range: bytes (\d+)-(\d+)/(\d+)", part).groups() for part in parts]
    assert said == [tuple(str(n).encode() for n in (a, b - 1, len(data))) for a, b in ranges]


def test_conditions(server, data):
    tag = server.get(FILE, method="HEAD")[1]["ETag"]
    assert server.get(FILE, If_None_Match=tag)[::2] == (304, b"")
    assert server.get(FILE, If_None_Match='"other", ' + tag)[0] == 304
    assert server.get(FILE, If_None_Match='"other"')[0] == 200
    assert server.get(FILE, If_Match='"other"')[0] == 412
    assert server.get(FILE, If_Match=tag, Range="bytes=0-3")[::2] == (206, data[:4])
    assert server.get(FILE, If_Range=tag, Range="bytes=0-3")[0] == 206
    assert server.get(FILE, If_Range='"other"', Range="bytes=0-3")[::2] == (200, data)
    assert server.get(FILE, If_None_Match=f'"other", W/{tag}')[0] == 304  # only whole copies are compared
    assert server.get(FILE, If_Match=f"W/{tag}")[0] == 412
    dated = server.get(FILE, method="HEAD")[1]["Last-Modified"]
    for weak in (f"W/{tag}", dated):  # two versions may have the same
        assert server.get(FILE, If_Range=weak, Range="bytes=0-3")[::2] == (200, data)


def test_ranges_count_once_and_for_get_only(server, data):
    status, headers, _ = server.get(FILE, method="HEAD", Range="bytes=0-3")
    assert (status, headers["Content-Length"]) == (200, str(len(data)))
    asked = (
        f"GET {FILE} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nRange: bytes=0-3\r\nRange: bytes=5-6\r\n\r\n"
    )
    assert server.raw(asked.encode()).startswith(b"HTTP/1.1 200 ")


def test_folders(server):
    assert server.get("/models")[:2][0] == 301
    status, headers, body = server.get("/models/")
    assert status == 200 and headers["Content-Type"].startswith("text/html")
    assert b'<a href="a%20%26%20%3Cb%3E.json">a &amp; &lt;b&gt;.json</a>' in body
    assert "script" not in headers["Content-Security-Policy"] and b"<script" not in body and b"style=" not in body
    entries = json.loads(server.get("/models/", Accept="application/json")[2])["entries"]
    assert [entry["name"] for entry in entries] == ["a & <b>.json", "config.json", "model.safetensors"]
    assert entries[2]["etag"] in server.get(FILE, method="HEAD")[1]["ETag"]
    assert b"secret" not in server.get("/")[2]
    assert json.loads(server.get("/api/v1/checkpoints")[2])["checkpoints"][0]["name"] == FILE[1:]


PATHS = [
    "//", "//models/",
    "/secret", "/models/../secret", "/models/%2e%2e/secret", "/..%2fsecret", "//etc/passwd", "/%2fetc%2fpasswd", "/.",
    "/models/model.safetensors/", "/models/model.safetensors/x", "/models/./model.safetensors", "/models\\..\\secret",
    "/models//model.safetensors", "/models/%00", "/models/model.safetensors%00.json", "/%c0%ae%c0%ae/secret", "/..",
    "/api/v1/../../secret", "/models/..;/secret", "/models/%252e%252e/secret", "/MODELS/model.safetensors",
    "/" + "a/" * 2000,
]  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_paths_that_lead_nowhere(server, path):
    request = f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    found = server.raw(request.encode())
    assert re.match(rb"HTTP/1.1 (301|400|404) ", found), found[:200]
    assert b"password" not in found and b"root:" not in found


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    path=st.text(st.sampled_from("/.%\\2eEfF05cmodels:;?#&=~ \x00é"), max_size=40),
    header=st.text(st.characters(codec="latin-1", exclude_characters="\r\n"), max_size=40),
    method=st.sampled_from(["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "get", "TRACE", "CONNECT", "X" * 100]),
)
def test_nothing_that_is_sent_ends_the_server_or_opens_other_files(server, path, header, method):
    request = f"{method} /{path} HTTP/1.1\r\nHost: localhost\r\nRange: {header}\r\nConnection: close\r\n\r\n"
    found = server.raw(request.encode("latin-1", errors="replace"))
    assert b"password" not in found and b"root:" not in found
    assert found == b"" or not found.startswith(b"HTTP/1.1 5"), found[:200]
    assert server.process.poll() is None


ASKED = "GET /models/config.json HTTP/1.1\r\nHost: localhost\r\n"
SMUGGLED = [
    ASKED + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /secret",
    ASKED + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nGET /x",
    ASKED + "Transfer-Encoding: xchunked\r\n\r\nGET /secret HTTP/1.1\r\n\r\n",
    ASKED + " X: folded\r\n\r\n",
    ASKED + "X Y: 1\r\n\r\n",
    ASKED + "X: a\x00b\r\n\r\n",
    "GET /models/config.json HTTP/1.1\nHost: localhost\n\n\x01\x02",
    "POST /models/config.json HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\nConnection: close\r\n\r\n",
    ASKED + "X: 1\r\n" * 5000 + "\r\n",
    ASKED + "X: " + "1" * 1_000_000 + "\r\n\r\n",
    "GET /" + "a" * 1_000_000 + " HTTP/1.1\r\nHost: localhost\r\n\r\n",
]


@pytest.mark.parametrize("request_text", SMUGGLED, ids=range(len(SMUGGLED)))
def test_requests_that_are_none(server, request_text):
    found = server.raw(request_text.encode("latin-1"), timeout=3)
    assert b"password" not in found
    assert not found or re.match(rb"HTTP/1.\d 4\d\d ", found), found[:200]
    assert server.get("/healthz")[0] == 200


def test_other_names_of_this_machine_are_refused(server):
    """A web page whose name leads to 127.0.0.1 must not read from here."""
    assert server.get(FILE, Host="evil.example:8600")[0] == 421
    assert server.get(FILE, Host=f"localhost:{server.place.rpartition(':')[2]}")[0] == 200
    assert server.get(FILE, Host="[::1]:8600")[0] == 200


def test_only_reading(server):
    for method in ("POST", "PUT", "DELETE", "PATCH"):
        assert server.get(FILE, method=method)[0] == 405
    assert server.get(FILE, Content_Length="3", method="GET")[0] in (200, 400)


def test_requests_have_an_id(server):
    assert server.get("/", X_Request_Id="from-a-proxy-1")[1]["X-Request-Id"] == "from-a-proxy-1"
    assert re.fullmatch(r"[0-9a-f]{16}", server.get("/", X_Request_Id="a\tb")[1]["X-Request-Id"])
    eventually(lambda: any("from-a-proxy-1" in line and "GET /: 200" in line for line in server.log))


def test_metrics(server, data):
    server.get(FILE)
    before = server.sent()
    server.get(FILE, Range="bytes=5-9")
    server.get(FILE)
    assert server.sent() - before == 5 + len(data)
    text = server.get("/metrics")[2].decode()
    assert 'shardload_requests_total{route="files",status="206"}' in text
    assert "shardload_request_seconds_bucket" in text


def test_a_file_that_changes_while_it_is_sent_breaks_off(tmp_path):
    path = tmp_path / "model.safetensors"  # the root is a checkpoint, and so has a name
    save_file({"x": np.zeros(16 << 20, np.float32)}, path)
    n_bytes = path.stat().st_size
    with served("--root", tmp_path, "--log-json") as server:
        host, _, port = server.place.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as asked:
            asked.sendall(f"GET /{tmp_path.name}/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            found = len(asked.recv(1 << 16))
            with path.open("r+b") as file:
                file.seek(n_bytes - 8)
                file.write(b"12345678")
            with pytest.raises((ConnectionError, EOFError)):
                while part := asked.recv(1 << 20):
                    found += len(part)
                raise EOFError
        assert found < n_bytes
        deadline = time.monotonic() + 10
        while not any("cut off" in line for line in server.log) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert any(json.loads(line).get("problem") == "cut off" for line in server.log)


def test_with_a_token(folder, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# of the rack\n{TOKEN}\n\nanother-token-of-it\n")
    tokens.chmod(0o600)
    with served("--root", folder, "--token-file", tokens) as server:
        for path in (FILE, "/", "/api/v1/checkpoints", "/metrics", "/missing"):
            status, headers, _ = server.get(path)
            assert (status, headers["WWW-Authenticate"]) == (401, "Bearer")
            for wrong in (TOKEN, "Bearer", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer é"):
                assert server.get(path, Authorization=wrong)[0] == 401, wrong
        for token in (TOKEN, "another-token-of-it"):
            assert server.get(FILE, Authorization=f"Bearer {token}")[0] == 200
            assert server.get(FILE, Authorization=f"bearer {token}", Host="models.rack")[0] == 200
        assert server.get("/healthz")[0] == server.get("/readyz")[0] == 200
        assert server.end() == 0
        assert TOKEN not in "".join(server.log) and "another-token" not in "".join(server.log)


def test_more_connections_than_allowed(folder):
    with served("--root", folder, "--max-connections", 3) as server:
        host, _, port = server.place.rpartition(":")
        kept = [socket.create_connection((host, int(port)), timeout=10) for _ in range(3)]  # accepted in this order
        assert server.raw(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        for each in kept:
            each.close()
        deadline = time.monotonic() + 30
        while b" 200 OK" not in server.raw(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"):
            assert time.monotonic() < deadline


def test_slow_clients_leave_others_alone(folder, data):
    with served("--root", folder, "--max-connections", 3000) as server:
        host, _, port = server.place.rpartition(":")
        slow = []
        for number in range(1000):
            slow.append(socket.create_connection((host, int(port)), timeout=10))
            slow[-1].sendall(
                b"GET /models/model.sa"
                if number % 2
                else b"GET " + FILE.encode() + b" HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
        assert server.get(FILE)[2] == data
        assert server.descriptors() > 900
        for each in slow:
            each.close()
        deadline = time.monotonic() + 20
        while server.descriptors() > 100:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert server.get(FILE)[2] == data
