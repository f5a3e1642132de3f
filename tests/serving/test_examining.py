"""Answers of other processes are held in memory once, however many clients ask for them."""

import asyncio
import json
import socket
import threading

import numpy as np
import pytest
from aiohttp.test_utils import TestClient, TestServer
from safetensors.numpy import save_file

from shardload.serving.application import Access, Service
from shardload.serving.roots.catalogue import Catalogue
from shardload.serving.site.checkpoint_pages import ServerPages
from shardload.serving.site.examining import Examiner, Question, UnansweredError

QUESTION = Question("model", "1", ("inspect",))


class ReadyExaminer(Examiner):
    """An examiner that has its answer."""

    def __init__(self, answer):
        super().__init__("token")
        self.answer = answer

    async def ask(self, question):
        return self.answer


class Parses:
    """Notes how many answers are parsed at the same time."""

    def __init__(self):
        self.lock, self.began, self.may_end = threading.Lock(), threading.Event(), threading.Event()
        self.running = self.most = self.total = 0

    def __call__(self, answer):
        with self.lock:
            self.running, self.total = self.running + 1, self.total + 1
            self.most = max(self.most, self.running)
        self.began.set()
        assert self.may_end.wait(60)
        with self.lock:
            self.running -= 1
        return answer["x"]


def test_one_answer_is_parsed_at_a_time_and_some_requests_wait():
    parses = Parses()

    async def run():
        examiner = ReadyExaminer(b'{"x": 3}')
        asked = [asyncio.create_task(examiner.read(QUESTION, parses)) for _ in range(70)]
        refused, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_EXCEPTION)
        assert await asyncio.to_thread(parses.began.wait, 60)
        parses.may_end.set()
        found = await asyncio.gather(*asked, return_exceptions=True)
        assert await examiner.read(QUESTION, parses) == 3  # those places are free again
        return refused, found

    refused, found = asyncio.run(run())
    assert refused and found.count(3) == 64 and (parses.total, parses.most) == (65, 1)
    assert {error.status for error in found if error != 3} == {503}


def test_what_cannot_be_shown_gives_its_place_back():
    async def run():
        examiner = ReadyExaminer(b"{}")
        for _ in range(70):
            with pytest.raises(KeyError):
                await examiner.read(QUESTION, lambda answer: answer["x"])
        with pytest.raises(UnansweredError):
            await Examiner("token").read(QUESTION, dict)

    asyncio.run(run())


class CountedBytes(bytes):
    """Bytes that count how many of them were copied."""

    copied = 0

    def __getitem__(self, part):
        found = super().__getitem__(part)
        self.copied += len(found)
        return found


def test_a_slow_client_has_no_copy_of_the_answer(tmp_path):
    (tmp_path / "folder").mkdir()
    save_file({"x": np.zeros(3)}, tmp_path / "model.safetensors")
    log, answer = [], CountedBytes(json.dumps("x" * (64 << 20)).encode())
    service = Service(Catalogue([tmp_path]), Access(), log.append, page_s=0.5)

    async def refresh(name):
        pass

    async def remote_tags(keys):
        return []

    async def run():
        service.site = ServerPages(
            service.roots, ReadyExaminer(answer), service.loads, refresh=refresh, remote_tags=remote_tags
        )
        async with TestClient(TestServer(service.application())) as client:
            with socket.socket() as slow:
                slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                slow.setblocking(False)
                loop = asyncio.get_running_loop()
                await loop.sock_connect(slow, ("127.0.0.1", client.port))
                path = b"/api/v1/checkpoints/model.safetensors/tensors"
                await loop.sock_sendall(slow, b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
                while not any("problem" in facts for facts in log):
                    await asyncio.sleep(0.05)

    asyncio.run(run())
    assert [facts["problem"] for facts in log if "problem" in facts] == ["stalled"]
    assert 0 < answer.copied < len(answer) // 2
