"""``shardload/step.json``, a step's metadata; this module is its only reader and writer.

The file may come from an older version or be manipulated: a field that is missing or of the wrong type
is read as if absent.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardload.loaders.orbax.loader import OWN_FOLDER
from shardload.stores import json_files
from shardload.stores.local import located
from shardload.stores.location import Location

STEP_FILE = f"{OWN_FOLDER}/step.json"
VERSION = 1
# JSON integers have any length, and float() raises OverflowError for one beyond about 1.8e308.
_LARGEST = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """The content of ``step.json``; docs/reference/checkpoints.md explains each field."""

    version: int = VERSION
    step: int | None = None
    # Where training was.
    epoch: int | None = None
    batch: int | None = None
    epoch_done: bool = False
    # By which metric the step ranks, among which steps, and which of those the run found damaged.
    logs: dict[str, float] = field(default_factory=dict)
    monitor: str | None = None
    mode: str = "auto"
    best: float | None = None
    best_of: str = "folder"
    run: str | None = None
    damaged: tuple[int, ...] = ()
    ranks: bool = True
    keep_best: int | None = None
    # What the step contains.
    save_weights_only: bool = False
    save_trainable_only: bool = False
    variables: tuple[str, ...] | None = None
    left_out: int = 0
    callbacks: tuple[Mapping[str, Any], ...] = ()
    metadata: Any = None
    # Where and with what it was saved.
    mesh: Mapping[str, Any] | None = None
    devices: int | None = None
    processes: int | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    saved_unix_s: float | None = None

    @classmethod
    def read(cls, folder: str | os.PathLike[str] | Location) -> StepRecord:
        """Read the record of a step.

        Raises:
            SourceError: If the file is missing or is not a JSON object.
        """
        return cls.of_json(json_files.read_object(located(folder) / STEP_FILE))

    @classmethod
    def of_json(cls, found: Mapping[str, Any]) -> StepRecord:
        """Build a record from the valid fields of a JSON object."""
        damaged, callbacks = found.get("damaged"), found.get("callbacks")
        mesh, versions = found.get("mesh"), found.get("versions")
        return cls(
            version=_integer(found.get("version")) or VERSION,
            step=_integer(found.get("step")),
            epoch=_count(found.get("epoch")),
            batch=_count(found.get("batch")),
            epoch_done=bool(found.get("epoch_done")),
            logs=_numbers(found.get("logs")),
            monitor=_text(found.get("monitor")),
            mode=_text(found.get("mode")) or "auto",
            best=_number(found.get("best")),
            best_of=_text(found.get("best_of")) or "folder",
            run=_text(found.get("run")),
            damaged=tuple(n for n in damaged if type(n) is int) if isinstance(damaged, list) else (),
            ranks=found.get("ranks") is not False,
            keep_best=_integer(found.get("keep_best")),
            save_weights_only=bool(found.get("save_weights_only")),
            save_trainable_only=bool(found.get("save_trainable_only")),
            variables=_texts(found.get("variables")),
            left_out=_count(found.get("left_out")) or 0,
            callbacks=tuple(c for c in callbacks if isinstance(c, dict)) if isinstance(callbacks, list) else (),
            metadata=found.get("metadata"),
            mesh=mesh if isinstance(mesh, dict) else None,
            devices=_count(found.get("devices")),
            processes=_count(found.get("processes")),
            versions=versions if isinstance(versions, dict) else {},
            saved_unix_s=_number(found.get("saved_unix_s")),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the record as a JSON object."""
        return asdict(self)

    def ranks_by(self, monitor: str) -> bool:
        """Whether the step can be ranked by ``monitor``: it has that metric, measured over a complete epoch."""
        return self.ranks and not math.isnan(self.logs.get(monitor, math.nan))


def _text(found: Any) -> str | None:
    return found if isinstance(found, str) else None


def _texts(found: Any) -> tuple[str, ...] | None:
    return tuple(filter(_text, found)) if isinstance(found, list) else None


def _integer(found: Any) -> int | None:
    # Not isinstance: true is an int in Python, but not a number in JSON.
    return found if type(found) is int else None


def _count(found: Any) -> int | None:
    """Return a non-negative integer below 2**63, else ``None``: larger numbers cannot come from a training run."""
    return found if type(found) is int and 0 <= found < 1 << 63 else None


def _number(found: Any) -> float | None:
    # bool is an int in Python, and a number beyond the limit cannot come from a metric.
    usable = isinstance(found, (int, float)) and not isinstance(found, bool) and abs(found) < _LARGEST
    # Python writes and reads infinities in JSON as Infinity, although the standard has none.
    return float(found) if usable or found in (math.inf, -math.inf) else None


def _numbers(found: Any) -> dict[str, float]:
    if not isinstance(found, dict):
        return {}
    return {name: number for name, value in found.items() if (number := _number(value)) is not None}
