"""What notebooks show instead of an object's ``repr``."""

import html

import keras
import numpy as np
import pytest
from safetensors.numpy import save_file
from saved_steps import save_step

import shardload
from shardload.adapting import AdapterReport
from shardload.comparing import diff
from shardload.layout_checks.compiled_step import CompiledStep
from shardload.layout_checks.numbers import NumbersCheck
from shardload.layout_checks.placement import Check, SetupReport
from shardload.optimizers.sharding import SlotReport
from shardload.parallel import LayoutChoice, LayoutPlan, choose
from shardload.reports import LoadReport, PlanReport
from shardload.reports.calls import CallReport, FastReport
from shardload.runs.step_list import StepList
from shardload.verifying import verify

HOSTILE = "<script>alert(1)</script>.\x1b[31m"


@pytest.fixture
def checkpoint(tmp_path):
    layers = {f"layers.{i}.up": np.ones((4, 8), np.float32) for i in range(3)}
    save_file({HOSTILE: np.ones(3, np.int8), **layers}, tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def shown(value):
    """The text that a notebook shows, checked to be preformatted text without markup in it."""
    text = value._repr_html_()
    assert text.startswith("<pre>") and text.endswith("</pre>") and "\x1b" not in text
    inner = text.removeprefix("<pre>").removesuffix("</pre>")
    assert "<" not in inner
    return html.unescape(inner)


def test_a_checkpoint_shows_its_tensors_with_those_of_layers_in_one_line(checkpoint):
    first, *lines = shown(shardload.inspect(checkpoint)).splitlines()
    assert first == f"{checkpoint} (safetensors): 4 tensors, 99 parameters, 387 B"
    assert [line.split() for line in lines] == [
        ["layers.*.up", "×3", "float32", "4", "×", "8", "384", "B"],  # noqa: RUF001
        ["<script>alert(1)</script>.\\x1b[31m", "int8", "3", "3", "B"],
    ]


def test_of_many_kinds_of_tensors_some_are_shown(tmp_path):
    letters = "abcdefg"
    save_file({a + b: np.ones(2, np.int8) for a in letters for b in letters}, tmp_path / "a.safetensors")
    assert shown(shardload.inspect(tmp_path / "a.safetensors")).endswith("\n… and 9 tensors more")


def test_a_comparison_and_verdicts_show_what_the_commands_print(checkpoint):
    found = diff(checkpoint, checkpoint)
    assert shown(found) == str(found) == "4 tensors equal, 0 not"
    (verdict,) = verdicts = verify(checkpoint)
    assert (
        shown(verdicts) == shown(verdict) == f"no digests; all headers and sizes right {checkpoint} (387 B, 4 tensors)"
    )


def test_the_steps_of_a_run_are_a_table(tmp_path):
    save_step(keras.Sequential([keras.Input((4,)), keras.layers.Dense(8)]), tmp_path, 10)
    with shardload.Checkpointer(tmp_path) as saver:
        head, row = shown(saver.steps()).splitlines()
    assert head.split() == ["step", "epoch", "metrics", "size", "age", "best", "state"] and row.startswith("10 ")
    assert shown(StepList()) == "no steps"


def test_reports_of_other_functions_show_their_text():
    for report in (
        AdapterReport(2, 0, ("a <b> note",)),
        SetupReport((Check("split", True, "a <b>"),), 0.0, {}),
        CallReport("load('<b>')", "keras", "it is <b>", 1.0, None),
    ):
        assert shown(report) == str(report) and "<b>" in str(report)


def test_a_choice_of_layouts_shows_its_summary():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64)])
    choice = choose(model, "1x2")
    assert shown(choice) == choice.summary()


def test_every_report_shows_itself():
    reports = (LoadReport, PlanReport, FastReport, SlotReport, LayoutPlan, LayoutChoice, CompiledStep, NumbersCheck)
    assert all(callable(getattr(each, "_repr_html_", None)) for each in reports)
    public = [getattr(shardload, name) for name in shardload.__all__ if name.endswith("Report")]
    assert public and all(callable(getattr(each, "_repr_html_", None)) for each in public)
