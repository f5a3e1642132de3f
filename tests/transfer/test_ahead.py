"""Ranges of a remote file, fetched ahead: each byte once, in few requests, within the memory they were given."""

import itertools
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from shardload.errors import DamagedError
from shardload.stores.location import Location
from shardload.transfer.geometry import SKIP_BYTES
from shardload.transfer.planning import Block
from shardload.transfer.range_reads import RangeReads
from shardload.transfer.ranges import MAX_RANGE_BYTES
from shardload.transfer.scratch import BlockMemory

MIB = 1 << 20
DATA = np.random.default_rng(0).integers(0, 256, 37 * MIB + 12345, np.uint8)


class Store:
    """A store with one file, which is the file too, and counts what is asked of it."""

    n_bytes, descriptor, is_remote, pace = DATA.nbytes, None, True, None

    def __init__(self, *, error=None, is_verifying=True):
        self.asked, self.cancelled, self.error, self.is_verifying = [], 0, error, is_verifying
        self.path = Location(self, "data")

    def open(self, key):
        return self

    def read_into(self, buffer, offset):
        raise AssertionError("ranges are requested ahead")

    read_unchecked = close = read_into

    def begin(self, start, stop):
        self.asked.append((start, stop))
        return Pending(self, start, stop)


class Pending:
    def __init__(self, store, start, stop):
        self.store, self.start, self.stop = store, start, stop

    def result(self):
        time.sleep(0.001 * (self.start // MIB % 3))
        if self.store.error is not None and self.start >= 8 * MIB:
            raise self.store.error
        return DATA.data[self.start : self.stop]

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
    reads = RangeReads(wanted, limit_bytes=limit, threads=threads)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda one: read(reads, one, 300_000), wanted))
    for one, data in zip(wanted, found, strict=True):
        assert np.array_equal(data, DATA[one.offset : one.offset + one.read_bytes])
    assert all(start % MIB == stop % MIB == 0 for start, stop in store.asked)
    units = [unit for start, stop in store.asked for unit in range(start // MIB, stop // MIB)]
    needed = {u for one in wanted for u in range(one.offset // MIB, (one.offset + one.read_bytes - 1) // MIB + 1)}
    assert sorted(units) == sorted(needed)
    assert reads.held_bytes == 0 and reads.peak_bytes <= limit


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("gaps", [False, True])
def test_where_nothing_is_verified_only_needed_bytes_are_fetched(seed, threads, gaps):
    store = Store(is_verifying=False)
    wanted = blocks(store, seed, gaps=gaps)
    reads = RangeReads(wanted, limit_bytes=40 * MIB, threads=threads)
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda one: read(reads, one, 300_000), wanted))
    for one, data in zip(wanted, found, strict=True):
        assert np.array_equal(data, DATA[one.offset : one.offset + one.read_bytes])
    between = [second.offset - first.offset - first.read_bytes for first, second in itertools.pairwise(wanted)]
    needed = sum(one.read_bytes for one in wanted)
    fetched = sum(stop - start for start, stop in store.asked)
    assert needed <= fetched <= needed + sum(gap for gap in between if gap < SKIP_BYTES)
    assert reads.read_bytes(wanted) == fetched
    assert reads.held_bytes == 0 and max(stop - start for start, stop in store.asked) >= 2 * MIB


def test_blocks_share_a_range_until_too_much_would_be_read_for_nothing():
    store = Store(is_verifying=False)
    places = [(100, 200), (20_000, 20_001), (50_000, 50_001), (30 * MIB + 5, 30 * MIB + 7)]
    wanted = [block(store, *place) for place in places]
    reads = RangeReads(wanted, limit_bytes=64 * MIB, threads=1)
    for one in wanted:
        assert np.array_equal(read(reads, one, MIB), DATA[one.offset : one.offset + one.read_bytes])
    assert store.asked == [(100, 20_001), *places[2:]]  # the second gap would make it 49,800 bytes
    assert reads.held_bytes == 0


def test_neighbours_come_in_one_request_and_several_at_a_time(store):
    wanted = [block(store, at, min(at + 4 * MIB, DATA.nbytes)) for at in range(0, DATA.nbytes, 4 * MIB)]
    reads = RangeReads(wanted, limit_bytes=64 * MIB, threads=2)
    read(reads, wanted[0], MIB)
    assert store.asked[:8] == [(at * MIB, (at + 4) * MIB) for at in range(0, 32, 4)] and MAX_RANGE_BYTES == 4 * MIB


def test_a_gap_is_not_fetched(store):
    wanted = [block(store, 0, MIB), block(store, 20 * MIB, 21 * MIB)]
    reads = RangeReads(wanted, limit_bytes=64 * MIB, threads=1)
    read(reads, wanted[0], MIB)
    assert store.asked == [(0, MIB), (20 * MIB, 21 * MIB)]


def test_what_fails_fails_for_every_thread_and_the_rest_is_given_up(store):
    store.error = DamagedError("not what was saved")
    wanted = blocks(store, 1, gaps=False)
    reads = RangeReads(wanted, limit_bytes=40 * MIB, threads=2)
    with pytest.raises(DamagedError):
        for one in wanted:
            read(reads, one, MIB)
    with pytest.raises(DamagedError):
        read(reads, next(one for one in wanted if one.offset >= 8 * MIB), MIB)
    reads.cancel()
    assert store.cancelled > 0
