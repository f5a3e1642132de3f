"""What clients of `benchmarks.soak` do: requests of every kind at random, whose answers are compared with the truth.

    python -m benchmarks.soak_clients FACTS SEED

FACTS is a JSON file that says where the server is, what it has, and when to stop. A line on stdout has the counts so
far, and a line on stderr each answer that is wrong.
"""

from __future__ import annotations

import collections
import http.client
import json
import mmap
import random
import re
import socket
import struct
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from benchmarks.hostile_requests import hostile_requests
from shardload.stores.handed import handed_files
from shardload.stores.tokens import BearerToken

N_THREADS = 6
N_IN_USE = 6
"""How many files of the bucket are read at a time: others are read later, so that the cache has to make room."""
_TAKEN_BYTES = 1 << 20
_POSSIBLE = (b"501", b"503", b"505")
"""Errors of a server that a hostile request may be told: what it asks for is not done, or not now."""


class Truth:
    """The files that the server has, by their address."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self._maps: dict[str, mmap.mmap] = {}
        for name, path in facts["files"].items():
            with Path(path).open("rb") as file:
                self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.local = sorted(name for name in self._maps if not name.startswith(("remote/", "alone")))
        self.remote = sorted(name for name in self._maps if name.startswith("remote/"))

    def __getitem__(self, name: str) -> mmap.mmap:
        return self._maps[name]


class WrongAnswerError(Exception):
    """An answer that should not be."""


class Client:
    """One client, in a thread."""

    def __init__(self, facts: dict[str, Any], truth: Truth, counts: collections.Counter[str], seed: int) -> None:
        self._facts, self._truth, self._counts = facts, truth, counts
        self._chance = random.Random(seed)
        self._host, _, port = urllib.parse.urlsplit(facts["address"]).netloc.rpartition(":")
        self._port = int(port)
        self._headers = {"Authorization": f"Bearer {facts['token']}"}
        self._hostile = hostile_requests(seed, token=facts["token"])
        self._open: http.client.HTTPConnection | None = None
        self._jobs: list[str] = []
        self._actions: list[tuple[Callable[[], None], int]] = [
            (self._range_of_local, 20), (self._range_of_remote, 20), (self._many_ranges, 12), (self._whole, 6),
            (self._head, 10), (self._conditional, 10), (self._json, 6), (self._page, 3), (self._changing, 4),
            (self._job, 4), (self._events, 3), (self._announced, 3), (self._handed, 4), (self._cut, 6),
            (self._wrong_token, 5), (self._sign_in, 2), (self._missing, 5), (self._hostile_request, 12),
            (self._unfinished, 3),
        ]  # fmt: skip

    def run(self) -> None:
        """Do one thing after the other until the time is over."""
        actions, weights = zip(*self._actions, strict=True)
        while time.time() < self._facts["until_s"]:
            action = self._chance.choices(actions, weights)[0]
            try:
                action()
                self._counts[action.__name__.removeprefix("_")] += 1
            except WrongAnswerError as error:
                self._counts["wrong"] += 1
                print(f"wrong: {action.__name__}: {error}", file=sys.stderr, flush=True)
                self._leave()
            except (OSError, http.client.HTTPException) as error:
                self._counts["lost"] += 1
                print(f"lost: {action.__name__}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                self._leave()
        self._leave()

    def _leave(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def _connection(self) -> http.client.HTTPConnection:
        if self._open is None or self._chance.random() < 0.05:
            self._leave()
            here = (f"127.0.{self._chance.randrange(4)}.{self._chance.randrange(1, 250)}", 0)
            self._open = http.client.HTTPConnection(self._host, self._port, timeout=180, source_address=here)
        return self._open

    def _ask(
        self, path: str, *, method: str = "GET", body: bytes | None = None, **headers: str
    ) -> tuple[int, http.client.HTTPMessage, bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection = self._connection()
        for is_last in (False, True):
            try:
                connection.request(method, path, body, self._headers | named)
                answer = connection.getresponse()
                break
            except (http.client.RemoteDisconnected, BrokenPipeError, ConnectionResetError):
                connection.close()  # the server may close a connection between two requests
                if is_last:
                    raise
        found = answer.read()
        self._counts["bytes"] += len(found)
        if answer.status == 500:
            raise WrongAnswerError(f"{method} {path} {named}: 500")
        return answer.status, answer.headers, found

    def _expect(self, is_right: bool, *told: object) -> None:
        if not is_right:
            raise WrongAnswerError(" ".join(map(str, told)))

    def _remote(self) -> str:
        now = int((time.time() - self._facts["began_s"]) / self._facts["shift_s"])
        return self._truth.remote[(now + self._chance.randrange(N_IN_USE)) % len(self._truth.remote)]

    def _any(self) -> str:
        return self._remote() if self._chance.random() < 0.5 else self._chance.choice(self._truth.local)

    def _part(self, name: str) -> tuple[int, int]:
        n_bytes = len(self._truth[name])
        count = min(n_bytes, int(2 ** self._chance.uniform(0, 23)))
        start = self._chance.randrange(n_bytes - count + 1)
        return start, start + count

    def _range_of(self, name: str) -> None:
        start, stop = self._part(name)
        status, headers, body = self._ask(f"/{name}", Range=f"bytes={start}-{stop - 1}")
        self._expect(status == 206 and body == self._truth[name][start:stop], name, start, stop, status, len(body))
        said = f"bytes {start}-{stop - 1}/{len(self._truth[name])}"
        self._expect(headers["Content-Range"] == said, headers["Content-Range"], said)

    def _range_of_local(self) -> None:
        self._range_of(self._chance.choice(self._truth.local))

    def _range_of_remote(self) -> None:
        self._range_of(self._remote())

    def _many_ranges(self) -> None:
        name = self._any()
        n_bytes = len(self._truth[name])
        cuts = sorted(self._chance.sample(range(n_bytes), 2 * self._chance.randrange(2, 20)))
        ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
        status, headers, body = self._ask(f"/{name}", Range="bytes=" + ",".join(f"{a}-{b - 1}" for a, b in ranges))
        mark = headers["Content-Type"].rpartition("boundary=")[2].encode()
        found = [part.partition(b"\r\n\r\n")[2] for part in body.split(b"\r\n--" + mark)[1:-1]]
        self._expect(status == 206 and found == [self._truth[name][a:b] for a, b in ranges], name, ranges, status)

    def _whole(self) -> None:
        name = self._any()
        status, _, body = self._ask(f"/{name}")
        self._expect(status == 200 and body == self._truth[name][:], name, status, len(body))

    def _head(self) -> None:
        name = self._any()
        status, headers, body = self._ask(f"/{name}", method="HEAD")
        self._expect(status == 200 and not body, name, status, len(body))
        self._expect(int(headers["Content-Length"]) == len(self._truth[name]), name, headers["Content-Length"])

    def _conditional(self) -> None:
        name = self._any()
        tag = self._ask(f"/{name}", method="HEAD")[1]["ETag"]
        self._expect(self._ask(f"/{name}", If_None_Match=tag)[0] == 304, name, "not 304")
        self._expect(self._ask(f"/{name}", If_Match='"other"')[0] == 412, name, "not 412")
        start, stop = self._part(name)
        status, _, body = self._ask(f"/{name}", If_Range=tag, Range=f"bytes={start}-{stop - 1}")
        self._expect(status == 206 and body == self._truth[name][start:stop], name, "If-Range", status)
        self._expect(self._ask(f"/{name}", Range=f"bytes={len(self._truth[name])}-")[0] == 416, name, "not 416")

    def _json(self) -> None:
        path = self._chance.choice(
            ("/api/v1/checkpoints", "/openapi.json", "/api/v1/jobs", "/api/v1/loads", "/models/")
        )
        status, _, body = self._ask(path, Accept="application/json")
        self._expect(status == 200 and bool(json.loads(body)), path, status)
        if path == "/models/":
            sizes = {entry["name"]: entry.get("size") for entry in json.loads(body)["entries"]}
            name = self._chance.choice([name for name in self._truth.local if name.startswith("models/")])
            self._expect(sizes.get(name.removeprefix("models/")) == len(self._truth[name]), sizes)
        if path == "/api/v1/jobs":
            for job in json.loads(body)["jobs"]:
                is_bad = job["state"] == "failed" or (job["result"] or {}).get("verdict") == "damaged"
                # What comes and goes may be gone when a job begins; the cache may be full of what is in use.
                is_possible = job["checkpoint"].startswith("changing") or "cache" in str(job["result"])
                self._expect(not is_bad or is_possible, job)

    def _page(self) -> None:
        name = self._chance.choice(self._facts["checkpoints"])
        paths = ("/", "/models/", "/remote/", "/ui/loads", f"/ui/checkpoints/{name}", f"/ui/plans/{name}?mesh=1x2")
        path = self._chance.choice(paths)
        status, _, body = self._ask(path, Accept="text/html")
        self._expect(status in (200, 422, 503) and body.startswith(b"<!"), path, status, body[:200])

    def _changing(self) -> None:
        number = self._chance.randrange(10)
        try:
            status, _, body = self._ask(f"/changing/{number}/model.safetensors")
        except http.client.IncompleteRead:  # it was removed while it was sent
            self._leave()
            return
        made = (2).to_bytes(8, "little") + b"{}"
        self._expect(status == 404 or (status == 200 and body == made), number, status, body[:200])

    def _job(self) -> None:
        kind, name = self._chance.choice(self._facts["jobs"])
        asked = json.dumps({"kind": kind, "checkpoint": name}).encode()
        more = {"Idempotency_Key": f"soak-{self._chance.randrange(1 << 40)}"} if self._chance.random() < 0.3 else {}
        status, _, body = self._ask("/api/v1/jobs", method="POST", body=asked, Content_Type="application/json", **more)
        self._expect(status in (200, 201, 429), status, body[:200])
        if status != 429:
            self._jobs = [*self._jobs, json.loads(body)["id"]][-5:]
        if self._jobs and self._chance.random() < 0.5:
            status, _, body = self._ask(f"/api/v1/jobs/{self._chance.choice(self._jobs)}", method="DELETE")
            self._expect(status in (200, 404), status, body[:200])

    def _events(self) -> None:
        if not self._jobs:
            return
        connection = http.client.HTTPConnection(self._host, self._port, timeout=180)
        with closing(connection):
            connection.request("GET", f"/api/v1/jobs/{self._chance.choice(self._jobs)}/events", headers=self._headers)
            answer = connection.getresponse()
            self._expect(answer.status in (200, 404, 503), answer.status)
            if answer.status == 200:
                self._expect(answer.readline() == b"event: job\n", "no event")
                if self._chance.random() < 0.2:
                    answer.read()

    def _announced(self) -> None:
        status, headers, body = self._ask("/api/v1/runs/run")
        self._expect(status == 200 and json.loads(body) == {"steps": [1]}, status, body[:200])
        status, _, _ = self._ask("/api/v1/runs/run", If_None_Match=headers["ETag"], Prefer="wait=1")
        self._expect(status == 304, status)

    def _handed(self) -> None:
        name = self._chance.choice(self._truth.local)
        tag = self._ask(f"/{name}", method="HEAD")[1]["ETag"].strip('"')
        files = handed_files(self._facts["address"], BearerToken(self._facts["address"], self._facts["token"]))
        file = None if files is None else files.open(name, tag=tag, shown=name)
        if file is None:  # 128 clients may be answered at a time
            self._counts["not handed over"] += 1
            return
        with closing(file):
            start, stop = self._part(name)
            buffer = bytearray(stop - start)
            file.read_into(memoryview(buffer), start)
        self._expect(buffer == self._truth[name][start:stop], name, start, stop)

    def _raw(self, data: bytes, *, most: int, timeout: float = 20) -> bytes:
        found = bytearray()
        with socket.create_connection((self._host, self._port), timeout=timeout) as made, suppress(OSError):
            if self._chance.random() < 0.3:  # the end of the connection is a reset
                made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            made.sendall(data)
            while len(found) < most and (part := made.recv(_TAKEN_BYTES)):
                found += part
        return bytes(found)

    def _request(self, name: str, *more: str) -> bytes:
        token = f"Authorization: Bearer {self._facts['token']}"
        return "\r\n".join((f"GET /{name} HTTP/1.1", "Host: localhost", token, *more, "", "")).encode()

    def _cut(self) -> None:
        name = self._any()
        found = self._raw(self._request(name), most=int(2 ** self._chance.uniform(0, 23)))
        _, _, body = found.partition(b"\r\n\r\n")
        self._expect(body == self._truth[name][: len(body)], name, len(body))

    def _wrong_token(self) -> None:
        wrong = self._chance.choice(("", "Bearer", "Bearer wrong", f"Basic {self._facts['token']}", "Bearer \xe9"))
        name = self._any()
        status, _, body = self._ask(f"/{name}", Authorization=wrong)
        self._expect(status == 401 and len(body) < 200, name, status)

    def _sign_in(self) -> None:
        is_right = self._chance.random() < 0.7
        fields = {"token": self._facts["token"] if is_right else "wrong", "next": "/ui/loads"}
        origin = f"http://{self._host}:{self._port}"
        status, headers, _ = self._ask(
            "/ui/sign-in", method="POST", body=urllib.parse.urlencode(fields).encode(), Authorization="", Origin=origin,
            Content_Type="application/x-www-form-urlencoded",
        )  # fmt: skip
        self._expect(status in ((303, 429) if is_right else (403, 429)), is_right, status)
        if status == 303:
            cookie = headers["Set-Cookie"].partition(";")[0]
            self._expect(self._ask("/ui/loads", Authorization="", Cookie=cookie)[0] == 200, "the cookie is refused")

    def _missing(self) -> None:
        name = (
            self._chance.choice(("models", "remote", "run", "new", "")) + f"/missing-{self._chance.randrange(1 << 40)}"
        )
        status, _, body = self._ask(f"/{name.lstrip('/')}")
        self._expect(status == 404, name, status, body[:200])

    def _hostile_request(self) -> None:
        sent = next(self._hostile)
        found = self._raw(sent, most=4 << 20, timeout=0.5)
        status = re.match(rb"HTTP/\d\.\d (\d{3}) ", found)
        self._expect(not found or status is not None, sent[:300], found[:200])
        self._expect(status is None or status[1] in _POSSIBLE or status[1] < b"500", sent[:300], found[:200])
        self._expect(b"in no checkpoint" not in found, sent[:300])

    def _unfinished(self) -> None:
        asked = self._request(self._any())
        self._raw(asked[: self._chance.randrange(len(asked) - 2)], most=1, timeout=self._chance.random())


def main() -> None:
    """Run the clients, and tell what they did."""
    facts = json.loads(Path(sys.argv[1]).read_text())
    truth, counts = Truth(facts), collections.Counter[str]()
    seeds = random.Random(int(sys.argv[2]))
    threads = [
        threading.Thread(target=Client(facts, truth, counts, seeds.randrange(1 << 32)).run) for _ in range(N_THREADS)
    ]
    for each in threads:
        each.start()
    while any(each.is_alive() for each in threads):
        threads[0].join(10)
        time.sleep(0.1)
        print(json.dumps(counts.copy()), flush=True)
    print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    main()
