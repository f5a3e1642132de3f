"""XLA flags with which programs that are compiled more than they are run compile quickly on the CPU."""

from __future__ import annotations

from importlib import metadata


def quick_to_compile(*, wait_s: int) -> str:
    """Return the value of ``XLA_FLAGS`` for the jaxlib that is installed, which is not imported.

    XLA ends the process at a flag that it does not know, before anything is printed that names a test.

    Args:
        wait_s: How long simulated devices wait for each other; XLA's own limit is 40 s.
    """
    flags = [
        "--xla_backend_optimization_level=0",
        "--xla_cpu_parallel_codegen_split_count=1",
        f"--xla_cpu_collective_call_terminate_timeout_seconds={wait_s}",
    ]
    # From 0.11.1 on, there are only fusion emitters, and no flag for them.
    if _version("jaxlib") < (0, 11, 1):
        flags.append("--xla_cpu_use_fusion_emitters=false")
    return " ".join(flags)


def _version(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in metadata.version(package).split(".")[:3] if part.isdigit())
