"""The contract of stores: files on this machine, and the store in memory that tests use."""

import os

import pytest
from memory_store import MemoryStore, RemoteMemoryStore, VerifyingMemoryStore
from store_contract import FILES, LARGE, StoreContract

from shardload.errors import DamagedError, SourceError, SourceNotFoundError, UnsafeSourceError
from shardload.loaders.folder import descendant, member
from shardload.stores.local import located
from shardload.stores.location import Location


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

    def replace(self, location, content):
        location.local_path().write_bytes(content)

    def test_relative_paths_become_absolute(self, location, monkeypatch):
        monkeypatch.chdir(location.local_path())
        assert located("sub/b") == location / "sub/b"
        assert located(location) is location

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


class TestMemory(StoreContract):
    shown = "memory://"
    store = MemoryStore

    @pytest.fixture
    def location(self):
        return Location(self.store({f"root/{name}": content for name, content in FILES.items()}), "root")

    def replace(self, location, content):
        location.store.files[location.key] = content


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
