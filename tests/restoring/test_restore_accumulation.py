"""Another ``gradient_accumulation_steps``: the number of updates is kept, not the number of batches."""

import shutil

import keras
import numpy as np
import pytest
from saved_steps import edited_structure

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MismatchError
from shardload.keras_bridge.variables import value_of
from shardload.optimizers import REKLS
from shardload.optimizers.tensor_parallel import TensorParallelOptimizer

optimizers = keras.optimizers
SCHEDULE = optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
MAKE = {
    "adam": lambda n: optimizers.Adam(0.5, gradient_accumulation_steps=n),
    "schedule": lambda n: optimizers.Adam(SCHEDULE, gradient_accumulation_steps=n),
    "scaled": lambda n: optimizers.LossScaleOptimizer(optimizers.Adam(0.5, gradient_accumulation_steps=n)),
    "split": lambda n: TensorParallelOptimizer(optimizers.Adam(0.5, gradient_accumulation_steps=n)),
    "rekls": lambda n: REKLS(0.5, gradient_accumulation_steps=n),
}
DATA = np.ones((16, 3)), np.ones((16, 4))


def build(optimizer, n):
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="first")], name="net")
    model.compile(MAKE[optimizer](n), "mse")
    return model


def batches_of(model):
    return next(v for v in model.optimizer.variables if v.path.endswith("/iteration") and "scale" not in v.path)


def trained(optimizer, n, batches):
    """As after training with this number of batches."""
    model = build(optimizer, n)
    model.optimizer.build(model.trainable_variables)
    batches_of(model).assign(batches)
    waiting = batches % (n or 1)
    for variable in model.optimizer.variables:
        if variable.name.endswith("gradient_accumulator"):
            variable.assign(np.full(variable.shape, waiting))
    return model


def restored(model, root):
    return shardload.restore(model, root, strict=False)


def from_archive(model, root):
    return shardload.load_weights(model, root / "model.keras")


def from_step(model, root):
    return shardload.load_weights(model, root / "7", strict=False)


def from_older_step(model, root):
    """From a step without the number of batches in its structure; it is in the model's configuration."""
    older = root.parent / "older"
    shutil.copytree(root / "7", older / "7")
    with edited_structure(older / "7") as structure:
        counts = [leaf for leaf in structure["leaves"] if leaf["key"].endswith("iteration")]
        assert [leaf.pop("gradient_accumulation_steps") for leaf in counts]
    return shardload.restore(model, older, strict=False)


def from_step_of_keras(model, root):
    other = root.parent / "plain"
    shutil.copytree(root / "7", other / "7")
    shutil.rmtree(other / "7" / "shardload")
    return shardload.restore(model, other, strict=False)


@pytest.mark.sample(2)
@pytest.mark.parametrize("load", [restored, from_archive, from_step, from_older_step, from_step_of_keras])
@pytest.mark.parametrize("optimizer", MAKE)
@pytest.mark.parametrize(("before", "now"), [(None, 4), (4, None), (4, 8), (4, 4)])
def test_the_updates_are_kept(load, optimizer, before, now, tmp_path):
    if optimizer == "rekls" and load is from_archive and before is not now and None in (before, now):
        pytest.skip("state of an optimizer that is not of Keras goes by number of variables, as in Keras")
    if optimizer not in ("adam", "scaled") and load in (from_older_step, from_step_of_keras):
        pytest.skip("the same as for adam")
    source = trained(optimizer, before, 40)
    shardload.save(source, tmp_path / "run", step=7)
    source.save(tmp_path / "run" / "model.keras")
    target = build(optimizer, now)
    report = load(target, tmp_path / "run")
    updates = int(source.optimizer.iterations)
    assert int(target.optimizer.iterations) == updates == 40 // (before or 1)
    assert int(value_of(batches_of(target))) == updates * (now or 1)
    assert float(SCHEDULE(target.optimizer.iterations)) == float(SCHEDULE(source.optimizer.iterations))
    told = [note for note in report.notes if note.startswith(f"optimizer.iterations stays {updates}: ")]
    assert len(told) == (before != now)
    if told:
        assert f"saved with gradient_accumulation_steps={before}, and the optimizer has " in told[0]
        assert ("scheduled" in told[0]) == (optimizer == "schedule")
        assert "gradients" not in told[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("load", [restored, from_archive, from_step])
@pytest.mark.parametrize("optimizer", ["adam", "scaled", "split", "rekls"])
@pytest.mark.parametrize("mesh", [None, "1x2"])
def test_gradients_that_wait_for_an_update_continue_with_the_same_number_only(load, optimizer, mesh, tmp_path):
    source = trained(optimizer, 4, 42)
    shardload.save(source, tmp_path / "run", step=7)
    source.save(tmp_path / "run" / "model.keras")
    for now, batches, waiting in ((4, 42, 2), (8, 80, 0), (2, 20, 0)):
        target = trained(optimizer, now, now + 1)
        if mesh is not None:
            shardload.load_weights(target, tmp_path / "run" / "7", mesh=mesh)
        report = load(target, tmp_path / "run")
        assert int(value_of(batches_of(target))) == batches
        sums = [value_of(v) for v in target.optimizer.variables if v.name.endswith("gradient_accumulator")]
        assert len(sums) == 2
        for value in sums:
            np.testing.assert_array_equal(value, np.full(value.shape, waiting))
        dropped = [note for note in report.notes if "The summed gradients of 2 batches, which waited" in note]
        assert len(dropped) == (now != 4)


@pytest.mark.parametrize("said", [0, -4, "4", True, 10**30, None])
def test_a_manipulated_number_is_as_good_as_none(said, tmp_path):
    shardload.save(trained("adam", 4, 40), tmp_path, step=7)
    with edited_structure(tmp_path / "7") as structure:
        next(leaf for leaf in structure["leaves"] if leaf["key"] == "iteration")["gradient_accumulation_steps"] = said
    target = build("adam", 8)
    shardload.restore(target, tmp_path)
    assert int(target.optimizer.iterations) == 10  # the configuration says it


def test_weights_alone_say_nothing_of_the_optimizer(tmp_path):
    shardload.save(trained("adam", 4, 42), tmp_path, step=7)
    target = trained("adam", 8, 3)
    report = shardload.restore(target, tmp_path, items="weights")
    assert int(value_of(batches_of(target))) == 3 and not any("accumulation" in note for note in report.notes)


def test_strictly_the_slots_have_to_be_the_same(tmp_path):
    shardload.save(trained("adam", None, 40), tmp_path, step=7)
    target = build("adam", 4)
    with pytest.raises(MismatchError, match="Only the optimizer differs"):
        shardload.restore(target, tmp_path)
    assert not target.optimizer.built


def test_a_checkpointer_and_a_resumed_fit_do_the_same(tmp_path, capsys):
    build("adam", 4).fit(*DATA, batch_size=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path)])
    model = build("adam", 2)
    assert shardload.Checkpointer(tmp_path).restore(model).step == 8
    assert int(model.optimizer.iterations) == 2
    again = build("adam", 2)
    again.fit(*DATA, batch_size=2, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True)])
    assert int(again.optimizer.iterations) == 2 + 4
    assert "Resumed step 8: optimizer.iterations stays 2: " in capsys.readouterr().out


def test_batches_that_a_resume_undoes_are_counted_as_batches(tmp_path, capsys):
    model = build("adam", 4)
    model.fit(*DATA, batch_size=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path)])
    model.fit(*DATA, batch_size=2, verbose=0)
    model.fit(*DATA, batch_size=2, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True)])
    assert "this model had trained 16 batches, so its last 8 are undone" in capsys.readouterr().out


def test_a_file_that_does_not_say_the_number_is_read_as_keras_reads_it(tmp_path):
    trained("adam", 4, 40).save_weights(tmp_path / "model.weights.h5")
    for now, updates in ((8, 5), (4, 10)):
        target = trained("adam", now, 0)
        report = shardload.load_weights(target, tmp_path / "model.weights.h5")
        assert int(target.optimizer.iterations) == updates
        [told] = [note for note in report.notes if "does not say the gradient_accumulation_steps" in note]
        assert f"it counted 40 batches, and optimizer.iterations is {updates}, as for" in told


def test_an_optimizer_of_a_loop_of_ones_own(tmp_path):
    shardload.save(trained("adam", 4, 42), tmp_path, step=7)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="first")], name="net")
    optimizer = MAKE["adam"](8)
    report = shardload.restore(model, tmp_path, optimizer=optimizer)
    assert int(optimizer.iterations) == 10 and any("from 42 to 80" in note for note in report.notes)


class Gan(keras.Model):
    """A model with an optimizer besides the compiled one."""

    def __init__(self, n):
        super().__init__(name="gan")
        self.dense = keras.layers.Dense(4, name="dense")
        self.other = optimizers.Adam(0.5, gradient_accumulation_steps=n)

    def call(self, inputs):
        return self.dense(inputs)

    def get_config(self):
        return {"n": self.other.gradient_accumulation_steps}


def gan(n):
    model = Gan(n)
    model(np.ones((1, 3)))
    model.compile("sgd", "mse")
    return model


def test_optimizers_besides_the_compiled_one_keep_their_updates(tmp_path):
    source, target = gan(4), gan(8)
    source.other.build(source.trainable_variables)
    next(v for v in source.other.variables if v.path.endswith("/iteration")).assign(42)
    shardload.save(source, tmp_path, step=7)
    report = shardload.restore(target, tmp_path)
    assert int(target.other.iterations) == int(source.other.iterations) == 10
    assert sum(note.startswith("optimizer.iterations stays 10: ") for note in report.notes) == 1
