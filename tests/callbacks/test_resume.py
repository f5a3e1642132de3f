"""A run that ended early and one that did not end with the same weights, batch for batch."""

import functools
import os
import re
import shutil
import signal
import warnings
from unittest.mock import Mock

import grain
import keras
import numpy as np
import pytest

import shardload
from shardload.callbacks import OrbaxCheckpoint, resume
from shardload.data import resumable
from shardload.errors import DamagedError, UsageError
from shardload.runs.step import StepInfo

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def read_little_ahead(monkeypatch):
    """Grain reads 500 batches ahead, which is most of the time where data has no end."""
    little = grain.ReadOptions(num_threads=2, prefetch_buffer_size=8)
    read = functools.partialmethod(grain.MapDataset.to_iter_dataset, little)
    monkeypatch.setattr(grain.MapDataset, "to_iter_dataset", read)


class Source:
    """Eighty examples; random access, as Grain wants it."""

    def __init__(self, count=80):
        rng = np.random.default_rng(0)
        self.x, self.y = rng.random((count, 6), np.float32), rng.random((count, 2), np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def data(*, repeat=False, rows=8, global_batch_size=None, count=80):
    found = grain.MapDataset.source(Source(count)).shuffle(seed=4)
    found = found.repeat() if repeat else found
    return resumable(found, global_batch_size=global_batch_size) if global_batch_size else resumable(found.batch(rows))


def model():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.2), keras.layers.Dense(2)]
    built = keras.Sequential([keras.Input((6,)), *layers])
    built.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return built


class At(keras.callbacks.Callback):
    """Does something after so many batches."""

    def __init__(self, batches, action):
        super().__init__()
        self.left, self.action = batches, action

    def on_train_batch_end(self, batch, logs=None):
        self.left -= 1
        if not self.left:
            self.action(self)


class Lengths(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.epochs = {}

    def on_train_batch_end(self, batch, logs=None):
        self.epochs[self.epoch] += 1

    def on_epoch_begin(self, epoch, logs=None):
        self.epoch = epoch
        self.epochs[epoch] = 0


def stop(callback):
    callback.model.stop_training = True


def fit(one, source, *callbacks, epochs=4, **options):
    lengths = Lengths()
    history = one.fit(source, epochs=epochs, verbose=0, shuffle=False, callbacks=[*callbacks, lengths], **options)
    return history.history, lengths.epochs


def same(one, other):
    pairs = zip([*one.variables, *one.optimizer.variables], [*other.variables, *other.optimizer.variables], strict=True)
    return all(np.asarray(a.value).tobytes() == np.asarray(b.value).tobytes() for a, b in pairs)


def steps(repeat):
    return {"steps_per_epoch": 10} if repeat else {}


@functools.cache
def uninterrupted(*, repeat=False):
    """The model after a run that was not stopped, and its history."""
    whole = model()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Your input ran out of data")  # what Keras says of Grain without a callback
        return whole, fit(whole, data(repeat=repeat), **steps(repeat))[0]


@pytest.mark.parametrize("repeat", [False, True], ids=["epoch", "steps_per_epoch"])
@pytest.mark.parametrize("stopped", [3, 10, 14])
def test_weights_metrics_and_lengths_are_those_of_a_run_that_was_not_stopped(tmp_path, stopped, repeat):
    options = steps(repeat)
    whole, wanted = uninterrupted(repeat=repeat)
    saver = OrbaxCheckpoint(tmp_path, save_freq=1, max_to_keep=2)
    fit(model(), data(repeat=repeat), saver, At(stopped, stop), **options)
    again = model()
    found, lengths = fit(again, data(repeat=repeat), OrbaxCheckpoint(tmp_path, save_freq=5, resume=True), **options)
    assert same(whole, again)
    assert list(lengths) == list(range(stopped // 10, 4)) and sum(lengths.values()) == 40 - stopped
    assert found["loss"] == wanted["loss"][stopped // 10 :] and found["mae"] == wanted["mae"][stopped // 10 :]


@pytest.mark.parametrize("repeat", [False, True])
def test_global_batches_go_on_as_those_of_one_process_do(tmp_path, repeat):
    options = steps(repeat)
    source = {"repeat": repeat, "global_batch_size": 8}
    fit(model(), data(**source), OrbaxCheckpoint(tmp_path, save_freq=1), At(13, stop), **options)
    again = model()
    fit(again, data(**source), OrbaxCheckpoint(tmp_path, resume=True), **options)
    assert same(uninterrupted(repeat=repeat)[0], again)


@pytest.fixture(scope="module")
def mid_epoch(tmp_path_factory):
    """Puts a run that was saved after three batches of data cut in this way into a folder."""

    @functools.cache
    def saved(**source):
        folder = tmp_path_factory.mktemp("mid_epoch")
        callbacks = OrbaxCheckpoint(folder, save_freq=1), At(3, stop)
        fit(model(), data(**source), *callbacks, epochs=1, **steps("repeat" in source))
        return folder

    return lambda folder, **source: shutil.copytree(saved(**source), folder, dirs_exist_ok=True)


@pytest.mark.parametrize(
    ("then", "now", "message"),
    [
        ({}, {"rows": 16}, r"Cannot continue in this data from step 3: .* 10 batches, and now has 5\."),
        ({}, {"repeat": True}, r"had 10 batches, and now has endlessly many"),
        ({"repeat": True}, {"repeat": True, "rows": 16}, "had 8 rows in this process, and now have 16"),
        ({"repeat": True}, {"repeat": True, "count": 96}, r"had 80 elements before repeat\(\), and now has 96"),
        (
            {"repeat": True, "global_batch_size": 8},
            {"repeat": True, "global_batch_size": 8, "count": 96},
            r"had 80 elements before repeat\(\), and now has 96",
        ),
        ({"global_batch_size": 8}, {"global_batch_size": 16}, "counts global batches of 8 examples, and now of 16"),
        ({"global_batch_size": 8}, {}, "saved with global_batch_size.*without it now"),
        ({}, {"global_batch_size": 8}, "saved without global_batch_size.*with it now"),
        ({"global_batch_size": 8}, {"global_batch_size": 8, "repeat": True}, "had 80 examples, and now has"),
    ],
)
def test_data_that_is_cut_otherwise_does_not_go_on(tmp_path, mid_epoch, then, now, message):
    mid_epoch(tmp_path, **then)
    one = model()
    with pytest.raises(UsageError, match=message):
        fit(one, data(**now), OrbaxCheckpoint(tmp_path, resume=True), epochs=1)
    assert int(one.optimizer.iterations) == 3


def test_a_last_batch_that_is_shorter_is_none_of_another_length(tmp_path):
    fit(model(), data(rows=12), OrbaxCheckpoint(tmp_path, save_freq=1), At(6, stop), epochs=1)
    _, lengths = fit(model(), data(rows=12), OrbaxCheckpoint(tmp_path, resume=True), epochs=2)
    assert lengths == {0: 1, 1: 7}


def test_data_that_has_run_out_is_told(tmp_path):
    with pytest.warns(UserWarning, match="ran out of data"):
        fit(model(), data(rows=16), OrbaxCheckpoint(tmp_path, save_freq=1), epochs=2, steps_per_epoch=4)
    with pytest.raises(UsageError, match="Step 5 was saved at the end of the dataset"):
        fit(model(), data(rows=16), OrbaxCheckpoint(tmp_path, resume=True), epochs=2, steps_per_epoch=4)


def test_data_that_cannot_go_on_where_the_step_says_begins_the_epoch_again(tmp_path, mid_epoch):
    mid_epoch(tmp_path)
    x, y = Source().x, Source().y
    again, lengths = model(), Lengths()
    with pytest.warns(UserWarning, match="after 3 batches of epoch 1, with a data position.*cannot continue"):
        again.fit(x, y, batch_size=8, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True), lengths])
    assert lengths.epochs == {0: 10}


def test_a_place_that_was_refused_is_not_kept_for_another_fit(tmp_path, mid_epoch):
    mid_epoch(tmp_path)
    one = model()
    with pytest.raises(UsageError, match="Cannot continue in this data"):
        fit(one, data(global_batch_size=8), OrbaxCheckpoint(tmp_path, resume=True), epochs=1)
    _, lengths = fit(one, data(), OrbaxCheckpoint(tmp_path / "other"), epochs=1)
    assert lengths == {0: 10}


def test_a_resumable_dataset_may_lie_below_others(tmp_path):
    fit(model(), data().map(lambda pair: pair), OrbaxCheckpoint(tmp_path, save_freq=1), At(13, stop))
    again = model()
    fit(again, data().map(lambda pair: pair), OrbaxCheckpoint(tmp_path, resume=True))
    assert same(uninterrupted()[0], again)


def test_a_model_that_was_restored_goes_on_once(tmp_path):
    fit(model(), data(), OrbaxCheckpoint(tmp_path), epochs=2)
    again = model()
    shardload.restore(again, tmp_path)
    _, lengths = fit(again, data(), OrbaxCheckpoint(tmp_path), epochs=4)
    assert list(lengths) == [2, 3]
    _, lengths = fit(again, data(), OrbaxCheckpoint(tmp_path), epochs=1)
    assert list(lengths) == [0]
    assert shardload.callbacks.OrbaxCheckpoint(tmp_path).directory == tmp_path
    assert max(int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()) == 50


def test_resume_begins_at_the_beginning_where_there_is_nothing(tmp_path):
    _, lengths = fit(model(), data(), OrbaxCheckpoint(tmp_path / "new", resume=True), epochs=1)
    assert lengths == {0: 10}


def test_sigterm_saves_once_more_and_ends_fit(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    ended = OrbaxCheckpoint(tmp_path)
    _, lengths = fit(model(), data(), ended, At(17, lambda _: os.kill(os.getpid(), signal.SIGTERM)))
    assert sum(lengths.values()) in (17, 18) and signal.getsignal(signal.SIGTERM) is before
    assert ended.preempted
    again, resumed = model(), OrbaxCheckpoint(tmp_path, resume=True)
    fit(again, data(), resumed)
    assert same(uninterrupted()[0], again) and not resumed.preempted


def test_the_step_to_resume_is_said_if_asked(tmp_path, capsys):
    fit(model(), data(), OrbaxCheckpoint(tmp_path), epochs=1)
    fit(model(), data(), OrbaxCheckpoint(tmp_path, resume=True), epochs=2)
    assert "Resumed" not in capsys.readouterr().out
    fit(model(), data(), OrbaxCheckpoint(tmp_path, resume=True, verbose=1), epochs=3)
    assert f"Resumed step 20 of {tmp_path}\n" in capsys.readouterr().out


def test_the_progress_bar_knows_the_length_of_the_epochs_after_a_resumed_one(tmp_path, capsys):
    fit(model(), data(), OrbaxCheckpoint(tmp_path, save_freq=9), epochs=1)
    again = OrbaxCheckpoint(tmp_path, save_freq=9, resume=True)
    model().fit(data(), epochs=3, verbose=2, shuffle=False, callbacks=[again])
    assert re.findall(r"^(\d+/\d+) - ", capsys.readouterr().out, re.MULTILINE) == ["1/1", "10/10", "10/10"]


def test_arrays_do_not_say_where_they_stood_and_the_epoch_begins_again(tmp_path):
    x, y = Source().x, Source().y
    model().fit(x, y, batch_size=8, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, save_freq=3), At(7, stop)])
    again, lengths = model(), Lengths()
    with pytest.warns(UserWarning, match="after 6 batches of epoch 1, without a data position"):
        again.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True), lengths])
    assert lengths.epochs == {0: 10, 1: 10}


class Counter:
    """A source of the user's own that can tell its place."""

    def __init__(self):
        self.at = 0

    def get_state(self):
        return {"at": self.at}

    def set_state(self, state):
        self.at = state["at"]


def test_a_source_of_the_users_own_gets_its_state_back(tmp_path):
    source = Counter()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tick = At(1, lambda _: setattr(source, "at", 99))
        fit(model(), data(), tick, OrbaxCheckpoint(tmp_path, data_iterator=source, save_freq=4), epochs=1)
    other = Counter()
    fit(model(), data(), OrbaxCheckpoint(tmp_path, data_iterator=other, resume=True), epochs=1)
    assert other.at == 99


def test_a_source_that_cannot_be_set_is_refused(tmp_path):
    class Mute:
        def get_state(self):
            return {"at": 1}

    fit(model(), data(), OrbaxCheckpoint(tmp_path, data_iterator=Mute(), save_freq=4), epochs=1)
    with pytest.raises(UsageError, match="has no set_state"):
        fit(model(), data(), OrbaxCheckpoint(tmp_path, data_iterator=Mute(), resume=True), epochs=1)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100000, b"\xff", b"[]", b'{"processes": 3}', b'{"processes": [3]}', b'{"state_base64": 5}',
        b'{"state_base64": "\xc3\xa9"}', b'{"state_base64": "abc"}',
    ],
)  # fmt: skip
def test_a_record_of_the_data_that_cannot_be_is_damage(tmp_path, content):
    (tmp_path / "shardload").mkdir()
    (tmp_path / "shardload/iterator.json").write_bytes(content)
    with pytest.raises(DamagedError, match=r"Step 3: .*iterator\.json"):
        resume.stored_positions(StepInfo(3, tmp_path, ours=True))


def test_a_folder_is_the_same_by_whatever_path(tmp_path, monkeypatch):
    one = model()
    (tmp_path / "link").symlink_to(tmp_path / "run", target_is_directory=True)
    (tmp_path / "run").mkdir()
    fit(one, data(), OrbaxCheckpoint(tmp_path / "link"), epochs=2)
    monkeypatch.chdir(tmp_path)
    again = model()
    shardload.restore(again, "run")
    _, lengths = fit(again, data(), OrbaxCheckpoint("link"), epochs=4)
    assert list(lengths) == [2, 3] and [p.name for p in (tmp_path / "run").iterdir() if p.name.isdigit()] == ["40"]


def test_arrays_at_the_last_batch_of_an_epoch_go_on_with_the_next(tmp_path):
    x, y = Source().x, Source().y
    model().fit(x, y, batch_size=8, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, save_freq=10)])
    again, lengths = model(), Lengths()
    again.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True), lengths])
    assert lengths.epochs == {1: 10, 2: 10}


def test_going_on_from_weights_alone_is_a_warning(tmp_path):
    fit(model(), data(), OrbaxCheckpoint(tmp_path, save_weights_only=True), epochs=1)
    with pytest.warns(UserWarning, match="no optimizer state"):
        fit(model(), data(), OrbaxCheckpoint(tmp_path, resume=True), epochs=2)


def test_an_interrupted_fit_and_the_next_one_in_the_same_process(tmp_path):
    interrupt = Mock(side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        fit(model(), data(), OrbaxCheckpoint(tmp_path, save_freq=1, max_to_keep=None), At(7, interrupt))
    _, lengths = fit(model(), data(), OrbaxCheckpoint(tmp_path, save_freq=1, resume=True), epochs=1)
    assert lengths == {0: 3}


@pytest.mark.parametrize(
    ("named", "message"), [({"directory": ""}, "Cannot save steps"), ({"resume": "newest"}, "Cannot use resume=")]
)
def test_impossible_arguments_are_refused_at_once(tmp_path, named, message):
    with pytest.raises(UsageError, match=message):
        OrbaxCheckpoint(**({"directory": tmp_path} | named))


def test_sigterm_after_a_failed_fit_does_what_it_did_before(tmp_path):
    def fail(_):
        raise RuntimeError("no more")

    seen = []
    before = signal.signal(signal.SIGTERM, lambda *_: seen.append(1))
    try:
        with pytest.raises(RuntimeError):
            fit(model(), data(), OrbaxCheckpoint(tmp_path), At(2, fail))
        os.kill(os.getpid(), signal.SIGTERM)
        assert seen == [1]
    finally:
        signal.signal(signal.SIGTERM, before)
