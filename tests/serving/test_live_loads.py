"""What clients read now, as a page and as JSON: told from their requests."""

import json
import socket
import time
from types import SimpleNamespace
from urllib.parse import urlsplit

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import served

from shardload.serving.site.live_loads import LiveLoads, loads_page

FILE = "/models/model.safetensors"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = tmp_path_factory.mktemp("read")
    (made / "models").mkdir()
    (made / "other").mkdir()
    save_file({"x": np.zeros(16 << 20, np.float32)}, made / "models" / "model.safetensors")
    with served("--root", made) as found:
        yield found


def loads(server):
    return json.loads(server.get("/api/v1/loads")[2])["loads"]


def test_a_load_shows_while_it_is_read_and_after(server):
    assert loads(server) == [] and b"Nothing is being read" in server.get("/ui/loads")[2]
    place = urlsplit(server.address)
    with socket.create_connection((place.hostname, place.port)) as client:
        client.sendall(f"GET {FILE} HTTP/1.1\r\nHost: {place.netloc}\r\n\r\n".encode())
        client.recv(1000)  # and no more: the server waits

        def running():
            (load,) = loads(server)
            return load if load["running_requests"] == 1 else None

        load = eventually(running)
        assert (load["client"], load["checkpoint"]) == ("127.0.0.1", "models")
        assert load["is_live"] and load["sent"] < load["bytes"] and load["bytes"] > 64 << 20
        page = server.get("/ui/loads")[2].decode()
        assert f'<progress max="{load["bytes"]}"' in page and "1 request" in page and "/ui/checkpoints/models" in page
    eventually(lambda: loads(server)[0]["running_requests"] == 0)


def test_what_pages_and_lists_read_is_no_load(server):
    before = loads(server)
    server.get("/ui/checkpoints/models")
    server.get("/models/")
    server.get(FILE, method="HEAD")
    assert [load["sent"] for load in loads(server)] == [load["sent"] for load in before]


def eventually(found):
    """Ask until there is something, or raise after a minute."""
    ends_s = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < ends_s
    return value


def roots(**steps):
    run = SimpleNamespace(name="run", kind="run", n_bytes=100)
    file = SimpleNamespace(name="a.gguf", kind="file", n_bytes=10)
    found = {"run": run, "a.gguf": file}
    names = {"run/7": {"data": True, "meta": False}, "run/7/data": {"x": False}}
    return SimpleNamespace(
        checkpoint=found.get, names=names.get, file=lambda key: SimpleNamespace(n_bytes=20 if "meta" in key else 30)
    )


def test_loads_are_told_apart_by_client_checkpoint_and_step():
    now = [0.0]
    live = LiveLoads(roots(), lambda: now[0])
    for client, key, count in (
        ("a", "run/7/meta", 20),
        ("a", "run/7/data/x", 5),
        ("b", "run/7/meta", 1),
        ("a", "a.gguf", 3),
    ):
        with live.reading(client, key) as sent:
            sent(count)
    with live.reading("a", "other.json") as sent:
        sent(100)
    live.handed("a.gguf")
    found = [
        (x["client"], x["checkpoint"], x.get("step"), x["sent"], x["bytes"], x["handed_files"]) for x in live.to_json()
    ]
    assert found == [
        ("this machine", "a.gguf", None, 0, 10, 1),
        ("a", "a.gguf", None, 3, 10, 0),
        ("b", "run", 7, 1, 50, 0),
        ("a", "run", 7, 25, 50, 0),
    ]


def test_a_load_has_a_rate_and_ends_after_a_pause():
    now = [0.0]
    live = LiveLoads(roots(), lambda: now[0])
    with live.reading("a", "a.gguf") as sent:
        for now[0] in (1.0, 1.05, 2.0):
            sent(1000)
        now[0] = 4.0
        assert live.to_json()[0]["bytes_per_s"] == 750  # 3,000 bytes in 4 s
        now[0] = 6.5
        assert live.to_json()[0]["bytes_per_s"] == 200  # those of the last 5 s
        now[0] = 100.0
        (load,) = live.to_json()
        assert load["bytes_per_s"] == 0 and load["is_live"]  # its request is still open
    now[0] = 159.0
    assert live.to_json()[0]["is_live"]
    now[0] = 161.0
    assert not live.to_json()[0]["is_live"] and "<h2>Ended</h2>" in loads_page(live.to_json())
    with live.reading("a", "a.gguf") as sent:
        sent(1)
    assert [load["sent"] for load in live.to_json()] == [1]
    now[0] = 2000.0
    assert live.to_json() == []


def test_very_many_clients_are_not_all_kept():
    live = LiveLoads(roots(), lambda: 0.0)
    with live.reading("first", "a.gguf"):
        for i in range(700):
            with live.reading(str(i), "a.gguf"):
                pass
        clients = [load["client"] for load in live.to_json()]
    assert len(clients) == 500 and clients[0] == "699" and "first" in clients


def test_names_of_clients_and_checkpoints_never_become_markup():
    live = LiveLoads(roots(), lambda: 0.0)
    with live.reading('"><b>', "a.gguf"):
        page = loads_page([{**load, "checkpoint": '<i>"'} for load in live.to_json()])
    assert "<b>" not in page and "<i>" not in page
