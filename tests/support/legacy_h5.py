"""Files of Keras 2, by Keras' own code: lists of names of fixed length, as before h5py 3, or as h5py writes them."""

import json

import h5py
import numpy as np
from keras.src.legacy.saving import legacy_h5_format


def write_weights(path, saved, *, fixed=True, libver="earliest"):
    """As `save_weights` of Keras 2 for a name that ends in .h5."""
    with h5py.File(path, "w", userblock_size=0 if fixed else 512, libver=libver) as file:
        legacy_h5_format.save_weights_to_hdf5_group(file, saved)
        if fixed:
            fix_lengths(file)
    return path


def write_variable(path, saved):
    """As `write_weights`, by today's h5py, which stores lists of names with variable length."""
    return write_weights(path, saved, fixed=False)


def write_model(path, saved):
    """As `save` of Keras 2."""
    saved.save(path)
    with h5py.File(path, "r+") as file:
        fix_lengths(file)
    return path


def fix_lengths(file):
    """Store all lists of names with fixed length."""

    def fix(node):
        for name in [name for name in node.attrs if name.startswith(("layer_names", "weight_names"))]:
            listed = [text if isinstance(text, bytes) else text.encode() for text in node.attrs[name]]
            if listed:
                node.attrs[name] = np.asarray(listed, "S")

    fix(file)
    file.visititems(lambda _, node: fix(node))


def _layer(kind, name, inbound, **config):
    nodes = [[[each, 0, 0, {}] for each in inbound]] if inbound else []
    return {"class_name": kind, "config": {"name": name, **config}, "name": name, "inbound_nodes": nodes}


_INITIAL = {
    "kernel_initializer": {"class_name": "GlorotUniform", "config": {"seed": None}},
    "bias_initializer": {"class_name": "Zeros", "config": {}},
}
_DENSE = {"trainable": True, "dtype": "float32", "activation": "relu", "use_bias": True, **_INITIAL}
OLD_CONFIG = {
    "class_name": "Model",
    "config": {
        "name": "model_1",
        "layers": [
            _layer("InputLayer", "in", [], batch_input_shape=[None, 8], dtype="float32", sparse=False, ragged=False),
            _layer("Dense", "zz", ["in"], units=16, **_DENSE),
            _layer("BatchNormalization", "norm", ["zz"], axis=[1], momentum=0.99, epsilon=0.001, dtype="float32"),
            _layer("Dense", "aa", ["norm"], units=16, **_DENSE),
            _layer("Concatenate", "both", ["zz", "aa"], axis=-1, dtype="float32"),
            _layer("Dense", "last", ["both"], units=8192, **_DENSE),
        ],
        "input_layers": [["in", 0, 0]],
        "output_layers": [["last", 0, 0]],
    },
}
"""A configuration as Keras 2.4 writes it."""
OLD_TRAINING = {
    "optimizer_config": {"class_name": "SGD", "config": {"learning_rate": 0.5, "momentum": 0.5}},
    "loss": {"class_name": "MeanSquaredError", "config": {"reduction": "sum", "name": "mean_squared_error"}},
    "metrics": None,
    "weighted_metrics": None,
    "loss_weights": None,
}


def write_described(path, saved, *, config=OLD_CONFIG, training=None, fixed=False):
    """As `save` of Keras 2: the weights of a model, with any text or JSON as its configuration."""
    texts = {"model_config": config, "training_config": training}
    with h5py.File(path, "w") as file:
        for name, value in texts.items():
            if value is not None:
                text = value.encode() if isinstance(value, str) else json.dumps(value).encode()
                file.attrs[name] = np.bytes_(text) if fixed else text
        legacy_h5_format.save_weights_to_hdf5_group(file.create_group("model_weights"), saved)
        fix_lengths(file)
    return path
