"""Distributions of Keras (``keras.distribution``) that users set or pass to shardload, and layouts that they choose."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras

from shardload.keras_bridge import Variable
from shardload.keras_bridge.binding import MeshParallel
from shardload.sharding.devices import has_mesh

_OF_KERAS = (keras.distribution.ModelParallel.get_variable_layout, keras.distribution.DataParallel.get_variable_layout)


def current() -> Any:
    """Return the Keras distribution that the user, not a bound model, set in this thread; ``None`` if there is none."""
    found = keras.distribution.distribution()
    return None if isinstance(found, MeshParallel) else found


def is_distribution(found: Any) -> bool:
    """Whether an argument is a distribution of Keras; false for a layout map, although it has a mesh too."""
    return hasattr(found, "get_variable_layout") and has_mesh(found)


def layout_of_models(distribution: Any) -> Any:
    """Return the ``layout`` that a distribution of shardload was made with, for new models; ``None`` for Keras' own."""
    return getattr(distribution, "layout_of_models", None)


def layout_map_of(distribution: Any) -> Any:
    """Return the ``LayoutMap`` of a ``ModelParallel``; ``None`` for other distributions."""
    return getattr(distribution, "_layout_map", None)


def variable_axes(distribution: Any, variable: Variable) -> Sequence[Any]:
    """Return, for each dim of a variable, what a distribution splits it over: a mesh axis, several, or ``None``."""
    rank = len(variable.shape)
    if type(distribution).get_variable_layout in _OF_KERAS:
        # By path: `get_variable_layout` answers with the layout that the variable has had until now.
        found = distribution.get_tensor_layout(variable.path)
    else:
        found = distribution.get_variable_layout(variable)
    if found is None:
        return (None,) * rank
    # Keras' layouts name an axis for each dim; a spec of JAX may end early, and the rest is not split.
    axes = found.axes if hasattr(found, "axes") else tuple(found.spec)
    return (*axes, *(None,) * (rank - len(axes)))


def activation_layouts(layout_map: Any) -> Callable[[str], Any]:
    """Return a function, for `bind`, from the path of a layer's output to its layout in a layout map, or ``None``."""
    return lambda path: layout_map[path]
