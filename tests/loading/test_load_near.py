"""Loads from `shardload serve` nearby: straight into the shards; after any wrong answer, the rest is requested."""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from object_server import ObjectServer
from remote_mix import mix, tensors, turned
from safetensors.numpy import save_file
from serving import served

import shardload
from shardload.errors import BudgetError, TransferError
from shardload.manifest import View
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.answers import ForbiddenError
from shardload.stores.near import NearFile, NearServer
from shardload.stores.objects import Version
from shardload.stores.remote import location_of
from shardload.stores.requests import Requests
from shardload.transfer.load_plan import Binding
from shardload.transfer.planning import plan_transfers

NAME = "model.safetensors"
TOKEN = "a-token-of-this-server"
ROWS = (("model",), ())


class NearObjects(ObjectServer):
    """An object server whose tags are those of `shardload serve`."""

    def tag(self, key):
        return f'"shardload-{super().tag(key)[1:]}'

    @property
    def received(self):
        """Requests for bytes that went straight into shards: only these have a condition."""
        return [headers for headers in self.headers if "If-Match" in headers]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    found = tmp_path_factory.mktemp("near") / "models"
    found.mkdir()
    save_file(tensors(), found / NAME)  # 97 MB
    return found


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Six matrices of 2 MiB, and a vector after each."""
    found, random = tmp_path_factory.mktemp("small"), np.random.default_rng(0)
    values = {f"w{i}": random.random((1024, 512), np.float32) for i in range(6)}
    save_file(values | {f"w{i}.b": random.random(64, np.float32) for i in range(6)}, found / NAME)
    return found


@pytest.fixture
def store(small):
    with closing(NearObjects(small)) as server:
        yield server


def by_rows(name, shape):
    return P("model") if len(shape) == 2 else P()


def check(address, folder, layout=by_rows, mesh="1x8", **options):
    found = shardload.load_arrays(address, layout, mesh=mesh, **options)
    expected = shardload.load_arrays(folder / NAME, layout, mesh=mesh, **options)
    assert found.keys() == expected.keys()
    assert all(np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes() for name in expected)


def plan(address, dims, positions=None):
    manifest, layout = shardload.inspect(address), Layout(MeshSpec.parse("1x8"), dims)
    tensors = {name: t for name, t in manifest.tensors.items() if len(t.shape) == 2}
    wanted = [Binding(name, View.whole(t), t.dtype, layout) for name, t in tensors.items()]
    return plan_transfers(manifest, wanted, host_memory_bytes=None, positions=positions)


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
@pytest.mark.parametrize("layout", [by_rows, mix])
def test_from_a_server_with_a_token(root, tmp_path, monkeypatch, mesh, layout):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    with served("--root", root, "--no-hand-over", "--token-file", tokens) as server:
        tokens.write_text(f"{server.address} {TOKEN}\n")  # now the client's
        monkeypatch.setenv("SHARDLOAD_TOKENS", str(tokens))
        check(f"{server.address}/models/{NAME}", root, layout, mesh, transpose=turned)


def test_most_bytes_go_straight_into_the_shards(store):
    found = plan(f"{store.http}/{NAME}", ROWS)
    assert found.direct_bytes == found.read_bytes == found.needed_bytes
    assert not plan(f"{store.http}/{NAME}", ((), ("model",))).direct_bytes  # runs of 256 bytes
    store.requests.clear()
    check(f"{store.http}/{NAME}", store.folder)
    assert len(store.received) == 6
    assert store.bytes_sent <= 1.001 * (store.folder / NAME).stat().st_size + (256 << 10)


@pytest.mark.parametrize("start", [b"HTTP/1.1 206 Partial Content\r\nX: ", b"HTTP/1.1 100 Continue\r\n\r\n" * 3])
def test_headers_that_never_end(store, monkeypatch, start):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "1")
    ended = threading.Event()

    def drip(handler, key):
        if "If-Match" not in handler.headers:
            return False
        handler.wfile.write(start)
        while not ended.wait(0.05):
            handler.wfile.write(b"x")
        return True

    store.fault = drip
    try:
        check(f"{store.http}/{NAME}", store.folder)
    finally:
        ended.set()


@pytest.mark.parametrize(("budget", "count"), [("16MiB", 12), ("32MiB", 6)])
def test_a_small_budget_is_kept(store, budget, count):
    """A block has at most a sixteenth of it. With a smaller one, blocks below 1 MiB would be requested together."""
    check(f"{store.http}/{NAME}", store.folder, host_memory_bytes=budget)
    assert len(store.received) == count
    with pytest.raises(BudgetError, match="at least 16MiB"):
        check(f"{store.http}/{NAME}", store.folder, host_memory_bytes="15MiB")


def test_gaps_are_read_as_from_a_file(tmp_path):
    """Half of each row is needed: one request for many rows, and the other half goes to memory of the thread."""
    wide = np.arange(64 << 15, dtype=np.float32).reshape(64, 1 << 15)
    save_file({"wide": wide}, tmp_path / NAME)
    with closing(NearObjects(tmp_path)) as store:
        half = plan(f"{store.http}/{NAME}", ((), ("batch",)), positions=[0])
        assert half.read_bytes == wide.nbytes
        check(f"{store.http}/{NAME}", tmp_path, lambda name, shape: P(None, "model"), "1x2")


@pytest.mark.parametrize("variable", ["http_proxy", "ALL_PROXY"])
def test_a_proxy_is_not_passed_by(store, monkeypatch, variable):
    monkeypatch.setenv(variable, store.root)
    assert NearServer.at("http://a.server:8600", headers={}) is None
    monkeypatch.setenv("no_proxy", "a.server")
    assert NearServer.at("http://a.server:8600", headers={}) is not None


def test_only_what_is_near_and_plain_is_connected_to(store):
    assert NearServer.at(store.root, headers={}).is_near
    assert NearServer.at("https://127.0.0.1:8600", headers={}) is None
    assert Requests(f"{store.http}?signed").near_server() is None
    store.close()
    assert not NearServer.at(store.root, headers={}).is_near


def answered(code=206, *, body=lambda data: data, shift=0, hangs_up=False, **changed):
    """A function that answers a request for bytes, other than it should."""

    def answer(handler, first, last, data, tag):
        content = body(data[first : last + 1])
        headers = {"ETag": tag, "Content-Range": f"bytes {first + shift}-{last + shift}/{len(data)}"}
        headers |= {"Content-Length": str(len(content))} | {k.replace("_", "-"): v for k, v in changed.items()}
        handler.close_connection = hangs_up
        handler.send_head(code, {name: str(value) for name, value in headers.items() if value is not None})
        handler.wfile.write(content)

    return answer


def half(data):
    return data[: len(data) // 2]


FAULTS = {
    "no token": answered(401, body=lambda data: b"no"),
    "forbidden": answered(403, body=lambda data: b"no"),
    "busy": answered(429, body=lambda data: b"no", Retry_After=1),
    "unavailable": answered(503, body=lambda data: b""),
    "moved": answered(302, body=lambda data: b"", Location="http://127.0.0.1:9/elsewhere"),
    "other version": answered(412, body=lambda data: b""),
    "no such range": answered(416, body=lambda data: b""),
    "all of the file": answered(200, Content_Range=None),
    "other tag": answered(ETag='"shardload-other"'),
    "no tag": answered(ETag=None),
    "weak tag": answered(ETag='W/"weak"'),
    "other range": answered(shift=1),
    "no range": answered(Content_Range=None),
    "shorter": answered(body=half),
    "longer": answered(body=lambda data: data + data),
    "compressed": answered(Content_Encoding="gzip"),
    "chunked": answered(Transfer_Encoding="chunked", Content_Length=None, body=lambda data: b"1\r\nx\r\n0\r\n\r\n"),
    "one byte after its end": answered(Content_Length=2 << 20, body=lambda data: data + b"x"),
    "cut off": answered(Content_Length=2 << 20, body=half, hangs_up=True),
    "cut off at once": answered(Content_Length=2 << 20, body=lambda data: b"", hangs_up=True),
    "reset": lambda handler, *_: handler.drop(),
    "no HTTP": lambda handler, *_: handler.wfile.write(b"\0" * 100 + b"\r\n\r\n") and handler.drop(),
}


def spoil(store, answer, times):
    """Have the store answer so many requests for bytes that go straight into shards otherwise."""
    left = iter(range(times))

    def fault(handler, key):
        if "If-Match" not in handler.headers or next(left, None) is None:
            return False
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        answer(handler, first, last, (store.folder / NAME).read_bytes(), store.tag(NAME))
        return True

    store.fault = fault


@pytest.mark.parametrize("name", FAULTS)
def test_whatever_is_wrong_is_requested_otherwise(store, name):
    spoil(store, FAULTS[name], times=2)
    check(f"{store.http}/{NAME}", store.folder)
    assert len(store.received) == 6


def opened(store):
    version = Requests(store.http).version(NAME)
    assert isinstance(version, Version)
    return NearFile(NearServer.at(store.root, headers={}), f"bucket/{NAME}", version, shown="the file")


@pytest.mark.parametrize("name", ["busy", "cut off", "longer"])
def test_a_server_that_never_sends_what_it_should_is_left_alone(store, name):
    spoil(store, FAULTS[name], times=100)
    file = opened(store)
    for _ in range(5):
        assert file.receive([memoryview(bytearray(1 << 20)), memoryview(bytearray(1 << 20))], 0) in (0, 1 << 20)
    assert len(store.received) == 3
    check(f"{store.http}/{NAME}", store.folder)


def test_a_broken_connection_goes_on_near_where_it_broke(tmp_path):
    value = np.random.default_rng(0).random((2048, 2048), np.float32)  # one block of 16 MiB
    save_file({"w": value}, tmp_path / NAME)
    with closing(NearObjects(tmp_path)) as store:
        spoil(store, answered(Content_Length=16 << 20, body=half, hangs_up=True), times=1)
        check(f"{store.http}/{NAME}", tmp_path)
        again = [asked for _, key, asked, _ in store.requests if key and asked[0] > 4 << 20]
        assert sum(last + 1 - first for first, last in again) == 8 << 20


@pytest.mark.parametrize("code", [412, 206])
def test_a_file_that_changes_meanwhile_is_an_error(store, code):
    path = store.folder / NAME

    def change(*asked):
        os.utime(path, ns=(0, path.stat().st_mtime_ns + 10**9))
        answered(code)(*asked[:-1], store.tag(NAME))

    spoil(store, change, times=1)
    with pytest.raises(TransferError, match="changed while it was read: another version took its place"):
        check(f"{store.http}/{NAME}", store.folder)


def test_a_refusal_says_what_is_wrong(store):
    spoil(store, lambda handler, *_: store.status.update({NAME: 403}) or handler.send(403, b"no", {}), times=1)
    with pytest.raises(ForbiddenError, match="403"):
        check(f"{store.http}/{NAME}", store.folder)


def test_a_redirect_does_not_get_the_token(store, small, tmp_path, monkeypatch):
    with closing(ObjectServer(small)) as other:
        tokens = tmp_path / "tokens"
        tokens.write_text(f"{store.root} {TOKEN}\n{other.root} another-token-of-a-server\n")
        tokens.chmod(0o600)
        monkeypatch.setenv("SHARDLOAD_TOKENS", str(tokens))
        spoil(store, answered(302, body=lambda data: b"", Location=f"{other.http}/{NAME}"), times=100)
        check(f"{store.http}/{NAME}", small)
        told = [{name.lower(): value for name, value in headers.items()} for headers in store.received]
        assert told and all(headers["authorization"] == f"Bearer {TOKEN}" for headers in told)
        assert not other.headers


def test_a_server_that_stalls_is_given_up(store, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "4")

    def stall(handler, *asked):
        answered(Content_Length=2 << 20, body=half)(handler, *asked)
        store.released.wait()

    spoil(store, stall, times=1)
    check(f"{store.http}/{NAME}", store.folder)


@pytest.mark.parametrize("from_near", [True, False])
def test_who_waits_can_be_stopped(store, from_near):
    begun = threading.Event()

    def stall(handler, key):
        if handler.headers.get("Range", "").startswith("bytes=0-"):  # the header's page
            return False
        if "If-Match" in handler.headers and not from_near:
            handler.drop()
            return True
        begun.set()
        store.released.wait()
        return True

    store.fault = stall
    with closing(location_of(f"{store.http}/{NAME}").open()) as file, ThreadPoolExecutor() as pool:
        waiting = pool.submit(file.scatter_into, [memoryview(bytearray(1 << 20))], 1 << 20)
        assert begun.wait(60)
        file.cancel()
        with pytest.raises(TransferError, match="cancelled"):
            waiting.result(25)  # a stall is given up after 30 s
        with pytest.raises(TransferError, match="cancelled"):
            file.scatter_into([memoryview(bytearray(1))], 0)
