"""Checkpoints at addresses are served like those of folders, and what is fetched leaves the bucket once."""

import asyncio
import contextlib
import http.client
import json
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from by_hand import check_same
from hub_server import COMMIT, HubServer
from object_server import ObjectServer
from safetensors.numpy import save_file
from saved_steps import save_step
from serving import eventually, served

import shardload
from shardload.errors import SourceNotFoundError, TransferError
from shardload.serving.application import Access, Service
from shardload.serving.roots.catalogue import Catalogue
from shardload.serving.roots.remote_roots import AddressRoot, RemoteCatalogue
from shardload.stores.remote import location_of

MIB = 1 << 20
BIG = "/m/model.safetensors"


def array(seed, n_bytes):
    return {"x": np.random.default_rng(seed).integers(0, 255, n_bytes, np.uint8)}


@pytest.fixture
def bucket(tmp_path):
    folder = tmp_path / "bucket" / "models"
    (folder / "m").mkdir(parents=True)
    save_file(array(0, 20 * MIB + 77), folder / "m" / "model.safetensors")
    (folder / "m" / "config.json").write_text('{"model_type": "gpt2"}')
    (folder / "m" / "secret of the model.txt").write_text("part of the checkpoint")
    save_file(array(1, 1000), folder / "one.safetensors")
    (folder / "secret").write_text("password")
    with contextlib.closing(ObjectServer(tmp_path / "bucket")) as server:
        yield server


@pytest.fixture
def big(bucket):
    return (bucket.folder / "models" / BIG[1:]).read_bytes()


@contextlib.contextmanager
def serving(bucket, *options, root="s3://bucket/models"):
    with served("--root", root, *options, env=bucket.environment()) as server:
        yield server


def names_of(server):
    return [each["name"] for each in json.loads(server.get("/api/v1/checkpoints")[2])["checkpoints"]]


@pytest.mark.parametrize("scheme", ["s3", "gs", "http"])
def test_files_ranges_and_conditions(bucket, big, scheme):
    bucket.has_index = True
    with serving(bucket, root=f"{getattr(bucket, scheme)}/models") as server:
        assert names_of(server) == ["m", "one.safetensors"]
        status, headers, body = server.get(BIG)
        assert (status, body) == (200, big)
        tag = headers["ETag"]
        assert tag.startswith('"') and not tag.startswith('"shardload-') and headers["Accept-Ranges"] == "bytes"
        status, headers, body = server.get(BIG, method="HEAD")
        assert (status, headers["ETag"], headers["Content-Length"], body) == (200, tag, str(len(big)), b"")
        for start, stop in [(0, 5), (8 * MIB - 3, 8 * MIB + 3), (MIB, len(big))]:
            status, headers, body = server.get(BIG, Range=f"bytes={start}-{stop - 1}", If_Range=tag)
            assert (status, body) == (206, big[start:stop])
        body = server.get(BIG, Range=f"bytes=1-2,{8 * MIB}-{8 * MIB + 9},{17 * MIB}-{17 * MIB + 1}")[2]
        assert big[1:3] in body and big[8 * MIB : 8 * MIB + 10] in body and big[17 * MIB : 17 * MIB + 2] in body
        assert server.get(BIG, If_None_Match=tag)[0] == 304 and server.get(BIG, If_Match='"other"')[0] == 412
        assert server.get(BIG, Range=f"bytes={len(big)}-")[0] == 416
        assert server.get("/secret")[0] == server.get("/m/none")[0] == 404
        assert b'href="secret%20of%20the%20model.txt"' in server.get("/m/")[2] and server.get("/m")[0] == 301
        entries = json.loads(server.get("/m/", Accept="application/json")[2])["entries"]
        assert {"name": "model.safetensors", "kind": "file", "size": len(big)} in entries
        assert server.end() == 0
    assert len(big) <= bucket.sent_of("m/model.safetensors") <= len(big) + MIB  # and a page, to recognise the format


def test_what_a_root_can_be(bucket):
    (bucket.folder / "empty").write_text("")
    for root, found in [
        ("models", ["m", "one.safetensors"]),
        ("models/m", ["m"]),
        ("models/m/model.safetensors", ["model.safetensors"]),
        ("", ["models", "models/m"]),  # it has weights of its own
    ]:
        with serving(bucket, root=f"s3://bucket/{root}".rstrip("/")) as server:
            assert names_of(server) == found
            assert server.get(f"/{found[0]}", method="HEAD")[0] in (200, 301)


def test_steps_and_several_roots(bucket, tmp_path):
    (bucket.folder / "runs").mkdir()
    for step in (2, 10):
        save_step(small_model(step), bucket.folder / "runs" / "run", step)
    (tmp_path / "here" / "folder").mkdir(parents=True)  # so that it is no checkpoint as a whole
    save_file(array(2, 10), tmp_path / "here" / "one.safetensors")
    options = ("--root", "s3://bucket/runs", "--root", tmp_path / "here")
    with serving(bucket, *options) as server:
        found = json.loads(server.get("/api/v1/checkpoints")[2])["checkpoints"]
        assert [(each["name"], each["kind"], each.get("source")) for each in found] == [
            ("m", "folder", "s3://bucket/models/m"),
            ("one.safetensors", "file", None),  # what is here hides what has the same name elsewhere
            ("run", "run", "s3://bucket/runs/run"),
        ]
        assert found[2]["steps"] == [2, 10]
        assert server.get("/one.safetensors")[2] == (tmp_path / "here" / "one.safetensors").read_bytes()
        for step in (2, 10):
            model = small_model(1)
            shardload.restore(model, f"{server.address}/run", step=step, mesh="1x8")
            check_same(model, small_model(step))


def small_model(seed):
    import keras

    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
    model.set_weights([np.random.default_rng(seed).normal(size=w.shape).astype("float32") for w in model.weights])
    return model


def test_steps_at_a_server_that_sends_empty_files_whole(bucket):
    save_step(small_model(1), bucket.folder / "models" / "run", 10)
    (bucket.folder / "models" / "run" / "10" / "empty").touch()
    bucket.has_index = bucket.sends_empty_whole = True
    with serving(bucket, root=f"{bucket.http}/models") as server:
        assert "run" in names_of(server)
        assert server.get("/run/10/empty")[::2] == (200, b"")


def test_a_root_that_is_a_server_shows_all_that_it_has(tmp_path):
    for name in ("alpha", "beta/gamma"):
        (tmp_path / "models" / name).mkdir(parents=True)
        save_file(array(1, 100), tmp_path / "models" / name / "model.safetensors")
    with served("--root", tmp_path / "models") as first, served("--root", first.address) as second:
        assert names_of(second) == names_of(first) == ["alpha", "beta/gamma"]
        assert second.get("/beta/gamma/model.safetensors")[2] == first.get("/beta/gamma/model.safetensors")[2]
        second.end()
        assert not any("shows no list" in line for line in second.log)


def test_many_clients_are_one_fetch_and_a_restart_reads_the_cache(bucket, big, tmp_path):
    options = ("--cache", tmp_path / "cache")
    with serving(bucket, *options) as server, ThreadPoolExecutor(12) as pool:
        assert all(body == big for _, _, body in pool.map(server.get, [BIG] * 12))
        assert bucket.sent_of("m/model.safetensors") == len(big) + 1  # one to ask for the version
        assert server.metric('shardload_received_bytes_total{source="source"}') == len(big)
        assert server.metric("shardload_sent_bytes_total") == 12 * len(big)
        [found] = [e for e in json.loads(server.get("/api/v1/checkpoints")[2])["checkpoints"] if e["name"] == "m"]
        assert found["source"] == "s3://bucket/models/m" and found["cached_bytes"] <= found["bytes"]
        assert server.end() == 0
    bucket.reset()
    with serving(bucket, *options) as server:
        assert server.get(BIG)[2] == big
        assert bucket.sent_of("m/model.safetensors") == 1
        assert server.metric('shardload_received_bytes_total{source="cache"}') == len(big)


def test_servers_of_one_address_have_the_same_tags(bucket, tmp_path):
    tags = []
    for options in [(), ("--cache", tmp_path / "cache")]:
        with serving(bucket, *options) as server:
            tags.append(server.get(BIG, method="HEAD")[1]["ETag"])
    assert tags[0] == tags[1]


def held_back(bucket, first):
    """Answer no request that begins at a byte until the event is set; say when one has come."""
    asked, release = threading.Event(), threading.Event()

    def fault(handler, key):
        asked_for = handler.headers.get("Range", "")
        if asked_for.startswith(f"bytes={first}-") and asked_for != "bytes=0-0" and "model.safetensors" in key:
            asked.set()
            release.wait(60)
        return False

    bucket.fault = fault
    return asked, release


def test_a_client_that_leaves_takes_nothing_from_others(bucket, big):
    with serving(bucket) as server, ThreadPoolExecutor(1) as pool:
        asked, release = held_back(bucket, 0)
        leaving = http.client.HTTPConnection(server.place, timeout=60)
        leaving.request("GET", BIG)
        assert asked.wait(60)
        other = pool.submit(server.get, BIG)
        leaving.close()
        release.set()
        assert other.result()[2] == big
        assert bucket.sent_of("m/model.safetensors") == len(big) + 1


def test_a_source_that_fails_is_an_error_with_a_reason(bucket, big):
    with serving(bucket) as server:
        bucket.status["models/m/model.safetensors"] = 403
        status, _, body = server.get(BIG)
        assert status == 502 and b"s3://bucket/models/m/model.safetensors" in body and b"403" in body
        assert server.metric('shardload_errors_total{kind="source"}') >= 1
        bucket.reset()
        assert server.get(BIG)[2] == big


def replaced_in_the_middle(bucket, content):
    """Replace the file before the second block of it is answered."""
    path = bucket.folder / "models" / BIG[1:]

    def fault(handler, key):
        if key.endswith("m/model.safetensors") and handler.headers.get("Range", "").startswith(f"bytes={8 * MIB}-"):
            bucket.fault = None
            path.with_name("new").write_bytes(content)
            path.with_name("new").rename(path)
        return False

    bucket.fault = fault


@pytest.mark.parametrize("scheme", ["s3", "gs", "http"])
def test_a_file_that_is_replaced_is_an_error_and_then_another_version(bucket, big, tmp_path, scheme):
    bucket.has_index = True
    with serving(bucket, "--cache", tmp_path / "cache", root=f"{getattr(bucket, scheme)}/models") as server:
        tag = server.get(BIG, method="HEAD")[1]["ETag"]
        replaced_in_the_middle(bucket, big[::-1])
        with pytest.raises(http.client.IncompleteRead) as cut:
            server.get(BIG)
        assert big.startswith(cut.value.partial)
        _, headers, body = server.get(BIG)
        assert body == big[::-1] and headers["ETag"] != tag
        assert server.get(BIG, If_Match=tag)[0] == 412


def test_a_source_that_fails_in_the_middle_ends_the_connection(bucket, big):
    def fault(handler, key):
        if handler.headers.get("Range", "").startswith(f"bytes={8 * MIB}-"):
            handler.refuse(403, "AccessDenied", {})
            return True
        return False

    with serving(bucket) as server:
        bucket.fault = fault
        with pytest.raises(http.client.IncompleteRead):
            server.get(BIG)
        bucket.fault = None
        assert server.get(BIG)[2] == big


@pytest.mark.parametrize("fault", ["unwritable", "too small"])
def test_a_cache_that_takes_nothing_fails_no_request(bucket, big, tmp_path, fault):
    cache = tmp_path / "cache"
    (cache / "shardload-ranges-1").mkdir(parents=True, mode=0o700)
    cache.chmod(0o700)
    if fault == "unwritable":
        (cache / "shardload-ranges-1" / "new").write_text("in the way")
    size = "1GiB" if fault == "unwritable" else "1MiB"
    with serving(bucket, "--cache", cache, "--cache-size", size) as server:
        for _ in range(2):
            assert server.get(BIG)[2] == big
        assert server.end() == 0


def test_what_was_not_used_for_longest_makes_room(bucket, big, tmp_path):
    cache = tmp_path / "cache"
    save_file(array(5, 20 * MIB), bucket.folder / "models" / "other.safetensors")
    options = ("--cache", cache, "--cache-size", "30MiB")
    with serving(bucket, *options) as server:
        assert server.get(BIG)[2] == big
        assert server.end() == 0
    for path in cache.rglob("object.json"):
        os.utime(path, times=(time.time() - 1000,) * 2)
    with serving(bucket, *options) as server:
        other = server.get("/other.safetensors")[2]
        assert server.end() == 0
    bucket.reset()
    with serving(bucket, *options) as server:
        assert server.get("/other.safetensors")[2] == other
        assert bucket.sent_of("other") < MIB


def test_a_scan_is_no_use_of_what_it_looks_at(bucket, big, tmp_path):
    options = ("--cache", tmp_path / "cache")
    with serving(bucket, *options) as server:
        assert server.get(BIG)[2] == big
        assert server.end() == 0
    used = list((tmp_path / "cache").rglob("object.json"))
    for path in used:
        os.utime(path, times=(1000.0, 1000.0))
    with serving(bucket, *options) as server:
        assert server.get("/none")[0] == 404
        assert used and {path.stat().st_mtime for path in used} == {1000.0}
        assert server.get(BIG, Range="bytes=0-9")[2] == big[:10]
        assert eventually(lambda: max(path.stat().st_mtime for path in used) > 1000.0)


def test_loads_are_equal(bucket, tmp_path):
    model = small_model(3)
    model.save_weights(bucket.folder / "models" / "some.weights.h5")
    with serving(bucket, "--cache", tmp_path / "cache") as server:
        for mesh in ("1x8", "2x4"):
            loaded = small_model(1)
            shardload.load_weights(loaded, f"{server.address}/some.weights.h5", mesh=mesh)
            check_same(loaded, model)


def test_a_model_of_a_hub(tmp_path, big, bucket):
    with contextlib.closing(HubServer(bucket.folder / "models" / "m")) as hub:
        env = {"HF_ENDPOINT": hub.root, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_DISABLE_XET": "1"}
        with served("--root", "hf://org/model", "--cache", tmp_path / "cache", env=env) as server:
            [found] = json.loads(server.get("/api/v1/checkpoints")[2])["checkpoints"]
            assert (found["name"], found["source"]) == ("model", f"hf://org/model@{COMMIT}")
            assert server.get("/model/model.safetensors")[2] == big
            assert server.get("/model/model.safetensors", Range="bytes=9-19")[2] == big[9:20]
        assert sum(path.startswith("api/models") for _, path, _ in hub.requests) == 1


def wait_until_old(catalogue):
    """A list that took long is not read again at once."""
    while not catalogue.is_old(is_search=True):
        time.sleep(0.01)


def test_what_comes_later_is_found_when_it_is_asked_for(bucket, monkeypatch):
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    catalogue = RemoteCatalogue([AddressRoot(lambda: location_of("s3://bucket/models"))], search_s=0)
    save_file(array(3, 10), bucket.folder / "models" / "later.safetensors")
    (bucket.folder / "models" / "one.safetensors").unlink()
    assert catalogue.file("later.safetensors") is None and not catalogue.is_old()
    asked = len(bucket.requests)
    catalogue.refresh()
    assert len(bucket.requests) == asked  # a list costs money
    wait_until_old(catalogue)
    catalogue.refresh(is_search=True)
    assert catalogue.file("later.safetensors") is not None and catalogue.file("one.safetensors") is None
    bucket.status[""] = 403
    wait_until_old(catalogue)
    with pytest.raises(TransferError, match="403"):
        catalogue.refresh(is_search=True)
    assert catalogue.file("later.safetensors") is not None


class CountingCatalogue(Catalogue):
    """A catalogue of folders that always wants to be scanned, and counts scans."""

    scans = 0

    def is_old(self, key=""):
        return True

    def refresh(self):
        self.scans += 1


def test_what_is_at_an_address_waits_for_no_scan_of_folders(bucket, big, tmp_path, monkeypatch):
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    catalogue = CountingCatalogue([tmp_path])
    addresses = RemoteCatalogue([AddressRoot(lambda: location_of("s3://bucket/models"))])

    async def ask():
        service = Service(catalogue, Access(), lambda facts: None, addresses=addresses)
        async with TestClient(TestServer(service.application())) as client:
            for path, status in ((BIG, 200), ("/m/", 200), ("/m/none", 404)):
                async with client.get(path) as answer:
                    assert (answer.status, catalogue.scans) == (status, 0)
                    body = await answer.read()
                    assert path != BIG or body == big
            async with client.get("/none") as answer:
                assert answer.status == 404 and catalogue.scans > 0

    asyncio.run(ask())


def test_addresses_that_lead_nowhere(bucket, monkeypatch):
    for name, value in bucket.environment().items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SourceNotFoundError, match="there is nothing at this address"):
        RemoteCatalogue([AddressRoot(lambda: location_of("s3://bucket/none"))])


def test_a_bucket_that_is_down_at_the_start(bucket, big, tmp_path):
    (tmp_path / "own").mkdir()
    save_file(array(2, 1000), tmp_path / "own" / "near.safetensors")
    bucket.status[""] = 503
    options = ("--root", "s3://bucket/models", "--root", tmp_path / "own")
    with served(*options, env={**bucket.environment(), "SHARDLOAD_REMOTE_TIMEOUT": "1"}) as server:
        assert server.told.startswith("1 checkpoint,")
        eventually(lambda: any("s3://bucket/models" in line and "tries again" in line for line in server.log))
        assert server.get("/own/near.safetensors")[0] == 200
        status, _, body = server.get("/readyz")
        assert (status, b"bucket" in body) == (503, False)
        assert server.get("/m/model.safetensors")[0] == 502
        bucket.status.clear()
        eventually(lambda: server.get("/readyz")[0] == 200)
        assert server.get("/m/model.safetensors")[2] == big


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_pages_and_loads_of_what_is_at_an_address(bucket, big, tmp_path, scheme):
    root = {"s3": bucket.s3, "http": bucket.http}[scheme] + "/models"
    bucket.has_index = True
    with serving(bucket, "--cache", tmp_path / "cache", root=root) as server:
        home = server.get("/")[2].decode()
        assert 'href="/ui/checkpoints/m"' in home
        page = server.get("/ui/checkpoints/m")[2].decode()
        assert root in page and "20.0 MiB" in page
        [tensor] = json.loads(server.get("/api/v1/checkpoints/m/tensors")[2])["tensors"]
        assert (tensor["name"], tensor["shape"]) == ("x", [20 * MIB + 77])
        assert 'value="prefetch"' in page and 'value="verify"' not in page
        assert server.get("/ui/checkpoints/none")[0] == 404
        server.get(BIG)
        [load] = json.loads(server.get("/api/v1/loads")[2])["loads"]
        assert (load["checkpoint"], load["sent"]) == ("m", len(big))


def test_a_page_shows_what_a_file_is_now(bucket):
    with serving(bucket) as server:

        def shape():
            [tensor] = json.loads(server.get("/api/v1/checkpoints/m/tensors")[2])["tensors"]
            return tensor["shape"]

        assert shape() == [20 * MIB + 77]
        save_file(array(7, 10 * MIB), bucket.folder / "models" / BIG[1:])
        assert eventually(lambda: shape() == [10 * MIB])
