"""A remote step is a store like any other, whose bytes are compared with the digests."""

import pytest
from object_server import ObjectServer
from store_contract import FILES, StoreContract

from shardload.errors import DamagedError, SourceError
from shardload.runs.digests import Digests
from shardload.runs.remote_store import open_step
from shardload.stores.remote import RemoteStore


class TestRemoteStep(StoreContract):
    shown = "/bucket/7"
    has_paths = True

    @pytest.fixture
    def server(self, tmp_path):
        step = tmp_path / "bucket" / "7"
        for name, content in FILES.items():
            (step / name).parent.mkdir(parents=True, exist_ok=True)
            (step / name).write_bytes(content)
        Digests.compute(step).write(step)
        server = ObjectServer(tmp_path / "bucket")
        yield server
        server.close()

    @pytest.fixture
    def location(self, server):
        return open_step(RemoteStore(f"{server.http}/7")).root

    def test_a_copy_is_used_instead_of_the_store(self, location, server):
        (location / "sub/b").local_path()
        sent = server.bytes_sent
        assert (location / "sub/b").read_header(10, offset=0, what="it") == b"0123456789"
        assert server.bytes_sent == sent

    def test_a_flipped_bit_is_damage(self, location, tmp_path):
        (tmp_path / "bucket/7/sub/b").write_bytes(b"X123456789")
        with pytest.raises(DamagedError, match=r"Step 7 is damaged: http://.*/7/sub/b from byte 0"):
            (location / "sub/b").read_header(1, offset=0, what="it")

    def test_files_that_were_not_saved_do_not_exist(self, location, tmp_path):
        (tmp_path / "bucket/7/stray").write_bytes(b"x")
        assert "stray" not in location.names()
        with pytest.raises((SourceError, FileNotFoundError), match="was not saved with the step"):
            (location / "stray").open()

    def test_its_copies_go_with_it(self, server):
        step = open_step(RemoteStore(f"{server.http}/7"))
        folder = (step.root / "sub/b").local_path().parents[2]
        assert folder.exists()
        del step
        assert not folder.exists()
