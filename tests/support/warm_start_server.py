"""The process whose copies `warm_start` starts: imports what takes long, then waits for words to run.

python warm_start_server.py DESCRIPTOR
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import select
import socket
import sys
import warnings

REQUEST_BYTES = 1 << 17
IMPORTED = (
    "keras", "keras_hub", "jax.experimental.multihost_utils", "grain", "tensorstore",
    "orbax.checkpoint", "shardload.cli", "shardload.callbacks", "shardload.loading",
)  # fmt: skip


class Server:
    """Starts a copy for each request; each has a socket of its own, on which its id and its exit code are told."""

    def __init__(self, requests):
        self._requests = requests
        self._running = {}

    def next_copy(self):
        """Return the request, in each copy; `None` once no more can come."""
        while True:
            for ready in select.select([self._requests, *self._running], [], [])[0]:
                if ready in self._running:
                    self._ended(ready)
                elif (request := self._asked()) is not None:
                    return request or None

    def _asked(self):
        """The request in the copy, `None` in the process that is copied, which is empty once there are no more."""
        message, fds, _, _ = socket.recv_fds(self._requests, REQUEST_BYTES, 3)
        if not message:
            return {}
        teller = socket.socket(fileno=fds[0])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 counts threads of BLAS
            pid = os.fork()
        if pid:
            self._running[os.pidfd_open(pid)] = pid, teller
            teller.sendall(b"%d\n" % pid)
            for fd in fds[1:]:
                os.close(fd)
            return None
        teller.close()
        self._become(*fds[1:])
        return json.loads(message)

    def _become(self, out, err):
        """What this process had open is nothing to its copy."""
        self._requests.close()
        for descriptor, (_, teller) in self._running.items():
            os.close(descriptor)
            teller.close()
        for number, fd in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
            os.dup2(fd, number)
            os.close(fd)

    def _ended(self, descriptor):
        pid, teller = self._running.pop(descriptor)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(descriptor)
        with teller, contextlib.suppress(BrokenPipeError):  # a test that failed has no use for it
            teller.sendall(b"%d\n" % code)


def become(request):
    """Run what was asked for, as if Python had been started for it."""
    import numpy as np

    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    random.seed()
    np.random.seed()
    how, what, *sys.argv[1:] = request["words"]
    if how == "-m":
        sys.path[0] = request["cwd"]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv[0], sys.path[0] = "-c", ""
        exec(compile(what, "<string>", "exec"), sys.modules["__main__"].__dict__)


if __name__ == "__main__":
    sys.modules["tensorflow"] = sys.modules["tensorflow_text"] = None  # Keras and KerasHub import it where it is
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in IMPORTED:
            importlib.import_module(name)
        from orbax.checkpoint import v1  # noqa: F401 - no module of its own
    gc.collect()
    gc.freeze()  # a collection would write to all of it, so that copies had to be made of every page
    request = Server(socket.socket(fileno=int(sys.argv[1]))).next_copy()
    if request:
        become(request)
