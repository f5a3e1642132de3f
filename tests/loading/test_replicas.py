"""Several processes load together, and each byte leaves storage once: the others get it by exchange."""

import random

import pytest
from object_server import served
from process_runs import told_by
from replicas_child import saved, tensors
from safetensors.numpy import save_file
from together_child import save

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("saved"))


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("processes", "devices", "mesh", "placement"),
    [(2, 4, "1x8", "adopt"), (2, 4, "2x4", "upload"), (4, 2, "2x4", "adopt"), (4, 1, "2x2", "adopt")],
)
def test_bits_are_exact_and_read_once(tmp_path, processes, devices, mesh, placement):
    told = told_by(processes, devices, mesh, "transfer", tmp_path, placement, module="replicas_child")
    whole = told[0]["whole"]
    assert [one["wrong"] for one in told] == [[]] * processes
    assert sum(one["read"] for one in told) == sum(one["planned"] for one in told) == told[0]["predicted"]
    assert sum(one["read"] for one in told) <= 1.05 * whole
    assert sum(one["chars"] for one in told) <= 1.05 * whole + processes * (1 << 20)  # modules are imported meanwhile
    assert max(one["read"] for one in told) <= 1.05 * whole / processes
    assert {one["strategies"]["bfloat16.replicated"] for one in told} == {"broadcast"}


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
@pytest.mark.parametrize("replicas", ["broadcast", "read"])
def test_a_model_loads_as_in_one_process(source, mesh, replicas):
    told = told_by(2, 4, mesh, "load", source, replicas, module="replicas_child")
    assert [one["wrong"] for one in told] == [[], []]
    cluster, whole = told[0]["report"]["cluster"], told[0]["whole"]
    assert cluster == told[1]["report"]["cluster"] and cluster["needed"] == whole
    assert cluster["read"] == [one["report"]["bytes"]["read"] for one in told]
    assert cluster["total_read"] == sum(cluster["read"])
    assert cluster["ratio"] == pytest.approx(cluster["total_read"] / whole, abs=1e-5)  # rounded in JSON
    if replicas == "broadcast":
        assert cluster["ratio"] <= 1.05 and cluster["exchanged"] and min(cluster["received"]) > 0
    else:
        assert cluster["ratio"] > 1.3 and not cluster["exchanged"] and cluster["received"] == [0, 0]


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_a_model_is_quantised_as_in_one_process(source, mesh, mode):
    told = told_by(2, 4, mesh, "quantised", source, mode, module="replicas_child")
    assert [one["wrong"] for one in told] == [[], []]
    assert told[0]["specs"] == told[1]["specs"]
    assert told[0]["specs"]["up/kernel"] == [None, "model"]
    assert told[0]["specs"]["down/kernel"] == ["model", None]
    # A kernel that is split along the dim whose elements share a scale is read by both.
    assert all(1.1 < ratio <= 2 for ratio in told[0]["ratios"])


@pytest.mark.parametrize("replicas", ["broadcast", "read"])
def test_arrays_are_read_once(tmp_path, replicas):
    told = told_by(2, 4, "2x4", "arrays", tmp_path, replicas, module="replicas_child")
    assert [one["wrong"] for one in told] == [[], []]
    read = sum(one["chars"] for one in told) / told[0]["whole"]
    assert read < 1.3 if replicas == "broadcast" else read > 1.6


@pytest.fixture(scope="module")
def bucket(source):
    """A server of the model and of arrays; processes that start meanwhile find it as ``s3://bucket``."""
    noise = random.Random(0).randbytes(3 << 20).hex()  # headers that do not fit in one message, even compressed
    save_file(tensors(8), source.parent / "arrays.safetensors", {"noise": noise})
    with pytest.MonkeyPatch.context() as patch, served(source.parent, patch) as server:
        yield server


def test_each_byte_leaves_an_object_store_once(source, bucket):
    told = told_by(4, 2, "2x4", "stored", source.parent, bucket.s3, module="replicas_child")
    assert [one["wrong"] for one in told] == [[]] * 4 and told[0]["exchanged"]
    # One process reads the headers, in pages; each looks for files of layers in the second one, in two pages.
    for name, pages in (("arrays.safetensors", 4), (source.name, 4 + 3 * 2)):
        assert bucket.sent_of(name) <= 1.05 * (source.parent / name).stat().st_size + pages * (256 << 10)


def test_steps_and_weights_are_exchanged(tmp_path):
    save(tmp_path, 1)
    told = told_by(2, 4, "2x4", "restore", tmp_path, module="replicas_child")
    assert [one["same"] for one in told] == [True, True]
    ratios = told[0]["ratios"]
    assert [exchanged for exchanged, _ in ratios] == [0] * 4 + [16] * 4
    # Of steps and weights in turn. Bytes of steps are verified by the MiB, which is four of these kernels.
    assert min(ratio for _, ratio in ratios[:4]) > 1.9 and max(ratio for _, ratio in ratios[5::2]) < 1.05
