"""What shardload knows about a model, a task, a backbone or a layer, besides what Keras keeps of it.

One dictionary with weak keys has all records, outside of the objects: it keeps no model and no weights alive, and Keras
neither tracks, copies nor saves what is in it. So a copy of a model has an empty record.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardload.manifest import Manifest
    from shardload.reports import LoadReport
    from shardload.sharding.devices import MeshDevices
    from shardload.stores.location import Fingerprint


@dataclass(slots=True)
class ModelRecord:
    """What shardload knows about one model, task, backbone or layer."""

    report: LoadReport | None = None
    """Report of the last load into a model."""
    loading_since: float | None = None
    """`time.perf_counter` at the start of the last load into a model, until the model gives its first result."""
    devices: MeshDevices | None = None
    """Mesh of a model while its variables have no values; once they have some, the mesh is read from these."""
    restored: Any = None
    """Saved training step (a `StepInfo`) that a model was restored from, until ``fit`` continues from it."""
    first_epoch: int | None = None
    """Epoch at which the next ``fit`` of a model starts, if shardload's checkpoint callback has set it."""
    runs: dict[Path | str, str] = field(default_factory=dict)
    """Folder of training steps → id of the run that saves there; a second ``fit`` of the model continues this run."""
    text_source: Manifest | None = None
    """Headers of the checkpoint that the weights came from, if a tokenizer can perhaps be built from them."""
    text_header: Fingerprint | None = None
    """Fingerprint of the file with the tokenizer in its header, made at the load; shows if the file changes later."""
    tokenizer: Any = None
    """Tokenizer of `text_source`, kept after its first use: building it takes longer than tokenizing a short text."""
    make_preprocessor: Callable[[], Any] | None = None
    """Function that makes the preprocessor of a task on first use, not already in the load."""
    built_from: str | None = None
    """Name of the checkpoint from whose configuration a backbone was built."""
    build_notes: tuple[str, ...] = ()
    """Notes for the report: settings of a backbone that were changed to match its source's configuration, or that
    differ from it."""
    set_attributes: set[str] = field(default_factory=set)
    """Names of the attributes of a built layer that `set_attribute` has set, and that are saved with its model."""


_records: weakref.WeakKeyDictionary[Any, ModelRecord] = weakref.WeakKeyDictionary()


def record_first_result(model: Any) -> None:
    """Set ``seconds.ready`` in the report of a model's last load, if this is the model's first result since then."""
    record = record_of(model)
    if record.loading_since is None or record.report is None:
        return
    ready = time.perf_counter() - record.loading_since
    record.report = replace(record.report, seconds=replace(record.report.seconds, ready=ready))
    record.loading_since = None


def record_of(found: Any) -> ModelRecord:
    """Return the record of an object, for callers to read and change; a new, empty one if there is none yet."""
    try:
        return _records.setdefault(found, ModelRecord())
    except TypeError:  # without a hash, or without weak references: nothing is known about it
        return ModelRecord()
