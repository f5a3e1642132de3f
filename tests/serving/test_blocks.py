"""Blocks of remote files: one fetch for all who wait, and bounded memory."""

import asyncio
from dataclasses import dataclass, field

import pytest

from shardload.errors import TransferError
from shardload.serving.metrics import Metrics
from shardload.serving.rack.blocks import FILE_BLOCK_BYTES, MOST_FETCHES, FileBlocks
from shardload.stores.range_cache import RangeCache
from shardload.stores.range_files import CachedObject


@dataclass(eq=False)
class FakeFile:
    """A file of so many blocks, whose fetches are counted, and wait until they may go on."""

    n_blocks: int = 3
    tag: str = "tag"
    stored: CachedObject | None = None
    error: Exception | None = None
    fetched: list[int] = field(default_factory=list)
    may_go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def n_bytes(self):
        return (self.n_blocks - 1) * FILE_BLOCK_BYTES + 5

    async def fetch(self, start, stop):
        self.fetched.append(start // FILE_BLOCK_BYTES)
        await self.may_go_on.wait()
        if self.error is not None:
            raise self.error
        return memoryview(bytes([start // FILE_BLOCK_BYTES % 251]) * (stop - start))


def made(**options):
    return FileBlocks(Metrics(), cache=None, note_error=lambda *_: None, **options)


def test_all_who_wait_share_one_fetch_also_if_some_leave():
    async def run():
        file, blocks = FakeFile(), made()
        waiting = [asyncio.create_task(blocks.get(file, 2)) for _ in range(20)]
        while not file.fetched:
            await asyncio.sleep(0)
        for leaving in waiting[::2]:
            leaving.cancel()
        file.may_go_on.set()
        found = await asyncio.gather(*waiting[1::2])
        assert {bytes(each.data) for each in found} == {b"\2" * 5} and file.fetched == [2]
        assert all(isinstance(each, asyncio.CancelledError) for each in
                   await asyncio.gather(*waiting[::2], return_exceptions=True))  # fmt: skip
        assert bytes((await blocks.get(file, 2)).data) == b"\2" * 5 and file.fetched == [2]

    asyncio.run(run())


def test_a_fetch_that_fails_is_the_error_of_all_who_wait_and_is_tried_again():
    async def run():
        file, blocks = FakeFile(error=TransferError("no answer")), made()
        file.may_go_on.set()
        found = await asyncio.gather(*(blocks.get(file, 0) for _ in range(5)), return_exceptions=True)
        assert {str(each) for each in found} == {"no answer"} and file.fetched == [0]
        blocks.begin(file, 1)  # nobody waits for it
        file.error = None
        assert len((await blocks.get(file, 0)).data) == FILE_BLOCK_BYTES

    asyncio.run(run())


@pytest.mark.parametrize("n_held", [1, 3])
def test_blocks_that_were_not_used_for_longest_are_dropped(n_held):
    async def run():
        file, blocks = FakeFile(n_blocks=10), made(held_bytes=n_held * FILE_BLOCK_BYTES)
        file.may_go_on.set()
        for number in range(5):
            await blocks.get(file, number)
            await blocks.get(file, number)
        assert file.fetched == [0, 1, 2, 3, 4]
        for number in range(5 - n_held, 5):
            await blocks.get(file, number)
        assert file.fetched == [0, 1, 2, 3, 4]
        await blocks.get(file, 0)
        assert file.fetched[5:] == [0]

    asyncio.run(run())


def test_no_more_than_so_many_are_fetched_at_a_time():
    async def run():
        file, blocks = FakeFile(n_blocks=3 * MOST_FETCHES), made()
        waiting = [asyncio.create_task(blocks.get(file, number)) for number in range(2 * MOST_FETCHES)]
        while len(file.fetched) < MOST_FETCHES:
            await asyncio.sleep(0)
        for _ in range(1000):
            await asyncio.sleep(0)
        assert len(file.fetched) == MOST_FETCHES
        file.may_go_on.set()
        await asyncio.gather(*waiting)
        assert sorted(file.fetched) == list(range(2 * MOST_FETCHES))

    asyncio.run(run())


def test_many_readers_fetch_less_in_advance():
    blocks = made(held_bytes=8 * FILE_BLOCK_BYTES)
    assert blocks.n_ahead == 4
    with blocks.reading(), blocks.reading(), blocks.reading():
        assert blocks.n_ahead == 1
        with blocks.reading(), blocks.reading():
            assert blocks.n_ahead == 0
    assert blocks.n_ahead == 4


@pytest.mark.parametrize("is_kept", [False, True])
def test_what_no_cache_keeps_is_sent_to_as_many_as_memory_has_room_for(tmp_path, is_kept):
    async def run():
        cache = RangeCache(tmp_path, 1 << 30) if is_kept else None
        blocks = FileBlocks(Metrics(), cache=cache, note_error=lambda *_: None, held_bytes=2 * FILE_BLOCK_BYTES)
        file = FakeFile(stored=CachedObject("s3://bucket/x", "tag", 5) if is_kept else None)
        may_end, n_sending = asyncio.Event(), 0

        async def send():
            nonlocal n_sending
            async with blocks.sending(file):
                n_sending += 1
                await may_end.wait()

        sending = [asyncio.create_task(send()) for _ in range(5)]
        for _ in range(100):
            await asyncio.sleep(0)
        assert blocks.keeps(file) == is_kept and n_sending == (5 if is_kept else 2)
        may_end.set()
        await asyncio.gather(*sending)
        assert n_sending == 5

    asyncio.run(run())
