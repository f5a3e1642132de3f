"""Whole models from GGUF files: bit for bit what KerasHub makes of the dequantised Hugging Face folder, on any mesh."""

import shutil

import gguf_pairs
import keras_hub
import numpy as np
import pytest
from gguf_fixture import gemma3_gguf  # noqa: F401 - a fixture
from hub_folders import keeping_values
from initial_values import zeros_for_random
from twins import DTYPES, abstract_twin, assert_on, assert_same

import shardload
from shardload.keras_bridge.variables import value_of

pytestmark = pytest.mark.slow


CASES = [
    (model_type, kind)
    for model_type in gguf_pairs.MODELS
    for kind in gguf_pairs.KINDS
    if kind in {"BF16", "Q8_0", "Q4_K_M"}
    or (model_type in {"gemma", "gemma2", "gemma3_text", "llama"} and kind[0] == "F")
] + [("gemma3_text", "Q4_0"), ("llama", "Q5_1")]
WITH_DTYPES = [
    pytest.param(*case, dtype, marks=[] if (i + j) % 2 == 0 else pytest.mark.full)
    for i, case in enumerate(CASES)
    for j, dtype in enumerate(DTYPES)
]
"""One dtype for each case, in turn: every kind meets both."""


def described(backbone):
    """What a backbone's configuration says of the model, not of this instance."""
    return {k: v for k, v in backbone.get_config().items() if k not in {"name", "dtype", "trainable"}}


@pytest.mark.sample(2)
@pytest.mark.parametrize(("model_type", "kind", "dtype"), WITH_DTYPES)
def test_gguf_equals_keras_hub_from_preset(model_type, kind, dtype, tmp_path, meshes):
    file, folder = gguf_pairs.write(tmp_path, model_type, kind)
    backbone = getattr(keras_hub.models, gguf_pairs.BACKBONES[model_type])
    with zeros_for_random(), keeping_values():
        reference = backbone.from_preset(str(folder), dtype=dtype)
    for mesh in meshes:
        model = shardload.load(file, mesh=mesh, dtype=dtype, task=False)
        assert described(model) == described(reference)
        assert_same(model, reference)
        assert_on(model, mesh)
    standing = abstract_twin(reference)
    report = shardload.load_weights(standing, file, mesh=meshes[0])
    assert_same(standing, reference)
    assert_on(standing, meshes[0])
    assert (report.missing, report.unused) == ((), ())


@pytest.fixture(scope="module")
def real_folder(gemma3_gguf, tmp_path_factory):  # noqa: F811
    folder = gguf_pairs.dequantised(gemma3_gguf, tmp_path_factory.mktemp("real"))
    yield folder
    shutil.rmtree(folder)  # a gigabyte


@pytest.mark.parametrize(
    ("dtype", "mesh"), [("float32", "2x4"), pytest.param("bfloat16", "1x8", marks=pytest.mark.full)]
)
def test_real_gemma_equals_keras_hub_from_preset(gemma3_gguf, real_folder, dtype, mesh):  # noqa: F811
    with zeros_for_random():  # random values would take 20 s
        reference = keras_hub.models.Gemma3Backbone.from_preset(str(real_folder), dtype=dtype)
    model = shardload.load(gemma3_gguf, mesh=mesh, dtype=dtype, task=False)
    assert described(model) == described(reference)
    for ours, theirs in zip(model.weights, reference.weights, strict=True):
        whole = np.asarray(value_of(theirs))
        for shard in value_of(ours).addressable_shards:  # shard by shard: no second copy of a gigabyte
            found = np.asarray(shard.data)
            assert found.dtype == whole.dtype
            assert found.tobytes() == whole[shard.index].tobytes(), ours.path
