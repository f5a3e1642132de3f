"""Plans as arithmetic: no file, no device."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardload.errors import BudgetError, LayoutError, MismatchError
from shardload.manifest import Extent, Manifest, Tensor, View
from shardload.sharding.layout import Bounds, Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import located
from shardload.transfer.casts import check_cast
from shardload.transfer.geometry import Ordered, address, cut, span
from shardload.transfer.host_memory import Budget
from shardload.transfer.planning import Binding, plan_transfers

MESH = MeshSpec.parse("1x8")
FLOAT32 = np.dtype(np.float32)


def manifest_of(shapes, *, path="f.bin", dtype=np.float32):
    path = located(path)
    tensors, offset = {}, 100
    for name, shape in shapes.items():
        tensors[name] = Tensor(name, shape, np.dtype(dtype), Extent(path, offset))
        offset += tensors[name].nbytes
    return Manifest(path, "safetensors", tensors, {path: offset})


def target(manifest, name, dim=None, **changes):
    view = changes.pop("view", View.whole(manifest.tensors[name]))
    rank = len(view.shape)
    layout = Layout.replicated(MESH, rank) if dim is None else Layout.split(MESH, rank, dim=dim, axis="model")
    return Binding(name, view, changes.pop("dtype", FLOAT32), changes.pop("layout", layout))


@st.composite
def views(draw):
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    strides = draw(st.lists(st.integers(0, 40), min_size=len(shape), max_size=len(shape)))
    return View("t", draw(st.integers(0, 9)), tuple(shape), tuple(strides))


@settings(max_examples=300, deadline=None)
@given(views(), st.integers(1, 60), st.integers(1, 60))
def test_cut_tiles_any_view_in_boxes_within_the_limit(view, limit, skip):
    seen = np.zeros(view.shape, int)
    for box in cut(Ordered.of(view, Bounds.whole(view.shape)), limit=limit, skip=skip):
        seen[(*box.slices, ...)] += 1
        assert span(box.shape, view.strides) <= limit
    assert (seen == 1).all()


@given(st.permutations(range(3)), st.integers(1, 200))
def test_cut_of_a_permuted_tensor_ascends_without_gaps(order, limit):
    base = View.whole(Tensor("t", (4, 6, 5), FLOAT32, Extent(located("f"), 0)))
    view = View("t", 0, tuple(base.shape[d] for d in order), tuple(base.strides[d] for d in order))
    boxes = list(cut(Ordered.of(view, Bounds.whole(view.shape)), limit=limit, skip=1000))
    ranges = [(address(view, b.start), address(view, b.start) + span(b.shape, view.strides)) for b in boxes]
    assert ranges[0][0] == 0 and ranges[-1][1] == 120
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@given(st.integers(1, 6), st.integers(2, 6), st.integers(0, 40))
def test_columns_of_a_matrix_are_cut_at_the_same_rows(rows, width, more):
    """Else two of them read the same bytes, where both together do not fit into a block."""
    parts = [(a, b) for a, b in itertools.combinations(range(width + 1), 2)]
    views = [View("t", a, (rows, b - a), (width, 1)) for a, b in parts]
    cuts = [list(cut(Ordered.of(v, Bounds.whole(v.shape)), limit=width + more, skip=1000)) for v in views]
    assert len({tuple((box.start[0], box.stop[0]) for box in boxes) for boxes in cuts}) == 1


def test_blocks_are_in_file_order_whatever_the_order_of_targets():
    manifest = manifest_of({"a": (64, 64), "b": (8,), "c": (128, 32)})
    plan = plan_transfers(manifest, [target(manifest, n) for n in "cab"], host_memory_bytes=1 << 20, block_bytes=1024)
    assert [b.tensor for b in plan.blocks if b.start == 0] == ["a", "b", "c"]
    assert [b.offset for b in plan.blocks] == sorted(b.offset for b in plan.blocks)
    assert all(b.read_bytes <= 1024 for b in plan.blocks)
    assert plan.needed_bytes == plan.read_bytes == manifest.nbytes
    assert plan.files == (located("f.bin"),)


def test_device_bytes_are_what_each_position_finally_holds():
    manifest = manifest_of({"a": (64, 64), "b": (8,)})
    plan = plan_transfers(manifest, [target(manifest, "a", 1), target(manifest, "b")], host_memory_bytes=1 << 20)
    assert plan.device_bytes == (64 * 8 * 4 + 32,) * 8


@pytest.mark.parametrize(
    ("shape", "dim", "strides", "how"),
    [
        ((64, 4096), 0, (4096, 1), "direct"), ((64, 4096), 1, (4096, 1), "direct"),
        ((64, 2048), 1, (2048, 1), "staged"), ((64, 512), 1, (512, 1), "staged"),
        ((4096, 64), 0, (1, 4096), "staged"), ((8,), None, (1,), "direct"),
    ],
)  # fmt: skip
def test_how_depends_on_run_length_and_order(shape, dim, strides, how):
    manifest = manifest_of({"a": (math.prod(shape),)})
    wanted = target(manifest, "a", dim, view=View("a", 0, shape, strides))
    plan = plan_transfers(manifest, [wanted], host_memory_bytes=1 << 20)
    assert {b.how for b in plan.blocks} == {how}
    assert all((b.host_bytes == 0) == (how == "direct") for b in plan.blocks)


def fused(manifest, name, *, swapped=False, dtype=FLOAT32):
    """Two variables out of one tensor: its upper half as it is, its lower half transposed."""
    rows, columns = manifest.tensors[name].shape
    upper = View(name, 0, (rows // 2, columns), (columns, 1))
    lower = View(name, rows // 2 * columns, (columns, rows // 2), (1, columns))
    found = [target(manifest, name, dim, view=view, dtype=dtype) for dim, view in ((0, upper), (1, lower))]
    return found[::-1] if swapped else found


def test_repeated_layers_are_planned_as_if_each_were_the_only_one():
    shapes = dict.fromkeys("abcdefgh", (256, 1024))
    manifest = manifest_of(shapes)
    targets = [
        *(target(manifest, "a", 0), target(manifest, "b", 1), target(manifest, "c", 0), target(manifest, "d", 1)),
        *fused(manifest, "e"),
        *fused(manifest, "f", swapped=True),
        *fused(manifest, "g", dtype=np.dtype(np.float16)),
        target(manifest, "h", 0, dtype=np.dtype(np.float16)),
    ]
    both = plan_transfers(manifest, targets, host_memory_bytes=1 << 20)
    for name in shapes:
        mine = [i for i, t in enumerate(targets) if t.view.tensor == name]
        alone = plan_transfers(manifest, [targets[i] for i in mine], host_memory_bytes=1 << 20)
        mapped = [replace(b, pieces=tuple(replace(p, binding=mine[p.binding]) for p in b.pieces)) for b in alone.blocks]
        assert [b for b in both.blocks if b.tensor == name] == mapped


def test_no_position_means_no_read():
    manifest = manifest_of({"a": (64, 64)})
    plan = plan_transfers(manifest, [target(manifest, "a", 0)], host_memory_bytes=1 << 20, positions=[])
    assert plan.blocks == () and plan.needed_bytes == 0


def test_positions_read_their_rows_only():
    manifest = manifest_of({"a": (64, 64)})
    plan = plan_transfers(manifest, [target(manifest, "a", 0)], host_memory_bytes=1 << 20, positions=[2, 5])
    assert [(b.start, b.stop) for b in plan.blocks] == [(1024, 1536), (2560, 3072)]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"view": View("a", 1, (8, 8), (8, 1))}, MismatchError, r"view needs 65 elements of tensor 'a', which has 64"),
        ({"view": View("x", 0, (8,), (1,))}, MismatchError, "checkpoint has no tensor 'x'"),
        ({"view": View("a", 63, (8, 8), (-8, 1))}, LayoutError, "expected one stride per dim, and none < 0"),
        ({"layout": Layout.replicated(MESH, 1)}, LayoutError, "does not divide"),
    ],
)
def test_what_cannot_be_planned_says_why(changes, error, message):
    manifest = manifest_of({"a": (8, 8)})
    with pytest.raises(error, match=message):
        plan_transfers(manifest, [target(manifest, "a", **changes)], host_memory_bytes=1 << 20)


def test_meshes_may_not_be_mixed():
    manifest = manifest_of({"a": (8, 8), "b": (8, 8)})
    other = target(manifest, "b", layout=Layout.replicated(MeshSpec.parse("2x4"), 2))
    with pytest.raises(LayoutError, match="several meshes at once: found batch=1,model=8, batch=2,model=4"):
        plan_transfers(manifest, [target(manifest, "a"), other], host_memory_bytes=1 << 20)


def test_a_54_gb_checkpoint_is_planned_in_few_blocks():
    shapes = {f"{i}.{n}": s for i in range(46) for n, s in enumerate([(36864, 4608)] * 3 + [(4608, 4608)] * 4)}
    manifest = manifest_of(shapes, dtype=np.uint16)
    targets = [target(manifest, n, 1, dtype=np.dtype(np.uint16)) for n in shapes]
    plan = plan_transfers(manifest, targets, host_memory_bytes=1 << 30)
    assert plan.read_bytes > 54e9 and len(plan.blocks) < 8000


def test_budget_counts_and_remembers_its_peak():
    budget = Budget(100)
    assert budget.try_take(60, what="x") and not budget.try_take(41, what="x")
    assert budget.try_take(40, what="x")
    budget.give_back(100)
    assert (budget.taken_bytes, budget.peak_bytes) == (0, 100)
    with pytest.raises(BudgetError, match=r"x needs 101 bytes of .*, but the budget is 100 bytes. .* at least 101"):
        budget.try_take(101, what="x")
    with pytest.raises(AssertionError, match="more bytes were given back"):
        budget.give_back(1)


def test_lossless_integer_casts_pass():
    for stored, wanted in (("uint8", "int32"), ("int8", "int16"), ("uint8", "float32"), ("bool", "bool")):
        check_cast(np.dtype(stored), np.dtype(wanted), variable="v", tensor="t")


@pytest.mark.parametrize("dim", [None, 0, 1])
def test_a_brief_plan_has_the_same_bytes(dim):
    shapes = {f"{i}.{name}": shape for i in range(40) for name, shape in (("big", (512, 2048)), ("small", (64, 8)))}
    manifest = manifest_of(shapes)
    targets = [target(manifest, name, dim if "big" in name else None) for name in shapes]
    whole, brief = (
        plan_transfers(manifest, targets, host_memory_bytes=None, positions=range(2), brief=brief)
        for brief in (False, True)
    )
    assert len(brief.blocks) < len(whole.blocks)
    for name in ("needed_bytes", "read_bytes", "peak_staging_bytes", "scratch_bytes", "device_bytes"):
        assert getattr(brief, name) == getattr(whole, name)
