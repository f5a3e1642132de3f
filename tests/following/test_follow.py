"""A model that follows the steps in a folder: each is adopted whole, verified, or not at all."""

import contextlib
import copy
import itertools
import json
import logging
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import keras
import numpy as np
import pytest
from object_server import served
from saved_steps import save_step
from serving import eventually
from serving import served as serve
from small_regression import on_mesh, regression

import shardload
from shardload import restoring
from shardload.errors import MismatchError, UnsupportedError, UsageError
from shardload.following.gate import Gate
from shardload.keras_bridge.variables import has_value
from shardload.pipeline import load
from shardload.runs import watching
from shardload.runs.watching import StepWatch


def publish(folder, step, **details):
    """Save a step whose weights all differ from those of other steps; return these."""
    model = regression("adam")
    rng = np.random.default_rng(step)
    model.set_weights([rng.normal(size=v.shape).astype("float32") for v in model.weights])
    save_step(model, folder, step, saved_unix_s=time.time(), **details)
    return weights(model)


def weights(model):
    return [np.asarray(v.value).tobytes() for v in model.weights]


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def model():
    return on_mesh(regression("sgd"), "1x8")


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
def test_each_new_step_bit_for_bit_in_the_own_layout(folder, mesh):
    model, other = (on_mesh(regression("adam"), mesh) for _ in range(2))
    layouts = [v.value.sharding for v in model.weights]
    follower = shardload.follow(model, folder, every_s=0)
    for step in (10, 20, 30):
        published = publish(folder, step)
        assert (follower.update(), follower.update(), follower.step) == (step, None, step)
        shardload.restore(other, folder, step=step, items="weights")
        assert weights(model) == weights(other) == published
    assert [v.value.sharding for v in model.weights] == layouts
    assert follower.problem is None
    assert 0 <= follower.staleness_s < 600
    assert int(model.optimizer.iterations) == 0


def test_steps_in_a_bucket(folder, model, monkeypatch):
    with served(folder.parent, monkeypatch) as server:
        follower = shardload.follow(model, f"{server.s3}/run", every_s=0)
        assert follower.update() is None
        assert "no steps" in follower.problem or "nothing at" in follower.problem
        for step in (1, 2):
            published = publish(folder, step)
            assert (follower.update(), follower.problem) == (step, None)
            assert weights(model) == published
        asked = len(server.requests)
        assert follower.update() is None
        assert {key for _, key, *_ in server.requests[asked:]} == {None}  # lists of names


def test_a_step_in_a_bucket_that_was_saved_again_by_equally_long_files(folder, model, monkeypatch):
    def published(value):
        found = regression("adam")
        found.set_weights([np.full(v.shape, value, "float32") for v in found.weights])
        save_step(found, folder, 1, saved_unix_s=time.time())
        digests = folder / "1" / "shardload" / "digests.json"
        digests.write_bytes(digests.read_bytes().ljust(100_000))
        assert digests.stat().st_size == 100_000
        return weights(found)

    with served(folder.parent, monkeypatch) as server:
        follower = shardload.follow(model, f"{server.s3}/run", every_s=0)
        for value in (1, 2):
            expected = published(value)
            assert (follower.update(), weights(model)) == (1, expected)
            shutil.rmtree(folder / "1")


def test_steps_of_a_server(folder, model):
    published = publish(folder, 1)
    with serve("--root", folder.parent) as server:
        source = f"{server.address}/run"
        with shardload.follow(model, source) as follower:
            assert (follower.step, follower.problem, weights(model)) == (1, None, published)
            for step in (2, 3):
                published = publish(folder, step)
                assert eventually(lambda step=step: follower.step == step)
                with follower.held():
                    assert weights(model) == published
        absent = shardload.follow(model, f"{source}s", every_s=0)
        assert absent.update() is None
        assert "shows no list of steps there. Check the address" in absent.problem
        best = shardload.follow(model, source, which="best", every_s=0)
        assert best.update() is None
        assert "No step in" in best.problem


def test_the_best_step_and_a_step_that_was_saved_again(folder, model):
    follower = shardload.follow(model, folder, which="best", every_s=0)
    ranked = {"monitor": "loss", "mode": "min"}
    publish(folder, 1, logs={"loss": 0.5}, **ranked)
    assert follower.update() == 1
    publish(folder, 2, logs={"loss": 0.7}, **ranked)
    assert follower.update() is None
    publish(folder, 3, logs={"loss": 0.4}, **ranked)
    assert follower.update() == 3
    shutil.rmtree(folder / "3")
    published = publish(folder, 3, logs={"loss": 0.3}, **ranked)
    assert follower.update() == 3
    assert weights(model) == published


def test_a_model_without_values_is_first_filled_and_then_follows(folder):
    with shardload.abstract():
        model = regression("sgd")
    first = publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=0)
    assert follower.update() == 1
    assert weights(model) == first
    second = publish(folder, 2)
    assert follower.update() == 2
    assert weights(model) == second


def test_readers_never_see_weights_of_two_steps(folder, model):
    published = {1: publish(folder, 1)}
    seen, ended = {}, threading.Event()

    def read():
        while not ended.wait(0.001):
            with follower.held() as step:
                found = [np.asarray(v.value).tobytes() for v in model.weights for _ in range(2)]
            seen.setdefault(step, []).append(found[::2])
            assert found[::2] == found[1::2]

    with shardload.follow(model, folder, every_s=0.01) as follower:
        readers = [threading.Thread(target=read) for _ in range(3)]
        for reader in readers:
            reader.start()
        for step in range(2, 7):
            published[step] = publish(folder, step)
            assert eventually(lambda step=step: step in seen)
        ended.set()
        for reader in readers:
            reader.join()
    assert seen.keys() == published.keys()
    assert all(found == published[step] for step in seen for found in seen[step])


def test_a_damaged_step_is_never_adopted_and_a_repaired_one_is(folder, model, caplog):
    good = publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=0)
    assert follower.update() == 1
    second = publish(folder, 2)
    file = max((folder / "2" / "pytree").rglob("d/*"), key=lambda path: path.stat().st_size)
    right = file.read_bytes()
    file.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    with caplog.at_level(logging.WARNING, logger="shardload"):
        assert follower.update() is None
        assert follower.update() is None
    assert weights(model) == good
    assert "step 2" in follower.problem.lower()
    assert "The weights of step 1 stay" in follower.problem
    assert len(caplog.messages) == 1
    file.write_bytes(right)
    assert eventually(lambda: follower.update() == 2)
    assert weights(model) == second
    assert follower.problem is None


def test_a_newer_step_ends_the_wait_for_a_damaged_one(folder, model):
    publish(folder, 1)
    (folder / "1" / "shardload" / "digests.json").write_text("{}")
    follower = shardload.follow(model, folder, every_s=0)
    assert follower.update() is None
    assert "The model has no step yet" in follower.problem
    assert follower.update() is None
    published = publish(folder, 2)
    assert follower.update() == 2
    assert weights(model) == published


def test_a_step_that_is_removed_while_it_is_read(folder, model, monkeypatch):
    publish(folder, 1)
    newer, removed = [], []
    prepared = restoring.prepared

    def removing(info):
        found = prepared(info)
        if not removed:
            removed.append(info.step)
            newer.append(publish(folder, 2))
            shutil.rmtree(folder / "1")
        return found

    monkeypatch.setattr(restoring, "prepared", removing)
    follower = shardload.follow(model, folder, every_s=0)
    assert (follower.update(), follower.problem, removed) == (None, None, [1])
    assert follower.update() == 2
    assert weights(model) == newer[0]


def test_what_fails_in_the_middle_of_a_swap_leaves_the_old_weights(folder, model, monkeypatch):
    good = publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=0)
    follower.update()
    published = publish(folder, 2)
    assign = keras.Variable.assign

    def refusing(self, value):
        if self is model.weights[-1]:
            raise MemoryError("none left")
        return assign(self, value)

    with monkeypatch.context() as patched:
        patched.setattr(keras.Variable, "assign", refusing)
        assert follower.update() is None
    assert "none left" in follower.problem
    assert weights(model) == good
    assert follower.step == 1
    assert eventually(lambda: follower.update() == 2)
    assert weights(model) == published


def test_ctrl_c_in_the_middle_of_a_swap_comes_after_it(folder, model, monkeypatch):
    publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=0)
    follower.update()
    published = publish(folder, 2)
    assign = keras.Variable.assign

    def interrupted(self, value):
        if self is model.weights[-1]:
            signal.raise_signal(signal.SIGINT)
        return assign(self, value)

    monkeypatch.setattr(keras.Variable, "assign", interrupted)
    with pytest.raises(KeyboardInterrupt):
        follower.update()
    assert (follower.step, weights(model)) == (2, published)
    assert follower.update() is None


def test_ctrl_c_is_not_lost_if_the_swap_fails(folder, model, monkeypatch):
    good = publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=0)
    follower.update()
    publish(folder, 2)
    assign = keras.Variable.assign

    def failing(self, value):
        if self is model.weights[-1]:
            signal.raise_signal(signal.SIGINT)
            raise MemoryError("none left")
        return assign(self, value)

    monkeypatch.setattr(keras.Variable, "assign", failing)
    with pytest.raises(KeyboardInterrupt):
        follower.update()
    assert (follower.step, weights(model)) == (1, good)


@keras.saving.register_keras_serializable("following")
class Counting(keras.layers.Dense):
    """Saves a number and a file next to its weights, and refuses some numbers after it took them."""

    count, words = 0, ""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.taken = []

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["count"] = self.count

    def load_own_variables(self, store):
        self.count = int(np.asarray(store["count"]))
        self.taken.append(self.count)
        if self.count < 0:
            raise ValueError("below zero")

    def save_assets(self, folder):
        Path(folder, "words").write_text(self.words)

    def load_assets(self, folder):
        self.words = Path(folder, "words").read_text()


def counting(count):
    model = keras.Sequential([keras.Input((4,)), Counting(2)])
    model.layers[0].count, model.layers[0].words = count, f"words of {count}"
    model.set_weights([np.full(value.shape, count, "float32") for value in model.get_weights()])
    return model


def state_of(model):
    layer = model.layers[0]
    return weights(model), layer.words, layer.count, layer.taken


def test_what_a_layers_own_code_refuses_leaves_all_of_the_old_step(folder):
    shardload.save(counting(1), folder, step=1)
    model = counting(0)
    follower = shardload.follow(model, folder, every_s=0)
    assert follower.update() == 1
    before = copy.deepcopy(state_of(model))
    assert before[1:] == ("words of 1", 1, [1])
    shardload.save(counting(-2), folder, step=2)
    assert follower.update() is None
    assert "below zero" in follower.problem and "The weights of step 1 stay" in follower.problem
    assert (state_of(model), follower.step) == (before, 1)
    shardload.save(counting(3), folder, step=3)
    assert (follower.update(), follower.problem) == (3, None)
    assert state_of(model) == (weights(counting(3)), "words of 3", 3, [1, 3])


@pytest.mark.parametrize("is_first", [True, False])
def test_a_failure_after_all_is_loaded_undoes_all(folder, monkeypatch, is_first):
    shardload.save(counting(1), folder, step=1)
    model = counting(0)
    follower = shardload.follow(model, folder, every_s=0)
    if not is_first:
        assert follower.update() == 1
        shardload.save(counting(2), folder, step=2)
    before = copy.deepcopy(state_of(model))

    def failing(model, source):
        assert state_of(model) != before
        raise MemoryError("none left")

    with monkeypatch.context() as patched:
        patched.setattr(load, "empty_vocabularies", failing)
        assert follower.update() is None
    assert "none left" in follower.problem
    assert (state_of(model), follower.step) == (before, None if is_first else 1)
    assert eventually(lambda: follower.update() is not None)
    assert state_of(model) != before


def test_a_model_without_values_has_none_after_a_failure(folder, monkeypatch):
    publish(folder, 1)
    with shardload.abstract():
        model = regression("sgd")
    follower = shardload.follow(model, folder, every_s=0)
    with monkeypatch.context() as patched:
        patched.setattr(load, "empty_vocabularies", lambda model, source: next(iter(())))
        assert follower.update() is None
    assert "The model has no step yet" in follower.problem
    assert not any(map(has_value, model.weights))
    published = publish(folder, 2)
    assert follower.update() == 2
    assert weights(model) == published


def test_steps_without_digests_are_refused(folder, model):
    publish(folder, 5)
    shutil.rmtree(folder / "5" / "shardload")
    follower = shardload.follow(model, folder, every_s=0)
    before = weights(model)
    assert follower.update() is None
    assert "no digests" in follower.problem
    assert weights(model) == before


def test_a_folder_that_is_not_there_yet(folder, model):
    follower = shardload.follow(model, folder, every_s=0)
    assert follower.update() is None
    assert "no such folder" in follower.problem
    published = publish(folder, 1)
    assert follower.update() == 1
    assert weights(model) == published
    assert follower.problem is None


def test_a_loop_gets_each_step_until_it_is_stopped(folder, model):
    publish(folder, 1)
    follower, seen = shardload.follow(model, folder, every_s=0.01), []
    for step in follower:
        seen.append(step)
        if step == 3:
            follower.stop()
        else:
            publish(folder, step + 1)
    assert seen == [1, 2, 3]


def test_a_stop_before_a_loop_begins_ends_it_until_the_follower_is_used_again(folder, model):
    publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=0)
    begun = iter(follower)
    follower.stop()
    assert list(begun) == list(follower) == []
    assert follower.update() == 1
    publish(folder, 2)
    assert next(iter(follower)) == 2


@pytest.fixture
def waiting(monkeypatch):
    """An event that is set once a swap waits for those who hold the weights."""
    event, swapping = threading.Event(), Gate.swapping

    def noted(self):
        event.set()
        return swapping(self)

    monkeypatch.setattr(Gate, "swapping", noted)
    return event


def test_a_thread_that_holds_the_weights_may_stop_while_a_swap_waits(folder, model, waiting):
    good = publish(folder, 1)
    with shardload.follow(model, folder, every_s=0.01) as follower:
        waiting.clear()
        with follower.held() as step:
            published = publish(folder, 2)
            assert waiting.wait(60)
            follower.stop()
            assert (step, follower.step, weights(model)) == (1, 1, good)
    assert follower.problem is None
    eventually(lambda: follower.update() == 2)  # it looks again once the last look is a while ago
    assert weights(model) == published


@pytest.mark.parametrize("devices", [1, 8])
def test_a_model_that_predicts_is_not_looked_at(folder, waiting, devices):
    """Keras takes the values out of a model while it predicts: it has neither weights nor a mesh then."""
    good, published = publish(folder, 1), []
    # Not compiled: an optimizer's variables would tell the devices.
    plain = keras.Sequential([keras.Input((16,)), *regression("sgd").layers])
    model = plain if devices == 1 else on_mesh(plain, "1x8")
    batch = np.ones((8, *model.input_shape[1:]), np.float32)

    def batches():
        for number in itertools.count():
            if number == 4:  # Keras has computed some, and fetches others in advance
                assert not all(map(has_value, model.weights))
                published.append(publish(folder, 2))
                assert waiting.wait(60)
            yield (batch,)

    with shardload.follow(model, folder, every_s=0.01) as follower:
        meshes = {v.value.sharding for v in model.weights}
        expected = model.predict(batch, verbose=0)
        waiting.clear()
        with follower.held() as step:
            found = model.predict(batches(), steps=8, verbose=0)
            assert step == 1 and weights(model) == good
        assert np.array_equal(found, np.tile(expected, (8, 1)))
        eventually(lambda: follower.step == 2)
        with follower.held():
            assert [weights(model)] == published and {v.value.sharding for v in model.weights} == meshes


def test_weights_may_be_released_in_another_thread(folder, model):
    publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=0)
    assert follower.update() == 1
    holding = follower.held()
    assert holding.__enter__() == 1
    releasing = threading.Thread(target=holding.__exit__, args=(None, None, None))
    releasing.start()
    releasing.join()
    publish(folder, 2)
    assert follower.update() == 2


def test_who_is_waited_for_may_wait_for_one_who_holds_later(folder, model, waiting):
    publish(folder, 1)
    with shardload.follow(model, folder, every_s=0.01) as follower, ThreadPoolExecutor(1) as pool:
        waiting.clear()
        with follower.held():
            publish(folder, 2)
            assert waiting.wait(60)
            assert pool.submit(lambda: held_step(follower)).result(60) == 1
        eventually(lambda: follower.step == 2)


def held_step(follower):
    with follower.held() as step:
        return step


def test_only_one_thread_updates(folder, model):
    publish(folder, 1)
    with shardload.follow(model, folder) as follower:
        with pytest.raises(UsageError, match="a background thread does so"):
            follower.update()
        with pytest.raises(UsageError, match="a background thread does so"):
            next(iter(follower))
    assert follower.update() is None


def test_a_stop_while_the_first_step_is_read_starts_no_thread(folder, model, monkeypatch):
    publish(folder, 1)
    follower, find = shardload.follow(model, folder, every_s=0), StepWatch.find

    def stopped(self, known):
        follower.stop()
        return find(self, known)

    monkeypatch.setattr(StepWatch, "find", stopped)
    follower.start()
    monkeypatch.undo()
    assert follower.step is None
    assert follower.update() == 1  # by this thread: no other one updates


def test_an_error_while_the_weights_are_held_ends_the_background_thread(folder, model, waiting):
    publish(folder, 1)
    follower, holding = shardload.follow(model, folder, every_s=0.01), contextlib.ExitStack()
    with holding, pytest.raises(ZeroDivisionError), follower:
        waiting.clear()
        holding.enter_context(follower.held())
        publish(folder, 2)
        assert waiting.wait(60)
        raise ZeroDivisionError
    assert follower.step == 1


def test_a_program_ends_although_a_thread_holds_the_weights(folder):
    publish(folder, 1)
    publish(folder.parent / "next", 2)
    command = [sys.executable, "-m", "holding_child", folder]
    ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=240)
    assert [json.loads(line) for line in ended.stdout.splitlines()] == [{"held": 1}, {"waits": True}]


def test_a_loop_rests_ever_longer_while_the_source_fails(folder, model, monkeypatch):
    follower, order = shardload.follow(model, folder, every_s=0), []

    def failing(source):
        order.append("look")
        if order.count("look") == 12:
            follower.stop()
        raise OSError("unreachable")

    ended = SimpleNamespace(wait=order.append)
    rest = StepWatch.rest
    monkeypatch.setattr(watching, "listed_state", failing)
    monkeypatch.setattr(StepWatch, "rest", lambda watch, _: rest(watch, ended))
    assert list(follower) == []
    assert [what for what in order if what != "look"] == [0.01 * 2**n for n in range(7)] + [1.0] * 4
    assert order[0::2] == ["look"] * 12


def test_a_model_that_does_not_fit_is_refused_at_first_and_told_later(folder, model):
    publish(folder, 1)
    wrong = keras.Sequential([keras.Input((16,)), keras.layers.Dense(3, name="up")])
    with pytest.raises(MismatchError):
        shardload.follow(wrong, folder).update()
    with pytest.raises(MismatchError), shardload.follow(wrong, folder):
        pass
    follower = shardload.follow(model, folder, every_s=0)
    follower.update()
    save_step(wrong, folder, 2)
    assert follower.update() is None
    assert "does not" in follower.problem


def test_it_looks_no_more_often_than_asked(folder, model):
    publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=10_000)
    assert follower.update() == 1
    publish(folder, 2)
    assert follower.update() is None
    assert shardload.follow(model, folder).update() == 2


def test_wrong_calls(folder, model):
    publish(folder, 1)
    with pytest.raises(UsageError, match="which="):
        shardload.follow(model, folder, which="newest")
    with pytest.raises(UsageError, match="every_s="):
        shardload.follow(model, folder, every_s=-1)
    with pytest.raises(UsageError, match="expected a Keras model"):
        shardload.follow([1], folder)
    with pytest.raises(UsageError, match="Cannot follow 3: expected the folder"):
        shardload.follow(model, 3)
    with pytest.raises(UnsupportedError, match="ftp://host/run, expected"):
        shardload.follow(model, "ftp://host/run")
    follower = shardload.follow(model, folder, every_s=0)
    with follower.held() as step:
        assert step is None
        with pytest.raises(UsageError, match="inside of held"):
            follower.update()


def test_a_function_of_jax_computes_by_the_step_that_it_was_given(folder, model):
    publish(folder, 1)
    follower = shardload.follow(model, folder, every_s=0)
    follower.update()
    compute = jax.jit(lambda values, x: model.stateless_call(values, [], x)[0])
    x = np.ones((4, 16), "float32")
    with follower.held():
        values = [v.value for v in model.trainable_variables]
    first = np.asarray(compute(values, x))
    publish(folder, 2)
    follower.update()
    assert np.array_equal(compute(values, x), first)
    assert not np.array_equal(compute([v.value for v in model.trainable_variables], x), first)


def test_the_gate_lets_many_hold_and_one_swap():
    gate, order = Gate(threading.Event()), []
    holding, swapped = threading.Event(), threading.Event()

    def hold():
        with gate.held(), gate.held():
            holding.set()
            order.append("held")

    def swap():
        with gate.swapping():
            order.append("swapped")
        swapped.set()

    with gate.held():
        other = threading.Thread(target=hold)
        other.start()
        assert holding.wait(60)
        other.join()
        swapping = threading.Thread(target=swap)
        swapping.start()
        for _ in itertools.repeat(None, 100):
            with gate.held():  # this thread holds already, so it does not wait for the swap
                assert not swapped.is_set()
        order.append("released")
    assert swapped.wait(60)
    assert order == ["held", "released", "swapped"]
