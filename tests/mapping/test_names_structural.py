"""Keras files: whatever a layer's hooks do, a mapped load equals Keras' own load, bit for bit."""

import h5py
import keras
import numpy as np
import pytest
from by_hand import check_same, fill, lay_out, mesh
from keras import layers

import shardload.keras_bridge.abstraction
from shardload.errors import MismatchError
from shardload.keras_bridge.variables import current_value
from shardload.loaders import open_manifest
from shardload.mapping.structural import map_keras


@keras.saving.register_keras_serializable("test")
class Transposing(layers.Layer):
    """Stores its kernel transposed and in two halves."""

    def __init__(self, units=8, **kwargs):
        super().__init__(**kwargs)
        self.units = units

    def build(self, shape):
        self.kernel = self.add_weight(shape=(shape[-1], self.units), name="kernel")
        self.wide = self.add_weight(shape=(2, self.units), name="wide")

    def call(self, x):
        return x @ self.kernel + self.wide[0]

    def save_own_variables(self, store):
        store["kernel_t"] = np.asarray(self.kernel).T
        store["wide"] = np.asarray(self.wide).reshape(-1)

    def load_own_variables(self, store):
        self.kernel.assign(store["kernel_t"].T)
        self.wide.assign(np.reshape(store["wide"], (2, self.units)))


@keras.saving.register_keras_serializable("test")
class Computing(Transposing):
    """Divides on the way in, in NumPy, in place and through Keras' ops; keeps a tensor; one plain view."""

    def build(self, shape):
        super().build(shape)
        self.third = self.add_weight(shape=(self.units,), name="third")
        self.plain = self.add_weight(shape=(self.units,), name="plain")

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["third"] = np.asarray(self.third)
        store["plain"] = np.asarray(self.plain)

    def load_own_variables(self, store):
        self.kept = store["wide"]
        self.kernel.assign((store["kernel_t"] / 3).T)
        self.wide.assign(keras.ops.reshape(store["wide"], (2, self.units)) * 0.7)
        third = store["third"]
        self.third.assign(np.array(third) - third.mean())
        self.plain.assign(store["plain"])


@keras.saving.register_keras_serializable("test")
class Sub(keras.Model):
    """Layers in attributes, lists, nested lists and dicts, one of them reachable twice."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first = layers.Dense(8)
        self.many = [layers.Dense(8), [layers.Dense(8), layers.LayerNormalization()]]
        self.named = {"a": layers.Dense(8), "b": self.first}

    def call(self, x):
        x = self.named["a"](self.many[0](self.first(x)))
        return self.many[1][1](self.many[1][0](x))


def functional(*made, shape=(8,), dtype="float32"):
    x = inputs = keras.Input(shape, dtype=dtype)
    for layer in made:
        x = layer(x)
    return keras.Model(inputs, x)


def sub():
    model = Sub()
    model(keras.Input((8,)))
    return model


def lora():
    model = functional(layers.Dense(16, name="d"), layers.EinsumDense("ab,bc->ac", 8, name="e"))
    for layer in model.layers[1:]:
        layer.enable_lora(2)
    return model


def embeddings(tie=True, enable_lora=False):
    embedding = layers.ReversibleEmbedding(16, 8, tie_weights=tie)
    tokens = keras.Input((4,), dtype="int32")
    model = keras.Model(tokens, embedding(embedding(tokens), reverse=True))
    if enable_lora:
        embedding.enable_lora(2)
    return model


def quantised(mode):
    model = functional(layers.Dense(16), layers.EinsumDense("ab,bc->ac", 8))
    model.quantize(mode, filters="dense")
    return model


def attention():
    query = keras.Input((4, 8))
    return keras.Model(query, layers.MultiHeadAttention(4, 8)(query, query))


MODELS = {
    "dense": lambda: functional(layers.Dense(16), layers.Dropout(0.5), layers.Dense(3)),
    "bfloat16": lambda: functional(layers.Dense(16, dtype="bfloat16"), layers.Dense(3, dtype="mixed_bfloat16")),
    "conv": lambda: functional(
        layers.Conv2D(8, 3), layers.BatchNormalization(), layers.DepthwiseConv2D(3), layers.Flatten(), shape=(8, 8, 3)
    ),
    "lstm": lambda: functional(
        layers.LSTM(8, return_sequences=True), layers.Bidirectional(layers.GRU(8)), shape=(4, 8)
    ),
    "attention": attention,
    "tied": embeddings,
    "untied": lambda: embeddings(tie=False),
    "lora": lora,
    "lora embedding": lambda: embeddings(enable_lora=True),
    "int8": lambda: quantised("int8"),
    "int4": lambda: quantised("int4"),
    "float8": lambda: quantised("float8"),
    "transposing": lambda: functional(Transposing(), Transposing()),
    "computing": lambda: functional(layers.Dense(8), Computing(), layers.Dense(3)),
    "containers": sub,
    "nested": lambda: functional(functional(layers.Dense(8)), keras.Sequential([layers.Dense(8), layers.Dense(2)])),
}


def randomise(model, seed=0):
    rng = np.random.default_rng(seed)
    for v in model.weights:
        value = rng.normal(size=v.shape) * 20
        v.assign(np.abs(value).astype(v.dtype) if "int" in v.dtype or "variance" in v.path else value)
    return model


def saved(model, path):
    randomise(model).save_weights(path)
    return open_manifest(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_equals_keras(kind, tmp_path):
    manifest = saved(MODELS[kind](), tmp_path / "m.weights.h5")
    reference, model = MODELS[kind](), lay_out(MODELS[kind](), mesh())
    reference.load_weights(tmp_path / "m.weights.h5")
    before = [np.asarray(current_value(v)).copy() for v in model.weights]
    found = map_keras(model, manifest)
    assert all(np.array_equal(a, np.asarray(current_value(v))) for a, v in zip(before, model.weights, strict=True))
    assert not found.missing and not found.unused and not found.mismatched and not found.notes
    fill(found, manifest)
    check_same(model, reference)


@pytest.mark.parametrize("kind", ["dense", "conv", "attention", "untied", "transposing", "computing", "containers"])
def test_abstract_models_map_alike(kind, tmp_path):
    manifest = saved(MODELS[kind](), tmp_path / "m.weights.h5")
    with shardload.keras_bridge.abstraction.abstract():
        model = MODELS[kind]()
    found = map_keras(model, manifest)
    assert all(current_value(v) is None for v in model.weights)
    reference = MODELS[kind]()
    reference.load_weights(tmp_path / "m.weights.h5")
    fill(found, manifest)
    check_same(model, reference)


def test_a_transposing_hook_is_a_view(tmp_path):
    manifest = saved(MODELS["transposing"](), tmp_path / "m.weights.h5")
    found = map_keras(MODELS["transposing"](), manifest)
    assert not found.computed
    kernel = next(b for b in found.bindings if b.name.endswith("kernel"))
    assert kernel.view.shape == (8, 8) and kernel.view.strides == (1, 8)


def test_a_computing_hook_reads_only_what_it_computes_with(tmp_path):
    manifest = saved(MODELS["computing"](), tmp_path / "m.weights.h5")
    model = MODELS["computing"]()
    found = map_keras(model, manifest)
    (computed,) = found.computed
    assert {n.rpartition("/")[2] for n in computed.tensors} == {"kernel_t", "wide", "third"}
    assert any(b.name.endswith("plain") for b in found.bindings)
    assert not hasattr(model.layers[2], "kept")
    fill(found, manifest)
    assert np.asarray(model.layers[2].kept).any()


def test_lora_reads_its_kernel_as_a_view(tmp_path):
    found = map_keras(lora(), saved(lora(), tmp_path / "m.weights.h5"))
    assert {n for c in found.computed for n in c.names} == {f"{x}/lora_kernel_{y}" for x in "de" for y in "ab"}
    assert all(c.tensors == () for c in found.computed)


def test_normalization_is_finalised_by_the_load_and_not_by_recording(tmp_path):
    model = functional(layers.Normalization(), layers.Dense(2))
    model.layers[1].adapt(np.random.default_rng(0).normal(3, 2, size=(64, 8)))
    model.save_weights(tmp_path / "n.weights.h5")
    other = functional(layers.Normalization(), layers.Dense(2))
    before = other.layers[1].mean
    manifest = open_manifest(tmp_path / "n.weights.h5")
    found = map_keras(other, manifest)
    assert other.layers[1].mean is before
    fill(found, manifest)
    check_same(other, model)
    np.testing.assert_array_equal(np.asarray(other.layers[1].mean), np.asarray(model.layers[1].mean))


def compiled():
    model = functional(layers.Dense(16), layers.Dropout(0.1), layers.Dense(1))
    model.compile(keras.optimizers.AdamW(1e-3), "mse", metrics=["mae"])
    return model


def trained_archive(path):
    model = compiled()
    model.fit(np.ones((16, 8)), np.ones((16, 1)), verbose=0)
    model.save(path)
    return model, open_manifest(path)


@pytest.mark.slow
def test_optimizer_of_an_archive(tmp_path):
    _, manifest = trained_archive(tmp_path / "m.keras")
    other = compiled()
    other.optimizer.build(other.trainable_variables)
    found = map_keras(other, manifest)
    assert not found.missing and not found.unused and not found.skipped and not found.computed
    fill(found, manifest)
    reference = keras.models.load_model(tmp_path / "m.keras")
    for one, two in zip(other.optimizer.variables, reference.optimizer.variables, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(two))
    assert {v.path.rpartition("/")[2] for v in found.state} == {"seed_generator_state", "total", "count"}


def test_optimizer_state_without_optimizer_is_unasked(tmp_path):
    model, manifest = trained_archive(tmp_path / "m.keras")
    found = map_keras(functional(layers.Dense(16), layers.Dropout(0.1), layers.Dense(1)), manifest)
    assert not found.unused and len(found.skipped) == len(model.optimizer.variables)


def test_optimizer_of_another_size_is_noted(tmp_path):
    _, manifest = trained_archive(tmp_path / "m.keras")
    other = functional(layers.Dense(16), layers.Dropout(0.1), layers.Dense(1))
    other.compile("sgd", "mse")
    found = map_keras(other, manifest)
    assert any("optimizer" in note for note in found.notes) and not found.unused and not found.missing


def test_shapes_that_differ_are_all_named(tmp_path):
    manifest = saved(functional(layers.Dense(16), layers.Dense(4)), tmp_path / "m.weights.h5")
    found = map_keras(functional(layers.Dense(16), layers.Dense(5)), manifest)
    assert [(m.tensor, m.expected, m.found) for m in found.mismatched] == [
        ("layers/dense_1/vars/0", (16, 5), (16, 4)),
        ("layers/dense_1/vars/1", (5,), (4,)),
    ]
    assert "has shape (16, 5), but tensor 'layers/dense_1/vars/0' has shape (16, 4)" in str(found.mismatched[0])
    assert not found.missing and not found.unused


def test_a_layer_with_another_number_of_variables(tmp_path):
    manifest = saved(functional(layers.Dense(16, use_bias=False)), tmp_path / "m.weights.h5")
    (mismatch,) = map_keras(functional(layers.Dense(16)), manifest).mismatched
    assert "expected 2 variables, but received 1" in mismatch.message


def test_more_layers_than_the_file_and_fewer(tmp_path):
    small, large = functional(layers.Dense(8)), functional(layers.Dense(8), layers.Dense(8))
    found = map_keras(large, saved(small, tmp_path / "s.weights.h5"))
    assert found.missing == (large.layers[2].kernel.path, large.layers[2].bias.path) and not found.mismatched
    found = map_keras(small, saved(large, tmp_path / "l.weights.h5"))
    assert found.unused == ("layers/dense_1/vars/0", "layers/dense_1/vars/1") and not found.missing


def test_dense_1_is_not_dense_10(tmp_path):
    manifest = saved(functional(*[layers.Dense(8) for _ in range(12)]), tmp_path / "m.weights.h5")
    model = functional(*[layers.Dense(8) for _ in range(12)])
    views = {id(b.variable): b.view.tensor for b in map_keras(model, manifest).bindings}
    assert views[id(model.layers[2].kernel)] == "layers/dense_1/vars/0"
    assert views[id(model.layers[11].kernel)] == "layers/dense_10/vars/0"


def test_sharded_weights(tmp_path):
    model = randomise(functional(layers.Dense(64), layers.Dense(64), layers.Dense(64)))
    model.save_weights(tmp_path / "m.weights.json", max_shard_size=2e-5)
    manifest = open_manifest(tmp_path / "m.weights.json")
    assert len(manifest.files) > 1
    other = lay_out(functional(layers.Dense(64), layers.Dense(64), layers.Dense(64)), mesh())
    fill(map_keras(other, manifest), manifest)
    check_same(other, model)


def test_files_of_keras_2_13(tmp_path):
    """They say `_layer_checkpoint_dependencies` where newer ones say `layers`."""
    import dataclasses

    manifest = saved(functional(layers.Dense(8)), tmp_path / "m.weights.h5")
    old = {n.replace("layers/", "_layer_checkpoint_dependencies/"): t for n, t in manifest.tensors.items()}
    old = {n: dataclasses.replace(t, name=n) for n, t in old.items()}
    found = map_keras(functional(layers.Dense(8)), dataclasses.replace(manifest, tensors=old))
    assert len(found.bindings) == 2 and not found.unused


def test_a_hook_that_falls_back_keeps_its_fallback(tmp_path):
    class Forgiving(Transposing):
        def load_own_variables(self, store):
            try:
                self.kernel.assign(store["kernel_t"])
            except ValueError:
                self.kernel.assign(store["kernel_t"].T)
            self.wide.assign(np.reshape(store["wide"], (2, self.units)))

    Forgiving.__name__ = "Transposing"  # Keras' paths come from class names
    manifest = saved(functional(Transposing(4)), tmp_path / "m.weights.h5")
    found = map_keras(functional(Forgiving(4)), manifest)
    assert len(found.bindings) == 2 and not found.mismatched


def test_a_hook_that_leaves_jax_is_run_on_values(tmp_path):
    class Leaving(Transposing):
        def load_own_variables(self, store):
            self.kernel.assign(np.asarray(keras.ops.transpose(store["kernel_t"])))
            self.wide.assign(np.reshape(store["wide"], (2, self.units)))

    Leaving.__name__ = "Transposing"
    manifest = saved(functional(Transposing()), tmp_path / "m.weights.h5")
    other = functional(Leaving())
    found = map_keras(other, manifest)
    assert [c.tensors for c in found.computed] == [("layers/transposing/vars/kernel_t",)]
    reference = functional(Transposing())
    reference.load_weights(tmp_path / "m.weights.h5")
    fill(found, manifest)
    check_same(other, reference)


def test_a_hook_that_changes_nothing_in_a_roundabout_way_is_a_view(tmp_path):
    class Roundabout(layers.Dense):
        def load_own_variables(self, store):
            kernel = store["0"] if store["0"].dtype == "float32" else None
            self.kernel.assign(np.asarray(np.transpose(kernel)).T)
            self.bias.assign(np.reshape(store["1"], self.bias.shape))

    Roundabout.__name__ = "Dense"
    manifest = saved(functional(layers.Dense(16)), tmp_path / "m.weights.h5")
    model, reference = functional(Roundabout(16, dtype="bfloat16")), functional(layers.Dense(16, dtype="bfloat16"))
    reference.load_weights(tmp_path / "m.weights.h5")
    found = map_keras(lay_out(model, mesh()), manifest)
    assert not found.computed
    fill(found, manifest)
    check_same(model, reference)


def test_a_hook_that_turns_round_is_refused(tmp_path):
    class Moody(Transposing):
        sober = True

        def load_own_variables(self, store):
            kernel = store["kernel_t"].T
            self.kernel.assign(kernel if Moody.sober else kernel * 2)
            self.wide.assign(np.reshape(store["wide"], (2, self.units)))

    Moody.__name__ = "Transposing"
    manifest = saved(functional(Transposing()), tmp_path / "m.weights.h5")
    found = map_keras(functional(Moody()), manifest)
    Moody.sober = False
    with pytest.raises(MismatchError, match=r"computed a value for 'transposing.*/kernel', but assigned a"):
        fill(found, manifest)


def test_a_hook_that_leaves_out_a_variable_the_second_time_is_refused(tmp_path):
    class Skipping(layers.Dense):
        skips = False

        def load_own_variables(self, store):
            self.kernel.assign(store["0"])
            if not Skipping.skips:
                self.bias.assign(store["1"])

    Skipping.__name__ = "Dense"
    manifest = saved(functional(layers.Dense(4)), tmp_path / "m.weights.h5")
    found = map_keras(functional(Skipping(4)), manifest)
    Skipping.skips = True
    with pytest.raises(MismatchError, match=r"assigned nothing to .*bias., but assigned a value"):
        fill(found, manifest)


@keras.saving.register_keras_serializable("test")
class Choosing(layers.Dense):
    """Has more in the file than it wants."""

    def save_own_variables(self, store):
        super().save_own_variables(store)
        store["extra"] = np.ones(3)

    def load_own_variables(self, store):
        self.kernel.assign(store["0"])
        self.bias.assign(store["1"])


def test_what_a_hook_of_its_own_leaves_unread_is_noted_and_not_refused(tmp_path):
    saved = keras.Sequential([keras.Input((3,)), Choosing(2), layers.Dense(2)])
    saved.save_weights(tmp_path / "m.weights.h5")
    found = map_keras(saved, open_manifest(tmp_path / "m.weights.h5"))
    assert found.unused == () and found.skipped == () and not found.missing
    unread = "does not read these tensors of the checkpoint: layers/choosing/vars/extra"
    assert found.notes == (f"Choosing at 'layers/choosing' {unread}",)


def test_what_keras_hook_leaves_unread_is_refused(tmp_path):
    saved = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    saved.save_weights(tmp_path / "m.weights.h5")
    with h5py.File(tmp_path / "m.weights.h5", "a") as file:
        file["layers/dense/vars/sub/2"] = np.ones(3)
        file["layers/dense_9/vars/0"] = np.ones(3)
    found = map_keras(saved, open_manifest(tmp_path / "m.weights.h5"))
    names = {*found.unused, *(m.tensor for m in found.mismatched)}
    assert "layers/dense_9/vars/0" in names and found.notes == ()
