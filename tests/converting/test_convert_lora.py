"""Steps with LoRA adapters in other formats: merged only if asked, and partial ones with their base."""

import shutil

import keras
import ml_dtypes
import numpy as np
import pytest
import warm_start
from checkpoints import flip, largest_file
from conversions import same
from progress_calls import AfterShare

import shardload
from shardload.errors import DamagedError, MismatchError, UnsupportedError, UsageError
from shardload.keras_bridge.lora import lora_kernels, lora_layers, merge

NAME = "gemma2_9b"


@pytest.fixture(scope="module")
def tuned(presets, folder):
    """A model in bfloat16 with adapters, a partial step and a whole one of it."""
    model = shardload.load(presets[NAME], mesh="1x8", dtype="bfloat16")
    model.backbone.enable_lora(4)
    for seed, variable in enumerate(model.trainable_variables):
        variable.assign(keras.random.normal(variable.shape, stddev=0.2, seed=seed))
    parts = {"save_trainable_only": True}
    return model, shardload.save(model, folder / "run", step=1, **parts), shardload.save(model, folder / "all", step=1)


@pytest.mark.parametrize("to", ["safetensors", "h5"])
def test_a_converted_step_has_the_bits_of_the_saved_model(tuned, presets, tmp_path, to):
    model, partial, whole = tuned
    shardload.save_as(model, tmp_path / "live", to="preset" if to == "h5" else to, merge_lora=True)
    report = shardload.convert(partial, tmp_path / "one", to=to, base=presets[NAME], merge_lora=True)
    shardload.convert(whole, tmp_path / "two", to=to, merge_lora=True)
    assert same(tmp_path / "one", tmp_path / "two") and not same(tmp_path / "one", presets[NAME])
    for name in ("one", "two"):
        found, wanted = (shardload.load(tmp_path / n, dtype="bfloat16").get_weights() for n in (name, "live"))
        assert all(a.tobytes() == b.tobytes() for a, b in zip(found, wanted, strict=True))
    assert any("LoRA was merged into 4 kernels" in note and "float32" in note for note in report.notes)
    assert any("8 weights from" in note for note in report.notes)
    assert not lora_layers(shardload.load(tmp_path / "one"))


def test_an_interrupted_merge_goes_on_and_another_base_begins_again(tuned, presets, tmp_path):
    options = {"to": "safetensors", "base": presets[NAME], "merge_lora": True}
    progress = AfterShare(KeyboardInterrupt, 0.75, stage="Converting")
    with pytest.raises(KeyboardInterrupt):
        shardload.convert(tuned[1], tmp_path / "out", progress=progress, **options)
    assert shardload.convert(tuned[1], tmp_path / "out", **options).resumed > 0
    shardload.convert(tuned[1], tmp_path / "whole", **options)
    assert same(tmp_path / "out", tmp_path / "whole")


def test_a_partial_step_and_its_base_make_a_whole_one(tuned, presets, tmp_path):
    model, partial, _ = tuned
    shardload.convert(partial, tmp_path / "step", to="orbax", base=presets[NAME])
    found, wanted = shardload.inspect(tmp_path / "step"), {v.path for v in model.variables}
    assert found.n_left_out == 0 and {name.partition("/")[2] for name in found.tensors} == wanted


@pytest.mark.parametrize(
    ("step", "options", "error", "says"),
    [
        (1, {}, UsageError, r"it is a partial step, without \d+ weights.*base=SOURCE \(--base SOURCE\)"),
        (2, {"base": "the base"}, UsageError, "has all weights. Omit base"),
        (2, {}, UnsupportedError, r"LoRA is enabled in 4 of its layers.*lora_kernel_a.*--merge-lora"),
        (1, {"base": "the base"}, UnsupportedError, r"LoRA is enabled in 4 of its layers.*merge_lora=True"),
        (1, {"base": "another", "merge_lora": True}, MismatchError, "as its base: Variable .* belongs to another base"),
        (2, {"to": "orbax", "merge_lora": True}, UnsupportedError, "Cannot merge LoRA into an Orbax checkpoint"),
    ],
)
def test_what_cannot_be_converted_is_told(tuned, presets, tmp_path, *, step, options, error, says):
    bases = {"the base": presets[NAME], "another": presets["gemma_2b"]}
    options = {"to": "safetensors"} | options
    if "base" in options:
        options["base"] = bases[options["base"]]
    with pytest.raises(error, match=says):
        shardload.convert(tuned[step], tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_what_has_no_adapters_cannot_be_merged(presets, tmp_path):
    with pytest.raises(UsageError, match="has no LoRA adapters"):
        shardload.convert(presets[NAME], tmp_path / "out", to="safetensors", merge_lora=True)


def test_a_damaged_partial_step_is_not_converted(tuned, presets, tmp_path):
    step = shutil.copytree(tuned[1], tmp_path / "1")
    chunk = largest_file(step / "pytree")
    flip(chunk, chunk.stat().st_size // 2)
    with pytest.raises(DamagedError, match="shardload verify"):
        shardload.convert(step, tmp_path / "out", to="safetensors", base=presets[NAME], merge_lora=True)


def test_the_command_takes_both_options(tuned, presets, tmp_path):
    command = ["-m", "shardload", "convert", tuned[1], "out", "--to", "safetensors"]
    options = ["--base", presets[NAME], "--merge-lora"]
    done = warm_start.run([*command, *options], cwd=tmp_path)
    assert done.returncode == 0 and "LoRA was merged into 4 kernels" in done.stderr, done.stderr


@pytest.mark.parametrize("layer", [keras.layers.Dense(24), keras.layers.EinsumDense("abc,cde->abde", (None, 4, 6))])
def test_in_float32_it_is_what_keras_merges(layer):
    model = keras.Sequential([keras.Input((5, 16)), layer])
    layer.enable_lora(3, lora_alpha=7)
    layer.lora_kernel_a.assign(keras.random.normal(layer.lora_kernel_a.shape, seed=1))
    layer.lora_kernel_b.assign(keras.random.normal(layer.lora_kernel_b.shape, seed=2))
    store = {}
    layer.save_own_variables(store)
    [found] = lora_kernels(lora_layers(model))
    np.testing.assert_allclose(np.asarray(found.merged()), np.asarray(store["0"]), rtol=1e-6, atol=1e-6)


def test_in_bfloat16_it_rounds_once():
    rng = np.random.default_rng(3)
    kernel, a, b = (rng.normal(size=shape).astype(ml_dtypes.bfloat16) for shape in ((64, 32), (64, 4), (4, 32)))
    found = np.asarray(merge(kernel, a, b, scale=0.5))
    single = kernel.astype("float32") + np.float32(0.5) * (a.astype("float32") @ b.astype("float32"))
    assert found.dtype == ml_dtypes.bfloat16
    ulp = np.abs(single) * 2.0**-8  # half of the distance of two numbers in bfloat16, at most
    assert np.all(np.abs(found.astype("float32") - single) <= ulp)
