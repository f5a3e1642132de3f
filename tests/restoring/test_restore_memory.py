"""What a restore holds on each device and on the host at any moment, and what it reads, measured from outside.

Saved by columns on 1x8, so each chunk in the files is a column strip; restored in layouts that cut across them.
"""

import functools
import re

import jax
import keras
import numpy as np
import pytest
from memory import Sampling, numbers_of_a_process, scratch_taken, watch
from saved_steps import save_step
from wide_layers import LAYERS, LAYOUTS, WIDTH, build, layouts

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import BudgetError
from shardload.loaders.orbax import saving as orbax_writer
from shardload.loaders.orbax.zarr import ZarrCodec
from shardload.pipeline import filling
from shardload.transfer import budgets, execution

MIB = 1 << 20
BUDGET = MIB
"""A quarter of a kernel; two chunks."""
READ_ONCE_BUDGET = 4 * MIB
"""From here on what is checked is not read twice."""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model after two batches on 1x8 and the folder its callback saved to."""
    root = tmp_path_factory.mktemp("run")
    distribution = keras.distribution.ModelParallel(layout_map=layouts(*LAYOUTS["as saved"]), batch_dim_name="batch")
    keras.distribution.set_distribution(distribution)
    try:
        keras.utils.set_random_seed(0)
        model = build()
        x = np.random.default_rng(0).random((16, WIDTH), np.float32)
        model.fit(x, x, batch_size=8, verbose=0, callbacks=[OrbaxCheckpoint(root)])
    finally:
        keras.distribution.set_distribution(None)
    return model, root


def state(model):
    return [np.asarray(v.value) for v in [*model.weights, *model.optimizer.variables]]


def same(one, other):
    return all(a.tobytes() == b.tobytes() for a, b in zip(state(one), state(other), strict=True))


@pytest.fixture
def sampling(monkeypatch):
    return watch(monkeypatch)


@pytest.fixture
def scratch(monkeypatch):
    return scratch_taken(monkeypatch)


def restore(run, title, sampling, *, budget=BUDGET):
    shape, kernel = LAYOUTS[title]
    with shardload.abstract():
        model = build()
    place = {"mesh": "x".join(map(str, shape)), "layout": layouts(shape, kernel)}
    report = shardload.restore(model, run[1], host_memory_bytes=budget, progress=sampling, **place)
    assert same(run[0], model)
    return model, report


def assert_bounded(model, report, sampling, *, block):
    final = {d.id: 0 for d in jax.devices()}
    for variable in [*model.variables, *model.optimizer.variables]:
        for shard in variable.value.addressable_shards:
            final[shard.device.id] += shard.data.nbytes
    assert len(sampling.samples) > 2 * report.variables
    for device, held in final.items():
        assert held <= sampling.most(device) <= held + block, f"device {device}"
    assert report.host_bytes.peak_staging <= 1.1 * report.host_bytes.budget


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("budget", [BUDGET, READ_ONCE_BUDGET])
@pytest.mark.parametrize("title", LAYOUTS)
def test_devices_and_staging_are_bounded(title, budget, run, sampling, scratch):
    model, report = restore(run, title, sampling, budget=budget)
    assert_bounded(model, report, sampling, block=budget // 16)
    assert report.host_bytes.budget == budget and sum(scratch) <= 1.1 * budget
    shard = model.layers[1].kernel.value.addressable_shards[0].data.shape
    (rows, columns), kernel = LAYOUTS[title]
    sizes = {"batch": rows, "model": columns, None: 1}
    assert shard == tuple(WIDTH // sizes[axis] for axis in kernel)


@pytest.mark.parametrize("title", LAYOUTS)
def test_each_needed_byte_is_read_about_once(title, run, sampling):
    model, report = restore(run, title, sampling, budget=READ_ONCE_BUDGET)
    state_bytes = sum(v.nbytes for v in state(model))
    assert state_bytes <= report.bytes.needed <= 1.001 * state_bytes  # scalars lie in the tree of the store
    assert report.bytes.read <= 1.1 * report.bytes.needed


@pytest.mark.slow
@pytest.mark.parametrize("title", ["rows on 8x1", "2x4"])
def test_uploaded_pieces_are_bounded(title, run, sampling, monkeypatch):
    """As on accelerators: into shards that are there already."""
    monkeypatch.setattr(filling.execution, "execute", functools.partial(execution.execute, placement="upload"))
    model, report = restore(run, title, sampling)
    assert_bounded(model, report, sampling, block=BUDGET // 2)


@pytest.mark.slow
def test_a_budget_below_a_chunk_holds_too(run, sampling, scratch):
    model, report = restore(run, "rows on 8x1", sampling, budget=256 << 10)
    assert_bounded(model, report, sampling, block=256 << 10)
    assert sum(scratch) <= 1.1 * (256 << 10)


def test_with_less_memory_than_a_few_digests_cover_it_is_read_twice(run, sampling):
    """Once to be checked; the report says so."""
    _, report = restore(run, "rows on 8x1", sampling)
    assert 1.9 * report.bytes.needed < report.bytes.read < 2.1 * report.bytes.needed


@pytest.mark.slow
def test_a_live_model_is_never_held_twice(run, sampling):
    model, _ = restore(run, "rows on 8x1", sampling)
    again = Sampling()
    shardload.restore(model, run[1], host_memory_bytes=BUDGET, progress=again)
    assert same(run[0], model)
    assert again.most() <= 2 * (WIDTH * WIDTH * 4 // 8)  # what is being replaced just now


# ---- compressed steps ----------------------------------------------------------------------------

PACKED_BUDGET = 8 * MIB
"""Enough for a chunk of half a MiB, what it is decoded from and to, and units that are kept."""


@pytest.fixture(scope="module")
def packed(run, tmp_path_factory):
    root = tmp_path_factory.mktemp("packed")
    save_step(run[0], root, 1, compression="zstd")
    return run[0], root


@pytest.fixture
def decoded(monkeypatch):
    """The shape of every chunk that is decoded."""
    found = []
    decode = ZarrCodec.decode
    monkeypatch.setattr(ZarrCodec, "decode", lambda self, stored: found.append(self.shape) or decode(self, stored))
    return found


@pytest.mark.parametrize("title", LAYOUTS)
def test_compressed_chunks_are_read_and_decoded_once(title, packed, sampling, decoded):
    model, report = restore(packed, title, sampling, budget=4 * PACKED_BUDGET)
    assert_bounded(model, report, sampling, block=MIB // 2)
    assert decoded.count((WIDTH, WIDTH // 8)) == 3 * LAYERS * 8
    assert 0.999 * report.bytes.needed <= report.bytes.read <= 1.1 * report.bytes.needed  # scalars lie in the tree


@pytest.mark.slow
@pytest.mark.parametrize("title", ["rows on 8x1", "2x4"])
def test_compressed_chunks_are_uploaded_in_bounds(title, packed, sampling, monkeypatch, decoded):
    monkeypatch.setattr(filling.execution, "execute", functools.partial(execution.execute, placement="upload"))
    model, report = restore(packed, title, sampling, budget=PACKED_BUDGET)
    assert_bounded(model, report, sampling, block=PACKED_BUDGET // 2)
    assert decoded.count((WIDTH, WIDTH // 8)) == 3 * LAYERS * 8


def test_a_budget_below_what_a_chunk_takes_says_what_would_do(packed, sampling):
    wholes = r"chunks decode as a whole, to 524288 bytes each.* at least (\d+) bytes"
    with pytest.raises(BudgetError, match=wholes) as told:
        restore(packed, "as saved", sampling, budget=MIB)
    least = int(re.search(r"at least (\d+)", str(told.value))[1])
    _, report = restore(packed, "rows on 8x1", sampling, budget=least)
    assert report.host_bytes.budget == least < PACKED_BUDGET


@pytest.mark.slow
def test_the_default_budget_holds_what_a_chunk_takes(packed, sampling, monkeypatch):
    monkeypatch.setattr(budgets, "DEFAULT_HOST_MEMORY", MIB)
    _, report = restore(packed, "2x4", sampling, budget=None)
    assert MIB < report.host_bytes.budget <= PACKED_BUDGET
    _, enough = restore(packed, "2x4", sampling, budget=PACKED_BUDGET)
    assert any("decode as a whole" in note for note in report.notes)
    assert not any("decode as a whole" in note for note in enough.notes)


@pytest.mark.slow
def test_what_lies_on_one_device_is_compressed_in_chunks(run, tmp_path, monkeypatch, sampling):
    monkeypatch.setattr(orbax_writer, "COMPRESSED_CHUNK_BYTES", MIB)
    model = build()
    shardload.restore(model, run[1], mesh="1x1")
    save_step(model, tmp_path, 1, compression="zstd")
    kernels = [t.storage for t in shardload.inspect(tmp_path).tensors.values() if t.shape == (WIDTH, WIDTH)]
    assert len(kernels) == 3 * LAYERS and {len(kernel.extents) for kernel in kernels} == {4}
    restore((run[0], tmp_path), "rows on 8x1", sampling, budget=2 * PACKED_BUDGET)


# ---- the whole process ---------------------------------------------------------------------------

_CHILD = """
from wide_layers import LAYOUTS, build, layouts

root, title, budget = sys.argv[1], sys.argv[2], int(sys.argv[3])

def restore():
    shape, kernel = LAYOUTS[title]
    with shardload.abstract():
        model = build()
    mesh = "x".join(map(str, shape))
    report = shardload.restore(model, root, mesh=mesh, layout=layouts(shape, kernel), host_memory_bytes=budget)
    return model, report

restore()  # what is imported and warmed up once
resident, read = forget_peak(), number("rchar", "io")
model, report = restore()
read = number("rchar", "io") - read
print(peak() - resident, read, report.bytes.needed)
"""


@pytest.mark.slow
@pytest.mark.parametrize("title", ["as saved", "rows on 8x1", "1x1"])
def test_a_process_grows_by_the_state_and_reads_it_once(title, run):
    """As the system counts it: what is checked is what is used."""
    growth, read, needed = grown(run[1], title, 4 * MIB)
    assert needed > 24 * MIB
    assert needed <= read <= 1.1 * needed
    assert growth <= needed + 4 * MIB + 24 * MIB


@pytest.mark.slow
def test_a_process_that_decodes_grows_by_the_state_and_the_budget(packed):
    growth, read, needed = grown(packed[1], "rows on 8x1", 4 * PACKED_BUDGET)
    assert needed <= read <= 1.1 * needed
    assert growth <= sum(v.nbytes for v in state(packed[0])) + 4 * PACKED_BUDGET


def grown(root, title, budget):
    """Bytes a fresh process grew by at most, and read, in its second restore, and what was needed."""
    return numbers_of_a_process(_CHILD, root, title, budget)
