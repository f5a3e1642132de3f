"""The state of Keras' own callbacks that decide by earlier epochs: ``EarlyStopping`` and ``ReduceLROnPlateau``.

    step.json    "callbacks": [{"callback": "EarlyStopping", "monitor": "val_loss", "wait": 2, "best": 0.25, …}]

Keras resets them when ``fit`` begins, and a resumed run would count its patience again. So the state is restored with
the first epoch. `OrbaxCheckpoint` moves behind them in ``fit``: a step saved at the end of an epoch then contains
their decision about this epoch, with the learning rate that it led to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from shardload import restoring
from shardload.errors import ShardloadError
from shardload.keras_bridge.training import run_after
from shardload.runs.listing import list_steps
from shardload.runs.step import StepInfo

_KINDS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
_COUNTS = ("wait", "best_epoch", "stopped_epoch", "cooldown_counter")


class OtherCallbacks:
    """The other callbacks of one ``fit`` whose state belongs to its steps."""

    def __init__(self, found: Sequence[Any] = ()) -> None:
        self._found = tuple(found)
        self._waiting: list[tuple[Any, dict[str, Any]]] = []

    @classmethod
    def of_fit(cls, saver: Any) -> OtherCallbacks:
        """Find them in the calling ``fit``, and let them run before ``saver``."""
        return cls(run_after(saver, _KINDS))

    def record(self) -> tuple[dict[str, Any], ...]:
        """Return their state for ``step.json``."""
        return tuple(map(_state_of, self._found))

    def resume(self, info: StepInfo) -> str | None:
        """Prepare to restore the state that a step stores; return the callback that ended the run, if one did."""
        stored = list(info.recorded.callbacks)
        self._waiting = []
        for callback in self._found:
            name = _name_of(callback)
            known = next((state for state in stored if (state.get("callback"), state.get("monitor")) == name), None)
            if known is not None:
                # Remove it, so that two callbacks of the same kind and metric get the two states in order.
                stored.remove(known)
                self._waiting.append((callback, _valid(known)))
        return next((_shown(callback) for callback, state in self._waiting if _has_stopped(callback, state)), None)

    def restore(self, model: Any, info: StepInfo) -> Iterator[str]:
        """Restore the state, once; yield warnings about weights that are lost."""
        waiting, self._waiting = self._waiting, []
        for callback, state in waiting:
            for name, value in state.items():
                setattr(callback, name, value)
            if not getattr(callback, "restore_best_weights", False) or state["best"] is None:
                continue
            callback.best_weights = _best_weights(model, info, state["best_epoch"])
            if callback.best_weights is None:
                yield (
                    f"{_shown(callback)} restores its best weights, those of epoch {state['best_epoch'] + 1}, but no "
                    f"step in {info.path.parent} has them: if no later epoch is better, the weights after the first "
                    "one that is trained now take their place. OrbaxCheckpoint(keep_best=1) with the same monitor "
                    "keeps them"
                )

    def finish(self, model: Any, info: StepInfo) -> Iterator[str]:
        """Restore the best weights after a ``fit`` that trains nothing, as the run did that ended; say so."""
        waiting = [callback for callback, _ in self._waiting]
        yield from self.restore(model, info)
        for callback in waiting:
            if getattr(callback, "best_weights", None) is not None:
                model.set_weights(callback.best_weights)
                yield f"{_shown(callback)} restored its best weights, those of epoch {callback.best_epoch + 1}"


def _state_of(callback: Any) -> dict[str, Any]:
    callback_name, monitor = _name_of(callback)
    best = None if callback.best is None else float(callback.best)
    counts = {name: int(getattr(callback, name)) for name in _COUNTS if hasattr(callback, name)}
    # JSON has no NaN, and a best value of NaN is never beaten.
    return {
        "callback": callback_name,
        "monitor": monitor,
        "best": best if best is None or math.isfinite(best) else str(best),
        **counts,
    }


def _name_of(callback: Any) -> tuple[str, str]:
    kind = next(kind for kind in _KINDS if isinstance(callback, kind))
    return kind.__name__, str(callback.monitor)


def _shown(callback: Any) -> str:
    return "{}({!r})".format(*_name_of(callback))


def _valid(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes in a stored state; a value that no callback can have becomes the initial one."""
    found: dict[str, Any] = {name: state[name] if type(state[name]) is int else 0 for name in _COUNTS if name in state}
    best = state.get("best")
    known = best in ("nan", "inf", "-inf") or (isinstance(best, (int, float)) and not isinstance(best, bool))
    return {**found, "best": float(best) if known and best is not None else None}


def _has_stopped(callback: Any, state: Mapping[str, Any]) -> bool:
    """Whether the callback ended the run, and would end it again; not if it got a larger ``patience``."""
    return bool(state.get("stopped_epoch")) and state["wait"] >= callback.patience


def _best_weights(model: Any, info: StepInfo, epoch: int) -> list[Any] | None:
    """Return the weights after an epoch, in Keras' order, from the step or another one of its run; ``None`` if lost."""
    for found in (info, *(step for step in list_steps(info.path.parent) if step.ours and step.run == info.run)):
        if found.epoch == epoch and found.recorded.epoch_done and found.problems is None:
            try:
                return restoring.weight_values(model, found)
            # Damaged, or of another model: another step of the run may have the same epoch.
            except ShardloadError:
                continue
    return None
