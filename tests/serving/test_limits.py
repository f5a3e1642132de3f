"""What one client may take of a server: connections, and requests a second."""

import socket

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from safetensors.numpy import save_file
from serving import served

import shardload
from shardload.serving.limits import ConnectionShare, RequestRate, client_of


@pytest.fixture
def root(tmp_path):
    (tmp_path / "models").mkdir()
    values = np.arange(4 << 20, dtype=np.float32)
    save_file({"x": values}, tmp_path / "models" / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(
    ("address", "client"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("2001:db8:1:2::9", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("::1", "::1"),
        ("no address", "no address"),
    ],
)
def test_a_client_is_an_address_or_a_network(address, client):
    assert client_of(address) == client


def taken(share, client, count):
    return sum(share.take(client) for _ in range(count))


def test_one_client_gets_half_of_all_connections_and_this_machine_all():
    share = ConnectionShare(9, each=None)
    assert taken(share, "192.0.2.7", 20) == 5
    assert taken(share, "192.0.2.8", 20) == 4
    share.give_back("192.0.2.8")
    assert not share.take("192.0.2.7") and share.take("192.0.2.8") and share.n_open == 9
    for client in ("127.0.0.1", "::1"):
        assert taken(ConnectionShare(9, each=None), client, 20) == 9


def test_a_limit_that_is_given_counts_for_this_machine_too():
    share = ConnectionShare(9, each=2)
    assert taken(share, "127.0.0.1", 20) == 2
    share.give_back("127.0.0.1")
    assert taken(share, "127.0.0.1", 20) == 1


def test_requests_of_one_client():
    now = [100.0]
    rate = RequestRate(4, now=lambda: now[0])
    assert [rate.wait_s("a") for _ in range(10)] == [0] * 8 + [1] * 2
    assert rate.wait_s("b") == 0
    now[0] += 0.25
    assert [rate.wait_s("a") for _ in range(2)] == [0, 1]
    now[0] += 100
    assert [rate.wait_s("a") for _ in range(10)] == [0] * 8 + [1] * 2
    slow = RequestRate(0.1, now=lambda: now[0])
    assert [slow.wait_s("a") for _ in range(2)] == [0, 10]
    now[0] += 4
    assert slow.wait_s("a") == 6


def test_very_many_clients_take_no_more_memory():
    rate = RequestRate(1, now=lambda: 0.0)
    assert [rate.wait_s("first") for _ in range(3)] == [0, 0, 1]
    for number in range(10_000):
        assert rate.wait_s(str(number)) == 0
    assert rate.wait_s("first") == 0  # forgotten, so it counts as idle


def test_a_client_that_has_its_connections_is_refused_more(root):
    with served("--root", root, "--client-connections", 2) as server:
        host, _, port = server.place.rpartition(":")
        first, second, third = (socket.create_connection((host, int(port)), timeout=30) for _ in range(3))
        with first, second, third:
            assert third.recv(1) == b""
            first.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert first.recv(1 << 12).startswith(b"HTTP/1.1 200 ")


def test_a_load_obeys_a_server_that_limits_requests(root):
    with served("--root", root, "--client-requests", 1) as server:
        while (answer := server.get("/models/"))[0] == 200:
            pass
        assert answer[0] == 429 and int(answer[1]["Retry-After"]) >= 1 and b"too many requests" in answer[2]
        assert server.get("/healthz")[0] == 200
        mesh = jax.make_mesh((8,), ("model",))
        found = shardload.load_arrays(
            f"{server.address}/models/model.safetensors", lambda name, shape: PartitionSpec("model"), mesh=mesh
        )
        assert np.array_equal(found["x"], np.arange(4 << 20, dtype=np.float32))
