"""`shardload.load_weights` in a script that several processes run; `tests.test_cli_processes` has the command."""

import hashlib

import keras
import numpy as np
import pytest
from process_runs import Run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The weights of a model without the seed of its dropout layer."""
    file = tmp_path_factory.mktemp("saved") / "some.weights.h5"
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
    model.save_weights(file)
    return file, model


def test_each_gets_its_part_of_the_same_values(saved):
    file, model = saved
    with Run(2, 4, "2x4", "seeded", file, module="load_child") as run:
        first, second = run.finish()
    assert first == second
    wanted = [hashlib.sha256(np.asarray(v.value).tobytes()).hexdigest() for v in model.layers[0].weights]
    assert [first["values"][f"sequential/dense/{name}"] for name in ("kernel", "bias")] == wanted
    assert any("seed" in path for path in first["initialised"])


@pytest.mark.parametrize(
    ("do", "what"),
    [
        ("unseeded", "seed_generator_state"),
        ("unseeded-head", "head/kernel"),
        ("zeros-or-not", "head/kernel"),
        ("in-a-program", "head/kernel"),
    ],
)
def test_what_would_differ_is_told_with_the_way_out_and_all_end(saved, do, what):
    with Run(2, 4, "2x4", do, saved[0], module="load_child") as run:
        for told in run.finish():
            assert what in told["error"] and "set_random_seed(n)" in told["error"]
