"""Keras files: run each layer's ``load_own_variables`` on arrays without memory and record what it assigns.

Keras walks the model itself (`keras_bridge.saving.load_state`), so nested containers, old key layouts and objects
stored once but reachable twice are found where Keras finds them::

    manifest "layers/dense/vars/0" ─► entry("layers/dense")["0"] = reserved ─► layer.kernel.assign(view of it)
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import keras

from shardload.errors import public_name
from shardload.keras_bridge.hub_imports import backbone_of, held_backbone
from shardload.keras_bridge.model_state import own_layers, state_of
from shardload.keras_bridge.recording import without_computing
from shardload.keras_bridge.saving import stored_variables
from shardload.keras_bridge.training import has_own_compile
from shardload.keras_bridge.variables import unique
from shardload.loaders import spec_of
from shardload.manifest import Manifest, Tensor
from shardload.mapping.layer_hooks import LayerStep, RecordedAssign, Visit, Walk, has_keras_hook
from shardload.mapping.variable_map import (
    Computed,
    Mismatch,
    VariableMap,
    refused_among,
    split_missing,
    unsharded_binding,
    variable_names,
)
from shardload.stores.location import is_nowhere
from shardload.transfer.planning import Binding

_UNFIT_OPTIMIZER = (
    "the optimizer's state is unchanged, with its iterations and learning rate: the file stores it by number, and some "
    "of it has another shape. A training step stores it by weight"
)
_UNUSED_OPTIMIZERS = "the checkpoint has the state of optimizers that the model has not built"
_TASK = "task:"


def map_keras(model: Any, manifest: Manifest, *, optimizer: bool = True) -> VariableMap:
    """Map a Keras file's tensors to the variables to which each layer's own ``load_own_variables`` assigns them."""
    # A preset of KerasHub stores a task's own layers in a second file, whose tensors the manifest prefixes.
    own = {n: t for n, t in manifest.tensors.items() if not n.startswith(_TASK)}
    head = {n.removeprefix(_TASK): t for n, t in manifest.tensors.items() if n.startswith(_TASK)}
    is_preset = spec_of(manifest).described_by == "keras-hub"
    backbone = backbone_of(model) if is_preset else model
    left_out = () if optimizer or getattr(model, "optimizer", None) is None else (model.optimizer,)
    has_values = not is_nowhere(manifest.location)
    walks = [Walk(backbone, own, skip=left_out, has_values=has_values)]
    if backbone is not model and head:
        walks.insert(0, Walk(model, head, skip=own_layers(backbone), has_values=has_values))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for walk in walks:
            without_computing(walk.record)
    # Without ResourceWarnings: they are about files that other code, also in other threads, has left open.
    notes = [str(w.message) for w in caught if not issubclass(w.category, ResourceWarning)]
    found = _variable_map(model, manifest, walks, tuple(dict.fromkeys(notes)))
    if is_preset and (found.missing or found.unused) and (name := held_backbone(model)):
        advice = f" The preset has the weights of a backbone, such as {name!r} of this model: pass model.{name}."
        return replace(found, advice=advice)
    return found


def _variable_map(model: Any, manifest: Manifest, walks: list[Walk], notes: tuple[str, ...]) -> VariableMap:
    # Visits that worked become bindings and steps; those that failed become mismatches.
    good, failed = _sort_out([visit for walk in walks for visit in walk.visits if visit.saveable is not None])
    weights = list(getattr(model, "weights", ()))
    everything = unique([*weights, *state_of(model)])
    touched = [e.variable for visit in good for e in visit.assigned]
    names = variable_names([*everything, *touched])
    bindings, steps = _bind(good, names)
    computed = tuple(
        Computed(step.owner, tuple(names[id(v)] for v in step.variables), step.variables, tuple(sorted(step.computing)))
        for step in steps
        if step.variables
    )
    # Weights without a value: of a failed layer (`covered`), made by a hook itself (`made`), else missing.
    mismatched = tuple(m for visit in failed for m in _mismatches(visit))
    covered = [v for visit in failed if visit.tensors for v in stored_variables(visit.saveable)]
    provided = [b.variable for b in bindings] + [v for c in computed for v in c.variables]
    # Variables that a layer's custom hook does not assign although it reads all tensors that it saved.
    hooked = [v for v in good if v.tensors and not has_keras_hook(v.saveable) and not _declined(v)]
    assigned = [{id(event.variable) for event in visit.assigned} for visit in hooked]
    made = [
        v for one, own in zip(hooked, assigned, strict=True) for v in stored_variables(one.saveable) if id(v) not in own
    ]
    missing, missing_variables, state = split_missing(weights, everything, [*provided, *covered, *made], names)
    # Tensors without a variable: offered but not read (`declined`), of an optimizer or head (`skipped`), else unused.
    taken = {n for visit in good for n in visit.read} | {t.name for visit in failed for t in visit.tensors.values()}
    declined = {n for visit in good for n in _declined(visit)} - taken
    notes += tuple(
        f"{type(visit.saveable).__name__} at {visit.path or 'the root'!r} does not read these tensors of the "
        f"checkpoint: {', '.join(_declined(visit))}"
        for visit in good
        if declined.intersection(_declined(visit))
    )
    provided_ids = {id(v) for v in provided}
    own = [v for v in made if id(v) not in provided_ids]
    notes += tuple(f"{names[id(v)]} keeps its value: its layer's save_own_variables does not save it" for v in own)
    used = taken | declined
    left = [n for n, t in manifest.tensors.items() if t.name not in used]
    idle = _idle_optimizers(model, good, {n: manifest.tensors[n] for n in left})
    notes += (f"{_UNUSED_OPTIMIZERS}: {', '.join(idle)}. Build them, then load the checkpoint again",) if idle else ()
    skipped = tuple(n for n in left if n.startswith(("optimizer/", _TASK, *(f"{path}/vars/" for path in idle))))
    apart = set(skipped)
    if any(isinstance(visit.saveable, keras.optimizers.Optimizer) for visit in failed):
        notes += (_UNFIT_OPTIMIZER,)
    return VariableMap(
        bindings=bindings,
        computed=computed,
        missing=missing,
        missing_variables=missing_variables,
        state=(*state, *own),
        unused=tuple(n for n in left if n not in apart),
        skipped=skipped,
        mismatched=mismatched,
        notes=notes,
        steps=tuple(steps),
        refused=refused_among(weights, covered, provided, names),
    )


def _idle_optimizers(model: Any, visits: list[Visit], left: Mapping[str, Tensor]) -> list[str]:
    """Return paths of optimizers (a GAN's) whose stored state is not used, as they are not built or not created yet."""
    found = [v.path for v in visits if v.tensors and not v.read and isinstance(v.saveable, keras.optimizers.Optimizer)]
    if has_own_compile(model):
        seen = {visit.path for visit in visits}
        first = [(n.removesuffix("/vars/0"), tensor) for n, tensor in left.items() if n.endswith("/vars/0")]
        # An optimizer's first variable counts its iterations.
        found += [path for path, t in first if path not in seen and t.shape == () and t.dtype.kind in "iu"]
    return [path for path in dict.fromkeys(found) if path != "optimizer"]


def _declined(visit: Visit) -> list[str]:
    """Return the tensors that a user's ``load_own_variables`` could have read but did not: a note, but no error."""
    if has_keras_hook(visit.saveable):
        return []
    return [t.name for t in visit.tensors.values() if t.name not in visit.read]


def _sort_out(visits: list[Visit]) -> tuple[list[Visit], list[Visit]]:
    """Return the visits (recorded calls of hooks) that worked, and those that failed and are to be reported.

    Keras may call the hook of one layer several times. Of the calls that worked, the last one at each path counts. If
    none worked, the one for which the checkpoint had the most tensors is reported, so that a layer has one error.
    """
    # Keras visits the parents of what failed again, so the last visit of an object counts.
    good = list({(id(v.saveable), v.path): v for v in visits if v.error is None}.values())
    done = {id(v.saveable) for v in good}
    worst: dict[int, Visit] = {}
    for visit in visits:
        if id(visit.saveable) not in done:
            best = worst.setdefault(id(visit.saveable), visit)
            if len(visit.tensors) > len(best.tensors):
                worst[id(visit.saveable)] = visit
    return good, list(worst.values())


def _bind(visits: list[Visit], names: Mapping[int, str]) -> tuple[tuple[Binding, ...], list[LayerStep]]:
    """Return a binding for each variable that gets part of a tensor, and a `LayerStep` for each hook to call again."""
    # A variable that is reached twice (tied layers, a hook that assigns again) keeps the last value, as in Keras.
    last: dict[int, tuple[Visit, RecordedAssign]] = {}
    for visit in visits:
        computing = visit.computing
        for event in visit.assigned:
            if event.view is not None and event.view.tensor not in computing:
                last[id(event.variable)] = (visit, event)
    by_visit: dict[int, list[RecordedAssign]] = {}
    for owner, event in last.values():
        by_visit.setdefault(id(owner), []).append(event)
    bindings: list[Binding] = []
    steps: list[LayerStep] = []
    for visit in visits:
        made = [unsharded_binding(e.variable, e.view, names) for e in by_visit.get(id(visit), ()) if e.view is not None]
        bindings.extend(made)
        # Or its ``load_own_variables`` is more than Keras' plain one for layers.
        hook = getattr(type(visit.saveable), "load_own_variables", None)
        if visit.assigned or visit.read or hook is not keras.Layer.load_own_variables:
            needed = frozenset(visit.computing & visit.read)
            views = {id(e.variable) for e in visit.assigned if e.view is not None and e.view.tensor not in needed}
            computes = unique(e.variable for e in visit.assigned if id(e.variable) not in views)
            tensors = dict(visit.tensors)
            steps.append(LayerStep(visit.saveable, visit.path, tensors, needed, tuple(made), tuple(computes)))
    return tuple(bindings), steps


def _mismatches(visit: Visit) -> list[Mismatch]:
    """Return the errors to report for a failed visit (a recorded call of a hook): wrong shapes, or its exception.

    Empty if the hook is Keras' own and the checkpoint has no tensors for the layer, because the layer's variables are
    then reported as missing.
    """
    if not visit.tensors and has_keras_hook(visit.saveable):
        return []
    own = stored_variables(visit.saveable)
    pairs = [(v, visit.tensors.get(str(i))) for i, v in enumerate(own)]
    found = [Mismatch.of_shapes(v, t.name, t.shape) for v, t in pairs if t is not None and t.shape != tuple(v.shape)]
    # The hook assigns by index, as Keras' own does: report every variable, not only the first that stopped it.
    if visit.mismatch in found:
        return found
    if visit.mismatch is not None:
        return [visit.mismatch]
    name = own[0].path if own else visit.path
    what = f"Cannot load {type(visit.saveable).__name__} at {visit.path!r} from the checkpoint"
    tensor = next((t.name for t in visit.tensors.values()), "")
    error = str(visit.error) or (public_name(visit.error) if visit.error is not None else "")
    return [Mismatch(name, tensor, None, None, f"{what}: {error}")]
