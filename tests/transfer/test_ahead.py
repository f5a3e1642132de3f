"""Ranges of a remote step, fetched ahead: each byte once, in few requests, within the memory they were given."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardload.errors import DamagedError
from shardload.stores.location import Location
from shardload.transfer.planning import Block
from shardload.transfer.prefetch import MAX_RANGE_UNITS, PrefetchedReads
from shardload.transfer.scratch import BlockMemory

MIB = 1 << 20
DATA = np.random.default_rng(0).integers(0, 256, 37 * MIB + 12345, np.uint8)


class Store:
    """A store with one file, which is the file too, and counts what is asked of it."""

    is_checked, n_bytes, descriptor = True, DATA.nbytes, None

    def __init__(self, *, error=None):
        self.asked, self.cancelled, self.error = [], 0, error
        self.path = Location(self, "data")

    def open(self, key):
        return self

    def read_into(self, buffer, offset):
        raise AssertionError("ranges are requested ahead")

    read_unchecked = close = read_into

    def begin(self, unit, count):
        self.asked.append((unit, count))
        return Pending(self, unit, count)


class Pending:
    def __init__(self, store, unit, count):
        self.store, self.unit, self.count = store, unit, count

    def result(self):
        time.sleep(0.001 * (self.unit % 3))
        if self.store.error is not None and self.unit >= 8:
            raise self.store.error
        return DATA.data[self.unit * MIB : (self.unit + self.count) * MIB]

    def cancel(self):
        self.store.cancelled += 1


@pytest.fixture
def store():
    return Store()


def block(store, start, stop):
    return Block("t", store.path, start, 0, stop - start, stop - start, 0, 0, stop - start, "staged", ())


def read(reads, one, step):
    """A block as a thread reads it: one scratch fill after the other."""
    whole = np.zeros(one.read_bytes, np.uint8)
    for at in range(0, one.read_bytes, step):
        n_bytes = min(step, one.read_bytes - at)
        flat = BlockMemory(np.zeros(n_bytes, np.uint8), np.dtype(np.uint8), 0)
        reads.fill(flat, n_bytes, path=one.path, offset=one.offset + at)
        whole[at : at + n_bytes] = flat.memory
    reads.release(one)
    return whole


def blocks(store, seed, *, gaps):
    rng = np.random.default_rng(seed)
    found, at = [], int(rng.integers(0, 2 * MIB))
    while at < DATA.nbytes:
        stop = min(DATA.nbytes, at + int(rng.integers(1, rng.choice([1000, MIB, 6 * MIB]))))
        found.append(block(store, at, stop))
        at = stop + (int(rng.integers(0, 3 * MIB)) if gaps else 0)
    return found


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("seed", range(4))
def test_every_byte_arrives_and_each_mib_is_fetched_once(store, seed, threads, gaps):
    wanted, limit = blocks(store, seed, gaps=gaps), 40 * MIB
    reads = PrefetchedReads(wanted, limit_bytes=limit, threads=threads)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda one: read(reads, one, 300_000), wanted))
    for one, data in zip(wanted, found, strict=True):
        assert np.array_equal(data, DATA[one.offset : one.offset + one.read_bytes])
    units = [unit + k for unit, count in store.asked for k in range(count)]
    needed = {u for one in wanted for u in range(one.offset // MIB, (one.offset + one.read_bytes - 1) // MIB + 1)}
    assert sorted(units) == sorted(needed)
    assert reads.held_bytes == 0 and reads.peak_bytes <= limit


def test_neighbours_come_in_one_request_and_several_at_a_time(store):
    wanted = [block(store, at, min(at + 4 * MIB, DATA.nbytes)) for at in range(0, DATA.nbytes, 4 * MIB)]
    reads = PrefetchedReads(wanted, limit_bytes=64 * MIB, threads=2)
    read(reads, wanted[0], MIB)
    assert store.asked[:8] == [(unit, 4) for unit in range(0, 32, 4)] and MAX_RANGE_UNITS == 4


def test_a_gap_is_not_fetched(store):
    wanted = [block(store, 0, MIB), block(store, 20 * MIB, 21 * MIB)]
    reads = PrefetchedReads(wanted, limit_bytes=64 * MIB, threads=1)
    read(reads, wanted[0], MIB)
    assert store.asked == [(0, 1), (20, 1)]


def test_what_fails_fails_for_every_thread_and_the_rest_is_given_up(store):
    store.error = DamagedError("not what was saved")
    wanted = blocks(store, 1, gaps=False)
    reads = PrefetchedReads(wanted, limit_bytes=40 * MIB, threads=2)
    with pytest.raises(DamagedError):
        for one in wanted:
            read(reads, one, MIB)
    with pytest.raises(DamagedError):
        read(reads, next(one for one in wanted if one.offset >= 8 * MIB), MIB)
    reads.close()
    assert store.cancelled > 0
