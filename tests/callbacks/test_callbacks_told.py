"""What is said, and what is not, when saving goes wrong: one paragraph that names the step and the way out."""

import logging
import os
import re
import signal
import socket
import sys
import threading
import warnings
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from callback_models import assert_holds, compiled, fit, steps_in

from shardload import interrupts
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import SaveError, SourceError, StepExistsError
from shardload.interrupts import Worker, defer_interrupt, raise_interrupt_safely, signal_of
from shardload.loaders.orbax import saving
from shardload.loaders.orbax import saving as orbax_writer
from shardload.processes import watchdog
from shardload.runs import best, writer

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")


def after_writing(monkeypatch, do):
    """``do`` is called with the step's staging folder once Orbax has written everything."""
    real = orbax_writer.PendingSave.result

    def result(self, timeout_s=None):
        real(self, timeout_s)
        do(self.path)

    monkeypatch.setattr(orbax_writer.PendingSave, "result", result)


@pytest.mark.slow
def test_two_callbacks_of_one_folder_are_told_the_way_out(tmp_path):
    said = r"Cannot save step 4: .* exists.*Two callbacks.*give one of them all rules"
    with pytest.raises(StepExistsError, match=said):
        fit(compiled(), OrbaxCheckpoint(tmp_path), OrbaxCheckpoint(tmp_path, "loss", save_best_only=True))
    assert steps_in(tmp_path) == [4]


# ---- files that go away before their digests are made --------------------------------------------


@pytest.mark.parametrize(
    "names", ["pytree/_METADATA", "pytree/manifest.ocdbt", "pytree/d/*", "averages/d/*", "averages/ocdbt.process_0/d/*"]
)
def test_a_file_that_is_removed_before_the_digests_are_made_is_missed(tmp_path, monkeypatch, names):
    after_writing(monkeypatch, lambda step: max(step.glob(names), key=lambda file: file.stat().st_size).unlink())
    averages = {"averages": {"w": np.arange(4096.0)}}  # long enough for a file of its own
    with pytest.raises(SaveError, match=r"Cannot save step 4 .*incomplete: .*Something removed it"):
        fit(compiled(), OrbaxCheckpoint(tmp_path, checkpointables=averages))
    assert steps_in(tmp_path) == []


# ---- older steps ---------------------------------------------------------------------------------


def test_an_older_step_that_cannot_be_looked_into_is_named_with_the_way_out(tmp_path, monkeypatch):
    text = f"Cannot read {tmp_path}/1, which may be a step: Permission denied. Grant this user read access"
    monkeypatch.setattr(best, "steps_of_run", Mock(side_effect=SourceError(text)))
    with pytest.raises(SaveError) as caught:
        fit(compiled(), OrbaxCheckpoint(tmp_path))
    told = str(caught.value)
    assert told.startswith(f"Step 4 is saved in {tmp_path}/4, but a task after the save failed: the steps")
    for said in ("beyond max_to_keep=1 could not be removed", "/1, which may be a step", "Grant this user read access"):
        assert said in told
    assert steps_in(tmp_path) == [4]


# ---- what Orbax and TensorStore print ------------------------------------------------------------


def test_a_failed_save_prints_no_traceback_of_orbax(tmp_path, monkeypatch, capfd):
    real = orbax_writer.start_save

    def start(path, *args, **named):
        pending = real(path, *args, **named)
        path.parent.rename(tmp_path / "away")
        return pending

    monkeypatch.setattr(orbax_writer, "start_save", start)
    with pytest.raises(SaveError, match=r"Cannot save step 4 .*was removed"):
        fit(compiled(), OrbaxCheckpoint(tmp_path))
    told = capfd.readouterr()
    assert "Traceback" not in told.err + told.out


@pytest.fixture
def long_ago(monkeypatch):
    """No save by shardload runs, and none failed recently."""
    monkeypatch.setattr(saving, "STRAGGLERS_S", 0.0)


def record(path, level=logging.ERROR):
    return logging.LogRecord("absl", level, path, 1, "_SignalingThread.run() raised an exception", (), None)


def test_orbax_is_silent_about_our_saves_only(long_ago, monkeypatch):
    of_orbax, of_others = record("/lib/orbax/checkpoint/future.py"), record("/lib/other/thing.py")
    assert saving.is_worth_logging(of_orbax) and saving.is_worth_logging(of_others)
    saving.save_began()
    assert not saving.is_worth_logging(of_orbax) and saving.is_worth_logging(of_others)
    assert saving.is_worth_logging(record("/lib/orbax/checkpoint/future.py", logging.WARNING))
    saving.save_ended(failed=False)
    assert saving.is_worth_logging(of_orbax)
    saving.save_began()
    saving.save_ended(failed=True)
    monkeypatch.setattr(saving, "STRAGGLERS_S", 60.0)
    assert not saving.is_worth_logging(of_orbax)


def test_only_a_write_of_tensorstore_that_comes_late_is_silent():
    import asyncio

    loop = asyncio.new_event_loop()
    loop.close()
    with pytest.raises(RuntimeError) as caught:
        loop.call_soon_threadsafe(print)
    here = caught.value.__traceback__
    assert not saving.is_late_write(caught.value, here)  # somebody's own call
    assert saving.is_late_write(caught.value, here.tb_next)  # called from no Python
    assert not saving.is_late_write(RuntimeError("other"), here.tb_next)


def async_serialize_from_host():
    async def write_fragment():
        pass

    return write_fragment()


async def of_somebody_else():
    pass


def test_what_orbax_left_behind_is_collected_silently_once_a_save_failed(long_ago):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        async_serialize_from_host()
        assert len(told) == 1 and "never awaited" in str(told[0].message)
        saving.save_began()
        saving.save_ended(failed=True)
        async_serialize_from_host()
        assert len(told) == 1
        of_somebody_else()
        assert len(told) == 2


# ---- Ctrl-C --------------------------------------------------------------------------------------


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_while_a_step_is_handed_over_does_not_cost_it(tmp_path, monkeypatch):
    real, model, callback = writer.snapshot, compiled(), OrbaxCheckpoint(tmp_path, save_freq=2, max_to_keep=None)

    def hold(items):
        interrupt()
        return real(items)

    monkeypatch.setattr(writer, "snapshot", hold)
    with pytest.raises(KeyboardInterrupt):
        fit(model, callback)
    callback.wait_until_finished()
    assert steps_in(tmp_path) == [2] and list((tmp_path / ".staging").glob("*")) == []
    assert_holds(tmp_path / "2", model)


def test_the_first_ctrl_c_is_deferred_and_the_second_is_not():
    done, before = [], signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), defer_interrupt():
        interrupt()
        done.append(1)
    with pytest.raises(KeyboardInterrupt), defer_interrupt():
        interrupt()
        interrupt()
        done.append(2)
    assert done == [1] and signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_each_signal_that_the_command_handles_is_deferred(number):
    done = []
    with pytest.raises(KeyboardInterrupt) as caught, raise_interrupt_safely(), defer_interrupt():
        os.kill(os.getpid(), number)
        done.append(1)
    assert done == [1] and signal_of(caught.value) == number


def test_a_wait_that_ctrl_c_ended_can_be_taken_up_again():
    waiting, go, done = threading.Event(), threading.Event(), []

    def work():
        assert waiting.wait(30)
        interrupt()
        assert go.wait(30)
        done.append(1)

    worker = Worker(work, name="test")
    with pytest.raises(KeyboardInterrupt):
        waiting.set()
        worker.wait()
    assert done == []
    threading.Timer(0.2, go.set).start()
    worker.wait()  # Thread.join would return at once
    assert done == [1]


def test_a_wait_looks_for_ctrl_c_now_and_then(monkeypatch):
    """One that came right before the wait would otherwise be seen when the wait ends."""
    go, asked = threading.Event(), []

    class Event(threading.Event):
        def wait(self, timeout=None):
            asked.append(timeout)
            if len(asked) > 1:
                go.set()
            return super().wait(0.05)

    monkeypatch.setattr(interrupts, "threading", SimpleNamespace(Event=Event, Thread=threading.Thread))
    worker = Worker(go.wait, name="test")
    worker.wait()
    assert len(asked) > 1 and None not in asked


def test_nothing_is_deferred_in_another_thread_or_where_ctrl_c_does_nothing():
    seen = []

    def look():
        with defer_interrupt():
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        look()
    finally:
        signal.signal(signal.SIGINT, before)
    assert seen == [before, signal.SIG_IGN]


# ---- last words ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("same", "why"), [(False, "most likely killed"), (True, "after the failure recorded above")])
def test_an_end_is_a_consequence_of_failures_of_the_same_run_only(tmp_path, monkeypatch, capsys, same, why):
    watchdog.write_down(str(tmp_path), {"process": 1, "cause": "Process 1 was killed in the run before"})

    def lines():
        if same:
            watchdog.write_down(str(tmp_path), {"process": 1, "cause": "Process 1 was killed"})
        yield "training\n"

    monkeypatch.setattr(sys, "stdin", lines())
    watchdog.watch(str(tmp_path), 0, 9, "host")
    assert why in watchdog.written_since(str(tmp_path), 0)[-1]["cause"]
    assert ("The cause: Process 1 was killed. Earlier" in capsys.readouterr().err) == same


@pytest.mark.parametrize("greeting", [b"", b"\0\0\x18\x04"])
def test_a_coordinator_that_the_kernel_still_connects_to_has_ended_unless_it_answers(monkeypatch, capsys, greeting):
    def serve():
        connection, _ = listening.accept()
        connection.sendall(greeting)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=serve)
        thread.start()
        monkeypatch.setattr(sys, "stdin", ["training\n"])
        watchdog.watch("", 1, 9, "host", f"127.0.0.1:{listening.getsockname()[1]}")
        thread.join()
    said = capsys.readouterr().err
    assert ("process 0 has ended, and JAX" in said) == (not greeting)
    assert ("most likely it was killed" in said) == bool(greeting)


def test_a_complete_step_is_said_and_logged(tmp_path, caplog, capsys):
    with caplog.at_level("INFO", logger="shardload"):
        fit(compiled(), OrbaxCheckpoint(tmp_path, verbose=1))
    line = rf"Step \d+ is complete: [\d.]+ \w+ in \d+\.\d s, {tmp_path}/\d+"
    assert any(re.fullmatch(line, record.getMessage()) for record in caplog.records)
    assert re.search(line, capsys.readouterr().out)
