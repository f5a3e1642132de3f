"""The devices that one collective of a compiled program joins, from its ``replica_groups``.

XLA writes groups in several forms, all for the same four groups of two::

    {{0,4},{1,5},{2,6},{3,7}}                          each group
    [4,2]<=[2,4]T(1,0)                                 reshape 0…7 to 2x4, transpose, reshape to 4 groups of 2
    mesh['a'=2,'b'=4] {'a'}                            the devices along axis a of a mesh
    mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}  the same, for another order of devices

Source: ``xla/hlo/ir/replica_group.cc``, ``xla/hlo/ir/mesh_and_axis.cc``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardload.sharding.mesh import MeshSpec

Groups = tuple[tuple[int, ...], ...]
"""Positions of devices in the program, one tuple per group."""

_IOTA = re.compile(r"\[([\d,]+)\](?:<=\[([\d,]+)\])?(?:T\(([\d,]+)\))?")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
# An axis between the braces, `'a'`, or a part of one, `'b':(2)4`.
_CHOSEN = re.compile(r"'([^']+)'(?::\((\d+)\)(\d+))?")


def replica_groups(attributes: str) -> Groups:
    """Return the groups that an instruction's attributes state, none if it states none.

    XLA for TPU leaves them out of the text (``{}``) once it has chosen how to run the collective.

    Args:
        attributes: The text after the operands of a collective instruction.
    """
    if "source_target_pairs={" in attributes:
        # A permute lists (source, target): devices that exchange, directly or through others, are one group.
        return _connected(_listed(attributes.partition("source_target_pairs=")[2]))
    text = attributes.partition("replica_groups=")[2]
    if text.startswith("mesh["):
        return _of_mesh(text)
    if text.startswith("["):
        return _rows(_iota(text))
    return _listed(text)


def group_axes(groups: Groups, mesh: MeshSpec) -> tuple[str, ...]:
    """Return the mesh axes along which devices of one group differ."""
    found = set()
    for group in groups:
        coordinates = np.unravel_index(np.array(group), mesh.sizes)
        found |= {axis for axis, along in zip(mesh.axes, coordinates, strict=True) if len(set(along.tolist())) > 1}
    return tuple(axis for axis in mesh.axes if axis in found)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]


def _listed(text: str) -> Groups:
    """Read ``{{0,1},{2,3}}`` at the beginning of ``text``."""
    found = re.match(r"\{((?:\{[\d,]*\},?)*)\}", text)
    return tuple(tuple(_numbers(group)) for group in re.findall(r"\{([\d,]+)\}", found[1])) if found else ()


def _iota(text: str) -> NDArray[Any]:
    found = _IOTA.match(text)
    if found is None:
        raise ValueError(f"unknown replica groups {text:.60}")
    shape = _numbers(found[1])
    return _permuted(_numbers(found[2] or found[1]), found[3]).reshape(shape)


def _permuted(sizes: Sequence[int], order: str | None) -> NDArray[Any]:
    positions: NDArray[Any] = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    return positions.transpose(_numbers(order)) if order else positions


def _of_mesh(text: str) -> Groups:
    """Read ``mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a', 'b':(1)2}``."""
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
    return _rows(_last(devices.reshape(shape), last))


def _last(positions: NDArray[Any], axes: Sequence[int]) -> NDArray[Any]:
    """Return rows of the positions that differ along ``axes`` only."""
    size = int(np.prod([positions.shape[axis] for axis in axes], dtype=int))
    return np.moveaxis(positions, axes, range(-len(axes), 0)).reshape(-1, size)


def _rows(found: NDArray[Any]) -> Groups:
    return tuple(tuple(row) for row in found.tolist())


def _connected(pairs: Groups) -> Groups:
    """Return the devices that exchange data, directly or through others."""
    groups: list[set[int]] = []
    for pair in pairs:
        joined = [group for group in groups if group & set(pair)]
        groups = [group for group in groups if group not in joined] + [set(pair).union(*joined)]
    return tuple(tuple(sorted(group)) for group in groups)
