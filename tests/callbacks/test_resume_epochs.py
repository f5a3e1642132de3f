"""Where a resumed fit begins, and what it says when there is nothing left to train."""

import shutil

import keras
import pytest
from callback_models import X, compiled, fit, steps_in

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MismatchError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:Step .* without a data position")


class Epochs(keras.callbacks.Callback):
    def on_train_begin(self, logs=None):
        self.seen = []

    def on_epoch_begin(self, epoch, logs=None):
        self.seen.append(epoch)


def epochs_of(model, callback, **named):
    epochs = Epochs()
    fit(model, callback, epochs, **named)
    return epochs.seen


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Three epochs of four batches."""
    root = tmp_path_factory.mktemp("saved")
    fit(compiled(), OrbaxCheckpoint(root), epochs=3)
    assert steps_in(root) == [12]
    return root


@pytest.fixture
def run(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "run")


def restored(run):
    model = compiled()
    shardload.restore(model, run)
    return model


def lines(capsys):
    return [line for line in capsys.readouterr().out.splitlines() if line]


@pytest.mark.parametrize("named", [{}, {"initial_epoch": 0}], ids=["default", "zero"])
@pytest.mark.parametrize("resume", [False, True])
def test_a_fit_that_has_nothing_left_to_train_says_so_and_the_ways_out(run, capsys, named, resume):
    model = compiled() if resume else restored(run)
    assert epochs_of(model, OrbaxCheckpoint(run, resume=resume), epochs=2, **named) == []
    (told,) = lines(capsys)
    assert f"Resumed step 12 of {run}" in told and "3 epochs are complete, and fit() was given epochs=2" in told
    assert "a larger epochs" in told and "OrbaxCheckpoint(initial_epoch=0)" in told


def test_a_cell_that_runs_again_says_so_every_time(tmp_path, capsys):
    model = compiled()
    for _ in range(3):
        epochs_of(model, OrbaxCheckpoint(tmp_path, resume=True), epochs=1)
    told = lines(capsys)
    assert len(told) == 2 and all("nothing is left to train" in line for line in told)


@pytest.mark.slow
def test_the_ways_out_work(run):
    model = restored(run)
    assert epochs_of(model, OrbaxCheckpoint(run), epochs=3) == []
    assert epochs_of(model, OrbaxCheckpoint(run), epochs=5) == [3, 4]  # the first fit did not forget the step
    model = restored(run)
    assert epochs_of(model, OrbaxCheckpoint(run, initial_epoch=0), epochs=2) == [0, 1]
    assert int(model.optimizer.iterations) == 28 and steps_in(run) == [28]


def test_a_fit_without_the_callback_afterwards_begins_at_the_beginning(run):
    model, epochs = restored(run), Epochs()
    epochs_of(model, OrbaxCheckpoint(run), epochs=2)
    fit(model, epochs, epochs=1)
    assert epochs.seen == [0]


@pytest.mark.slow
def test_a_fit_that_goes_on_says_nothing(run, capsys):
    assert epochs_of(restored(run), OrbaxCheckpoint(run), epochs=4) == [3]
    assert lines(capsys) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("of_fit", "of_callback", "expected"), [(1, None, [1, 2, 3]), (3, None, [3]), (0, 2, [2, 3]), (2, 1, [2, 3])]
)
def test_an_explicit_initial_epoch_wins(run, of_fit, of_callback, expected, capsys):
    """That of fit over that of the callback; its 0 is the default."""
    callback = OrbaxCheckpoint(run, initial_epoch=of_callback)
    assert epochs_of(restored(run), callback, epochs=4, initial_epoch=of_fit) == expected
    assert lines(capsys) == []


def test_an_explicit_initial_epoch_beyond_epochs_is_said_as_well(run, capsys):
    assert epochs_of(restored(run), OrbaxCheckpoint(run), epochs=4, initial_epoch=5) == []
    (told,) = lines(capsys)
    assert "training begins with epoch 6, and fit() was given epochs=4" in told


def test_without_a_step_to_resume_fit_alone_decides(tmp_path):
    assert epochs_of(compiled(), OrbaxCheckpoint(tmp_path, initial_epoch=1), epochs=2) == [0, 1]


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "0"])
def test_what_initial_epoch_can_be(tmp_path, wrong):
    with pytest.raises(UsageError, match=r"Cannot use initial_epoch=.*: expected a non-negative integer or None"):
        OrbaxCheckpoint(tmp_path, initial_epoch=wrong)


@pytest.mark.slow
def test_a_run_that_goes_back_says_that_later_steps_are_there(tmp_path, capsys):
    fit(compiled(), OrbaxCheckpoint(tmp_path, max_to_keep=None), epochs=3)
    model = compiled()
    shardload.restore(model, tmp_path, step=4)
    assert epochs_of(model, OrbaxCheckpoint(tmp_path, max_to_keep=None), epochs=2) == [1]
    (told,) = lines(capsys)
    assert f"Resumed step 4 of {tmp_path}, which has later steps" in told and "from 13 on" in told
    assert steps_in(tmp_path) == [4, 8, 12, 16]


def test_a_cell_that_takes_a_trained_model_back_says_so(run, capsys):
    model = compiled()
    fit(model, OrbaxCheckpoint(run, resume=True), epochs=4)
    fit(model, epochs=2)
    assert lines(capsys) == []
    assert epochs_of(model, OrbaxCheckpoint(run, resume=True), epochs=5) == [4]
    assert lines(capsys) == [
        "Resumed step 16 (epoch 4); this model had trained 24 batches, so its last 8 are undone. To continue from "
        "the model's current state, pass resume=False"
    ]
    assert int(model.optimizer.iterations) == 20


@pytest.mark.slow
def test_a_model_that_was_taken_back_to_weights_alone_says_so(tmp_path, capsys):
    model = compiled()
    fit(model, OrbaxCheckpoint(tmp_path, save_weights_only=True), epochs=1)
    fit(model, epochs=1)
    with pytest.warns(UserWarning, match="no optimizer state"):
        fit(model, OrbaxCheckpoint(tmp_path, resume=True), epochs=2)
    assert "had trained 8 batches, so its last 4 are undone" in capsys.readouterr().out


def test_a_step_that_does_not_fit_names_ways_out_that_fit_has(run):
    model = compiled()
    model.layers[1].trainable = False
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    with pytest.raises(MismatchError, match=r"items='weights'\) before fit, and pass resume=False") as caught:
        fit(model, OrbaxCheckpoint(run, resume=True), epochs=4)
    assert "strict" not in str(caught.value)
    shardload.restore(model, run, items="weights")
    assert epochs_of(model, OrbaxCheckpoint(run), epochs=1) == [0]


@pytest.mark.slow
def test_in_the_middle_of_an_epoch_its_number_changes_nothing(tmp_path):
    """X has no position: the epoch begins again. With the same number it is that epoch, with another one that one."""
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_freq=6), epochs=2)
    assert epochs_of(compiled(), OrbaxCheckpoint(tmp_path, resume=True), epochs=3, initial_epoch=1) == [1, 2]


@pytest.mark.slow
def test_the_epoch_that_keras_backup_goes_on_with_is_left_to_it(tmp_path):
    def backup():
        return keras.callbacks.BackupAndRestore(tmp_path / "backup", delete_checkpoint=False)

    epochs = Epochs()
    fit(compiled(), backup(), OrbaxCheckpoint(tmp_path / "run"), epochs=2)
    fit(compiled(), backup(), OrbaxCheckpoint(tmp_path / "run"), epochs, epochs=3)
    assert epochs.seen == [2]


@pytest.mark.slow
def test_a_step_of_keras_says_no_epoch_and_that_is_said(tmp_path):
    first = compiled()
    first.fit(X, X, epochs=2, verbose=0, callbacks=[keras.callbacks.OrbaxCheckpoint(tmp_path)])
    with pytest.warns(UserWarning, match=f"Step 1 of {tmp_path} was not saved by shardload and stores no epoch"):
        assert epochs_of(first, OrbaxCheckpoint(tmp_path, resume=True), epochs=1) == [0]


def test_the_end_of_data_is_an_interruption_only_where_it_is_one(tmp_path):
    def batches(n):
        yield from ((X[:4], X[:4]) for _ in range(n))

    fit_batches(batches(3), OrbaxCheckpoint(tmp_path))  # its length is that of the epoch
    with pytest.raises(UserWarning, match="ran out of data"):
        fit_batches(batches(3), OrbaxCheckpoint(tmp_path), epochs=2)
    with pytest.raises(UserWarning, match="ran out of data"):
        fit_batches(batches(3), OrbaxCheckpoint(tmp_path), steps_per_epoch=4)


def fit_batches(source, callback, **options):
    compiled().fit(source, verbose=0, shuffle=False, callbacks=[callback], **options)
