"""Check live models: compare shards with the planned ones, device by device, and outputs with a replicated model."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import keras
import numpy as np

from shardload.errors import UsageError
from shardload.keras_bridge.binding import ModelBinding
from shardload.keras_bridge.model_state import slots_of, state_of
from shardload.keras_bridge.variables import has_value, value_of
from shardload.layout_checks.comparison import coarsest_eps, compare_all, nudged
from shardload.layout_checks.compiled_step import devices_for
from shardload.layout_search.given_layouts import GivenLayouts, choice_for
from shardload.layouts.choice import LayoutChoice
from shardload.layouts.collectives import device_id
from shardload.layouts.model_variables import all_variables
from shardload.reports.markup import ShownAsText
from shardload.sharding.layout import Bounds, Layout
from shardload.units import plural


@dataclass(frozen=True, slots=True)
class Misplaced:
    """A variable whose shards on the devices are not those that its planned layout gives them."""

    path: str
    planned: str
    """The planned layout of the variable, as text for a report."""
    found: str
    """The actual sharding of the variable, as text for a report."""
    planned_bytes: int
    """Bytes of the variable that each device should have."""
    found_bytes: int
    """Bytes of the variable on the device that has most of it."""

    def __str__(self) -> str:
        return (
            f"{self.path}: planned {self.planned} with {plural(self.planned_bytes, 'byte')} per device, found "
            f"{self.found} with {self.found_bytes:,}"
        )


def check_placement(model: Any, choice: GivenLayouts, *, devices: Sequence[Any] | None = None) -> tuple[Misplaced, ...]:
    """Return the variables of a live model whose shards differ from the plan; an empty tuple if none does.

    Reads ``addressable_shards``: the part of the array on each device, and its bytes. Variables without a value are
    left out.

    Examples:
        ```python
        distribution = shardload.AutoShardDistribution("data=2,model=4")
        distribution.shard(model)
        assert shardload.parallel.check_placement(model, distribution.choice(model)) == ()
        ```

    Args:
        model: A model whose values are on the mesh, such as one that `shardload.load` returned.
        choice: Layouts of its variables: a plan, or what `choose` returned for this model object.
        devices: One device for each mesh position; by default the first of ``jax.devices()``.

    Raises:
        LayoutError: When the layouts are for another model object, or the plan is for another model.
        MeshError: When the number of devices is not that of mesh positions.
    """
    choice = choice_for(model, choice)
    devices = devices_for(choice.mesh, devices)
    return tuple(misplaced_by_id(model, choice, devices).values())


def misplaced_by_id(model: Any, choice: LayoutChoice, devices: Sequence[Any]) -> dict[int, Misplaced]:
    """Return the variables of a live model whose shards are not where ``choice`` puts them, by ``id(variable)``."""
    found = {
        key: misplaced(v.path, value_of(v), choice.of(v), devices)
        for key, v in all_variables(model).items()
        if key in choice.by_id and has_value(v)
    }
    return {key: one for key, one in found.items() if one is not None}


def misplaced(path: str, array: Any, layout: Layout, devices: Sequence[Any]) -> Misplaced | None:
    """Return how an array's shards differ from those of ``layout``; ``None`` if each device has its planned part."""
    shape, shards = tuple(array.shape), array.addressable_shards
    nbytes = layout.bounds(shape)[0].size * array.dtype.itemsize
    # Only this process's shards can be read; the other processes check theirs.
    here = {device for device in devices if device.process_index == jax.process_index()}
    planned = {d: (box, nbytes) for d, box in zip(devices, layout.bounds(shape), strict=True) if d in here}
    found = {}
    for shard in shards:
        ranges = [part.indices(size)[:2] for part, size in zip(shard.index, shape, strict=True)]
        box = Bounds(tuple(start for start, _ in ranges), tuple(stop for _, stop in ranges))
        found[shard.device] = (box, shard.data.nbytes)
    if planned == found:
        return None
    sharding = getattr(array.sharding, "spec", array.sharding)
    return Misplaced(path, str(layout), str(sharding), nbytes, max(shard.data.nbytes for shard in shards))


def bytes_by_device(arrays: Iterable[Any]) -> dict[Any, int]:
    """Return the bytes that arrays take on each device of this process, in the order of device ids."""
    total: Counter[Any] = Counter()
    for array in arrays:
        for shard in array.addressable_shards:
            total[shard.device] += shard.data.nbytes
    return dict(sorted(total.items(), key=lambda found: found[0].id))


# ---- the setup of a wrapper: where its variables are, and what it computes ---------------------------

SAMPLE_BATCH, SAMPLE_LENGTH = 2, 8
"""Lengths in sample inputs for dims that the model leaves open: 2 for the first dim (the batch), 8 for every other."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check of a model on its mesh, such as its bytes on each device, and whether it passed."""

    name: str
    """Name of the check: ``shardings``, ``bytes``, ``split`` (is any variable split?) or ``outputs``."""
    passed: bool
    detail: str
    """What the check found, as one line of text for the report."""


@dataclass(frozen=True, slots=True)
class SetupReport(ShownAsText):
    """Whether a model on a mesh has its planned shards and right outputs; ``bool(report)``: every check passed."""

    checks: tuple[Check, ...]
    max_difference: float
    """Largest absolute difference between an output of the sharded model and of the replicated one."""
    device_bytes: Mapping[str, int]
    """Bytes of all variables on each device, optimizer slots included."""

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return all(check.passed for check in self.checks)

    @property
    def overall_status(self) -> str:
        """``PASSED`` or ``FAILED``."""
        return "PASSED" if self.ok else "FAILED"

    def __bool__(self) -> bool:
        return self.ok

    def __str__(self) -> str:
        return "\n".join(f"{'ok  ' if c.passed else 'FAIL'}  {c.name}: {c.detail}" for c in self.checks)


def check_setup(
    model: Any, choice: LayoutChoice, binding: ModelBinding, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> SetupReport:
    """Check shards, bytes and outputs of a model that runs on a mesh; ``args`` and ``kwargs`` are sample inputs."""
    outputs, difference = _outputs(model, binding, args, kwargs)
    text = f"{plural(choice.sharded, 'variable')} split, {choice.replicated} replicated over "
    # On several devices, a model with no split variable would pass the other checks.
    split = Check("split", choice.sharded > 0 or choice.mesh.size == 1, text + plural(choice.mesh.size, "device"))
    checks = (_shardings(model, choice, binding), _bytes(model, choice), split, outputs)
    found = bytes_by_device(value_of(v) for v in state_of(model) if has_value(v))
    return SetupReport(checks, difference, {device_id(device): n for device, n in found.items()})


def _shardings(model: Any, choice: LayoutChoice, binding: ModelBinding) -> Check:
    wrong, known = [], [v for v in state_of(model) if has_value(v)]
    weight_of = {id(slot): weight for slot, weight in slots_of(model)}
    for variable in known:
        # A slot that was created after the choice is where its weight is; a metric or a learning rate is replicated.
        planned = choice.by_id.get(id(variable)) or choice.by_id.get(id(weight_of.get(id(variable))))
        layout = Layout.replicated(choice.mesh, len(variable.shape)) if planned is None else planned.layout
        if misplaced(variable.path, value_of(variable), layout, binding.devices) is not None:
            wanted = binding.distribution.sharding(layout)
            wrong.append(f"{variable.path} is {value_of(variable).sharding}, planned {wanted}")
    detail = "; ".join(wrong[:3]) or f"{plural(len(known), 'variable')} sharded as planned"
    return Check("shardings", not wrong, detail)


def _bytes(model: Any, choice: LayoutChoice) -> Check:
    planned = [v for v in state_of(model) if id(v) in choice.by_id and has_value(v)]
    expected = sum(choice.by_id[id(v)].device_bytes for v in planned)
    found = bytes_by_device(map(value_of, planned))
    wrong = {device_id(device): n for device, n in found.items() if n != expected}
    held = f"{expected:,} of {plural(sum(choice.by_id[id(v)].nbytes for v in planned), 'byte')} on each device"
    return Check("bytes", not wrong, f"planned {held}, found {wrong}" if wrong else f"{held}, as planned")


def _outputs(model: Any, binding: ModelBinding, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Check, float]:
    if not args and not kwargs:
        args = (_sample(model),)
    # One function for all runs, so only the values and their placement differ.
    variables = [[value_of(v) for v in group] for group in (model.trainable_variables, model.non_trainable_variables)]
    everywhere, given = binding.distribution.replicated(0), (tuple(args), dict(kwargs))

    def run(values: Any, inputs: Any) -> Any:
        return model.stateless_call(*values, *inputs[0], training=False, **inputs[1])[0]

    forward, eps = jax.jit(run), coarsest_eps(model)

    def outputs(values: Any, inputs: Any) -> dict[str, Any]:
        leaves = jax.tree.leaves(forward(values, jax.device_put(inputs, everywhere)))
        return {f"output {number}": leaf for number, leaf in enumerate(leaves)}

    def moved(seeds: Sequence[int]) -> list[Mapping[str, Any]]:
        values, inputs = jax.tree.map(np.asarray, (variables, given))
        cases = (nudged((values, inputs), eps, seed=seed) for seed in seeds)
        return [outputs(jax.device_put(values, everywhere), inputs) for values, inputs in cases]

    with binding.scope():
        sharded = outputs(variables, given)
        compared = compare_all(sharded, outputs(jax.device_put(variables, everywhere), given), moved, eps=eps).arrays
    difference, allowed = (max((getattr(c, n) for c in compared), default=0.0) for n in ("max_abs", "allowed"))
    text = f"{plural(len(compared), 'output')} compared: at most {difference:.2g} from those of the replicated model"
    detail = f"{text}; accepted: {allowed:.2g}, which rounding explains"
    return Check("outputs", all(c.agrees for c in compared), detail), difference


def _sample(model: Any) -> Any:
    def sample(spec: Any) -> Any:
        shape = [n or (SAMPLE_LENGTH if d else SAMPLE_BATCH) for d, n in enumerate(spec.shape)]
        if "float" in spec.dtype:
            return np.random.default_rng(0).normal(size=shape).astype(np.float32)
        # Ones and zeros are valid as token ids, segments and masks alike.
        return ((np.arange(math.prod(shape)) + 1) % 2).reshape(shape).astype(spec.dtype)

    try:
        # A Sequential has its inputs in a functional model inside, which is called in its place.
        inputs = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        return keras.tree.map_structure(sample, inputs)
    except (AttributeError, IndexError, TypeError, ValueError) as error:
        raise UsageError(
            f"Cannot make sample inputs for the model {model.name!r}: it is not functional, so its inputs are unknown. "
            "Pass a batch: validate_tensor_parallelism_setup(x)"
        ) from error
