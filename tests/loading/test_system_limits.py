"""A limit of the process is named, with the way out, and never taken for damage."""

import errno
import os
import resource
import tempfile
from contextlib import contextmanager
from pathlib import Path

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardload
from shardload.console import failures
from shardload.converting import companions
from shardload.errors import LimitError, SourceError, TransferError, WriteError
from shardload.loaders import open_manifest
from shardload.runs.listing import list_steps
from shardload.verifying import verify

pytestmark = pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="open files are counted in /proc")
SPARE = (0, 1, 2, 3, 5, 8)
"""Files that a call may open: from none to some, but fewer than it has."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    """One checkpoint in many files."""
    folder = tmp_path_factory.mktemp("parts")
    for i in range(20):
        save_file({f"t{i}": np.full(4, i, "float32")}, folder / f"p{i:02}.safetensors")
    return folder


@pytest.fixture(scope="module")
def h5(tmp_path_factory):
    path = tmp_path_factory.mktemp("h5") / "m.weights.h5"
    model().save_weights(path)
    return path


def model(value=0.0):
    made = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4, name="one"), keras.layers.Dense(4, name="two")])
    made.compile("sgd", "mse")
    for weight in made.weights:
        weight.assign(np.full(weight.shape, value))
    return made


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with the steps 1 and 2, whose weights are 1 and 2."""
    folder = tmp_path_factory.mktemp("run") / "steps"
    for step in (1, 2):
        shardload.save(model(step), folder, step=step)
    return folder


@contextmanager
def few_files(spare):
    """Let this process open only ``spare`` more files at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    probe = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free: that of the list itself, until now
    os.close(probe)
    used.discard(probe)
    limit = 0
    while spare > 0 or limit in used:  # the limit is on the number of a descriptor, not on how many there are
        spare -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def held(call, spare):
    """What a call returns with so few files; ``None`` if it names the limit."""
    call()  # imports what it needs
    with few_files(spare):
        try:
            return call()
        except LimitError as error:
            assert error.errno == errno.EMFILE
            assert "Too many open files (at most " in str(error) and "ulimit -n 4096" in str(error)
            return None


@pytest.mark.parametrize("spare", SPARE)
def test_headers_are_read_or_the_limit_is_named(spare, parts, h5, run):
    for path, tensors in ((parts, 20), (h5, None), (run / "2", None)):
        found = held(lambda path=path: open_manifest(path), spare)
        assert found is not None or spare < 8
        assert found is None or tensors is None or len(found.tensors) == tensors
        assert found is None or spare > 0


@pytest.mark.parametrize("spare", SPARE)
def test_a_checkpoint_that_cannot_be_opened_is_not_called_damaged(spare, parts, h5, run):
    for path in (parts, h5, run, run / "2"):
        found = held(lambda path=path: verify(path), spare)
        assert (found is None) if not spare else found is None or all(verdict.is_good for verdict in found)


@pytest.mark.parametrize("spare", SPARE)
def test_no_older_step_is_restored_because_of_a_limit(spare, run):
    target = model()
    steps = held(lambda: [(info.step, info.problems) for info in list_steps(run)], spare)
    assert steps in (None, [(1, None), (2, None)])
    held(lambda: shardload.restore(target, run, fallback="previous"), spare)
    assert set(np.unique(target.weights[0].value)) == {2.0}


def test_the_command_names_the_limit_whoever_says_so():
    for error in (
        OSError(errno.EMFILE, "Too many open files"),
        ImportError("libx.so: cannot open shared object file: Too many open files"),
        ValueError("Error opening file [os_error_code='24']"),
        RuntimeError("can't start new thread"),
    ):
        found = failures.failure_of(error)
        assert found.exit_code == 1 and "ulimit -" in found.message and "bug" not in found.message
    wrapped = TransferError("Cannot read a.safetensors: it failed")
    wrapped.__cause__ = OSError(errno.ENOSPC, "No space left on device")
    assert failures.failure_of(wrapped).message.endswith("it failed. Free some space, or choose another disk.")
    assert failures.failure_of(SourceError("Odd.")).message == "Odd."


def test_a_full_disk_is_not_taken_for_a_tokenizer_that_cannot_be_written(monkeypatch, tmp_path):
    class Tokenizer:
        def save_to_preset(self, folder):
            raise RuntimeError("Cannot write: No space left on device")

    monkeypatch.setattr(companions, "save_description", lambda *_, **__: None)
    with pytest.raises(RuntimeError, match="No space left"):
        companions.write_description(object(), companions.Preprocessing(Tokenizer()), tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_folder_for_temporary_files_what_needs_none_works(monkeypatch, tmp_path):
    made = model(3.0)
    made.save(tmp_path / "m.keras")
    monkeypatch.setattr(tempfile, "tempdir", "/proc/nothing")
    assert set(np.unique(shardload.load(tmp_path / "m.keras").weights[0].value)) == {3.0}
    verify(tmp_path / "m.keras")
    with pytest.raises(WriteError, match=r"Cannot write temporary files: .* Set TMPDIR to a folder"):
        shardload.save_as(made, tmp_path / "out.weights.h5")
    assert [path.name for path in tmp_path.iterdir()] == ["m.keras"]
