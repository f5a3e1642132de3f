"""What is said of the weights of a step whose optimizer keeps moving averages of them."""

import keras
import numpy as np
import pytest
from callback_models import compiled, fit

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import UsageError


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
