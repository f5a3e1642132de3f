"""Servers of one address share what they fetch: each byte leaves the bucket once, whatever happens to one of them."""

import contextlib
import hashlib
import json
import random
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest
from object_server import ObjectServer
from safetensors.numpy import save_file
from serving import served

import shardload
from shardload.errors import TransferError

MIB = 1 << 20
FILE = "/model.safetensors"
N_BYTES = 40 * MIB + 321


@pytest.fixture
def bucket(tmp_path):
    folder = tmp_path / "bucket" / "m"
    folder.mkdir(parents=True)
    save_file({"x": np.random.default_rng(0).integers(0, 255, N_BYTES, np.uint8)}, folder / FILE[1:])
    with contextlib.closing(ObjectServer(tmp_path / "bucket")) as server:
        yield server


@pytest.fixture
def data(bucket):
    return (bucket.folder / "m" / FILE[1:]).read_bytes()


def free_ports(count):
    """Ports outside of the range from which the system gives some to connections and to other tests."""
    found = []
    while len(found) < count:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found


@contextlib.contextmanager
def rack(bucket, count, *, peers=(), options=lambda number: ()):
    """Servers that are each other's peers, and their own; ``peers`` are addresses of others."""
    ports = free_ports(count)
    addresses = [*(f"http://127.0.0.1:{port}" for port in ports), *peers]
    named = [text for address in addresses for text in ("--peer", address)]
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                served("--root", "s3://bucket/m/model.safetensors", "--listen", f"127.0.0.1:{port}", *named,
                       *options(number), env=bucket.environment())
            )
            for number, port in enumerate(ports)
        ]  # fmt: skip


def all_of(servers, *, times=1):
    """What each server sends of the file when all are asked at the same time."""
    with ThreadPoolExecutor(len(servers) * times) as pool:
        return [body for _, _, body in pool.map(lambda each: each.get(FILE), servers * times)]


def test_each_byte_leaves_the_bucket_once(bucket, data):
    with rack(bucket, 3) as servers:
        bucket.reset()
        assert all(body == data for body in all_of(servers, times=3))
        assert bucket.sent_of("model") == len(data) + 3  # one each to ask for the version
        received = {source: [each.metric(f'shardload_received_bytes_total{{source="{source}"}}') for each in servers]
                    for source in ("source", "peer")}  # fmt: skip
        assert sum(received["source"]) == len(data) and sum(received["peer"]) == 2 * len(data)


def test_a_server_that_comes_later_asks_the_others_for_what_they_have(bucket, data, tmp_path):
    def options(number):
        return ("--cache", tmp_path / str(number))

    with rack(bucket, 2, options=options) as servers:
        assert all(body == data for body in all_of(servers))
        bucket.reset()
        later = [text for each in servers for text in ("--peer", each.address)]
        with served("--root", "s3://bucket/m/model.safetensors", *later, env=bucket.environment()) as new:
            bucket.reset()
            assert new.get(FILE)[2] == data
            assert bucket.sent_of("model") == 1


def test_a_server_that_is_killed_is_replaced(bucket, data):
    with rack(bucket, 3) as servers:
        asked = threading.Event()

        def fault(handler, key):
            if handler.headers.get("Range") == f"bytes={16 * MIB}-{24 * MIB - 1}":
                asked.set()
            return False

        bucket.fault = fault
        with ThreadPoolExecutor(2) as pool:
            pending = [pool.submit(each.get, FILE) for each in servers[:2]]
            assert asked.wait(60)
            servers[2].process.kill()
            assert all(each.result()[2] == data for each in pending)


class FakePeer:
    """Servers that do what they like: one, for its clients at each of its ``addresses`` another one.

    Which server is asked first for a block is as good as chance; with many, one of these is, for some block.
    """

    def __init__(self, answer):
        self.asked = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(handler):  # noqa: N805
                handler.send_response(404)
                handler.end_headers()

            def do_GET(handler):  # noqa: N805
                if handler.path == "/api/v1/server":
                    found = {"server": "shardload", "id": f"fake {handler.headers['Host']}"}
                    handler.reply(200, json.dumps(found).encode())
                else:
                    self.asked.append(dict(handler.headers))
                    answer(handler)

            def reply(handler, status, body, **headers):  # noqa: N805
                handler.send_response(status)
                for name, value in {"Content-Length": str(len(body)), **headers}.items():
                    handler.send_header(name.replace("_", "-"), value)
                handler.end_headers()
                with contextlib.suppress(OSError):
                    handler.wfile.write(body)

        self.server = ThreadingHTTPServer(("", 0), Handler)
        self.server.daemon_threads = True
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        self.addresses = [f"http://127.0.0.{number}:{self.server.server_address[1]}" for number in range(1, 17)]

    def close(self):
        self.server.shutdown()
        self.server.server_close()


def wanted(handler):
    first, last = map(int, re.fullmatch(r"bytes=(\d+)-(\d+)", handler.headers["Range"]).groups())
    return last + 1 - first


def wrong_bytes(handler):
    body = bytes(wanted(handler))
    digest = hashlib.blake2b(b"something else", digest_size=16).hexdigest()
    handler.reply(206, body, ETag=handler.headers["If-Match"], Shardload_Digest=digest)


def no_digest(handler):
    handler.reply(206, bytes(wanted(handler)), ETag=handler.headers["If-Match"])


def another_version(handler):
    body = bytes(wanted(handler))
    digest = hashlib.blake2b(body, digest_size=16).hexdigest()
    handler.reply(206, body, ETag='"another"', Shardload_Digest=digest)


def too_short(handler):
    handler.reply(206, b"x", ETag=handler.headers["If-Match"], Content_Length=str(wanted(handler)))
    handler.close_connection = True


def refusing(handler):
    handler.reply(412, b"")


@pytest.mark.parametrize("answer", [wrong_bytes, no_digest, another_version, too_short, refusing])
def test_a_peer_that_is_wrong_is_replaced(bucket, data, answer):
    with contextlib.closing(FakePeer(answer)) as fake, rack(bucket, 2, peers=fake.addresses) as servers:
        bucket.reset()
        assert all(body == data for body in all_of(servers))
        assert fake.asked and {each["Shardload-Peer"] for each in fake.asked} == {"fetch"}
        assert bucket.sent_of("model") <= 2 * len(data) + 2
        assert sum(each.metric('shardload_errors_total{kind="peer"}') for each in servers) >= 1


def test_a_peer_that_stalls_is_replaced(bucket, data):
    release = threading.Event()
    with contextlib.closing(FakePeer(lambda handler: release.wait(120))) as fake:
        with rack(bucket, 1, peers=fake.addresses[:3]) as [server]:  # each costs seconds
            assert server.get(FILE)[2] == data
            assert fake.asked and server.metric('shardload_errors_total{kind="peer"}') >= 1
        release.set()


def test_who_has_another_version_is_not_asked_for_it(bucket, data):
    """The source decides: a file that was replaced is the new one at a server that never saw the old one."""
    with rack(bucket, 1) as [old]:
        assert old.get(FILE)[2] == data
        path = bucket.folder / "m" / FILE[1:]
        save_file({"x": np.random.default_rng(1).integers(0, 255, N_BYTES, np.uint8)}, path.with_name("new"))
        path.with_name("new").rename(path)
        with rack(bucket, 1, peers=[old.address]) as [new]:
            assert new.get(FILE)[2] == path.read_bytes() != data
            assert new.metric('shardload_received_bytes_total{source="peer"}') == 0


def test_requests_of_peers_are_not_passed_on(bucket, data):
    with contextlib.closing(FakePeer(wrong_bytes)) as fake, rack(bucket, 1, peers=fake.addresses) as [server]:
        tag = server.get(FILE, method="HEAD")[1]["ETag"]
        for start in range(0, len(data), 8 * MIB):
            asked = {"Range": f"bytes={start}-{min(len(data), start + 8 * MIB) - 1}", "If_Match": tag}
            assert server.get(FILE, Shardload_Peer="look", **asked)[0] == 404
            status, headers, body = server.get(FILE, Shardload_Peer="fetch", **asked)
            assert status == 206 and body == data[start : start + 8 * MIB]
            assert headers["Shardload-Digest"] == hashlib.blake2b(body, digest_size=16).hexdigest()
            assert server.get(FILE, Shardload_Peer="look", **asked)[0] == 206
        assert not fake.asked
        assert server.get(FILE, Shardload_Peer="fetch", Range="bytes=0-9", If_Match=tag)[0] == 400
        assert server.get(FILE, Shardload_Peer="fetch", Range="bytes=0-9", If_Match='"other"')[0] == 412


def test_peers_whose_address_has_the_wrong_scheme_are_told_in_plain_words(bucket, folder_of_other, certificate):
    with (
        served("--root", folder_of_other) as plain,
        served("--root", folder_of_other, *certificate.options) as protected,
    ):
        cases = {
            plain.address.replace("http:", "https:"): "If it has no certificate, write http://",
            protected.address.replace("https:", "http:"): "If it has a certificate, its address begins with https://",
            protected.address: "its certificate is not trusted: unable to get local issuer certificate. SSL_CERT_FILE",
        }
        peers = [text for address in cases for text in ("--peer", address)]
        with served("--root", "s3://bucket/m", *peers, env=bucket.environment()) as server:
            told = {peer["url"]: peer for peer in json.loads(server.get("/api/v1/cache")[2])["peers"]}
    for address, said in cases.items():
        assert said in told[address]["problem"], told[address]


def test_http_at_a_port_of_https_is_told_to_be_that(folder_of_other, certificate, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "1")
    said = "Perhaps it has a certificate: then write https:// instead of http://"
    with (
        served("--root", folder_of_other, *certificate.options) as server,
        pytest.raises(TransferError, match=said),
    ):
        shardload.inspect(server.address.replace("https:", "http:") + "/one")


@pytest.fixture
def folder_of_other(tmp_path):
    (tmp_path / "other" / "one").mkdir(parents=True)
    save_file({"x": np.zeros(4)}, tmp_path / "other" / "one" / "model.safetensors")
    return tmp_path / "other"
