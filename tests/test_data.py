"""Positions in Grain datasets as Keras reads them: what was trained, not what was looked at."""

import grain
import keras
import numpy as np
import pytest

from shardload.data import follow, resumable, stop_following
from shardload.errors import UsageError

pytestmark = pytest.mark.filterwarnings("ignore:Your input ran out of data")  # what Keras says of any Grain epoch


def batches(*, seed=3, repeat=False):
    source = grain.MapDataset.range(64).shuffle(seed=seed)
    source = source.repeat() if repeat else source
    return source.map(lambda i: (np.full(4, i, np.float32), np.float32(i))).batch(8)


class Recorder(keras.layers.Layer):
    """Adds nothing; notes the numbers it was trained on."""

    def __init__(self):
        super().__init__()
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return x * self.scale


class Seen(keras.callbacks.Callback):
    """Tells the position what was trained, as the checkpoint callback does, and keeps its states."""

    def __init__(self, *, stop_after=None, resume=None):
        super().__init__()
        self.stop_after, self.resume = stop_after, resume
        self.epochs, self.states, self.ends = [], [], []

    def on_train_begin(self, logs=None):
        self.position = follow(self.model)
        if self.resume:
            self.position.resume(*self.resume[:1], skipped=self.resume[1])

    def on_epoch_begin(self, epoch, logs=None):
        self.position.epoch_begins()
        self.epochs.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.position.trained(batch + 1)
        self.epochs[-1] += 1
        self.states.append(self.position.state)
        self.ends.append(self.position.at_end)
        if len(self.states) == self.stop_after:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.position.epoch_ends()

    def on_train_end(self, logs=None):
        stop_following()


def model():
    built = keras.Sequential([keras.Input((4,)), Recorder(), keras.layers.Dense(1, kernel_initializer="ones")])
    built.compile(keras.optimizers.SGD(1e-6), "mse")
    return built


def fit(data, one=None, *, stop_after=None, resume=None, **options):
    seen = Seen(stop_after=stop_after, resume=resume)
    one = one or model()
    one.fit(data, verbose=0, shuffle=False, callbacks=[seen], **options)
    return one, seen


def test_the_state_is_that_after_the_batch_that_was_trained():
    _, seen = fit(resumable(batches()))
    expected = iter(batches().to_iter_dataset())
    for state in seen.states:
        next(expected)
        assert state == expected.get_state()
    assert seen.ends == [False] * 7 + [True]


@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": 5}], ids=["epoch", "steps_per_epoch"])
def test_a_resumed_run_trains_the_same_batches_and_every_epoch_has_its_length(options):
    repeat = bool(options)
    whole, _ = fit(resumable(batches(repeat=repeat)), epochs=3, **options)
    one, first = fit(resumable(batches(repeat=repeat)), stop_after=3, **options)
    one, second = fit(resumable(batches(repeat=repeat)), one, resume=(first.states[-1], 3), epochs=3, **options)
    assert second.epochs == ([2, 5, 5] if repeat else [5, 8, 8])
    assert all(np.array_equal(a.value, b.value) for a, b in zip(whole.weights, one.weights, strict=True))


def test_nothing_is_followed_outside_of_fit():
    data = resumable(batches())
    assert len(list(data)) == 8
    state = iter(data)
    first = [next(state) for _ in range(3)][-1]
    again = iter(data)
    again.set_state(state.get_state())
    assert not np.array_equal(next(again)[0], first[0])


def test_a_second_callback_changes_nothing():
    seen, other = Seen(), Seen()
    model().fit(resumable(batches()), verbose=0, shuffle=False, callbacks=[seen, other], epochs=2)
    assert seen.states == other.states and len(seen.states) == 16 and None not in seen.states


def test_other_sources_are_refused():
    with pytest.raises(UsageError, match="data_iterator="):
        resumable([1, 2, 3])
