"""A trainer, a server and two replicas on other meshes, killed in turn: the others go on, with whole steps only."""

import json
import math
import os
import subprocess
import sys
import threading

import process_child
import pytest
from follow_child import digest
from serving import eventually, served

import shardload


class Child:
    """A process of `follow_child`, and what it told so far."""

    def __init__(self, mesh, do, source):
        devices = str(math.prod(map(int, mesh.split("x"))))
        command = [sys.executable, "-m", "follow_child", "1", "0", "0", devices, mesh, do, str(source), str(10**9)]
        env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu", "SHARDLOAD_REMOTE_TIMEOUT": "5"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        self.told, self.lines = [], []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith("{"):
                self.told.append(json.loads(line))

    def adopts_after(self, step):
        """Wait for a later step than this one, and return its number."""
        is_told = lambda: self.process.poll() is not None or (self.told and self.told[-1]["step"] > step)  # noqa: E731
        assert eventually(is_told, within_s=300) and self.process.poll() is None, "".join(self.lines[-30:])
        return self.told[-1]["step"]

    def kill(self):
        self.process.kill()
        self.process.wait()
        self._reader.join()
        self.process.stdout.close()


@pytest.fixture
def started():
    found = []

    def start(*arguments):
        found.append(Child(*arguments))
        return found[-1]

    yield start
    for one in found:
        one.kill()


@pytest.mark.slow
def test_who_is_left_goes_on_with_whole_steps(tmp_path, started):
    run = tmp_path / "root" / "run"
    run.mkdir(parents=True)
    trainer = started("1x1", "train", run)
    with served("--root", run.parent) as server:
        place, source = server.place, f"{server.address}/run"
        replicas = [started(mesh, "follow", source) for mesh in ("1x8", "2x4")]
        last = max([one.adopts_after(0) for one in replicas])
        trainer.kill()
        trainer = started("1x1", "train", run)
        last = max([one.adopts_after(last) for one in replicas])
        server.process.kill()
    with served("--root", run.parent, "--listen", place):
        last = max([one.adopts_after(last) for one in replicas])
        replicas[0].kill()
        last = replicas[1].adopts_after(last)
        replicas.append(started("1x8", "follow", source))
        assert replicas[2].adopts_after(0) >= last
        trainer.kill()
        for one in replicas:
            one.kill()
    adopted = {(line["step"], line["digest"]) for one in replicas for line in one.told}
    model = process_child.model()
    for step in {step for step, _ in adopted}:
        shardload.restore(model, run, step=step, items="weights")
        assert {found for number, found in adopted if number == step} == {digest(model)}
