"""VariableExchange what one process has read and others need, so that each byte leaves storage once.

Variables arrive in their owner layout (`shardload.transfer.owners`), and leave in their target layout. They are
exchanged in batches, whose order and content are equal on all processes: a collective waits for all of them. Before
each batch all processes meet, because a collective that waits long for a process that still reads would time out::

    threads  ──[ read a ][ read b ][ read c ][ read d ]──[ read e ]…    reads go on during an exchange
    caller                                 meet ─[ a b c ]───── meet ─[ d e ]─ …

Bits are exchanged as integers: Gloo, JAX's collectives for CPUs, computes with bfloat16 in float32, which changes NaNs.

Imports JAX: import this module only when a transfer is about to start.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from numpy.typing import NDArray

from shardload.errors import TransferError
from shardload.manifest import Manifest
from shardload.sharding.layout import Bounds
from shardload.transfer import execution
from shardload.transfer.execution import TransferStats
from shardload.transfer.geometry import Ordered
from shardload.transfer.load_plan import Binding, LoadPlan
from shardload.transfer.owners import OwnerChoice, OwnerPlan
from shardload.transfer.placement import assemble, jax_mesh, named_sharding, partition_spec, shard_bounds

EXCHANGE_BYTES = 64 << 20
"""Most bytes on each device of variables that are exchanged at a time, besides the device's own share of the model. A
variable of which a device has more is exchanged alone."""
_COMPILED_TOGETHER = 4
"""Most programs that are compiled at a time."""


@dataclass(frozen=True, slots=True)
class ExchangeProgram:
    """What is compiled to exchange a variable; variables of one shape and layout share it."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    choice: OwnerChoice
    order: tuple[int, ...]
    """The dims of the variable, those that go furthest in the file first: the order of flattened shards."""

    def lane(self, devices: tuple[Any, ...]) -> NamedSharding:
        """Return the owner layout on the devices that exchange: of one process's devices with equal shards, one."""
        owner = self.choice.layout
        used = {axis for axes in owner.spec for axis in axes}
        single = tuple(axis not in used for axis in owner.mesh.axes)
        return NamedSharding(_part(jax_mesh(owner.mesh, devices), single), partition_spec(owner.spec))


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One variable to exchange: its name, its binding, and how it is read."""

    name: str
    binding: Binding
    choice: OwnerChoice

    @property
    def program(self) -> ExchangeProgram:
        """What is compiled to exchange the variable."""
        view = self.binding.view
        order = Ordered.of(view, Bounds.whole(view.shape)).order
        return ExchangeProgram(view.shape, self.binding.dtype, self.choice, order)

    @property
    def device_bytes(self) -> int:
        """Bytes on each device that the variable takes during the exchange, besides its share of the target."""
        loaded = self.choice.flat or self.binding.view.shape
        owned = math.prod(self.choice.layout.shard_shape(loaded)) * self.binding.dtype.itemsize
        # Each all-to-all but the last leaves a result of its own.
        return owned * (1 + sum(move.target_dim is not None for move in self.choice.moves))


def batches(plan: OwnerPlan, bindings: Sequence[Binding], manifest: Manifest) -> Iterator[tuple[Exchanged, ...]]:
    """Yield the variables that are exchanged together, in the order in which their tensors lie in the files."""
    place = {name: number for number, name in enumerate(manifest.tensors)}
    found = [Exchanged(b.name, b, c) for b, c in zip(bindings, plan.choices, strict=True) if c.moves]
    found.sort(key=lambda one: place[one.binding.view.tensor])
    held: list[Exchanged] = []
    for one in found:
        if held and sum(each.device_bytes for each in held) + one.device_bytes > EXCHANGE_BYTES:
            yield tuple(held)
            held = []
        held.append(one)
    if held:
        yield tuple(held)


def execute_together(
    plan: LoadPlan,
    manifest: Manifest,
    owners: OwnerPlan | None,
    bindings: Sequence[Binding],
    *,
    devices: Sequence[Any],
    meet: Callable[[str], None],
    on_ready: Callable[[str, Any], None],
    shardings: Mapping[str, Any] | None = None,
    **options: Any,
) -> TransferStats:
    """Carry out a plan as `execute` does, and exchange what other processes have read.

    Args:
        plan: What to read: made from ``owners.bindings(bindings)``.
        manifest: The manifest the plan was made from.
        owners: Which process reads what; ``None`` if one process loads alone.
        bindings: The variables, with the layouts that they get in the end.
        devices: One per mesh position, in order.
        meet: Waits for all processes, at a meeting of the given name.
        on_ready: Called with name and array when a variable is complete.
        shardings: As for `execute`.
        options: Other arguments of `execute`.
    """
    if owners is None or not owners.exchanges:
        return execution.execute(plan, manifest, devices=devices, on_ready=on_ready, shardings=shardings, **options)
    outputs = [output for binding in bindings for output in binding.outputs]
    wanted = {o.name: (shardings or {}).get(o.name) or named_sharding(o.layout, devices) for o in outputs}
    exchange = VariableExchange(batches(owners, bindings, manifest), wanted, devices, meet=meet, on_ready=on_ready)
    try:
        # What is not exchanged is loaded on the refined mesh, too, and gets its own sharding at once.
        whole = {name: sharding for name, sharding in wanted.items() if name not in exchange.names}
        stats = execution.execute(plan, manifest, devices=devices, on_ready=exchange.ready, shardings=whole, **options)
        exchange.finish()
    finally:
        exchange.close()
    return stats


class VariableExchange:
    """Receives variables as they are read, exchanges those that the plan says, and passes all on to ``on_ready``."""

    def __init__(
        self,
        batches: Iterable[tuple[Exchanged, ...]],
        shardings: Mapping[str, Any],
        devices: Sequence[Any],
        *,
        meet: Callable[[str], None],
        on_ready: Callable[[str, Any], None],
    ) -> None:
        self._devices, self._meet, self._on_ready = tuple(devices), meet, on_ready
        self._waiting, self._shardings = list(batches), shardings
        self.names = {one.name for batch in self._waiting for one in batch}
        """Names of the variables that are exchanged."""
        self._number = itertools.count(1)
        self._read: dict[str, Any] = {}
        # Compiled while the threads read, several at a time: a program takes 0.1 to 0.5 s.
        self._compiler = ThreadPoolExecutor(_COMPILED_TOGETHER, thread_name_prefix="shardload-compile")
        self._programs: dict[ExchangeProgram, Future[Any]] = {}
        for one in itertools.chain.from_iterable(self._waiting):
            if (program := one.program) not in self._programs:
                self._programs[program] = self._compiler.submit(compiled, program, self._devices)

    def ready(self, name: str, array: Any) -> None:
        """Receive a variable that is read; exchange a batch once all of its variables have come."""
        if name not in self.names:
            self._on_ready(name, array)
            return
        self._read[name] = array
        while self._waiting and all(one.name in self._read for one in self._waiting[0]):
            self._run(self._waiting.pop(0))

    def finish(self) -> None:
        """Raise unless all variables were exchanged and passed on."""
        if self._waiting:
            raise TransferError(
                f"Cannot exchange {self._waiting[0][0].name!r} between processes: it has not been read. Load the "
                "model again"
            )

    def close(self) -> None:
        """Stop compiling, and drop what was read; needed after an error too."""
        self._compiler.shutdown(wait=False, cancel_futures=True)
        self._read.clear()

    def _run(self, batch: Sequence[Exchanged]) -> None:
        programs = [self._programs[one.program].result() for one in batch]
        self._meet(f"exchange {next(self._number)}")
        for one, program in zip(batch, programs, strict=True):
            shards = exchanged(self._read.pop(one.name), program, one.program.lane(self._devices))
            self._on_ready(one.name, _placed(one.binding.view.shape, self._shardings[one.name], shards))


def exchanged(array: Any, program: Any, lane: NamedSharding) -> dict[Any, Any]:
    """VariableExchange an array in its owner layout; return the shards of its target layout by device.

    ``lane``: the owner layout on the devices that take part.
    """
    kept = lane.device_set
    shards = [shard.data for shard in array.addressable_shards if shard.device in kept]
    # One at a time: Gloo mixes up the messages of two programs that run at once.
    found = program(jax.make_array_from_single_device_arrays(array.shape, lane, shards)).block_until_ready()
    return {shard.device: shard.data for shard in found.addressable_shards}


@functools.lru_cache(maxsize=64)
def _part(mesh: Mesh, single: tuple[bool, ...]) -> Mesh:
    return Mesh(mesh.devices[tuple(slice(0, 1) if one else slice(None) for one in single)], mesh.axis_names)


@functools.lru_cache(maxsize=256)
def compiled(program: ExchangeProgram, devices: tuple[Any, ...]) -> Any:
    """Compile the exchange of an array from its owner layout to its target layout."""

    def undo(shard: Any) -> Any:
        bits = _as_bits(shard)
        for move in reversed(choice.moves):
            if move.target_dim is None:
                bits = jax.lax.all_gather(bits, move.axes, axis=move.owner_dim, tiled=True)
            else:
                bits = jax.lax.all_to_all(bits, move.axes, move.target_dim, move.owner_dim, tiled=True)
        if choice.flat is not None:
            local = choice.target.shard_shape(program.shape)
            bits = bits.reshape([local[d] for d in program.order]).transpose(np.argsort(program.order))
        return bits if bits.dtype == shard.dtype else jax.lax.bitcast_convert_type(bits, shard.dtype)

    choice, lane = program.choice, program.lane(devices)
    out = partition_spec(choice.target.spec)
    # Without check_vma: an all-gather's result is the same on all devices, which JAX does not infer.
    sharded = jax.shard_map(undo, mesh=lane.mesh, in_specs=lane.spec, out_specs=out, check_vma=False)
    loaded = jax.ShapeDtypeStruct(choice.flat or program.shape, program.dtype, sharding=lane)
    return jax.jit(sharded).lower(loaded).compile()


def _as_bits(shard: Any) -> Any:
    if jnp.issubdtype(shard.dtype, jnp.integer) or shard.dtype == jnp.bool_:
        return shard
    return jax.lax.bitcast_convert_type(shard, jnp.dtype(f"uint{8 * shard.dtype.itemsize}"))


def share_memory(devices: Iterable[Any]) -> bool:
    """Whether devices of one process may have one copy of a shard, as if it had been read for all of them."""
    return all(device.platform == "cpu" for device in devices)


def _placed(shape: tuple[int, ...], sharding: NamedSharding, shards: Mapping[Any, Any]) -> Any:
    """Return an array of the shards on some of this process's devices, of which the other devices get copies."""
    boxes = shard_bounds(sharding, shape)
    if len(shards) == len(boxes):
        return jax.make_array_from_single_device_arrays(shape, sharding, [shards[device] for device in boxes])
    by_box = {boxes[device]: shard for device, shard in shards.items()}
    if share_memory(boxes):
        host: dict[Any, NDArray[Any]] = {box: np.asarray(shard) for box, shard in by_box.items()}
        return assemble(shape, sharding, host)
    copies = [jax.device_put(by_box[box], device) for device, box in boxes.items()]
    return jax.make_array_from_single_device_arrays(shape, sharding, copies)
