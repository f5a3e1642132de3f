"""Hugging Face names: run KerasHub's own converter, first to record what it assigns, then for what it computes.

``convert_weights(backbone, loader, config)`` requests tensors from the loader by their Hugging Face names, and assigns
them to variables, often reshaped or transposed. In the first run, they are arrays without data, and assignments are
only recorded. Where a variable gets a tensor's elements, that becomes a `Binding`, which is loaded without the
converter. A mere cast between floating dtypes (Mistral's converter rounds everything to float16) is ignored, unless
``float_casts`` says otherwise. Computed values (stacks of experts, interpolated positions) need a second run of the
same code, which reads the tensors that it computes with. It comes after all bindings are assigned, because some
converters compute from variables.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, ClassVar

import keras

from shardload.families.parts.config import architecture_of
from shardload.families.registry import model_type_of
from shardload.hub import kerashub
from shardload.keras_bridge import Variable
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.saving import assignments_to
from shardload.keras_bridge.variables import is_abstract, pending_of, unique
from shardload.manifest import Manifest
from shardload.mapping.converter_run import Assign, ConverterAssign, Loader, Recording, Run, record
from shardload.mapping.placeholders import FloatCasts, Reservations
from shardload.mapping.variable_map import (
    AssignStep,
    Computed,
    Runtime,
    VariableMap,
    refused_among,
    split_missing,
    unsharded_binding,
    variable_names,
)
from shardload.reports.facts import Note, NoteKind
from shardload.transfer.planning import Binding
from shardload.units import plural


def map_hub(model: Any, manifest: Manifest, *, float_casts: FloatCasts = "viewed") -> VariableMap:
    """Map a Hugging Face (or GGUF) checkpoint by running KerasHub's converter on arrays without data."""
    converter = kerashub.converter(manifest)
    runs = [Run(converter.convert_weights, backbone_of(model), manifest, None, float_casts)]
    # KerasHub also converts the head of an image classifier or assistant, in a separate run, with an empty prefix.
    architecture, known = architecture_of(manifest.config), model_type_of(manifest.config).loads_head_of
    fits = "ForImageClassification" in architecture or architecture in known
    if fits and backbone_of(model) is not model and hasattr(converter, "convert_head"):
        runs.append(Run(converter.convert_head, model, manifest, "", float_casts))
    return _variable_map(model, manifest, [record(run) for run in runs])


def _variable_map(model: Any, manifest: Manifest, recordings: list[Recording]) -> VariableMap:
    weights = list(model.weights)
    everything = unique([*weights, *state_of(model)])
    names = variable_names([*everything, *(e.variable for r in recordings for e in r.assigned)])
    bindings: list[Binding] = []
    computed: list[Computed] = []
    late: list[ConverterStep] = []
    for recording in recordings:
        # The last assignment of each variable that is only assigned views; all assignments of other variables.
        by_hook = {id(e.variable) for e in recording.assigned if e.view is None}
        viewed = {id(e.variable): e for e in recording.assigned if id(e.variable) not in by_hook}
        rest = [e for e in recording.assigned if id(e.variable) in by_hook]
        bindings.extend(unsharded_binding(e.variable, e.view, names) for e in viewed.values() if e.view is not None)
        if rest:
            step = _step(recording, rest)
            late.append(step)
            for variable in unique(e.variable for e in rest):
                tensors = {name for e in rest if e.variable is variable for name in e.tensors}
                computed.append(Computed(step.owner, (names[id(variable)],), (variable,), tuple(sorted(tensors))))
    # Weights without a value: mismatched ones are refused, others are missing or keep their initial value.
    mismatched = tuple(m for r in recordings for m in r.mismatched)
    fetched = {name for r in recordings for name in r.fetched}
    provided = [b.variable for b in bindings] + [v for c in computed for v in c.variables]
    wrong = {m.variable for m in mismatched}
    covered = [v for v in weights if v.path in wrong]
    uncomputed = {id(v): v for r in recordings for v in r.uncomputed}
    weights = [v for v in weights if id(v) not in uncomputed]
    plain: dict[int, str] = {}
    if not any(r.absent for r in recordings):
        # The converter found all that it requested, so fixed tables that it never requests (rotary) keep their values.
        sourced = {id(p) for p in (*provided, *covered)}
        weights = [v for v in weights if v.trainable or id(v) in sourced]
        # So do zeros and ones that it never requests (biases of Gemma 3n's MobileNet), but not random values.
        constant = (keras.initializers.Zeros, keras.initializers.Ones)
        plain = {
            id(v): names[id(v)]
            for v in weights
            if id(v) not in sourced and is_abstract(v) and isinstance(pending_of(v).initializer, constant)
        }
        weights = [v for v in weights if id(v) not in plain]
    missing, missing_variables, state = split_missing(weights, everything, [*provided, *covered], names)
    notes = tuple(line for r in recordings for line in _notes(r))
    if plain:
        notes += (
            f"initial zeros or ones remain in {plural(len(plain), 'variable')}, because KerasHub's converter requests "
            f"no tensor for them: {next(iter(plain.values()))} …",
        )
    if uncomputed:
        notes += (
            f"initial values remain in {plural(len(uncomputed), 'variable')}, which the model never computes with: "
            f"{next(iter(uncomputed.values())).path} …",
        )
    return VariableMap(
        bindings=tuple(bindings),
        computed=tuple(computed),
        missing=missing,
        missing_variables=missing_variables,
        state=state,
        unused=tuple(n for n in manifest.tensors if n not in fetched),
        mismatched=mismatched,
        notes=notes,
        steps=(*(AssignStep((b,)) for b in bindings), *late),
        refused=refused_among(weights, covered, provided, names),
        absent=tuple(name for r in recordings for name in r.absent),
    )


def _step(recording: Recording, rest: list[ConverterAssign]) -> ConverterStep:
    # Inputs that it got from `get_tensor`, and views of variables that it also computes, are read for real.
    direct = {n for e in rest if not e.ported for n in (*e.tensors, *((e.view.tensor,) if e.view else ()))}
    counts = collections.Counter(id(e.variable) for e in rest)
    again = frozenset(key for key, count in counts.items() if count > 1)
    return ConverterStep(
        recording.run, tuple(unique(e.variable for e in rest)), frozenset(recording.computing | direct), again
    )


def _notes(recording: Recording) -> list[str]:
    absent = [
        Note(f"The converter asked for {name!r}, which the checkpoint does not have", NoteKind.TENSOR_NOT_STORED)
        for name in recording.absent
    ]
    notes = [line.strip() for line in recording.printed.splitlines() if line.strip()] + absent
    if recording.rounded:
        (first, dtype), *rest = recording.rounded.items()
        more = f"{first!r} and {plural(len(rest), 'other tensor')}" if rest else repr(first)
        notes.append(
            f"KerasHub's converter rounds {more} to {dtype}; values outside of its range become infinite or zero"
        )
    return notes


class ReplayLoader(Loader):
    """What a converter requests tensors from in its second run: only those that it computes with have values."""

    def __init__(self, step: ConverterStep, runtime: Runtime) -> None:
        super().__init__(step.run_of)
        self._step = step
        self._runtime = runtime
        self._reservations = Reservations()
        self._wanted = {id(v) for v in step.variables}

    def get_tensor(self, hf_weight_key: str) -> Any:
        """Return the tensor's values if the converter computes with them, else an array without data."""
        tensor = self.find(hf_weight_key)
        if tensor.name in self._step.computing:
            return self._runtime.read(tensor.name)
        return self._reservations.make(tensor)

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        """Read a tensor, apply ``hook_fn`` and assign the result, if the value of the variable must be computed."""
        if id(keras_variable) not in self._wanted:
            return
        value: Any = self._runtime.read(self.find(hf_weight_key).name)
        if hook_fn:
            value = hook_fn(value, list(keras_variable.shape))
        keras_variable.assign(value)

    def assign(self, variable: Variable, value: Any, assign: Assign) -> Any:
        """Assign the value if the converter computed it; variables that get a stored tensor already have theirs."""
        # A variable that is a view already has its sharded array; `value` is a reservation without data.
        if id(variable) not in self._wanted:
            return value
        return self._runtime.compute(variable, value, assign)


@dataclass(frozen=True, slots=True, eq=False)
class ConverterStep:
    """The second run of a converter, which assigns the variables whose values it computes."""

    run_of: Run
    variables: tuple[Variable, ...]
    computing: frozenset[str]
    reassigned: frozenset[int] = frozenset()
    """``id`` of each variable that is assigned more than once in a run; a conversion must wait for its last value."""
    saveable: ClassVar[None] = None
    needs: ClassVar[tuple[str, ...]] = ()
    """Names of the variables whose arrays must have been read before: none, as it runs after all other parts anyway."""
    computes: ClassVar[bool] = True

    @property
    def owner(self) -> str:
        """Name of the converter, for messages."""
        return f"converter {self.run_of.function.__module__.rpartition('.')[2]}"

    def run(self, runtime: Runtime) -> None:
        """Run the converter again, with the values of the tensors that it computes with."""
        loader = ReplayLoader(self, runtime)
        with assignments_to(loader.assign):
            self.run_of(loader)
