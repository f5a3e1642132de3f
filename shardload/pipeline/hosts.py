"""What each host reads and receives in a load by several, from a load that one process has planned.

Layers repeat, and so do hosts: of tensors that are cut alike one is planned, and of hosts with the same shards, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

from shardload.manifest import Extent
from shardload.pipeline.preparing import PreparedLoad
from shardload.reports import HostReads, ReadReason, SharedReads
from shardload.transfer.load_plan import Binding
from shardload.transfer.owners import Replicas, hosts_of, plan_owners
from shardload.transfer.planning import needed_by_tensor, plan_transfers

_PLANNED_HOSTS = 16
"""Most hosts whose reads are planned one by one."""


def host_reads(prepared: PreparedLoad, hosts: int, replicas: Replicas) -> HostReads:
    """Return what each of ``hosts`` processes reads if they share the devices of a planned load equally."""
    bindings, devices = prepared.mapping.bindings, prepared.devices.mesh.size // hosts
    boxes = [layout.bounds(shape) for layout, shape in {(b.layout, b.view.shape) for b in bindings}]
    kinds: dict[tuple[frozenset[int], ...], list[int]] = {}
    for first in range(0, prepared.devices.mesh.size, devices):
        # Equal boxes are one object (`Layout.bounds`).
        shards = tuple(frozenset(map(id, every[first : first + devices])) for every in boxes)
        kinds.setdefault(shards, []).append(first)
    alike = list(kinds.values())
    if len(alike) > _PLANNED_HOSTS:
        alike = [alike[i * (len(alike) - 1) // (_PLANNED_HOSTS - 1)] for i in range(_PLANNED_HOSTS)]
    times, chosen = _representatives(prepared, bindings)
    counts = [_bytes(prepared, chosen, times, range(first, first + devices)) for first, *_ in alike]
    computed = prepared.computed_bytes
    read = sum(len(same) * (one[1] + computed) for same, one in zip(alike, counts, strict=True))
    return HostReads(
        hosts=hosts,
        devices=devices,
        needed=max(needed for needed, _ in counts) + computed,
        read=max(read for _, read in counts) + computed,
        total_read=read * hosts // sum(map(len, alike)),
        kinds=len(kinds),
        planned=len(counts),
        shared=_shared_reads(prepared, hosts, replicas),
    )


def _representatives(prepared: PreparedLoad, bindings: Sequence[Binding]) -> tuple[Counter[str], list[Binding]]:
    """Return one of each kind of tensors that are read alike, by its bindings, and how many tensors it stands for."""
    by_tensor: dict[str, list[Binding]] = {}
    for binding in bindings:
        by_tensor.setdefault(binding.view.tensor, []).append(binding)
    first: dict[Hashable, str] = {}
    times = Counter[str]()
    for name, sharing in by_tensor.items():
        tensor = prepared.manifest.tensors[name]
        views = ((b.view.offset, b.view.shape, b.view.strides, b.layout, b.dtype) for b in sharing)
        # Chunks may lie differently in each tensor, and readers of equal shape may still differ.
        key: Hashable = (tensor.shape, tensor.dtype, *views) if isinstance(tensor.storage, Extent) else name
        times[first.setdefault(key, name)] += 1
    return times, [binding for name in times for binding in by_tensor[name]]


def _bytes(
    prepared: PreparedLoad, bindings: Sequence[Binding], times: Counter[str], positions: range
) -> tuple[int, int]:
    """Return the bytes that the devices at these positions need, and that their process reads."""
    plan = plan_transfers(
        prepared.manifest,
        bindings,
        host_memory_bytes=prepared.plan.host_memory_bytes,
        positions=positions,
        scatter=prepared.source.checker is None,
    )
    needed = needed_by_tensor(prepared.manifest, bindings, positions=positions)
    read = sum(block.read_bytes * times[block.tensor] for block in plan.blocks)
    return sum(n_bytes * times[name] for name, n_bytes in needed.items()), read


def _shared_reads(prepared: PreparedLoad, hosts: int, replicas: Replicas) -> SharedReads | None:
    """Return what hosts read and receive if each byte is read by one of them; ``None`` if that was not asked for."""
    bindings = prepared.mapping.bindings
    if replicas == "read" or hosts == 1 or not bindings:
        return None
    process_of = hosts_of(prepared.devices.mesh, hosts)
    owners = plan_owners(prepared.manifest, bindings, process_of=process_of, replicas="broadcast")
    chosen = plan_owners(prepared.manifest, bindings, process_of=process_of, replicas=replicas)
    read = sum(choice.read_bytes for choice in owners.choices) + hosts * prepared.computed_bytes
    return SharedReads(
        read=-(-read // hosts),
        total_read=read,
        received=sum(choice.received_bytes for choice in owners.choices),
        exchanged=sum(bool(choice.moves) for choice in owners.choices),
        is_chosen=chosen.exchanges,
        reasons=tuple(ReadReason(b.name, c.strategy, c.why) for b, c in zip(bindings, owners.choices, strict=True)),
    )
