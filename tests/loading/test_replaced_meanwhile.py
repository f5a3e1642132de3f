"""A checkpoint that is replaced by another one while it is opened: it loads as one of them, or not at all."""

import itertools
import json

import gguf
import jax
import keras
import numpy as np
import pytest
from checkpoints import finish_gguf
from object_server import BUCKET, served
from safetensors.numpy import save_file

import shardload
from shardload.errors import ShardloadError, TransferError
from shardload.stores.local import LocalStore

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
HERE = jax.sharding.SingleDeviceSharding(jax.devices()[0])


def in_parts(folder, value):
    # Files of equal sizes, in which the tensors have other places.
    n = 4 * int(value)
    for shard, sizes in zip(SHARDS, ({"a": n, "b": 12 - n}, {"c": 4, "d": 4}), strict=True):
        arrays = {name: np.full(size, value * ord(name), np.float32) for name, size in sizes.items()}
        save_file(arrays, folder / shard)
    return folder


def with_index(folder, value):
    in_parts(folder, value)
    listed = {"a": SHARDS[0], "b": SHARDS[0], "c": SHARDS[1], "d": SHARDS[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


def keras_shards(folder, value):
    model = keras.Sequential([keras.Input((64,)), *(keras.layers.Dense(64, name=n, use_bias=False) for n in "abcd")])
    model.set_weights([np.full((64, 64), value)] * 4)
    model.save_weights(folder / "model.weights.json", max_shard_size=4e-5)
    return folder / "model.weights.json"


def keras_h5(folder, value):
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, name=n, use_bias=False) for n in "ab")])
    model.set_weights([np.full((8, 8), value)] * 2)
    model.save_weights(folder / "model.weights.h5")
    return folder / "model.weights.h5"


def gguf_parts(folder, value):
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama", split_max_tensors=1)
    for name in ("token_embd.weight", "output.weight"):
        writer.add_tensor(name, np.full((32, 32), value, np.float32))
    finish_gguf(writer)
    return folder / "model-00001-of-00002.gguf"


WRITERS = (with_index, in_parts, keras_shards, keras_h5, gguf_parts)


def written(write, root, value):
    folder = root / f"{write.__name__}-{value}"
    folder.mkdir(parents=True)
    return folder, write(folder, value).relative_to(folder)


def swapping(monkeypatch, number, swap):
    """Call ``swap`` before the file is opened that is opened as number ``number``."""
    count, opened = itertools.count(1), LocalStore.open

    def open_(self, key):
        if next(count) == number:
            swap()
        return opened(self, key)

    monkeypatch.setattr(LocalStore, "open", open_)


def loaded(source):
    """The shapes and bytes of all tensors of a checkpoint, or the error."""
    try:
        arrays = shardload.load_arrays(source, HERE).items()
    except ShardloadError as error:
        return error
    return {name: (array.shape, np.asarray(array).tobytes()) for name, array in arrays}


@pytest.mark.parametrize("write", WRITERS)
def test_a_folder_replaced_by_renaming(write, tmp_path, monkeypatch):
    found = []
    for number in itertools.count(1):
        root = tmp_path / str(number)
        (old, name), (new, _) = written(write, root, 1.0), written(write, root, 2.0)
        versions, done = [loaded(old / name), loaded(new / name)], []

        def swap(old=old, new=new, done=done):
            old.rename(old.with_name("before"))
            done.append(new.rename(old))

        with monkeypatch.context() as patch:
            swapping(patch, number, swap)
            found.append(loaded(old / name))
        assert found[-1] in versions or isinstance(found[-1], ShardloadError), f"open {number}: {found[-1]}"
        if not done:
            break
    assert found[0] == versions[1] and found[-1] == versions[0]
    changed = [one for one in found if isinstance(one, TransferError)]
    assert changed and all(str(one).count("changed") for one in changed), found


@pytest.mark.parametrize("scheme", ["s3", "gs", "http"])
@pytest.mark.parametrize("write", [with_index, keras_shards])
def test_objects_replaced_after_their_index_was_read(write, scheme, tmp_path, monkeypatch):
    (old, _), (new, _) = written(write, tmp_path / BUCKET, 1.0), written(write, tmp_path, 2.0)
    index = next(old.glob("*.json")).name
    with served(tmp_path / BUCKET, monkeypatch) as server:

        def replace(_, key):
            with server.lock:
                swap(key)
            return False

        def swap(key):
            if key is not None and key.endswith((".safetensors", ".h5")) and (old / index).exists():
                for file in (old / index, *(f for f in old.iterdir() if f.name != index)):
                    file.unlink()
                for file in new.iterdir():
                    if file.name != index:
                        (old / file.name).write_bytes(file.read_bytes())

        server.fault = replace
        root = server.http if scheme == "http" else f"{scheme}://{BUCKET}"
        error = loaded(f"{root}/{old.name}/{index}")
    assert isinstance(error, TransferError) and "they may belong to two checkpoints" in str(error), error


def test_a_cached_index_is_asked_for_again(tmp_path, monkeypatch):
    (old, _), (new, _) = written(with_index, tmp_path / BUCKET, 1.0), written(with_index, tmp_path, 2.0)
    with served(tmp_path / BUCKET, monkeypatch) as server, shardload.cache(tmp_path / "cache"):
        assert loaded(f"s3://{BUCKET}/{old.name}") == loaded(old)

        def replace(_, key):
            if key is not None and key.endswith(SHARDS[1]):
                (old / "model.safetensors.index.json").unlink(missing_ok=True)
                for name in SHARDS:
                    (old / name).write_bytes((new / name).read_bytes())
            return False

        server.fault = replace
        error = loaded(f"s3://{BUCKET}/{old.name}")
    assert isinstance(error, TransferError), error
