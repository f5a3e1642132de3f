"""URLs as sources of a load: stores by their scheme, and training steps in ``s3://``, ``gs://`` and ``http(s)://``."""

from __future__ import annotations

from collections.abc import Callable

from shardload.errors import UnsupportedError
from shardload.loaders.orbax import SPEC, open_orbax
from shardload.manifest import Manifest
from shardload.resolve import Resolved
from shardload.steps.listing import find_step
from shardload.steps.remote_listing import prepared
from shardload.stores.location import Location

SCHEMES: dict[str, Callable[[str], Location]] = {}
"""URL scheme of a store → function that returns the location of a URL. Each format is read from it as from this
machine. Schemes of `shardload.stores.remote` are not listed: of those, only training steps are read."""


def location_of(source: object) -> Location | None:
    """Return the location of a URL whose scheme is in `SCHEMES`; ``None`` for other sources."""
    scheme, separator, _ = source.partition("://") if isinstance(source, str) else ("", "", "")
    return SCHEMES[scheme](str(source)) if separator and scheme in SCHEMES else None


def open_remote(url: str, *, format: str | None = None) -> tuple[Resolved, Manifest]:
    """Open the step at an address, or the latest step below it.

    Raises:
        SourceNotFoundError: When there is no step.
        UnsupportedError: When shardload did not save it, or the store cannot list files.
        DamagedError: When it differs from what was saved.
        TransferError: When the store does not respond.
    """
    if format not in (None, SPEC.name):
        raise UnsupportedError(
            f"Cannot read {url} as {format}: only training steps ({SPEC.name}) can be read from remote stores. "
            "Copy the checkpoint to this machine and load it from there"
        )
    info = prepared(find_step(url, "latest"))
    return Resolved(info.where, f"step {info.step}, verified"), open_orbax(info.location)
