"""Training steps at an address (``s3://``, ``gs://``, ``http(s)://``) as sources of a load."""

from __future__ import annotations

from shardload.errors import UnsupportedError
from shardload.loaders.orbax import SPEC, open_orbax
from shardload.manifest import Manifest
from shardload.resolve import Resolved
from shardload.steps.listing import find_step
from shardload.steps.remote_listing import prepared


def open_remote(url: str, *, format: str | None = None) -> tuple[Resolved, Manifest]:
    """Open the step at an address, or the latest step below it.

    Raises:
        SourceNotFoundError: When there is no step.
        UnsupportedError: When shardload did not save it, or the store cannot list files.
        DamagedError: When it differs from what was saved.
        TransferError: When the store does not respond.
    """
    if format not in (None, SPEC.name):
        raise UnsupportedError(f"{url}: of remote sources only training steps are read, and those are no {format}")
    info = prepared(find_step(url, "latest"))
    return Resolved(info.where, info.where, f"step {info.step}, verified"), open_orbax(info.location)
