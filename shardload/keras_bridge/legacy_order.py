"""The order in which Keras 2 stored the weights of a model."""

from __future__ import annotations

from typing import Any

from keras.src.legacy.saving import legacy_h5_format

from shardload.keras_bridge.keras_types import Model, Variable


def legacy_weights(layer: Any) -> list[Variable]:
    """Return a layer's weights, also those of layers in it, in the order of Keras 2: trainable ones first."""
    return list(legacy_h5_format._legacy_weights(layer))


def own_weights(model: Model) -> list[Variable]:
    """Return the weights that belong to the model itself and to none of its layers, in the order of Keras 2."""
    # As in `legacy_h5_format.load_weights_from_hdf5_group`, but by identity: `in` would compare values.
    known = {id(variable) for variable in model.weights}
    return [v for v in model._trainable_variables + model._non_trainable_variables if id(v) in known]
