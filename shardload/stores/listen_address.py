"""Where a server listens: a host and a port, and whether only this machine can connect."""

from __future__ import annotations

import ipaddress
from contextlib import suppress
from dataclasses import dataclass

from shardload.errors import UsageError


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """A host, which may be a name, and a port; 0 is any free port."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> ListenAddress:
        """Read ``HOST:PORT``; raise a `UsageError` if it is something else."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not port.isdecimal() or int(port) > 65535:
            raise UsageError(f"Cannot listen at {text!r}: expected HOST:PORT, such as 127.0.0.1:8600")
        return cls(host, int(port))

    @property
    def is_local(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        with suppress(ValueError):
            return ipaddress.ip_address(self.host).is_loopback
        return False
