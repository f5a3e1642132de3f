"""One run at a time saves to a remote folder: it owns the folder by an object that it keeps up.

    root/.staging/owner.json      {"id": …, "host": …, "pid": …, "beat": 17}     replaced every few seconds

A bucket has no locks. A run that begins creates this object, if there is none. Otherwise it looks whether the owner is
alive: its process, if it is on this machine; else whether it replaces the object within `WATCH_S`. A dead owner's place
is taken, by a write that succeeds only if nothing else took it. Whoever lost the place, as after a pause longer than
`WATCH_S`, learns it before it publishes or removes a step.

All savers of one process share its ownership, as two callbacks of one ``fit`` share a folder.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from shardload.errors import ShardloadError
from shardload.stores.uploads import Tag, TakenError, Uploads

OWNER_FILE = ".staging/owner.json"
BEAT_S = 10.0
"""Seconds from one replacement of the object to the next."""
WATCH_S = 35.0
"""For how long an owner is watched before it is taken for dead: more than three beats."""
_LONG_AGO_S = 3600.0
"""An owner whose last beat is older than this, by this machine's clock, is not watched: clocks differ by less."""
OWNER_LOOK_S = 1.0


@dataclass(frozen=True, slots=True)
class Owner:
    """Which process saves to a folder."""

    id: str
    host: str = ""
    machine: str = ""
    """What differs between machines, and between containers that do not see each other's processes."""
    pid: int = 0
    started: str = ""
    """When the process was started, as the system counts it: another process may get its number."""
    beat: int = 0
    unix_s: float = 0.0

    @classmethod
    def here(cls) -> Owner:
        """Describe this process, with a new random id."""
        pid = os.getpid()
        return cls(secrets.token_hex(8), socket.gethostname(), _machine(), pid, _started(pid), 0, time.time())

    @classmethod
    def of_json(cls, data: bytes) -> Owner:
        """Read the object; one that cannot be read has no owner, and nothing keeps it up."""
        with suppress(ValueError, TypeError):
            found: Any = json.loads(data)
            if isinstance(found, Mapping):
                known = {key: value for key, value in found.items() if key in cls.__slots__}
                return cls(**{"id": "", **known})
        return cls("")

    @property
    def is_alive(self) -> bool | None:
        """Whether the process exists; ``None`` if that cannot be told, as on another machine."""
        if not self.machine or self.machine != _machine() or not self.started:
            return None
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host or 'an unknown machine'}"


class OwnedByOtherError(Exception):
    """Raised when another process owns a folder; the message says which, as a phrase."""


class Ownership:
    """The right of this process to save to one remote folder, from `take` to `release`."""

    def __init__(self, uploads: Uploads) -> None:
        self._uploads = uploads
        self._brief = Uploads(uploads.url, most_s=BEAT_S)
        """For what must not wait long for a store that does not answer."""
        self._owner = Owner.here()
        self._tag: Tag | None = None
        self._lost: str | None = None
        self._ended = threading.Event()
        self._lock = threading.Lock()

    def take(self) -> None:
        """Become the owner, or raise `OwnedByOtherError`; wait up to `WATCH_S` for a sign of life of another owner."""
        tag: Tag | None = None
        try:
            tag = self._uploads.put(OWNER_FILE, self._json(), only_new=True)
        except TakenError:
            tag = self._replace_dead()
        self._tag = tag
        threading.Thread(target=self._keep_up, name="shardload-owner", daemon=True).start()

    def check(self) -> None:
        """Raise `OwnedByOtherError` if another run has taken the place of this one."""
        if self._lost is None:
            found = self._uploads.read(OWNER_FILE)
            owner = None if found is None else Owner.of_json(found[0])
            if owner is None or owner.id != self._owner.id:
                self._lost = "its owner's object was deleted" if owner is None else f"{owner} saves to it now"
        if self._lost is not None:
            raise OwnedByOtherError(self._lost)

    def release(self) -> None:
        """Delete the object, if it is still this process's own."""
        self._ended.set()
        with self._lock, suppress(OwnedByOtherError, ShardloadError):
            self.check()
            self._brief.delete([OWNER_FILE])

    def _replace_dead(self) -> Tag:
        while True:
            found = self._uploads.read(OWNER_FILE)
            if found is None:  # its owner has just ended
                with suppress(TakenError):
                    return self._uploads.put(OWNER_FILE, self._json(), only_new=True)
                continue
            owner = Owner.of_json(found[0])
            if owner.is_alive or (owner.is_alive is None and self._gives_sign(found)):
                raise OwnedByOtherError(f"{owner} saves to it now")
            with suppress(TakenError):
                return self._uploads.put(OWNER_FILE, self._json(), replacing=found[1])

    def _gives_sign(self, found: tuple[bytes, Tag]) -> bool:
        if time.time() - Owner.of_json(found[0]).unix_s > _LONG_AGO_S:
            return False
        logging.getLogger("shardload").warning(
            "Waiting up to %.0f s to see whether %s, which saved to %s, is still alive",
            WATCH_S, Owner.of_json(found[0]), self._uploads.url,
        )  # fmt: skip
        until = time.monotonic() + WATCH_S
        while time.monotonic() < until:
            time.sleep(OWNER_LOOK_S)
            now = self._uploads.read(OWNER_FILE)
            if now is None or now[0] != found[0]:
                return now is not None
        return False

    def _keep_up(self) -> None:
        while not self._ended.wait(BEAT_S):
            with self._lock:
                if self._ended.is_set():
                    return
                self._owner = replace(self._owner, beat=self._owner.beat + 1, unix_s=time.time())
                try:
                    self._tag = self._brief.put(OWNER_FILE, self._json(), replacing=self._tag)
                except TakenError:
                    if not self._adopt():
                        return  # `check` finds out who it was
                except ShardloadError:
                    continue  # the store does not answer: the next beat may get through

    def _adopt(self) -> bool:
        """Whether the object is still this process's own: an earlier beat replaced it, whose answer was lost."""
        with suppress(ShardloadError):
            if (found := self._brief.read(OWNER_FILE)) is None or Owner.of_json(found[0]).id != self._owner.id:
                return False
            self._tag = found[1]
        return True

    def _json(self) -> bytes:
        return json.dumps(asdict(self._owner)).encode()


def _machine() -> str:
    """Return what this machine, and what sees its processes, is called; "" if the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


def _started(pid: int) -> str:
    """Return when a process was started, as a text; "" if there is none, or the system does not tell."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]
