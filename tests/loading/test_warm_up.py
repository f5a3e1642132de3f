"""A load with ``warm_up``: the first call compiles nothing more, and its result is the same, bit for bit."""

import json
import logging

import cli_fakes
import jax
import keras
import numpy as np
import pytest
from process_runs import told_by

import shardload
from shardload.errors import UsageError
from shardload.keras_bridge.model_records import record_of
from shardload.synth import synth

X, Y = np.random.default_rng(0).normal(size=(2, 8, 16)).astype("float32")
STEPS = {"predict": X, "train": (X, Y)}


def network(seed=0, *layers):
    keras.utils.set_random_seed(seed)
    hidden = [keras.layers.Dense(24, "relu"), keras.layers.BatchNormalization(), keras.layers.Dropout(0.5)]
    model = keras.Sequential([keras.Input((16,)), *layers, *hidden, keras.layers.Dense(16)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def trained(*given):
    model = network(*given)
    model.fit(X, Y, verbose=0)
    return model


@keras.saving.register_keras_serializable("test_warm_up")
class Shift(keras.layers.Layer):
    """Like ``Normalization``, it computes with an array made from its variable."""

    def build(self, shape):
        self.shift = self.add_weight(shape=shape[-1:], initializer="zeros", trainable=False)
        self.offset = np.zeros(shape[-1:], "float32")

    def finalize_state(self):
        self.offset = np.asarray(self.shift)

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.finalize_state()

    def call(self, x):
        return x + self.offset


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "network.keras"
    trained().save(path)
    return path


def compiled_in(call, caplog):
    """The programs that JAX compiled in a call, and the call's result."""
    with caplog.at_level(logging.DEBUG, "jax._src.interpreters.pxla"):
        caplog.clear()
        found = call()
    messages = (record.getMessage() for record in caplog.records)
    return [message.split()[1] for message in messages if message.startswith("Compiling")], found


def load(saved, **options):
    keras.utils.set_random_seed(5)  # of Dropout
    return shardload.load(saved, **options)


def first(model, kind):
    """The first result of a model, with the weights after it."""
    if kind == "predict":
        return model.predict(X, batch_size=8, verbose=0).tobytes()
    loss = model.fit(X, Y, batch_size=8, shuffle=False, verbose=0).history
    return json.dumps(loss), [np.asarray(v).tobytes() for v in model.weights]


@pytest.mark.parametrize("mesh", ["1x8", "2x4", "1x1"])
@pytest.mark.parametrize("kind", ["predict", "train"])
def test_first_call_finds_what_the_load_compiled(kind, mesh, saved, caplog):
    plain, expected = compiled_in(lambda: first(load(saved, mesh=mesh), kind), caplog)
    model = load(saved, mesh=mesh, warm_up={kind: STEPS[kind]})
    again, found = compiled_in(lambda: first(model, kind), caplog)
    step = f"jit({kind}_step)"
    assert (found, step in plain, step in again) == (expected, True, False)
    assert shardload.report(model).seconds.warm_up > 0


def test_shapes_are_enough_and_steps_share_a_load(saved, caplog):
    def spec(array):
        return jax.ShapeDtypeStruct(array.shape, array.dtype)

    model = load(saved, mesh="1x8", warm_up={"predict": spec(X), "train": (spec(X), spec(Y))})
    assert shardload.report(model).notes == ()
    for kind in STEPS:
        assert f"jit({kind}_step)" not in compiled_in(lambda kind=kind: first(model, kind), caplog)[0]


def test_weights_loaded_into_a_live_model_are_the_ones_it_computes_with(saved, tmp_path, caplog):
    trained(1).save_weights(tmp_path / "other.weights.h5")
    model = load(saved, mesh="1x8")
    shardload.load_weights(model, tmp_path / "other.weights.h5", warm_up={"predict": X})
    names, found = compiled_in(lambda: first(model, "predict"), caplog)
    assert "jit(predict_step)" not in names
    expected = load(saved, mesh="1x8")
    shardload.load_weights(expected, tmp_path / "other.weights.h5")
    assert found == first(expected, "predict")


def test_restored_model_trains_on_without_compiling(saved, tmp_path, caplog):
    model = load(saved, mesh="1x8")
    model.fit(X, Y, verbose=0, callbacks=[shardload.callbacks.OrbaxCheckpoint(tmp_path)])
    results = []
    for warm_up in (None, {"train": (X, Y)}):
        fresh = load(saved, mesh="1x8")
        shardload.restore(fresh, tmp_path, warm_up=warm_up)
        record_of(fresh).restored = None  # as in a new run
        results.append(compiled_in(lambda fresh=fresh: first(fresh, "train"), caplog))
    (plain, expected), (again, found) = results
    assert (found, "jit(train_step)" in plain, "jit(train_step)" in again) == (expected, True, False)


def test_generation_says_the_same_without_compiling(tmp_path, caplog):
    folder = synth("gemma3_270m", directory=tmp_path, scale=0.01)
    texts = []
    for warm_up in (None, {"generate": {"prompts": ["one", "two and"], "max_new_tokens": 4}}):
        model = shardload.load(folder, mesh="1x8", warm_up=warm_up)
        generate = lambda model=model: shardload.generate(model, ["one", "two and"], max_new_tokens=4)  # noqa: E731
        assert shardload.report(model).seconds.ready is None
        names, text = compiled_in(generate, caplog)
        assert ("jit(compiled_generate_function)" in names) == (warm_up is None)
        assert shardload.report(model).seconds.ready > shardload.report(model).seconds.total
        texts.append(text)
    assert texts[0] == texts[1]


def test_what_cannot_be_compiled_is_a_note_and_compiles_later(saved):
    model = load(saved, mesh="1x8", warm_up={"predict": np.zeros((8, 5), "float32"), "train": (X, Y)})
    (note,) = shardload.report(model).notes
    assert note.startswith("not compiled during the load: predict: ")
    assert first(model, "predict") == first(load(saved, mesh="1x8"), "predict")


def test_eager_model_is_not_compiled(saved):
    model = network()
    model.compile("sgd", "mse", run_eagerly=True)
    report = shardload.load_weights(model, saved, mesh="1x8", items="weights", warm_up={"train": (X, Y)})
    assert "run_eagerly" in report.notes[-1]


def test_values_that_a_load_changes_are_not_fixed_in_the_program(tmp_path):
    shift = Shift()
    model = network(0, shift)
    model.optimizer.build(model.trainable_variables)
    shift.shift.assign(np.arange(16.0))
    shift.finalize_state()
    model.save(tmp_path / "model.keras")
    loaded = shardload.load(tmp_path / "model.keras", mesh="1x8", warm_up={"predict": X})
    assert "predict: its layers also compute with" in shardload.report(loaded).notes[-1]
    assert first(loaded, "predict") == first(shardload.load(tmp_path / "model.keras", mesh="1x8"), "predict")
    np.testing.assert_allclose(loaded.predict(X, verbose=0), model.predict(X, verbose=0), atol=1e-5)


def test_failed_load_leaves_the_old_model(saved, tmp_path):
    model = load(saved, mesh="1x8")
    before = first(model, "predict")
    trained(1).save_weights(tmp_path / "other.weights.h5")

    class Failing:
        def start(self, total_bytes, description): ...
        def stop(self): ...
        def advance(self, n_bytes):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shardload.load_weights(
            model, tmp_path / "other.weights.h5", atomic=True, progress=Failing(), warm_up={"predict": X}
        )
    assert first(model, "predict") == before


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("predict", "expected a mapping such as {'predict': batch}"),
        ({"fit": X}, "expected 'predict' or 'train' or 'generate' as key"),
        ({"train": X}, r"expected a tuple \(x, y\) or \(x, y, sample_weight\)"),
        ({"predict": "text"}, "expected a batch of arrays"),
        ({"predict": {}}, "expected a batch of arrays"),
        ({"train": (X, Y[:3])}, "its arrays differ in their first dim, 3 and 8"),
        ({"generate": {"prompt": "a"}}, "found no prompts"),
        ({"generate": {"prompts": "a", "length": 3}}, "found 'length'"),
    ],
)
def test_wrong_argument_is_refused_before_anything_is_read(wrong, message):
    with pytest.raises(UsageError, match=message):
        shardload.load("no such file", warm_up=wrong)


def test_restore_generates_no_text(saved, tmp_path):
    with pytest.raises(UsageError, match="expected 'predict' or 'train' as key"):
        shardload.restore(network(), tmp_path, warm_up={"generate": "text"})


@pytest.mark.slow
def test_command_warms_up_for_its_prompt(tmp_path):
    folder = str(synth("gemma3_270m", directory=tmp_path, scale=0.01))
    command = ("load", folder, "--mesh", "1x2", "--prompt", "one", "--max-new-tokens", "3", "--json")
    plain, warm = (cli_fakes.shardload(*command, *more).json for more in ((), ("--warm-up",)))
    assert warm["generated"] == plain["generated"]
    assert (plain["seconds"]["warm_up"], warm["notes"]) == (None, plain["notes"])
    assert warm["seconds"]["ready"] > warm["seconds"]["total"] > warm["seconds"]["warm_up"] > 0
    assert "--warm-up" in cli_fakes.shardload("load", folder, "--warm-up").stderr


@pytest.mark.slow
def test_several_processes_compile_the_same_step(saved):
    told = told_by(2, 2, "1x4", "warm-up", saved)
    assert [(one["compiled"], one["notes"]) for one in told] == [(False, [])] * 2
    assert told[0]["losses"] == told[1]["losses"]
