"""Load tensors as sharded `jax.Array`s, without Keras and without a model.

●0 open ─► ●1 start JAX ─► ●2 targets (name → sharding) ─► layouts, grouped by mesh ─► plan
─► ●3 transfer ─► ●4 arrays with just these shardings ─► ●5

At each ● all processes of a `jax.distributed` run wait for each other, as in `shardload.pipeline.load`, unless the call
concerns this process only (`shardload.pipeline.joint_arrays`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import PartitionSpec, Sharding

from shardload.errors import MismatchError, suggests_arguments
from shardload.keras_bridge.caller import warn_caller
from shardload.manifest import Manifest
from shardload.pipeline.array_reader import ArrayReader, is_rule, leaves_of
from shardload.pipeline.array_targets import (
    SCALARS,
    Placed,
    TensorNames,
    TensorNamesArgument,
    WantedArray,
    array_layout,
    as_asked,
    check_keys,
    checked_value,
    first_names,
    is_in_default_memory,
    mesh_devices_of,
    narrows,
    specs_of_boxes,
)
from shardload.pipeline.joint_arrays import ArraysRequest, array_topics, joint_arrays
from shardload.pipeline.opening_together import open_together
from shardload.processes.joint_call import Call
from shardload.progress import Progress, ProgressLike
from shardload.resolve.opening import OpenedSource, open_source
from shardload.sharding.devices import MeshDevices, local_positions, resolve_devices
from shardload.sharding.layout import Bounds, Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.location import Fingerprint
from shardload.transfer.casts import overflow_notes
from shardload.transfer.exchange import execute_together
from shardload.transfer.load_plan import Binding, LoadPlan
from shardload.transfer.owners import OwnerChoice, OwnerPlan, Replicas, plan_owners, process_numbers
from shardload.transfer.placement import jax_mesh
from shardload.transfer.planning import plan_transfers
from shardload.transfer.read_tensor import require_decoders
from shardload.typing import MeshLike, PathLike

ArrayTarget: TypeAlias = (
    "jax.ShapeDtypeStruct | Sharding | PartitionSpec | jax.Array | jax.Device | Format | np.ndarray[Any, Any]"
)
"""Types of objects that say where an array goes; a `jax.ShapeDtypeStruct` or `jax.Array` states shape and dtype too."""


@suggests_arguments
def load_arrays(
    source: PathLike,
    targets: Any,
    *,
    mesh: MeshLike | None = None,
    names: TensorNamesArgument = None,
    transpose: Mapping[str, Sequence[int]] | Callable[[str, tuple[int, ...]], Sequence[int] | None] | None = None,
    dtype: Any = None,
    strict: bool = True,
    format: str | None = None,
    host_memory_bytes: int | str | None = None,
    progress: ProgressLike = None,
    replicas: Literal["auto", "read", "broadcast"] = "auto",
) -> Any:
    """Load a checkpoint of any format straight into sharded `jax.Array`s.

    A target is a `jax.ShapeDtypeStruct` with a sharding, a `NamedSharding`, a `SingleDeviceSharding`, a
    `PartitionSpec` on ``mesh``, a `jax.Device`, a `jax.experimental.layout.Format`, or a `jax.Array` to replace: its
    shape, dtype and sharding. Typed PRNG keys, Python's numbers and arrays of NumPy are targets too, as in Orbax: what
    loads is of the same type. Each process reads what its own devices need.

    In a `jax.distributed` run, all processes make the call, and it succeeds or fails on all of them. A process may
    also call it alone, if the mesh and the targets name no devices of other processes. If ``targets`` is a function,
    pass the mesh too: without one, all processes have to make the call.

    Examples:
        ```python
        from jax.sharding import PartitionSpec as P

        def target(name, shape):
            return P("model") if name.endswith("embed_tokens.weight") else P()

        params = shardload.load_arrays("gemma-2-2b", target, mesh="1x8")  # a dict by tensor name
        ```

    Args:
        source: As for `shardload.load`; its tensors have the names that `shardload.inspect` lists.
        targets: One target for every tensor; or a function of an array's name and shape (and dtype, if it takes three)
            that returns a target, or ``None`` to leave the tensor out; or a dict or another pytree of targets (a module
            of Equinox, the state of Flax NNX or Linen). A leaf's name is its path joined by dots, or by slashes if
            the file's names have them (Orbax, Keras). The ``value`` of a box of Flax may be in the path, the
            tensor's name, both or neither. Functions and numbers in a module stay if there is no tensor for them.
        mesh: The mesh of each `PartitionSpec`, in any form that `shardload.load` accepts. The axes of ``"2x4"`` are
            ``batch`` and ``model``. A `jax.ShapeDtypeStruct` without a sharding is whole on each of its devices, or
            split as its box (`nn.Partitioned`) says.
        names: Tensor names by target names, as a mapping of those that differ or a function. A mapping may have
            more entries, for targets that this call does not have. A `StoredAs` instead of a name is a rule for an
            array that is stored in another form: layers in tensors of their own, fused, with other dims or without
            padding.
        transpose: The order of the tensor's dims in an array, by target name; or a function of the target's name and
            the tensor's shape that returns it, or ``None``. Transposed tensors are read like others.
        dtype: Dtype of floating-point arrays whose target states none, also one of float8; the tensor's own by default.
        strict: Refuse a checkpoint with tensors that no target names.
        format: Name of a format, to require it.
        host_memory_bytes: Most bytes staged in host memory, as for `shardload.load`.
        progress: As for `shardload.load`.
        replicas: As for `shardload.load`, for arrays on meshes of which every process has an equal block.

    Returns:
        The arrays in the structure of ``targets``; for a function or a single target, a dict by tensor name.

    Raises:
        UsageError: When an argument is of the wrong kind.
        SourceNotFoundError: When the name resolves to nothing.
        SourceError: When the checkpoint contradicts itself.
        MismatchError: When a target has no tensor, or one of another shape; under ``strict``, when a tensor is unused.
        MeshError: When ``mesh`` cannot be read or has more positions than there are devices.
        LayoutError: When a sharding does not divide its array.
        TransferError: When reading fails half-way.
        DamagedError: When the bytes of a training step differ from the saved ones.
        DisagreementError: When the processes of a `jax.distributed` run request different arrays.
        ProcessFailedError: When it failed on another process with an error that is not from shardload.
        ProcessLostError: When another process ended, or does not respond for 15 s.
    """
    request = ArraysRequest(
        source=source,
        targets=targets,
        mesh=mesh,
        names=names,
        transpose=transpose,
        dtype=dtype,
        strict=strict,
        format=format,
        host_memory_bytes=host_memory_bytes,
        progress=progress,
        replicas=replicas,
    )
    with joint_arrays(request) as call:
        return _run(request, call)


def _run(request: ArraysRequest, call: Call) -> Any:
    # Headers only. From here on, a file that changes is an error.
    with Fingerprint.opening():
        opened = open_together(call, lambda: open_source(request.source, request.format))
        files = Fingerprint.of(opened.manifest.files, folder=opened.manifest.location)
    for note in opened.manifest.notes:  # of tensors that an index leaves out
        warn_caller(note)
    # Once all processes have headers, as the start of JAX waits for all of them.
    call.start_jax()
    wanted, rebuild = _requested(request, opened.manifest)
    plans = _plans(opened, wanted, request.budget_bytes, replicas=None if call.is_alone else request.replicas)
    call.require(array_topics(opened, wanted, {n: c for plan in plans for n, c in plan.choices.items()}))
    # Twice: a writer must not have changed the files since their headers were read, before and after the reads.
    files.check()
    found = _transfer(opened, wanted, plans, call.watched(request.reporter), call.meet)
    files.check()
    call.meet("the end of the transfer")
    made = rebuild({one.name: found[one.name] if one.finish is None else one.finish(found[one.name]) for one in wanted})
    call.meet("the end")
    return made


def _requested(request: ArraysRequest, manifest: Manifest) -> tuple[list[WantedArray], Callable[[dict[str, Any]], Any]]:
    """Return the arrays to load, and a function that puts them into the structure of the caller's targets."""
    mesh = request.mesh
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        on = resolve_devices(mesh)
        mesh = jax_mesh(on.mesh, on.devices)
    known = TensorNames(manifest, request.names)
    specs = {known.of_box(path): spec for path, spec in specs_of_boxes(request.targets)}
    reader = ArrayReader(manifest, mesh, specs, known, request.transpose, request.float_dtype)
    leaves, rebuild = leaves_of(request.targets, reader)
    for argument, value in (("names", request.names), ("transpose", request.transpose)):
        check_keys(argument, value, leaves, of="target")
    wanted = reader.wanted(leaves)
    if request.strict:
        _check_all_used(manifest, wanted, by_rule=is_rule(request.targets))
    return wanted, rebuild


def _check_all_used(manifest: Manifest, wanted: Sequence[WantedArray], *, by_rule: bool) -> None:
    # A rule sees every tensor, so what it leaves out is left out on purpose; but not all of them.
    used = {name for one in wanted for name in one.tensors}
    if not by_rule and (unused := [name for name in manifest.tensors if name not in used]):
        raise MismatchError(
            f"Cannot load from {manifest.source}: no target names {len(unused)} of its tensors:\n  "
            + "\n  ".join(first_names(unused))
            + "\nPass strict=False to leave them out."
        )
    if not wanted and manifest.tensors:
        raise MismatchError(
            f"Cannot load from {manifest.source}: the function returned None for each of its tensors. Return a "
            "target, such as a PartitionSpec, for those to load, or pass strict=False"
        )


def _bindings(group: Iterable[WantedArray], mesh: MeshSpec) -> Iterator[Binding]:
    # Layers repeat, so thousands of small arrays have a few layouts.
    layouts: dict[tuple[Placed, tuple[int, ...]], Layout] = {}
    for one in group:
        key = one.sharding, one.shape
        if key not in layouts:
            layouts[key] = array_layout(one.name, one.shape, one.sharding, mesh)
        layout, stored = layouts[key], one.stored
        if stored.finer is not None and (finer := stored.finer.layout(layout)) is not None:
            layout, stored = finer, stored.finer.stored
        whole = Bounds.whole(stored.shape)
        for part in stored.parts:
            box = None if part.box == whole else part.box
            yield Binding(one.name, part.view, one.dtype, layout, box=box)


def _is_read_whole(opened: OpenedSource, one: WantedArray) -> bool:
    """Whether an array is read whole on the host: integers of a wider dtype, Python's numbers, arrays of NumPy."""
    narrow = any(narrows(opened.manifest.tensors[name].dtype, one.dtype) for name in one.tensors)
    return narrow or one.finish in SCALARS or one.on_host


@dataclass(frozen=True, slots=True)
class _MeshPlan:
    """What is loaded onto one mesh, and how: a single device is a mesh too."""

    devices: MeshDevices
    bindings: tuple[Binding, ...]
    plan: LoadPlan
    owners: OwnerPlan | None
    """Which process reads what; ``None`` if each process reads what its devices of this mesh need."""

    @property
    def choices(self) -> dict[str, OwnerChoice]:
        """How each array is read, by name, if processes may exchange arrays of this mesh."""
        choices = () if self.owners is None else self.owners.choices
        return dict(zip((b.name for b in self.bindings), choices, strict=False))


def _plans(
    opened: OpenedSource, wanted: Sequence[WantedArray], budget: int | None, *, replicas: Replicas | None
) -> list[_MeshPlan]:
    """Plan all transfers before the first read, so that what cannot be read or does not fit is refused at once."""
    require_decoders(opened.manifest.tensors[name] for one in wanted for name in one.tensors)
    by_mesh: dict[MeshDevices, list[WantedArray]] = {}
    # By name: all processes exchange the arrays of one mesh after those of another.
    for one in sorted(wanted, key=lambda one: one.name):
        if not _is_read_whole(opened, one):
            by_mesh.setdefault(mesh_devices_of(one.sharding), []).append(one)
    return [_mesh_plan(opened, devices, group, budget, replicas) for devices, group in by_mesh.items()]


def _mesh_plan(
    opened: OpenedSource, on: MeshDevices, group: list[WantedArray], budget: int | None, replicas: Replicas | None
) -> _MeshPlan:
    bindings, process_of = tuple(_bindings(group, on.mesh)), process_numbers(on.devices)
    owners = None
    # Processes that have no device of this mesh would not come to the meetings.
    if replicas is not None and len(set(process_of)) == jax.process_count():
        on_cpu = any(device.platform == "cpu" for device in on.devices)
        owners = plan_owners(opened.manifest, bindings, process_of=process_of, replicas=replicas, on_cpu=on_cpu)
    plan = plan_transfers(
        opened.manifest,
        bindings if owners is None else owners.bindings(bindings),
        host_memory_bytes=budget,
        positions=local_positions(on),
        scatter=opened.checker is None,
        uploads=any(device.platform != "cpu" for device in on.devices),
    )
    return _MeshPlan(on, bindings, plan, owners)


def _transfer(
    opened: OpenedSource,
    wanted: Sequence[WantedArray],
    plans: Sequence[_MeshPlan],
    shown: Progress,
    meet: Callable[[str], None],
) -> dict[str, Any]:
    arrays = {one.name: checked_value(opened, one) for one in wanted if _is_read_whole(opened, one)}
    overflowed: tuple[str, ...] = ()
    shardings, shapes = {one.name: one.sharding for one in wanted}, {one.name: one.shape for one in wanted}
    usual = {sharding: is_in_default_memory(sharding) for sharding in dict.fromkeys(shardings.values())}

    def ready(name: str, array: Any) -> None:
        arrays[name] = as_asked(array, shardings[name], shapes[name])

    try:
        for each in plans:
            shown.start(each.plan.read_bytes, "Loading")
            stats = execute_together(
                each.plan,
                opened.manifest,
                each.owners,
                each.bindings,
                devices=each.devices.devices,
                meet=meet,
                on_ready=ready,
                progress=shown.advance,
                check=opened.checker,
                shardings={
                    binding.name: shardings[binding.name]
                    for binding in each.bindings
                    if usual[shardings[binding.name]] and binding.view.shape == shapes[binding.name]
                },
            )
            overflowed += stats.overflowed
    finally:
        shown.stop()
    for text in overflow_notes(overflowed):
        warn_caller(text)
    return arrays
