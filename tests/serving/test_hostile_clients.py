"""What clients may do to a server without harm to others: leave, flood, stall, or send what is no request."""

import asyncio
import contextlib
import itertools
import json
import re
import socket
import ssl
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from safetensors.numpy import save_file
from serving import eventually, served

from benchmarks.hostile_requests import hostile_requests
from shardload.errors import UnsafeSourceError
from shardload.serving.application import Access, Service
from shardload.serving.roots.catalogue import Catalogue

FILE = "/models/model.safetensors"
ASK = f"GET {FILE} HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("root")
    (made / "models").mkdir()
    save_file({"x": np.zeros(24 << 20, np.float32)}, made / "models" / "model.safetensors")
    (made / "models" / "config.json").write_text('{"model_type": "llama"}')
    return made


def connected(server, **options):
    host, _, port = server.place.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10, **options)


def metric(server, name):
    lines = server.get("/metrics")[2].decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_clients_that_leave_are_one_line_each(folder):
    with served("--root", folder, "--log-json") as server:
        for most in (0, 1 << 16, 17 << 20, 33 << 20):
            with connected(server) as asked:
                asked.sendall(f"{ASK}\r\n".encode())
                taken = 0
                while taken < most:
                    taken += len(asked.recv(1 << 18))
        eventually(lambda: metric(server, "shardload_running_requests") == 1)
        server.end()
    left = [json.loads(line) for line in server.log]
    assert [each["problem"] for each in left if each.get("path") == FILE] == ["cut off"] * 4


@pytest.mark.parametrize("count", [1200], ids=lambda count: f"{count} requests")
def test_made_up_requests_get_nothing_and_break_nothing(folder, tmp_path, count):
    token, tokens, n_told = "a-token-of-this-server", tmp_path / "tokens", 0
    tokens.write_text(token)
    tokens.chmod(0o600)
    (folder / "secret").write_text("in no checkpoint")

    def ask(data):
        found = b""
        with connected(server) as asked, contextlib.suppress(OSError):
            asked.sendall(data)
            asked.settimeout(0.3)  # most connections stay open after an answer
            while len(found) < 1 << 20 and (part := asked.recv(1 << 16)):
                found += part
        return found

    with served("--root", folder, "--token-file", tokens, "--log-json") as server:
        with ThreadPoolExecutor(16) as threads:
            for sent, found in zip(
                requests := list(itertools.islice(hostile_requests(0, token=token), count)),
                threads.map(ask, requests),
                strict=True,
            ):
                assert b"in no checkpoint" not in found and b"Traceback" not in found, sent
                assert not found or re.match(rb"HTTP/\d\.\d [2345]\d\d ", found), (sent, found[:100])
                is_open = sent.split(b" ")[1].startswith((b"/healthz", b"/ui/sign-in")) if b" /" in sent else False
                assert token.encode() in sent or is_open or re.match(rb"HTTP/\d\.\d 2", found) is None, (sent, found)
                n_told += bool(found)
        assert server.get(FILE, Authorization=f"Bearer {token}")[2] == (folder / FILE[1:]).read_bytes()
        server.end()
    logged = [json.loads(line) for line in server.log]  # each is one object: nothing else was written
    statuses = [facts["status"] for facts in logged if "status" in facts]
    assert n_told and len(statuses) > count // 3
    assert set(statuses) <= {0, *range(200, 500), 503}, set(statuses)  # 0: it left before the answer


def test_what_is_no_request_is_one_line_without_its_text(folder):
    with served("--root", folder) as server:
        for text in (
            f"{ASK}Authorization: Bearer a-token-of-someone\x01\r\n\r\n",
            f"{ASK}Authorization: Bearer {'a-token-of-someone' * 1000}\r\n\r\n",
            "GET /\x1b[31m HTTP/1.1\r\nHost: localhost\r\n\r\n",
            "\x16\x03\x01\x02",
            f"{ASK}Content-Encoding: gzip\r\nContent-Length: 4\r\n\r\nabcd",
        ):
            answer = server.raw(text.encode(), timeout=3)
            assert answer.startswith(b"HTTP/1."), text
            assert b"\r\nServer: shardload\r\n" in answer and b"aiohttp" not in answer and b"Python" not in answer
            assert b"token-of" not in answer
        assert metric(server, 'shardload_errors_total{kind="bad request"}') >= 3
        server.end()
    log = "".join(server.log)
    assert "bad request" in log and "Traceback" not in log and "token" not in log and "\x1b" not in log
    assert len(server.log) <= 10


@pytest.mark.parametrize("expected", [b"something", b"\xe9\xff", b"100-continue, x"])
@pytest.mark.parametrize("asked", [ASK, "PUT /models HTTP/1.1\r\nHost: localhost\r\n"])
def test_what_is_expected_is_not_repeated(folder, asked, expected):
    with served("--root", folder) as server:
        found = server.raw(asked.encode() + b"Connection: close\r\nExpect: " + expected + b"\r\n\r\n")
        assert found.startswith(b"HTTP/1.1 417 ") and found.endswith(b"\r\n\r\nExpect can be 100-continue only.\n")
        assert b"\r\nServer: shardload\r\n" in found
        server.end()
    log = "".join(server.log)
    assert "it expects something unknown" in log and "Traceback" not in log


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_all_connections_count_as_soon_as_they_are_accepted(folder, certificate, scheme):
    """Also many at once, and those that never finish the handshake of TLS."""
    tls = certificate.options if scheme == "https" else ()
    with served("--root", folder, "--max-connections", 5, "--no-hand-over", *tls) as server:
        before = server.descriptors()
        many = [connected(server) for _ in range(100)]
        eventually(lambda: server.descriptors() <= before + 5)
        for each in many:
            each.close()
        eventually(lambda: server.descriptors() <= before)
        if scheme == "http":
            eventually(lambda: metric(server, "shardload_connections") == 1)


def test_bytes_over_tls(folder, certificate):
    context = ssl.create_default_context(cafile=certificate.path)
    with served("--root", folder, *certificate.options) as server:
        with context.wrap_socket(connected(server), server_hostname="127.0.0.1") as asked:
            asked.sendall(f"{ASK}Connection: close\r\n\r\n".encode())
            found = bytearray()
            while part := asked.recv(1 << 20):
                found += part
        assert found.partition(b"\r\n\r\n")[2] == (folder / FILE[1:]).read_bytes()


def test_a_log_that_nobody_reads_keeps_no_client_waiting(folder):
    command = [sys.executable, "-m", "shardload", "serve", "--root", str(folder), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        host, _, port = process.stdout.readline().split()[-1].removeprefix("http://").rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=10) as asked:
                for _ in range(100):  # 400 kB of lines: more than a pipe has room for
                    asked.sendall(f"GET /{'a' * 4000} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
                    assert b" 404 " in asked.recv(4096)
        finally:
            process.terminate()
            assert process.wait(timeout=20) == 0


def test_other_addresses_of_this_machine(folder):
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.2", 0))
        except OSError:
            pytest.skip("this machine has no other")
    with served("--root", folder, "--listen", "127.0.0.2:0") as server:
        assert server.get("/healthz")[0] == 200
        assert server.get("/healthz", Host="127.0.0.2.evil.example")[0] == 421


def test_the_end_does_not_wait_for_ever_for_a_client(folder):
    with served("--root", folder, "--grace", 1) as server, connected(server) as asked:
        asked.sendall(f"{ASK}\r\n".encode())
        assert asked.recv(1)
        assert server.end() == 0  # although the client takes no more


# Within this process, with a catalogue or a limit that no folder or operator would have.


class SlowCatalogue(Catalogue):
    """A catalogue that counts scans, and whose scans take until they may end, or fail."""

    scans, problem, open_error = 0, None, None

    def __init__(self, roots):
        super().__init__(roots)
        self.may_end = threading.Event()

    def is_old(self, key=""):
        return True

    def refresh(self):
        self.scans += 1
        assert self.may_end.wait(60)
        if self.problem is not None:
            raise self.problem

    def open(self, key):
        if self.open_error is not None:
            raise self.open_error
        return super().open(key)


def asked(service, ask):
    async def run():
        async with TestClient(TestServer(service.application())) as client:
            return await ask(client)

    return asyncio.run(run())


def test_who_asks_for_what_is_missing_shares_a_scan_and_one_thread(folder):
    catalogue = SlowCatalogue([folder])

    async def ask(client):
        waiting = [asyncio.create_task(client.get(f"/missing/{n}")) for n in range(60)]
        while not catalogue.scans:
            await asyncio.sleep(0.01)
        async with client.get(FILE, headers={"Range": "bytes=0-9"}) as answer:  # while the scan goes on
            assert answer.status == 206
        assert catalogue.scans == 1
        catalogue.may_end.set()
        return {(await each).status for each in waiting}

    assert asked(Service(catalogue, Access(), lambda facts: None), ask) == {404}
    assert catalogue.scans <= 2


class CountingCatalogue(Catalogue):
    """A catalogue that counts how often its names are listed, which sorts them."""

    listed = 0

    def names(self, folder):
        self.listed += not folder
        return super().names(folder)


def test_a_list_of_many_names_is_made_once(tmp_path):
    (tmp_path / "folder").mkdir()  # so that all together are no checkpoint
    for number in range(50):
        (tmp_path / f"{number}.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    catalogue = CountingCatalogue([tmp_path])

    async def ask(client):
        async with client.get("/", headers={"Accept": "application/json"}) as answer:
            entries = (await answer.json())["entries"]
        listed = catalogue.listed
        async with client.get("/7.safetensors") as answer:
            assert answer.status == 200 and catalogue.listed == listed
        return len(entries)

    assert asked(Service(catalogue, Access(), lambda facts: None), ask) == 50
    assert catalogue.listed <= 2


def test_a_scan_that_fails_leaves_what_was_found(folder):
    catalogue, log = SlowCatalogue([folder]), []
    catalogue.problem = UnsafeSourceError("Cannot serve more than a few files")
    catalogue.may_end.set()

    async def ask(client):
        return [(await client.get(path)).status for path in ("/", "/missing", FILE)]

    assert asked(Service(catalogue, Access(), log.append), ask) == [200, 404, 200]
    assert any("more than a few files" in facts.get("problem", "") for facts in log)


def test_a_file_that_cannot_be_opened_now_may_be_asked_for_again(folder):
    catalogue = SlowCatalogue([folder])
    catalogue.open_error = OSError(24, "Too many open files")

    async def ask(client):
        return (await client.get(FILE)).status

    assert asked(Service(catalogue, Access(), lambda facts: None), ask) == 503


def test_a_client_that_does_not_take_a_list_is_cut_off(folder, tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    for number in range(20_000):
        (model / f"{number:06d}{'n' * 150}").touch()
    log = []

    async def ask(client):
        with socket.socket() as client_socket:
            client_socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client_socket.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client_socket, ("127.0.0.1", client.port))
            await loop.sock_sendall(client_socket, b"GET /model/ HTTP/1.1\r\nHost: localhost\r\n\r\n")
            while not any("problem" in facts for facts in log):
                await asyncio.sleep(0.05)

    asked(Service(Catalogue([tmp_path]), Access(), log.append, page_s=0.5), ask)
    assert [facts["problem"] for facts in log if "problem" in facts] == ["stalled"]


def test_what_is_added_is_there_at_once(tmp_path):
    (tmp_path / "team").mkdir()
    with served("--root", tmp_path) as server:
        for number in range(3):
            assert server.get(f"/team/{number}/model.safetensors")[0] == 404
            (tmp_path / "team" / f"{number}").mkdir()
            save_file({"x": np.full(3, number)}, tmp_path / "team" / f"{number}" / "model.safetensors")
            assert server.get(f"/team/{number}/model.safetensors")[0] == 200
            assert f'"{number}/"'.encode() in server.get("/team/")[2]


def test_what_is_added_is_in_the_pages(folder, tmp_path):
    link = tmp_path / "latest"
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        save_file({name: np.ones(3, np.float32)}, tmp_path / name / "model.safetensors")
    link.symlink_to("a")
    with served("--root", tmp_path) as server:
        first = server.get("/latest/model.safetensors")
        assert b"more.safetensors" not in server.get("/a/")[2]
        save_file({"x": np.ones(3, np.float32)}, tmp_path / "a" / "more.safetensors")
        link.unlink()
        link.symlink_to("b")
        second = server.get("/latest/model.safetensors")
        assert second[0] == 200 and second[2] == (tmp_path / "b" / "model.safetensors").read_bytes() != first[2]
        assert second[1]["ETag"] != first[1]["ETag"]
        eventually(lambda: b"more.safetensors" in server.get("/a/")[2])
