"""The contract of stores: files on this machine, folders at URLs, and the stores in memory that tests use."""

import os
import subprocess
import sys

import pytest
from memory_store import MemoryStore, RemoteMemoryStore, VerifyingMemoryStore
from object_server import served
from store_contract import FILES, LARGE, StoreContract

from shardload.errors import (
    DamagedError,
    SourceError,
    SourceNotFoundError,
    TransferError,
    UnsafeSourceError,
)
from shardload.loaders.contents import descendant, member
from shardload.stores.json_files import read_object
from shardload.stores.local import located
from shardload.stores.location import Location
from shardload.stores.remote import location_of
from shardload.stores.web_folders import is_list, links


def write(folder):
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


class TestLocal(StoreContract):
    has_paths = True

    @pytest.fixture
    def location(self, tmp_path):
        return located(write(tmp_path / "folder"))

    def replace(self, file, content):
        file.local_path().write_bytes(content)

    def test_relative_paths_become_absolute(self, location, monkeypatch):
        monkeypatch.chdir(location.local_path())
        assert located("sub/b") == location / "sub/b" and located(location) is location

    def test_the_root(self):
        assert located("/").parent == located("/") and located("/") / "tmp" == located("/tmp")

    def test_a_link_may_not_leave_its_folder(self, location):
        folder = location.local_path()
        (folder / "inside").symlink_to("sub/b")
        (folder.parent / "secret").write_bytes(b"x")
        (folder / "outside").symlink_to("../secret")
        assert member(location, "inside", named_by="index").size == 10
        with pytest.raises(UnsafeSourceError, match="symbolic link that leaves its folder"):
            member(location, "outside", named_by="index")
        (folder / "sub" / "up").symlink_to("../../secret")
        with pytest.raises(UnsafeSourceError, match="symbolic link that leaves its folder"):
            descendant(location, "sub/up", named_by="index")

    def test_pipes_are_not_files(self, location):
        os.mkfifo(location.local_path() / "pipe")
        pipe = location / "pipe"
        assert pipe.exists() and not pipe.is_file() and not pipe.is_folder()
        with pytest.raises(SourceError, match="not a regular file"):
            pipe.open()

    def test_a_dangling_link(self, location):
        (location.local_path() / "link").symlink_to("nowhere")
        assert (location / "link").is_link() and not (location / "link").exists()
        with pytest.raises(SourceNotFoundError, match="points to nothing"):
            (location / "link").open()


class TestRemoteStore(StoreContract):
    """A folder in S3 and in GCS, without digests."""

    has_paths = True

    shown = "://bucket/folder"

    @pytest.fixture
    def server(self, tmp_path, monkeypatch):
        write(tmp_path / "folder")
        with served(tmp_path, monkeypatch) as server:
            yield server

    @pytest.fixture(params=["s3", "gs"])
    def location(self, request, server):
        return location_of(f"{getattr(server, request.param)}/folder/")

    def test_short_reads_share_requests(self, location, server):
        with (location / "sub/deep/d/large").stream() as stream:
            stream.read(1)
            server.requests.clear()
            assert [stream.seek(at) and stream.read(3) for at in (9, 500, 100_000, 199_000)]
            assert len(server.requests) == 0
            stream.seek(2 << 20)
            assert stream.read() == LARGE[2 << 20 :] and len(server.requests) == 1

    def test_the_size_of_a_file_comes_with_its_first_bytes(self, location, server, tmp_path):
        for size in (0, 1, 1023, 1024, 1025, 1 << 20, (5 << 20) - 1):
            with (tmp_path / "folder" / f"of_{size}").open("wb") as file:
                file.truncate(size)
        for size in (0, 1, 1023, 1024, 1025, 1 << 20, (5 << 20) - 1):
            path = location_of(str(location)) / f"of_{size}"
            assert path.size == path.size == size
        assert len([key for _, key, *_ in server.requests if key is not None]) == 6  # the server does not count a 416

    def test_http_reads_without_a_list(self, server, tmp_path):
        location = location_of(f"{server.http}/folder")
        assert (location / "empty").is_file() and not (location / "none").exists()
        assert read_object(location / "a.json") == {"a": 1} and (location / "sub/deep/d/large").size == len(LARGE)
        with pytest.raises(SourceError, match=r"Cannot list the folder .*/sub/deep: it does not exist"):
            (location / "sub/deep").names()
        (tmp_path / "folder" / "config.json").write_text("{}")
        again = location_of(f"{server.http}/folder")
        assert again.is_folder() and again.names() == ["config.json"] and (again / "a.json").is_file()

    def test_http_lists_by_an_index_page(self, server, tmp_path):
        (tmp_path / "folder" / "a b&c#é.txt").write_text("odd")
        server.has_index = True
        location = location_of(f"{server.http}/folder")
        assert location.names() == sorted(path.name for path in (tmp_path / "folder").iterdir())
        assert (location / "sub").is_folder() and (location / "a b&c#é.txt").read_header(3, offset=0, what="") == b"odd"
        assert not (location / "none").exists()

    def test_an_index_page_leads_nowhere_else(self, server):
        page = b"""<a href="../up">..</a><a href="/bucket/folder/good">g</a><a href="http://other/bucket/folder/x">x</a>
        <a href="?C=M">sort</a><a href="a/b">deep</a><a href="%2e%2e">dots</a><a href="c%2Fd">slash</a>
        <a href="e/">e</a>"""
        assert links(page, f"{server.http}/folder") == {"good": False, "e": True}

    def test_an_object_that_stands_for_a_folder(self, location, server, tmp_path):
        """Consoles of stores make an empty object for a folder."""
        server.markers.add("folder/sub")
        again = location_of(str(location))
        assert (again / "sub").is_folder() and (again / "sub/b").is_file() and "sub" in again.names()

    def test_a_store_that_refuses_what_it_lacks(self, location, server):
        """S3 answers 403 in place of 404 to those who may not list."""
        assert (location / "a.json").is_file()
        server.status |= {"folder/none": 403, "": 403}
        assert not (location / "none").exists() and (location / "empty").is_file()

    def test_parts_of_files_are_copied_to_their_place(self, location):
        path = (location / "sub/deep/d/large").local_part(1000, 3000)
        assert path.read_bytes() == bytes(1000) + LARGE[1000:3000]
        assert (location / "sub/deep/d/large").size == len(LARGE)


class TestMemory(StoreContract):
    shown = "memory://"
    store = MemoryStore

    @pytest.fixture
    def location(self):
        return Location(self.store({f"root/{name}": content for name, content in FILES.items()}), "root")

    def replace(self, file, content):
        file.store.files[file.key] = content


class TestRemoteMemory(TestMemory):
    shown = "remote://"
    store = RemoteMemoryStore


class TestVerifyingMemory(TestMemory):
    shown = "verifying://"
    store = VerifyingMemoryStore

    def test_a_flipped_byte_is_damage(self, location):
        location.store.flip("root/sub/deep/d/large", (1 << 20) + 7)
        path = location / "sub/deep/d/large"
        assert path.read_header(1 << 20, offset=0, what="it") == LARGE[: 1 << 20]
        with pytest.raises(DamagedError, match="from byte 1048576"):
            path.read_header(1, offset=(2 << 20) - 1, what="it")


def test_an_index_page_that_is_made_as_it_is_sent(tmp_path, monkeypatch):
    """nginx sends its index in chunks, without a length."""
    write(tmp_path / "folder")
    with served(tmp_path, monkeypatch) as server:
        server.has_index = server.is_chunked = True
        location = location_of(f"{server.http}/folder")
        assert location.is_folder() and location.names() == sorted(p.name for p in (tmp_path / "folder").iterdir())


def test_an_index_page_with_links_that_are_no_addresses():
    assert links(b'<a href="http://[bad">x</a><a href="good">g</a>', "http://host/folder") == {"good": False}


def test_a_server_that_refuses_folders(tmp_path, monkeypatch):
    """Many HTTP servers answer 403 for a folder, and public buckets for what they lack."""
    write(tmp_path / "folder")
    (tmp_path / "folder" / "config.json").write_text("{}")
    with served(tmp_path, monkeypatch) as server:
        server.status |= {"folder": 403, "folder/shardload/digests.json": 403}
        assert location_of(f"{server.http}/folder").names() == ["config.json"]
        server.status["*"] = 403
        with pytest.raises(TransferError, match="may not be read: HTTP status 403"):
            location_of(f"{server.http}/folder").open()


FORKING = """
import os
from shardload.errors import UnsupportedError
from shardload.stores.remote import location_of
assert location_of("s3://bucket/folder").is_folder()
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
try:
    location_of("s3://bucket/folder").is_folder()
except UnsupportedError as error:
    os._exit(7 if "do not survive a fork" in str(error) else 1)
os._exit(2)
"""


def test_a_forked_process_is_told_that_it_cannot_read(tmp_path, monkeypatch):
    write(tmp_path / "folder")
    with served(tmp_path, monkeypatch):
        assert subprocess.run([sys.executable, "-c", FORKING], timeout=60, check=False).returncode == 7


@pytest.mark.parametrize(
    "title, expected",
    [("Index of /models/", True), ("Directory listing for /", True), ("Team · shardload", True), ("Our models", False)],
)
def test_a_list_of_folders_is_known_by_its_title(title, expected):
    page = f'<html><head><title>{title}</title></head><a href="../">up</a><a href="gemma/">gemma/</a>'.encode()
    assert is_list(page, links(page, "http://host/models")) is expected
