"""Whatever happens to a file of a step: restoring says so, naming step and file, and the previous step is offered."""

import random
import shutil

import keras
import numpy as np
import pytest
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
    return [np.asarray(v.value) for v in [*model.variables, *model.optimizer.variables]], root


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
    values = [np.asarray(v.value) for v in [*target.variables, *target.optimizer.variables]]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(values, expected, strict=True))
    return "harmless"


@pytest.mark.slow
def test_flipped_bits_in_any_file_are_found(run, step):
    expected, target = run[0], build()
    rng = random.Random(7)
    found = 0
    for k in range(FLIPS):
        every = [p for p in files(step) if p.stat().st_size]
        path = every[k % len(every)]
        at, bit = rng.randrange(path.stat().st_size), 1 << rng.randrange(8)
        _flip(path, at, bit)
        result = outcome(step, expected, target)
        assert result == "found", f"bit {bit} of byte {at} of {path.relative_to(step)} was not noticed"
        found += 1
        _flip(path, at, bit)
    assert found == FLIPS and outcome(step, expected, target) == "harmless"


def _flip(path, at, bit):
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ bit]))


@pytest.mark.parametrize("how", ["zeroed", "truncated", "deleted", "emptied", "grown"])
def test_files_that_are_not_what_they_were_are_found(run, step, how):
    target = build()
    for path in files(step):
        before = path.read_bytes()
        if not before and how != "deleted":
            continue
        _spoil(path, before, how)
        changed = not path.exists() or path.read_bytes() != before
        if changed:
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
        path.write_bytes(
            before[: len(before) // 2]
            + bytes(min(4096, len(before) - len(before) // 2))
            + before[len(before) // 2 + 4096 :]
        )
    else:
        path.write_bytes({"truncated": before[: len(before) // 2], "emptied": b"", "grown": before + b"x"}[how])


def test_the_previous_step_is_taken_when_asked_to(run, step):
    for path in files(step)[:3]:
        path.write_bytes(b"")
    target = build()
    report = shardload.restore(target, step.parent, fallback="previous", mesh="1x8")
    assert any("step 1" in n and "verified" in n for n in report.notes)
    values = [np.asarray(v.value) for v in [*target.variables, *target.optimizer.variables]]
    assert all(a.tobytes() == b.tobytes() for a, b in zip(values, run[0], strict=True))
