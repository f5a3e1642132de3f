"""Positions in Grain datasets as Keras reads them: what was trained, not what was looked at."""

import functools
import itertools
import json
import shutil

import grain
import keras
import numpy as np
import pytest
import reading_child
from process_runs import told_by

from shardload.data import BatchPart, follow_data, part_in, resumable, stop_following
from shardload.data.position import Origin, Reading
from shardload.errors import UsageError
from shardload.runs.contents import iterator_record

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
        self.position = follow_data(self.model)
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


@pytest.mark.slow
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


def examples(*, repeat=False, n=70):
    found = grain.MapDataset.range(n).shuffle(seed=3)
    return found.repeat() if repeat else found


def test_global_batches_are_those_of_one_process_cut_into_parts(monkeypatch):
    def numbers(part):
        monkeypatch.setattr("shardload.data.part_of_this_process", lambda: part)
        return [batch.tolist() for batch in resumable(examples(), global_batch_size=8)]

    whole = numbers(BatchPart(0, 1))
    assert whole == [batch.tolist() for batch in examples().batch(8, drop_remainder=True)] and len(whole) == 8
    for count in (2, 4, 8):
        parts = [numbers(BatchPart(index, count)) for index in range(count)]
        assert [list(itertools.chain(*batch)) for batch in zip(*parts, strict=True)] == whole


def test_global_batches_of_a_repeated_dataset_pass_its_end(monkeypatch):
    monkeypatch.setattr("shardload.data.part_of_this_process", lambda: BatchPart(1, 2))
    wanted = itertools.islice(examples(repeat=True).batch(8), 20)
    found = itertools.islice(resumable(examples(repeat=True), global_batch_size=8), 20)
    assert [batch.tolist() for batch in found] == [batch.tolist()[4:] for batch in wanted]


@pytest.mark.parametrize(
    ("owners", "process", "part"),
    [
        ([{0}, {1}], 1, BatchPart(1, 2)),  # two rows of the mesh, one for each
        ([{0, 1}], 1, BatchPart(0, 1)),  # 1x8: both hold all rows
        ([{0}, {0}, {1}, {1}], 0, BatchPart(0, 2)),  # 4x2 over two
        ([{0, 1}, {2, 3}], 3, BatchPart(1, 2)),  # 2x4 over four
        ([{1}, {0}], 0, BatchPart(1, 2)),  # the mesh has the last word, not the process' number
    ],
)
def test_the_part_of_a_process_follows_from_the_mesh(owners, process, part):
    assert part_in(owners, process) == part


@pytest.mark.parametrize("owners", [[{0}, {1}, {0}, {1}], [{0}, {0}, {1}], [{0, 1}, {1}]])
def test_rows_that_are_no_equal_shares_are_refused(owners):
    with pytest.raises(UsageError, match="Cannot divide the rows"):
        part_in(owners, 0)


@pytest.mark.parametrize(
    ("dataset", "size", "message"),
    [
        (examples().to_iter_dataset(), 8, "expected a grain.MapDataset of examples"),
        (examples().filter(bool), 8, "Cannot cut a filtered dataset"),
        (examples(), 0, "global_batch_size=0: expected a positive integer"),
        (examples(n=5), 8, "a global batch of 8: the dataset has only 5 examples"),
    ],
)
def test_what_has_no_global_batches_is_refused(dataset, size, message):
    with pytest.raises(UsageError, match=message):
        resumable(dataset, global_batch_size=size)


def test_global_batches_that_cannot_be_are_refused_when_they_are_read(monkeypatch):
    gaps = examples().map(lambda i: i if i % 3 else None)
    with pytest.raises(UsageError, match="Cannot cut a filtered dataset"):
        list(resumable(gaps, global_batch_size=8))
    monkeypatch.setattr("shardload.data.part_of_this_process", lambda: BatchPart(0, 3))
    with pytest.raises(UsageError, match="cannot be cut into 3 equal parts"):
        list(resumable(examples(), global_batch_size=8))


@pytest.mark.parametrize("state", [{"best": float("inf")}, [float("nan")], {1: 2}, {"at": (1, 2)}, {"seen": {1}}])
def test_a_state_that_json_would_change_is_refused(state):
    with pytest.raises(UsageError, match="state of data_iterator"):
        iterator_record(state)


def test_a_state_comes_back_as_it_was():
    state = {"at": [1, 2.5, None, True], "of": {"text": "ü"}}
    assert iterator_record(lambda: state)["state"] == state


def test_a_position_of_other_processes_says_how_to_change_their_number():
    origin = Origin(3, Reading(), processes=2, processes_now=4)
    said = r"saved by 2 processes.*are 4\. Read the data.*resumable\(dataset, global_bat"
    with pytest.raises(UsageError, match=said):
        origin.check(Reading())


# ---- several processes ---------------------------------------------------------------------------

# The model of `reading_child` keeps in its state at which batch it saw each example, so what was read twice, left out
# or read out of order shows in a value that is compared with that of a run that did not stop.
run = functools.partial(told_by, module="reading_child")


def stopped(kind, base):
    """What an uninterrupted run of two processes ended with, and the folder of one that stopped in mid-epoch."""
    ends = run(2, 4, "2x4", f"{kind} stop", base)
    assert json.loads((base / "stopped/4/shardload/step.json").read_text())["batch"] == 4
    assert ends[0] == ends[1]
    return ends[0], base / "stopped"


@pytest.fixture(scope="module")
def of_all(tmp_path_factory):
    return stopped("global", tmp_path_factory.mktemp("global"))


@pytest.fixture(scope="module")
def of_each(tmp_path_factory):
    return stopped("own", tmp_path_factory.mktemp("own"))


@pytest.fixture
def one_process():
    reading_child.distribute("2x4")
    yield
    keras.distribution.set_distribution(None)


def said(folder, step):
    return json.loads((folder / f"{step}/shardload/iterator.json").read_text())


@pytest.mark.slow
def test_global_batches_go_on_with_the_next_one_to_the_same_bits(of_all, tmp_path):
    whole, folder = of_all[0], shutil.copytree(of_all[1], tmp_path / "steps")
    assert run(2, 4, "2x4", "global go-on", folder) == [whole] * 2
    told = said(of_all[1], 4)
    assert told["position"] == {"next_index": 4}
    assert told["reading"] == {"global_batch_size": 8, "examples": 72}


@pytest.mark.parametrize(("processes", "devices", "mesh"), [(4, 2, "4x2"), (2, 4, "1x8")])
@pytest.mark.slow
def test_global_batches_go_on_with_any_number_of_processes_and_on_any_mesh(of_all, tmp_path, processes, devices, mesh):
    whole, folder = of_all[0], shutil.copytree(of_all[1], tmp_path / "steps")
    ends = run(processes, devices, mesh, "global go-on", folder)
    assert [end["when"] for end in ends] == [whole["when"]] * processes
    assert len({end["digest"] for end in ends}) == 1


@pytest.mark.slow
def test_global_batches_go_on_in_one_process(of_all, tmp_path, one_process):
    whole, folder = of_all[0], shutil.copytree(of_all[1], tmp_path / "steps")
    assert reading_child.ledger(reading_child.train("global", folder, index=0, count=1)) == whole["when"]


@pytest.mark.slow
def test_each_process_gets_back_the_place_of_its_own_data(of_each, tmp_path):
    whole, folder = of_each[0], shutil.copytree(of_each[1], tmp_path / "steps")
    assert run(2, 4, "2x4", "own go-on", folder) == [whole] * 2
    first, second = said(folder, 18)["processes"]
    assert first["position"] != second["position"]


@pytest.mark.slow
def test_places_of_two_processes_are_no_place_for_one(of_each, tmp_path, one_process):
    folder = shutil.copytree(of_each[1], tmp_path / "steps")
    with pytest.raises(UsageError, match=r"saved by 2 processes.*now there are 1.*global_batch_size=…"):
        reading_child.train("own", folder, index=0, count=1)
