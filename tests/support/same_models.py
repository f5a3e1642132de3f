"""Two models that must be the same: class, configuration, dtypes, placement, and every value."""

import json

import keras
import numpy as np

import shardload
from shardload.keras_bridge.model_state import own_layers
from shardload.keras_bridge.variables import current_value


def outcome(function):
    """What a call returns, and the error it raises; from the same seeds and names each time."""
    keras.backend.clear_session(free_memory=False)  # to collect garbage takes longer than many a load
    keras.utils.set_random_seed(7)
    try:
        return function(), None
    except Exception as error:
        return None, error


def compare(function):
    """Make a call outside of `shardload.fast` and inside; both must do the same."""
    outside, expected = outcome(function)
    with shardload.fast() as report:
        inside, raised = outcome(function)
    assert (type(raised), str(raised)) == (type(expected), str(expected))
    if isinstance(outside, keras.Layer):
        assert differences(inside, outside) == []
    else:
        assert inside == outside
    return report


def differences(one, other):
    """What differs, as text; nothing if the models are the same."""
    found = []
    if type(one) is not type(other):
        found.append(f"{type(one)} is not {type(other)}")
    if described(one) != described(other):
        found.append(f"{described(one)} is not {described(other)}")
    if set(vars(one)) != set(vars(other)):
        found.append(f"attributes {set(vars(one)) ^ set(vars(other))}")
    pairs = zip(variables(one), variables(other), strict=True)
    return found + [text for a, b in pairs for text in variable_differences(a, b)]


def described(model):
    config = keras.saving.serialize_keras_object(model)
    return json.dumps(config, sort_keys=True, default=repr), str(model.dtype_policy), model.name, model.compiled


def variables(model):
    optimizer = getattr(model, "optimizer", None)
    metrics = [v for metric in model.metrics for v in metric.variables]
    return [*model.variables, *metrics, *(optimizer.variables if optimizer else ())]


def variable_differences(a, b):
    # The state in which Keras leaves a variable, private or not: value, dtype, place, initialiser, layout.
    x, y = current_value(a), current_value(b)
    facts = {
        "path": (a.path, b.path),
        "dtype": (x.dtype, y.dtype),
        "sharding": (x.sharding, y.sharding),
        "committed": (x.committed, y.committed),
        "trainable": (a.trainable, b.trainable),
        "initializer": (vars(a)["_initializer"], vars(b)["_initializer"]),
        "layout": (str(vars(a)["_layout"]), str(vars(b)["_layout"])),
    }
    found = [f"{name} of {b.path}: {m} is not {n}" for name, (m, n) in facts.items() if m != n]
    if np.asarray(x).tobytes() != np.asarray(y).tobytes():
        found.append(f"value of {b.path}")
    return found


def zero_new_adapters(model):
    """Do what Keras does to adapters of merged weights. They would never train, so a load gives the first a value."""
    for layer in own_layers(model):
        for name in ("kernel", "embeddings"):
            first, second = (getattr(layer, f"lora_{name}_{factor}", None) for factor in "ab")
            if second is not None and not np.any(second.value):
                first.assign(np.zeros(first.shape))
