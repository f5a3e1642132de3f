"""A step restored onto whatever mesh the model lives on now, bit for bit, or not at all."""

import gc
from pathlib import Path

import jax
import keras
import ml_dtypes
import numpy as np
import pytest
from checkpoints import flip, largest_file
from safetensors.numpy import save_file
from saved_steps import let_save, save_step

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import (
    DamagedError,
    LoadInterruptedError,
    MismatchError,
    SourceNotFoundError,
    UnsupportedError,
    UsageError,
)
from shardload.mapping.optimizer_pairs import UNTRAINED
from shardload.reports.facts import NoteKind, of_kind
from shardload.verifying import verify

MESHES = ["1x8", "2x4", "8x1", "1x3", "1x1"]


def build(*, seed=0, optimizer="adam", width=24):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [keras.layers.Dense(48, activation="relu"), keras.layers.Dropout(0.1), keras.layers.Dense(width)]
    )
    model.build((None, 32))
    if optimizer:
        model.compile(optimizer, "mse", metrics=["mae"])
    return model


def trained(**options):
    model = build(**options)
    rng = np.random.default_rng(0)
    model.fit(rng.random((64, 32)), rng.random((64, model.output_shape[1])), batch_size=8, verbose=0)
    return model


def values(model):
    weights = {f"w{i}": np.asarray(v.value) for i, v in enumerate(model.weights)}
    slots = {f"o{i}": np.asarray(v.value) for i, v in enumerate(getattr(model.optimizer, "variables", ()))}
    return weights | slots


def same(one, other):
    one, other = values(one), values(other)
    return one.keys() == other.keys() and all(one[k].tobytes() == other[k].tobytes() for k in one)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A model trained on 1x8, and the folder its step was saved in."""
    model = trained()
    root = tmp_path_factory.mktemp("run") / "steps"
    save_step(model, root, 3)
    spread = build()
    shardload.restore(spread, root, mesh="1x8")
    save_step(spread, root, 8, epoch=1)
    return model, root


@pytest.mark.parametrize("axes", [(None, None), (None, "model"), ("batch", None)])
def test_the_bits_of_every_nan_are_saved_from_replicas(tmp_path, axes):
    """A program of XLA may change them under the XLA_FLAGS of these tests, so that none may touch what is saved."""
    every = np.resize(np.arange(0x7F80, 0x8000, dtype=np.uint16), (24, 120)).view(ml_dtypes.bfloat16)
    save_file({"a": every}, tmp_path / "every.safetensors")
    layouts = keras.distribution.LayoutMap(keras.distribution.DeviceMesh((2, 4), ("batch", "model")))
    layouts[".*kernel"] = axes
    model = keras.Sequential([keras.Input((24,)), keras.layers.Dense(120, dtype="bfloat16", use_bias=False)])
    names = {"a": model.weights[0].path}
    shardload.load_weights(model, tmp_path / "every.safetensors", names=names, mesh="2x4", layout=layouts)
    assert np.asarray(model.weights[0].value).tobytes() == every.tobytes()
    shardload.save(model, tmp_path / "run", step=1)
    (found,) = shardload.load_arrays(tmp_path / "run" / "1", jax.devices()[0]).values()
    assert np.asarray(found).tobytes() == every.tobytes()


@pytest.mark.parametrize("mesh", MESHES)
def test_everything_on_any_mesh(run, mesh):
    model, root = run
    target = build(seed=5)
    report = shardload.restore(target, root, mesh=mesh)
    assert same(model, target)
    assert report.bytes.read <= 1.1 * report.bytes.needed
    assert any("step 8 (epoch 2), verified" in note for note in report.notes)
    spread = {len(v.value.sharding.device_set) for v in target.weights}
    assert spread == {np.prod([int(n) for n in mesh.split("x")])}


@pytest.mark.slow
def test_an_abstract_model_is_filled_in_place(run):
    model, root = run
    with shardload.abstract():
        target = build(seed=5)
    shardload.restore(target, root, mesh="2x4", step=3)
    assert same(model, target)
    target.fit(np.zeros((8, 32)), np.zeros((8, 24)), verbose=0)


@pytest.mark.slow
def test_training_goes_on_as_if_nothing_had_happened(run):
    model, root = run
    target = build(seed=5)
    shardload.restore(target, root, step=3)
    again = build(seed=6)
    shardload.restore(again, root, step=3)
    for one in (target, again):
        one.fit(np.ones((16, 32)), np.ones((16, 24)), batch_size=8, shuffle=False, verbose=0)
    assert same(target, again) and int(target.optimizer.iterations) == int(model.optimizer.iterations) + 2


def test_auto_generated_names_play_no_part(run):
    model, root = run
    for _ in range(3):
        target = build(seed=5)
    assert target.layers[0].name != model.layers[0].name
    shardload.restore(target, root)
    assert same(model, target)


def test_weights_into_an_uncompiled_model(run):
    model, root = run
    target = build(seed=5, optimizer=None)
    report = shardload.restore(target, root)
    assert all(np.array_equal(a.value, b.value) for a, b in zip(model.weights, target.weights, strict=True))
    assert any("parts that this model lacks" in note for note in report.notes)


def test_weights_only_leaves_the_optimizer_alone(run):
    _, root = run
    target = trained(seed=5)
    before = [np.asarray(v.value) for v in target.optimizer.variables]
    shardload.restore(target, root, items="weights")
    assert all(np.array_equal(a, v.value) for a, v in zip(before, target.optimizer.variables, strict=True))
    with pytest.raises(UsageError, match="expected 'all', 'weights', "):
        shardload.restore(target, root, items="everything")


@pytest.mark.slow
@pytest.mark.parametrize("load", [shardload.restore, shardload.load_weights])
def test_a_step_of_weights_leaves_a_trained_optimizer_as_it_is_and_says_so(tmp_path, load):
    model = trained()
    save_step(model, tmp_path / "run", 1, weights_only=True)
    target = trained(seed=5)
    before = [np.asarray(v.value) for v in target.optimizer.variables]
    report = load(target, tmp_path / "run")
    assert all(np.array_equal(a.value, b.value) for a, b in zip(model.weights, target.weights, strict=True))
    assert all(np.array_equal(a, v.value) for a, v in zip(before, target.optimizer.variables, strict=True))
    assert of_kind(report.notes, NoteKind.OPTIMIZER_UNCHANGED)
    with pytest.raises(MismatchError, match="missing from the checkpoint"):
        shardload.restore(target, tmp_path / "run", items="optimizer")


@pytest.mark.parametrize("make", [build, trained])
def test_a_step_from_before_training_leaves_slots_as_they_are_and_says_so(tmp_path, make):
    model = build()
    save_step(model, tmp_path / "run", 0)
    target = make(seed=5)
    target.optimizer.build(target.trainable_variables)
    slots = [np.asarray(v.value) for v in target.optimizer.variables[2:]]
    report = shardload.restore(target, tmp_path / "run")
    assert all(np.array_equal(a.value, b.value) for a, b in zip(model.weights, target.weights, strict=True))
    assert int(target.optimizer.iterations.value) == 0
    assert len(slots) == 8
    assert all(np.array_equal(a, v.value) for a, v in zip(slots, target.optimizer.variables[2:], strict=True))
    assert UNTRAINED in report.notes


def test_a_model_that_never_trained_comes_back_from_its_step_alone(tmp_path):
    model = build()
    let_save(OrbaxCheckpoint(tmp_path / "run", save_freq="epoch"), model)
    again = shardload.load(tmp_path / "run", mesh="1x1")
    assert all(np.array_equal(a.value, b.value) for a, b in zip(model.weights, again.weights, strict=True))
    assert again.compiled
    assert not any(np.asarray(v.value).any() for v in again.optimizer.variables[2:])


def test_a_trained_optimizer_without_slots_is_not_taken_for_an_untrained_one(tmp_path):
    save_step(trained(optimizer="sgd"), tmp_path / "run", 1)
    with pytest.raises(MismatchError, match="missing from the checkpoint"):
        shardload.restore(trained(seed=5), tmp_path / "run")


def test_optimizer_only_leaves_the_weights_alone(run):
    model, root = run
    target = build(seed=5)
    before = [np.asarray(v.value) for v in target.trainable_variables]
    shardload.restore(target, root, items="optimizer")
    assert all(np.array_equal(a, v.value) for a, v in zip(before, target.trainable_variables, strict=True))
    ours, theirs = target.optimizer.variables, model.optimizer.variables
    assert all(np.array_equal(a.value, b.value) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adam", "explicit"])
@pytest.mark.parametrize("mesh", [None, "1x8"])
def test_an_optimizer_that_keras_wraps_for_half_precision(mesh, optimizer, tmp_path):
    """``compile`` puts a `LossScaleOptimizer` around it, which the configuration it keeps does not say."""

    def mixed():
        policy = keras.config.dtype_policy()
        keras.config.set_dtype_policy("mixed_float16")
        try:
            model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(8)])
        finally:
            keras.config.set_dtype_policy(policy)
        wrapped = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam())
        model.compile("adam" if optimizer == "adam" else wrapped, "mse")
        return model

    model, x = mixed(), np.random.default_rng(0).random((64, 16), np.float32)
    model.fit(x, x[:, :8], verbose=0, callbacks=[OrbaxCheckpoint(tmp_path / "run")])
    model.save(tmp_path / "model.keras")
    assert type(model.optimizer).__name__ == "LossScaleOptimizer"
    one, two = mixed(), mixed()
    shardload.restore(one, tmp_path / "run", mesh=mesh)
    shardload.load_weights(two, tmp_path / "model.keras", mesh=mesh)
    assert same(model, one) and same(model, two)
    assert int(one.optimizer.iterations) == 2
    for step, other in zip(model.optimizer.variables, one.optimizer.variables, strict=True):
        np.testing.assert_array_equal(step.value, other.value)
    other = mixed()
    other.compile("sgd", "mse")
    with pytest.raises(MismatchError, match="not used by the model"):
        shardload.restore(other, tmp_path / "run")


def test_what_only_a_compiled_model_has_is_not_asked_of_another(run):
    for items in ("optimizer", "metrics"):
        with pytest.raises(UsageError, match=f"has no {items}: it was not compiled"):
            shardload.restore(build(seed=5, optimizer=None), run[1], items=items)


def test_a_map_that_names_nothing_is_refused(run):
    with pytest.raises(MismatchError, match=r"Cannot rename 'layers/dens': no key in .*'layers/dense' or "):
        shardload.restore(build(seed=5), run[1], rename={"layers/dens": "layers/head"})
    with pytest.raises(UsageError, match="rename='layers/dense': expected a mapping"):
        shardload.restore(build(seed=5), run[1], rename="layers/dense")


def test_a_model_whose_layers_have_no_weights_yet(run):
    class Late(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def call(self, inputs):
            return self.dense(inputs)

    model = Late()
    with pytest.raises(UnsupportedError, match=r"has not been built\. Call it on a batch"):
        shardload.restore(model, run[1])
    model.built = True
    with pytest.raises(UnsupportedError, match=r"has no weights.* call it on a batch"):
        shardload.restore(model, run[1])


def test_another_optimizer_is_a_stated_choice(run):
    _, root = run
    target = build(seed=5, optimizer="sgd")
    before = values(target)
    for load, source in ((shardload.restore, root), (shardload.load_weights, root / "8")):
        with pytest.raises(MismatchError, match=r"(?s)not used.* Only the optimizer differs: pass items='weights'"):
            load(target, source)
        assert all(np.array_equal(before[k], v) for k, v in values(target).items())
        load(target, source, items="weights")
        assert float(target.optimizer.learning_rate) == np.float32(0.01)  # that of SGD, not of the step
        before = values(target)


def test_an_optimizer_is_not_blamed_where_weights_differ_too(run):
    with pytest.raises(MismatchError, match="Pass strict=False"):
        shardload.restore(build(optimizer="sgd", width=16), run[1])


def test_another_shape_is_refused_before_anything_changes(run):
    _, root = run
    target = build(seed=5, width=16)
    before = values(target)
    with pytest.raises(MismatchError, match=r"has shape \(48, 16\), but .* has shape \(48, 24\)"):
        shardload.restore(target, root)
    assert all(np.array_equal(before[k], v) for k, v in values(target).items())


def test_a_moved_layer_is_found_through_an_explicit_map(run):
    model, root = run
    inputs = keras.Input((32,))
    x = keras.layers.Dense(48, activation="relu")(inputs)
    target = keras.Model(inputs, keras.layers.Dense(24)(keras.layers.Dense(48)(x)))
    with pytest.raises(MismatchError):
        shardload.restore(target, root)
    shardload.restore(target, root, rename={"layers/dense_1": "layers/dense_2"}, strict=False)
    assert np.array_equal(target.layers[-1].kernel.value, model.layers[-1].kernel.value)


def test_compressed_steps_are_decoded(run, tmp_path):
    model, _ = run
    save_step(model, tmp_path / "z", 1, compression="zstd")
    target = build(seed=5)
    shardload.restore(target, tmp_path / "z", mesh="2x4")
    assert same(model, target)


def test_missing_steps_are_named(run, tmp_path):
    _, root = run
    with pytest.raises(SourceNotFoundError, match="has no step 5"):
        shardload.restore(build(), root, step=5)
    with pytest.raises(SourceNotFoundError, match="contains no steps"):
        shardload.restore(build(), tmp_path)


@pytest.mark.slow
def test_a_flipped_bit_is_named_with_the_way_out_and_passed_over(tmp_path):
    model = trained()
    for step in (1, 2, 3):
        save_step(model, tmp_path / "s", step)
    flip(largest_file(tmp_path / "s" / "3"), 2000)
    flip(largest_file(tmp_path / "s" / "2"), 3000)
    with pytest.raises((DamagedError, LoadInterruptedError), match=r"(?s)3.*Step 1 is the newest good one"):
        shardload.restore(build(), tmp_path / "s")
    target = build(seed=5)
    report = shardload.restore(target, tmp_path / "s", fallback="previous")
    assert same(model, target)
    assert any("step 3 is damaged and was passed over" in note for note in report.notes)


@pytest.fixture
def scored(run, tmp_path):
    """Steps whose losses were 0.3, 0.1, 0.4 and 0.2, and one that says nothing; 2 is the best, then 4, 1 and 3."""
    for step, loss in enumerate((0.3, 0.1, 0.4, 0.2, None), 1):
        logs = {} if loss is None else {"loss": loss}
        save_step(run[0], tmp_path / "s", step, monitor="loss", mode="min", logs=logs)
    return tmp_path / "s"


def test_the_best_step_says_by_what_it_is_the_best(scored):
    report = shardload.restore(build(), scored, step="best")
    assert report.notes[0] == "step 2, best loss=0.1 (lower is better), verified"
    assert shardload.restore(build(), scored, step=2).notes[0] == "step 2, verified"


def damage_data(root, *steps):
    for step in steps:
        flip(largest_file(root / str(step)), 2000)


def test_the_way_out_of_a_damaged_best_is_the_next_best(run, scored):
    damage_data(scored, 2, 4)
    out = r"(?s)tep 2.*Step 1 is the next best good one: pass step=1, or fallback='previous'"
    with pytest.raises((DamagedError, LoadInterruptedError), match=out):
        shardload.restore(build(), scored, step="best")
    target = build(seed=5)
    report = shardload.restore(target, scored, step="best", fallback="previous")
    assert same(run[0], target) and report.notes[1].startswith("step 1, verified")
    assert report.notes[0].startswith("step 2 is damaged and was passed over: Step 2")


def test_where_no_other_good_step_is_ranked_none_is_taken_for_the_next_best(scored):
    damage_data(scored, 1, 2, 3, 4)
    out = r"No other undamaged step has a value of the monitored metric\. Step 5 is the newest good one: pass step=5\.$"
    with pytest.raises((DamagedError, LoadInterruptedError), match=out):
        shardload.restore(build(), scored, step="best", fallback="previous")


@pytest.mark.parametrize("file", ["step.json", "digests.json"])
def test_a_step_that_does_not_say_how_good_it_is_is_passed_over_if_asked_for(scored, file):
    (scored / "2" / "shardload" / file).write_text("{")
    with pytest.raises(
        DamagedError, match=r"(?s)tep 2.*Step 4 is the (next best good one|best good one of the others)"
    ):
        shardload.restore(build(), scored, step="best")
    report = shardload.restore(build(), scored, step="best", fallback="previous")
    assert "passed over" in report.notes[0] and "step 2" in report.notes[0].lower()
    assert report.notes[1].startswith("step 4, verified")


def test_keras_own_steps_are_read_by_name_and_reported_unverified(tmp_path):
    model = trained()
    callback = keras.callbacks.OrbaxCheckpoint(str(tmp_path / "keras"), save_on_background=False)
    callback.set_model(model)
    callback.on_epoch_end(7)
    callback.wait_until_finished()
    target = keras.models.clone_model(model)
    target.compile("adam", "mse")
    report = shardload.restore(target, tmp_path / "keras", mesh="1x8", items="weights")
    assert all(np.array_equal(a.value, b.value) for a, b in zip(model.weights, target.weights, strict=True))
    assert any("unverified" in note for note in report.notes)


def test_devices_never_hold_more_than_their_shards(run):
    _, root = run
    with shardload.abstract():
        target = build(optimizer=None)
    report = shardload.restore(target, root, mesh="1x8")
    held = {d.id: 0 for d in jax.devices()}
    for variable in target.variables:
        for shard in variable.value.addressable_shards:
            held[shard.device.id] += shard.data.nbytes
    assert {d.id: d.bytes for d in report.devices} == {k: v for k, v in held.items() if v}


def test_restoring_and_loading_leave_no_file_open(run):
    _, root = run
    target = build(seed=5)
    shardload.restore(target, root)
    before = len([*Path("/proc/self/fd").iterdir()])
    for _ in range(3):
        shardload.restore(target, root)
        shardload.load_weights(target, root)
    gc.collect()
    assert len([*Path("/proc/self/fd").iterdir()]) <= before


def test_a_folder_that_holds_a_folder_of_our_name_is_no_step(tmp_path):
    one, other = build(optimizer=None), build(seed=5, optimizer=None)
    one.save_weights(tmp_path / "model.weights.h5")
    (tmp_path / "shardload").mkdir()
    shardload.load_weights(other, tmp_path / "model.weights.h5")
    assert [v.verdict for v in verify(tmp_path / "model.weights.h5")] == ["readable"]
    third = build(seed=6, optimizer=None)
    shardload.load_weights(third, tmp_path)
    assert all(np.array_equal(a.value, b.value) for a, b in zip(one.weights, third.weights, strict=True))


def test_a_damaged_step_is_told_by_load_too(tmp_path):
    save_step(build(), tmp_path / "s", 1)
    (tmp_path / "s" / "1" / "pytree" / "_METADATA").write_text("{}")
    with pytest.raises(DamagedError, match="_METADATA"):
        shardload.load_weights(build(), tmp_path / "s")


@pytest.mark.slow
def test_atomic_puts_the_old_values_back(tmp_path):
    save_step(trained(), tmp_path / "s", 1)
    flip(largest_file(tmp_path / "s" / "1"), 4000)
    target = trained(seed=5)
    before = values(target)
    with pytest.raises((DamagedError, LoadInterruptedError)):
        shardload.restore(target, tmp_path / "s", atomic=True)
    assert all(np.array_equal(before[k], v) for k, v in values(target).items())
