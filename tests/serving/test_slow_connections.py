"""Slow connections, as `python -m benchmarks.slow_connections` opens ten thousand: they end, and harm no one else."""

import contextlib
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import eventually, served

from benchmarks.slow_connections import SlowClients

FILE = "/models/model.safetensors"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have one address that begins with 127")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("root")
    (made / "models").mkdir()
    save_file({"x": np.random.default_rng(0).random(8 << 20, np.float32)}, made / "models" / "model.safetensors")
    return made


@contextlib.contextmanager
def slow_clients(server):
    host, _, port = server.place.rpartition(":")
    slow = SlowClients((host, int(port)))
    try:
        yield slow
    finally:
        slow.close()


def test_one_address_gets_its_share_and_others_theirs(folder):
    data = (folder / FILE[1:]).read_bytes()
    with served("--root", folder, "--client-connections", 30) as server, slow_clients(server) as slow:
        slow.open(200, addresses=1)
        eventually(lambda: slow.count_open() == 30)
        assert server.get(FILE)[2] == data  # from another address
        slow.open(200, addresses=10)
        eventually(lambda: slow.count_open() == 30 + 180 and server.metric("shardload_connections") == 211)
        assert server.get(FILE)[2] == data


@pytest.mark.slow
def test_slow_connections_end_by_the_limits_of_the_server(folder):
    data = (folder / FILE[1:]).read_bytes()
    with served("--root", folder) as server, slow_clients(server) as slow:
        assert server.get(FILE)[2] == data
        before = server.descriptors()
        slow.open(300, addresses=10)
        eventually(lambda: server.descriptors() >= before + 300)

        def step():
            slow.step()
            assert server.get(FILE)[2] == data
            return slow.count_open() == 0

        eventually(step, within_s=400)
        eventually(lambda: server.descriptors() <= before + 2)
