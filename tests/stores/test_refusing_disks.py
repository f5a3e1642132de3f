"""A disk that refuses to be written to is named, with the bytes that were to be written, and nothing stays behind."""

import errno
import os
import resource
from contextlib import contextmanager
from unittest.mock import Mock

import keras
import numpy as np
import pytest

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import SaveError, WriteError
from shardload.synth import synth

WIDTH = 400
"""A kernel of 625 KiB, in files of no fewer."""
LIMIT = 256 << 10


@pytest.fixture(scope="module")
def model():
    found = keras.Sequential([keras.Input((WIDTH,)), keras.layers.Dense(WIDTH), keras.layers.Dense(WIDTH)])
    found.compile("sgd", "mse")
    batch = np.zeros((2, WIDTH))
    found.fit(batch, batch, verbose=0)  # compiled before files are limited
    return found


def fit(model, folder):
    batch = np.zeros((2, WIDTH))
    model.fit(batch, batch, verbose=0, callbacks=[OrbaxCheckpoint(folder)])


CONVERSIONS = {
    "convert": lambda model, folder: shardload.convert(folder.parent / "m.keras", folder / "m.weights.h5"),
    "convert to shards": lambda model, folder: shardload.convert(folder.parent / "m.keras", folder / "m.weights.json"),
    "convert to orbax": lambda model, folder: shardload.convert(folder.parent / "m.keras", folder / "m", to="orbax"),
    "save_as": lambda model, folder: shardload.save_as(model, folder / "m.weights.h5"),
}
STEPS = {
    "save": lambda model, folder: shardload.save(model, folder / "run", step=0),
    "save adapters": lambda model, folder: shardload.save(model, folder / "run", step=0, save_trainable_only=True),
    "callback": lambda model, folder: fit(model, folder / "run"),
}
SYNTH = {
    "synth": lambda model, folder: synth("gpt2_base", scale=0.1, directory=folder),
    "synth safetensors": lambda model, folder: synth("gpt2_base", scale=0.1, directory=folder, format="safetensors"),
}
WRITERS = CONVERSIONS | STEPS | SYNTH


@contextmanager
def small_files():
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", WRITERS)
def test_files_that_may_not_be_so_large(model, tmp_path, name):
    model.save(tmp_path / "m.keras")
    folder = tmp_path / "out"
    folder.mkdir()
    with small_files(), pytest.raises((WriteError, SaveError)) as caught:
        WRITERS[name](model, folder)
    said = str(caught.value)
    assert caught.value.errno == errno.EFBIG
    assert str(folder) in said and "File too large" in said and "ulimit -f unlimited" in said
    assert "MiB" in said.split("(ValueError", maxsplit=1)[0]  # what was to be written
    assert [path.relative_to(folder).as_posix() for path in folder.rglob("*")] in ([], ["run"])


SAID = {
    errno.ENOSPC: r"the disk is full, for 1\.2 MiB of tensors\. Free some space",
    errno.EDQUOT: r"Disk quota exceeded, for 1\.2 MiB of tensors\. Free some space of this user's quota",
    errno.EROFS: r"Read-only file system\. Choose a place that can be written",
}


@pytest.mark.parametrize("number", SAID)
@pytest.mark.parametrize("name", ["convert", "save_as"])
def test_a_disk_that_refuses_in_the_middle(model, tmp_path, monkeypatch, name, number):
    model.save(tmp_path / "m.keras")
    folder = tmp_path / "out"
    folder.mkdir()
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(WriteError, match=SAID[number]) as caught:
        CONVERSIONS[name](model, folder)
    assert caught.value.errno == number and str(folder / "m.weights.h5") in str(caught.value)
    left = [".m.weights.h5.converting"] if name == "convert" else []  # which the same command continues
    assert [path.name for path in folder.iterdir()] == left


def test_memory_that_is_refused_is_a_limit_too(model, tmp_path, monkeypatch):
    error = MemoryError("Unable to allocate 70.3 MiB for an array with shape (36864000,)")
    monkeypatch.setattr(os, "pwrite", Mock(side_effect=error))
    said = r"Cannot write .*/m\.weights\.h5: Cannot allocate memory\. .*ulimit -v"
    with pytest.raises(WriteError, match=said) as caught:
        shardload.save_as(model, tmp_path / "m.weights.h5")
    assert caught.value.errno == errno.ENOMEM
    assert not list(tmp_path.iterdir())


def test_a_read_only_disk_names_the_target(model, tmp_path, monkeypatch):
    refuses = Mock(side_effect=OSError(errno.EROFS, os.strerror(errno.EROFS)))
    monkeypatch.setattr("shardload.converting.publishing.FolderLock.take", refuses)
    with pytest.raises(WriteError, match=r"Cannot write .*/m\.weights\.h5: Read-only file system\. Choose a place"):
        shardload.save_as(model, tmp_path / "m.weights.h5")
    assert not list(tmp_path.iterdir())
