"""The table of planned against compiled bytes: one program, cases that fail, and what is printed."""

import multiprocessing
import os
import signal

import pytest

from benchmarks import layouts, layouts_planned
from benchmarks.layouts_planned import Case

PLANNED = [
    {"kind": "all-gather", "axes": "model", "count": 2, "nbytes": 2048},
    {"kind": "all-reduce", "axes": "batch", "count": 1, "nbytes": 4096},
]
GATHER = {"kind": "all-gather", "axes": "model", "dtype": "f32", "nbytes": 2048, "arrays": 2, "inside": "", "count": 1}
SUM = {"kind": "all-reduce", "axes": "batch", "dtype": "f32", "nbytes": 512, "arrays": 1, "inside": "loop", "count": 4}
ROW = {
    "model": "tiny",
    "mesh": "2x4",
    "step": "forward",
    "planned_bytes": 6144,
    "compiled_bytes": 4096,
    "planned": PLANNED,
    "compiled": [GATHER | {"source": "jit(forward)/take"}, SUM | {"source": "jit(forward)/while/dot_general"}],
}
EXPLAINED = """\
### tiny, 2x4, forward: 6,144 bytes planned, 4,096 compiled (0.67)

| collective | axes | planned | compiled |
|---|---|---|---|
| all-gather | model | 2 x, 2,048 | 2 x, 2,048 |
| all-reduce | batch | 1 x, 4,096 | 4 x, 2,048 |

* 4 x all-reduce over batch: 512 f32, in a loop: jit(forward)/while/dot_general"""


def small_model():
    import keras

    import shardload

    with shardload.abstract():
        hidden, out = keras.layers.Dense(128, activation="relu"), keras.layers.Dense(32)
        return keras.Sequential([keras.Input((32,)), hidden, out])


def test_a_row_compares_a_plan_with_its_program():
    row = layouts_planned.measured(Case("small", "2x4", "gradients"), small_model())
    assert row["compiled_bytes"] == sum(each["nbytes"] * each["count"] for each in row["compiled"]) > 0
    assert row["planned_bytes"] == sum(each["nbytes"] for each in row["planned"])
    assert all(each["source"].startswith("jit(gradients)") for each in row["compiled"])
    assert layouts_planned.ratio(row) == 1
    assert not layouts_planned.is_exception(row)


def some_rows(cases, connection):
    """Send a row for each case, but die at one."""
    for case in cases:
        if case.model == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        connection.send(layouts_planned.head(case))


def test_a_case_that_ends_the_process_is_a_row():
    cases = [Case(model, "2x4", "forward") for model in ("good", "dies", "better")]
    found = list(layouts_planned.rows(cases, work=some_rows))
    assert [(row["model"], row.get("error")) for row in found] == [
        ("good", None),
        ("dies", "the process died"),
        ("better", None),
    ]


def test_a_case_that_is_too_slow_has_an_error():
    ours, _open = multiprocessing.Pipe(duplex=False)
    assert layouts_planned.received(ours, 0) == (None, "took longer than 0 s")


def test_tables_show_ratios_exceptions_and_errors(monkeypatch, capsys):
    equal = ROW | {"mesh": "1x8", "compiled_bytes": 6144}
    failed = {"model": "tiny", "mesh": "8x1", "step": "forward", "error": "ValueError: odd"}
    monkeypatch.setattr(layouts_planned, "rows", lambda cases: iter([equal, ROW, failed]))
    cases = [Case("tiny", mesh, "forward") for mesh in ("1x8", "2x4", "8x1")]
    layouts_planned.compare(cases, as_json=False, explain=True)
    assert capsys.readouterr().out.splitlines()[2:] == [
        "| model | step | 1x8 | 2x4 | 8x1 |",
        "|---|---|---|---|---|",
        "| tiny | forward | 0.0059 / 0.0059, 1.00 | 0.0059 / 0.0039, **0.67** | error |",
        "",
        "2 of 3 programs differ by more than 5%.",
        "",
        *layouts_planned.EXCEPTION_HEAD.splitlines(),
        "| tiny | 2x4 | forward | 0.67 | all-reduce batch 0.0039 / 0.002 (dot_general) |",
        "| tiny | 8x1 | forward | | ValueError: odd |",
        "",
        *EXPLAINED.splitlines(),
        "",
        "### tiny, 8x1, forward: ValueError: odd",
    ]


def test_a_plan_without_exchanges_is_exact_only_if_nothing_is_exchanged():
    nothing = ROW | {"planned_bytes": 0, "compiled_bytes": 0}
    assert not layouts_planned.is_exception(nothing)
    assert layouts_planned.is_exception(nothing | {"compiled_bytes": 4})


def test_options_choose_models_meshes_and_steps(monkeypatch):
    seen = []
    monkeypatch.setattr(layouts_planned, "model_lengths", lambda: {"t5": 128, "t5_gated": 128, "llama": 2048})
    monkeypatch.setattr(layouts_planned, "compare", lambda cases, **_: seen.append(cases))
    layouts.main(["--planned", "--only", "^t5$", "--mesh", "2x4", "--mesh", "8x1", "--training"])
    layouts.main(["--planned", "--only", "llama", "--inference", "--batch", "8"])
    assert seen[0] == [Case("t5", mesh, "gradients") for mesh in ("2x4", "8x1")]
    assert seen[1] == [Case("llama", mesh, "forward", 8, 2048) for mesh in layouts_planned.MESHES]


@pytest.mark.slow
# Families warn of masks of their own.
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_held_out_models_declare_batches_that_eight_devices_divide():
    import shardload
    from benchmarks.held_out_models import held_out
    from shardload.layout_search.tracing import input_specs, rows_of

    names = set()
    for name, make in held_out():
        with shardload.abstract():
            assert {rows % 8 for rows in rows_of(input_specs(make(), batch=16, sequence=128))} == {0}
        names.add(name)
    assert len(names) == 11
    assert not names & {name for name, _ in (*layouts.others(), *layouts.decoders())}
