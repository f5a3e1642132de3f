"""Checkpoints written to buckets: complete under their names, or not there."""

import itertools
import subprocess
import sys

import keras
import numpy as np
import pytest
from bucket_server import bucket

import shardload
from shardload.comparing import diff
from shardload.errors import UsageError, WriteError
from shardload.stores import uploads
from shardload.synth import synth
from shardload.verifying import verify


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    """A Hugging Face folder of a tiny Gemma 2."""
    return synth("gemma2_2b", format="safetensors", scale=0.02, directory=tmp_path_factory.mktemp("gemma"))


@pytest.fixture
def server(tmp_path, monkeypatch):
    (tmp_path / "bucket").mkdir()
    (tmp_path / "staging").mkdir()
    monkeypatch.setenv("SHARDLOAD_STAGING", str(tmp_path / "staging"))
    monkeypatch.setenv("SHARDLOAD_REMOTE_TIMEOUT", "20")
    monkeypatch.setattr(uploads, "SINGLE_REQUEST_BYTES", 1 << 20)  # so that all larger files go in parts
    with bucket(tmp_path / "bucket", monkeypatch) as found:
        yield found


def model(seed=0):
    keras.utils.set_random_seed(seed)
    return keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(64)])


def values(one):
    return [np.asarray(v.value).tobytes() for v in one.weights]


def left(server, tmp_path):
    return [server.names(), server.parts, [*(tmp_path / "staging").glob("*/.staging/*")]]


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/models/gemma.weights.h5", {}),
        ("gs://bucket/models/gemma.weights.h5", {}),
        ("s3://bucket/models/gemma.weights.json", {"max_shard_bytes": "1MiB"}),
        ("s3://bucket/models/folder", {"to": "safetensors", "max_shard_bytes": "100KiB"}),
        ("gs://bucket/models/folder", {"to": "safetensors", "max_shard_bytes": "100KiB"}),
        ("s3://bucket/models/step", {"to": "orbax"}),
        ("gs://bucket/models/preset", {"to": "preset"}),
    ],
)
def test_what_is_converted_is_read_back_bit_for_bit(server, gemma, tmp_path, url, options):
    name = url.rpartition("/")[2]
    report = shardload.convert(gemma, url, **options)
    assert report.target == url
    assert not server.parts
    local = tmp_path / name
    shardload.convert(gemma, local, **options)
    found = diff(url, local)
    assert found.equal > 3 and not found.differences
    assert [found.verdict for found in verify(url)] in (["readable"], ["verified"])
    made = [key for _, key, _ in server.writes if "/.staging/" not in key]
    indexes = {"gemma.weights.json": "gemma.weights.json", "folder": "model.safetensors.index.json"}
    if name in indexes:  # once all others are there
        assert made[-1].endswith(indexes[name])
    with pytest.raises(WriteError, match=f"{url} already exists. Replace it with overwrite=True"):
        shardload.convert(gemma, url, **options)


@pytest.mark.parametrize("url", ["s3://bucket/model.weights.h5", "gs://bucket/a/model.weights.h5"])
def test_a_model_is_saved_and_replaced(server, url):
    for seed, overwrite in ((0, False), (1, True)):
        one, other = model(seed), model(7)
        shardload.save_as(one, url, overwrite=overwrite)
        shardload.load_weights(other, url)
        assert values(other) == values(one)
    with pytest.raises(WriteError, match="already exists"):
        shardload.save_as(model(), url)


def test_what_may_not_be_read_is_not_called_something_else(server):
    url = f"{server.s3}/model.weights.h5"
    shardload.save_as(model(), url)
    server.fault = lambda handler, key: (
        handler.command == "GET" and key.endswith(".h5") and (handler.refuse(400, "ExpiredToken", {}) or True)
    )
    with pytest.raises(WriteError, match=r"whether it is a checkpoint cannot be told\. .*ExpiredToken"):
        shardload.save_as(model(), url, overwrite=True)


def test_only_checkpoints_are_replaced(server):
    server.write("notes.weights.h5", b"my notes")
    with pytest.raises(WriteError, match=r"Cannot replace s3://bucket/notes.weights.h5: it is not a checkpoint"):
        shardload.save_as(model(), f"{server.s3}/notes.weights.h5", overwrite=True)
    assert (server.folder / "notes.weights.h5").read_bytes() == b"my notes"


def test_old_shards_go(server):
    url = f"{server.s3}/model.weights.json"
    shardload.save_as(model(), url, max_shard_bytes="20KiB")
    before = server.names()
    assert len(before) > 4
    shardload.save_as(model(1), url, overwrite=True)
    other = model(7)
    shardload.load_weights(other, url)
    assert values(other) == values(model(1))
    assert len(server.names()) < len(before)


def test_no_shard_of_a_replaced_folder_is_there_with_a_new_one(server, gemma, monkeypatch):
    url, options, seen = f"{server.s3}/folder", {"to": "safetensors", "max_shard_bytes": "100KiB"}, []
    shardload.convert(gemma, url, **options)

    def interrupted(self, files, **_):
        seen.append([name for name in server.names() if name.startswith("folder/")])
        raise KeyboardInterrupt

    monkeypatch.setattr(uploads.Uploads, "put_files", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        shardload.convert(gemma, url, overwrite=True, **options)
    assert caught.value.__notes__[0].endswith("The old checkpoint was deleted before the upload.")
    assert seen == [[]]  # all shards of a folder are a checkpoint even without an index


def contents(server):
    return {name: (server.folder / name).read_bytes() for name in server.names()}


@pytest.mark.parametrize("refused", ["PUT", "DELETE"])
@pytest.mark.parametrize("name", ["folder", "file.weights.h5"])
def test_a_replaced_checkpoint_of_one_object_with_data_is_there_again_after_an_error(server, gemma, name, refused):
    url, options = f"{server.s3}/{name}", {} if name.endswith("h5") else {"to": "safetensors"}
    shardload.convert(gemma, url, **options)
    before = contents(server)
    if name.endswith("h5"):
        assert sorted(before) == ["file.json", "file.weights.h5"]

    deleted = itertools.count()

    def refuse(handler, key):
        if refused == "PUT":
            is_refused = handler.command == "PUT" and key.endswith((".h5", ".safetensors"))
        else:  # the first one deletes what was written to see whether it can be
            is_refused = handler.command == "POST" and handler.path.endswith("?delete") and next(deleted) > 0
        if is_refused:
            handler.read_body()
            handler.refuse(403, "AccessDenied", {})
        return is_refused

    server.fault = refuse
    with pytest.raises(WriteError, match="HTTP status 403") as caught:
        shardload.convert(gemma, url, dtype="float16", overwrite=True, **options)
    assert contents(server) == before
    assert caught.value.__notes__ == [
        f"Nothing is left at {url} of what was written. The old checkpoint is there again."
    ]


@pytest.mark.parametrize(("source", "target"), [("a", "a"), ("a", "a/b"), ("a/b", "a"), ("a.weights.h5",) * 2])
def test_a_source_is_not_replaced_by_what_is_made_of_it(server, gemma, source, target):
    options = {} if source.endswith("h5") else {"to": "safetensors"}
    shardload.convert(gemma, f"{server.s3}/{source}", **options)
    before = contents(server)
    with pytest.raises(UsageError, match="one contains the other") as caught:
        shardload.convert(f"{server.s3}/{source}", f"{server.s3}/{target}", overwrite=True, **options)
    assert contents(server) == before and not getattr(caught.value, "__notes__", [])


def test_an_error_leaves_nothing(server, gemma, tmp_path):
    server.refused["index.json"] = 403
    with pytest.raises(WriteError, match=r"may not be written: HTTP status 403 .*\(request REQ123\)"):
        shardload.convert(gemma, f"{server.s3}/folder", to="safetensors", max_shard_bytes="100KiB")
    assert left(server, tmp_path) == [[], {}, []]


def test_ctrl_c_leaves_nothing(server, gemma, tmp_path, monkeypatch):
    put_files = uploads.Uploads.put_files

    def interrupted(self, files, **options):
        put_files(self, files, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(uploads.Uploads, "put_files", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        shardload.convert(gemma, f"{server.s3}/folder", to="safetensors")
    assert caught.value.__notes__ == ["Nothing is left at s3://bucket/folder of what was written."]
    assert left(server, tmp_path) == [[], {}, []]


def test_what_a_killed_conversion_staged_is_removed(server, tmp_path):
    shardload.save_as(model(), f"{server.s3}/one.weights.h5")
    [disk] = (tmp_path / "staging").iterdir()
    (disk / ".staging" / "0-deadbeef" / "step").mkdir(parents=True)
    shardload.save_as(model(), f"{server.s3}/two.weights.h5")
    assert not [*disk.iterdir()]


def test_a_missing_bucket_is_found_before_the_conversion(server, gemma, tmp_path):
    server.has_bucket = False
    with pytest.raises(WriteError, match="Create the bucket s3://bucket"):
        shardload.convert(gemma, f"{server.s3}/folder", to="safetensors")
    with pytest.raises(ValueError, match=r"it is a bucket\. Give a name in it"):
        shardload.convert(gemma, server.s3, to="safetensors")


def test_the_command_writes_to_a_bucket(server, gemma):
    url = f"{server.gs}/model.weights.h5"
    words = [sys.executable, "-m", "shardload", "convert", str(gemma), url]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{url}: ")
    assert server.names()[0].startswith("model.")
