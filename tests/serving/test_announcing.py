"""A server tells the steps of a run, and new ones as soon as there are any."""

import asyncio
import json
import re
import shutil
import threading

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer
from serving import eventually, served
from step_folders import save_step

from shardload.serving.announcing import Announcing
from shardload.serving.roots.catalogue import Catalogue

RUN = "/api/v1/runs/models/run"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "models" / "run").mkdir(parents=True)
    save_step(tmp_path / "models" / "run", 10, n_bytes=100)
    (tmp_path / "models" / "config.json").write_text("{}")
    return tmp_path / "models" / "run"


@pytest.fixture
def server(folder):
    with served("--root", folder.parents[1]) as found:
        yield found


class Waiting(threading.Thread):
    """A request that waits for another answer than that of an ETag."""

    def __init__(self, server, known):
        super().__init__()
        self.server, self.known, self.answer = server, known, None
        self.start()

    def run(self):
        self.answer = self.server.get(RUN, If_None_Match=self.known, Prefer="respond-async, wait=25")

    def result(self):
        self.join()
        return self.answer


def steps(answer):
    assert answer[0] == 200
    return json.loads(answer[2])["steps"]


def running(server):
    return float(re.search(r"\nshardload_running_requests (\S+)", server.get("/metrics")[2].decode())[1])


def test_the_steps_of_a_run(server):
    answer = server.get(RUN)
    assert steps(answer) == [10]
    tag = answer[1]["ETag"]
    assert server.get(RUN, If_None_Match=tag)[::2] == (304, b"")
    assert server.get(RUN, If_None_Match=tag, Prefer="wait=1")[::2] == (304, b"")
    assert steps(server.get(RUN, If_None_Match='"other"', Prefer="wait=25")) == [10]
    for other in ("", "/", "/models", "/models/run/10", "/models/config.json", "/..%2f..%2fetc"):
        assert server.get(f"/api/v1/runs{other}")[0] == 404


def test_whoever_waits_is_told_of_new_and_removed_steps(server, folder):
    tag = server.get(RUN)[1]["ETag"]
    waiting = [Waiting(server, tag) for _ in range(3)]
    save_step(folder, 20, n_bytes=100)
    answers = [one.result() for one in waiting]
    assert [steps(answer) for answer in answers] == [[10, 20]] * 3
    waiting = Waiting(server, answers[0][1]["ETag"])
    shutil.rmtree(folder / "10")
    assert steps(waiting.result()) == [20]


def test_a_server_that_ends_answers_those_who_wait(server):
    waiting = Waiting(server, server.get(RUN)[1]["ETag"])
    assert eventually(lambda: running(server) > 1)
    assert server.end() == 0
    assert waiting.result()[0] == 304


def test_no_more_than_some_may_wait(server, folder):
    tag = server.get(RUN)[1]["ETag"]
    waiting = [Waiting(server, tag) for _ in range(260)]
    assert eventually(lambda: sum(one.answer is not None for one in waiting) >= 4)
    assert {one.answer[0] for one in waiting if one.answer is not None} == {304}
    save_step(folder, 20, n_bytes=100)
    assert {one.result()[0] for one in waiting} <= {200, 304}


class CountingCatalogue(Catalogue):
    """A catalogue that counts how many files of steps are looked up."""

    looked_up = 0

    def file(self, key):
        self.looked_up += 1
        return super().file(key)


def test_steps_are_looked_through_once_after_each_scan(folder):
    save_step(folder, 20, n_bytes=100)
    catalogue = CountingCatalogue([folder.parents[1]])

    async def refresh(name):
        pass

    async def tags():
        application = web.Application()
        Announcing(catalogue, refresh).add_routes(application.router)
        async with TestClient(TestServer(application)) as client:
            tag = (await client.get(RUN)).headers["ETag"]
            waiting = (client.get(RUN, headers={"If-None-Match": tag, "Prefer": "wait=1"}) for _ in range(8))
            assert {answer.status for answer in await asyncio.gather(*waiting)} == {304}
            catalogue.refresh()
            return tag, (await client.get(RUN)).headers["ETag"]

    first, second = asyncio.run(tags())
    assert first == second and catalogue.looked_up == 2 * 2
