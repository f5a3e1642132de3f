"""A load by several processes: which launcher started them, what it tells each of them, and how they connect.

    mpirun     Open MPI 4, which JAX knows, or another MPI, which JAX asks through mpi4py
    srun       Slurm; a shell of `salloc` and the script of `sbatch` have some of its variables, too
    Kubernetes an indexed Job or a JobSet; JAX asks the cluster for the number of processes
    none       JAX looks by itself: it knows Cloud TPUs

JAX connects the processes. It trusts environment variables, even if it then waits in vain, so this module checks them
first. If some processes do not connect, JAX aborts the others with a C++ stack trace; this module's own time limit is
shorter, and ends them with a readable error.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from shardload.errors import MeshError, MissingExtraError, public_name
from shardload.sharding.mesh import MeshSpec
from shardload.units import plural

_BY_HAND = "pass --coordinator-address, --num-processes and --process-id"


@dataclass(frozen=True, slots=True)
class Launcher:
    """A way to start several processes (mpirun, srun, Kubernetes), and the environment variables that each then has."""

    title: str
    command: str
    """Sentence for error messages on how to start the processes: "Start the processes with mpirun"."""
    rank: str
    """Name of the environment variable that holds this process's own number, counted from 0."""
    size: str | None = None
    """Name of the environment variable that holds how many processes there are; ``None`` if there is no such
    variable."""
    needed: tuple[str, ...] = ()
    """Names of further environment variables that JAX needs to connect the processes; an error lists missing ones."""
    package: str | None = None
    """Python package by which JAX finds out what the variables do not tell; ``None`` if they tell everything."""
    method: str | None = None
    """Argument ``cluster_detection_method`` of `jax.distributed.initialize`; ``None`` lets JAX try all methods."""

    def lacks_package(self) -> bool:
        """Whether JAX needs a package for this launcher that is not installed."""
        return self.package is not None and importlib.util.find_spec(self.package) is None


_MPI_START = "Start the processes with mpirun"
_OPEN_MPI = Launcher(
    "Open MPI",
    _MPI_START,
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    needed=("OMPI_MCA_orte_hnp_uri", "OMPI_COMM_WORLD_LOCAL_RANK"),
    method="ompi",
)
_OPEN_MPI_5 = Launcher(
    "Open MPI", _MPI_START, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", package="mpi4py", method="mpi4py"
)
"""Open MPI from version 5 on. It does not set the variable with mpirun's address, so JAX asks MPI through mpi4py."""
MPI = Launcher("MPI", _MPI_START, "PMI_RANK", "PMI_SIZE", package="mpi4py", method="mpi4py")
SLURM = Launcher(
    "Slurm",
    "Start the processes with srun",
    "SLURM_PROCID",
    "SLURM_NTASKS",
    needed=("SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_LOCALID"),
    method="slurm",
)
_KUBERNETES = Launcher(
    "Kubernetes",
    'Start the pods with a JobSet or with a Job of completionMode "Indexed"',
    "JOB_COMPLETION_INDEX",
    package="kubernetes",
)


@dataclass(frozen=True, slots=True)
class Launched:
    """What a launcher's environment variables tell about this process; a field is ``None`` if they do not tell it."""

    by: Launcher | None = None
    num_processes: int | None = None
    process_id: int | None = None


def launched(environ: Mapping[str, str]) -> Launched:
    """Read from the environment which launcher started this process, and its number; raise if variables contradict."""
    by = _launcher(environ)
    if by is None:
        return Launched()
    needed = [by.rank, *([by.size] if by.size else []), *by.needed]
    if missing := [name for name in needed if name not in environ]:
        raise _refused(by, f"the environment has no {', '.join(missing)}, expected {' and '.join(needed)}")
    size, rank = _number(by, by.size, environ), _number(by, by.rank, environ)
    if size is not None and rank is not None and rank >= size:
        raise _refused(by, f"{by.rank} is {rank}, expected less than {by.size}, which is {size}")
    # In a shell of salloc, which may be a step of its own, SLURM_NTASKS counts the tasks of the whole job.
    in_step = environ.get("SLURM_STEP_NUM_TASKS", str(size)) if by is SLURM else str(size)
    if in_step != str(size):
        raise _refused(by, f"SLURM_STEP_NUM_TASKS is {in_step}, expected {size} as in SLURM_NTASKS")
    return Launched(by, size, rank)


def alone_among_several(environ: Mapping[str, str]) -> str | None:
    """Return a note for users if a launcher started several processes that do not load together; in the first only."""
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
        return _OPEN_MPI if "OMPI_MCA_orte_hnp_uri" in environ else _OPEN_MPI_5
    # srun sets PMI variables, too: then they agree with its own.
    if "PMI_SIZE" in environ and environ["PMI_SIZE"] != environ.get("SLURM_NTASKS"):
        return MPI
    if "SLURM_JOB_ID" in environ:
        return SLURM
    # Cloud TPUs on Kubernetes have variables of their own, which JAX reads first.
    if "KUBERNETES_SERVICE_HOST" in environ and "TPU_WORKER_HOSTNAMES" not in environ:
        return _KUBERNETES
    return None


def _number(by: Launcher, name: str | None, environ: Mapping[str, str]) -> int | None:
    if name is None:
        return None
    if not (environ[name].isascii() and environ[name].isdecimal()):
        raise _refused(by, f"{name} is {environ[name]!r}, expected a number")
    return int(environ[name])


def _refused(by: Launcher, found: str) -> MeshError:
    return MeshError(f"Cannot tell which processes {by.title} started: {found}. {by.command}, or {_BY_HAND}")


DEFAULT_WAIT_S = 300
"""Seconds to wait until all processes have connected, as long as JAX waits: pods of a job may start minutes apart."""
_DEAD_S = 60
"""Seconds after which JAX aborts this process if it has heard nothing from another process.

Once connected, each process also sends a message every second. By these, shardload notices a lost process after 15 s.
If this process waits inside JAX for the lost one, shardload ends it 8 s later, with a readable line. JAX's processes
send a message once in half of this time. So it notices a loss in the second half, after these 24 s in any case.
"""
GiveUp = Callable[[MeshError], int]
"""Function that reports why the processes did not connect, and returns the exit code; called in a thread of its own."""

_EACH_BY_HAND = (
    "Start each with the same --coordinator-address and --num-processes and with its own --process-id, from 0; process "
    "0 runs on the machine of that address"
)
_NO_LAUNCHER = (
    "--distributed is for processes started by Slurm, Open MPI, another MPI with mpi4py, Kubernetes or on a Cloud TPU"
)


@dataclass(frozen=True, slots=True)
class Processes:
    """Which of the processes that load together this is; fields are named as in `jax.distributed.initialize`.

    If a field is ``None``, JAX finds out the value in `meet`.
    """

    coordinator_address: str | None
    """Address ``host:port`` of process 0, to which all processes connect."""
    num_processes: int | None
    process_id: int | None
    launcher: Launcher | None = None
    """The launcher (mpirun, Slurm, …) that started the processes, if ``--distributed`` looked for one and found it."""
    initialization_timeout: int = DEFAULT_WAIT_S
    """Seconds to wait until all processes have connected; then this process ends with an error."""

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, the one that prints; before `meet`, also true if the number is not known yet."""
        return not self.process_id

    def devices_of(self, mesh: MeshSpec) -> int | None:
        """Return how many of a mesh's devices each process has; ``None`` while the number of processes is not known."""
        if self.num_processes is None:
            return None
        if mesh.size % self.num_processes:
            raise MeshError(
                f"The mesh {mesh} has {plural(mesh.size, 'device')}, which {plural(self.num_processes, 'process')} "
                "cannot share evenly. Use a mesh whose size is a multiple of the number of processes"
            )
        return mesh.size // self.num_processes

    def meet(self, *, note: Callable[[str], None], give_up: GiveUp) -> Processes:
        """Connect the processes by `jax.distributed`, before JAX is used; return this one, now with its number."""
        import jax

        note(_waiting(self))
        by = self.launcher
        # JAX would handle SIGTERM to let training save once more; a command ends.
        jax.config.update("jax_enable_preemption_service", False)
        with _watched(self, give_up):
            try:
                jax.distributed.initialize(
                    self.coordinator_address,
                    self.num_processes,
                    self.process_id,
                    # Without the package everything is known, and JAX must not look for more.
                    cluster_detection_method=by and ("deactivate" if by.lacks_package() else by.method),
                    # JAX's own limit, which must not end the process before ours does.
                    initialization_timeout=2 * self.initialization_timeout + 60,
                    heartbeat_timeout_seconds=_DEAD_S,
                )
            except Exception as error:  # JAX, MPI and the client of Kubernetes have many classes
                raise _not_connected(self, f"{public_name(error)}: {error}") from error
        # Imported late, because it imports JAX.
        from shardload import processes
        from shardload.processes.exit_reasons import exit_recorder

        # Before Keras is imported, which takes seconds: from here on, the end of this process is noticed and reported.
        exit_recorder().begin(holds_back=True)
        exit_recorder().note("shardload was starting")
        processes.begin(by_all=True)
        return Processes(processes.coordinator(), processes.count(), processes.index(), self.launcher)


def detected(
    coordinator_address: str | None, num_processes: int | None, process_id: int | None, environ: Mapping[str, str]
) -> Processes:
    """Return which of several processes this is; arguments that are ``None`` are read from the launcher's variables."""
    if coordinator_address is not None and num_processes is not None and process_id is not None:
        return Processes(coordinator_address, num_processes, process_id)
    found = launched(environ)
    count = found.num_processes if num_processes is None else num_processes
    index = found.process_id if process_id is None else process_id
    by = found.by
    if by is not None and by.lacks_package() and None in (coordinator_address, count, index):
        missing = ModuleNotFoundError(name=by.package)
        raise MissingExtraError.explaining(missing, needed_for=f"--distributed with {by.title}")
    return Processes(coordinator_address, count, index, by)


def _waiting(processes: Processes) -> str:
    count, index = processes.num_processes, processes.process_id
    me = "one of several processes" if index is None else f"process {index}"
    of = "" if count is None else f" of {count}"
    by = "" if processes.launcher is None else f", started by {processes.launcher.title}"
    if count == 1:
        return f"{me}{of}{by}."
    others = "the other process" if count == 2 else f"the {'' if count is None else f'{count - 1} '}other processes"
    at = "" if processes.coordinator_address is None else f" at {processes.coordinator_address}"
    return f"{me}{of}{by}; waiting for {others}{at}."


def _not_connected(processes: Processes, found: str) -> MeshError:
    count, by = processes.num_processes, processes.launcher
    which = "the processes" if count is None else f"the {plural(count, 'process')}"
    at = "" if processes.coordinator_address is None else f" at {processes.coordinator_address}"
    if by is not None:
        advice = f"{by.command}, all of this command"
    else:
        advice = f"{_NO_LAUNCHER}. {_EACH_BY_HAND}" if processes.coordinator_address is None else _EACH_BY_HAND
    return MeshError(f"Cannot connect {which}{at}: {found.rstrip('.')}. {advice}")


@contextlib.contextmanager
def _watched(processes: Processes, give_up: GiveUp) -> Iterator[None]:
    def miss() -> None:
        found = f"some have not connected within {processes.initialization_timeout} s"
        error = _not_connected(processes, f"{found} (--initialization-timeout)")
        # The main thread is inside C++ code, where no exception reaches it.
        os._exit(give_up(error))

    watch = threading.Timer(processes.initialization_timeout, miss)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
