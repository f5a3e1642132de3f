"""Requests that no honest client sends, made up from a seed: paths, headers, methods, framing and bytes at random.

None of them has a right to more than a refusal, except that some happen to be requests for what is served.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS", "get", "TRACE", "CONNECT", "PRI", "X" * 100, "")
_PIECES = (
    "/", "..", ".", "%2e", "%2f", "%00", "%c0%ae", "\\", "%5c", "%252e", ":", ";", "?", "#", "&", "=", "~", " ", "\x00",
    "\xe9", "models", "model.safetensors", "secret", "etc", "passwd", "api", "v1", "jobs", "events", "ui",
    "checkpoints", "tensors", "plan", "mesh", "runs", "metrics", "openapi.json", "a" * 300, "%", "%zz", "-1", "9" * 30,
)  # fmt: skip
_NAMES = (
    "Range", "If-Range", "If-Match", "If-None-Match", "Prefer", "Accept", "Accept-Encoding", "Authorization", "Cookie",
    "Content-Length", "Transfer-Encoding", "Content-Encoding", "Content-Type", "Expect", "Upgrade", "Connection",
    "Host", "Origin", "Sec-Fetch-Site", "X-Request-Id", "Idempotency-Key", "X-Forwarded-For", "Trailer", "TE",
    "X Y", "",
)  # fmt: skip
_VALUES = (
    "", "*", '"', '"x"', 'W/"x"', "bytes=", "bytes=0-", "bytes=-1", "bytes=5-2", "bytes=0-0,0-0",
    "bytes=" + "0-1," * 900, "bytes=99999999999999999999-", "bytes=-99999999999999999999",
    "items=0-1", "wait=9999999999", "wait=-1", "gzip",
    "chunked", "xchunked", "chunked, chunked", "0", "-1", "5", "99999999999", "1e3", "0x10", "100-continue",
    "websocket", "close", "keep-alive", "Bearer", "Bearer x", "Basic eDp5", "shardload=x", "evil.example", "localhost",
    "null", "text/html", "application/json", "\xe9\xff", "a" * 9000, "\t", "\x00", "\x1b[31m",
)  # fmt: skip
_BODIES = (b"", b"0\r\n\r\n", b"5\r\nabcde\r\n0\r\n\r\n", b"ffffffffffffffff\r\n", b"{}", b"[" * 5000, b"\xff" * 100)


def hostile_requests(seed: int, *, token: str | None = None, host: str = "localhost") -> Iterator[bytes]:
    """Yield requests without end; a half of them has the token, if there is one."""
    chance = random.Random(seed)
    while True:
        if chance.random() < 0.1:
            yield chance.randbytes(chance.randrange(1, 400))
            continue
        lines = [_first_line(chance)]
        if chance.random() < 0.8:
            lines.append(f"Host: {host}")
        if token is not None and chance.random() < 0.5:
            lines.append(f"Authorization: Bearer {token}")
        for _ in range(chance.randrange(4)):
            lines.append(f"{chance.choice(_NAMES)}{chance.choice((': ', ':', ' : ', ''))}{chance.choice(_VALUES)}")
        end = chance.choice(("\r\n",) * 8 + ("\n", "\r"))
        found = (end.join(lines) + end * 2).encode("latin-1") + chance.choice(_BODIES)
        yield found[: chance.randrange(len(found))] if chance.random() < 0.1 else found


def _first_line(chance: random.Random) -> str:
    path = "/" + "".join(chance.choice(_PIECES) for _ in range(chance.randrange(8)))
    version = chance.choice(("HTTP/1.1",) * 8 + ("HTTP/1.0", "HTTP/2.0", "HTTP/9", ""))
    return f"{chance.choice(_METHODS)} {path} {version}"
