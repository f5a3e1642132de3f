"""Restore a step into an optimizer with another ``gradient_accumulation_steps``: the number of updates stays the same.

Keras stores how many batches an optimizer has seen, and divides it to get ``optimizer.iterations``, the number of
updates. So the stored count is converted:

    saved with 4 batches per update       42 batches are 10 updates, and the summed gradients of 2 batches
    restored with 8 batches per update    80 batches are 10 updates; the gradients of the 2 batches are dropped
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardload.keras_bridge import Variable
from shardload.keras_bridge.model_state import optimizers_by_path
from shardload.keras_bridge.optimizer_slots import Accumulation, accumulations_in, described_accumulation, innermost
from shardload.keras_bridge.variables import value_of
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.mapping.state_tree import Stored
from shardload.mapping.variable_map import MappingStep, Runtime, VariableMap
from shardload.reports.facts import Note, NoteKind
from shardload.transfer.read_tensor import read_tensor
from shardload.units import plural

_UNKNOWN = "the checkpoint does not say the gradient_accumulation_steps of its optimizer: "
_ACCUMULATOR = "_gradient_accumulator"
_Values = Mapping[int, tuple[Variable, Callable[[Any], Any]]]


@dataclass(frozen=True, slots=True)
class _RecountedStep:
    """A part of a load that runs another part, ``step``, and then converts an optimizer's count of batches."""

    step: MappingStep
    values: tuple[tuple[Variable, Callable[[Any], Any]], ...]
    """(variable that ``step`` assigns, function from its stored to its final value): counts, and sums of gradients."""
    owner: str
    saveable: Any
    needs: tuple[str, ...]
    computes: bool

    def run(self, runtime: Runtime) -> None:
        """Run `step`, which assigns stored values; replace those in `values` by final ones, on the same devices."""
        self.step.run(runtime)
        for variable, function in self.values:
            now = value_of(variable)
            computed = jax.jit(function, out_shardings=now.sharding)(now)
            runtime.assign(variable, computed, lambda variable, value: variable.assign(value))


def with_updates_kept(found: VariableMap, model: Any, manifest: Manifest) -> VariableMap:
    """Return ``found``, changed so that each optimizer continues with the number of updates that it was saved with."""
    # The tensors of variables that are loaded whole, by ``id`` of the variable.
    tensors = {id(b.variable): b.view.tensor for b in found.bindings}
    for c in found.computed:
        if len(c.tensors) == len(c.variables):
            tensors |= dict(zip(map(id, c.variables), c.tensors, strict=True))
    notes: list[str] = []
    values: dict[int, tuple[Variable, Callable[[Any], Any]]] = {}
    accumulations = [(found, one) for found in optimizers_by_path(model).values() for one in accumulations_in(found)]
    for optimizer, one in accumulations:
        if (tensor := tensors.get(id(one.count))) is None:
            continue
        before = _stored_steps(tensor, manifest, is_innermost=one.count is innermost(optimizer)._iterations)
        if before == one.steps or (before is None and one.steps == 1 and not _has_sums(manifest)):
            continue
        batches = int(read_tensor(manifest, tensor))
        if before is None:
            here = f"optimizer.iterations is {batches // one.steps}, as for {_argument(one.steps)}"
            notes.append(f"{_UNKNOWN}it counted {plural(batches, 'batch')}, and {here}")
            continue
        values[id(one.count)] = (one.count, partial(_recount, before=before, now=one.steps))
        if batches % before:
            values |= {id(v): (v, jnp.zeros_like) for v in one.sums if id(v) in tensors}
        notes.append(_recount_note(batches, before, one))
    steps = tuple(_recounted(step, found, values) for step in found.steps) if values else found.steps
    return replace(found, steps=steps, notes=(*found.notes, *notes))


def _recount(count: Any, *, before: int, now: int) -> Any:
    return count // before * now


def _recounted(step: MappingStep, found: VariableMap, values: _Values) -> MappingStep:
    assigned = [b.variable for b in found.bindings if b.name in step.needs]
    assigned += [v for c in found.computed if c.owner == step.owner for v in c.variables]
    own = tuple(values[id(v)] for v in assigned if id(v) in values)
    return _RecountedStep(step, own, step.owner, step.saveable, step.needs, step.computes) if own else step


def _stored_steps(tensor: str, manifest: Manifest, *, is_innermost: bool) -> int | None:
    """Return the saved ``gradient_accumulation_steps`` of the optimizer whose count of batches is in ``tensor``.

    1 if it accumulated no gradients; ``None`` if not known. ``is_innermost``: the optimizer wraps no other one.
    """
    structure = manifest.metadata.get("structure")
    if structure is not None:
        leaves = (Stored.of_json(leaf) for leaf in structure["leaves"])
        said = next((leaf.accumulates for leaf in leaves if "/".join(leaf.path) == tensor), None)
        if said is not None:
            return said
    if spec_of(manifest).tensor_names == "step" and not _has_sums(manifest):
        return 1
    return described_accumulation(described_optimizer(manifest)) if is_innermost else None


def described_optimizer(manifest: Manifest) -> Any:
    """Return the configuration of the compiled optimizer in an archive or step; ``None`` if it stores none."""
    compiled = manifest.config.get("compile_config")
    return compiled.get("optimizer") if isinstance(compiled, Mapping) else None


def _has_sums(manifest: Manifest) -> bool:
    return any(name.endswith(_ACCUMULATOR) for name in manifest.tensors)


def _recount_note(batches: int, before: int, one: Accumulation) -> str:
    updates, rest = divmod(batches, before)
    text = (
        f"optimizer.iterations stays {updates}: it was saved with {_argument(before)}, and the optimizer has "
        f"{_argument(one.steps)}, so its count of batches changes from {batches} to {updates * one.steps}"
    )
    if rest:
        text += f". The summed gradients of {plural(rest, 'batch')}, which waited for an update, are dropped"
    text += ". Keras computes a scheduled learning rate from that count" if one.has_schedule else ""
    return Note(text, NoteKind.BATCHES_RECOUNTED)


def _argument(steps: int) -> str:
    return f"gradient_accumulation_steps={steps if steps > 1 else None}"
