"""Models that share layers and variables, nest models, and save values with hooks of their own.

Every builder returns the same model each time.
"""

from pathlib import Path

import keras
import numpy as np

LAYERS = keras.layers
registered = keras.saving.register_keras_serializable("saving_models")


@registered
class Logits(LAYERS.Layer):
    """Has the table of an embedding as an attribute, and a weight of its own."""

    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")

    def call(self, x):
        return keras.ops.matmul(x, keras.ops.transpose(self.table)) * self.scale


@registered
class Tied(keras.Model):
    """A head that holds the table of the embedding."""

    def __init__(self, **named):
        super().__init__(**named)
        self.embedding, self.head = LAYERS.Embedding(7, 4), Logits()

    def build(self, shape):
        self.embedding.build(shape)
        self.head.table = self.embedding.embeddings
        self.head.build((*shape, 4))
        self.built = True

    def call(self, ids):
        return self.head(self.embedding(ids))


def tied():
    model = Tied()
    model.build((None, 3))
    return model


@registered
class Containers(keras.Model):
    """Layers in lists and dicts, one of them twice; a variable of its own, and names that files use themselves."""

    def __init__(self, **named):
        super().__init__(**named)
        self.all = [LAYERS.Dense(2), {"x": LAYERS.Dense(3), "y": [LAYERS.Dense(4), (LAYERS.Dense(5),)]}]
        self.again = self.all[0]
        self.vars, self._private = LAYERS.Dense(3), LAYERS.Dense(2)

    def build(self, shape):
        self.own = self.add_weight(shape=(3,))
        one, nested = self.all
        for layer in (one, nested["x"], nested["y"][0], nested["y"][1][0], self.vars, self._private):
            layer.build(shape)
        self.built = True

    def call(self, x):
        return self.all[0](x)


def containers():
    model = Containers()
    model.build((None, 4))
    return model


class Passing(LAYERS.Layer):
    """Has an output of the shape of its input: the input itself, where a subclass does not say otherwise."""

    def call(self, x):
        return x

    def compute_output_shape(self, shape):
        return shape


class Hooked(Passing):
    """Two weights, and a hook of its own."""

    def build(self, shape):
        self.a = self.add_weight(shape=(4,), initializer="ones")
        self.b = self.add_weight(shape=(2,), initializer="ones")

    def call(self, x):
        return x * self.a * keras.ops.sum(self.b)

    def load_own_variables(self, store):
        self.a.assign(store["a"])
        self.b.assign(store["b"])


@registered
class Named(Hooked):
    def save_own_variables(self, store):
        store["b"] = self.b
        store["a"] = self.a


@registered
class InFolders(Hooked):
    def save_own_variables(self, store):
        store["in/a"], store["in/b"] = self.a, self.b

    def load_own_variables(self, store):
        self.a.assign(store["in/a"])
        self.b.assign(store["in/b"])


@registered
class Collecting(Passing):
    """Saves the variables of the layer inside, which Keras also saves itself."""

    def __init__(self, **named):
        super().__init__(**named)
        self.inner = LAYERS.Dense(4)

    def build(self, shape):
        self.inner.build(shape)

    def call(self, x):
        return self.inner(x)

    def save_own_variables(self, store):
        store["kernel"] = self.inner.kernel

    def load_own_variables(self, store):
        self.inner.kernel.assign(store["kernel"])


@registered
class Counting(Named):
    """Saves a number that is no variable."""

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["seen"] = np.int64(5)

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.seen = int(np.array(store["seen"]))


@registered
class Doubling(Named):
    def save_own_variables(self, store):
        store["a"], store["b"] = self.a * 2, self.b

    def load_own_variables(self, store):
        self.a.assign(np.array(store["a"]) / 2)
        self.b.assign(store["b"])


@registered
class Forgetful(Named):
    """Saves one of its weights."""

    def save_own_variables(self, store):
        store["a"] = self.a

    def load_own_variables(self, store):
        self.a.assign(store["a"])


@registered
class AsNumPy(Named):
    def save_own_variables(self, store):
        store["a"], store["b"] = np.asarray(self.a), np.asarray(self.b)


@registered
class State(Passing):
    """Variables of odd dtypes and shapes that are not trained."""

    def build(self, shape):
        for name, dtype, of in (("step", "int32", ()), ("flag", "bool", (3,)), ("byte", "uint8", (2, 1))):
            setattr(self, name, self.add_weight(shape=of, dtype=dtype, initializer="zeros", trainable=False))


@registered
class Empty(Passing):
    """Variables without elements, which HDF5 stores and Orbax does not."""

    def build(self, shape):
        self.none = self.add_weight(shape=(0, 4))
        self.counts = self.add_weight(shape=(0,), dtype="int32", initializer="zeros", trainable=False)


def around(*layers):
    """A builder of a small model with layers of these classes in its middle."""
    return lambda: keras.Sequential([keras.Input((4,)), LAYERS.Dense(4), *(of() for of in layers), LAYERS.Dense(2)])


def shared():
    """One layer called twice, and one model called by itself and in another."""
    x, one = keras.Input((4,)), LAYERS.Dense(4)
    inner = keras.Sequential([keras.Input((4,)), LAYERS.Dense(4), LAYERS.LayerNormalization()])
    return keras.Model(x, [inner(one(one(x))), inner(x)])


def nested():
    inner = keras.Sequential([keras.Input((4,)), LAYERS.Dense(4), LAYERS.BatchNormalization()])
    x = keras.Input((4,))
    middle = keras.Model(x, LAYERS.Dense(4)(inner(x)))
    return keras.Sequential([keras.Input((4,)), middle, keras.Sequential([LAYERS.Dense(3)])])


def owned_twice():
    """Layers that also are in other layers, which Keras cannot describe."""
    x, one = keras.Input((3, 4)), LAYERS.Dense(4)
    y = LAYERS.SpectralNormalization(one)(LAYERS.TimeDistributed(one)(x))
    inner = keras.Sequential([keras.Input((3, 4)), one])
    return keras.Model(x, [one(y), keras.Sequential([keras.Input((3, 4)), inner])(y)])


def wrapped():
    x = keras.Input((3, 4))
    y = LAYERS.Bidirectional(LAYERS.GRU(2, return_sequences=True), backward_layer=LAYERS.LSTM(
        2, return_sequences=True, go_backwards=True))(x)  # fmt: skip
    y = LAYERS.Bidirectional(LAYERS.RNN([LAYERS.SimpleRNNCell(2), LAYERS.SimpleRNNCell(3)], return_sequences=True))(y)
    inner = keras.Sequential([keras.Input((6,)), LAYERS.Dense(2), LAYERS.BatchNormalization()])
    return keras.Model(x, LAYERS.TimeDistributed(LAYERS.SpectralNormalization(LAYERS.Dense(2)))(
        LAYERS.TimeDistributed(inner)(y)))  # fmt: skip


def mixed():
    kinds = ("mixed_bfloat16", "bfloat16", "float16")
    made = [LAYERS.Dense(4, dtype=kind) for kind in kinds]
    return keras.Sequential([keras.Input((4,)), *made, LAYERS.BatchNormalization(dtype="bfloat16")])


def quantised(mode):
    def make():
        layers = [LAYERS.Embedding(8, 4), LAYERS.EinsumDense("bti,io->bto", (None, 4)), LAYERS.Dense(2)]
        model = keras.Sequential([keras.Input((4,), dtype="int32"), *layers])
        model.quantize(mode)
        return model

    return make


@registered
class Adversaries(keras.Model):
    """Two networks, of which one has an optimizer besides the compiled one."""

    def __init__(self, **named):
        super().__init__(**named)
        self.one, self.two, self.second = LAYERS.Dense(2), LAYERS.Dense(2), keras.optimizers.Adam()

    def build(self, shape):
        self.one.build(shape)
        self.two.build(shape)
        self.second.build(self.two.trainable_variables)
        self.built = True

    def call(self, x):
        return self.one(x) + self.two(x)


def adversaries():
    model = Adversaries()
    model.build((None, 4))
    return model


def spectrogram():
    layer = LAYERS.STFTSpectrogram(frame_length=8, frame_step=4, fft_length=8)
    return keras.Sequential([keras.Input((32, 1)), layer, LAYERS.Dense(2)])


@registered
class Undecided(keras.Model):
    """Has optimizers as attributes, which were not built."""

    def __init__(self, **named):
        super().__init__(**named)
        self.one, self.second = LAYERS.Dense(2), keras.optimizers.Adam(0.25)
        self.third = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.125))

    def build(self, shape):
        self.one.build(shape)
        self.built = True

    def call(self, x):
        return self.one(x)


def undecided():
    model = Undecided()
    model.build((None, 4))
    return model


def scaled():
    """Compiled with an optimizer in another, and with a compiled model inside."""
    inner = keras.Sequential([keras.Input((4,)), LAYERS.Dense(3)])
    inner.compile(keras.optimizers.Adam(0.5), "mse")
    model = keras.Sequential([keras.Input((4,)), inner, LAYERS.Dense(2)])
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.25)), "mse")
    return model


def before_spectral():
    x, one = keras.Input((4,)), LAYERS.Dense(4)
    return keras.Model(x, LAYERS.SpectralNormalization(one)(one(x)))


def after_spectral():
    x, one = keras.Input((4,)), LAYERS.Dense(4)
    return keras.Model(x, one(LAYERS.SpectralNormalization(one)(x)))


def before_steps():
    x, one = keras.Input((3, 4)), LAYERS.Dense(4)
    return keras.Model(x, LAYERS.TimeDistributed(one)(one(x)))


def after_steps():
    x, one = keras.Input((3, 4)), LAYERS.Dense(4)
    return keras.Model(x, one(LAYERS.TimeDistributed(one)(x)))


def one_cell():
    x, cell = keras.Input((3, 4)), LAYERS.GRUCell(4)
    return keras.Model(x, LAYERS.RNN(cell)(LAYERS.RNN(cell, return_sequences=True)(x)))


def copied_cells():
    """A cell twice in what is copied, and a layer used twice, which makes Keras look for what is shared."""
    x, one, cell = keras.Input((3, 4)), LAYERS.Dense(4), LAYERS.GRUCell(4)
    y = LAYERS.Bidirectional(LAYERS.RNN([cell, LAYERS.LSTMCell(4), cell], return_sequences=True), merge_mode="sum")(x)
    return keras.Model(x, LAYERS.TimeDistributed(one)(one(y)))


@keras.saving.register_keras_serializable("saving_models")
class Weighing(keras.layers.Layer):
    """As ``StringLookup(output_mode="tf_idf")``, which needs TensorFlow: words, and weights that are no Variable."""

    def call(self, x):
        return x

    def save_own_variables(self, store):
        store["idf_weights"] = self.weights_const

    def load_own_variables(self, store):
        self.weights_const = np.asarray(store["idf_weights"])

    def save_assets(self, folder):
        (Path(folder) / "words.txt").write_text("cat dog")

    def load_assets(self, folder):
        self.table = dict(zip((Path(folder) / "words.txt").read_text().split(), self.weights_const, strict=True))
