"""A resumed run stops, and lowers its learning rate, in the same epoch as one that was not interrupted."""

import functools
import json

import keras
import pytest
import warm_start
from callback_models import fit, record
from stopping_child import LOSSES, Scripted, run
from stopping_child import model as built

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.runs.step import StepRecord


def weights(model):
    return [v.tobytes() for v in model.get_weights()] + [float(model.optimizer.learning_rate)]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """What a run with these options ends with, and its number of epochs."""

    @functools.cache
    def ended(**options):
        whole, n_epochs = run(tmp_path_factory.mktemp("whole"), epochs=20, **options)
        return weights(whole), n_epochs

    return ended


@pytest.mark.sample(2)
@pytest.mark.parametrize("saver_first", [True, False])
@pytest.mark.parametrize("best", [True, False])
@pytest.mark.parametrize("after", [1, 3, 5, 6])
def test_a_resumed_run_ends_as_an_uninterrupted_one(tmp_path, uninterrupted, after, best, saver_first):
    options = {"restore_best_weights": best, "saver_first": saver_first, "max_to_keep": None}
    run(tmp_path, epochs=after, **options)
    parts, n_parts = run(tmp_path, epochs=20, **options)
    assert (weights(parts), n_parts + after) == uninterrupted(**options)
    assert n_parts == 7 - after


def test_a_run_that_was_stopped_stays_stopped_and_says_so(tmp_path, capsys):
    whole, _ = run(tmp_path, epochs=20, max_to_keep=None)
    capsys.readouterr()
    again, n_epochs = run(tmp_path, epochs=20, max_to_keep=None)
    said = capsys.readouterr().out
    assert n_epochs == 0 and weights(again) == weights(whole)
    assert "EarlyStopping('scripted') ended training after epoch 7, so nothing is left to train. To continue" in said
    assert "EarlyStopping('scripted') restored its best weights, those of epoch 3" in said
    _, n_epochs = run(tmp_path, epochs=20, max_to_keep=None, patience=6)
    assert n_epochs == 2  # with a larger patience it goes on, and counts on
    _, n_epochs = run(tmp_path, epochs=20, max_to_keep=None, initial_epoch=0)
    assert n_epochs == 7  # another epoch than the one that is due: it begins to count again


def test_best_weights_that_no_step_has_are_told(tmp_path):
    run(tmp_path, epochs=5, max_to_keep=1)
    with pytest.warns(UserWarning, match="those of epoch 3, but no step in .* has them.*keep_best=1"):
        _, n_epochs = run(tmp_path, epochs=20, max_to_keep=1)
    assert n_epochs == 2


def test_the_state_is_in_the_record_and_a_damaged_one_is_none(tmp_path):
    run(tmp_path, epochs=5)
    step = record(tmp_path, 20)
    stopping, plateau = step["callbacks"]
    assert stopping == {
        "callback": "EarlyStopping", "monitor": "scripted", "best": 3.0, "wait": 2, "best_epoch": 2, "stopped_epoch": 0
    }  # fmt: skip
    assert plateau == {
        "callback": "ReduceLROnPlateau", "monitor": "scripted", "best": 3.0, "wait": 0, "cooldown_counter": 1
    }  # fmt: skip
    assert step["logs"]["scripted"] == LOSSES[4]
    assert StepRecord.of_json({"callbacks": [3, {"callback": 5}]}).callbacks == ({"callback": 5},)


@pytest.mark.parametrize("first", [float("nan"), float("inf")])
def test_a_best_value_that_is_no_number_comes_back(tmp_path, first):
    def stopped(folder, *parts):
        for epochs in parts:
            model, stopping = built(), keras.callbacks.EarlyStopping(monitor="scripted", mode="min", patience=2)
            saver = OrbaxCheckpoint(folder, monitor="loss", resume=True)
            history = fit(model, Scripted([first, 3, 2, 1, 0, 0, 0, 0]), saver, stopping, epochs=epochs)
        return history.epoch[-1]

    assert stopped(tmp_path / "whole", 8) == stopped(tmp_path / "parts", 1, 8)


def test_saving_by_batches_keeps_the_state_too(tmp_path):
    model = built()
    stopping = keras.callbacks.EarlyStopping(monitor="scripted", mode="min", patience=4)
    fit(model, OrbaxCheckpoint(tmp_path, save_freq=3, max_to_keep=None), Scripted(), stopping, epochs=4)
    found = {step: record(tmp_path, step)["callbacks"][0]["wait"] for step in (3, 6, 9, 12, 15)}
    assert found == {3: 0, 6: 0, 9: 0, 12: 0, 15: 0}
    assert record(tmp_path, 15)["callbacks"][0]["best_epoch"] == 2


def test_a_step_from_before_has_no_such_state(tmp_path):
    fit(built(), OrbaxCheckpoint(tmp_path), epochs=2)
    content = json.loads((tmp_path / "8" / "shardload" / "step.json").read_text())
    assert content.pop("callbacks") == []
    assert StepRecord.of_json(content).callbacks == ()
    _, n_epochs = run(tmp_path, epochs=20)
    assert n_epochs == 5  # epochs 3 to 7


@pytest.mark.slow
def test_a_killed_run_stops_where_an_uninterrupted_one_does(tmp_path):
    def child(folder, *more):
        return warm_start.run(["-m", "stopping_child", tmp_path / folder, *more])

    assert child("killed", "18").returncode == -9
    assert child("killed").returncode == child("whole").returncode == 0
    one, other = built(), built()
    shardload.restore(one, tmp_path / "killed")
    shardload.restore(other, tmp_path / "whole")
    assert weights(one) == weights(other)
    assert [record(tmp_path / name, 28)["epoch"] for name in ("killed", "whole")] == [6, 6]
