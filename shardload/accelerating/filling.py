"""Fill a model that Keras' own code built without values, and leave it as Keras would."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from shardload.keras_bridge import abstraction
from shardload.keras_bridge.model_records import record_of
from shardload.keras_bridge.model_state import refresh_derived, state_of
from shardload.keras_bridge.variables import is_abstract, release_from_mesh
from shardload.layouts.current_layout import current_devices
from shardload.loading import Loaded, run_load_weights
from shardload.pipeline.request import LoadWeightsRequest
from shardload.reports import LoadReport
from shardload.sharding.devices import MeshDevices
from shardload.sharding.mesh import DEFAULT_AXES, MeshSpec
from shardload.text.sources import remember


class NotSupported(Exception):  # noqa: N818 - not an error: Keras makes the call
    """Why Keras is to make a call."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A call that shardload made."""

    result: Any
    """What Keras would return."""
    report: LoadReport


def local_path(path: Any) -> Path:
    """Return an existing local path as an absolute one.

    Raises:
        NotSupported: When it is a file object, an address, or does not exist.
    """
    if not isinstance(path, str | os.PathLike):
        raise NotSupported(f"its source is a {type(path).__name__}, expected a path")
    text = os.fspath(path)
    if "://" in text:
        raise NotSupported("its source is not on this machine")
    if not (found := Path(text)).exists():
        raise NotSupported("its source does not exist")
    return found.absolute()


def fill(model: Any, path: Path) -> Loaded:
    """Load weights into a model, where Keras would put them: in its layouts, or on the default device."""
    # Without a distribution, a mesh of one device; `finish` makes the values ordinary arrays again.
    if current_devices(model) is None:
        one = MeshSpec(DEFAULT_AXES, (1, 1))
        record_of(model).devices = MeshDevices(one, (_default_device(),))
    return run_load_weights(LoadWeightsRequest(model=model, source=path, as_keras=True))


def finish(model: Any, loaded: Loaded, *, created: Sequence[Any] = (), committed: bool = False) -> None:
    """Give all remaining variables their initial values, and take those without a layout off the mesh.

    Args:
        model: What the call returns.
        loaded: What was loaded into it, or into its backbone.
        created: References to the variables that its construction created.
        committed: Whether JAX refuses to combine the values with arrays on other devices, as those that Orbax reads.
    """
    abstraction.initialise(model)
    # What the model does not list: a preprocessor's or a local layer's variables, if they are still in use.
    left = [variable for ref in created if (variable := ref()) is not None and is_abstract(variable)]
    abstraction.initialise(left)
    # A list: `any` of a generator would stop at the first one that was released.
    released = [release_from_mesh(variable, committed=committed) for variable in state_of(model)]
    if any(released):
        refresh_derived(model)
    record_of(model).report = loaded.report
    remember(model, loaded.manifest)


def _default_device() -> Any:
    # An array tells: JAX's default may be a context, a setting or the first device, and a device or a platform's name.
    return next(iter(jax.numpy.zeros(()).devices()))
