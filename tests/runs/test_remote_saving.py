"""Steps saved to buckets: complete or absent, whoever dies, refuses or writes there, too."""

import json
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
from bucket_child import digest, model, train
from bucket_server import bucket
from orbax.checkpoint import v1 as ocp
from remote_runs import build, same
from remote_runs import train as fit

import shardload
from shardload.errors import SaveError, StepExistsError, UsageError
from shardload.runs import ownership, remote_root
from shardload.runs.listing import find_step, list_steps
from shardload.runs.ownership import OWNER_FILE, Owner
from shardload.stores.uploads import Uploads
from shardload.verifying import verify


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "staging").mkdir()
    monkeypatch.setenv("SHARDLOAD_STAGING", str(tmp_path / "staging"))
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "20")
    with bucket(tmp_path / "bucket", monkeypatch) as found:
        yield found


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """What six batches without interruption lead to, saved to a local folder."""
    return digest(train(tmp_path_factory.mktemp("local"), 6))


def steps(url):
    return [info.step for info in list_steps(url)]


def leaves(tree):
    return [v for value in tree.values() for v in (leaves(value) if isinstance(value, dict) else [value])]


def staged(server):
    return [name for name in server.names() if "/.staging/" in name]


def test_what_a_process_wrote_to_see_whether_it_can_is_removed_by_the_next(server):
    server.write("run/.staging/writable-0123abcd", b"")  # it could not delete it
    shardload.save(build(width=8), f"{server.s3}/run", step=1)
    assert steps(f"{server.s3}/run") == [1] and staged(server) == []


@pytest.mark.filterwarnings("ignore:Sharding info not provided")  # plain Orbax goes by the saved sharding
@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_steps_of_fit_are_read_by_all(server, scheme, tmp_path):
    url = f"{scheme}://bucket/run"
    trained = fit(url, width=64, epochs=2)
    assert steps(url) == [1, 2]
    assert not staged(server)
    assert not [*(tmp_path / "staging").glob("*/*")]
    assert [found.verdict for found in verify(url)] == ["verified", "verified"]
    assert [found.verdict for found in verify(f"{url}/2")] == ["verified"]
    for place in (url, server.folder / "run"):  # the bucket, and its objects as files
        restored = build(64)
        shardload.restore(restored, place, mesh="2x4")
        assert same(restored, trained)
    loaded = ocp.load_checkpointables(str(server.folder / "run/2"))["pytree"]
    values = sorted(np.asarray(leaf).tobytes() for leaf in leaves(loaded["trainable_variables"]))
    assert values == sorted(np.asarray(v.value).tobytes() for v in trained.trainable_variables)


def test_a_loop_keeps_the_latest_and_the_best(server, expected):
    url = f"{server.s3}/run"
    one = train(url, 6, keep_best=1, monitor="loss", mode="max")
    assert digest(one) == expected
    kept = list_steps(url)
    assert {5, 6} <= {info.step for info in kept}
    assert len(kept) in (2, 3)
    assert sum(info.best for info in kept) == 1
    best = max(kept, key=lambda info: info.metrics["loss"])
    assert best.best
    assert not staged(server)
    # The record of a removed step goes first.
    gone = [key for method, key, _ in server.writes if method == "DELETE" and key.startswith("run/1/")]
    assert not gone or gone[0] == "run/1/shardload/digests.json"


def test_fit_resumes_from_a_bucket(server):
    x = np.random.default_rng(0).random((32, 64), np.float32)

    def run(place, epochs):
        one = model()
        saver = shardload.callbacks.OrbaxCheckpoint(place, resume=True, save_freq=2)
        one.fit(x, x, batch_size=8, epochs=epochs, shuffle=False, verbose=0, callbacks=[saver])
        return one

    whole = run(server.folder / "local", 3)
    url = f"{server.gs}/run"
    run(url, 2)
    assert digest(run(url, 3)) == digest(whole)
    assert steps(url) == [12]
    restored = model()
    shardload.restore(restored, url)
    restored.fit(x, x, epochs=3, verbose=0, callbacks=[shardload.callbacks.OrbaxCheckpoint(url)])
    assert steps(url) == [12]  # nothing was left to train


@pytest.mark.parametrize("at", ["pytree/d/", "_CHECKPOINT_METADATA", "shardload/digests.json"])
def test_a_killed_writer_leaves_no_step_and_the_next_run_removes_the_rest(server, expected, at):
    url, child, stopped = f"{server.s3}/run", [], []

    def kill(key):
        if key.startswith("run/3/") and at in key and not stopped:
            stopped.append(key)
            child[0].send_signal(signal.SIGKILL)
            child[0].wait()

    server.on_put = kill
    child.append(subprocess.Popen([sys.executable, "-m", "bucket_child", url, "6"]))
    assert child[0].wait(timeout=120) == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while at == "shardload/digests.json" and 3 not in steps(url) and time.monotonic() < deadline:
        time.sleep(0.1)  # the server had the whole request: the record counts
    complete = at == "shardload/digests.json"
    assert steps(url)[-1] == (3 if complete else 2)
    left = [name for name in server.names() if name.startswith("run/3/")]
    assert left
    assert any(name.startswith("run/.staging/3-") for name in server.names())
    assert digest(train(url, 6)) == expected
    assert steps(url) == [5, 6]
    assert not staged(server)
    assert not [name for name in server.names() if name.startswith("run/3/")]


def test_faults_of_the_store_are_repeated(server, expected):
    server.faults["run/2/pytree"] = [500, (503, 1), "reset", 429]
    server.faults["run/3/shardload/digests.json"] = [500, "reset"]
    url = f"{server.s3}/run"
    assert digest(train(url, 6, max_to_keep=None)) == expected
    assert steps(url) == [1, 2, 3, 4, 5, 6]
    assert {found.verdict for found in verify(url)} == {"verified"}


def test_a_refused_write_is_told_and_leaves_no_step(server, caplog):
    server.refused["run/2/pytree/d/"] = 403
    url = f"{server.s3}/run"
    with pytest.raises(SaveError, match=r"Cannot save step 2 to s3://bucket/run/2: .*AccessDenied \(request REQ123"):
        train(url, 3)
    assert steps(url) == [1]
    assert not [name for name in server.names() if name.startswith("run/2/")]
    said = [r.getMessage() for r in caplog.records if (r.name, r.levelname) == ("shardload", "ERROR")]
    assert len(said) == 1 and said[0].startswith("Cannot save step 2 to s3://bucket/run/2")


def test_a_save_that_cannot_begin_is_logged_too(server, caplog, monkeypatch):
    monkeypatch.setattr(remote_root.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(SaveError, match="are staged in") as caught:
        train(f"{server.s3}/run", 1)
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [str(caught.value)]


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda server: server.refused.update({"": 403}), "HTTP status 403"),
        (lambda server: setattr(server, "has_bucket", False), "Create the bucket s3://bucket"),
    ],
)
def test_a_bucket_that_cannot_be_written_is_found_before_training(server, spoil, words):
    spoil(server)
    for make in (shardload.Checkpointer, shardload.callbacks.OrbaxCheckpoint):
        with pytest.raises(SaveError, match=f"Cannot save steps to s3://bucket/run: .*{words}"):
            make(f"{server.s3}/run")


def test_no_room_for_staging_is_found_before_anything_is_written(server, monkeypatch):
    monkeypatch.setattr(remote_root.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000))
    with pytest.raises(SaveError, match=r"are staged in .*/staging/.* but only 1,?000.* SHARDLOAD_STAGING"):
        train(f"{server.s3}/run", 1)
    assert not server.names()


def test_staging_to_a_file_is_refused(server, monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SHARDLOAD_STAGING", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"Cannot stage files for an upload in .*Set SHARDLOAD_STAGING to a folder"):
        shardload.Checkpointer(f"{server.s3}/run")


def test_a_step_that_another_run_saved_meanwhile_stays(server):
    def save_first(key):
        if key == "run/1/shardload/digests.json":
            server.on_put = lambda key: None
            server.write(key, b"of another run")

    server.on_put = save_first
    with pytest.raises(StepExistsError, match="another run saved s3://bucket/run/1 meanwhile"):
        train(f"{server.s3}/run", 1)
    assert (server.folder / "run/1/shardload/digests.json").read_bytes() == b"of another run"
    assert any("/pytree/" in name for name in server.names())


def test_a_saved_step_is_not_overwritten(server):
    url = f"{server.s3}/run"
    one = train(url, 1)
    with pytest.raises(StepExistsError, match="s3://bucket/run/1 exists"):
        shardload.save(one, url, step=1)
    assert shardload.save(one, url, step=2) == f"{url}/2"
    server.write("run/9/notes.txt", b"mine")
    with pytest.raises(StepExistsError, match=r"s3://bucket/run/9 has other files \(notes.txt\)"):
        shardload.save(one, url, step=9)
    assert "run/9/notes.txt" in server.names()
    assert steps(url) == [1, 2]


def other(**changed):
    """An owner on another machine."""
    return Owner("other", host="elsewhere", machine="another", pid=7, started="1", unix_s=time.time(), **changed)


def write_owner(server, owner):
    server.write(f"run/{OWNER_FILE}", json.dumps({name: getattr(owner, name) for name in Owner.__slots__}).encode())


def test_a_second_run_is_refused_while_the_first_lives(server, monkeypatch):
    monkeypatch.setattr(ownership, "OWNER_LOOK_S", 0.05)
    write_owner(server, other())
    beats = iter(range(1, 100))
    read = Uploads.read

    def beating(self, name):
        write_owner(server, other(beat=next(beats)))
        return read(self, name)

    monkeypatch.setattr(Uploads, "read", beating)
    with pytest.raises(SaveError, match="process 7 on elsewhere saves to it now, and two runs cannot share a folder"):
        train(f"{server.s3}/run", 1)
    assert not [name for name in server.names() if "/1/" in name]


def test_the_place_of_a_dead_run_is_taken(server, monkeypatch):
    monkeypatch.setattr(ownership, "OWNER_LOOK_S", 0.05)
    monkeypatch.setattr(ownership, "WATCH_S", 0.2)
    write_owner(server, other())
    train(f"{server.s3}/run", 1)
    assert steps(f"{server.s3}/run") == [1]
    assert not staged(server)


def test_who_lost_the_place_publishes_and_removes_nothing(server):
    url = f"{server.s3}/run"

    def take_over(key):
        if key.startswith("run/2/pytree"):
            write_owner(server, other())

    server.on_put = take_over
    with pytest.raises(SaveError, match=r"Cannot save step 2 .*process 7 on elsewhere saves to it now"):
        train(url, 3)
    assert steps(url) == [1]
    assert f"run/{OWNER_FILE}" in server.names()


def test_an_owner_whose_answers_were_lost_keeps_its_place(server, monkeypatch):
    """It replaced the object, but learns only that this is another version than the one it knows."""
    monkeypatch.setattr(ownership, "BEAT_S", 0.05)
    owner, lost = server.folder / "run" / OWNER_FILE, []

    def lose(handler, key):
        if handler.command == "PUT" and key == f"run/{OWNER_FILE}":
            lost.append(key)
            handler.instead = lambda: None
        return False

    with shardload.Checkpointer(f"{server.s3}/run") as saver:
        saver.save(1, model())
        server.fault = lose
        wait_for(lambda: len(lost) > 3)
        server.fault = None
        last = Owner.of_json(owner.read_bytes()).beat
        wait_for(lambda: Owner.of_json(owner.read_bytes()).beat > last + 2)


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_what_a_failed_save_left_goes_with_the_next_save_of_the_step_and_the_place_with_the_saver(server, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "1")
    url = f"{server.s3}/run"

    def fails(handler, key):
        if handler.command == "GET" or not ("/pytree/" in key or "?delete" in handler.path):
            return False
        handler.read_body()
        handler.refuse(500, "InternalError", {})
        return True

    saver = shardload.Checkpointer(url, save_on_background=False)
    saver.save(1, model())
    server.fault = fails
    with pytest.raises(SaveError, match=r"Cannot save step 2 to .*HTTP status 500"):
        saver.save(2, model())
    assert any(name.startswith("run/2/") for name in server.names())
    server.fault = None
    saver.save(2, model())
    assert steps(url) == [1, 2]
    assert staged(server) == [f"run/{OWNER_FILE}"]
    server.refused["run/3/"] = 403
    with pytest.raises(SaveError, match="HTTP status 403"), saver:
        saver.save(3, model())
    assert not staged(server)


@pytest.mark.parametrize("scheme", ["s3", "gs"])
def test_two_callbacks_of_one_folder_are_told_the_way_out(server, scheme):
    url = f"{getattr(server, scheme)}/run"
    make = shardload.callbacks.OrbaxCheckpoint
    callbacks = [make(url), make(url, "loss", save_best_only=True)]
    x = np.zeros((32, 64), np.float32)
    trained = model()
    with pytest.raises(StepExistsError, match=r"Cannot save step \d+: .*Two callbacks.*give one of them all rules"):
        trained.fit(x, x, batch_size=16, epochs=3, verbose=0, callbacks=callbacks)
    for one in callbacks:
        one.on_train_end()  # waits for its saves, as the end of the program does
    [step, *_] = steps(url)  # of the first one
    assert [found.verdict for found in verify(f"{url}/{step}")] == ["verified"]


def test_a_page_in_place_of_an_answer_deletes_nothing(server, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "1")
    url = f"{server.gs}/run"  # s3 answers with a list of what is deleted, which a page is not

    def page(handler, key):
        if handler.command == "DELETE" and "/3/" in key:
            handler.read_body()
            handler.send(200, b"<!DOCTYPE html><title>Log in</title>", {"Content-Type": "text/html"})
            return True
        if handler.command == "PUT" and "/3/pytree/" in key:
            handler.read_body()
            handler.refuse(403, "AccessDenied", {})
            return True
        return False

    with shardload.Checkpointer(url, save_on_background=False) as saver:
        saver.save(2, model())
        server.fault = page
        with pytest.raises(SaveError, match="Cannot save step 3"):
            saver.save(3, model())
        assert any(name.startswith("run/3/") for name in server.names()) and len(staged(server)) == 2
        server.fault = None
        saver.save(4, model())
        with shardload.Checkpointer(url) as later:
            later.save(5, model())
    assert steps(url) == [2, 4, 5]
    assert not [name for name in server.names() if name.startswith("run/3/")]


@pytest.mark.parametrize("at", ["shardload/digests.json", "shardload/step.json"])
def test_a_step_that_is_removed_while_it_is_listed_is_not_damaged(server, at):
    url = f"{server.s3}/run"
    train(url, 3, max_to_keep=None)

    def remove(handler, key):
        if key == f"run/{steps_now[-1]}/{at}":
            for name in server.names():
                if name.startswith(f"run/{steps_now[-1]}/"):
                    server.remove(name)
        return False

    for listed in (lambda: steps(url)[-1], lambda: find_step(url, "latest").step):
        steps_now = steps(url)
        server.fault = remove
        assert listed() == steps_now[-2]
        server.fault = None


def test_two_savers_of_one_process_share_a_folder(server):
    url = f"{server.s3}/run"
    one = model()
    x = np.ones((8, 64), np.float32)
    latest = shardload.callbacks.OrbaxCheckpoint(url, max_to_keep=1)
    best = shardload.callbacks.OrbaxCheckpoint(url, save_best_only=True, monitor="missing", mode="min")
    with pytest.warns(UserWarning, match="Can save best model only"):
        one.fit(x, x, epochs=2, verbose=0, callbacks=[latest, best])
    assert steps(url) == [2]
    assert not staged(server)


def test_addresses_that_cannot_be_saved_to(server):
    with pytest.raises(UsageError, match="expected a path on this machine"):
        shardload.Checkpointer(f"{server.http}/run")
    with pytest.raises(UsageError, match="steps are folders"):
        shardload.Checkpointer("s3://bucket/model.keras")


def test_metadata_goes_along(server):
    url = f"{server.s3}/run"
    shardload.save(model(), url, step=3, metadata={"a": 1}, metrics={"loss": 0.5}, epoch=0)
    [info] = list_steps(url)
    assert (info.recorded.metadata, info.metrics, info.epoch) == ({"a": 1}, {"loss": 0.5}, 0)
