"""What shardload/keras_bridge relies on in Keras beyond its public API. A new Keras release must pass this first.

Pinned against Keras 3.15.1 on JAX 0.10.2. Each test names one seam; where it fails, read that seam's upstream
source before touching anything else.
"""

import inspect

import grain
import jax
import keras
import numpy as np
import pytest
from keras.src.backend.common import global_state, variables
from keras.src.backend.jax import core as jax_core
from keras.src.backend.jax import trainer
from keras.src.backend.jax.core import JaxVariable
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_api, saving_lib, serialization_lib
from keras.src.saving.keras_saveable import KerasSaveable
from keras.src.trainers.epoch_iterator import EpochIterator

from shardload.errors import LayoutError, MismatchError
from shardload.keras_bridge.compiled_steps import jitted_in
from shardload.keras_bridge.model_state import OptimizerState, policy_name, slots_of, state_of, weights_of
from shardload.keras_bridge.quantising import quantisation_config, quantise_layer
from shardload.keras_bridge.recording import (
    GLOBAL_GENERATOR,
    GLOBAL_SEED,
    UNINITIALISED,
    record_variables,
    registered_variables,
    seeded,
    unregistered,
)
from shardload.keras_bridge.saving import saved_objects
from shardload.keras_bridge.training import (
    epoch_iterator_of_caller,
    epoch_iterator_of_fit,
    forget_epoch_length,
    grain_dataset,
    initial_epoch_of_fit,
    set_initial_epoch,
)
from shardload.keras_bridge.variables import (
    copied,
    direct_assign,
    is_built_in,
    pending_of,
    release_from_mesh,
    set_layout,
    sharding_of,
)
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec
from shardload.transfer.placement import named_sharding

MESH = MeshSpec.parse("2x4")


def test_the_version_is_the_one_these_seams_were_read_in():
    assert keras.__version__.startswith("3.15.")


def test_a_variable_has_the_private_attributes():
    variable = keras.Variable(np.ones(3, "float32"), name="v")
    assert isinstance(variable, JaxVariable) and isinstance(variable._value, jax.Array)
    assert (variable._initializer, variable._layout, variable._dtype) == (None, None, "float32")


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
        (trainer, "_distribute_data", ["data"]),
        (trainer.JAXTrainer, "_make_function", ["self", "step_function"]),
        (keras.Operation, "_post_build", ["self"]),
        (jax_core, "cast", ["x", "dtype"]),
        (keras.quantizers.AbsMaxQuantizer, "__call__", ["self", "x", "axis", "to_numpy"]),
        (saving_lib, "_load_state", ["saveable", "weights_store", "assets_store", "inner_path"]),
        (saving_lib, "get_attr_skipset", ["obj_type"]),
        (saving_lib, "_walk_saveable", ["saveable"]),
        (saving_lib, "_get_unique_name", ["name", "used_names"]),
        (saving_lib, "_serialize_model_as_json", ["model"]),
        (saving_lib, "_save_assets_to_dict", ["model"]),
        (saving_lib.DiskIOStore, "__init__", ["self", "root_path", "archive", "mode"]),
    ],
)
def test_patched_methods_and_called_functions_have_their_signature(owner, name, parameters):
    assert list(inspect.signature(vars(owner)[name]).parameters)[: len(parameters)] == parameters


def test_assign_is_inherited_so_that_a_replacement_can_be_deleted_again():
    assert "assign" not in vars(JaxVariable)


def test_reading_a_variable_without_value_calls_its_initializer():
    variable = keras.Variable("ones", shape=(2,))
    variable._value, variable._initializer = None, lambda shape, dtype: (shape, dtype)
    assert variable.value == ((2,), "float32")


def test_the_waiting_list_is_a_list_in_thread_local_state():
    with keras.StatelessScope(initialize_variables=False):
        variable = keras.Variable("zeros", shape=(1,))
    assert global_state.get_global_attribute(UNINITIALISED) == [variable]
    assert unregistered() == [variable]
    assert registered_variables() == []


def test_a_seed_generators_state_is_recognised():
    with record_variables():
        state = keras.random.SeedGenerator(7).state
    assert pending_of(state).exact
    np.testing.assert_array_equal(state.value, [7, 0])


def test_assignment_keeps_a_sharded_buffer():
    variable = keras.Variable(np.zeros((8, 4), "float32"))
    set_layout(variable, Layout(MESH, (("model",), ("batch",))), jax.devices())
    array = jax.device_put(np.ones((8, 4), "float32"), sharding_of(variable))
    variable.assign(array)
    assert variable._value is array
    direct_assign(variable, array)
    assert variable._value is array


def test_a_named_sharding_serves_as_layout():
    variable = keras.Variable(np.zeros((8, 4), "float32"))
    set_layout(variable, Layout(MESH, (("batch", "model"), ())), jax.devices())
    variable.assign(np.ones((8, 4)))
    assert [s.data.shape for s in variable.value.addressable_shards] == [(1, 4)] * 8


def test_direct_assignment_refuses_what_does_not_fit():
    variable = keras.Variable(np.zeros((8, 4), "float32"), name="v")
    with pytest.raises(MismatchError, match=r"assign float32 \(4, 8\) to variable 'v': expected float32 \(8, 4\)"):
        direct_assign(variable, jax.numpy.zeros((4, 8)))
    with pytest.raises(MismatchError, match="Cannot assign bfloat16"):
        direct_assign(variable, jax.numpy.zeros((8, 4), "bfloat16"))
    with pytest.raises(LayoutError, match="does not divide"):
        set_layout(variable, Layout(MESH, ((), ("batch", "model"))), jax.devices())
    set_layout(variable, Layout(MESH, ((), ("model",))), jax.devices())
    with pytest.raises(MismatchError, match="Cannot assign an array on"):
        direct_assign(variable, jax.numpy.zeros((8, 4)))


def test_optimizers_take_a_layout_from_the_reference_variable():
    variable = keras.Variable(np.zeros((8, 4), "float32"))
    set_layout(variable, Layout(MESH, (("model",), ())), jax.devices())
    optimizer = keras.optimizers.Adam()
    optimizer.build([variable])
    assert optimizer._trainable_variables == [variable]
    assert all(slot._layout is variable._layout for slot in optimizer._momentums + optimizer._velocities)


def test_optimizers_look_up_what_creates_a_slot_on_themselves_and_read_a_layout_of_the_reference():
    weight = keras.Variable(np.zeros((8, 4), "float32"))
    set_layout(weight, Layout(MESH, (("model",), ())), jax.devices())
    stand_in = copied(weight, named_sharding(Layout(MESH, (("model",), ("batch",))), jax.devices()))
    optimizer, create = keras.optimizers.Adam(), keras.optimizers.Adam.add_variable_from_reference
    optimizer.__dict__["add_variable_from_reference"] = lambda v, **options: create(optimizer, stand_in, **options)
    optimizer.build([weight])
    assert [slot._layout for slot in optimizer._momentums + optimizer._velocities] == [stand_in._layout] * 2
    assert weight._layout != stand_in._layout and "momentum" in optimizer._momentums[0].path


@pytest.mark.parametrize("name", ["Adam", "SGD", "AdamW", "Lion", "RMSprop", "Adagrad", "Nadam", "Ftrl", "Adafactor"])
def test_slots_are_found_in_every_optimizer(name):
    weights = [keras.Variable(np.zeros(shape, "float32")) for shape in ((6, 4), (8,))]
    model = keras.Sequential([])
    model.optimizer = getattr(keras.optimizers, name)(**({"momentum": 0.9} if name == "SGD" else {}))
    model.optimizer.build(weights)
    same_shape = [v for v in model.optimizer.variables if v.shape in ((6, 4), (8,))]
    assert {id(slot) for slot, _ in slots_of(model)} == set(map(id, same_shape))


def test_slots_are_found_behind_a_loss_scale():
    weights = [keras.Variable(np.zeros((8, 4), "float32"))]
    model = keras.Sequential([])
    model.optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
    model.optimizer.build(weights)
    assert [weight for _, weight in slots_of(model)] == weights * 2


def test_one_operation_of_a_program_can_be_bound_alone():
    for equation in jax.make_jaxpr(lambda x: keras.random.normal((4,), seed=1) * x)(2.0).jaxpr.eqns:
        assert isinstance(equation.primitive.get_bind_params(equation.params), dict)


def test_a_models_call_is_looked_up_on_the_instance():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.__dict__["call"] = lambda *_, **__: "instance"
    assert model(np.ones((1, 2))) == "instance"


def test_state_covers_samplers_metrics_and_seeds():
    import models

    with record_variables():
        lm = models.causal_lm("gpt2")
        lm.compile("adam", "mse", sampler="top_k", weighted_metrics=["mae"])
    state = state_of(lm)
    ids = set(map(id, state))
    assert len(ids) == len(state) and {id(v) for v in lm.sampler.variables} <= ids
    assert {id(v) for v in lm.optimizer.variables} <= ids
    assert {id(v) for v in lm.metrics_variables} <= ids
    assert [*map(id, weights_of(lm))] == [*map(id, [*lm.variables, *lm.optimizer.variables])]


def small_model():
    """An input, and one layer with a kernel and a bias."""
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, name="dense")], name="small")


def test_layers_are_flattened_from_the_model_itself_down():
    inner = small_model()
    outer = keras.Sequential([keras.Input((2,)), inner])
    assert [*map(id, outer._flatten_layers())][:1] == [id(outer)]
    assert {id(inner), id(inner.layers[-1])} <= set(map(id, outer._flatten_layers()))


def test_a_layer_keeps_what_it_stores_in_two_lists():
    layer = keras.layers.BatchNormalization()
    layer.build((None, 2))
    assert [v.name for v in layer._trainable_variables] == ["gamma", "beta"]
    assert [v.name for v in layer._non_trainable_variables] == ["moving_mean", "moving_variance"]


def test_a_layer_lists_its_seed_generators():
    layer = keras.layers.Dropout(0.5, seed=1)
    assert [*map(id, layer._seed_generators)] == [id(layer.seed_generator)]


@pytest.mark.parametrize("argument", ["metrics", "weighted_metrics"])
def test_metrics_handed_to_compile_are_kept_as_they_were_given(argument):
    model, metric = small_model(), keras.metrics.MeanSquaredError()
    model.compile("sgd", "mse", **{argument: [metric]})
    private = {"metrics": "_user_metrics", "weighted_metrics": "_user_weighted_metrics"}[argument]
    assert keras.tree.flatten(getattr(model._compile_metrics, private)) == [metric]
    assert not set(map(id, metric.variables)) & set(map(id, model.metrics_variables))
    assert set(map(id, metric.variables)) <= set(map(id, state_of(model)))


def test_a_metric_says_in_private_which_direction_is_better():
    assert [m()._direction for m in (keras.metrics.Accuracy, keras.metrics.MeanSquaredError)] == ["up", "down"]


def test_a_layers_policy_may_be_a_map_by_path():
    policies = keras.dtype_policies.DTypePolicyMap(default_policy="mixed_bfloat16")
    layer = keras.layers.Dense(3, dtype=policies, name="dense")
    layer.build((None, 2))
    policies[layer.path] = "int8_from_float32"
    assert layer._dtype_policy is layer.dtype_policy is policies
    assert policy_name(layer) == "int8_from_float32"
    assert keras.layers.Dense(3, dtype="float16")._dtype_policy == keras.DTypePolicy("float16")


@pytest.mark.parametrize("mode", ["int8", "int4", "int4/2"])
def test_a_kernel_without_values_is_quantised_as_one_with_values(mode):
    config = quantisation_config(mode)
    with record_variables():
        layers = keras.layers.Dense(3), keras.layers.EinsumDense("ab,cbd->acd", (5, 3))
        for layer in layers:
            layer.build((None, 2))
            quantise_layer(layer, config)
    others = keras.layers.Dense(3), keras.layers.EinsumDense("ab,cbd->acd", (5, 3))
    for layer, other in zip(layers, others, strict=True):
        other.build((None, 2))
        other.quantize(config=config)
        found, wanted = ([(v.name, v.shape, v.dtype, v.trainable) for v in o.weights] for o in (layer, other))
        assert found == wanted
        assert layer.dtype_policy == other.dtype_policy and layer._is_quantized
        ignored = ("name", "quantization_config")
        found, wanted = ({k: v for k, v in o.get_config().items() if k not in ignored} for o in (layer, other))
        assert found == wanted


def test_safe_mode_is_what_the_innermost_scope_says():
    before = serialization_lib.in_safe_mode()
    with serialization_lib.SafeModeScope(True):
        with serialization_lib.SafeModeScope(False):
            assert serialization_lib.in_safe_mode() is False
        assert serialization_lib.in_safe_mode() is True
    assert serialization_lib.in_safe_mode() is before


def test_a_symbolic_tensor_knows_the_operation_and_its_inputs():
    source = keras.KerasTensor((2,))
    history = keras.ops.exp(source)._keras_history
    assert history.operation._inbound_nodes[history.node_index].input_tensors == [source]


def test_initializers_of_keras_are_told_by_their_module():
    assert is_built_in(keras.initializers.GlorotUniform())
    assert type(keras.initializers.GlorotUniform()).__module__.startswith("keras.src.initializers.")


def test_an_optimizer_tracks_by_id_in_stores_that_can_be_put_back():
    optimizer = keras.optimizers.Adam()
    before, built = OptimizerState.of(optimizer), [keras.Variable(np.zeros(2, "float32"))]
    tracked = {name: set(ids) for name, ids in optimizer._tracker.stored_ids.items()}
    optimizer.build(built)
    assert optimizer._tracker.stored_ids != tracked
    before.restore()
    assert optimizer._tracker.stored_ids == tracked and not optimizer.built


def test_what_is_saved_is_found_by_walking_saveables():
    model = small_model()
    assert all(isinstance(part, KerasSaveable) for part in (model, model.layers[-1], keras.optimizers.SGD()))
    assert "layers" in {name for name, _ in saving_lib._walk_saveable(model)}
    assert [path for path, part in saved_objects(model) if part is model.layers[-1]] == ["layers/dense"]


def test_a_model_without_assets_has_none():
    assert saving_lib._save_assets_to_dict(small_model()) is None
    assert '"class_name": "Sequential"' in saving_lib._serialize_model_as_json(small_model())[0]


def batches():
    """Endless batches of Grain's, of inputs and targets."""
    data = [(np.ones(2, "float32"), np.ones(3, "float32"))] * 6
    return grain.MapDataset.source(data).repeat().batch(2).to_iter_dataset()


def test_the_adapter_of_grain_keeps_the_dataset_and_the_iterator_its_length():
    data = batches()
    epochs = EpochIterator(x=data)
    assert epochs.data_adapter._dataset is data and grain_dataset(epochs) is data
    epochs._num_batches = 1
    forget_epoch_length(epochs)
    assert epochs._num_batches == epochs.data_adapter.num_batches


class Looking(keras.callbacks.Callback):
    """Notes which iterator the running fit has, and in which epochs."""

    def on_train_begin(self, logs=None):
        self.found, self.epochs = epoch_iterator_of_fit(), []
        self.given = initial_epoch_of_fit()
        set_initial_epoch(self.model, 2)

    def on_epoch_begin(self, epoch, logs=None):
        self.epochs.append(epoch)


def test_fit_has_a_local_variable_epoch_iterator_and_starts_where_it_is_told():
    model, looking, data = small_model(), Looking(), batches()
    model.compile("sgd", "mse")
    model.fit(data, epochs=4, steps_per_epoch=1, shuffle=False, verbose=0, callbacks=[looking], initial_epoch=1)
    assert looking.given == 1 and initial_epoch_of_fit() == 0
    assert "epoch_iterator" in inspect.unwrap(trainer.JAXTrainer.fit).__code__.co_varnames
    assert grain_dataset(looking.found) is data and looking.epochs == [2, 3]
    assert epoch_iterator_of_fit() is None


def test_a_dataset_is_opened_from_inside_a_method_of_the_epoch_iterator():
    found = []

    class Noting(grain.IterDataset):
        def __iter__(self):
            found.append(epoch_iterator_of_caller())
            return iter(self._parent)

    epochs = trainer.JAXEpochIterator(x=Noting(batches()), steps_per_epoch=2)
    assert len([begin for begin, _, _ in epochs]) == 2 and found[-1] is epochs
    assert isinstance(epochs, EpochIterator)


def test_seeds_are_kept_where_set_random_seed_puts_them():
    keras.utils.set_random_seed(5)
    assert global_state.get_global_attribute(GLOBAL_SEED) == 5
    assert global_state.get_global_attribute(GLOBAL_GENERATOR) is None
    keras.random.uniform(())
    generator = global_state.get_global_attribute(GLOBAL_GENERATOR)
    assert isinstance(generator, keras.random.SeedGenerator)
    with seeded(6):
        assert global_state.get_global_attribute(GLOBAL_SEED) == 6
    assert global_state.get_global_attribute(GLOBAL_GENERATOR) is generator


@pytest.mark.parametrize(
    ("module", "name", "arguments"),
    [
        (saving_lib, "load_model", ["filepath", "custom_objects", "compile", "safe_mode"]),
        (saving_api, "_load_model_from_orbax_checkpoint", ["filepath", "custom_objects", "compile", "safe_mode"]),
        (saving_lib, "load_weights_only", ["model", "filepath", "skip_mismatch", "objects_to_skip"]),
        (saving_api, "load_weights", ["model", "filepath", "skip_mismatch", "kwargs"]),
        (legacy_h5_format, "load_model_from_hdf5", ["filepath", "custom_objects", "compile", "safe_mode"]),
        (legacy_h5_format, "load_weights_from_hdf5_group", ["group", "model", "skip_mismatch"]),
        (legacy_h5_format, "load_weights_from_hdf5_group_by_name", ["group", "model", "skip_mismatch"]),
    ],
)
def test_what_loads_has_these_arguments(module, name, arguments):
    assert list(inspect.signature(getattr(module, name)).parameters) == arguments


def test_public_functions_call_them_by_their_names_in_a_module():
    called = {
        saving_api.load_model: (
            "saving_lib.load_model(",
            "_load_model_from_orbax_checkpoint(",
            "load_model_from_hdf5(",
        ),
        saving_api.load_weights: ("saving_lib.load_weights_only(", "legacy_h5_format.load_weights_from_hdf5_group("),
        keras.Model.load_weights: ("saving_api.load_weights(",),
    }
    for function, names in called.items():
        assert [name for name in names if name not in inspect.getsource(inspect.unwrap(function))] == []


def test_names_of_layers_are_counted_in_a_global_attribute():
    keras.layers.Dense(3)
    assert global_state.get_global_attribute("object_name_uids")["dense"] >= 1


def test_an_array_may_be_uncommitted_with_the_buffer_of_another():
    variable = keras.Variable(np.ones(3, "float32"))
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("model",))
    direct_assign(variable, jax.device_put(np.ones(3, "float32"), jax.NamedSharding(mesh, jax.P())))
    pointer = variable.value.unsafe_buffer_pointer()
    assert release_from_mesh(variable, committed=False) and not release_from_mesh(variable, committed=False)
    assert variable.value.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert not variable.value.committed and variable.value.unsafe_buffer_pointer() == pointer


def test_the_jitted_functions_of_keras_steps_are_found():
    """compiled_steps: each step is one jitted function, which the made function reaches by variables of known names."""
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
    model.make_predict_function()
    model.make_train_function()
    assert [jitted_in(model.predict_function).__name__, jitted_in(model.train_function).__name__] == [
        "predict_step",
        "<lambda>" if keras.config.is_nnx_enabled() else "train_step",
    ]
    model.compile("sgd", "mse", run_eagerly=True)
    model.make_train_function(force=True)
    assert jitted_in(model.train_function) is None


def test_a_stateless_scope_takes_specs_for_values():
    """compiled_steps: a spec in ``state_mapping`` is what `Variable.value` returns, unchanged."""
    variable = keras.Variable(np.zeros(3, "float32"))
    spec = jax.ShapeDtypeStruct((3,), np.float32)
    with keras.StatelessScope(initialize_variables=False) as scope:
        scope.state_mapping[id(variable)] = spec
        assert variable.value is spec


def test_what_jax_compiled_ahead_serves_the_call():
    """compiled_steps: lowering and compiling for specs fills the caches that a call of the same function looks in."""
    traced = []
    step = jax.jit(lambda x: traced.append(1) or x * 2)
    step.trace(jax.ShapeDtypeStruct((3,), np.float32)).lower().compile()
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patched:
        compiled = []
        patched.setattr(jax._src.compiler, "backend_compile_and_load", lambda *a, **k: compiled.append(1))
        step(np.zeros(3, np.float32))
    assert (traced, compiled) == ([1], [])
