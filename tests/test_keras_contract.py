"""What shardload/_keras.py relies on in Keras beyond its public API. A new Keras release must pass this first.

Pinned against Keras 3.15.1 on JAX 0.10.2. Each test names one seam; where it fails, read that seam's upstream
source before touching anything else.
"""

import inspect

import jax
import keras
import numpy as np
import pytest
from keras.src.backend.common import global_state, variables
from keras.src.backend.jax import trainer
from keras.src.backend.jax.core import JaxVariable

from shardload import _keras
from shardload.errors import LayoutError, MismatchError
from shardload.layout import Layout
from shardload.mesh import MeshSpec

MESH = MeshSpec.parse("2x4")


def test_the_version_is_the_one_these_seams_were_read_in():
    assert keras.__version__.startswith("3.15.")


def test_a_variable_has_the_private_attributes():
    variable = keras.Variable(np.ones(3, "float32"), name="v")
    assert isinstance(variable, JaxVariable)
    assert isinstance(variable._value, jax.Array)
    assert variable._initializer is None
    assert variable._layout is None
    assert variable._dtype == "float32"


@pytest.mark.parametrize(
    ("owner", "name", "parameters"),
    [
        (variables.Variable, "__init__", ["self", "initializer", "shape", "dtype"]),
        (variables.Variable, "_deferred_initialize", ["self"]),
        (variables.Variable, "assign", ["self", "value"]),
        (JaxVariable, "_initialize_with_initializer", ["self", "initializer"]),
        (JaxVariable, "_initialize_layout", ["self"]),
        (trainer.JAXEpochIterator, "_get_distributed_iterator", ["self", "distribution"]),
        (trainer.JAXTrainer, "_check_sharding_consistency", ["self", "trainable_shardings"]),
    ],
)
def test_patched_methods_have_their_signature(owner, name, parameters):
    assert list(inspect.signature(vars(owner)[name]).parameters)[: len(parameters)] == parameters


def test_reading_a_variable_without_value_calls_its_initializer():
    variable = keras.Variable("ones", shape=(2,))
    variable._value, variable._initializer = None, lambda shape, dtype: (shape, dtype)
    assert variable.value == ((2,), "float32")


def test_the_waiting_list_is_a_list_in_thread_local_state():
    with keras.StatelessScope(initialize_variables=False):
        variable = keras.Variable("zeros", shape=(1,))
    assert global_state.get_global_attribute(_keras.UNINITIALISED) == [variable]
    assert _keras.unregistered() == [variable]
    assert _keras.registered() == []


def test_a_seed_generators_state_is_recognised():
    with _keras.record_variables():
        state = keras.random.SeedGenerator(7).state
    assert _keras.pending_of(state).exact
    np.testing.assert_array_equal(state.value, [7, 0])


def test_assignment_keeps_a_sharded_buffer():
    variable = keras.Variable(np.zeros((8, 4), "float32"))
    _keras.set_layout(variable, Layout(MESH, (("model",), ("batch",))), jax.devices())
    array = jax.device_put(np.ones((8, 4), "float32"), _keras.sharding_of(variable))
    variable.assign(array)
    assert variable._value is array
    _keras.direct_assign(variable, array)
    assert variable._value is array


def test_a_named_sharding_serves_as_layout():
    variable = keras.Variable(np.zeros((8, 4), "float32"))
    _keras.set_layout(variable, Layout(MESH, (("batch", "model"), ())), jax.devices())
    variable.assign(np.ones((8, 4)))
    assert [s.data.shape for s in variable.value.addressable_shards] == [(1, 4)] * 8


def test_direct_assignment_refuses_what_does_not_fit():
    variable = keras.Variable(np.zeros((8, 4), "float32"), name="v")
    with pytest.raises(MismatchError, match=r"'v' is float32 \(8, 4\), but was given float32 \(4, 8\)"):
        _keras.direct_assign(variable, jax.numpy.zeros((4, 8)))
    with pytest.raises(MismatchError, match="given bfloat16"):
        _keras.direct_assign(variable, jax.numpy.zeros((8, 4), "bfloat16"))
    with pytest.raises(LayoutError, match="does not divide"):
        _keras.set_layout(variable, Layout(MESH, ((), ("batch", "model"))), jax.devices())
    _keras.set_layout(variable, Layout(MESH, ((), ("model",))), jax.devices())
    with pytest.raises(MismatchError, match="lives on"):
        _keras.direct_assign(variable, jax.numpy.zeros((8, 4)))


def test_optimizers_take_a_layout_from_the_reference_variable():
    variable = keras.Variable(np.zeros((8, 4), "float32"))
    _keras.set_layout(variable, Layout(MESH, (("model",), ())), jax.devices())
    optimizer = keras.optimizers.Adam()
    optimizer.build([variable])
    assert optimizer._trainable_variables == [variable]
    assert all(slot._layout is variable._layout for slot in optimizer._momentums + optimizer._velocities)


@pytest.mark.parametrize("name", ["Adam", "SGD", "AdamW", "Lion", "RMSprop", "Adagrad", "Nadam", "Ftrl", "Adafactor"])
def test_slots_are_found_in_every_optimizer(name):
    weights = [keras.Variable(np.zeros(shape, "float32")) for shape in ((6, 4), (8,))]
    model = keras.Sequential([])
    model.optimizer = getattr(keras.optimizers, name)(**({"momentum": 0.9} if name == "SGD" else {}))
    model.optimizer.build(weights)
    same_shape = [v for v in model.optimizer.variables if v.shape in ((6, 4), (8,))]
    assert {id(slot) for slot, _ in _keras.slots_of(model)} == set(map(id, same_shape))


def test_slots_are_found_behind_a_loss_scale():
    weights = [keras.Variable(np.zeros((8, 4), "float32"))]
    model = keras.Sequential([])
    model.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.optimizer.build(weights)
    assert [weight for _, weight in _keras.slots_of(model)] == weights * 2


def test_one_operation_of_a_program_can_be_bound_alone():
    closed = jax.make_jaxpr(lambda x: keras.random.normal((4,), seed=1) * x)(2.0)
    for equation in closed.jaxpr.eqns:
        assert isinstance(equation.primitive.get_bind_params(equation.params), dict)


def test_a_models_call_is_looked_up_on_the_instance():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.__dict__["call"] = lambda *_, **__: "instance"
    assert model(np.ones((1, 2))) == "instance"


def test_state_covers_samplers_metrics_and_seeds():
    import models

    with _keras.record_variables():
        lm = models.causal_lm("gpt2")
        lm.compile("adam", "mse", sampler="top_k", weighted_metrics=["mae"])
    state = _keras.state_of(lm)
    ids = set(map(id, state))
    assert len(ids) == len(state)
    assert {id(v) for v in lm.sampler.variables} <= ids
    assert {id(v) for v in lm.optimizer.variables} <= ids
    assert {id(v) for v in lm.metrics_variables} <= ids
    assert [*map(id, _keras.weights_of(lm))] == [*map(id, [*lm.variables, *lm.optimizer.variables])]
