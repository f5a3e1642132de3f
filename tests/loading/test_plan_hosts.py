"""`shardload.plan(hosts=…)` says what each of several processes reads, before there are any."""

import gc

import keras
import pytest
from process_runs import Run

import shardload
from shardload.errors import MeshError, UsageError
from shardload.pipeline import load


@pytest.fixture
def saved(tmp_path):
    """A model whose kernels are split by columns and by rows, and whose other variables are whole everywhere."""
    x = inputs = keras.Input((96,))
    for name in ("up", "down"):
        x = keras.layers.Dense(768 if name == "up" else 96, name=name, activation="relu")(x)
    keras.Model(inputs, keras.layers.LayerNormalization()(x)).save(tmp_path / "model.keras")
    return tmp_path / "model.keras"


def columns_and_rows():
    return {"up/kernel": (None, "model"), "up/bias": ("model",), "down/kernel": ("model", None)}


@pytest.mark.slow
@pytest.mark.parametrize(("processes", "devices", "mesh"), [(2, 4, "1x8"), (2, 4, "2x4"), (4, 2, "2x4")])
def test_processes_read_what_was_planned(saved, processes, devices, mesh):
    with Run(processes, devices, mesh, "load", saved) as run:
        read = [one["read"] for one in run.finish()]
    hosts = shardload.plan(saved, mesh=mesh, hosts=processes).hosts
    assert (hosts.hosts, hosts.devices) == (processes, devices)
    assert hosts.read == max(read) and hosts.total_read == sum(read)


@pytest.mark.parametrize("hosts", [1, 4])
def test_a_whole_model_is_read_by_every_host(saved, hosts):
    found = shardload.plan(saved, mesh="1x8", layout="replicated", hosts=hosts)
    assert found.hosts.total_read == hosts * found.bytes.needed and found.hosts.planned == 1
    assert found.hosts.read == found.hosts.needed == found.bytes.needed


def test_split_weights_are_needed_once(saved):
    found = shardload.plan(saved, mesh="1x8", layout=columns_and_rows(), hosts=8)
    kernels, rest = 2 * 96 * 768 * 4, found.bytes.needed - 2 * 96 * 768 * 4 - 768 * 4
    assert found.hosts.needed == (kernels + 768 * 4) // 8 + rest
    assert found.hosts.planned == 8 and found.hosts.total_read >= found.bytes.needed + 7 * rest


def test_of_many_kinds_of_hosts_some_are_planned(saved):
    plan = shardload.plan(saved, mesh="1x96", layout={"up/kernel": ("model", None)}, hosts=96)
    found = plan.hosts
    assert (found.planned, found.kinds) == (16, 96)
    assert found.total_read == 96 * found.read  # each reads one row, and all the rest
    assert "(estimated from 16 of 96 kinds of hosts)" in " ".join(str(plan).split())


def test_the_table(saved):
    found = shardload.plan(saved, mesh="1x8", layout="replicated", hosts=2)
    text = " ".join(str(found).split())
    assert "2 hosts of 4 devices: each reads 580.1 KiB for 580.1 KiB needed; together 1.1 MiB, 2 times what" in text
    assert found.to_json()["hosts"]["total_read"] == 2 * found.bytes.needed
    assert "Disk" not in text and "Hosts" not in str(shardload.plan(saved, mesh="1x8"))


def test_with_one_reader_each_byte_is_read_once(saved):
    found = shardload.plan(saved, mesh="2x4", layout=columns_and_rows(), hosts=2)
    shared, kernels = found.hosts.shared, 2 * 96 * 768 * 4
    # Only kernels are long enough to be exchanged.
    assert (shared.exchanged, shared.is_chosen) == (2, False)
    assert shared.total_read == 2 * found.bytes.needed - kernels and shared.read == -(-shared.total_read // 2)
    assert shared.received == kernels // 2
    strategies = {reason.variable: reason.strategy for reason in shared.reasons}
    assert strategies["up/kernel"] == "broadcast" and strategies["up/bias"] == "read"
    assert "each reads 292.1 KiB and receives 288.0 KiB from others" in " ".join(str(found).split())


def test_nothing_is_shared_where_each_reads(saved):
    for options in ({"hosts": 2, "replicas": "read"}, {"hosts": 1}):
        assert shardload.plan(saved, mesh="2x4", layout=columns_and_rows(), **options).hosts.shared is None
    with pytest.raises(UsageError, match="Cannot use replicas='all': expected 'auto', 'read' or 'broadcast'"):
        shardload.plan(saved, mesh="1x8", replicas="all")


def test_hosts_that_cannot_be(saved):
    with pytest.raises(MeshError, match="Cannot divide the 8 devices of mesh batch=1,model=8 equally among 3 hosts"):
        shardload.plan(saved, mesh="1x8", hosts=3)
    for hosts in (0, True, "2"):
        with pytest.raises(UsageError, match=f"hosts={hosts!r}: expected a number of hosts"):
            shardload.plan(saved, mesh="1x8", hosts=hosts)


def test_no_garbage_is_collected_while_a_plan_is_made(saved, monkeypatch):
    """Each collection looks at all objects of JAX and Keras: half a second, after a large model was built."""
    seen = []
    for stage in ("build", "host_reads"):
        run = getattr(load, stage)
        monkeypatch.setattr(load, stage, lambda *given, run=run: (seen.append(gc.isenabled()), run(*given))[1])
    shardload.plan(saved, mesh="1x8", hosts=2)
    assert seen == [False, False] and gc.isenabled()
