"""Memory for shards: aligned, and in huge pages from their first byte on."""

import numpy as np
import pytest

from shardload.transfer.host_memory import (
    ALIGNMENT_BYTES,
    HUGE_PAGE_BYTES,
    MAPPED_BYTES,
    UsedMemory,
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


def test_used_memory_is_given_out_once_where_it_fits_and_the_oldest_is_dropped_first():
    used = UsedMemory()
    buffers = {n: memory(n) for n in (1000, 1200, 2000)}
    for buffer in buffers.values():
        used.put(buffer)
    assert used.take(1300) is None  # 2000 bytes would be half unused, and 1200 are too few
    assert used.take(990) is buffers[1000]
    assert used.take(990) is buffers[1200]
    assert used.take(990) is None
    used.put(buffers[1000])
    assert [used.drop(), used.drop(), used.drop()] == [2000, 1000, 0]
