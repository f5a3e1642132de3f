"""Files of Keras 2, by Keras' own code: lists of names of fixed length, as before h5py 3, or as h5py writes them."""

import h5py
import numpy as np
from keras.src.legacy.saving import legacy_h5_format


def write_weights(path, saved, *, fixed=True):
    """As `save_weights` of Keras 2 for a name that ends in .h5."""
    with h5py.File(path, "w", userblock_size=0 if fixed else 512) as file:
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
