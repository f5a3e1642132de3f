"""Headers that one process reads for all: the others get the same manifest, and open no file for it."""

import json
import shutil
from functools import partial
from pathlib import Path

import keras
import numpy as np
import pytest
from checkpoints import largest_file, write_gguf
from object_server import served
from safetensors.numpy import save_file
from saved_steps import save_step

from shardload.errors import DamagedError, DisagreementError, TransferError, TruncatedSourceError
from shardload.loaders import open_manifest
from shardload.pipeline.opening_together import open_together
from shardload.resolve.opening import OpenedSource, open_source
from shardload.stores import header_reads
from shardload.stores.header_reads import noting, replaying
from shardload.stores.local import LOCAL, located

ONES = np.ones((16, 8), np.float32)


def small_model():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    model.compile("adam", "mse")
    return model


def hugging_face(folder):
    folder.mkdir()
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for i, name in enumerate(names):
        save_file({f"t{i}": ONES * i}, folder / name)
    weight_map = {f"t{i}": name for i, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


def gguf(folder):
    folder.mkdir()
    write_gguf(folder / "model.gguf", {"token_embd.weight": ONES})
    return folder / "model.gguf"


def h5(folder):
    folder.mkdir()
    small_model().save_weights(folder / "model.weights.h5")
    return folder / "model.weights.h5"


def keras_file(folder):
    folder.mkdir()
    small_model().save(folder / "model.keras")
    return folder / "model.keras"


def step(folder):
    save_step(small_model(), folder, 3)
    return folder


FORMATS = {"safetensors": hugging_face, "gguf": gguf, "h5": h5, "keras": keras_file, "step": step}


@pytest.fixture
def opened(monkeypatch):
    """The files that are really opened."""
    found = []
    original = LOCAL.open
    monkeypatch.setattr(type(LOCAL), "open", lambda self, key: found.append(key) or original(key))
    return found


def facts(manifest):
    tensors = {name: (t.shape, t.dtype, t.stored_bytes) for name, t in manifest.tensors.items()}
    metadata = {key: value for key, value in manifest.metadata.items() if key not in ("item", "digests")}  # paths
    return tensors, manifest.config, metadata, sorted(manifest.files.values())


def noted(source):
    with noting() as reads:
        manifest = open_source(source, None).manifest
    return manifest, reads.pack(manifest.location)


@pytest.mark.parametrize("format", FORMATS)
def test_the_same_manifest_without_opening_a_file(format, tmp_path, opened):
    source = FORMATS[format](tmp_path / "source")
    manifest, packed = noted(source)
    elsewhere = tmp_path / "other" / "source"  # as on a host where the folder is mounted at another path
    shutil.copytree(tmp_path / "source", elsewhere)
    there = elsewhere / source.relative_to(tmp_path / "source")
    opened.clear()
    with replaying(packed) as replay:
        found = open_source(there, None).manifest
    assert [key for key in opened if Path(key).exists()] == []  # it also looks for files that may be there
    assert replay.is_of(found.location) and str(elsewhere) in found.source
    for mine, other in zip(facts(found), facts(manifest), strict=True):
        assert mine == other


def test_reads_that_were_not_noted_open_the_file(tmp_path, opened):
    folder = hugging_face(tmp_path / "source")
    _, packed = noted(folder)
    opened.clear()
    shard = folder / "model-00001-of-00002.safetensors"
    with replaying(packed):
        file = located(shard).open()
    buffer = bytearray(ONES.nbytes)
    file.read_into(memoryview(buffer), file.n_bytes - ONES.nbytes)
    assert bytes(buffer) == bytes(ONES.nbytes) and opened == [str(shard)]
    file.close()


def test_nothing_is_noted_of_more_than_may_be_kept(tmp_path, monkeypatch):
    source = gguf(tmp_path / "source")
    monkeypatch.setattr(header_reads, "MOST_BYTES", 10)
    assert noted(source)[1] is None


@pytest.mark.parametrize("format", ["safetensors", "gguf", "h5", "keras"])
def test_headers_in_a_bucket_are_read_once_and_later_reads_keep_to_their_version(format, tmp_path, monkeypatch):
    source = FORMATS[format](tmp_path / "source")
    with served(tmp_path, monkeypatch) as server:
        url = f"{server.s3}/{source.relative_to(tmp_path)}"
        manifest, packed = noted(url)
        server.requests.clear()
        with replaying(packed) as replay:
            found = open_source(url, None).manifest
        for mine, other in zip(facts(found), facts(manifest), strict=True):
            assert mine == other
        assert server.sent_of("^source/") == 0 and replay.is_of(found.location)
        path = max(found.files, key=lambda file: found.files[file])
        assert path.store.tag(path.key)  # the processes compare it
        replaced = tmp_path / path.key
        replaced.write_bytes(replaced.read_bytes()[:-1] + b"#")
        with pytest.raises(TransferError, match="changed while it was read"):
            path.open().read_into(memoryview(bytearray(8)), found.files[path] - 8)


class FirstSide:
    """Process 0 of a call of several; keeps what it hands out."""

    is_alone = False

    def hand_out(self, do, what):
        self.packed = do()
        return self.packed


def test_a_tokenizer_in_a_bucket_is_handed_out_with_the_headers_if_a_model_is_built(tmp_path, monkeypatch):
    folder = hugging_face(tmp_path / "source")
    vocabulary = np.random.default_rng(0).bytes(300 << 10)  # more than the page of which a file's size is read
    (folder / "tokenizer.model").write_bytes(vocabulary)
    with served(tmp_path, monkeypatch) as server:

        def opened_by(side, *, builds):
            server.requests.clear()
            opener = partial(open_source, f"{server.s3}/source", None)
            source = open_together(side, opener, builds=builds)
            copy = source.manifest.location.local_folder() / "tokenizer.model"
            return copy.read_bytes(), server.sent_of("tokenizer")

        found, sent = opened_by(FirstSide(), builds=False)
        assert found == vocabulary and len(vocabulary) <= sent
        opened_by(kept := FirstSide(), builds=True)
        found, sent = opened_by(Side(kept.packed), builds=True)
        assert found == vocabulary and sent == 0


def test_each_process_reads_headers_of_a_web_server_which_may_make_tags_of_its_own(tmp_path, monkeypatch):
    gguf(tmp_path / "source")
    with served(tmp_path, monkeypatch) as server:
        assert noted(f"{server.http}/source/model.gguf")[1] is None


def test_another_bucket_is_asked_itself(tmp_path, monkeypatch):
    source = gguf(tmp_path / "source")
    _, packed = noted(source)  # process 0 has a copy on its machine
    with served(tmp_path, monkeypatch) as server:
        with replaying(packed):
            open_source(f"{server.s3}/source/model.gguf", None)
        assert server.sent_of("model.gguf") > 0


def test_a_truncated_header_is_the_same_error_while_reads_are_noted(tmp_path):
    source = gguf(tmp_path / "source")
    source.write_bytes(source.read_bytes()[:20])
    with pytest.raises(TruncatedSourceError, match="is truncated: the counts should take 16 bytes"), noting():
        open_source(source, None)


class Side:
    """A call of two processes, of which process 0 has been here."""

    is_alone = False

    def __init__(self, packed):
        self.packed = packed

    def hand_out(self, do, what):
        return self.packed


def open_here(source, packed):
    return open_together(Side(packed), lambda: OpenedSource(open_manifest(str(source)), None, ()))


def test_another_step_is_opened_by_its_own_headers(tmp_path):
    manifest, packed = noted(step(tmp_path / "run"))
    save_step(small_model(), tmp_path / "run", 4)
    found = open_here(tmp_path / "run", packed)
    assert (manifest.location.name, found.manifest.location.name) == ("3", "4")
    assert found.manifest.metadata["step"] == 4


def test_files_of_other_sizes_are_a_difference(tmp_path):
    _, packed = noted(hugging_face(tmp_path / "source"))
    folder = tmp_path / "other" / "source"
    folder.parent.mkdir()
    hugging_face(folder)
    shard = folder / "model-00002-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes() + b"1234")
    with pytest.raises(DisagreementError, match=r"The size of .*00002.safetensors: process 0 has \d+ bytes, this one"):
        open_here(folder, packed)


def test_another_save_of_the_same_step_is_a_difference_and_no_damage(tmp_path):
    for name, note in (("one", "short"), ("other", "a longer one")):
        (tmp_path / name).mkdir()
        save_step(small_model(), tmp_path / name / "run", 3, note=note)
    _, packed = noted(tmp_path / "one" / "run" / "3")
    opener = partial(open_source, tmp_path / "other" / "run" / "3", None)
    with pytest.raises(DisagreementError, match=r"disagree about the source\. By the headers of process 0.* has grown"):
        open_together(Side(packed), opener)
    largest_file(tmp_path / "other" / "run" / "3").write_bytes(b"")
    with pytest.raises(DamagedError):
        open_together(Side(packed), opener)
