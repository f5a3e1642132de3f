"""The recipes of docs/how-to for clusters and notebooks, as far as one machine can run them, and quoted messages."""

import ast
import functools
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_fields
import pytest
import warm_start
from gguf_tokenizers import add_pieces, gguf_with_tokenizer
from process_runs import job_of_a_free_port

from shardload.console import launch
from shardload.runs.listing import list_steps

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"
RECIPES = ["load-on-kubernetes", "load-on-a-tpu-pod", "load-on-slurm", "two-machines", "load-in-a-notebook"]


def page(name):
    return (HOW_TO / f"{name}.md").read_text()


def scripts(name):
    return re.findall(r"^```bash\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)


# ---- every recipe --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_what_was_tried_what_to_expect_and_what_to_look_at(name):
    text = page(name)
    assert re.search(r"[Tt]ried|not run", text) and "## What to expect" in text
    assert "## When it hangs or fails" in text and "(troubleshooting.md)" in text


@pytest.mark.parametrize("name", [name for name in RECIPES if scripts(name)])
def test_the_scripts_of_a_recipe_are_valid(name):
    for script in scripts(name):
        done = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_recipes_use_options_that_exist():
    said = warm_start.run(["-m", "shardload", "load", "--help"], env=os.environ | {"COLUMNS": "200"}, check=True).stdout
    commands = [
        line for name in RECIPES for line in page(name).replace("\\\n", " ").splitlines() if "shardload load" in line
    ]
    used = {option for line in commands for option in re.findall(r"--[a-z-]+", line.partition("shardload load")[2])}
    assert "--distributed" in used and {option for option in used if option not in said} == set()


# ---- quoted messages -----------------------------------------------------------------------------


def texts_in(node):
    """The texts that code makes, with ``…`` for what it inserts."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=values):
            return "".join(map(texts_in, values))
        case ast.BinOp(left=left, right=right):
            return texts_in(left) + texts_in(right)
    return "…"


@functools.cache
def package_texts():
    every = [ast.walk(ast.parse(path.read_text())) for path in (ROOT / "shardload").rglob("*.py")]
    kinds = (ast.Constant, ast.JoinedStr, ast.BinOp)
    return {texts_in(node) for nodes in every for node in nodes if isinstance(node, kinds)}


def quoted_messages():
    """The first column of tables of messages."""
    text = page("troubleshooting")
    rows = re.findall(r"^\| (`[^|]*`) \| [^|]* \| [^|]* \|$", text, re.MULTILINE)
    return [quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row)]


def is_said(message):
    """Whether one text of the package contains the parts of a message between ``…`` and numbers, in order."""
    parts = [re.escape(part.strip()) for part in re.split(r"…|\d+", message) if part.strip()]
    pattern = re.compile(".*".join(parts), re.DOTALL)
    return any(pattern.search(text) for text in package_texts())


def test_each_quoted_message_is_in_the_package():
    messages = quoted_messages()
    assert len(messages) > 50
    assert [message for message in messages if not is_said(message)] == []


def test_a_message_that_nobody_says_is_found():
    assert not is_said("The moon … is made of green cheese")


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_quote_messages_that_exist(name):
    rows = page(name).partition("## When it hangs")[2].splitlines()
    quoted = [found for row in rows for found in re.findall(r"^\| `([^`]*)`", row)]
    outside = {"Pending", "ContainerCreating"}
    assert [one for one in quoted if one not in outside and not is_said(one)] == []


# ---- Kubernetes ----------------------------------------------------------------------------------


def kubernetes(name):
    return {found["kind"]: found for found in kubernetes_fields.objects_of(f"how-to/{name}.md")}


@pytest.mark.parametrize("name", ["load-on-kubernetes", "start-several-processes"])
def test_kubernetes_objects_have_only_fields_that_exist(name):
    forms = json.loads(kubernetes_fields.STORED.read_text())
    found = kubernetes(name)
    assert found.keys() == {"Service", "Job"}
    for one in found.values():
        assert kubernetes_fields.problems(one, forms[kubernetes_fields.title_of(one)]) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"completions": "2"}, "Job.spec.completions is '2', expected integer"),
        ({"completion": 2}, "Job.spec has an unknown field completion"),
        ({"template": None}, "Job.spec has no template, which is required"),
        ({"backoffLimit": False}, "Job.spec.backoffLimit is False, expected integer"),
    ],
)
def test_what_is_wrong_in_an_object_is_found(change, said):
    job = kubernetes("load-on-kubernetes")["Job"]
    job["spec"] = {key: value for key, value in (job["spec"] | change).items() if value is not None}
    form = json.loads(kubernetes_fields.STORED.read_text())["batch/v1 Job"]
    assert kubernetes_fields.problems(job, form, "Job") == [said]


@pytest.mark.parametrize("name", ["load-on-kubernetes", "start-several-processes"])
def test_pods_find_each_other_by_the_names_in_their_command(name):
    found = kubernetes(name)
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]["spec"]
    container = pod["containers"][0]
    words = [*container.get("command", ()), *container["args"]]
    options = dict(itertools.pairwise(words))
    assert service["spec"] == {
        "clusterIP": "None", "publishNotReadyAddresses": True, "selector": {"job-name": job["metadata"]["name"]},
    }  # fmt: skip
    assert pod["subdomain"] == service["metadata"]["name"]
    assert options["--coordinator-address"] == f"{job['metadata']['name']}-0.{pod['subdomain']}:1234"
    assert int(options["--num-processes"]) == job["spec"]["completions"] == job["spec"]["parallelism"]
    environ = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    one = launch.detected(options["--coordinator-address"], int(options["--num-processes"]), None, environ)
    assert (one.num_processes, one.process_id) == (2, 1)
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    assert mounted == {volume["name"] for volume in pod.get("volumes", ())}


# ---- Slurm, two networks, notebooks: run ---------------------------------------------------------


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A small language model with a tokenizer."""
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        return gguf_with_tokenizer(folder, patch, "gemma3_text", add_pieces, vocab_size=1024)


SRUN = """#!/bin/bash
# Starts two tasks with the variables that Slurm sets, as the options of the script ask.
[[ "$1 $2" == "--kill-on-bad-exit=1 --label" ]] || exit 9
shift 2
export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_LOCALID=0
for SLURM_PROCID in 0 1; do
    export SLURM_PROCID
    "$@" --platform cpu 2>&1 | sed "s/^/$SLURM_PROCID: /" &
done
wait -n && wait -n
"""


@pytest.fixture
def commands(tmp_path, monkeypatch):
    """A folder for commands that come first in PATH, with ``shardload`` of this environment."""
    folder = tmp_path / "bin"
    folder.mkdir()
    own = folder / "shardload"
    own.write_text(f'#!/bin/bash\nexec {sys.executable} -m shardload "$@"\n')
    own.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return folder


def run_script(text, *arguments, cwd):
    (cwd / "script").write_text(text)
    command = ["bash", "script", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=300, check=False)


@pytest.mark.slow
def test_the_slurm_script_loads_with_two_tasks(source, commands, tmp_path, monkeypatch):
    (commands / "srun").write_text(SRUN)
    (commands / "srun").chmod(0o755)
    monkeypatch.setenv("SLURM_JOB_ID", str(job_of_a_free_port()))
    (script,) = scripts("load-on-slurm")
    done = run_script(script, source, "2x2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0: note: process 0 of 2, started by Slurm; waiting for the other process" in done.stdout
    assert "0: Mesh          batch=2,model=2 (4 cpu devices)" in done.stdout


def can_make_networks():
    tried = "ip netns add shardload-try && ip netns delete shardload-try"
    return subprocess.run(tried, shell=True, capture_output=True, check=False).returncode == 0


@pytest.mark.slow
@pytest.mark.skipif(not can_make_networks(), reason="needs root, ip and network namespaces")
def test_two_processes_in_two_networks_load_together(source, commands, tmp_path):
    script = scripts("two-machines")[1]
    done = run_script(script, source, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "process 0 of 2; waiting for the other process at 10.77.0.10:1234" in done.stderr
    assert re.search(r"^1 +\S+ \w+ +\S+ \w+ +\S+ s$", done.stdout, re.MULTILINE)  # what process 1 read
    assert "host0" not in subprocess.run(["ip", "netns", "list"], text=True, capture_output=True, check=True).stdout


DRIVE = """
import sys, types
colab = types.ModuleType("google.colab")
colab.drive = types.SimpleNamespace(mount=lambda path: None)
sys.modules["google.colab"] = colab
import jax
jax.config.update("jax_num_cpu_devices", 8)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["colab", "kaggle"])
def test_the_cells_of_a_notebook_run_in_order(name, source, tmp_path):
    notebook = json.loads((ROOT / "examples" / "notebooks" / f"{name}.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell.get("outputs", []) == [] for cell in notebook["cells"])
    code = "\n".join(cells)
    code = re.sub(r"^%pip .*$", "", code, flags=re.MULTILINE)
    code = re.sub(r'^SOURCE = ".*"$', f"SOURCE = {str(source)!r}", code, flags=re.MULTILINE)
    code = re.sub(r'^KEEP = ".*"$', f"KEEP = {str(tmp_path)!r}", code, flags=re.MULTILINE)
    done = warm_start.run(["-c", DRIVE + code], cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "batch=1,model=8 (8 cpu devices)" in done.stdout and "restored" in done.stdout
    assert [info.step for info in list_steps(tmp_path / "run")] == [1]
