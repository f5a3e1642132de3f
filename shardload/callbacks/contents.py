"""The parts of a model that are saved in a step: its state, and the configuration from which it can be rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from shardload.callbacks import step_records
from shardload.keras_bridge.saving import assets_of, serialised_model
from shardload.mapping.state_tree import StateTree, describe


class Contents:
    """The content of the steps saved by one callback.

    Args:
        weights_only: Omit optimizer, metrics and the model's configuration.
        warn: Called with a message about a part that cannot be saved.
    """

    def __init__(self, *, weights_only: bool, warn: Callable[[str], None]) -> None:
        self.weights_only, self._warn = weights_only, warn
        self._state: StateTree | None = None
        self._items: dict[str, Any] = {}

    def forget(self) -> None:
        """Discard the description of the model, so that the next step describes it again."""
        self._state = None

    def state_of(self, model: Any) -> StateTree:
        """Return the model's state; it is described again only if the variables changed."""
        if self._state is None or not self._state.still_describes(model):
            self._state = describe(model)
            self._items = {} if self.weights_only else dict(self._descriptions(model))
        return self._state.weights_only() if self.weights_only else self._state

    def items(
        self, state: StateTree, more: Mapping[str, Any] | Callable[[], Mapping[str, Any]] | None
    ) -> dict[str, Any]:
        """Return the items that Orbax writes, by name: the state, the descriptions, and the user's own items."""
        items = {"pytree": step_records.for_all_processes(state.tree), **self._items}
        return items if more is None else items | step_records.checked_items(more)

    def _descriptions(self, model: Any) -> Iterator[tuple[str, Any]]:
        """Yield the items needed to rebuild the model; they stay the same until its variables change."""
        try:
            yield "model_config", {"config": serialised_model(model)}
        except Exception as error:  # Keras runs the get_config of every layer
            self._warn(
                f"The model's configuration cannot be saved ({type(error).__name__}: {error}), so "
                "keras.saving.load_model cannot rebuild it; its state is saved."
            )
        if (assets := assets_of(model)) is not None:
            yield "assets", assets
