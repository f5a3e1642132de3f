"""Requests that no honest client sends, made up from a seed: paths, headers, methods, framing and bytes at random.

None of them has a right to more than a refusal, except that some happen to be requests for what is served.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_METHODS = ("GET", "GET", "GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "X" * 100)
_VERSIONS = ("HTTP/1.1",) * 4 + ("HTTP/1.0", "HTTP/2.0", "HTTP/9", "")
_PIECES = (
    "/", "..", ".", "%2e", "%2f", "%00", "%c0%ae", "\\", "%5c", "%252e", ":", ";", "?", "&", "=", "~", "models", "%",
    "%zz", "model.safetensors", "secret", "etc", "passwd", "api", "v1", "jobs", "events", "ui", "checkpoints",
    "tensors", "plan", "mesh", "runs", "metrics", "openapi.json", "a" * 300, "-1", "9" * 30,
)  # fmt: skip
_ROUTES = (
    "models/model.safetensors", "api/v1/jobs", "api/v1/checkpoints", "api/v1/runs/", "ui/checkpoints/", "ui/plans/",
    "ui/sign-in", "api/v1/server", "metrics", "healthz", "",
)  # fmt: skip
_NAMES = (
    "Range", "If-Range", "If-Match", "If-None-Match", "Prefer", "Accept", "Accept-Encoding", "Authorization", "Cookie",
    "Content-Length", "Content-Type", "Expect", "Upgrade", "Connection", "Host", "Origin", "Sec-Fetch-Site", "TE",
    "X-Request-Id", "Idempotency-Key", "X-Forwarded-For",
)  # fmt: skip
_VALUES = (
    "", "*", '"', '"x"', 'W/"x"', "bytes=", "bytes=0-", "bytes=-1", "bytes=5-2", "bytes=0-0,0-0", "0", "null", "5,6",
    "bytes=" + "0-1," * 900, "bytes=99999999999999999999-", "bytes=-99999999999999999999", "items=0-1", "bytes=0-0",
    "wait=9999999999", "wait=-1", "gzip", "100-continue", "websocket", "close", "keep-alive", "Bearer", "Bearer x",
    "Basic eDp5", "shardload=x", "evil.example", "localhost", "text/html", "application/json", "\xe9\xff", "\t",
)  # fmt: skip
_BROKEN_PIECES = (" ", "\x00", "\xe9", "#", "\x1b[31m", "\r", "a" * 9000)
_BROKEN_NAMES = ("Transfer-Encoding", "Content-Length", "Content-Encoding", "Trailer", "X Y", "", "\x00", "Host")
_BROKEN_VALUES = (
    "chunked", "xchunked", "chunked, chunked", "-1", "99999999999", "1e3", "0x10", "gzip", "a" * 9000, "\x00",
    "\x1b[31m",
)  # fmt: skip
_BODIES = (b"", b"0\r\n\r\n", b"5\r\nabcde\r\n0\r\n\r\n", b"ffffffffffffffff\r\n", b"{}", b"[" * 5000, b"\xff" * 100)


def hostile_requests(seed: int, *, token: str | None = None, host: str = "localhost") -> Iterator[bytes]:
    """Yield requests without end: a third of them is not even one. A half of them has the token, if there is one."""
    chance = random.Random(seed)
    while True:
        if chance.random() < 0.05:
            yield chance.randbytes(chance.randrange(1, 400))
            continue
        is_broken = chance.random() < 0.3
        lines = [_first_line(chance, is_broken=is_broken)]
        if chance.random() < 0.95:
            lines.append(f"Host: {host}")
        if token is not None and chance.random() < 0.5:
            lines.append(f"Authorization: Bearer {token}")
        lines += (f"{chance.choice(_NAMES)}: {chance.choice(_VALUES)}" for _ in range(chance.randrange(4)))
        if not is_broken:
            yield "\r\n".join((*lines, "", "")).encode("latin-1")
            continue
        for _ in range(chance.randrange(3)):
            between = chance.choice((": ", ":", " : ", ""))
            lines.append(f"{chance.choice(_BROKEN_NAMES)}{between}{chance.choice(_BROKEN_VALUES)}")
        end = chance.choice(("\r\n",) * 8 + ("\n", "\r"))
        found = (end.join(lines) + end * 2).encode("latin-1") + chance.choice(_BODIES)
        yield found[: chance.randrange(len(found))] if chance.random() < 0.1 else found


def _first_line(chance: random.Random, *, is_broken: bool) -> str:
    pieces = _PIECES + _BROKEN_PIECES if is_broken else _PIECES
    path = "/" + chance.choice(_ROUTES) + "".join(chance.choice(pieces) for _ in range(chance.randrange(5)))
    version = chance.choice(("HTTP/1.1",) * 8 + ("HTTP/1.0",)) if not is_broken else chance.choice(_VERSIONS)
    return f"{chance.choice(_METHODS)} {path} {version}"
