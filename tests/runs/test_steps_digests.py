"""Every kind of damage to a step is found and named; an undamaged one is not accused."""

import json
import os
import random
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import pytest
import xxhash
from step_folders import MIB, files_of, flip, save_step

from shardload.errors import DamagedError, SourceError, SourceNotFoundError, TransferError, UsageError
from shardload.runs.digests import Checker, Damage, Digests, find_damage
from shardload.stores import local

BIG = "pytree/d/big"


@pytest.fixture
def step(tmp_path):
    return save_step(tmp_path, 7)


def rewrite(step, change):
    """Change ``digests.json`` and give it a digest of itself that fits, as a forger would."""
    path = step / "shardload" / "digests.json"
    body = json.loads(path.read_text())
    del body["self"]
    change(body)
    own = xxhash.xxh3_64_hexdigest(json.dumps(body, sort_keys=True, separators=(",", ":")).encode())
    path.write_text(json.dumps(body | {"self": own}))


def test_a_step_as_saved_is_not_accused(step):
    assert find_damage(step) == [] and Digests.read(step) == Digests.compute(step)


def test_the_format_is_the_one_of_the_design_note(step):
    found = json.loads((step / "shardload" / "digests.json").read_text())
    own = found.pop("self")
    assert own == xxhash.xxh3_64_hexdigest(json.dumps(found, sort_keys=True, separators=(",", ":")).encode())
    content = (step / BIG).read_bytes()
    units = [xxhash.xxh3_64_hexdigest(content[at : at + MIB]) for at in range(0, len(content), MIB)]
    assert found["files"][BIG] == {"bytes": 2 * MIB + 5, "units": units}
    assert found["files"]["pytree/d/empty"] == {"bytes": 0, "units": []}
    assert (found["version"], found["algorithm"], found["unit_bytes"]) == (1, "xxh3_64", MIB)
    assert "shardload/digests.json" not in found["files"]


def test_large_files_are_split_among_threads_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("shardload.runs.digest_list.TASK_UNITS", 2)
    monkeypatch.setattr("shardload.runs.digest_list.READ_UNITS", 1)
    (tmp_path / "big").write_bytes(content := random.Random(0).randbytes(7 * MIB + 1))
    expected = tuple(xxhash.xxh3_64_hexdigest(content[at : at + MIB]) for at in range(0, len(content), MIB))
    assert Digests.compute(tmp_path).files["big"].units == expected


def test_every_flipped_bit_is_found_and_named(step):
    rng = random.Random(0)
    for path in files_of(step) * 8:
        if not (size := path.stat().st_size):
            continue
        offset, bit = rng.randrange(size), rng.randrange(8)
        flip(path, offset=offset, bit=bit)
        (found,) = find_damage(step)
        assert found.path == path.relative_to(step).as_posix() and found.step == "7"
        if found.offset is not None:
            assert found.offset == offset // MIB * MIB
        flip(path, offset=offset, bit=bit)
    assert find_damage(step) == []


def test_neighbouring_damage_is_reported_once(step):
    flip(step / BIG, offset=5)
    flip(step / BIG, offset=MIB + 5)
    (found,) = find_damage(step)
    assert str(found) == (f"step 7: {BIG} from byte 0 is damaged: the digest does not match the next {2 * MIB} bytes")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: f.unlink(), "is missing"),
        (lambda f: os.truncate(f, MIB), f"was truncated: it has {MIB} bytes, but was saved with {2 * MIB + 5}"),
        (lambda f: os.truncate(f, 0), "was truncated: it has 0 bytes"),
        (lambda f: os.truncate(f, 3 * MIB), "has grown"),
        (lambda f: (f.rename(f.with_name("moved")), f.symlink_to("moved")), "symbolic link"),
        (lambda f: (f.unlink(), f.mkdir()), "is missing"),
        (lambda f: (f.unlink(), os.mkfifo(f)), "a pipe"),
    ],
)
def test_a_file_that_is_not_as_saved(step, damage, says):
    damage(step / BIG)
    named = {found.path: found for found in find_damage(step)}
    assert says in str(named[BIG])
    assert {found.path for found in Digests.read(step).check_names(step)} == set(named)


def test_unexpected_files_and_linked_folders_are_damage(step, tmp_path):
    (step / "extra").write_text("x")
    (step / "pytree" / "link").symlink_to(tmp_path, target_is_directory=True)
    assert [found.path for found in find_damage(step)] == ["extra", "pytree/link"]


@pytest.mark.parametrize("name", [".DS_Store", "pytree/._big", "pytree/d/Thumbs.db", "shardload/desktop.ini"])
def test_files_that_systems_leave_in_a_step_are_no_damage(step, name):
    (step / name).write_text("x")
    assert find_damage(step) == [] == Digests.read(step).check_names(step)
    assert Digests.compute(step) == Digests.read(step)


def test_a_grown_empty_file_is_damage(step):
    (step / "pytree/d/empty").write_text("x")
    assert find_damage(step)[0].path == "pytree/d/empty"


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"nonsense", b"\xff", b'{"self": 3}', b"[" * 50_000])
def test_digests_that_are_none(step, content):
    (step / "shardload" / "digests.json").write_bytes(content)
    (found,) = find_damage(step)
    assert found.path == "shardload/digests.json"
    with pytest.raises(DamagedError, match="Step 7 is damaged"):
        Digests.read(step)


def test_missing_digests(step, tmp_path):
    (step / "shardload" / "digests.json").unlink()
    assert [found.path for found in find_damage(step)] == ["shardload/digests.json"]
    with pytest.raises(SourceNotFoundError, match="shardload did not save it"):
        Digests.read(step)
    with pytest.raises(SourceNotFoundError, match="there is no such folder"):
        find_damage(tmp_path / "8")


@pytest.mark.parametrize("name", ["../up", "/etc/passwd", "a/../../b", "", "a//b", "./a", "a\0b"])
def test_paths_that_lead_out_are_refused(step, name):
    rewrite(step, lambda body: body["files"].update({name: {"bytes": 0, "units": []}}))
    with pytest.raises(DamagedError, match="leads out"):
        Digests.read(step)


@pytest.mark.parametrize(
    "entry",
    [None, {}, {"bytes": -1, "units": []}, {"bytes": True, "units": ["0" * 16]}, {"bytes": 1, "units": []},
     {"bytes": 1, "units": ["zz"]}, {"bytes": 1, "units": [3]}, {"bytes": 1 << 80, "units": []}],
)  # fmt: skip
def test_entries_that_make_no_sense_are_refused(step, entry):
    rewrite(step, lambda body: body["files"].update({"a": entry}))
    with pytest.raises(DamagedError, match="entry of 'a'"):
        Digests.read(step)


@pytest.mark.parametrize("change", [{"version": 2}, {"algorithm": "md5"}, {"unit_bytes": 1}, {"files": []}])
def test_another_version_is_refused(step, change):
    rewrite(step, lambda body: body.update(change))
    with pytest.raises(DamagedError):
        Digests.read(step)


def test_links_cannot_be_given_digests(step):
    (step / "link").symlink_to("pytree")
    with pytest.raises(SourceError, match="a symbolic link"):
        Digests.compute(step)


def test_progress_adds_up_to_all_bytes(step):
    seen = []
    find_damage(step, progress=seen.append)
    assert sum(seen) == sum(file.n_bytes for file in Digests.read(step).files.values())


def test_an_unreadable_file_is_damage(step, monkeypatch):
    monkeypatch.setattr("shardload.runs.digests.digest_piece", Mock(side_effect=TransferError("Input/output error")))
    assert "Input/output error" in str(find_damage(step)[0])


def test_damage_reads_well():
    assert str(Damage("a", "is missing", step="3")) == "step 3: a is missing"


def test_a_checker_checks_what_is_read_and_no_more(step):
    flip(step / BIG, offset=2 * MIB + 1)
    with Checker(step) as checker:
        checker.check(BIG, 5, MIB + 1)
        checker.check(step / BIG, 0, 2 * MIB)
        assert checker.bytes_checked == 2 * MIB
        for _ in range(2):
            with pytest.raises(DamagedError, match=rf"Step 7 is damaged: .*{BIG} from byte {2 * MIB}"):
                checker.check(BIG, 2 * MIB, 2 * MIB + 1)


def test_a_unit_is_read_and_checked_at_once(step):
    content, into = (step / BIG).read_bytes(), memoryview(bytearray(MIB))
    with Checker(step) as checker:
        for unit, size in enumerate((MIB, MIB, 5, 0)):
            assert checker.read_unit(step / BIG, unit, into) == size
            assert into[:size] == content[unit * MIB :][:size]
        assert checker.bytes_checked == 2 * MIB + 5
        flip(step / BIG, offset=MIB + 7)
        with pytest.raises(DamagedError, match=rf"Step 7 is damaged: .*{BIG} from byte {MIB}"):
            checker.read_unit(BIG, 1, into)


def test_threads_check_each_unit_once(step):
    with Checker(step) as checker:
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(checker.check_whole, [BIG] * 8))
        assert checker.bytes_checked == 2 * MIB + 5


def test_a_failed_read_is_tried_again(step, monkeypatch):
    with Checker(step) as checker:
        with monkeypatch.context() as patch, pytest.raises(TransferError, match="flaky"):
            patch.setattr(local, "read_exact", Mock(side_effect=TransferError("flaky")))
            checker.check_whole(BIG)
        checker.check_whole(BIG)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: f.unlink(), "cannot be opened"),
        (lambda f: os.truncate(f, 1), "was truncated"),
        (lambda f: (f.rename(f.with_name("moved")), f.symlink_to("moved")), "symbolic link"),
        (lambda f: (f.parent.rename(f.parent.with_name("e")), f.parent.symlink_to("e")), "symbolic link"),
    ],
)
def test_a_checker_refuses_files_that_changed(step, damage, says):
    damage(step / BIG)
    with Checker(step) as checker, pytest.raises(DamagedError, match=says):
        checker.check(BIG, 0, 1)


def test_a_checker_knows_only_the_files_of_its_step(step, tmp_path):
    with Checker(step) as checker:
        with pytest.raises(DamagedError, match="was not saved with the step"):
            checker.check("other", 0, 1)
        with pytest.raises(UsageError, match="is not inside"):
            checker.check(tmp_path / "x", 0, 1)
        with pytest.raises(DamagedError, match="should have at least"):
            checker.check(BIG, 0, 3 * MIB)
        checker.check_whole("pytree/d/empty")
        checker.check(BIG, 4, 4)
