"""The recipes of docs/how-to for clusters and notebooks, as far as one machine can run them, and quoted messages."""

import contextlib
import itertools
import json
import os
import re
import shutil
import ssl
import subprocess
import sys
from pathlib import Path

import kubernetes_fields
import pytest
import warm_start
import yaml
from bucket_server import bucket
from gguf_tokenizers import add_pieces, gguf_with_tokenizer
from process_runs import job_of_a_free_port
from quoted_messages import is_said

from shardload.console import launch
from shardload.runs.listing import list_steps

ROOT = Path(__file__).parents[2]
HOW_TO = ROOT / "docs" / "how-to"
RECIPES = [
    "load-on-kubernetes",
    "train-on-kubernetes",
    "load-on-a-tpu-pod",
    "load-on-slurm",
    "train-on-slurm",
    "two-machines",
    "load-in-a-notebook",
]
SERVERS = [
    "serve-checkpoints",
    "secure-a-server",
    "serve-buckets-with-a-cache",
    "serve-several-machines",
    "verify-and-prefetch",
    "operate-a-server",
    "serve-on-kubernetes",
]


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


@pytest.mark.parametrize("name", [name for name in [*RECIPES, *SERVERS] if scripts(name)])
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


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_quote_messages_that_exist(name):
    rows = page(name).partition("## When it hangs")[2].splitlines()
    quoted = [found for row in rows for found in re.findall(r"^\| `([^`]*)`", row)]
    outside = {"Pending", "ContainerCreating"}
    assert [one for one in quoted if one not in outside and not is_said(one)] == []


# ---- Kubernetes ----------------------------------------------------------------------------------


def kubernetes(name):
    return {found["kind"]: found for found in kubernetes_fields.objects_of(f"how-to/{name}.md")}


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("load-on-kubernetes", {"Service", "Job"}),
        ("start-several-processes", {"Service", "Job"}),
        ("serve-on-kubernetes", {"Service", "DaemonSet"}),
    ],
)
def test_kubernetes_objects_have_only_fields_that_exist(name, kinds):
    forms = json.loads(kubernetes_fields.STORED.read_text())
    found = kubernetes(name)
    assert found.keys() == kinds
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


def job_set_form():
    """The fields of JobSet v1alpha2 (github.com/kubernetes-sigs/jobset, api/jobset/v1alpha2) that the page uses."""
    job = json.loads(kubernetes_fields.STORED.read_text())["batch/v1 Job"]["fields"]["spec"]
    template = {"required": [], "fields": {"spec": job}}
    replicated = {"required": ["name", "template"], "fields": {"name": "string", "template": template}}
    rule = {"name": "string", "action": "string", "onJobFailureReasons": {"items": "string"}}
    rules = {"items": {"required": ["name", "action"], "fields": rule}}
    policy = {"required": [], "fields": {"maxRestarts": "integer", "rules": rules}}
    spec = {"required": [], "fields": {"failurePolicy": policy, "replicatedJobs": {"items": replicated}}}
    metadata = {"required": [], "fields": {"name": "string"}}
    fields = {"apiVersion": "string", "kind": "string", "metadata": metadata, "spec": spec}
    return {"required": [], "fields": fields}


@pytest.fixture
def job_set():
    (found,) = kubernetes_fields.job_sets_of("how-to/train-on-kubernetes.md")
    return found


def test_a_job_set_has_only_fields_that_exist(job_set):
    assert kubernetes_fields.title_of(job_set) == "jobset.x-k8s.io/v1alpha2 JobSet"
    assert kubernetes_fields.problems(job_set, job_set_form()) == []
    job_set["spec"]["failurePolicy"]["maxRestart"] = 3
    assert kubernetes_fields.problems(job_set, job_set_form(), "JobSet") == [
        "JobSet.spec.failurePolicy has an unknown field maxRestart"
    ]


def test_pods_of_a_job_set_have_names_and_room(job_set):
    (replicated,) = job_set["spec"]["replicatedJobs"]
    job, name = replicated["template"]["spec"], job_set["metadata"]["name"]
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    environ = {one["name"]: one["value"] for one in container["env"]}
    assert environ["COORDINATOR"] == f"{name}-{replicated['name']}-0-0.{name}:1234"
    assert int(environ["PROCESSES"]) == job["completions"] == job["parallelism"]
    mounts = {one["name"]: one["mountPath"] for one in container["volumeMounts"]}
    volumes = {one["name"]: one["emptyDir"] for one in pod["volumes"]}
    assert mounts.keys() == volumes.keys() and environ["SHARDLOAD_STAGING"] == mounts["staging"]
    room, limit = volumes["staging"]["sizeLimit"], container["resources"]["limits"]["ephemeral-storage"]
    assert int(room.removesuffix("Gi")) < int(limit.removesuffix("Gi"))
    assert job["backoffLimit"] == 0 and pod["restartPolicy"] == "Never"


# ---- a server ------------------------------------------------------------------------------------


def blocks(language, text):
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def test_servers_are_started_with_options_that_exist():
    reference = (ROOT / "docs" / "reference" / "cli" / "serve.md").read_text()
    table = reference.partition("## shardload serve")[2].partition("\n## ")[0]
    text = "".join(map(page, SERVERS)).replace("\\\n", " ")
    (pod,) = kubernetes("serve-on-kubernetes")["DaemonSet"]["spec"]["template"]["spec"]["containers"]
    lines = [line.partition("shardload serve ")[2] for line in text.splitlines()] + pod["command"] + pod["args"]
    used = {option for line in lines for option in re.findall(r"--[a-z-]+", line)}
    assert "--token-file" in used and {option for option in used if f"`{option}" not in table} == set()


def test_a_server_may_finish_before_it_is_killed():
    spec = kubernetes("serve-on-kubernetes")["DaemonSet"]["spec"]["template"]["spec"]
    grace = dict(itertools.pairwise(spec["containers"][0]["command"]))["--grace"]
    unit = blocks("ini", page("operate-a-server"))[0]
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert min(int(stop), spec["terminationGracePeriodSeconds"]) > int(grace)


def test_alerts_watch_metrics_that_exist():
    (alerts,) = [block for block in blocks("yaml", page("monitor-a-server")) if block.startswith("groups:")]
    rules = [rule for group in yaml.safe_load(alerts)["groups"] for rule in group["rules"]]
    watched = {name for rule in rules for name in re.findall(r"\b(?:shardload_\w+|up)\b", rule["expr"])}
    there = set(re.findall(r"`(shardload_\w+)", page("monitor-a-server")))  # which are compared with a server's
    assert len(rules) == len(watched) == 6 and watched <= there | {"up"}


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_the_commands_for_certificates_make_ones_that_are_trusted(tmp_path):
    (commands,) = [script for script in scripts("secure-a-server") if "openssl req" in script]
    done = run_script(f"set -e\n{commands}", cwd=tmp_path)
    assert done.returncode == 0 and "cert.pem: OK" in done.stdout, done.stderr
    client = ssl.create_default_context(cafile=tmp_path / "ca.pem")
    server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    server.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    for name in ("host1", "10.0.0.1"):
        to_client, to_server = ssl.MemoryBIO(), ssl.MemoryBIO()
        one = client.wrap_bio(to_client, to_server, server_hostname=name)
        other = server.wrap_bio(to_server, to_client, server_side=True)
        for side in (one, other, one):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
        assert one.version() == "TLSv1.3" and one.getpeercert()["subject"] == ((("commonName", "host1"),),)


# ---- buckets -------------------------------------------------------------------------------------


def test_policies_and_rules_of_buckets_are_json():
    text = page("bucket-permissions")
    policy, amazon, google = map(json.loads, re.findall(r"^```json\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    actions = {action for one in policy["Statement"] for action in [one["Action"]] if isinstance(action, str)}
    actions |= {action for one in policy["Statement"] if isinstance(one["Action"], list) for action in one["Action"]}
    assert actions == set(re.findall(r"`(s3:\w+)`", text))
    assert amazon["Rules"][0]["AbortIncompleteMultipartUpload"] == {"DaysAfterInitiation": 1}
    assert [one["action"]["type"] for one in google["rule"]] == ["AbortIncompleteMultipartUpload", "Delete"]


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
    done = run_script(scripts("load-on-slurm")[0], source, "2x2", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0: note: process 0 of 2, started by Slurm; waiting for the other process" in done.stdout
    assert "0: Mesh          batch=2,model=2 (4 cpu devices)" in done.stdout


TRAINING = """
import grain, keras, numpy as np

def distribution():
    layout = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 2), ("batch", "model")))
    layout[".*kernel"] = (None, "model")
    options = {"batch_dim_name": "batch", "auto_shard_dataset": False}
    return keras.distribution.ModelParallel(layout_map=layout, **options)

def build_model():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64), keras.layers.Dense(8)])
    model.compile("adam", "mse")
    return model

def examples():
    x = np.random.default_rng(0).random((256, 64), "float32")
    return grain.MapDataset.source(list(zip(x, x[:, :8]))).shuffle(seed=1).repeat(1000)
"""

PREEMPTING_SRUN = """#!/bin/bash
# Starts two tasks, and sends SIGTERM to the second one when there is a step that was not there before.
[[ "$1 $2" == "--kill-on-bad-exit=0 --label" ]] || exit 9
shift 2
export SLURM_NTASKS=2 SLURM_STEP_NUM_TASKS=2 SLURM_STEP_NODELIST=localhost SLURM_LOCALID=0
before=$(ls -d "$BUCKET"/run/*/shardload/digests.json 2>/dev/null)
SLURM_PROCID=0 "$@" &
first=$!
SLURM_PROCID=1 "$@" &
until now=$(ls -d "$BUCKET"/run/*/shardload/digests.json 2>/dev/null) && [[ "$now" != "$before" ]]; do
    kill -0 $first 2>/dev/null || break
    sleep 0.2
done
kill -TERM $!
highest=0
for task in $first $!; do
    code=0
    wait $task || code=$?
    ((code > highest)) && highest=$code
done
exit $highest
"""


def training_script(name):
    """The script of a page. Its fence says ``py``: test_docs_examples runs blocks of ``python`` in its own process."""
    (text,) = re.findall(r"^```py\n(.*?)^```", page(name), re.DOTALL | re.MULTILINE)
    return text


def test_both_training_scripts_differ_only_in_how_they_connect():
    slurm, kubernetes = map(training_script, ["train-on-slurm", "train-on-kubernetes"])
    after = [text.partition("import shardload")[2].partition('"gs://BUCKET/run"') for text in (slurm, kubernetes)]
    assert after[1][1] and after[0][0].replace("s3://", "gs://") == "".join(after[1])
    compile(kubernetes, "train.py", "exec")


@pytest.fixture
def train_on_slurm(commands, tmp_path, monkeypatch):
    """Run the page's batch script ``times`` times with stand-ins, saving every 20 batches; return runs and steps."""
    job = job_of_a_free_port()
    monkeypatch.setenv("SLURM_JOB_ID", str(job))
    monkeypatch.setenv("BUCKET", str(tmp_path / "bucket"))
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    (tmp_path / "bucket").mkdir()

    def run(srun, training, times):
        made = {
            "srun": srun,
            "scontrol": f'#!/bin/bash\necho "$@" >> {tmp_path}/queued\n',
            "python": f'#!/bin/bash\nexec {sys.executable} "$@"\n',
        }
        for name, text in made.items():
            (commands / name).write_text(text)
            (commands / name).chmod(0o755)
        (tmp_path / "my_training.py").write_text(training)
        batch = scripts("train-on-slurm")[0].replace("/local/", f"{tmp_path}/local/")
        with bucket(tmp_path / "bucket", monkeypatch) as server:
            smaller = {
                "s3://BUCKET": server.s3,
                "global_batch_size=512": "global_batch_size=32",
                "save_freq=500": "save_freq=20",
            }
            train = training_script("train-on-slurm")
            for old, new in smaller.items():
                assert old in train
                train = train.replace(old, new)
            (tmp_path / "train.py").write_text(train)
            runs, steps = [], []
            for _ in range(times):
                runs.append(run_script(batch, cwd=tmp_path))
                steps.append([info.step for info in list_steps(f"{server.s3}/run")])
        return runs, steps

    return run


@pytest.mark.slow
def test_a_preempted_slurm_job_is_queued_again_and_continues(train_on_slurm, tmp_path):
    (first, second), (steps, later) = train_on_slurm(PREEMPTING_SRUN, TRAINING, 2)
    assert (first.returncode, second.returncode) == (143, 143), first.stdout + first.stderr + second.stderr
    assert f"Resumed step {steps[-1]} of " in second.stdout and later[-1] > steps[-1]
    job = os.environ["SLURM_JOB_ID"]
    assert (tmp_path / "queued").read_text() == f"requeue {job}\n" * 2
    assert len(list((tmp_path / "local" / f"shardload-{job}").iterdir())) == 1  # where the page says


@pytest.mark.slow
def test_a_slurm_job_saves_the_end_of_training_and_is_not_queued_again(train_on_slurm, tmp_path):
    assert "repeat(1000)" in TRAINING and "epochs=10" in training_script("train-on-slurm")
    short = TRAINING.replace(".repeat(1000)", "").replace("random((256", "random((224")  # 7 batches in an epoch
    (run,), (steps,) = train_on_slurm(PREEMPTING_SRUN.replace("kill -TERM $!\n", ""), short, 1)
    assert run.returncode == 0, run.stdout + run.stderr
    assert steps == [60, 70]
    assert not (tmp_path / "queued").exists()


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
