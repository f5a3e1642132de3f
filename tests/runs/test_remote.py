"""Steps in object stores, restored through TensorStore's own drivers from a server on loopback."""

import functools
import gc
import hashlib
import json
import tempfile
from contextlib import closing

import keras
import numpy as np
import pytest
import warm_start
from object_server import ObjectServer, served
from remote_runs import build, same, state, train
from saved_steps import save_step
from store_contract import FILES, StoreContract

import shardload
from shardload.errors import BudgetError, DamagedError, SourceError
from shardload.runs.digests import Digests
from shardload.runs.listing import list_steps
from shardload.runs.remote_store import open_step
from shardload.stores.remote import location_of
from shardload.transfer import execution, range_reads
from shardload.verifying import verify

MIB = 1 << 20
DATA = r"/d/"


@pytest.fixture(scope="module")
def objects(tmp_path_factory):
    """A bucket with one run of large arrays and one of two steps of small ones; and the models."""
    folder = tmp_path_factory.mktemp("bucket")
    model = train(folder / "run")
    save_step(model, folder / "packed", 1, compression="zstd")
    return folder, model, train(folder / "small", width=32, epochs=2, monitor="loss")


@pytest.fixture
def store(objects, monkeypatch):
    with served(objects[0], monkeypatch) as server:
        yield server


def address(store, scheme, name):
    return f"{getattr(store, scheme)}/{name}"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:axis .* splits no weight")  # 1x3
@pytest.mark.parametrize(("scheme", "mesh"), [("http", "1x8"), ("s3", "2x4"), ("gs", "1x1"), ("s3", "1x3")])
def test_everything_on_any_mesh_bit_for_bit(objects, store, scheme, mesh):
    target = build()
    report = shardload.restore(target, address(store, scheme, "run"), step=1, mesh=mesh)
    assert same(target, objects[1])
    assert report.source == address(store, scheme, "run/1")
    assert "step 1 (epoch 1), verified" in report.notes
    assert store.sent_of("process_0/d/") <= report.bytes.read <= 1.1 * report.bytes.needed
    assert report.host_bytes.peak_staging <= 1.1 * report.host_bytes.budget


def rows(shape):
    found = keras.distribution.LayoutMap(keras.distribution.DeviceMesh(shape, ("batch", "model")))
    found[".*kernel"] = ("model", None)
    found[".*bias"] = (None,)
    return found


@pytest.mark.slow
def test_a_layout_across_the_one_that_was_saved(objects, store):
    target = build()
    report = shardload.restore(target, store.s3 + "/run", mesh="1x8", layout=rows((1, 8)))
    kernel = target.weights[0].value
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(128, 2048)}
    assert same(target, objects[1])
    assert store.sent_of(DATA) <= 1.1 * report.bytes.needed


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "budget"), [("s3", "64MiB"), ("http", None)])
def test_compressed_chunks_across_a_layout(objects, store, scheme, budget):
    target = build()
    url = address(store, scheme, "packed/1")
    report = shardload.restore(target, url, mesh="1x8", layout=rows((1, 8)), host_memory_bytes=budget)
    assert same(target, objects[1])
    assert store.sent_of("process_0/d/") <= report.bytes.read <= 1.1 * report.bytes.needed
    assert report.bytes.needed < sum(array.nbytes for array in state(objects[1]))
    assert report.host_bytes.peak_staging <= 1.1 * report.host_bytes.budget


def test_neighbouring_bytes_are_fetched_together(store):
    shardload.restore(build(), store.http + "/run/1")
    lengths = [sent for _, key, _, sent in store.requests if key and "/d/" in key and sent > MIB]
    assert len(lengths) <= 14 and max(lengths) <= 4 * MIB


@pytest.mark.slow
def test_of_weights_only_weights_are_fetched(objects, store):
    target = build(compiled=False)
    report = shardload.restore(target, store.s3 + "/run", items="weights")
    assert all(np.array_equal(a, b) for a, b in zip(state(target), state(objects[1]), strict=False))
    assert store.sent_of(DATA) <= report.bytes.needed + 2 * MIB


@pytest.mark.slow
def test_a_small_budget_is_kept(objects, store, monkeypatch):
    made = []
    monkeypatch.setattr(range_reads.RangeReads, "cancel", lambda self: made.append(self))  # noqa: PLW0108 - becomes a method
    target = build()
    report = shardload.restore(target, store.s3 + "/run", mesh="1x8", layout=rows((1, 8)), host_memory_bytes="16MiB")
    assert same(target, objects[1])
    assert report.host_bytes.peak_staging <= 16 * MIB and made[0].peak_bytes <= 4 * MIB
    assert made[0].held_bytes == 0
    with pytest.raises(BudgetError, match="Raise it to at least 16MiB"):
        shardload.restore(target, store.s3 + "/run", host_memory_bytes="8MiB")


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["16MiB", None])
def test_where_data_is_uploaded(objects, store, monkeypatch, budget):
    monkeypatch.setattr(execution, "execute", functools.partial(execution.execute, placement="upload"))
    target = build()
    report = shardload.restore(target, store.s3 + "/run", mesh="1x8", layout=rows((1, 8)), host_memory_bytes=budget)
    assert same(target, objects[1])
    assert report.host_bytes.peak_staging <= 1.1 * report.host_bytes.budget
    assert store.sent_of(DATA) <= 1.1 * report.bytes.needed


@pytest.mark.parametrize("step", ["latest", "best", 1, 2])
def test_a_step_of_several(objects, store, step):
    target = build(32)
    report = shardload.restore(target, store.s3 + "/small", step=step)
    assert same(target, objects[2]) == (step != 1)
    assert report.source == f"{store.s3}/small/{1 if step == 1 else 2}"


def test_load_builds_the_model_too(objects, store):
    model = shardload.load(store.http + "/small/2", mesh="1x8")
    assert same(model, objects[2]) and shardload.report(model).source == store.http + "/small/2"


def test_load_weights_into_a_model_that_stands(objects, store):
    target = build(32, compiled=False)
    shardload.load_weights(target, store.gs + "/small")
    assert all(np.array_equal(a, b) for a, b in zip(state(target), state(objects[2]), strict=False))


def test_nothing_is_left_behind(store, monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    manifest = shardload.inspect(store.s3 + "/small")
    shardload.restore(build(32), store.s3 + "/small", items="weights")
    assert len(list(tmp_path.iterdir())) == 1 and manifest.tensors
    del manifest
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_steps_are_listed_by_what_they_say(store):
    found = list_steps(store.s3 + "/small")
    assert [(info.step, info.epoch, info.best) for info in found] == [(1, 0, False), (2, 1, True)]
    assert [info.where for info in found] == [f"{store.s3}/small/{n}" for n in (1, 2)]
    assert store.sent_of(DATA) == 0


def test_a_converted_step_was_saved_without_a_record(objects, store):
    shardload.convert(objects[0] / "small/2", objects[0] / "converted/2", to="orbax")
    (info,) = list_steps(store.s3 + "/converted")
    assert (info.step, info.ours, info.problems, info.record, info.remote is None) == (2, True, None, None, False)


def test_verify_reads_everything(objects, store):
    verdict = verify(store.http + "/run/1")[0]
    files = [p for p in (objects[0] / "run/1").rglob("*") if p.is_file()]
    assert (verdict.verdict, verdict.path) == ("verified", store.http + "/run/1")
    assert verdict.n_bytes == sum(p.stat().st_size for p in files) <= store.bytes_sent
    assert [v.verdict for v in verify(store.s3 + "/small")] == ["verified"] * 2


FRESH = """
import hashlib, sys, shardload, numpy as np
from remote_runs import build, state
model = build()
shardload.restore(model, sys.argv[1], mesh="2x4")
print(hashlib.sha256(b"".join(a.tobytes() for a in state(model))).hexdigest())
"""


@pytest.mark.slow
def test_in_a_fresh_process(objects, store):
    done = python("-c", f"import conftest\n{FRESH}", store.s3 + "/run")
    expected = hashlib.sha256(b"".join(a.tobytes() for a in state(objects[1]))).hexdigest()
    assert done.stdout.split() == [expected], done.stderr


def python(*arguments):
    return warm_start.run(arguments, timeout=60)


@pytest.mark.slow
def test_the_command_line(store):
    done = python("-m", "shardload", "load", store.s3 + "/small", "--mesh", "2x4", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["source"] == store.s3 + "/small/2"
    done = python("-m", "shardload", "steps", store.s3 + "/small", "--json")
    assert [step["path"] for step in json.loads(done.stdout)["steps"]] == [f"{store.s3}/small/{n}" for n in (1, 2)]
    done = python("-m", "shardload", "verify", store.http + "/small/2")
    assert done.stdout.startswith(f"verified  {store.http}/small/2 ("), done.stderr


# ---- a store like any other ----------------------------------------------------------------------


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
        with closing(ObjectServer(tmp_path / "bucket")) as server:
            yield server

    @pytest.fixture
    def location(self, server):
        return open_step(location_of(f"{server.http}/7")).root

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
        step = open_step(location_of(f"{server.http}/7"))
        folder = (step.root / "sub/b").local_path().parents[2]
        assert folder.exists()
        del step
        assert not folder.exists()
