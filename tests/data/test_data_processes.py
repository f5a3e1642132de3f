"""Grain data of several processes that stop in the middle of an epoch: what comes next, with whatever number of them.

The model of `reading_child` keeps in its state at which batch it saw each example, so what was read twice, left out or
read out of order shows in a value that is compared with that of a run that did not stop.
"""

import json
import shutil

import keras
import pytest
import reading_child
from process_runs import Run

from shardload.errors import UsageError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:Your input ran out of data"),  # what Keras says of any Grain epoch
]


def run(processes, devices, mesh, do, folder):
    with Run(processes, devices, mesh, do, folder, module="reading_child") as started:
        return started.finish()


def stopped(kind, base):
    """What an uninterrupted run of two processes ended with, and the folder of one that stopped in mid-epoch."""
    ends = run(2, 4, "2x4", f"{kind} stop", base)
    assert json.loads((base / "stopped/4/shardload/step.json").read_text())["batch"] == 4
    assert ends[0] == ends[1]
    return ends[0], base / "stopped"


@pytest.fixture(scope="module")
def of_all(tmp_path_factory):
    return stopped("global", tmp_path_factory.mktemp("global"))


@pytest.fixture(scope="module")
def of_each(tmp_path_factory):
    return stopped("own", tmp_path_factory.mktemp("own"))


@pytest.fixture
def one_process():
    reading_child.distribute("2x4")
    yield
    keras.distribution.set_distribution(None)


def said(folder, step):
    return json.loads((folder / f"{step}/shardload/iterator.json").read_text())


def test_global_batches_go_on_with_the_next_one_to_the_same_bits(of_all, tmp_path):
    whole, folder = of_all[0], shutil.copytree(of_all[1], tmp_path / "steps")
    assert run(2, 4, "2x4", "global go-on", folder) == [whole] * 2
    told = said(of_all[1], 4)
    assert told["position"] == {"next_index": 4}
    assert told["reading"] == {"global_batch_size": 8, "examples": 72}


@pytest.mark.parametrize(("processes", "devices", "mesh"), [(4, 2, "4x2"), (2, 4, "1x8")])
def test_global_batches_go_on_with_any_number_of_processes_and_on_any_mesh(of_all, tmp_path, processes, devices, mesh):
    whole, folder = of_all[0], shutil.copytree(of_all[1], tmp_path / "steps")
    ends = run(processes, devices, mesh, "global go-on", folder)
    assert [end["when"] for end in ends] == [whole["when"]] * processes
    assert len({end["digest"] for end in ends}) == 1


def test_global_batches_go_on_in_one_process(of_all, tmp_path, one_process):
    whole, folder = of_all[0], shutil.copytree(of_all[1], tmp_path / "steps")
    assert reading_child.ledger(reading_child.train("global", folder, index=0, count=1)) == whole["when"]


def test_each_process_gets_back_the_place_of_its_own_data(of_each, tmp_path):
    whole, folder = of_each[0], shutil.copytree(of_each[1], tmp_path / "steps")
    assert run(2, 4, "2x4", "own go-on", folder) == [whole] * 2
    first, second = said(folder, 18)["processes"]
    assert first["position"] != second["position"]


def test_places_of_two_processes_are_no_place_for_one(of_each, tmp_path, one_process):
    folder = shutil.copytree(of_each[1], tmp_path / "steps")
    with pytest.raises(UsageError, match=r"saved by 2 processes.*now there are 1.*global_batch_size=…"):
        reading_child.train("own", folder, index=0, count=1)
