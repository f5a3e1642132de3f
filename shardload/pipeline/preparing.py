"""All decisions of a load, before a model is changed: mapping, layouts, plan, and whether they fit.

These decisions read only headers, and the values of tensors that no variable uses, to check that they may be ignored:
copies of used tensors, or all zeros (`shardload.mapping.outside`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardload import mapping as tensor_mapping
from shardload.errors import MismatchError
from shardload.hub import quantised
from shardload.keras_bridge.quantising import QuantisedKernel, quantise_structure, renew_optimizer
from shardload.layouts.choice import current_layout
from shardload.loaders import spec_of
from shardload.loaders.quantised.kept import without_dequantised
from shardload.manifest import Manifest
from shardload.mapping.keeping import kept_kernels, kept_manifest, kept_map, pack_kernels
from shardload.mapping.layer_hooks import has_keras_hook
from shardload.mapping.outside import OutsideTensor
from shardload.mapping.quantising import quantised_layouts, quantised_map
from shardload.mapping.replaced import replaced_notes
from shardload.mapping.stored_values import lacking_values, stored_values
from shardload.mapping.variable_map import Mismatch, VariableMap
from shardload.parallel import LayoutChoice, choose
from shardload.pipeline.request import Matching
from shardload.resolve.opening import OpenedSource
from shardload.sharding.devices import MeshDevices, local_positions
from shardload.transfer.casts import is_float
from shardload.transfer.direct_io import Io, choose_io
from shardload.transfer.owners import OwnerPlan, Replicas, plan_owners
from shardload.transfer.planning import LoadPlan, needed_by_tensor, plan_transfers
from shardload.transfer.read_tensor import require_decoders
from shardload.typing import LayoutLike

_NOT_STRICT = " Pass strict=False (--no-strict) to load what fits and report the rest."
_OTHER_OPTIMIZER = (
    " Only the optimizer differs: pass items='weights' to load the weights and keep the model's optimizer as it is. "
    "strict=False continues with the slots that both optimizers have, and the stored iterations and learning rate."
)
_OTHER_OPTIMIZER_BUILT = " Only the optimizer differs: pass compile=False (--no-compile) to load the model without it."
_SHOWN = 8
"""Most differences that an error lists; it states how many more there are."""


@dataclass(frozen=True, slots=True)
class PreparedLoad:
    """A load with all its decisions (mapping, layouts, plan of reads), made before the model is changed."""

    source: OpenedSource
    model: Any
    devices: MeshDevices
    matching: Matching
    mapping: VariableMap
    layouts: LayoutChoice
    plan: LoadPlan
    direct: bool = field(default=False, kw_only=True)
    """Whether files are read past the page cache (`shardload.transfer.direct_io`)."""
    notes: tuple[str, ...] = ()
    """Notes for the report: on the source, and on how the model was built."""
    left_out: tuple[Mismatch, ...] = ()
    """Variables left out of the load because their tensors do not match (possible only with ``strict=False``)."""
    outside: tuple[OutsideTensor, ...] = ()
    """Tensors that the model does not use, for a known reason (a buffer, a head, a copy): reported, but no error."""
    compared_bytes: int = 0
    """Number of bytes read to decide which tensors are ``outside``: values compared with copies or with zeros."""
    why_unused: Mapping[str, str] = field(default_factory=dict)
    """For unused tensors, by name, the reason why the model does not use them, if it is known."""
    owners: OwnerPlan | None = None
    """Which process reads what, and what they exchange; ``None`` if one process loads alone."""
    kernels: tuple[QuantisedKernel, ...] = ()
    """The kernels that are quantised while they are loaded."""

    @property
    def manifest(self) -> Manifest:
        """The checkpoint's headers."""
        return self.source.manifest

    @property
    def needed_bytes(self) -> int:
        """Stored bytes that this process's shards need, each counted once, no matter which process reads them."""
        if self.owners is None or not self.owners.exchanges:
            return self.plan.needed_bytes
        return self._needed_at(self.plan.positions)

    @property
    def mesh_bytes(self) -> int:
        """Stored bytes that all devices of the mesh need, each byte counted once."""
        return self._needed_at(range(self.devices.mesh.size))

    def _needed_at(self, positions: Sequence[int]) -> int:
        return sum(needed_by_tensor(self.manifest, self.mapping.bindings, positions=positions).values())

    @property
    def computed_bytes(self) -> int:
        """Bytes of the tensors to compute values from: each process reads them whole, outside of ``plan``."""
        names = {name for computed in self.mapping.computed for name in computed.tensors}
        return sum(self.manifest.tensors[name].stored_bytes for name in names)

    def validated(self) -> PreparedLoad:
        """Raise `MismatchError` if checkpoint and model differ; with ``strict=False``, return a load of what fits."""
        require_decoders(self.manifest.tensors[name] for name in self.mapping.read)
        if not self.matching.strict:
            return replace(self, mapping=self.mapping.without_mismatched(), left_out=self.mapping.mismatched)
        problems = [f"does not match: {m}" for m in self.mapping.mismatched]
        problems += [f"does not match: {text}" for text in self._integers_for_floats()]
        problems += [f"missing from the checkpoint: {name}" for name in self.mapping.missing]
        # Keras accepts tensors that the model does not use, but none that a converter asks for and does not find.
        unused, absent = ((), self.mapping.absent) if self.matching.as_keras else (self.mapping.unused, ())
        problems += [f"missing from the checkpoint: tensor {name}" for name in absent]
        why = {name: f" ({reason})" for name, reason in self.why_unused.items()}
        problems += [f"not used by the model: {name}{why.get(name, '')}" for name in unused]
        if not problems:
            return self
        problems += self.manifest.notes  # what the files contain besides, perhaps the reason
        rest = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        misfit = (
            f"{self.manifest.source} does not fit the model {self.model.name!r} ({type(self.model).__name__}):\n  "
            + "\n  ".join(problems[:_SHOWN])
            + rest
        )
        if self.matching.as_keras:
            raise MismatchError(misfit)
        state = "The model is unchanged."
        if self.kernels and not self.matching.builds:
            state = "The model is quantised, without values. Build it again before another load."
        raise MismatchError(f"{misfit}\n{state}", self._fix(), other_arguments=not self.mapping.advice)

    def _integers_for_floats(self) -> Iterator[str]:
        """Yield a problem for each integer tensor that would fill a float variable: quantised codes without scales.

        Custom loading hooks are exempt, because they may apply scales.
        """
        # A layer with a loading hook of its own may read the scales in it.
        custom = [s for s in self.mapping.steps if s.saveable is not None and not has_keras_hook(s.saveable)]
        exempt = {name for step in custom for name in step.needs}
        for b in self.mapping.bindings:
            stored = self.manifest.tensors[b.view.tensor].dtype
            if is_float(b.dtype) and not is_float(stored) and b.name not in exempt:
                yield (
                    f"Variable {b.name!r} is {b.dtype}, but tensor {b.view.tensor!r} is {stored}: without scales, "
                    "integers are not weights"
                )

    def _fix(self) -> str:
        if self.mapping.advice:
            return self.mapping.advice
        if self.mapping.only_optimizer_differs:
            return _OTHER_OPTIMIZER_BUILT if self.matching.builds else _OTHER_OPTIMIZER
        fix = _NOT_STRICT
        if self.matching.builds and self.mapping.unused:
            fix = (
                f" Where the model is right without a tensor, name it: ignore=[{self.mapping.unused[0]!r}] "
                f"(--ignore {self.mapping.unused[0]}). strict=False (--no-strict) also accepts missing weights."
            )
        if spec_of(self.manifest).tensor_names == "own" and self.mapping.missing and self.mapping.unused:
            function = "call shardload.load_weights(model, source, names=…)" if self.matching.builds else "pass names="
            fix += f" Where only the names differ, {function} with {{tensor: variable path}}."
        return fix


def prepare_load(
    source: OpenedSource,
    model: Any,
    devices: MeshDevices,
    *,
    layout: LayoutLike | None,
    matching: Matching,
    budget_bytes: int | None,
    optimizer: bool = True,
    notes: Sequence[str] = (),
    process_of: Sequence[int] | None = None,
    replicas: Replicas = "auto",
    io: Io = "buffered",
    quantisation: Any = None,
    keep: bool = False,
) -> PreparedLoad:
    """Decide which tensor fills which variable, in which layout, and what is read when; the model is not changed.

    ``process_of`` has the process of each mesh position, if several load together. With ``quantisation``, Keras'
    configuration of one, the model is quantised, which gives it other variables; so does ``keep``, which keeps the
    codes of a quantised folder.
    """
    manifest, ignored = source.manifest, matching.ignore_config
    # Quantised folders are refused by their configuration; of bare files only the mapping shows it.
    quantised.check_before(manifest, ignore=ignored)
    names, as_keras = matching.names, matching.as_keras
    if quantisation is not None or keep:
        renew_optimizer(model)
    if matching.is_restore:
        items, rename = matching.items, matching.rename
        mapping = tensor_mapping.map_state(model, manifest, items=items, rename=rename, names=names)
    else:
        mapping = tensor_mapping.map_weights(model, manifest, names=names, optimizer=optimizer, as_keras=as_keras)
    quantised.check_mapped(manifest, mapping.bindings, mapping.unused, ignore=ignored)
    accepted = quantised.accepted(manifest, mapping.bindings, ignore=ignored)
    has_weights = spec_of(manifest).tensor_names == "step" and matching.items in ("all", "weights")
    lacking = lacking_values(model, stored_values(manifest)) if has_weights else ()
    mapping = replace(mapping, notes=(*accepted, *mapping.notes, *lacking))
    layouts = current_layout(model, devices) if layout is None else choose(model, devices.mesh, layout)
    devices = replace(devices, mesh=layouts.mesh)  # a plan may divide one of its axes in two
    # Layouts come after mapping, because rules look at variables, and before planning, which needs every shard.
    kernels: Sequence[QuantisedKernel] = ()
    before = layouts
    if quantisation is not None:
        kernels = quantise_structure(model, quantisation)
        layouts = quantised_layouts(before, model, kernels)
        mapping = quantised_map(mapping, kernels, before=before, after=layouts)
    if keep:
        stored = kept_kernels(model, mapping, manifest)
        kernels = pack_kernels(model, stored)
        layouts = quantised_layouts(before, model, kernels)
        mapping = kept_map(mapping, stored, kernels, before=before, after=layouts)
        manifest = kept_manifest(manifest, stored)
        source = replace(source, manifest=manifest, notes=without_dequantised(source.notes))
    # What is quantised is staged in a layout of its own.
    laid_out = (b if b.encoding else replace(b, layout=layouts.of(b.variable)) for b in mapping.bindings)
    mapping = replace(mapping, bindings=tuple(laid_out))
    owners = None
    if process_of is not None and mapping.bindings:
        on_cpu = any(device is not None and device.platform == "cpu" for device in devices.devices)
        options: dict[str, Any] = {"process_of": process_of, "replicas": replicas, "on_cpu": on_cpu}
        owners = plan_owners(manifest, mapping.bindings, **options)
    verified = source.checker is not None or any(path.store.is_verifying for path in manifest.files)
    reading = choose_io(io, manifest.files, verified=verified)
    plan = plan_transfers(
        manifest,
        mapping.bindings if owners is None else owners.bindings(mapping.bindings),
        host_memory_bytes=budget_bytes,
        positions=local_positions(devices),
        # Bytes to verify must pass through memory that is not yet a shard's, and so must those of aligned reads.
        scatter=source.checker is None and not reading.direct,
        # The devices of a plan are None: it is made as for CPU devices.
        uploads=any(device is not None and device.platform != "cpu" for device in devices.devices),
        brief=all(device is None for device in devices.devices),
    )
    notes = (*source.notes, *notes, *filter(None, [reading.note]))
    found = PreparedLoad(
        *(source, model, devices, matching, mapping, layouts, plan, notes),
        owners=owners,
        direct=reading.direct,
        kernels=tuple(kernels),
    )
    # Only a model built from the description shows which tensors lie outside of it; any other may be the wrong one.
    if not matching.builds:
        return found
    mapping = tensor_mapping.without_parts(mapping, manifest)
    ignore, compare = matching.ignore, matching.reads_values
    sorted_out = tensor_mapping.sort_unused(mapping, manifest, model, ignore=ignore, compare=compare)
    lacked = {each.tensor for each in sorted_out.outside}
    return replace(
        found,
        notes=(*notes, *replaced_notes(manifest, source.adapters, lacked=lacked)),
        mapping=replace(mapping, unused=sorted_out.unused),
        outside=sorted_out.outside,
        why_unused=sorted_out.why,
        compared_bytes=sorted_out.read_bytes,
    )
