"""A resumed run stops, and lowers its learning rate, in the same epoch as one that was not interrupted."""

import functools
import json

import keras
import numpy as np
import pytest
import warm_start
from callback_models import compiled, fit, record
from stopping_child import LOSSES, Scripted, run
from stopping_child import model as built

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import UsageError
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
    assert (weights(parts), n_parts + after) == uninterrupted(**options) and n_parts == 7 - after


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
    both = {"monitor": "scripted", "best": 3.0}
    assert stopping == {"callback": "EarlyStopping", **both, "wait": 2, "best_epoch": 2, "stopped_epoch": 0}
    assert plateau == {"callback": "ReduceLROnPlateau", **both, "wait": 0, "cooldown_counter": 1}
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
    assert content.pop("callbacks") == [] and StepRecord.of_json(content).callbacks == ()
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


# ---- averages of weights: what is said of a step whose optimizer keeps them ----------------------


def model():
    return compiled(optimizer=keras.optimizers.Adam(0.01, use_ema=True))


def said(report):
    return [note for note in report.notes if "use_ema" in note]


@pytest.mark.parametrize("mesh", [None, "1x8"])
def test_a_step_of_fit_has_the_weights_in_training(tmp_path, mesh):
    trained, again = model(), model()
    fit(trained, OrbaxCheckpoint(tmp_path), epochs=2)
    [note] = said(shardload.restore(again, tmp_path, mesh=mesh))
    assert note.startswith("the model has the weights in training; their moving averages (use_ema) are in the")
    kernels = [np.asarray(m.trainable_variables[0].value) for m in (trained, again)]
    assert not np.array_equal(*kernels)  # fit ended with the averages
    again.optimizer.finalize_variable_values(again.trainable_variables)
    assert np.array_equal(kernels[0], np.asarray(again.trainable_variables[0].value))


def test_a_step_saved_after_fit_has_the_averages(tmp_path):
    trained = model()
    fit(trained)
    shardload.save(trained, tmp_path, step=1)
    [note] = said(shardload.restore(model(), tmp_path))
    assert note.startswith("the model has the moving averages of its weights (use_ema)")


def test_a_resumed_fit_says_it_too(tmp_path, capsys):
    fit(model(), OrbaxCheckpoint(tmp_path), epochs=1)
    fit(model(), OrbaxCheckpoint(tmp_path, resume=True), epochs=2)
    assert "Resumed step 4: the model has the weights in training" in capsys.readouterr().out


def test_nothing_is_said_where_there_are_none(tmp_path):
    untrained = model()
    shardload.save(untrained, tmp_path, step=0)
    assert not said(shardload.restore(model(), tmp_path))
    assert not said(shardload.restore(compiled(), tmp_path, strict=False))
    fit(model(), OrbaxCheckpoint(tmp_path / "run"))
    assert not said(shardload.restore(model(), tmp_path / "run", items="weights"))


@pytest.mark.parametrize("make", [OrbaxCheckpoint, shardload.Checkpointer])
def test_an_unknown_mode_is_refused_with_the_choices(tmp_path, make):
    with pytest.raises(UsageError, match="Cannot use mode='up': expected 'auto', 'min' or 'max'"):
        make(tmp_path, mode="up")


@pytest.mark.filterwarnings("default:SwapEMAWeights:UserWarning")
def test_averages_that_are_swapped_in_before_a_save_are_warned_of(tmp_path, recwarn):
    for swap, before in ((True, True), (True, False), (False, True)):
        recwarn.clear()
        callbacks = [keras.callbacks.SwapEMAWeights(swap_on_epoch=swap), OrbaxCheckpoint(tmp_path / f"{swap}{before}")]
        fit(model(), *(callbacks if before else callbacks[::-1]), epochs=1)
        told = [str(each.message) for each in recwarn if "Put OrbaxCheckpoint first" in str(each.message)]
        assert bool(told) is (swap and before)
