"""What is in a checkpoint, and what a load of it would do, for pages and programs: other processes find out.

    Question(source, command) ─► Examiner ─► shardload inspect │ plan http://127.0.0.1:PORT/SOURCE --json
                                   │                                    │
                                   └─ answers by version     the bytes that every client gets

Headers are parsed and models are built outside of the server, by one process at a time with limits on its time, memory
and output: a file that crashes a library ends this process only. The process reads through the server, at an address
that only this machine has, and so opens no file that a client could not.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
import sys
import tempfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar
from urllib.parse import quote

from shardload.errors import SourceError
from shardload.serving.limits import ConnectionShare
from shardload.serving.listener import bound
from shardload.stores.cache_choice import FOLDER_VARIABLE, SIZE_VARIABLE
from shardload.stores.tokens import TOKENS_VARIABLE

ResultT = TypeVar("ResultT")
_MOST_S = 120.0
_MOST_ANSWER = 32 << 20
"""Most bytes of one answer: 100,000 tensors take as much."""
_MOST_KEPT = 64 << 20
_MOST_MEMORY = 4 << 30
"""Most bytes of memory that a process may write to (of Linux); a plan for 512 devices takes 0.5 GB."""
_MOST_WAITING = 4
_MOST_READING = 64
"""Most pages that wait until their answer is parsed, one at a time: parsing takes memory and delays requests."""
_MOST_CONNECTIONS = 64
_NICE = 10
"""Niceness of such a process, because the server sends checkpoints meanwhile."""
_HOST = "127.0.0.1"


class UnansweredError(Exception):
    """A question has no answer: the text says why, ``status`` is that of a response."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a checkpoint."""

    source: str
    """Address of the checkpoint below the server's."""
    version: str
    """Text that differs whenever a file of the checkpoint was changed."""
    command: tuple[str, ...]
    """Command of ``shardload`` that answers it, with its options."""


class Examiner:
    """Answers questions about checkpoints. ``token`` is one that the server accepts."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._connect: Callable[[], asyncio.Protocol] | None = None
        self._server: asyncio.Server | None = None
        self._turn = asyncio.Semaphore(1)
        self._running: dict[Question, asyncio.Task[bytes]] = {}
        self._answers: OrderedDict[Question, bytes] = OrderedDict()
        self._reading = asyncio.Semaphore(1)
        self._n_reading = 0

    def start(self, connect: Callable[[], asyncio.Protocol]) -> None:
        """Allow questions; ``connect`` makes what answers a connection, as `asyncio.loop.create_server` takes it."""
        self._connect = connect

    async def close(self) -> None:
        """End what is running."""
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            self._server.close()

    async def read(self, question: Question, made: Callable[[dict[str, Any]], ResultT]) -> ResultT:
        """Return what ``made`` makes of an answer, in a thread, for one request at a time.

        Raises:
            UnansweredError: When there is no answer, or too many others wait.
        """
        answer = await self.ask(question)
        if self._n_reading >= _MOST_READING:
            raise UnansweredError(503, "Too many other pages are asked for. Try again in a moment.")
        self._n_reading += 1
        try:
            async with self._reading:
                return await asyncio.to_thread(lambda: made(json.loads(answer)))
        finally:
            self._n_reading -= 1

    async def ask(self, question: Question) -> bytes:
        """Return the answer: an object of JSON, as the command prints it, with addresses below the server's as paths.

        Raises:
            UnansweredError: When there is none, or too many others wait.
        """
        found = self._answers.get(question)
        if found is None:
            found = await asyncio.shield(self._task(question))
        if question in self._answers:
            self._answers.move_to_end(question)
        return found

    def _task(self, question: Question) -> asyncio.Task[bytes]:
        """Return the task that answers a question: the same for all who ask it."""
        if (task := self._running.get(question)) is not None:
            return task
        if len(self._running) >= _MOST_WAITING:
            raise UnansweredError(503, "Other checkpoints are being read. Try again in a moment.")
        task = self._running[question] = asyncio.create_task(self._answered(question))
        task.add_done_callback(lambda done: self._end(question, done))
        return task

    def _end(self, question: Question, done: asyncio.Task[bytes]) -> None:
        del self._running[question]
        if done.cancelled() or done.exception() is not None:
            return
        self._answers[question] = done.result()
        while sum(map(len, self._answers.values())) > _MOST_KEPT and len(self._answers) > 1:
            self._answers.popitem(last=False)

    async def _answered(self, question: Question) -> bytes:
        async with self._turn:
            address = await self._address()
            try:
                async with asyncio.timeout(_MOST_S):
                    printed = await self._printed(question, address)
            except TimeoutError:
                raise UnansweredError(504, f"Reading the checkpoint took more than {_MOST_S:.0f} s.") from None
            except OSError as error:  # there is no folder for temporary files, or there are too many processes
                raise UnansweredError(503, f"The server cannot read checkpoints now: {error.strerror}.") from error
            return await asyncio.to_thread(_checked, printed.replace(f"{address}/".encode(), b""))

    async def _address(self) -> str:
        """Return an address of the server that only this machine has; it listens there when it is first needed."""
        if self._connect is None:
            raise UnansweredError(503, "The server cannot read checkpoints yet.")
        if self._server is None:
            try:
                listener = bound(_HOST, 0, share=ConnectionShare(_MOST_CONNECTIONS, each=None))
            except SourceError as error:
                raise UnansweredError(503, f"The server cannot read checkpoints now: {error}") from error
            self._server = await asyncio.get_running_loop().create_server(self._connect, sock=listener)
        return f"http://{_HOST}:{self._server.sockets[0].getsockname()[1]}"

    async def _printed(self, question: Question, address: str) -> bytes:
        name, *more = question.command
        with _tokens(f"{address} {self._token}\n") as path:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-m", "shardload", name, f"{address}/{quote(question.source)}", "--json"),
                *more,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                env=_environment(path),
                start_new_session=True,  # an interrupt at a terminal is for the server
            )
            try:
                _limit(process.pid)
                found = bytearray()
                assert process.stdout is not None
                while part := await process.stdout.read(1 << 20):
                    found += part
                    if len(found) > _MOST_ANSWER:
                        raise UnansweredError(422, "There is more in the checkpoint than a page can show.")
                await process.wait()
            finally:
                if process.returncode is None:
                    with suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
        return bytes(found)


@contextmanager
def _tokens(line: str) -> Iterator[str]:
    """Write a token to a file that only this user may read: others see the environment and arguments of processes."""
    with tempfile.NamedTemporaryFile("w", prefix="shardload-") as file:
        file.write(line)
        file.flush()
        yield file.name


def _environment(tokens: str) -> dict[str, str]:
    """Return the variables of a process that reads from this server only: by no proxy, and into no cache."""
    kept = {
        name: text
        for name, text in os.environ.items()
        if not name.lower().endswith("_proxy") and name not in (FOLDER_VARIABLE, SIZE_VARIABLE)
    }
    return {**kept, TOKENS_VARIABLE: tokens, "JAX_PLATFORMS": "cpu", "NO_PROXY": "*"}


def _limit(process: int) -> None:
    with suppress(OSError, AttributeError):  # it has ended, or this system has no such limits
        os.setpriority(os.PRIO_PROCESS, process, _NICE)
        resource.prlimit(process, resource.RLIMIT_DATA, (_MOST_MEMORY, _MOST_MEMORY))


def _checked(printed: bytes) -> bytes:
    """Return what a command printed, as one line, if it is an answer; raise if it is an error, or none."""
    try:
        found = json.loads(printed)
    except ValueError:  # it crashed, or came to its limit of memory
        raise UnansweredError(422, "The process that read the checkpoint ended without an answer.") from None
    if "error" in found:
        raise UnansweredError(422, str(found["error"].get("message")))
    return f"{json.dumps(found)}\n".encode()
