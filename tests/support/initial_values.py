"""References that begin with zeros, as KerasHub or Keras replaces all their values before a test looks at any."""

import contextlib

import keras
import numpy as np
import pytest

RANDOM = ("VarianceScaling", "RandomNormal", "RandomUniform", "TruncatedNormal")
"""Keras' initializers that draw; the others derive from them."""


@contextlib.contextmanager
def zeros_for_random():
    """XLA compiles a program for every shape that is drawn: most of what it costs to load a small model.

    For the reference alone: what it is compared with begins with random values, so a value that neither loads differs.
    """

    def zeros(self, shape, dtype=None):
        return keras.ops.convert_to_tensor(np.zeros(shape, keras.backend.standardize_dtype(dtype)))

    with pytest.MonkeyPatch.context() as patch:
        for name in RANDOM:
            patch.setattr(getattr(keras.initializers, name), "__call__", zeros)
        yield
