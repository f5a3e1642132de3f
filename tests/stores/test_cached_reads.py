"""Reads of a remote store through the cache: what is still asked of the server, and that bytes are the object's own."""

import time
from email.utils import formatdate

import numpy as np
import object_server
import pytest
from object_server import served

import shardload
from shardload.errors import TransferError, UsageError
from shardload.stores.cache_choice import current_cache
from shardload.stores.range_files import FOLDER
from shardload.stores.requests import Requests

DATA = np.random.default_rng(0).bytes(3 << 20)
MIB = 1 << 20


@pytest.fixture
def server(tmp_path, monkeypatch):
    folder = tmp_path / "bucket"
    folder.mkdir()
    (folder / "model").write_bytes(DATA)
    with served(folder, monkeypatch) as found:
        yield found


@pytest.fixture
def cache(tmp_path):
    with shardload.cache(tmp_path / "cache", size="1GiB"):
        yield current_cache()


def read(address, *ranges, name="model"):
    """Read ranges of an object, as a new start does."""
    requests = Requests(address)
    pending = [requests.begin(name, *each) for each in ranges]
    found = [bytes(each.result()) for each in pending]
    current_cache().settle()
    return found


def sent(server):
    """(first, last) of each request since the last call, and the bytes that were sent."""
    found = [(asked, n) for _, _, asked, n in server.requests]
    server.requests.clear()
    return [asked for asked, _ in found], sum(n for _, n in found)


@pytest.mark.parametrize("scheme", ["s3", "gs", "http"])
def test_a_second_start_asks_for_one_byte_of_a_file(server, cache, scheme):
    address = getattr(server, scheme)
    ranges = [(0, MIB), (MIB, 2 * MIB), (2 * MIB, 3 * MIB)]
    assert b"".join(read(address, *ranges)) == DATA
    assert sent(server)[1] == len(DATA)
    assert b"".join(read(address, *ranges)) == DATA
    assert sent(server) == ([(0, 0)], 1)
    assert (cache.traffic.cached, cache.traffic.fetched, cache.traffic.stored) == (len(DATA), len(DATA), len(DATA))


def test_other_ranges_are_fetched_as_far_as_they_are_missing(server, cache):
    read(server.s3, (100_000, MIB), (2 * MIB, 3 * MIB))
    sent(server)
    assert read(server.s3, (50_000, 2 * MIB + 5), (2 * MIB + 7, 3 * MIB)) == [
        DATA[50_000 : 2 * MIB + 5],
        DATA[2 * MIB + 7 :],
    ]
    asked, n_bytes = sent(server)
    assert sorted(asked) == [(0, 0), (50_000, 99_999), (MIB, 2 * MIB - 1)]
    assert n_bytes == 1 + 50_000 + MIB
    assert read(server.s3, (50_000, 3 * MIB)) == [DATA[50_000:]]
    assert sent(server)[1] == 1


def test_whole_objects_and_their_ends(server, cache):
    for _ in range(2):
        requests = Requests(server.s3)
        assert requests.read("model") == DATA
        assert requests.read("model", 5, 10 * MIB) == DATA[5:]
        assert requests.read_small("model", limit=4 * MIB) == DATA
        assert requests.read("missing") is None and requests.version("missing") is None
        with pytest.raises(TransferError, match="shorter than it should be"):
            requests.read("model", 4 * MIB, 5 * MIB)
        cache.settle()


@pytest.mark.parametrize("scheme", ["s3", "http"])
@pytest.mark.parametrize("is_whole", [False, True])
def test_an_empty_object(server, cache, scheme, is_whole):
    server.sends_empty_whole = is_whole
    (server.folder / "empty").touch()
    for _ in range(2):
        assert Requests(getattr(server, scheme)).version("empty").size == 0


def test_a_changed_object_is_fetched(server, cache):
    read(server.s3, (0, MIB))
    (server.folder / "model").write_bytes(DATA[::-1])
    assert read(server.s3, (0, MIB)) == [DATA[::-1][:MIB]]
    assert cache.traffic.cached == 0
    sent(server)
    assert read(server.s3, (0, MIB)) == [DATA[::-1][:MIB]]
    assert sent(server)[1] == 1


def test_a_change_during_a_load_is_an_error_with_a_cache_too(server, cache):
    requests = Requests(server.s3)
    requests.read("model", 0, MIB)
    (server.folder / "model").write_bytes(DATA[::-1])
    with pytest.raises(TransferError, match="changed while it was read"):
        requests.read("model", 0, 2 * MIB)


def test_a_removed_object_is_missing(server, cache):
    read(server.s3, (0, MIB))
    (server.folder / "model").unlink()
    assert Requests(server.s3).read("model", 0, MIB) is None


def test_a_damaged_range_is_fetched_again(server, cache):
    read(server.s3, (0, MIB), (MIB, 2 * MIB))
    for path in (cache.folder.path / FOLDER / "objects").glob("*/*/*-*"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    sent(server)
    assert read(server.s3, (0, 2 * MIB)) == [DATA[: 2 * MIB]]
    assert sorted(sent(server)[0]) == [(0, 0), (0, MIB - 1), (MIB, 2 * MIB - 1)]
    assert len(cache.traffic.notes) == 1
    assert read(server.s3, (0, 2 * MIB)) == [DATA[: 2 * MIB]]
    assert sent(server)[1] == 1


def test_a_server_without_tags_needs_a_time_that_is_not_recent(server, cache, monkeypatch):
    monkeypatch.setattr(server, "tag", lambda key: "")
    monkeypatch.setattr(object_server, "LONG_AGO", formatdate(time.time() - 5, usegmt=True))
    read(server.http, (0, MIB))
    sent(server)
    read(server.http, (0, MIB))
    assert sent(server)[1] == MIB and cache.traffic.stored == 0
    monkeypatch.setattr(object_server, "LONG_AGO", formatdate(time.time() - 500, usegmt=True))
    read(server.http, (0, MIB))
    sent(server)
    read(server.http, (0, MIB))
    assert sent(server)[1] == 1
    monkeypatch.setattr(object_server, "LONG_AGO", formatdate(time.time() - 400, usegmt=True))
    read(server.http, (0, MIB))
    assert sent(server)[1] == 1 + MIB


def test_a_weak_tag_is_no_version(server, cache, monkeypatch):
    monkeypatch.setattr(server, "tag", lambda key: 'W/"same"')
    monkeypatch.setattr(object_server, "LONG_AGO", formatdate(time.time() - 5, usegmt=True))
    read(server.http, (0, MIB))
    assert cache.traffic.stored == 0


def test_a_signature_may_differ_but_no_other_part_of_a_query(server, cache):
    signed = "?X-Amz-Signature=one-secret&X-Amz-Expires=9&part=1"
    read(f"{server.http}{signed}", (0, MIB))
    sent(server)
    read(f"{server.http}?X-Amz-Signature=other-secret&part=1", (0, MIB))
    assert sent(server)[1] == 1
    read(f"{server.http}?X-Amz-Signature=one-secret&part=2", (0, MIB))
    assert sent(server)[1] == MIB


def test_no_secret_is_in_the_cache(server, cache, monkeypatch):
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token-secret")
    for address in (server.s3, f"{server.http}?X-Amz-Signature=sign-secret&key=query-secret"):
        read(address, (0, 1000))
    everything = list(cache.folder.path.rglob("*"))
    texts = [path.name.encode() + (path.read_bytes() if path.is_file() else b"") for path in everything]
    assert len([path for path in everything if path.name == "object.json"]) == 2
    assert not any(b"secret" in text or b"AWS" in text or b"Signature" in text for text in texts)


def test_another_endpoint_is_another_place(server, cache, monkeypatch):
    read(server.s3, (0, MIB))
    monkeypatch.setenv("AWS_ENDPOINT_URL", server.root.replace("127.0.0.1", "localhost"))
    sent(server)
    read(server.s3, (0, MIB))
    assert sent(server)[1] == MIB


def test_choices_of_a_cache(tmp_path, monkeypatch):
    assert current_cache() is None
    monkeypatch.setenv("SHARDLOAD_CACHE", str(tmp_path / "a"))
    assert current_cache().folder.path == tmp_path / "a" and current_cache().limit_bytes == 100 << 30
    monkeypatch.setenv("SHARDLOAD_CACHE_SIZE", "2GiB")
    assert current_cache().limit_bytes == 2 << 30
    with shardload.cache(tmp_path / "b", size="1GiB"):
        assert (current_cache().folder.path, current_cache().limit_bytes) == (tmp_path / "b", 1 << 30)
        with shardload.cache(None):
            assert current_cache() is None
        assert current_cache().folder.path == tmp_path / "b"
    assert current_cache().folder.path == tmp_path / "a" and not list(tmp_path.iterdir())
    monkeypatch.setenv("SHARDLOAD_CACHE_SIZE", "much")
    with pytest.raises(UsageError, match=r"SHARDLOAD_CACHE_SIZE: Cannot read 'much' as a number of bytes"):
        current_cache()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((5,), "Cannot use directory=5: expected a path"),
        (("",), "Cannot use '' as the cache, expected the path of a folder"),
        (("s3://bucket/x",), "it is a URL"),
    ],
)
def test_a_folder_that_is_none(arguments, said):
    with pytest.raises(UsageError, match=said):
        shardload.cache(*arguments)
    with pytest.raises(UsageError, match="size: "):
        shardload.cache("x", size="1")
    assert current_cache() is None
