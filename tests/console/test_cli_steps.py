"""`shardload steps` and `shardload verify`, typed as a user types them."""

import json
import math
import os
import shutil
import time

import keras
import numpy as np
import pytest
import warm_start
from object_server import served
from saved_steps import save_step

from shardload.console import listing

pytestmark = pytest.mark.slow


def run(*arguments):
    return warm_start.run(["-m", "shardload", *arguments])


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
    assert [(s["step"], s["best"]) for s in listed] == [(3, False), (7, True), (9, False)]
    assert all(s["digests"] for s in listed)
    lines = run("steps", root).stdout.splitlines()
    assert lines[0].split()[:3] == ["step", "epoch", "metrics"]
    assert "best" in lines[2] and "val_loss=0.25" in lines[2]


def test_metrics_that_are_not_finite_are_text(tmp_path):
    save_step(model(), tmp_path, 3, logs={"val_loss": math.inf, "reward": -math.inf, "accuracy": 0.5})
    (listed,) = json.loads(run("steps", tmp_path, "--json").stdout)["steps"]
    assert listed["metrics"] == {"val_loss": "inf", "reward": "-inf", "accuracy": 0.5}


def test_a_plain_step_of_orbax_in_a_bucket_has_no_age(root, tmp_path, monkeypatch):
    shutil.copytree(root / "3", tmp_path / "run" / "3")
    shutil.rmtree(tmp_path / "run" / "3" / "shardload")
    with served(tmp_path, monkeypatch) as server:
        words = ["-m", "shardload", "steps", f"{server.s3}/run"]
        table, listed = (warm_start.run([*words, *more], env=dict(os.environ)).stdout for more in ([], ["--json"]))
    assert "unverified" in table and " d " not in table
    assert [step["saved_unix_s"] for step in json.loads(listed)["steps"]] == [None]


def test_a_step_or_another_folder_says_what_it_is(root, tmp_path):
    done = run("steps", root / "3", "--json")
    assert done.returncode == 1
    assert (
        f"It looks like a step itself: give its folder {root} and step=3" in json.loads(done.stdout)["error"]["message"]
    )
    said = f"{tmp_path} contains no steps yet: each will be a folder in it, named by its number\n"
    assert run("steps", tmp_path).stdout == said


def test_a_checkpoint_of_another_kind_has_no_steps(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert run("steps", tmp_path).returncode == 0  # a run may have it, and has saved no step yet
    weights(tmp_path / "model.safetensors")
    done = run("steps", tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert f"{tmp_path} contains no steps. It is a Hugging Face folder" in done.stderr and "load_weights" in done.stderr


def test_no_such_folder_is_one_paragraph(tmp_path):
    done = run("steps", tmp_path / "nothing")
    assert done.returncode == 1 and "there is no such folder" in done.stderr and "Traceback" not in done.stderr


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


def test_other_checkpoints_have_no_digests(tmp_path):
    path = tmp_path / "m.weights.h5"
    model().save_weights(path)
    done = run("verify", path)
    assert done.returncode == 0 and "verified" not in done.stdout
    assert done.stdout.startswith("no digests; all headers and sizes right")
    path.write_bytes(path.read_bytes()[:-3000])
    done = run("verify", path)
    assert done.returncode == 1 and done.stdout.startswith("damaged") and "(0 B)" not in done.stdout


def weights(path, **changed):
    from safetensors.numpy import save_file

    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(4, np.float16), "c": np.zeros(2)}
    save_file({k: v for k, v in (tensors | changed).items() if v is not None}, path)
    return path


def test_diff_names_what_differs_and_by_how_much(tmp_path):
    one = weights(tmp_path / "one.safetensors")
    assert run("diff", one, weights(tmp_path / "same.safetensors")).returncode == 0
    moved = np.arange(6, dtype=np.float32).reshape(2, 3)
    moved[1] += (0, 0.5, -2)
    two = weights(tmp_path / "two.safetensors", a=moved, b=np.ones(4, np.float32), c=None, d=np.ones(1))
    done = run("diff", one, two, "--json")
    found = {d["name"]: d for d in json.loads(done.stdout)["differences"]}
    assert done.returncode == 1 and json.loads(done.stdout)["equal"] == 0
    assert (found["a"]["what"], found["a"]["elements"], found["a"]["largest"]) == ("values", 2, 2.0)
    assert (found["b"]["what"], found["b"]["elements"]) == ("dtype", 0)
    assert [found[n]["what"] for n in "cd"] == ["only in the first", "only in the second"]
    assert "0 tensors equal, 4 not" in run("diff", one, two).stdout


def test_diff_compares_bits(tmp_path):
    one = weights(tmp_path / "1.safetensors", c=np.array([0.0, np.nan]))
    assert run("diff", one, weights(tmp_path / "2.safetensors", c=np.array([0.0, np.nan]))).returncode == 0
    done = run("diff", one, weights(tmp_path / "3.safetensors", c=np.array([-0.0, np.nan])), "--json")
    assert json.loads(done.stdout)["differences"][0]["elements"] == 1
    done = run("diff", one, weights(tmp_path / "4.safetensors", c=np.array([0.0, 1.0])), "--json")
    assert json.loads(done.stdout)["differences"][0]["largest"] == "nan"


def test_diff_of_two_steps(root):
    assert "0 not" in run("diff", root / "3", root / "9").stdout


def test_diff_lists_weights_before_state_of_the_optimizer(root, tmp_path):
    other = model()
    other.fit(np.zeros((8, 16)), np.ones((8, 64)), verbose=0)
    save_step(other, tmp_path / "run", 1)
    names = [d["name"] for d in json.loads(run("diff", root / "3", tmp_path / "run/1", "--json").stdout)["differences"]]
    state = [name.startswith(("optimizer_variables/", "metrics_variables/")) for name in names]
    assert state == sorted(state) and {True, False} == set(state)


def test_what_is_no_checkpoint_is_not_called_damaged(tmp_path):
    (tmp_path / "note.txt").write_text("hello")
    done = run("verify", tmp_path / "note.txt")
    assert done.returncode == 1 and done.stdout == "" and "matches no known format" in done.stderr
    assert "Traceback" not in done.stderr


def test_steps_shows_what_ended_a_run_of_several_processes_after_its_last_step(root, tmp_path):
    root = shutil.copytree(root, tmp_path / "run")
    lines = [{"unix_s": 1.0, "cause": "long ago"}, {"unix_s": time.time() + 9, "cause": "Process 1 ended"}]
    (root / ".failures.jsonl").write_text("no json\n" + "".join(json.dumps(line) + "\n" for line in lines))
    assert run("steps", root).stdout.splitlines()[-1] == "since then: Process 1 ended"
    told = json.loads(run("steps", root, "--json").stdout)["failures"]
    assert [found["cause"] for found in told] == ["Process 1 ended"]


@pytest.mark.parametrize("width", [None, 200])
def test_rows_that_fit_are_lines(width):
    table = [("name", "what"), ("a/kernel", "values"), ("b", "dtype")]
    assert listing.aligned(table, width=width) == "name      what\na/kernel  values\nb         dtype\n"


def test_rows_that_do_not_fit_are_broken_between_cells():
    table = [("name", "what", "first"), ("a/long/kernel", "values", "float32"), ("b", "x" * 30, "y")]
    found = listing.aligned(table, width=24).splitlines()
    assert found == ["name", "    what  first", "a/long/kernel", "    values  float32", "b", f"    {'x' * 30}", "    y"]
