"""Hugging Face names: run KerasHub's own converter with a loader without bytes.

``convert_weights(backbone, loader, config)`` requests tensors from the loader by their Hugging Face names and
assigns the results of its hooks. The first run gets reservations and is only recorded; its views
become bindings. A cast between floating dtypes alone (Mistral's converter rounds everything to float16) is passed over,
unless ``float_casts`` says otherwise. Computed values (stacks of experts, interpolated positions) are left to a second
run of the same code, which skips views and reads only tensors used in computations, each
when the converter requests it. That run comes after all bindings: some converters compute from variables.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import keras

from shardload.families.parts.config import architecture_of
from shardload.families.registry import model_type_of
from shardload.hub import kerashub
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.pending import pending_of
from shardload.keras_bridge.variables import is_abstract, unique
from shardload.manifest import Manifest
from shardload.mapping.converter_run import ConverterAssign, Recording, Run, record
from shardload.mapping.converter_step import ConverterStep
from shardload.mapping.placeholders import FloatCasts
from shardload.mapping.variable_map import (
    Computed,
    DirectStep,
    Step,
    VariableMap,
    bind,
    refused_among,
    split_missing,
    variable_names,
)
from shardload.reports.facts import Note, NoteKind
from shardload.transfer.planning import Binding
from shardload.units import plural


def map_hub(model: Any, manifest: Manifest, *, float_casts: FloatCasts = "viewed") -> VariableMap:
    """Map tensors of a Hugging Face (or GGUF) checkpoint to variables, according to KerasHub's converter.

    Args:
        model: A KerasHub backbone or task, abstract or not; it is not changed.
        manifest: ``hf-safetensors`` or ``gguf``.
        float_casts: Whether casts of floating-point tensors by the converter are made, or left out: values then go
            from the file to the variable.

    Raises:
        UnsupportedError: When the converter cannot run on this model.
    """
    converter = kerashub.converter(manifest)
    runs = [Run(converter.convert_weights, backbone_of(model), manifest, None, float_casts)]
    # KerasHub also converts the head in a separate run, with an empty prefix.
    if _has_head(model, manifest):
        runs.append(Run(converter.convert_head, model, manifest, "", float_casts))
    recordings = [record(run) for run in runs]
    return _summarise(model, manifest, recordings)


def _summarise(model: Any, manifest: Manifest, recordings: list[Recording]) -> VariableMap:
    weights = list(model.weights)
    everything = unique([*weights, *state_of(model)])
    names = variable_names([*everything, *(e.variable for r in recordings for e in r.assigned)])
    bindings: list[Binding] = []
    computed: list[Computed] = []
    late: list[ConverterStep] = []
    for recording in recordings:
        viewed, rest = _split(recording)
        bindings.extend(bind(e.variable, e.view, names) for e in viewed if e.view is not None)
        if rest:
            step = _step(recording, rest)
            late.append(step)
            computed.extend(_computed(step.owner, rest, names))
    # Weights without a value: mismatched ones are refused, others are missing or keep their initial value.
    mismatched = tuple(m for r in recordings for m in r.mismatched)
    fetched = {name for r in recordings for name in r.fetched}
    provided = [b.variable for b in bindings] + [v for c in computed for v in c.variables]
    wrong = {m.variable for m in mismatched}
    covered = [v for v in weights if v.path in wrong]
    plain: dict[int, str] = {}
    if not any(r.absent for r in recordings):
        # The converter found all that it requested, so fixed tables that it never requests (rotary) keep their values.
        sourced = {id(p) for p in (*provided, *covered)}
        weights = [v for v in weights if v.trainable or id(v) in sourced]
        # So do zeros and ones that it never requests (biases of Gemma 3n's MobileNet), but not random values.
        plain = {id(v): names[id(v)] for v in weights if id(v) not in sourced and _begins_constant(v)}
        weights = [v for v in weights if id(v) not in plain]
    missing, missing_variables, state = split_missing(weights, everything, [*provided, *covered], names)
    unused = tuple(n for n in manifest.tensors if n not in fetched)
    notes = tuple(line for r in recordings for line in _notes(r)) + _kept(tuple(plain.values()))
    steps: tuple[Step, ...] = (*(DirectStep(b) for b in bindings), *late)
    return VariableMap(
        bindings=tuple(bindings),
        computed=tuple(computed),
        missing=missing,
        missing_variables=missing_variables,
        state=state,
        unused=unused,
        skipped=(),
        mismatched=mismatched,
        notes=notes,
        steps=steps,
        refused=refused_among(weights, covered, provided, names),
        absent=tuple(name for r in recordings for name in r.absent),
    )


def _split(recording: Recording) -> tuple[list[ConverterAssign], list[ConverterAssign]]:
    """Separate variables that are views of tensors from those that the converter computes.

    Returns:
        The last assignment of each variable that is only ever assigned views; all assignments of the other variables.
    """
    computed = {id(e.variable) for e in recording.assigned if e.view is None}
    viewed = {id(e.variable): e for e in recording.assigned if id(e.variable) not in computed}
    return list(viewed.values()), [e for e in recording.assigned if id(e.variable) in computed]


def _step(recording: Recording, rest: list[ConverterAssign]) -> ConverterStep:
    variables = tuple({id(e.variable): e.variable for e in rest}.values())
    # Inputs that it got from `get_tensor`, and views of variables that it also computes, are read for real.
    direct = {n for e in rest if not e.ported for n in (*e.tensors, *((e.view.tensor,) if e.view else ()))}
    counts = collections.Counter(id(e.variable) for e in rest)
    again = frozenset(key for key, count in counts.items() if count > 1)
    return ConverterStep(recording.run, variables, frozenset(recording.computing | direct), again)


def _computed(owner: str, rest: list[ConverterAssign], names: Mapping[int, str]) -> list[Computed]:
    tensors: dict[int, set[str]] = {}
    variables: dict[int, Variable] = {}
    for event in rest:
        variables[id(event.variable)] = event.variable
        tensors.setdefault(id(event.variable), set()).update(event.tensors)
    return [Computed(owner, (names[key],), (v,), tuple(sorted(tensors[key]))) for key, v in variables.items()]


def _notes(recording: Recording) -> list[str]:
    absent = [
        Note(f"The converter asked for {name!r}, which the checkpoint does not have", NoteKind.TENSOR_NOT_STORED)
        for name in recording.absent
    ]
    rounded = [_rounded(recording.rounded)] if recording.rounded else []
    return [line.strip() for line in recording.printed.splitlines() if line.strip()] + absent + rounded


def _rounded(tensors: Mapping[str, str]) -> str:
    (first, dtype), *rest = tensors.items()
    more = f" and {plural(len(rest), 'other tensor')}" if rest else ""
    return (
        f"KerasHub's converter rounds {first!r}{more} to {dtype}; values outside of its range become infinite or zero"
    )


def _kept(names: tuple[str, ...]) -> tuple[str, ...]:
    if not names:
        return ()
    return (
        f"initial zeros or ones remain in {plural(len(names), 'variable')}, because KerasHub's converter requests "
        f"no tensor for them: {names[0]} …",
    )


def _has_head(model: Any, manifest: Manifest) -> bool:
    """Whether the checkpoint's head fits this task: KerasHub loads heads of image classifiers and assistants."""
    architecture = architecture_of(manifest.config)
    known = model_type_of(manifest.config).loads_head_of
    fits = "ForImageClassification" in architecture or architecture in known
    return fits and backbone_of(model) is not model and hasattr(kerashub.converter(manifest), "convert_head")


def _begins_constant(variable: Variable) -> bool:
    """Whether an abstract variable's initial value is all zeros or all ones."""
    constant = (keras.initializers.Zeros, keras.initializers.Ones)
    return is_abstract(variable) and isinstance(pending_of(variable).initializer, constant)
