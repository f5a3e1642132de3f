"""The smallest mesh that fits, with searched layouts: one trace, meshes of every shape."""

import keras
import pytest
from layout_models import LAYOUT_MODELS, with_a_rule

from shardload.errors import DoesNotFitError, LayoutError, UsageError
from shardload.parallel import search, search_compiled, search_smallest_mesh
from shardload.sharding.mesh import MeshSpec

MIB = 2**20


@pytest.fixture(scope="module")
def block():
    return LAYOUT_MODELS["block"]()


def trained(block, mesh, limit):
    return search(block.model, MeshSpec.parse(mesh), inputs=block.inputs, optimizer="adamw", device_memory_bytes=limit)


def test_no_mesh_of_fewer_devices_fits(block):
    limit = 40 * MIB
    plan = search_smallest_mesh(block.model, limit, inputs=block.inputs, optimizer="adamw")
    assert plan.device.total <= limit and plan.device_memory_bytes == limit
    assert plan.mesh.size > 1
    fewer = plan.mesh.size // 2
    for batch in (b for b in (1, 2, 4, 8) if b <= fewer):
        with pytest.raises(DoesNotFitError):
            trained(block, f"{batch}x{fewer // batch}", limit)


def test_the_plan_is_that_of_a_search_on_its_mesh_and_the_fastest_of_its_size(block):
    limit = 40 * MIB
    plan = search_smallest_mesh(block.model, limit, inputs=block.inputs, optimizer="adamw")
    assert plan == trained(block, "x".join(map(str, plan.mesh.sizes)), limit)
    for mesh in [f"{b}x{plan.mesh.size // b}" for b in (1, 2, 4, 8) if plan.mesh.size % b == 0]:
        try:
            assert trained(block, mesh, limit).step_s >= plan.step_s
        except DoesNotFitError as error:
            assert error.least_bytes > limit


def test_a_model_that_fits_on_one_device_gets_one(block):
    plan = search_smallest_mesh(block.model, 2**34, inputs=block.inputs)
    assert plan.mesh == MeshSpec.parse("1x1") and plan.exchanges == ()


def test_where_more_devices_split_nothing_further_no_mesh_is_found(block):
    assert search_smallest_mesh(block.model, 64 * 2**10, inputs=block.inputs, optimizer="adamw") is None
    assert search_smallest_mesh(block.model, 40 * MIB, inputs=block.inputs, optimizer="adamw", max_devices=1) is None


def test_a_dim_that_a_larger_axis_does_not_divide_is_split_over_a_part_of_it():
    # One row cannot be split. Over four and over eight devices, the second kernel of 511 x 2 x 309 has two parts.
    inputs = [keras.Input((512,)), keras.Input((511,))]
    layers = [keras.layers.Dense(n, use_bias=False) for n in (1024, 618)]
    model = keras.Model(inputs, [layer(x) for layer, x in zip(layers, inputs, strict=True)])
    needs = []
    for mesh in ("1x2", "1x4", "1x8"):
        with pytest.raises(DoesNotFitError) as error:
            search(model, mesh, batch=1, device_memory_bytes=1000)
        needs.append(error.value.least_bytes)
    assert needs[0] > needs[1] > needs[2] > 4 * 511 * 309
    assert search_smallest_mesh(model, needs[2], batch=1).mesh.size == 8


def test_an_input_of_one_row_does_not_keep_the_batch_whole():
    inputs = [keras.Input((8,), batch_size=1), keras.Input((4095,))]
    model = keras.Model(inputs, [keras.layers.Dense(3)(x) for x in inputs])
    # 64 rows of 4095 inputs are 1 MiB, and neither 4095 nor 3 can be split in two.
    assert search_smallest_mesh(model, MIB, batch=64).mesh.sizes == (2, 1)


def test_a_batch_that_no_axis_divides_is_not_split():
    plan = search_smallest_mesh(LAYOUT_MODELS["block"](layers=1).model, 8 * MIB, batch=3, optimizer="adamw")
    assert plan.mesh.size > 1 and plan.mesh.sizes[0] == 1


def test_what_no_plan_can_be_made_with_is_refused(block):
    with pytest.raises(UsageError, match="device_memory_bytes='16GiB': expected a positive integer"):
        search_smallest_mesh(block.model, "16GiB", inputs=block.inputs)
    with pytest.raises(LayoutError, match="Cannot plan for the class SGD"):
        search_smallest_mesh(block.model, 2**30, inputs=block.inputs, optimizer=keras.optimizers.SGD)


def test_a_model_that_is_not_built_is_refused():
    with pytest.raises(LayoutError, match=r"Call it on a keras\.Input or a batch once"):
        search_smallest_mesh(keras.Sequential([keras.layers.Dense(3)]), 2**30)


def test_rules_for_layers_are_kept_on_every_mesh():
    model = with_a_rule(layers=4)
    plan = search_smallest_mesh(model, 7 * MIB, batch=1)  # of 8 MiB, and 2 MiB for the kernel that is gathered for use
    assert plan.mesh == MeshSpec.parse("1x2") and 6 * MIB < plan.device.total <= 7 * MIB
    assert {v.spec for v in plan.variables if v.path.endswith("kernel")} == {(("model",), ())}
    assert {v.spec for v in plan.variables if v.path.endswith("bias")} == {((),)}


@pytest.mark.parametrize(
    ("call", "wrong", "hint"),
    [
        (lambda model, **given: search(model, "1x2", **given), {"sequense": 4}, "Did you mean 'sequence'"),
        (lambda model, **given: search_compiled(model, "1x2", **given), {"pin": {}}, "Did you mean 'pins'"),
        (lambda model, **given: search_smallest_mesh(model, 1 << 30, **given), {"batch_axis": "data"}, ""),
    ],
)
def test_an_option_that_a_search_does_not_have_is_refused(call, wrong, hint):
    with pytest.raises(UsageError, match=rf"search\w*\(\) has no argument '{next(iter(wrong))}'\.?.*{hint}"):
        call(keras.Sequential([keras.Input((8,)), keras.layers.Dense(8)]), **wrong)
