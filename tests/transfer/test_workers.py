"""Worker threads that wake their caller seldom: `shardload.transfer.workers`."""

import gc
import threading
from unittest.mock import Mock

import pytest

from shardload.transfer.workers import WorkerThreads


@pytest.fixture
def workers():
    made = WorkerThreads(2)
    yield made
    made.close()


def test_the_caller_sleeps_until_enough_have_ended(workers):
    gates = [threading.Event() for _ in range(4)]
    for job, gate in enumerate(gates):
        workers.submit(job, lambda job=job, gate=gate: gate.wait(30) and 10 * job)
    assert workers.in_flight == 4
    gates[0].set()
    threading.Timer(0.1, gates[1].set).start()
    found = workers.collect(at_least=2)
    assert sorted((ended.job, ended.result) for ended in found) == [(0, 0), (1, 10)] and workers.in_flight == 2
    gates[2].set()
    gates[3].set()
    found = workers.collect(at_least=99)
    assert sorted(ended.job for ended in found) == [2, 3] and workers.in_flight == 0


@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt(), MemoryError()])
def test_what_fails_wakes_the_caller_at_once(workers, error):
    gate = threading.Event()

    workers.submit("slow", lambda: gate.wait(30))
    workers.submit("bad", Mock(side_effect=error))
    found = workers.collect(at_least=2)
    assert [(ended.job, ended.error) for ended in found] == [("bad", error)] and workers.in_flight == 1
    gate.set()


def test_closing_drops_what_has_not_begun():
    before = set(threading.enumerate())
    workers, gate, done = WorkerThreads(1), threading.Event(), []
    begun = threading.Event()
    workers.submit(0, lambda: (begun.set(), gate.wait(30)))
    for job in range(1, 4):
        workers.submit(job, lambda job=job: done.append(job))
    assert begun.wait(30)
    threading.Timer(0.1, gate.set).start()
    workers.close()
    assert done == [] and not any(t.name.startswith("shardload") for t in set(threading.enumerate()) - before)


def test_all_threads_stand_by_before_there_is_work():
    before = set(threading.enumerate())
    workers = WorkerThreads(3)
    try:
        assert sum(t.name.startswith("shardload") for t in set(threading.enumerate()) - before) == 3
    finally:
        workers.close()


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_thread_that_cannot_be_started_leaves_none_waiting(monkeypatch, error):
    real, started = threading.Thread.start, []

    def start(thread):
        if thread.name.startswith("shardload"):
            started.append(thread)
            if len(started) == 2:
                raise error
        real(thread)

    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(type(error)):
        WorkerThreads(3)
    started[0].join(30)
    assert not started[0].is_alive()


def test_a_crew_that_is_forgotten_dismisses_its_threads():
    before = set(threading.enumerate())
    workers = WorkerThreads(3)
    threads = set(threading.enumerate()) - before
    assert threads
    del workers
    gc.collect()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
