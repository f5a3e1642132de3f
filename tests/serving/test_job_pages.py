"""The page of jobs: it shows them, and its forms start and cancel them, from the server's own pages only."""

import contextlib
import json
import re
import threading

import numpy as np
import pytest
from object_server import ObjectServer
from safetensors.numpy import save_file
from saved_steps import save_step
from serving import eventually, send_form, served

from shardload.serving.jobs.queue import Jobs, TooManyJobsError
from shardload.serving.jobs.records import Job, JobRecords
from shardload.serving.roots.catalogue import Catalogue
from shardload.serving.site.job_pages import jobs_page

PAGE = "/ui/jobs"
TOKEN = "a-token-of-this-server"


def small_model():
    import keras

    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(8)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    (root / "models").mkdir()
    save_file({"x": np.zeros(1000, np.float32)}, root / "models" / "model.safetensors")
    for step in (2, 10):
        save_step(small_model(), root / "run", step)
    return root


@pytest.fixture(scope="module")
def server(folder):
    with served("--root", folder) as found:
        yield found


def jobs(server):
    return json.loads(server.get("/api/v1/jobs")[2])["jobs"]


def start(server, kind, checkpoint):
    """Start a job by the form, and return it at its end."""
    status, headers, _ = send_form(server, PAGE, {"kind": kind, "checkpoint": checkpoint})
    assert (status, headers["Location"]) == (303, PAGE)
    number = jobs(server)[-1]["id"]
    eventually(lambda: json.loads(server.get(f"/api/v1/jobs/{number}")[2])["ended_s"] is not None)
    return json.loads(server.get(f"/api/v1/jobs/{number}")[2])


def test_a_form_of_a_checkpoints_page_starts_a_job(server):
    page = server.get("/ui/checkpoints/models")[2].decode()
    form = re.search(r'<form class="actions".*?</form>', page)[0]
    assert f'method="post" action="{PAGE}"' in form and 'name="checkpoint" value="models"' in form
    assert re.findall(r'name="kind" value="(\w+)"', form) == ["verify", "prefetch"]
    assert start(server, "verify", "models")["state"] == "done"
    page = server.get(PAGE)[2].decode()
    assert "Verify models" in page and "readable" in page and "No job runs" in page and "asked for at" in page
    assert f'href="{PAGE}" aria-current=page' in page and " style=" not in page and "<script>" not in page


def test_one_step_is_verified_by_its_own(server):
    page = server.get("/ui/checkpoints/run?step=2")[2].decode()
    assert re.findall(r'<option value="([^"]+)">([^<]+)', page) == [("run/2", "Step 2"), ("run", "All steps")]
    step, whole = start(server, "verify", "run/2"), start(server, "verify", "run")
    assert step["result"]["verdict"] == whole["result"]["verdict"] == "verified"
    assert 0 < step["total_bytes"] < whole["total_bytes"]
    assert start(server, "prefetch", "run/10")["state"] == "done"
    assert 'href="/ui/checkpoints/run/2"' in server.get(PAGE)[2].decode()
    assert server.get("/ui/checkpoints/run/2")[2] == page.encode()
    for name in ("run/3", "run/2/shardload", "models/model.safetensors", "run/02"):
        assert send_form(server, PAGE, {"kind": "verify", "checkpoint": name})[0] == 404


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"kind": "verify", "checkpoint": "<b>"}, 404),
        ({"kind": "<b>", "checkpoint": "models"}, 400),
        ({"kind": "verify"}, 400),
        ({}, 400),
        ({"cancel": "no-such-job"}, 404),
        ({"kind": "verify", "checkpoint": "m" * 5000}, 413),
    ],
)
def test_forms_that_ask_for_nothing_there_is_are_refused_in_words(server, fields, status):
    before = jobs(server)
    answered, headers, body = send_form(server, PAGE, fields)
    assert answered == status and b"<b>" not in body and jobs(server) == before
    if status != 413:
        assert headers.get_content_type() == "text/html" and b'role="alert"' in body


@pytest.mark.parametrize("origin", [None, "null", "http://evil.example", "http://127.0.0.1:1", ""])
def test_forms_of_other_pages_are_refused(server, origin):
    assert send_form(server, PAGE, {"kind": "verify", "checkpoint": "models"})[0] == 303
    eventually(lambda: all(job["state"] == "done" for job in jobs(server)))
    before = jobs(server)
    assert send_form(server, PAGE, {"kind": "verify", "checkpoint": "models"}, origin=origin)[0] == 403
    assert send_form(server, PAGE, {"cancel": before[0]["id"]}, origin=origin)[0] == 403
    assert jobs(server) == before


def test_a_form_needs_a_token_or_a_session(folder, tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{TOKEN}\n")
    tokens.chmod(0o600)
    with served("--root", folder, "--token-file", tokens) as server:
        fields = {"kind": "verify", "checkpoint": "models"}
        assert send_form(server, PAGE, fields)[0] == 401
        session = send_form(server, "/ui/sign-in", {"token": TOKEN})[1]["Set-Cookie"].partition(";")[0]
        assert send_form(server, PAGE, fields, Cookie=session)[0] == 303
        assert send_form(server, PAGE, fields, Cookie=session, origin="http://evil.example")[0] in (401, 403)
        assert server.get(PAGE, Accept="text/html")[0] == 401 and server.get(PAGE, Cookie=session)[0] == 200


def test_a_job_is_cancelled_by_its_button(tmp_path):
    (tmp_path / "bucket" / "m").mkdir(parents=True)
    save_file({"x": np.zeros(20 << 20, np.uint8)}, tmp_path / "bucket" / "m" / "model.safetensors")
    release = threading.Event()

    def wait(handler, key):
        if handler.headers.get("Range", "").endswith(f"-{(16 << 20) - 1}"):
            release.wait(120)
        return False

    with contextlib.closing(ObjectServer(tmp_path / "bucket")) as bucket, contextlib.ExitStack() as stack:
        stack.callback(release.set)
        options = ("--root", "s3://bucket/m", "--cache", tmp_path / "cache")
        bucket.fault = wait
        with served(*options, env=bucket.environment()) as server:
            assert send_form(server, PAGE, {"kind": "prefetch", "checkpoint": "m"})[0] == 303
            page = server.get(PAGE)[2].decode()
            (job,) = jobs(server)
            assert (
                "<progress" in page
                and f'name="cancel" value="{job["id"]}"' in page
                and 'href="/ui/checkpoints/m"' in page
            )
            assert send_form(server, PAGE, {"cancel": job["id"]})[0] == 303
            eventually(lambda: jobs(server)[0]["state"] == "cancelled")
            page = server.get(PAGE)[2].decode()
            assert "cancelled" in page and "<progress" not in page and 'name="cancel"' not in page
            status, _, body = send_form(server, PAGE, {"kind": "verify", "checkpoint": "m"})
            assert status == 422 and b"prefetched only" in body


def test_a_page_has_the_latest_jobs_and_no_markup_of_others():
    problems = [f'"><b>{number}' for number in range(20)]
    result = {"verdict": "damaged", "problems": problems}
    found = [Job(f"j{number}", "verify", "<i>", "done", 5, 10, result, 0.0, float(number)) for number in range(60)]
    page = jobs_page([*found, Job("w", "prefetch", "m", "waiting", 0, 0, None, 0.0, None)])
    assert page.count("<li id=") == 51 and "10 older jobs are not shown" in page and "<i>" not in page
    shown = re.findall(r'id="job-(\w+)"', page)
    assert shown[:3] == ["w", "j59", "j58"] and shown[-1] == "j10"
    assert "<b>" not in page and "and 11 more lines" in page and "1970-01-01 00:00:00" in page


def test_one_client_gets_half_of_the_jobs_and_this_machine_all(folder):
    made = Jobs(Catalogue([folder]), JobRecords(None), lambda facts: None)

    def taken(client, count):
        for number in range(count):
            made.submit("verify", "models", total_bytes=1, client=client, key=f"{client} {number}")

    with pytest.raises(TooManyJobsError, match="of this client"):
        taken("192.0.2.7", 51)
    assert len(made.all()) == 50
    made.cancel(made.all()[0].id)
    made.submit("verify", "models", total_bytes=1, client="192.0.2.7", key="one more")
    with pytest.raises(TooManyJobsError, match="try again"):
        taken("127.0.0.1", 51)
    assert sum(not job.is_over for job in made.all()) == 100
