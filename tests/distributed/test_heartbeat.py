"""Who is taken for lost, and who is not; the key-value store is a dict."""

import queue
import sys
import threading
import time

import pytest

from shardload.errors import ProcessLostError
from shardload.processes.heartbeats import Heartbeat

pytestmark = pytest.mark.slow


class Store:
    def __init__(self):
        self.keys = {}
        self.gone = False

    def key_value_set(self, key, value, allow_overwrite=False):
        if self.gone:
            raise RuntimeError("UNAVAILABLE: connection refused")
        self.keys[key] = value

    def key_value_dir_get(self, prefix):
        return [(k, v) for k, v in self.keys.items() if k.startswith(prefix)]

    def key_value_try_get(self, key):
        return self.keys[key]


@pytest.fixture
def at_exit(monkeypatch):
    """What would be done when the interpreter ends; at the latest, it is done after the test."""
    found = []
    monkeypatch.setattr("shardload.processes.heartbeats.atexit.register", found.append)
    monkeypatch.setattr("shardload.processes.heartbeats.LINGER_S", 0.2)  # the others are this process, and do not end
    monkeypatch.setattr("shardload.processes.heartbeats.SETTLE_S", 0.0)
    yield found
    for leave in found:
        leave()


@pytest.fixture
def store(at_exit):
    return Store()


def beating(store, index=0):
    beat = Heartbeat(store, index=index, beat_s=0.02, silent_s=1.5)
    beat.start()
    return beat


def lost(beat, within_s=15.0):
    until = time.monotonic() + within_s
    while beat.lost is None and time.monotonic() < until:
        time.sleep(0.01)
    return beat.lost


def test_a_process_that_goes_silent_is_lost_and_all_are_told(store):
    store.keys["shardload/alive/1"] = "7 host-b pid 9"
    told = queue.Queue()
    first, third = beating(store), beating(store, index=2)
    first.when_lost(told.put)
    assert "Process 1 (host-b pid 9) has sent no heartbeat" in lost(first)
    assert told.get(timeout=5) == first.lost and lost(third) == first.lost
    with pytest.raises(ProcessLostError, match="Process 1"):
        third.check()


def test_processes_that_speak_or_have_not_begun_or_have_left_are_not_lost(store):
    store.keys["shardload/alive/3"] = "left host-d pid 11"
    first, second = beating(store), beating(store, index=1)
    assert lost(first, within_s=2.5) is None and lost(second, within_s=0.0) is None
    first.check(2)
    with pytest.raises(ProcessLostError, match="Process 3 has ended while others waited"):
        first.check(3)


def test_a_store_that_is_gone_is_process_0_lost(store):
    second = beating(store, index=1)
    store.gone = True
    assert "Process 0" in lost(second)


def test_who_asks_late_is_told_at_once(store):
    store.keys["shardload/alive/1"] = "7 host-b pid 9"
    first = beating(store)
    assert lost(first)
    told = threading.Event()
    first.when_lost(lambda _: told.set())
    assert told.is_set()


def test_no_thread_is_in_the_service_when_the_interpreter_ends(store, at_exit, monkeypatch):
    inside, answer = threading.Event(), threading.Event()

    def slow(prefix):
        inside.set()
        answer.wait(5)
        return []

    monkeypatch.setattr(store, "key_value_dir_get", slow)
    monkeypatch.setattr("shardload.processes.heartbeats.FIRST_S", 0.0)
    before = set(threading.enumerate())
    beating(store)
    (speaker,) = (t for t in set(threading.enumerate()) - before if t.name == "shardload-heartbeat")
    assert inside.wait(5)
    threading.Timer(0.2, answer.set).start()
    (leave,) = at_exit
    leave()
    assert not speaker.is_alive()
    assert store.keys["shardload/alive/0"].startswith("left")


@pytest.fixture
def failing(monkeypatch):
    """As after an uncaught error: Python has printed it, and runs what is to be done at exit."""
    monkeypatch.setattr(sys, "last_value", RuntimeError("Gloo all-reduce failed"), raising=False)


def leaving(leave):
    thread = threading.Thread(target=leave)
    thread.start()
    return thread


def test_a_process_that_fails_waits_until_it_is_known_whether_another_was_lost(store, at_exit, failing):
    store.keys["shardload/alive/1"] = "7 host-b pid 9"
    let_go = queue.Queue()
    for index in (0, 2):
        Heartbeat(store, index=index, beat_s=0.02, silent_s=1.5, let_go=lambda i=index: let_go.put(i)).start()
    for thread in [leaving(leave) for leave in at_exit]:
        thread.join(10)
        assert not thread.is_alive()
    assert "Process 1 (host-b pid 9)" in store.keys["shardload/lost"]
    assert {let_go.get(timeout=1), let_go.get(timeout=1)} == {0, 2}
    at_exit.clear()


def test_processes_that_all_fail_do_not_wait_for_long(store, at_exit, failing):
    beats = [Heartbeat(store, index=i, beat_s=0.02, silent_s=60.0) for i in (0, 1, 2)]
    for beat in beats:
        beat.start()
    assert lost(beats[0], within_s=0.2) is None
    first, *others = at_exit
    threads = [leaving(leave) for leave in others]
    time.sleep(0.5)
    assert all(thread.is_alive() for thread in threads)  # process 0 may still find that one was lost
    with pytest.raises(ProcessLostError, match="Process 1 has ended while others waited"):
        beats[0].check(1)
    for thread in [leaving(first), *threads]:
        thread.join(10)
        assert not thread.is_alive()
    at_exit.clear()
