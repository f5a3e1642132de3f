"""Assignment keeps buffers, waits for whole layers, and knows what it left behind."""

import time
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from by_hand import arrays, assigner, check_same, fill, lay_out, mesh, pointers
from keras import layers

import shardload.keras_bridge.abstraction
from shardload.errors import LoadInterruptedError, MismatchError
from shardload.keras_bridge.saving import assignments_to
from shardload.keras_bridge.variables import current_value, is_abstract, stored_dtype
from shardload.loaders import open_manifest
from shardload.mapping.assign import Assigner, as_keras_casts
from shardload.mapping.structural import map_keras
from shardload.mapping.variable_map import split_missing


class Doubling(layers.Dense):
    """Computes its kernel."""

    fails = False

    def load_own_variables(self, store):
        self.loaded = True
        if Doubling.fails:
            raise RuntimeError("no luck")
        self.kernel.assign(store["0"] * 2)
        self.bias.assign(store["1"])


def model(dtype="float32"):
    inputs = keras.Input((8,))
    x = layers.Dense(16, name="a", dtype=dtype)(inputs)
    x = Doubling(8, name="b", dtype=dtype)(x)
    return keras.Model(inputs, layers.Normalization(dtype=dtype)(x))


@pytest.fixture
def manifest(tmp_path):
    source = model()
    rng = np.random.default_rng(0)
    for v in source.weights:
        v.assign(np.abs(rng.normal(size=v.shape)).astype(v.dtype))
    source.save_weights(tmp_path / "m.weights.h5")
    return open_manifest(tmp_path / "m.weights.h5")


def start(target, manifest, **options):
    found = map_keras(target, manifest)
    return assigner(found, manifest, **options), dict(arrays(found, manifest))


def held(target):
    return {v.path: None if current_value(v) is None else pointers(current_value(v)) for v in target.weights}


def test_buffers_are_kept_and_layers_wait_for_all_theirs(manifest):
    target = lay_out(model(), mesh())
    loading, ready = start(target, manifest)
    before = held(target)
    loading.ready("a/kernel", ready["a/kernel"])
    assert held(target) == before
    loading.ready("a/bias", ready["a/bias"])
    assert held(target)["a/kernel"] == pointers(ready["a/kernel"])
    assert held(target)["b/kernel"] == before["b/kernel"]


def test_all_but_computed_variables_have_the_buffers_they_were_given(manifest):
    target = lay_out(model(), mesh())
    reference = model()
    reference.load_weights(manifest.source)
    found = map_keras(target, manifest)
    assert [c.names for c in found.computed] == [("b/kernel",)]
    assert {b.name for b in found.bindings} == {v.path for v in target.weights} - {"b/kernel"}
    fill(found, manifest)  # compares the buffers
    check_same(target, reference)


def test_mixed_dtypes_are_cast_as_keras_casts(manifest):
    target, reference = lay_out(model("bfloat16"), mesh()), model("bfloat16")
    reference.load_weights(manifest.source)
    fill(map_keras(target, manifest), manifest)
    check_same(target, reference)


def test_arrays_nobody_waits_for_are_refused(manifest):
    loading, ready = start(model(), manifest)
    loading.ready("a/bias", ready["a/bias"])
    for name in ("a/bias", "nothing"):
        with pytest.raises(KeyError, match=name):
            loading.ready(name, ready["a/bias"])


def test_finishing_early_is_refused(manifest):
    loading, ready = start(model(), manifest)
    loading.ready("a/bias", ready["a/bias"])
    with pytest.raises(LoadInterruptedError, match=r"no value for \d variables, the first 'a/kernel'"):
        loading.finish()


def test_mismatches_are_refused_before_anything_changes(manifest):
    inputs = keras.Input((8,))
    other = keras.Model(inputs, layers.Dense(17, name="a")(inputs))
    with pytest.raises(MismatchError, match=r"'a/kernel' has shape \(8, 17\)"):
        start(other, manifest)


def interrupted(target, manifest, **options):
    """Both of layer a arrive, b's bias is on its way when the load ends."""
    loading, ready = start(target, manifest, **options)
    for name in ("a/kernel", "a/bias"):
        loading.starting(name)
        loading.ready(name, ready[name])
    loading.starting("b/bias")
    return loading


def test_an_interrupted_load_of_a_live_model(manifest):
    target = model()
    state = interrupted(target, manifest).abort()
    assert set(state.new) == {"a/kernel", "a/bias"} and state.none == ("b/bias",)
    assert "b/kernel" in state.old and current_value(target.layers[2].bias) is None
    assert "2 variables have new values, 4 their old ones, 1 none" in str(state)


def test_an_interrupted_load_of_an_abstract_model(manifest):
    with shardload.keras_bridge.abstraction.abstract():
        target = model()
    state = interrupted(target, manifest).abort()
    assert len(state.new) == 2 and len(state.none) == 5 and not state.old
    shardload.keras_bridge.abstraction.initialise(target)
    assert all(current_value(v) is not None for v in target.weights)


def test_atomic_puts_the_old_buffers_back(manifest):
    target = lay_out(model(), mesh())
    before = held(target)
    state = interrupted(target, manifest, atomic=True).abort()
    assert held(target) == before and len(state.old) == len(before) and not state.new


def test_atomic_makes_abstract_variables_abstract_again(manifest):
    with shardload.keras_bridge.abstraction.abstract():
        target = model()
    interrupted(target, manifest, atomic=True).abort()
    assert all(is_abstract(v) for v in target.weights)
    shardload.keras_bridge.abstraction.initialise(target)
    assert np.asarray(target.layers[1].kernel).any()


def test_atomic_undoes_attributes_when_a_hook_fails_late(manifest, monkeypatch):
    target = model()
    loading, ready = start(target, manifest, atomic=True)
    before, mean = held(target), target.layers[3].mean
    for name, array in ready.items():
        loading.ready(name, array)
    monkeypatch.setattr(Doubling, "fails", True)
    with pytest.raises(RuntimeError, match="no luck"):
        loading.finish()
    assert target.layers[3].mean is not mean
    loading.abort()
    assert held(target) == before and target.layers[3].mean is mean
    assert not hasattr(target.layers[2], "loaded")


class Remembering(layers.Dense):
    """Keeps arrays in containers that Keras does not track, and replaces them when it is loaded."""

    def build(self, shape):
        super().build(shape)
        for name, value in [("listed", [np.zeros(2)]), ("named", {"a": np.zeros(2)})]:
            object.__setattr__(self, name, value)

    def load_own_variables(self, store):
        super().load_own_variables(store)
        self.listed[0], self.named["a"] = np.ones(2), np.ones(2)


def test_arrays_in_plain_containers_are_replaced_by_a_load_and_put_back_by_an_abort(tmp_path):
    inputs = keras.Input((8,))
    target = keras.Model(inputs, Remembering(8)(inputs))
    target.save_weights(tmp_path / "m.weights.h5")
    layer, kept = target.layers[1], (target.layers[1].listed[0], target.layers[1].named["a"])
    loading, ready = start(target, open_manifest(tmp_path / "m.weights.h5"), atomic=True)
    assert layer.listed[0] is kept[0] and layer.named["a"] is kept[1]
    for name, array in ready.items():
        loading.ready(name, array)
    assert layer.listed[0].all() and layer.named["a"].all()
    loading.abort()
    assert layer.listed[0] is kept[0] and layer.named["a"] is kept[1]


def test_a_second_load_and_training_work(manifest):
    target = model()
    for _ in range(2):
        fill(map_keras(target, manifest), manifest)
    trained = keras.Model(target.inputs, target.layers[2].output)
    trained.compile("sgd", "mse")
    trained.fit(np.ones((8, 8)), np.ones((8, 8)), verbose=0)


def test_other_threads_assign_as_ever(manifest):
    import threading

    other = keras.Variable(np.zeros(3, "float32"))
    thread = threading.Thread(target=lambda: other.assign(np.ones(3, "float32")))
    with assignments_to(lambda variable, value, assign: value):
        thread.start()
        thread.join()
        other.assign(np.full(3, 7.0, "float32"))
    assert np.asarray(current_value(other)).tolist() == [1, 1, 1]
    assert "assign" not in vars(type(other))


@pytest.mark.parametrize("stored", ["float64", "float32", "float16", "int32", "int8"])
@pytest.mark.parametrize("wanted", ["float32", "bfloat16", "float16"])
def test_casts_equal_keras(stored, wanted):
    value = (np.random.default_rng(0).normal(size=4096) * 100).astype(stored)
    variable = keras.Variable(np.zeros(4096), dtype=wanted)
    variable.assign(value)
    ours = as_keras_casts(value, stored_dtype(variable))
    assert ours.tobytes() == np.asarray(current_value(variable)).tobytes()


COUNT = 20_000


def test_the_missing_ones_are_found_in_one_pass():
    weights = [SimpleNamespace() for _ in range(COUNT)]
    state = [SimpleNamespace() for _ in range(COUNT)]
    names = {id(v): str(n) for n, v in enumerate(weights)}
    began = time.process_time()
    missing, variables, left = split_missing(weights, [*weights, *state], weights[1:] + state[2:], names)
    # It took 39 s when each variable was looked up in a union of sets made for it alone.
    assert time.process_time() - began < 5
    assert missing == ("0",) and variables == (weights[0],) and left == tuple(state[:2])


class Computing:
    """A step that computes from one array."""

    computes, saveable = True, None
    asked = 0

    def __init__(self, name):
        self.name = name

    @property
    def needs(self):
        Computing.asked += 1
        return (self.name,)

    def run(self, runtime):
        assert runtime.take(self.name) == int(self.name)


def test_steps_that_compute_are_not_searched_for_each_array():
    steps = [Computing(str(n)) for n in range(COUNT)]
    found = SimpleNamespace(mismatched=(), bindings=(), computed=(), steps=steps)
    assigner = Assigner(found, read_tensor=None, place=None)
    for n in range(COUNT):
        assigner.ready(str(n), n)
    assigner.finish()
    assert Computing.asked <= 5 * COUNT
