"""Whatever the view, the layout and the block size: shards equal the NumPy view, sliced."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from memory_store import RemoteMemoryStore
from transfer_harness import Chunks, Rows, check, load, manifest_of

from shardload.errors import LayoutError
from shardload.manifest import View
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import located
from shardload.stores.location import Location
from shardload.transfer.planning import Binding, plan_transfers

MESHES = [MeshSpec.parse(m) for m in ("1x1", "1x3", "1x8", "8x1", "2x4", "data=2,fsdp=2,model=2")]


@st.composite
def shapes(draw):
    """Of up to 4,096 elements: each may become a chunk and a block of its own."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 6, 8, 16]), max_size=4)))
    while np.prod(shape) > 4096:
        shape = shape[1:]
    return shape


@st.composite
def arrays_with_views(draw):
    shape = draw(shapes())
    dtype = draw(st.sampled_from([np.uint8, np.uint16, np.float32]))
    value = np.arange(np.prod(shape, dtype=int)).astype(dtype).reshape(shape)
    seen = value
    for step in draw(st.lists(st.sampled_from(["permute", "reshape", "slice", "broadcast"]), max_size=4)):
        if step == "permute":
            seen = seen.transpose(draw(st.permutations(range(seen.ndim))))
        elif step == "reshape" and seen.flags.c_contiguous and seen.size:
            flat = seen.reshape(-1)
            size = draw(st.sampled_from([n for n in range(1, flat.size + 1) if flat.size % n == 0]))
            seen = flat.reshape(size, flat.size // size)
        elif step == "slice" and seen.ndim:
            where = []
            for n in seen.shape:
                start = draw(st.integers(0, max(0, n - 1)))
                where.append(slice(start, draw(st.integers(start, n)), draw(st.sampled_from([1, 1, 2]))))
            seen = seen[tuple(where)]
        elif step == "broadcast" and seen.size <= 4096:  # a few hundred KiB: the budget of the tests is 1 MiB
            seen = np.broadcast_to(seen, (draw(st.sampled_from([2, 8])), *seen.shape))
    return value, seen


@st.composite
def layouts(draw, shape):
    mesh = draw(st.sampled_from(MESHES))
    free = list(draw(st.permutations(mesh.axes)))
    spec = []
    for n in shape:
        axes, parts = [], 1
        while free and draw(st.booleans()) and n % (parts * mesh.axis_size(free[-1])) == 0:
            parts *= mesh.axis_size(free[-1])
            axes.append(free.pop())
        spec.append(tuple(axes))
    return Layout(mesh, tuple(spec))


def view_of(name, value, seen):
    itemsize = value.dtype.itemsize
    start = (seen.__array_interface__["data"][0] - value.__array_interface__["data"][0]) // itemsize if seen.size else 0
    return View(name, start, seen.shape, tuple(abs(s) // itemsize for s in seen.strides))


def in_remote_store(manifest):
    """The same file in a remote store, whose ranges are used where they arrived: they end with what is needed."""
    path = Location(RemoteMemoryStore({"f.bin": Path(manifest.source).read_bytes()}), "f.bin")
    tensors = {name: replace(t, storage=replace(t.storage, path=path)) for name, t in manifest.tensors.items()}
    return replace(manifest, location=path, tensors=tensors, files={path: max(manifest.files.values())})


def loaded_by_any_plan(data, manifest, targets, *, placement, staged):
    """Load by a plan whose thresholds are drawn, those for staging from ``staged``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shardload.transfer.planning.DIRECT_RUN_BYTES", data.draw(st.sampled_from([1, 8, 1 << 10])))
        patch.setattr("shardload.transfer.planning.STAGED_BYTES", data.draw(st.sampled_from(staged)))
        skip = data.draw(st.sampled_from([1, 16, 1 << 17]))
        patch.setattr("shardload.transfer.planning.SKIP_BYTES", skip)
        patch.setattr("shardload.transfer.load_plan.SKIP_BYTES", skip)
        patch.setattr("shardload.transfer.scratch.PITCH_ROW_BYTES", data.draw(st.sampled_from([1, 1 << 10])))
        block_bytes = data.draw(st.sampled_from([1, 7, 64, 1 << 20]))
        least = 16 if manifest.location.store.is_remote else 1
        plan = plan_transfers(manifest, targets, host_memory_bytes=least << 20, block_bytes=block_bytes)
        return load(plan, manifest, placement=placement)


QUIET = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@QUIET
@given(data=st.data(), pair=arrays_with_views(), placement=st.sampled_from(["adopt", "upload"]))
def test_any_view_in_any_layout(tmp_path_factory, data, pair, placement):
    value, seen = pair
    path = tmp_path_factory.mktemp("any") / "f.bin"
    decoded, alignment = data.draw(st.booleans()), data.draw(st.sampled_from([1, 4]))
    source = Rows(value, path=located(path), alignment=alignment) if decoded else value
    manifest = manifest_of(path, {"pad": np.zeros(data.draw(st.integers(0, 3)), np.uint8), "t": source})
    if not decoded and data.draw(st.booleans()):
        manifest = in_remote_store(manifest)
    layout = data.draw(layouts(seen.shape))
    target = Binding("v", view_of("t", value, seen), value.dtype, layout)
    found, stats = loaded_by_any_plan(data, manifest, [target], placement=placement, staged=[8, 40, 100, 1 << 20])
    check(found["v"], seen, layout)
    assert stats.peak_staging_bytes <= (16 if manifest.location.store.is_remote else 1) << 20


@st.composite
def boxes_in_any_order(draw):
    """Arrays and views of them that permute dims, keep ranges of some and single indices of others."""
    shape = draw(shapes())
    value = np.arange(np.prod(shape, dtype=int)).astype(draw(st.sampled_from([np.uint8, np.float32]))).reshape(shape)
    where = []
    for n in shape:
        start = draw(st.integers(0, n - 1))
        where.append(draw(st.sampled_from([slice(0, n), slice(start, n), start])))
    seen = value[(*where, ...)]
    return value, seen.transpose(draw(st.permutations(range(seen.ndim))))


@pytest.mark.slow
@QUIET
@given(data=st.data(), pair=boxes_in_any_order(), placement=st.sampled_from(["adopt", "upload"]))
def test_any_box_of_chunks_in_any_layout(tmp_path_factory, data, pair, placement):
    value, seen = pair
    path = tmp_path_factory.mktemp("chunks") / "f.bin"
    grid = tuple(data.draw(st.integers(1, n + 2)) for n in value.shape)
    manifest = manifest_of(path, {"pad": np.zeros(data.draw(st.integers(0, 3)), np.uint8), "t": Chunks(value, grid)})
    whole, part = data.draw(layouts(value.shape)), data.draw(layouts(seen.shape))
    part = Layout(whole.mesh, part.spec) if part.mesh == whole.mesh else Layout.replicated(whole.mesh, seen.ndim)
    wide = data.draw(st.sampled_from([value.dtype, np.dtype(np.float32)]))
    targets = [
        Binding("part", view_of("t", value, seen), value.dtype, part),
        Binding("whole", View.whole(manifest.tensors["t"]), wide, whole),
    ][data.draw(st.integers(0, 1)) :]
    found, _ = loaded_by_any_plan(data, manifest, targets, placement=placement, staged=[8, 40, 1 << 20])
    check(found["whole"], value.astype(wide), whole)
    if "part" in found:
        check(found["part"], seen, part)


def test_a_view_that_reshapes_chunks_is_refused(tmp_path):
    value = np.arange(64, dtype=np.float32).reshape(8, 8)
    manifest = manifest_of(tmp_path / "f.bin", {"t": Chunks(value, (8, 4))})
    layout = Layout.replicated(MESHES[0], 1)
    with pytest.raises(LayoutError, match="stored in chunks"):
        plan_transfers(
            manifest, [Binding("v", View("t", 0, (64,), (1,)), value.dtype, layout)], host_memory_bytes=1 << 20
        )


@pytest.mark.parametrize("rows", [2, 3, 5, 2560])
@pytest.mark.parametrize("columns", [slice(0, 2), slice(0, 24), slice(8, 40), slice(24, 48)])
@pytest.mark.parametrize("spec", [((), ("model",)), ((), ())])
def test_columns_of_a_remote_tensor_end_within_its_last_row(tmp_path, rows, columns, spec):
    value = np.arange(rows * 48, dtype=np.float32).reshape(rows, 48)
    manifest = in_remote_store(manifest_of(tmp_path / "f.bin", {"t": value}))
    seen, layout = value[:, columns], Layout(MeshSpec.parse("1x2"), spec)
    target = Binding("v", view_of("t", value, seen), value.dtype, layout)
    found, _ = load(plan_transfers(manifest, [target], host_memory_bytes=16 << 20), manifest)
    check(found["v"], seen, layout)
