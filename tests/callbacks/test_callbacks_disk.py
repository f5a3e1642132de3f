"""Disks that are full, closed or taken away while ``fit`` saves to them, and while a checkpoint is converted.

All of it happens to a process of its own (`disk_child`), which tells what it saw; one such process for several tests.
"""

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

OWN_MOUNTS = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]
ROOT = Path(__file__).parents[2]


def child(folder, *scenarios, before=()):
    """What each scenario says it saw."""
    command = [*before, sys.executable, "-m", "disk_child", str(folder), *scenarios]
    # What is not there yet is made below the folder: the home of another user is not to be written to.
    named = {**os.environ, "HOME": str(folder), "KERAS_HOME": str(folder)}
    done = subprocess.run(command, cwd=ROOT, env=named, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-5000:]
    return {name: seen for line in done.stdout.splitlines() for name, seen in json.loads(line).items()}


@pytest.fixture(scope="module")
def mounting(tmp_path_factory):
    """How to give a process file systems of its own."""
    try_it = ["mount", "-t", "tmpfs", "tmpfs", str(tmp_path_factory.mktemp("mount"))]
    if shutil.which("unshare") is None or subprocess.run([*OWN_MOUNTS, *try_it], check=False).returncode:
        pytest.skip("no small disk can be had here: this user may not mount one, not even in a namespace of its own")
    return OWN_MOUNTS


@pytest.fixture(scope="module")
def disk(mounting, tmp_path_factory):
    names = ("full", "full_in_places", "other_disk", "read_only", "conversions")
    return child(tmp_path_factory.mktemp("disk"), *names, before=mounting)


@pytest.fixture(scope="module")
def folder():
    """The last ones as an ordinary user, who cannot pass pytest's folders: those are root's alone."""
    base = Path(tempfile.mkdtemp())
    base.chmod(0o755)
    folders = ("gone", "gone_while_saving", "older_spoilt")
    yield child(base, *folders, "denied_at_start", "denied_in_between", "older_denied")
    shutil.rmtree(base)


def assert_failed(seen, why, *, errno, steps):
    """``fit`` raised that, and the folder holds these steps, whole ones.

    Threads of Orbax may still write to the staging folder after that; what they leave, the next ``fit`` removes.
    """
    error = seen["error"]
    assert error is not None, "fit ended as if all were well"
    assert (error["type"], error["errno"]) == ("SaveError", errno), error
    assert re.search(why, error["text"]) and "\n" not in error["text"], error["text"]
    assert (seen["steps"], seen["bad"]) == (steps, []), seen


def assert_saved(seen, newest):
    """``fit`` ended well and its last step is whole, as are all others."""
    assert seen["error"] is None and seen["steps"][-1] == newest, seen
    assert (seen["bad"], seen["staged"]) == ([], [])


# ---- a full disk, a read-only one, another one ---------------------------------------------------


def test_a_disk_that_fills_up_is_told_and_costs_no_step(disk):
    first, again = disk["full"]["first"], disk["full"]["again"]
    assert_failed(first, r"Cannot save step 3 .*No space left on device.*Free some room", errno=28, steps=[1, 2])
    assert first["batches"] == 3  # it was raised in the fourth, before this callback was told of it
    assert_saved(again, 2 + again["batches"])


def test_wherever_the_room_ends_it_is_told(disk):
    before, tries, again = (disk["full_in_places"][name] for name in ("before", "tries", "again"))
    failed = [seen for seen in tries if seen["error"]]
    for seen in failed:
        assert_failed(seen, r"Cannot save step \d+ .*No space left on device.*Free", errno=28, steps=seen["steps"])
    for seen, later in itertools.pairwise(tries):
        assert not set(seen["staged"]) & set(later["staged"]), "what failed keeps its room for good"
    saved = [seen for seen in tries if not seen["error"]]
    for seen in saved:
        assert_saved(seen, seen["steps"][-1])
    assert len(failed) >= 10 and len(saved) >= 3
    for seen, later in itertools.pairwise([before, *tries]):
        more = set(later["steps"]) - set(seen["steps"])
        assert set(seen["steps"]) <= set(later["steps"]) and len(more) == (0 if later["error"] else 1)
    assert_saved(again, again["steps"][-1])
    assert again["batches"] > 0


def test_staging_on_another_disk_is_told_with_the_way_out(disk):
    seen = disk["other_disk"]
    why = r"step 1 .*cross-device.*\.staging must be on the same file system"
    assert_failed(seen["first"], why, errno=18, steps=[])
    assert_saved(seen["again"], 4)


def test_a_disk_that_becomes_read_only(disk):
    seen = disk["read_only"]
    assert_failed(seen["between"], r"Cannot save step 3 .*Read-only file system", errno=30, steps=[1, 2])
    assert_failed(seen["start"], r"Cannot save steps to .*Read-only file system", errno=30, steps=[1, 2])
    assert seen["start"]["batches"] == 0
    assert_saved(seen["again"], 2 + seen["again"]["batches"])


# ---- a user who may not write --------------------------------------------------------------------


@pytest.mark.parametrize("where", ["itself", "above"])
def test_a_folder_this_user_may_not_write_to_is_told_before_training(folder, where):
    seen = folder["denied_at_start"][where]
    assert_failed(seen, "Cannot save steps to .*: Permission denied. .*may write to", errno=13, steps=[])
    assert seen["batches"] == 0


@pytest.mark.parametrize("where", ["root", "staging"])
def test_a_folder_that_is_closed_in_between(folder, where):
    seen, again = folder["denied_in_between"][where], folder["denied_in_between"][f"{where} again"]
    assert_failed(seen, "Cannot save step 3 .*Permission denied.*Grant this user write", errno=13, steps=[1, 2])
    assert seen["batches"] <= 3
    assert_saved(again, 2 + again["batches"])


def test_an_older_step_that_is_closed_is_not_taken_for_a_failed_save(folder):
    seen = folder["older_denied"]
    assert seen["all stay"]["error"] is None and seen["a"] == {"steps": [1, 2, 3, 4], "bad": [], "staged": []}
    told = seen["not to be listed"]["error"]["text"]
    assert re.search(r"Step 3 is saved in .*/1, which may be a step: Permission denied", told)
    assert seen["b"] == {"steps": [1, 2, 3], "bad": [], "staged": []}


def test_a_step_that_cannot_be_removed_is_told_with_what_is_left_of_it(folder):
    seen, again = folder["older_denied"]["not to be removed"], folder["older_denied"]["c"]
    (left,) = seen["staged"]
    told = rf"Step 3 is saved in .*Step 1 .* was removed, but.*Permission denied.*Delete the folder .*/{left}$"
    assert_failed(seen, told, errno=None, steps=[2, 3])
    assert_saved(again, 3 + again["batches"])


# ---- folders that go away ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "why", "errno", "kept"),
    [
        ("removed", "the folder was removed or renamed", 2, None),
        ("emptied", "another folder has replaced", None, None),
        ("linked", "another folder has replaced", None, [1, 2]),
        ("moved", "the folder was removed or renamed", 2, [1, 2]),
    ],
)
def test_a_root_that_goes_away_is_told_and_nothing_is_written_in_its_place(folder, how, why, errno, kept):
    seen = folder["gone"][how]
    error = seen["error"]
    assert re.match(rf"Cannot save step 3 to .*{why}", error["text"]) and error["errno"] == errno
    assert "untouched" not in error["text"]
    assert seen["left"] == [] and seen["batches"] == 2
    assert kept is None or seen["away"] == {"steps": kept, "bad": [], "staged": []}


def test_a_root_that_moves_and_leaves_a_link_goes_on(folder):
    seen = folder["gone"]["moved and linked"]
    assert_saved(seen, 4)
    assert seen["away"]["steps"] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("what", "why"),
    [("staging", "folder .* was removed"), ("step", "folder .* was removed"), ("item", "folder 'item' .*is missing")],
)
def test_what_is_removed_while_a_step_is_written_does_not_make_a_step(folder, what, why):
    seen, again = folder["gone_while_saving"][what], folder["gone_while_saving"][f"{what} again"]
    assert seen["steps"] == [1], "a step without what was removed"
    assert re.match(rf"Cannot save step 2 to .*{why}.*untouched", seen["error"]["text"]), seen["error"]
    assert seen["error"]["errno"] == 2 and seen["bad"] == []
    assert_saved(again, 1 + again["batches"])


@pytest.mark.parametrize("how", ["root", "moved", "replaced"])
def test_a_root_that_goes_away_while_a_step_is_written(folder, how):
    seen = folder["gone_while_saving"][how]
    # Whoever writes a file may make the folders above it anew: then another folder is there, and holds no step.
    assert re.match(r"Cannot save step 2 .*(the folder was removed|another folder has replaced)", seen["error"]["text"])
    assert not isinstance(seen["steps"], list) or seen["steps"] == []
    assert how == "root" or (seen["away"]["steps"], seen["away"]["bad"]) == ([1], [])


def test_what_becomes_of_older_steps_is_nobodys_failure(folder):
    seen = folder["older_spoilt"]
    assert [found["error"] for found in seen.values()] == [None] * len(seen)
    assert {name: (found["steps"], found["bad"]) for name, found in seen.items()} == {
        "removed": ([3, 4], []),
        "digests": ([1, 3, 4], [1]),  # what is damaged is for people to remove
        "json": ([1, 3, 4], [1]),
        "bytes": ([1, 2, 3, 4], [2]),
        "the only one": ([4], []),
    }


# ---- conversions ---------------------------------------------------------------------------------


@pytest.mark.parametrize("to", ["h5", "safetensors", "orbax"])
def test_a_conversion_that_fills_the_disk_goes_on_once_there_is_room(disk, to):
    found = {name: seen for name, seen in disk["conversions"].items() if name.startswith(to)}
    assert len(found) >= 3
    for name, seen in found.items():
        paragraph = seen["first"]["out"].splitlines()[-1]
        assert seen["first"]["code"] == 1, name
        kept = ".out.converting" in seen["first"]["names"]
        assert seen["first"]["names"] == [*([".out.converting"] if kept else []), "filler"]
        way_on = r" The finished part is in .*again to continue.*" if kept else ""
        said = r"\. Free some space, or choose another disk\." + way_on
        full = r"the disk is full, for [\d.]+ [KM]iB of tensors"
        assert re.fullmatch(rf"Error: Cannot write .*/out: {full}{said}", paragraph)
        assert kept or " -1 " in name, "work that was lost"
        assert (seen["again"]["code"], seen["again"]["names"]) == (0, ["out"]), seen
        assert seen["same"] in (None, 0)
    copied = [seen["again"]["out"] for name, seen in found.items() if " -1 " not in name]
    assert all(re.search(r"; (3|24) were copied by an interrupted run", out) for out in copied) and copied


def test_a_conversion_to_a_small_disk_is_refused_at_once(disk):
    first = disk["conversions"]["small"]["first"]
    assert (first["code"], first["names"]) == (1, []), first
    assert re.fullmatch(
        r"Error: Cannot write out: it needs .* to spare, but .*Free some space, or choose another folder\.\n",
        first["out"],
    )
