"""Clients on the server's machine get open files; whatever is wrong with these, they request the bytes instead."""

import json
import os
import resource
import socket
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from serving import eventually, served

import shardload
from shardload.errors import TransferError
from shardload.stores.handed import HandedFiles, handed_files
from shardload.stores.location import Fingerprint
from shardload.stores.remote import location_of
from shardload.stores.tokens import BearerToken

NAME = "models/model.safetensors"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "root" / "models").mkdir(parents=True)
    (tmp_path / "root" / "other").mkdir()
    values = {f"w{i}": np.random.default_rng(i).random((512, 512), np.float32) for i in range(4)}
    save_file(values, tmp_path / "root" / NAME)
    return tmp_path / "root"


@pytest.fixture
def server(folder):
    with served("--root", folder) as found:
        yield found


def targets(values):
    import jax

    mesh = jax.make_mesh((1, 8), ("batch", "model"))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("model"))
    return {name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=sharding) for name, v in values.items()}


def loaded(source, folder):
    values = load_file(folder / NAME)
    found = shardload.load_arrays(source, targets(values))
    assert all(np.array_equal(found[name], value) for name, value in values.items())


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_no_weight_goes_through_a_connection(server, folder, host):
    address = f"http://{host}:{server.place.rpartition(':')[2]}/models"
    loaded(address, folder)
    assert server.sent() <= 256 << 10  # the page with the header, which tells the version
    assert b"shardload_handed_files_total 0" not in server.get("/metrics")[2]
    eventually(lambda: any("HAND /models/model.safetensors" in line for line in server.log))


def test_a_server_may_send_all_the_same(folder):
    with served("--root", folder, "--no-hand-over") as server:
        loaded(f"{server.address}/models", folder)
        assert server.sent() > 4 << 20
        assert not any("HAND" in line for line in server.log)


@pytest.mark.parametrize("hands_over", [True, False])
def test_over_tls(folder, certificate, monkeypatch, hands_over):
    monkeypatch.setenv("SSL_CERT_FILE", certificate.path)
    option = "--hand-over" if hands_over else "--no-hand-over"
    with served("--root", folder, *certificate.options, option) as server:
        assert server.address.startswith("https://")
        loaded(f"{server.address}/models", folder)
        server.end()
        assert any("HAND" in line for line in server.log) == hands_over
        with pytest.raises(TransferError):
            shardload.inspect(f"{server.address.replace('https', 'http')}/models")


def test_only_with_a_token(folder, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-this-server\n")
    tokens.chmod(0o600)
    with served("--root", folder, "--token-file", tokens) as server:
        asked = server.get("/api/v1/server", Authorization="Bearer a-token-of-this-server")
        name, tag = json.loads(asked[2])["socket"], tag_of(server, Authorization="Bearer a-token-of-this-server")
        right, wrong = (BearerToken(server.address, text) for text in ("a-token-of-this-server", "another-token-of-it"))
        for token in (None, wrong):
            assert HandedFiles(name, token).open(NAME, tag=tag, shown="x") is None
            assert handed_files(server.address, token) is None
        with_closing(HandedFiles(name, right).open(NAME, tag=tag, shown="x"))
        assert "a-token" not in "".join(server.log)


def tag_of(server, **headers):
    return server.get(f"/{NAME}", method="HEAD", **headers)[1]["ETag"].strip('"')


def with_closing(file):
    assert file is not None
    file.close()


def test_names_that_are_not_served(server, folder):
    (folder / "secret").write_text("password")
    found = handed_files(server.address, None)
    for key in (
        "secret",
        "../etc/passwd",
        "/etc/passwd",
        "models",
        "",
        "models/../secret",
        f"./{NAME}",
        None,
        5,
        [NAME],
    ):
        assert found.open(key, tag=tag_of(server), shown="x") is None
    assert found.open(NAME, tag="another version", shown="x") is None
    with_closing(found.open(NAME, tag=tag_of(server), shown="x"))


def test_handing_over_goes_on_after_bad_lines_and_without_descriptors(server, folder):
    name = json.loads(server.get("/api/v1/server")[2])["socket"]
    for line in (b"[" * 50_000 + b"\n", b"\xff\n", b"1\n", b"\n"):
        with socket.socket(socket.AF_UNIX) as asked:
            asked.connect(f"\0{name}")
            asked.sendall(line)
            assert asked.recv(1) == b""
    pid, limits = server.process.pid, resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    with socket.socket(socket.AF_UNIX) as asked:
        asked.connect(f"\0{name}")
        time.sleep(0.3)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    time.sleep(1)
    with_closing(handed_files(server.address, None).open(NAME, tag=tag_of(server), shown="x"))
    assert not any("Traceback" in line for line in server.log)


def test_a_file_that_is_replaced_or_written_to_in_the_middle(server, folder):
    place = location_of(f"{server.address}/{NAME}")
    before = place.identity()
    content = (folder / NAME).read_bytes()
    with (folder / NAME).open("r+b") as file:
        file.write(content[:10])
    assert place.identity() != before
    assert (
        place.store.open(place.key).descriptor is None
    )  # no longer that version: its bytes are requested, and refused
    with pytest.raises(TransferError, match="changed"):
        place.store.open(place.key).read_into(memoryview(bytearray(2 << 20)), 0)


@pytest.mark.parametrize("option", ["--hand-over", "--no-hand-over"])
def test_a_file_that_is_written_to_while_it_is_loaded_is_noticed(folder, option):
    """Also by its last byte, after all of them were sent: what the socket holds are pages of the file, no copies."""
    with served("--root", folder, option) as server:
        place = location_of(f"{server.address}/{NAME}")
        files = Fingerprint.of([place])
        with closing(place.open()) as file:
            file.read_into(memoryview(bytearray(file.n_bytes)), 0)
        files.check()
        with (folder / NAME).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"x")
        with pytest.raises(TransferError, match="changed"):
            files.check()


@pytest.mark.parametrize(
    "what", ["nothing", "garbage", "no file", "pipe", "folder", "another version", "two", "silence"]
)
def test_what_another_server_may_hand_over(what, folder, monkeypatch):
    name = f"test-{os.getpid()}-{what}"
    path = folder / NAME
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()

        def answer():
            made, _ = listener.accept()
            with made:
                made.recv(1 << 16)
                right, opened = b'{"etag": "right"}', []
                if what in ("pipe", "two"):
                    opened = list(os.pipe())[: 1 + (what == "two")]
                elif what == "folder":
                    opened = [os.open(folder, os.O_RDONLY)]
                elif what not in ("nothing", "no file", "silence"):
                    opened = [os.open(path, os.O_RDONLY)]
                if what == "silence":
                    made.settimeout(30)
                    made.recv(1)
                elif what != "nothing":
                    said = {"garbage": b"\xff{", "another version": b'{"etag": "other"}'}.get(what, right)
                    socket.send_fds(made, [said], opened)
                for each in opened:
                    os.close(each)

        monkeypatch.setattr("shardload.stores.handed.WAIT_S", 0.5)
        thread = threading.Thread(target=answer)
        thread.start()
        before = sum(1 for _ in Path("/proc/self/fd").iterdir())
        assert HandedFiles(name, None).open(NAME, tag="right", shown="x") is None
        thread.join(30)
    assert sum(1 for _ in Path("/proc/self/fd").iterdir()) <= before


def test_other_servers_and_machines_are_not_asked_for_more(tmp_path):
    assert handed_files("http://192.0.2.1:8600", None) is None
    assert handed_files("http://no-such-host.invalid", None) is None
    assert HandedFiles("no-such-socket", None).open(NAME, tag="", shown="x") is None


def test_an_end_of_the_server_in_the_middle_leaves_what_was_handed_over(server, folder):
    place = location_of(f"{server.address}/{NAME}")
    file = place.store.open(place.key)
    assert server.end() == 0
    buffer = bytearray(file.n_bytes)
    file.read_into(memoryview(buffer), 0)
    file.close()
    assert bytes(buffer) == (folder / NAME).read_bytes()
