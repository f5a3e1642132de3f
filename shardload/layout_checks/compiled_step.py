"""Compile a planned step without weights, and read its memory and its collectives from the compiled program.

    model + LayoutChoice + shapes of a batch ─► lower, compile (no values) ─► CompiledStep
                                                                              bytes per device, every collective

The batch is split over the batch axis, activations are laid out as in a model that runs on the mesh, and
everything else is XLA's own decision: this is the program that training on that mesh runs.

On CPU, XLA computes 16-bit floats in 32 bits: copies of all weights appear among the temporaries, and collectives have
twice their bytes. To get the bytes of 16 bits on CPU, compile a float32 model and call `CompiledStep.scaled`.
"""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from numbers import Number
from typing import Any

import jax
import numpy as np

from shardload.errors import MeshError, UsageError
from shardload.keras_bridge.joint_optimizer import FLOAT32_UPDATE
from shardload.layout_checks.hlo import Collective, collective_json, collectives_in
from shardload.layout_checks.step_programs import StepKind, StepProgram, program_of
from shardload.layout_search.given_layouts import GivenLayouts, choice_for
from shardload.layout_search.plan_parts import CompiledCheck
from shardload.layout_search.tracing import is_array
from shardload.layouts.choice import LayoutChoice
from shardload.reports.markup import preformatted
from shardload.sharding.devices import device_list
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.stores.event_loop import collector_paused
from shardload.transfer.placement import named_sharding
from shardload.units import check_no_iterator, format_bytes, plural

_CPU_OPTIONS = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""Options of XLA for CPU. Machine code is not optimised, as it never runs; memory and collectives stay the same."""
_AS_ON_ACCELERATORS = {"xla_disable_hlo_passes": "cse_barrier_expander,cpu-all-reduce-combiner"}
"""XLA for CPU removes the barriers of `jax.checkpoint`, and then keeps what was to be recomputed. It also keeps whole
gradients of all weights, to add them up at the end in one all-reduce. Without these passes, a step needs memory as on
accelerators."""
_GATHERED_LATE = {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
"""XLA for CPU gathers all weights before the first operation of the step. With this scheduler, it gathers them before
their use, as XLA does for accelerators."""
_WORDS = {"forward": "forward pass", "gradients": "forward and backward pass", "training": "training step"}


def compile_step(
    model: Any,
    choice: GivenLayouts,
    inputs: Any,
    *,
    target: Any = None,
    training: Any = None,
    loss: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    devices: Sequence[Any] | None = None,
) -> CompiledStep:
    """Compile a model's step under a choice of layouts, from shapes alone.

    Neither values nor layouts of the model change, and no weight is allocated.

    Examples:
        ```python
        choice = shardload.parallel.choose(model, "data=2,model=4")
        batch = jax.ShapeDtypeStruct((32, 64), "float32")
        step = shardload.parallel.compile_step(model, choice, batch, training="gradients")
        print(step.total_bytes, step.counts)
        ```

    Args:
        model: A built model, with values or from `shardload.abstract`.
        choice: Layouts of its variables: a plan, or what `choose` returned for this model object.
        inputs: The first argument of its ``call``: an array, a ``jax.ShapeDtypeStruct``, or a nested structure of
            these. The first dim of each is split over the batch axis, if that divides it.
        target: What the loss compares the outputs with, in the same form.
        training: What to compile. ``None``: inference; ``"gradients"``: forward and backward pass; an optimizer or its
            name (``"sgd"``): the whole training step, whose new state reuses the memory of the old one.
        loss: As for ``compile``; by default the model's own. Without any loss or target, the mean of the squared
            outputs stands in.
        kwargs: Further arguments of ``call``; arrays and shapes are split like ``inputs``.
        devices: One device for each mesh position; by default the first of ``jax.devices()``. With devices of
            ``jax.experimental.topologies``, the step is compiled for another machine.

    Raises:
        LayoutError: When the layouts are for another model object, or the plan is for another model.
        MeshError: When there are too few devices.
        UninitialisedError: When the model is not built.
        UsageError: When Keras has no optimizer ``training``.
    """
    choice = choice_for(model, choice)
    devices = devices_for(choice.mesh, devices)
    arrays, static = split_keywords(kwargs)
    check_batch(inputs=inputs, target=target)
    target = None if training is None else target  # inference needs none
    batch = batch_specs({"inputs": inputs, "kwargs": arrays, "target": target}, choice, devices)
    started = time.perf_counter()
    made = program_of(model, choice, training=training, loss=loss, static=static, devices=devices)
    with collector_paused(), made as program:
        step = _compiled(program, batch, choice, devices)
    return replace(step, compile_s=time.perf_counter() - started)


@dataclass(frozen=True, slots=True)
class CompiledStep:
    """Memory and collectives of a compiled program; bytes are those of one device."""

    mesh: MeshSpec
    kind: StepKind
    platform: str
    """The platform that the step was compiled for, such as ``cpu``."""
    argument_bytes: int
    """Bytes of the step's arguments: weights, optimizer slots and the batch."""
    output_bytes: int
    """Bytes of the step's results: outputs in inference, or the loss with gradients or with new weights and slots."""
    alias_bytes: int
    """Bytes of results that reuse the memory of arguments, as new weights do in training; they count only once."""
    temporary_bytes: int
    """Bytes of activations and everything else that the program allocates while it runs."""
    float32_argument_bytes: int
    """Bytes of float32 arguments that would be 16-bit in a 16-bit model: `scaled` halves them."""
    float32_output_bytes: int
    """Bytes of float32 results that would be 16-bit in a 16-bit model: `scaled` halves them."""
    collectives: tuple[Collective, ...]
    """Every collective instruction in the compiled program."""
    compile_s: float
    float32_update_bytes: int = 0
    """Bytes of temporaries that an optimizer needs in float32 even if the model is 16-bit: `scaled` keeps them."""
    notes: tuple[str, ...] = ()
    """Remarks for people on how to read the numbers of this step."""

    @property
    def total_bytes(self) -> int:
        """Bytes on each device while the step runs: arguments, results and temporaries; shared memory counts once."""
        # Donated arguments become outputs in place: the new weights of a training step are counted once.
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes

    @property
    def collective_bytes(self) -> int:
        """Bytes that collectives exchange in one step: those of all their results on one device, added up."""
        return sum(found.total_bytes for found in self.collectives)

    @property
    def counts(self) -> Mapping[str, int]:
        """Number of collective instructions in the compiled program, by kind: ``{"all-reduce": 4}``."""
        return dict(Counter(found.kind for found in self.collectives))

    def fits(self, device_bytes: int) -> bool:
        """Whether the step needs at most ``device_bytes`` on each device."""
        return self.total_bytes <= device_bytes

    def scaled(self, dtype: str = "bfloat16") -> CompiledStep:
        """Return the numbers that a step compiled in float32 would have in a 16-bit dtype.

        The state and the update of an optimizer that computes in float32 keep their bytes. Arguments, outputs and
        collectives are exact if all other floats change their dtype. Temporaries are scaled, too, although some of them
        (sums, integers) may stay in 32 bits.
        """
        ratio: float = jax.numpy.dtype(dtype).itemsize / 4

        def less(nbytes: int) -> int:
            return round(nbytes * (1 - ratio))

        return replace(
            self,
            argument_bytes=self.argument_bytes - less(self.float32_argument_bytes),
            output_bytes=self.output_bytes - less(self.float32_output_bytes),
            alias_bytes=self.alias_bytes - less(min(self.alias_bytes, self.float32_output_bytes)),
            temporary_bytes=self.temporary_bytes - less(self.temporary_bytes - self.float32_update_bytes),
            float32_argument_bytes=0,
            float32_output_bytes=0,
            collectives=tuple(
                replace(c, nbytes=c.nbytes - less(c.nbytes), dtype=dtype)
                if c.dtype == "f32" and FLOAT32_UPDATE not in c.source
                else c
                for c in self.collectives
            ),
            notes=(*self.notes, f"scaled from float32 to {dtype}"),
        )

    def for_plan(self) -> CompiledCheck:
        """Return the results as a `CompiledCheck`, which `LayoutPlan.with_checks` stores in a plan."""
        totals: dict[str, tuple[int, int]] = defaultdict(lambda: (0, 0))
        for one in self.collectives:
            count, nbytes = totals[one.kind]
            totals[one.kind] = (count + one.count, nbytes + one.total_bytes)
        return CompiledCheck(
            self.kind,
            self.platform,
            self.total_bytes,
            self.argument_bytes,
            self.temporary_bytes,
            dict(sorted(totals.items())),
            self.notes,
        )

    def _repr_html_(self) -> str:
        return preformatted(self.summary())

    def summary(self) -> str:
        """Return a few lines of text: bytes on each device, and the collectives, largest first."""
        lines = [
            f"{_WORDS[self.kind]} on {self.mesh}, compiled for {self.platform} in {self.compile_s:.1f} s",
            f"each device: {format_bytes(self.total_bytes)} (arguments {format_bytes(self.argument_bytes)}, outputs "
            f"{format_bytes(self.output_bytes - self.alias_bytes)}, temporaries {format_bytes(self.temporary_bytes)})",
            f"collectives: {plural(len(self.collectives), 'instruction')}, {format_bytes(self.collective_bytes)}",
        ]
        # One line for all that differ only in their source: the same collective of each layer.
        runs = Counter[Collective]()
        for found in self.collectives:
            runs[replace(found, source="", count=1)] += found.count
        largest = sorted(runs, key=lambda found: -found.nbytes * runs[found])
        lines += [f"  {replace(found, count=runs[found])}" for found in largest]
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Any]:
        """Return memory and collectives as an object for `json.dumps`; bytes are those of one device."""
        skipped = ("mesh", "collectives", "notes")
        return {
            "mesh": dict(zip(self.mesh.axes, self.mesh.sizes, strict=True)),
            **{name: getattr(self, name) for name in self.__slots__ if name not in skipped},
            "total_bytes": self.total_bytes,
            "collective_bytes": self.collective_bytes,
            "collectives": [collective_json(found) for found in self.collectives],
            "notes": list(self.notes),
        }


def devices_for(mesh: MeshSpec, devices: Sequence[Any] | None) -> tuple[Any, ...]:
    """Return one device for each mesh position: the caller's ``devices``, else the first devices that JAX lists."""
    found = device_list(devices) or tuple(jax.devices()[: mesh.size])
    if len(found) != mesh.size:
        raise MeshError(
            f"Cannot compile for the mesh {mesh}: found {plural(len(found), 'device')}, expected {mesh.size}. "
            f"Simulate them on CPU with jax.config.update('jax_num_cpu_devices', {mesh.size}) before JAX starts, or "
            "pass devices="
        )
    return found


def check_batch(**arguments: Any) -> None:
    """Raise unless a batch or target consists of numbers and arrays of numbers, or of their shapes; errors name it."""
    for argument, value in arguments.items():
        check_no_iterator(argument, value)
        for leaf in jax.tree.leaves(value):
            dtype = leaf.dtype if is_array(leaf) else np.asarray(leaf).dtype if isinstance(leaf, Number) else None
            if isinstance(leaf, type) or dtype is None or np.dtype(dtype).kind in "OSUMm":
                raise UsageError(f"Cannot use {argument}={value!r:.60}: expected arrays of numbers, or their shapes")


def batch_specs(batch: Any, choice: LayoutChoice, devices: Sequence[Any]) -> Any:
    """Return shapes with shardings for a batch: arrays are split over axes for rows and sequences that divide."""

    def spec(leaf: Any) -> jax.ShapeDtypeStruct:
        shape = tuple(np.shape(leaf))
        # As JAX would place it: 64-bit values become 32-bit unless x64 is enabled.
        dtype = jax.dtypes.canonicalize_dtype(getattr(leaf, "dtype", None) or np.asarray(leaf).dtype)
        # A bound model replicates a batch that does not divide, and so does the compiled program.
        layout = Layout(choice.mesh, choice.mesh.of_batch(shape, choice.splits_batch))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=named_sharding(layout, devices))

    return jax.tree.map(spec, batch)


def split_keywords(kwargs: Mapping[str, Any] | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Divide keyword arguments of ``call`` into arrays and others, which become constants of the program."""
    if not isinstance(kwargs, Mapping | None) or not all(isinstance(name, str) for name in kwargs or {}):
        raise UsageError(f"Cannot use kwargs={kwargs!r:.60}: expected a dictionary of keyword arguments of call")
    found = dict(kwargs or {})
    # A structure with a flag or a string in it is built into the program, where `call` can branch on it.
    arrays = {
        name for name, value in found.items() if (leaves := jax.tree.leaves(value)) and all(map(is_array, leaves))
    }
    return {n: v for n, v in found.items() if n in arrays}, {n: v for n, v in found.items() if n not in arrays}


def _compiled(program: StepProgram, batch: Any, choice: LayoutChoice, devices: Sequence[Any]) -> CompiledStep:
    state, platform = program.specs(devices), devices[0].platform
    # Variables that the step does not use stay on the devices: they are arguments too.
    step = jax.jit(
        program.function,
        out_shardings=program.out_shardings(devices),
        donate_argnums=0 if program.kind == "training" else (),
        keep_unused=True,
    )
    lowered = step.lower(state, batch)
    options = _CPU_OPTIONS | (_AS_ON_ACCELERATORS if choice.remat or choice.uses else {})
    options |= _GATHERED_LATE if choice.uses else {}
    compiled = lowered.compile(compiler_options=options if platform == "cpu" else None)
    outputs = jax.tree.map(
        lambda info, sharding: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
        lowered.out_info,
        compiled.output_shardings,
    )
    memory = compiled.memory_analysis()
    slots = zip(state.get("optimizer", []), program.variables.get("optimizer", []), strict=True)
    # State that is float32 in a 16-bit model too is not scaled.
    fixed = _float32_bytes([spec for spec, v in slots if id(v) in program.fixed])
    collectives = collectives_in(compiled.as_text(), choice.mesh)
    return CompiledStep(
        choice.mesh,
        program.kind,
        platform,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        float32_argument_bytes=_float32_bytes((state, batch)) - fixed,
        float32_output_bytes=_float32_bytes(outputs) - fixed,
        float32_update_bytes=min(program.float32_update_bytes, memory.temp_size_in_bytes),
        collectives=collectives,
        compile_s=0.0,
        notes=tuple(_notes(state, batch, choice, platform, collectives)),
    )


def _float32_bytes(specs: Any) -> int:
    """Return the bytes on one device of all float32 arrays in ``specs``, a structure of shapes with shardings."""
    leaves = [leaf for leaf in jax.tree.leaves(specs) if leaf.dtype == np.float32]
    return sum(4 * math.prod(leaf.sharding.shard_shape(leaf.shape)) for leaf in leaves)


def _notes(
    state: Any, batch: Any, choice: LayoutChoice, platform: str, collectives: Sequence[Collective]
) -> Iterator[str]:
    whole = [leaf.shape for leaf in jax.tree.leaves(batch) if leaf.shape and leaf.sharding.is_fully_replicated]
    if whole and any(choice.mesh.axis_size(axis) > 1 for axis in choice.splits_batch):
        axes = " and ".join(map(repr, choice.splits_batch))
        yield f"a batch of shape {whole[0]} does not divide over axis {axes}: it is replicated"
    if platform == "cpu" and any(leaf.dtype.itemsize == 2 for leaf in jax.tree.leaves(state)):
        yield (
            "XLA computes 16-bit floats in 32 bits on CPU, so temporaries and collectives are too large: compile the "
            "model in float32 and call scaled()"
        )
    if any(collective.inside == "loop" for collective in collectives):
        yield "collectives in a loop of unknown length are counted once"
