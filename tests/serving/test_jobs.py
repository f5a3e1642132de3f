"""Jobs of a server: verify and prefetch, their progress as events, and what is left of them after a restart."""

import base64
import contextlib
import hashlib
import http.client
import json
import shutil
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from callback_models import compiled, fit
from object_server import ObjectServer
from safetensors.numpy import save_file
from serving import eventually, served

from shardload.callbacks import OrbaxCheckpoint
from shardload.serving.jobs.queue import Jobs
from shardload.serving.jobs.records import Job, JobRecords
from shardload.serving.roots.catalogue import Catalogue

JOBS = "/api/v1/jobs"


def asked(server, method, path=JOBS, body=None, **headers):
    """Status and object of one answer."""
    if isinstance(body, dict):
        headers, body = {"Content_Type": "application/json"} | headers, json.dumps(body)
    with contextlib.closing(http.client.HTTPConnection(server.place, timeout=60)) as connection:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body=body, headers=named)
        answer = connection.getresponse()
        data = answer.read().decode()
        return answer.status, json.loads(data) if answer.headers.get_content_subtype() == "json" else data


def submit(server, kind, checkpoint, **headers):
    return asked(server, "POST", body={"kind": kind, "checkpoint": checkpoint}, **headers)


def ended(server, job):
    """A job at its end, which its events say."""
    status, text = asked(server, "GET", f"{JOBS}/{job['id']}/events")
    assert status == 200
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: ")]
    assert text.startswith("event: job\n") and events[-1] == asked(server, "GET", f"{JOBS}/{job['id']}")[1]
    return events[-1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    (root / "models").mkdir()
    weights = {"x": np.random.default_rng(0).random(300_000, np.float32)}
    save_file(weights, root / "models" / "model.safetensors")
    (root / "models" / "config.json").write_text('{"model_type": "none"}')
    save_file(weights, root / "alone.safetensors")
    fit(compiled(), OrbaxCheckpoint(root / "run"))
    return root


@pytest.fixture(scope="module")
def server(folder):
    with served("--root", folder) as found:
        yield found


def test_files_are_compared_with_what_they_were_the_last_time(server):
    status, job = submit(server, "verify", "models")
    assert status == 201 and job["state"] == "waiting" and job["checkpoint"] == "models"
    first = ended(server, job)
    assert first["state"] == "done" and first["result"]["verdict"] == "readable" and not first["result"]["problems"]
    assert first["done_bytes"] == first["total_bytes"] > 1_200_000
    second = ended(server, submit(server, "verify", "models")[1])
    assert second["id"] != first["id"] and second["result"] == {"verdict": "verified", "problems": [], "notes": []}
    assert [each["id"] for each in asked(server, "GET")[1]["jobs"]][:2] == [first["id"], second["id"]]


def test_a_digest_that_is_known_is_sent_along(folder):
    name = "models/model.safetensors"
    with served("--root", folder) as server:
        assert server.get(f"/{name}", method="HEAD")[1]["Repr-Digest"] is None
        ended(server, submit(server, "verify", "models")[1])
        whole = server.get(f"/{name}")
        digest = f"sha-256=:{base64.b64encode(hashlib.sha256(whole[2]).digest()).decode()}:"
        assert whole[1]["Repr-Digest"] == server.get(f"/{name}", method="HEAD")[1]["Repr-Digest"] == digest
        part = server.get(f"/{name}", Range="bytes=0-9", Want_Repr_Digest="sha-256=1")
        assert (part[0], part[1]["Repr-Digest"]) == (206, digest)
        assert server.get(f"/{name}", Range="bytes=0-9")[1]["Repr-Digest"] is None


def test_steps_are_compared_with_their_digests(server, folder):
    assert ended(server, submit(server, "verify", "run")[1])["result"]["verdict"] == "verified"
    step = next(path for path in (folder / "run").iterdir() if path.name.isdecimal())
    shutil.copytree(step, folder / "damaged" / step.name)
    data = max((path for path in (folder / "damaged").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    eventually(lambda: submit(server, "verify", "damaged")[0] < 300)
    found = ended(server, submit(server, "verify", "damaged")[1])["result"]
    assert found["verdict"] == "damaged" and data.name in found["problems"][0]
    assert str(folder) not in json.dumps(found)  # where the files are is not for clients


def test_a_file_that_is_no_longer_readable_is_damaged(server, folder):
    save_file({"x": np.zeros(100_000, np.float32)}, folder / "short.safetensors")
    eventually(lambda: submit(server, "verify", "short.safetensors")[0] < 300)
    with (folder / "short.safetensors").open("r+b") as file:
        file.truncate(200_000)
    found = ended(server, submit(server, "verify", "short.safetensors", Idempotency_Key="once-more")[1])
    assert found["result"]["verdict"] == "damaged" and "short.safetensors" in found["result"]["problems"][0]
    assert str(folder) not in json.dumps(found)


def test_prefetch_reads_all_files(server):
    job = ended(server, submit(server, "prefetch", "alone.safetensors")[1])
    assert job["state"] == "done" and job["done_bytes"] == job["total_bytes"] > 1_200_000 and job["result"] == {}


def test_asking_again_with_the_same_key_is_the_same_job(server):
    first = submit(server, "prefetch", "models", Idempotency_Key="monday")
    assert first[0] == 201
    ended(server, first[1])
    again = submit(server, "prefetch", "models", Idempotency_Key="monday")
    assert again[0] == 200 and again[1]["id"] == first[1]["id"] and again[1]["state"] == "done"
    assert submit(server, "verify", "models", Idempotency_Key="monday")[0] == 422
    assert submit(server, "prefetch", "models")[1]["id"] != first[1]["id"]


@pytest.mark.parametrize(
    ("body", "headers", "status"),
    [
        ({"kind": "delete", "checkpoint": "models"}, {}, 400),
        ({"kind": "verify", "checkpoint": ["models"]}, {}, 400),
        ({"kind": "verify", "checkpoint": "models", "more": 1}, {}, 400),
        ({"kind": ["verify"], "checkpoint": "models"}, {}, 400),
        ("[" * 10_000, {"Content_Type": "application/json"}, 400),
        ("{", {"Content_Type": "application/json"}, 400),
        (b"\xff\xfe", {"Content_Type": "application/json"}, 400),
        ("x" * 20_000, {"Content_Type": "application/json"}, 413),
        ({"kind": "verify", "checkpoint": "../models"}, {}, 404),
        ({"kind": "verify", "checkpoint": "models/model.safetensors"}, {}, 404),
        ({"kind": "verify", "checkpoint": "models"}, {"Content_Type": "text/plain"}, 415),
        ({"kind": "verify", "checkpoint": "models"}, {"Idempotency_Key": "x" * 300}, 400),
        ({"kind": "verify", "checkpoint": "models"}, {"Origin": "http://evil.example"}, 403),
        ({"kind": "verify", "checkpoint": "models"}, {"Origin": "null"}, 403),
        ({"kind": "verify", "checkpoint": "models"}, {"Origin": "http://["}, 403),
        ({"kind": "verify", "checkpoint": "models"}, {"Origin": "http://[x]:y"}, 403),
        ({"kind": "verify", "checkpoint": "\ud800/\0"}, {}, 404),
        ({"kind": "verify", "checkpoint": "models"}, {"Sec_Fetch_Site": "cross-site"}, 403),
        ({"kind": "verify", "checkpoint": "models"}, {"Host": "evil.example"}, 421),
    ],
)
def test_what_is_no_job_is_refused(server, body, headers, status):
    before = len(asked(server, "GET")[1]["jobs"])
    assert asked(server, "POST", body=body, **headers)[0] == status
    assert len(asked(server, "GET")[1]["jobs"]) == before
    assert asked(server, "GET", f"{JOBS}/no-such-job")[0] == asked(server, "DELETE", f"{JOBS}/no-such-job")[0] == 404


def test_only_jobs_have_a_body(server):
    assert asked(server, "DELETE", f"{JOBS}/1", body={})[0] == 400
    assert asked(server, "POST", "/models/model.safetensors", body={})[0] == 405


def test_a_job_needs_a_token_where_reading_does(folder, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-this-server\n")
    tokens.chmod(0o600)
    with served("--root", folder, "--token-file", tokens) as server:
        assert submit(server, "verify", "models")[0] == 401
        assert submit(server, "verify", "models", Authorization="Bearer a-token-of-this-server")[0] == 201


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A checkpoint that takes a while to read: most of it is a hole."""
    root = tmp_path_factory.mktemp("large")
    header = json.dumps({"x": {"dtype": "U8", "shape": [40 << 30], "data_offsets": [0, 40 << 30]}}).encode()
    with (root / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + (40 << 30))
    return root


def largest(server):
    found = json.loads(server.get("/api/v1/checkpoints")[2])["checkpoints"]
    return max(found, key=lambda each: each["bytes"])["name"]


def test_a_job_is_cancelled_while_it_runs_or_waits(large):
    with served("--root", large) as server:
        name = largest(server)
        running, waiting = submit(server, "verify", name)[1], submit(server, "prefetch", name)[1]
        eventually(lambda: asked(server, "GET", f"{JOBS}/{running['id']}")[1]["done_bytes"] > 0)
        assert submit(server, "verify", name)[1]["id"] == running["id"]  # it is being done
        assert asked(server, "DELETE", f"{JOBS}/{waiting['id']}")[1]["state"] == "cancelled"
        asked(server, "DELETE", f"{JOBS}/{running['id']}")
        assert ended(server, running)["state"] == "cancelled"
        assert asked(server, "DELETE", f"{JOBS}/{running['id']}")[1]["state"] == "cancelled"


def test_jobs_survive_the_end_of_the_server(large, folder, tmp_path):
    roots, state = ("--root", large, "--root", folder), ("--state", tmp_path / "state")
    with served(*roots, *state) as server:
        done = ended(server, submit(server, "verify", "models", Idempotency_Key="first")[1])
        running = submit(server, "verify", largest(server))[1]
        waiting = submit(server, "verify", "models")[1]
        eventually(lambda: asked(server, "GET", f"{JOBS}/{running['id']}")[1]["done_bytes"] > 0)
        server.process.kill()
        server.process.wait()
    assert (tmp_path / "state" / "serve.sqlite").stat().st_mode & 0o077 == 0
    with served(*roots, *state) as server:
        assert submit(server, "verify", "models", Idempotency_Key="first") == (200, done)
        eventually(lambda: asked(server, "GET", f"{JOBS}/{running['id']}")[1]["state"] == "running")
        asked(server, "DELETE", f"{JOBS}/{running['id']}")
        assert ended(server, waiting)["result"]["verdict"] == "verified"  # with the digests of the process before
        assert server.end() == 0
    with served(*roots, *state) as server:
        assert asked(server, "GET", f"{JOBS}/{running['id']}")[1]["state"] == "cancelled"


def test_bytes_that_changed_while_nothing_wrote_to_the_file_are_damage(folder, tmp_path):
    options = ("--root", folder, "--state", tmp_path)
    with served(*options) as server:
        ended(server, submit(server, "verify", "alone.safetensors")[1])
        server.end()
    with contextlib.closing(sqlite3.connect(tmp_path / "serve.sqlite")) as records, records:
        records.execute("UPDATE digests SET sha256 = ? WHERE address = 'alone.safetensors'", ("0" * 64,))
    with served(*options) as server:
        found = ended(server, submit(server, "verify", "alone.safetensors")[1])["result"]
    assert found["verdict"] == "damaged" and "alone.safetensors" in found["problems"][0]


def test_two_servers_do_not_share_their_records(folder, tmp_path):
    options = ("--root", folder, "--state", tmp_path)
    with served(*options), pytest.raises(AssertionError), served(*options):
        pass
    (tmp_path / "serve.sqlite-wal").unlink(missing_ok=True)
    (tmp_path / "serve.sqlite").write_bytes(b"this is no database " * 1000)
    with pytest.raises(AssertionError), served(*options):
        pass


def test_a_stream_of_events_ends_with_the_server(large):
    with served("--root", large) as server:
        job = submit(server, "verify", largest(server))[1]
        with contextlib.closing(http.client.HTTPConnection(server.place, timeout=60)) as connection:
            connection.request("GET", f"{JOBS}/{job['id']}/events")
            answer = connection.getresponse()
            assert answer.readline() == b"event: job\n"
            assert server.end() == 0
            answer.read()


@pytest.fixture
def bucket(tmp_path):
    (tmp_path / "bucket" / "m").mkdir(parents=True)
    values = np.random.default_rng(0).integers(0, 255, 20 << 20, np.uint8)
    save_file({"x": values}, tmp_path / "bucket" / "m" / "model.safetensors")
    with contextlib.closing(ObjectServer(tmp_path / "bucket")) as found:
        yield found


def test_what_is_prefetched_leaves_the_bucket_once(bucket, tmp_path):
    data = (bucket.folder / "m" / "model.safetensors").read_bytes()
    options = ("--root", "s3://bucket/m", "--cache", tmp_path / "cache")
    with served(*options, env=bucket.environment()) as server:
        bucket.reset()
        job = ended(server, submit(server, "prefetch", "m")[1])
        assert (job["state"], job["result"], job["done_bytes"]) == ("done", {}, len(data))
        assert bucket.sent_of("model") <= len(data) + 1
        assert server.get("/m/model.safetensors")[2] == data
        assert bucket.sent_of("model") <= len(data) + 1
        status, text = submit(server, "verify", "m")
        assert status == 422 and "shardload verify" in text


def test_a_prefetch_that_waits_for_its_bucket_is_cancelled_or_left_to_the_next_server(bucket, tmp_path):
    options = ("--root", "s3://bucket/m", "--cache", tmp_path / "cache", "--state", tmp_path / "state")
    release, is_asked = threading.Event(), threading.Event()

    def wait(handler, key):
        if handler.headers.get("Range", "").endswith(f"-{(16 << 20) - 1}"):
            is_asked.set()
            release.wait(120)
        return False

    with served(*options, env=bucket.environment()) as server:
        bucket.fault = wait
        first = submit(server, "prefetch", "m", Idempotency_Key="first")[1]
        assert is_asked.wait(60)
        second = submit(server, "prefetch", "m", Idempotency_Key="second")[1]
        eventually(lambda: asked(server, "GET", f"{JOBS}/{first['id']}")[1]["state"] == "running")
        asked(server, "DELETE", f"{JOBS}/{first['id']}")
        assert ended(server, first)["state"] == "cancelled"
        eventually(lambda: asked(server, "GET", f"{JOBS}/{second['id']}")[1]["state"] == "running")
        assert server.end() == 0
    release.set()
    bucket.fault = None
    with served(*options, env=bucket.environment()) as server:
        assert ended(server, second)["state"] == "done"


def test_a_prefetch_needs_room_to_keep_what_it_fetches(bucket, tmp_path):
    for options, problem in (
        ([], "--cache DIR"),
        (["--cache", tmp_path / "cache", "--cache-size", "1MiB"], "--cache-size"),
    ):
        with served("--root", "s3://bucket/m", *options, env=bucket.environment()) as server:
            job = ended(server, submit(server, "prefetch", "m")[1])
        assert job["state"] == "failed" and problem in job["result"]["problem"]


def test_a_job_that_the_server_does_not_survive_is_given_up(large, tmp_path):
    options = ("--root", large, "--state", tmp_path / "state")
    with served(*options) as server:
        job = submit(server, "verify", largest(server))[1]
        eventually(lambda: asked(server, "GET", f"{JOBS}/{job['id']}")[1]["done_bytes"] > 0)
        assert server.end() == 0  # this does not count
    for starts in 1, 2, 3:
        with served(*options) as server:
            eventually(lambda: asked(server, "GET", f"{JOBS}/{job['id']}")[1]["done_bytes"] > 0)
            assert asked(server, "GET", f"{JOBS}/{job['id']}")[1]["starts"] == starts
    with served(*options) as server:
        found = ended(server, job)
    assert found["state"] == "failed" and "3 times" in found["result"]["problem"]


def test_a_job_that_is_refused_is_not_done_later(tmp_path):
    with contextlib.closing(JobRecords(tmp_path)) as records:
        for number in range(1000):
            records.put(Job(str(number), "verify", "m", "done", 0, 0, None, 0.0, ended_s=1.0))
    with contextlib.closing(sqlite3.connect(tmp_path / "serve.sqlite")) as file:
        file.execute("CREATE TRIGGER full BEFORE DELETE ON jobs BEGIN SELECT RAISE(ABORT, 'the disk is full'); END")
    with contextlib.closing(JobRecords(tmp_path)) as records:
        records.put(Job("old", "verify", "m", "waiting", 0, 0, None, 0.0, ended_s=None))
        with pytest.raises(sqlite3.Error, match="the disk is full"):
            records.put(Job("new", "verify", "m", "done", 0, 0, None, 0.0, ended_s=1.0, key="key"))
        assert [job.id for job in records.jobs()][-1] == "old"


class SlowRecords(JobRecords):
    """Records on a disk that takes its time."""

    def __init__(self):
        super().__init__(None)
        self.begun, self.may_end = threading.Event(), threading.Event()

    def put(self, job):
        self.begun.set()
        assert self.may_end.wait(60)
        return super().put(job)


def test_a_job_that_is_being_stored_keeps_nothing_else_waiting(folder):
    records = SlowRecords()
    jobs = Jobs(Catalogue([folder]), records, lambda facts: None)
    with ThreadPoolExecutor(1) as thread:
        submitted = thread.submit(jobs.submit, "verify", "models", total_bytes=1, client="one")
        assert records.begun.wait(60)
        assert jobs.all() == [] and jobs.find("x") is None
        records.may_end.set()
        job, is_new = submitted.result(60)
    assert is_new and jobs.find(job.id) == job and records.jobs() == [job]
    jobs.stop()


def test_a_prefetch_that_the_cache_does_not_store_is_not_done(bucket, tmp_path):
    options = ("--root", "s3://bucket/m", "--cache", tmp_path / "cache")
    with served(*options, env=bucket.environment()) as server:
        drafts = tmp_path / "cache" / "shardload-ranges-1" / "new"

        def is_in_the_way():  # headers may still be on their way to the disk
            drafts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            shutil.rmtree(drafts, ignore_errors=True)
            with contextlib.suppress(IsADirectoryError):
                drafts.write_text("in the way")
            return drafts.is_file()

        eventually(is_in_the_way)
        job = ended(server, submit(server, "prefetch", "m")[1])
    assert job["state"] == "failed" and "did not store" in job["result"]["problem"]
