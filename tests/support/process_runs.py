"""Starts several processes of one `jax.distributed` run on this machine, and hears what they tell."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


class Run:
    """``processes`` times ``devices``, one batch part for each process of the mesh's first axis."""

    def __init__(self, processes, devices, mesh, do, folder, *more, module="process_child"):
        port = free_port()
        self.started = [
            subprocess.Popen(
                [sys.executable, "-m", module]
                + [str(word) for word in (processes, index, port, devices, mesh, do, folder, *more)],
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ROOT,
                env={**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"},
            )
            for index in range(processes)
        ]

    def finish(self):
        """What each process told last."""
        outputs = [one.communicate(timeout=150)[0] for one in self.started]
        assert all(one.returncode == 0 for one in self.started), outputs
        return [told(output)[-1] for output in outputs]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in self.started:
            one.kill()
            one.communicate()


def told(output):
    return [json.loads(line) for line in output.splitlines() if line.startswith("{")]
