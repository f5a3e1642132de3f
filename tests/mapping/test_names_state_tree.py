import h5py
import keras
import models
import numpy as np
import pytest
from saved_steps import assert_one_to_one

from shardload import abstract
from shardload.errors import SourceError, UninitialisedError
from shardload.keras_bridge.model_state import own_layers
from shardload.keras_bridge.variables import current_value
from shardload.mapping.state_tree import find_stored, state_tree_of


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(4)
        self.blocks = [keras.layers.Dense(4), [keras.layers.Dense(4, use_bias=False)]]
        self.drop = keras.layers.Dropout(0.5, seed=1)

    def call(self, x, training=False):
        x = self.drop(self.first(x), training=training)
        return self.blocks[1][0](self.blocks[0](x))


def functional():
    inputs = keras.Input((4,))
    x = keras.layers.BatchNormalization()(keras.layers.Dense(4)(inputs))
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dropout(0.5)])
    return keras.Model(inputs, keras.layers.Dense(4)(inner(x)))


def sequential():
    return keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(4)])


MODELS = {f.__name__: f for f in (functional, sequential, Subclassed)}


def trained(build, optimizer="adam"):
    model = build()
    model.compile(optimizer, "mse", metrics=["mae"])
    rng = np.random.default_rng(0)
    model.fit(rng.normal(size=(8, 4)), rng.normal(size=(8, 4)), epochs=1, verbose=0)
    return model


def flat(tree, path=()):
    for name, held in tree.items():
        if isinstance(held, dict):
            yield from flat(held, (*path, name))
        else:
            yield (*path, name), held


@pytest.mark.slow
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_tree_is_keras_own(build):
    model = trained(build)
    tree, theirs = state_tree_of(model).tree, model.get_state_tree()
    assert list(tree) == ["trainable_variables", "non_trainable_variables", "optimizer_variables", "metrics_variables"]
    ours = dict(flat(tree))
    assert list(ours) and {k: id(v) for k, v in ours.items()} == {k: id(v) for k, v in flat(theirs)}


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_weights_have_the_keys_of_weights_h5(build, tmp_path):
    model = trained(build, keras.optimizers.SGD())
    model.save_weights(tmp_path / "m.weights.h5")
    leaves = {leaf.key: leaf.variable for leaf in state_tree_of(model).leaves if leaf.kind == "weight"}
    names = []
    with h5py.File(tmp_path / "m.weights.h5") as file:
        file.visititems(lambda name, held: names.append(name) if isinstance(held, h5py.Dataset) else None)
        names = [n for n in names if not n.startswith("optimizer")]
        assert set(names) == set(leaves)
        assert all(np.array_equal(file[n][()], leaves[n].numpy()) for n in names)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_pairs_models_whose_automatic_names_differ(build):
    stored, other = trained(build), trained(build)
    assert [v.path for v in stored.weights] != [v.path for v in other.weights]
    pairing = find_stored(other, state_tree_of(stored).to_json())
    assert_one_to_one(pairing)
    assert len(pairing.pairs) == len(state_tree_of(other).leaves)
    by_path = {leaf.path: leaf.variable for leaf in state_tree_of(stored).leaves}
    stored_of = {id(leaf.variable): by_path[stored.path] for stored, leaf in pairing.pairs}
    assert [id(stored_of[id(v)]) for v in in_groups(other)] == [id(v) for v in in_groups(stored)]


def in_groups(model):
    names = ("trainable_variables", "non_trainable_variables", "metrics_variables")
    return [*(v for name in names for v in getattr(model, name)), *model.optimizer.variables]


def test_slots_by_kind_and_weight():
    model = trained(sequential)
    found = {(leaf.role.slot, leaf.role.of) for leaf in state_tree_of(model).leaves if leaf.kind == "slot"}
    weights = {leaf.key for leaf in state_tree_of(model).leaves if leaf.kind == "weight"}
    assert found == {(s, w) for s in ("momentums", "velocities") for w in weights}
    scalars = {leaf.key for leaf in state_tree_of(model).leaves if leaf.kind == "optimizer"}
    assert scalars == {"iteration", "learning_rate"}


OPTIMIZERS = {
    "adafactor": keras.optimizers.Adafactor,
    "muon": keras.optimizers.Muon,
    "schedule": lambda: keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(0.1, 100)),
    "ema": lambda: keras.optimizers.SGD(momentum=0.9, use_ema=True),
    "accumulating": lambda: keras.optimizers.Lamb(gradient_accumulation_steps=2),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.AdamW()),
    "amsgrad": lambda: keras.optimizers.Adam(amsgrad=True),
    "nadam": keras.optimizers.Nadam,
    "ftrl": keras.optimizers.Ftrl,
}


@pytest.mark.slow
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_every_optimizer_variable_has_a_role_of_its_own(make):
    model = trained(functional, make())
    leaves = [leaf for leaf in state_tree_of(model).leaves if leaf.path[0] == "optimizer_variables"]
    assert len(leaves) == len({id(v) for v in model.optimizer.variables})
    assert len({(leaf.kind, leaf.key) for leaf in leaves}) == len(leaves)
    assert not [leaf.key for leaf in leaves if "variables/" in leaf.key.removeprefix("model_variables")]
    shapes = {leaf.key: leaf.shape for leaf in state_tree_of(model).leaves if leaf.kind == "weight"}
    slots = [leaf for leaf in leaves if leaf.kind == "slot" and leaf.role.slot.split("/")[-1] not in "rc"]
    assert all(leaf.shape == shapes[leaf.role.of] for leaf in slots)
    assert_one_to_one(find_stored(trained(functional, make()), state_tree_of(model).to_json()))


def test_loss_scale_nests_its_inner_optimizer():
    model = trained(sequential, OPTIMIZERS["loss_scale"]())
    keys = {leaf.key for leaf in state_tree_of(model).leaves if leaf.kind == "optimizer"}
    assert keys >= {"step_counter", "dynamic_scale", "inner_optimizer/iteration", "inner_optimizer/learning_rate"}
    assert "inner_optimizer/momentums" in {leaf.role.slot for leaf in state_tree_of(model).leaves}


def test_repeated_paths_get_unique_names():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(4, name="a")(inputs))
    twin = keras.layers.Dense(4, name="a")
    twin.build((None, 4))
    model.twin = twin
    with pytest.raises(ValueError, match="found twice"):
        model.compile("sgd"), model.get_state_tree()
    assert sorted(state_tree_of(model).tree["trainable_variables"]["a"]) == ["bias", "bias#2", "kernel", "kernel#2"]


def test_names_that_meet_after_joining_stay_apart():
    from shardload.mapping.state_tree import free_path

    taken = set()
    paths = [free_path("g", name, taken) for name in ("a/b", "a.b", "a", "a/b/c", "a")]
    dotted = {".".join(path) for path in paths}
    assert len(dotted) == len(paths) and not any(b.startswith(f"{a}.") for a in dotted for b in dotted)


def test_uncompiled_and_abstract_models():
    model = sequential()
    model.build((None, 4))
    assert list(state_tree_of(model).tree["trainable_variables"]) == [model.name]
    with abstract():
        empty = sequential()
        empty.build((None, 4))
    with pytest.raises(UninitialisedError, match="Cannot save the model: no value for 4 variables"):
        _ = state_tree_of(empty).tree
    assert len(find_stored(empty, state_tree_of(model).to_json()).pairs) == 4


def test_lists_what_disagrees():
    stored = state_tree_of(trained(sequential)).to_json()
    other = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), keras.layers.Dense(5), keras.layers.Dense(5)])
    pairing = find_stored(other, [leaf for leaf in stored["leaves"] if leaf["kind"] == "weight"])
    assert [leaf.key for leaf in pairing.missing] == ["layers/dense_2/vars/0", "layers/dense_2/vars/1"]
    differ = [s.role.key for s, leaf in pairing.pairs if s.shape != leaf.shape]
    assert differ == ["layers/dense_1/vars/0", "layers/dense_1/vars/1"]
    assert {s.role.kind for s in find_stored(other, stored).unexpected} == {"slot", "optimizer", "metric"}


@pytest.mark.slow
def test_pairs_leaves_of_other_dtypes():
    stored = state_tree_of(models.randomise(models.build("gemma1", "bfloat16"))).to_json()
    pairing = find_stored(models.build("gemma1", "float32"), stored)
    assert not pairing.missing and not pairing.unexpected
    assert all(s.dtype != leaf.dtype for s, leaf in pairing.pairs)


def test_task_and_backbone():
    task, backbone = models.causal_lm("gemma1"), models.build("gemma1")
    keys = {leaf.key for leaf in state_tree_of(task).weights_only().leaves if leaf.kind == "weight"}
    assert len(keys) == len(task.weights)
    stored = [leaf for leaf in state_tree_of(task).to_json()["leaves"] if leaf["kind"] == "weight"]
    pairing = find_stored(backbone, stored, rename={"layers/gemma_backbone": ""})
    assert all(s.shape == leaf.shape for s, leaf in pairing.pairs)
    assert not [leaf for leaf in pairing.missing if leaf.kind == "weight"]
    assert len(pairing.pairs) == len(backbone.weights)


def test_lora_keeps_the_keys_of_what_it_adapts():
    plain, adapted = models.build("gemma1"), models.build("gemma1")
    adapted.enable_lora(2)
    before = current_value(adapted.weights[0])
    pairing = find_stored(adapted, state_tree_of(plain).to_json())
    assert not pairing.unexpected and all(s.shape == leaf.shape for s, leaf in pairing.pairs)
    assert {leaf.key.rsplit("/", 1)[1] for leaf in pairing.missing} == {"lora_kernel_a", "lora_kernel_b"}
    assert_one_to_one(find_stored(adapted, state_tree_of(adapted).to_json()))
    assert adapted.weights[0] is not None and current_value(adapted.weights[0]) is before
    assert any(getattr(layer, "lora_enabled", False) for layer in own_layers(adapted))


@pytest.mark.filterwarnings("ignore:Layer InputLayer does not have")
def test_int8_with_lora():
    def build():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), keras.layers.Dense(8)])
        model.quantize("int8")
        model.layers[0].enable_lora(2)
        return model

    leaves = state_tree_of(build()).leaves
    assert len({leaf.key for leaf in leaves}) == len(leaves)
    assert_one_to_one(find_stored(build(), state_tree_of(build()).to_json()))


NAMED = {"path": ["a"], "kind": "weight", "key": "", "name": [], "shape": [], "dtype": ""}


@pytest.mark.parametrize(
    "leaf", [{}, {"path": 3}, [], {"path": ["a"], "kind": 1, "key": "", "shape": [], "dtype": ""}, NAMED]
)
def test_refuses_a_strange_structure(leaf):
    with pytest.raises(SourceError, match=r"structure\.json has a leaf"):
        find_stored(sequential(), [leaf])


@pytest.mark.parametrize("leaves", [5, None, True])
def test_refuses_a_structure_without_leaves(leaves):
    with pytest.raises(SourceError, match=r"structure\.json has no valid list of leaves"):
        find_stored(sequential(), {"version": 1, "leaves": leaves})


class Pair(keras.layers.Layer):
    """Keeps its weights in a list, as many layers of users do."""

    def build(self, shape):
        self.pair = [self.add_weight(shape=(shape[-1],), initializer="ones", name=f"w{i}") for i in range(2)]
        self.scalars = [self.add_weight(shape=(), initializer="ones", name=f"s{i}") for i in range(2)]

    def call(self, x):
        return x * self.pair[0] * self.scalars[0] + self.pair[1] * self.scalars[1]


def test_weights_in_a_list_have_a_key_each():
    model = keras.Sequential([keras.Input((4,)), Pair()])
    model.compile("adam", "mse")
    keys = [leaf.key for leaf in state_tree_of(model).leaves if leaf.kind == "weight"]
    assert len(keys) == len(set(keys)) == 4
