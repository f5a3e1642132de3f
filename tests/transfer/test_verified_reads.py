import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from step_folders import MIB, flip, save_step

from shardload.errors import DamagedError
from shardload.runs.digests import Checker
from shardload.transfer.byte_source import UnitReads
from shardload.transfer.scratch import BlockMemory

BIG = "pytree/d/big"
"""Two MiB and five bytes."""
EDGES = [0, 3, 700_001, MIB - 2, MIB + 1, 2 * MIB - 1, 2 * MIB + 5]


def block(start, stop, how="staged"):
    return SimpleNamespace(path=BIG, offset=start, read_bytes=stop - start, how=how)


BLOCKS = [block(a, b) for a, b in itertools.pairwise(EDGES)]


@pytest.fixture
def step(tmp_path):
    return save_step(tmp_path, 7)


def flat(n_bytes, *, dtype="uint8", row=0, pitch=0):
    return BlockMemory(np.zeros(n_bytes, np.uint8), np.dtype(dtype), 0, row, pitch)


def read(reads, of):
    room = flat(of.read_bytes)
    reads.fill(room, of.read_bytes, path=of.path, offset=of.offset)
    reads.release(of)
    return room.memory.tobytes()


def test_blocks_that_share_units_read_each_once(step):
    reads = UnitReads(BLOCKS, kept_units=2, verifier=Checker(step))
    content = (step / BIG).read_bytes()
    assert b"".join(read(reads, b) for b in BLOCKS) == content
    assert reads.verifier.bytes_checked == len(content) and not reads.kept


def test_with_no_room_to_keep_units_they_are_read_and_checked_again(step):
    reads = UnitReads(BLOCKS, kept_units=0, verifier=Checker(step))
    content = (step / BIG).read_bytes()
    for of in (*BLOCKS[::2], *BLOCKS[1::2]):
        assert read(reads, of) == content[of.offset :][: of.read_bytes]
    assert len(content) + MIB <= reads.verifier.bytes_checked <= len(content) + len(BLOCKS) * MIB


def test_threads_share_what_they_read(step):
    reads = UnitReads(BLOCKS * 4, kept_units=3, verifier=Checker(step))
    content, wrong, gate = (step / BIG).read_bytes(), [], threading.Barrier(4)

    def work(_):
        gate.wait()
        wrong.extend(b for b in BLOCKS if read(reads, b) != content[b.offset :][: b.read_bytes])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert not wrong and reads.verifier.bytes_checked == len(content) and not reads.kept


@pytest.mark.parametrize(("row", "pitch"), [(1000, 1016), (350_000, 350_032), (16, 24)])
@pytest.mark.parametrize("offset", [0, 5, MIB - 8, MIB - 1])
def test_rows_are_spaced_out_as_scratch_has_them(row, pitch, offset, step):
    n_bytes = min(2 * MIB + 5 - offset, MIB + 100) // 2 * 2
    room = flat((n_bytes // (2 * row) + 1) * pitch * 2, dtype="uint16", row=row, pitch=pitch)
    reads = UnitReads([block(offset, offset + n_bytes)], kept_units=1, verifier=Checker(step))
    reads.fill(room, n_bytes, path=BIG, offset=offset)
    found = b"".join(room.memory[at : at + 2 * row].tobytes() for at in range(0, room.memory.size, 2 * pitch))
    assert found[:n_bytes] == (step / BIG).read_bytes()[offset : offset + n_bytes]


@pytest.mark.parametrize("at", [0, MIB, 2 * MIB + 4])
def test_every_block_of_a_damaged_unit_fails(at, step):
    flip(step / BIG, offset=at)
    reads = UnitReads(BLOCKS, kept_units=2, verifier=Checker(step))
    hit = [b for b in BLOCKS if b.offset // MIB <= at // MIB <= (b.offset + b.read_bytes - 1) // MIB]
    assert hit
    for of in BLOCKS:
        if of in hit:
            with pytest.raises(DamagedError, match=rf"{BIG} from byte {at // MIB * MIB} "):
                reads.fill(flat(of.read_bytes), of.read_bytes, path=BIG, offset=of.offset)
        else:
            reads.fill(flat(of.read_bytes), of.read_bytes, path=BIG, offset=of.offset)


def test_a_block_beyond_the_file_is_damage(step):
    size = (step / BIG).stat().st_size
    reads = UnitReads([beyond := block(size - 1, size + 9)], kept_units=1, verifier=Checker(step))
    with pytest.raises(DamagedError, match="should have at least"):
        reads.fill(flat(10), 10, path=BIG, offset=beyond.offset)
