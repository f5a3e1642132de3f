"""`--distributed`: the environments of launchers, faked as they set them, and what is wrong in them."""

import os

import pytest
import warm_start
from cli_fakes import with_fakes
from process_runs import job_of_a_free_port

from shardload.console import launch, options
from shardload.console.launch import alone_among_several
from shardload.errors import MeshError, MissingExtraError

SRUN = {
    "SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NODELIST": "node[07-08]",
    "SLURM_PROCID": "1", "SLURM_LOCALID": "0",
}  # fmt: skip
SALLOC = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_JOB_NODELIST": "node[07-08]"}
SBATCH = SALLOC | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODELIST": "node[07-08]"}
INTERACTIVE = SRUN | {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}
MPIRUN_5 = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}
MPIRUN = MPIRUN_5 | {"OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://127.0.0.1,10.1.0.1:34911;tcp6://[fd00::2]:42169"}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "1"}
POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "3"}


@pytest.fixture
def all_installed(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: name)


@pytest.fixture
def none_installed(monkeypatch):
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)


def found(environ, *given):
    return launch.detected(*(given or (None, None, None)), environ)


@pytest.mark.parametrize(
    ("environ", "method", "count", "index"),
    [
        (SRUN, "slurm", 2, 1),
        (MPIRUN, "ompi", 2, 1),
        (MPIRUN | SALLOC | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "ompi", 2, 1),
        (MPIRUN_5, "mpi4py", 2, 1),
        (MPIRUN_5 | SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "mpi4py", 2, 1),  # of mpirun's helper on a node
        (HYDRA, "mpi4py", 2, 1),
        (HYDRA | SRUN, "slurm", 2, 1),  # srun --mpi=pmi2
        (HYDRA | SRUN | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, "mpi4py", 2, 1),
        (POD, None, None, 3),
        ({}, None, None, None),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "TPU_WORKER_HOSTNAMES": "a,b"}, None, None, None),
    ],
)
def test_the_launcher_that_started_the_process_is_recognised(environ, method, count, index, all_installed):
    one = found(environ)
    assert (one.launcher and one.launcher.method, one.num_processes, one.process_id) == (method, count, index)


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        (SALLOC, "the environment has no SLURM_PROCID, SLURM_STEP_NODELIST, SLURM_LOCALID, expected .* with srun"),
        (SBATCH, "the environment has no SLURM_STEP_NODELIST, expected .* with srun"),
        (INTERACTIVE, "SLURM_STEP_NUM_TASKS is 1, expected 4 as in SLURM_NTASKS. Start the processes with srun"),
        (SRUN | {"SLURM_PROCID": "2"}, "SLURM_PROCID is 2, expected less than SLURM_NTASKS, which is 2"),
        (SRUN | {"SLURM_NTASKS": "2(x2)"}, r"SLURM_NTASKS is '2\(x2\)', expected a number"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "no OMPI_COMM_WORLD_RANK, expected .* with mpirun"),
        (MPIRUN | {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK is 2, expected less than"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 'no JOB_COMPLETION_INDEX, .* completionMode "Indexed"'),
    ],
)
def test_variables_that_are_missing_or_contradict_each_other(environ, said, all_installed):
    with pytest.raises(MeshError, match="Cannot tell which processes .* started: .*" + said):
        found(environ)


@pytest.mark.parametrize(("environ", "package"), [(MPIRUN_5, "mpi4py"), (HYDRA, "mpi4py"), (POD, "kubernetes")])
def test_what_jax_needs_to_ask_is_named_unless_it_need_not_ask(environ, package, none_installed):
    with pytest.raises(MissingExtraError, match=f"--distributed with .* needs the package '{package}'"):
        found(environ)
    known = found(environ, "host:1", 4, None)
    assert (known.coordinator_address, known.num_processes) == ("host:1", 4)
    assert known.process_id == int(environ.get("JOB_COMPLETION_INDEX", 1))


def test_options_take_precedence_and_all_three_need_no_launcher():
    assert found(SRUN, "host:1", 3, None) == launch.Processes("host:1", 3, 1, launch.SLURM)
    assert found(SALLOC, "host:1", 3, 2) == launch.Processes("host:1", 3, 2)
    with pytest.raises(options.typer.BadParameter, match="With --distributed"):
        options.processes("host:1", None, None)


def test_only_one_of_several_unasked_processes_says_so():
    assert "Slurm started 2 processes, and each loads" in alone_among_several(SRUN | {"SLURM_PROCID": "0"})
    assert "Open MPI started 2" in alone_among_several(MPIRUN_5 | {"OMPI_COMM_WORLD_RANK": "0"})
    for environ in (SRUN, SALLOC, SBATCH, INTERACTIVE, {}, POD, SRUN | {"SLURM_NTASKS": "many"}):
        assert alone_among_several(environ) is None


MEET = """
import os, sys
from shardload.console.launch import detected
one = detected(None, None, None, os.environ).meet(note=print, give_up=lambda error: sys.exit(str(error)))
print(one.coordinator_address, one.num_processes, one.process_id)
"""


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("title", ["Slurm", "Open MPI"])
def test_jax_connects_what_a_launcher_started(title, count):
    job = job_of_a_free_port()
    if title == "Slurm":
        for_all = SRUN | {"SLURM_JOB_ID": f"{job}", "SLURM_STEP_NODELIST": "localhost"}
        for_all["SLURM_STEP_NUM_TASKS"], size, rank = f"{count}", "SLURM_NTASKS", "SLURM_PROCID"
    else:
        for_all = MPIRUN | {"OMPI_MCA_orte_hnp_uri": f"{job * 4096}.0;tcp://127.0.0.1:1"}
        size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    started = [
        warm_start.start(["-c", MEET], env=os.environ | for_all | {size: f"{count}", rank: f"{index}"})
        for index in range(count)
    ]
    for index, one in enumerate(started):
        out, err = one.communicate(timeout=60)
        assert one.returncode == 0, err
        assert out.splitlines()[0].startswith(f"process {index} of {count}, started by {title}")
        assert out.splitlines()[-1].split()[1:] == [str(count), str(index)]
        assert f":{61440 + job} " in out


@pytest.mark.slow
def test_no_launcher_at_all_is_an_error_not_a_wait():
    done = warm_start.run(["-c", MEET], env={k: v for k, v in os.environ.items() if not k.startswith("KUBE")})
    assert done.returncode == 1
    assert "Cannot connect the processes: " in done.stderr and "is for processes started by Slurm" in done.stderr


@pytest.mark.slow
def test_the_command_says_that_processes_are_alone_and_loads():
    setup = "engine.load = lambda *a, **k: loads(*a, **k)"
    done = with_fakes(setup, "load", "fake.gguf", "--mesh=1x1", "--platform=cpu", **SRUN | {"SLURM_PROCID": "0"})
    assert done.code == 0, done.stderr
    assert "note: Slurm started 2 processes" in done.stderr
    refused = with_fakes("", "load", "fake.gguf", "--mesh=1x1", "--distributed", "--json", **SBATCH)
    assert refused.code == 1 and refused.json["error"]["type"] == "MeshError"
