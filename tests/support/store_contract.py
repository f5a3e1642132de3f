"""What every store promises. A new store subclasses `StoreContract`, says how to fill it, and inherits the tests."""

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest

from shardload.errors import (
    SourceError,
    SourceNotFoundError,
    TransferError,
    TruncatedSourceError,
    UnsafeSourceError,
    UnsupportedError,
)
from shardload.loaders.contents import descendant, member
from shardload.stores.json_files import read_object
from shardload.stores.location import Fingerprint

LARGE = np.random.default_rng(0).integers(0, 256, (2 << 20) + 5, np.uint8).tobytes()
"""More than two units, so that remote stores fetch it in parts."""
FILES = {"a.json": b'{"a": 1}', "empty": b"", "sub/deep/d/large": LARGE, "sub/b": b"0123456789"}


class StoreContract:
    """The tests; `location` is the folder that contains `FILES`."""

    @pytest.fixture
    def location(self, tmp_path):
        """Return the location of a folder with `FILES`, and of nothing else."""
        raise NotImplementedError

    shown = "/"
    """What the name of the folder contains."""
    has_paths = False
    """Whether `local_path` returns a path."""

    def replace(self, file, content):
        """Change the content of the file at the location ``file``, if the store's files can change."""
        pytest.skip("files of this store do not change")

    def test_kinds(self, location):
        assert location.is_folder() and (location / "sub").is_folder() and (location / "sub" / "deep").is_folder()
        assert (location / "a.json").is_file() and (location / "empty").is_file()
        assert not (location / "sub").is_file() and not (location / "a.json").is_folder()
        assert not (location / "none").exists() and not (location / "a.json" / "x").exists()

    def test_names(self, location):
        assert set(location.names()) >= {"a.json", "empty", "sub"}
        assert (location / "sub").names() == ["b", "deep"]
        with pytest.raises(SourceError, match=r"Cannot list the folder .*none"):
            (location / "none").names()

    def test_names_for_people(self, location):
        assert self.shown in str(location) and str(location / "sub" / "b") == f"{location}/sub/b"
        assert (location / "sub" / "b").name == "b" and (location / "sub").parent == location

    def test_locations_are_values(self, location):
        one, two = location / "sub" / "b", location / "sub/b"
        assert one == two and hash(one) == hash(two) and one != location and len({one, two}) == 1
        assert sorted([location / "b", location / "a"]) == [location / "a", location / "b"]
        assert one.relative_to(location) == "sub/b" and location.relative_to(one) is None

    @pytest.mark.parametrize("name", FILES)
    def test_whole_files(self, location, name):
        content, path = FILES[name], location / name
        assert path.size == path.identity().size == len(content)
        assert path.read_header(len(content), offset=0, what="it") == content
        with path.stream() as stream:
            assert stream.read() == content

    @pytest.mark.parametrize("unchecked", [False, True])
    @pytest.mark.parametrize(("start", "stop"), [(0, 1), (5, (1 << 20) + 7), ((2 << 20) - 1, len(LARGE)), (9, 9)])
    def test_ranges(self, location, start, stop, unchecked):
        buffer = bytearray(stop - start)
        with closing((location / "sub/deep/d/large").open()) as file:
            assert file.n_bytes == len(LARGE)
            (file.read_unchecked if unchecked else file.read_into)(memoryview(buffer), start)
        assert buffer == LARGE[start:stop]

    @pytest.mark.parametrize(("start", "stop"), [(0, 1 << 20), (1 << 20, 3 << 20), (2 << 20, len(LARGE))])
    def test_a_remote_file_is_asked_in_advance(self, location, start, stop):
        if not location.store.is_remote:
            pytest.skip("a local store needs no requests")
        with closing((location / "sub/deep/d/large").open()) as file:
            first, second = file.begin(start, stop), file.begin(0, 1 << 20)
            assert bytes(second.result()) == LARGE[: 1 << 20]
            assert bytes(first.result()) == LARGE[start:stop]
            if not location.store.is_verifying:
                assert bytes(file.begin(5, 9).result()) == LARGE[5:9]

    def test_typed_buffers(self, location):
        found = np.empty((2, 3), "<u2")
        with closing((location / "sub/deep/d/large").open()) as file:
            file.read_into(found.data, 3)
        assert found.tobytes() == LARGE[3:15]

    def test_threads_share_a_file(self, location):
        def part(start):
            buffer = bytearray(50_000)
            file.read_into(memoryview(buffer), start)
            return buffer == LARGE[start : start + 50_000]

        with closing((location / "sub/deep/d/large").open()) as file, ThreadPoolExecutor(8) as pool:
            assert all(pool.map(part, range(0, 2_000_000, 99_991)))

    def test_a_stream_seeks(self, location):
        with (location / "sub/b").stream() as stream:
            assert stream.seek(-3, 2) == 7 and stream.read() == b"789" and stream.read() == b""
            assert stream.seek(2) == 2 and stream.read(3) == b"234" and stream.tell() == 5

    def test_past_the_end(self, location):
        with closing((location / "sub/b").open()) as file, pytest.raises(TransferError, match=r"sub/b"):
            file.read_into(memoryview(bytearray(5)), 8)
        with pytest.raises(TruncatedSourceError, match=r"sub/b is truncated: the header should take 5 bytes"):
            (location / "sub/b").read_header(5, offset=8, what="the header")
        with pytest.raises(TruncatedSourceError):  # refused before memory is allocated
            (location / "sub/b").read_header(1 << 60, offset=0, what="the header")

    def test_what_is_not_a_file(self, location):
        with pytest.raises(SourceNotFoundError, match=r"There is no file .*none"):
            (location / "none").open()
        with pytest.raises(SourceError, match=r"should be a file, but it is a folder"):
            (location / "sub").open()
        with pytest.raises(TransferError, match=r"none"):
            (location / "none").identity()

    def test_json(self, location):
        assert read_object(location / "a.json") == {"a": 1}

    def test_names_from_an_index_stay_inside(self, location):
        assert member(location, "a.json", named_by="index") == location / "a.json"
        assert descendant(location, "sub/deep/d/large", named_by="index").size == len(LARGE)
        for name in ("../a.json", "..", "/a.json", "sub\\b"):
            with pytest.raises(UnsafeSourceError, match="not a plain name"):
                member(location, name, named_by="index")
        with pytest.raises(SourceError, match="index should name files"):
            member(location, "a\0b", named_by="index")

    def test_links(self, location):
        assert not (location / "a.json").is_link() and (location / "sub/b").resolved().size == 10

    def test_changes_are_seen(self, location):
        path = location / "sub/b"
        fingerprint = Fingerprint.of([path, location / "empty"])
        fingerprint.check()
        self.replace(path, b"9876543210")
        with pytest.raises(TransferError, match=r"sub/b changed since its headers were read"):
            fingerprint.check()

    def test_a_path_for_libraries_that_open_files(self, location):
        path = location / "sub/b"
        if self.has_paths:
            assert path.local_path().read_bytes() == b"0123456789"
            assert path.size == 10  # also after a copy was made
        else:
            with pytest.raises(UnsupportedError, match=r"Cannot open .*sub/b in place.*Copy the checkpoint"):
                path.local_path()
