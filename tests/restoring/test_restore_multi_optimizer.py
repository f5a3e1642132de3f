"""Several optimizers for the weights of one model: their state is matched by weight and class, not by position."""

import json

import keras
import numpy as np
import pytest
from saved_steps import edited_structure, save_step, with_optimizer_values

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MismatchError
from shardload.keras_bridge.variables import value_of

K = keras.optimizers
DATA = np.ones((8, 3)), np.ones((8, 4))


def adam(**options):
    return K.Adam(0.5, **options)


def sgd():
    return K.SGD(0.25, momentum=0.5)


def build(*, first=adam, second=sgd, turned=False, scaled=False, names=("a", "b")):
    """A model of two layers, each with its optimizer; ``turned`` for the optimizers in another order."""
    layers = [keras.layers.Dense(4, name=name) for name in names]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    one, two = first(), second()
    found = K.OptimizerMap(two, {".*/a/.*": one}) if turned else K.OptimizerMap(one, {".*/b/.*": two})
    optimizer = K.MultiOptimizer(found)
    model.compile(K.LossScaleOptimizer(optimizer) if scaled else optimizer, "mse")
    return model


def inner(model):
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    return {type(one).__name__: one for one in optimizer.optimizers}


def trained(**options):
    return with_optimizer_values(build(**options))


def assert_same(one, other):
    for mine, its in zip(one.variables, other.variables, strict=True):
        np.testing.assert_array_equal(value_of(mine), value_of(its), err_msg=mine.path)


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mesh", [None, "1x2"])
def test_the_order_of_the_optimizers_does_not_matter(scaled, mesh, tmp_path):
    source, target = trained(scaled=scaled), build(turned=True, scaled=scaled)
    assert list(inner(source)) == ["SGD", "Adam"]
    save_step(source, tmp_path, 7)
    report = shardload.restore(target, tmp_path, mesh=mesh)
    assert list(inner(target)) == ["Adam", "SGD"] and not report.missing and not report.unused
    for name, optimizer in inner(source).items():
        assert_same(inner(target)[name], optimizer)


def test_two_of_one_class_are_told_by_their_weights(tmp_path):
    source, target = trained(second=lambda: K.Adam(0.25)), build(second=lambda: K.Adam(0.25), turned=True)
    save_step(source, tmp_path, 7)
    shardload.restore(target, tmp_path)
    for mine, its in zip(target.optimizer.optimizers, reversed(source.optimizer.optimizers), strict=True):
        assert_same(mine, its)


def test_another_class_does_not_continue_but_the_others_do(tmp_path):
    source, target = trained(), build(second=lambda: K.RMSprop(0.125))
    save_step(source, tmp_path, 7)
    with pytest.raises(MismatchError, match="Only the optimizer differs"):
        shardload.restore(build(second=lambda: K.RMSprop(0.125)), tmp_path)
    report = shardload.restore(target, tmp_path, strict=False)
    assert_same(inner(target)["Adam"], inner(source)["Adam"])
    new = inner(target)["RMSprop"]
    assert float(new.learning_rate) == 0.125 and not any(np.asarray(v).any() for v in new.variables if v.shape)
    assert int(new.iterations) == 0
    assert any("begin as in a new optimizer: " in note and "velocities" in note for note in report.notes)


def grouped(groups, *, frozen=()):
    """A model of four weights, with an Adam for each group of them and an SGD for the others."""
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(4, name=name) for name in ("a", "b")]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    for name in frozen:
        model.get_layer(name).trainable = False
    found = K.OptimizerMap(sgd(), {group: adam() for group in groups})
    model.compile(K.MultiOptimizer(found), "mse")
    return with_optimizer_values(model)


def moments(model):
    """The count and the slots of the Adam of each weight."""
    adams = [one for one in model.optimizer.optimizers if type(one) is K.Adam]
    return {
        slot.name: (int(one.iterations), np.asarray(value_of(slot)))
        for one in adams
        for slot in one.variables
        if slot.name.endswith(("_momentum", "_velocity"))
    }


def test_the_count_goes_with_the_slots_if_the_first_weight_is_another(tmp_path):
    """What several optimizers count is matched by the first weight of each, which may now be frozen."""
    source, target = grouped([".*/(a|b)/.*"]), grouped([".*/(a|b)/.*"], frozen=["a"])
    target.optimizer.iterations.assign(0)
    save_step(source, tmp_path, 7)
    assert not shardload.restore(target, tmp_path, strict=False).missing
    for name, (count, value) in moments(target).items():
        assert count == moments(source)[name][0]
        np.testing.assert_array_equal(value, moments(source)[name][1])


def test_slots_do_not_continue_without_their_count(tmp_path):
    """One Adam became two: its count goes to one of them."""
    source, target = grouped([".*/(a|b)/.*"]), grouped([".*/a/.*", ".*/b/.*"])
    save_step(source, tmp_path, 7)
    report = shardload.restore(target, tmp_path, strict=False)
    stored = moments(source)
    for name, (count, value) in moments(target).items():
        continues = name.startswith("net_a_")
        assert count == (stored[name][0] if continues else 0)
        np.testing.assert_array_equal(value, stored[name][1] if continues else 0)
    assert "the step has no iterations for the optimizer of 2 weights: its slots begin as in a new one" in report.notes


def test_averages_of_one_of_them_begin_with_its_weights(tmp_path):
    source, target = trained(), build(first=lambda: adam(use_ema=True))
    save_step(source, tmp_path, 7)
    shardload.restore(target, tmp_path, strict=False)
    averages = [v for v in inner(target)["Adam"].variables if v.name.endswith("_average")]
    for average, weight in zip(averages, target.layers[0].weights, strict=True):
        np.testing.assert_array_equal(value_of(average), value_of(weight))


def test_each_keeps_its_updates_if_it_accumulates_other_batches(tmp_path):
    source = trained(first=lambda: adam(gradient_accumulation_steps=4))
    save_step(source, tmp_path, 7)
    target = build(first=lambda: adam(gradient_accumulation_steps=8))
    report = shardload.restore(target, tmp_path)
    for name, optimizer in inner(source).items():
        assert int(inner(target)[name].iterations) == int(optimizer.iterations)
    assert sum(note.startswith("optimizer.iterations stays") for note in report.notes) == 1


def test_an_older_step_numbers_their_state(tmp_path):
    source, target = trained(), build()
    save_step(source, tmp_path, 7)
    with edited_structure(tmp_path / "7") as structure:
        state = [leaf for leaf in structure["leaves"] if leaf["kind"] in ("slot", "optimizer")]
        assert len(state) == len(source.optimizer.variables)
        for position, leaf in enumerate(state):
            if leaf["key"].startswith("inner_optimizers/"):
                leaf.pop("slot", None), leaf.pop("of", None)
                leaf |= {"kind": "optimizer", "key": f"variables/{position}"}
    shardload.restore(target, tmp_path)
    assert_same(target.optimizer, source.optimizer)


def test_a_layer_that_moved_takes_its_optimizer_along(tmp_path):
    source = trained()
    save_step(source, tmp_path, 7)
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, name="a")(inputs)
    new = keras.layers.Dense(4, name="new", trainable=False)(hidden)
    target = keras.Model(inputs, keras.layers.Dense(4, name="b")(new))
    one, two = adam(), sgd()
    target.compile(K.MultiOptimizer(lambda weight: two if weight.path.startswith("b/") else one), "mse")
    shardload.restore(target, tmp_path, rename={"layers/dense_1": "layers/dense_2"}, strict=False)
    for name, optimizer in inner(source).items():
        assert_same(inner(target)[name], optimizer)


def test_a_partial_step_has_the_counts_of_all_optimizers(tmp_path):
    shardload.save(trained(), tmp_path, step=7, variables=["*/bias"])
    found = json.loads((tmp_path / "7" / "shardload" / "structure.json").read_text())
    keys = {leaf["key"] for leaf in found["leaves"]}
    assert {"inner_optimizers/0/SGD/iteration", "inner_optimizers/1/Adam/iteration"} <= keys
    assert not any(leaf["kind"] == "optimizer" for leaf in found["left_out"])


def test_a_resumed_run_continues(tmp_path):
    build().fit(*DATA, batch_size=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path)])
    model = build(turned=True)
    model.fit(*DATA, batch_size=2, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True)])
    assert [int(one.iterations) for one in (model.optimizer, *model.optimizer.optimizers)] == [8, 8, 8]
