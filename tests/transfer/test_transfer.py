"""Bytes read, memory held, casts, failures: what a transfer promises beyond geometry."""

import dataclasses
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from transfer_harness import Rows, check, load, manifest_of

import shardload.transfer.execution
import shardload.transfer.preadv
from shardload.errors import BudgetError, MeshError, MismatchError, TransferError
from shardload.manifest import Manifest, Packed, Tensor, View
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import located
from shardload.transfer.budgets import least_budget
from shardload.transfer.execution import execute, named_sharding, place
from shardload.transfer.host_memory import memory
from shardload.transfer.planning import Binding, plan_transfers

MESH = MeshSpec.parse("1x8")
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
MIB = 1 << 20


def split(rank, dim, mesh=MESH):
    return Layout.split(mesh, rank, dim=dim, axis="model") if dim is not None else Layout.replicated(mesh, rank)


def whole(manifest, name, *, dim=None, dtype=None, transposed=False, variable=None):
    tensor = manifest.tensors[name]
    view = View.whole(tensor)
    if transposed:
        view = View(name, 0, view.shape[::-1], view.strides[::-1])
    return Binding(variable or name, view, np.dtype(dtype or tensor.dtype), split(len(view.shape), dim))


def planned(manifest, *targets, budget=64 * MIB, **options):
    return plan_transfers(manifest, targets, host_memory_bytes=budget, **options)


@pytest.fixture
def reads(monkeypatch):
    """Byte ranges every read call asks for."""
    seen = []
    original = shardload.transfer.preadv.preadv

    def preadv(fd, wanted, offset):
        got = original(fd, wanted, offset)
        seen.append((offset, got))
        return got

    monkeypatch.setattr(shardload.transfer.preadv, "preadv", preadv)
    return seen


@pytest.fixture
def value():
    return np.arange(1024 * 2048, dtype=np.uint16).reshape(1024, 2048)


@pytest.fixture
def manifest(tmp_path, value):
    return manifest_of(tmp_path / "f.bin", {"a": value, "b": np.arange(7, dtype=np.float32)})


@pytest.mark.parametrize(("dim", "transposed"), [(0, False), (1, False), (None, False), (0, True), (1, True)])
@pytest.mark.parametrize("placement", ["adopt", "upload"])
def test_each_byte_is_read_once_in_file_order(manifest, value, reads, *, dim, transposed, placement):
    plan = planned(manifest, whole(manifest, "a", dim=dim, transposed=transposed), whole(manifest, "b"))
    found, stats = load(plan, manifest, placement=placement, threads=1)
    check(found["a"], value.T if transposed else value, split(2, dim))
    assert plan.read_bytes == plan.needed_bytes
    assert stats.read_bytes == plan.needed_bytes == sum(n for _, n in reads) == value.nbytes + 28
    assert [a for a, _ in reads] == sorted(a for a, _ in reads)


@pytest.mark.parametrize("dim", [0, 1, None])
def test_devices_adopt_the_buffers_that_were_read_into(manifest, monkeypatch, dim):
    handed = {}
    original = jax.make_array_from_callback

    def spy(shape, sharding, callback):
        def remember(index):
            handed[len(handed)] = callback(index)
            return handed[len(handed) - 1]

        return original(shape, sharding, remember)

    monkeypatch.setattr(jax, "make_array_from_callback", spy)
    plan = planned(manifest, whole(manifest, "a", dim=dim))
    found, stats = load(plan, manifest)
    pointers = {s.data.unsafe_buffer_pointer() for s in found["a"].addressable_shards}
    assert pointers == {b.ctypes.data for b in handed.values()}
    if dim == 1:  # in runs of 512 bytes: two copies through scratch are faster
        assert stats.direct_bytes == 0 and stats.peak_staging_bytes == stats.threads * plan.scratch_bytes
    else:
        assert stats.direct_bytes == stats.read_bytes and stats.peak_staging_bytes == 0


def test_replicas_share_memory_and_survive_donation(manifest):
    found, _ = load(planned(manifest, whole(manifest, "b")), manifest)
    array = found["b"]
    assert len({s.data.unsafe_buffer_pointer() for s in array.addressable_shards}) == 1
    for shard in jax.jit(lambda x: x + 1, donate_argnums=0)(array).addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), np.arange(1, 8, dtype=np.float32))


def test_scratch_is_never_part_of_an_array(manifest, value):
    plan = planned(manifest, whole(manifest, "a", dim=0, transposed=True), budget=MIB)
    first, _ = load(plan, manifest, threads=1)
    copies = [np.array(s.data) for s in first["a"].addressable_shards]
    load(plan, manifest, threads=1)
    for shard, copy in zip(first["a"].addressable_shards, copies, strict=True):
        np.testing.assert_array_equal(np.asarray(shard.data), copy)


def test_fused_kernel_is_read_once_for_three_variables(tmp_path, reads):
    fused = np.arange(256 * 96, dtype=np.float32).reshape(256, 96)
    manifest = manifest_of(tmp_path / "f.bin", {"qkv": fused})
    views = {n: View("qkv", 32 * i, (256, 4, 8), (96, 8, 1)) for i, n in enumerate("qkv")}
    targets = [Binding(n, v, fused.dtype, split(3, 0)) for n, v in views.items()]
    plan = planned(manifest, *targets, block_bytes=64 * 96 * 4)
    found, _ = load(plan, manifest)
    for i, name in enumerate("qkv"):
        check(found[name], fused[:, 32 * i : 32 * i + 32].reshape(256, 4, 8), split(3, 0))
    assert len(plan.blocks) == 4 and sum(n for _, n in reads) == fused.nbytes == plan.needed_bytes


def test_tied_variables_share_one_read(manifest, value, reads):
    one, two = whole(manifest, "a", dim=0, variable="one"), whole(manifest, "a", dim=0, transposed=True, variable="two")
    found, _ = load(planned(manifest, one, two), manifest)
    check(found["one"], value, split(2, 0))
    check(found["two"], value.T, split(2, 0))
    assert sum(n for _, n in reads) == value.nbytes


def test_columns_nobody_here_needs_are_not_read(tmp_path, reads):
    wide = np.arange(4 * 8 * 65536, dtype=np.uint8).reshape(4, 8 * 65536)
    manifest = manifest_of(tmp_path / "f.bin", {"w": wide})
    plan = planned(manifest, whole(manifest, "w", dim=1), positions=[2, 3])
    assert plan.needed_bytes == plan.read_bytes == wide.nbytes // 4
    assert plan.device_bytes == (wide.nbytes // 8,) * 8


def test_over_read_is_counted(tmp_path):
    manifest = manifest_of(tmp_path / "f.bin", {"w": np.zeros((64, 8 * 100), np.uint8)})
    plan = planned(manifest, whole(manifest, "w", dim=1), positions=[0])
    assert 64 * 100 == plan.needed_bytes == 6400 == plan.read_bytes - 63 * 700


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["adopt", "upload"])
@pytest.mark.parametrize(("dim", "transposed"), [(0, False), (1, False), (None, False), (1, True), (0, True)])
def test_budget_holds_for_a_tensor_four_times_its_size(manifest, value, placement, dim, transposed):
    layout = split(2, dim)
    plan = planned(manifest, whole(manifest, "a", dim=dim, transposed=transposed), budget=MIB)
    found, stats = load(plan, manifest, placement=placement)
    check(found["a"], value.T if transposed else value, layout)
    assert stats.peak_staging_bytes <= MIB and plan.peak_staging_bytes <= MIB


def test_what_is_prepared_ahead_is_bounded(manifest, value, monkeypatch):
    plan = planned(manifest, whole(manifest, "a", dim=1), budget=MIB)
    monkeypatch.setattr(shardload.transfer.execution, "PREPARED", 2)
    ahead = []
    original = shardload.transfer.execution.Transfer.run

    def run(self, *callbacks):
        ahead.append(len(self.tasks))
        original(self, *callbacks)

    monkeypatch.setattr(shardload.transfer.execution.Transfer, "run", run)
    found, _ = load(plan, manifest, placement="adopt")
    check(found["a"], value, split(2, 1))
    assert ahead == [2]
    assert len([b for b in plan.blocks if b.how == "staged"]) > 2


@pytest.mark.parametrize("placement", ["adopt", "upload"])
def test_device_zero_holds_its_shards_and_one_block_at_most(manifest, placement):
    before = {id(a) for a in jax.live_arrays()}
    plan = planned(manifest, whole(manifest, "a", dim=1), whole(manifest, "b"), budget=MIB)
    most, arrays = 0, []

    def sample(*_):
        nonlocal most
        pointers = {}
        for array in jax.live_arrays():
            if id(array) not in before:
                for shard in array.addressable_shards:
                    if shard.device == jax.devices()[0]:
                        pointers[shard.data.unsafe_buffer_pointer()] = shard.data.nbytes
        most = max(most, sum(pointers.values()))

    def ready(_, array):
        arrays.append(array)
        sample()

    execute(plan, manifest, devices=jax.devices(), on_ready=ready, progress=sample, placement=placement)
    assert plan.device_bytes[0] <= most <= plan.device_bytes[0] + MIB // 8


def test_progress_adds_up(manifest):
    plan = planned(manifest, whole(manifest, "a", dim=0), block_bytes=1 << 16)
    steps = []
    load(plan, manifest, progress=steps.append)
    assert len(steps) == len(plan.blocks) > 8 and sum(steps) == plan.read_bytes


def test_decoded_rows_count_against_the_budget(tmp_path):
    value = np.arange(4096 * 512, dtype=np.float32).reshape(4096, 512)
    source = Rows(value, path=located(tmp_path / "f.bin"), alignment=32)
    manifest = manifest_of(tmp_path / "f.bin", {"q": source})
    plan = planned(manifest, whole(manifest, "q", dim=1), budget=2 * MIB)
    found, stats = load(plan, manifest)
    check(found["q"], value, split(2, 1))
    assert all(start % 32 == 0 for start, _ in source.calls)
    assert 0 < max((stop - start) * 2048 for start, stop in source.calls) <= stats.peak_staging_bytes <= 2 * MIB
    assert stats.read_bytes == source.stored_bytes == plan.needed_bytes


def test_budget_too_small_for_a_unit_is_refused(tmp_path):
    manifest = manifest_of(tmp_path / "f.bin", {"q": Rows(np.zeros((2, 1 << 20), np.uint8), path=located("f"))})
    with pytest.raises(BudgetError, match="Raise the budget to at least"):
        planned(manifest, whole(manifest, "q"), budget=MIB)
    with pytest.raises(BudgetError, match="at least 64KiB"):
        planned(manifest, whole(manifest, "q"), budget=1000)


SPECIAL = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, -1e-45, 3.4e38, 1.00390625, 1.01171875, 65504, 1e-8, 7])


@pytest.mark.parametrize("placement", ["adopt", "upload"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        ("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float32"), ("float32", "float16"),
        ("float16", "bfloat16"), ("bfloat16", "float16"), ("int8", "float32"), ("int32", "float32"),
        ("uint8", "int32"), ("float64", "float32"), ("float64", "bfloat16"), ("float8_e4m3fn", "bfloat16"),
    ],
)  # fmt: skip
def test_casts_equal_numpy_bit_for_bit(tmp_path, stored, wanted, placement, transposed):
    stored, wanted = np.dtype(getattr(ml_dtypes, stored, stored)), np.dtype(getattr(ml_dtypes, wanted, wanted))
    bits = np.random.default_rng(0).integers(0, 256, 64 * 1024 * stored.itemsize, dtype=np.uint8)
    with np.errstate(all="ignore"):
        value = bits.view(stored).reshape(64, 1024).copy()
        value[0, : SPECIAL.size] = SPECIAL.astype(np.float32).astype(stored)
        expected = value.T.astype(wanted) if transposed else value.astype(wanted)
    manifest = manifest_of(tmp_path / "f.bin", {"t": value})
    plan = planned(manifest, whole(manifest, "t", dim=0, dtype=wanted, transposed=transposed), budget=MIB)
    found, stats = load(plan, manifest, placement=placement)
    with np.errstate(all="ignore"):
        overflows = (np.isinf(value.astype(wanted)) & np.isfinite(value)).any()
    if (stored, wanted) != (np.float32, ml_dtypes.bfloat16):  # the same range, but for rounding
        assert stats.overflowed == (("t",) if overflows else ())
    assert found["t"].dtype == wanted
    unsigned = np.dtype(f"u{wanted.itemsize}")
    np.testing.assert_array_equal(np.asarray(found["t"]).view(unsigned), expected.view(unsigned))
    if stored != np.float64:
        with np.errstate(all="ignore"):
            by_jax = np.asarray(jnp.asarray(value, wanted)).view(unsigned)
            np.testing.assert_array_equal(by_jax, value.astype(wanted).view(unsigned))


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [("float32", "int32"), ("int32", "int8"), ("int8", "uint8"), ("bool", "float32"), ("complex64", "float32")],
)
def test_other_casts_are_refused_before_reading(tmp_path, stored, wanted):
    manifest = manifest_of(tmp_path / "f.bin", {"t": np.zeros(8, stored)})
    with pytest.raises(MismatchError, match=f"Cannot cast tensor 't' from {stored} to {wanted}"):
        planned(manifest, whole(manifest, "t", dtype=wanted))


def test_64_bit_variables_need_x64(tmp_path):
    manifest = manifest_of(tmp_path / "f.bin", {"t": np.zeros(8, np.float64)})
    with pytest.raises(MismatchError, match="jax_enable_x64"):
        load(planned(manifest, whole(manifest, "t")), manifest)


def test_file_that_changed_size_is_refused_before_reading(manifest, reads):
    plan = planned(manifest, whole(manifest, "a", dim=0))
    with Path(manifest.source).open("ab") as file:
        file.write(b"x")
    with pytest.raises(TransferError, match="changed since its headers were read, from 4194332 to 4194333 bytes"):
        load(plan, manifest)
    assert not reads


@pytest.mark.parametrize("transposed", [False, True])
def test_file_that_shrinks_while_being_read(manifest, transposed):
    plan = planned(manifest, whole(manifest, "a", dim=0, transposed=transposed), budget=MIB, block_bytes=1 << 16)

    said = r"tensor 'a': .*f\.bin ends early\. Found \d+ bytes at offset \d+, expected 65536"
    with pytest.raises(TransferError, match=said):
        load(plan, manifest, progress=lambda _: os.truncate(manifest.source, 1000))


def test_file_that_vanished(manifest):
    plan = planned(manifest, whole(manifest, "a", dim=0))
    Path(manifest.source).unlink()
    with pytest.raises(TransferError, match=r"Cannot read .* although its headers were read"):
        load(plan, manifest)


def test_io_error_names_tensor_file_and_offset(manifest, monkeypatch):
    monkeypatch.setattr(shardload.transfer.preadv, "preadv", Mock(side_effect=OSError(5, "Input/output error")))
    said = r"Cannot read tensor 'b', 28 bytes at offset 4194304 of .*Input/output error"
    with pytest.raises(TransferError, match=said):
        load(planned(manifest, whole(manifest, "b")), manifest)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_cancelled_load_stops_and_frees_everything(manifest, error, reads):
    open_files, arrays = len(list(Path("/proc/self/fd").iterdir())), len(jax.live_arrays())
    threads = set(threading.enumerate())

    plan = planned(manifest, whole(manifest, "a", dim=0, transposed=True), budget=MIB)
    with pytest.raises(error):
        load(plan, manifest, progress=Mock(side_effect=error))
    assert sum(n for _, n in reads) < 8 * (1 << 16) * 2
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files
    assert len(jax.live_arrays()) == arrays
    assert not [t for t in set(threading.enumerate()) - threads if t.name.startswith("shardload")]


def test_wrong_number_of_devices(manifest):
    plan = planned(manifest, whole(manifest, "b"))
    with pytest.raises(MeshError, match="with 2 devices: expected 8"):
        execute(plan, manifest, devices=jax.devices()[:2], on_ready=print)


def test_nothing_to_do():
    empty = Manifest(located("x"), "safetensors", {}, {})
    assert execute(planned(empty), empty, devices=[], on_ready=print).read_bytes == 0


@pytest.mark.parametrize("dim", [0, 1, None])
def test_place_copies(dim):
    value = np.arange(128, dtype=np.float32).reshape(8, 16)
    array = place(value, split(2, dim), jax.devices())
    expected = value.copy()
    value[...] = -1
    check(array, expected, split(2, dim))
    assert array.sharding.is_equivalent_to(named_sharding(split(2, dim), jax.devices()), 2)


@pytest.mark.slow
@pytest.mark.parametrize("most", [1, 1000, 5000, 100_000])
def test_reads_that_the_kernel_cuts_short_are_gone_on_with(manifest, value, monkeypatch, most):
    """Signals and some file systems return fewer bytes than asked for, at any place in a run."""
    original = shardload.transfer.preadv.preadv
    asked = []

    def preadv(fd, wanted, offset):
        ends = np.cumsum(wanted[:, 1])
        count = int(np.searchsorted(ends, most, side="left")) + 1
        few = wanted[:count].copy()
        few[-1, 1] -= max(0, int(few[:, 1].sum()) - most)
        asked.append(int(wanted[:, 1].sum()))
        return original(fd, few, offset)

    monkeypatch.setattr(shardload.transfer.preadv, "preadv", preadv)
    small = value[:16] if most == 1 else value
    held = manifest_of(Path(manifest.source).parent / "small.bin", {"a": small}) if most == 1 else manifest
    arrays = {}
    execute(planned(held, whole(held, "a", dim=1)), held, devices=jax.devices(), on_ready=arrays.__setitem__)
    np.testing.assert_array_equal(arrays["a"], small)
    assert max(asked) > most


@pytest.mark.parametrize(
    ("shape", "dim"), [((1037, 2048), 1), ((3, 517, 2048), 2), ((5, 8, 211, 256), 1), ((129, 9, 2048), 2)]
)
def test_lists_of_reads_longer_than_one_call_takes(tmp_path, monkeypatch, shape, dim):
    """More runs than one system call takes, and not a multiple of them."""
    monkeypatch.setattr("shardload.transfer.planning.DIRECT_RUN_BYTES", 512)
    value = np.arange(np.prod(shape), dtype=np.uint32).astype(np.uint16).reshape(shape)
    manifest = manifest_of(tmp_path / "f.bin", {"a": value})
    plan = planned(manifest, whole(manifest, "a", dim=dim), block_bytes=1 << 30, budget=1 << 34)
    assert [b.how for b in plan.blocks] == ["direct"]
    found, stats = load(plan, manifest)
    check(found["a"], value, split(len(shape), dim))
    assert stats.direct_bytes == value.nbytes


def test_what_is_passed_over_counts_against_the_budget(tmp_path):
    """A quarter of each row is wanted; the rest lands in scratch."""
    value = np.arange(256 * 4096, dtype=np.uint32).astype(np.uint16).reshape(256, 4096)
    manifest = manifest_of(tmp_path / "f.bin", {"a": value})
    target = Binding("a", View("a", 0, (256, 1024), (4096, 1)), value.dtype, split(2, None))
    plan = planned(manifest, target)
    assert {b.how for b in plan.blocks} == {"direct"}
    found, stats = load(plan, manifest, threads=2)
    check(found["a"], value[:, :1024], target.layout)
    assert stats.peak_staging_bytes == 2 * plan.scratch_bytes > 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
def test_pieces_that_are_uploaded_keep_every_bit(tmp_path, dtype):
    """Signalling NaNs too."""
    value = np.random.default_rng(0).integers(0, 256, 4 << 20, np.uint8).view(jnp.dtype(dtype)).reshape(256, -1)
    manifest = manifest_of(tmp_path / "f.bin", {"a": value})
    found, _ = load(planned(manifest, whole(manifest, "a", dim=1), budget=MIB), manifest, placement="upload")
    assert np.asarray(found["a"]).tobytes() == value.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["adopt", "upload"])
@pytest.mark.parametrize("budget", [64 << 10, 256 << 10, MIB, 2 * MIB])
@pytest.mark.parametrize(
    ("wanted", "dim", "transposed"), [("uint16", 0, True), ("float32", 1, False), ("float32", 0, True)]
)
def test_rows_longer_than_the_budget_allows_are_not_moved_row_by_row(
    tmp_path, placement, *, budget, wanted, dim, transposed
):
    value = np.arange(4 * (512 << 10), dtype=np.uint32).astype(np.uint16).reshape(4, 512 << 10)
    manifest = manifest_of(tmp_path / "f.bin", {"a": value})
    target = dataclasses.replace(whole(manifest, "a", dim=dim, transposed=transposed), dtype=np.dtype(wanted))
    found, stats = load(planned(manifest, target, budget=budget), manifest, placement=placement, threads=1)
    np.testing.assert_array_equal(np.asarray(found["a"]), (value.T if transposed else value).astype(wanted))
    assert stats.peak_staging_bytes <= budget


def test_no_memory_for_shards_is_told(manifest, monkeypatch):
    no_memory = Mock(side_effect=OSError(12, "Cannot allocate memory"))
    monkeypatch.setattr("shardload.transfer.host_memory.memory", no_memory)
    said = r"Cannot allocate 4194304 bytes for the shards of variable 'a' .*Use a mesh over more hosts"
    with pytest.raises(TransferError, match=said):
        load(planned(manifest, whole(manifest, "a", dim=1)), manifest)


def test_uploads_use_the_memory_of_those_before_them(tmp_path, monkeypatch):
    """Whatever the devices still read is left alone: a device that adopted a buffer would have other bits here."""
    values = {f"v{k}": np.random.default_rng(k).integers(0, 256, (64, 1 << 10), np.uint8) for k in range(60)}
    manifest = manifest_of(tmp_path / "f.bin", values)
    counted = Mock(side_effect=memory)
    monkeypatch.setattr("shardload.transfer.host_memory.memory", counted)
    plan = planned(manifest, *(whole(manifest, name, dim=1) for name in values), budget=MIB)
    found, stats = load(plan, manifest, placement="upload", threads=1)
    for name, value in values.items():
        assert np.asarray(found[name]).tobytes() == value.tobytes()
    assert counted.call_count < 20 and stats.peak_staging_bytes <= MIB


@pytest.mark.parametrize("shape", [(4, 1 << 20), (4, 4 << 20), (4, 12 << 20)])
def test_the_least_budget_of_a_chunk_leaves_room_for_the_scratch_of_many_threads(tmp_path, shape):
    path = tmp_path / "f.bin"
    value = np.arange(1 << 20, dtype=np.uint32).astype(np.uint16).reshape(256, 4096)
    held = manifest_of(path, {"a": value})
    zeros = SimpleNamespace(shape=shape, decode=lambda stored: np.zeros(shape, np.uint16))
    big = Tensor("big", shape, value.dtype, Packed(located(path), 0, 8, zeros))
    manifest = dataclasses.replace(held, tensors={**held.tensors, "big": big})
    budget = least_budget(big, through_units=False, uploads=False)
    plan = planned(manifest, whole(manifest, "a", dim=0, transposed=True), whole(manifest, "big"), budget=budget)
    found, stats = load(plan, manifest, threads=8)
    np.testing.assert_array_equal(np.asarray(found["a"]), value.T)
    assert stats.peak_staging_bytes <= budget
