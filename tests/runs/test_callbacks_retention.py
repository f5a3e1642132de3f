from pathlib import Path

import pytest

from shardload.errors import UsageError
from shardload.runs.best import BestRule, Retention
from shardload.runs.step import StepInfo, StepRecord


def step(number, *, loss=None, hours=0.0, ours=True, problems=None, **details):
    record = StepRecord.of_json({"logs": {} if loss is None else {"loss": loss}, **details})
    return StepInfo(number, Path(str(number)), ours, saved_s=hours * 3600, problems=problems, record=record)


def removed(rule, steps, mode="min", **by):
    return rule.removable(steps, newest=steps[-1].step, by=BestRule("loss", mode, **by))


def test_latest():
    assert removed(Retention(2), [step(n) for n in (1, 2, 3)]) == [1]
    assert removed(Retention(None), [step(n) for n in range(9)]) == []


@pytest.mark.parametrize(("mode", "gone"), [("min", [3, 4]), ("max", [1, 3])])
def test_best_and_latest_together(mode, gone):
    steps = [
        step(1, loss=0.1), step(2, loss=9.0 if mode == "max" else 0.2), step(3, loss=0.5), step(4, loss=0.7), step(5),
    ]  # fmt: skip
    assert removed(Retention(1, best=2), steps, mode) == gone


def test_nan_is_never_best():
    assert removed(Retention(1, best=1), [step(1, loss=float("nan")), step(2, loss=3.0), step(3)]) == [1]


def test_every_steps_keeps_the_first_after_each_multiple():
    assert removed(Retention(1, every_steps=10), [step(n) for n in (7, 12, 19, 20, 29, 31)]) == [7, 19, 29]


def test_every_hours():
    assert removed(Retention(1, every_hours=1), [step(n, hours=n * 0.6) for n in range(6)]) == [1, 3]


def test_leaves_alone_what_is_foreign_or_damaged():
    steps = [step(1, ours=False), step(2, problems="digests are missing"), step(3), step(4)]
    assert removed(Retention(1), steps) == [3]


@pytest.mark.parametrize(
    "wrong", [{"latest": 0}, {"latest": 1.5}, {"latest": 1, "best": True}, {"latest": 1, "every_hours": 0}]
)
def test_refuses_nonsense(wrong):
    with pytest.raises(UsageError):
        Retention(**wrong)


PROMISED = {"monitor": "loss", "mode": "min", "keep_best": 1}


def test_the_best_that_another_callback_promised_to_keep_stay():
    steps = [step(1, loss=0.1, **PROMISED), step(2, loss=0.2, **PROMISED), step(3), step(4)]
    assert removed(Retention(1), steps) == [2, 3]
    two = [*steps[:2], step(3, loss=0.3, **(PROMISED | {"keep_best": 2})), step(4)]
    assert removed(Retention(1), two) == [3]
    assert removed(Retention(1, best=1), two) == [2, 3]  # the rule of this callback, which is about the same
    other = [step(1, loss=0.1, **PROMISED), step(2, loss=0.2), step(3, loss=0.3)]
    assert Retention(1, best=1).removable(other, newest=3, by=BestRule("mae", "min")) == [2]


def test_steps_of_other_runs_are_compared_among_themselves():
    ours, others = PROMISED | {"run": "b"}, PROMISED | {"run": "a"}
    steps = [step(1, loss=0.1, **others), step(2, loss=0.2, **others), step(3, loss=0.3, **ours), step(4, **ours)]
    assert removed(Retention(1, best=1), steps, runs={"b"}) == [2]
    assert removed(Retention(1, best=1), steps) == [2, 3]


def test_what_is_known_to_be_damaged_is_left_alone():
    assert removed(Retention(1, best=1), [step(1, loss=0.1), step(2, loss=0.2), step(3)], damaged={1}) == []


def test_the_metrics_of_a_part_of_an_epoch_do_not_count():
    assert removed(Retention(1, best=1), [step(1, loss=0.2), step(2, loss=0.1, ranks=False), step(3)]) == [2]
