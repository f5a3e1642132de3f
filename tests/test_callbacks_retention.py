from pathlib import Path

import pytest

from shardload.callbacks._retention import Retention
from shardload.errors import UsageError
from shardload.steps.listing import StepInfo


def step(number, *, loss=None, hours=0.0, ours=True, problems=None):
    metrics = {} if loss is None else {"loss": loss}
    return StepInfo(number, Path(str(number)), ours, metrics=metrics, saved_s=hours * 3600, problems=problems)


def removed(rule, steps, mode="min"):
    return rule.removable(steps, newest=steps[-1].step, monitor="loss", mode=mode)


def test_latest():
    assert removed(Retention(2), [step(n) for n in (1, 2, 3)]) == [1]
    assert removed(Retention(None), [step(n) for n in range(9)]) == []


@pytest.mark.parametrize(("mode", "gone"), [("min", [3, 4]), ("max", [1, 3])])
def test_best_and_latest_together(mode, gone):
    steps = [
        step(1, loss=0.1),
        step(2, loss=9.0 if mode == "max" else 0.2),
        step(3, loss=0.5),
        step(4, loss=0.7),
        step(5),
    ]
    assert removed(Retention(1, best=2), steps, mode) == gone


def test_nan_is_never_best():
    assert removed(Retention(1, best=1), [step(1, loss=float("nan")), step(2, loss=3.0), step(3)]) == [1]


def test_every_steps_keeps_the_first_after_each_multiple():
    assert removed(Retention(1, every_steps=10), [step(n) for n in (7, 12, 19, 20, 29, 31)]) == [7, 19, 29]


def test_every_hours():
    steps = [step(n, hours=n * 0.6) for n in range(6)]
    assert removed(Retention(1, every_hours=1), steps) == [1, 3]


def test_leaves_alone_what_is_foreign_or_damaged():
    steps = [step(1, ours=False), step(2, problems="digests are missing"), step(3), step(4)]
    assert removed(Retention(1), steps) == [3]


@pytest.mark.parametrize(
    "wrong", [{"latest": 0}, {"latest": 1.5}, {"latest": 1, "best": True}, {"latest": 1, "every_hours": 0}]
)
def test_refuses_nonsense(wrong):
    with pytest.raises(UsageError):
        Retention(**wrong)
