"""Split a layout further, over axes that do not split it yet: what ZeRO-1 does with the state of an optimizer.

A (6, 8) momentum follows its kernel, split over ``model``. Each of its shards has two equal copies over ``batch``, so
each copy may keep a part::

    mesh batch=2,model=4     follows its kernel    (-, model)         (6, 2) on each device
                             spread over batch     (batch, model)     (3, 2) on each device
"""

from __future__ import annotations

from collections.abc import Sequence

from shardload.sharding.layout import Layout, Spec
from shardload.units import plural


def spread(layout: Layout, shape: tuple[int, ...], axes: Sequence[str]) -> Layout:
    """Return the layout that also splits over each of ``axes`` that divides a dim evenly.

    An axis splits the largest dim that no axis splits yet, else it is the last axis of a dim that is split already,
    the one with the longest shards. An axis that divides none, or splits the variable already, changes nothing.

    Args:
        layout: The layout to start from; must divide ``shape``.
        shape: Of the whole variable.
        axes: Axes of the mesh, in the order in which they choose their dims.

    Raises:
        MeshError: When the mesh has no such axis.
    """
    for axis in axes:
        layout = _over(layout, shape, axis)
    return layout


def why_not_spread(layout: Layout, shape: tuple[int, ...], axes: Sequence[str]) -> str:
    """Return why `spread` leaves out some of ``axes``, for people; empty if it uses all of them."""
    why = []
    for axis in axes:
        before, size = layout, layout.mesh.axis_size(axis)
        layout = _over(layout, shape, axis)
        if size == 1:
            why.append(f"axis {axis!r} has one device")
        elif before == layout and not _splits(layout, axis):
            shards = "x".join(map(str, layout.shard_shape(shape))) or "scalar"
            why.append(f"no dim of its {shards} shard divides by the {plural(size, 'device')} of axis {axis!r}")
    return "; ".join(why)


def _over(layout: Layout, shape: tuple[int, ...], axis: str) -> Layout:
    size = layout.mesh.axis_size(axis)
    shard = layout.shard_shape(shape)
    # Shards must stay even: only a dim whose shards divide can be split again.
    dims = [dim for dim, length in enumerate(shard) if length % size == 0 and length > 0]
    if size == 1 or not dims or _splits(layout, axis):
        return layout
    # A dim that is not split yet before one that is, then the longest, then the first.
    chosen = min(dims, key=lambda dim: (bool(layout.spec[dim]), -shard[dim], dim))
    spec: Spec = tuple((*axes, axis) if dim == chosen else axes for dim, axes in enumerate(layout.spec))
    return Layout(layout.mesh, spec)


def _splits(layout: Layout, axis: str) -> bool:
    return any(axis in axes for axes in layout.spec)
