"""Hugging Face names: run KerasHub's own converter with a loader that has no bytes.

``convert_weights(backbone, loader, config)`` asks the loader for tensors by their Hugging Face names and
assigns what its hooks make of them. The first run gets reservations and is only watched; what it viewed
becomes bindings. What it computed (casts, stacks of experts, interpolated positions) is left for a second
run of the same code, in which views are skipped and only tensors that are computed with are read, each
when the converter asks for it. That run comes after all bindings: some converters compute from variables.
"""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardload import _hub, _keras
from shardload.errors import UnsupportedError
from shardload.manifest import Manifest, Tensor, View
from shardload.names.reservations import Reservations, tensors_behind
from shardload.names.variable_map import (
    Binding,
    Computed,
    DirectStep,
    Mismatch,
    Runtime,
    Step,
    Variable,
    VariableMap,
    split_missing,
    variable_names,
)

Assign = Callable[[Variable, Any], Any]


def map_hub(model: Any, manifest: Manifest) -> VariableMap:
    """Which tensors of a Hugging Face (or GGUF) checkpoint go to which variable, as KerasHub's converter has it.

    Args:
        model: A KerasHub backbone or task, abstract or not; nothing of it is changed.
        manifest: ``hf-safetensors`` or ``gguf``.

    Raises:
        UnsupportedError: When the converter cannot run on this model.
    """
    runs = [Run(_hub.converter(manifest).convert_weights, getattr(model, "backbone", model), manifest, None)]
    if _has_head(model, manifest):
        runs.append(Run(_hub.converter(manifest).convert_head, model, manifest, ""))
    recordings = [_record(run) for run in runs]
    return _summarise(model, manifest, recordings)


@dataclass(frozen=True, slots=True)
class Run:
    """One function of a converter and what it is to fill."""

    function: Callable[[Any, Any, Any], Any]
    target: Any
    manifest: Manifest
    prefix: str | None

    def __call__(self, loader: Loader) -> str:
        """Run it; returns what it printed."""
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), loader:
            self.function(self.target, loader, copy.deepcopy(dict(self.manifest.config)))
        return printed.getvalue()


class Loader(contextlib.ExitStack):
    """KerasHub's ``SafetensorLoader`` without files: names are looked up as it does, tensors come from elsewhere."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.tensors = run.manifest.tensors
        self.preset = run.manifest.source
        self.prefix = run.prefix
        self.fname = None
        self.safetensor_files: dict[str, Any] = {}
        self.safetensor_config = _weight_map(run.manifest)

    def get_prefixed_key(self, hf_weight_key: str, dict_like: Any) -> str:
        """The name as stored: itself, behind the prefix found before, or behind the first prefix that fits."""
        names = dict_like.keys()
        if hf_weight_key in names:
            return hf_weight_key
        if self.prefix is not None and self.prefix + hf_weight_key in names:
            return self.prefix + hf_weight_key
        for name in names:
            if name.endswith(hf_weight_key):
                self.prefix = name[: -len(hf_weight_key)]
                return str(name)
        self.prefix = ""
        return hf_weight_key

    def find(self, hf_weight_key: str) -> Tensor:
        """The tensor a converter means.

        Raises:
            KeyError: When there is none; converters probe and expect it.
        """
        return self.tensors[self.get_prefixed_key(hf_weight_key, self.tensors)]


@dataclass(slots=True, eq=False)
class Assigned:
    """One assignment a converter made."""

    variable: Variable
    view: View | None
    tensors: frozenset[str]
    ported: bool
    """By ``port_weight``, from one tensor."""


@dataclass(slots=True)
class Recording:
    """What one run of a converter asked for and assigned."""

    run: Run
    assigned: list[Assigned] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    computing: set[str] = field(default_factory=set)
    """Tensors the second run needs as real bytes when ``get_tensor`` asks for them."""
    mismatched: list[Mismatch] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Names the converter asked for that the checkpoint does not have."""
    printed: str = ""


class RecordingLoader(Loader):
    """Serves reservations."""

    def __init__(self, run: Run, recording: Recording, *, lenient: bool) -> None:
        super().__init__(run)
        self.recording = recording
        self.shared = Reservations()
        self._ported: Reservations | None = None
        self._lenient = lenient

    def get_tensor(self, hf_weight_key: str) -> Any:
        """A reservation that lives until the end of the run."""
        tensor = self.find(hf_weight_key)
        self.recording.fetched.add(tensor.name)
        return self.shared.make(tensor)

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        """Assign what the hook makes of a reservation of its own."""
        try:
            tensor = self.find(hf_weight_key)
        except KeyError:
            if not self._lenient:
                raise
            self.recording.absent.append(hf_weight_key)
            return
        self.recording.fetched.add(tensor.name)
        self._ported = Reservations()
        value: Any = self._ported.make(tensor)
        if hook_fn:
            value = hook_fn(value, list(keras_variable.shape))
        event = self._note(keras_variable, value, tensor.name)
        del value
        self._ported.settle()
        if event and self._ported.used:
            event.view = None
        self._ported = None

    def assign(self, variable: Variable, value: Any, assign: Assign) -> Any:
        """Where every ``variable.assign`` of the converter ends up."""
        del assign  # nothing is assigned while recording
        self._note(variable, value, None)
        return value

    def _note(self, variable: Variable, value: Any, ported: str | None) -> Assigned | None:
        _check_variable(variable, ported)
        view = (self._ported if ported and self._ported else self.shared).locate(value)
        shape = tuple(getattr(value, "shape", ()))
        if shape != tuple(variable.shape):
            self.recording.mismatched.append(_disagree(variable, ported or "", shape))
            return None
        tensors = frozenset((ported,)) if ported else tensors_behind(value)
        self.recording.assigned.append(Assigned(variable, view, tensors, ported is not None))
        return self.recording.assigned[-1]


class ReplayLoader(Loader):
    """Serves real bytes where the first run computed, reservations elsewhere."""

    def __init__(self, step: ConverterStep, runtime: Runtime) -> None:
        super().__init__(step.run_of)
        self._step = step
        self._runtime = runtime
        self._reservations = Reservations()
        self._wanted = {id(v) for v in step.variables}

    def get_tensor(self, hf_weight_key: str) -> Any:
        """Real bytes, or a stand-in where the converter only probes or views."""
        tensor = self.find(hf_weight_key)
        return (
            self._runtime.read(tensor.name) if tensor.name in self._step.computing else self._reservations.make(tensor)
        )

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        """Only for variables that are computed; the others have their values already."""
        if id(keras_variable) not in self._wanted:
            return
        value: Any = self._runtime.read(self.find(hf_weight_key).name)
        if hook_fn:
            value = hook_fn(value, list(keras_variable.shape))
        keras_variable.assign(value)

    def assign(self, variable: Variable, value: Any, assign: Assign) -> Any:
        """Place what was computed; leave what was viewed, which is there."""
        if id(variable) not in self._wanted:
            return value
        return self._runtime.compute(variable, value, assign)


@dataclass(frozen=True, slots=True, eq=False)
class ConverterStep:
    """The second run of a converter."""

    run_of: Run
    variables: tuple[Variable, ...]
    computing: frozenset[str]

    @property
    def owner(self) -> str:
        """Whose code runs."""
        return f"converter {self.run_of.function.__module__.rpartition('.')[2]}"

    @property
    def saveable(self) -> None:
        """Converters assign and change nothing else."""
        return

    @property
    def needs(self) -> tuple[str, ...]:
        """Nothing by name; it runs when all bindings are in place."""
        return ()

    @property
    def computes(self) -> bool:
        """Always."""
        return True

    def run(self, runtime: Runtime) -> None:
        """Run the converter again."""
        loader = ReplayLoader(self, runtime)
        with _keras.assignments_to(loader.assign):
            self.run_of(loader)


def _record(run: Run) -> Recording:
    """Watch one run; where it stumbles over an absent name, once more to learn of all absent names."""
    for lenient in (False, True):
        recording = Recording(run)
        try:
            _keras.without_computing(lambda: _watch(recording, lenient))  # noqa: B023  # called before the next turn
        except KeyError as error:
            if lenient:
                raise UnsupportedError(
                    f"{run.manifest.source}: KerasHub's converter needs the tensor {error}, which the checkpoint lacks"
                ) from error
            continue
        except Exception as error:
            if not _keras.is_tracing_error(error):
                raise
            recording = Recording(run)
            _watch(recording, lenient)
        break
    return recording


def _watch(recording: Recording, lenient: bool) -> None:
    loader = RecordingLoader(recording.run, recording, lenient=lenient)
    with _keras.assignments_to(loader.assign):
        recording.printed = recording.run(loader)
    loader.shared.settle()
    recording.computing = set(loader.shared.used)
    for event in recording.assigned:
        if not event.ported and event.view is not None and event.view.tensor in recording.computing:
            event.view = None


def _summarise(model: Any, manifest: Manifest, recordings: list[Recording]) -> VariableMap:
    weights = list(model.weights)
    everything = _keras.unique([*weights, *_keras.state_of(model)])
    names = variable_names([*everything, *(e.variable for r in recordings for e in r.assigned)])
    bindings: list[Binding] = []
    computed: list[Computed] = []
    late: list[ConverterStep] = []
    for recording in recordings:
        viewed, rest = _split(recording)
        bindings.extend(_binding(event, manifest, names) for event in viewed)
        if rest:
            step = _step(recording, rest)
            late.append(step)
            computed.extend(_computed(step.owner, rest, names))
    mismatched = tuple(m for r in recordings for m in r.mismatched)
    fetched = {name for r in recordings for name in r.fetched}
    provided = [b.variable for b in bindings] + [v for c in computed for v in c.variables]
    wrong = {m.variable for m in mismatched}
    covered = [v for v in weights if v.path in wrong]
    if not any(r.absent for r in recordings):
        # The converter found all it asked for: fixed tables it never asks for (rotary frequencies) are the model's own.
        weights = [v for v in weights if v.trainable or id(v) in {id(p) for p in provided}]
    missing, missing_variables, state = split_missing(weights, everything, [*provided, *covered], names)
    unused = tuple(n for n in manifest.tensors if n not in fetched)
    notes = tuple(line for r in recordings for line in _notes(r))
    steps: tuple[Step, ...] = (*(DirectStep(b) for b in bindings), *late)
    return VariableMap(
        tuple(bindings), tuple(computed), missing, missing_variables, state, unused, (), mismatched, notes, steps
    )


def _split(recording: Recording) -> tuple[list[Assigned], list[Assigned]]:
    """Last views of variables that are only ever viewed; and all assignments to the others."""
    computed = {id(e.variable) for e in recording.assigned if e.view is None}
    viewed = {id(e.variable): e for e in recording.assigned if id(e.variable) not in computed}
    return list(viewed.values()), [e for e in recording.assigned if id(e.variable) in computed]


def _binding(event: Assigned, manifest: Manifest, names: Mapping[int, str]) -> Binding:
    assert event.view is not None
    stored = manifest.tensors[event.view.tensor].dtype
    dtype = _keras.stored_dtype(event.variable)
    return Binding(names[id(event.variable)], event.variable, event.view, dtype, stored)


def _step(recording: Recording, rest: list[Assigned]) -> ConverterStep:
    variables = tuple({id(e.variable): e.variable for e in rest}.values())
    direct = {n for e in rest if not e.ported for n in (*e.tensors, *((e.view.tensor,) if e.view else ()))}
    return ConverterStep(recording.run, variables, frozenset(recording.computing | direct))


def _computed(owner: str, rest: list[Assigned], names: Mapping[int, str]) -> list[Computed]:
    tensors: dict[int, set[str]] = {}
    variables: dict[int, Variable] = {}
    for event in rest:
        variables[id(event.variable)] = event.variable
        tensors.setdefault(id(event.variable), set()).update(event.tensors)
    return [Computed(owner, (names[key],), (v,), tuple(sorted(tensors[key]))) for key, v in variables.items()]


def _notes(recording: Recording) -> list[str]:
    absent = [f"The converter asked for {name!r}, which the checkpoint does not have" for name in recording.absent]
    return [line.strip() for line in recording.printed.splitlines() if line.strip()] + absent


def _check_variable(variable: Any, tensor: str | None) -> None:
    if not hasattr(variable, "assign") or not hasattr(variable, "path"):
        raise UnsupportedError(
            f"KerasHub's converter would assign tensor {tensor!r} to something that is no variable: a quantised or "
            "LoRA-enabled layer computes its kernel. Load first, then quantize() or enable_lora()"
        )


def _disagree(variable: Variable, tensor: str, found: tuple[int, ...]) -> Mismatch:
    expected = tuple(variable.shape)
    source = f"tensor {tensor!r}" if tensor else "what the converter computes"
    text = f"Variable {variable.path!r} has shape {expected}, but {source} gives {found}"
    return Mismatch(variable.path, tensor, expected, found, text)


def _weight_map(manifest: Manifest) -> dict[str, Any] | None:
    if len(manifest.files) < 2:
        return None
    files = {n: Path(getattr(t.storage, "path", manifest.source)).name for n, t in manifest.tensors.items()}
    return {"weight_map": files}


def _has_head(model: Any, manifest: Manifest) -> bool:
    """Whether the checkpoint's head belongs to this task: KerasHub loads heads of image classifiers and assistants."""
    architecture = str((manifest.config.get("architectures") or [""])[0])
    fits = "ForImageClassification" in architecture or architecture == "Gemma4AssistantForCausalLM"
    return fits and hasattr(model, "backbone") and hasattr(_hub.converter(manifest), "convert_head")
