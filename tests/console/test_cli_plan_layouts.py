"""`shardload plan` with a search: what a person types, sees, saves and loads with."""

import re
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from cli_fakes import Done, in_process, install, shardload

from shardload.cli import main
from shardload.parallel import LayoutPlan

NAME = "gemma2_2b-x0.02"
STEP = ("--train", "adamw", "--batch", "8", "--sequence", "32")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A checkpoint root with a tiny Gemma 2 in it."""
    folder = tmp_path_factory.mktemp("root")
    done = shardload("synth", "gemma2_2b", "--scale", "0.02", SHARDLOAD_HOME=str(folder))
    assert done.code == 0, done.stderr
    return folder


@pytest.fixture
def cli(root, capfd, monkeypatch):
    """The command in this process, with that root."""
    monkeypatch.setenv("SHARDLOAD_HOME", str(root))
    return in_process(capfd)


@pytest.fixture(scope="module")
def planned(root, tmp_path_factory) -> tuple[Done, Path]:
    """A plan as a person asks for it, in a process of its own, compiled, saved and drawn."""
    folder = tmp_path_factory.mktemp("plans")
    files = ("--save-plan", str(folder / "plan.json"), "--svg", str(folder / "plan.svg"))
    arguments = ("plan", NAME, "--mesh", "2x4", *STEP, "--device-memory", "16MiB", "--compile", "--json", *files)
    return shardload(*arguments, SHARDLOAD_HOME=str(root)), folder


def test_a_plan_for_training_keeps_the_limit_and_names_the_smallest_mesh(planned):
    done, _ = planned
    assert done.code == 0, done.stderr
    found = LayoutPlan.from_json(done.json["plan"])
    assert found.training and found.device.slots == 2 * found.device.gradients > 0
    assert found.inputs == "int32[8, 32], int32[8, 32]"
    assert found.device.total <= found.device_memory_bytes == 16 * 2**20
    sizes = [int(n) for n in done.json["smallest_mesh"].split("x")]
    assert len(sizes) == 2 and sizes[0] * sizes[1] <= 8


def test_the_compiled_step_has_the_planned_state_and_every_collective(planned):
    found = planned[0].json
    state = found["plan"]["device"]["weights"] + found["plan"]["device"]["slots"]
    assert found["compiled"]["kind"] == "training" and found["compiled"]["mesh"] == {"batch": 2, "model": 4}
    batch = 2 * 4 * 32 * 4  # two inputs, int32, of which each device has 4 rows; and the optimizer's scalars
    assert 0 <= found["compiled"]["argument_bytes"] - state - batch < 256
    assert {c["kind"] for c in found["compiled"]["collectives"]} >= {"all-reduce"}


def test_files_are_written_and_named(planned):
    done, folder = planned
    assert LayoutPlan.load(folder / "plan.json") == LayoutPlan.from_json(done.json["plan"])
    assert ElementTree.parse(folder / "plan.svg").getroot().tag.endswith("svg")
    assert "simulating 8 CPU devices" in done.stderr and f"wrote {folder / 'plan.json'}" in done.stderr


def test_a_saved_plan_is_what_a_load_uses(planned, root):
    file = planned[1] / "plan.json"
    arguments = ("load", NAME, "--layout", str(file), "--platform", "cpu", "--json")  # the mesh is the plan's
    done = shardload(*arguments, SHARDLOAD_HOME=str(root))
    assert done.code == 0, done.stderr
    assert done.json["mesh"] == "batch=2,model=4"
    assert {d["bytes"] for d in done.json["devices"]} == {LayoutPlan.load(file).device.weights}


def test_a_load_with_a_saved_plan_is_planned_on_its_mesh_and_on_no_other(planned, cli):
    file = planned[1] / "plan.json"
    done = cli("plan", NAME, "--layout", str(file), "--device-memory", "16MiB", "--json")
    assert done.code == 0, done.stderr
    assert done.json["mesh"] == "batch=2,model=4"
    assert {d["bytes"] for d in done.json["devices"]} == {LayoutPlan.load(file).device.weights}
    done = cli("plan", NAME, "--layout", str(file), "--mesh", "1x8")
    assert done.code == 1 and "Cannot use the plan for batch=2,model=4 on the mesh batch=1,model=8" in done.stderr


def test_a_load_searches_its_layouts_itself(root):
    arguments = ("load", NAME, "--mesh", "1x8", "--layout", "search", "--platform", "cpu", "--json")
    done = shardload(*arguments, SHARDLOAD_HOME=str(root))
    assert done.code == 0, done.stderr
    assert done.json["layout"]["sharded"] > 0
    assert len(done.json["devices"]) == 8 and done.json["devices"][0]["bytes"] < done.json["weight_bytes"]


def test_a_plan_for_inference_is_printed_with_its_bars(cli):
    done = cli("plan", NAME, "--mesh", "1x4", "--layout", "search", "--batch", "4")
    assert done.code == 0 and "inference, inputs int32[4, 512]" in done.stdout
    assert "  weights     █" in done.stdout and "gradients" not in done.stdout
    assert "smallest mesh" not in done.stdout
    assert re.match(r"source: \S+ \(\d+\.\d k parameters, bfloat16\)\n", done.stdout)


def test_a_plan_of_weights_says_its_dtype_and_what_plans_training(cli):
    done = cli("plan", NAME, "--mesh", "1x4")
    assert ", bfloat16\n" in done.stdout
    assert done.stdout.endswith("add --layout search; for a training step, --train adamw\n")


def test_a_limit_that_nothing_keeps_is_an_error_that_says_what_would_do(cli):
    done = cli("plan", NAME, "--mesh", "1x2", *STEP, "--device-memory", "1MiB")
    assert done.code == 1 and done.stdout == ""
    assert "No layout on batch=1,model=2 needs at most 1.0 MiB per device. The least found is" in done.stderr
    assert re.search(r"It fits on (\d+x\d+) with the same batch of (\d+): pass --mesh \1 --batch \2", done.stderr)


def test_a_batch_that_does_not_divide_is_said(cli):
    done = cli("plan", NAME, "--mesh", "4x1", "--batch", "6", "--json")
    assert any("batch of 6 does not divide over axis 'batch'" in note for note in done.json["plan"]["notes"])


def test_an_optimizer_that_keras_does_not_know_is_refused(cli):
    done = cli("plan", NAME, "--mesh", "1x2", "--train", "adamz")
    assert done.code == 1 and "optimizer 'adamz': Keras has none of that name" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--train", "sgd", "--layout", "auto"), "--train searches for layouts. Leave out --layout auto"),
        (("--save-plan", "plan.toml"), "'plan.toml' does not end in .json"),
        (("--svg", "no/such/folder/plan.svg"), "is not a file in an existing folder"),
        (("--svg", "plan.png"), "does not end in .svg"),
        (("--batch", "0"), "it must be greater than or equal to 1"),
    ],
)
def test_usage(arguments, said, cli):
    done = cli("plan", NAME, *arguments)
    assert done.code == 2 and said in done.stderr


def test_without_a_search_the_report_of_a_load_is_printed(capfd, monkeypatch):
    engine = install(monkeypatch)
    asked = {}
    report = SimpleNamespace(fits=None, to_json=lambda: {"format": "gguf"})
    engine.plan = lambda source, **options: asked.update(options) or report
    capfd.readouterr()
    assert main(("plan", "somewhere", "--json")) == 0
    assert '"format": "gguf"' in capfd.readouterr().out and asked["layout"] == "auto"
