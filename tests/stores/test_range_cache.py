"""The cache of ranges on disk: what it finds, what it refuses to return, what it removes, and who shares it."""

import errno
import itertools
import json
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shardload.errors import UsageError
from shardload.stores import range_files
from shardload.stores.cache_space import clear, make_room, remove_leftovers, stored_objects
from shardload.stores.range_cache import Piece, RangeCache, cover
from shardload.stores.range_files import FOLDER, CachedObject, CacheFolder

DATA = np.random.default_rng(0).bytes(1 << 20)
OBJECT = CachedObject("s3://bucket/model.safetensors", "etag abc", len(DATA))


def keep(cache, start, stop, *, found=OBJECT, since=0.0):
    cache.keep(found, start, memoryview(DATA)[start:stop], used_since_s=since)
    cache.settle()


def read(cache, start, stop, *, found=OBJECT):
    """The bytes if all are stored and sound, else None."""
    buffer = bytearray(stop - start)
    for piece in cache.find(found, start, stop):
        part = memoryview(buffer)[piece.start - start : piece.stop - start]
        if piece.segment is None or not cache.read_into([part], found, piece):
            return None
    return bytes(buffer)


def files(directory):
    return [path for path in (directory / FOLDER / "objects").glob("*/*/*") if path.name != "object.json"]


@pytest.fixture
def cache(tmp_path):
    return RangeCache(tmp_path / "cache", 1 << 30)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20)), max_size=12), st.integers(0, 60), st.integers(1, 40))
def test_pieces_cover_a_range_in_order(stored, start, length):
    segments, stop = sorted((a, a + n) for a, n in stored), start + length
    pieces = cover(segments, start, stop)
    assert [p.start for p in pieces] == [start, *(p.stop for p in pieces[:-1])] and pieces[-1].stop == stop
    assert all(p.segment[0] <= p.start and p.stop <= p.segment[1] for p in pieces if p.segment)
    assert not any(a.segment is b.segment is None for a, b in itertools.pairwise(pieces))
    # What is stored is fetched only if it lies between two gaps, as these are all shorter than a request is worth.
    missing = {i for i in range(start, stop) if not any(a <= i < b for a, b in segments)}
    gaps = {i for p in pieces if p.segment is None for i in range(p.start, p.stop)}
    assert missing <= gaps
    assert not gaps or missing >= {min(gaps), max(gaps)}


def test_a_long_stored_piece_between_gaps_is_used():
    far = 1 << 20
    assert cover([(10, far)], 0, far + 5) == [Piece(0, 10, None), Piece(10, far, (10, far)), Piece(far, far + 5, None)]
    assert cover([(10, 20)], 0, 30) == [Piece(0, 30, None)]


def test_any_part_of_what_was_kept_is_read(cache):
    keep(cache, 1000, 900_000)
    assert read(cache, 1000, 900_000) == DATA[1000:900_000]
    for start, stop in [(1000, 1001), (300_000, 300_001), (1000 + (256 << 10), 900_000), (5000, 899_999)]:
        assert read(cache, start, stop) == DATA[start:stop]
    assert read(cache, 999, 1001) is None
    assert cache.traffic.stored == 899_000


@pytest.mark.parametrize(("start", "stop"), [(0, 1 << 20), (5, 300_000), (262_144, 524_288), (262_143, 786_433)])
def test_a_range_is_read_into_many_buffers(cache, start, stop):
    keep(cache, 0, 1 << 20)
    wanted = {1, 4096, 262_144 - start % 262_144, 262_145, (stop - start) // 2}
    cuts = sorted({0, *(cut for cut in wanted if cut < stop - start), stop - start})
    buffers = [memoryview(bytearray(b - a)) for a, b in itertools.pairwise(cuts)]
    [piece] = cache.find(OBJECT, start, stop)
    assert cache.read_into(buffers, OBJECT, piece)
    assert b"".join(buffers) == DATA[start:stop]


def test_a_folder_that_was_removed_and_filled_again_is_read(cache, tmp_path):
    keep(cache, 0, 1000)
    assert read(cache, 0, 1000) == DATA[:1000]
    shutil.rmtree(cache.folder.path / FOLDER)
    keep(cache, 1000, 2000)
    assert read(cache, 0, 1000) is None  # known to this process until it is read
    assert read(cache, 1000, 2000) == DATA[1000:2000]


def test_a_later_process_finds_it(cache):
    keep(cache, 0, 5000)
    assert read(RangeCache(cache.folder.path, 1 << 30), 10, 4000) == DATA[10:4000]


def test_a_process_finds_what_another_has_stored_meanwhile(cache, monkeypatch):
    clock = time.monotonic
    assert read(cache, 0, 5000) is None
    keep(RangeCache(cache.folder.path, 1 << 30), 0, 5000)
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 3)
    assert read(cache, 0, 5000) == DATA[:5000]


@pytest.mark.parametrize("other", [{"version": "etag b"}, {"size": 1 << 19}, {"address": "s3://b/m"}, {"variant": "x"}])
def test_another_object_or_version_is_not_found(cache, other):
    keep(cache, 0, 5000)
    facts = {"address": OBJECT.address, "version": OBJECT.version, "size": OBJECT.size} | other
    assert read(cache, 0, 5000, found=CachedObject(**facts)) is None


def _flip(path, offset):
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


DAMAGE = {
    "data": lambda path: _flip(path, 4096 + 300_000),
    "last byte": lambda path: _flip(path, -1),
    "digest": lambda path: _flip(path, 60),
    "header": lambda path: _flip(path, 4000),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "empty": lambda path: path.write_bytes(b""),
    "foreign": lambda path: path.write_bytes(np.random.default_rng(1).bytes(path.stat().st_size)),
    "folder": lambda path: (path.unlink(), path.mkdir()),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_discarded_with_a_note(cache, kind):
    keep(cache, 0, len(DATA))
    [path] = files(cache.folder.path)
    DAMAGE[kind](path)
    assert read(cache, 0, len(DATA)) is None
    assert kind == "folder" or not path.exists()
    assert "had damaged files of s3://bucket/model.safetensors" in cache.traffic.notes[0]
    assert cache.find(OBJECT, 0, 10)[0].segment is None
    if kind != "folder":
        keep(cache, 0, len(DATA))
        assert read(cache, 0, len(DATA)) == DATA


def test_files_that_are_noted_by_turns_are_noted_once(cache):
    cache.note("noted before")
    before = cache.traffic
    for _ in range(3):
        cache.note("a")
        cache.note("b")
    assert cache.traffic.since(before).notes == ("a", "b")


def test_a_file_of_another_object_is_not_read(cache):
    other = CachedObject("s3://bucket/other", "etag abc", OBJECT.size)
    keep(cache, 0, 5000, found=other)
    keep(cache, 5000, 6000)
    [theirs] = [path for path in files(cache.folder.path) if path.name == "0-1388"]
    [mine] = [path for path in files(cache.folder.path) if path.name != "0-1388"]
    theirs.rename(mine.parent / theirs.name)
    assert read(RangeCache(cache.folder.path, 1 << 30), 0, 5000) is None


def test_symbolic_links_are_not_followed(cache, tmp_path):
    keep(cache, 0, 5000)
    [path] = files(cache.folder.path)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    assert read(cache, 0, 5000) is None
    assert not path.is_symlink() and (tmp_path / "elsewhere").exists()
    keep(cache, 0, 5000)
    path.parent.rename(tmp_path / "folder")
    path.parent.symlink_to(tmp_path / "folder")
    assert read(RangeCache(cache.folder.path, 1 << 30), 0, 5000) is None
    assert not stored_objects(cache.folder)
    clear(cache.folder)
    assert (tmp_path / "folder" / path.name).exists()


@pytest.mark.parametrize("name", ["../x", "0-5-6", "00-5", "5-5", "6-5", "0-ffffffffffffffffff", "0-200000", "x"])
def test_names_that_are_no_range_of_the_object_are_ignored(name):
    assert range_files.segment_of(name, 1 << 20) is None
    assert range_files.segment_of("0-100000", 1 << 20) == (0, 1 << 20)


def test_only_the_user_may_read_the_folder(cache):
    old = os.umask(0)
    try:
        keep(cache, 0, 5000)
    finally:
        os.umask(old)
    for path in [cache.folder.path, *cache.folder.path.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)


def test_a_folder_that_others_may_write_to_is_refused(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(UsageError, match=r"other users can write to it \(mode 777\), expected a folder that only you"):
        RangeCache(tmp_path / "shared", 1 << 20)
    (tmp_path / "own").mkdir(mode=0o755)
    (tmp_path / "own" / FOLDER).symlink_to(tmp_path / "shared")
    with pytest.raises(UsageError, match="is not a folder"):
        RangeCache(tmp_path / "own", 1 << 20)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="it is a file, expected a folder"):
        RangeCache(tmp_path / "file", 1 << 20)


def versions(count):
    return [CachedObject("s3://bucket/model", f"etag {n}", len(DATA)) for n in range(count)]


def age(cache, found, seconds):
    path = cache.folder.path / FOLDER / "objects" / Path(*found.folders) / "object.json"
    os.utime(path, times=(time.time() - seconds,) * 2)


def test_what_was_not_used_for_longest_goes_first(tmp_path):
    cache = RangeCache(tmp_path, 3_500_000)
    old, older, new, newest = versions(4)
    for found, seconds in [(old, 100), (older, 200), (new, 50)]:
        keep(cache, 0, len(DATA), found=found)
        age(cache, found, seconds)
    keep(cache, 0, len(DATA), found=newest, since=time.time() - 10)
    left = {each.described.version for each in stored_objects(cache.folder)}
    assert left == {"etag 0", "etag 2", "etag 3"}
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 3_500_000


def test_a_use_makes_an_object_young(tmp_path):
    cache = RangeCache(tmp_path, 2_500_000)
    first, second, third = versions(3)
    for found, seconds in [(first, 200), (second, 100)]:
        keep(cache, 0, len(DATA), found=found)
        age(cache, found, seconds)
    assert read(RangeCache(tmp_path, 2_500_000), 0, 10, found=first) == DATA[:10]
    keep(cache, 0, len(DATA), found=third, since=time.time() - 10)
    assert {each.described.version for each in stored_objects(cache.folder)} == {"etag 0", "etag 2"}


def test_what_the_load_itself_uses_stays(tmp_path):
    cache, since = RangeCache(tmp_path, 2_500_000), time.time()
    for found in versions(4):
        keep(cache, 0, len(DATA), found=found, since=since)
    assert {each.described.version for each in stored_objects(cache.folder)} == {"etag 0", "etag 1"}
    assert cache.traffic.left_out == 2 * len(DATA)
    assert cache.traffic.notes == (f"the cache {tmp_path} is full: what this load reads does not fit in 2.4 MiB",)
    for found in versions(4)[:2]:
        age(cache, found, 100)
    keep(cache, 0, len(DATA), found=versions(4)[3], since=time.time())
    assert "etag 3" in {each.described.version for each in stored_objects(cache.folder)}


def test_what_is_pinned_stays_in_the_version_that_was_used_last(tmp_path):
    cache, other = RangeCache(tmp_path, 3_500_000), CachedObject("s3://bucket/models", "etag", len(DATA))
    before, now, new = versions(3)
    cache.pinned = lambda: ["s3://bucket/model"]  # not s3://bucket/models
    for found, seconds in [(before, 300), (now, 200), (other, 100)]:
        keep(cache, 0, len(DATA), found=found)
        age(cache, found, seconds)
    keep(cache, 0, len(DATA), found=CachedObject("s3://x", "etag", len(DATA)), since=time.time() - 10)
    assert [each.described for each in stored_objects(cache.folder)][1:] == [other, now]
    keep(cache, 0, len(DATA), found=CachedObject("s3://y", "etag", len(DATA)), since=time.time() - 10)
    assert [each.described for each in stored_objects(cache.folder)][2:] == [now]
    cache.pinned = lambda: ["s3:/"]
    keep(cache, 0, len(DATA), found=new, since=time.time() + 10)
    assert cache.traffic.notes[-1].endswith("does not fit in 3.3 MiB with what is pinned")


def test_a_range_is_read_though_it_is_removed_meanwhile(cache, monkeypatch):
    keep(cache, 0, len(DATA))

    def removing(*args):
        monkeypatch.undo()
        clear(cache.folder)
        return os.preadv(*args)

    monkeypatch.setattr(os, "preadv", removing)
    assert read(cache, 0, len(DATA)) == DATA
    assert read(cache, 0, len(DATA)) is None and not cache.traffic.notes


def test_clearing_by_age_and_address(cache):
    names = ["s3://bucket/a/x", "s3://bucket/a/y", "s3://bucket/ab"]
    for name in names:
        keep(cache, 0, 5000, found=CachedObject(name, "etag", len(DATA)))
    age(cache, CachedObject(names[0], "etag", len(DATA)), 100)
    assert [each.described.address for each in clear(cache.folder, older_than_s=50)] == names[:1]
    assert [each.described.address for each in clear(cache.folder, address="s3://bucket/a/")] == names[1:2]
    assert [each.n_bytes for each in clear(cache.folder)] == [5000 + 4096]
    assert not list((cache.folder.path / FOLDER / "objects").iterdir())


def test_a_description_that_is_not_the_folders_own_counts_for_nothing(cache):
    keep(cache, 0, 5000)
    [path] = (cache.folder.path / FOLDER / "objects").glob("*/*/object.json")
    for text in ["", "[]", "{}", '{"address": 1}', "[" * 60_000, json.dumps({"address": "s3://b", "version": "v"})]:
        path.write_text(text)
        assert [each.described for each in stored_objects(cache.folder)] == [None]
    assert read(cache, 0, 5000) == DATA[:5000]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EDQUOT, errno.EIO])
def test_a_disk_that_refuses_turns_writing_off_with_one_warning(cache, monkeypatch, code):
    keep(cache, 0, 5000)

    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(range_files, "write_everything", refuse)
    with pytest.warns(RuntimeWarning, match=rf"Cannot write to the cache .*: {os.strerror(code)}\. What it") as caught:
        keep(cache, 5000, 6000)
        keep(cache, 6000, 7000)
    assert len(caught) == len(cache.traffic.notes) == 1 and cache.traffic.left_out == 2000
    assert read(cache, 0, 5000) == DATA[:5000]
    assert not list((cache.folder.path / FOLDER / "new").iterdir())


def test_a_disk_that_has_room_again_is_written_to_a_minute_later(cache, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(range_files, "write_everything", refuse)
        with pytest.warns(RuntimeWarning, match="No space left"):
            keep(cache, 0, 1000)
    keep(cache, 1000, 2000)
    assert not cache.is_on and not files(cache.folder.path)
    later = time.monotonic() + 61
    monkeypatch.setattr(time, "monotonic", lambda: later)
    keep(cache, 2000, 3000)
    assert cache.is_on and read(cache, 2000, 3000) == DATA[2000:3000] and read(cache, 0, 1000) is None
    assert cache.traffic.left_out == 2000
    assert cache.traffic.notes[-1] == f"the cache {cache.folder.path} can be written to again"


def test_what_was_used_before_the_clock_was_set_back_does_not_stay_for_ever(tmp_path):
    cache = RangeCache(tmp_path, 2_500_000)
    first, second, third, fourth = versions(4)
    for found in (first, second):
        keep(cache, 0, len(DATA), found=found)
        age(cache, found, -10_000)
    keep(cache, 0, len(DATA), found=third, since=time.time() - 120)
    assert cache.traffic.left_out == len(DATA)  # it may have been used right now
    assert all(each.used_s <= time.time() + 1 for each in stored_objects(cache.folder))
    for found in (first, second):
        age(cache, found, 200)
    keep(cache, 0, len(DATA), found=fourth, since=time.time() - 110)
    assert "etag 3" in {each.described.version for each in stored_objects(cache.folder)}


def test_a_cache_that_was_full_looks_again_after_the_clock_was_set_back(tmp_path, monkeypatch):
    cache, now_s = RangeCache(tmp_path, 2_500_000), time.time()
    with monkeypatch.context() as before:
        before.setattr(time, "time", lambda: now_s + 10_000)
        for found in versions(2):
            keep(cache, 0, len(DATA), found=found, since=now_s + 10_000)
            age(cache, found, 0)
        keep(cache, 0, len(DATA), found=versions(3)[2], since=now_s + 10_000)
    assert cache.traffic.left_out == len(DATA)
    for found in versions(2):
        age(cache, found, 200)
    keep(cache, 0, len(DATA), found=versions(4)[3], since=time.time())
    assert "etag 3" in {each.described.version for each in stored_objects(cache.folder)}


def test_a_file_that_the_system_refuses_is_not_stored(cache):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (6000, before[1]))
    try:
        with pytest.warns(RuntimeWarning, match="File too large"):
            keep(cache, 0, 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not files(cache.folder.path) and read(cache, 0, 5000) is None


READ_ONLY = """
import os, warnings
if os.geteuid() == 0:  # root writes everywhere
    os.chown(sys.argv[1], 12345, 12345)
    os.setuid(12345)
warnings.simplefilter("error")
found = CachedObject("s3://bucket/model", "etag abc", len(data))
cache = RangeCache(Path(sys.argv[1]), 1 << 30)
cache.keep(found, 0, memoryview(data)[:5000], used_since_s=0.0)
cache.settle()
for path in [cache.folder.path, *cache.folder.path.rglob("*")]:
    path.chmod(0o500 if path.is_dir() else 0o400)
later = RangeCache(cache.folder.path, 1 << 30)
[piece] = later.find(found, 10, 4000)
buffer = bytearray(piece.n_bytes)
print(later.read_into([memoryview(buffer)], found, piece), bytes(buffer) == data[10:4000])
later.keep(found, 5000, memoryview(data)[5000:6000], used_since_s=0.0)
later.settle()
print(later.traffic.notes[0])
for path in [cache.folder.path, *cache.folder.path.rglob("*")]:
    path.chmod(0o700)
"""


def test_a_read_only_folder_is_read():
    with tempfile.TemporaryDirectory() as folder, start(READ_ONLY, folder) as child:
        said = child.communicate(timeout=60)[0].splitlines()
    assert said[0] == "True True"
    assert said[1].startswith(f"Cannot write to the cache {folder}: Permission denied. What it has is read")


def test_a_disk_that_does_not_keep_up_has_ranges_left_out(cache, monkeypatch):
    busy = threading.Event()
    monkeypatch.setattr(range_files, "write_everything", lambda *_: busy.wait())
    for turn in range(128):  # a MiB each
        cache.keep(CachedObject("s3://bucket/m", f"etag {turn}", len(DATA)), 0, memoryview(DATA), used_since_s=0.0)
    assert cache.traffic.left_out == 64 << 20
    busy.set()
    cache.settle()


CHILD = """
import sys, time
from pathlib import Path
import numpy as np
from shardload.stores.range_cache import RangeCache
from shardload.stores.range_files import CachedObject
data = np.random.default_rng(0).bytes(1 << 20)
"""


def start(code, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + code, *map(str, arguments)], stdout=subprocess.PIPE, text=True
    )


SHARING = """
cache, seed = RangeCache(Path(sys.argv[1]), 3_000_000), int(sys.argv[2])
rng, bad = np.random.default_rng(seed), 0
for turn in range(300):
    found = CachedObject("s3://bucket/model", f"etag {rng.integers(6)}", len(data))
    first = int(rng.integers(len(data) - 200_000)); last = first + int(rng.integers(1, 200_000))
    for piece in cache.find(found, first, last):
        buffer = bytearray(piece.n_bytes)
        if piece.segment is not None and cache.read_into([memoryview(buffer)], found, piece):
            bad += bytes(buffer) != data[piece.start:piece.stop]
    cache.keep(found, first, memoryview(data)[first:last], used_since_s=time.time() + 10)
    cache.settle()
print(bad, cache.traffic.cached, len(cache.traffic.notes), flush=True)
"""


def test_processes_share_a_cache_that_is_full_all_the_time(tmp_path):
    children = [start(SHARING, tmp_path, seed) for seed in range(3)]
    results = [child.communicate(timeout=120)[0].split() for child in children]
    assert all(child.returncode == 0 for child in children)
    assert [(bad, notes) for bad, _, notes in results] == [("0", "0")] * 3
    assert all(int(cached) for _, cached, _ in results)
    assert not list((tmp_path / FOLDER / "new").iterdir())
    folder = CacheFolder(tmp_path)
    make_room(folder, limit_bytes=3_000_000, used_before_s=time.time() + 10)
    assert sum(each.n_bytes for each in stored_objects(folder)) <= 3_000_000


KILLED = """
from shardload.stores import range_files
write_everything = range_files.write_everything
def slow(fd, parts):
    if parts[0].nbytes != 4096:  # the description
        return write_everything(fd, parts)
    write_everything(fd, [parts[0], parts[1][:1000]])
    print("half", flush=True)
    time.sleep(60)
range_files.write_everything = slow
found = CachedObject("s3://bucket/model.safetensors", "etag abc", len(data))
cache = RangeCache(Path(sys.argv[1]), 1 << 30)
cache.keep(found, 0, memoryview(data), used_since_s=0.0)
cache.settle()
"""


def test_a_writer_that_is_killed_leaves_nothing_that_is_read(cache):
    with start(KILLED, cache.folder.path) as child:
        assert child.stdout.readline() == "half\n"
        new = cache.folder.path / FOLDER / "new"
        remove_leftovers(cache.folder)
        assert len(list(new.iterdir())) == 1, "its writer is alive"
        child.send_signal(signal.SIGKILL)
        child.wait()
    assert read(cache, 0, len(DATA)) is None and not files(cache.folder.path)
    keep(cache, 0, 5000)  # the first write removes leftovers
    assert not list(new.iterdir())
    assert read(cache, 0, 5000) == DATA[:5000]
