"""The best step is never lost, and a run only compares with a best that is there and that it should compare with."""

import math
import os
import shutil
import signal

import keras
import numpy as np
import pytest
from callback_models import X, compiled, record, steps_in

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import DamagedError, LoadInterruptedError, UsageError
from shardload.runs.listing import find_step, list_steps

pytestmark = [pytest.mark.filterwarnings("ignore:Step .* without a data position")]


class Says(keras.callbacks.Callback):
    """Puts values of a metric into the logs, and sends SIGTERM after so many batches."""

    def __init__(self, *values, sigterm=None, metric="val_loss"):
        super().__init__()
        self.values, self.left, self.metric = list(values), sigterm, metric

    def on_epoch_end(self, epoch, logs=None):
        if self.values and (value := self.values.pop(0)) is not None:
            logs[self.metric] = value

    def on_train_batch_end(self, batch, logs=None):
        if self.left is not None:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), signal.SIGTERM)


def fit(model, callback, *values, epochs=None, sigterm=None):
    """Four batches an epoch, one epoch for each value unless told otherwise."""
    says = Says(*values, sigterm=sigterm)
    epochs = len(values) if epochs is None else epochs
    return model.fit(X, X, epochs=epochs, batch_size=4, verbose=0, callbacks=[says, callback])


def fitted(callback, *values, **options):
    """A callback after a fit of a new model."""
    fit(compiled(), callback, *values, **options)
    return callback


def best(root):
    return find_step(root, "best").step


# ---- the best step stays, whatever else is saved ---------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("named", [{}, {"max_to_keep": 2}, {"keep_best": 1}, {"keep_every_steps": 4}], ids=str)
def test_sigterm_does_not_cost_the_best_step(tmp_path, named):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True, **named), 0.2, 0.5, epochs=4, sigterm=10)
    assert steps_in(tmp_path) == [4, 10] and best(tmp_path) == 4
    shardload.restore(compiled(), tmp_path, step="best")


@pytest.mark.parametrize(("mode", "values"), [("max", (0.5, 0.2)), ("min", (0.2, 0.5))])
def test_it_does_not_in_any_mode(tmp_path, mode, values):
    fit(compiled(), OrbaxCheckpoint(tmp_path, mode=mode, save_best_only=True), *values, epochs=4, sigterm=10)
    assert steps_in(tmp_path) == [4, 10] and best(tmp_path) == 4


@pytest.mark.slow
def test_a_resumed_run_keeps_it_too_and_goes_on_comparing_with_it(tmp_path):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True), 0.2, epochs=3, sigterm=6)
    assert steps_in(tmp_path) == [4, 6]
    again = fitted(OrbaxCheckpoint(tmp_path, save_best_only=True, resume=True), 0.4, epochs=3, sigterm=6)
    assert again.best == 0.2 and best(tmp_path) == 4 and len(steps_in(tmp_path)) == 2
    final = fitted(OrbaxCheckpoint(tmp_path, save_best_only=True, resume=True), 0.3, 0.1, epochs=4)
    assert final.best == 0.1 and steps_in(tmp_path) == [best(tmp_path)]


@pytest.mark.slow
def test_a_fit_that_ends_before_the_first_value_leaves_a_step_and_no_best(tmp_path):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True), epochs=2, sigterm=2)
    assert steps_in(tmp_path) == [2]
    again = fitted(OrbaxCheckpoint(tmp_path, save_best_only=True, resume=True), 0.5, epochs=1)
    assert again.best == 0.5 and steps_in(tmp_path) == [6]


@pytest.mark.slow
def test_the_value_of_a_part_of_an_epoch_does_not_displace_that_of_whole_ones(tmp_path):
    """The loss of the first batch of an epoch says little beside the mean of others."""

    class Easy(Says):
        def on_train_batch_end(self, batch, logs=None):
            super().on_train_batch_end(batch, logs)
            if self.left == 0:
                logs["loss"] = 0.0

    says = Easy(0.3, 0.2, sigterm=9, metric="loss")
    callback = OrbaxCheckpoint(tmp_path, "loss", save_best_only=True)
    compiled().fit(X, X, epochs=3, batch_size=4, verbose=0, callbacks=[says, callback])
    assert steps_in(tmp_path) == [8, 9] and record(tmp_path, 9)["logs"]["loss"] == 0.0
    assert best(tmp_path) == 8 and callback.best == 0.2
    again = OrbaxCheckpoint(tmp_path, "loss", save_best_only=True, resume=True)
    compiled().fit(X, X, epochs=3, batch_size=4, verbose=0, callbacks=[Says(0.1, metric="loss"), again])
    assert again.best == 0.1 and steps_in(tmp_path) == [13]


@pytest.mark.slow
def test_a_plain_callback_on_the_folder_leaves_the_best_step_of_another(tmp_path):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True), 0.2)
    model = compiled()
    fit(model, OrbaxCheckpoint(tmp_path, "loss", resume=True), epochs=4)
    assert steps_in(tmp_path) == [4, 16] and best(tmp_path) == 4
    fit(model, OrbaxCheckpoint(tmp_path, save_best_only=True), 0.1)
    assert steps_in(tmp_path) == [20] and best(tmp_path) == 20


# ---- values that are no numbers --------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_is_never_the_best_and_said(tmp_path, wrong):
    callback = OrbaxCheckpoint(tmp_path, save_best_only=True)
    with pytest.warns(UserWarning, match=f"val_loss is {wrong} at epoch 1"):
        fit(compiled(), callback, wrong, 0.5, wrong)
    assert callback.best == 0.5 and steps_in(tmp_path) == [8]


# ---- what a run compares with ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_best_that_is_gone_is_not_compared_with(tmp_path):
    model = compiled()
    callback = OrbaxCheckpoint(tmp_path, save_best_only=True, max_to_keep=None)
    fit(model, callback, 0.5, 0.1)
    shutil.rmtree(tmp_path / "8")
    again = fitted(OrbaxCheckpoint(tmp_path, save_best_only=True, resume=True), 0.3, epochs=2)
    assert again.best == 0.3 and steps_in(tmp_path) == [8]
    shutil.rmtree(tmp_path / "8")
    fit(model, callback, 0.4)  # the same callback once more: what it remembers is gone as well
    assert callback.best == 0.4 and len(steps_in(tmp_path)) == 1


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def shorten(file):
    file.write_bytes(file.read_bytes()[:-9])


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flip, shorten, os.remove])
def test_a_best_that_is_damaged_is_neither_compared_with_nor_removed(tmp_path, damage, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True, max_to_keep=None), 0.5, 0.1)
    damage(max((tmp_path / "8" / "pytree").rglob("d/*"), key=lambda file: file.stat().st_size))
    again = fitted(OrbaxCheckpoint(tmp_path, save_best_only=True), 0.3, epochs=3, sigterm=6)
    assert "val_loss=0.1 of step 8 does not count" in capsys.readouterr().out
    assert again.best == 0.3 and steps_in(tmp_path) == [8, 12, 14]


def data_of(step):
    return max((step / "pytree").rglob("d/*"), key=lambda file: file.stat().st_size)


def weights(model):
    return [np.asarray(v.value).tobytes() for v in [*model.variables, *model.optimizer.variables]]


@pytest.fixture(scope="module")
def beaten_by_a_damaged_one(tmp_path_factory):
    """Steps 8, the best and damaged, and 12, which is better than any other; and the state that 12 was saved with."""
    root = tmp_path_factory.mktemp("damaged") / "run"
    fit(compiled(), OrbaxCheckpoint(root, save_best_only=True, max_to_keep=None), 0.5, 0.1)
    flip(data_of(root / "8"))
    model = compiled()
    fit(model, OrbaxCheckpoint(root, save_best_only=True), 0.3)
    return root, weights(model)


def test_what_a_run_takes_for_the_best_is_the_way_out_of_a_damaged_one(beaten_by_a_damaged_one):
    root, expected = beaten_by_a_damaged_one
    out = r"(?s)tep 8.*Step 12 is the next best good one: pass step=12"
    with pytest.raises((DamagedError, LoadInterruptedError), match=out):
        shardload.restore(compiled(), root, step="best")
    target = compiled()
    report = shardload.restore(target, root, step="best", fallback="previous")
    assert weights(target) == expected
    assert report.notes[0].startswith("step 8 is damaged and was passed over")


@pytest.mark.slow
def test_what_a_run_takes_for_the_best_stays_beside_a_damaged_one(beaten_by_a_damaged_one, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(beaten_by_a_damaged_one[0], root)
    assert record(root, 12)["damaged"] == [8]
    fit(compiled(), OrbaxCheckpoint(root), epochs=2)  # reads no data, so it does not notice the damage
    assert steps_in(root) == [8, 12, 20] and record(root, 20)["damaged"] == [8]
    for value in (0.05, 0.01):  # which need not look at step 8 any more once they compare with a better one
        fit(compiled(), OrbaxCheckpoint(root, save_best_only=True), value)
    assert steps_in(root) == [8, 28] and best(root) == 28 and record(root, 28)["damaged"] == [8]


def test_a_best_that_was_repaired_counts_again(beaten_by_a_damaged_one, tmp_path):
    root = tmp_path / "run"
    shutil.copytree(beaten_by_a_damaged_one[0], root)
    flip(data_of(root / "8"))  # back
    again = fitted(OrbaxCheckpoint(root, save_best_only=True), 0.2, 0.05)
    assert again.best == 0.05 and record(root, 20)["damaged"] == []
    assert steps_in(root) == [8, 20]  # 12, gone now, said that 8 is damaged


@pytest.mark.slow
def test_a_step_that_does_not_say_how_good_it_was_is_named(tmp_path, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True, max_to_keep=None), 0.5, 0.1)
    flip(tmp_path / "8" / "shardload" / "step.json")
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True), 0.3)
    assert "val_loss of step 8 does not count: shardload/step.json" in capsys.readouterr().out
    assert steps_in(tmp_path) == [8, 12]


def test_the_list_says_at_first_sight_what_is_missing(tmp_path):
    fit(compiled(), OrbaxCheckpoint(tmp_path), 0.5)
    file = max((tmp_path / "4" / "pytree").rglob("d/*"), key=lambda file: file.stat().st_size)
    shorten(file)
    assert "was truncated" in list_steps(tmp_path)[0].problems
    file.unlink()
    assert f"{file.relative_to(tmp_path / '4')} is missing" in list_steps(tmp_path)[0].problems


# ---- folders of other runs -------------------------------------------------------------------------


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if "val_loss" in line]


def test_a_run_says_that_it_compares_with_another_and_how_not_to(tmp_path, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True), 0.1)
    assert lines(capsys) == []
    callback = fitted(OrbaxCheckpoint(tmp_path, save_best_only=True), 0.5, 0.4)
    (told,) = lines(capsys)
    assert f"val_loss=0.1 of step 4, which another run saved in {tmp_path}" in told
    assert "best_of='run'" in told and "another folder" in told
    assert callback.best == 0.1 and steps_in(tmp_path) == [4]


@pytest.mark.slow
def test_it_says_so_of_keep_best_as_well(tmp_path, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path, keep_best=1), 0.1)
    fit(compiled(), OrbaxCheckpoint(tmp_path, keep_best=1), 0.5)
    (told,) = lines(capsys)
    assert told.startswith("keep_best") and "step 4" in told


@pytest.mark.slow
def test_a_run_may_compare_with_itself_alone_as_keras_does(tmp_path, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True), 0.1)
    callback = OrbaxCheckpoint(tmp_path, save_best_only=True, best_of="run")
    fit(compiled(), callback, 0.5, 0.4, 0.6, epochs=4, sigterm=14)
    assert lines(capsys) == [] and callback.best == 0.4
    assert best(tmp_path) == 12  # of this run
    assert steps_in(tmp_path) == [4, 12, 18]  # the best of the other is not lost
    again = fitted(OrbaxCheckpoint(tmp_path, save_best_only=True, best_of="run", resume=True), 0.45, epochs=4)
    assert again.best == 0.4 and best(tmp_path) == 12 and lines(capsys) == []


def test_going_on_in_the_same_process_is_the_same_run(tmp_path, capsys):
    model = compiled()
    for _ in range(2):
        fit(model, OrbaxCheckpoint(tmp_path, save_best_only=True), 0.1)
    assert lines(capsys) == []
    assert len({record(tmp_path, step)["run"] for step in steps_in(tmp_path)}) == 1
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True, resume=True), 0.3, epochs=2)
    assert lines(capsys) == []


@pytest.mark.slow
def test_a_run_that_goes_back_says_what_it_leaves_ahead(tmp_path, capsys):
    named = {"save_best_only": True, "max_to_keep": None}
    fit(compiled(), OrbaxCheckpoint(tmp_path, **named), 0.5, 0.1)
    model = compiled()
    shardload.restore(model, tmp_path, step=4)
    fit(model, OrbaxCheckpoint(tmp_path, **named), 0.3, epochs=2)
    (told,) = lines(capsys)
    assert "val_loss=0.1 of step 8, which was saved after step 4" in told


def test_a_threshold_that_is_harder_to_beat_needs_no_word(tmp_path, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True), 0.5)
    callback = fitted(OrbaxCheckpoint(tmp_path, save_best_only=True, initial_value_threshold=0.2), 0.3, 0.1)
    assert lines(capsys) == [] and callback.best == 0.1


def test_what_best_of_can_be(tmp_path):
    with pytest.raises(UsageError, match="Cannot use best_of='all': expected 'folder' or 'run'"):
        OrbaxCheckpoint(tmp_path, best_of="all")


def test_with_verbose_it_says_why_it_does_not_save(tmp_path, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True, verbose=1), 0.1, 0.5)
    assert lines(capsys) == ["val_loss=0.5 does not beat 0.1 at epoch 2: nothing is saved"]
