"""Files read past the page cache give the same bits as files read through it."""

import errno
import os
from pathlib import Path

import cli_fakes
import keras
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

import shardload
from shardload.errors import TransferError, UsageError
from shardload.stores.local import located
from shardload.transfer import direct_io
from shardload.transfer.direct_io import ALIGNMENT, PIECE_BYTES, DirectReads, choose_io, resident_share
from shardload.transfer.scratch import BlockMemory

SIZE = 3 * PIECE_BYTES + 1000
DIRECT = "read past the page cache (O_DIRECT)"


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("bytes") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    if direct_io.refusal_of(path) is not None:
        pytest.skip("the file system of the tests has no O_DIRECT")
    return path


def evict(path):
    with path.open("rb") as opened:
        os.fsync(opened.fileno())
        os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("row", [0, 1536, 4096])
@pytest.mark.parametrize(
    ("offset", "n_bytes"),
    [
        (0, 1), (0, ALIGNMENT), (ALIGNMENT, ALIGNMENT), (511, 2), (ALIGNMENT - 1, 2), (8, 3 * ALIGNMENT),
        (1, PIECE_BYTES), (PIECE_BYTES - 3, PIECE_BYTES + 7), (SIZE - 1, 1), (SIZE - 5000, 5000), (0, SIZE),
    ],
)  # fmt: skip
def test_any_range_arrives_as_it_is(file, row, offset, n_bytes):
    pitch = row + 64 if row else 0
    memory = np.zeros((n_bytes // row + 1) * pitch if row else n_bytes, np.uint8)
    source = DirectReads()
    try:
        got = source.fill(
            BlockMemory(memory, np.dtype(np.uint8), 0, row, pitch), n_bytes, path=located(file), offset=offset
        )
    finally:
        source.close()
    found = memory.reshape(-1, pitch)[:, :row].ravel()[:n_bytes] if row else memory
    assert got == n_bytes and found.tobytes() == file.read_bytes()[offset : offset + n_bytes]
    assert n_bytes <= source.read_bytes([]) < n_bytes + (2 + n_bytes // (PIECE_BYTES - ALIGNMENT)) * ALIGNMENT


def test_end_of_a_file_is_a_short_read(file):
    source = DirectReads()
    memory = BlockMemory(np.zeros(100, np.uint8), np.dtype(np.uint8), 0)
    assert source.fill(memory, 100, path=located(file), offset=SIZE - 10) == 10
    assert source.fill(memory, 100, path=located(file), offset=SIZE + 10) == 0
    source.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory, file):
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(1000, name="a"), keras.layers.Dense(801, name="b"), keras.layers.Dense(3, name="c")]
    model = keras.Sequential([keras.Input((600,)), *layers])
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    model.save(path)
    return path


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16"}, {"layout": {".*kernel": (None, "model")}}])
def test_model_has_the_same_bits(saved, options):
    models = [shardload.load(saved, mesh="1x2", io=io, **options) for io in ("buffered", "direct")]
    plain, direct = ([np.asarray(v.value).tobytes() for v in model.weights] for model in models)
    assert direct == plain
    reports = [shardload.report(model) for model in models]
    assert DIRECT in reports[1].notes and DIRECT not in reports[0].notes
    assert reports[1].bytes.read >= reports[0].bytes.read
    assert reports[1].host_bytes.peak_staging <= reports[1].host_bytes.budget


def test_nothing_stays_in_the_page_cache(tmp_path, file):
    tensors = {f"t{i}": np.random.default_rng(i).random((700, 999)).astype(ml_dtypes.bfloat16) for i in range(5)}
    path = tmp_path / "model.safetensors"
    save_file(tensors, path)
    evict(path)
    if resident_share(path) > 0.1:
        pytest.skip("this file system keeps its files in memory")
    model = keras.Sequential([keras.Input((700,)), keras.layers.Dense(999, use_bias=False, dtype="bfloat16")])
    names = {"t0": model.weights[0].path}
    shardload.load_weights(model, path, names=names, strict=False, mesh="1x1", io="direct")
    assert np.asarray(model.weights[0].value).tobytes() == tensors["t0"].tobytes()
    assert resident_share(path) < 0.5
    path.read_bytes()
    assert resident_share(path) == 1.0


def test_small_budget_runs_fewer_threads(saved):
    model = shardload.load(saved, mesh="1x2", io="direct", host_memory_bytes="16MiB")
    assert shardload.report(model).host_bytes.peak_staging <= 16 << 20


def test_auto_asks_the_cache_then_the_disk(file, monkeypatch):
    rates = {os.O_DIRECT: 2.0, 0: 1.0}
    monkeypatch.setattr(direct_io, "AUTO_BYTES", SIZE)
    monkeypatch.setattr(direct_io, "read_rate", lambda path, offset, flags: rates[flags])
    monkeypatch.setattr(direct_io, "resident_share", lambda path: 0.0)
    found = choose_io("auto", [located(file)], verified=False)
    assert found.direct and "as the files are not in it: 2.00 GB/s against 1.00 GB/s" in found.note
    rates[0] = 1.9
    assert not choose_io("auto", [located(file)], verified=False).direct
    rates[0] = 1.0
    monkeypatch.setattr(direct_io, "resident_share", lambda path: 0.5)
    assert choose_io("auto", [located(file)], verified=False) == direct_io.FileReading(direct=False)


def test_file_system_without_it_is_an_error_or_a_note(file, monkeypatch):
    original = os.open

    def refusing(path, flags, *more, **named):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return original(path, flags, *more, **named)

    monkeypatch.setattr(os, "open", refusing)
    with pytest.raises(TransferError, match="past the page cache: Invalid argument, expected a file system that"):
        choose_io("direct", [located(file)], verified=False)
    found = choose_io("auto", [located(file)], verified=False)
    assert not found.direct and "cannot be opened with O_DIRECT" in found.note


def test_verified_bytes_are_read_as_usual(file):
    found = choose_io("direct", [located(file)], verified=True)
    assert not found.direct and "its bytes are verified as they are read" in found.note


def test_wrong_argument():
    with pytest.raises(UsageError, match=r"io='fast': expected 'auto', 'buffered' or 'direct'"):
        shardload.load("nowhere", io="fast")


@pytest.mark.slow
def test_command(saved):
    found = cli_fakes.shardload("load", str(saved), "--mesh", "1x2", "--io", "direct", "--json")
    assert DIRECT in found.json["notes"], found
    assert Path(found.json["source"]) == saved
