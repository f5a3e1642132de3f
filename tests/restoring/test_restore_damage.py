"""Whatever happens to a file of a step: restoring says so, naming step and file, and the previous step is offered."""

import random
import shutil

import keras
import numpy as np
import pytest
from checkpoints import flip
from saved_steps import save_step

import shardload
from shardload.errors import DamagedError, LoadInterruptedError, SourceNotFoundError

FLIPS = 200


def build():
    model = keras.Sequential([keras.Input((300,)), keras.layers.Dense(700), keras.layers.Dense(5)])
    model.compile("adam", "mse")
    return model


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    model, root = build(), tmp_path_factory.mktemp("run") / "steps"
    model.fit(np.ones((8, 300)), np.ones((8, 5)), verbose=0)
    save_step(model, root, 1)
    spread = build()
    shardload.restore(spread, root, mesh="1x4")
    save_step(spread, root, 2, epoch=0)
    return values(model), root


def values(model):
    return [np.asarray(v.value).tobytes() for v in [*model.variables, *model.optimizer.variables]]


@pytest.fixture
def step(run, tmp_path):
    shutil.copytree(run[1], tmp_path / "steps")
    return tmp_path / "steps" / "2"


def files(step):
    return sorted(p for p in step.rglob("*") if p.is_file())


def outcome(step, expected, target):
    """``"found"``, or ``"harmless"``; anything else is an error."""
    try:
        shardload.restore(target, step.parent, mesh="2x4")
    except (DamagedError, LoadInterruptedError) as error:
        assert "tep 2" in str(error) and "tep 1 is the newest good one" in str(error), str(error)
        return "found"
    assert values(target) == expected
    return "harmless"


@pytest.mark.slow
def test_flipped_bits_in_any_file_are_found(run, step):
    expected, target = run[0], build()
    rng = random.Random(7)
    for k in range(FLIPS):
        every = [p for p in files(step) if p.stat().st_size]
        path = every[k % len(every)]
        at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        flip(path, at, bit)
        result = outcome(step, expected, target)
        assert result == "found", f"bit {bit} of byte {at} of {path.relative_to(step)} was not noticed"
        flip(path, at, bit)
    assert outcome(step, expected, target) == "harmless"


@pytest.mark.parametrize("how", ["zeroed", "truncated", "deleted", "emptied", "grown"])
def test_files_that_are_not_what_they_were_are_found(run, step, how):
    target = build()
    for path in files(step):
        before = path.read_bytes()
        if not before and how != "deleted":
            continue
        _spoil(path, before, how)
        if not path.exists() or path.read_bytes() != before:
            if path.name == "digests.json" and how == "deleted":
                with pytest.raises((DamagedError, SourceNotFoundError), match=r"digests\.json"):
                    shardload.restore(target, step.parent, mesh="2x4")
            else:
                assert outcome(step, run[0], target) == "found", f"{path.relative_to(step)}, {how}"
        path.write_bytes(before)


def _spoil(path, before, how):
    if how == "deleted":
        path.unlink()
    elif how == "zeroed":
        start, end = len(before) // 2, min(len(before) // 2 + 4096, len(before))
        path.write_bytes(before[:start] + bytes(end - start) + before[end:])
    else:
        path.write_bytes({"truncated": before[: len(before) // 2], "emptied": b"", "grown": before + b"x"}[how])


def test_the_previous_step_is_taken_when_asked_to(run, step):
    for path in files(step)[:3]:
        path.write_bytes(b"")
    target = build()
    report = shardload.restore(target, step.parent, fallback="previous", mesh="1x8")
    assert any("step 1" in n and "verified" in n for n in report.notes)
    assert values(target) == run[0]
