"""Random Keras models as recipes: lists of JSON, so that one model can be made several times, shown and shrunk.

Every block maps a batch of four features to another, so blocks go into each other in any way::

    ["plain", "dense", "bfloat16"]     one layer of that policy; "" is the global one
    ["class", "Conv2D"]                that class of `keras.layers`, between a Dense layer that makes its input and one
                                       that makes features of its output
    ["again", 3]                       the third object that was made, used once more
    ["spectral", B]  ["holder", B]     a wrapper of Keras; a layer that gets another as an argument
    ["times", B]                       `TimeDistributed`
    ["cells", "rnn", [0, 1, 0]]        `RNN` or `Bidirectional` with these cells, of which each is made once
    ["hook", "Named"]                  a layer with hooks of its own, of `saving_models`
    ["sequential", [B, …]]  ["functional", [B, …]]  ["owner", {…}, [B, …]]
"""

import json

import keras
import keras_layers
import numpy as np
import saving_models
from hypothesis import strategies as st
from saving_models import LAYERS

registered = keras.saving.register_keras_serializable("random_models")
WIDTH = 4
PLAIN = {
    "dense": lambda **named: LAYERS.Dense(WIDTH, **named),
    **{name: lambda **named: LAYERS.Dense(WIDTH, **named) for name in ("lora", "int8")},
    "einsum": lambda **named: LAYERS.EinsumDense("bi,io->bo", WIDTH, **named),
    "batch": LAYERS.BatchNormalization,
    "layer": LAYERS.LayerNormalization,
    "rms": LAYERS.RMSNormalization,
    "prelu": LAYERS.PReLU,
    "normal": LAYERS.Normalization,
    "dropout": lambda **named: LAYERS.Dropout(0.5, **named),
    "noise": lambda **named: LAYERS.GaussianNoise(0.1, seed=3, **named),
    "identity": LAYERS.Identity,
    "spectral": lambda **named: LAYERS.SpectralNormalization(LAYERS.Dense(WIDTH, **named)),
}
POLICIES = ["", "", "", "mixed_bfloat16", "bfloat16", "float16", "float32"]
INPUTS = {
    (16,): ["AdditiveAttention", "Attention", "BatchNormalization", "Dense", "EinsumDense", "GroupNormalization",
            "LayerNormalization", "Normalization", "PReLU", "RMSNormalization", "SpectralNormalization"],
    (2, 16): ["Conv1DTranspose", "GroupQueryAttention", "MultiHeadAttention", "TimeDistributed"],
    (4, 4): ["Conv1D", "DepthwiseConv1D", "SeparableConv1D"],
    (2, 4): ["Bidirectional", "GRU", "GRUCell", "LSTM", "LSTMCell", "RNN", "SimpleRNN", "SimpleRNNCell",
             "StackedRNNCells"],
    (4, 4, 1): ["Conv2D", "Conv2DTranspose", "DepthwiseConv2D", "SeparableConv2D"],
    (2, 4, 2): ["ConvLSTM1D"],
    (2, 3, 3, 1): ["ConvLSTM2D"],
    (3, 3, 3, 1): ["Conv3D", "Conv3DTranspose"],
    (1, 3, 3, 3, 1): ["ConvLSTM3D"],
    (): ["Embedding", "ReversibleEmbedding"],
}  # fmt: skip
"""Classes by the shape of one example; of `()`, those of integers."""
CLASSES = {name: shape for shape, names in INPUTS.items() for name in names}
CELLS = [lambda: LAYERS.GRUCell(WIDTH), lambda: LAYERS.LSTMCell(WIDTH), lambda: LAYERS.SimpleRNNCell(WIDTH)]
HOOKS = ["Named", "InFolders", "Collecting", "State", "Counting", "Doubling", "Forgetful", "AsNumPy", "Empty"]
OPTIMIZERS = {
    "": lambda: None,
    "adam": lambda: keras.optimizers.Adam(0.25),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.5, 2, 0.5), momentum=0.5),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop(0.125)),
    "ema": lambda: keras.optimizers.AdamW(use_ema=True),
}
WRITTEN = ["step", "live.weights.h5", "parts.weights.json", "keras.keras"]
CONVERSIONS = [f"{source} {target}" for source in WRITTEN for target in ("h5.weights.h5", "json.weights.json", "orbax")]
"""Each source that a model is written to, and each target."""
ATTRIBUTES = ["a", "_b", "vars", "backbone", "zoo", "layer", "table"]


class Made:
    """What was made for one recipe so far."""

    def __init__(self):
        self.blocks, self.cells, self.lora, self.int8 = [], {}, [], []

    def note(self, block):
        self.blocks.append(block)
        return block

    def cell(self, number):
        return self.cells.setdefault(number, CELLS[number % len(CELLS)]())


def layer_of(recipe, made):
    """The layer or model of a block."""
    kind, *rest = recipe
    match kind:
        case "plain":
            name, policy = rest
            layer = made.note(PLAIN[name](**({"dtype": policy} if policy else {})))
            if name in ("lora", "int8"):
                getattr(made, name).append(layer)
            return layer
        case "hook":
            return made.note(getattr(saving_models, rest[0])())
        case "again" if made.blocks:
            return made.blocks[rest[0] % len(made.blocks)]
        case "again":
            return layer_of(["plain", "dense", ""], made)
        case "spectral":
            return made.note(LAYERS.SpectralNormalization(layer_of(["plain", "dense", ""], made)))
        case "holder":
            return made.note(Holder(layer_of(rest[0], made)))
        case "sequential":
            return made.note(sequential(rest[0], made))
        case "functional":
            return made.note(functional(rest[0], made))
        case "owner":
            return made.note((OwnerModel if rest[0]["model"] else OwnerLayer)(rest[0], rest[1]))
        case _:
            x = keras.Input((WIDTH,))
            return made.note(keras.Model(x, called(recipe, x, made)))


def called(recipe, x, made):
    """The result of a block in a functional model."""
    kind, *rest = recipe
    match kind:
        case "class":
            return around(rest[0], x)
        case "times":
            steps = LAYERS.RepeatVector(2)(x)
            return LAYERS.GlobalAveragePooling1D()(LAYERS.TimeDistributed(layer_of(rest[0], made))(steps))
        case "cells":
            cells = [made.cell(number) for number in rest[1]]
            rnn = LAYERS.RNN(cells if len(cells) > 1 else cells[0])
            rnn = LAYERS.Bidirectional(rnn, merge_mode="sum") if rest[0] == "both" else rnn
            return rnn(LAYERS.RepeatVector(2)(x))
        case _:
            return layer_of(recipe, made)(x)


def around(name, x):
    shape = CLASSES[name]
    x = LAYERS.Dense(int(np.prod(shape or (3,))))(x)
    x = LAYERS.Reshape(shape)(x) if shape else keras.ops.cast(keras.ops.greater(x, 0.0), "int32")
    x = keras_layers.applied(name, x)
    return LAYERS.Dense(WIDTH)(LAYERS.Flatten()(x))


def sequential(blocks, made):
    return keras.Sequential([keras.Input((WIDTH,)), *(distinct(blocks, made))])


def distinct(blocks, made):
    """The layers of the blocks; a sequential model takes each once."""
    found = {id(layer): layer for layer in (layer_of(block, made) for block in blocks)}
    return list(found.values())


def functional(blocks, made):
    """A chain; every third block starts at the input again, and what is left open is added up."""
    x = start = keras.Input((WIDTH,))
    ends = []
    for i, block in enumerate(blocks):
        if i % 3 == 2:
            ends.append(x)
            x = start
        x = called(block, x, made)
    return keras.Model(start, LAYERS.Add()([*ends, x]) if ends else x)


@registered
class Holder(LAYERS.Layer):
    """Gets a layer as an argument, and describes it as Keras' wrappers do."""

    def __init__(self, inner, **named):
        super().__init__(**named)
        self.inner = inner

    def build(self, shape):
        if not self.inner.built:
            self.inner.build(shape)

    def call(self, x):
        return self.inner(x)

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return {**super().get_config(), "inner": keras.saving.serialize_keras_object(self.inner)}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config.pop("inner")), **config)


class Owner:
    """Has blocks in attributes, lists, dicts and tuples, and other things that Keras tracks or saves."""

    def __init__(self, options, blocks, **named):
        super().__init__(**named)
        self.options, self.recipe = json.dumps(options), json.dumps(blocks)
        made = Made()
        parts = distinct(blocks, made)
        self.made_for_lora, self.order = tuple(made.lora), len(parts)
        match options["style"]:
            case "list":
                self.parts = parts
            case "tuple":
                self.parts = tuple(parts)
            case "dict":
                self.parts = {f"k{i}": part for i, part in enumerate(parts)}
            case "nested":
                self.parts = [parts[:1], {"x": tuple(parts[1:2]), "y": [parts[2:]]}]
            case "attributes":
                for name, part in zip(ATTRIBUTES, parts, strict=False):
                    setattr(self, name, part)
                self.parts = parts[len(ATTRIBUTES) :]
        if options["alias"]:
            self.zz_alias = {"again": [parts[0], parts[-1]]}
        if options["optimizer"]:
            self.second = OPTIMIZERS[options["optimizer"]]()
        if options["metric"]:
            self.mean = keras.metrics.Mean()
        if options["seed"]:
            self.generator = keras.random.SeedGenerator(5)
        if options["raw"]:
            self.raw = keras.Variable(np.ones((2, 3), "float32"), name="raw")

    def chain(self):
        if isinstance(self.parts, dict):
            return list(self.parts.values())
        found = [getattr(self, name) for name in ATTRIBUTES if hasattr(self, name)]
        parts = self.parts
        if parts and isinstance(parts[0], (list, tuple)):
            parts = [*parts[0], *parts[1]["x"], *parts[1]["y"][0]]
        return [*found, *parts]

    def build(self, shape):
        options = json.loads(self.options)
        for part in self.chain():
            if not part.built:
                part.build(shape)
        if options["own"]:
            self.own = self.add_weight(shape=(WIDTH,), initializer="ones", name="own")
        if options["built"] and options["optimizer"]:
            self.second.build(self.trainable_variables)
        self.built = True

    def call(self, x):
        for part in self.chain():
            x = part(x)
        return x * self.own if json.loads(self.options)["own"] else x

    def compute_output_shape(self, shape):
        return shape

    def get_config(self):
        return {"name": self.name, "options": json.loads(self.options), "blocks": json.loads(self.recipe)}


@registered
class OwnerLayer(Owner, LAYERS.Layer):
    pass


@registered
class OwnerModel(Owner, keras.Model):
    pass


def make(recipe):
    """The model of a recipe; every time the same one."""
    before = keras.config.dtype_policy()
    try:
        keras.config.set_dtype_policy(recipe["policy"])
        made = Made()
        model = layer_of(recipe["root"], made)
        if not model.built:
            model.build((None, WIDTH))
        for layer in made.int8:
            layer.quantize("int8")
        for layer in made.lora:
            layer.enable_lora(2)
        optimizer = OPTIMIZERS[recipe["optimizer"]]()
        if optimizer is not None:
            model.compile(optimizer, "mse")
            if recipe["built"]:
                model.optimizer.build(model.trainable_variables)
        return model
    finally:
        keras.config.set_dtype_policy(before)


def _listed(*kinds):
    return st.tuples(*kinds).map(list)


leaves = st.one_of(
    _listed(st.just("plain"), st.sampled_from(sorted(set(PLAIN) - {"lora", "int8"})), st.sampled_from(POLICIES)),
    _listed(st.just("class"), st.sampled_from(sorted(CLASSES))),
    _listed(st.just("hook"), st.sampled_from(HOOKS[:4])),
    _listed(st.just("again"), st.integers(0, 9)),
    _listed(st.just("cells"), st.sampled_from(["rnn", "both"]), st.lists(st.integers(0, 3), min_size=1, max_size=3)),
)
rare = st.one_of(
    _listed(st.just("plain"), st.sampled_from(["lora", "int8"]), st.just("")),
    _listed(st.just("hook"), st.sampled_from(HOOKS[4:])),
)
options = st.fixed_dictionaries(
    {
        "model": st.booleans(),
        "style": st.sampled_from(["list", "tuple", "dict", "nested", "attributes"]),
        "optimizer": st.sampled_from(["", "", *OPTIMIZERS]),
        **{name: st.booleans() for name in ("alias", "metric", "seed", "raw", "own", "built")},
    }
)


def _around(blocks):
    several = st.lists(blocks, min_size=1, max_size=4)
    return st.one_of(
        _listed(st.just("sequential"), several),
        _listed(st.just("functional"), several),
        _listed(st.just("owner"), options, several),
        _listed(st.just("holder"), blocks),
        _listed(st.just("spectral"), st.just([])),
        _listed(st.just("times"), blocks),
    )


blocks = st.recursive(st.one_of(leaves, leaves, leaves, leaves, rare), _around, max_leaves=6)
_several = st.lists(blocks, min_size=1, max_size=4)
recipes = st.fixed_dictionaries(
    {
        "policy": st.sampled_from(["float32", "float32", "mixed_bfloat16", "bfloat16", "mixed_float16"]),
        "optimizer": st.sampled_from(["", "", *OPTIMIZERS]),
        "built": st.booleans(),
        "conversions": st.lists(st.sampled_from(CONVERSIONS), min_size=1, max_size=2, unique=True),
        "root": st.one_of(
            _listed(st.just("sequential"), _several),
            _listed(st.just("functional"), _several),
            _listed(st.just("owner"), options.map(lambda found: {**found, "model": True}), _several),
        ),
    }
)
