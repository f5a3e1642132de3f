"""What must be the same when all processes are about to load: mesh, source, dtype, model and layout.

`shardload.processes.agreement` compares it. Paths are not compared: the checkpoint may have another path on another
host. Nor are names of variables, because Keras numbers them in order of creation: a variable is identified by its place
in the model.

Steps saved by shardload have digests of their content. From other files a few bytes are read, at the start of tensors
and at evenly spaced places: enough to tell one checkpoint from another, not to detect a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from shardload.keras_bridge.variables import stored_dtype
from shardload.layouts.model_variables import all_variables
from shardload.manifest import Extent, Manifest
from shardload.pipeline.preparing import PreparedLoad
from shardload.processes.agreement import Facts, Topic, facts_digest
from shardload.sharding.devices import MeshDevices
from shardload.stores.location import Location
from shardload.transfer.byte_source import Verifier
from shardload.transfer.casts import is_float
from shardload.units import exact_bytes

SPOTS = 256
"""Places to read in all files: takes milliseconds, for a checkpoint of any size."""
SPOT_BYTES = 256


def topics(prepared: PreparedLoad) -> list[Topic]:
    """Return the topics to compare, with causes of other differences first.

    Args:
        prepared: The load that this process is about to run.
    """
    # Causes before effects: another dtype also changes every line of the model, which would be named instead.
    same = "the same on every process"
    return [
        Topic("the mesh", lambda: _mesh(prepared.devices), f"Pass {same}"),
        Topic("the source", lambda: source(prepared.manifest), f"Load {same}"),
        Topic(
            "the source",
            lambda: content(prepared.manifest, prepared.source.checker),
            f"Load {same}; copy it again where it lies in several places",
        ),
        Topic("the dtype", lambda: _dtypes(prepared), f"Pass {same}, or build the model with it"),
        Topic("the model", lambda: _model(prepared), f"Build {same}", lambda: _paths(prepared)),
        Topic("the layout", lambda: _layouts(prepared), f"Use {same}", lambda: _paths(prepared)),
    ]


def _mesh(devices: MeshDevices) -> Facts:
    shape = f"{'x'.join(map(str, devices.mesh.sizes))} ({', '.join(devices.mesh.axes)})"
    return {"Its shape": shape, "Its devices": ", ".join(str(getattr(d, "id", None)) for d in devices.devices)}


def source(manifest: Manifest) -> Facts:
    """Return the facts in the headers, without paths."""
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


def content(manifest: Manifest, check: Verifier | None) -> Facts:
    """Return facts about the data: all of it if there are digests, else at some places."""
    if check is None:
        return {name: _bytes_at(path, offset) for name, path, offset in _spots(manifest)}
    return {
        f"The digests of {name}": facts_digest({"": "".join(units)})
        for name, units in sorted(check.units_by_file().items())
    }


def _spots(manifest: Manifest) -> Iterator[tuple[str, Location, int]]:
    """Yield names, files and offsets of the places to read."""
    # Tensors begin where values surely are; evenly spaced places also cover tensors that have no extent.
    starts = [(t.name, t.storage) for t in manifest.tensors.values() if isinstance(t.storage, Extent) and t.size]
    for name, extent in _some(starts, SPOTS // 2):
        yield f"The first bytes of tensor {name!r}", extent.path, extent.offset
    files = _some(list(manifest.files.items()), SPOTS // 4)
    # At least the first and the last place of each file (and no division by zero below).
    each = max(2, SPOTS // 2 // max(1, len(files)))
    for number, (path, size) in enumerate(files):
        for offset in dict.fromkeys(max(0, size - SPOT_BYTES) * k // (each - 1) for k in range(each)):
            yield f"The bytes at {offset} of file {number}", path, offset


def _some(found: list[Any], most: int) -> list[Any]:
    """Return at most ``most`` entries, evenly chosen."""
    return found[:: math.ceil(len(found) / most)] if len(found) > most else found


def _bytes_at(path: Location, offset: int) -> str:
    with closing(path.open()) as file:
        buffer = bytearray(min(SPOT_BYTES, max(0, file.n_bytes - offset)))
        file.read_into(memoryview(buffer), offset)
    return f"{buffer[:8].hex()}… ({hashlib.blake2b(buffer, digest_size=4).hexdigest()})"


def _dtypes(prepared: PreparedLoad) -> Facts:
    """Compared before the model, where every weight would differ."""
    found = {str(stored_dtype(v)) for v in all_variables(prepared.model).values() if is_float(stored_dtype(v))}
    return {"That of the weights": ", ".join(sorted(found))}


def _model(prepared: PreparedLoad) -> Facts:
    # By place, never by name (module docstring); a variable without a tensor keeps its line.
    found = {id(v): f"{stored_dtype(v)} {tuple(v.shape)}, no tensor" for v in all_variables(prepared.model).values()}
    for binding in prepared.mapping.bindings:
        found[id(binding.variable)] = f"{binding.dtype} {binding.view.shape} from {binding.view}"
    for computed in prepared.mapping.computed:
        found |= {id(v): f"computed from {', '.join(computed.tensors)}" for v in computed.variables}
    return {f"Variable {number}": text for number, text in enumerate(found.values())}


def _layouts(prepared: PreparedLoad) -> Facts:
    return {f"Variable {number}": str(row.layout) for number, row in enumerate(prepared.layouts.variables)}


def _paths(prepared: PreparedLoad) -> Facts:
    return {f"Variable {number}": row.path for number, row in enumerate(prepared.layouts.variables)}
