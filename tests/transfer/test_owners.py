"""Which process reads which rows, as arithmetic: no file, no device, no process."""

import math

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardload.manifest import Chunked, Extent, Manifest, Tensor, View
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import located
from shardload.transfer.load_plan import Binding
from shardload.transfer.owners import ProcessGrid, hosts_of, plan_owners

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FILE = located("f.bin")


def owners(shape, spec, mesh, hosts, *, storage=None, transposed=False, replicas="broadcast", **options):
    """The choice for one tensor."""
    mesh = MeshSpec.parse(mesh)
    tensor = Tensor("t", shape, BFLOAT16, storage or Extent(FILE, 0))
    view = View("t", 0, shape[::-1], (1, shape[1])) if transposed else View.whole(tensor)
    manifest = Manifest(FILE, "safetensors", {"t": tensor}, {FILE: tensor.nbytes})
    binding = Binding("v", view, BFLOAT16, Layout(mesh, spec))
    plan = plan_owners(manifest, [binding], process_of=hosts_of(mesh, hosts), replicas=replicas, **options)
    return binding, plan, plan.choices[0]


ROWS, COLUMNS, WHOLE = (("model",), ()), ((), ("model",)), ((), ())


@pytest.mark.parametrize(
    ("spec", "mesh", "hosts", "transposed", "layout"),
    [
        (WHOLE, "1x8", 2, False, "(model/processes, -)"),
        (WHOLE, "1x8", 2, True, "(-, model/processes)"),
        (COLUMNS, "1x8", 2, False, "(model/processes+model/devices, -)"),
        (ROWS, "1x8", 2, True, "(-, model/processes+model/devices)"),
        (ROWS, "2x4", 2, False, "(model/devices+batch/processes, -)"),
        (COLUMNS, "2x4", 2, False, "(batch/processes, model/devices)"),
        (COLUMNS, "2x4", 4, False, "(batch/processes+model/processes+model/devices, -)"),
        (COLUMNS, "8x1", 4, False, "(batch/processes, -)"),
    ],
)
def test_owner_layouts(spec, mesh, hosts, transposed, layout):
    binding, plan, choice = owners((512, 256), spec, mesh, hosts, transposed=transposed)
    assert choice.strategy == "broadcast" and str(choice.layout) == layout
    assert choice.read_bytes == choice.once_bytes == 512 * 256 * 2 < choice.everyone_bytes
    assert choice.target == plan.grid.refined(binding.layout)


def test_what_stays_as_it_is():
    assert owners((512, 256), ROWS, "1x8", 2)[2].why == "no two processes read the same bytes"
    assert owners((512, 256), WHOLE, "1x8", 2, replicas="read")[2].why == "replicas='read'"
    assert "it is small" in owners((64, 64), WHOLE, "1x8", 2)[2].why
    assert owners((331, 331), WHOLE, "1x6", 3)[2].why == "no dim of (331, 331) divides into parts for 3 processes"
    # 128 KiB of each row, and as much to skip.
    assert owners((8, 131072), COLUMNS, "1x2", 2)[2].strategy == "alone"


def test_chunks_that_lie_as_the_shards_are_read_alone():
    extents = {(0, i): Extent(FILE, i * 512 * 32 * 2) for i in range(8)}
    grid = Chunked((512, 32), extents)
    assert owners((512, 256), COLUMNS, "1x8", 2, storage=grid)[2].strategy == "alone"
    choice = owners((512, 256), ROWS, "2x4", 2, storage=grid)[2]
    assert choice.strategy == "broadcast" and choice.read_bytes == choice.once_bytes


def test_shards_whose_rows_do_not_divide_are_flattened():
    choice = owners((132, 512), ROWS, "2x4", 2)[2]
    assert choice.flat == (4, 33 * 512) and str(choice.layout) == "(model/devices, batch/processes)"
    assert choice.read_bytes == choice.once_bytes


def test_auto_exchanges_where_that_is_faster():
    options = {"replicas": "auto", "hosts": 8, "mesh": "8x1"}
    assert owners((65536, 16384), WHOLE, **options)[2].strategy == "broadcast"
    slower = owners((65536, 16384), WHOLE, **options, on_cpu=True)[2]
    assert slower.strategy == "read" and "an exchange is expected to take" in slower.why
    assert slower.read_bytes == slower.everyone_bytes == 8 * 2 << 30
    assert owners((512, 256), WHOLE, **options)[2].strategy == "read"  # compiling takes longer


def test_a_process_without_a_block_of_neighbours():
    mesh = MeshSpec.parse("1x4")
    assert ProcessGrid.of(mesh, (0, 1, 0, 1)) is None
    assert ProcessGrid.of(MeshSpec.parse("2x4"), (0, 0, 1, 1, 0, 0, 1, 1)).crossing == ("model/processes",)
    tensor = Tensor("t", (512, 256), BFLOAT16, Extent(FILE, 0))
    manifest = Manifest(FILE, "safetensors", {"t": tensor}, {FILE: tensor.nbytes})
    bindings = [Binding("v", View.whole(tensor), BFLOAT16, Layout(mesh, WHOLE))]
    plan = plan_owners(manifest, bindings, process_of=(0, 1, 0, 1), replicas="broadcast")
    assert plan.choices[0].why == "the devices of a process are not neighbours in the mesh" and not plan.exchanges
    assert plan.bindings(bindings) == tuple(bindings)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(["1x8", "2x4", "4x2", "8x1"]),
    st.sampled_from([2, 4, 8]),
    st.permutations(["batch", "model", None]),
    st.lists(st.sampled_from([8, 24, 64, 132]), min_size=3, max_size=3),
    st.permutations(range(3)),
)
def test_each_element_has_one_process_as_owner(mesh, hosts, axes, shape, order):
    mesh, shape = MeshSpec.parse(mesh), tuple(shape)
    tensor = Tensor("t", tuple(shape[d] for d in order), BFLOAT16, Extent(FILE, 0))
    strides = dict(zip(order, View.whole(tensor).strides, strict=True))
    view = View("t", 0, shape, tuple(strides[d] for d in range(3)))
    layout = Layout(mesh, tuple(() if axis is None else (axis,) for axis in axes))
    if not layout.divides(shape):
        return
    manifest = Manifest(FILE, "safetensors", {"t": tensor}, {FILE: tensor.nbytes})
    binding, process_of = Binding("v", view, BFLOAT16, layout), hosts_of(mesh, hosts)
    plan = plan_owners(manifest, [binding], process_of=process_of, replicas="broadcast")
    (choice,), (owned,) = plan.choices, plan.bindings([binding])
    assert choice.target == plan.grid.refined(layout)
    if choice.strategy != "broadcast":
        return
    owner = np.full(owned.view.shape, -1)
    for process, box in zip(process_of, owned.layout.bounds(owned.view.shape), strict=True):
        assert set(np.unique(owner[box.slices])) <= {-1, process}
        owner[box.slices] = process
    assert (owner >= 0).all() and math.prod(owned.view.shape) == math.prod(shape)
    assert choice.read_bytes < choice.everyone_bytes
