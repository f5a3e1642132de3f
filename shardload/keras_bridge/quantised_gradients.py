"""Gradients through an output layer that is quantised to int8, which Keras 3.15 lacks.

Keras' dense layers round their inputs to int8, and pass gradients on as if they had not. Its `ReversibleEmbedding` does
not: rounding has no gradient, so all that reaches the layers below comes from the scale of the rounding, and points
anywhere. LoRA in a model with such an output layer does not learn. Here it gets the gradient of the dense layers::

    logits = round(x · s) @ codes / (s · scale)          d logits / d x = codes / scale
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
from keras import ops

from shardload.keras_bridge.patches import Patches, replacing


def int8_gradients() -> AbstractContextManager[None]:
    """Inside the block, output layers in int8 pass gradients on; what they compute stays the same, bit for bit."""
    return _PATCHES.applied()


@replacing
def _int8_call(original: Any, layer: Any, inputs: Any, reverse: bool = False) -> Any:
    if not reverse or getattr(layer, "inputs_quantizer", None) is None:
        return original(layer, inputs, reverse=reverse)

    @jax.custom_gradient  # type: ignore[untyped-decorator]
    def logits_of(x: Any) -> Any:
        logits = original(layer, x, reverse=True)

        def gradient(upstream: Any) -> Any:
            if (cap := layer.logit_soft_cap) is not None:
                upstream = upstream * (1 - ops.square(logits / cap))
            if layer.tie_weights:
                codes, scale = ops.transpose(layer._embeddings), ops.transpose(layer.embeddings_scale)
            else:
                codes, scale = layer.reverse_embeddings, layer.reverse_embeddings_scale
            kernel = ops.divide(ops.cast(codes, layer.compute_dtype), scale)  # (dim, vocabulary)
            return ops.cast(ops.matmul(upstream, ops.transpose(kernel)), x.dtype)

        return logits, gradient

    return logits_of(inputs)


_PATCHES = Patches(lambda: [(keras.layers.ReversibleEmbedding, "_int8_call", _int8_call)])
