"""Starts several processes of one `jax.distributed` run on this machine, and hears what they tell."""

import json
import os
import random
import socket
import subprocess
from pathlib import Path

import warm_start

ROOT = Path(__file__).parents[2]


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def job_of_a_free_port():
    """The number of a job of Slurm or Open MPI for which JAX chooses a port that is free."""
    for job in random.sample(range(4096), 4096):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", 61440 + job)):
                return job
    raise AssertionError


class Run:
    """``processes`` times ``devices``, one batch part for each process of the mesh's first axis."""

    def __init__(self, processes, devices, mesh, do, folder, *more, module="process_child"):
        self.port = port = free_port()
        self.started = [
            warm_start.start(
                ["-m", module, processes, index, port, devices, mesh, do, folder, *more],
                stderr=subprocess.STDOUT,
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


def told_by(*arguments, **named):
    """What each process of a `Run` that ends well told last."""
    with Run(*arguments, **named) as run:
        return run.finish()


def shards_told(processes, mesh, ways, folder, *, module):
    """The shards of all of 8 devices after each of several ways to load, as processes tell them that try all."""
    arguments = (processes, 8 // processes, mesh, "; ".join(ways), folder)
    with Run(*arguments, module=module) as run:
        outputs = [one.communicate(timeout=240)[0] for one in run.started]
    found = {}
    for output in outputs:
        for line in told(output):
            found.setdefault(line["do"], {}).update(line["shards"])
    assert found.keys() == set(ways) and all(len(shards) == 8 for shards in found.values()), outputs
    return found
