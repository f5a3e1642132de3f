"""What shardload knows about a model, a task, a backbone or a layer, besides what Keras keeps of it.

One dictionary with weak keys has all records, outside of the objects: it keeps no model and no weights alive, and Keras
neither tracks, copies nor saves what is in it. So a copy of a model has an empty record.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
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
    devices: MeshDevices | None = None
    """Mesh of a model whose variables have no values yet, or lost them in a failed load: else the values show it."""
    restored: Any = None
    """Step (a `StepInfo`) that a model was restored from, until ``fit`` continues from it."""
    first_epoch: int | None = None
    """Epoch that the callback set for the next ``fit`` of a model."""
    runs: dict[Path, str] = field(default_factory=dict)
    """Folder of steps → the training run that a model saves there; a second ``fit`` of the same model continues it."""
    text_source: Manifest | None = None
    """Headers of the checkpoint that a model's weights came from, if it may contain a tokenizer."""
    text_header: Fingerprint | None = None
    """Fingerprint, from the time of the load, of a file with the tokenizer in its header; shows if it has changed."""
    tokenizer: Any = None
    """Tokenizer of `text_source`, kept after its first use: building it takes longer than tokenizing a short text."""
    make_preprocessor: Callable[[], Any] | None = None
    """Function that makes the preprocessor of a task on first use."""
    built_from: str | None = None
    """Name of the checkpoint from whose configuration a backbone was built."""
    build_notes: tuple[str, ...] = ()
    """Notes on what was changed on a backbone to match the configuration, and which entries of it were ignored."""
    set_attributes: set[str] = field(default_factory=set)
    """Names of the attributes that `set_attribute` has set on a built layer."""


_records: weakref.WeakKeyDictionary[Any, ModelRecord] = weakref.WeakKeyDictionary()


def record_of(found: Any) -> ModelRecord:
    """Return the record of an object, for callers to read and change; a new, empty one if there is none yet."""
    try:
        return _records.setdefault(found, ModelRecord())
    except TypeError:  # without a hash, or without weak references: nothing is known about it
        return ModelRecord()
