"""Memory for shards: aligned, and in huge pages from their first byte on."""

import os
from pathlib import Path

import numpy as np
import pytest

from shardload.transfer.host_memory import (
    ALIGNMENT_BYTES,
    HUGE_PAGE_BYTES,
    MAPPED_BYTES,
    UploadMemory,
    arena,
    memory,
    stacked_arrays,
)


@pytest.mark.parametrize("n_bytes", [1, 1000, MAPPED_BYTES, HUGE_PAGE_BYTES - 1])
def test_memory_is_as_long_as_asked_for_and_aligned(n_bytes):
    found = memory(n_bytes)
    assert found.nbytes == n_bytes and found.ctypes.data % ALIGNMENT_BYTES == 0


@pytest.mark.parametrize("n_bytes", [HUGE_PAGE_BYTES, HUGE_PAGE_BYTES + 5, 5 * HUGE_PAGE_BYTES - 1])
def test_large_memory_starts_on_a_huge_page(n_bytes):
    """The kernel only places multiples of a huge page so; elsewhere, half of a 5 MB tensor lies in small pages."""
    others = [memory(n_bytes) for _ in range(3)]
    assert all(m.nbytes == n_bytes and m.ctypes.data % HUGE_PAGE_BYTES == 0 for m in others)
    others[0][:] = 1
    assert not others[1].any() and not others[2].any()


def test_an_arena_holds_all_shards_apart():
    shards = arena([(3, 700_000), (2, 5), (1, 700_000)], np.dtype(np.float32))
    for k, shard in enumerate(shards):
        shard[...] = k
    assert [set(shard.ravel().tolist()) for shard in shards] == [{0.0}, {1.0}, {2.0}]


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5), np.float32), ((7,), np.int8), ((300, 2000), np.uint16), ((1, 16), np.float64)]
)
def test_a_stack_holds_arrays_of_one_shape_apart_and_aligned(shape, dtype):
    whole = stacked_arrays(4, shape, np.dtype(dtype))
    for k, one in enumerate(whole):
        assert one.shape == shape and one.flags.c_contiguous and one.ctypes.data % ALIGNMENT_BYTES == 0
        one[...] = k
    assert [set(one.ravel().tolist()) for one in whole] == [{0}, {1}, {2}, {3}]


def test_memory_for_uploads_is_used_again_without_overlaps_and_never_exceeds_what_was_taken():
    """Against a model: random takes and returns, where each buffer keeps its own bytes."""
    rng = np.random.default_rng(0)
    most = 64 * HUGE_PAGE_BYTES // 16
    uploads, held, apart = UploadMemory(most, misaligned=8), [], 0
    for k in range(600):
        n_bytes = int(rng.integers(1, most // 5))
        if sum(buffer.n_bytes for buffer, _ in held) + n_bytes + ALIGNMENT_BYTES <= most:
            buffer = uploads.take(n_bytes) or uploads.take_apart(n_bytes)
            assert buffer.memory.nbytes == n_bytes and buffer.memory.ctypes.data % ALIGNMENT_BYTES == 8
            buffer.memory[:] = k % 256
            held.append((buffer, k % 256))
            apart += buffer.start is None
        elif held:
            buffer, value = held.pop(int(rng.integers(len(held))))
            assert (buffer.memory == value).all()
            uploads.give_back(buffer)
    assert 0 < apart < 200
    for buffer, value in held:
        assert (buffer.memory == value).all()
        uploads.give_back(buffer)
    whole = uploads.take(most)
    assert whole.start == 0


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_gaps_in_the_memory_for_uploads_take_no_room_beside_a_mapping_of_its_own():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    part = 16 * HUGE_PAGE_BYTES
    uploads = UploadMemory(4 * part)
    first, second, third, fourth = (uploads.take(part) for _ in range(4))
    for buffer in (first, second, third, fourth):
        buffer.memory[:] = 1
    full = resident()
    uploads.give_back(first)
    uploads.give_back(third)  # two gaps, each too short for the next
    assert uploads.take(2 * part) is None
    wide = uploads.take_apart(2 * part)
    wide.memory[:] = 1
    assert wide.start is None and resident() < full + HUGE_PAGE_BYTES
    uploads.give_back(second)  # while the other mapping lasts
    assert resident() < full - part + HUGE_PAGE_BYTES
    assert (fourth.memory == 1).all()
