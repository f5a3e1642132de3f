"""`shardload steps` and `shardload verify`, typed as a user types them."""

import json
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.saved_steps import save_step


def run(*arguments):
    command = [sys.executable, "-m", "shardload", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def model():
    built = keras.Sequential([keras.Input((16,)), keras.layers.Dense(64)])
    built.compile("adam", "mse")
    built.fit(np.ones((4, 16)), np.ones((4, 64)), verbose=0)
    return built


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    built, root = model(), tmp_path_factory.mktemp("run") / "steps"
    for step, loss in ((3, 0.5), (7, 0.25), (9, 0.75)):
        save_step(built, root, step, epoch=step // 3, monitor="val_loss", mode="min", logs={"val_loss": loss})
    (root / "11").mkdir()
    return root


def test_steps_are_listed_with_the_best(root):
    listed = json.loads(run("steps", root, "--json").stdout)["steps"]
    assert [(s["step"], s["best"], s["digests"]) for s in listed] == [(3, False, True), (7, True, True), (9, False, True)]
    lines = run("steps", root).stdout.splitlines()
    assert lines[0].split()[:3] == ["step", "epoch", "metrics"]
    assert "best" in lines[2] and "val_loss=0.25" in lines[2]


def test_no_such_folder_is_one_paragraph(tmp_path):
    done = run("steps", tmp_path / "nothing")
    assert done.returncode == 1 and "There is no folder" in done.stderr and "Traceback" not in done.stderr


def test_an_undamaged_run_is_verified(root):
    done = run("verify", root)
    assert done.returncode == 0 and done.stdout.count("verified") == 3


def test_a_flipped_bit_is_found_and_the_exit_code_says_so(tmp_path):
    save_step(model(), tmp_path / "run", 4)
    file = max((p for p in (tmp_path / "run" / "4").rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data = bytearray(file.read_bytes())
    data[700] ^= 1
    file.write_bytes(data)
    done = run("verify", tmp_path / "run", "--json")
    found = json.loads(done.stdout)["checkpoints"][0]
    assert done.returncode == 1 and found["verdict"] == "damaged"
    assert file.name in found["problems"][0]


def test_other_checkpoints_are_readable_at_best(tmp_path):
    path = tmp_path / "m.weights.h5"
    model().save_weights(path)
    done = run("verify", path)
    assert done.returncode == 0 and done.stdout.startswith("readable") and "verified" not in done.stdout
    path.write_bytes(path.read_bytes()[:-3000])
    done = run("verify", path)
    assert done.returncode == 1 and done.stdout.startswith("damaged")
