"""Layers of Keras and families of KerasHub meet no primitive of JAX without a rule, but for those in `GATHERED`."""

import jax
import keras
import keras_layers
import pytest
from keras_layers import LAYERS, OTHERS, SHAPES, applied, is_preprocessing

import shardload
from benchmarks import layouts
from shardload.layout_search.tracing import input_specs, record_program, trace
from shardload.parallel import search

GATHERED = {"fnet": {"fft"}}
"""Primitives whose operands are needed whole, which the notes of a plan say, by what uses them."""


def layer_names():
    """Every class of `keras.layers` with a program, but for those of input pipelines, which Keras runs elsewhere."""
    return sorted(n for n, c in keras_layers.classes().items() if n not in OTHERS and not is_preprocessing(c))


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
            model = keras.Model(x, applied(name, y))
            recorded = record_program(model, jax.ShapeDtypeStruct(shape, dtype), training=True)
        except Exception as error:
            errors.append(f"{dtype}{list(shape)}: {type(error).__name__}: {str(error)[:200]}")
        else:
            return trace(recorded).program
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
    recorded = record_program(model, input_specs(model, batch=8, sequence=16), training=True)
    assert set(trace(recorded).program.unknown) == GATHERED.get(family, set())


def test_a_plan_says_which_primitives_have_no_rule_where_it_is_printed():
    x = keras.Input((16,))
    plan = search(keras.Model(x, LAYERS.Dense(8)(keras.ops.real(keras.ops.fft((x, 0 * x))[0]))), "1x2", batch=8)
    said = "no rule for fft (x1): its operands count as gathered, its results as replicated"
    assert f"note: {said}" in str(plan).splitlines() and said in plan.to_json()["notes"]
