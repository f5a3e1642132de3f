"""A load by several processes: this process's identity, and the connection to the others.

If peers do not connect, `jax.distributed` aborts the process with a C++ stack trace. The time limit here is shorter, so
that the process ends with a readable error first.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shardload.errors import MeshError
from shardload.sharding.mesh import MeshSpec

WAIT_S = 300.0
"""Seconds to wait for all processes to connect."""
GiveUp = Callable[[MeshError], int]
"""Reports an error, in a thread of its own, and returns the exit code."""


@dataclass(frozen=True, slots=True)
class Processes:
    """This process among those that load together; the names are those of `jax.distributed.initialize`."""

    coordinator_address: str
    """``host:port`` at which process 0 serves the others."""
    num_processes: int
    process_id: int

    @property
    def is_first(self) -> bool:
        """Whether this is process 0, which prints."""
        return self.process_id == 0

    def devices_of(self, mesh: MeshSpec) -> int:
        """Return the number of the mesh's devices per process.

        Raises:
            MeshError: When the devices cannot be divided equally.
        """
        if mesh.size % self.num_processes:
            raise MeshError(
                f"The mesh {mesh} has {mesh.size} devices, which {self.num_processes} processes cannot share evenly. "
                "Use a mesh whose size is a multiple of the number of processes"
            )
        return mesh.size // self.num_processes

    def meet(self, *, note: Callable[[str], None], give_up: GiveUp) -> None:
        """Set up `jax.distributed` before any other use of JAX; call ``give_up`` if other processes do not connect."""
        import jax

        others = "the other process" if self.num_processes == 2 else f"the {self.num_processes - 1} other processes"
        note(f"process {self.process_id} of {self.num_processes}; waiting for {others} at {self.coordinator_address}.")
        # JAX would handle SIGTERM to let training save once more; a command ends.
        jax.config.update("jax_enable_preemption_service", False)
        with _watched(self, give_up):
            jax.distributed.initialize(
                self.coordinator_address,
                self.num_processes,
                self.process_id,
                # JAX's own limit, which must not end the process before ours does.
                initialization_timeout=int(2 * WAIT_S) + 60,
            )


@contextlib.contextmanager
def _watched(processes: Processes, give_up: GiveUp) -> Iterator[None]:
    def miss() -> None:
        error = MeshError(
            f"Cannot connect the {processes.num_processes} processes at {processes.coordinator_address}: some have not "
            f"connected within {WAIT_S:.0f} s. Start each with the same --coordinator-address and --num-processes and "
            "with its own --process-id, from 0; process 0 runs on the machine of that address"
        )
        # The main thread is inside C++ code, where no exception reaches it.
        os._exit(give_up(error))

    watch = threading.Timer(WAIT_S, miss)
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()
