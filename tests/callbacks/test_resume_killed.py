"""kill -9 while steps are being written: whatever is published is whole, and restores on any mesh.

``SHARDLOAD_KILLS=50`` kills as often as that, as `make kills` does; the suite kills three times.
"""

import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp
from resume_child import model

import shardload
from shardload.runs.digests import find_damage
from shardload.runs.listing import list_steps

KILLS = int(os.environ.get("SHARDLOAD_KILLS", "3"))


def killed(folder, *, after, in_save):
    """Train in a process of its own and kill it once it has saved ``after`` steps and a little more."""
    before = {info.step for info in list_steps(folder)} if folder.is_dir() else set()
    child = subprocess.Popen([sys.executable, "-m", "resume_child", str(folder)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 600
    new = set()
    while (not new or max(new) < (max(before) if before else 0) + after) and child.poll() is None:
        assert time.monotonic() < deadline, "the child saves nothing"
        new = {info.step for info in list_steps(folder)} - before if folder.is_dir() else set()
        time.sleep(0.01)
    time.sleep(random.random() * 0.1)
    while in_save and not staged_when_stopped(child, folder):
        assert time.monotonic() < deadline, "the child stages nothing"
        child.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    child.kill()
    child.wait()
    assert child.returncode == -signal.SIGKILL, f"the child ended by itself: {child.returncode}"


def staged_when_stopped(child, folder):
    """Stop the child and say whether it is in the middle of writing a step."""
    child.send_signal(signal.SIGSTOP)
    _, status = os.waitpid(child.pid, os.WUNTRACED)
    assert os.WIFSTOPPED(status), f"the child ended by itself: {status}"
    return any((folder / ".staging").glob("*"))


def leaves(tree):
    return [v for value in tree.values() for v in (leaves(value) if isinstance(value, dict) else [value])]


def values(arrays):
    return sorted(np.asarray(array).tobytes() for array in arrays)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # plain Orbax goes by the saved sharding
def test_what_is_published_is_whole_and_restores_on_any_mesh(tmp_path):
    folder, staged, newest = tmp_path / "run", 0, -1
    for turn in range(KILLS):
        killed(folder, after=random.randint(1, 4), in_save=turn == 0)
        staged += any((folder / ".staging").glob("*"))
        steps = list_steps(folder)
        assert steps and all(info.ours and not find_damage(info.path) for info in steps)
        assert steps[-1].step > newest
        newest = steps[-1].step
    assert staged >= 1
    stored = ocp.load_checkpointables(list_steps(folder)[-1].path)["pytree"]
    for mesh in ("2x4", "1x4", "1x1"):
        one = model()
        report = shardload.restore(one, folder, mesh=mesh)
        assert any(f"step {newest}" in note and "verified" in note for note in report.notes)
        assert values(v.value for v in one.trainable_variables) == values(leaves(stored["trainable_variables"]))
        assert values(v.value for v in one.optimizer.variables) == values(leaves(stored["optimizer_variables"]))
        assert int(one.optimizer.iterations) == newest
