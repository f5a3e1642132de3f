import codecs
import json
import os
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from unittest.mock import Mock

import pytest

from shardload.errors import SourceError, SourceNotFoundError, TransferError, TruncatedSourceError, UnsafeSourceError
from shardload.stores.json_files import parse_object, read_object
from shardload.stores.local import LocalFile, located, open_readonly, read_exact
from shardload.stores.location import Fingerprint
from shardload.stores.store import read_bytes


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "data.bin"
    path.write_bytes(bytes(range(100)))
    return path


def test_read_exact_fills_a_typed_buffer(path):
    buffer = memoryview(bytearray(8)).cast("H")
    with closing(LocalFile(path)) as file:
        file.read_into(buffer, 10)
    assert file.n_bytes == 100
    assert bytes(buffer) == bytes(range(10, 18))


def test_read_exact_names_the_file_that_shrank(path):
    with (
        closing(LocalFile(path)) as file,
        pytest.raises(TransferError, match=r"data\.bin ends .* byte 100.* 20 more bytes"),
    ):
        file.read_into(memoryview(bytearray(30)), 90)


def test_read_exact_goes_on_after_short_reads(path, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real(fd, [buffers[0][:3]], offset))
    buffer = bytearray(10)
    with closing(LocalFile(path)) as file:
        file.read_into(memoryview(buffer), 5)
    assert buffer == bytes(range(5, 15))


def test_read_exact_of_nothing(path):
    with closing(LocalFile(path)) as file:
        file.read_into(memoryview(bytearray()).cast("B"), 0)


def test_read_exact_reports_a_disk_error(path):
    fd = os.open(path.parent, os.O_RDONLY)
    with pytest.raises(TransferError, match="Cannot read 1 byte at offset 0 of folder"):
        read_exact(fd, memoryview(bytearray(1)), 0, "folder")
    os.close(fd)


def test_read_header_refuses_before_allocating(path):
    with closing(LocalFile(path)) as file, pytest.raises(TruncatedSourceError, match=r"the header .* 100 bytes"):
        read_bytes(file, 1 << 60, offset=0, path=str(path), what="the header")


@pytest.mark.parametrize("kind", ["folder", "pipe"])
def test_only_regular_files_open(tmp_path, kind):
    path = tmp_path / "thing"
    path.mkdir() if kind == "folder" else os.mkfifo(path)
    with pytest.raises(SourceError, match="should be a file"):
        open_readonly(path)


def test_missing_and_dangling_files(tmp_path):
    with pytest.raises(SourceNotFoundError, match="There is no file"):
        open_readonly(tmp_path / "none")
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(SourceNotFoundError, match="points to nothing"):
        open_readonly(tmp_path / "link")


def test_permission_is_named(path, monkeypatch):
    monkeypatch.setattr(os, "open", Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(SourceError, match=r"may not be read .* chmod"):
        open_readonly(path)


def test_a_name_with_a_nul_byte_is_refused():
    with pytest.raises(SourceError, match="not a file name"):
        open_readonly("a\0b")


# ---- JSON that nobody vouches for: what a valid document may look like ---------------------------


@pytest.mark.parametrize(
    "template", ["{" * 3000, "{%- for m in messages %}{{ m['role'] }}{% endfor %}" * 500, '\\"[' * 2000]
)
def test_brackets_in_texts_are_no_containers(template):
    document = {"chat_template": template, "layers": [1, 2]}
    assert parse_object(json.dumps(document).encode(), path="x") == document


def test_brackets_beside_texts_are(template="{" * 3000):
    raw = json.dumps({"chat_template": template, "layers": [[]] * 3000}, separators=(",", ":")).encode()
    with pytest.raises(UnsafeSourceError, match="3002 brackets and braces"):
        parse_object(raw, path="x")


@pytest.mark.parametrize(("raw", "says"), [(b"[]", "contains a list. Download"), (b"\xff", "is not UTF-8. Download")])
def test_what_is_no_object_in_utf_8_names_the_way_out(raw, says):
    with pytest.raises(SourceError, match=says):
        parse_object(raw, path="x")


@pytest.mark.parametrize("after", ["", "\n", " \r\n\t" * 5000])
@pytest.mark.parametrize("length", [10, 5000, 100_000])
def test_a_byte_order_mark_and_blanks_at_the_end(tmp_path, after, length):
    document = {"name": "x" * length}
    (tmp_path / "x.json").write_bytes(codecs.BOM_UTF8 + (json.dumps(document) + after).encode())
    assert read_object(tmp_path / "x.json") == document


def test_copies_of_a_killed_process_are_removed_by_the_next(tmp_path):
    make = (
        "from shardload.stores.local import make_private_folder as make; folder = make(); print(folder, flush=True); "
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}

    def start(then):
        return subprocess.Popen([sys.executable, "-c", make + then], env=env, stdin=-1, stdout=-1, text=True)

    killed, living = start("import os; os._exit(9)"), start("input()")
    folders = [Path(one.stdout.readline().strip()) for one in (killed, living)]
    killed.communicate()
    for folder in folders:
        (folder / "copy").write_bytes(b"x")
        os.utime(folder, (0, 0))
    start("").communicate()
    assert [folder.exists() for folder in folders] == [False, True]
    living.communicate("\n")


def test_a_path_that_is_no_file_name_is_the_same_error_while_files_are_noted(tmp_path):
    for name in ("a\0b", "missing"):
        with pytest.raises((SourceError, SourceNotFoundError)), Fingerprint.opening():
            located(tmp_path / name).open()
