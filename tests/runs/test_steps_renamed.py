"""A step in a folder of another number is never taken for the step of that number: it is named, with the way out."""

import shutil

import keras
import numpy as np
import pytest
from object_server import served
from saved_steps import save_step
from step_folders import save_step as save_files

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import DamagedError, LoadInterruptedError, SourceNotFoundError
from shardload.runs import digests
from shardload.runs.listing import find_step, list_steps
from shardload.verifying import verify

RENAMED = r"9: it contains step 4, so the folder was copied or renamed\. Rename it to 4; a copy needs a name that is no"


def build():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Steps 4 and 7; 4 is the better one."""
    model, root = build(), tmp_path_factory.mktemp("bucket") / "run"
    model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)
    for step, loss in ((4, 0.25), (7, 0.5)):
        save_step(model, root, step, epoch=step // 4, epoch_done=True, monitor="loss", mode="min", logs={"loss": loss})
    return root


@pytest.fixture
def run(saved, tmp_path):
    """The same, with step 4 copied to the folder 9."""
    shutil.copytree(saved, tmp_path / "run")
    shutil.copytree(saved / "4", tmp_path / "run" / "9")
    return tmp_path / "run"


@pytest.fixture
def store(run, monkeypatch):
    with served(run.parent, monkeypatch) as server:
        yield server


@pytest.mark.parametrize("step", ["latest", 9])
def test_restore_refuses_it_and_offers_the_newest_good_step(run, step):
    with pytest.raises(DamagedError, match=rf"(?s)run/9 as step {RENAMED}.*Step 7 is the newest good one"):
        shardload.restore(build(), run, step=step)


def test_the_step_before_it_is_a_way_out(run):
    report = shardload.restore(build(), run, fallback="previous")
    assert any("step 7" in note and "verified" in note for note in report.notes)
    assert any("step 9" in note and "contains step 4" in note for note in report.notes)


def test_best_is_the_original_or_says_what_became_of_it(run):
    assert find_step(run, "best").step == 4
    shutil.rmtree(run / "4")
    with pytest.raises(DamagedError, match=RENAMED):
        shardload.restore(build(), run, step="best")


def test_a_copy_of_a_lower_number_is_not_the_best_either(tmp_path):
    save_files(tmp_path, 4, monitor="loss", mode="min", logs={"loss": 0.5})
    shutil.copytree(tmp_path / "4", tmp_path / "2")
    assert [(info.step, info.best) for info in list_steps(tmp_path)] == [(2, False), (4, True)]


@pytest.mark.parametrize("what", ["", "9"])
def test_load_refuses_it(run, what):
    with pytest.raises(DamagedError, match=RENAMED):
        shardload.load_weights(build(), run / what)


def test_under_a_name_that_is_no_number_it_loads(run):
    (run / "9").rename(run / "final")
    assert any("step 7" in note for note in shardload.restore(build(), run).notes)
    shardload.load_weights(build(), run / "final")
    assert verify(run / "final")[0].is_good


def test_a_link_with_another_number_is_no_newer_step(run):
    shutil.rmtree(run / "9")
    (run / "9").symlink_to(run / "4")
    with pytest.raises(DamagedError, match=RENAMED):
        shardload.restore(build(), run)


def test_the_list_and_verify_say_so(run):
    assert [info.problems for info in list_steps(run)] == [None, None, "contains step 4: copied or renamed"]
    assert [verdict.verdict for verdict in verify(run)] == ["verified", "verified", "damaged"]
    (found,) = digests.find_damage(run / "9")
    assert "contains step 4" in str(found) and "step 9" in str(found)


def test_a_number_that_is_gone_is_found_under_its_new_name(run):
    shutil.rmtree(run / "4")
    with pytest.raises(SourceNotFoundError, match=r"has no step 4\. The folder 9 contains it"):
        find_step(run, 4)


def test_a_run_does_not_resume_from_it(run):
    model = build()
    with pytest.raises(DamagedError, match=RENAMED):
        model.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0, callbacks=[OrbaxCheckpoint(run, resume=True)])


def test_retention_neither_counts_nor_removes_it(run):
    build().fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0, callbacks=[OrbaxCheckpoint(run, "loss", max_to_keep=2)])
    assert sorted(int(p.name) for p in run.iterdir() if p.name.isdigit()) == [7, 9, 10]


def test_an_older_step_whose_record_has_no_number_is_read(tmp_path):
    path = save_files(tmp_path, 4)
    (path / "shardload" / "step.json").write_text('{"epoch": 1}')
    digests.Digests.compute(path).write(path)
    path.rename(tmp_path / "9")
    assert [info.problems for info in list_steps(tmp_path)] == [None]
    assert digests.find_damage(tmp_path / "9") == []


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_next_best_is_not_a_copy_of_the_best(run, store, is_remote):
    data = max((run / "4" / "pytree").rglob("d/*"), key=lambda file: file.stat().st_size)
    data.write_bytes(data.read_bytes()[:-9] + bytes(9))
    folder = f"{store.s3}/run" if is_remote else run
    said = r"(?s)tep 4 .*Step 7 is the next best.*: pass step=7"
    with pytest.raises((DamagedError, LoadInterruptedError), match=said):
        shardload.restore(build(), folder, step="best")
    report = shardload.restore(build(), folder, step="best", fallback="previous")
    assert any(note.startswith("step 7") for note in report.notes)


@pytest.mark.parametrize("step", ["latest", 9, "best"])
def test_from_afar(run, store, step):
    shutil.rmtree(run / "4")
    with pytest.raises(DamagedError, match=RENAMED):
        shardload.restore(build(), f"{store.s3}/run", step=step)


def test_from_afar_by_its_own_address(run, store):
    for address in (f"{store.http}/run/9", f"{store.s3}/run"):
        with pytest.raises(DamagedError, match=RENAMED):
            shardload.load_weights(build(), address)
    assert [info.problems for info in list_steps(f"{store.s3}/run")][-1] == "contains step 4: copied or renamed"
    assert [verdict.verdict for verdict in verify(f"{store.s3}/run")] == ["verified", "verified", "damaged"]
    report = shardload.restore(build(), f"{store.s3}/run", fallback="previous")
    assert any("step 7" in note for note in report.notes)
