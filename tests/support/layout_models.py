"""Reduced models for layouts: of each, the model, a batch that divides over every mesh of the tests, and a target.

`LAYOUT_MODELS` maps a name to a builder; each call builds a fresh model with Keras' own random values, or with none
inside `shardload.abstract()`. Families of KerasHub are those of `models`, which keep what the real ones have: numbers
of heads, tied embeddings, odd vocabularies.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import models
import numpy as np

BATCH = 8
"""Examples in a batch (16 for ``block``): divides over 1, 2, 4 and 8 devices."""
LENGTH = 12
"""Tokens per example."""
CLASSES = 10
MESHES = ("1x8", "2x4", "8x1", "1x3")


class LayoutModel(NamedTuple):
    """A model with data to run it and to train it."""

    model: Any
    inputs: Any
    """A NumPy array, or a dict of them, as the model takes it."""
    target: Any
    """Integers (classes, for logits), or floats of the output's shape (for a mean squared error)."""


def loss_for(target: Any) -> Any:
    """A loss that suits a target: cross-entropy of logits for integers, mean squared error for floats."""
    import keras

    if np.issubdtype(np.asarray(target).dtype, np.integer):
        return keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    return keras.losses.MeanSquaredError()


def block(*, layers: int = 2, width: int = 256, heads: int = 8, hidden: int = 1024, length: int = 128) -> LayoutModel:
    """Transformer blocks with the norms last, on 16 x ``length`` vectors: small enough to count collectives by hand."""
    import keras

    y = inputs = keras.Input((length, width))
    for _ in range(layers):
        attended = keras.layers.MultiHeadAttention(heads, width // heads)(y, y)
        y = keras.layers.LayerNormalization()(keras.layers.Add()([y, attended]))
        inner = keras.layers.Dense(width)(keras.layers.Dense(hidden, activation="gelu")(y))
        y = keras.layers.LayerNormalization()(keras.layers.Add()([y, inner]))
    x, target = np.random.default_rng(0).normal(size=(2, 16, length, width)).astype("float32")
    return LayoutModel(keras.Model(inputs, y), x, target)


def decoder(family: str) -> LayoutModel:
    """A decoder of `models.DECODERS` with its head: logits for the next token."""
    model = models.causal_lm(family)
    inputs = models.tokens(model, batch=BATCH, length=LENGTH)
    return LayoutModel(model, inputs, np.roll(inputs["token_ids"], -1, axis=1))


def encoder(family: str) -> LayoutModel:
    """An encoder of `models.ENCODERS` with a classifier on its first token."""
    import keras

    backbone = models.build(family)
    features = backbone.output["sequence_output"] if isinstance(backbone.output, dict) else backbone.output
    logits = keras.layers.Dense(CLASSES, name="classifier")(features[:, 0])
    inputs = models.tokens(backbone, batch=BATCH, length=LENGTH)
    return LayoutModel(keras.Model(backbone.input, logits), inputs, _classes())


def mixtral() -> LayoutModel:
    """Mixtral: grouped heads, eight experts of which two answer each token; vocabulary not tied."""
    import keras_hub

    sizes = {"num_query_heads": 8, "num_key_value_heads": 2, "hidden_dim": 64, "intermediate_dim": 96}
    backbone = models.backbone("Mixtral", **sizes, num_experts=8, top_k=2, sliding_window=8)
    model = keras_hub.models.MixtralCausalLM(backbone=backbone, preprocessor=None)
    inputs = models.tokens(model, batch=BATCH, length=LENGTH)
    return LayoutModel(model, inputs, np.roll(inputs["token_ids"], -1, axis=1))


def resnet() -> LayoutModel:
    """A residual network of KerasHub with batch norms, and a classifier on it."""
    import keras

    backbone = models.build("resnet")
    pooled = keras.layers.GlobalAveragePooling2D()(backbone.output)
    model = keras.Model(backbone.input, keras.layers.Dense(CLASSES, name="classifier")(pooled))
    return LayoutModel(model, _images(32), _classes())


def vit() -> LayoutModel:
    """A vision transformer of KerasHub: patches by convolution, a class token, learned positions."""
    import keras
    import keras_hub

    sizes = {"patch_size": 8, "num_layers": 2, "num_heads": 8, "hidden_dim": 64, "mlp_dim": 256}
    backbone = keras_hub.models.ViTBackbone(image_shape=(32, 32, 3), **sizes)
    model = keras.Model(backbone.input, keras.layers.Dense(CLASSES, name="classifier")(backbone.output[:, 0]))
    return LayoutModel(model, _images(32), _classes())


def lstm() -> LayoutModel:
    """Recurrent layers over embedded tokens: an LSTM in both directions, then a GRU."""
    import keras

    tokens = keras.Input((LENGTH,), dtype="int32")
    y = keras.layers.Embedding(264, 32)(tokens)
    y = keras.layers.Bidirectional(keras.layers.LSTM(48, return_sequences=True))(y)
    model = keras.Model(tokens, keras.layers.Dense(CLASSES)(keras.layers.GRU(64)(y)))
    return LayoutModel(model, np.random.default_rng(0).integers(0, 264, (BATCH, LENGTH)).astype("int32"), _classes())


def unet() -> LayoutModel:
    """A U-Net: two levels down by pooling and up by transposed convolution, with group norms and skips."""
    import keras

    def convolved(y: Any, filters: int) -> Any:
        y = keras.layers.Conv2D(filters, 3, padding="same", activation="silu")(y)
        return keras.layers.GroupNormalization(8)(y)

    images = keras.Input((16, 16, 3))
    first = convolved(images, 16)
    second = convolved(keras.layers.MaxPooling2D()(first), 32)
    y = convolved(keras.layers.MaxPooling2D()(second), 64)
    for skip, filters in ((second, 32), (first, 16)):
        y = keras.layers.Conv2DTranspose(filters, 2, strides=2)(y)
        y = convolved(keras.layers.Concatenate()([y, skip]), filters)
    model = keras.Model(images, keras.layers.Conv2D(3, 1)(y))
    x = _images(16)
    return LayoutModel(model, x, np.tanh(x[:, ::-1]))


def subclassed() -> LayoutModel:
    """A subclassed model with neither ``build`` nor a static graph; branches on its arguments."""
    import keras

    class Gated(keras.Model):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.gate = keras.layers.Dense(128, activation="sigmoid")
            self.up = [keras.layers.Dense(128) for _ in range(2)]
            self.dropout = keras.layers.Dropout(0.0)
            self.down = {"out": keras.layers.Dense(CLASSES)}

        def call(self, x: Any, training: bool = False) -> Any:
            gated = self.gate(x) * self.up[0](x)
            return self.down["out"](self.dropout(gated + self.up[1](x), training=training))

    model = Gated()
    model(keras.Input((32,)))
    x = np.random.default_rng(0).normal(size=(BATCH, 32)).astype("float32")
    return LayoutModel(model, x, _classes())


def with_a_rule(layers: int = 1) -> Any:
    """A model of layers, "mixing", whose class has a rule: its kernel is split by rows."""
    import keras

    import shardload

    class Mixing(keras.layers.Dense):  # type: ignore[misc]
        pass

    shardload.layout_rule(Mixing)(lambda layer: {"kernel": (0,), "bias": ()})
    inputs = keras.Input((512,))
    names = ["mixing", *(f"mixing_{i}" for i in range(1, layers))]
    return keras.Model(inputs, [Mixing(1024, name=name)(inputs) for name in names])


def _classes() -> Any:
    return np.random.default_rng(1).integers(0, CLASSES, BATCH).astype("int32")


def _images(size: int) -> Any:
    return np.random.default_rng(0).normal(size=(BATCH, size, size, 3)).astype("float32")


LAYOUT_MODELS: dict[str, Callable[[], LayoutModel]] = {
    "block": block,
    **{name: partial(encoder, name) for name in ("bert", "roberta")},
    **{name: partial(decoder, name) for name in ("gpt2", "opt", "gemma1", "gemma2", "gemma3", "llama")},
    **{builder.__name__: builder for builder in (mixtral, resnet, vit, lstm, unet, subclassed)},
}
"""Every builder by name."""
