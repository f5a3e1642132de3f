"""Each architecture of GGUF: bit for bit what its Hugging Face folder loads as, and PyTorch's own outputs.

The folders and PyTorch's outputs are those of `transformers_cross`; `gguf_from_folder` makes files of them with the
gguf package.
"""

import re
from pathlib import Path

import gguf_from_folder
import numpy as np
import pytest
from transformers_cross import folders, running

import shardload
from shardload.families.registry import gguf_architectures

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
PAGE = Path(__file__).parents[2] / "docs" / "reference" / "formats.md"


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
    file = gguf_from_folder.write(folder, tmp_path / "model.gguf")
    model = shardload.load(file, mesh="1x2", dtype="float32")
    assert_loads_as(folder, model)
    found = running.compare(model, fixture)
    assert found.kind == "equal", found


def assert_loads_as(folder, model):
    expected = shardload.load(folder, mesh="1x2", dtype="float32")
    for ours, theirs in zip(model.weights, expected.weights, strict=True):
        if not ours.path.startswith("pooled_dense"):  # random: neither has it
            assert np.asarray(ours.value).tobytes() == np.asarray(theirs.value).tobytes(), ours.path


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
    fixture = folders.read_family(name.partition(", ")[0])[name]
    folder = folders.build(fixture, tmp_path / "folder")
    gguf_from_folder.write(folder, tmp_path / "model.gguf", kind=QUANTISED[name])
    gguf_from_folder.requantise(folder, QUANTISED[name])
    model = shardload.load(tmp_path / "model.gguf", mesh="1x2", dtype="float32")
    expected = shardload.load(folder, mesh="1x2", dtype="float32")
    for ours, theirs in zip(model.weights, expected.weights, strict=True):
        assert np.asarray(ours.value).tobytes() == np.asarray(theirs.value).tobytes(), ours.path
