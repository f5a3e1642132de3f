"""Each architecture of GGUF: bit for bit what its Hugging Face folder loads as, and PyTorch's own outputs.

The folders and PyTorch's outputs are those of `transformers_cross`; `gguf_from_folder` makes files of them with the
gguf package.
"""

import re
import shutil
from pathlib import Path

import gguf_from_folder
import gguf_pairs
import keras_hub
import numpy as np
import pytest
from gguf_fixture import gemma3_gguf  # noqa: F401 - a fixture
from hub_folders import keeping_values
from initial_values import zeros_for_random
from transformers_cross import folders, running
from twins import DTYPES, abstract_twin, assert_on, assert_same

import shardload
from shardload.families.registry import gguf_architectures
from shardload.keras_bridge.variables import value_of

pytestmark = pytest.mark.slow

CASES = {
    "gemma": ["gemma, tied"],
    "gemma2": ["gemma2, 4 KV heads"],
    "gemma3": ["gemma3_text, 7 layers"],
    "gemma4": ["gemma4_text, two head_dims", "gemma4_text, per layer inputs", "gemma4_text, experts"],
    "llama": ["llama, untied", "mistral, tied", "mixtral, no sliding window"],
    "smollm3": ["smollm3, 4 layers"],
    "qwen2": ["qwen2, untied"],
    "qwen2moe": ["qwen2_moe, untied"],
    "qwen3": ["qwen3, tied"],
    "qwen3moe": ["qwen3_moe, norm_topk_prob"],
    "gpt-oss": ["gpt_oss, untied", "gpt_oss, tied"],
    "gpt2": ["gpt2, n_inner"],
    "phi3": ["phi3, untied", "phi3, longrope, short text", "phi3, longrope, long text"],
    "bloom": ["bloom, 6 heads"],
    "gemma-embedding": ["gemma3_text, both directions"],
    "bert": [
        *("bert, masked LM", "distilbert, masked LM", "xlm-roberta, base model"),
        *("roberta, token types of zeros, masked LM", "xlm-roberta, 2 token types"),
    ],
}
"""By architecture; of each, folders that say nothing that a GGUF file cannot say."""
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "gguf.md"


def test_every_architecture_is_crossed_and_in_the_documentation():
    assert set(CASES) == set(gguf_architectures())
    listed = PAGE.read_text(encoding="utf-8").partition("\n## GGUF\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?`) \| (.+?) \|$", listed, re.MULTILINE)
    assert [name.strip("`") for names, _ in rows[1:] for name in names.split(", ")] == list(gguf_architectures())


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", [name for names in CASES.values() for name in names])
def test_a_file_loads_as_its_folder_and_answers_as_pytorch(name, tmp_path):
    fixture = folders.read_family(name.partition(", ")[0])[name]
    folder = folders.build(fixture, tmp_path / "folder")
    model = shardload.load(gguf_from_folder.write(folder, tmp_path / "model.gguf"), mesh="1x2", dtype="float32")
    expected = shardload.load(folder, mesh="1x2", dtype="float32")
    for ours, theirs in zip(model.weights, expected.weights, strict=True):
        if not ours.path.startswith("pooled_dense"):  # random: neither has it
            assert np.asarray(ours.value).tobytes() == np.asarray(theirs.value).tobytes(), ours.path
    found = running.compare(model, fixture)
    assert found.kind == "equal", found


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("bert, base model", "BertModel has no pooler: "),
        ("phi3, longrope, long text", "texts longer than 8 tokens use other rotary factors"),
    ],
)
def test_a_note_says_what_the_file_lacks_or_generating_does_otherwise(name, note, tmp_path):
    folder = folders.build(folders.read_family(name.partition(", ")[0])[name], tmp_path / "folder")
    model = shardload.load(gguf_from_folder.write(folder, tmp_path / "model.gguf"), mesh="1x1")
    assert note in " ".join(shardload.report(model).notes)


QUANTISED = {
    **dict.fromkeys(("qwen3_moe, norm_topk_prob", "qwen2_moe, untied", "gpt2, tied", "llama, untied"), "Q8_0"),
    **{"bloom, tied": "Q8_0", "phi3, untied": "Q4_0", "gpt_oss, untied": "MXFP4"},
}


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_files(name, tmp_path):
    """What blocks decode to is what the folder of those values has."""
    folder = folders.build(folders.read_family(name.partition(", ")[0])[name], tmp_path / "folder")
    gguf_from_folder.write(folder, tmp_path / "model.gguf", kind=QUANTISED[name])
    gguf_from_folder.requantise(folder, QUANTISED[name])
    model = shardload.load(tmp_path / "model.gguf", mesh="1x2", dtype="float32")
    assert_same(model, shardload.load(folder, mesh="1x2", dtype="float32"))


FILES = [
    (model_type, kind)
    for model_type in gguf_pairs.MODELS
    for kind in gguf_pairs.KINDS
    if kind in {"BF16", "Q8_0", "Q4_K_M"}
    or (model_type in {"gemma", "gemma2", "gemma3_text", "llama"} and kind[0] == "F")
] + [("gemma3_text", "Q4_0"), ("llama", "Q5_1")]
WITH_DTYPES = [
    pytest.param(*case, dtype, marks=[] if (i + j) % 2 == 0 else pytest.mark.full)
    for i, case in enumerate(FILES)
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
