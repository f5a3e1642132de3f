"""The command line with everything behind it: a tiny Gemma 2 is written, planned, inspected and loaded."""

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import quantised_folders
from cli_fakes import Done, environment, in_process, install, run, shardload

from shardload.cli import main
from shardload.parallel import LayoutPlan

NAME = "gemma2_2b-x0.02"


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A checkpoint root with a tiny Gemma 2 in it."""
    folder = tmp_path_factory.mktemp("root")
    done = run((sys.executable, "-m", "shardload", "synth", "gemma2_2b", "--scale", "0.02"), SHARDLOAD_HOME=str(folder))
    assert (done.code, done.stdout, done.stderr) == (0, f"{folder / NAME}\n", "")
    return folder


@pytest.fixture
def cli(root, capfd, monkeypatch):
    """The command in this process, with that root."""
    monkeypatch.setenv("SHARDLOAD_HOME", str(root))
    return in_process(capfd)


@pytest.fixture(scope="module")
def loaded(root) -> Done:
    """The load on eight simulated devices, as a person starts it."""
    arguments = ("load", NAME, "--mesh", "1x8", "--platform", "cpu", "--json", "--html", str(root / "load.html"))
    return shardload(*arguments, SHARDLOAD_HOME=str(root))


def test_load_reports_one_object(loaded, root):
    assert loaded.code == 0, loaded.stderr
    assert loaded.stderr == (
        "note: simulating 8 CPU devices for the mesh batch=1,model=8; no accelerator is used.\n"
        f"note: wrote {root / 'load.html'}\n"
    )
    assert loaded.json["format"] == "keras-hub-preset"
    assert [d["platform"] for d in loaded.json["devices"]] == ["cpu"] * 8


def test_more_tokens_than_the_context_are_refused_before_the_load(cli):
    done = cli("load", NAME, "--prompt", "hi", "--max-new-tokens", "100000")
    assert (done.code, done.stdout) == (1, "")
    assert f"the context of {NAME} has 8192. Shorten the prompt" in done.stderr


def test_the_report_lists_the_layout_of_each_variable(loaded):
    found = loaded.json["layout"]["variables"]
    assert len(found) == loaded.json["variables"] and sum(v["bytes"] for v in found) == loaded.json["weight_bytes"]
    assert sum(v["device_bytes"] for v in found) == loaded.json["devices"][0]["bytes"]
    kernel = next(v for v in found if v["name"] == "decoder_block_0/ffw_gating/kernel")
    assert (kernel["dtype"], kernel["reason"], kernel["spec"]) == ("bfloat16", "column", [[], ["model"]])
    assert kernel["shard_shape"] == [kernel["shape"][0], kernel["shape"][1] // 8] and kernel["tensor"]


def test_a_load_writes_a_page_with_all_variables_and_what_happened(loaded, root):
    page = (root / "load.html").read_text("utf-8")
    assert page.count("<details>") == loaded.json["variables"]
    assert "<h1>Load of " in page and "cpu 7  batch=0, model=7</th>" in page and ">transfer</th>" in page


def test_a_plan_of_reads_writes_a_page_of_its_own(cli, tmp_path):
    file = tmp_path / "plan.html"
    done = cli("plan", NAME, "--mesh", "1x3", "--hosts", "3", "--html", str(file))
    assert done.code == 0 and f"note: wrote {file}\n" in done.stderr and "Fallbacks" in done.stdout
    page = file.read_text("utf-8")
    assert "<h1>Plan of " in page and "heads do not divide by 3" in page and "each host reads what it needs" in page


def test_every_needed_byte_is_accounted_for(loaded):
    found = loaded.json
    assert found["bytes"]["read"] >= found["bytes"]["needed"] == found["weight_bytes"] > 0
    assert found["host_bytes"]["peak_staging"] <= found["host_bytes"]["budget"]
    assert found["throughput_gb_s"] > 0


def test_the_plan_says_what_the_load_then_did(loaded, cli):
    planned = cli("plan", NAME, "--mesh", "1x8", "--json").json
    for key in (
        "source", "format", "mesh", "variables", "parameters", "weight_bytes", "layout", "missing", "unused", "cast",
    ):  # fmt: skip
        assert planned[key] == loaded.json[key]
    assert [d["bytes"] for d in planned["devices"]] == [d["bytes"] for d in loaded.json["devices"]]
    assert planned["bytes"] == loaded.json["bytes"]


@pytest.mark.parametrize(("memory", "code"), [("16GiB", 0), ("10KiB", 1)])
def test_the_plan_says_whether_it_fits(memory, code, cli):
    done = cli("plan", NAME, "--mesh", "1x8", "--device-memory", memory, "--json")
    assert (done.code, done.json["fits"]["fits"]) == (code, code == 0)


def test_codes_of_a_quantised_folder_are_kept(cli, tmp_path):
    folder, _ = quantised_folders.write(tmp_path, "gptq 4", intermediate_size=48)
    planned, loaded, floats = (
        cli(command, str(folder), "--mesh", "1x8", "--quantized", kept, "--json")
        for command, kept in (("plan", "keep"), ("load", "keep"), ("plan", "dequantize"))
    )
    assert [done.code for done in (planned, loaded, floats)] == [0, 0, 0]
    assert planned.json["weight_bytes"] == loaded.json["weight_bytes"] < floats.json["weight_bytes"] / 2
    assert planned.json["bytes"] == loaded.json["bytes"]
    assert planned.json["parameters"] == floats.json["parameters"]
    searched = cli("plan", str(folder), "--layout", "search", "--quantized", "keep")
    assert (searched.code, "A search for layouts plans floats: leave --quantized out" in searched.stderr) == (2, True)


def test_a_plan_needs_no_weights(cli):
    done = cli("plan", "gemma2_27b", "--mesh", "4x8", "--device-memory", "16GiB", "--json")
    assert (done.code, done.stderr) == (0, "")
    assert (done.json["parameters"], len(done.json["devices"]), done.json["fits"]["fits"]) == (27_227_128_320, 32, True)
    assert done.json["notes"][0] == "planned from the architecture: no weights of gemma2_27b are on this machine"


def test_the_table_of_a_real_load(cli):
    done = cli("load", NAME, "--mesh", "2x4", "--platform", "cpu", "--dtype", "float32")
    assert done.code == 0, done.stderr
    assert "batch=2,model=4 (8 cpu devices)" in done.stdout and "bfloat16 → float32" in done.stdout


def test_inspect_lists_each_tensor_on_a_line(cli):
    done = cli("inspect", NAME)
    summary, blank, head, *lines = done.stdout.splitlines()
    assert (done.code, blank, head.split()) == (0, "", ["name", "shape", "dtype", "bytes", "file", "storage"])
    assert f"{len(lines)} tensors" in summary
    assert all("model.weights.h5  offset " in line for line in lines)


def test_inspect_filters_and_prints_objects(cli):
    found = cli("inspect", NAME, "--match", "*attention/key*", "--json").json
    assert [t["name"] for t in found["tensors"] if "attention/key" not in t["name"]] == []
    assert found["bytes"] == sum(t["bytes"] for t in found["tensors"]) > 0
    assert found["tensors"][0]["storage"] == "extent"


@pytest.mark.slow
def test_inspect_imports_neither_jax_nor_keras(root):
    after = "print([m for m in ('jax', 'keras', 'keras_hub') if m in sys.modules], file=sys.stderr)"
    code = f"import sys; from shardload.cli import main; main(['inspect', {str(root / NAME)!r}]); {after}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stderr == "[]\n"


def test_sources_lists_it_first(cli, root):
    assert cli("sources", "--json").json["sources"][0] == {"name": NAME, "kind": "local", "what": str(root / NAME)}


def test_sources_lists_aliases_and_architectures_once(cli):
    names = [line.split()[0] for line in cli("sources").stdout.splitlines()]
    assert {"gemma2_7b", "gemma2_9b", "llama3_8b"} <= set(names) and len(names) == len(set(names))


def test_synth_again_says_the_same_and_keeps_what_differs(cli, root):
    assert cli("synth", "gemma2_2b", "--scale", "0.02").stdout == f"{root / NAME}\n"
    differs = cli("synth", "gemma2_2b", "--scale", "0.02", "--seed", "1")
    assert differs.code == 1 and "--overwrite" in differs.error


def one_tensor(path: Path, name: str) -> Path:
    """A safetensors file with one float."""
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 4)
    return path


def test_a_prompt_without_a_tokenizer_fails_before_the_load(cli, tmp_path, monkeypatch):
    monkeypatch.setattr("shardload.loading.run", lambda *a, **k: pytest.fail("loaded all the same"))
    path = one_tensor(tmp_path / "model.safetensors", "weight")
    done = cli("load", str(path), "--platform", "cpu", "--prompt", "Say")
    assert (done.code, done.stdout) == (1, "") and "tokenizer" in done.error


def test_a_damaged_checkpoint_is_one_paragraph(cli, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes((1 << 40).to_bytes(8, "little") + b"{}")
    for command in ("inspect", "load", "plan"):
        done = cli(command, str(path))
        assert (done.code, done.stdout) == (1, "") and str(path) in done.error


def test_inspect_notes_a_tensor_that_the_index_does_not_list(cli, tmp_path):
    one_tensor(tmp_path / "a.safetensors", "a")
    one_tensor(tmp_path / "b.safetensors", "b")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert "note:" not in cli("inspect", str(index)).stderr
    header = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate("bc")}
    raw = json.dumps(header).encode()
    (tmp_path / "b.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(8))
    done = cli("inspect", str(index))
    assert done.stderr == f"note: left out 1 unlisted tensor: {index.name} does not assign 'c' to b.safetensors\n"
    assert "2 tensors" in done.stdout


def test_a_tensor_name_cannot_drive_the_terminal(cli, tmp_path):
    done = cli("inspect", str(one_tensor(tmp_path / "model.safetensors", "\x1b]0;title\x07")))
    assert "\\x1b]0;title\\x07" in done.stdout and "\x1b" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "source", ["no_such_model_at_all", "./nowhere/model.gguf", "ftp://server/model", "s3://", "", "a\0b"]
)
def test_a_source_that_is_not_there(source, cli):
    done = cli("load", source, "--platform", "cpu")
    assert (done.code, done.stdout) == (1, "") and done.error.startswith("Error: ")
    assert "Unexpected" not in done.error


@pytest.mark.slow
def test_a_pipe_that_closes_early_is_quiet(root):
    command = f'{sys.executable} -m shardload inspect {root / NAME} | head -1; echo "${{PIPESTATUS[0]}}"'
    done = run(("bash", "-c", command))
    assert done.stderr == "" and len(done.stdout.splitlines()) == 2
    assert NAME in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_pipe_that_closes_in_the_middle_of_much_is_quiet(tmp_path, more):
    names = [f"model.layers.{i}.a_name_that_fills_a_pipe_soon.weight" for i in range(3000)]
    entries = {name: {"dtype": "F32", "shape": [1], "data_offsets": [4 * i, 4 * i + 4]} for i, name in enumerate(names)}
    header = json.dumps(entries).encode()
    path = tmp_path / "big.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4 * len(names)))
    listed = f"{sys.executable} -m shardload inspect {path} {' '.join(more)}"
    assert len(run(("bash", "-c", listed)).stdout) > 1 << 17  # twice what a pipe holds
    done = run(("bash", "-c", f'{listed} | head -1; echo "${{PIPESTATUS[0]}}"'))
    assert (done.stderr, done.stdout.splitlines()[1:]) == ("", ["141"])


# ---- shardload plan with a search: what a person types, sees, saves and loads with ---------------


STEP = ("--train", "adamw", "--batch", "8", "--sequence", "32")


@pytest.fixture(scope="module")
def planned(root, tmp_path_factory) -> tuple[Done, Path]:
    """A plan as a person asks for it, in a process of its own, compiled, saved and drawn."""
    folder = tmp_path_factory.mktemp("plans")
    files = ("--save-plan", str(folder / "plan.json"), "--svg", str(folder / "plan.svg"))
    files += ("--html", str(folder / "plan.html"))
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
    page = (folder / "plan.html").read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>") and "the opposite" in page and "token_embedding/<wbr>embeddings" in page
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


def test_microbatches_recomputation_and_mixed_precision_are_planned(cli):
    plain = cli("plan", NAME, "--mesh", "1x2", *STEP, "--json").json
    options = ("--microbatches", "2", "--remat", "full", "--dtype", "mixed_bfloat16")
    mixed = cli("plan", NAME, "--mesh", "1x2", *STEP, *options, "--json").json
    assert plain["dtypes"] == ["bfloat16"] and mixed["dtypes"] == ["float32"]
    assert plain["plan"]["remat"] == {} and [*mixed["plan"]["remat"].values()] == ["full"]
    assert mixed["plan"]["device"]["weights"] >= 2 * plain["plan"]["device"]["weights"]
    # Two moments, and the sums of gradients.
    assert mixed["plan"]["device"]["slots"] == pytest.approx(3 * mixed["plan"]["device"]["weights"], rel=0.01)
    assert mixed["plan"]["inputs"].startswith("int32[4, 32]")
    assert any("one of 2 microbatches of 4 rows" in note for note in mixed["plan"]["notes"])
    odd = cli("plan", NAME, "--mesh", "1x2", *STEP, "--microbatches", "3")
    assert odd.code == 2 and "Cannot divide a batch of 8 into 3 microbatches" in odd.stderr


def test_the_fastest_of_all_meshes_is_taken_and_all_are_listed(cli):
    found = cli("plan", NAME, "--mesh", "auto", "--devices", "4", *STEP, "--device-memory", "1GiB", "--json").json
    tried = {one["mesh"]: one["step_s"] for one in found["tried"]}
    assert tried.keys() == {"1x4", "2x2", "4x1"} and all(tried.values())
    chosen = min(tried, key=tried.get)
    assert "x".join(map(str, found["plan"]["mesh"]["sizes"])) == chosen
    said = cli("plan", NAME, "--mesh", "auto", "--devices", "4", *STEP).stdout
    assert said.count(" ms a step, ") == 3 and said.count(", chosen\n") == 1
    small = cli("plan", NAME, "--mesh", "auto", "--devices", "2", *STEP, "--device-memory", "1MiB")
    assert small.code == 1 and "No mesh of 2 devices needs at most 1.0 MiB per device. The least found" in small.stderr


def test_sequences_are_split_if_asked_for(cli):
    on = cli("plan", NAME, "--mesh", "1x2", *STEP, "--sequence-parallel", "on", "--json").json["plan"]
    off = cli("plan", NAME, "--mesh", "1x2", *STEP, "--sequence-parallel", "off", "--json").json["plan"]
    assert on["sequence_axes"] == ["model"] and off["sequence_axes"] == []
    assert on["device"]["activations"] < off["device"]["activations"]


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
        (("--html", "plan.htm"), "does not end in .html"),
        (("--svg", "plan.png"), "does not end in .svg"),
        (("--batch", "0"), "it must be greater than or equal to 1"),
        (("--remat", "full"), "--remat is for a training step. Add --train with an optimizer"),
        (("--microbatches", "2"), "--microbatches is for a training step. Add --train with an optimizer"),
        (("--sequence-parallel", "on"), "--sequence-parallel is for a training step. Add --train with an optimizer"),
        (("--mesh", "auto", "--batch", "8"), "auto tries all meshes of N devices: add --devices N"),
        (("--mesh", "auto", "--devices", "8"), "auto compares meshes with the same batch: add --batch N"),
        (("--mesh", "1x8", "--devices", "8"), "It is for --mesh auto"),
        (("--remat", "some"), "'some' is not one of 'auto', 'none', 'matmuls', 'full'"),
    ],
)
def test_usage(arguments, said, cli):
    done = cli("plan", NAME, *arguments)
    assert done.code == 2 and said in done.stderr


def test_without_a_search_the_report_of_a_load_is_printed(capfd, monkeypatch):
    engine = install(monkeypatch)
    asked = {}
    report = SimpleNamespace(fits=None, to_html=str, to_json=lambda: {"format": "gguf"})
    engine.plan = lambda source, **options: asked.update(options) or report
    capfd.readouterr()
    assert main(("plan", "somewhere", "--json")) == 0
    assert '"format": "gguf"' in capfd.readouterr().out and asked["layout"] == "auto"
