"""Roles of variables, and the layouts that follow from them.

A *role* says how a variable is best split: along its own dims, best first (`Wants`), or like another variable
(`Follows`). Each axis of a mesh splits at most one dim of a variable. Its kind says which one::

    kind of axis   dim that it splits
    expert         the one along which the matrices of experts are stacked, else as ``model``
    model          the first one in the role whose length the size of the axis divides, as in Megatron
    fsdp           the longest one that no other axis splits, else one that is split already
    batch          none

A mesh may have several axes of the kind ``model`` (named ``model`` and ``tp``): all but the first split as ``fsdp``
does. If the first ``model`` axis splits another dim than the best, or none, the layout has a `Fallback`, which reports
show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardload.layouts.choice import VariableLayout
from shardload.layouts.model_variables import LARGE_BYTES, nbytes
from shardload.sharding.layout import Fallback, Layout
from shardload.sharding.mesh import MeshSpec

_LEAST_SPLIT_BYTES = 1 << 10
"""Bytes of the smallest variable that is split: splitting a smaller one saves nothing and costs a collective."""
MATRICES = "matrices"
"""`Dim.what` for the dim along which the matrices of experts are stacked: an ``expert`` axis of the mesh splits it."""


@dataclass(frozen=True, slots=True)
class Dim:
    """A dim that may be split. ``what`` is a plural noun for its elements (``heads``), which reports use."""

    index: int
    what: str


@dataclass(frozen=True, slots=True)
class Wants:
    """The role (how to split it best) of a variable that is not split like another one: which of its dims to split."""

    rule: str
    """Why these dims are best, in a word or two for reports: ``heads out``, ``column``, ``vocabulary``."""
    dims: tuple[Dim, ...]
    """Dims to split, best first; empty for a variable that stays replicated on purpose."""
    exact: bool = True
    """Whether splitting another dim than the first is a fallback to report; ``False`` if ``dims`` are only a guess."""
    even_small: bool = False
    """Whether to split the variable even if it is smaller than 1 KiB, because a user's rule says so."""


@dataclass(frozen=True, slots=True)
class Follows:
    """The role (how to split it best) of a variable that is split like its *leader*: a bias like its kernel."""

    rule: str
    leader: Any
    """The Keras variable whose layout this variable follows."""
    dims: tuple[int | None, ...]
    """For each dim of the follower, the dim of the leader that it is split like, or ``None`` if it stays whole."""


LayoutRole = Wants | Follows


def by_shape(variable: Any) -> Wants:
    """Return how to split a variable of unknown meaning: its largest dim, but no vector of less than 1 MiB."""
    shape = tuple(variable.shape)
    if len(shape) < 2 and nbytes(variable) < LARGE_BYTES:
        return Wants("vector", ())
    # The last among equals: in a square kernel these are, as a rule, the outputs.
    order = sorted(range(len(shape)), key=lambda d: (-shape[d], -d))
    return Wants("shape", tuple(Dim(d, f"elements of dim {d}") for d in order), exact=False)


def lay_out(variable: Any, role: Wants, mesh: MeshSpec) -> VariableLayout:
    """Choose the layout of one variable: each mesh axis splits one of ``role.dims`` whose length its size divides."""
    shape = tuple(int(n) for n in variable.shape)
    if not role.dims or (nbytes(variable) < _LEAST_SPLIT_BYTES and not role.even_small):
        # Replicated on purpose, so no fallback is reported.
        return VariableLayout.of(variable, Layout.replicated(mesh, len(shape)), role.rule if not role.dims else "small")
    spec: list[tuple[str, ...]] = [()] * len(shape)

    def split(dims: Sequence[Dim], axis: str) -> Dim | None:
        size = mesh.axis_size(axis)
        if (found := _first_that_divides(shape, dims, size)) is not None and size > 1:
            spec[found.index] = (axis,)
        return found

    matrices = [d for d in role.dims if d.what == MATRICES]
    # First: no other axis should take the dim that these need.
    undivided = [axis for axis in mesh.axes_of("expert") if matrices and split(matrices, axis) is None]
    model_axes = mesh.axes_of("model")
    dim = split([d for d in role.dims if not spec[d.index]], model_axes[0]) if model_axes else None
    instead = {axis: split([d for d in role.dims if not spec[d.index]], axis) for axis in undivided}
    for axis in mesh.axes:
        size = mesh.axis_size(axis)
        if size == 1 or not (axis in model_axes[1:] or mesh.axis_kind(axis) == "fsdp"):
            continue
        # Unsplit dims first, the longest first: an fsdp axis saves memory, whichever dim it takes.
        for d in sorted(role.dims, key=lambda d: (bool(spec[d.index]), -shape[d.index])):
            if shape[d.index] % (size * Layout(mesh, tuple(spec)).parts[d.index]) == 0:
                spec[d.index] = (*spec[d.index], axis)
                break
    layout = Layout(mesh, tuple(spec))
    fallbacks = (_fallback_of(variable, matrices[0], axis, other, layout=layout) for axis, other in instead.items())
    fallback = next(fallbacks, None) or _fallback(variable, role, dim, layout=layout)
    return VariableLayout.of(variable, layout, role.rule, fallback)


def lay_out_along(variable: Any, role: Follows, leader: Layout) -> VariableLayout:
    """Return the layout of a variable that is split like its leader, or replicated if that split would be uneven."""
    layout = Layout(leader.mesh, tuple(() if d is None else leader.spec[d] for d in role.dims))
    if not layout.divides(tuple(variable.shape)):
        layout = Layout.replicated(leader.mesh, len(variable.shape))
    return VariableLayout.of(variable, layout, f"{role.rule} follows {role.leader.path}")


def decide_layouts(
    variables: Mapping[int, Any],
    roles: Mapping[int, LayoutRole],
    mesh: MeshSpec,
    *,
    fixed: Mapping[int, VariableLayout] | None = None,
) -> dict[int, VariableLayout]:
    """Choose the layout of every variable by its role; return them by ``id(variable)``. Those in ``fixed`` are kept."""
    placed: dict[int, VariableLayout] = dict(fixed or {})
    waiting: dict[int, Follows] = {}
    for key, variable in variables.items():
        role = roles[key]
        if key in placed:
            continue
        if isinstance(role, Follows):
            waiting[key] = role
        else:
            placed[key] = lay_out(variable, role, mesh)
    # In rounds, as a leader may be a follower itself: the slot of a bias follows the bias, which follows its kernel.
    while waiting:
        ready = [k for k, role in waiting.items() if id(role.leader) in placed]
        if not ready:  # the leader is not among the variables, so there is none to follow
            placed |= {k: lay_out(variables[k], by_shape(variables[k]), mesh) for k in waiting}
            break
        for key in ready:
            role = waiting.pop(key)
            placed[key] = lay_out_along(variables[key], role, placed[id(role.leader)].layout)
    return placed


def as_far_as_it_divides(variable: Any, role: LayoutRole, wanted: Layout, *, rule: str) -> VariableLayout:
    """Return the layout ``wanted`` by a rule. Mesh axes that do not divide a dim evenly split another dim, or none."""
    shape = tuple(int(n) for n in variable.shape)
    if wanted.divides(shape):
        return VariableLayout.of(variable, wanted, rule)
    candidates = role.dims if isinstance(role, Wants) else ()
    spec: list[tuple[str, ...]] = list(wanted.spec)
    why = []
    for d, (length, parts) in enumerate(zip(shape, wanted.parts, strict=True)):
        if length % parts == 0:
            continue
        axes, spec[d] = spec[d], ()
        why.append(f"{length} does not divide by {parts}")
        # Move the axes to the best free dim of the role that divides, else drop them.
        free = [c for c in candidates if not spec[c.index] and c.index != d]
        if (other := _first_that_divides(shape, free, parts)) is not None:
            spec[other.index] = axes
    layout = Layout(wanted.mesh, tuple(spec))
    reason = "; ".join(why) + ("; replicated" if layout.is_replicated else f"; split as {layout} instead")
    return VariableLayout.of(variable, layout, rule, Fallback(variable.path, str(wanted), str(layout), reason))


def _first_that_divides(shape: tuple[int, ...], dims: Any, parts: int) -> Dim | None:
    return next((d for d in dims if shape[d.index] % parts == 0), None)


def _fallback(variable: Any, role: Wants, dim: Dim | None, *, layout: Layout) -> Fallback | None:
    wanted, mesh, shape = role.dims[0], layout.mesh, tuple(variable.shape)
    axes = [axis for axis in (*mesh.axes_of("model"), *mesh.axes_of("fsdp")) if mesh.axis_size(axis) > 1]
    if not axes or axes[0] in mesh.axes_of("fsdp"):  # an fsdp axis may take any dim
        dim = None
        if not axes or not layout.is_replicated:
            return None
    elif dim == wanted or (dim is not None and not role.exact):
        return None
    if not role.exact:
        ideal = Layout.split(mesh, len(shape), dim=wanted.index, axis=axes[0])
        why = f"no dim of {shape} divides by {mesh.axis_size(axes[0])}; replicated"
        return Fallback(variable.path, str(ideal), str(layout), why)
    return _fallback_of(variable, wanted, axes[0], dim, layout=layout)


def _fallback_of(variable: Any, wanted: Dim, axis: str, dim: Dim | None, *, layout: Layout) -> Fallback:
    """Return the fallback of a variable of which an axis splits another dim than the one that it should, or none."""
    shape, size = tuple(variable.shape), layout.mesh.axis_size(axis)
    ideal = Layout.split(layout.mesh, len(shape), dim=wanted.index, axis=axis)
    instead = "replicated" if dim is None else f"its {shape[dim.index]} {dim.what} are split instead"
    count, what = shape[wanted.index], wanted.what
    if count == 1:
        what = what.replace("entries", "entry").replace("matrices", "matrix").removesuffix("s")
    why = f"{count} {what} {'does' if count == 1 else 'do'} not divide by {size}; {instead}"
    return Fallback(variable.path, str(ideal), str(layout), why)
