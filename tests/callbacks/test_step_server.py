"""A trainer that serves its steps: replicas follow it, and the server ends with it."""

import importlib.util
import os
import socket
import subprocess
import sys
import warnings

import numpy as np
import pytest
from serving import eventually
from small_regression import numbers, on_mesh, regression

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MissingExtraError, UsageError

TRAIN = """
import sys, time
from small_regression import numbers, regression
from shardload.callbacks import OrbaxCheckpoint

model, saver = regression("sgd"), OrbaxCheckpoint(sys.argv[1], serve="127.0.0.1:0")
model.fit(*numbers(), epochs=2, verbose=0, callbacks=[saver])
while saver.serving is None:
    time.sleep(0.05)
print(saver.serving, flush=True)
sys.stdin.read()
"""


def is_refused(address):
    host, _, port = address.removeprefix("http://").partition("/")[0].rpartition(":")
    with socket.socket() as asked:
        return asked.connect_ex((host, int(port))) != 0


@pytest.mark.slow
def test_a_replica_follows_the_trainer_itself_and_the_server_ends_with_it(tmp_path):
    env = {**os.environ, "KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", TRAIN, str(tmp_path / "run")]
    trainer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        address = trainer.stdout.readline().strip()
        assert address.endswith("/run")
        model, other = (on_mesh(regression("sgd"), "2x4") for _ in range(2))
        follower = shardload.follow(model, address, every_s=0)
        assert (follower.update(), follower.problem) == (2, None)
        shardload.restore(other, tmp_path / "run", items="weights")
        same = zip(model.weights, other.weights, strict=True)
        assert all(np.array_equal(a.value, b.value) for a, b in same)
    finally:
        trainer.kill()
        trainer.communicate()
    assert eventually(lambda: is_refused(address))


def test_a_server_that_cannot_start_does_not_stop_training(tmp_path):
    model = regression("sgd")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        saver = OrbaxCheckpoint(tmp_path / "run", serve=f"127.0.0.1:{taken.getsockname()[1]}", max_to_keep=None)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")

            def told():
                model.fit(*numbers(), verbose=0, callbacks=[saver])
                return [str(one.message) for one in found if "no longer served" in str(one.message)]

            assert eventually(told)
            [text] = told()
    assert "Cannot listen at" in text and "Training goes on" in text
    assert saver.serving is None


def test_what_cannot_be_served(tmp_path, monkeypatch):
    run = tmp_path / "run"
    for serve, text in [
        ("0.0.0.0:8600", "without a token"),
        ("8600", "expected HOST:PORT"),
        (8600, "expected True, HOST:PORT"),
        ({"port": "8600"}, "'port': …"),
        ({"listen": 8600}, "expected True"),
    ]:
        with pytest.raises(UsageError, match=text):
            OrbaxCheckpoint(run, serve=serve)
    with pytest.raises(UsageError, match="follow a bucket at its address"):
        OrbaxCheckpoint("s3://bucket/run", serve=True)
    for name in ("ui", "api", "metrics"):
        with pytest.raises(
            UsageError, match=f"{name}: the name '{name}' is the server's own. Give a folder of another"
        ):
            OrbaxCheckpoint(tmp_path / name, serve=True)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"shardload\[serve\]"):
        OrbaxCheckpoint(run, serve=True)
    assert not run.exists()
