"""One load, from model and manifest to filled variables: the checks between the stages, and timing.

prepare ─► LoadJob(mapping, layouts, plan) ─► check ─► fill ─► LoadReport
headers only, nothing changed                the only part that changes the model
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from shardload import mapping as tensor_mapping
from shardload.errors import LoadInterruptedError, MismatchError
from shardload.hub import fidelity, kerashub, quantised
from shardload.keras_bridge import abstraction, binding
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.variables import has_value, relocate, sharding_of
from shardload.loaders import spec_of
from shardload.manifest import Manifest
from shardload.mapping import Mismatch, OutsideTensor, VariableMap
from shardload.mapping.assign import Assigner
from shardload.mapping.layer_step import has_keras_hook
from shardload.parallel import LayoutChoice, choose
from shardload.parallel.current_layout import AS_IT_WAS, remember
from shardload.pipeline import reporting
from shardload.progress import Progress, Silent
from shardload.reports import LoadReport
from shardload.sharding.devices import MeshDevices, local_positions
from shardload.stores.fingerprint import Fingerprint
from shardload.transfer import execution
from shardload.transfer.casts import is_float
from shardload.transfer.planning import LoadPlan, Target, make_plan
from shardload.transfer.read_tensor import read_tensor
from shardload.transfer.verifier import Verifier

OnFailure = Literal["raise", "tell", "restore"]
"""``raise``: only the error, as the caller has no model yet; ``tell``: add the state of the model to the error;
``restore``: keep the old values until the new ones are complete, and restore them."""
NOT_STRICT = " Pass strict=False (--no-strict) to load what fits and report the rest."
"""Advice for a load or restore that does not fit, which a caller may replace."""
SHOWN = 8
"""Names that an error lists before it counts the rest."""


def on_failure(*, atomic: bool) -> OnFailure:
    """Return the failure mode for an existing model, with or without ``atomic``."""
    return "restore" if atomic else "tell"


class Clock:
    """Wall-clock seconds per stage, counted from creation."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self.stages: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the duration of the block to ``stage``."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.stages[stage] = self.stages.get(stage, 0.0) + time.perf_counter() - began

    @property
    def total_s(self) -> float:
        """Seconds since creation."""
        return time.perf_counter() - self._began


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Everything decided before the first byte of data is read."""

    model: Any
    manifest: Manifest
    place: MeshDevices
    mapping: VariableMap
    choice: LayoutChoice
    plan: LoadPlan
    left_out: tuple[Mismatch, ...] = ()
    """Mismatches that are skipped, because ``strict`` is not set."""
    check: Verifier | None = None
    """The checkpoint's digests."""
    outside: tuple[OutsideTensor, ...] = ()
    """Tensors outside the model's architecture: reported, but no error."""
    why_unused: Mapping[str, str] = field(default_factory=dict)
    """Explanations for some of the unused tensors, by name."""
    built: bool = False
    """Whether the model was built from the checkpoint's description."""

    def with_unused_sorted(self, *, ignore: Iterable[str] = (), compare: bool = True) -> LoadJob:
        """Separate tensors outside the model from unused ones, for a model built from the checkpoint's description.

        Args:
            ignore: As for `mapping.sort_unused`.
            compare: As for `mapping.sort_unused`.
        """
        mapping = tensor_mapping.without_parts(self.mapping, self.manifest)
        found = tensor_mapping.sort_unused(mapping, self.manifest, self.model, ignore=ignore, compare=compare)
        mapping = replace(mapping, unused=found.unused)
        return replace(self, mapping=mapping, outside=found.outside, why_unused=found.why, built=True)

    def checked(self, *, strict: bool) -> LoadJob:
        """Return the job if everything fits; with ``strict=False``, leave out mismatched variables instead of raising.

        Raises:
            MismatchError: Under ``strict``, when shapes disagree, integers would become floats, a weight of the model
                has no tensor, or a tensor has no place in the model.
        """
        if not strict:
            return replace(self, mapping=self.mapping.without_mismatched(), left_out=self.mapping.mismatched)
        problems = [f"does not match: {m}" for m in self.mapping.mismatched]
        problems += [f"does not match: {text}" for text in self._integers_for_floats()]
        problems += [f"missing from the checkpoint: {name}" for name in self.mapping.missing]
        problems += [f"not used by the model: {self._told(name)}" for name in self.mapping.unused]
        if not problems:
            return self
        rest = f"\n  … and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise MismatchError(
            f"{self.manifest.source} does not fit the model {self.model.name!r} ({type(self.model).__name__}):\n  "
            + "\n  ".join(problems[:SHOWN])
            + rest
            + f"\nThe model is unchanged.{self._way_out()}"
        )

    def _integers_for_floats(self) -> Iterator[str]:
        """Yield problems of integer tensors for float variables: probably quantised, and useless without their scales.

        Custom loading hooks are exempt, because they may apply scales.
        """
        knowing = [s for s in self.mapping.steps if s.saveable is not None and not has_keras_hook(s.saveable)]
        exempt = {name for step in knowing for name in step.needs}
        for b in self.mapping.bindings:
            if is_float(b.dtype) and not is_float(b.stored) and b.name not in exempt:
                yield (
                    f"Variable {b.name!r} is {b.dtype}, but tensor {b.view.tensor!r} holds {b.stored}: integers are no "
                    "weights unless something scales them"
                )

    def _told(self, name: str) -> str:
        return f"{name} ({self.why_unused[name]})" if name in self.why_unused else name

    def _way_out(self) -> str:
        out = NOT_STRICT
        if self.built and self.mapping.unused:
            out = (
                f" Where the model is right without a tensor, name it: ignore=[{self.mapping.unused[0]!r}] "
                f"(--ignore {self.mapping.unused[0]}). strict=False (--no-strict) also accepts missing weights."
            )
        if spec_of(self.manifest).tensor_names == "own" and self.mapping.missing and self.mapping.unused:
            out += " Where only the names differ, pass names={tensor: variable path}."
        return out


def build(manifest: Manifest, **options: Any) -> Any:
    """Build the model that a checkpoint describes, without allocating buffers."""
    with abstraction.abstract():
        return kerashub.build_model(manifest, **options)


def prepare(
    model: Any,
    manifest: Manifest,
    place: MeshDevices,
    *,
    layout: Any,
    host_memory_bytes: int | None,
    tensor_names: Mapping[str, str] | None = None,
    mapping: VariableMap | None = None,
    check: Verifier | None = None,
    ignore_config: Sequence[str] = (),
    optimizer: bool = True,
) -> LoadJob:
    """Make all decisions of a load; changes nothing.

    Args:
        model: The model to fill.
        manifest: The checkpoint.
        place: The devices to load onto.
        layout: A mode, or the layouts themselves.
        host_memory_bytes: The budget; chosen by the plan by default.
        tensor_names: Tensor name → variable path, for bare files.
        mapping: The mapping of tensors to variables, if it is already known.
        check: The checkpoint's digests.
        ignore_config: As for `shardload.loading.run`.
        optimizer: Whether to load stored optimizer state.
    """
    ignore_config = fidelity.check_names(ignore_config)
    quantised.check_before(manifest, ignore=ignore_config)
    mapping = mapping or tensor_mapping.map_weights(model, manifest, names=tensor_names, optimizer=optimizer)
    quantised.check_mapped(manifest, mapping.bindings, mapping.unused, ignore=ignore_config)
    told = quantised.accepted(manifest, mapping.bindings, ignore=ignore_config)
    mapping = replace(mapping, notes=(*told, *mapping.notes))
    choice = layout if isinstance(layout, LayoutChoice) else choose(model, place.mesh, layout)
    targets = [Target(b.name, b.view, b.dtype, choice.layouts[id(b.variable)]) for b in mapping.bindings]
    plan = make_plan(
        manifest,
        targets,
        host_memory_bytes=host_memory_bytes,
        positions=local_positions(place),
        scatter=check is None,
        uploads=any(device is not None and device.platform != "cpu" for device in place.devices),
    )
    return LoadJob(model, manifest, place, mapping, choice, plan, check=check)


def fill(
    job: LoadJob,
    clock: Clock,
    *,
    files: Fingerprint,
    on_failure: OnFailure,
    progress: Progress | None,
    notes: tuple[str, ...],
    on_filled: Callable[[], None] = lambda: None,
) -> LoadReport:
    """Read, assign, initialise the rest, and report.

    Args:
        job: The decided load; its model is changed only here.
        clock: Measures the stages.
        files: Fingerprint of the checkpoint's files from when their headers were read.
        on_failure: What to do with a half-loaded model.
        progress: Receives the number of bytes read.
        notes: Notes for the report.
        on_filled: Called when all values are in place, while old values can still be restored.

    Raises:
        LoadInterruptedError: When it failed after values had been replaced; describes the state of the model.
        TransferError: When reading failed and nothing had been replaced.
    """
    files.check()
    with clock("transfer"), _standing(job, files, on_failure=on_failure) as assigner:
        stats = _stream(job, assigner, progress or Silent())
        files.check()
        assigner.finish(on_filled)
    with clock("build"):
        initialised = abstraction.initialise(job.model)
        _gather(job)
        abstraction.check_initialised(job.model)
    return reporting.load_report(job, clock, stats, initialised=tuple(initialised), notes=notes)


def _stream(job: LoadJob, assigner: Assigner, shown: Progress) -> execution.TransferStats:
    shown.start(job.plan.read_bytes, f"Loading {job.model.name}")
    try:
        return execution.execute(
            job.plan,
            job.manifest,
            devices=job.place.devices,
            on_start=assigner.starting,
            on_ready=assigner.ready,
            progress=shown.advance,
            check=job.check,
        )
    finally:
        shown.stop()


def _gather(job: LoadJob) -> None:
    """Move variables that the checkpoint lacks (seeds, metrics, kept weights) to the mesh: one program, one mesh."""
    if binding.binding_of(job.model) is not None:
        for variable in state_of(job.model):
            if (sharding := sharding_of(variable)) is not None:
                relocate(variable, sharding)


@contextmanager
def _standing(job: LoadJob, files: Fingerprint, *, on_failure: OnFailure) -> Iterator[Assigner]:
    """Bind the model to its new mesh and yield its assigner; on failure describe its state, or restore everything."""
    before = binding.BindingSnapshot.of(job.model)
    held = sum(map(has_value, job.mapping.provided))
    assigner = _assigner(job, files, atomic=on_failure == "restore")
    try:
        _bind(job)
        yield assigner
    except BaseException as error:
        left = assigner.abort()
        unchanged = not left.new and len(left.old) == held
        if on_failure == "restore" or unchanged:
            before.restore()
        if on_failure == "raise" or unchanged:
            raise
        remember(job.model, job.place)
        told = f"Of the model {job.model.name!r} {left}."
        if not isinstance(error, Exception):
            error.add_note(f"The load was interrupted. {told}")
            raise
        raise LoadInterruptedError(
            f"Loading {job.manifest.source} failed: {error}\n{told} Load it again, or use atomic=True to keep the old "
            "values until the new ones are complete."
        ) from error


def _bind(job: LoadJob) -> None:
    if job.choice.mode != AS_IT_WAS:
        binding.bind(
            job.model, mesh=job.place.mesh, devices=job.place.devices, layouts=job.choice.layouts, values="keep"
        )


def _assigner(job: LoadJob, files: Fingerprint, *, atomic: bool) -> Assigner:
    def place(variable: Any, value: Any) -> Any:
        return execution.place(value, job.choice.layouts[id(variable)], job.place.devices)

    def read(tensor: str) -> Any:
        value = read_tensor(job.manifest, tensor)
        files.check()
        return value

    return Assigner(job.mapping, read_tensor=read, place=place, atomic=atomic)
