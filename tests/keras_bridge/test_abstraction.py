"""Building without allocating, and late initialisation: no buffer, no run, no compile; the same bits."""

import subprocess
import sys
import threading
import weakref

import jax
import keras
import models
import numpy as np
import pytest
from keras.src.backend.common import variables
from keras.src.backend.jax.core import JaxVariable

import shardload
from shardload.errors import UninitialisedError, UnsupportedError
from shardload.keras_bridge.abstraction import abstract, check_initialised, initialise, is_abstract, uninitialised
from shardload.keras_bridge.model_state import state_of
from shardload.keras_bridge.recording import registered_variables, unregistered
from shardload.keras_bridge.variables import direct_assign, drop_value, has_value, recording, set_layout, sharding_of
from shardload.sharding.layout import Layout
from shardload.sharding.mesh import MeshSpec


class Custom(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(8)
        self.scale = self.add_weight(shape=(8,), initializer="ones")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x) * self.scale


def built_custom():
    model = Custom()
    model.build((None, 4))
    return model


def attention():
    x = keras.Input((5, 8))
    return keras.Model(x, keras.layers.LayerNormalization()(keras.layers.MultiHeadAttention(2, 8)(x, x)))


def batch_norm():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.BatchNormalization()])


L = keras.layers
PLAIN = {
    "lstm": lambda: keras.Sequential([keras.Input((5, 3)), L.LSTM(8), L.Dropout(0.5)]),
    "normalization": lambda: keras.Sequential([keras.Input((4,)), L.Normalization(), L.Dense(8)]),
    "quantized": lambda: keras.Sequential([keras.Input((8,)), L.Dense(16, dtype="int8_from_float32")]),
} | {f.__name__: f for f in (built_custom, batch_norm, attention, models.conv)}
EVERYTHING = PLAIN | {name: (lambda f=f: f()) for name, f in models.BUILDERS.items()}


def compiled(build):
    model = build()
    model.compile(keras.optimizers.Adam(1e-3), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def bits(model):
    return [np.asarray(v.value).tobytes() for v in state_of(model)]


@pytest.fixture
def compilations():
    seen = []

    def listen(event, seconds, **_):
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("name", EVERYTHING)
def test_nothing_is_allocated_nor_initialised(name, monkeypatch):
    monkeypatch.setattr(keras.initializers.VarianceScaling, "__call__", None)
    monkeypatch.setattr(keras.initializers.RandomNormal, "__call__", None)
    before = sum(a.nbytes for a in jax.live_arrays())
    with shardload.abstract():
        model = compiled(EVERYTHING[name])
    assert all(map(is_abstract, state_of(model)))
    # Constructors' own arithmetic: the scale of Gemma's embeddings, Normalization's mean and variance.
    assert sum(a.nbytes for a in jax.live_arrays()) - before <= 32


@pytest.mark.parametrize("name", sorted(PLAIN.keys() - {"normalization"}))
def test_nothing_is_compiled(name, compilations):
    with abstract():
        compiled(PLAIN[name])
    assert compilations == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["built_custom", "lstm", "normalization", "attention", "quantized", "conv", "gpt2"])
def test_late_initialisation_is_eager_initialisation(name):
    keras.utils.set_random_seed(5)
    eager = compiled(EVERYTHING[name])
    keras.utils.set_random_seed(5)
    with abstract():
        late = compiled(EVERYTHING[name])
    done = initialise(late)
    check_initialised(late)
    assert len(done) == len(state_of(late)) and bits(late) == bits(eager)


class Odd(type):
    """A class made of this is equal to all others and has no hash."""

    def __eq__(cls, other):
        return True

    __hash__ = None


class Holder(metaclass=Odd):
    variables = ()

    def __init__(self, *variables):
        self.variables = list(variables)


class Empty(metaclass=Odd):
    pass


def test_variables_are_found_whatever_holds_them():
    layer = keras.layers.Dense(2)
    seeds, first, second = keras.random.SeedGenerator(1), keras.Variable([1.0]), keras.Variable([2.0])
    layer.attributes = None
    layer.__dict__.update({"a": Empty(), "b": Holder(first), "c": weakref.proxy(second), "d": weakref.proxy(seeds)})
    assert {first.path, second.path, seeds.state.path} <= {v.path for v in state_of(layer)}


INITIALIZERS = [
    "glorot_uniform", "he_normal", "orthogonal", "zeros", "identity",
    keras.initializers.RandomNormal(0.3, 0.7, seed=1), keras.initializers.RandomUniform(-0.3, 0.7, seed=2),
    keras.initializers.TruncatedNormal(0.3, 0.7, seed=3), keras.initializers.Constant(0.1),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("initializer", INITIALIZERS, ids=lambda i: getattr(type(i), "__name__", i))
def test_sharded_initialisation_is_eager_initialisation(initializer, dtype):
    dtype = "float32" if initializer == "orthogonal" else dtype  # JAX has no QR in bfloat16
    mesh = MeshSpec.parse("2x4")
    initializer = keras.initializers.get(initializer)
    eager = keras.Variable(initializer, shape=(64, 64), dtype=dtype)
    for spec in ((("model",), ("batch",)), ((), ())):
        with abstract():
            late = keras.Variable(initializer, shape=(64, 64), dtype=dtype)
        initialise([late], layouts={id(late): Layout(mesh, spec)}, devices=jax.devices())
        assert np.asarray(late.value).tobytes() == np.asarray(eager.value).tobytes()
        assert late.value.sharding.is_equivalent_to(sharding_of(late), 2)


def test_no_device_holds_more_than_its_shards_while_initialising(monkeypatch):
    held = []
    mesh = MeshSpec.parse("1x8")
    with abstract():
        late = keras.Variable(keras.initializers.RandomNormal(seed=1), shape=(1024, 512))

    def sampled(stage):
        def run(*args):
            out = stage(*args)
            held.append(max(shard.data.nbytes for array in out for shard in array.addressable_shards))
            compiled = stage.lower(*args).compile().memory_analysis()
            held.append(compiled.temp_size_in_bytes + compiled.output_size_in_bytes)
            return out

        return run

    monkeypatch.setattr(jax, "jit", lambda *args, jit=jax.jit, **named: sampled(jit(*args, **named)))
    initialise([late], layouts={id(late): Layout.split(mesh, 2, dim=0, axis="model")})
    shard_bytes = late.value.nbytes // 8
    assert max(held) <= 4 * shard_bytes + 4096  # the result and the generator's scratch, never the whole tensor


def test_layouts_of_an_open_distribution_are_recorded():
    device_mesh = keras.distribution.DeviceMesh((2, 4), ["batch", "model"], devices=jax.devices())
    layout_map = keras.distribution.LayoutMap(device_mesh)
    layout_map[".*kernel"] = (None, "model")
    with keras.distribution.ModelParallel(layout_map=layout_map).scope(), abstract():
        layer = keras.layers.Dense(8)
        layer.build((None, 4))
    initialise(layer)
    assert layer.kernel.value.sharding.spec == jax.sharding.PartitionSpec(None, "model")
    assert layer.bias.value.sharding.is_fully_replicated


@pytest.mark.slow
def test_shared_seed_generators_are_drawn_in_order():
    mesh = MeshSpec.parse("1x8")

    def build():
        seed = keras.random.SeedGenerator(9)
        initializer = keras.initializers.RandomNormal(seed=seed)
        return [*(keras.Variable(initializer, shape=(8, 4)) for _ in range(3)), seed.state]

    eager = build()
    with abstract():
        late = build()
    initialise(late[::-1], layouts={id(v): Layout.replicated(mesh, v.ndim) for v in late})
    assert [np.asarray(v.value).tobytes() for v in late] == [np.asarray(v.value).tobytes() for v in eager]


def test_initialisers_that_cannot_be_traced_still_work():
    calls = []

    def initializer(shape, dtype=None):
        calls.append(shape)
        return keras.random.normal(shape, dtype=dtype) * float(keras.random.uniform((), seed=1))

    with abstract():
        variable = keras.Variable(initializer, shape=(8,))
    assert calls == []
    initialise([variable], layouts={id(variable): Layout.split(MeshSpec.parse("1x8"), 1, dim=0, axis="model")})
    assert len(variable.value.sharding.device_set) == 8


def test_small_host_values_are_kept_on_the_host():
    before = len(jax.live_arrays())
    with abstract():
        optimizer = keras.optimizers.Adam(0.25)
        array = keras.Variable(np.arange(6, dtype="float64").reshape(2, 3))
        embedding = keras.layers.Embedding(3, 2, weights=[np.eye(3, 2)])
        embedding.build()
    assert len(jax.live_arrays()) == before
    assert float(optimizer.learning_rate) == 0.25
    assert array.dtype == "float32"
    initialise([array, *embedding.variables, *optimizer.variables])
    np.testing.assert_array_equal(array.value, np.arange(6).reshape(2, 3))
    np.testing.assert_array_equal(embedding.embeddings.value, np.eye(3, 2))


def test_reading_a_missing_value_says_what_to_do():
    with abstract():
        model = PLAIN["conv"]()
    kernel = next(v for v in model.weights if v.path.endswith("kernel"))
    for read in (
        kernel.numpy,
        lambda: kernel + 1,
        lambda: model.predict(np.zeros((1, 16, 16, 3)), verbose=0),
        model.get_weights,
        jax.jit(lambda: kernel.value),
    ):
        with pytest.raises(UninitialisedError, match=r"kernel' has no value.*shardload\.load_weights"):
            read()


class Derived(keras.layers.Layer):
    """As KerasHub's DINOv2 does: one variable is interpolated from another when the layer is built."""

    def build(self, shape):
        self.table = self.add_weight(shape=(4, 3), initializer="normal", name="table")
        self.half = self.add_weight(shape=(2, 3), initializer="zeros", name="half")
        self.half.assign(self.halved())

    def halved(self):
        return keras.ops.mean(keras.ops.reshape(keras.ops.convert_to_tensor(self.table), (2, 2, 3)), axis=1)

    def load_own_variables(self, store):
        self.table.assign(store["0"])
        self.half.assign(self.halved())

    def call(self, x):
        return x @ keras.ops.transpose(self.half)


def test_a_variable_computed_in_build_is_loaded(tmp_path):
    saved = keras.Sequential([keras.Input((3,)), Derived()])
    saved.layers[0].half.assign(np.full((2, 3), 7))  # Keras, too, leaves it unread
    saved.save_weights(tmp_path / "m.weights.h5")
    with abstract():
        model = keras.Sequential([keras.Input((3,)), Derived()])
    report = shardload.load_weights(model, tmp_path / "m.weights.h5", mesh="1x1")
    saved.load_weights(tmp_path / "m.weights.h5")
    for mine, theirs in zip(model.weights, saved.weights, strict=True):
        np.testing.assert_array_equal(mine.value, theirs.value)
    assert report.unused == ()
    assert [note for note in report.notes if "Derived at 'layers/derived' does not read" in note and "vars/1" in note]


@pytest.mark.parametrize("sharded", [False, True])
def test_a_variable_computed_in_build_is_never_initialised(sharded):
    with abstract():
        layer = Derived()
        layer.build((None, 3))
    if sharded:
        set_layout(layer.half, Layout(MeshSpec(("model",), (1,)), ((), ())), jax.devices()[:1])
    with pytest.raises(UninitialisedError, match=r"half' has no value: its layer computes it.*shardload\.load_weights"):
        initialise(layer)
    assert uninitialised(layer) == [layer.half.path]


@pytest.mark.parametrize(
    ("compute", "error", "match"),
    [
        (lambda x: x * 2, UninitialisedError, r"table' has no value inside.*Build the model outside it"),
        (np.asarray, UninitialisedError, "table' has no value"),
        (lambda x: 1 if keras.ops.convert_to_tensor(x) else 0, UninitialisedError, "table' has no value"),
        (lambda x: x.value + 1, UnsupportedError, r"'keeping': it computes \.made .*keeping/table.*load_weights"),
        (lambda x: keras.ops.sum(x[0]) + 1, UnsupportedError, r"computes \.made"),
    ],
)
def test_what_else_a_build_computes_is_refused(compute, error, match):
    class Keeping(keras.layers.Layer):
        def build(self, shape):
            self.table = self.add_weight(shape=(4, 3), name="table")
            self.made = compute(self.table)

    with abstract(), pytest.raises(error, match=match):
        Keeping(name="keeping").build((None, 3))


def test_outside_of_builds_reading_is_refused_inside_the_block_too():
    with abstract():
        model = PLAIN["conv"]()
        with pytest.raises(UninitialisedError, match="has no value"):
            keras.ops.convert_to_tensor(model.weights[0])


def test_what_is_left_is_named():
    with abstract():
        model = built_custom()
    with pytest.raises(UninitialisedError, match=r"No value for 3 variables: .*kernel"):
        check_initialised(model)
    model.dense.kernel.assign(np.zeros((4, 8)))
    assert initialise(model) == [v.path for v in (model.scale, model.dense.bias)]
    assert uninitialised(model) == []


def test_variables_on_keras_waiting_list_are_found():
    with keras.StatelessScope(initialize_variables=False):
        forgotten = keras.Variable("zeros", shape=(2,), name="forgotten")
    with pytest.raises(UninitialisedError, match="forgotten"):
        check_initialised([])
    assert unregistered() == [forgotten]


def test_stateless_scopes_inside_leave_no_debt():
    with abstract(), keras.StatelessScope(initialize_variables=False):
        variable = keras.Variable("zeros", shape=(2,))
    assert registered_variables() == []
    assert is_abstract(variable)
    assert initialise([variable]) == [variable.path]


def test_an_exception_restores_everything():
    seams = [variables.Variable, JaxVariable]
    before = [dict(vars(cls)) for cls in seams]
    with pytest.raises(RuntimeError, match="half-way"), abstract():
        keras.layers.Dense(3).build((2, 2))
        with abstract():
            pass
        assert recording()
        raise RuntimeError("half-way")
    assert [dict(vars(cls)) for cls in seams] == before
    assert not is_abstract(keras.Variable("zeros", shape=(1,)))


def test_other_threads_build_as_always():
    built = []
    with abstract():
        thread = threading.Thread(target=lambda: built.append(keras.Variable(np.ones(3))))
        thread.start()
        thread.join()
        inside = keras.Variable(np.ones(3))
    assert not is_abstract(built[0]) and is_abstract(inside)


def test_layers_made_outside_grow_as_always():
    with abstract():
        model = keras.Sequential([keras.layers.Dense(3)])
    assert model.predict(np.ones((2, 2)), verbose=0).shape == (2, 3)


@pytest.mark.slow
def test_afterwards_the_model_is_an_ordinary_one(tmp_path):
    x, y = np.ones((8, 4), "float32"), np.ones((8, 8), "float32")
    keras.utils.set_random_seed(1)
    source = compiled(batch_norm)
    source.save_weights(tmp_path / "m.weights.h5")
    with abstract():
        model = compiled(batch_norm)
    model.load_weights(tmp_path / "m.weights.h5")
    initialise(model)
    np.testing.assert_array_equal(model.predict(x, verbose=0), source.predict(x, verbose=0))
    model.fit(x, y, verbose=0)
    model.evaluate(x, y, verbose=0)
    model.summary(print_fn=lambda *_, **__: None)
    model.save(tmp_path / "m.keras")
    again = keras.saving.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(model.predict(x, verbose=0), again.predict(x, verbose=0))
    model.load_weights(tmp_path / "m.weights.h5")
    assert keras.models.clone_model(model).count_params() == model.count_params()


def test_fit_without_initialise_names_the_optimizer_slot():
    with abstract():
        model = compiled(lambda: keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))
    model.set_weights([np.ones((2, 1)), np.ones(1)])
    with pytest.raises(UninitialisedError, match="momentum"):
        model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)
    initialise(model)
    model.fit(np.ones((2, 2)), np.ones((2, 1)), verbose=0)


def test_lora_inside_and_after():
    with abstract():
        layer = keras.layers.Dense(8)
        layer.build((None, 4))
        layer.enable_lora(2)
    initialise(layer)
    np.testing.assert_array_equal(layer.lora_kernel_b.value, np.zeros((2, 8)))
    assert layer(np.ones((1, 4))).shape == (1, 8)


def test_quantize_needs_values():
    with abstract():
        layer = keras.layers.Dense(8)
        layer.build((None, 4))
    with pytest.raises(UninitialisedError, match="kernel"):
        layer.quantize("int8")
    initialise(layer)
    layer.quantize("int8")


def test_dropped_values_are_not_made_up():
    variable = keras.Variable(np.ones(3), name="dropped")
    drop_value(variable)
    assert not has_value(variable)
    with pytest.raises(UninitialisedError, match=r"'dropped'.*Load the model again"):
        initialise([variable])
    direct_assign(variable, jax.numpy.zeros(3))
    check_initialised([variable])


def preset(folder, task):
    lm = models.causal_lm("gpt2")
    (lm if task else lm.backbone).save_to_preset(str(folder))
    for weights in [*folder.glob("*.h5"), *folder.glob("model.weights*")]:
        weights.unlink(missing_ok=True)
    return lm


@pytest.mark.parametrize("task", [False, True])
def test_from_preset_reads_configuration_only(tmp_path, task):
    import keras_hub

    saved = preset(tmp_path, task)
    with abstract():
        cls = keras_hub.models.GPT2CausalLM if task else keras_hub.models.Backbone
        model = cls.from_preset(str(tmp_path), **({"preprocessor": None} if task else {}))
    assert all(map(is_abstract, model.weights)) and model.count_params() == saved.count_params()
    with pytest.raises(FileNotFoundError):
        keras_hub.models.Backbone.from_preset(str(tmp_path))


@pytest.mark.slow
def test_keras_hub_imported_inside_the_block(tmp_path):
    preset(tmp_path, False)
    code = f"""
import sys, conftest, shardload
with shardload.abstract():
    import keras_hub
    model = keras_hub.models.Backbone.from_preset({str(tmp_path)!r})
from shardload.keras_bridge.variables import is_abstract
assert all(map(is_abstract, model.weights))
assert not [f for f in sys.meta_path if type(f).__module__.startswith("shardload")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_nine_billion_parameters_cost_nothing():
    import keras_hub

    before = sum(a.nbytes for a in jax.live_arrays())
    with abstract():
        backbone = keras_hub.models.GemmaBackbone(
            vocabulary_size=256000, num_layers=42, num_query_heads=16, num_key_value_heads=8, hidden_dim=3584,
            intermediate_dim=28672, head_dim=256, use_post_ffw_norm=True, use_post_attention_norm=True,
            dtype="bfloat16",
        )  # fmt: skip
    assert backbone.count_params() == 9_241_705_984
    assert sum(a.nbytes for a in jax.live_arrays()) - before <= 8
