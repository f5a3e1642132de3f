"""The launcher of a run with `--distributed`: what its environment variables say of this process and the others.

    mpirun     Open MPI 4, which JAX knows, or another MPI, which JAX asks through mpi4py
    srun       Slurm; a shell of `salloc` and the script of `sbatch` have some of its variables, too
    Kubernetes an indexed Job or a JobSet; JAX asks the cluster for the number of processes
    none       JAX looks by itself: it knows Cloud TPUs

JAX connects the processes. Its search trusts any variable, so what it would wait for in vain is refused here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass

from shardload.errors import MeshError
from shardload.units import plural

_BY_HAND = "pass --coordinator-address, --num-processes and --process-id"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A kind of launcher."""

    title: str
    command: str
    """What starts the processes, as an imperative for messages."""
    rank: str
    """The variable with the number of the process, from 0."""
    size: str | None = None
    """The variable with the number of processes."""
    needed: tuple[str, ...] = ()
    """The other variables that JAX reads."""
    package: str | None = None
    """The package that JAX needs to learn more than the variables say."""
    method: str | None = None
    """``cluster_detection_method`` of `jax.distributed.initialize`; ``None`` lets JAX search."""

    def lacks_package(self) -> bool:
        """Whether the package that JAX needs is not installed."""
        return self.package is not None and importlib.util.find_spec(self.package) is None


_MPI_START = "Start the processes with mpirun"
OPEN_MPI = Launcher(
    "Open MPI",
    _MPI_START,
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    needed=("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_LOCAL_RANK"),
    method="ompi",
)
OPEN_MPI_5 = Launcher(
    "Open MPI", _MPI_START, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", package="mpi4py", method="mpi4py"
)
"""Version 5 no longer sets the variable with the address of ``mpirun``."""
MPI = Launcher("MPI", _MPI_START, "PMI_RANK", "PMI_SIZE", package="mpi4py", method="mpi4py")
SLURM = Launcher(
    "Slurm",
    "Start the processes with srun",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    needed=("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID"),
    method="slurm",
)
KUBERNETES = Launcher(
    "Kubernetes",
    'Start the pods with a JobSet or with a Job of completionMode "Indexed"',
    "JOB_COMPLETION_INDEX",
    package="kubernetes",
)


@dataclass(frozen=True, slots=True)
class Launched:
    """This process as its launcher started it; ``None`` for what only JAX can tell."""

    by: Launcher | None = None
    num_processes: int | None = None
    process_id: int | None = None


def launched(environ: Mapping[str, str]) -> Launched:
    """Return what the environment says of this process.

    Raises:
        MeshError: If variables are missing or contradict each other.
    """
    by = _launcher(environ)
    if by is None:
        return Launched()
    needed = [by.rank, *([by.size] if by.size else []), *by.needed]
    if missing := [name for name in needed if name not in environ]:
        raise _refused(by, f"the environment has no {', '.join(missing)}, expected {' and '.join(needed)}")
    return Launched(by, _number(by, by.size, environ), _checked_rank(by, environ))


def alone_among_several(environ: Mapping[str, str]) -> str | None:
    """Return a note for the first of several processes that one launcher started, if none was told of the others."""
    try:
        found = launched(environ)
    except MeshError:
        return None
    count = found.num_processes or 1
    if found.by is None or found.process_id != 0 or count < 2:
        return None
    return (
        f"{found.by.title} started {plural(count, 'process')}, and each loads everything by itself. With "
        "--distributed they load together."
    )


def _launcher(environ: Mapping[str, str]) -> Launcher | None:
    # Before Slurm: where mpirun runs in a Slurm job, processes inherit the Slurm variables of mpirun's own helpers.
    if "OMPI_COMM_WORLD_SIZE" in environ:
        return OPEN_MPI if "OMPI_MCA_orte_hnp_uri" in environ else OPEN_MPI_5
    # srun sets PMI variables, too: then they agree with its own.
    if "PMI_SIZE" in environ and environ["PMI_SIZE"] != environ.get("SLURM_NTASKS"):
        return MPI
    if "SLURM_JOB_ID" in environ:
        return SLURM
    # Cloud TPUs on Kubernetes have variables of their own, which JAX reads first.
    if "KUBERNETES_SERVICE_HOST" in environ and "TPU_WORKER_HOSTNAMES" not in environ:
        return KUBERNETES
    return None


def _checked_rank(by: Launcher, environ: Mapping[str, str]) -> int | None:
    size, rank = _number(by, by.size, environ), _number(by, by.rank, environ)
    if size is not None and rank is not None and rank >= size:
        raise _refused(by, f"{by.rank} is {rank}, expected less than {by.size}, which is {size}")
    # In a shell of salloc, which may be a step of its own, SLURM_NTASKS counts the tasks of the whole job.
    in_step = environ.get("SLURM_STEP_NUM_TASKS", str(size)) if by is SLURM else str(size)
    if in_step != str(size):
        raise _refused(by, f"SLURM_STEP_NUM_TASKS is {in_step}, expected {size} as in SLURM_NTASKS")
    return rank


def _number(by: Launcher, name: str | None, environ: Mapping[str, str]) -> int | None:
    if name is None:
        return None
    if not (environ[name].isascii() and environ[name].isdecimal()):
        raise _refused(by, f"{name} is {environ[name]!r}, expected a number")
    return int(environ[name])


def _refused(by: Launcher, found: str) -> MeshError:
    return MeshError(f"Cannot tell which processes {by.title} started: {found}. {by.command}, or {_BY_HAND}")
