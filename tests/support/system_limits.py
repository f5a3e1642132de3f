"""Real limits of this process, for the length of a block."""

import os
import resource
from contextlib import contextmanager


@contextmanager
def few_files(spare):
    """Let this process open only ``spare`` more files at a time."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    probe = os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free: that of the list itself, until now
    os.close(probe)
    used.discard(probe)
    limit = 0
    while spare > 0 or limit in used:  # the limit is on the number of a descriptor, not on how many there are
        spare -= limit not in used
        limit += 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
