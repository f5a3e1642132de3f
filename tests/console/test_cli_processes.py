"""`shardload load` by several processes: real ones, on loopback, each with its part of the mesh."""

import contextlib
import shutil
import signal
import subprocess
import time

import pytest
import typer
import warm_start
from cli_fakes import COMMAND, Done, environment, run
from process_runs import free_port

from shardload.console import options
from shardload.console.launch import Processes
from shardload.errors import MeshError
from shardload.sharding.mesh import MeshSpec
from shardload.synth import synth

pytestmark = pytest.mark.slow

QUIET = {"TF_CPP_MIN_LOG_LEVEL": "3", "GLOG_minloglevel": "3", "GRPC_VERBOSITY": "ERROR", "JAX_PLATFORMS": "cpu"}
"""What the command sets before JAX is imported."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return synth("gemma2_2b", scale=0.05, format="safetensors", directory=tmp_path_factory.mktemp("checkpoint"))


@contextlib.contextmanager
def started(*commands):
    """The same load by as many processes as there are commands, each with arguments of its own."""
    together = ["--platform", "cpu", "--coordinator-address", f"127.0.0.1:{free_port()}"]
    together += ["--num-processes", str(len(commands)), "--process-id"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment()}
    running = [
        subprocess.Popen([*COMMAND, "load", *map(str, command), *together, str(index)], **pipes)
        for index, command in enumerate(commands)
    ]
    try:
        yield running
    finally:
        for one in running:
            one.kill()
            one.communicate()


def ended(commands):
    with started(*commands) as running:
        said = [one.communicate(timeout=120) for one in running]
        heard = [(out, "\n".join(w for w in err.splitlines() if w and "[Gloo]" not in w)) for out, err in said]
        return [Done(one.returncode, *words) for one, words in zip(running, heard, strict=True)]


@pytest.mark.parametrize("mesh", [pytest.param("1x8", marks=pytest.mark.full), "2x4"])
def test_each_reads_what_its_devices_need_and_the_first_reports_for_all(mesh, checkpoint):
    first, second = ended([(checkpoint, "--mesh", mesh, "--json")] * 2)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert (second.stdout, second.stderr) == ("", "")
    found = first.json
    assert [p["process"] for p in found["processes"]] == [0, 1]
    for key in ("needed", "read"):
        assert sum(p["bytes"][key] for p in found["processes"]) == found["bytes"][key]
    assert len(found["devices"]) == 8
    if mesh == "1x8":  # halves; biases and scales are small, and both have them
        assert max(p["bytes"]["needed"] for p in found["processes"]) < 0.51 * found["weight_bytes"]
    else:  # each has the whole model, on four devices
        assert [p["bytes"]["needed"] for p in found["processes"]] == [found["weight_bytes"]] * 2


def test_a_table_for_people(checkpoint):
    first, second = ended([(checkpoint, "--mesh", "1x2")] * 2)
    assert (first.code, second.code) == (0, 0), first.stderr + second.stderr
    assert [line.split()[:1] for line in first.stdout.splitlines()[-3:]] == [["process"], ["0"], ["1"]]
    assert "process 0 of 2; waiting for the other process at 127.0.0.1:" in first.stderr


def test_what_fails_on_one_fails_on_all(checkpoint, tmp_path):
    damaged = tmp_path / "damaged"
    shutil.copytree(checkpoint, damaged)
    (file,) = damaged.glob("*.safetensors")
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 1000)
    first, second = ended([(checkpoint, "--mesh", "1x4", "--json"), (damaged, "--mesh", "1x4", "--json")])
    assert (first.code, second.code) == (1, 1) and str(file) in second.stderr
    assert "On process 1: " in first.stderr and str(file) in first.stderr
    assert first.json["error"]["type"] == second.json["error"]["type"] == "TruncatedSourceError"


def test_ctrl_c_ends_the_waiting_for_others(checkpoint):
    with started((checkpoint, "--mesh", "1x2"), ("no such thing", "--mesh", "1x2")) as (first, second):
        assert second.wait(60) == 1  # it never comes
        until = time.monotonic() + 60
        while "waiting for" not in first.stderr.readline() and time.monotonic() < until:
            pass
        first.send_signal(signal.SIGINT)
        assert first.wait(20) == 130


def test_those_that_never_come_are_missed_in_a_sentence(checkpoint):
    address = (
        "--initialization-timeout", "2", "--coordinator-address", f"127.0.0.1:{free_port()}", "--num-processes", "2",
        "--process-id", "0",
    )  # fmt: skip
    done = run((*COMMAND, "load", str(checkpoint), "--mesh=1x2", "--json", *address))
    assert done.code == 1 and "Cannot connect the 2 processes at 127.0.0.1:" in done.stderr
    assert "some have not connected within 2 s (--initialization-timeout)" in done.stderr
    assert "--process-id" in done.stderr and "@ " not in done.stderr  # a stack of C++ frames
    assert done.json["error"]["type"] == "MeshError"


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (("host:1", 2, None), "all three"), ((None, None, 0), "all three"), (("host", 2, 0), "host:1234"),
        (("host:0", 2, 0), "host:1234"), ((":12", 2, 0), "host:1234"), (("host:99999", 2, 0), "host:1234"),
        (("host:1", 2, 2), "numbered from 0"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other(given, named):
    with pytest.raises(options.typer.BadParameter, match=named):
        options.processes(*given)


def test_a_mesh_that_processes_cannot_share_is_refused():
    assert options.processes(None, None, None) is None
    assert options.processes("host:1", 3, 0, initialization_timeout=60).initialization_timeout == 60
    with pytest.raises(typer.BadParameter, match="several processes"):
        options.processes(None, None, None, initialization_timeout=60)
    with pytest.raises(MeshError, match="8 devices, which 3 processes cannot share evenly"):
        Processes("host:1", 3, 0).devices_of(MeshSpec.parse("1x8"))


@pytest.mark.parametrize("more", [("--prompt", "Hello", "--mesh", "1x2"), ()])
def test_what_several_processes_cannot_do(more, checkpoint):
    (done,) = ended([(checkpoint, *more)])
    assert done.code == 2
    assert ("--num-processes" in done.error) if more else ("A mesh is required" in done.error)


DIES = """
import os, signal, sys, time
from shardload.processes.heartbeats import Heartbeat
Heartbeat.__init__.__kwdefaults__["silent_s"] = 3.0  # not 15, for the test
from functools import partial
from shardload.console.failures import tell
from shardload.console.launch import Processes
from shardload.console.streams import Results
from shardload.errors import ShardloadError
from shardload.interrupts import exit_at_once
address, count, index, victim, when = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5]
def die():
    print("killed", time.time(), flush=True)
    if when != "interrupted":
        os.kill(os.getpid(), signal.SIGKILL)
    with exit_at_once(partial(Results(sys.stdout).interrupted, as_json=False)):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
try:
    Processes(address, count, index).meet(note=print, give_up=lambda error: 1)
    if index == victim and when == "importing":
        time.sleep(1)  # the others are connected, too
        die()
    from shardload.processes import Channel
    meeting = Channel("test")
    meeting.together(lambda: None)
    if index == victim:
        time.sleep(1.5)  # a beat of each
        die()
    meeting.together(lambda: None)
except ShardloadError as error:
    sys.exit(tell(error, json_wanted=False))
"""


@pytest.mark.parametrize(
    ("count", "victim", "when"),
    [
        (2, 0, "importing"), (2, 1, "importing"), (4, 0, "waiting"), (4, 3, "importing"), (2, 1, "interrupted"),
        (4, 3, "waiting"),
    ],
)  # fmt: skip
def test_a_killed_peer_is_missed_from_the_moment_it_is_connected(count, victim, when):
    address = f"127.0.0.1:{free_port()}"
    running = [
        warm_start.start(["-c", DIES, address, count, index, victim, when], env=environment(**QUIET))
        for index in range(count)
    ]
    said = [one.communicate(timeout=90) for one in running]
    ended = time.time()
    killed = float(said[victim][0].split()[-1])
    assert ended - killed < 30
    for index, (_, err) in enumerate(said):
        lines = [line for line in err.splitlines() if "[Gloo]" not in line]
        if index == victim and when == "interrupted":
            assert lines[-1].startswith("Interrupted") and running[index].returncode == 130
        elif index == victim:
            assert "most likely it was killed" in lines[-1]
        elif victim:
            assert f"Process {victim} (" in lines[-1] and "no heartbeat" in lines[-1]
        else:  # JAX aborts this process, and its stack trace is kept out
            assert "process 0 has ended, and JAX" in lines[-1] or "Process 0, which runs the coord" in lines[-1]
        assert len(lines) == 1, err
        assert running[index].returncode != 0
