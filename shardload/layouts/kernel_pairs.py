"""Pairs of kernels that follow each other in the graph of a functional model: columns, then rows, then one all-reduce.

    Dense ─► gelu ─► Dropout ─► Dense        Conv2D ─► BatchNormalization ─► ReLU ─► Conv2D
    column   └─ each on its own features ─┘  row     channels  └ its vectors follow ┘       input channels

Only what reads a kernel's output alone is paired with it, so nothing else needs its features whole. In between are
layers that compute each feature by itself. Blocks of subclassed layers, which have no such graph, are paired by their
shapes (`shardload.layouts.roles`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

import keras

from shardload.keras_bridge.functional_graph import sole_consumers

BY_FEATURE = (
    "Activation",
    "ActivityRegularization",
    "AlphaDropout",
    "BaseGlobalPooling",
    "BasePooling",
    "BatchNormalization",
    "Dropout",
    "ELU",
    "GaussianDropout",
    "GaussianNoise",
    "Identity",
    "LeakyReLU",
    "ReLU",
    "BaseSpatialDropout",
    "UpSampling1D",
    "UpSampling2D",
    "UpSampling3D",
    "ZeroPadding1D",
    "ZeroPadding2D",
    "ZeroPadding3D",
)
"""Classes of layers that compute each feature, the last dim, by itself."""
_OVER_FEATURES = ("softmax", "log_softmax", "sparsemax", "glu")
"""Activations that need all features."""


@dataclass(frozen=True, slots=True)
class KernelPair:
    """Two layers with kernels, and the layers between them."""

    first: Any
    between: tuple[Any, ...]
    second: Any


def pairs(model: Any, kernels: Collection[int], *, never_first: Collection[int] = ()) -> Iterator[KernelPair]:
    """Yield the pairs of a model's own graph, each layer in one of them.

    Args:
        model: A functional or sequential model; any other has no pairs.
        kernels: ``id`` of each layer that may be paired.
        never_first: Ids of those that already end a pair.
    """
    links = list(sole_consumers(model))
    reader = {id(one): other for one, other in links}
    # A second's output is whole again after the all-reduce: it begins no pair, or two pairs would share a kernel.
    seconds: set[int] = set()
    for first, _ in links:
        key = id(first)
        if key not in kernels or key in seconds or key in never_first or not _by_feature(first):
            continue
        between: list[Any] = []
        following = reader[key]
        while id(following) in reader and id(following) not in kernels and _passes(following):
            between.append(following)
            following = reader[id(following)]
        if id(following) in kernels:
            seconds.add(id(following))
            yield KernelPair(first, tuple(between), following)


def _passes(layer: Any) -> bool:
    # By name, and Keras' own classes only: its base classes (BasePooling) are not exported, and a user's class may
    # share a name.
    names = {cls.__name__ for cls in type(layer).__mro__ if cls.__module__.startswith("keras.")}
    last = getattr(layer, "data_format", None) in (None, "channels_last")
    if "BatchNormalization" in names:
        # Batch norm says its feature dim by axis; it has no data_format.
        last = layer.axis in (-1, len(layer.input.shape) - 1)
    # With a multiplier, outputs of one input channel are neighbours, and vectors behind it have another length.
    if "BaseDepthwiseConv" in names:
        return last and layer.depth_multiplier == 1 and _by_feature(layer)
    return isinstance(layer, keras.Layer) and last and not names.isdisjoint(BY_FEATURE) and _by_feature(layer)


def _by_feature(layer: Any) -> bool:
    """Whether the activation of a layer, if it has one, computes each feature by itself."""
    return getattr(getattr(layer, "activation", None), "__name__", "") not in _OVER_FEATURES
