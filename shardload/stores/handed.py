"""Open files that `shardload serve` on this machine hands over, so that no byte of them goes through a socket.

    a file's ETag is "shardload-…"            only then, and only if the address is one of this machine:
    GET /api/v1/server                        ─► {"server": "shardload", "socket": "shardload-5f0c…"}
    that socket: {"key": NAME, "token": …}    ─► {"etag": …} and the open file itself

The socket is an abstract one of Linux: only processes of the same machine (in the same network namespace) reach it. The
file is read like any other file here, straight into the shards. Whatever goes wrong, the bytes are requested instead.
"""

from __future__ import annotations

import json
import os
import socket
import stat
import sys
from contextlib import suppress
from urllib.parse import urlsplit

from shardload.stores.answers import page_of
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
    """Return what hands over the files at an address, if `shardload serve` runs there, on this machine.

    Only an address of this machine is asked.
    """
    if sys.platform != "linux":
        return None
    with suppress(OSError, ValueError, AttributeError):
        if not _is_of_this_machine(urlsplit(root).hostname or ""):
            return None
        found = json.loads(page_of(f"{root}{SERVER_PATH}", LINE_BYTES, headers=token.headers if token else {}) or b"{}")
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
