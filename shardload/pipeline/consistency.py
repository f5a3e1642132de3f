"""Check that all processes are about to load the same thing.

The call and its arguments are compared first. For every topic, each process makes the same short lists of facts and
sends their digests. Where two digests differ, process 0 sends its list, and every process finds the first
difference. Paths are not compared: the checkpoint may have another path on another host. Nor are names of variables,
because Keras numbers them in order of creation: a variable is identified by its place in the model.

Steps saved by shardload have digests of their content. From other files a few bytes are read, at the start of tensors
and at evenly spaced places: enough to tell one checkpoint from another, not to detect a flipped bit.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardload.distributed.joint_call import JointCall
from shardload.errors import DisagreementError
from shardload.keras_bridge.variables import stored_dtype
from shardload.layouts.model_variables import all_variables
from shardload.manifest import Extent, Manifest
from shardload.pipeline.preparing import PreparedLoad
from shardload.sharding.devices import MeshDevices
from shardload.stores.location import Location
from shardload.transfer.byte_source import Verifier
from shardload.transfer.casts import is_float
from shardload.units import exact_bytes

SPOTS = 256
"""Places to read in all files: takes milliseconds, for a checkpoint of any size."""
SPOT_BYTES = 256

Facts = dict[str, str]
"""Name → fact, as text that is equal on every process."""


@dataclass(frozen=True, slots=True)
class Topic:
    """One thing that must be the same on all processes."""

    what: str
    """Object of the sentence "processes disagree about …"."""
    facts: Callable[[], Facts]
    fix: str
    """What to do about a difference, as the last sentence of the message."""
    titles: Callable[[], Facts] = dict
    """Process 0's titles of facts whose names alone are unclear, for messages."""


def call_topics(function: str, arguments: Mapping[str, Any]) -> list[Topic]:
    """Return the topics to compare at the start of a call.

    Args:
        function: Its name.
        arguments: Arguments that must be equal as written; mesh, layout and dtype are compared later, by
            their effect.
    """
    return [
        Topic("the call", lambda: {"function": repr(function)}, "Make the same calls in the same order on all of them"),
        Topic("the arguments", lambda: _written(arguments), "Pass the same on every process"),
    ]


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


def require(joint: JointCall, found: list[Topic]) -> None:
    """Check that all processes are about to load the same thing.

    Raises:
        DisagreementError: On all processes, naming the first difference and each side's value.
    """
    facts = [topic.facts() for topic in found]
    # One meeting for all topics, with digests: the facts, a line per tensor, follow only where digests differ.
    of_each = joint.together(lambda: [_digest(one) for one in facts], f"the comparison of {found[0].what}")
    for topic, mine, digests in zip(found, facts, zip(*of_each, strict=True), strict=True):
        if len(set(digests)) > 1:
            raise _disagreement(joint, topic, mine)


def _disagreement(joint: JointCall, topic: Topic, mine: Facts) -> DisagreementError:
    # All processes come here together, as all compared the same digests.
    first, titles = joint.first(lambda: (mine, topic.titles()), f"what process 0 has of {topic.what}")
    differences = joint.together(lambda: _difference(first, mine), f"what differs of {topic.what}")
    key, wanted, _ = next(one for one in differences if one is not None)
    others = [f"process {i} has {one[2]}" for i, one in enumerate(differences) if one is not None and one[0] == key]
    return DisagreementError(
        f"Cannot make this call together: the processes disagree about {topic.what}. {titles.get(key, key)}: process "
        f"0 has {wanted}, {', '.join(others[:8])}{' …' if len(others) > 8 else ''}. {topic.fix}"
    )


def _difference(first: Facts, mine: Facts) -> tuple[str, str, str] | None:
    """Return the first fact that differs: its name, its value on process 0, and its value here."""
    for key in [*first, *(key for key in mine if key not in first)]:
        if first.get(key) != mine.get(key):
            return key, first.get(key, "none"), mine.get(key, "none")
    return None


def _digest(facts: Facts) -> str:
    return hashlib.blake2b(json.dumps(facts).encode(), digest_size=16).hexdigest()


def _written(arguments: Mapping[str, Any]) -> Facts:
    found: Facts = {}
    for name, value in arguments.items():
        if isinstance(value, Mapping):
            found |= {f"{name}[{key!r}]": _as_text(item) for key, item in sorted(value.items(), key=str)}
        elif value is not None:
            found[name] = _as_text(value)
    return found


def _as_text(value: Any) -> str:
    """Format an argument's value as text that is equal on every process; objects by their type."""
    match value:
        case None | str():
            return repr(value)
        # Before int, which bool is a subclass of.
        case bool() | np.bool_():
            return repr(bool(value))
        case int() | np.integer():
            return repr(int(value))
        # Sorted, as a set is in another order in each process.
        case list() | tuple() | set() | frozenset():
            return f"[{', '.join(sorted(map(_as_text, value)))}]"
    return type(value).__name__


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
    found["Its configuration"] = _digest({"": json.dumps(manifest.config, sort_keys=True, default=repr)})
    return found


def content(manifest: Manifest, check: Verifier | None) -> Facts:
    """Return facts about the data: all of it if there are digests, else at some places."""
    if check is None:
        return {name: _bytes_at(path, offset) for name, path, offset in _spots(manifest)}
    return {
        f"The digests of {name}": _digest({"": "".join(units)}) for name, units in sorted(check.units_by_file().items())
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
