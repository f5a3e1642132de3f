"""Several processes load together, and each byte leaves storage once: the others get it by exchange."""

import pytest
from process_runs import told_by
from replicas_child import saved

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize(("processes", "devices", "mesh"), [(2, 4, "1x8"), (2, 4, "2x4"), (4, 2, "2x4"), (4, 1, "2x2")])
def test_bits_are_exact_and_read_once(tmp_path, processes, devices, mesh):
    told = told_by(processes, devices, mesh, "transfer", tmp_path, module="replicas_child")
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
    together = sum(one["report"]["bytes"]["read"] for one in told)
    if replicas == "broadcast":
        assert together <= 1.05 * told[0]["whole"]
    else:
        assert together > 1.3 * told[0]["whole"]
