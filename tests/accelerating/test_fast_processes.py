"""`shardload.fast` in a program that several processes run."""

import hub_folders
import pytest
from process_runs import Run


@pytest.mark.slow
def test_each_process_gets_what_keras_would_give_it(tmp_path):
    path = hub_folders.write(tmp_path / "hf", "gemma2", hub_folders.build(tmp_path / "hf", "gemma2"))
    told = {}
    for do in ("outside", "inside"):
        with Run(2, 2, "1x4", do, path, module="fast_child") as run:
            told[do] = run.finish()
    assert [one["digest"] for one in told["inside"]] == [one["digest"] for one in told["outside"]]
    assert told["inside"][0]["digest"] != told["inside"][1]["digest"]
    assert [one["why"] for one in told["inside"]] == [[None], [None]]
