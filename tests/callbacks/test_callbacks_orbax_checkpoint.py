import inspect
from pathlib import Path

import jax
import keras
import numpy as np
import pytest
from callback_models import (
    Subclassed,
    X,
    assert_holds,
    compiled,
    fit,
    functional,
    gemma,
    gemma_data,
    record,
    sequential,
    steps_in,
)
from orbax.checkpoint import v1 as ocp

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import UnsupportedError, UsageError
from shardload.restoring import restore
from shardload.runs.listing import list_steps

pytestmark = pytest.mark.filterwarnings("ignore:Sharding info not provided")

BUILDERS = {"functional": functional, "sequential": sequential, "subclassed": Subclassed}


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_a_step_holds_the_whole_state(build, tmp_path):
    model = compiled(build)
    fit(model, OrbaxCheckpoint(tmp_path))
    assert steps_in(tmp_path) == [4]
    assert_holds(tmp_path / "4", model)


@pytest.mark.slow
def test_kerashub_gemma_keeps_its_optimizer(tmp_path):
    model = gemma()
    model.fit(*gemma_data(), batch_size=4, shuffle=False, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path)])
    assert_holds(tmp_path / "2", model)
    slots = [leaf for leaf in record(tmp_path, 2, "structure")["leaves"] if leaf["kind"] == "slot"]
    assert len(slots) == 2 * len(model.trainable_variables)


@pytest.mark.slow
def test_a_mesh_of_eight(tmp_path):
    mesh = keras.distribution.DeviceMesh((1, 8), ("batch", "model"), keras.distribution.list_devices()[:8])
    layouts = keras.distribution.LayoutMap(mesh)
    layouts["first/kernel"] = (None, "model")
    keras.distribution.set_distribution(keras.distribution.ModelParallel(layout_map=layouts, batch_dim_name="batch"))
    try:
        model = compiled()
        fit(model, OrbaxCheckpoint(tmp_path, save_freq=2, max_to_keep=None))
    finally:
        keras.distribution.set_distribution(None)
    assert len(model.get_layer("first").kernel.value.sharding.device_set) == 8
    assert record(tmp_path, 4)["mesh"] == {"axes": ["batch", "model"], "sizes": [1, 8]}
    assert_holds(tmp_path / "4", model)


@pytest.mark.slow
def test_a_second_fit_and_a_second_run_continue_the_numbers(tmp_path):
    model, callback = compiled(), OrbaxCheckpoint(tmp_path, max_to_keep=None)
    fit(model, callback, epochs=2)
    fit(model, callback)
    fit(model, OrbaxCheckpoint(tmp_path, max_to_keep=None))
    fit(compiled(), OrbaxCheckpoint(tmp_path, max_to_keep=None))
    assert steps_in(tmp_path) == [4, 8, 12, 16, 20]


@pytest.mark.slow
def test_batches_are_counted_over_several_fits(tmp_path):
    model, callback = compiled(), OrbaxCheckpoint(tmp_path, save_freq=3, max_to_keep=None)
    for _ in range(3):
        fit(model, callback)
    assert steps_in(tmp_path) == [3, 6, 9, 12]


@pytest.mark.slow
def test_every_so_many_batches_across_epochs(tmp_path):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_freq=3, max_to_keep=None), epochs=3)
    assert steps_in(tmp_path) == [3, 6, 9, 12]
    assert [(record(tmp_path, n)["epoch"], record(tmp_path, n)["batch"]) for n in (3, 6, 12)] == [
        (0, 3),
        (1, 2),
        (2, 4),
    ]


@pytest.mark.slow
def test_the_end_of_training_is_saved_if_asked(tmp_path):
    model, callback = compiled(), OrbaxCheckpoint(tmp_path, save_freq=3, max_to_keep=None, save_at_end=True)
    fit(model, callback, epochs=2)
    assert steps_in(tmp_path) == [3, 6, 8]
    assert_holds(tmp_path / "8", model)
    fit(model, callback, epochs=0)
    assert steps_in(tmp_path) == [3, 6, 8]  # nothing was trained
    again = compiled()
    fit(again, OrbaxCheckpoint(tmp_path, save_freq=3, max_to_keep=None, save_at_end=True, resume=True), epochs=2)
    assert steps_in(tmp_path) == [3, 6, 8] and again.optimizer.iterations == 8  # training was complete


@pytest.mark.slow
def test_averages_that_end_training_are_what_is_saved(tmp_path):
    model = functional()
    model.compile(keras.optimizers.Adam(use_ema=True, ema_momentum=0.5), "mse")
    fit(model, OrbaxCheckpoint(tmp_path, save_freq=3, save_at_end=True))
    assert_holds(tmp_path / "4", model)


@pytest.mark.slow
@pytest.mark.parametrize(
    "rule",
    [
        {"save_decision": lambda step, logs: False},
        {"save_best_only": True, "monitor": "loss", "mode": "min", "initial_value_threshold": -1},
    ],
)
def test_other_rules_hold_at_the_end_of_training_as_well(rule, tmp_path):
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_freq=3, save_at_end=True, **rule))
    assert steps_in(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("save_freq", ["epoch", 4])
def test_a_decision_about_the_last_batch_is_asked_for_once(save_freq, tmp_path):
    asked = []
    callback = OrbaxCheckpoint(
        tmp_path, save_freq=save_freq, save_at_end=True, save_decision=lambda step, logs: asked.append(step)
    )
    fit(compiled(), callback, epochs=2)
    assert asked == [4, 8]


@pytest.mark.slow
def test_a_step_in_mid_epoch_holds_the_state_of_that_batch(tmp_path):
    model, twin = compiled(), compiled()
    twin.set_weights(model.get_weights())
    fit(model, OrbaxCheckpoint(tmp_path, save_freq=2, max_to_keep=None), shuffle=False)
    twin.fit(X[:8], X[:8], batch_size=4, shuffle=False, verbose=0)
    assert_holds(tmp_path / "2", twin)


@pytest.mark.slow
def test_several_batches_per_execution(tmp_path):
    model = functional()
    model.compile("adam", "mse", steps_per_execution=2)
    fit(model, OrbaxCheckpoint(tmp_path, save_freq=2, max_to_keep=None), epochs=2)
    assert steps_in(tmp_path) == [2, 4, 6, 8]


def test_what_a_step_tells(tmp_path):
    given = {"run": "a", "seeds": [1, 2]}
    fit(compiled(), OrbaxCheckpoint(tmp_path, "loss", metadata=given, data_iterator=lambda: {"at": 7}), epochs=2)
    told = record(tmp_path, 8)
    assert (told["step"], told["epoch"], told["batch"], told["epoch_done"]) == (8, 1, 4, True)
    assert set(told["logs"]) == {"loss", "mae"} and told["best"] <= told["logs"]["loss"]
    assert told["metadata"] == given and told["mode"] == "min" and told["mesh"] is None
    assert set(told["versions"]) >= {"python", "shardload", "keras", "jax", "orbax-checkpoint"}
    assert record(tmp_path, 8, "iterator")["state"] == {"at": 7}


def test_metadata_of_each_step(tmp_path):
    fit(compiled(), OrbaxCheckpoint(tmp_path, metadata=lambda step, logs: {"n": step, "keys": sorted(logs)}))
    assert record(tmp_path, 4)["metadata"] == {"n": 4, "keys": ["loss", "mae"]}


@pytest.mark.slow
def test_keras_reads_it(tmp_path):
    model = compiled()
    fit(model, OrbaxCheckpoint(tmp_path), epochs=2)
    loaded = keras.saving.load_model(tmp_path)
    fresh = compiled()
    fresh.load_weights(tmp_path / "8")
    for ours, a, b in zip(model.weights, loaded.weights, fresh.weights, strict=True):
        assert np.array_equal(ours, a) and np.array_equal(ours, b)
    slots = zip(model.optimizer.variables, loaded.optimizer.variables, strict=True)
    assert all(np.array_equal(ours, theirs) for ours, theirs in slots)


@keras.saving.register_keras_serializable("shardload-tests")
class Vocabulary(Subclassed):
    def save_assets(self, folder):
        (Path(folder) / "words.txt").write_text("a b")

    def load_assets(self, folder):
        pass


def test_assets_as_keras_stores_them(tmp_path):
    fit(compiled(Vocabulary), OrbaxCheckpoint(tmp_path))
    assert bytes(ocp.load_checkpointables(str(tmp_path / "4"), {"assets": None})["assets"]["words.txt"]) == b"a b"


def test_weights_only(tmp_path):
    model = compiled()
    fit(model, OrbaxCheckpoint(tmp_path, save_weights_only=True))
    kinds = {leaf["kind"] for leaf in record(tmp_path, 4, "structure")["leaves"]}
    assert kinds == {"weight"} and not (tmp_path / "4" / "model_config").exists()
    fresh = compiled()
    fresh.load_weights(tmp_path)
    assert all(np.array_equal(a, b) for a, b in zip(model.weights, fresh.weights, strict=True))


@pytest.mark.slow
def test_optimizers_keras_cannot_save(tmp_path):
    model = compiled(optimizer=keras.optimizers.Adafactor())
    fit(model, OrbaxCheckpoint(tmp_path))
    with pytest.raises(ValueError, match="found twice"):
        model.get_state_tree()
    assert_holds(tmp_path / "4", model)


@pytest.mark.slow
def test_best_only_keeps_its_best_over_runs(tmp_path):
    fit_with = compiled()
    first = OrbaxCheckpoint(tmp_path, "loss", save_best_only=True, max_to_keep=None)
    history = fit(fit_with, first, epochs=3).history["loss"]
    assert first.best == pytest.approx(min(history))
    second = OrbaxCheckpoint(tmp_path, "loss", save_best_only=True, max_to_keep=None)
    before = steps_in(tmp_path)
    bad = compiled(optimizer=keras.optimizers.SGD(0.0))
    bad.set_weights([w + 9 for w in bad.get_weights()])
    fit(bad, second)
    assert second.best == first.best and steps_in(tmp_path) == before


def test_best_only_warns_without_the_metric(tmp_path):
    model, callback = compiled(), OrbaxCheckpoint(tmp_path, save_best_only=True)
    with pytest.warns(UserWarning, match="Can save best model only with val_loss available") as caught:
        model.fit(X, X, verbose=0, callbacks=[callback])
    assert caught[0].filename == __file__  # the line of fit, not one of shardload or Keras
    assert steps_in(tmp_path) == []


@pytest.mark.parametrize(("rule", "why"), [({"save_best_only": True}, "skipping save at epoch 1"), ({}, "Cannot rank")])
def test_a_metric_that_is_not_there_names_those_that_are(tmp_path, rule, why):
    callback = OrbaxCheckpoint(tmp_path, "val_los", mode="min", **rule)
    said = rf"{why}.* have loss, mae, val_loss, val_mae \(did you mean 'val_loss'\?\)\."
    with pytest.warns(UserWarning, match=said) as caught:
        fit(compiled(), callback, epochs=2, validation_data=(X, X))
    assert len([found for found in caught if found.category is UserWarning]) == 1  # in two epochs
    with pytest.raises(UsageError, match=r"lower 'val_los' is better\. Check the name \(did you mean 'val_loss'\?\)"):
        fit(compiled(), OrbaxCheckpoint(tmp_path, "val_los", keep_best=1))


def test_threshold(tmp_path):
    fit(compiled(), OrbaxCheckpoint(tmp_path, "loss", save_best_only=True, initial_value_threshold=0.0))
    assert steps_in(tmp_path) == []


@pytest.mark.slow
def test_direction_of_a_metric(tmp_path):
    model = functional()
    model.compile("adam", "mse", metrics=[keras.metrics.R2Score(), "mae"])
    fit(model, OrbaxCheckpoint(tmp_path, "r2_score", keep_best=1))
    assert record(tmp_path, 4)["mode"] == "max"
    with pytest.raises(UsageError, match="whether a higher or a lower 'nothing' is better"):
        fit(model, OrbaxCheckpoint(tmp_path, "nothing", save_best_only=True))


@pytest.mark.slow
def test_keeps_the_latest_and_tells_of_each(tmp_path):
    told = []
    said = {"post_finalization": lambda step, path: told.append((step, path.name))}
    fit(compiled(), OrbaxCheckpoint(tmp_path, save_freq=1, max_to_keep=2, **said))
    assert steps_in(tmp_path) == [3, 4] and told == [(n, str(n)) for n in (1, 2, 3, 4)]


@pytest.mark.slow
def test_a_decision_of_the_users(tmp_path):
    callback = OrbaxCheckpoint(tmp_path, save_freq=1, max_to_keep=None, save_decision=lambda step, logs: step % 3 == 0)
    fit(compiled(), callback, epochs=2)
    assert steps_in(tmp_path) == [3, 6]


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_further_items_and_compression(tmp_path, background):
    items = lambda: {"ema": {"w": np.arange(3.0)}}  # noqa: E731
    callback = OrbaxCheckpoint(tmp_path, save_on_background=background, checkpointables=items, compression="zstd")
    model = compiled()
    fit(model, callback)
    assert np.array_equal(ocp.load_checkpointables(str(tmp_path / "4"), {"ema": None})["ema"]["w"], np.arange(3.0))
    assert_holds(tmp_path / "4", model)


def test_a_model_keras_cannot_serialise_is_saved_all_the_same(tmp_path):
    class Odd(Subclassed):
        def get_config(self):
            raise NotImplementedError("never")

    model = compiled(Odd)
    with pytest.warns(UserWarning, match=r"configuration cannot be saved \(NotImplementedError: never\)"):
        fit(model, OrbaxCheckpoint(tmp_path), epochs=2)
    assert_holds(tmp_path / "8", model)


def test_a_layer_that_a_sequential_has_twice_is_not_described_as_one(tmp_path):
    twice = keras.layers.Dense(8, name="twice")
    model = compiled(lambda: keras.Sequential([keras.Input((8,)), twice, twice]))
    said = "Keras describes each layer of the Sequential '.*' once, but it has 'twice' several times"
    with pytest.warns(UserWarning, match=said):
        fit(model, OrbaxCheckpoint(tmp_path))
    assert_holds(tmp_path / "4", model)
    with pytest.raises(UnsupportedError):
        shardload.load(tmp_path, mesh="1x1")
    report = shardload.save_as(model, tmp_path / "m.weights.h5")
    assert not (tmp_path / "m.json").exists() and "m.json was not written" in " ".join(report.notes)


def test_a_directory_of_the_users_home_is_found_there(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    model = compiled()
    fit(model, OrbaxCheckpoint("~/run"))
    assert steps_in(tmp_path / "run") and not Path("~").exists()
    assert restore(model, "~/run").notes
    assert [info.path.parent for info in list_steps("~/run")] == [tmp_path / "run"]


def test_relative_directories_stay_where_they_were(tmp_path, monkeypatch):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    callback = OrbaxCheckpoint("steps")
    monkeypatch.chdir(tmp_path / "b")
    fit(compiled(), callback)
    assert steps_in(tmp_path / "a" / "steps") == [4] and callback.directory.is_absolute()


def test_a_diverged_loss_can_be_read_back(tmp_path):
    fit(compiled(optimizer=keras.optimizers.SGD(1e30)), OrbaxCheckpoint(tmp_path, "loss", keep_best=1), epochs=2)
    assert [info.problems for info in list_steps(tmp_path)] == [None]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"save_freq": "batch"}, "Unrecognized save_freq"),
        ({"save_freq": 0}, "Unrecognized save_freq"),
        ({"save_at_end": "no"}, "Cannot use save_at_end='no'"),
        ({"max_to_keep": 0}, "Cannot use max_to_keep=0"),
        ({"keep_best": 0}, "Cannot use keep_best=0"),
        ({"keep_best": 0, "save_best_only": True}, "Cannot use keep_best=0"),
        ({"compression": "gzip"}, "Cannot use compression='gzip'"),
        ({"metadata": {"a": object()}}, "Cannot save metadata: .*Expected JSON"),
        ({"checkpointables": {"pytree": {}}}, "Cannot name a checkpointable 'pytree'"),
        ({"checkpointables": {"mine": np.arange(3)}}, "'mine' is a single value"),
        ({"checkpointables": {"mine": jax.numpy.arange(3)}}, "'mine' is a single value"),
        ({"checkpointables": {"mine": 1.5}}, "'mine' is a single value"),
        ({"directory": "https://host/run"}, "a path on this machine"),
        ({"directory": "ck/{epoch:02d}.keras"}, "steps are folders named by their numbers.* such as 'ck'"),
        ({"directory": "{epoch}"}, "such as 'checkpoints'"),
        ({"directory": "s3://bucket/runs/best.weights.h5"}, "such as 's3://bucket/runs'"),
        ({"directory": "gs://bucket/{epoch}"}, "'gs://bucket/{epoch}': .* such as 'gs://bucket/checkpoints'"),
        ({"directory": "best.weights.h5"}, "such as 'checkpoints'"),
    ],
)
def test_wrong_arguments_are_told_at_once(tmp_path, wrong, message):
    with pytest.raises(UsageError, match=message):
        OrbaxCheckpoint(**{"directory": tmp_path / "x", **wrong})


def test_takes_what_keras_callback_takes():
    theirs = inspect.signature(keras.callbacks.OrbaxCheckpoint).parameters
    ours = inspect.signature(OrbaxCheckpoint).parameters
    assert [(n, p.default) for n, p in theirs.items()] == [(n, p.default) for n, p in ours.items()][: len(theirs)]


@pytest.mark.slow
@pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)
def test_another_model_goes_on_as_the_first_would(build, tmp_path):
    """Its layers and its optimizer (``adam_1``) are named differently: Keras restores nothing, without a word."""
    first, other = compiled(build, keras.optimizers.Adam()), compiled(build, keras.optimizers.Adam())
    fit(first, OrbaxCheckpoint(tmp_path), shuffle=False)
    other(X[:4])
    restore(other, tmp_path)
    fit(first, shuffle=False)
    fit(other, shuffle=False)
    assert all(np.array_equal(a, b) for a, b in zip(first.get_weights(), other.get_weights(), strict=True))


def test_goes_on_after_steps_of_others_and_never_removes_them(tmp_path):
    (tmp_path / "50").mkdir()
    (tmp_path / "50" / "_CHECKPOINT_METADATA").write_text("{}")
    (tmp_path / "70").mkdir()  # empty: no step
    fit(compiled(), OrbaxCheckpoint(tmp_path))
    assert steps_in(tmp_path) == [50, 54, 70]


def test_keep_best_says_that_its_metric_is_not_there(tmp_path):
    message = r"Cannot rank steps by 'val_loss'\. The logs have loss, mae: fit.* Pass both save_freq='epoch'"
    with pytest.warns(UserWarning, match=message):
        fit(compiled(), OrbaxCheckpoint(tmp_path, "val_loss", keep_best=1), epochs=2)


def test_a_checkpointable_that_nothing_can_store_is_named(tmp_path):
    with pytest.raises(UsageError, match='"thing"'):
        fit(compiled(), OrbaxCheckpoint(tmp_path, checkpointables={"thing": object()}))
    assert steps_in(tmp_path) == []
