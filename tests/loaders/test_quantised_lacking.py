"""A quantised folder without a tensor that its method needs is refused by that tensor's name, in every method."""

import json
import re

import ml_dtypes
import numpy as np
import pytest
import quantised_folders
from quantised_folders import METHODS, held
from safetensors.numpy import save_file

import shardload
from shardload.errors import ShardloadError, SourceError, UnsupportedError

WIDE = {"intermediate_size": 96}
LAYER = "model.layers.0.mlp.up_proj"
OPTION = "quantization_config"
NOT_NEEDED = ("input_scale", "input_global_scale", "weight_format")
"""What quantises activations, and says how int8 is stored where there are several ways."""
IN_ORDER = ("gptq 4", "gptq 2", "gptq 8, second version")
"""GPTQ without ``desc_act``: some writers leave out the groups."""


def parts_of(method):
    """Endings of the tensors that one layer has."""
    return [name.removeprefix("x.") for name in METHODS[method][0]("x", (96, 32))[0]]


def is_needed(method, part):
    return part not in NOT_NEEDED and not (part == "g_idx" and method in IN_ORDER)


NEEDED = [(method, part) for method in METHODS for part in parts_of(method) if is_needed(method, part)]
OPTIONAL = [(method, part) for method in METHODS for part in parts_of(method) if not is_needed(method, part)]


def damaged(folder, edit=None, **settings):
    """The folder with other tensors, and other settings of its quantization_config."""
    tensors = held(folder / "model.safetensors")
    if edit is not None:
        edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config[OPTION] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(folder, part, *, of_all=False):
    """The folder without one tensor of a layer, or of all layers."""
    names = [name for name in held(folder / "model.safetensors") if name.endswith(f"_proj.{part}")]
    return damaged(folder, lambda tensors: [tensors.pop(n) for n in names if of_all or n == f"{LAYER}.{part}"])


def with_weights(folder, **settings):
    """The folder with other settings for the weights of its group of compressed-tensors."""
    group = json.loads((folder / "config.json").read_text())[OPTION]["config_groups"]["group_0"]
    return damaged(folder, config_groups={"group_0": {**group, "weights": {**group["weights"], **settings}}})


def write(tmp_path, method):
    return quantised_folders.write(tmp_path, method, **WIDE)[0]


@pytest.mark.parametrize(("method", "part"), NEEDED)
def test_a_needed_tensor_is_named(method, part, tmp_path):
    folder = without(write(tmp_path, method), part)
    for options in ({}, {"ignore_config": [OPTION]}):
        with pytest.raises(SourceError, match=rf"it lacks '{re.escape(f'{LAYER}.{part}')}'") as raised:
            shardload.plan(folder, **options)
        assert OPTION not in str(raised.value)


@pytest.mark.parametrize(("method", "part"), NEEDED)
def test_nothing_is_loaded_if_all_of_a_kind_are_missing(method, part, tmp_path):
    folder = without(write(tmp_path, method), part, of_all=True)
    is_float8 = method in ("fp8 blocks", "fp8 tensor", "float8 channels") and part.startswith("weight_scale")
    with pytest.raises(UnsupportedError if is_float8 else SourceError) as raised:
        shardload.plan(folder)
    said = "lacks a scale" if is_float8 else rf"it lacks 'model\..*_proj\.{re.escape(part)}'"
    assert re.search(said, str(raised.value))
    assert OPTION not in str(raised.value)


@pytest.mark.parametrize(("method", "part"), OPTIONAL)
def test_a_tensor_that_is_not_needed_may_be_missing(method, part, tmp_path):
    folder = write(tmp_path, method)
    expected = shardload.load(folder, dtype="float32").get_weights()
    for of_all in (False, True):
        found = shardload.load(without(folder, part, of_all=of_all), dtype="float32").get_weights()
        assert all(map(np.array_equal, found, expected))


USES = {
    "load": lambda folder, out: shardload.load(folder, mesh="1x1", strict=False),
    "kept": lambda folder, out: shardload.load(folder, quantized="keep"),
    "ignored": lambda folder, out: shardload.load(folder, ignore_config=[OPTION], strict=False),
    "preset": lambda folder, out: shardload.convert(folder, out, to="preset"),
    "dequantised folder": lambda folder, out: shardload.convert(folder, out, to="safetensors", dtype="float32"),
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
@pytest.mark.parametrize("of_all", [False, True])
@pytest.mark.parametrize(
    ("method", "part"),
    [
        ("gptq 4 in another order", "g_idx"),
        ("packed 8 in another order", "weight_g_idx"),
        ("int8 asymmetric", "weight_zero_point"),
    ],
)
def test_whoever_loads_it_is_told(method, part, of_all, use, tmp_path):
    folder = without(write(tmp_path / "hf", method), part, of_all=of_all)
    with pytest.raises(SourceError, match=rf"it lacks '.*\.{part}'"):
        use(folder, tmp_path / "out")


def test_the_settings_may_be_wrong_about_the_order_of_groups(tmp_path):
    folder = damaged(write(tmp_path, "gptq 4 in another order"), desc_act=False)
    assert shardload.plan(folder)
    with pytest.raises(SourceError, match=rf"it lacks '{LAYER}.g_idx'"):
        shardload.plan(without(folder, "g_idx"))


def test_scales_of_experts_are_needed_too(tmp_path):
    name = "model.layers.0.mlp.experts.gate_up_proj"
    experts = {name: np.zeros((2, 4, 4), ml_dtypes.float8_e4m3fn)}
    folder = damaged(write(tmp_path, "fp8 blocks"), lambda tensors: tensors.update(experts))
    with pytest.raises(SourceError, match=rf"it lacks '{name}_scale_inv'"):
        shardload.plan(folder)


@pytest.mark.parametrize("actorder", ["group", "dynamic", True])
def test_groups_in_the_order_of_activations_need_an_index(actorder, tmp_path):
    folder = with_weights(write(tmp_path, "packed 4"), actorder=actorder)
    with pytest.raises(SourceError, match=r"it lacks '.*\.weight_g_idx'"):
        shardload.plan(folder)


@pytest.mark.parametrize("actorder", ["weight", "static", None, False])
def test_other_orders_need_none(actorder, tmp_path):
    assert shardload.plan(with_weights(write(tmp_path, "packed 4"), actorder=actorder))


def test_an_index_of_int8_groups_is_refused_if_they_are_not_in_order(tmp_path):
    folder = with_weights(write(tmp_path, "int8 channels"), strategy="group", group_size=16, actorder="group")

    def grouped(order, tensors):
        for name in [name for name in tensors if name.endswith(".weight_scale")]:
            rows, columns = tensors[name.removesuffix("_scale")].shape
            tensors[name] = np.ones((rows, columns // 16), np.float32)
            tensors[f"{name.removesuffix('_scale')}_g_idx"] = (np.arange(columns) // 16)[::order].astype(np.int32)

    assert not shardload.plan(damaged(folder, lambda tensors: grouped(1, tensors))).unused
    with pytest.raises(UnsupportedError, match="actorder='group'"):
        shardload.plan(damaged(folder, lambda tensors: grouped(-1, tensors)))


@pytest.mark.parametrize("method", ["packed 4 asymmetric", "packed 8 in another order", "int8 asymmetric"])
def test_zero_points_of_symmetric_weights_are_a_contradiction(method, tmp_path):
    folder = with_weights(write(tmp_path, method), symmetric=True)
    for options in ({}, {"strict": False}):
        with pytest.raises(
            SourceError, match=r"config_groups say that .* is symmetric, .* 'model.*weight_zero_point'"
        ) as raised:
            shardload.load(folder, **options)
        assert "ignore" not in str(raised.value)


def test_zero_points_of_zero_are_none(tmp_path):
    folder = with_weights(write(tmp_path, "int8 asymmetric"), symmetric=True)

    def zeroed(tensors):
        tensors |= {name: value * 0 for name, value in tensors.items() if name.endswith("_zero_point")}

    expected = shardload.load(without(damaged(folder, zeroed), "weight_zero_point", of_all=True), dtype="float32")
    folder = with_weights(write(tmp_path, "int8 asymmetric"), symmetric=True)
    assert len(expected.weights) == len(shardload.load(damaged(folder, zeroed), dtype="float32").weights)


def test_of_several_groups_what_the_one_that_fits_lacks_is_named(tmp_path):
    folder = write(tmp_path, "packed 4 asymmetric")
    group = json.loads((folder / "config.json").read_text())[OPTION]["config_groups"]["group_0"]
    other = {"targets": ["re:.*down_proj"], "weights": {**group["weights"], "num_bits": 8}}
    damaged(folder, config_groups={"group_0": group, "group_1": other})
    assert shardload.plan(folder)
    with pytest.raises(SourceError, match=rf"it lacks '{LAYER}.weight_zero_point'"):
        shardload.plan(without(folder, "weight_zero_point"))


def test_an_offset_of_nested_scales_is_needed(tmp_path):
    name = f"{LAYER}.weight.quant_state.bitsandbytes__nf4"

    def forget(tensors):
        said = json.loads(tensors[name].tobytes())
        del said["nested_offset"]
        tensors[name] = np.frombuffer(json.dumps(said).encode(), np.uint8)

    with pytest.raises(SourceError, match="does not say the nested_offset"):
        shardload.plan(damaged(write(tmp_path, "nf4 nested"), forget))


@pytest.mark.parametrize("stored", [np.uint8(1), np.int32(2)])
def test_int8_in_the_order_of_a_gpu_is_refused(stored, tmp_path):
    def turn(tensors):
        tensors[f"{LAYER}.weight_format"] = np.array(stored)

    with pytest.raises(SourceError, match=rf"'{LAYER}.weight_format' is {int(stored)}, expected 0"):
        shardload.plan(damaged(write(tmp_path, "bitsandbytes int8"), turn))


def test_ignoring_the_configuration_is_no_way_out_of_missing_scales(tmp_path):
    folder = without(write(tmp_path, "fp8 blocks"), "weight_scale_inv")
    config = json.loads((folder / "config.json").read_text())
    del config[OPTION]
    (folder / "config.json").write_text(json.dumps(config))
    for options in ({}, {"ignore_config": [OPTION]}):
        with pytest.raises(ShardloadError, match="quantised with fp8") as raised:
            shardload.plan(folder, **options)
        assert OPTION not in str(raised.value)
