"""Servers that are not quite what they seem: pages that are no lists, names that are no paths, drips, wrong ports."""

import errno
import itertools
import json
import socket
import threading
import time

import numpy as np
import object_server
import pytest
from object_server import served
from safetensors.numpy import save_file

import shardload
from shardload.errors import SourceNotFoundError, TransferError, UnsafeSourceError
from shardload.resolve.opening import open_source
from shardload.runs.listing import find_step, list_steps, steps_of_run
from shardload.stores.answers import FailedTry, ForbiddenError, failure, write_failure
from shardload.stores.requests import Requests

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 8,
          "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
          "torch_dtype": "bfloat16"}  # fmt: skip


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    root = tmp_path_factory.mktemp("bucket")
    for folder, name in (("usual", "model.safetensors"), ("unusual", "weights-v2.safetensors")):
        (root / folder).mkdir()
        save_file({"a": np.arange(64, dtype=np.float32)}, root / folder / name)
    (root / "unusual" / "config.json").write_text(json.dumps(CONFIG))
    return root


@pytest.fixture
def store(objects, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "1")
    with served(objects, monkeypatch) as server:
        yield server


@pytest.mark.parametrize("links", ["about.html", "contact/", ""])
def test_a_page_about_a_model_is_no_list_of_its_files(store, links):
    store.page = f"<html><a href='{links}'>More</a> about this model</html>".encode()
    store.paged.add("usual")
    assert list(shardload.inspect(f"{store.http}/usual").tensors) == ["a"]


def test_where_no_list_is_shown_a_file_is_asked_for(store):
    said = "The server shows no list of this folder, so only usual names were looked for: give the address of a file"
    with pytest.raises(SourceNotFoundError, match=said):
        shardload.inspect(f"{store.http}/unusual")
    [note] = open_source(f"{store.http}/unusual", None, described=True, verify=False, weights=False).notes[:1]
    assert "no weights of a usual name are in" in note and said in note
    assert list(shardload.inspect(f"{store.http}/unusual/weights-v2.safetensors").tensors) == ["a"]


def test_a_port_without_tls_is_said_at_once(store):
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse():
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
                connection.recv(65536)

        threading.Thread(target=refuse, daemon=True).start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}/model.safetensors"
        with pytest.raises(TransferError, match=r"it does not answer in TLS; .* write http:// instead") as caught:
            shardload.inspect(url)
    assert " times in " not in str(caught.value)


def test_a_status_is_said_once():
    page = "<html><head><title>403 Forbidden</title></head><body><h1>403 Forbidden</h1><hr>nginx</body></html>"
    found = FailedTry.of(OSError(f"Server returned non-2xx status code: 403 Forbidden: {page}"))
    assert (found.said, found.code) == ("HTTP status 403 Forbidden: nginx", "forbidden")


@pytest.mark.parametrize(("status", "code"), [(400, "ExpiredToken"), (403, "TokenRefreshRequired")])
def test_expired_credentials_are_to_be_renewed(status, code):
    page = f"<Error><Code>{code}</Code><Message>The provided token has expired.</Message></Error>"
    found = FailedTry.of(OSError(f"Server returned error response: {status} Refused: {page}"))
    assert (found.code, found.is_passing) == ("expired", False)
    read = failure("s3://bucket", "a", found)
    written = write_failure("s3://bucket", "a", found, doing="written")
    assert isinstance(read, ForbiddenError) and written.errno == errno.EACCES
    for said in map(str, (read, written)):
        assert "The provided token has expired. The credentials have expired: log in again" in said


def test_a_scheme_may_have_capitals(store):
    assert list(shardload.inspect("S3://bucket/usual").tensors) == ["a"]
    assert list_steps("GS://bucket/usual") == []


@pytest.mark.parametrize("name", ["run/a/../b", "run//b"])
def test_names_that_are_no_paths_are_named(store, name):
    store.markers |= {"run/1/_CHECKPOINT_METADATA", name}
    with pytest.raises(TransferError, match=r"^Cannot list s3://bucket/run .*: it has an object named 'run/"):
        list_steps("s3://bucket/run")


def test_thousands_of_numbered_folders_are_not_all_asked_about(store, tmp_path, monkeypatch):
    for number in range(5001):
        (tmp_path / "run" / str(number)).mkdir(parents=True)
    with served(tmp_path, monkeypatch) as other:
        other.has_index = True
        with pytest.raises(UnsafeSourceError, match="it names 5001 numbered folders, expected at most 5000"):
            list_steps(f"{other.http}/run")
        assert len(other.headers) < 20
        with pytest.raises(SourceNotFoundError):
            find_step(f"{other.http}/run", "latest")
        assert len(other.headers) < 40


def pages(which, headers=()):
    """A fault: requests for lists of these numbers, or "all" requests, are answered by a web page."""
    lists = itertools.count()

    def fault(handler, key):
        if which != "all" and (key or next(lists) not in which):
            return False
        return handler.send(200, b"<html><title>Log in</title></html>", {"Content-Type": "text/html", **dict(headers)})

    return fault


@pytest.fixture
def patient(store, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "20")
    return store


@pytest.fixture
def run(patient, objects):
    """The store, with a run of 1001 steps."""
    for number in range(1, 1002):
        (objects / "run" / str(number)).mkdir(parents=True, exist_ok=True)
        (objects / "run" / str(number) / "_CHECKPOINT_METADATA").write_text("{}")
    return patient


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("headers", [{}, {"ETag": '"1"', "Last-Modified": object_server.LONG_AGO}])
def test_a_web_page_is_no_list_without_steps(patient, scheme, headers):
    patient.fault = pages("all", headers)
    with pytest.raises(TransferError, match=r"expected a list of names\. It may|perhaps a web page"):
        steps_of_run(f"{scheme}://bucket/usual")


@pytest.mark.parametrize("scheme", ["s3", "gs"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_list_that_a_web_page_cuts_short_is_asked_for_again(run, scheme, number, monkeypatch):
    monkeypatch.setattr(object_server, "PAGE", 1000)
    run.fault = pages({number})
    names = Requests(f"{scheme}://bucket/run").sizes()
    assert len(names) == 1001
    assert len([key for _, key, *_ in run.requests if key is None]) == 2 + number  # and those that the page answered


def test_only_where_nothing_is_it_takes_more_requests_to_be_sure(patient):
    assert len(Requests(f"{patient.s3}/unusual").sizes()) == 2
    assert len(patient.requests) == 1
    assert Requests(f"{patient.s3}/nowhere").sizes() == {}
    assert len(patient.requests) == 1 + 3


def test_a_drip_counts_as_a_stall(store):
    store.dripping.add("usual/model.safetensors")
    began = time.monotonic()
    with pytest.raises(TransferError, match=r"it sent less than \d+ bytes in 0\.25 s, \d+ times"):
        shardload.inspect(f"{store.http}/usual/model.safetensors")
    assert time.monotonic() - began < 5


def test_access_refused_is_no_missing_list(store):
    store.status["*"] = 403
    with pytest.raises(ForbiddenError, match="may not be read"):
        shardload.inspect(f"{store.s3}/usual")
