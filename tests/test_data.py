"""Positions in Grain datasets as Keras reads them: what was trained, not what was looked at."""

import grain
import keras
import numpy as np
import pytest

from shardload.data import position_of, resumable
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
    """Tells a position what was trained, as the checkpoint callback does, and keeps its states."""

    def __init__(self, data, *, stop_after=None, resumed=False):
        super().__init__()
        self.position, self.stop_after, self.resumed = position_of(data), stop_after, resumed
        self.epochs, self.states = [], []

    def on_epoch_begin(self, epoch, logs=None):
        self.position.epoch_begins()
        self.epochs.append(0)

    def on_train_batch_end(self, batch, logs=None):
        self.position.trained(1)
        self.epochs[-1] += 1
        self.states.append(self.position.state)
        if len(self.states) == self.stop_after:
            self.model.stop_training = True

    def on_epoch_end(self, epoch, logs=None):
        self.position.epoch_ends(shortened=self.resumed and len(self.epochs) == 1)


def model():
    built = keras.Sequential([keras.Input((4,)), Recorder(), keras.layers.Dense(1, kernel_initializer="ones")])
    built.compile(keras.optimizers.SGD(1e-6), "mse")
    return built


def fit(data, one=None, **options):
    seen = Seen(data, **{k: options.pop(k) for k in ("stop_after", "resumed") if k in options})
    one = one or model()
    one.fit(data, verbose=0, shuffle=False, callbacks=[seen], **options)
    return one, seen


def test_the_state_is_that_after_the_batch_that_was_trained():
    data = resumable(batches())
    _, seen = fit(data)
    expected = iter(batches().to_iter_dataset())
    for state in seen.states:
        next(expected)
        assert state == expected.get_state()


@pytest.mark.parametrize("options", [{}, {"steps_per_epoch": 5}], ids=["epoch", "steps_per_epoch"])
def test_a_resumed_run_trains_the_same_batches_and_later_epochs_are_whole(options):
    repeat = bool(options)
    whole, _ = fit(resumable(batches(repeat=repeat)), epochs=3, **options)
    data = resumable(batches(repeat=repeat))
    one, first = fit(data, epochs=1, stop_after=3, **options)
    again = resumable(batches(repeat=repeat))
    position_of(again).resume(first.states[-1])
    rest = {"steps_per_epoch": 12, "epochs": 1} if repeat else {"epochs": 3}
    one, second = fit(again, one, resumed=True, **rest)
    assert second.epochs == ([12] if repeat else [5, 8, 8])
    assert all(np.array_equal(a.value, b.value) for a, b in zip(whole.weights, one.weights, strict=True))


def test_an_epoch_that_ended_leaves_nothing_to_resume_unless_one_iterator_spans_epochs():
    data = resumable(batches())
    fit(data)
    assert not position_of(data).spans_epochs
    data = resumable(batches(repeat=True))
    fit(data, steps_per_epoch=4, epochs=2)
    assert position_of(data).spans_epochs


def test_other_sources_are_refused():
    with pytest.raises(UsageError, match="data_iterator="):
        resumable([1, 2, 3])
    assert position_of([1]) is None
