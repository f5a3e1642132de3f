"""Saves to a bucket that fails at random, and whose process is killed: a few of `make faults`."""

import pytest
from save_fault_runs import CASES, FaultySaves

pytestmark = pytest.mark.slow


def test_every_step_is_complete_or_absent():
    with FaultySaves() as faulty:
        found = [faulty.run(seed) for seed in range(0, len(CASES), 3)]
    assert [(one.seed, one.title, one.faults, one.said, one.wrong) for one in found if one.wrong] == []
