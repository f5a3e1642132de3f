"""A step is there whole or not at all: killed writers, vanished folders, two writers, full disks."""

import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
from step_folders import fill, names, save_step

from shardload.errors import SaveError, SourceNotFoundError, StepExistsError, UsageError, WriteError
from shardload.runs import publish
from shardload.runs.digests import Digests, find_damage
from shardload.runs.listing import list_steps
from shardload.runs.publish import Root, Staging, remove_stale, remove_step

CHILD = Path(__file__).parents[1] / "support" / "step_child.py"


def ready(root, step=7):
    """A staging folder that could be published."""
    staging = Staging.begin(root, step)
    fill(staging.path, step=step)
    Digests.compute(staging.path).write(staging.path)
    return staging


def test_nothing_shows_before_publish(tmp_path):
    staging = ready(tmp_path)
    assert names(tmp_path) == [".staging"] and staging.publish() == tmp_path / "7"
    assert find_damage(tmp_path / "7") == [] and names(tmp_path / ".staging") == []


def test_relative_roots_stay_where_they_were(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    staging = ready("run")
    monkeypatch.chdir("/")
    assert staging.publish() == tmp_path / "run" / "7"


def test_everything_is_flushed_before_the_rename(tmp_path, monkeypatch):
    synced, real_fsync, real_rename = [], os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (synced.append(str(Path(f"/proc/self/fd/{fd}").readlink())), real_fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda a, b: (synced.append("rename"), real_rename(a, b)))
    staging = ready(tmp_path)
    synced.clear()
    expected = {str(path) for path in [staging.path, *staging.path.rglob("*")]}
    staging.publish()
    assert set(synced[: synced.index("rename")]) == expected
    assert synced[synced.index("rename") + 1 :] == [str(tmp_path)]


def test_a_failed_flush_is_no_step(tmp_path, monkeypatch):
    staging = ready(tmp_path)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(SaveError, match=r"step 7 .*Input/output error.*untouched") as caught:
        staging.publish()
    assert caught.value.errno == errno.EIO
    assert list_steps(tmp_path) == []


def test_a_step_is_never_overwritten(tmp_path):
    save_step(tmp_path, 7)
    with pytest.raises(StepExistsError, match="Cannot save step 7"):
        Staging.begin(tmp_path, 7)
    assert isinstance(StepExistsError("x"), FileExistsError)


def test_who_saved_the_step_that_is_there_decides_the_way_out(tmp_path):
    save_step(tmp_path, 7).rename(tmp_path / "8")  # as if another process had saved 8
    save_step(tmp_path, 7)
    root = Root(tmp_path)
    with pytest.raises(StepExistsError, match=r"This process saved it\. Save under another number"):
        Staging.begin(root, 7)
    os.utime(tmp_path / "7", (root.opened_s, root.opened_s + 1))  # as if this root had been open when it was saved
    with pytest.raises(StepExistsError, match=r"This process saved it\. Two callbacks of one"):
        Staging.begin(root, 7)
    told = {-1: "saved before this run. Remove it", 1: "Another run.*saved it meanwhile, at 20.* own folder,"}
    for days, message in told.items():
        os.utime(tmp_path / "8", (root.opened_s, root.opened_s + days * 86400))
        with pytest.raises(StepExistsError, match=message):
            Staging.begin(root, 8)


@pytest.mark.parametrize(
    "make", [lambda r: save_step(r, 7), lambda r: (r / "7").touch(), lambda r: (r / "7").symlink_to(r)]
)
def test_the_second_of_two_writers_is_told(tmp_path, make):
    staging = ready(tmp_path)
    make(tmp_path)
    before = os.lstat(tmp_path / "7").st_ino
    with pytest.raises(StepExistsError):
        staging.publish()
    staging.discard()
    assert os.lstat(tmp_path / "7").st_ino == before and names(tmp_path / ".staging") == []


def test_a_writer_who_wins_in_the_last_moment_keeps_the_step(tmp_path, monkeypatch):
    staging = ready(tmp_path)
    monkeypatch.setattr(publish, "refuse_existing", lambda root, step: None)
    save_step(tmp_path, 7)
    with pytest.raises(StepExistsError):
        staging.publish()


def test_an_empty_folder_in_the_way_is_no_step(tmp_path):
    (tmp_path / "7").mkdir()
    ready(tmp_path).publish()
    assert find_damage(tmp_path / "7") == []


def test_a_missing_root_is_not_made(tmp_path):
    with pytest.raises(SaveError, match="No such file"):
        Staging.begin(tmp_path / "gone", 1)
    assert not (tmp_path / "gone").exists()


def test_a_root_can_be_made_on_request(tmp_path):
    root = Root(tmp_path / "a" / "b", create=True)
    ready(root).publish()
    (tmp_path / "file").touch()
    with pytest.raises(SaveError, match=r"Not a directory|File exists"):
        Root(tmp_path / "file", create=True)


@contextmanager
def ordinary_user():
    """Root may write anywhere, so be somebody else for a while."""
    was = os.geteuid()
    if was == 0:
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(was)


def test_a_folder_that_may_not_be_written(tmp_path):
    with tempfile.TemporaryDirectory() as root:  # not tmp_path: others may not even look into that
        save_step(Path(root), 1)
        for folder in (Path(root), Path(root) / ".staging"):
            folder.chmod(0o555)
            said = r"step 2 .*Permission denied.*Grant this user"
            with ordinary_user(), pytest.raises(SaveError, match=said) as caught:
                Staging.begin(root, 2)
            assert caught.value.errno == errno.EACCES
            with ordinary_user(), pytest.raises(WriteError, match="Cannot remove step 1"):
                remove_step(root, 1)
        Path(root).chmod(0o755)
        assert find_damage(Path(root) / "1") == []


def test_a_root_that_vanished_is_noticed(tmp_path):
    root = tmp_path / "run"
    root.mkdir()
    staging = ready(root)
    shutil.rmtree(root)
    with pytest.raises(SaveError, match=r"removed or renamed.*\. Earlier steps may have moved with the folder$"):
        staging.publish()
    staging.discard()
    assert not root.exists()


def test_a_root_that_was_replaced_is_noticed(tmp_path):
    (tmp_path / "run").mkdir()
    root = Root(tmp_path / "run")
    staging = ready(root)
    (tmp_path / "run").rename(tmp_path / "old")
    (tmp_path / "run").mkdir()
    for act in (staging.publish, lambda: Staging.begin(root, 8)):
        with pytest.raises(SaveError, match="another folder has replaced"):
            act()
    assert names(tmp_path / "run") == []


def test_what_has_no_digests_is_not_published(tmp_path):
    staging = Staging.begin(tmp_path, 7)
    for prepare in (str, fill):  # nothing, and files without digests
        prepare(staging.path)
        with pytest.raises(SaveError, match="no valid digests"):
            staging.publish()
    Digests.compute(staging.path).write(staging.path)
    (staging.path / "pytree/d/big").unlink()
    with pytest.raises(SaveError, match=r"changed after its digests.*big is missing"):
        staging.publish()
    assert list_steps(tmp_path) == []


def test_discard_leaves_nothing_and_may_be_repeated(tmp_path):
    staging = ready(tmp_path)
    for _ in range(2):
        staging.discard()
    assert names(tmp_path / ".staging") == []


@pytest.mark.parametrize("step", [-1, 1.0, True, "7", None])
def test_steps_are_whole_numbers(tmp_path, step):
    with pytest.raises(UsageError, match="expected a non-negative integer"):
        Staging.begin(tmp_path, step)


def test_only_the_process_that_began_publishes(tmp_path):
    first = ready(tmp_path)
    other = Staging.join(first.path)
    assert (other.path, other.step) == (first.path, 7)
    with pytest.raises(UsageError, match="process that began"):
        other.publish()
    other.discard()
    assert first.publish().is_dir()


def test_a_live_writer_is_left_alone(tmp_path):
    staging = ready(tmp_path)
    assert remove_stale(tmp_path) == []
    assert staging.publish().is_dir()


def test_stale_staging_is_removed_and_nothing_else(tmp_path):
    assert remove_stale(tmp_path) == []
    stale = tmp_path / ".staging" / "3-0011aabb"
    (stale / "step").mkdir(parents=True)
    (tmp_path / ".staging" / "notes").mkdir()
    (tmp_path / ".staging" / "4-00").symlink_to(tmp_path)
    save_step(tmp_path, 1)
    assert remove_stale(tmp_path) == [stale] and names(tmp_path / ".staging") == ["4-00", "notes"]
    assert find_damage(tmp_path / "1") == []


def test_a_folder_that_is_removed_before_it_is_locked_is_made_again(tmp_path, monkeypatch):
    take, removed = publish.FolderLock.take, []

    def late(home, *, wait=False):
        if wait and not removed:
            removed.extend(remove_stale(tmp_path))
        return take(home, wait=wait)

    monkeypatch.setattr(publish.FolderLock, "take", late)
    staging = ready(tmp_path)
    assert len(removed) == 1 and removed[0] != staging.home
    assert staging.publish().is_dir()


def test_nothing_is_stale_where_nothing_can_be_locked(tmp_path, monkeypatch):
    monkeypatch.setattr(publish.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    staging = ready(tmp_path)
    assert remove_stale(tmp_path) == []
    assert staging.publish().is_dir()


def test_a_removed_step_is_gone(tmp_path):
    save_step(tmp_path, 1)
    save_step(tmp_path, 2)
    remove_step(tmp_path, 1)
    assert [info.step for info in list_steps(tmp_path)] == [2]
    assert names(tmp_path / ".staging") == []
    with pytest.raises(SourceNotFoundError, match="Cannot remove step 1"):
        remove_step(tmp_path, 1)


def test_a_linked_step_is_unlinked_not_emptied(tmp_path):
    elsewhere = save_step(tmp_path, 1).rename(tmp_path / "elsewhere")
    (tmp_path / "2").symlink_to(elsewhere)
    remove_step(tmp_path, 2)
    assert find_damage(elsewhere) == []
    assert not (tmp_path / "2").is_symlink()


def test_a_step_that_cannot_be_removed(tmp_path, monkeypatch):
    save_step(tmp_path, 1)
    monkeypatch.setattr(os, "rename", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", "x")))
    with pytest.raises(WriteError, match="Permission denied"):
        remove_step(tmp_path, 1)
    assert find_damage(tmp_path / "1") == []


def kill_often(root, kind, *, times, rng, patience_s):
    """Start a writer, kill it at a random moment after its first step; returns how many kills left staging behind."""
    left = 0
    for _ in range(times):
        with subprocess.Popen([sys.executable, CHILD, root, kind], stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout.readline()
            time.sleep(rng.random() * patience_s)
            child.kill()
        left += any((root / ".staging").iterdir())
        steps = list_steps(root)
        assert steps
        assert {path.name for path in root.iterdir() if path.name.isdigit()} == {str(info.step) for info in steps}
        assert [damage for info in steps for damage in find_damage(info.path)] == []
    return left


@pytest.mark.slow
def test_a_killed_writer_never_leaves_half_a_step(tmp_path):
    assert kill_often(tmp_path, "plain", times=12, rng=random.Random(0), patience_s=0.05)
    remove_stale(tmp_path)
    assert names(tmp_path / ".staging") == []


@pytest.mark.slow
def test_a_writer_killed_inside_orbax_never_leaves_half_a_step(tmp_path):
    assert kill_often(tmp_path, "orbax", times=6, rng=random.Random(0), patience_s=0.3)


@pytest.mark.slow
def test_removing_a_step_and_clearing_up_do_not_disturb_each_other(tmp_path):
    done = threading.Event()

    def clear_up():
        while not done.is_set():
            remove_stale(tmp_path)

    thread = threading.Thread(target=clear_up)
    thread.start()
    try:
        for step in range(300):
            (tmp_path / str(step) / "shardload").mkdir(parents=True)
            (tmp_path / str(step) / "shardload" / "step.json").write_text("{}")
            remove_step(tmp_path, step)
    finally:
        done.set()
        thread.join()
    remove_stale(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [".staging"]
    assert list((tmp_path / ".staging").iterdir()) == []
