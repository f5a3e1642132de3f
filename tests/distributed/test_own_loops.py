"""`load_arrays` and `Checkpointer` in a program of several processes."""

import numpy as np
import pytest
from process_runs import Run
from safetensors.numpy import save_file

import shardload

pytestmark = pytest.mark.slow


def joined(told):
    """The parts of all processes as whole arrays, by name; every element must be there, and copies be equal."""
    whole = {}
    for name in told[0]["parts"]:
        parts = [part for each in told for part in each["parts"][name]]
        shape = [max(stops) for stops in zip(*([stop for _, stop in index] for index, _ in parts), strict=True)]
        value = np.full(shape, np.nan)
        for index, values in parts:
            where = tuple(slice(*span) for span in index)
            assert np.isnan(value[where]).all() or np.array_equal(value[where], values)
            value[where] = values
        assert not np.isnan(value).any()
        whole[name] = value
    return whole


def run(processes, devices, mesh, do, folder):
    with Run(processes, devices, mesh, do, folder, module="loop_child") as started:
        return started.finish()


def test_arrays_of_several_processes(tmp_path):
    written = {
        "a": np.arange(32, dtype=np.float32).reshape(16, 2),
        "b": np.arange(3, dtype=np.int32),
        "c": np.arange(8, dtype=np.float16),
    }
    save_file(written, tmp_path / "file.safetensors")
    told = run(2, 4, "1x8", "arrays", tmp_path)
    found = joined(told)
    assert found.keys() == written.keys()
    assert all(np.array_equal(found[name], written[name]) for name in written)
    assert [index for index, _ in told[1]["parts"]["a"]] == [[[8 + 2 * i, 10 + 2 * i], [0, 2]] for i in range(4)]


def test_a_loop_goes_on_with_other_processes_on_another_mesh(tmp_path):
    saved = joined(run(2, 4, "2x4", "save", tmp_path))
    assert [info.step for info in shardload.Checkpointer(tmp_path / "run").steps()] == [2]
    for processes, devices, mesh in ((2, 4, "1x8"), (1, 2, "1x2")):
        told = run(processes, devices, mesh, "restore", tmp_path)
        assert {(each["step"], each["metadata"]["tokens"]) for each in told} == {(2, 20)}
        found = joined(told)
        assert found.keys() == saved.keys() and len(found) > 10
        assert all(np.array_equal(found[name], saved[name]) for name in saved)
