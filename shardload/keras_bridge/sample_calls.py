"""Call a model on sample inputs without computing: to build it, or to learn the paths of its layers' outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import keras
from keras.src.backend.jax.core import compute_output_spec
from keras.src.distribution.distribution_lib import Distribution

from shardload.keras_bridge.abstraction import abstract, is_abstract
from shardload.keras_bridge.binding import unscoped
from shardload.keras_bridge.keras_types import Model, Variable
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.recording import without_computing


class _OutputPaths(Distribution):  # type: ignore[misc]
    """Records the paths for which Keras requests a layout, and returns no layout."""

    def __init__(self) -> None:
        super().__init__(device_mesh=None)
        self.found: list[str] = []

    def get_tensor_layout(self, path: str) -> None:
        self.found.append(path)

    def get_variable_layout(self, variable: Variable) -> Any:
        return None


def build_by_calling(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Variable]:
    """Build a model by calling it on sample inputs, without computing anything; its variables get no values.

    Returns:
        The variables that the call created, which have no values.
    """
    before = {id(v) for v in state_of(model)}

    def call() -> None:
        given, named = jax.tree.map(_traced, (tuple(args), dict(kwargs)))
        model(*given, **named)

    with abstract():
        without_computing(call)
    return [v for v in state_of(model) if id(v) not in before and is_abstract(v)]


def output_paths(model: Model, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str] | None:
    """Return the paths for which Keras requests the layout of a layer's output, in the order of the calls.

    Args:
        model: A built model.
        args: Sample inputs; the inputs of a functional model if there are none.
        kwargs: Sample inputs by name.

    Returns:
        ``None`` if there are no inputs to call it on.
    """
    if not args and not kwargs:
        own = _own_inputs(model)
        if own is None:
            return None
        args = (own,)
    args, kwargs = jax.tree.map(_described, (tuple(args), dict(kwargs)))
    recorder = _OutputPaths()
    # A bound model would open its own distribution, and Keras would ask that one.
    with recorder.scope(), unscoped(model):
        compute_output_spec(model, *args, **kwargs)
    return list(dict.fromkeys(recorder.found))


def _traced(leaf: Any) -> Any:
    """Return a tensor with the shape and dtype of a sample, for code that is traced."""
    return jax.numpy.zeros(leaf.shape, leaf.dtype) if _is_tensor(leaf) else leaf


def _described(leaf: Any) -> Any:
    """Return a sample without its values."""
    return keras.KerasTensor(leaf.shape, str(leaf.dtype)) if _is_tensor(leaf) else leaf


def _is_tensor(leaf: Any) -> bool:
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def _own_inputs(model: Model) -> Any:
    try:
        return model.input
    except (AttributeError, ValueError):
        return None
