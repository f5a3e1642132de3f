"""The engine that `OrbaxCheckpoint` and `Checkpointer` share: it saves the steps of one run.

begin     wait for other savers to the same folder · remove what killed processes left
compare   find the value of the metric that a new step has to beat
save      wait for the last save · collect what the step contains ─► `Writer` writes the step in the background
                                                                  └─► remove the steps that no rule keeps
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from shardload import processes
from shardload.errors import UsageError
from shardload.processes import Channel
from shardload.processes.agreement import Exchanges, Topic, call_topics, require
from shardload.runs.best import Best, Monitor, Retention, remover
from shardload.runs.contents import Contents, Selection, checked_metadata, joined_positions, prepare_serialising
from shardload.runs.publish import Root
from shardload.runs.remote_root import RemoteRoot
from shardload.runs.step import StepInfo, StepRecord
from shardload.runs.writer import AnyRoot, Place, SaveJob, Writer
from shardload.stores.clients import Address, is_bucket
from shardload.stores.local import local_target
from shardload.units import check_choice, is_real

Metadata = Mapping[str, Any] | Callable[[int, Mapping[str, float]], Mapping[str, Any]] | None


class StepSaver:
    """Saves the steps of one run to a folder; see `OrbaxCheckpoint` for the arguments, and `Best` for ``rule``."""

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        monitor: Monitor,
        rule: str,
        retention: Retention,
        selection: Selection,
        warn: Callable[[str], None],
        best_of: Literal["folder", "run"] = "folder",
        weights_only: bool = False,
        compression: Literal["none", "zstd"] = "none",
        timeout_s: float | None = None,
    ) -> None:
        _check_directory(directory)
        if timeout_s is not None and not (is_real(timeout_s) and timeout_s > 0):
            raise UsageError(
                f"Cannot use async_timeout_s={timeout_s!r:.60}: expected a positive number of seconds, or None"
            )
        check_choice("compression", compression, ("none", "zstd"))
        check_choice("best_of", best_of, ("folder", "run"))
        self.compression, self.timeout_s = compression, timeout_s
        self._arguments = {
            "monitor": monitor.name,
            "max_to_keep": retention.latest,
            "keep_best": retention.best,
            "keep_every_steps": retention.every_steps,
            "keep_every_hours": retention.every_hours,
            "save_trainable_only": selection.trainable_only,
            "variables": selection.patterns,
            "best_of": best_of,
            "save_weights_only": weights_only,
            "compression": compression,
        }
        self.monitor, self.retention = monitor, retention
        self.best = Best(monitor, of=best_of, rule=rule if retention.best else None)
        self.contents = Contents(weights_only=weights_only, warn=warn, selection=selection)
        # Last: a refused call makes no folder.
        root: AnyRoot = RemoteRoot(str(directory)) if is_bucket(directory) else Root(directory, create=True)
        self.directory: Place = root.place
        self.writer = Writer(root)

    def begin(self, function: str, **arguments: Any) -> None:
        """Prepare the folder for a run: wait for saves to it in this process, and remove unfinished steps.

        Several processes first compare the arguments of the saver, and ``arguments``, those of ``function`` that must
        be equal on all of them as well.
        """
        if processes.are_several():
            together = Exchanges(self.writer.channel)
            require(together, call_topics(function, {"directory": str(self.directory), **self._arguments, **arguments}))
        self.writer.begin()
        prepare_serialising()

    def compare(
        self, model: Any, steps: list[StepInfo], resumed: StepInfo | None = None, *, channel: Channel | None = None
    ) -> list[str]:
        """Find the best value of the metric in ``steps``, which a new step has to beat; return notices for the user.

        The run of ``resumed``, the step that training continues from, counts as part of this one. By ``channel``,
        process 0 sends the best value to the others; by default, it is the channel on which saves are coordinated.
        """
        return self.best.begin(model, steps, self.directory, resumed, channel=channel or self.writer.channel)

    def save(
        self,
        model: Any,
        record: StepRecord,
        *,
        metadata: Metadata,
        position: dict[str, Any],
        checkpointables: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
        in_background: bool,
        remove_later: bool = False,
        then: Callable[[int, Any], None] | None = None,
    ) -> None:
        """Wait for the last save, then save a step. When this returns, training may change the arrays.

        ``record`` has the step's number, epoch and metrics. ``position`` is the position in the data on this process,
        empty if there is none. With ``remove_later``, the next save does not wait until old steps are removed.
        ``then`` is called with the step's number and folder after publishing. Several processes compare the step's
        number and content before anything is written.
        """
        self.writer.wait()
        step = record.step
        assert step is not None
        if record.ranks and self.best.comparison.mode is not None:
            self.monitor.note(record.logs.get(self.monitor.name), model)
        given = checked_metadata(metadata(step, record.logs) if callable(metadata) else metadata)
        record = replace(record, keep_best=self.retention.best, metadata=given, **self.best.record())
        remove = remover(self.retention, self.writer.root, by=self.best.comparison)
        after = (self.writer.later(remove) if remove_later else remove, *((then,) if then else ()))
        positions, together = [position], Exchanges(self.writer.channel)
        if processes.are_several():
            topics = _state_topics(step, self.contents.described_state(model).tree)
            # All processes exchange positions, also those without one: an exchange needs every process.
            positions = require(together, topics, value=position)
        job = self.contents.job(
            model,
            record,
            position=joined_positions(positions),
            checkpointables=checkpointables,
            compression=self.compression,
            timeout_s=self.timeout_s,
            after=after,
        )
        if processes.are_several():
            require(together, _item_topics(job))
        self.writer.start(job)
        if not in_background:
            self.writer.wait()


_SAME = "the same on every process"


def _state_topics(step: int, tree: Any) -> list[Topic]:
    """Return what must be equal on all processes before they collect what a step contains, in the order to compare."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    arrays = {f"Array {'/'.join(str(key.key) for key in path)!r}": leaf for path, leaf in leaves}
    return [
        Topic("the step", lambda: {"Number": str(step)}, f"Save {_SAME}"),
        Topic("the model", lambda: {name: _kind(value) for name, value in arrays.items()}, f"Build {_SAME}"),
        Topic("the layouts", lambda: {name: _layout(value) for name, value in arrays.items()}, f"Use {_SAME}"),
    ]


def _item_topics(job: SaveJob) -> list[Topic]:
    """Return what must be equal on all processes before they write a step together: its items, but for the state."""

    def facts() -> dict[str, str]:
        found = dict.fromkeys(sorted(job.items), "saved")
        for name in found.keys() - {"pytree"}:
            leaves, _ = jax.tree_util.tree_flatten_with_path(job.items[name])
            found |= {f"Array {name + jax.tree_util.keystr(path)!r}": _kind(leaf) for path, leaf in leaves}
        return dict(sorted(found.items()))

    return [Topic("the items of the step", facts, f"Save {_SAME}")]


def _kind(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "dtype") else type(value).__name__


def _layout(value: Any) -> str:
    # A NumPy array is stored by process 0: one of a model without a distribution.
    sharding = getattr(value, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return "whole" if sharding is None else type(sharding).__name__
    entries = [*sharding.spec]
    while entries and entries[-1] is None:  # P("model") is P("model", None)
        entries.pop()
    return f"({', '.join(map(str, entries))}) on {_mesh(sharding.mesh)}"


@functools.lru_cache(maxsize=8)
def _mesh(mesh: jax.sharding.Mesh) -> str:
    sizes = ",".join(f"{axis}={size}" for axis, size in mesh.shape.items())
    return f"the mesh {sizes} of devices {', '.join(str(device.id) for device in mesh.devices.flat)}"


def check_flags(**flags: Any) -> None:
    """Raise a `UsageError` for a flag that is not True, False, 1 or 0: the text ``"no"`` would count as true."""
    for name, given in flags.items():
        if not isinstance(given, bool | np.bool_ | int) or given not in (True, False):
            raise UsageError(f"Cannot use {name}={given!r:.60}: expected True or False")


def _check_directory(directory: str | os.PathLike[str]) -> None:
    """Raise a `UsageError` unless ``directory`` can be a folder of steps: not a URL of HTTP, and no name of a file."""
    if not isinstance(directory, str | os.PathLike):
        raise UsageError(f"Cannot save steps to {directory!r:.60}: expected the path of a folder")
    if not os.fspath(directory):
        raise UsageError('Cannot save steps to "": expected the path of a folder. The current folder is "."')
    address = Address.parse(str(directory)) if is_bucket(directory) else None
    root, path = ("", local_target(directory)) if address is None else (f"{address.root}/", Path(address.path))
    # File names and patterns such as those of Keras' ModelCheckpoint, which the callback may replace.
    if re.search(r"\{[^}]*\}", path.name) or path.name.endswith((".keras", ".h5")):
        folder = path.parent if path.parent.name else Path("checkpoints")
        raise UsageError(
            f"Cannot save steps to {f'{root}{path}'!r}: steps are folders named by their numbers, not files. Pass the "
            f"folder for them, such as {f'{root}{folder}'!r}"
        )
