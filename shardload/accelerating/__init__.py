"""Run the loading functions of Keras and KerasHub through shardload: ``with shardload.fast(): …``.

    call in a program ─► Keras' own function ─► interception ─► build as Keras, without values ─► fill ─► return
                         checks, errors         keras_bridge     Keras' and KerasHub's own code   pipeline
                                                                       │ what fails or is unsupported
                                                                       └─► Keras makes the call, the report says why

So the model, its names, its seeds and all errors are Keras' own; shardload only reads the weights and places them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import keras

from shardload.errors import DamagedError, ShardloadError, public_name, suggests_arguments
from shardload.keras_bridge import abstraction
from shardload.keras_bridge.abstraction import abstract
from shardload.keras_bridge.entry_points import (
    EntryCall,
    calls_to,
    conversions_to,
    handlers,
    model_from_config,
    plain_keras,
    rewound_on_error,
    saved_config,
    step_of,
)
from shardload.keras_bridge.hub_imports import backbone_of
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import refresh_derived, state_of, without_walking_vocabularies
from shardload.keras_bridge.recording import record_variables
from shardload.keras_bridge.saving import load_layer_assets as load_assets_of_folder
from shardload.keras_bridge.variables import is_abstract, release_from_mesh
from shardload.layouts.choice import current_devices
from shardload.loaders import spec_of
from shardload.loading import Loaded, run_load_weights
from shardload.mapping.assets import load_assets, staged_assets
from shardload.pipeline.request import LoadWeightsRequest, check_backend
from shardload.reports import LoadReport
from shardload.reports.calls import CallReport, FastReport
from shardload.resolve import hubs
from shardload.resolve.opening import open_source
from shardload.sharding.devices import MeshDevices
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.stores.remote import location_of
from shardload.text.sources import record_text_source


class NotSupported(Exception):  # noqa: N818 - not an error: Keras makes the call
    """Raised with the reason why a call cannot be made by shardload, so that Keras has to make it."""


@dataclass(frozen=True, slots=True)
class Filled:
    """The result of a call of Keras or KerasHub that shardload made in its place."""

    result: Any
    """The value that Keras would return from the call."""
    report: LoadReport | None
    """The report of the load; ``None`` if the call loads no weights."""


def local_path(path: Any) -> Path:
    """Return an existing local path as an absolute one; raise `NotSupported` for anything else."""
    if not isinstance(path, str | os.PathLike):
        raise NotSupported(f"its source is a {type(path).__name__}, expected a path")
    text = os.fspath(path)
    if "://" in text:
        raise NotSupported("its source is not on this machine")
    if not (found := Path(text)).exists():
        raise NotSupported("its source does not exist")
    return found.absolute()


def url_of(path: Any) -> str | None:
    """Return an address in a store that shardload reads in place; ``None`` for anything else."""
    return path if location_of(path) is not None else None


def fill_model(model: Any, path: Path | str) -> Loaded:
    """Load weights into a model and place them as Keras would: in its layouts or, if it has none, on one device."""
    # Without a distribution, a mesh of one device; `finish` makes the values ordinary arrays again.
    if current_devices(model) is None:
        one = MeshSpec(DEFAULT_AXES, (1, 1))
        # An array tells the default device: a context, a setting or the first one; a device or a platform's name.
        default = next(iter(jax.numpy.zeros(()).devices()))
        record_of(model).devices = MeshDevices(one, (default,))
    return run_load_weights(LoadWeightsRequest(model=model, source=path, as_keras=True))


def finish(model: Any, loaded: Loaded, *, created: Sequence[Any] = (), committed: bool = False) -> None:
    """Initialise variables that were not loaded, and turn values of those without a layout into arrays on one device.

    ``created``: weak references to all variables that were created while the model was built. The model's own lists
    lack some, such as a preprocessor's; those that still exist are initialised too. ``committed``: bind the arrays to
    that device, as Orbax does: JAX refuses to combine bound arrays of different devices.
    """
    _initialise(model, created)
    # A list: `any` of a generator would stop at the first one that was released.
    released = [release_from_mesh(variable, committed=committed) for variable in state_of(model)]
    if any(released):
        refresh_derived(model)
    record_of(model).report = loaded.report
    record_text_source(model, loaded.manifest)


def _initialise(model: Any, created: Sequence[Any]) -> None:
    """Give variables of a model, and others in ``created``, that were not loaded their initial values."""
    abstraction.initialise(model)
    # What the model does not list: a preprocessor's or a local layer's variables, if they are still in use.
    left = [variable for ref in created if (variable := ref()) is not None and is_abstract(variable)]
    abstraction.initialise(left)


def model_call(call: EntryCall) -> Filled:
    """Do the work of ``load_model``: build the model without values, then load its weights and its layers' files."""
    path: Path | str
    config: str | None
    if url := url_of(call.arguments["filepath"]):
        path, opened = url, open_source(url, None)
        checker, config, is_step = opened.checker, json.dumps(opened.manifest.config), spec_of(opened.manifest).is_step
    else:
        path = local_path(call.arguments["filepath"])
        # An archive and a folder have a config.json; an Orbax checkpoint has the configuration inside.
        checker, config = None, saved_config(path)
        if is_step := config is None:
            path = step_of(path) or path
            opened = open_source(path, "orbax")
            checker, config = opened.checker, json.dumps(opened.manifest.config)
    if config in (None, "{}"):
        raise NotSupported("the checkpoint contains no configuration of a model")
    with abstract() as created:
        model = model_from_config(config, call.arguments)
    if not isinstance(model, keras.Model):
        raise NotSupported(f"it is a {type(model).__name__}, expected a model")
    loaded = fill_model(model, path)
    # After the weights, as hooks may use them. Keras can also save a model as a folder instead of an archive.
    if not is_step and isinstance(path, Path) and (path / "assets").is_dir():
        for _, layer, error in load_assets_of_folder(model, path / "assets"):
            raise NotSupported(f"{layer!r} cannot load the files that it saved in {path / 'assets'}") from error
    else:
        with staged_assets(loaded.manifest, check=checker) as folder:
            load_assets(model, loaded.manifest, folder)
    # Orbax restores to a device, so its arrays are committed to it; values from files of Keras are not.
    finish(model, loaded, created=created, committed=is_step)
    return Filled(model, loaded.report)


def weights_call(call: EntryCall) -> Filled:
    """Do the work of ``model.load_weights``: load weights into an existing model. The result is None, as in Keras."""
    model: Any = call.arguments["model"]
    if call.arguments.get("objects_to_skip") is not None:
        raise NotSupported("objects_to_skip is given")
    if not model.built:
        raise NotSupported("the model has not been built")
    if url := url_of(call.arguments["filepath"]):
        loaded = fill_model(model, url)
        finish(model, loaded, committed=spec_of(loaded.manifest).is_step)
        return Filled(None, loaded.report)
    path = local_path(call.arguments["filepath"])
    step = step_of(path)
    loaded = fill_model(model, step or path)
    finish(model, loaded, committed=step is not None)
    return Filled(None, loaded.report)


HEAD, BACKBONE = "head", "backbone"


@dataclass(slots=True)
class _Collected:
    """Records KerasHub's calls that load weights while it builds a model; one load replaces them afterwards."""

    loader: Any
    parts: dict[str, tuple[Any, Path]] = field(default_factory=dict)
    """Name of a part (``head`` or ``backbone``) → the object to fill, and the folder with the part's weights."""
    n_weights: int = 0
    """Number of weights that the backbone had when KerasHub asked to load them: if it has more later, Keras makes the
    call, because KerasHub would not have loaded these."""

    def call(self, call: EntryCall) -> Any:
        """Record a call that loads weights, without making it; let Keras make all other calls."""
        if call.kind != "weights":
            return call.original()
        found = call.arguments
        # KerasHub loads a task's file without its backbone, which has a file of its own.
        self._add(HEAD if found.get("objects_to_skip") else BACKBONE, found["model"], local_path(found["filepath"]))
        return None

    def convert(self, part: str, target: Any) -> None:
        """Record KerasHub's request to convert Hugging Face weights into ``target``, a task's head or a backbone."""
        # KerasHub fetches a file from the Hugging Face Hub when a tensor in it is read; here all files are needed.
        preset = str(self.loader.preset)
        self._add(part, target, hubs.fetch(preset) if preset.startswith("hf://") else local_path(preset))

    def _add(self, part: str, target: Any, path: Path) -> None:
        if part in self.parts:
            raise NotSupported("it loads several parts")
        self.parts[part] = (target, path if path.is_dir() else path.parent)
        if part == BACKBONE:
            self.n_weights = len(target.weights)

    def target(self, made: Any) -> tuple[Any, Path]:
        """Return the object to fill with weights, and the folder that has them.

        ``made``: the task or backbone that KerasHub has built. KerasHub's calls to load the head and the backbone were
        recorded, not made. If both read the same folder, one load into ``made`` does the work of both; if only the
        backbone's call was recorded, the backbone is filled. Otherwise raise `NotSupported`: Keras makes the calls.
        """
        if BACKBONE not in self.parts:
            raise NotSupported("it loads no weights of a backbone")
        backbone, folder = self.parts[BACKBONE]
        if backbone is not backbone_of(made):
            raise NotSupported("it loads the weights of another object than its backbone")
        # KerasHub would not have loaded weights that were created later.
        if self.n_weights != len(backbone.weights):
            raise NotSupported("its backbone is not built when KerasHub loads the weights")
        if HEAD not in self.parts:
            return backbone, folder
        if self.parts[HEAD] != (made, folder):
            raise NotSupported("its weights are in several folders")
        return made, folder


def preset_call(call: EntryCall) -> Filled:
    """Do the work of ``from_preset``: let KerasHub build the model without weights, then load those it would load.

    With ``load_weights=False``, variables get Keras' initial values, each straight in its layout.
    """
    loader = call.arguments["loader"]
    collected = _Collected(loader)
    intercepted = calls_to(collected.call), conversions_to(loader, collected.convert)
    with record_variables() as created, intercepted[0], intercepted[1], without_walking_vocabularies():
        made = call.original()
    if not call.arguments["load_weights"]:
        # KerasHub converts the heads of image classifiers all the same.
        if collected.parts:
            raise NotSupported("load_weights=False, but KerasHub loads the weights of a head")
        _initialise(made, created)
        return Filled(made, None)
    loaded = fill_model(*collected.target(made))
    finish(made, loaded, created=created)
    return Filled(made, loaded.report)


_LOADS: Mapping[str, Callable[[EntryCall], Filled]] = {
    "model": model_call,
    "weights": weights_call,
    "preset": preset_call,
}
_NO_WEIGHTS = {
    "layer": "it has no weights",
    "legacy": "it is an HDF5 file of Keras 2 (.h5)",
}
_SHOWN = 300
"""Most characters that the report keeps of the message of an error."""


@dataclass(frozen=True, slots=True)
class Accelerated:
    """Makes the loading calls of Keras and KerasHub in one `shardload.fast` block, and reports them."""

    report: FastReport

    def __call__(self, call: EntryCall) -> Any:
        """Make one call of the block, with shardload or by Keras' own code; return or raise what Keras would."""
        # Before `plain_keras`, inside of which no block is open. Blocks nest, and each reports the call.
        reports = [handler.report for handler in handlers() if isinstance(handler, Accelerated)]
        began = time.perf_counter()
        filled, why, raised = None, None, None
        try:
            # shardload itself calls Keras; without this, those calls would come back here.
            with plain_keras():
                filled, why = _attempt(call)
                return call.original() if filled is None else filled.result
        except BaseException as error:
            raised = _error_text(error)
            raise
        finally:
            load = filled.report if filled else None
            read = 0 if filled else None
            ended = CallReport(
                call=call.text,
                by="keras" if why else "shardload",
                why=why,
                seconds=time.perf_counter() - began,
                read_bytes=load.bytes.read if load else read,
                error=raised,
                load=load,
            )
            for report in reports:
                report.add(ended)


def _attempt(call: EntryCall) -> tuple[Filled | None, str | None]:
    """Make a call with shardload, and return its result, or ``None`` and the reason why Keras has to make it.

    For a damaged checkpoint, raise `DamagedError`: Keras would not notice, and load the damaged bytes.
    """
    if (load := _LOADS.get(call.kind)) is None:
        return None, _NO_WEIGHTS[call.kind]
    # Keras starts with the names and seeds that it would have had without the attempt.
    try:
        with rewound_on_error():
            return load(call), None
    except DamagedError:
        raise
    except NotSupported as reason:
        return None, str(reason)
    except Exception as error:
        # User code builds models and may raise anything; if it does so again for Keras, that error is the right one.
        return None, _error_text(error)


def _error_text(error: BaseException) -> str:
    text = " ".join(str(error).split())
    text = text if len(text) <= _SHOWN else f"{text[:_SHOWN]} …"
    kind = public_name(error)
    return text if isinstance(error, ShardloadError) and text else f"{kind}: {text}" if text else kind


@suggests_arguments
@contextmanager
def fast() -> Iterator[FastReport]:
    """Make Keras and KerasHub load through shardload inside the block; the program stays as it is.

    ``from_preset`` of KerasHub's models, ``model.load_weights``, ``keras.saving.load_model`` and
    ``keras.models.load_model`` keep their arguments, return values and errors, and use the distribution that is set in
    Keras. What shardload does not support, or cannot load, goes to Keras, and the report says why.

    The block affects the code that runs in it, including tasks and threads that copy its context
    (``asyncio.to_thread``); other threads see plain Keras. Blocks nest: a call appears in the report of each.

    Examples:
        ```python
        import keras_hub

        with shardload.fast() as report:
            backbone = keras_hub.models.Backbone.from_preset("./gemma3_270m")
        print(report)  # a line for each call
        ```

    Yields:
        The report, which grows with each call.

    Raises:
        BackendError: When Keras does not run on JAX.
        DamagedError: From a call that loads a training step whose bytes differ from the saved ones; Keras would load
            them.
    """
    check_backend()
    report = FastReport()
    with calls_to(Accelerated(report)):
        yield report


__all__ = ["FastReport", "fast"]
