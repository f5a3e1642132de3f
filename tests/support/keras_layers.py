"""One layer of each class of `keras.layers`, with arguments that make it small, and batches that it takes."""

import inspect

import jax.numpy as jnp
import keras

LAYERS = keras.layers
SHAPES = [(8, 16), (8, 12, 16), (8, 16, 16, 3), (8, 6, 8, 8, 4), (2, 3, 8, 8, 8, 4)]
"""Batches of features, steps and pixels; a layer is given the first that it takes."""
ARGUMENTS = {
    **{f"Adaptive{of}Pooling{d}D": [4] for d in (1, 2, 3) for of in ("Average", "Max")},
    **{f"AveragePooling{d}D": [2] for d in (1, 2, 3)},
    **{f"Conv{d}D{kind}": [8, 3] for d in (1, 2, 3) for kind in ("", "Transpose")},
    **{f"ConvLSTM{d}D": [8, 3] for d in (1, 2, 3)},
    **{f"DepthwiseConv{d}D": [3] for d in (1, 2)},
    **{f"SeparableConv{d}D": [8, 3] for d in (1, 2)},
    **{f"SpatialDropout{d}D": [0.5] for d in (1, 2, 3)},
    **{f"{kind}Cell": [8] for kind in ("GRU", "LSTM", "SimpleRNN")},
    **{key: [0.5] for key in ("AlphaDropout", "Dropout", "GaussianDropout", "GaussianNoise")},
    **{key: [8] for key in ("Dense", "GRU", "LSTM", "SimpleRNN")},
    **{key: [32, 8] for key in ("Embedding", "ReversibleEmbedding")},
    "Activation": ["gelu"],
    "Attention": [True],
    "EinsumDense": ["bi,io->bo", 8],
    "GroupNormalization": [2],
    "GroupQueryAttention": [4, 4, 2],
    "Lambda": [jnp.tanh],
    "MultiHeadAttention": [4, 4],
    "Permute": [(2, 1)],
    "RepeatVector": [3],
    "Reshape": [(-1,)],
    "Dot": [-1],
}
WITH_LAYERS = {
    "Bidirectional": lambda: [LAYERS.LSTM(8)],
    "RNN": lambda: [LAYERS.SimpleRNNCell(8)],
    "SpectralNormalization": lambda: [LAYERS.Dense(8)],
    "StackedRNNCells": lambda: [[LAYERS.GRUCell(8), LAYERS.LSTMCell(8)]],
    "TimeDistributed": lambda: [LAYERS.Dense(8)],
}
SEVERAL = {"Add", "AdditiveAttention", "Attention", "Average", "Concatenate", "Dot", "Maximum", "Minimum", "Multiply",
           "Subtract"}  # fmt: skip
"""Layers that take a list."""
QUERY_AND_VALUE = {"GroupQueryAttention", "MultiHeadAttention"}
OTHERS = {"FlaxLayer", "InputLayer", "JaxLayer", "Layer", "TFSMLayer", "TorchModuleWrapper", "Wrapper"}
"""What has no program of its own, or another library's."""


def classes():
    """Every class of `keras.layers` by name, once, though some have several names."""
    found = {c: n for n, c in reversed(vars(LAYERS).items()) if inspect.isclass(c) and issubclass(c, LAYERS.Layer)}
    return {n: c for c, n in sorted(found.items(), key=lambda pair: pair[1])}


def is_preprocessing(cls):
    return ".preprocessing." in cls.__module__


def layer_of(name):
    arguments = WITH_LAYERS[name]() if name in WITH_LAYERS else ARGUMENTS.get(name, [])
    layer = getattr(LAYERS, name)(*arguments)
    return LAYERS.RNN(layer) if name.endswith(("Cell", "Cells")) else layer


def applied(name, x):
    """What a layer of that class makes of an input."""
    layer = layer_of(name)
    return layer(x, x) if name in QUERY_AND_VALUE else layer([x, x] if name in SEVERAL else x)
