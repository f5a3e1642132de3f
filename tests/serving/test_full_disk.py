"""What a server does without room for its cache or its jobs: files are served, and jobs are refused in words."""

import contextlib
import json
import sqlite3
import subprocess
import sys

import numpy as np
import pytest
from object_server import ObjectServer
from safetensors.numpy import save_file
from serving import served
from small_disk import filled, small_disk

JOBS = "/api/v1/jobs"
FILE = "/m/model.safetensors"
MIB = 1 << 20


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "root"
    (made / "m").mkdir(parents=True)
    save_file({"x": np.random.default_rng(0).integers(0, 255, 20 * MIB, np.uint8)}, made / "m" / "model.safetensors")
    (made / "m" / "config.json").write_text('{"model_type": "gpt2"}')
    return made


def submit(server, kind, checkpoint):
    body = json.dumps({"kind": kind, "checkpoint": checkpoint}).encode()
    return server.get(JOBS, method="POST", body=body, Content_Type="application/json")


def ended(server, job):
    server.get(f"{JOBS}/{job['id']}/events")
    return json.loads(server.get(f"{JOBS}/{job['id']}")[2])


def test_a_cache_without_room_fails_no_request_and_leaves_nothing_half_written(folder, tmp_path):
    data = (folder / FILE[1:]).read_bytes()
    with contextlib.closing(ObjectServer(folder.parent)) as bucket, small_disk(tmp_path / "disk", "12m") as disk:
        with served("--root", "s3://bucket/root", "--cache", disk, env=bucket.environment()) as server:
            assert server.get(FILE)[2] == data  # 20 MiB do not fit
            assert server.get(FILE, Range="bytes=9-19")[2] == data[9:20]
            job = ended(server, json.loads(submit(server, "prefetch", "m")[2]))
            assert job["state"] == "failed" and "did not store all of it" in job["result"]["problem"]
            assert not list((disk / "shardload-ranges-1" / "new").iterdir())
            assert server.end() == 0
        assert "No space left on device. What it has is read" in "".join(server.log)
        with served("--root", "s3://bucket/root", "--cache", disk, env=bucket.environment()) as server:
            assert server.get(FILE)[2] == data


def test_jobs_are_refused_while_their_disk_is_full_and_taken_afterwards(folder, tmp_path):
    data = (folder / FILE[1:]).read_bytes()
    with small_disk(tmp_path / "disk", "2m") as disk:
        options = ("--root", folder, "--state", disk / "state")
        with served(*options) as server:
            first = ended(server, json.loads(submit(server, "verify", "m")[2]))
            with filled(disk):
                status, _, text = submit(server, "verify", "m")
                assert status == 503 and text.endswith(b"is full. Free space where --state is\n"), text
                assert server.get(FILE)[2] == data
                assert json.loads(server.get(JOBS)[2])["jobs"] == [first]
            second = ended(server, json.loads(submit(server, "verify", "m")[2]))
            assert (second["state"], second["result"]["verdict"]) == ("done", "verified")
            assert server.end() == 0
        with served(*options) as server:
            assert json.loads(server.get(JOBS)[2])["jobs"] == [first, second]


def test_a_job_whose_digests_have_no_room_fails_in_words(folder, tmp_path):
    with served("--root", folder, "--state", tmp_path / "state") as server:
        assert server.end() == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "state" / "serve.sqlite")) as file:
        file.execute("CREATE TRIGGER full BEFORE INSERT ON digests BEGIN SELECT RAISE(ABORT, 'disk is full'); END")
    with served("--root", folder, "--state", tmp_path / "state") as server:
        job = ended(server, json.loads(submit(server, "verify", "m")[2]))
    expected = "Cannot store the SHA-256 of a file: disk is full. Free space where --state is"
    assert (job["state"], job["result"]) == ("failed", {"problem": expected})


def test_a_server_does_not_begin_where_its_jobs_cannot_be_kept(folder, tmp_path):
    with small_disk(tmp_path / "disk", "1m") as disk, filled(disk):
        command = [sys.executable, "-m", "shardload", "serve", "--root", folder, "--state", disk / "state"]
        done = subprocess.run(
            [*map(str, command), "--listen", "127.0.0.1:0"], capture_output=True, text=True, check=False
        )
    assert done.returncode == 1 and "Cannot keep jobs in" in done.stderr and "Traceback" not in done.stderr
