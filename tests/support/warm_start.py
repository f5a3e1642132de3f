"""Python processes that have imported Keras, JAX and Orbax already: copies of one that did, and does nothing else.

To import them takes 3 s of processor time, and the tests start a hundred processes; a copy takes a thirtieth of that.
The process that is copied has neither a JAX backend nor threads that run Python, so its copies start as fresh ones do.
Where a process cannot be copied (no `os.fork`, no pidfd, other settings of JAX), one is started the plain way.

A test that is about imports, the environment or the memory of a process starts one the plain way.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

SERVER = Path(__file__).with_name("warm_start_server.py")
READ_WHEN_IMPORTED = ("JAX_", "KERAS_", "PYTHON", "TF_")
"""How the variables begin that are read before a copy is made: a copy comes too late for other values of them."""


def start(arguments, *, cwd=None, env=None, stderr=subprocess.PIPE):
    """Start ``python ARGUMENTS``, with ``-m MODULE`` or ``-c CODE`` first; its output is there once it has ended."""
    words, env = [str(word) for word in arguments], dict(os.environ if env is None else env)
    folder = str(cwd or Path.cwd())
    if hasattr(os, "fork") and hasattr(os, "pidfd_open") and _imported_with(env) == _imported_with(os.environ):
        return Copy(words, folder, env, joined=stderr == subprocess.STDOUT)
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE, stderr=stderr, stdin=subprocess.DEVNULL, text=True, cwd=folder, env=env,
    )  # fmt: skip


def run(arguments, *, timeout=300, check=False, cwd=None, env=None):
    """As `subprocess.run`, with the output as text."""
    child = start(arguments, cwd=cwd, env=env)
    try:
        out, err = child.communicate(timeout=timeout)
    except BaseException:
        child.kill()
        child.communicate()
        raise
    done = subprocess.CompletedProcess(arguments, child.returncode, out, err)
    if check and done.returncode:
        sys.stderr.write(err)
        done.check_returncode()
    return done


def _imported_with(env):
    return {name: value for name, value in env.items() if name.startswith(READ_WHEN_IMPORTED)}


class Copy:
    """A process, with what of `subprocess.Popen` the tests use."""

    def __init__(self, words, cwd, env, *, joined):
        self.args = words
        self.returncode = None
        self._outputs = [_Output() for _ in range(1 if joined else 2)]
        self._told, theirs = socket.socketpair()
        request = json.dumps({"words": words, "cwd": cwd, "env": env}).encode()
        with theirs:
            socket.send_fds(_server(), [request], [theirs.fileno(), self._outputs[0].end, self._outputs[-1].end])
        for output in self._outputs:
            os.close(output.end)
        self.pid = int(self._line())

    def _line(self):
        found = b""
        while not found.endswith(b"\n"):
            more = self._told.recv(64)
            assert more, f"the process that is copied has ended: {self.args}"
            found += more
        return found

    def poll(self):
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = int(self._line())
            self._told.close()
        return self.returncode

    def wait(self, timeout=None):
        if self.returncode is None and not select.select([self._told], [], [], timeout)[0]:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self.poll()

    def communicate(self, timeout=None):
        """Everything that it and the processes it has started have written, once all of them have ended."""
        end = None if timeout is None else time.monotonic() + timeout
        for output in self._outputs:
            output.join(None if end is None else max(0, end - time.monotonic()))
            if output.is_alive():
                raise subprocess.TimeoutExpired(self.args, timeout)
        self.wait(None if end is None else max(0, end - time.monotonic()))
        return (*(output.said for output in self._outputs), None)[:2]

    def send_signal(self, number):
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended, which is not told yet
                os.kill(self.pid, number)

    def terminate(self):
        self.send_signal(signal.SIGTERM)

    def kill(self):
        self.send_signal(signal.SIGKILL)


class _Output(threading.Thread):
    """Reads what is written to the ``end`` of a pipe, as long as any process can."""

    def __init__(self):
        super().__init__(daemon=True)
        self.said = ""
        self._begin, self.end = os.pipe()
        self.start()

    def run(self):
        with open(self._begin, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a descriptor
            self.said = file.read()


_STARTING = threading.Lock()


def _server():
    """Where to ask for copies."""
    with _STARTING:
        return _started()


@functools.cache
def _started():
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen([sys.executable, SERVER, str(theirs.fileno())], pass_fds=[theirs.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)  # first: the process ends with it
    return ours
