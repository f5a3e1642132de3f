"""A whole model out of a training step alone: what was done to its layers after they were made comes back too."""

import json

import callback_models as made
import keras
import numpy as np
import pytest

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import SourceError, SourceNotFoundError, UnsupportedError
from shardload.keras_bridge.layer_settings import apply_settings, settings_of

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")


@keras.saving.register_keras_serializable("test-load-trained")
class Nested(keras.Model):
    """Its configuration says nothing of its layers."""

    def __init__(self, **named):
        super().__init__(**named)
        self.table = keras.layers.Embedding(16, 8)
        self.blocks = [keras.layers.Dense(8, "tanh"), keras.layers.EinsumDense("abc,cd->abd", (None, 8))]
        self.head = keras.layers.Dense(1)

    def call(self, x):
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = np.random.default_rng(0).integers(0, 16, (8, 4))
TARGET = np.random.default_rng(1).normal(size=(8, 4, 1)).astype("float32")


def nested(*, quantised=False, rank=None, alpha=None, frozen=()):
    keras.utils.set_random_seed(1)
    model = Nested()
    model(TOKENS)
    if quantised:
        model.quantize("int8")
    for layer in (model.table, *model.blocks):
        if rank:
            layer.enable_lora(rank, lora_alpha=alpha)
    for name in frozen:
        getattr(model, name).trainable = False
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def train(model, *callbacks):
    model.fit(TOKENS, TARGET, batch_size=4, verbose=0, shuffle=False, callbacks=list(callbacks))


def saved(model, root, fit=train):
    fit(model, OrbaxCheckpoint(root))
    return max(int(p.name) for p in root.iterdir() if p.name.isdigit())


def values(variables):
    return [np.asarray(v.value).tobytes() for v in variables]


def bits(variables):
    return [(v.name, str(v.dtype), value) for v, value in zip(variables, values(variables), strict=True)]


def assert_same_training(one, other, fit=train):
    """The same values, and the same after another epoch."""
    for _ in range(2):
        assert bits(other.weights) == bits(one.weights)
        assert len(other.trainable_variables) == len(one.trainable_variables)
        assert values(other.optimizer.variables) == values(one.optimizer.variables)
        fit(one)
        fit(other)


def test_the_best_step_or_a_number_may_be_asked_for(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.01), "mse")
    x, y = np.eye(3), np.ones((3, 1))
    keep = OrbaxCheckpoint(tmp_path, monitor="loss", mode="max", max_to_keep=None, resume=False)
    model.fit(x, y, epochs=3, verbose=0, callbacks=[keep])  # the loss sinks: the first step has the highest
    for which, number in (("best", 1), (2, 2), ("latest", 3)):
        assert int(shardload.load(tmp_path, step=which, mesh="1x1").optimizer.iterations) == number
        assert shardload.load_weights(model, tmp_path, step=which).source == str(tmp_path / str(number))
    with pytest.raises(SourceNotFoundError, match=r"no step 4\. It has 3 steps: 1, 2, 3"):
        shardload.load(tmp_path, step=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "done",
    [
        {},
        {"frozen": ("table",)},
        {"rank": 2},
        {"rank": 2, "alpha": 16},
        {"quantised": True},
        {"quantised": True, "rank": 3, "alpha": 1.5},
        {"quantised": True, "rank": 3, "frozen": ("head",)},
    ],
    ids=lambda done: "-".join(done) or "plain",
)
def test_a_subclassed_model_comes_back_as_it_was_trained(tmp_path, done):
    model = nested(**done)
    again = shardload.load(tmp_path / str(saved(model, tmp_path)), mesh="1x1")
    assert settings_of(again) == settings_of(model)
    assert np.asarray(again(TOKENS)).tobytes() == np.asarray(model(TOKENS)).tobytes()
    assert_same_training(model, again)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["Adam", "LoRA", "int8"])
def test_a_task_of_keras_hub_comes_back_compiled(tmp_path, way):
    def fit(model, *callbacks):
        x, y = made.gemma_data()
        model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=list(callbacks))

    model = made.gemma(keras.optimizers.RMSprop(0.01))
    if way == "int8":
        model.quantize("int8")
    if way != "Adam":
        model.backbone.enable_lora(2)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.RMSprop(0.01), loss, sampler="greedy")
    if way == "int8":  # on a mesh of shardload's, gradients of int8 layers differ from those of Keras alone
        shardload.save(model, tmp_path / "begun", step=1)
        model = shardload.load(tmp_path / "begun", mesh="1x1")
    again = shardload.load(tmp_path / str(saved(model, tmp_path, fit)), mesh="1x1")
    assert type(again.optimizer) is keras.optimizers.RMSprop
    assert settings_of(again) == settings_of(model)
    assert_same_training(model, again, fit)


@pytest.mark.slow
def test_a_quantiser_of_ones_own_is_not_taken_for_keras_own(tmp_path):
    keras.utils.set_random_seed(1)
    model = Nested()
    model(TOKENS)
    model.quantize("int8", config=keras.quantizers.Int8QuantizationConfig(activation_quantizer=None))
    model.compile("sgd", "mse")
    step = saved(model, tmp_path)
    with pytest.raises(UnsupportedError, match=r"the layer '.*': it was quantised \(int8, not as by default\)"):
        shardload.load(tmp_path / str(step), mesh="1x1")


def functional(*, policy=None):
    inputs = keras.Input((4,))
    layers = [keras.layers.Dense(8, dtype=policy, name="a"), keras.layers.Dense(2, dtype=policy, name="b")]
    return keras.Model(inputs, layers[1](layers[0](inputs)))


def rows(model, *callbacks):
    rng = np.random.default_rng(0)
    x, y = rng.random((16, 4), np.float32), rng.random((16, 2), np.float32)
    model.fit(x, y, batch_size=8, verbose=0, shuffle=False, callbacks=list(callbacks))


def thaw_after_lora(model):
    model.get_layer("a").enable_lora(2)
    model.trainable = False
    model.trainable = True


CHANGES = {
    "freeze_kernel": lambda model: setattr(model.get_layer("a").kernel, "trainable", False),
    "lora_with_alpha": lambda model: model.get_layer("a").enable_lora(2, lora_alpha=16),
    "thaw_after_lora": thaw_after_lora,
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_single_variables_stay_frozen_and_alpha_is_kept(tmp_path, change, optimizer):
    model = functional()
    change(model)
    model.compile(optimizer, "mse")
    again = shardload.load(tmp_path / str(saved(model, tmp_path, rows)), mesh="1x1")
    assert [v.trainable for v in again.weights] == [v.trainable for v in model.weights]
    assert np.asarray(again(np.ones((2, 4)))).tobytes() == np.asarray(model(np.ones((2, 4)))).tobytes()
    assert_same_training(model, again, rows)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["bfloat16", "mixed_bfloat16", "mixed_float16", "float16"])
@pytest.mark.parametrize("build", [functional, nested], ids=["functional", "subclassed"])
def test_the_policy_that_was_global_is_the_models(tmp_path, policy, build):
    fit = rows if build is functional else train
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(policy)
    try:
        model = build()
        model.compile("adam", "mse")
    finally:
        keras.config.set_dtype_policy(before)
    again = shardload.load(tmp_path / str(saved(model, tmp_path, fit)), mesh="1x1")
    assert keras.config.dtype_policy() == before
    assert [layer.dtype_policy.name for layer in again.layers] == [layer.dtype_policy.name for layer in model.layers]
    assert type(again.optimizer) is type(model.optimizer)
    assert_same_training(model, again, fit)


def test_another_dtype_may_be_asked_for(tmp_path):
    again = shardload.load(tmp_path / str(saved(nested(), tmp_path)), mesh="1x1", dtype="bfloat16")
    assert {str(v.dtype) for v in again.weights} == {"bfloat16"}


def test_a_policy_set_on_a_built_layer_is_refused(tmp_path):
    model = nested()
    model.head.dtype_policy = "mixed_bfloat16"
    model.compile("sgd", "mse")
    step = saved(model, tmp_path)
    had = "it had the dtype policy 'mixed_bfloat16', but its configuration gives 'float32'"
    with pytest.raises(UnsupportedError, match=had):
        shardload.load(tmp_path / str(step), mesh="1x1")


def test_metrics_given_as_objects_have_values(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    one, other = keras.metrics.MeanAbsoluteError(), keras.metrics.MeanSquaredError()
    model.compile("sgd", "mse", metrics=[one], weighted_metrics=[other])
    model.save(tmp_path / "model.keras")
    again = shardload.load(tmp_path / "model.keras", mesh="1x1")
    x, y = np.ones((4, 4), np.float32), np.ones((4, 2), np.float32)
    assert again.evaluate(x, y, verbose=0) == model.evaluate(x, y, verbose=0)


@pytest.mark.slow
def test_a_quantised_task_made_anew_can_be_saved_by_keras(tmp_path):
    model = made.gemma()
    model.quantize("int8")
    x, y = made.gemma_data()
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.fit(x, y, batch_size=4, verbose=0, shuffle=False, callbacks=[OrbaxCheckpoint(tmp_path / "run")])
    shardload.load(tmp_path / "run", mesh="1x1").save_weights(tmp_path / "again.weights.h5")
    model.save_weights(tmp_path / "model.weights.h5")
    one, other = (shardload.inspect(tmp_path / f"{name}.weights.h5").tensors for name in ("model", "again"))
    assert {n: (t.shape, t.dtype) for n, t in one.items()} == {n: (t.shape, t.dtype) for n, t in other.items()}


@pytest.mark.parametrize(
    "form",
    [
        [],
        {"head": 3},
        {"head": {"trainable": "no"}},
        {"head": {"lora": 4}},
        {"head": {"lora": {"rank": 10**9, "alpha": 1}}},
        {"head": {"lora": {"rank": True, "alpha": 1}}},
        {"head": {"lora": {"rank": 2, "alpha": "much"}}},
        {"head": {"frozen": "kernel"}},
        {"head": {"policy": 16}},
    ],
    ids=json.dumps,
)
def test_a_form_that_is_none_is_refused(form):
    with shardload.abstract():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        with pytest.raises(SourceError, match=r"structure\.json"):
            apply_settings(model, form)


def test_a_path_the_model_does_not_have_is_passed_over():
    with shardload.abstract():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        apply_settings(model, {"layers/gone": {"trainable": False, "quantization": "int8"}})
    assert settings_of(model) == {"": {"policy": "float32"}}
