"""Open files that `shardload serve` on this machine hands over, so that no byte of them goes through a socket.

    a file's ETag is "shardload-…"            only then, and only if the address is one of this machine:
    GET /api/v1/server                        ─► {"server": "shardload", "socket": "shardload-5f0c…"}
    that socket: {"key": NAME, "token": …}    ─► {"etag": …} and the open file itself

The socket is an abstract one of Linux: only processes of the same machine (in the same network namespace) reach it. The
file is read like any other file here, straight into the shards. Whatever goes wrong, the bytes are requested instead.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import stat
import sys
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from shardload.stores.clients import certificates_file
from shardload.stores.local import LocalFile
from shardload.stores.tokens import BearerToken

SERVED_TAG = "shardload-"
"""How the ETags of a server begin, by which clients know it."""
SERVER_PATH = "/api/v1/server"
LINE_BYTES = 64 << 10
"""Longest request or answer, in bytes."""
WAIT_S = 5.0


class HandedFiles:
    """Gets open files from a server on this machine."""

    def __init__(self, socket_name: str, token: BearerToken | None) -> None:
        self._socket_name, self._token = socket_name, token

    def open(self, key: str, *, tag: str, shown: str) -> LocalFile | None:
        """Return the file of this name in the version of this tag; ``None`` if the server does not hand it over."""
        asked = {"key": key} | ({} if self._token is None else {"token": self._token.text})
        descriptors: list[int] = []
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as made:
                made.settimeout(WAIT_S)
                made.connect(f"\0{self._socket_name}")
                made.sendall(json.dumps(asked).encode() + b"\n")
                answer, descriptors, _, _ = socket.recv_fds(made, LINE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
            is_right = json.loads(answer).get("etag") == tag and stat.S_ISREG(os.fstat(descriptors[0]).st_mode)
        except (OSError, ValueError, AttributeError, IndexError):
            is_right = False
        if not is_right:
            for descriptor in descriptors:
                os.close(descriptor)
            return None
        return LocalFile(shown, descriptor=descriptors[0])


def handed_files(root: str, token: BearerToken | None) -> HandedFiles | None:
    """Return what hands over the files at an address, if a server of ours listens there, on this machine.

    Only an address of this machine is asked.
    """
    if sys.platform != "linux":
        return None
    parts = urlsplit(root)
    with suppress(OSError, ValueError, http.client.HTTPException):
        if not _is_of_this_machine(parts.hostname or ""):
            return None
        found = _asked(parts.scheme, parts.netloc, {} if token is None else token.headers)
        name = found.get("socket")
        if found.get("server") == "shardload" and isinstance(name, str) and 0 < len(name) < 100:
            return HandedFiles(name, token)
    return None


def _is_of_this_machine(host: str) -> bool:
    """Whether a host's address is one of this machine's: only to such a one can a socket be bound."""
    family, kind, number, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, number) as made, suppress(OSError):
        made.bind(address)
        return True
    return False


def _asked(scheme: str, place: str, headers: dict[str, str]) -> dict[str, Any]:
    made: http.client.HTTPConnection
    if scheme == "https":
        context = ssl.create_default_context()
        if (path := certificates_file()) is not None:
            context.load_verify_locations(path)
        made = http.client.HTTPSConnection(place, timeout=WAIT_S, context=context)
    else:
        made = http.client.HTTPConnection(place, timeout=WAIT_S)
    with closing(made):
        made.request("GET", SERVER_PATH, headers=headers)
        answer = made.getresponse()
        found = json.loads(answer.read(LINE_BYTES)) if answer.status == http.client.OK else None
    return found if isinstance(found, dict) else {}
