"""Restore a training step into a model, on the model's current mesh.

    find the step ─► check its small files ─► manifest ─► pair tensors with variables ─► plan ─► read, checking each MiB
                                                                                              of data before it is used

A step is read like any other checkpoint: parts of its uncompressed chunks can be read, so a step can be restored on any
mesh, whichever saved it, and no device ever stores more than its own shards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from shardload.errors import DamagedError, MismatchError, SourceError, UnsupportedError, suggests_arguments
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import plain_model, with_optimizer
from shardload.keras_bridge.variables import value_of
from shardload.loaders.orbax.loader import open_orbax
from shardload.manifest import Manifest
from shardload.mapping.stored_state import Items, map_state
from shardload.pipeline import load as pipeline
from shardload.pipeline.load import joint_load
from shardload.pipeline.request import RestoreRequest
from shardload.processes.joint_call import Call
from shardload.progress import ProgressLike
from shardload.reports import LoadReport
from shardload.resolve.opening import OpenedSource
from shardload.runs.digests import Checker
from shardload.runs.listing import Alternative, Which, alternative, find_step, prepared
from shardload.runs.step import StepInfo
from shardload.transfer.byte_source import check_tensor
from shardload.transfer.read_tensor import read_tensor
from shardload.typing import LayoutLike, MeshLike, PathLike


@suggests_arguments
def restore(
    model: Any,
    directory: PathLike,
    *,
    step: Which = "latest",
    items: Items = "all",
    mesh: MeshLike | None = None,
    axes: str | None = None,
    layout: LayoutLike | None = None,
    devices: Sequence[Any] | None = None,
    optimizer: Any = None,
    rename: Mapping[str, str] | None = None,
    names: Mapping[str, str] | None = None,
    strict: bool = True,
    atomic: bool = False,
    fallback: Literal["previous"] | None = None,
    host_memory_bytes: int | str | None = None,
    progress: ProgressLike = None,
    warm_up: Mapping[str, Any] | None = None,
    replicas: Literal["auto", "read", "broadcast"] = "auto",
) -> LoadReport:
    """Fill a model with a step of a training run.

    Examples:
        ```python
        report = shardload.restore(model, "checkpoints", step="best", mesh="2x4")
        print(report.notes[0])  # which step it was
        ```

    Args:
        model: A built Keras model, live or built inside `shardload.abstract`, compiled or not.
        directory: The folder in which `shardload.callbacks.OrbaxCheckpoint` saves its steps; also a folder of Keras'
            own callback, or of plain Orbax.
        step: The step's number, ``"latest"`` or ``"best"``; with several processes, process 0 resolves these.
        items: ``"all"``, ``"weights"``, ``"optimizer"`` or ``"metrics"``. For an uncompiled model ``"all"`` means its
            weights. If an optimizer has not trained yet, its slots are created first.
        mesh: As for `load_weights`; by default the model's current mesh, which can differ from the saved one.
        axes: As for `load_weights`.
        layout: As for `load_weights`.
        devices: As for `load_weights`.
        optimizer: An optimizer of a training loop of your own, for a model that is not compiled: its state is restored
            too, and laid out along the weights.
        rename: For layers that moved, prefix of keys in the step → in the model: ``{"layers/dense": "layers/head"}``.
        names: Tensor name → variable path, for steps not saved by shardload.
        strict: Raise if the step lacks a requested item or contains more than the model; otherwise report it.
        atomic: Keep the old values until all new ones are loaded; this doubles the memory.
        fallback: ``"previous"`` replaces a damaged step by the newest undamaged step before it, with ``step="best"``
            by the next best undamaged one, and reports it.
        host_memory_bytes: As for `load_weights`.
        progress: As for `load_weights`.
        warm_up: As for `load`, but for ``"predict"`` and ``"train"`` only.
        replicas: As for `load_weights`.

    Returns:
        The report; its notes name the step, and whether its bytes were verified.

    Raises:
        UsageError: If an argument is of the wrong kind.
        SourceNotFoundError: If there is no such step.
        MeshError: If there are too few devices.
        LayoutError: If the layout cannot be applied.
        DamagedError: If bytes differ from the saved ones; names step, file and the step to use instead.
        MismatchError: If model and step disagree; the model is then unchanged.
        LoadInterruptedError: If reading failed after values had been replaced.
        DisagreementError: As in `load`, like all other errors about processes.
    """
    request = RestoreRequest(
        model=plain_model(model),
        directory=directory,
        step=step,
        items=items,
        mesh=mesh,
        axes=axes,
        layout=layout,
        devices=devices,
        optimizer=optimizer,
        rename=rename,
        names=names,
        strict=strict,
        atomic=atomic,
        fallback=fallback,
        host_memory_bytes=host_memory_bytes,
        progress=progress,
        warm_up=warm_up,
        replicas=replicas,
    )
    restored = run_restore(request)
    if items == "all":
        record_of(request.model).restored = restored.info
    return restored.report


@dataclass(frozen=True, slots=True)
class Restored:
    """What a restore returns to other code of shardload: the report of the load, and which step was restored."""

    report: LoadReport
    info: StepInfo
    """Number, folder and other facts of the step that was restored."""


def run_restore(request: RestoreRequest) -> Restored:
    """Restore a training step into a model; return the report, and which step was restored.

    The model does not remember that step. So a later ``fit`` does not continue at the step's epoch and data position,
    as it would after `shardload.restore`: the caller decides where training continues.
    """
    with joint_load(request) as call:
        restored = _restore_undamaged(request, call)
    record_of(request.model).restored = None
    return restored


def adopt(
    request: RestoreRequest,
    choose: Callable[[], StepInfo | None],
    *,
    looks: Callable[[], AbstractContextManager[None]],
    swap: Callable[[StepInfo], AbstractContextManager[None]],
) -> Restored | None:
    """Restore the step that ``choose`` returns on process 0, if any, on all processes, and assign its values at once.

    The model is unchanged until everything is read and verified. All values are assigned inside the context that
    ``swap`` returns, and are the old ones again if that fails. ``looks`` returns a context in which the model is looked
    at before anything is read: Keras takes the values out of a model while it predicts.

    Raises:
        UnsupportedError: If shardload did not save the step, so that it cannot be verified.
    """
    with joint_load(request) as call:
        if (info := _chosen(call, request.directory, choose)) is None:
            return None
        if not info.ours:
            raise UnsupportedError(
                f"Cannot verify step {info.step} of {info.folder}: shardload did not save it, so it has no digests. "
                "Save steps by shardload.callbacks.OrbaxCheckpoint or shardload.Checkpointer"
            )
        report = _restore(request, info, call, (), best=False, looks=looks, swap=lambda: swap(info))
    record_of(request.model).restored = None
    return Restored(report, info)


def _restore_undamaged(request: RestoreRequest, call: Call) -> Restored:
    """Restore the requested step or, if it is damaged and ``fallback`` is set, the previous or next best intact one."""
    directory, step = request.directory, request.step
    skipped: list[str] = []
    tried: set[int] = set()
    info: StepInfo | None = None
    while True:
        try:
            with call.attempt():
                # After damage, the alternative is already known.
                info = info or _find(call, directory, step)
                report = _restore(request, info, call, skipped, best=step == "best" and not skipped)
                return Restored(report, info)
        except Exception as error:
            damage = _damage(error)
            # Without a step yet, damage kept the search from telling which is best: then look for the best other one.
            if damage is None or (info is None and step != "best"):
                raise
            call.try_again()
            tried |= {info.step} if info is not None else set()
            find = partial(alternative, directory, step, bad=info, tried=tried)
            # Process 0 decides for all: each would read whole steps to find one, and a running job may add another.
            found = Alternative(**call.first(lambda find=find: asdict(find()), "the alternative"))  # type: ignore[misc]
            if request.fallback is None or found.step is None:
                # In its own class: an interrupted load that was due to damage is still an interrupted load.
                raise type(error)(f"{error}\n{found.advice}") from damage
            name = "a damaged step" if info is None else f"step {info.step} is damaged and"
            skipped.append(f"{name} was passed over: {damage}")
            info = find_step(directory, found.step)


def _find(call: Call, directory: PathLike, step: Which) -> StepInfo:
    found = _chosen(call, directory, lambda: find_step(directory, step))
    assert found is not None
    return found


def _chosen(call: Call, directory: PathLike, choose: Callable[[], StepInfo | None]) -> StepInfo | None:
    """Choose a step on process 0, for all processes: another one could find a newer step a moment later."""
    # Process 0 keeps what it found, the others look up its number: `first` passes on JSON only.
    mine: list[StepInfo | None] = []

    def number_of_chosen() -> int | None:
        mine.append(choose())
        return None if mine[0] is None else mine[0].step

    number = call.first(number_of_chosen, "the choice of the step")
    if number is None:
        return None
    return mine[0] if mine else find_step(directory, number)


def _restore(
    request: RestoreRequest,
    info: StepInfo,
    call: Call,
    skipped: Sequence[str],
    *,
    best: bool,
    looks: Callable[[], AbstractContextManager[None]] = nullcontext,
    swap: Callable[[], AbstractContextManager[None]] | None = None,
) -> LoadReport:
    def opener() -> OpenedSource:
        ready = prepared(info)
        checker = Checker.of_step(ready.location) if ready.ours else None  # before the headers, which it verifies
        return OpenedSource(_opened(ready), checker, (*skipped, _title(ready, best=best)))

    with with_optimizer(request.model, request.optimizer):
        return pipeline.run_load(request, call, opener=opener, looks=looks, swap=swap).report


def metric_values(model: Any, info: StepInfo) -> list[tuple[Any, NDArray[Any]]]:
    """Return the metric variables of ``model`` with their verified values from a shardload step.

    Many metrics have no variables until ``fit`` has seen data, so `restore` could not fill them before.
    """
    return list(_verified(model, info, "metrics"))


def weight_values(model: Any, info: StepInfo) -> list[NDArray[Any]]:
    """Return a value for each weight of ``model``: that of a shardload step, verified, or else the current one."""
    found = {id(variable): value for variable, value in _verified(model, info, "weights")}
    return [found[id(v)] if id(v) in found else np.asarray(value_of(v)) for v in model.weights]


def _verified(model: Any, info: StepInfo, items: Items) -> Iterator[tuple[Any, NDArray[Any]]]:
    """Yield variables of a model (``items`` says which), each with its verified value from a shardload step."""
    check = Checker.of_step(info.location)
    manifest = _opened(info)
    mapping = map_state(model, manifest, items=items)
    if mapping.missing or mapping.mismatched:
        first = [*mapping.missing, *mapping.mismatched][0]
        raise MismatchError(
            f"Cannot read step {info.step} for the model {model.name!r}: {first} does not match. Build the model that "
            "saved the step"
        )
    for binding in mapping.bindings:
        tensor = manifest.tensors[binding.view.tensor]
        # Tensor by tensor, so that a damaged one raises before its value is used.
        check_tensor(check, tensor)
        yield binding.variable, read_tensor(manifest, tensor.name).astype(binding.dtype)


def _opened(info: StepInfo) -> Manifest:
    try:
        return open_orbax(info.location)
    except SourceError as error:
        if info.ours:
            raise DamagedError(
                f"Step {info.step} in {info.where.rpartition('/')[0]} cannot be read: {error}"
            ) from error
        raise


def _damage(error: BaseException | None) -> DamagedError | None:
    # A load that replaced values wraps the damage in a LoadInterruptedError.
    while error is not None:
        if isinstance(error, DamagedError):
            return error
        error = error.__cause__
    return None


def _title(info: StepInfo, *, best: bool) -> str:
    if not info.ours:
        return f"step {info.step}, not saved by shardload: unverified, as it has no digests"
    epoch = f" (epoch {info.epoch + 1})" if info.epoch is not None else ""
    by = f", best {info.best_by}" if best and info.best_by else ""
    return f"step {info.step}{epoch}{by}, verified"
