"""The parts of a model that are saved in a step: its state, and the configuration from which it can be rebuilt."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from shardload.callbacks import step_records
from shardload.callbacks.selection import ALL, Selection
from shardload.callbacks.writer import SaveJob
from shardload.keras_bridge.hook_values import with_own_hooks
from shardload.keras_bridge.set_attributes import serialised_with_attributes
from shardload.keras_bridge.vocabularies import assets_of, unadapted_layers
from shardload.mapping.state_tree import StateTree, describe
from shardload.mapping.stored_values import values_to_json
from shardload.steps.record import StepRecord


class Contents:
    """The content of the steps saved by one callback.

    Args:
        weights_only: Omit optimizer, metrics and the model's configuration.
        warn: Called with a message about a part that cannot be saved.
        selection: The weights to save. A partial step omits the assets, which come with the other weights.
    """

    def __init__(self, *, weights_only: bool, warn: Callable[[str], None], selection: Selection = ALL) -> None:
        self.weights_only, self._warn, self._selection = weights_only, warn, selection
        self._whole: StateTree | None = None
        self._state = StateTree(())
        self._items: dict[str, Any] = {}
        self._hooked: list[tuple[str, Any]] = []
        self._told: set[str] = set()

    def forget(self) -> None:
        """Discard the description of the model, so that the next step describes it again."""
        self._whole = None

    def state_of(self, model: Any) -> StateTree:
        """Return the model's state; it is described again only if the variables changed."""
        if self._whole is None or not self._whole.still_describes(model):
            # In this order: which items describe the model depends on the weights that the selection leaves out.
            self._whole = describe(model)
            self._hooked = with_own_hooks(model)
            self._state = self._selection.of(self._whole, model)
            self._items = {} if self.weights_only else dict(self._descriptions(model))
        return self._state.weights_only() if self.weights_only else self._state

    def job(
        self,
        model: Any,
        record: StepRecord,
        *,
        position: Mapping[str, Any],
        checkpointables: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None,
        **how: Any,
    ) -> SaveJob:
        """Return everything needed to write one step.

        Args:
            model: The model to save.
            record: The step's record; what the step contains and where it was saved is filled in.
            position: The position of the data; empty if there is none.
            checkpointables: The user's own items.
            how: Further arguments of `SaveJob`.
        """
        state = self.state_of(model)
        record = replace(
            record,
            save_weights_only=self.weights_only,
            save_trainable_only=self._selection.trainable_only,
            variables=self._selection.patterns,
            left_out=sum(leaf.kind == "weight" for leaf in state.left_out),
            versions=step_records.versions(),
            saved_unix_s=time.time(),
            **step_records.placement(state),
        )
        records = {"step.json": record.to_json(), "structure.json": state.to_json() | self._values()}
        if position:
            records["iterator.json"] = dict(position)
        items = {"pytree": step_records.for_all_processes(state.tree), **self._items}
        if checkpointables is not None:
            items |= step_records.checked_items(checkpointables)
        assert record.step is not None
        return SaveJob(step=record.step, items=items, records=records, **how)

    def _values(self) -> dict[str, Any]:
        """Return what layers save besides variables, as it is now; warn once of what cannot be stored."""
        found, lost = values_to_json(self._hooked)
        for sentence in lost:
            if sentence not in self._told:
                self._told.add(sentence)
                self._warn(f"{sentence}. Keras' model.save_weights(path) saves it")
        return found

    def _descriptions(self, model: Any) -> Iterator[tuple[str, Any]]:
        """Yield the items needed to rebuild the model; they stay the same until its variables change."""
        try:
            yield "model_config", {"config": serialised_with_attributes(model)}
        except Exception as error:  # Keras runs the get_config of every layer
            self._warn(
                f"The model's configuration cannot be saved ({type(error).__name__}: {error}), so "
                "keras.saving.load_model cannot rebuild it; its state is saved."
            )
        if not self._state.left_out and (assets := assets_of(model)) is not None:
            yield "assets", assets
        for path, layer in () if self._state.left_out else unadapted_layers(model):
            self._warn(
                f"{type(layer).__name__} at {path or 'the root'!r} has no vocabulary yet, so the step contains none. "
                "To store it, call its adapt() or set_vocabulary() before you save"
            )
