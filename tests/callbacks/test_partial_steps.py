"""Steps with only the weights that training changes: what they hold, and which models they fit."""

import json
import shutil

import keras
import numpy as np
import pytest
import warm_start
from callback_models import fit, record, steps_in
from lora_child import content, lora_model

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import MismatchError, UsageError
from shardload.keras_bridge.model_state import trained_variables
from shardload.runs.digests import Digests, find_damage


def saver(folder, **named):
    return OrbaxCheckpoint(folder, monitor="loss", save_trainable_only=True, max_to_keep=None, **named)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two epochs of adapters, with the model that trained them."""
    folder = tmp_path_factory.mktemp("adapters")
    model = lora_model()
    fit(model, saver(folder), epochs=2, shuffle=False)
    return folder, model


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.dtype == other[name].dtype and value.tobytes() == other[name].tobytes(), name


def test_a_partial_step_has_what_training_changes_and_says_what_it_lacks(run):
    folder, model = run
    step, structure = record(folder, 8), record(folder, 8, "structure")
    assert find_damage(folder / "8") == []
    assert (step["save_trainable_only"], step["variables"], step["left_out"]) == (True, None, 2)
    left_out = {leaf["key"]: leaf["shape"] for leaf in structure["left_out"]}
    assert left_out == {"layers/dense/vars/0": [8, 8], "layers/dense/vars/1": [8]}
    assert {leaf["key"] for leaf in structure["leaves"] if leaf["kind"] == "weight"} == {
        "layers/dense/vars/lora_kernel_a",
        "layers/dense/vars/lora_kernel_b",
        *(f"layers/batch_normalization/vars/{n}" for n in range(4)),  # its statistics change in training
        "layers/dense_1/vars/0",
        "layers/dense_1/vars/1",
    }
    assert not (folder / "8" / "assets").exists()
    fresh = lora_model()
    report = shardload.restore(fresh, folder)
    [note] = [note for note in report.notes if "partial" in note]
    assert note.startswith("the step is partial: unchanged in the model, and not counted above, are 2 weights (72 ")
    assert note.endswith(", 288 B): net/first/kernel, net/first/bias")
    assert not report.missing
    assert_equal(content(fresh), content(model))


def test_a_resumed_run_of_adapters_trains_what_an_uninterrupted_one_does(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    resumed, whole = lora_model(), lora_model()
    fit(resumed, saver(folder, resume=True), epochs=4, shuffle=False)
    fit(whole, epochs=4, shuffle=False)
    assert steps_in(folder) == [4, 8, 12, 16]
    assert_equal(content(resumed), content(whole))


@pytest.mark.parametrize("mesh", ["1x8", "2x4"])
def test_adapters_and_their_base_go_to_a_new_mesh_together(run, mesh):
    folder, model = run
    fresh = lora_model()
    shardload.restore(fresh, folder, mesh=mesh)
    assert_equal(content(fresh), content(model))
    assert {len(v.value.devices()) for v in fresh.variables} == {8}
    fit(fresh, batch_size=8)


@pytest.mark.parametrize(
    ("build", "says"),
    [
        (
            lambda: lora_model(rank=None),
            r"adapters in 1 layer \(rank 2\), the model has none: call enable_lora\(rank=2",
        ),
        (lambda: lora_model(rank=4), r"rank 4, but 2 in the step[\s\S]*LoRA cannot be enabled twice: load the base"),
        (lambda: lora_model(alpha=8), "has alpha 8, but 2 in the step"),
        (
            lambda: lora_model(width=16),
            "first/kernel' has shape .8, 16., but .8, 8. in the model that this partial step was saved from",
        ),
    ],
)
def test_a_model_that_differs_is_unchanged_and_told_what_to_do(run, build, says):
    model = build()
    before = content(model)
    with pytest.raises(MismatchError, match=says):
        shardload.restore(model, run[0])
    assert_equal(content(model), before)


def test_resuming_without_lora_says_what_to_call(run):
    with pytest.raises(MismatchError, match=r"call enable_lora\(rank=2") as raised:
        fit(lora_model(rank=None), saver(run[0], resume=True), epochs=4)
    assert "items='weights'" not in str(raised.value)  # the adapters would be missing as well


def test_a_weight_missing_from_the_model_counts_as_before(run, tmp_path):
    folder = shutil.copytree(run[0], tmp_path / "run")
    path = folder / "8" / "shardload" / "structure.json"
    structure = json.loads(path.read_text())
    del structure["left_out"]
    path.write_text(json.dumps(structure))
    Digests.compute(folder / "8").write(folder / "8")
    with pytest.raises(MismatchError, match=r"missing from the checkpoint: .*first/kernel"):
        shardload.load_weights(lora_model(), str(folder / "8"))


def test_a_partial_step_does_not_load_without_its_base(run):
    with pytest.raises(MismatchError, match=r"8 alone: it is a partial step, without 2 weights.*Load the base model"):
        shardload.load(str(run[0] / "8"))


def test_steps_inspect_and_verify_say_that_a_step_is_partial(run):
    def said(*arguments):
        return warm_start.run(["-m", "shardload", *arguments], check=True).stdout

    assert said("steps", run[0]).count("not read, partial: without 2 weights") == 2
    assert json.loads(said("steps", run[0], "--json"))["steps"][0]["left_out"] == 2
    assert "; partial: without 2 weights" in said("inspect", run[0] / "8").splitlines()[0]
    assert ", partial: without 2 weights)" in said("verify", run[0])


@pytest.mark.parametrize("chosen", [["*lora*"], lambda variable: "lora" in variable.path])
def test_variables_are_chosen_by_pattern_or_function(tmp_path, chosen):
    model = lora_model()
    fit(model, OrbaxCheckpoint(tmp_path, variables=chosen))
    weights = [leaf for leaf in record(tmp_path, 4, "structure")["leaves"] if leaf["kind"] == "weight"]
    assert [leaf["path"][-1] for leaf in weights] == ["lora_kernel_a", "lora_kernel_b"]
    assert record(tmp_path, 4)["variables"] == (["*lora*"] if isinstance(chosen, list) else None)
    fresh = lora_model()
    before = content(fresh)
    report = shardload.restore(fresh, tmp_path)
    after, wanted = content(fresh), content(model)
    weights = {name: before[name] for name in list(before)[: len(model.variables)]}
    for name, value in weights.items():
        assert np.array_equal(after[name], wanted[name] if "lora" in name else value), name
    moments = [name for name in wanted if "lora" in name and "momentum" in name]
    assert len(moments) == 2 and all(np.array_equal(after[name], wanted[name]) for name in moments)
    assert any("are 8 weights (" in note for note in report.notes)
    fit(fresh)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"variables": "lora"}, "expected patterns of variable paths"),
        ({"variables": []}, "expected patterns of variable paths"),
        ({"variables": ["*"], "save_trainable_only": True}, "together"),
        ({"save_trainable_only": "lora"}, "expected True or False"),
    ],
)
@pytest.mark.parametrize("make", [OrbaxCheckpoint, shardload.Checkpointer])
def test_a_wrong_choice_is_refused(tmp_path, make, arguments, says):
    with pytest.raises(UsageError, match=says):
        make(tmp_path, **arguments)


def test_a_choice_of_nothing_is_refused(tmp_path):
    model = lora_model()
    with pytest.raises(UsageError, match=r"'\*lara\*': it matches no path.*first/kernel'"):
        shardload.save(model, tmp_path, step=1, variables=["*lara*"])
    with pytest.raises(UsageError, match="selects none of its weights"):
        shardload.save(model, tmp_path, step=1, variables=lambda _: False)
    model.trainable = False
    with pytest.raises(UsageError, match="no trainable variable"):
        shardload.save(model, tmp_path, step=1, save_trainable_only=True)
    assert steps_in(tmp_path) == []


def test_a_loop_saves_and_restores_adapters(tmp_path):
    model = lora_model()
    fit(model)
    shardload.save(model, tmp_path, step=1, save_trainable_only=True)
    with shardload.Checkpointer(tmp_path, save_trainable_only=True) as checkpointer:
        fit(model)
        checkpointer.save(2, model)
    fresh = lora_model()
    assert shardload.Checkpointer(tmp_path).restore(fresh).recorded.left_out == 2
    assert_equal(content(fresh), content(model))


def test_values_of_quantised_layers_are_constants():
    layer = keras.layers.Dense(8)
    model = keras.Sequential([keras.Input((8,)), layer])
    layer.quantize("int8")
    layer.enable_lora(2)
    assert {v.name for v in trained_variables(model)} == {"bias", "lora_kernel_a", "lora_kernel_b"}


@pytest.mark.slow
def test_a_killed_run_of_adapters_goes_on(tmp_path):
    assert warm_start.run(["-m", "lora_child", tmp_path / "run", "6", "kill"]).returncode == -9
    for folder in ("run", "whole"):
        warm_start.run(["-m", "lora_child", tmp_path / folder, "6"], check=True)
    resumed, whole = lora_model(), lora_model()
    shardload.restore(resumed, tmp_path / "run")
    shardload.restore(whole, tmp_path / "whole")
    assert_equal(content(resumed), content(whole))
    assert steps_in(tmp_path / "run")[-1] == 24
