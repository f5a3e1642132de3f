"""Layout rules that users register for their own layers."""

import jax
import keras
import numpy as np
import pytest

import shardload
from shardload.errors import LayoutError, UsageError
from shardload.parallel import choose
from shardload.sharding.mesh import MeshSpec


@pytest.fixture
def experts():
    """A class of its own for each test, so that rules do not outlive it."""

    class Experts(keras.layers.Layer):
        def build(self, shape):
            self.gate = self.add_weight(shape=(4, shape[-1], 16), name="gate")
            self.router = self.add_weight(shape=(64, 64), name="router")
            self.scale = self.add_weight(shape=(4, 16), name="scale")

        def call(self, x):
            return x @ self.gate[0]

    return Experts


def chosen(layer_class, mesh="1x4"):
    model = keras.Sequential([keras.Input((8,)), layer_class(name="experts")])
    return model, choose(model, MeshSpec.parse(mesh))


def specs(choice):
    return {v.path.rsplit("/", 1)[-1]: str(v.layout) for v in choice.variables if "experts" in v.path}


def test_a_rule_decides_what_is_split_and_the_rest_stays_as_it_was(experts):
    assert specs(chosen(experts)[1]) == {"gate": "(-, -, model)", "router": "(-, model)", "scale": "(-, -)"}

    @shardload.layout_rule(experts)
    def split(layer):
        return {"gate": (0, 2), "router": ()}

    _, choice = chosen(experts)
    assert specs(choice) == {"gate": "(model, -, -)", "router": "(-, -)", "scale": "(-, -)"}
    assert {v.rule for v in choice.variables if v.path.endswith("gate")} == {"rule for Experts"}
    assert split(None)["router"] == ()


def test_a_small_variable_is_split_where_a_rule_names_it(experts):
    shardload.layout_rule(experts)(lambda layer: {"scale": (1, 0)})
    assert specs(chosen(experts)[1])["scale"] == "(-, model)"


def test_a_dim_that_does_not_divide_is_a_fallback(experts):
    shardload.layout_rule(experts)(lambda layer: {"gate": (0, 2)})
    _, choice = chosen(experts, "1x8")
    assert specs(choice)["gate"] == "(-, -, model)"
    (fallback,) = (f for f in choice.fallbacks if f.variable.endswith("gate"))
    assert (fallback.wanted, fallback.got) == ("(model, -, -)", "(-, -, model)")


def test_a_subclass_inherits_a_rule_until_it_has_its_own(experts):
    class Wider(experts):
        pass

    shardload.layout_rule(experts)(lambda layer: {"gate": (0,)})
    assert specs(chosen(Wider)[1])["gate"] == "(model, -, -)"
    shardload.layout_rule(Wider)(lambda layer: {"gate": (1,)})
    assert specs(chosen(Wider)[1])["gate"] == "(-, model, -)"


def test_a_rule_wins_over_what_a_block_derives_for_its_sublayers():
    class Mine(keras.layers.Dense):
        pass

    shardload.layout_rule(Mine)(lambda layer: {"kernel": (0,)})
    found = specs(choose(keras.Sequential([keras.Input((64,)), Mine(128, name="experts")]), MeshSpec.parse("1x4")))
    assert found == {"kernel": "(model, -)", "bias": "(-)"}  # the bias follows its kernel's outputs


def test_a_load_places_shards_by_the_rule_and_slots_follow(experts, tmp_path):
    shardload.layout_rule(experts)(lambda layer: {"gate": (0,)})
    model, _ = chosen(experts)
    model.compile("adam", "mse")
    model.optimizer.build(model.trainable_variables)
    values = [np.asarray(v) for v in model.weights]
    model.save_weights(tmp_path / "m.weights.h5")
    shardload.load_weights(model, tmp_path / "m.weights.h5", mesh="1x4", layout="auto")
    assert all((np.asarray(v) == old).all() for v, old in zip(model.weights, values, strict=True))
    of_gate = [v for v in model.optimizer.variables if v.path.endswith(("gate_momentum", "gate_velocity"))]
    assert len(of_gate) == 2
    for variable in (model.layers[0].gate, *of_gate):
        assert variable.value.sharding.shard_shape((4, 8, 16)) == (1, 8, 16)
        assert variable.value.sharding.device_set == set(jax.devices()[:4])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"gat": (0,)}, r"names the variable 'gat', but the layer has gate, router, scale"),
        ({"gate": (3,)}, r"gives 'gate' the dims \(3,\), but its shape is \(4, 8, 16\): expected different integers"),
        ({"gate": (0, 0)}, r"expected different integers from 0 to 2"),
        ({"gate": (True,)}, r"expected different integers from 0 to 2"),
        ({"gate": 0}, r"The layout rule for Experts \(.*experts\) failed: TypeError"),
        ({"gate": {0, 2}}, r"failed: TypeError: dims are a tuple or a list, not \{0, 2\}"),
        (None, r"failed: AttributeError.*A rule returns"),
    ],
)
def test_a_rule_that_cannot_be_applied_is_an_error(experts, answer, message):
    shardload.layout_rule(experts)(lambda layer: answer)
    with pytest.raises(LayoutError, match=message):
        chosen(experts)


@pytest.mark.parametrize("layer_class", [int, "Experts", None, keras.layers.Dense(1)])
def test_a_rule_is_for_a_class_of_layers(layer_class):
    with pytest.raises(UsageError, match=r"expected a subclass of keras\.layers\.Layer"):
        shardload.layout_rule(layer_class)


@pytest.mark.parametrize("rule", [{"gate": (0,)}, keras.layers.Dense])
def test_a_rule_is_a_function(experts, rule):
    with pytest.raises(UsageError, match="expected a function of the layer"):
        shardload.layout_rule(experts)(rule)


def test_numpy_integers_are_integers(experts):
    shardload.layout_rule(experts)(lambda layer: {"gate": list(np.argsort(layer.gate.shape))})
    assert specs(chosen(experts)[1])["gate"] == "(model, -, -)"


def test_two_variables_of_one_name_are_an_error():
    class Twice(keras.layers.Layer):
        def build(self, shape):
            self.one, self.two = (self.add_weight(shape=(64, 64), name="w") for _ in range(2))

        def call(self, x):
            return x

    shardload.layout_rule(Twice)(lambda layer: {"w": (0,)})
    with pytest.raises(LayoutError, match="several variables of the layer have that name"):
        chosen(Twice)


def test_layers_that_were_never_built_are_left_alone(experts):
    shardload.layout_rule(experts)(lambda layer: {"gate": (0,)})

    class Holder(experts):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.unused = experts()

    assert specs(chosen(Holder)[1])["gate"] == "(model, -, -)"


def test_replicated_does_not_call_rules(experts):
    shardload.layout_rule(experts)(lambda layer: 1 / 0)
    model = keras.Sequential([keras.Input((8,)), experts(name="experts")])
    assert choose(model, MeshSpec.parse("1x4"), "replicated").sharded == 0
