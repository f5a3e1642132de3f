"""A disk of a few megabytes: a tmpfs, where this user may mount one."""

import subprocess
from contextlib import contextmanager

import pytest


@contextmanager
def small_disk(path, size):
    """Yield the folder ``path``, which has so much room; skip the test if nothing may be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "tmpfs", path]
    if subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("no small disk can be had here: this user may not mount one")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


@contextmanager
def filled(disk):
    """Leave no room on a disk meanwhile."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(bytes(1 << 16)):
                pass
        except OSError:
            pass
    yield
    filler.unlink()
