"""Run a server until a signal ends it: open the socket, set up TLS, and finish what is being sent at the end."""

from __future__ import annotations

import asyncio
import ctypes
import os
import re
import resource
import signal
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import web

from shardload import __version__
from shardload.errors import SourceError, UsageError
from shardload.serving.accepting import Accepting
from shardload.serving.application import Access, Service
from shardload.serving.certificates import expiry_s, server_context
from shardload.serving.connection import Connection, refusing_expectations
from shardload.serving.jobs.queue import Jobs
from shardload.serving.jobs.records import JobRecords
from shardload.serving.limits import ConnectionShare, RequestRate
from shardload.serving.listener import Listener, bound
from shardload.serving.noise import server_log
from shardload.serving.roots.catalogue import Catalogue
from shardload.serving.roots.remote_roots import RemoteCatalogue
from shardload.stores.listen_address import ListenAddress
from shardload.stores.range_cache import RangeCache
from shardload.stores.tokens import private_content

_LEAST_TOKEN = 16
"""Fewest characters of a token."""
_TOKEN = re.compile(rb"[!-~]{%d,}" % _LEAST_TOKEN)
_IDLE_S = 75.0
"""Seconds after which a connection without a complete request is closed."""
_M_MMAP_THRESHOLD = -3
"""The number of this setting in glibc's ``malloc.h``."""
_LARGE_BYTES = 1 << 20
_THREADS = 32
"""Threads that open and read files: they wait for the disk more than they compute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listening:
    """Where a server listens, and how it protects what it sends."""

    host: str
    port: int
    certificate: Path | None = None
    key: Path | None = None
    most_connections: int = 1024
    client_connections: int | None = None
    """Most connections of one client; by default half of all, and any number from this machine."""
    requests_per_s: int | None = None
    """How many requests a second one client may send; by default any number."""
    hands_over: bool = True
    """Whether clients on this machine get open files, and read them without a connection."""
    until_stdin_closes: bool = False
    """Whether the end of standard input ends the server, too: it may be a pipe from the process that started it."""
    grace_s: float = 30.0
    """Seconds that bodies which are being sent at the end may still take."""

    @classmethod
    def parse(cls, text: str, **options: Any) -> Listening:
        """Read ``HOST:PORT``; raise a `UsageError` if it is something else."""
        found = ListenAddress.parse(text)
        return cls(host=found.host, port=found.port, **options)

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        return ListenAddress(self.host, self.port).is_local

    def tls(self) -> ssl.SSLContext | None:
        """Return what TLS needs; ``None`` if there is no certificate."""
        if self.certificate is None:
            if self.key is not None:
                raise UsageError("Cannot use --tls-key without --tls-cert")
            return None
        return server_context(self.certificate, self.key)


def read_tokens(path: Path) -> tuple[str, ...]:
    """Read tokens, one a line; empty lines and lines that begin with ``#`` are passed over.

    Raises:
        SourceError: When the file cannot be read, users outside of its group may read it, or a line is no token.
    """
    lines = [line.strip() for line in private_content(str(path), named_by="--token-file").split(b"\n")]
    for number, line in enumerate(lines, 1):
        if line and not line.startswith(b"#") and _TOKEN.fullmatch(line) is None:
            raise SourceError(
                f"Cannot use line {number} of {path}: it is no token, expected {_LEAST_TOKEN} or more letters, digits "
                "and signs, such as python -c 'import secrets; print(secrets.token_urlsafe(32))' prints"
            )
    tokens = tuple(line.decode() for line in lines if line and not line.startswith(b"#"))
    if not tokens:
        raise SourceError(f"Cannot use {path}: it contains no token. Write one on a line of its own")
    return tokens


def serve(
    catalogue: Catalogue,
    listening: Listening,
    *,
    tokens: tuple[str, ...] = (),
    state: Path | None = None,
    log: Callable[[dict[str, Any]], None],
    started: Callable[[str], None],
    addresses: RemoteCatalogue | None = None,
    cache: RangeCache | None = None,
    peers: tuple[str, ...] = (),
) -> None:
    """Serve until SIGINT or SIGTERM, then finish what is being sent.

    Args:
        catalogue: What is served.
        listening: Where.
        tokens: One of them is needed to read; required where other machines can connect.
        state: Folder for jobs and digests of files; without one, they are gone with this process.
        log: Called with the facts of each request, and of what else happens.
        started: Called with the server's address, once it can be asked.
        addresses: What is served of other stores.
        cache: Keeps what is fetched from these.
        peers: Addresses of other servers that serve these, which are asked first.

    Raises:
        UsageError: When other machines could connect without a token, or another server uses ``state``.
        SourceError: When the address is taken, or is not one of this machine; for a certificate, or for ``state``.
    """
    if not tokens and not listening.is_local:
        raise UsageError(
            f"Cannot listen at {listening.host} without a token: everyone who can connect could read the checkpoints. "
            "Give --token-file FILE, or listen at 127.0.0.1"
        )
    access = Access(tokens, is_local=listening.is_local and not tokens)
    rate = None if listening.requests_per_s is None else RequestRate(listening.requests_per_s)
    context = listening.tls()
    jobs = Jobs(catalogue, JobRecords(state), log)
    service = Service(
        catalogue,
        access,
        log,
        jobs=jobs,
        hands_over=listening.hands_over,
        rate=rate,
        addresses=addresses,
        cache=cache,
        peers=peers,
    )
    _return_memory()
    _allow_descriptors(2 * listening.most_connections + 256)  # each connection may have a file open
    share = ConnectionShare(listening.most_connections, each=listening.client_connections)
    service.metrics.connections.set_function(lambda: share.n_open)
    if context is not None and (at_s := expiry_s(context, listening.certificate)) is not None:
        name = "shardload_certificate_expiry_timestamp_seconds"
        service.metrics.tell(name, "When the certificate expires, in seconds since 1970", at_s)
    with bound(listening.host, listening.port, share=share) as listener:
        try:
            ended_s = asyncio.run(_run(service, listener, listening, context, started=started, log=log))
        finally:
            jobs.stop()
    log({"event": "stopped", "seconds": round(time.monotonic() - ended_s, 3)})


def _return_memory() -> None:
    """Let glibc return the memory of each large block to the system, not keep it in the heaps of its threads.

    After the first block that it frees, it takes later ones from there, and the gaps between them stay.
    """
    with suppress(OSError, AttributeError):  # another library of C
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def _allow_descriptors(count: int) -> None:
    """Raise this process's limit of open files, as far as the system lets it: it is 1024 for most."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(hard, count)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def _read_stdin(then: Callable[[], object]) -> None:
    with suppress(OSError):
        while os.read(0, 1 << 16):
            pass
    with suppress(RuntimeError):  # the server has ended already
        then()


async def _run(
    service: Service,
    listener: Listener,
    listening: Listening,
    context: ssl.SSLContext | None,
    *,
    started: Callable[[str], None],
    log: Callable[[dict[str, Any]], None],
) -> float:
    """Serve, and return when the end was asked for, by `time.monotonic`."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if listening.until_stdin_closes:
        # A daemon: a read cannot be interrupted.
        threading.Thread(target=_read_stdin, args=(lambda: loop.call_soon_threadsafe(ended.set),), daemon=True).start()
    runner = web.AppRunner(
        service.application(),
        shutdown_timeout=listening.grace_s / 2,  # aiohttp waits for so long twice
        handle_signals=False,
    )
    await runner.setup()
    requests = runner.server
    assert requests is not None
    requests.request_handler = refusing_expectations(requests.request_handler, service.note_error)
    options: dict[str, Any] = {
        "access_log": None,
        "keepalive_timeout": _IDLE_S,
        "auto_decompress": False,  # no request has a body that counts
        "logger": server_log(service),
    }

    def connect() -> Connection:
        return Connection(requests, loop=loop, **options)

    service.examiner.start(connect)
    loop.set_default_executor(ThreadPoolExecutor(_THREADS))

    try:
        accepting = Accepting(listener, connect, context=context, note_error=service.note_connection)
        host = f"[{listening.host}]" if ":" in listening.host else listening.host
        port = listener.getsockname()[1]
        handing = loop.create_task(service.handing.run()) if service.hands_over else None
        address = f"{'http' if context is None else 'https'}://{host}:{port}"
        log({"event": "started", "version": __version__, "address": address})
        started(address)
        await ended.wait()
        ended_s, service.is_ending = time.monotonic(), True
        log({"event": "stopping", "requests": service.metrics.n_running, "grace_s": listening.grace_s})
        service.catalogue.stop()
        service.announcing.end()
        if handing is not None:
            handing.cancel()
        await service.examiner.close()
        accepting.close()
    finally:
        await runner.cleanup()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)
    return ended_s
