"""Bytes that a load from a store requests, by the server's count: for each layout hardly more than it needs."""

import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from object_server import served
from process_runs import told_by
from remote_mix import mix, tensors, turned
from safetensors.numpy import save_file

import shardload


def rows(name, shape):
    return P("model") if len(shape) == 2 else P()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    root = tmp_path_factory.mktemp("bucket")
    save_file(tensors(), root / "model.safetensors")  # 97 MB
    return root


@pytest.fixture
def store(source, monkeypatch):
    with served(source, monkeypatch) as server:
        yield server


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
@pytest.mark.parametrize(("layout", "most"), [(rows, 1.02), (mix, 1.1)])
def test_hardly_more_than_the_needed_bytes_are_requested(store, mesh, layout, most):
    found = shardload.load_arrays(f"{store.http}/model.safetensors", layout, mesh=mesh, transpose=turned)
    needed = sum(array.nbytes for array in found.values())
    assert needed > 96e6 and store.bytes_sent <= most * needed
    assert len(store.requests) <= needed / (2 << 20) + 5
    expected = tensors()
    for name, array in found.items():
        value = expected[name].T if name.endswith("up") else expected[name]
        assert np.asarray(array).tobytes() == np.ascontiguousarray(value).tobytes()


def test_of_a_few_arrays_little_more_is_requested(store):
    """Tensors that are left out are not read, but for short ones between others."""
    wanted = ("0.q_proj", "0.norm", "1.down")
    found = shardload.load_arrays(
        f"{store.http}/model.safetensors", lambda name, shape: rows(name, shape) if name in wanted else None,
        mesh="1x8", strict=False,
    )  # fmt: skip
    needed = sum(array.nbytes for array in found.values())
    assert sorted(found) == sorted(wanted) and store.bytes_sent <= 1.03 * needed + (256 << 10)  # the header's page


@pytest.mark.sample(1)
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
def test_two_processes_request_each_byte_once(store, tmp_path, mesh):
    told = told_by(2, 4, mesh, "remote", store.http, "broadcast", module="replicas_child")
    needed = told[0]["needed"]
    assert needed > 96e6 and store.bytes_sent <= 1.1 * needed
    assert [one["wrong"] for one in told] == [[], []]


@pytest.mark.slow
def test_two_processes_each_request_the_columns_that_they_need(store):
    told = told_by(2, 4, "1x8", "remote", store.http, "read", module="replicas_child")
    assert [one["wrong"] for one in told] == [[], []]
