"""What a server writes to stderr: a line for each request, error and note, for people or for programs."""

import json
import logging
import re
import shutil
import warnings

import numpy as np
import pytest
from safetensors.numpy import save_file
from serving import served

from shardload.console.request_log import RequestLog, json_line, text_line

FILE = "/models/model.safetensors"


@pytest.fixture
def root(tmp_path):
    (tmp_path / "models").mkdir()
    save_file({"x": np.zeros(1 << 10, np.float32)}, tmp_path / "models" / "model.safetensors")
    return tmp_path


def objects(server):
    """The lines of a server that has ended."""
    return [json.loads(line) for line in server.log]


def test_each_line_is_an_object_from_the_first_to_the_last(root):
    shutil.copytree(root / "models", root / "ui")
    with served("--root", root, "--log-json") as server:
        server.get(FILE, Range="bytes=0-9", X_Request_Id="mine")
        assert server.end() == 0
    note, started, asked, stopping, stopped = objects(server)
    assert all(each.pop("unix_s") > 1e9 for each in (note, started, asked, stopping, stopped))
    assert note.pop("level") == "warning" and "ui is not served" in note["note"]
    assert started.pop("version") and started == {"level": "info", "event": "started", "address": server.address}
    assert asked.pop("seconds") >= 0
    assert asked == {
        "level": "info", "request": "mine", "client": "127.0.0.1", "method": "GET", "path": FILE,
        "range": "bytes=0-9", "status": 206, "bytes": 10,
    }  # fmt: skip
    assert stopping == {"level": "info", "event": "stopping", "requests": 0, "grace_s": 30.0}
    assert stopped.pop("seconds") >= 0 and stopped == {"level": "info", "event": "stopped"}


def test_lines_for_people_have_a_date_and_a_zone(root):
    with served("--root", root) as server:
        server.get(FILE)
        assert server.end() == 0
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d[+-]\d\d:\d\d \S", line) for line in server.log)
    first, asked, stopping, stopped = (line.partition(" ")[2] for line in server.log)
    assert re.fullmatch(rf"started: shardload \S+ at {server.address}\n", first)
    assert f"GET {FILE}: 200, " in asked
    assert "stopping: " in stopping and re.fullmatch(r"stopped after \d+\.\d s\n", stopped)


@pytest.mark.parametrize("shown", [json_line, text_line])
def test_warnings_and_lines_of_libraries_are_lines_of_the_log(shown, capfd):
    log = RequestLog(shown)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with log.taking_all():
            warnings.warn("the disk is full", RuntimeWarning, stacklevel=1)
            logging.getLogger("asyncio").error("Task failed", exc_info=ValueError("why"))
        log.close()
        assert warnings.showwarning.__module__ == "warnings"
    first, second = capfd.readouterr().err.splitlines()
    if shown is json_line:
        assert [json.loads(line)["level"] for line in (first, second)] == ["warning", "error"]
    assert "the disk is full" in first and "RuntimeWarning" not in first
    assert "asyncio: Task failed" in second and "ValueError: why" in second


@pytest.mark.parametrize(
    ("facts", "level"),
    [
        ({"status": 200}, "info"),
        ({"status": 404}, "info"),
        ({"status": 401}, "warning"),
        ({"status": 200, "problem": "cut off"}, "warning"),
        ({"status": 502}, "error"),
        ({"job": "1", "state": "done", "verdict": "verified"}, "info"),
        ({"job": "1", "state": "done", "verdict": "damaged"}, "error"),
        ({"job": "1", "state": "failed", "problem": "why"}, "error"),
        ({"problem": "cannot look for new checkpoints"}, "warning"),
        ({"problem": "server: it failed", "level": "error"}, "error"),
    ],
)
def test_levels(facts, level, capfd):
    log = RequestLog(json_line)
    log.note(facts)
    log.close()
    assert json.loads(capfd.readouterr().err)["level"] == level
