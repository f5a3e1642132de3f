"""Access to parts of ``fit`` and ``compile`` that Keras does not expose, such as the iterator over epochs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any, Literal

import keras
from keras.src.backend.jax.trainer import JAXEpochIterator, JAXTrainer, _distribute_data
from keras.src.saving import serialization_lib
from keras.src.trainers.epoch_iterator import EpochIterator

from shardload.keras_bridge import Model
from shardload.keras_bridge.patches import Patches, replacing
from shardload.keras_bridge.xla_faults import avoiding_xla_faults

_LONGEST = "_shardload_longest_epoch"
"""Attribute set on Keras' ``EpochIterator``: the batches of its longest epoch so far, to notice a shorter one."""


@replacing
def _distributed_iterator(original: Any, self: Any, distribution: Any) -> Iterator[Any]:
    """Yield the batches of an epoch on their devices, in place of a method of Keras; see `batches_laid_out_singly`."""
    if not getattr(distribution, "lays_out_each_batch", False):
        yield from original(self, distribution)
        return
    for data in self.data_adapter.get_jax_iterator():
        yield _distribute_data(data)


@replacing
def _check_sharding_consistency(original: Any, self: Model, *shardings: Sequence[Any]) -> None:
    """Skip Keras' check on a single device: it would warn of variables without a mesh, which do no harm there."""
    devices = {device for found in shardings for sharding in found for device in sharding.device_set}
    if len(devices) > 1:
        original(self, *shardings)


@replacing
def _make_function(original: Any, self: Model, step_function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a step, and so trace it, in `avoiding_xla_faults`."""

    def step(*arrays: Any) -> Any:
        with avoiding_xla_faults(keras.distribution.distribution()):
            return step_function(*arrays)

    return original(self, step, *args, **kwargs)


def batches_laid_out_singly() -> AbstractContextManager[None]:
    """Inside the block, a distribution with ``lays_out_each_batch`` chooses a layout for each batch.

    Keras takes that of the first batch for all, and fails at a last batch that is too small to split.
    """
    return _TRAINER_PATCHES.applied()


def compile_as_described(
    model: Model, config: Mapping[str, Any], *, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> bool:
    """Compile a rebuilt model with its saved ``compile_config``, as Keras would; return whether it is compiled now.

    Tasks of KerasHub override ``compile``, so Keras would not call it; here it is called with the saved arguments. A
    ``compile`` that the user has overridden is not called, as in Keras, and the model stays uncompiled.
    """
    cls = type(model)
    with keras.saving.custom_object_scope(dict(custom_objects or {})), serialization_lib.SafeModeScope(safe_mode):
        if cls.compile.__module__.startswith("keras_hub."):
            model.compile(**keras.saving.deserialize_keras_object(dict(config)))
            return True
        model.compile_from_config(dict(config))
    return cls.compile is keras.Model.compile or cls.compile_from_config is not keras.Model.compile_from_config


def has_own_compile(model: Model) -> bool:
    """Whether the model's class has a ``compile`` written by a user, not that of Keras or KerasHub."""
    own = getattr(type(model), "compile", keras.Model.compile)
    return own is not keras.Model.compile and not own.__module__.startswith("keras_hub.")


def metric_direction(model: Model, name: str) -> Literal["min", "max"] | None:
    """Return "min" if lower values of a metric are better, "max" if higher ones are; ``None`` if it is not known."""
    metrics: list[Any] = []
    for metric in getattr(model, "metrics", ()):
        metrics.extend(getattr(metric, "metrics", ()) or [metric])
    exact = [m for m in metrics if m.name == name]
    for metric in exact or [m for m in metrics if name.endswith(f"_{m.name}")]:  # one output's: ``head_accuracy``
        if hasattr(metric, "_direction"):
            return "max" if metric._direction == "up" else "min"
    return None


_TRAINER_PATCHES = Patches(
    lambda: [
        (JAXEpochIterator, "_get_distributed_iterator", _distributed_iterator),
        (JAXTrainer, "_check_sharding_consistency", _check_sharding_consistency),
        (JAXTrainer, "_make_function", _make_function),
    ]
)


def epoch_iterator_of_caller() -> Any:
    """Return Keras' iterator over epochs that has called this code, to get a batch, say; None if none has."""
    owners = (frame.f_locals.get("self") for frame in _frames(sys._getframe(1)))
    return next((owner for owner in owners if isinstance(owner, EpochIterator)), None)


def epoch_iterator_of_fit() -> Any:
    """Return Keras' iterator over epochs of the ``fit`` that runs the calling code; None outside of ``fit``."""
    return _locals_of_fit().get("epoch_iterator")


def initial_epoch_of_fit() -> int:
    """Return the ``initial_epoch`` of the ``fit`` that runs the calling code; 0 outside of ``fit``."""
    return int(_locals_of_fit().get("initial_epoch", 0))


def run_after(callback: Any, kinds: tuple[type, ...]) -> list[Any]:
    """Make ``callback`` run after all callbacks of the classes ``kinds`` in the running ``fit``; return those."""
    container = _locals_of_fit().get("callbacks")
    if not isinstance(container, keras.callbacks.CallbackList) or callback not in container.callbacks:
        return []
    everyone = list(container.callbacks)
    found = [each for each in everyone if isinstance(each, kinds)]
    last = max(map(everyone.index, found), default=-1)
    if everyone.index(callback) < last:
        rest = [each for each in everyone[: last + 1] if each is not callback]
        # A new list: Keras is iterating over the old one.
        container.callbacks = [*rest, callback, *everyone[last + 1 :]]
    return found


def swaps_averages_before(callback: Any) -> bool:
    """Whether a ``SwapEMAWeights`` in the running ``fit`` puts averages into the model before ``callback`` runs."""
    everyone = _callbacks_of_fit()
    before = everyone[: everyone.index(callback)] if callback in everyone else []
    return any(isinstance(each, keras.callbacks.SwapEMAWeights) and each.swap_on_epoch for each in before)


def in_fit(frame: FrameType | None) -> bool:
    """Whether a Python stack frame, such as one that a signal interrupted, is inside a running `keras.Model.fit`."""
    return any(isinstance(found.f_locals.get("self"), keras.Model) for found in _frames(frame, "fit"))


def _callbacks_of_fit() -> list[Any]:
    container = _locals_of_fit().get("callbacks")
    return list(container.callbacks) if isinstance(container, keras.callbacks.CallbackList) else []


def _locals_of_fit() -> dict[str, Any]:
    fits = (dict(frame.f_locals) for frame in _frames(sys._getframe(1), "fit"))
    return next((found for found in fits if isinstance(found.get("epoch_iterator"), EpochIterator)), {})


def _frames(frame: FrameType | None, name: str | None = None) -> Iterator[FrameType]:
    """Yield a Python stack frame and its callers; with ``name``, only frames of functions with that name."""
    while frame is not None:
        if name is None or frame.f_code.co_name == name:
            yield frame
        frame = frame.f_back


def grain_dataset(epochs: Any) -> Any:
    """Return the Grain dataset that Keras' iterator over epochs reads, to save its position; None for other data."""
    return getattr(epochs.data_adapter, "_dataset", None)


def expect_end_of_data(epochs: Any, *, expected: bool) -> None:
    """Set whether the data of ``epochs``, Keras' iterator over epochs, may end in this epoch without a warning.

    Without a known length, an epoch lasts until the data end. Keras counts the batches that it requests, also the last
    request, which got none. It would take this number for the length of all later epochs, and warn in each that the
    last batch is missing. With ``expected``, it is forgotten; Keras then warns only of epochs shorter than one before.
    """
    if not expected:
        vars(epochs).pop("_interrupted_warning", None)
        return

    def ended() -> None:
        # Keras counts a step before it asks for its data, so the last one, which got none, is subtracted.
        batches, longest = epochs._steps_seen - epochs.steps_per_execution, vars(epochs).get(_LONGEST, 1)
        # A generator that is used up yields only the batches that Keras had peeked at.
        if batches < longest:
            EpochIterator._interrupted_warning(epochs)
        vars(epochs)[_LONGEST] = max(batches, longest)
        # Keras has just set it, one batch too high, and would hold later epochs to it.
        epochs._num_batches = None

    epochs._interrupted_warning = ended


def has_unknown_length(epochs: Any) -> bool:
    """Whether Keras' iterator over epochs must read its data to the end to learn the length of an epoch."""
    return epochs.steps_per_epoch is None and epochs._num_batches is None


def forget_epoch_length(epochs: Any) -> None:
    """Make Keras' iterator over epochs ask its data again for an epoch's length: a resumed epoch was shorter."""
    epochs._num_batches = epochs.data_adapter.num_batches


def forget_bar_length() -> None:
    """Make the progress bar of the running ``fit`` forget the length of the last epoch: a resumed epoch was shorter."""
    for each in _callbacks_of_fit():
        if isinstance(each, keras.callbacks.ProgbarLogger):
            each.target = (each.params or {}).get("steps")


def set_initial_epoch(model: Any, epoch: int | None) -> None:
    """Set the first epoch of the next ``fit``; Keras reads it right after ``on_train_begin``."""
    model._initial_epoch = epoch
