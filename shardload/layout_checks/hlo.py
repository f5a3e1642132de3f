"""The collectives of a compiled program, read from its text (HLO): their kinds, their bytes, and the devices in each.

    compiled.as_text() ─► computations ─► walk from ENTRY ─► one `Collective` per instruction
                                          │ a ``while`` with a known trip count: its body, that many times
                                          │ a ``while`` without one: its body once, marked ``loop``
                                          └ a branch of a ``conditional``: once, marked ``branch``

The bytes of a collective are the size of its result on one device. If one instruction combines several arrays, their
bytes are added up. A pair of ``-start`` and ``-done`` counts once.

XLA writes groups in several forms. Each line here means the same four groups of two devices::

    {{0,4},{1,5},{2,6},{3,7}}                          each group
    [4,2]<=[2,4]T(1,0)                                 reshape 0…7 to 2x4, transpose, reshape to 4 groups of 2
    mesh['a'=2,'b'=4] {'a'}                            the devices along axis a of a mesh
    mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}  the same, for another order of devices

Source: ``xla/hlo/ir/replica_group.cc``, ``xla/hlo/ir/mesh_and_axis.cc``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardload.errors import UsageError
from shardload.sharding.devices import mesh_spec
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes

_COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# HLO text has computations at column 0, with their instructions indented below; names may lack the `%`:
#     ENTRY %main (x: f32[8]) -> f32[8] {
#       ROOT %y = f32[8]{0} add(%a, %b), metadata={…}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_NAME = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
_OPCODE = re.compile(r"\s*([\w\-]+)\(")
# `f32[8,128]`; `[<=8]` is a dim whose length is known only at run time.
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_CALLED = re.compile(r"\b(calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_SOURCE = re.compile(r'\bop_name="([^"]*)"')
_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
# An axis between the braces, `'a'`, or a part of one, `'b':(2)4`.
_CHOSEN = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")

_CHAIN = re.compile(r"channel_id=\d+,.*frontend_attributes=\{[^}]*chain_id=\"\d+\"")
_ALL_REDUCE_SCATTER = "all-reduce-scatter"
"""How XLA for TPU names a function that has an all-reduce and a slice of its result, and runs as a reduce-scatter."""
_Inside = Literal["", "loop", "branch"]
_INSIDE: dict[str, _Inside] = {"while": "loop", "conditional": "branch"}
_DeviceGroups = tuple[tuple[int, ...], ...]
"""Groups of devices that exchange data: for each, the positions of its devices in the program's order of devices."""


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective instruction of a compiled program."""

    kind: str
    """Its kind: ``all-reduce``, ``all-gather``, ``reduce-scatter``, ``all-to-all``, ``collective-permute`` …"""
    nbytes: int
    """Bytes of the result on one device, if the instruction runs once."""
    dtype: str
    """The dtype of the operands as XLA names it, such as ``f32``. Several dtypes are joined by ``+``."""
    operands: int
    """Number of arrays that the instruction exchanges at once: XLA combines small collectives into one."""
    group_size: int
    """Devices in each group; 0 where the program does not say, as for TPU."""
    axes: tuple[str, ...]
    """Mesh axes along which the devices of a group differ. A group may have only some of the devices along an axis."""
    count: int = 1
    """How often the instruction runs in one step. In a loop, it runs as often as the body of the loop."""
    inside: _Inside = ""
    """``loop`` if it is in a loop of unknown length, counted once; ``branch`` if it is in a branch that may not run."""
    source: str = ""
    """JAX's name of the operation of the model that needs the collective; empty if XLA added it."""

    @property
    def total_bytes(self) -> int:
        """Bytes that the instruction exchanges in one step: those of its result on one device, times its runs."""
        return self.nbytes * self.count

    def __str__(self) -> str:
        times = f"{self.count} x " if self.count > 1 else ""
        over = f"over {','.join(self.axes)}" if self.axes else "on one device" if self.group_size else "over some axes"
        note = {"": "", "loop": ", in a loop of unknown length", "branch": ", in a branch"}[self.inside]
        return f"{times}{self.kind} {over}: {format_bytes(self.nbytes)} {self.dtype}{note}"


@dataclass(frozen=True, slots=True)
class _Instruction:
    opcode: str
    result: str
    """Shape of the result as XLA writes it: ``f32[16,128]{1,0}``."""
    attributes: str


def collectives_in(text: str, mesh: MeshSpec) -> tuple[Collective, ...]:
    """Return every collective instruction of a compiled program, in the order of its text.

    Examples:
        ```python
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

        rows = NamedSharding(Mesh(jax.devices(), ("model",)), P("model"))
        program = jax.jit(lambda x: x.sum(0)).lower(jax.ShapeDtypeStruct((8, 4), "float32", sharding=rows)).compile()
        mesh = shardload.parallel.choose(model, "model=8").mesh
        print(shardload.parallel.collectives_in(program.as_text(), mesh))
        ```

    Args:
        text: ``compiled.as_text()`` of a program for one mesh.
        mesh: The mesh, whose positions are the program's devices, row-major.

    Raises:
        UsageError: When ``text`` is not a string.
        MeshError: When ``mesh`` is not a mesh.
    """
    if not isinstance(text, str):
        raise UsageError(f"Cannot find collectives in {text!r:.60}: expected the text of a program, compiled.as_text()")
    mesh = mesh_spec(mesh)
    entry, computations = _computations(text)
    return tuple(_walk(computations, entry, mesh, set())) if entry else ()


def shape_bytes(shape: str) -> int:
    """Return the bytes of a shape as XLA writes it: ``f32[16,128]{1,0}``, or a tuple of shapes."""
    return sum(_bits(dtype) * math.prod(_numbers(dims)) for dtype, dims in _ARRAY.findall(shape)) // 8


def _walk(
    computations: Mapping[str, list[_Instruction]], name: str, mesh: MeshSpec, chains: set[str]
) -> Iterator[Collective]:
    for one in computations.get(name, ()):
        # Later parts of an asynchronous instruction, whose `-start` is counted.
        if one.opcode.endswith(("-done", "-update")):
            continue
        # XLA for TPU divides a collective among several fusions, a chain, each of which has the whole instruction.
        if chain := _CHAIN.search(one.attributes):
            if chain[0] in chains:
                continue
            chains.add(chain[0])
        if one.opcode.removesuffix("-start") in _COLLECTIVES:
            yield _collective(one, mesh)
            continue
        # How often the instruction runs what it calls; what a reduction applies (`to_apply`) has no collectives.
        trips, inside = 1, _INSIDE.get(one.opcode, "")
        if one.opcode == "while" and (known := _TRIPS.search(one.attributes)):
            trips, inside = int(known[1]), ""
        callees = [name for key, name in _CALLED.findall(one.attributes) if key != "to_apply" or one.opcode == "call"]
        if branches := _BRANCHES.search(one.attributes):
            callees += [name.strip().lstrip("%") for name in branches[1].split(",")]
        for callee in callees:
            scatters = callee.startswith(_ALL_REDUCE_SCATTER)
            for collective in _walk(computations, callee, mesh, chains):
                found = _scattered(collective) if scatters else collective
                # The innermost note stays: a branch inside a loop is a branch.
                yield replace(found, count=found.count * trips, inside=found.inside or inside)


def _scattered(found: Collective) -> Collective:
    """Return the reduce-scatter that XLA for TPU runs for an all-reduce and a slice of its result."""
    if found.kind != "all-reduce" or not found.group_size:
        return found
    return replace(found, kind="reduce-scatter", nbytes=found.nbytes // found.group_size)


def _collective(one: _Instruction, mesh: MeshSpec) -> Collective:
    kind = one.opcode.removesuffix("-start")
    result = one.result
    if kind not in (one.opcode, "all-reduce") and result.startswith("("):
        result = _members(result)[1]  # (operands, results, …): all but all-reduce-start return both
    arrays = _ARRAY.findall(result)
    groups = replica_groups(one.attributes)
    source = _SOURCE.search(one.attributes)
    return Collective(
        kind,
        shape_bytes(result),
        "+".join(sorted({dtype for dtype, _ in arrays})),
        len(arrays),
        max(map(len, groups), default=0),
        group_axes(groups, mesh),
        source=source[1] if source else "",
    )


def _computations(text: str) -> tuple[str, dict[str, list[_Instruction]]]:
    """Return the name of the computation (function) that runs first, and the instructions of each one, by name."""
    entry, current = "", list[_Instruction]()
    found: dict[str, list[_Instruction]] = {}
    for line in text.splitlines():
        if header := _COMPUTATION.match(line):
            current = found[header[2]] = []
            entry = header[2] if header[1] else entry
        elif name := _NAME.match(line):
            # `f32[8]{0} all-reduce(%x), channel_id=1`: the shape of the result is one word, or a tuple in parentheses
            # with spaces in it.
            text = line[name.end() :]
            end = _closing(text) if text.startswith("(") else text.find(" ")
            if opcode := _OPCODE.match(text, end):
                current.append(_Instruction(opcode[1], text[:end], text[_closing(text, opcode.end() - 1) :]))
    return entry, found


def _closing(text: str, start: int = 0) -> int:
    """Return the index after the closing parenthesis that belongs to the first opening one, from ``start`` on."""
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if depth == 0:
            return at + 1
    return len(text)


def _members(shape: str) -> list[str]:
    """Return the shapes in a tuple shape such as ``(f32[2], s32[])``."""
    found, depth, start = list[str](), 0, 1
    for at, letter in enumerate(shape):
        depth += (letter in "([{") - (letter in ")]}")
        if (letter == "," and depth == 1) or depth == 0:
            found.append(shape[start:at])
            start = at + 1
    return found


def _bits(dtype: str) -> int:
    """Return the bits of one element of a dtype that XLA names so: 16 for ``bf16``, 8 for ``pred``, 0 for ``token``."""
    # The first number of the name: bf16, s4, f8e4m3fn.
    width = re.search(r"\d+", dtype)
    return 8 if dtype == "pred" else int(width[0]) if width else 0


def collective_json(found: Collective) -> dict[str, Any]:
    """Return a collective as an object for `json.dumps`."""
    fields = {name: getattr(found, name) for name in Collective.__slots__}
    return fields | {"axes": list(found.axes), "total_bytes": found.total_bytes}


# ---- groups of devices -----------------------------------------------------------------------------


def replica_groups(attributes: str) -> _DeviceGroups:
    """Return the groups of devices that exchange data, from the text of a collective's attributes; else empty.

    XLA for TPU leaves the groups out of the text (``{}``) once it has chosen how to run the collective.
    """
    if "source_target_pairs={" in attributes:
        # A permute lists (source, target): devices that exchange, directly or through others, are one group.
        groups: list[set[int]] = []
        for pair in _listed_groups(attributes.partition("source_target_pairs=")[2]):
            joined = [group for group in groups if group & set(pair)]
            groups = [group for group in groups if group not in joined] + [set(pair).union(*joined)]
        return tuple(tuple(sorted(group)) for group in groups)
    text = attributes.partition("replica_groups=")[2]
    if text.startswith("mesh["):
        return _mesh_groups(text)
    if text.startswith("["):
        found = _IOTA.match(text)
        if found is None:
            raise ValueError(f"unknown replica groups {text:.60}")
        return _as_groups(_permuted(_numbers(found[2] or found[1]), found[3]).reshape(_numbers(found[1])))
    return _listed_groups(text)


def group_axes(groups: _DeviceGroups, mesh: MeshSpec) -> tuple[str, ...]:
    """Return the mesh axes along which devices of one group differ: the axes over which a collective runs."""
    found = set()
    for group in groups:
        coordinates = np.unravel_index(np.array(group), mesh.sizes)
        found |= {axis for axis, along in zip(mesh.axes, coordinates, strict=True) if len(set(along.tolist())) > 1}
    return tuple(axis for axis in mesh.axes if axis in found)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _listed_groups(text: str) -> _DeviceGroups:
    """Return the groups of devices that ``text`` begins with: ((0, 1), (2, 3)) for ``{{0,1},{2,3}}``."""
    found = re.match(r"\{((?:\{[\d,]*\},?)*)\}", text)
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", found[1])) if found else ()


def _permuted(sizes: Sequence[int], order: str | None) -> NDArray[Any]:
    positions: NDArray[Any] = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    return positions.transpose(_numbers(order)) if order else positions


def _mesh_groups(text: str) -> _DeviceGroups:
    """Return the device groups of a text such as ``mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a', 'b':(1)2}``."""
    sizes = {name: int(size) for name, size in _AXIS.findall(text.partition("]")[0])}
    devices = np.arange(np.prod(list(sizes.values()), dtype=int))
    if stated := re.search(r"device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\)", text):
        ids = _permuted(_numbers(stated[1]), stated[2]) if stated[1] else np.array(_numbers(stated[3]))
        devices = ids.ravel()
    chosen = _CHOSEN.findall(text.partition("{")[2].partition("}")[0])
    wanted = {name: (int(before or 1), int(size or 0)) for name, before, size in chosen}
    shape: list[int] = []
    last: list[int] = []
    for name, size in sizes.items():
        # Cut each axis into (before, chosen, after). `'b':(2)4` chooses the 4 in the middle, `'b'` the whole axis, and
        # of an axis that is not between the braces nothing is chosen.
        before, within = wanted.get(name, (size, 1))
        within = within or size
        shape += [before, within, size // (before * within)]
        last += [len(shape) - 2] if name in wanted else []
    # Rows of the positions that differ along the chosen parts only.
    size = math.prod(shape[axis] for axis in last)
    return _as_groups(np.moveaxis(devices.reshape(shape), last, range(-len(last), 0)).reshape(-1, size))


def _as_groups(found: NDArray[Any]) -> _DeviceGroups:
    return tuple(tuple(row) for row in found.tolist())
