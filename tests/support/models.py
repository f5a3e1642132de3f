"""Small models that are true to the real ones in everything but size: heads, tying, gating, odd vocabularies.

Every builder returns a fresh backbone (or model) of two layers for a ``dtype``; `causal_lm` puts it in
KerasHub's task, `tokens` makes its inputs, `randomise` gives every variable a seeded value (biases and
norms too, which start as zeros and ones and would hide a mistake). keras_hub is imported when a builder runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def gemma1(dtype: Any = "float32") -> Any:
    """Gemma 1 2B: eight query heads share one key/value head; vocabulary tied."""
    import keras_hub

    return keras_hub.models.GemmaBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=1,
        hidden_dim=64,
        intermediate_dim=256,
        head_dim=16,
        dtype=dtype,
    )


def gemma2(dtype: Any = "float32") -> Any:
    """Gemma 2 2B: eight query heads, four key/value heads, soft caps, post norms; the width divides by three."""
    import keras_hub

    return keras_hub.models.GemmaBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=4,
        hidden_dim=72,
        intermediate_dim=192,
        head_dim=16,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        use_sliding_window_attention=True,
        sliding_window_size=8,
        dtype=dtype,
    )


def gemma3(dtype: Any = "float32") -> Any:
    """Gemma 3 270M: four query heads, one key/value head, query and key norms, text only."""
    import keras_hub

    return keras_hub.models.Gemma3Backbone(
        vocabulary_size=256,
        image_size=224,
        num_layers=2,
        num_query_heads=4,
        num_key_value_heads=1,
        hidden_dim=40,
        intermediate_dim=128,
        head_dim=16,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        use_sliding_window_attention=True,
        sliding_window_size=8,
        dtype=dtype,
    )


def llama(dtype: Any = "float32") -> Any:
    """Llama 3 8B: grouped heads that divide by eight, vocabulary not tied."""
    import keras_hub

    return keras_hub.models.Llama3Backbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=16,
        num_key_value_heads=8,
        hidden_dim=128,
        intermediate_dim=224,
        dtype=dtype,
    )


def mistral(dtype: Any = "float32") -> Any:
    """Mistral 7B with fewer key/value heads, sliding window."""
    import keras_hub

    return keras_hub.models.MistralBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=2,
        hidden_dim=64,
        intermediate_dim=224,
        sliding_window=8,
        dtype=dtype,
    )


def qwen2(dtype: Any = "float32") -> Any:
    """Qwen 2.5 0.5B: fourteen query heads, two key/value heads, biases on query, key and value; tied."""
    import keras_hub

    return keras_hub.models.QwenBackbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=14,
        num_key_value_heads=2,
        hidden_dim=112,
        intermediate_dim=152,
        tie_word_embeddings=True,
        dtype=dtype,
    )


def qwen3(dtype: Any = "float32") -> Any:
    """Qwen 3: query and key norms, a head_dim of its own."""
    import keras_hub

    return keras_hub.models.Qwen3Backbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=16,
        num_key_value_heads=8,
        head_dim=16,
        hidden_dim=64,
        intermediate_dim=192,
        tie_word_embeddings=True,
        dtype=dtype,
    )


def phi3(dtype: Any = "float32") -> Any:
    """Phi-3 mini: as many key/value heads as query heads."""
    import keras_hub

    return keras_hub.models.Phi3Backbone(
        vocabulary_size=256,
        num_layers=2,
        num_query_heads=8,
        num_key_value_heads=8,
        hidden_dim=64,
        intermediate_dim=160,
        dtype=dtype,
    )


def gpt2(dtype: Any = "float32") -> Any:
    """GPT-2 base: twelve heads and an odd vocabulary (50,257); learned positions; tied."""
    import keras_hub

    return keras_hub.models.GPT2Backbone(
        vocabulary_size=257,
        num_layers=2,
        num_heads=12,
        hidden_dim=96,
        intermediate_dim=384,
        max_sequence_length=64,
        dtype=dtype,
    )


def opt(dtype: Any = "float32") -> Any:
    """OPT 125M: twelve heads, learned positions."""
    import keras_hub

    return keras_hub.models.OPTBackbone(
        vocabulary_size=272,
        num_layers=2,
        num_heads=12,
        hidden_dim=96,
        intermediate_dim=384,
        max_sequence_length=64,
        dtype=dtype,
    )


def bert(dtype: Any = "float32") -> Any:
    """BERT base: encoder, twelve heads, segments, pooler; vocabulary (30,522) divides by two only."""
    import keras_hub

    return keras_hub.models.BertBackbone(
        vocabulary_size=258,
        num_layers=2,
        num_heads=12,
        hidden_dim=96,
        intermediate_dim=384,
        max_sequence_length=64,
        dtype=dtype,
    )


def roberta(dtype: Any = "float32") -> Any:
    """RoBERTa base: encoder, twelve heads, odd vocabulary (50,265)."""
    import keras_hub

    return keras_hub.models.RobertaBackbone(
        vocabulary_size=265,
        num_layers=2,
        num_heads=12,
        hidden_dim=96,
        intermediate_dim=384,
        max_sequence_length=64,
        dtype=dtype,
    )


def resnet(dtype: Any = "float32") -> Any:
    """A ResNet with batch norms and strided shortcuts, on 32 x 32 images."""
    import keras_hub

    return keras_hub.models.ResNetBackbone(
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 128],
        stackwise_num_blocks=[1, 2],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        image_shape=(32, 32, 3),
        dtype=dtype,
    )


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


DECODERS: dict[str, Callable[..., Any]] = {
    f.__name__: f for f in (gemma1, gemma2, gemma3, llama, mistral, qwen2, qwen3, phi3, gpt2, opt)
}
"""Families with a CausalLM task."""
ENCODERS: dict[str, Callable[..., Any]] = {f.__name__: f for f in (bert, roberta)}
VISION: dict[str, Callable[..., Any]] = {f.__name__: f for f in (resnet, conv)}
BUILDERS = {**DECODERS, **ENCODERS, **VISION}
"""Every family by name."""

_TASKS = {
    "gemma1": "GemmaCausalLM",
    "gemma2": "GemmaCausalLM",
    "gemma3": "Gemma3CausalLM",
    "llama": "Llama3CausalLM",
    "mistral": "MistralCausalLM",
    "qwen2": "QwenCausalLM",
    "qwen3": "Qwen3CausalLM",
    "phi3": "Phi3CausalLM",
    "gpt2": "GPT2CausalLM",
    "opt": "OPTCausalLM",
}


def build(family: str, dtype: Any = "float32") -> Any:
    """A fresh backbone of ``family``."""
    return BUILDERS[family](dtype)


def causal_lm(family: str, dtype: Any = "float32") -> Any:
    """The generating task of a decoder family, without preprocessor (token ids in, token ids out)."""
    import keras_hub

    task = getattr(keras_hub.models, _TASKS[family])
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
