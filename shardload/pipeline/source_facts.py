"""What processes compare of a checkpoint before they load it together.

Paths are not compared: the checkpoint may have another path on another host. Contents are compared by the digests that
steps saved by shardload have. In other files a few bytes are compared, at the start of tensors and at evenly spaced
places: enough to tell one checkpoint from another, not to detect a flipped bit. Where an object store tells the version
of each object (its ETag), the versions are compared: later reads are limited to them, so all processes read the same.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

from shardload.manifest import Extent, Manifest
from shardload.processes.agreement import Facts, Topic, facts_digest
from shardload.stores.location import Location
from shardload.stores.store import fill_exactly
from shardload.transfer.byte_source import Verifier
from shardload.transfer.owners import OwnerChoice
from shardload.units import exact_bytes

SPOTS = 256
"""Number of places at which processes compare files without digests: reading them takes milliseconds at any size."""
_SPOT_BYTES = 256
_AT_ONCE = 8
"""Number of places that are read at once."""


def source_topics(manifest: Manifest, check: Verifier | None) -> list[Topic]:
    """Return what must be equal on all processes about the checkpoint that they load: its headers, then its bytes."""
    same = "the same on every process"
    return [
        Topic("the source", lambda: source_facts(manifest), f"Load {same}"),
        Topic(
            "the source",
            lambda: content_facts(manifest, check),
            f"Load {same}; copy it again where it lies in several places",
        ),
    ]


def owners_topic(choices: Mapping[str, OwnerChoice]) -> Topic:
    """Return which process reads what, for each variable by what it is called in errors: equal on all processes."""
    return Topic(
        "which process reads what",
        lambda: {name: f"{choice.strategy} {choice.layout}" for name, choice in choices.items()},
        "Use the same version of shardload on every process",
    )


def source_facts(manifest: Manifest) -> Facts:
    """Return facts from a checkpoint's headers that must be equal on all processes: not paths, which may differ."""
    # Files by their number, as their paths may differ between hosts.
    order = {path: i for i, path in enumerate(manifest.files)}
    found = {"Its format": manifest.format, "The number of its tensors": str(len(manifest.tensors))}
    for tensor in manifest.tensors.values():
        # Offsets too: files of equal size may have their tensors in another order.
        match tensor.storage:
            case Extent(path, offset):
                where = f" at byte {offset} of file {order.get(path, -1)}"
            case _:
                where = f" in {exact_bytes(tensor.stored_bytes)}"
        found[f"Tensor {tensor.name!r}"] = f"{tensor.dtype} {tensor.shape}{where}"
    found["The sizes of its files"] = ", ".join(map(str, sorted(manifest.files.values())))
    found["Its configuration"] = facts_digest({"": json.dumps(manifest.config, sort_keys=True, default=repr)})
    return found


def content_facts(manifest: Manifest, check: Verifier | None) -> Facts:
    """Return facts about a checkpoint's bytes that processes compare: digests, versions, or bytes at a few places."""
    if check is not None:
        units_by_file = sorted(check.units_by_file().items())
        return {f"The digests of {name}": facts_digest({"": "".join(units)}) for name, units in units_by_file}
    tags = {path: path.store.tag(path.key) for path in manifest.files}
    found = {f"The version of file {i}": tag for i, tag in enumerate(tags.values()) if tag is not None}
    spots = [spot for spot in _spots(manifest) if tags.get(spot[1]) is None]
    with ThreadPoolExecutor(_AT_ONCE, "shardload-spots") as pool:  # each is a request, where files are remote
        return found | dict(pool.map(_fact_of_spot, spots))


def _fact_of_spot(spot: tuple[str, Location, int]) -> tuple[str, str]:
    name, path, offset = spot
    with closing(path.open()) as file:
        buffer = bytearray(min(_SPOT_BYTES, max(0, file.n_bytes - offset)))
        fill_exactly(file, memoryview(buffer), offset)
    return name, f"{buffer[:8].hex()}… ({hashlib.blake2b(buffer, digest_size=4).hexdigest()})"


def _spots(manifest: Manifest) -> Iterator[tuple[str, Location, int]]:
    """Yield the places at which processes compare bytes: a description of the bytes, their file, and their offset."""
    # Tensors begin where values surely are; evenly spaced places also cover tensors that have no extent.
    starts = [(t.name, t.storage) for t in manifest.tensors.values() if isinstance(t.storage, Extent) and t.size]
    for name, extent in _some(starts, SPOTS // 2):
        yield f"The first bytes of tensor {name!r}", extent.path, extent.offset
    files = _some(list(manifest.files.items()), SPOTS // 4)
    # At least the first and the last place of each file (and no division by zero below).
    each = max(2, SPOTS // 2 // max(1, len(files)))
    for number, (path, size) in enumerate(files):
        for offset in dict.fromkeys(max(0, size - _SPOT_BYTES) * k // (each - 1) for k in range(each)):
            yield f"The bytes at {offset} of file {number}", path, offset


def _some(found: list[Any], most: int) -> list[Any]:
    """Return a sample of at most ``most`` entries of a list, evenly spaced."""
    return found[:: max(1, math.ceil(len(found) / most))]
