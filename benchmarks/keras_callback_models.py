"""Four kinds of models and three ways to train them, for `keras_callback`: small, but larger than a file's head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

WIDTH = 128


@keras.saving.register_keras_serializable("shardload-benchmarks")
class Subclassed(keras.Model):  # type: ignore[misc]
    """Layers in a list; dropout, so that a seed is part of the state."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.blocks = [keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dense(WIDTH)]
        self.dropout = keras.layers.Dropout(0.1)

    def call(self, x: Any, training: bool = False) -> Any:
        return self.blocks[1](self.dropout(self.blocks[0](x), training=training))


def functional() -> Any:
    """Two dense layers with a norm."""
    inputs = keras.Input((WIDTH,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(WIDTH, "tanh")(inputs))
    return keras.Model(inputs, keras.layers.Dense(WIDTH)(keras.layers.Dropout(0.1)(x)))


def sequential() -> Any:
    """Without an Input: built by its first batch."""
    return keras.Sequential([keras.layers.Dense(WIDTH, "tanh"), keras.layers.Dropout(0.1), keras.layers.Dense(WIDTH)])


def gemma() -> Any:
    """KerasHub's task, two layers."""
    import keras_hub

    backbone = keras_hub.models.GemmaBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=256,
        head_dim=16,
        dropout=0.1,
    )
    return keras_hub.models.GemmaCausalLM(backbone=backbone, preprocessor=None)


BUILDERS: dict[str, Callable[[], Any]] = {
    "functional": functional,
    "Sequential": sequential,
    "subclassed": Subclassed,
    "Gemma": gemma,
}
WAYS = ("Adam", "LoRA", "int8")
"""LoRA: rank 4 beside frozen kernels, Adam. int8: kernels quantised, LoRA beside them, Adam."""


@dataclass(frozen=True, slots=True)
class Made:
    """A kind of model and a way to train it."""

    kind: str
    way: str = "Adam"
    optimizer: Callable[[], Any] = keras.optimizers.Adam
    prepare: Callable[[Any], Any] | None = None

    @property
    def name(self) -> str:
        """Both, for a table."""
        return f"{self.kind}/{self.way}"

    @classmethod
    def of_name(cls, name: str) -> Made:
        """The inverse of `name`."""
        return cls(*name.split("/"))

    def model(self, *, seed: int, compiled: bool = True) -> Any:
        """Built, with every variable it will ever have but the optimizer's and the metrics'."""
        keras.utils.set_random_seed(seed)
        model = BUILDERS[self.kind]()
        if not model.weights:
            model(self.data()[0])
        if self.way == "int8":
            model.quantize("int8")
        if self.way in ("LoRA", "int8"):
            _enable_lora(model)
        if compiled:
            model.compile(self.optimizer(), _loss(self.kind))
        return model

    def data(self) -> tuple[Any, Any]:
        """Eight examples and what they should give."""
        rng = np.random.default_rng(0)
        if self.kind == "Gemma":
            tokens = rng.integers(1, 256, size=(8, 6)).astype("int32")
            return {"token_ids": tokens, "padding_mask": np.ones_like(tokens)}, tokens
        x = rng.normal(size=(8, WIDTH)).astype("float32")
        return x, x[::-1].copy()

    def fit(self, model: Any, *callbacks: Any, epochs: int = 1) -> Any:
        """Two batches an epoch."""
        x, y = self.data()
        return model.fit(x, y, batch_size=4, epochs=epochs, verbose=0, shuffle=False, callbacks=list(callbacks))


def _loss(kind: str) -> Any:
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True) if kind == "Gemma" else "mse"


def _enable_lora(model: Any) -> None:
    if hasattr(model, "backbone"):
        model.backbone.enable_lora(4)
        return
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Dense):
            layer.enable_lora(4)
