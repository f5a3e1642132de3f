"""`LayoutChoice`: a layout for every variable, why it was chosen, and where the wanted one did not divide evenly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax

from shardload.errors import MeshError
from shardload.keras_bridge.layer_layouts import CallLayouts
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.recomputation import Recompute
from shardload.keras_bridge.variables import has_value, numbered, sharding_of, value_of
from shardload.layouts.model_variables import LARGE_BYTES, all_variables, nbytes
from shardload.reports.markup import preformatted
from shardload.sharding.devices import MeshDevices, resolve_devices
from shardload.sharding.layout import Fallback, Layout
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.units import plural

KEEP_LAYOUT = "as it was"
"""The ``mode`` of a `LayoutChoice` in which every variable keeps the layout that it has now."""


@dataclass(frozen=True, slots=True)
class VariableLayout:
    """The layout of one variable, what led to it, and the variable's path, shape and bytes."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    """Bytes of the whole value of the variable, as if it were on one device."""
    layout: Layout
    rule: str
    """Why this layout, for reports: what the variable is (``bias``), the pattern of a user's rule, or ``default``."""
    fallback: Fallback | None = None
    """What the rule wanted and why the mesh did not allow it; ``None`` if ``layout`` is what the rule wanted."""

    @classmethod
    def of(cls, variable: Any, layout: Layout, rule: str, fallback: Fallback | None = None) -> VariableLayout:
        """Return an entry for a Keras variable with its path, shape and bytes; the variable may have no value yet."""
        return cls(variable.path, tuple(variable.shape), nbytes(variable), layout, rule, fallback)

    @property
    def device_bytes(self) -> int:
        """Bytes of the variable on each device."""
        return self.nbytes // math.prod(self.layout.parts)


@dataclass(frozen=True, slots=True)
class LayoutChoice:
    """Layouts of all variables of one model on one mesh."""

    mesh: MeshSpec
    mode: str
    """What chose the layouts: ``auto``, ``keras_hub``, ``replicated``, ``layout_map``, ``rules``, … or a file."""
    by_id: Mapping[int, VariableLayout]
    """``id(variable)`` → layout: first for ``model.variables``, then for compiled metrics and optimizer slots."""
    batch_axes: tuple[str, ...] | None = None
    """The mesh axes that split the batch, if a plan or a Keras distribution names them; ``None``: the mesh's own."""
    uses: Mapping[int, Layout] = field(default_factory=dict)
    """``id(variable)`` → layout that the model computes with, for variables that are stored in another layout.

    ``by_id`` has the stored layout, which splits such a variable over more mesh axes. Each step gathers it for use."""
    gather_dtypes: Mapping[int, str] = field(default_factory=dict)
    """``id(variable)`` → dtype in which it is gathered, for those of ``uses`` that are read in a smaller dtype only."""
    remat: Mapping[str, Recompute] = field(default_factory=dict)
    """For each kind of blocks that recomputes values in the backward pass (by class name), which: see `LayoutPlan`."""
    call_layouts: tuple[CallLayouts, ...] = ()
    """Layouts at both ends of layers with weights, if a plan splits activations along their sequence."""
    activations: Callable[[str], Any] | None = field(default=None, repr=False, compare=False)
    """A function from the path of a layer's output (``dense/output``) to the layout of that output: a ``TensorLayout``
    from the user's LayoutMap, a `jax.sharding.PartitionSpec`, or ``None`` where XLA shall choose."""
    rule_notes: tuple[str, ...] = ()
    """Sentences on rules of a Keras distribution that match no variable; rules from other sources raise instead."""

    def of(self, variable: Any) -> Layout:
        """Return the layout of a variable."""
        return self.by_id[id(variable)].layout

    @property
    def variables(self) -> tuple[VariableLayout, ...]:
        """The values of ``by_id``: one `VariableLayout` for each variable, in the order of the model's variables."""
        return tuple(self.by_id.values())

    @property
    def splits_batch(self) -> tuple[str, ...]:
        """The mesh axes that split the batch."""
        return self.mesh.batch_axes if self.batch_axes is None else self.batch_axes

    @property
    def layouts(self) -> Mapping[int, Layout]:
        """The `Layout` of each variable, by ``id(variable)``, without the rule that led to it."""
        return {key: planned.layout for key, planned in self.by_id.items()}

    @property
    def fallbacks(self) -> tuple[Fallback, ...]:
        """One entry for each variable that got another layout than its rule wanted, as a dim did not divide evenly."""
        return tuple(v.fallback for v in self.variables if v.fallback is not None)

    @property
    def sharded(self) -> int:
        """Number of split variables."""
        return sum(not v.layout.is_replicated for v in self.variables)

    @property
    def replicated(self) -> int:
        """Number of replicated variables."""
        return len(self.variables) - self.sharded

    @property
    def replicated_large(self) -> tuple[str, ...]:
        """Paths of variables of at least 1 MiB that are replicated, for reports: split, they would take less memory.

        Empty if the user asked for ``replicated``, or if the mesh has no axis that splits weights.
        """
        if self.mode == "replicated" or not weight_axes(self.mesh):
            return ()
        return tuple(v.path for v in self.variables if v.layout.is_replicated and v.nbytes >= LARGE_BYTES)

    @property
    def idle_axes(self) -> tuple[str, ...]:
        """Mesh axes that are meant to split weights but split none, although some variable has at least 1 MiB."""
        # No warning for a layout that was requested or kept, or where every variable is too small to split.
        if self.mode in ("replicated", KEEP_LAYOUT) or all(v.nbytes < LARGE_BYTES for v in self.variables):
            return ()
        used = {axis for v in self.variables for axes in v.layout.spec for axis in axes}
        return tuple(axis for axis in weight_axes(self.mesh) if axis not in used)

    @property
    def idle_notes(self) -> tuple[str, ...]:
        """One sentence for each mesh axis that splits no weight, for reports: its devices store the same weights."""
        return tuple(
            f"axis {axis!r} of the mesh {self.mesh} splits no weight: the "
            f"{plural(self.mesh.axis_size(axis), 'device')} along it store the same weights"
            for axis in self.idle_axes
        )

    @property
    def guess_notes(self) -> tuple[str, ...]:
        """One sentence for each mesh axis whose use was guessed from its position, because its name is unknown."""
        return self.mesh.guess_notes if self.mode == "auto" else ()

    @property
    def nbytes(self) -> int:
        """Bytes of all variables together, each counted once however many devices have a copy."""
        return sum(v.nbytes for v in self.variables)

    @property
    def device_bytes(self) -> int:
        """Bytes of all variables on one device. Every device has as many, because every split is even."""
        return sum(v.device_bytes for v in self.variables)

    @property
    def rules(self) -> Mapping[str, str]:
        """Path of each variable → why it has its layout. Of several with one path, the second is ``PATH#2``, …."""
        variables = self.variables
        return dict(zip(numbered(v.path for v in variables), (v.rule for v in variables), strict=True))

    def _repr_html_(self) -> str:
        return preformatted(self.summary())

    def summary(self) -> str:
        """Return a few lines of text: number of split variables, bytes per device, fallbacks, and unused mesh axes."""
        lines = [
            f"layout {self.mode} on {self.mesh}: {plural(self.sharded, 'variable')} split, {self.replicated} "
            f"replicated; {self.device_bytes:,} of {plural(self.nbytes, 'byte')} on each device"
        ]
        if not weight_axes(self.mesh) and self.mode != "replicated":
            axis = " and ".join(map(repr, self.mesh.batch_axes))
            lines.append(f"axis {axis} splits the batch: this mesh has no axis to split weights over")
        lines += [*self.idle_notes, *self.guess_notes, *self.rule_notes]
        # One line per reason: a stack of layers has the same fallback in each of them.
        for why, count in Counter(f.why for f in self.fallbacks).items():
            first = next(f.variable for f in self.fallbacks if f.why == why)
            others = f" and {count - 1} more" if count > 1 else ""
            lines.append(f"fallback: {first}{others}: {why}")
        lines += [f"replicated though large: {path}" for path in self.replicated_large]
        return "\n".join(lines)


def weight_axes(mesh: MeshSpec) -> tuple[str, ...]:
    """Return the mesh axes of more than one device that may split weights."""
    return tuple(
        axis for axis in mesh.axes if mesh.axis_size(axis) > 1 and mesh.axis_kind(axis) in ("fsdp", "model", "expert")
    )


# ---- the current layout of a model, which a load without `mesh` keeps ---------------------------------
#
# every value on one device              ─► a 1x1 mesh on that device
# layouts or values over one mesh        ─► that mesh and those layouts; values on one device count as replicated
# every value lost to a failed load      ─► their previous mesh (`ModelRecord.devices`)
# no values                              ─► no current mesh: the load chooses one


def current_devices(model: Any) -> MeshDevices | None:
    """Return the mesh that a model's variables are on, ``None`` if they are on none; raise if they are on several."""
    shardings = [s for v in all_variables(model).values() if (s := _sharding(v)) is not None]
    meshes = {s.mesh for s in shardings if isinstance(s, jax.sharding.NamedSharding)}
    if len(meshes) > 1:
        raise MeshError(
            f"Cannot find the mesh of {model.name!r}: its variables are spread over {plural(len(meshes), 'mesh')}, "
            "expected one. Pass mesh= to choose one"
        )
    if not shardings:
        return record_of(model).devices
    if meshes:
        return resolve_devices(meshes.pop())
    # Values on several single devices count as on the first: a load moves them all to one.
    first = min((d for s in shardings for d in s.device_set), key=lambda d: d.id)
    return MeshDevices(MeshSpec(DEFAULT_AXES, (1, 1)), (first,))


def _sharding(variable: Any) -> Any:
    # The layout that a variable has been given counts first: an abstract variable has no value.
    wanted = sharding_of(variable)
    return value_of(variable).sharding if wanted is None and has_value(variable) else wanted


def current_layout(model: Any, devices: MeshDevices) -> LayoutChoice:
    """Return the layouts that variables have now on ``devices``, their mesh: a load without ``layout`` keeps them."""
    by_id = {}
    for key, variable in all_variables(model).items():
        sharding = _sharding(variable)
        spec = sharding.spec if isinstance(sharding, jax.sharding.NamedSharding) else ()
        layout = Layout.of_spec(devices.mesh, spec, len(variable.shape))
        by_id[key] = VariableLayout.of(variable, layout, KEEP_LAYOUT)
    return LayoutChoice(devices.mesh, KEEP_LAYOUT, by_id)
