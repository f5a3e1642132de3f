"""Plans found by search: what is split, what it costs and needs, limits, pins, and plans as files."""

import gc
import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import keras
import models
import numpy as np
import pytest
from layout_models import LAYOUT_MODELS, with_a_rule

import shardload
from shardload.errors import DoesNotFitError, LayoutError, MeshError, UsageError, WriteError
from shardload.layout_search import linear_program
from shardload.layouts.kv_cache import KvCache
from shardload.parallel import Hardware, LayoutPlan, choose, search, search_compiled, search_smallest_mesh
from shardload.sharding.mesh import MeshSpec
from shardload.units import format_bytes, parse_bytes

MIB = 2**20
MESH = MeshSpec(("batch", "model"), (2, 4))
DEVICE_MESH = keras.distribution.DeviceMesh(MESH.sizes, MESH.axes, devices=[f"cpu:{i}" for i in range(8)])


@pytest.fixture(scope="module")
def block():
    keras.utils.clear_session()  # names of layers count from the start
    return LAYOUT_MODELS["block"]()


@pytest.fixture(scope="module")
def trained(block):
    return search(block.model, MESH, inputs=block.inputs, optimizer="adamw")


def layouts(plan):
    return {v.path: str(layout) for v, layout in plan.layouts()}


def gemma(**changes):
    import keras_hub

    sizes = {"num_layers": 4, "num_query_heads": 8, "num_key_value_heads": 4, "hidden_dim": 256, "head_dim": 64}
    with shardload.abstract():
        return keras_hub.models.GemmaBackbone(2048, intermediate_dim=2048, **{**sizes, **changes})


def test_blocks_that_the_model_does_not_repeat_are_refused():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)])
    with pytest.raises(UsageError, match="Cannot recompute 'FusdBlock': the model repeats no block of that class"):
        search(model, "2x4", batch=8, optimizer="adamw", remat={"FusdBlock": "full"})


def test_simulated_devices_copy_no_work_that_is_free_on_accelerators():
    inputs = y = keras.Input((64,))
    for width in (256, 64, 256, 64):
        y = keras.layers.Dense(width, "relu")(y)
    plans = [
        search(keras.Model(inputs, y), "1x8", batch=64, optimizer="adamw", hardware=rates)
        for rates in (Hardware(), Hardware.simulated())
    ]
    assert plans[0].exchanged_bytes == 0 and plans[0].device.weights == 4 * sum(
        math.prod(v.shape) for v in plans[0].variables
    )
    assert plans[1].device.weights < plans[0].device.weights / 4


def test_convolutions_along_a_split_sequence_are_noted():
    def noted(layer):
        model = keras.Sequential([keras.Input((16, 8)), layer, keras.layers.Dense(8)])
        plan = search(model, "data=2,context=4", batch=8, optimizer="adamw")
        return [note for note in plan.notes if note.startswith("convolutions along the sequence that axis 'context'")]

    assert noted(keras.layers.Conv1D(8, 3, padding="same"))
    assert not noted(keras.layers.Dense(8))


def test_a_transformer_block_is_split_as_megatron_does_without_looking_at_names(trained):
    found = layouts(trained)
    assert found["multi_head_attention/query/kernel"] == "(-, model, -)"
    assert found["multi_head_attention/attention_output/kernel"] == "(model, -, -)"
    assert found["dense_1/kernel"] == "(-, model)" and found["dense/kernel"] == "(model, -)"
    assert found["multi_head_attention/attention_output/bias"] == found["layer_normalization/gamma"] == "(-)"


def test_a_block_needs_a_quarter_of_its_weights_and_ten_mebibytes_of_collectives(block, trained):
    assert trained.device.weights <= 1.6 * MIB and trained.exchanged_bytes <= 10.6 * MIB
    forward = search(block.model, MESH, inputs=block.inputs)
    assert forward.device.weights <= 1.6 * MIB and forward.exchanged_bytes == 4 * MIB


def test_gradients_and_slots_count_where_training_is_planned(trained):
    assert trained.device.gradients == trained.device.weights
    assert trained.device.slots == 2 * trained.device.gradients
    assert trained.device.total == sum((*(trained.device.weights,) * 4, trained.device.activations))


def test_the_optimizer_says_how_large_slots_are(block):
    sgd = search(block.model, MESH, inputs=block.inputs, optimizer="sgd")
    momentum = search(block.model, MESH, inputs=block.inputs, optimizer=keras.optimizers.SGD(0.1, momentum=0.9))
    assert (sgd.device.slots, momentum.device.slots) == (0, momentum.device.weights)
    with pytest.raises(LayoutError, match="optimizer 'adamz': Keras has none of that name"):
        search(block.model, MESH, inputs=block.inputs, optimizer="adamz")


def test_where_memory_is_plenty_and_links_are_slow_everything_is_replicated(block):
    slow = Hardware(link_bytes_per_s=1e6)
    plan = search(block.model, MESH, inputs=block.inputs, device_memory_bytes=2**34, hardware=slow)
    assert plan.exchanged_bytes == 0 and set("".join(layouts(plan).values())) <= set("(-, )")


def test_a_memory_limit_is_kept_by_splitting_what_costs_least(block):
    loose = search(block.model, MESH, inputs=block.inputs, optimizer="adamw", device_memory_bytes=2**30)
    options = {"device_memory_bytes": 37 * MIB, "sequence_parallel": False}
    tight = search(block.model, MESH, inputs=block.inputs, optimizer="adamw", **options)
    assert tight.device.total <= 37 * MIB < loose.device.total and tight.step_s >= loose.step_s


def test_where_only_the_least_memory_fits_times_are_still_seconds(monkeypatch):
    # With one moment, the fastest answer exceeds the limit at another one, and the least memory is the answer.
    monkeypatch.setattr(linear_program, "MOMENTS", 1)
    case = LAYOUT_MODELS["resnet"]()
    find = partial(search, case.model, MESH, inputs=case.inputs, optimizer="adamw")
    with pytest.raises(DoesNotFitError) as error:
        find(device_memory_bytes=1000)
    least = find(device_memory_bytes=error.value.least_bytes)
    again = find(pins=least)
    # Pins fix how weights are stored: the same, but used a little faster.
    assert again.device == least.device and least.step_s == pytest.approx(again.step_s, rel=0.01)
    assert all(d.opposite_s is None or abs(d.opposite_s) < least.step_s for d in least.decisions)


def test_a_limit_that_no_layout_keeps_says_what_would_do(block):
    said = r"at most 1\.0 MiB per device\. The least found is [\d.]+ MiB: .* weights"
    with pytest.raises(LayoutError, match=said) as error:
        search(block.model, MESH, inputs=block.inputs, optimizer="adamw", device_memory_bytes=MIB)
    advised = parse_bytes(str(error.value).split("The least found is ")[1].split(": ")[0])
    plan = search(block.model, MESH, inputs=block.inputs, optimizer="adamw", device_memory_bytes=advised)
    assert error.value.least_bytes == plan.device.total <= advised


class Gated(keras.layers.Layer):
    """A gated layer whose two halves are computed by one kernel."""

    def __init__(self, width, **kwargs):
        super().__init__(**kwargs)
        self.into, self.out = keras.layers.Dense(4 * width, use_bias=False), keras.layers.Dense(width)

    def build(self, shape):
        self.into.build(shape)
        self.out.build((*shape[:-1], 2 * shape[-1]))
        self.built = True

    def call(self, x):
        gate, y = keras.ops.split(self.into(x), 2, axis=-1)  # what the note names
        return x + self.out(keras.ops.silu(gate) * y)


def test_a_dim_that_the_program_takes_apart_is_noted_with_the_line():
    y = inputs = keras.Input((128,))
    for _ in range(2):
        y = Gated(128)(y)
    notes = search(keras.Model(inputs, y), "1x4", batch=8).notes
    at = 1 + next(i for i, line in enumerate(Path(__file__).read_text().split("\n")) if "# what the note names" in line)
    expected = f"slices its dim of 512, or joins it to others, at {Path(__file__).name}:{at}. Where it is sliced"
    said = [note for note in notes if expected in note]
    assert len(said) == 1 and "/kernel and 1 more" in said[0]
    assert search(LAYOUT_MODELS["block"]().model, "1x4", batch=8).notes == ()


def test_what_does_not_fit_is_told_what_would_help_most(block):
    find = partial(search, block.model, MESH, inputs=block.inputs, optimizer="adamw")
    whole = partial(find, sequence_parallel=False)
    free = find(remat="none").device
    limit = free.total - free.activations // 10
    with pytest.raises(DoesNotFitError, match=r"It fits with --remat auto --sequence-parallel auto"):
        whole(remat="none", device_memory_bytes=limit)
    with pytest.raises(DoesNotFitError, match=r"With everything done to save memory, it needs .*\(--remat auto\)"):
        find(remat="none", device_memory_bytes=MIB)
    said = r"although each MultiHeadAttention recomputes everything\. .*about [\d.]+ MiB \(plan --microbatches 2, or"
    with pytest.raises(DoesNotFitError, match=said):
        find(device_memory_bytes=MIB)


def test_under_a_tight_limit_weights_are_stored_split_over_the_batch_axis_too():
    model = gemma(num_layers=2)
    inputs = {k: jax.ShapeDtypeStruct((8, 16), "int32") for k in ("token_ids", "padding_mask")}
    free = search(model, MESH, inputs=inputs, optimizer="adamw", device_memory_bytes=2**32)
    least = sum(v.nbytes for v in free.variables) * 4 // 8 + 6 * MIB
    tight = search(model, MESH, inputs=inputs, optimizer="adamw", device_memory_bytes=least)
    stored = [v for v in tight.variables if v.stored]
    assert stored and all(v.stored == ("batch",) for v in stored)
    assert tight.device.total <= least


def test_where_nothing_else_fits_small_weights_are_stored_split_too():
    layers = [keras.layers.Dense(120, use_bias=False) for _ in range(10)]  # 56 KiB each
    with shardload.abstract():
        model = keras.Sequential([keras.Input((120,)), *layers])
    limits = (3 * MIB, 2 * MIB, MIB)
    plans = [search(model, "8x1", batch=8, optimizer="adamw", device_memory_bytes=limit) for limit in limits]
    stored = [sum(bool(v.stored) for v in plan.variables) for plan in plans]
    assert stored[0] == 0 < stored[1] < stored[2] <= 10
    assert all(plan.device.total <= plan.device_memory_bytes for plan in plans)
    with pytest.raises(LayoutError, match=r"The least found is 34\d\.\d KiB") as error:
        search(model, "8x1", batch=8, optimizer="adamw", device_memory_bytes=100_000)
    # Weights, gradients and two moments, 4 * 10 * 57,600 bytes / 8, and one that is gathered for use.
    assert 288_000 + 57_600 < error.value.least_bytes < 355_000


@pytest.mark.parametrize(
    ("mesh", "heads", "groups"),
    [("1x4", "model", "model"), ("1x8", "model_1+model_2", "model_1"), ("1x2", "model", "model")],
)
def test_an_axis_is_divided_in_two_where_groups_of_heads_do_not_divide(mesh, heads, groups):
    plan = search(gemma(), mesh, batch=16, sequence=256)
    found = layouts(plan)
    assert found["decoder_block_0/attention/query/kernel"] == f"({heads}, -, -)"
    assert found["decoder_block_0/attention/key/kernel"] == f"({groups}, -, -)"
    assert found["decoder_block_0/attention/attention_output/kernel"] == f"({heads}, -, -)"
    assert found["decoder_block_0/ffw_gating/kernel"] == f"(-, {heads})"
    assert plan.mesh.size == MeshSpec.parse(mesh).size


def test_an_axis_stays_whole_where_no_weight_is_split_over_a_part_of_it():
    layers = [keras.layers.Dense(n) for n in (36, 256, 256)]  # 36 units ask for 4 x 2 of 8 devices
    model = keras.Sequential([keras.Input((256,)), *layers])
    assert search(model, "1x8", batch=8, pins={".*/kernel": (None, None)}).mesh == MeshSpec.parse("1x8")


def test_blocks_that_repeat_are_decided_once():
    plans = [search(gemma(num_layers=n), MeshSpec.parse("1x4"), batch=4, sequence=64) for n in (2, 6)]
    assert len(plans[0].decisions) == len(plans[1].decisions)
    assert layouts(plans[0]).items() <= layouts(plans[1]).items()


def test_a_pin_is_kept_and_the_rest_follows(block):
    plan = search(block.model, MESH, inputs=block.inputs, optimizer="adamw", pins={"dense_1/kernel": ("model", None)})
    assert layouts(plan)["dense_1/kernel"] == "(model, -)"
    assert next(v.reason for v in plan.variables if v.path == "dense_1/kernel") == "pinned"
    assert plan.why("dense_1/kernel").startswith("dense_1/kernel (256, 1024): (model, -), pinned")
    with pytest.raises(LayoutError, match="no_such"):
        search(block.model, MESH, inputs=block.inputs, pins={"no_such/kernel": ("model", None)})


def test_a_pin_is_kept_axis_by_axis_or_refused(block):
    pins = {"dense_1/kernel": jax.sharding.PartitionSpec(("model", "batch"), None)}
    plan = search(block.model, MESH, inputs=block.inputs, optimizer="adamw", pins=pins)
    assert layouts(plan)["dense_1/kernel"] == "(model+batch, -)"
    mesh = MeshSpec(("batch", "model"), (1, 3))
    with pytest.raises(LayoutError, match=r"Cannot pin 'dense_1/kernel' to .*does not divide by 3"):
        search(block.model, mesh, inputs=block.inputs, pins={"dense_1/kernel": (None, "model")})
    with pytest.raises(LayoutError, match="Cannot split the batch over 'nope'"):
        search(block.model, MESH, inputs=block.inputs, batch_axis="nope")


@pytest.mark.parametrize("form", ["tuples", "specs", "layout map", "plan"])
def test_pins_have_the_forms_of_layouts(chained, form):
    model, up = chain("up_0", "up_1", "up_2"), jax.sharding.PartitionSpec("model")  # (model, -)
    layout_map = keras.distribution.LayoutMap(DEVICE_MESH)
    layout_map["up_[02]/kernel"] = ("model", None)
    pins = {"tuples": {"up_[02]/kernel": ("model", None)}, "specs": {"up_[02]/kernel": up}, "layout map": layout_map}
    pins["plan"] = search(model, MESH, batch=32, pins=layout_map)
    found = search(model, MESH, batch=32, pins=pins[form])
    assert [layouts(found)[f"up_{i}/kernel"] for i in (0, 2)] == ["(model, -)"] * 2
    assert found.exchanged_bytes == pins["plan"].exchanged_bytes


def test_a_plan_that_is_pinned_is_searched_again_with_its_costs(chained):
    model = chain("up_0", "up_1", "up_2")
    again = search(model, MESH, batch=32, pins=chained)
    assert (again.diff(chained), again.exchanges, again.device) == ((), chained.exchanges, chained.device)
    with pytest.raises(LayoutError, match="Cannot pin the layouts of a plan for batch=2,model=4 on the mesh batch=1,"):
        search(model, MeshSpec.parse("1x8"), batch=32, pins=chained)


def test_pins_of_another_form_are_refused(chained):
    model, outputs = chain("up_0", "up_1", "up_2"), keras.distribution.LayoutMap(DEVICE_MESH)
    outputs["up_0/output"] = ("batch", None)
    for pins, error, match in (
        (["up_0/kernel"], UsageError, r"Cannot plan with pins=\['up_0/kernel'\]: expected rules such as"),
        ("up_0/kernel", UsageError, "Cannot plan with pins='up_0/kernel': expected rules"),
        ({"up_0/kernel": None}, LayoutError, r"Cannot use \{'up_0/kernel': None\} as a rule of the pins: expected"),
        ({"up_0/kernel": "model"}, LayoutError, "as a rule of the pins: expected the path of a variable and a mesh"),
        (outputs, LayoutError, "Cannot pin 'up_0/output': it is for the output of a layer"),
    ):
        with pytest.raises(error, match=match):
            search(model, MESH, batch=32, pins=pins)


@pytest.mark.parametrize(
    ("mesh", "axes", "parts"),
    [
        ("data=2,fsdp=2,model=2", ("data", "fsdp"), 4),
        ("fsdp=4", ("fsdp",), 4),
        ("model=4", (), 1),
        ("expert=4", (), 1),
    ],
)
def test_the_names_of_axes_say_which_of_them_split_the_batch(mesh, axes, parts):
    plan = search(chain("up", "down"), mesh, batch=32, optimizer="adamw")
    assert plan.batch_axes == axes
    # Gradients are added up over all axes of the batch at once.
    summed = [e for e in plan.exchanges if e.kind == "all-reduce" and e.axis == "+".join(axes)]
    assert bool(summed) is bool(axes)
    assert "axis 'context' splits nothing" in search(chain("up", "down"), "context=2,model=2", batch=8).notes[0]
    with pytest.raises(MeshError, match="axis 'pipe' is for the stages of a pipeline"):
        search(chain("up", "down"), "pipe=2,model=2")


def test_a_sequential_model_says_its_inputs():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(256), keras.layers.Dense(64)])
    assert search(model, MESH, batch=8).inputs == "float32[8, 64]"


class Pair(keras.layers.Layer):
    """Two layers of one name, so that their variables have the same paths."""

    def __init__(self, first=keras.layers.Dense):
        super().__init__(name="pair")
        self.up, self.down = first(512, name="d"), keras.layers.Dense(64, name="d")

    def call(self, x):
        return self.down(self.up(x))


def pair(**arguments):
    inputs = keras.Input((64,))
    return keras.Model(inputs, Pair(**arguments)(inputs))


@pytest.fixture(scope="module")
def paired():
    return search(pair(), MESH, batch=64, optimizer="adam", hardware=Hardware(latency_s=0))


def test_variables_with_one_path_get_their_own_layouts(paired):
    model = pair()
    choice = choose(model, MESH, paired)
    assert [str(choice.of(v)) for v in model.variables] == [str(layout) for _, layout in paired.layouts()]
    assert len({str(choice.of(v)) for v in model.variables if len(v.shape) == 2}) == 2


def test_variables_with_one_path_are_told_apart_by_numbers(paired):
    up, down = jax.sharding.PartitionSpec(None, "model"), jax.sharding.PartitionSpec("model", None)
    assert paired.names == ("pair/d/kernel", "pair/d/bias", "pair/d/kernel#2", "pair/d/bias#2")
    specs = paired.partition_specs()
    assert (specs["pair/d/kernel"], specs["pair/d/kernel#2"]) == (up, down)
    why = paired.why("pair/d/kernel#2")
    assert why.startswith("pair/d/kernel#2 (512, 64): (model, -)") and "pair/d/kernel[0]" not in why
    assert why in paired.why("pair/d/kernel") and "pair/d/kernel (64, 512): (-, model)" in paired.why("pair/d/kernel")
    first, *rest = paired.variables
    other = replace(paired, variables=(replace(first, spec=((), ())), *rest))
    assert paired.diff(other) == ("pair/d/kernel: (-, model) -> (-, -)",)
    assert "pair/d/kernel#2  (512/model, 64)" in str(paired)


def test_a_layout_map_cannot_tell_variables_with_one_path_apart(paired):
    with pytest.raises(LayoutError, match=r"several variables have the path 'pair/d/kernel', one with \(-, model\)"):
        paired.to_layout_map(DEVICE_MESH)
    same = replace(paired, variables=tuple(replace(v, spec=((),) * len(v.shape)) for v in paired.variables))
    assert len(same.to_layout_map(DEVICE_MESH)) == 0


def test_a_rule_is_for_its_class_where_layers_have_one_path():
    class Columns(keras.layers.Dense):
        pass

    @shardload.layout_rule(Columns)
    def columns(layer):
        return {"kernel": (1,), "bias": ()}

    plan = search(pair(first=Columns), MESH, batch=64)
    assert [v.reason == "pinned" for v in plan.variables] == [True, True, False, False]


def test_a_rule_for_a_layer_class_is_kept():
    found = layouts(search(with_a_rule(), MESH, batch=8))
    assert found["mixing/kernel"] == "(model, -)" and found["mixing/bias"] == "(-)"


def test_a_plan_explains_each_decision_by_what_the_opposite_costs(trained):
    text = trained.why("dense_1/kernel")
    assert "axis 'model' splits the 1024 of" in text and "ms per step" in text
    assert all(d.opposite_s is None or d.opposite_s > -1e-9 or d.split for d in trained.decisions)
    with pytest.raises(LayoutError, match="no variable of that path"):
        trained.why("dense_9/kernel")


@pytest.mark.parametrize(("limit", "fits"), [(60 * MIB, False), (70 * MIB, True)])
def test_the_opposite_of_a_decision_keeps_the_limit_too(block, limit, fits):
    # Of an input, nothing but the batch is split; of what a layer makes of it, the residual stream could be.
    inputs = keras.Input((128, 64))
    model = keras.Model(inputs, block.model(keras.layers.Dense(256, name="embed")(inputs)))
    plan = search(model, MESH, batch=16, optimizer="adamw", device_memory_bytes=limit, sequence_parallel=False)
    # With the residual stream split over the model axis, activations need 64 MiB.
    opposite_s = {d.dims[0]: d.opposite_s for d in plan.decisions}
    assert (opposite_s["embed/kernel[1]"] is not None) is fits


def test_the_same_search_gives_the_same_plan(block, trained):
    assert search(block.model, MESH, inputs=block.inputs, optimizer="adamw") == trained


def test_a_plan_is_saved_read_back_and_compared(trained, tmp_path):
    trained.save(tmp_path / "plan.json")
    again = LayoutPlan.load(tmp_path / "plan.json")
    assert again == trained and again.diff(trained) == ()
    other = search(LAYOUT_MODELS["block"](layers=1).model, MESH, batch=16)
    assert any(line.endswith("-> absent") for line in trained.diff(other))
    for text, why in (('{"format": "other"}', "its format is not"), ('{"format": ', "it is not JSON")):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(LayoutError, match=why):
            LayoutPlan.load(tmp_path / "bad.json")


def test_a_plan_is_written_into_folders_that_are_made_for_it(chained, tmp_path):
    chained.save(tmp_path / "new" / "folder" / "plan.json")
    assert LayoutPlan.load(tmp_path / "new" / "folder" / "plan.json") == chained
    with pytest.raises(WriteError, match=r"Cannot write the plan .*: Is a directory\. Use the path of a file"):
        chained.save(tmp_path)


@pytest.mark.parametrize("wrong", [None, 3, {}])
def test_what_is_no_path_or_check_of_a_plan_is_refused(chained, wrong, tmp_path):
    for use, what in (
        (LayoutPlan.load, "read the plan"),
        (chained.save, "write the plan"),
        (chained.diff, "compare a"),
    ):
        with pytest.raises(UsageError, match=f"Cannot {what} .*: expected "):
            use(wrong)
    with pytest.raises(UsageError, match="Cannot add True to a plan: expected what compile_step returns"):
        chained.with_checks(compiled=True)
    with pytest.raises(LayoutError, match=r"Cannot read the plan .*: Is a directory, expected the file that"):
        LayoutPlan.load(tmp_path)


@pytest.mark.parametrize("wrong", [None, "2x4", MESH])
def test_what_is_no_mesh_with_devices_has_no_layout_map(chained, wrong):
    said = r"LayoutMap on .*: expected .*DeviceMesh\(\(2, 4\), \['batch', 'model'\], dev"
    with pytest.raises(UsageError, match=said):
        chained.to_layout_map(wrong)


def test_plans_on_two_meshes_are_compared_with_the_meshes_named(block, trained, tmp_path):
    trained.save(tmp_path / "plan.json")
    other = search(block.model, MeshSpec.parse("1x8"), inputs=block.inputs, optimizer="adamw")
    mesh, *lines = other.diff(tmp_path / "plan.json")
    assert mesh == "mesh: batch=1,model=8 -> batch=2,model=4"
    ours = {v.path: v.spec for v in trained.variables}
    assert [line.partition(":")[0] for line in lines] == [v.path for v in other.variables if v.spec != ours[v.path]]
    with pytest.raises(LayoutError, match=r"no_such\.json': there is no such file"):
        trained.diff(tmp_path / "no_such.json")


@pytest.mark.parametrize(
    ("limit", "opposite_s", "said"),
    [
        (None, -0.001, "saves 1.000 ms per step, less than the memory that it needs for weights is worth"),
        (None, None, "the opposite contradicts other decisions"),
        (2**30, None, "does not keep the memory limit"),
    ],
)
def test_why_does_not_speak_of_a_limit_that_was_not_given(trained, limit, opposite_s, said):
    decisions = tuple(replace(d, opposite_s=opposite_s) for d in trained.decisions)
    plan = replace(trained, decisions=decisions, device_memory_bytes=limit)
    assert said in plan.why("dense_1/kernel") and ("memory limit" in plan.why("dense_1/kernel")) == (limit is not None)


def test_a_sequence_that_no_input_has_is_refused():
    fixed = keras.Sequential([keras.Input((16, 8)), keras.layers.Dense(8)])
    assert search(fixed, MESH, batch=8, sequence=16).inputs == "float32[8, 16, 8]"
    with pytest.raises(LayoutError, match=r"sequence=32: its inputs are float32\[8, 16, 8\], given or fixed by the"):
        search(fixed, MESH, batch=8, sequence=32)


def test_what_an_axis_of_unknown_name_is_used_for_is_noted():
    notes = search(chain("up", "down"), "data=2,foo=4", batch=8).notes
    assert [note.split(";")[0] for note in notes] == [
        "axis 'foo' of the mesh is used as the model axis because of its position"
    ]


def test_sequences_are_no_longer_than_the_positions_of_a_model():
    with shardload.abstract():
        model = models.build("bert")
    assert search(model, MESH, batch=8).inputs.startswith("int32[8, 64]")
    assert search(gemma(num_layers=1), MESH, batch=8).inputs.startswith("int32[8, 512]")
    with pytest.raises(LayoutError, match=r"on inputs int32\[8, 4096\].*as sequence= \(--sequence\)"):
        search(model, MESH, batch=8, sequence=4096)


def test_arguments_that_a_functional_model_would_ignore_are_refused(block):
    with pytest.raises(LayoutError, match=r"Cannot trace .* with arguments \['attention_mask'\]"):
        search(block.model, MESH, inputs=block.inputs, arguments={"attention_mask": np.ones((16, 128))})
    assert search(block.model, MESH, inputs=block.inputs, arguments={"training": False})


def test_a_plan_chooses_the_layouts_of_its_model_and_of_no_other(block, trained, tmp_path):
    trained.save(tmp_path / "plan.json")
    for layout in (trained, tmp_path / "plan.json"):
        choice = choose(block.model, MESH, layout)
        assert {v.path: str(v.layout) for v in choice.variables} == layouts(trained)
    with pytest.raises(LayoutError, match="Cannot use the plan for batch=2,model=4 on the mesh batch=1,model=8"):
        choose(block.model, MeshSpec.parse("1x8"), trained)
    with pytest.raises(LayoutError, match=r"Cannot use the plan of .*is not in the plan|has shape"):
        choose(LAYOUT_MODELS["resnet"]().model, MESH, trained)


def test_a_plan_is_for_a_model_that_is_built_again_too(trained):
    again = LAYOUT_MODELS["block"]().model  # Keras numbers its layers anew
    assert [v.path for v in again.variables] != [v.path for v in trained.variables]
    choice = choose(again, MESH, trained)
    assert [str(v.layout) for v in choice.variables] == list(layouts(trained).values())


def chain(*names):
    y = inputs = keras.Input((64,))
    for name in names:
        y = keras.layers.Dense(64, name=name)(y)
    return keras.Model(inputs, y)


@pytest.fixture(scope="module")
def chained():
    return search(chain("up_0", "up_1", "up_2"), MESH, batch=32, pins={"up_1/kernel": ("batch", "model")})


def test_a_plan_brings_its_mesh(chained, tmp_path):
    chained.save(tmp_path / "plan.json")
    chain("up_0", "up_1", "up_2").save_weights(tmp_path / "one.weights.h5")
    for layout in (chained, tmp_path / "plan.json", str(tmp_path / "plan.json")):
        assert shardload.AutoShardDistribution(layout=layout).mesh == MESH
        model = chain("up_0", "up_1", "up_2")
        assert shardload.load_weights(model, tmp_path / "one.weights.h5", layout=layout).mesh == str(MESH)


@pytest.mark.parametrize(
    ("names", "pinned"),
    [
        (("up_1", "up_0", "up_2"), "up_1"),  # by path
        (("up_4", "up_5", "up_9"), "up_5"),  # numbered again
        (("up_1", "up_2", "up_3"), "up_2"),  # likewise, although some paths are in the plan
        (("a", "b", "c"), "b"),  # named otherwise
    ],
)
def test_variables_take_the_layout_of_their_path_or_of_their_place(chained, names, pinned):
    model = chain(*names)
    choice = choose(model, MESH, chained)
    assert [v.path for v in model.variables if str(choice.of(v)) == "(batch, model)"] == [f"{pinned}/kernel"]


@pytest.mark.parametrize("names", [("up_1", "x", "up_2"), ("up_5", "up_1", "up_0")])
def test_where_some_paths_are_in_the_plan_the_others_are_named(chained, names):
    missing = next(name for name in names if name in ("x", "up_5"))
    with pytest.raises(LayoutError, match=f"Cannot use the plan .*: '{missing}/kernel' is not in the plan, '{missing}"):
        choose(chain(*names), MESH, chained)


def test_a_plan_becomes_a_layout_map_and_partition_specs(block, trained):
    layout_map = trained.to_layout_map(DEVICE_MESH)
    for variable, layout in trained.layouts():
        found = layout_map[variable.path]
        assert (found is None) == layout.is_replicated
        assert found is None or tuple(found.axes) == tuple(axes[0] if axes else None for axes in variable.spec)
    assert trained.partition_specs()["dense_1/kernel"] == jax.sharding.PartitionSpec(None, "model")
    with pytest.raises(LayoutError, match="the meshes differ"):
        trained.to_layout_map(keras.distribution.DeviceMesh((8,), ["model"], devices=[f"cpu:{i}" for i in range(8)]))


class OfOne(keras.Model):
    """A model of which Keras does not know the inputs, with a layer that is built on the first call."""

    def __init__(self, units):
        super().__init__()
        self.dense = keras.layers.Dense(units)

    def call(self, x):
        return 2 * self.dense(x)


def test_a_model_that_does_not_say_its_inputs_asks_for_them():
    model = OfOne(128)
    model(np.zeros((8, 64), "float32"))
    with pytest.raises(LayoutError, match=r"does not declare its inputs\. Pass inputs="):
        search(model, MESH)
    assert search(model, MESH, inputs=np.zeros((8, 64), "float32"), optimizer="adam").training


def test_a_model_without_variables_and_inputs_that_do_not_fit_are_refused(block):
    with pytest.raises(LayoutError, match=r"Call it on a keras\.Input or a batch once"):
        search(keras.Sequential([keras.layers.Dense(3)]), MESH, batch=8)
    with pytest.raises(LayoutError, match=r"Cannot trace .*Pass inputs= that the model accepts"):
        search(block.model, MESH, inputs=jax.ShapeDtypeStruct((8, 128, 255), "float32"))


@pytest.mark.parametrize("read", [float, np.asarray, bool])
def test_a_model_that_reads_values_is_told_so(read):
    class Reads(keras.Sequential):
        def call(self, x):
            return super().call(x) * read(x[0, 0])

    model = Reads([keras.Input((64,)), keras.layers.Dense(128)])
    with pytest.raises(LayoutError, match=r"(Concretization|Tracer).*Its call reads values .* Use keras\.ops") as error:
        search(model, MESH, inputs=np.zeros((8, 64), "float32"))
    assert "Pass inputs=" not in str(error.value)


def test_the_batch_that_a_model_fixes_is_planned_for_and_none_is_refused():
    layers = [keras.layers.Dense(128)]
    model = keras.Sequential([keras.Input((64,), batch_size=6), *layers])
    assert search(model, MESH).inputs == search(model, MESH, batch=6).inputs == "float32[6, 64]"
    for use in (search, search_compiled, lambda model, mesh, batch: search_smallest_mesh(model, 2**20, batch=batch)):
        with pytest.raises(LayoutError, match=r"with batch=16: its inputs are float32\[6, 64\], given or fixed by the"):
            use(model, MESH, batch=16)
    with pytest.raises(LayoutError, match=r"with batch=16: its inputs are float32\[6, 64\]"):
        search(model, MESH, inputs=np.zeros((6, 64), "float32"), batch=16)
    with pytest.raises(LayoutError, match=r"on inputs float32\[0, 64\]: a dim has length 0"):
        search(keras.Sequential([keras.Input((64,)), *layers]), MESH, inputs=np.zeros((0, 64), "float32"))


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 2, 0)])
def test_the_rows_of_all_inputs_are_split_wherever_an_input_of_one_row_is(order):
    inputs = keras.Input((64,), batch_size=1), keras.Input((64,)), keras.Input((32,))
    layers = [keras.layers.Dense(128) for _ in inputs]
    model = keras.Model([inputs[i] for i in order], [layers[i](inputs[i]) for i in order])
    whole, split = (search(model, mesh, batch=64).device.activations for mesh in ("1x1", "8x1"))
    assert split < whole / 7


def test_a_batch_is_for_inputs_that_do_not_fix_one():
    inputs = [keras.Input((64,)), keras.Input((64,), batch_size=1)]
    model = keras.Model(inputs, keras.layers.Dense(64)(inputs[0] + inputs[1]))
    assert search(model, MESH, batch=16).inputs == "float32[16, 64], float32[1, 64]"


def test_rates_may_be_numbers_of_numpy(block, tmp_path):
    hardware = Hardware(flops_per_s=np.float32(1e12), axis_bytes_per_s={"model": np.float32(1e9)})
    plan = search(block.model, MESH, inputs=block.inputs, hardware=hardware)
    plan.save(tmp_path / "plan.json")
    assert LayoutPlan.load(tmp_path / "plan.json") == plan and plan.constants["axis_bytes_per_s"] == {"model": 1e9}


def test_a_limit_may_be_an_integer_of_numpy(block):
    plan = search(block.model, MESH, inputs=block.inputs, device_memory_bytes=np.int64(2**32))
    assert type(plan.device_memory_bytes) is int and json.loads(json.dumps(plan.device_memory_bytes)) == 2**32


@pytest.mark.parametrize(
    "wrong", [{"batch": 0}, {"sequence": -1}, {"device_memory_bytes": "16GiB"}, {"device_memory_bytes": 0}]
)
def test_numbers_that_are_none_are_refused(block, wrong):
    (name, value), *_ = wrong.items()
    with pytest.raises(LayoutError, match=f"Cannot plan with {name}={value!r}: expected a positive integer"):
        search(block.model, MESH, **wrong)


@pytest.mark.parametrize("model", [None, "gemma", keras.Model], ids=["None", "a name", "a class"])
def test_what_is_no_model_is_refused(model):
    for use in (search, search_compiled, choose, lambda model, mesh: search_smallest_mesh(model, 2**20)):
        with pytest.raises(UsageError, match=r"Cannot (plan|choose layouts for) (None|'gemma'|<class .*>): expected a"):
            use(model, MESH)


@pytest.mark.parametrize("hardware", [{}, {"flops_per_s": 1e12}, "v5e", Hardware])
def test_hardware_of_another_kind_is_refused(block, hardware):
    for use in (lambda **given: search(block.model, MESH, **given), partial(search_smallest_mesh, block.model, 2**30)):
        with pytest.raises(UsageError, match=r"Cannot plan with hardware=.*: expected a shardload\.parallel\.Hardware"):
            use(inputs=block.inputs, hardware=hardware)


def test_arguments_without_names_are_refused_and_long_inputs_cut(block):
    with pytest.raises(UsageError, match=r"arguments=\[True\]: expected a mapping of arguments of call by name"):
        search(block.model, MESH, inputs=block.inputs, arguments=[True])
    with pytest.raises(LayoutError, match=r"on inputs 1\.0, 1\.0, .* and 48 more: "):
        search(block.model, MESH, inputs=[1.0] * 64)


def test_constants_are_checked_and_stated(block, trained):
    assert "cost constants: flops_per_s 1e+14" in str(trained)
    for wrong in ({"flops_per_s": 0}, {"flops_per_s": "fast"}, {"latency_s": None}, {"link_bytes_per_s": math.nan}):
        with pytest.raises(LayoutError, match="rates must be positive"):
            Hardware(**wrong)
    with pytest.raises(LayoutError, match=r"axis_bytes_per_s=\[1\]: expected a bandwidth for each axis"):
        Hardware(axis_bytes_per_s=[1])
    with pytest.raises(LayoutError, match=r"bandwidth for \['modle'\]"):
        search(block.model, MESH, inputs=block.inputs, hardware=Hardware(axis_bytes_per_s={"modle": 1e9}))


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LAYOUT_MODELS)
@pytest.mark.parametrize("mesh", ["2x4", "1x3"])
def test_every_model_is_planned_for_training_with_layouts_that_divide(name, mesh):
    found = LAYOUT_MODELS[name]()
    plan = search(found.model, MeshSpec.parse(mesh), inputs=found.inputs, optimizer="adam")
    assert [v.path for v in plan.variables] == [v.path for v in found.model.variables]
    assert all(layout.divides(v.shape) for v, layout in plan.layouts())
    assert plan.device.weights == sum(v.nbytes // math.prod(layout.parts) for v, layout in plan.layouts())
    assert plan.notes == ()


def test_a_batch_that_does_not_divide_is_noted():
    plan = search(chain("up", "down"), MESH, batch=15)
    assert plan.notes[0] == "a batch of 15 does not divide over axis 'batch': its 2 devices all do the same work"


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "llama", "qwen3"])
def test_the_note_on_the_cache_of_a_generating_model(family):
    model = models.causal_lm(family)
    sizes = [math.prod(v.shape) for v in model.variables if v.path.endswith("key/kernel")]
    per_token = 2 * sum(sizes) // model.backbone.hidden_dim  # keys and values of all layers
    cache = format_bytes(8 * 16 * per_token * 4)
    said = f"a KV cache, which is not counted: {cache} over all devices for 8 x 16 tokens"
    plan = search(model, MESH, batch=8, sequence=16)
    [note] = [note for note in plan.notes if said in note]
    layout = next(layout for v, layout in plan.layouts() if v.path.endswith("key/kernel"))
    parts = 2 * layout.parts[0 if family == "gemma2" else 1]  # of the batch, and of the heads
    assert f", {format_bytes(8 * 16 * per_token * 4 // parts)} on each" in note
    assert not any("KV" in note for note in search(model, MESH, batch=8, sequence=16, optimizer="adam").notes)


@pytest.mark.parametrize("family", ["gemma2", "gpt2", "llama"])
@pytest.mark.parametrize("mesh", ["1x4", "2x2", "4x1"])
def test_a_cache_that_is_asked_for_is_split_as_the_plan_splits_it(family, mesh):
    model, step = models.causal_lm(family), {"batch": 8, "sequence": 16}
    plan = search(model, mesh, **step, kv_cache="8x1000")
    assert not any("KV" in note for note in plan.notes)
    specs = {v.path: v.spec for v in plan.variables}
    cache = KvCache.of(model, rows=8, tokens=1000)
    share = cache.device_bytes(plan.mesh, lambda v: specs[v.path], batch_axes=plan.batch_axes)
    assert plan.device.kv_cache == share > 0
    assert plan.device.total == plan.device.weights + plan.device.activations + share
    assert LayoutPlan.from_json(plan.to_json()) == plan and "KV cache" in plan.summary()
    # A limit counts it: a whole cache on each device does not fit where its shares do.
    limit = search(model, "1x1", **step).device.total + cache.nbytes // 2
    assert search(model, mesh, **step, kv_cache=(8, 1000), device_memory_bytes=limit).device.total <= limit
    with pytest.raises(DoesNotFitError):
        search(model, "1x1", **step, kv_cache=(8, 1000), device_memory_bytes=limit)
    assert search_smallest_mesh(model, limit, **step, kv_cache=(8, 1000)).mesh.size == 2


def test_a_cache_that_cannot_be_counted_is_noted_and_one_of_training_refused():
    plan = search(chain("up", "down"), MESH, batch=8, kv_cache=(8, 16))
    assert plan.notes == ("the KV cache is not counted: Functional does not generate text from a KV cache",)
    with pytest.raises(UsageError, match="in a step of training: leave out kv_cache"):
        search(chain("up", "down"), MESH, batch=8, kv_cache=(8, 16), optimizer="sgd")
    with pytest.raises(UsageError, match="kv_cache='many': expected rows and tokens"):
        search(chain("up", "down"), MESH, batch=8, kv_cache="many")


@pytest.mark.filterwarnings("ignore:`build")
def test_a_model_whose_layers_are_not_built_is_refused():
    model = OfOne(8)
    model.build((None, 8))
    with pytest.raises(LayoutError, match="has no variables yet"):
        search(model, "2x4", inputs=jax.ShapeDtypeStruct((16, 8), "float32"))
    assert model(np.ones((16, 8), "float32")).shape == (16, 8)


@pytest.mark.parametrize("is_enabled", [True, False])
def test_the_garbage_collector_is_left_as_it_was(block, is_enabled):
    (gc.enable if is_enabled else gc.disable)()
    try:
        search(block.model, MESH, inputs=block.inputs)
        assert gc.isenabled() is is_enabled
        with pytest.raises(LayoutError, match="Cannot trace"):
            search(block.model, MESH, inputs=jax.ShapeDtypeStruct((16, 7), "float32"))
        assert gc.isenabled() is is_enabled
    finally:
        gc.enable()
