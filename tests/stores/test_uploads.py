"""Objects are written whole or not at all, under conditions, and again where a request failed."""

import os
import threading

import pytest
from bucket_server import bucket
from obstore.exceptions import GenericError

from shardload.errors import UsageError, WriteError
from shardload.stores import uploads
from shardload.stores.answers import FailedTry
from shardload.stores.uploads import TakenError, Uploads

MIB = 1 << 20


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "20")
    with bucket(tmp_path / "bucket", monkeypatch) as found:
        yield found


@pytest.fixture(params=["s3", "gs"])
def to(request, server):
    return Uploads(f"{request.param}://bucket/run")


@pytest.fixture
def big(tmp_path, monkeypatch):
    """A file that is uploaded in four parts."""
    monkeypatch.setattr(uploads, "SINGLE_REQUEST_BYTES", MIB)
    monkeypatch.setattr(uploads, "PART_BYTES", 5 * MIB)
    (tmp_path / "big").write_bytes(os.urandom(17 * MIB))
    return tmp_path / "big"


def test_conditions_of_a_write(to):
    first = to.put("a", b"1")
    with pytest.raises(TakenError, match="run/a exists already"):
        to.put("a", b"2", only_new=True)
    second = to.put("a", b"3", replacing=first)
    with pytest.raises(TakenError):
        to.put("a", b"4", replacing=first)
    assert to.read("a") == (b"3", second)
    assert to.read("b") is None


@pytest.mark.parametrize("fault", [500, (503, 1), 429, "reset"])
def test_a_failed_write_is_repeated(server, to, fault):
    server.faults["run/a"] = [fault, fault]
    to.put("a", b"1", only_new=True)
    assert to.read("a")[0] == b"1"
    assert [key for method, key, _ in server.writes if method == "PUT"] == ["run/a"] * 3


def test_a_write_whose_answer_was_lost_has_succeeded(server, to):
    def write_and_fail(key):
        server.write(key, b"1")
        server.on_put = lambda key: None
        raise ConnectionResetError

    server.on_put = write_and_fail
    to.put("a", b"1", only_new=True)
    assert to.read("a")[0] == b"1"


def test_a_body_that_did_not_arrive_in_time_is_sent_again(server, to):
    """S3 answers so with status 400 where a connection was too slow."""
    refused = []

    def fault(handler, key):
        if handler.command != "PUT" or refused:
            return False
        refused.append(key)
        handler.read_body()
        handler.refuse(400, "RequestTimeout", {})
        return True

    server.fault = fault
    to.put("a", b"1", only_new=True)
    assert to.read("a")[0] == b"1"


def test_parts_whose_end_was_lost_are_sent_again(server, to, big):
    """An upload that is complete is not known any more, when its end is told once more."""
    lost = []

    def fault(handler, key):
        if handler.command == "POST" and "uploadId" in handler.path and not lost:
            lost.append(key)
            handler.instead = lambda: None
        return False

    server.fault = fault
    to.put_files({"big": big})
    assert lost and (server.folder / "run" / "big").read_bytes() == big.read_bytes()
    assert not server.parts


def test_of_a_file_in_parts_only_the_failed_part_is_repeated(server, to, big):
    server.faults["run/big"] = [500, 503, 500]
    to.put_files({"big": big, "other": big})
    for name in ("big", "other"):
        assert (server.folder / "run" / name).read_bytes() == big.read_bytes()
    assert sum(n_bytes for _, _, n_bytes in server.writes) < 2 * big.stat().st_size + 4 * 5 * MIB
    assert not server.parts


def test_an_interrupted_upload_leaves_no_parts(server, to, big):
    began, interrupted = threading.Event(), threading.Event()

    def check():
        if began.is_set():
            interrupted.set()
            raise KeyboardInterrupt

    def hold(handler, key):
        if handler.command == "PUT":
            began.set()
            interrupted.wait(20)  # so that the upload is not over before it is interrupted
        return False

    big.write_bytes(os.urandom(40 * MIB))  # more parts than are sent at once
    server.fault = hold
    with pytest.raises(KeyboardInterrupt):
        to.put_files({"big": big}, check=check)
    assert not server.parts and not server.names()


@pytest.mark.parametrize("code", [403, 404])
def test_a_bucket_that_refuses_is_found_at_once(server, to, code):
    server.refused["writable"] = code
    with pytest.raises(WriteError, match=rf"run/\.staging/writable-\w+ \(at http://.*\) .*: HTTP status {code}"):
        to.check()


def test_errors_name_the_request(server, to):
    server.refused["run/a"] = 403
    with pytest.raises(WriteError, match=r"run/a .* may not be written: HTTP status 403 .*\(request REQ123\)"):
        to.put("a", b"1")
    server.refused["run/a"] = 400
    with pytest.raises(WriteError, match=r"run/a .* cannot be written: HTTP status 400"):
        to.put("a", b"1")
    server.has_bucket = False
    with pytest.raises(WriteError, match=r"NoSuchBucket. Create the bucket (s3|gs)://bucket, or check its name"):
        to.put("b", b"1")


def test_a_right_that_is_missing_is_named(server):
    to = Uploads("s3://bucket/run")
    server.refused["run/a"] = 403
    with pytest.raises(WriteError, match=r"were sent: grant them s3:PutObject and s3:DeleteObject, or set others"):
        to.put("a", b"1")
    server.keeps = "writable"  # told for each object, in an answer with status 200
    with pytest.raises(WriteError, match=r"writable-\w+ .* may not be deleted: Access Denied. The keys .* grant them"):
        to.check()


def test_many_objects_are_deleted(server, to):
    for name in "abc":
        to.put(name, b"1")
    to.delete(["a", "b", "missing"])
    assert server.names() == ["run/c"]


def test_http_is_not_written_to(server):
    with pytest.raises(UsageError, match="expected an address at s3:// or gs://"):
        Uploads(f"{server.http}/run")


@pytest.mark.parametrize("said", ["multipart response: missing field `UploadId`", "DeleteObjects response: unknown"])
def test_an_answer_that_is_no_object_stores_is_told(said):
    failed = FailedTry.of(GenericError(f"Generic S3 error: Got invalid {said}"))
    assert failed.said.endswith("not those of an object store, but perhaps a web page to log in")
