"""The state of one optimizer continued in another: by what each variable is, never by name or number."""

import itertools
import shutil

import keras
import numpy as np
import pytest
from saved_steps import edited_structure, save_step, with_optimizer_values

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MismatchError
from shardload.keras_bridge.optimizer_slots import kind_of
from shardload.keras_bridge.variables import value_of
from shardload.mapping.roles import SLOT_KINDS
from shardload.optimizers.tensor_parallel import TensorParallelOptimizer

optimizers = keras.optimizers


def schedule():
    return optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)


MAKE = {
    "adam": lambda: optimizers.Adam(0.5),
    "schedule": lambda: optimizers.Adam(schedule()),
    "adamw": lambda: optimizers.AdamW(0.5),
    "amsgrad": lambda: optimizers.Adam(0.5, amsgrad=True),
    "ema": lambda: optimizers.Adam(0.5, use_ema=True),
    "accumulating": lambda: optimizers.Adam(0.5, gradient_accumulation_steps=2),
    "scaled": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.5)),
    "scaled ema": lambda: optimizers.LossScaleOptimizer(optimizers.Adam(0.5, use_ema=True)),
    "split": lambda: TensorParallelOptimizer(optimizers.Adam(0.5)),
    "split ema": lambda: TensorParallelOptimizer(optimizers.Adam(0.5, use_ema=True)),
    "nadam": lambda: optimizers.Nadam(0.5),
    "lamb": lambda: optimizers.Lamb(0.5),
    "lion": lambda: optimizers.Lion(0.5),
    "sgd": lambda: optimizers.SGD(0.5),
    "sgd ema": lambda: optimizers.SGD(0.5, use_ema=True),
    "momentum": lambda: optimizers.SGD(0.5, momentum=0.9),
    "rmsprop": lambda: optimizers.RMSprop(0.5),
    "rmsprop momentum": lambda: optimizers.RMSprop(0.5, momentum=0.9),
    "schedule-free": lambda: optimizers.ScheduleFreeAdamW(0.5),
    "muon": lambda: optimizers.Muon(0.5),
}


def build(optimizer, *, seed=0):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="first")], name="net")
    model.compile(MAKE[optimizer]() if isinstance(optimizer, str) else optimizer, "mse")
    return model


def trained(optimizer):
    return with_optimizer_values(build(optimizer))


def state(model):
    """Value by the end of the name: ``kernel_momentum``, ``iteration``."""
    found = {}
    for variable in model.optimizer.variables:
        owner, _, last = variable.path.rpartition("/")
        name = f"scale {last}" if owner.startswith("loss_scale") else last
        found[name.removeprefix("net_first_")] = np.asarray(value_of(variable))
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder with one step of each optimizer, and its archive."""
    root = tmp_path_factory.mktemp("optimizers")
    models = {}

    def of(name):
        if name not in models:
            models[name] = trained(name)
            save_step(models[name], root / name, 7)
            models[name].save(root / name / "model.keras")
        return models[name], root / name

    return of


def assert_continued(target, source, *, but=()):
    mine, its = state(target), state(source)
    # Keras stores batches, of which an update may take several.
    for found, model in ((mine, target), (its, source)):
        found["iteration"] = np.asarray(model.optimizer.iterations)
    common = [name for name in mine if name in its and name != "learning_rate" and not name.startswith("scale ")]
    assert "iteration" in common and len(common) > 2
    for name in common:
        np.testing.assert_array_equal(mine[name], its[name], err_msg=name)
    of_weights = [name for name in mine if name not in its and name.startswith(("kernel_", "bias_"))]
    assert {name.rpartition("_")[2] for name in of_weights} == set(but)
    for weight, stored in zip(target.weights, source.weights, strict=True):
        np.testing.assert_array_equal(value_of(weight), value_of(stored))


@pytest.mark.parametrize(
    ("before", "now"),
    [("adam", "schedule"), ("schedule", "adam"), ("adam", "adamw"), ("adamw", "lamb"), ("adam", "split")],
)
def test_optimizers_with_the_same_slots_load_strictly(saved, before, now):
    source, root = saved(before)
    target = build(now, seed=1)
    report = shardload.restore(target, root)
    assert_continued(target, source)
    assert not report.missing and not report.unused
    schedules = [note for note in report.notes if "schedule" in note]
    assert len(schedules) == ("schedule" in (before, now))


@pytest.mark.parametrize(
    ("before", "now", "new"),
    [
        ("adam", "ema", "average"),
        ("adam", "split ema", "average"),
        ("adam", "amsgrad", "hat"),
        ("adam", "accumulating", "accumulator"),
        ("adam", "scaled", "scale"),
        ("adam", "scaled ema", "average"),
        ("scaled", "adam", ""),
        ("scaled", "ema", "average"),
        ("amsgrad", "adamw", ""),
        ("ema", "adamw", ""),
        ("adam", "nadam", "variable"),
        ("nadam", "adam", ""),
        ("adam", "lion", ""),
        ("adam", "rmsprop", ""),
    ],
)
@pytest.mark.parametrize("mesh", [None, "1x2"])
def test_what_both_have_continues_and_the_rest_begins(saved, before, now, new, mesh):
    source, root = saved(before)
    target = build(now, seed=1)
    with pytest.raises(MismatchError, match="Only the optimizer differs"):
        shardload.restore(build(now), root)
    report = shardload.restore(target, root, strict=False, mesh=mesh)
    assert_continued(target, source, but={new} & {"average", "hat", "accumulator"})
    _assert_averages_begin_with_the_weights(target)
    assert len([note for note in report.notes if "continues with what is stored" in note]) == bool(new)


def _assert_averages_begin_with_the_weights(model):
    averages = {name: value for name, value in state(model).items() if name.endswith("_average")}
    for name, value in averages.items():
        [weight] = [w for w in model.weights if name.startswith(w.name)]
        np.testing.assert_array_equal(value, value_of(weight), err_msg=name)
    before = [np.asarray(value_of(w)) for w in model.weights]
    model.optimizer.finalize_variable_values(model.trainable_variables)
    for value, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(value, value_of(weight))


def test_slots_that_the_step_lacks_begin_anew_in_a_model_that_trained(saved):
    source, root = saved("adam")
    for now in ("ema", "amsgrad"):
        target = trained(now)
        report = shardload.restore(target, root, strict=False)
        assert_continued(target, source, but=[{"ema": "average", "amsgrad": "hat"}[now]])
        _assert_averages_begin_with_the_weights(target)
        assert not any(value.any() for name, value in state(target).items() if name.endswith("hat"))
        assert not any("moving averages of its weights" in note for note in report.notes)
    target.fit(np.ones((4, 3)), np.ones((4, 4)), verbose=0)  # weights and averages share no buffer


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("momentum", "adam"),  # contains the learning rate
        ("momentum", "lion"),
        ("adam", "sgd"),
        ("lion", "adam"),
        ("rmsprop momentum", "adam"),
        ("adam", "schedule-free"),
        ("muon", "adam"),
    ],
)
@pytest.mark.parametrize("build", [build, trained])
def test_another_kind_of_optimizer_stays_as_it_is_with_its_count_and_rate(saved, before, now, build):
    _, root = saved(before)
    target = build(now)
    found = state(target)
    with pytest.raises(MismatchError, match="Only the optimizer differs"):
        shardload.restore(target, root)
    for load, source in ((shardload.restore, root), (shardload.load_weights, root / "model.keras")):
        report = load(target, source, strict=False)
        assert state(target).keys() == found.keys()
        assert all(np.array_equal(found[name], value) for name, value in state(target).items())
        assert any("does not continue with the stored state" in note for note in report.notes)
    target.fit(np.ones((4, 3)), np.ones((4, 4)), verbose=0)


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("adam", "schedule"),
        ("adam", "adamw"),
        ("adam", "ema"),
        ("amsgrad", "ema"),
        ("scaled", "adam"),
        ("adam", "scaled"),
    ],
)
@pytest.mark.parametrize("make", [build, trained])
def test_an_archive_says_what_its_optimizer_has(saved, before, now, make):
    source, root = saved(before)
    target = make(now)
    shardload.load_weights(target, root / "model.keras")
    assert_continued(target, source, but=["average"] if now == "ema" else [])
    _assert_averages_begin_with_the_weights(target)


@pytest.mark.parametrize("now", ["adamw", "schedule", "ema"])
def test_a_tree_without_roles_has_them_in_its_names(saved, tmp_path, now):
    source, root = saved("adam")
    shutil.copytree(root / "7", tmp_path / "run" / "7")
    shutil.rmtree(tmp_path / "run" / "7" / "shardload")
    target = build(now, seed=1)
    shardload.restore(target, tmp_path / "run", strict=False)
    assert_continued(target, source, but=["average"] if now == "ema" else [])
    _assert_averages_begin_with_the_weights(target)


def test_an_older_step_that_does_not_name_its_optimizer_is_matched_by_attribute(saved, tmp_path):
    source, root = saved("adam")
    shutil.copytree(root / "7", tmp_path / "run" / "7")
    with edited_structure(tmp_path / "run" / "7") as structure:
        assert structure.pop("optimizers") == {"": "Adam"}
    target = build("adamw")
    shardload.restore(target, tmp_path / "run")
    assert_continued(target, source)


DATA = np.ones((8, 3)), np.ones((8, 4))


def test_a_resumed_fit_continues_with_a_schedule(tmp_path):
    model, again, other = build("adam"), build("schedule"), build("schedule")
    model.fit(*DATA, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path)])
    assert shardload.Checkpointer(tmp_path).restore(other).step == 1
    assert_continued(other, model)
    again.fit(*DATA, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True)])
    assert int(again.optimizer.iterations) == 2


def test_a_resumed_fit_says_whose_learning_rate_it_has(tmp_path, capsys):
    build("adam").fit(*DATA, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path)])
    told, kept = build(optimizers.Adam(0.25)), build(optimizers.Adam(0.25))
    shardload.restore(kept, tmp_path)
    kept.optimizer.learning_rate = 0.125
    for model, rate in ((kept, 0.125), (told, 0.125)):
        model.fit(*DATA, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True)])
        assert float(model.optimizer.learning_rate) == rate
    wanted = "the state of the optimizer was loaded too: its learning rate was 0.25, and is 0.125. To train with"
    assert capsys.readouterr().out.count(wanted) == 1


def optimizers_of_keras():
    found = [getattr(optimizers, name) for name in dir(optimizers)]
    wrappers = {getattr(optimizers, f"{kind}Optimizer", None) for kind in ("", "LossScale", "Multi")}
    return {c for c in found if isinstance(c, type) and issubclass(c, optimizers.Optimizer) and c not in wrappers}


def test_every_optimizer_of_keras_is_known():
    kinds = {kind_of(c(learning_rate=0.1)) for c in optimizers_of_keras()}
    assert kinds == {c.__name__ for c in optimizers_of_keras()} == SLOT_KINDS


@pytest.mark.parametrize("kind", sorted(SLOT_KINDS))
def test_every_optimizer_of_keras_continues_and_begins_its_averages(kind, tmp_path):
    make = getattr(optimizers, kind)
    source = trained(make(learning_rate=0.5))
    save_step(source, tmp_path, 7)
    for averaging in (False, True):
        target = build(make(learning_rate=0.5, use_ema=averaging), seed=1)
        shardload.restore(target, tmp_path, strict=not averaging)
        slots = [v for v in target.optimizer.variables if not v.path.endswith("_average")]
        for mine, its in zip(slots, source.optimizer.variables, strict=True):
            np.testing.assert_array_equal(value_of(mine), value_of(its), err_msg=mine.path)
        _assert_averages_begin_with_the_weights(target)


OPTIONS = {
    "Adafactor": [{}, {"relative_step": False}, {"beta_2_decay": -0.5}],
    "Adam": [{}, {"amsgrad": True}],
    "AdamW": [{}, {"amsgrad": True}],
    "Muon": [{}, {"exclude_layers": ["second"]}, {"exclude_layers": ["first"]}],
    "RMSprop": [{}, {"momentum": 0.9}, {"centered": True}, {"momentum": 0.9, "centered": True}],
    "SGD": [{}, {"momentum": 0.9}, {"momentum": 0.5, "nesterov": True}],
}
"""Options of Keras' optimizers that decide which slots there are, or how slots are used; of others, there is none."""
COMMON = [{}, {"use_ema": True}, {"gradient_accumulation_steps": 2}]
WITHIN = [
    pytest.param(kind, one, other, id=f"{kind} {one} to {other}")
    for kind in sorted(SLOT_KINDS)
    for options in [[*OPTIONS.get(kind, [{}]), *COMMON[1:]]]
    for one, other in itertools.permutations(options, 2)
]


def two_layers(optimizer, *, seed=None, last=3):
    if seed is not None:
        keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(4, name="first"), keras.layers.Dense(last, name="second")]
    model = keras.Sequential([keras.Input((3,)), *layers], name="net")
    model.compile(optimizer, "mse")
    return model


def slots(model):
    """Value by weight and attribute, without what belongs to the optimizer as a whole."""
    named = {v.path.rpartition("/")[2]: np.asarray(value_of(v)) for v in model.optimizer.variables}
    return {name: value for name, value in named.items() if name.startswith("net_")}


@pytest.mark.sample(3)
@pytest.mark.parametrize(("kind", "before", "now"), WITHIN)
def test_another_option_of_the_same_optimizer_keeps_what_both_have(kind, before, now, tmp_path):
    made = (getattr(optimizers, kind)(learning_rate=0.5, **options) for options in (before, now, now))
    source, target, fresh = (two_layers(optimizer, seed=1) for optimizer in made)
    source.optimizer.build(source.trainable_variables)
    for number, variable in enumerate(source.optimizer.variables):
        whole = "int" in str(variable.dtype)
        variable.assign(np.full(variable.shape, 8 if whole else (number + 1) / 64, variable.dtype))
    save_step(source, tmp_path, 7)
    shardload.restore(target, tmp_path, strict=False)
    fresh.optimizer.build(fresh.trainable_variables)
    assert int(target.optimizer.iterations) == int(source.optimizer.iterations) > 0
    assert float(target.optimizer.learning_rate) == float(source.optimizer.learning_rate)
    mine, stored, new = slots(target), slots(source), slots(fresh)
    assert mine.keys() == new.keys()
    weights = [(w.path.replace("/", "_"), np.asarray(value_of(w))) for w in target.weights]
    new |= {f"{name}_average": value for name, value in weights}
    # Muon's momentum is a sum, that of the weights which it leaves to Adam (with a velocity) a mean.
    whole_new = {name.removesuffix("_velocity") for name in mine.keys() ^ stored.keys() if name.endswith("_velocity")}
    for name, value in mine.items():
        begins = name not in stored or name.rpartition("_")[0] in whole_new
        np.testing.assert_array_equal(value, (new if begins else stored)[name], err_msg=name)
    target.fit(np.ones((4, 3)), np.ones((4, 3)), verbose=0)


def test_slots_of_another_shape_begin_with_a_note(tmp_path):
    source, target = two_layers(optimizers.Adam(0.5), seed=1), two_layers(optimizers.Adam(), last=5)
    source.optimizer.build(source.trainable_variables)
    fill(source, 8)
    save_step(source, tmp_path, 7)
    with pytest.raises(MismatchError, match="has shape"):
        shardload.restore(target, tmp_path)
    report = shardload.restore(target, tmp_path, strict=False)
    assert "step and model have other slots for 2 weights: these begin as in a new optimizer" in report.notes
    for name, value in slots(target).items():
        np.testing.assert_array_equal(value, 0 if name.startswith("net_second") else 8, err_msg=name)


class OwnOptimizer(keras.optimizers.Optimizer):
    """An optimizer that Keras does not know: only its own code says what a new one has in its slots."""

    has_hats = False

    def build(self, variables):
        super().build(variables)
        names = ["momentum", "velocity_hat"] if self.has_hats else ["momentum"]
        self._momentums, *hats = self.add_optimizer_variables(variables, names, initializer="ones")
        self._velocity_hats = hats[0] if hats else []

    def update_step(self, gradient, variable, learning_rate):
        self.assign_sub(variable, gradient * learning_rate)


class Telling(OwnOptimizer):
    def start_of_slot(self, attribute):
        return 1.0


def own(optimizer, *, has_hats=False, last=4):
    optimizer = keras.optimizers.get(optimizer)
    optimizer.has_hats = has_hats
    model = two_layers(optimizer, last=last)
    optimizer.build(model.trainable_variables)
    return model


def fill(model, value):
    for variable in model.optimizer.variables:
        variable.assign(np.full(variable.shape, value, variable.dtype))


@pytest.mark.parametrize("change", [{"has_hats": True}, {"last": 5}])
def test_of_an_optimizer_that_does_not_say_how_its_slots_begin_nothing_is_invented(change, tmp_path):
    source = own(OwnOptimizer(0.5))
    fill(source, 8)
    save_step(source, tmp_path, 7)
    silent, telling = own(OwnOptimizer(0.5), **change), own(Telling(0.5), **change)
    for target in (silent, telling):
        fill(target, 3)
        for items in ("all", "optimizer"):
            with pytest.raises(MismatchError):
                shardload.restore(target, tmp_path, items=items)
        report = shardload.restore(target, tmp_path, strict=False)
        found = {name: set(np.ravel(value)) for name, value in slots(target).items()}
        if target is silent:
            [note] = [note for note in report.notes if "does not continue with the stored state" in note]
            assert "Give its class a method start_of_slot" in note
            assert set.union(*found.values()) == {3} == {int(target.optimizer.iterations)}
            continue
        assert int(target.optimizer.iterations) == 8
        for name, values in found.items():
            assert values == ({1} if "hat" in name or ("last" in change and "second" in name) else {8}), name


@pytest.mark.parametrize("file", ["g.keras", "g.weights.h5"])
def test_a_file_that_stores_the_optimizer_by_number_says_that_nothing_continues(file, tmp_path):
    source = own("adam", last=2)
    fill(source, 8)
    source.save(tmp_path / file) if file.endswith(".keras") else source.save_weights(tmp_path / file)
    target = own("adam", last=5)
    fill(target, 3)
    report = shardload.load_weights(target, tmp_path / file, strict=False)
    assert any("the optimizer's state is unchanged, with its iterations" in note for note in report.notes)
    assert {float(v) for variable in target.optimizer.variables for v in np.ravel(value_of(variable))} == {3}


class WithExtra(optimizers.Adam):
    def build(self, variables):
        super().build(variables)
        self.extra = self.add_optimizer_variables(variables, "extra")


def test_the_note_names_the_slots_that_the_step_lacks(saved):
    target = build(WithExtra(0.5))
    target.optimizer.build(target.trainable_variables)
    report = shardload.restore(target, saved("adam")[1], strict=False)
    assert any(note.endswith("learning rate: the step lacks its extra") for note in report.notes)
    assert int(target.optimizer.iterations) == 0
    report = shardload.restore(trained("sgd"), saved("adam")[1], strict=False)
    assert any("has momentums, velocities of another optimizer, and lacks its slots" in note for note in report.notes)


def test_a_replaced_learning_rate_is_told_everywhere(saved):
    source, root = saved("adam")
    rate = float(source.optimizer.learning_rate)
    wanted = f"the state of the optimizer was loaded too: its learning rate was 0.5, and is {rate:g}. "
    loads = [
        lambda model: shardload.restore(model, root).notes,
        lambda model: shardload.load_weights(model, root / "7").notes,
        lambda model: shardload.load_weights(model, root / "model.keras").notes,
        lambda model: shardload.Checkpointer(root).restore(model) and shardload.report(model).notes,
    ]
    for optimizer in ("adam", "split"):
        for load in loads:
            assert sum(note.startswith(wanted) for note in load(build(optimizer))) == 1
    assert not any("learning rate" in note for note in shardload.restore(source, root).notes)
    assert not any("learning rate" in note for note in shardload.restore(build("adam"), root, items="weights").notes)
