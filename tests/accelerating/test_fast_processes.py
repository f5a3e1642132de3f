"""`shardload.fast` in a program that several processes run."""

import hub_folders
import pytest
from process_runs import Run


@pytest.mark.slow
def test_each_process_gets_what_keras_would_give_it(tmp_path):
    path = hub_folders.write(tmp_path / "hf", "gemma2", hub_folders.build(tmp_path / "hf", "gemma2"))
    with Run(2, 2, "1x4", "inside,outside", path, module="fast_child") as run:  # inside first: in a fresh process
        told = run.finish()
    inside, outside = ([one[where]["digest"] for one in told] for where in ("inside", "outside"))
    assert inside == outside and inside[0] != inside[1]
    assert [one["inside"]["why"] for one in told] == [[None], [None]]
