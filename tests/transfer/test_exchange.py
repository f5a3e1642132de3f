"""What is exchanged together: bounded memory, and the same order on all processes."""

import numpy as np
import pytest

from shardload.manifest import Extent, Manifest, Tensor, View
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.local import located
from shardload.transfer import exchange
from shardload.transfer.load_plan import Binding
from shardload.transfer.owners import hosts_of, plan_owners

FLOAT32 = np.dtype(np.float32)


@pytest.fixture
def exchanged(monkeypatch):
    """Batches of variables of 1, 1, 4 and 1 MiB, split by columns over two processes, in the order given."""

    def made(names):
        path, mesh = located("f.bin"), MeshSpec.parse("1x2")
        tensors, offset = {}, 0
        for name, rows in {"a": 512, "b": 512, "c": 2048, "d": 512}.items():
            tensors[name] = Tensor(name, (rows, 512), FLOAT32, Extent(path, offset))
            offset += tensors[name].nbytes
        manifest = Manifest(path, "safetensors", tensors, {path: offset})
        split = Layout(mesh, ((), ("model",)))
        wanted = [Binding(name, View.whole(tensors[name]), FLOAT32, split) for name in names]
        plan = plan_owners(manifest, wanted, process_of=hosts_of(mesh, 2), replicas="broadcast")
        return list(exchange.batches(plan, wanted, manifest))

    monkeypatch.setattr(exchange, "EXCHANGE_BYTES", 2 << 20)
    return made


@pytest.mark.parametrize("names", ["abcd", "dcba"])
def test_batches_are_bounded_and_in_file_order(exchanged, names):
    batches = exchanged(names)
    # Each device has half of a variable, as read and as exchanged.
    assert [["".join(one.name for one in batch), sum(one.device_bytes for one in batch)] for batch in batches] == [
        ["ab", 2 << 20], ["c", 4 << 20], ["d", 1 << 20],
    ]  # fmt: skip
