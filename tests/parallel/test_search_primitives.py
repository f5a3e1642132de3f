"""Layers of Keras and families of KerasHub meet no primitive of JAX without a rule, but for those in `GATHERED`."""

import inspect

import jax
import jax.numpy as jnp
import keras
import pytest

import shardload
from benchmarks import layouts
from shardload.parallel import search
from shardload.parallel.layout_search.tracing import input_specs, record, trace

GATHERED = {"fnet": {"fft"}}
"""Primitives whose operands are needed whole, which the notes of a plan say, by what uses them."""
SHAPES = [(8, 16), (8, 12, 16), (8, 16, 16, 3), (8, 6, 8, 8, 4), (2, 3, 8, 8, 8, 4)]
"""Batches of features, steps and pixels; a layer is given the first that it takes."""
LAYERS = keras.layers
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
LEFT_OUT = {"FlaxLayer", "InputLayer", "JaxLayer", "Layer", "TFSMLayer", "TorchModuleWrapper", "Wrapper"}
"""What has no program of its own, or another library's. Keras runs its preprocessing layers with TensorFlow."""


def layer_names():
    """Every class of `keras.layers` once, though some have several names, but for those of input pipelines."""
    found = {c: n for n, c in reversed(vars(LAYERS).items()) if inspect.isclass(c) and issubclass(c, LAYERS.Layer)}
    return sorted({n for c, n in found.items() if ".preprocessing." not in c.__module__} - LEFT_OUT)


def layer_of(name):
    arguments = WITH_LAYERS[name]() if name in WITH_LAYERS else ARGUMENTS.get(name, [])
    layer = getattr(LAYERS, name)(*arguments)
    return LAYERS.RNN(layer) if name.endswith(("Cell", "Cells")) else layer


class Scaled(LAYERS.Layer):
    """One weight for all: with it before a layer, a step has gradients that pass through the layer."""

    def build(self, shape):
        self.scale = self.add_weight(shape=())

    def call(self, x):
        return x * self.scale


def program_of(name):
    """The training step of a model with that layer, on the first batch that the layer takes."""
    errors = []
    for shape, dtype in [*((shape, "float32") for shape in SHAPES), (SHAPES[0], "int32")]:
        x = keras.Input(batch_shape=shape, dtype=dtype)
        y = Scaled()(x) if dtype == "float32" else x
        try:
            layer = layer_of(name)
            made = layer(y, y) if name in QUERY_AND_VALUE else layer([y, y] if name in SEVERAL else y)
            model = keras.Model(x, made)
            recorded = record(model, jax.ShapeDtypeStruct(shape, dtype), training=True)
        except Exception as error:
            errors.append(f"{dtype}{list(shape)}: {type(error).__name__}: {str(error)[:200]}")
        else:
            return trace(recorded, divisors=(2, 4)).program
    raise AssertionError("\n".join(errors))


@pytest.mark.parametrize("name", layer_names())
def test_every_primitive_of_a_layer_has_a_rule(name):
    assert not program_of(name).unknown


FAMILIES = dict([*layouts.decoders(), *layouts.others()])


# Families warn of masks and states of their own.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.sample(3)
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_primitive_of_a_family_has_a_rule(family):
    with shardload.abstract():
        model = FAMILIES[family]()
    recorded = record(model, input_specs(model, batch=8, sequence=16), training=True)
    assert set(trace(recorded, divisors=(2, 4)).program.unknown) == GATHERED.get(family, set())


def test_a_plan_says_which_primitives_have_no_rule_where_it_is_printed():
    x = keras.Input((16,))
    plan = search(keras.Model(x, LAYERS.Dense(8)(keras.ops.real(keras.ops.fft((x, 0 * x))[0]))), "1x2", batch=8)
    said = "no rule for fft (x1): its operands count as gathered, its results as replicated"
    assert f"note: {said}" in str(plan).splitlines()
    assert said in plan.to_json()["notes"]
