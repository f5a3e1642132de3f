"""Quantised folders as the library of each method writes them, with their codes kept in Keras' packed layers."""

import numpy as np
import pytest
from kept_layers import assert_layers_are_keras_own, kernels_of_elements
from transformers_cross import folders, quantised

import shardload
from shardload.errors import UnsupportedError

KEPT = {
    "int8 channels": {"gptq/8"},
    "packed 8 asymmetric": {"gptq/8"},
    "packed 4": {"int4", "gptq/4"},
    "packed 4 asymmetric": {"int4", "gptq/4"},
    "packed 4 channels": {"int4", "gptq/4"},
    "gptq 4": {"int4", "gptq/4"},
    "gptq 4 asymmetric": {"int4", "gptq/4"},
    "gptq 8, second version": {"gptq/8"},
    "awq": {"int4", "gptq/4"},
    "bitsandbytes int8": {"gptq/8"},
}
"""Method → the modes of Keras in which its weights are kept."""
NAMES = [case.name for case in quantised.CASES]
VARIANT = {case.name: case.variant for case in quantised.CASES}


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    def build(name):
        family = next(case.family for case in quantised.CASES if case.name == name)
        fixture = folders.read_family(family, quantised.FIXTURES)[name]
        return folders.build(fixture, tmp_path_factory.mktemp("kept"))

    return build


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in NAMES if VARIANT[name] in KEPT])
def test_layers_are_those_of_keras_with_the_codes_of_the_folder(name, folder_of, tmp_path):
    folder = folder_of(name)
    elements = kernels_of_elements(folder, tmp_path)
    for mesh in ("1x1", "1x8", "2x4", "1x3"):
        found = shardload.load(folder, mesh=mesh, dtype="float32", quantized="keep")
        layers = assert_layers_are_keras_own(found, elements, outputs=mesh == "1x1")
        assert len(layers) == 7
        modes = {layer.dtype_policy.name.rpartition("/")[0] for layer in layers}
        assert modes <= KEPT[VARIANT[name]], mesh
    report = shardload.report(found)
    assert "7 weights kept packed" in " ".join(report.notes)
    assert not any("dequantised" in note for note in report.notes)
    assert report.parameters == shardload.plan(folder).parameters


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in NAMES if VARIANT[name] not in KEPT])
def test_codes_that_keras_cannot_compute_with_are_refused_by_name(name, folder_of):
    with pytest.raises(UnsupportedError, match=r"Cannot keep 'model\..*' packed: .*Leave out quantized='keep'"):
        shardload.load(folder_of(name), quantized="keep")


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in NAMES if VARIANT[name] in KEPT])
def test_a_model_computes_what_the_dequantised_one_does(name, folder_of):
    folder = folder_of(name)
    ids = {"token_ids": np.arange(12).reshape(2, 6), "padding_mask": np.ones((2, 6), int)}
    floats, kept = (
        shardload.load(folder, mesh="2x4", dtype="float32", quantized=q).predict(ids, verbose=0)
        for q in ("dequantize", "keep")
    )
    # Those that are dequantised are rounded to the dtype of the scales, which may be bfloat16.
    np.testing.assert_allclose(kept, floats, rtol=0.02, atol=0.02 * np.abs(floats).max())
