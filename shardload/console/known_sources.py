"""Every name that SOURCE can have on this machine, for `shardload sources` and for shell completion.

Listing changes nothing, unlike `fetch`: no checkpoint is opened, assembled or downloaded. KerasHub's presets are listed
only on request, because that imports KerasHub.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from shardload import resolve
from shardload.synth import names as architecture_names
from shardload.units import format_bytes, format_count


class Kind(StrEnum):
    """The origin of a name."""

    LOCAL = "local"
    INSTALLED = "installed"
    ALIAS = "alias"
    SYNTHETIC = "synthetic"
    PRESET = "preset"


@dataclass(frozen=True, slots=True)
class KnownSource:
    """A name that SOURCE can have."""

    name: str
    kind: Kind
    what: str
    """One line for people."""


def fetch(source: str, *, weights: bool = True) -> None:
    """Make ``source`` available locally (assemble or download it), or raise if it does not exist.

    Without ``weights``, an architecture or a configuration is enough.
    """
    from shardload.stores.remote import location_of

    # Checkpoints in stores are read in place.
    if location_of(source) is None:
        resolve.resolve(source, weights=weights)


def known(*, presets: bool = False, announced: bool = True) -> list[KnownSource]:
    """Return each name once; names that load immediately come first.

    Args:
        presets: Also list KerasHub's.
        announced: Also list files in formats that installed packages announce, which imports those packages.
    """
    # The first of a name counts: a checkpoint on this machine hides an architecture or preset of its name.
    ways = (_local(announced=announced), _installed(), architectures(), _presets() if presets else ())
    found: dict[str, KnownSource] = {}
    for way in ways:
        for source in way:
            found.setdefault(source.name, source)
    return list(found.values())


def _local(*, announced: bool) -> Iterator[KnownSource]:
    root = resolve.root_if_any()
    for entry in sorted(root.iterdir()) if root is not None and root.is_dir() else ():
        # Files count by their endings: anything else in the root is not a checkpoint. Folders are not looked into.
        stem = resolve.stem_of(entry.name, announced=announced)
        if not entry.name.startswith(".") and (stem != entry.name or entry.is_dir()):
            yield KnownSource(stem, Kind.LOCAL, str(entry))


def _installed() -> Iterator[KnownSource]:
    # Without importing it, and without assembling its parts: a list must be quick.
    if importlib.util.find_spec(resolve.PIP_PACKAGE) is not None:
        yield KnownSource(resolve.PIP_NAME, Kind.INSTALLED, f"real weights, from the package {resolve.PIP_PACKAGE}")


def architectures() -> Iterator[KnownSource]:
    """Yield the architectures that `shardload synth` can write, aliases after their targets."""
    for found in architecture_names():
        size = f"{format_count(found.parameters)} parameters, {format_bytes(found.nbytes)} in bfloat16"
        yield KnownSource(found.name, Kind.SYNTHETIC, f"{size}; write it with: shardload synth {found.name}")
        for alias in found.aliases:
            yield KnownSource(alias, Kind.ALIAS, f"another name of {found.name}")


def _presets() -> Iterator[KnownSource]:
    from shardload.hub import kerashub

    for name, handle in sorted(kerashub.preset_handles().items()):
        yield KnownSource(name, Kind.PRESET, handle)
