"""Serve the steps of a run while it trains: `shardload serve` as a process, which ends with the trainer.

    trainer ──stdin──► shardload serve --run DIR --until-stdin-closes ──► replicas that follow the run

A process of its own, because the trainer's interpreter is busy. However the trainer ends, the system closes the pipe to
the server's standard input, and the server ends, too. If the server ends by itself, training goes on.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import quote

from shardload.errors import MissingExtraError, UsageError
from shardload.stores.announced import RESERVED
from shardload.stores.clients import is_bucket
from shardload.stores.listen_address import ListenAddress
from shardload.typing import PathLike

Serve = bool | str | Mapping[str, PathLike]
"""Whether, or where, to serve: ``HOST:PORT``, or a dict of options of ``shardload serve``, by their names in Python."""
_LISTEN = "127.0.0.1:8600"
_OPTIONS = {"listen": "--listen", "token_file": "--token-file", "tls_cert": "--tls-cert", "tls_key": "--tls-key"}
_ADDRESS = re.compile(r"checkpoints?, .* at (\S+)$")


class StepServer:
    """A server of the steps in a folder, once `start` was called."""

    def __init__(self, serve: str | Mapping[str, PathLike] | bool, directory: PathLike) -> None:
        """Check the arguments; raise for an address that other machines reach without a token, or a missing package."""
        given = {"listen": _LISTEN} if serve is True else {"listen": serve} if isinstance(serve, str) else serve
        if not isinstance(given, Mapping) or not all(isinstance(v, str | os.PathLike) for v in given.values()):
            raise UsageError(f"Cannot use serve={serve!r:.60}: expected True, HOST:PORT, or a dict of options")
        if unknown := given.keys() - _OPTIONS.keys():
            raise UsageError(f"Cannot use serve={{{min(map(str, unknown))!r}: …}}: expected {', '.join(_OPTIONS)}")
        if is_bucket(directory):
            raise UsageError(
                f"Cannot serve the steps in {directory}: expected a folder. Replicas follow a bucket at its address"
            )
        if (name := Path(directory).expanduser().resolve().name) in RESERVED:
            raise UsageError(
                f"Cannot serve the steps in {directory}: the name {name!r} is the server's own. Give a folder of "
                "another name"
            )
        missing = next((name for name in ("aiohttp", "prometheus_client") if not importlib.util.find_spec(name)), None)
        if missing is not None:
            raise MissingExtraError(missing, extra="serve", needed_for="OrbaxCheckpoint(serve=…)")
        self._options = {"listen": _LISTEN, **{name: os.fspath(value) for name, value in given.items()}}
        listening = ListenAddress.parse(self._options["listen"])
        if not listening.is_local and "token_file" not in given:
            raise UsageError(
                f"Cannot serve at {listening.host} without a token: everyone who can connect could read the steps. "
                f"Pass serve={{'listen': {self._options['listen']!r}, 'token_file': FILE}}, or an address at 127.0.0.1"
            )
        self._process: subprocess.Popen[str] | None = None
        self._lines: deque[str] = deque(maxlen=5)
        self._reader: threading.Thread | None = None
        self.address: str | None = None
        """The address of the run, which `shardload.follow` takes; ``None`` until the server answers."""

    def start(self, folder: Path) -> None:
        """Start the server of a folder, unless it was started."""
        if self._process is not None:
            return
        options = [word for name, value in self._options.items() for word in (_OPTIONS[name], value)]
        command = [sys.executable, "-m", "shardload", "serve", "--run", str(folder), "--until-stdin-closes", *options]
        self._process = made = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in a terminal is for the trainer, which decides when it ends
        )
        self._reader = threading.Thread(target=self._read, args=(made, folder.name), daemon=True)
        self._reader.start()

    def check(self, warn: Callable[[str], None]) -> None:
        """Call ``warn`` with the reason if the server has ended by itself."""
        if self._process is None or self._reader is None or self._reader.is_alive():
            return
        said = " ".join(self._lines) or f"it ended with code {self._process.returncode}"
        warn(f"The steps are no longer served: {said} Training goes on")

    def _read(self, process: subprocess.Popen[str], name: str) -> None:
        assert process.stdout is not None
        with process:  # at the end, closes the pipes and waits for it
            for line in process.stdout:
                self._lines.append(line.strip())
                if (found := _ADDRESS.search(line.rstrip())) and self.address is None:
                    self.address = f"{found[1]}/{quote(name)}"
