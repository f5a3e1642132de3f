"""Thousands of small tensors: read together, placed one by one."""

import itertools
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from step_folders import flip, save_step
from transfer_harness import Rows, check, load, manifest_of

import shardload.transfer.preadv
from shardload.errors import DamagedError, TransferError
from shardload.manifest import Extent, Manifest, Tensor, View
from shardload.runs.digests import Checker
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import located
from shardload.transfer.load_plan import RUN_BYTES, SMALL_BLOCK_BYTES, joined_runs
from shardload.transfer.planning import Binding, plan_transfers

MESH = MeshSpec.parse("1x8")
SHAPES = [(), (8,), (24, 8), (3,), (16, 8, 4), (64, 64), (0, 8), (8, 1)]
COUNT = 800
MIB = 1 << 20


@pytest.fixture(scope="module")
def values():
    random = np.random.default_rng(0)
    dtypes = [np.float32, ml_dtypes.bfloat16, np.int8]
    return {f"t{i}": (random.random(SHAPES[i % 8]) * 100).astype(dtypes[i // 8 % 3]) for i in range(COUNT)}


@pytest.fixture(scope="module")
def manifest(values, tmp_path_factory):
    return manifest_of(tmp_path_factory.mktemp("small") / "f.bin", values)


@pytest.fixture
def reads(monkeypatch):
    """Byte ranges every read call asks for; `fail` may raise for one of them."""
    seen = SimpleNamespace(ranges=[], fail=lambda start, stop: None)
    original = shardload.transfer.preadv.preadv

    def preadv(fd, wanted, offset):
        seen.fail(offset, offset + int(wanted[:, 1].sum()))
        got = original(fd, wanted, offset)
        seen.ranges.append((offset, offset + got))
        return got

    monkeypatch.setattr(shardload.transfer.preadv, "preadv", preadv)
    return seen


def bindings(manifest, *, split, dtype=None):
    """Whole tensors, the even ones of a fitting shape split by rows, or by the last dim."""
    for name, tensor in manifest.tensors.items():
        layout = Layout.replicated(MESH, len(tensor.shape))
        if split is not None and tensor.shape and tensor.shape[split] % 8 == 0:
            layout = Layout.split(MESH, len(tensor.shape), dim=split % len(tensor.shape), axis="model")
        yield Binding(name, View.whole(tensor), np.dtype(dtype or tensor.dtype), layout)


@pytest.mark.parametrize("placement", ["adopt", "upload"])
@pytest.mark.parametrize(("split", "dtype"), [(None, None), (0, None), (-1, None), (0, np.float32)])
def test_small_tensors_are_read_together(manifest, values, reads, *, placement, split, dtype):
    plan = plan_transfers(manifest, list(bindings(manifest, split=split, dtype=dtype)), host_memory_bytes=None)
    found, stats = load(plan, manifest, placement=placement)
    for binding in plan.bindings:
        check(found[binding.name], values[binding.name].astype(binding.dtype), binding.layout)
    size = sum(value.nbytes for value in values.values())
    assert sum(b - a for a, b in reads.ranges) == stats.read_bytes == plan.needed_bytes == size
    assert len(reads.ranges) <= 2 * size // RUN_BYTES + 1 and stats.direct_bytes == 0
    assert plan.scratch_bytes <= RUN_BYTES and plan.scratch_bytes <= stats.peak_staging_bytes
    if placement == "adopt":
        assert stats.peak_staging_bytes <= plan.peak_staging_bytes


def test_views_of_one_tensor_and_transposed_ones(tmp_path, reads):
    fused = [np.arange(24 * i, 24 * i + 24, dtype=np.float32).reshape(4, 6) for i in range(50)]
    manifest = manifest_of(tmp_path / "f.bin", {f"t{i}": value for i, value in enumerate(fused)})
    one = Layout.replicated(MESH, 2)
    views = {"q": View("", 0, (4, 3), (6, 1)), "k": View("", 3, (3, 4), (1, 6)), "all": View("", 0, (6, 4), (1, 6))}
    wanted = [
        Binding(f"{n}{i}", View(f"t{i}", v.offset, v.shape, v.strides), np.dtype(np.float32), one)
        for i in range(50)
        for n, v in views.items()
    ]
    found, _ = load(plan_transfers(manifest, wanted, host_memory_bytes=None), manifest)
    for i, value in enumerate(fused):
        for name, expected in {"q": value[:, :3], "k": value[:, 3:].T, "all": value.T}.items():
            check(found[f"{name}{i}"], expected, one)
    assert len(reads.ranges) == 1


@pytest.mark.parametrize("placement", ["adopt", "upload"])
def test_the_smallest_budget_is_kept(manifest, values, *, placement):
    plan = plan_transfers(manifest, list(bindings(manifest, split=0)), host_memory_bytes=64 << 10)
    found, stats = load(plan, manifest, placement=placement, threads=2)
    assert stats.peak_staging_bytes <= 64 << 10
    for binding in plan.bindings:
        check(found[binding.name], values[binding.name], binding.layout)


def test_a_read_that_fails_names_its_tensor(manifest, reads):
    def fail(start, stop):
        if start <= broken.storage.offset < stop:
            raise OSError(5, "Input/output error")

    broken = manifest.tensors["t610"]
    reads.fail = fail
    plan = plan_transfers(manifest, list(bindings(manifest, split=None)), host_memory_bytes=None)
    with pytest.raises(TransferError, match=rf"Cannot read tensor 't610', {broken.nbytes} bytes at offset"):
        load(plan, manifest, threads=1)


def test_an_overflow_names_its_tensor(tmp_path):
    big = {f"t{i}": np.full(16, 1e30 if i == 7 else 1, np.float32) for i in range(20)}
    manifest = manifest_of(tmp_path / "f.bin", big)
    plan = plan_transfers(manifest, list(bindings(manifest, split=None, dtype=np.float16)), host_memory_bytes=None)
    _, stats = load(plan, manifest)
    assert stats.overflowed == ("t7",)


def test_progress_counts_every_byte(manifest):
    steps = []
    plan = plan_transfers(manifest, list(bindings(manifest, split=None)), host_memory_bytes=None)
    load(plan, manifest, progress=steps.append)
    assert sum(steps) == plan.read_bytes and len(steps) > 1


@pytest.mark.parametrize("damage", [False, True])
def test_runs_of_a_step_are_verified(tmp_path, *, damage):
    step = save_step(tmp_path, 7)
    file = step / "pytree/d/big"
    content = np.fromfile(file, np.uint8)[: 2 * MIB]
    if damage:
        flip(file, offset=MIB + 77)
    path = located(file)
    tensors = {f"t{i}": Tensor(f"t{i}", (1024,), content.dtype, Extent(path, 1024 * i)) for i in range(2048)}
    manifest = Manifest(path, "orbax", tensors, {path: file.stat().st_size})
    plan = plan_transfers(manifest, list(bindings(manifest, split=None)), host_memory_bytes=None, scatter=False)
    checker = Checker(step)
    if damage:
        with pytest.raises(DamagedError):
            load(plan, manifest, check=checker)
        return
    found, _ = load(plan, manifest, check=checker)
    assert b"".join(np.asarray(found[f"t{i}"]).tobytes() for i in range(2048)) == content.tobytes()
    assert checker.bytes_checked == 2 * MIB and max(map(len, plan.runs)) == RUN_BYTES // 1024


def test_what_forms_a_run():
    def block(offset, n_bytes, *, path="f", decoded=False):
        return SimpleNamespace(offset=offset, read_bytes=n_bytes, path=path, is_decoded=decoded)

    big = SMALL_BLOCK_BYTES + 1
    sizes = [10, 20, big, 30, 40]
    starts = itertools.accumulate(sizes, initial=0)
    blocks = [block(at, n) for at, n in zip(starts, sizes, strict=False)]
    end = sum(sizes)
    blocks += [block(end + 1, 5), block(end + 6, 5, path="g"), block(end + 11, 5, path="g", decoded=True)]
    found = list(joined_runs(blocks, staged=lambda b: b.read_bytes, limit_bytes=1000))
    assert found == [range(2), range(2, 3), range(3, 5), range(5, 6), range(6, 7), range(7, 8)]
    assert list(joined_runs(blocks, staged=lambda b: b.read_bytes, limit_bytes=29))[:2] == [range(1), range(1, 2)]
    many = [block(i * SMALL_BLOCK_BYTES, SMALL_BLOCK_BYTES) for i in range(20)]
    assert list(joined_runs(many, staged=lambda b: 0, limit_bytes=0)) == [range(8), range(8, 16), range(16, 20)]
    assert list(joined_runs([], staged=lambda b: 0, limit_bytes=0)) == []


def test_decoded_tensors_stay_alone(tmp_path):
    tensors = {f"t{i}": np.arange(8, dtype=np.float32) for i in range(6)}
    tensors["t3"] = Rows(np.arange(8, dtype=np.float32), path=located(tmp_path / "f.bin"))
    manifest = manifest_of(tmp_path / "f.bin", tensors)
    plan = plan_transfers(manifest, list(bindings(manifest, split=None)), host_memory_bytes=None)
    found, _ = load(plan, manifest)
    assert sorted(map(len, plan.runs)) in ([1, 2, 3], [1, 5])
    assert len(found) == 6 and all(np.array_equal(np.asarray(array), np.arange(8)) for array in found.values())
