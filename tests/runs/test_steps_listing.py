"""Which folders are steps, what is told about them, and which one a word means."""

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from step_folders import save_step

from shardload.errors import DamagedError, SourceNotFoundError, UsageError
from shardload.runs.digests import Digests
from shardload.runs.listing import find_step, list_steps
from shardload.runs.step import StepRecord


def test_steps_are_listed_by_number(tmp_path):
    for step in (10, 9, 0):
        save_step(tmp_path, step, epoch=1, batch=step, logs={"loss": step / 2})
    found = list_steps(tmp_path)
    assert [info.step for info in found] == [0, 9, 10]
    last = found[-1]
    assert (last.ours, last.epoch, last.batch, last.metrics, last.problems) == (True, 1, 10, {"loss": 5.0}, None)
    assert last.saved_s == 1e9 + 10
    assert last.n_bytes == sum(path.stat().st_size for path in last.path.rglob("*") if path.is_file())


def test_what_is_no_step(tmp_path):
    save_step(tmp_path, 3)
    for name in ("5", "07", "a", "-1", "1.5", "٣", "9" * 30):
        (tmp_path / name).mkdir()
    (tmp_path / "6").write_text("a file")
    (tmp_path / "8").mkdir()
    (tmp_path / "8" / "notes.txt").write_text("not a step")
    (tmp_path / "07" / "_CHECKPOINT_METADATA").touch()
    assert [info.step for info in list_steps(tmp_path)] == [3]


def test_foreign_steps_are_told_apart(tmp_path):
    (tmp_path / "4").mkdir()
    (tmp_path / "4" / "_CHECKPOINT_METADATA").write_text("{}")
    (info,) = list_steps(tmp_path)
    assert (info.ours, info.problems) == (False, None) and info.saved_s > 0


def test_a_step_without_digests_stays_ours_and_says_so(tmp_path):
    (save_step(tmp_path, 3) / "shardload" / "digests.json").unlink()
    (info,) = list_steps(tmp_path)
    assert info.ours and info.problems == "shardload/digests.json is missing"


@pytest.mark.parametrize(
    "content", [b"", b"[]", b"{", b'{"epoch": "x", "logs": 3, "saved_unix_s": []}', b'{"logs": {"a": "b"}}']
)
def test_an_unreadable_record_is_tolerated(tmp_path, content):
    (save_step(tmp_path, 3) / "shardload" / "step.json").write_bytes(content)
    (info,) = list_steps(tmp_path)
    assert (info.step, info.epoch, info.metrics, info.best) == (3, None, {}, False)
    assert "shardload/step.json" in info.problems


def test_a_converted_step_was_saved_without_a_record(tmp_path):
    save_step(tmp_path, 3, monitor="loss", logs={"loss": 1.0})
    converted = save_step(tmp_path, 4)
    (converted / "shardload" / "step.json").unlink()
    Digests.compute(converted).write(converted)
    info = list_steps(tmp_path)[1]
    assert (info.step, info.ours, info.problems, info.record, info.metrics) == (4, True, None, None, {})
    assert find_step(tmp_path, "best").step == 3


@pytest.mark.parametrize("epoch", [-1, 1 << 63, 10**400, True, 1.0, "1", [1]])
def test_an_epoch_that_cannot_be_is_none(tmp_path, epoch):
    save_step(tmp_path, 3, epoch=epoch, batch=epoch, saved_unix_s=10**400, logs={"a": 10**400})
    (info,) = list_steps(tmp_path)
    assert (info.epoch, info.batch, info.metrics) == (None, None, {})


@pytest.mark.parametrize(
    ("mode", "values", "best"),
    [
        ("min", [3.0, 1.0, 2.0], [1]), ("max", [3.0, 1.0, 2.0], [0]), ("min", [float("nan"), 5.0, 5.0], [1]),
        ("max", [None, float("-inf"), None], [1]), ("min", [None, None], []),
    ],
)  # fmt: skip
def test_the_best_step(tmp_path, mode, values, best):
    for step, value in enumerate(values):
        save_step(tmp_path, step, monitor="m", mode=mode, logs={} if value is None else {"m": value})
    assert [info.step for info in list_steps(tmp_path) if info.best] == best


@pytest.mark.parametrize(("monitor", "best"), [("val_accuracy", 2), ("val_loss", 1)])
def test_auto_goes_by_the_name(tmp_path, monitor, best):
    for step in (1, 2):
        save_step(tmp_path, step, monitor=monitor, mode="auto", logs={monitor: float(step)})
    assert find_step(tmp_path, "best").step == best


def test_finding_a_step(tmp_path):
    for step, loss in ((1, 0.5), (2, 0.1), (5, 0.3)):
        save_step(tmp_path, step, monitor="loss", mode="min", logs={"loss": loss})
    assert [find_step(tmp_path, which).step for which in ("latest", "best", 1)] == [5, 2, 1]
    with pytest.raises(SourceNotFoundError, match=r"no step 3\. It has 3 steps: 1, 2, 5\. .*latest"):
        find_step(tmp_path, 3)


def test_what_cannot_be_found(tmp_path):
    with pytest.raises(SourceNotFoundError, match="no such folder"):
        find_step(tmp_path / "none", "latest")
    (tmp_path / "best.keras").touch()
    with pytest.raises(SourceNotFoundError, match=r"it is a file, .* shardload\.load_weights\(model, '.*best.keras'"):
        find_step(tmp_path / "best.keras", "best")
    with pytest.raises(SourceNotFoundError, match="contains no steps"):
        find_step(tmp_path, "latest")
    step = save_step(tmp_path, 1, monitor="val_loss", logs={"loss": 1.0, "mae": 2.0})
    with pytest.raises(SourceNotFoundError, match=r"with a value of 'val_loss'\. Saved metrics: loss, mae; name one"):
        find_step(tmp_path, "best")
    with pytest.raises(SourceNotFoundError, match=r"looks like a step itself: .*step=1"):
        find_step(step, "latest")
    step.rename(tmp_path / "final")
    with pytest.raises(SourceNotFoundError, match=r"single checkpoint of Orbax: use shardload\.load_weights"):
        find_step(tmp_path / "final", "latest")
    for wrong in ("newest", True, 1.0, None):
        with pytest.raises(UsageError, match="Cannot find step"):
            find_step(tmp_path, wrong)


def test_a_record_is_read_as_it_was_written():
    facts = {"step": 3, "epoch": 1, "batch": 2, "epoch_done": True, "logs": {"loss": 0.5}, "monitor": "loss"}
    best = {"mode": "min", "best": 0.5, "best_of": "run", "run": "a", "damaged": (1, 2), "ranks": False, "keep_best": 1}
    place = {"mesh": {"axes": ["x"], "sizes": [8]}, "devices": 8, "processes": 2, "versions": {"jax": "0.10"}}
    record = StepRecord(**facts, **best, **place, save_weights_only=True, metadata={"run": [1]}, saved_unix_s=1.5)
    assert StepRecord.of_json(json.loads(json.dumps(asdict(record)))) == record


def test_every_field_of_a_record_is_documented():
    text = (Path(__file__).parents[2] / "docs/reference/step-folder.md").read_text()
    table = text.partition("`shardload/step.json`:")[2].partition("\n\n")[2].partition("\n\n")[0]
    names = "".join(line.split("|")[1] for line in table.splitlines()[2:])
    assert set(re.findall(r"`(\w+)`", names)) == {*asdict(StepRecord())}


@pytest.mark.parametrize("wrong", [None, "x", True, -1, 1e400, [1, "x"], {"a": "b"}])
def test_a_field_of_another_kind_is_read_as_if_it_were_not_there(wrong):
    empty = StepRecord()
    found = StepRecord.of_json(dict.fromkeys(asdict(empty), wrong))
    for name, kind in [("logs", dict), ("damaged", tuple), ("mode", str), ("best_of", str), ("versions", dict)]:
        assert isinstance(getattr(found, name), kind)
    for name in ("epoch", "batch", "devices", "processes"):
        assert getattr(found, name) is None
    assert StepRecord.of_json({}) == empty and not found.ranks_by("loss")


def test_a_record_that_is_not_as_it_was_saved_does_not_say_what_is_best(tmp_path):
    for step, loss in ((1, 0.5), (2, 0.3)):
        save_step(tmp_path, step, monitor="loss", mode="min", logs={"loss": loss})
    record = tmp_path / "1/shardload/step.json"
    record.write_text(record.read_text().replace("0.5", "0.1"))
    found = [(info.best, info.metrics, info.problems is None) for info in list_steps(tmp_path)]
    assert found == [(False, {}, False), (True, {"loss": 0.3}, True)]
    said = r"determine the best step in .*: step 1 has no readable metrics .*step\.json cannot be read"
    with pytest.raises(DamagedError, match=said):
        find_step(tmp_path, "best")
    assert find_step(tmp_path, "latest").step == 2


def test_the_home_of_nobody_is_a_folder_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SourceNotFoundError, match="in ~nosuchuser/run: there is no such folder"):
        list_steps("~nosuchuser/run")
    (tmp_path / "~nosuchuser" / "run").mkdir(parents=True)
    assert list_steps("~nosuchuser/run") == []
