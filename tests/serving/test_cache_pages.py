"""The state of the cache and of the peers, as a page and as JSON; and what is pinned stays in a cache that is full."""

import contextlib
import json
import os
import re
import time
from types import SimpleNamespace

import numpy as np
import pytest
from object_server import ObjectServer
from safetensors.numpy import save_file
from serving import eventually, send_form, served

from shardload.errors import UsageError
from shardload.serving.rack.cache_contents import pin
from shardload.serving.site.cache_pages import cache_page

MIB = 1 << 20
PAGE = "/ui/cache"


@pytest.fixture
def bucket(tmp_path):
    for seed, name in enumerate(("a", "b", "c")):
        (tmp_path / "bucket" / name).mkdir(parents=True)
        values = np.random.default_rng(seed).integers(0, 255, 9 * MIB, np.uint8)
        save_file({"x": values}, tmp_path / "bucket" / name / "model.safetensors")
    with contextlib.closing(ObjectServer(tmp_path / "bucket")) as server:
        yield server


def facts(server):
    return json.loads(server.get("/api/v1/cache")[2])


def prefetch(server, name):
    assert send_form(server, "/ui/jobs", {"kind": "prefetch", "checkpoint": name})[0] == 303
    number = json.loads(server.get("/api/v1/jobs")[2])["jobs"][-1]["id"]
    eventually(lambda: json.loads(server.get(f"/api/v1/jobs/{number}")[2])["state"] == "done")


def test_what_is_in_the_cache_is_told_for_each_checkpoint(bucket, tmp_path):
    options = ("--root", "s3://bucket", "--cache", tmp_path / "cache", "--cache-size", "1GiB", "--pin", "b")
    with served(*options, env=bucket.environment()) as server:
        prefetch(server, "a")
        found = facts(server)
        cache = found["cache"]
        assert (cache["folder"], cache["limit_bytes"], cache["is_on"]) == (str(tmp_path / "cache"), 1 << 30, True)
        assert cache["used_bytes"] > 9 * MIB and cache["removed_bytes"] == 0 and cache["notes"] == []
        a, b, c = cache["checkpoints"]
        assert [each["name"] for each in (a, b, c)] == ["a", "b", "c"] and a["source"] == "s3://bucket/a"
        assert a["cached_bytes"] == a["bytes"] > 9 * MIB and a["is_in_use"] and not a["is_pinned"]
        # What a scan has read of the others to recognise them is there, too.
        assert b["cached_bytes"] < MIB and c["cached_bytes"] < MIB and b["is_pinned"] and not c["is_pinned"]
        assert found["blocks"].keys() == {"memory", "cache", "peer", "miss"} and found["blocks"]["miss"] == 2
        assert found["peers"] == []
        assert sum(found["received_bytes"].values()) == a["bytes"]
        page = server.get(PAGE)[2].decode()
    assert str(tmp_path / "cache") in page and "2 missing" in page and "1.0 GiB" in page and "Peers" not in page
    assert f'href="{PAGE}" aria-current=page' in page and " style=" not in page
    shown = dict(re.findall(r'href="/ui/checkpoints/(\w)">\w</a><span class="client">([^<]*)<', page))
    assert shown["a"] == "in use" and "pinned" in shown["b"] and "pinned" not in shown["c"]
    # What is there as a whole needs no button.
    assert set(re.findall(r'name="checkpoint" value="(\w)"', page)) == {"b", "c"} and "Verify" not in page


def test_a_server_without_a_cache_says_so(bucket, tmp_path):
    (tmp_path / "here").mkdir()
    save_file({}, tmp_path / "here" / "alone.safetensors")
    with served("--root", tmp_path / "here") as server:
        assert facts(server)["cache"] is None
        assert b"needs none" in server.get(PAGE)[2]
    with served("--root", "s3://bucket", env=bucket.environment()) as server:
        assert facts(server)["cache"] is None
        page = server.get(PAGE)[2].decode()
        assert "--cache DIR" in page and "512.0 MiB" in page and "0 missing" in page


def test_what_is_pinned_stays_and_the_rest_goes(bucket, tmp_path):
    options = ("--root", "s3://bucket", "--cache", tmp_path / "cache", "--cache-size")
    with served(*options, "1GiB", env=bucket.environment()) as server:
        prefetch(server, "a")
        prefetch(server, "b")
        assert server.end() == 0
    objects = {json.loads(path.read_text())["address"]: path for path in (tmp_path / "cache").rglob("object.json")}
    with served(*options, "20MiB", "--pin", "a", env=bucket.environment()) as server:
        for age_s, name in ((3000, "a"), (2000, "b")):
            os.utime(objects[f"s3://bucket/{name}/model.safetensors"], times=(time.time() - age_s,) * 2)
        prefetch(server, "c")
        found = {each["name"]: each for each in facts(server)["cache"]["checkpoints"]}
        assert found["a"]["cached_bytes"] == found["a"]["bytes"] and found["c"]["cached_bytes"] == found["c"]["bytes"]
        assert found["b"]["cached_bytes"] < found["b"]["bytes"] and facts(server)["cache"]["removed_bytes"] > 0


def test_peers_are_shown_with_what_they_sent(bucket, tmp_path):
    with served("--root", "s3://bucket", env=bucket.environment()) as first:
        first.get("/a/model.safetensors")
        peers = ("--peer", first.address, "--peer", "http://127.0.0.1:1")
        with served("--root", "s3://bucket", *peers, env=bucket.environment()) as second:
            up, down = facts(second)["peers"]
            assert (up["url"], up["state"], up["blocks"], up["problem"]) == (first.address, "reachable", 0, None)
            assert up["since_s"] <= up["answered_s"] and (down["state"], down["answered_s"]) == ("left out", None)
            assert down["problem"] == "cannot connect: Connection refused"
            assert second.get("/a/model.safetensors")[0] == 200
            up, down = facts(second)["peers"]
            assert (up["blocks"], up["bytes"]) == (2, len(first.get("/a/model.safetensors")[2])) and down["problem"]
            page = second.get(PAGE)[2].decode()
            assert "2 blocks sent, 9.0 MiB" in page and "left out" in page and "<h2>Peers</h2>" in page
            first.process.kill()
            first.process.wait()
            assert second.get("/b/model.safetensors")[0] == 200
            up, _ = facts(second)["peers"]
            assert up["state"] == "left out" and up["problem"] and up["answered_s"]


def catalogue(problem=None, **n_bytes):
    found = {name: SimpleNamespace(name=name, n_bytes=n, source=f"s3://b/{name}") for name, n in n_bytes.items()}
    problems = [problem] if problem else []
    return SimpleNamespace(checkpoint=found.get, checkpoints=found.values, problems=lambda: problems)


def test_what_cannot_be_pinned_is_refused():
    cache = SimpleNamespace(limit_bytes=100)
    assert pin([], catalogue(), None) == []
    assert pin(["m", "n", "m"], catalogue(m=60, n=40), cache) == []
    assert cache.pinned() == ["s3://b/m", "s3://b/n"]
    later = catalogue(problem="a bucket is down")
    assert pin(["m"], later, cache) == ["m"]
    assert cache.pinned() == []
    later.checkpoint = catalogue(m=1).checkpoint
    assert cache.pinned() == ["s3://b/m"]
    with pytest.raises(UsageError, match=r"Cannot pin m: the server has no cache, .*--cache DIR"):
        pin(["m"], catalogue(m=1), None)
    with pytest.raises(UsageError, match=r"Cannot pin x: no checkpoint .* expected one of these: m"):
        pin(["m", "x"], catalogue(m=1), cache)
    with pytest.raises(
        UsageError, match=r"Cannot pin 2 checkpoints: together 101 bytes, .* keeps 100 bytes.*--cache-size"
    ):
        pin(["m", "n"], catalogue(m=60, n=41), cache)


def test_names_and_notes_never_become_markup():
    cached = {"name": '"><b>', "source": "<i>", "bytes": 0, "cached_bytes": 0, "used_s": None, "is_in_use": False,
              "is_pinned": False}  # fmt: skip
    cache = {"folder": "<b>", "limit_bytes": 10, "used_bytes": 20, "removed_bytes": 0, "is_on": False, "notes": ["<b>"],
             "checkpoints": [cached] * 201}  # fmt: skip
    peer = {"url": "<b>", "state": "left out", "since_s": 0.0, "answered_s": None, "blocks": 0, "bytes": 0,
            "problem": "<b>"}  # fmt: skip
    counts = dict.fromkeys(("memory", "cache", "peer", "miss", "source"), 0)
    page = cache_page({"cache": cache, "blocks": counts, "received_bytes": counts, "peers": [peer]}, has_addresses=True)
    assert "<b>" not in page and "<i>" not in page and page.count('class="name"') == 201
    assert "Without 1 checkpoint" in page and "cannot be written to" in page and "1970-01-01 00:00:00 UTC" in page
