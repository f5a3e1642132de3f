"""Small models that are true to the real ones in everything but size: heads, tying, gating, odd vocabularies.

Every builder returns a fresh backbone (or model) of two layers for a ``dtype``; `causal_lm` puts it in
KerasHub's task, `tokens` makes its inputs, `randomise` gives every variable a seeded value (biases and
norms too, which start as zeros and ones and would hide a mistake). keras_hub is imported when a builder runs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np


def backbone(name: str, dtype: Any = "float32", **sizes: Any) -> Any:
    """A backbone of KerasHub with two layers and a vocabulary of 256, where ``sizes`` do not say otherwise."""
    import keras_hub

    return getattr(keras_hub.models, f"{name}Backbone")(
        **{"num_layers": 2, "vocabulary_size": 256, **sizes}, dtype=dtype
    )


def _attention(query: int, key_value: int, hidden: int, intermediate: int, **more: Any) -> dict[str, Any]:
    heads = {"num_query_heads": query, "num_key_value_heads": key_value}
    return {**heads, "hidden_dim": hidden, "intermediate_dim": intermediate, **more}


_WINDOW = {"use_sliding_window_attention": True, "sliding_window_size": 8}
_POST_NORMS = {"use_post_ffw_norm": True, "use_post_attention_norm": True}
_SOFT_CAPS = {"attention_logit_soft_cap": 50.0, "final_logit_soft_cap": 30.0}
_TWELVE_HEADS = {"num_heads": 12, "hidden_dim": 96, "intermediate_dim": 384, "max_sequence_length": 64}
"""Learned positions, too."""

_DECODERS = {
    # Gemma 1 2B: eight query heads share one key/value head; vocabulary tied.
    "gemma1": ("Gemma", _attention(8, 1, 64, 256, head_dim=16)),
    # Gemma 2 2B: eight query heads, four key/value heads, soft caps, post norms; the width divides by three.
    "gemma2": ("Gemma", _attention(8, 4, 72, 192, head_dim=16, **_POST_NORMS, **_SOFT_CAPS, **_WINDOW)),
    # Gemma 3 270M: four query heads, one key/value head, query and key norms, text only.
    "gemma3": ("Gemma3", _attention(4, 1, 40, 128, head_dim=16, image_size=224, **_POST_NORMS, **_WINDOW)),
    # Llama 3 8B: grouped heads that divide by eight, vocabulary not tied.
    "llama": ("Llama3", _attention(16, 8, 128, 224)),
    # Mistral 7B with fewer key/value heads, sliding window.
    "mistral": ("Mistral", _attention(8, 2, 64, 224, sliding_window=8)),
    # Qwen 2.5 0.5B: fourteen query heads, two key/value heads, biases on query, key and value; tied.
    "qwen2": ("Qwen", _attention(14, 2, 112, 152, tie_word_embeddings=True)),
    # Qwen 3: query and key norms, a head_dim of its own.
    "qwen3": ("Qwen3", _attention(16, 8, 64, 192, head_dim=16, tie_word_embeddings=True)),
    # Phi-3 mini: as many key/value heads as query heads.
    "phi3": ("Phi3", _attention(8, 8, 64, 160)),
    # GPT-2 base: an odd vocabulary (50,257); tied.
    "gpt2": ("GPT2", {**_TWELVE_HEADS, "vocabulary_size": 257}),
    # OPT 125M.
    "opt": ("OPT", {**_TWELVE_HEADS, "vocabulary_size": 272}),
}
_ENCODERS = {
    # BERT base: segments, pooler; vocabulary (30,522) divides by two only.
    "bert": ("Bert", {**_TWELVE_HEADS, "vocabulary_size": 258}),
    # RoBERTa base: odd vocabulary (50,265).
    "roberta": ("Roberta", {**_TWELVE_HEADS, "vocabulary_size": 265}),
}


def resnet(dtype: Any = "float32") -> Any:
    """A ResNet with batch norms and strided shortcuts, on 32 x 32 images."""
    import keras_hub

    return keras_hub.models.ResNetBackbone(
        input_conv_filters=[64], input_conv_kernel_sizes=[3], stackwise_num_filters=[64, 128],
        stackwise_num_blocks=[1, 2], stackwise_num_strides=[1, 2], block_type="basic_block", image_shape=(32, 32, 3),
        dtype=dtype,
    )  # fmt: skip


def conv(dtype: Any = "float32") -> Any:
    """A plain Keras convolutional classifier: no KerasHub in it."""
    import keras

    inputs = keras.Input((16, 16, 3))
    x = keras.layers.Conv2D(24, 3, activation="relu", dtype=dtype)(inputs)
    x = keras.layers.BatchNormalization(dtype=dtype)(x)
    x = keras.layers.DepthwiseConv2D(3, dtype=dtype)(x)
    x = keras.layers.Conv2D(48, 1, activation="relu", dtype=dtype)(x)
    x = keras.layers.Conv2DTranspose(16, 2, strides=2, dtype=dtype)(x)
    x = keras.layers.GlobalAveragePooling2D(dtype=dtype)(x)
    x = keras.layers.Dense(64, activation="relu", dtype=dtype)(x)
    return keras.Model(inputs, keras.layers.Dense(10, dtype=dtype)(x))


DECODERS: dict[str, Callable[..., Any]] = {key: partial(backbone, name, **of) for key, (name, of) in _DECODERS.items()}
"""Families with a CausalLM task."""
ENCODERS: dict[str, Callable[..., Any]] = {key: partial(backbone, name, **of) for key, (name, of) in _ENCODERS.items()}
VISION: dict[str, Callable[..., Any]] = {f.__name__: f for f in (resnet, conv)}
BUILDERS = {**DECODERS, **ENCODERS, **VISION}
"""Every family by name."""


def build(family: str, dtype: Any = "float32") -> Any:
    """A fresh backbone of ``family``."""
    return BUILDERS[family](dtype)


def causal_lm(family: str, dtype: Any = "float32") -> Any:
    """The generating task of a decoder family, without preprocessor (token ids in, token ids out)."""
    import keras_hub

    task = getattr(keras_hub.models, f"{_DECODERS[family][0]}CausalLM")
    lm = task(backbone=build(family, dtype), preprocessor=None)
    lm.compile(sampler="greedy", run_eagerly=False)
    return lm


def tokens(model: Any, *, batch: int = 8, length: int = 12, seed: int = 0) -> Any:
    """Seeded inputs for ``model``: a dict of token arrays, or images."""
    rng = np.random.default_rng(seed)
    backbone = getattr(model, "backbone", model)
    vocabulary = getattr(backbone, "vocabulary_size", None)
    if vocabulary is None:
        return rng.normal(size=(batch, *model.input_shape[1:])).astype("float32")
    inputs = {
        "token_ids": rng.integers(1, vocabulary, size=(batch, length)).astype("int32"),
        "padding_mask": np.ones((batch, length), dtype="int32"),
    }
    if "segment_ids" in {tensor.name for tensor in backbone.inputs}:
        inputs["segment_ids"] = rng.integers(0, 2, size=(batch, length)).astype("int32")
    return inputs


def randomise(model: Any, *, seed: int = 0) -> Any:
    """Give every floating-point weight of ``model`` a seeded value, norms around one; returns ``model``."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        if not str(variable.dtype).startswith(("float", "bfloat")):
            continue
        noise = rng.normal(size=variable.shape).astype("float32") * (0.3 / max(1, len(variable.shape)))
        positive = variable.path.endswith(("scale", "gamma", "variance"))
        variable.assign(np.abs(noise) + 0.8 if positive else noise)
    return model
