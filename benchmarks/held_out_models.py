"""Eleven small models of real architectures that no rule of the search was written for: `held_out` yields them.

    KerasHub  Whisper, DeBERTa v3 and a T5 with gates and 6 heads, which neither 4 nor 8 devices divide
    here      a U-Net with attention, a selective state space (Mamba), message passing on a graph, experts with a
              capacity, a decoder with tied embeddings, two towers with logits within the batch, a masked bidirectional
              LSTM, and linear algebra in loops

All are functional models, so that their inputs are known. Batch sizes divide by 8.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras import layers, ops

WIDTH = 256
VOCABULARY = 8192


def held_out() -> Iterator[tuple[str, Callable[[], Any]]]:
    """Return the models by name, in the form of `benchmarks.layouts.others`."""
    import keras_hub

    hub = keras_hub.models
    yield "whisper", lambda: hub.WhisperBackbone(VOCABULARY, 2, 8, 512, 2048, max_encoder_sequence_length=256)
    yield "deberta_v3", lambda: hub.DebertaV3Backbone(VOCABULARY, 2, 12, 768, 3072, bucket_size=64)
    yield "t5_gated", lambda: hub.T5Backbone(VOCABULARY, 2, 6, 512, 1024, key_value_dim=64, activation="gelu")
    yield "unet", unet
    yield "mamba", mamba
    yield "graph", graph
    yield "experts", experts
    yield "tied_decoder", tied_decoder
    yield "two_towers", two_towers
    yield "masked_bilstm", masked_bilstm
    yield "linear_algebra", linear_algebra


# ---- images ------------------------------------------------------------------------------------------


def unet() -> Any:
    """Build a denoising U-Net of three resolutions: residual blocks, attention at the lowest, joined channels."""
    image, time = keras.Input((32, 32, 4), name="image"), keras.Input((64,), name="time")
    moment = layers.Dense(WIDTH, activation="silu")(time)
    y, skips = layers.Conv2D(64, 3, padding="same")(image), []
    for channels in (64, 128):
        y = _residual(y, moment, channels)
        skips.append(y)
        y = layers.Conv2D(channels, 3, strides=2, padding="same")(y)
    y = _residual(y, moment, WIDTH)
    rows = layers.Reshape((64, WIDTH))(layers.GroupNormalization(8)(y))
    y = y + layers.Reshape((8, 8, WIDTH))(layers.MultiHeadAttention(8, WIDTH // 8)(rows, rows))
    for channels in (128, 64):
        y = layers.Conv2D(channels, 3, padding="same")(layers.UpSampling2D()(y))
        y = _residual(layers.Concatenate()([y, skips.pop()]), moment, channels)
    return keras.Model([image, time], layers.Conv2D(4, 3, padding="same")(y))


def _residual(x: Any, moment: Any, channels: int) -> Any:
    y = layers.Conv2D(channels, 3, padding="same")(ops.silu(layers.GroupNormalization(8)(x)))
    y = y + layers.Reshape((1, 1, channels))(layers.Dense(channels)(moment))
    y = layers.Conv2D(channels, 3, padding="same")(ops.silu(layers.GroupNormalization(8)(y)))
    return y + (x if x.shape[-1] == channels else layers.Conv2D(channels, 1)(x))


# ---- sequences ---------------------------------------------------------------------------------------


class SelectiveScan(layers.Layer):
    """The mixer of a Mamba block: one projection cut in two, a causal convolution, and a recurrence over time."""

    def __init__(self, state: int = 16, rank: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.state, self.rank = state, rank

    def build(self, shape: Any) -> None:
        """Create the projections, and the decay of each state of each channel."""
        width, inner = shape[-1], 2 * shape[-1]
        self.in_proj = layers.Dense(2 * inner, use_bias=False, name="in_proj")
        self.convolution = layers.DepthwiseConv1D(4, padding="valid", name="convolution")
        self.x_proj = layers.Dense(self.rank + 2 * self.state, use_bias=False, name="x_proj")
        self.dt_proj = layers.Dense(inner, name="dt_proj")
        self.out_proj = layers.Dense(width, use_bias=False, name="out_proj")
        self.in_proj.build(shape)
        self.convolution.build((*shape[:-1], inner))
        self.x_proj.build((*shape[:-1], inner))
        self.dt_proj.build((*shape[:-1], self.rank))
        self.out_proj.build((*shape[:-1], inner))
        self.a_log = self.add_weight(shape=(inner, self.state), initializer="zeros", name="a_log")
        self.skip = self.add_weight(shape=(inner,), initializer="ones", name="skip")

    def call(self, x: Any) -> Any:
        """Return the mixed sequence: (batch, time, width)."""
        x, z = ops.split(self.in_proj(x), 2, axis=-1)
        x = ops.silu(self.convolution(ops.pad(x, ((0, 0), (3, 0), (0, 0)))))
        dt, b, c = ops.split(self.x_proj(x), (self.rank, self.rank + self.state), axis=-1)
        dt, a = ops.softplus(self.dt_proj(dt)), -ops.exp(self.a_log)

        def step(carried: Any, now: Any) -> Any:
            x, dt, b, c = now
            kept = carried * ops.exp(dt[..., None] * a)
            carried = kept + (dt * x)[..., None] * b[:, None, :]
            return carried, ops.einsum("bis,bs->bi", carried, c)

        times = [ops.swapaxes(each, 0, 1) for each in (x, dt, b, c)]
        start = ops.zeros((ops.shape(x)[0], x.shape[-1], self.state))
        _, y = ops.scan(step, start, tuple(times))
        return self.out_proj((ops.swapaxes(y, 0, 1) + x * self.skip) * ops.silu(z))


def mamba() -> Any:
    """Build two blocks of a Mamba on token ids, with logits."""
    tokens = keras.Input((None,), dtype="int32")
    y = layers.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(2):
        y = y + SelectiveScan()(layers.RMSNormalization()(y))
    return keras.Model(tokens, layers.Dense(VOCABULARY, use_bias=False)(layers.RMSNormalization()(y)))


class CapacityExperts(layers.Layer):
    """Experts as in GShard: two per token, each with room for some tokens of a sequence, by einsum of one-hot masks."""

    def __init__(self, experts: int = 8, hidden: int = 1024, factor: float = 1.25, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.experts, self.hidden, self.factor = experts, hidden, factor

    def build(self, shape: Any) -> None:
        """Create the router and the stacked kernels."""
        width = shape[-1]
        self.router = self.add_weight(shape=(width, self.experts), name="router")
        self.into = self.add_weight(shape=(self.experts, width, self.hidden), name="into")
        self.out = self.add_weight(shape=(self.experts, self.hidden, width), name="out")

    def call(self, x: Any) -> Any:
        """Return the sum of each token's experts; a token that finds no room gets zero."""
        capacity = math.ceil(2 * self.factor * x.shape[1] / self.experts)
        shares = ops.softmax(ops.einsum("bsd,de->bse", x, self.router))
        weights, chosen = ops.top_k(shares, 2)
        combine, taken = 0.0, 0.0
        for choice in range(2):
            mask = ops.one_hot(chosen[..., choice], self.experts)
            place = (ops.cumsum(mask, axis=1) - 1 + taken) * mask
            taken = taken + ops.sum(mask, axis=1, keepdims=True)
            mask = mask * ops.cast(place < capacity, mask.dtype)
            room = ops.one_hot(ops.cast(ops.sum(place * mask, axis=-1), "int32"), capacity)
            combine = combine + ops.einsum("bs,bse,bsc->bsec", weights[..., choice], mask, room)
        dispatch = ops.cast(combine > 0, x.dtype)
        given = ops.einsum("bsec,bsd->ebcd", dispatch, x)
        hidden = ops.relu(ops.einsum("ebcd,edh->ebch", given, self.into))
        return ops.einsum("bsec,ebcd->bsd", combine, ops.einsum("ebch,ehd->ebcd", hidden, self.out))


def experts() -> Any:
    """Build two transformer blocks with experts of limited capacity, on 128 vectors."""
    y = inputs = keras.Input((128, WIDTH))
    for _ in range(2):
        normal = layers.LayerNormalization()(y)
        y = y + layers.MultiHeadAttention(8, WIDTH // 8)(normal, normal, use_causal_mask=True)
        y = y + CapacityExperts()(layers.LayerNormalization()(y))
    return keras.Model(inputs, y)


def tied_decoder() -> Any:
    """Build a decoder whose embedding also computes the logits."""
    import keras_hub

    tokens = keras.Input((None,), dtype="int32")
    embedding = keras_hub.layers.ReversibleEmbedding(VOCABULARY, 512)
    y = embedding(tokens)
    for _ in range(2):
        y = keras_hub.layers.TransformerDecoder(2048, 8, normalize_first=True)(y)
    return keras.Model(tokens, embedding(layers.LayerNormalization()(y), reverse=True))


def masked_bilstm() -> Any:
    """Build a tagger: embeddings with a mask of padding, and two LSTMs in both directions."""
    tokens = keras.Input((None,), dtype="int32")
    y = layers.Embedding(VOCABULARY, 128, mask_zero=True)(tokens)
    for _ in range(2):
        y = layers.Bidirectional(layers.LSTM(WIDTH, return_sequences=True))(y)
    return keras.Model(tokens, layers.Dense(32)(y))


# ---- others ------------------------------------------------------------------------------------------


class Messages(layers.Layer):
    """Message passing: a message along each edge from both of its nodes, summed at the receiver."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.message = layers.Dense(width, activation="relu", name="message")
        self.update = layers.Dense(width, name="update")

    def build(self, nodes_shape: Any, senders_shape: Any, receivers_shape: Any) -> None:
        """Build both layers for pairs of node vectors."""
        self.message.build((None, 2 * nodes_shape[-1]))
        self.update.build((None, nodes_shape[-1] + self.message.units))

    def call(self, nodes: Any, senders: Any, receivers: Any) -> Any:
        """Return the new vectors of the nodes."""
        pairs = [ops.take(nodes, senders, axis=0), ops.take(nodes, receivers, axis=0)]
        sums = ops.segment_sum(self.message(ops.concatenate(pairs, axis=-1)), receivers, num_segments=nodes.shape[0])
        return nodes + self.update(ops.concatenate([nodes, sums], axis=-1))


def graph() -> Any:
    """Build two rounds of message passing on one graph of 1,024 nodes and 4,096 edges."""
    nodes = keras.Input(batch_shape=(1024, WIDTH), name="nodes")
    senders, receivers = (keras.Input(batch_shape=(4096,), dtype="int32", name=n) for n in ("senders", "receivers"))
    y = nodes
    for _ in range(2):
        y = Messages(WIDTH)(layers.LayerNormalization()(y), senders, receivers)
    return keras.Model([nodes, senders, receivers], layers.Dense(16)(y))


def two_towers() -> Any:
    """Build two towers for retrieval: every user of the batch is compared with every item of the batch."""
    user, item = (keras.Input((8,), dtype="int32", name=name) for name in ("user", "item"))

    def tower(ids: Any) -> Any:
        y = ops.mean(layers.Embedding(VOCABULARY, 128)(ids), axis=1)
        for units in (512, 128):
            y = layers.Dense(units, activation="relu")(y)
        return layers.UnitNormalization()(layers.Dense(64)(y))

    return keras.Model([user, item], ops.matmul(tower(user), ops.transpose(tower(item))) / 0.05)


class MatrixSquareRoot(layers.Layer):
    """The square root of a covariance by Newton and Schulz, after a projection to the largest directions of a kernel.

    The directions are found by orthogonal iteration (QR). A power iteration finds the largest singular value of the
    kernel, which is divided by it.
    """

    def __init__(self, directions: int = 64, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.directions = directions

    def build(self, shape: Any) -> None:
        """Create the kernel and the start of the orthogonal iteration."""
        self.kernel = self.add_weight(shape=(shape[-1], shape[-1]), name="kernel")
        self.start = self.add_weight(shape=(shape[-1], self.directions), name="start")

    def call(self, x: Any) -> Any:
        """Return the square roots of the covariances of (batch, rows, width): (batch, directions, directions)."""

        def power(_: Any, v: Any) -> Any:
            v = ops.matmul(ops.transpose(self.kernel), ops.matmul(self.kernel, v))
            return v / ops.sqrt(ops.sum(v * v))

        v = ops.fori_loop(0, 3, power, ops.ones((x.shape[-1], 1)) / x.shape[-1])
        kernel = self.kernel / ops.sqrt(ops.sum(ops.matmul(self.kernel, v) ** 2))
        q = ops.fori_loop(0, 3, lambda _, q: ops.qr(ops.matmul(kernel, q))[0], ops.qr(self.start)[0])
        x = ops.matmul(x, q)
        covariance = ops.einsum("brd,bre->bde", x, x) / x.shape[1]
        unit = ops.eye(self.directions)
        size = ops.trace(covariance, axis1=-2, axis2=-1)[:, None, None]

        def newton(_: Any, found: Any) -> Any:
            y, z = found
            step = (3 * unit - ops.matmul(z, y)) / 2
            return ops.matmul(y, step), ops.matmul(step, z)

        y, _ = ops.fori_loop(0, 5, newton, (covariance / size, covariance * 0 + unit))
        return y * ops.sqrt(size)


def linear_algebra() -> Any:
    """Build a classifier by the square root of a covariance (iSQRT-COV): power, QR and Newton iterations in loops."""
    inputs = keras.Input((128, WIDTH))
    y = MatrixSquareRoot()(layers.Dense(WIDTH, activation="relu")(inputs))
    return keras.Model(inputs, layers.Dense(64)(layers.Flatten()(y)))
