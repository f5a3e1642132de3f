import os
import re
import shutil
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import keras
import pytest
import warm_start
from callback_models import Batches, X, assert_holds, compiled, fit, steps_in

from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import SaveError
from shardload.loaders.orbax import saving as orbax_writer
from shardload.loaders.orbax.saving import save_error
from shardload.runs import publish, writer
from shardload.runs.digests import find_damage
from shardload.runs.listing import list_steps

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def broken(monkeypatch, *, at=1):
    """From the save ``at`` on, Orbax fails in the background; returns an event set once it has."""
    real, calls, failed = orbax_writer.PendingSave.result, [], threading.Event()

    def result(self, timeout_s=None):
        calls.append(self)
        real(self, timeout_s)
        if len(calls) >= at:
            failed.set()
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(orbax_writer.PendingSave, "result", result)
    return failed


def settle():
    """Wait until the save in flight has ended, successfully or not."""
    for thread in threading.enumerate():
        if thread.name.startswith("shardload-step"):
            thread.join()


def test_a_background_failure_is_raised_at_the_next_batch(tmp_path, monkeypatch):
    broken(monkeypatch, at=2)
    callback = OrbaxCheckpoint(tmp_path, save_freq=2, max_to_keep=None)
    batches = Batches({4: settle})
    with pytest.raises(SaveError, match=r"Cannot save step 4 .*No space left on device") as caught:
        fit(compiled(), callback, batches, epochs=5)
    assert batches.done == 4 and caught.value.errno == 28
    assert steps_in(tmp_path) == [2] and list((tmp_path / ".staging").glob("*")) == []


def test_a_failure_of_the_last_save_ends_fit(tmp_path, monkeypatch):
    broken(monkeypatch)
    with pytest.raises(SaveError, match="Cannot save step 4"):
        fit(compiled(), OrbaxCheckpoint(tmp_path))
    assert steps_in(tmp_path) == []


def test_a_failure_in_the_foreground_as_well(tmp_path, monkeypatch):
    broken(monkeypatch)
    batches = Batches()
    with pytest.raises(SaveError, match="Cannot save step 1"):
        fit(compiled(), OrbaxCheckpoint(tmp_path, save_freq=1, save_on_background=False), batches)
    assert batches.done == 0


def test_training_goes_on_after_a_failure_was_seen(tmp_path, monkeypatch):
    callback, model = OrbaxCheckpoint(tmp_path), compiled()
    with monkeypatch.context() as patch:
        broken(patch)
        with pytest.raises(SaveError):
            fit(model, callback)
    fit(model, callback)
    assert steps_in(tmp_path) == [8]
    assert_holds(tmp_path / "8", model)


def test_waiting_tells_of_a_failure_once(tmp_path, monkeypatch):
    broken(monkeypatch)
    callback = OrbaxCheckpoint(tmp_path)
    with pytest.raises(SaveError):
        fit(compiled(), callback)
    callback.wait_until_finished()


def test_what_follows_a_save_may_fail_too(tmp_path):
    upload = Mock(side_effect=ConnectionError("no route"))
    with pytest.raises(SaveError, match=r"Step 4 is saved in .*ConnectionError: no route"):
        fit(compiled(), OrbaxCheckpoint(tmp_path, post_finalization=upload))
    assert find_damage(tmp_path / "4") == []


def test_a_save_that_takes_too_long_is_given_up(tmp_path, monkeypatch):
    def never(self, timeout_s=None):
        time.sleep(timeout_s)
        raise TimeoutError(f"after {timeout_s} s")

    monkeypatch.setattr(orbax_writer.PendingSave, "result", never)
    with pytest.raises(SaveError, match=r"Step 4 was not written within 1 s \(async_timeout_s\)"):
        fit(compiled(), OrbaxCheckpoint(tmp_path, async_timeout_s=1))
    assert steps_in(tmp_path) == []


@pytest.mark.slow
def test_one_save_in_flight(tmp_path, monkeypatch):
    real, running, most = orbax_writer.PendingSave.result, set(), []

    def slow(self, timeout_s=None):
        running.add(self)
        most.append(len(running))
        time.sleep(0.1)
        real(self, timeout_s)  # raises where the save takes longer, and is called again
        running.remove(self)

    monkeypatch.setattr(orbax_writer.PendingSave, "result", slow)
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_freq=1, max_to_keep=None))
    assert set(most) == {1} and len(most) >= 4 and steps_in(tmp_path) == [1, 2, 3, 4]


def test_training_goes_on_while_a_step_is_written(tmp_path, monkeypatch):
    real, go = orbax_writer.PendingSave.result, threading.Event()
    monkeypatch.setattr(
        orbax_writer.PendingSave, "result", lambda self, timeout_s=None: (go.wait(60), real(self, timeout_s))
    )
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_freq=2, max_to_keep=None), Batches({3: go.set}))
    assert go.is_set() and steps_in(tmp_path) == [2, 4]


@pytest.mark.parametrize("replaced", [False, True])
def test_a_root_that_went_away_is_noticed(tmp_path, replaced):
    root = tmp_path / "root"
    callback = OrbaxCheckpoint(root, save_freq=1)

    def remove():
        callback.wait_until_finished()
        shutil.rmtree(root)
        if replaced:
            root.mkdir()

    with pytest.raises(SaveError, match="has replaced" if replaced else "removed"):
        fit(compiled(), callback, Batches({2: remove}))
    assert root.exists() == replaced and not list(root.glob("[0-9]*"))


@pytest.mark.slow
def test_an_exception_in_fit_does_not_cost_the_pending_step(tmp_path):
    callback, model = OrbaxCheckpoint(tmp_path, save_freq=2, max_to_keep=None), compiled()
    with pytest.raises(RuntimeError, match="out of luck"):
        fit(model, callback, Batches({2: Mock(side_effect=RuntimeError("out of luck"))}))
    callback.wait_until_finished()
    assert_holds(tmp_path / "2", model)
    fit(model, callback)
    assert steps_in(tmp_path) == [2, 4, 6]


def test_a_failure_nobody_waited_for_is_raised_by_the_next_fit(tmp_path, monkeypatch):
    callback, model = OrbaxCheckpoint(tmp_path, save_freq=2), compiled()
    with monkeypatch.context() as patch:
        broken(patch)
        with pytest.raises(KeyboardInterrupt):
            fit(model, callback, Batches({2: Mock(side_effect=KeyboardInterrupt)}))
        settle()
    with pytest.raises(SaveError, match="Cannot save step 2"):
        fit(model, callback)


@pytest.mark.parametrize("seen_before", [False, True])
def test_a_ctrl_c_that_was_dropped_ends_fit_after_the_batch(tmp_path, seen_before):
    """As Python drops it in a finaliser, where training would go on."""

    class Dropping(keras.callbacks.Callback):
        batches = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.batches += 1
            if batch == 1:
                with suppress(KeyboardInterrupt):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(1)

    dropping = Dropping()
    if seen_before:  # by a `fit` that failed, of another callback
        with pytest.raises(ZeroDivisionError):
            fit(compiled(), OrbaxCheckpoint(tmp_path / "other"), Batches({1: lambda: 1 / 0}))
    callback = OrbaxCheckpoint(tmp_path / "run", save_freq=1)
    with pytest.raises(KeyboardInterrupt):
        compiled().fit(X, X, batch_size=4, verbose=0, callbacks=[callback, dropping])
    assert dropping.batches == 2
    callback.wait_until_finished()
    assert steps_in(tmp_path / "run") == [1]
    with pytest.raises(KeyboardInterrupt):  # outside of fit, and no more than once
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("at", ["held", "copied"])
def test_an_interrupt_while_arrays_are_held_or_copied_leaves_nothing(tmp_path, monkeypatch, at):
    interrupted, callback = Mock(side_effect=KeyboardInterrupt), OrbaxCheckpoint(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(writer, "snapshot", interrupted if at == "held" else lambda items: None)
        patch.setattr(orbax_writer, "start_save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            fit(compiled(), callback)
    assert steps_in(tmp_path) == [] and list((tmp_path / ".staging").glob("*")) == []


CHILD = """
import conftest, os, signal
from callback_models import *
from shardload.callbacks import OrbaxCheckpoint
from shardload.runs import best
def fail(): raise RuntimeError("on purpose")
def interrupt(): os.kill(os.getpid(), signal.SIGINT)
fit(compiled(), OrbaxCheckpoint({root!r}, save_freq=1, max_to_keep=3), Batches({at}), epochs={epochs})
"""


def child(root, *, at="{}", epochs=1):
    return warm_start.start(["-c", CHILD.format(root=str(root), at=at, epochs=epochs)])


@pytest.mark.slow
def test_kill_leaves_only_whole_steps(tmp_path):
    run = child(tmp_path, epochs=100_000)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("[0-9]*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.005)
    time.sleep(0.013)
    run.send_signal(signal.SIGKILL)
    run.communicate()
    steps = list_steps(tmp_path)
    assert steps and [find_damage(info.path) for info in steps] == [[]] * len(steps)
    newest = steps[-1].step
    fit(compiled(), OrbaxCheckpoint(tmp_path, max_to_keep=None))
    assert steps_in(tmp_path)[-1] == newest + 4 and list((tmp_path / ".staging").glob("*")) == []


@pytest.mark.slow
@pytest.mark.parametrize(("how", "told"), [("fail", "RuntimeError: on purpose"), ("interrupt", "KeyboardInterrupt")])
def test_a_script_that_ends_in_an_exception_ends_cleanly(tmp_path, how, told):
    run = child(tmp_path, at=f"{{3: {how}}}")
    _, stderr = run.communicate(timeout=60)
    assert run.returncode != 0 and re.search(told, stderr), stderr
    assert [find_damage(tmp_path / str(n)) for n in steps_in(tmp_path)] == [[]] * len(steps_in(tmp_path))
    assert steps_in(tmp_path) == [1, 2, 3] and list((tmp_path / ".staging").glob("*")) == []


# ---- removing in the background --------------------------------------------------------------------


@pytest.mark.slow
def test_saves_do_not_wait_for_steps_to_be_removed_but_fit_does(tmp_path, monkeypatch):
    real, go, seen = publish.remove_step, threading.Event(), []

    def slow(root, step):
        seen.append(steps_in(tmp_path))
        assert go.wait(60)
        real(root, step)

    monkeypatch.setattr(publish, "remove_step", slow)
    callback = OrbaxCheckpoint(tmp_path, save_freq=1, background_delete=True)
    fit(compiled(), callback, Batches({3: lambda: (settle(), go.set())}))
    assert seen[0] == [1, 2] and steps_in(tmp_path) == [4]


def test_a_failure_to_remove_in_the_background_is_raised(tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "remove_step", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(SaveError, match=r"Step \d is saved in .*Permission denied"):
        fit(compiled(), OrbaxCheckpoint(tmp_path, save_freq=2, background_delete=True))
    assert steps_in(tmp_path) == [2, 4]


def test_what_orbax_says_ends_in_one_full_stop():
    said = str(save_error(ValueError("Found empty item."), step=3, folder=Path("/nowhere/else/step")))
    assert "Found empty item)" in said and ".." not in said
