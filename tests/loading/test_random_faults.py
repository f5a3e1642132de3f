"""A store that fails at random: loads are bit-exact, or raise one of our errors with the cause, soon.

`make faults` runs a thousand of them.
"""

import gc
import threading

import h5py
import keras
import pytest
from fault_runs import CASES, Faulty
from object_server import served

import shardload
from shardload.errors import TransferError
from shardload.stores import remote
from shardload.stores.event_loop import Fetch, collector_off
from shardload.verifying import verify

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def faulty():
    with Faulty() as found:
        yield found


@pytest.mark.parametrize("first", range(0, len(CASES), 10))
def test_every_load_is_exact_or_says_what_failed(faulty, first):
    found = [faulty.run(seed) for seed in range(first, min(first + 10, len(CASES)))]
    assert [(one.seed, one.title, one.faults, one.said, one.wrong) for one in found if one.wrong] == []


class Owner:
    """An object in a cycle with one of h5py's: the garbage collector frees it, in any thread."""

    def __init__(self):
        self.owner, self.space = self, h5py.h5s.create_simple((1,))


def test_the_garbage_collector_does_not_free_what_hdf5_waits_for(tmp_path, monkeypatch):
    """h5py holds a lock while it reads; freeing its objects in the thread that answers the read would wait for it."""
    model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(512)])
    model.save_weights(tmp_path / "x.weights.h5")
    send = remote.Requests.begin

    def begin(self, *given):
        Owner()

        async def allocate():
            return [[] for _ in range(20_000)]  # more than the collector waits for

        Fetch(allocate(), shown="")
        return send(self, *given)

    monkeypatch.setattr(remote.Requests, "begin", begin)
    found = []
    with served(tmp_path, monkeypatch) as server:
        thread = threading.Thread(
            target=lambda: found.append(shardload.inspect(f"{server.s3}/x.weights.h5")), daemon=True
        )
        thread.start()
        thread.join(60)
    assert found and found[0].tensors


def test_the_collector_runs_again_after_the_last_of_nested_pauses():
    with collector_off():
        with collector_off():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


@pytest.mark.parametrize("kind", ["keras archive", "orbax without ocdbt"])
def test_a_store_that_does_not_answer_is_not_a_damaged_checkpoint(faulty, tmp_path, monkeypatch, kind):
    """zipfile takes an OSError for a bad archive, and so did we of files of zarr."""
    name = {"keras archive": "keras_archive", "orbax without ocdbt": "orbax_without_ocdbt"}[kind]
    with served(faulty.folder / "good", monkeypatch) as server:
        monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "0.5")

        def fails(handler, key):
            # Not the first page, by which a file is recognised.
            if not key.endswith(".zarray") and "bytes=0-" in handler.headers.get("Range", "bytes=0-"):
                return False
            handler.refuse(503, "SlowDown", {})
            return True

        server.fault = fails
        with pytest.raises(TransferError, match="503 Service Unavailable"):
            verify(f"{server.s3}/{faulty.places[name]}")
