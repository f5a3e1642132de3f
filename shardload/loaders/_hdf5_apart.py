"""HDF5 headers that may crash libhdf5, read in a process of their own: ``python -m shardload.loaders._hdf5_apart``.

A crash there is an error here. What comes back is `read_here`'s answer as a pickle, from our own code.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from shardload import errors
from shardload.errors import SourceError
from shardload.manifest import Tensor

PATIENCE_S = 300
"""A group of 65,000 datasets takes some seconds."""


def read(path: str, start: int, n_bytes: int) -> tuple[Tensor, ...]:
    """The tensors of the HDF5 file in ``n_bytes`` of a file from ``start`` on; raises like `hdf5.read_tensors`."""
    command = [sys.executable, "-m", __name__, path, str(start), str(n_bytes)]
    places = os.pathsep.join(str(Path(place).absolute()) for place in sys.path)
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env={**os.environ, "PYTHONPATH": places},
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SourceError(
            f"{path} is damaged HDF5: libhdf5 was still reading its headers after {PATIENCE_S} s. "
            "Download or save it again"
        ) from error
    except OSError as error:
        raise SourceError(
            f"{path} has groups of many links, whose headers are read in a process of their own, which could not be "
            f"started: {error}. Save it again with Keras, which writes no such groups"
        ) from error
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise SourceError(f"{path} is damaged HDF5: it made libhdf5 crash ({name}). Download or save it again")
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise SourceError(f"{path}: its headers could not be read in a process of their own: {last}")
    kind, found = pickle.loads(done.stdout)
    if kind is not None:
        raise getattr(errors, kind)(found)
    tensors: tuple[Tensor, ...] = found
    return tensors


def main(path: str, start: str, n_bytes: str) -> None:
    """Write a pickle of the name of an error's class, or ``None``, and its text, or the tensors."""
    from shardload.loaders import hdf5

    answer: tuple[str | None, Any]
    try:
        answer = None, hdf5.read_here(hdf5.FileRegion(path, int(start), int(n_bytes)), dense=True)
    except errors.ShardloadError as error:
        answer = type(error).__name__, str(error)
    sys.stdout.buffer.write(pickle.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # a damaged file may make libhdf5 crash while it closes


if __name__ == "__main__":
    main(*sys.argv[1:])
