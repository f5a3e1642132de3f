"""Run a KerasHub converter once with a loader without bytes, and record what it does."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardload.errors import (
    LimitError,
    MismatchError,
    MissingExtraError,
    ShardloadError,
    UnsupportedError,
    import_failure,
)
from shardload.hub.config_forms import read_config
from shardload.hub.kerashub import preset_path
from shardload.keras_bridge.keras_types import Variable
from shardload.keras_bridge.recording import is_tracing_error, without_computing
from shardload.keras_bridge.saving import assignments_to
from shardload.manifest import Manifest, Tensor, View
from shardload.mapping.hub_names import HubNames
from shardload.mapping.placeholders import CASTS, FloatCasts, Reservations, tensors_behind
from shardload.mapping.variable_map import Mismatch

Assign = Callable[[Variable, Any], Any]


@dataclass(frozen=True, slots=True)
class Run:
    """One function of a converter and the object it fills."""

    function: Callable[[Any, Any, Any], Any]
    target: Any
    manifest: Manifest
    prefix: str | None
    float_casts: FloatCasts = "viewed"
    """``"computed"`` casts tensors as the converter does, which may round them."""

    def __call__(self, loader: Loader) -> str:
        """Run the function; return what it printed."""
        # Converters warn with print(); the report shows it as notes.
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), loader:
            self.function(self.target, loader, read_config(self.manifest))
        return printed.getvalue()


class Loader(contextlib.ExitStack):
    """KerasHub's ``SafetensorLoader`` without files: finds names in the same way, but gets tensors from elsewhere."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.tensors = run.manifest.tensors
        self.preset = preset_path(run.manifest)
        self._names = HubNames(run.manifest, run.prefix)
        # Attributes of KerasHub's loader: converters read some of them.
        self.fname = None
        self.safetensor_files: dict[str, Any] = {}
        self.safetensor_config = _weight_map(run.manifest)

    @property
    def prefix(self) -> str | None:
        """The last matching prefix; converters read it."""
        return self._names.prefix

    def get_prefixed_key(self, hf_weight_key: str, dict_like: Any) -> str:
        """Return the stored name."""
        return self._names.find(hf_weight_key, dict_like)

    def find(self, hf_weight_key: str) -> Tensor:
        """Find the tensor that a converter means.

        Raises:
            KeyError: When there is none; converters probe for tensors and expect it.
        """
        return self.tensors[self.get_prefixed_key(hf_weight_key, self.tensors)]


@dataclass(slots=True, eq=False)
class ConverterAssign:
    """One assignment by a converter."""

    variable: Variable
    view: View | None
    tensors: frozenset[str]
    ported: bool
    """Whether ``port_weight`` assigned it, from one tensor."""


@dataclass(slots=True)
class Recording:
    """Requests and assignments of one converter run."""

    run: Run
    assigned: list[ConverterAssign] = field(default_factory=list)
    fetched: set[str] = field(default_factory=set)
    computing: set[str] = field(default_factory=set)
    """Tensors whose real bytes ``get_tensor`` must return in the second run."""
    rounded: dict[str, str] = field(default_factory=dict)
    """Tensors that the converter computes with in a dtype of fewer values, and that dtype."""
    mismatched: list[Mismatch] = field(default_factory=list)
    absent: list[str] = field(default_factory=list)
    """Names that the converter requested and the checkpoint lacks."""
    printed: str = ""


class RecordingLoader(Loader):
    """KerasHub's loader, which returns reservations (arrays without memory) and records where they are assigned."""

    def __init__(self, run: Run, recording: Recording, *, lenient: bool) -> None:
        super().__init__(run)
        self.recording = recording
        # A converter may do anything with the result of `get_tensor` until it ends; `port_weight` uses its tensor up.
        self.shared = Reservations(run.float_casts)
        self._ported: Reservations | None = None
        self._lenient = lenient

    def get_tensor(self, hf_weight_key: str) -> Any:
        """Return a reservation that lives until the end of the run."""
        tensor = self.find(hf_weight_key)
        self.recording.fetched.add(tensor.name)
        return self.shared.make(tensor)

    def port_weight(self, keras_variable: Any, hf_weight_key: str, hook_fn: Any = None) -> None:
        """Reserve the tensor, apply ``hook_fn`` and assign the result."""
        try:
            tensor = self.find(hf_weight_key)
        except KeyError:
            if not self._lenient:
                raise
            self.recording.absent.append(hf_weight_key)
            return
        self.recording.fetched.add(tensor.name)
        self._ported = Reservations(self.recording.run.float_casts)
        value: Any = self._ported.make(tensor)
        if hook_fn:
            value = hook_fn(value, list(keras_variable.shape))
        event = self._note(keras_variable, value, tensor.name)
        # Closing finds out whether the hook read the tensor's bytes; a live reference would count as such a use.
        del value
        self._ported.close()
        if event and self._ported.used:
            event.view = None
            self.recording.rounded.update(self._ported.rounding)
        self._ported = None

    def assign(self, variable: Variable, value: Any, assign: Assign) -> Any:
        """Record an assignment; receives every ``variable.assign`` of the converter."""
        # Nothing is assigned while recording.
        del assign
        self._note(variable, value, None)
        return value

    def _note(self, variable: Variable, value: Any, ported: str | None) -> ConverterAssign | None:
        _check_variable(variable, ported)
        view = (self._ported if ported and self._ported else self.shared).locate(value)
        shape = tuple(getattr(value, "shape", ()))
        if shape != tuple(variable.shape):
            self.recording.mismatched.append(Mismatch.of_shapes(variable, ported or "", shape))
            return None
        tensors = frozenset((ported,)) if ported else tensors_behind(value)
        self.recording.assigned.append(ConverterAssign(variable, view, tensors, ported is not None))
        return self.recording.assigned[-1]


def record(run: Run) -> Recording:
    """Record one run; if it fails at an absent name, run again to collect all absent names.

    Raises:
        UnsupportedError: When it needs a tensor that is absent, or variables that no longer exist.
        MissingExtraError: When a package that it imports is missing.
        LimitError: When a limit of this process was reached.
        MismatchError: When it fails otherwise: a tensor to reshape does not have the size in the model's configuration.
    """
    try:
        return _record(run)
    except ShardloadError:
        raise
    except Exception as error:
        if failed := import_failure(error):
            raise MissingExtraError.explaining(failed, needed_for=f"Converting {run.manifest.source}") from error
        if limit := LimitError.explaining(error, f"convert {run.manifest.source}"):
            raise limit from error
        name, target = run.function.__module__.rpartition(".")[2], type(run.target).__name__
        raise MismatchError(
            f"Cannot convert {run.manifest.source} to {target} with KerasHub's {name}: "
            f"{str(error)[:200] or type(error).__name__}. If config.json does not match the tensors, correct "
            f"config.json. Otherwise KerasHub's {target} cannot represent this model: load it into a model of your "
            "own with shardload.load_weights(model, source)"
        ) from error


def _record(run: Run) -> Recording:
    for lenient in (False, True):
        recording = Recording(run)
        try:
            without_computing(lambda: _watch(recording, lenient))  # noqa: B023  # called before the next turn
        except KeyError as error:
            if lenient:
                raise UnsupportedError(
                    f"Cannot convert {run.manifest.source}: KerasHub's converter needs the tensor {error}, which the "
                    "checkpoint lacks"
                ) from error
            continue
        except Exception as error:
            if not is_tracing_error(error):
                raise
            # The converter needs the numbers of a traced value (NumPy code, an `if`), so let it compute for real.
            recording = Recording(run)
            _watch(recording, lenient)
        break
    return recording


def _watch(recording: Recording, lenient: bool) -> None:
    loader = RecordingLoader(recording.run, recording, lenient=lenient)
    with assignments_to(loader.assign), CASTS.applied():
        recording.printed = recording.run(loader)
    # A tensor that is computed with is read whole in the second run, so its views are assigned there too.
    loader.shared.close()
    recording.computing = set(loader.shared.used)
    recording.rounded |= {n: to for n, to in loader.shared.rounding.items() if n in recording.computing}
    for event in recording.assigned:
        if not event.ported and event.view is not None and event.view.tensor in recording.computing:
            event.view = None


def _check_variable(variable: Any, tensor: str | None) -> None:
    if not hasattr(variable, "assign") or not hasattr(variable, "path"):
        raise UnsupportedError(
            f"Cannot assign tensor {tensor!r} as KerasHub's converter does: its target is not a variable, because a "
            "quantised or LoRA-enabled layer computes its kernel. Load the weights first, then call quantize() or "
            "enable_lora()"
        )


def _weight_map(manifest: Manifest) -> dict[str, Any] | None:
    # KerasHub's loader has None for a folder without an index, and its converters test for that.
    if len(manifest.files) < 2:
        return None
    files = {n: getattr(t.storage, "path", manifest.location).name for n, t in manifest.tensors.items()}
    return {"weight_map": files}
