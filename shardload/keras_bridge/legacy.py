"""Keras 2: models from configurations in its form, by Keras' own legacy code, and the order of the stored weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
from keras.src.legacy.saving import legacy_h5_format, saving_options, saving_utils
from keras.src.saving import serialization_lib

from shardload.errors import UnsupportedError
from shardload.keras_bridge.keras_types import Model, Variable
from shardload.keras_bridge.layer_settings import global_policy


def build(config: Mapping[str, Any], *, dtype: Any, custom_objects: Mapping[str, Any] | None, safe_mode: bool) -> Model:
    """Build the model that a ``model_config`` describes, uncompiled.

    Args:
        config: The parsed attribute.
        dtype: Dtype or dtype policy of all layers; their own by default.
        custom_objects: Classes that Keras does not know.
        safe_mode: Whether to refuse Python code.

    Raises:
        UnsupportedError: When it describes no model.
    """
    found = _decoded(config if dtype is None else _without_dtypes(config))
    with _scope(custom_objects, safe_mode), nullcontext() if dtype is None else global_policy(dtype):
        model = saving_utils.model_from_config(found, custom_objects=dict(custom_objects or {}))
    if not isinstance(model, keras.Model):
        raise UnsupportedError(
            f"Cannot build a model: the configuration describes a {type(model).__name__}, expected a Keras model"
        )
    return model


def compile_as_described(
    model: Model, config: Mapping[str, Any], *, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> None:
    """Compile a model as a ``training_config`` says."""
    with _scope(custom_objects, safe_mode):
        arguments = saving_utils.compile_args_from_training_config(_decoded(config), dict(custom_objects or {}))
        model.compile(**arguments)


@contextmanager
def _scope(custom_objects: Mapping[str, Any] | None, safe_mode: bool) -> Iterator[None]:
    with (
        keras.saving.custom_object_scope(dict(custom_objects or {})),
        serialization_lib.SafeModeScope(safe_mode),
        saving_options.keras_option_scope(use_legacy_config=True),
    ):
        yield


def _decoded(value: Any) -> Any:
    """Return a copy, with the objects for which JSON has no form; as Keras' ``json_utils``, which asks TensorFlow."""
    if isinstance(value, list):
        return [_decoded(each) for each in value]
    if not isinstance(value, Mapping):
        return copy.copy(value)
    match value.get("class_name"):
        case "__tuple__" | "TensorShape" if isinstance(items := value.get("items"), list):
            return tuple(map(_decoded, items))
        case "__ellipsis__":
            return Ellipsis
        case "__bytes__" if isinstance(text := value.get("value"), str):
            return text.encode()
    return {key: _decoded(each) for key, each in value.items()}


def _without_dtypes(value: Any) -> Any:
    """Return a configuration whose layers compute in the global policy."""
    if isinstance(value, list):
        return [_without_dtypes(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    found = {key: _without_dtypes(each) for key, each in value.items()}
    inner = found.get("config")
    # Layers have names; initializers do not, and a dtype of theirs is that of their values.
    if not isinstance(inner, dict) or "name" not in inner or found.get("class_name") == "InputLayer":
        return found
    return {**found, "config": {key: each for key, each in inner.items() if key != "dtype" or not _is_float(each)}}


def _is_float(dtype: Any) -> bool:
    """Whether a dtype, or a policy as Keras 3 describes it, is one of floats."""
    if isinstance(dtype, Mapping) and isinstance(dtype.get("config"), Mapping):
        dtype = dtype["config"].get("name")
    return isinstance(dtype, str) and "float" in dtype


def legacy_weights(layer: Any) -> list[Variable]:
    """Return a layer's weights, also those of layers in it, in the order of Keras 2: trainable ones first."""
    return list(legacy_h5_format._legacy_weights(layer))


def own_weights(model: Model) -> list[Variable]:
    """Return the weights that belong to the model itself and to none of its layers, in the order of Keras 2."""
    # As in `legacy_h5_format.load_weights_from_hdf5_group`, but by identity: `in` would compare values.
    known = {id(variable) for variable in model.weights}
    return [v for v in model._trainable_variables + model._non_trainable_variables if id(v) in known]
