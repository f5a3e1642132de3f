"""Tokens for HTTP servers: sent to the server of their line alone, and shown nowhere."""

import itertools
import re
import traceback
from contextlib import closing

import numpy as np
import pytest
from jax.sharding import PartitionSpec
from object_server import ObjectServer, served
from safetensors.numpy import save_file

import shardload
from shardload.errors import SourceError
from shardload.stores.answers import ForbiddenError, page_of, pause_asked
from shardload.stores.remote import location_of
from shardload.stores.requests import Requests
from shardload.stores.tokens import origin_of, token_for

TOKEN = "s3cr3t-t0ken"
BEARER = f"Bearer {TOKEN}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    found = tmp_path_factory.mktemp("served")
    (found / "model").mkdir()
    save_file({"a": np.arange(2048, dtype=np.float32)}, found / "model" / "odd_name.safetensors")
    return found


@pytest.fixture
def server(folder, monkeypatch):
    """A server that sends nothing without the token."""
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "1")
    monkeypatch.delenv("SHARDLOAD_TOKENS", raising=False)
    with served(folder, monkeypatch) as found:
        found.fault = asks_for_a_token
        yield found


@pytest.fixture
def other(folder):
    """A second server, which asks for no token."""
    with closing(ObjectServer(folder)) as found:
        yield found


@pytest.fixture
def tokens(tmp_path, monkeypatch):
    """Write a file of tokens, which only its user can read, and name it in the environment."""

    def written(text, mode=0o600):
        path = tmp_path / "tokens"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        path.chmod(mode)
        monkeypatch.setenv("SHARDLOAD_TOKENS", str(path))
        return path

    return written


def asks_for_a_token(handler, key, status=401):
    """Refuse a request without the token."""
    del key
    if handler.headers.get("Authorization") == BEARER:
        return False
    handler.refuse(status, "Unauthorized", {"WWW-Authenticate": "Bearer"})
    return True


def sent_to(server):
    """What each request had as authorization."""
    return {headers.get("authorization", headers.get("Authorization")) for headers in server.headers}


def model_at(server):
    return f"{server.http}/model/odd_name.safetensors"


def error_of(call):
    """The error of a call, which shows the token nowhere."""
    with pytest.raises(shardload.errors.ShardloadError) as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value))
    assert TOKEN not in shown + repr(caught.value) and TOKEN[:6] not in str(caught.value)
    return caught.value


# ---- where a token goes --------------------------------------------------------------------------


def test_a_token_goes_with_each_request_to_its_server(server, tokens):
    tokens(f"# of mine\n\n{server.root} {TOKEN}\n")
    arrays = shardload.load_arrays(model_at(server), lambda name, shape: PartitionSpec(), mesh="1x8")
    assert np.array_equal(np.asarray(arrays["a"]), np.arange(2048, dtype=np.float32))
    assert sent_to(server) == {BEARER}


def test_a_token_goes_to_no_other_server(server, other, tokens):
    tokens(f"{server.root} {TOKEN}\n")
    shardload.inspect(model_at(other))
    assert sent_to(other) == {None}


@pytest.mark.parametrize("code", [301, 302, 303, 307, 308])
def test_a_token_is_not_sent_to_where_its_server_redirects(server, other, tokens, code):
    tokens(f"{server.root} {TOKEN}\n")
    name = "model/odd_name.safetensors"
    server.moved[name] = code, f"{other.http}/{name}"
    shardload.inspect(model_at(server))
    assert sent_to(server) == {BEARER}
    assert other.headers and sent_to(other) == {None}


@pytest.mark.parametrize("how", ["another host", "a way back"])
def test_a_token_is_not_sent_to_a_redirect_to_the_same_port(server, other, tokens, how):
    """Neither under another name of the host, nor where another server has led back."""
    tokens(f"{server.root} {TOKEN}\n")
    back = f"{server.http}/model/moved"
    first = back.replace("127.0.0.1", "localhost") if how == "another host" else f"{other.http}/x"
    server.moved["model/first"] = 307, first
    other.moved["x"] = 307, back
    error_of(lambda: shardload.inspect(f"{server.http}/model/first", format="safetensors"))
    assert sent_to(server) == {BEARER, None} and sent_to(other) <= {None}


@pytest.mark.parametrize("is_chunked", [False, True])
def test_index_pages_are_read_with_the_token(server, tokens, is_chunked):
    """By obstore, or by urllib where the page is made as it is sent."""
    tokens(f"{server.root} {TOKEN}\n")
    server.has_index, server.is_chunked = True, is_chunked
    assert location_of(f"{server.http}/model").names() == ["odd_name.safetensors"]
    assert sent_to(server) == {BEARER}


def test_a_page_that_redirects_gets_no_token_there(server, other):
    server.moved["model"] = 302, f"{other.http}/model/"
    assert page_of(f"{server.http}/model", 1000, headers={"authorization": BEARER}) is None
    assert sent_to(server) == {BEARER} and other.headers == []


def test_a_busy_server_is_asked_with_the_token_how_long_to_wait(server, tokens):
    waited = []

    def busy(handler, key):
        if asks_for_a_token(handler, key):
            return True
        waited.append(key)
        if len(waited) <= 2:
            handler.refuse(503, "SlowDown", {"Retry-After": "0.2"})
        return len(waited) <= 2

    tokens(f"{server.root} {TOKEN}\n")
    server.fault = busy
    shardload.inspect(model_at(server))
    assert sent_to(server) == {BEARER}
    server.fault = asks_for_a_token
    assert pause_asked(model_at(server)) == 0.0


@pytest.mark.parametrize("headers", [{"authorization": "Bearer of-a-hub"}, {}])
def test_a_hub_gets_its_own_token_only(server, tokens, headers):
    tokens(f"{server.root} {TOKEN}\n")
    server.fault = None
    assert Requests(server.http, headers=headers).exists("model/odd_name.safetensors")
    assert sent_to(server) == {headers.get("authorization")}


def test_a_bucket_gets_no_token(server, tokens):
    """Though its endpoint has a line in the file; nor is the file read, which may be wrong."""
    tokens(f"{server.root} {TOKEN}\n", mode=0o644)
    server.fault = None
    shardload.inspect(f"{server.s3}/model/odd_name.safetensors")
    assert server.headers and not any(TOKEN in str(headers) for headers in server.headers)


def test_a_server_is_the_same_in_all_ways_to_write_it(tokens):
    tokens(f"HTTPS://Host.example:443/ {TOKEN}\nhttp://[::1]:8600 other\r\n")
    assert token_for("https://host.EXAMPLE").headers == {"authorization": BEARER}
    assert token_for("http://[::1]:8600").text == "other"
    others = "http://host.example", "https://host.example:8600", "https://host.example.org", "https://a.host.example"
    assert [token_for(root) for root in others] == [None] * 4
    assert [token_for(root) for root in ("s3://host.example", "http://[::1]")] == [None] * 2


@pytest.mark.parametrize(
    ("address", "origin"),
    [
        ("http://h:80", "http://h"), ("http://h:8080/", "http://h:8080"), ("https://H:080", "https://h:80"),
        ("https://h:", "https://h"), ("https://h:0", None), ("https://h:65536", None), ("https://h:x", None),
        ("ftp://h", None), ("h:80", None), ("https://h/a", None), ("https://u@h", None), ("https://u:p@h", None),
        ("https://h?a", None), ("https://h#a", None), ("https://h\\@evil", None), ("https://", None), ("", None),
    ],
)  # fmt: skip
def test_what_is_the_origin_of_a_server(address, origin):
    assert origin_of(address) == origin


# ---- a file that cannot be used ------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o620])
def test_a_file_that_others_may_read_is_refused(tokens, mode):
    path = tokens(f"https://host {TOKEN}\n", mode)
    said = error_of(lambda: shardload.inspect("https://host/model.safetensors"))
    assert isinstance(said, SourceError)
    assert f"Cannot use the tokens in {path}, which SHARDLOAD_TOKENS names: its mode is {mode:o}" in str(said)
    assert str(said).endswith(f"Run: chmod 600 {path}")
    path.chmod(0o600)
    assert token_for("https://host").text == TOKEN


LINES = {
    f"https://host\n{TOKEN}": "Cannot use line 1 of .*: found 1 word, expected two: https://host:8600 TOKEN",
    f"\n# {TOKEN}\nhttps://host Bearer {TOKEN}": "Cannot use line 3 of .*: found 3 words, expected two",
    f"{TOKEN} https://host": "Cannot use line 1 of .*: its first word is not the address of an HTTP server",
    f"https://host/path {TOKEN}": "no path, user or query",
    f"https://{TOKEN}@host {TOKEN}": "no path, user or query",
    f"s3://bucket {TOKEN}": "expected http:// or https://",
    f"https://host {TOKEN}é": "Cannot use line 1 of .*: its token has a character that is not printable ASCII",
    f"https://host {TOKEN}\0": "not printable ASCII",
    f"https://host {TOKEN}\nhttps://HOST:443/ {TOKEN}2": "Cannot use line 2 of .*: line 1 is for this server, too",
}


@pytest.mark.parametrize("text", LINES)
def test_a_line_that_cannot_be_used_is_named_and_not_shown(tokens, text):
    path = tokens(text)
    said = error_of(lambda: shardload.inspect("https://host/model.safetensors"))
    assert isinstance(said, SourceError) and str(path) in str(said) and "SHARDLOAD_TOKENS" in str(said)
    assert re.search(LINES[text], str(said))


def test_other_files_are_no_files_of_tokens(tokens, tmp_path, monkeypatch):
    path = tokens(b"x" * (1 << 20) + b"x")
    assert f"{path}, which SHARDLOAD_TOKENS names, as a file of tokens: it has more than" in str(
        error_of(lambda: token_for("https://host"))
    )
    for name, said in (("nowhere", "There is no file"), ("", "should be a file, but it is a folder")):
        monkeypatch.setenv("SHARDLOAD_TOKENS", str(tmp_path / name))
        found = error_of(lambda: shardload.inspect("https://host/model.safetensors"))
        assert "Cannot read the tokens that SHARDLOAD_TOKENS names: " in str(found) and said in str(found)
        assert not isinstance(found, FileNotFoundError)  # it is not the checkpoint that is missing


def test_a_file_as_windows_writes_it_is_read(tokens):
    tokens(b"\xef\xbb\xbf" + f"https://host\t{TOKEN}\r\n\r\n".encode())
    assert token_for("https://host").text == TOKEN


def test_a_file_below_home_is_found(tokens, monkeypatch):
    path = tokens(f"https://host {TOKEN}")
    monkeypatch.setenv("HOME", str(path.parent))
    monkeypatch.setenv("SHARDLOAD_TOKENS", "~/tokens")
    found = token_for("https://host")
    assert found.text == TOKEN and TOKEN not in repr(found)


# ---- a server that refuses -----------------------------------------------------------------------


REFUSALS = list(itertools.product([401, 403], ["model", "model/odd_name.safetensors"]))


@pytest.mark.parametrize("has_file", [False, True])
@pytest.mark.parametrize(("status", "path"), REFUSALS)
def test_who_sends_no_token_is_told_how(server, tokens, status, path, has_file):
    if has_file:
        tokens("# none yet\n")
    server.has_index = True

    server.fault = lambda handler, key: asks_for_a_token(handler, key, status)
    said = str(error_of(lambda: shardload.inspect(f"{server.http}/{path}")))
    assert f"may not be read: HTTP status {status}" in said and "No token was sent" in said
    where = "to .*/tokens, which SHARDLOAD_TOKENS names" if has_file else "chmod 600.* set SHARDLOAD_TOKENS"
    assert re.search(where, said)
    line = re.search(r"write the line '(\S+ TOKEN)'", said)[1]
    tokens(line.replace("TOKEN", TOKEN))
    shardload.inspect(f"{server.http}/{path}")


@pytest.mark.parametrize(("status", "path"), REFUSALS)
def test_a_token_that_is_refused_is_said_to_be(server, tokens, status, path):
    file = tokens(f"{server.root} {TOKEN}2\n")
    server.fault = lambda handler, key: asks_for_a_token(handler, key, status)
    said = str(error_of(lambda: shardload.inspect(f"{server.http}/{path}")))
    assert f"may not be read: HTTP status {status}" in said and "No token was sent" not in said
    assert f"The server refused the token for {server.root} in {file}: correct it there" in said


@pytest.mark.parametrize("repeated", [TOKEN, "x" * 291 + TOKEN, f"wrong: {BEARER}!"])
@pytest.mark.parametrize("status", [401, 400, 500])
def test_a_server_that_repeats_the_token_is_not_quoted(server, tokens, repeated, status):
    """Nor is a part of it, where a long message is cut."""
    tokens(f"{server.root} {TOKEN}\n")
    server.fault = lambda handler, key: (handler.refuse(status, repeated, {}), True)[1]
    assert "…" in str(error_of(lambda: shardload.inspect(model_at(server))))


def test_a_page_to_log_in_names_the_way_to_give_a_token(server):
    server.fault = None
    server.paged.add("model/odd_name.safetensors")
    assert "SHARDLOAD_TOKENS" in str(error_of(lambda: shardload.inspect(model_at(server))))


# ---- the cache -----------------------------------------------------------------------------------


def test_a_cache_has_nothing_of_a_token_and_asks_for_it_each_time(server, tokens, tmp_path, monkeypatch):
    tokens(f"{server.root} {TOKEN}\n")
    cache = tmp_path / "cache"

    def read():
        with shardload.cache(cache):
            shardload.inspect(model_at(server))

    read()
    files = {path.relative_to(cache): path.read_bytes() for path in cache.rglob("*") if path.is_file()}
    assert files and not any(TOKEN.encode() in data or TOKEN in str(path) for path, data in files.items())
    monkeypatch.delenv("SHARDLOAD_TOKENS")
    assert "No token was sent" in str(error_of(read))
    server.fault = None
    before = server.bytes_sent
    read()
    assert server.bytes_sent - before == 1  # which tells the version: the rest is in the cache, under the same name
    assert {path.relative_to(cache) for path in cache.rglob("*") if path.is_file()} == files.keys()


def test_a_refusal_is_one_of_access(server):
    with pytest.raises(ForbiddenError):
        Requests(server.http).exists("model/odd_name.safetensors")
