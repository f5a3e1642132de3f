"""Each model that is written for Hugging Face, from its KerasHub backbone alone: the folder that transformers wrote.

The folders are those of `transformers_cross`. A backbone built from KerasHub's configuration, which knows no folder,
gets the weights; then its tensors, and the fields of its ``config.json``, must be those of transformers.
"""

import json
import re

import gguf_from_folder
import hub_nested
import numpy as np
import pytest
from conversions import killed, lines_done
from safetensors.numpy import load_file
from transformers_cross import exported_folders, folders

import shardload
from shardload.errors import UnsupportedError
from shardload.families.registry import exports

pytestmark = pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning")  # KerasHub's T5
CASES = exported_folders.CASES
MESHES = ("1x8", "2x4", "1x3")
OTHER_NAMES = {
    **{r"^transformer\.": "", r"LayerNorm\.gamma$": "LayerNorm.weight", r"LayerNorm\.beta$": "LayerNorm.bias"},
    r"vision_tower\.vision_model\.": "vision_tower.",
}
"""GPT-2's files on the Hub have no prefix, transformers 5 still writes TensorFlow's names for a few classes, and SigLIP
has another name in files on the Hub than in those that transformers 5 writes."""
LEFT_OUT = r"(\w+\.)*pooler\.|contact_head\.|.*inv_freq$|lm_head\.|.*position_ids$|mtp\."
"""Tensors of transformers' classes that KerasHub's lack, and that change no output compared in `transformers_cross`."""
OTHER_FIELDS = {"max_window_layers", "pad_token_id", *exported_folders.SET_ON_LAYERS}
"""Fields with another value of the same meaning, and those that `exported_folders` explains."""


def tensors_of(folder):
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, value in load_file(path).items():
            for other, own in OTHER_NAMES.items():
                name = re.sub(other, own, name)  # noqa: PLW2901 - each on the last one's result
            found[name] = value
    return found


def assert_written(out, source, backbone):
    ours, theirs = tensors_of(out), tensors_of(source)
    assert [name for name in theirs.keys() - ours.keys() if not re.match(LEFT_OUT, name)] == []
    assert exports()[backbone].without_pooler == any("pooler" in name for name in theirs.keys() - ours.keys())
    assert ours.keys() <= theirs.keys()
    zeros = {zero.tensor: zero.rows for zero in exports()[backbone].zeros}
    for name, value in ours.items():
        wanted = theirs[name]
        assert (value.shape, value.dtype) == (wanted.shape, wanted.dtype), name
        rows, wanted_rows = np.atleast_1d(value), np.atleast_1d(wanted)
        first = zeros.get(name, 0)
        first = len(rows) if first is None else first
        assert not rows[:first].any()
        assert rows[first:].tobytes() == wanted_rows[first:].tobytes(), name
    config, known = (json.loads((folder / "config.json").read_text()) for folder in (out, source))
    assert_fields(config, known)


def assert_fields(config, known):
    """Each field that both configurations have is the same, also in their parts."""
    for key in (config.keys() & known.keys()) - OTHER_FIELDS:
        if isinstance(config[key], dict) and isinstance(known[key], dict):
            assert_fields(config[key], known[key])
        else:
            assert config[key] == known[key], key


def test_each_model_that_is_written_is_compared():
    written = {kind for export in exports().values() for kind in export.model_types}
    assert {name.partition(",")[0] for name in CASES} == written


@pytest.mark.sample(6)
@pytest.mark.parametrize(("name", "mesh"), [(name, MESHES[i % 3]) for i, name in enumerate(CASES)])
def test_a_backbone_is_written_as_transformers_writes_it(name, mesh, tmp_path):
    folder = folders.build(folders.read_family(name.partition(", ")[0])[name], tmp_path / "hf")
    model = exported_folders.without_origin(folder, mesh=mesh)
    report = shardload.save_as(model, tmp_path / "out", to="safetensors")
    declared = exports()[type(model).__name__]
    for text, is_told in (("zeros were written", declared.zeros), ("no pooler", declared.without_pooler)):
        assert any(text in note for note in report.notes) == bool(is_told)
    assert_written(tmp_path / "out", folder, type(model).__name__)
    again = shardload.load(tmp_path / "out", mesh=mesh, task=False)
    assert [a.tobytes() for a in model.get_weights()] == [a.tobytes() for a in again.get_weights()]


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith(("dinov2", "blip-2, t5"))])
def test_a_preset_is_converted_to_the_same_folder(name, tmp_path):
    """KerasHub's own preset of DINOv2 has values that shardload does not write: it saves more than its variables."""
    folder = folders.build(folders.read_family(name.partition(", ")[0])[name], tmp_path / "hf")
    model = exported_folders.without_origin(folder)
    shardload.save_as(model, tmp_path / "preset", to="preset")
    shardload.convert(tmp_path / "preset", tmp_path / "out", to="safetensors", host_memory_bytes="256KiB")
    assert_written(tmp_path / "out", folder, type(model).__name__)


def test_no_preset_of_blip_2_with_t5_is_written(tmp_path):
    """KerasHub's saver leaves out that the head is built, and the weights of the head would find no variable."""
    folder = folders.build(folders.read_family("blip-2")["blip-2, t5, transformers 4"], tmp_path / "hf")
    with pytest.raises(UnsupportedError, match="lm_head/vars/0', expected nothing"):
        shardload.save_as(exported_folders.without_origin(folder), tmp_path / "preset", to="preset")
    assert not (tmp_path / "preset").exists()


@pytest.mark.parametrize("name", ["mixtral, no sliding window", "qwen3_moe, norm_topk_prob"])
def test_a_gguf_file_of_a_mixture_is_converted_to_a_tensor_for_each_expert(name, tmp_path):
    folder = folders.build(folders.read_family(name.partition(", ")[0])[name], tmp_path / "hf")
    gguf_from_folder.write(folder, tmp_path / "model.gguf", kind="F16")
    shardload.convert(tmp_path / "model.gguf", tmp_path / "out", to="safetensors", dtype="float32")
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(folder)
    assert ours.keys() == theirs.keys()
    assert [key for key, value in ours.items() if value.tobytes() != theirs[key].astype("float32").tobytes()] == []


def test_an_interrupted_conversion_of_a_mixture_is_continued(tmp_path):
    name = "qwen3_moe, norm_topk_prob"
    folder = folders.build(folders.read_family("qwen3_moe")[name], tmp_path / "hf")
    shardload.save_as(exported_folders.without_origin(folder), tmp_path / "preset", to="preset")
    journal = killed(tmp_path / "preset", tmp_path / "out", "safetensors", done=3, name="experts")
    n_done = len(lines_done(journal))
    report = shardload.convert(tmp_path / "preset", tmp_path / "out", to="safetensors")
    assert 3 <= report.resumed <= n_done
    assert_written(tmp_path / "out", folder, "Qwen3MoeBackbone")


@pytest.mark.parametrize("lacking", ["vision_encoder", "mrope_section"])
def test_qwen_3_5_that_reads_no_images_is_not_written(lacking, tmp_path):
    folder = folders.build(folders.read_family("qwen3_5")["qwen3_5, vision"], tmp_path / "hf")
    known = exported_folders.without_origin(folder)
    backbone = type(known).from_config(known.get_config() | {lacking: None})
    match = f"Cannot write Qwen3_5Backbone for Hugging Face: it has {lacking}=None, expected a model that reads images"
    with pytest.raises(UnsupportedError, match=match):
        shardload.save_as(backbone, tmp_path / "out", to="safetensors")


def test_an_activation_without_a_name_in_transformers_is_refused(tmp_path):
    folder = folders.build(folders.read_family("metaclip_2")["metaclip_2, both"], tmp_path / "hf")
    known = exported_folders.without_origin(folder)
    described = known.get_config()
    described["text_encoder"]["config"]["intermediate_activation"] = "mish"
    match = "Cannot write MetaCLIP 2 for Hugging Face: it has the activation 'mish', expected one of quick_gelu, gelu"
    with pytest.raises(UnsupportedError, match=match):
        shardload.save_as(type(known).from_config(described), tmp_path / "out", to="safetensors")


def test_a_folder_with_fused_experts_is_written_back_with_them(tmp_path):
    """Qwen's published folders have one tensor for all experts; transformers 5 writes one for each expert."""
    (tmp_path / "hf").mkdir()
    hub_nested.write(tmp_path / "hf", "qwen3_5_moe")
    model = shardload.load(tmp_path / "hf", mesh="1x3")
    shardload.save_as(model, tmp_path / "out", to="safetensors")
    ours, theirs = tensors_of(tmp_path / "out"), tensors_of(tmp_path / "hf")
    assert [name for name in ours if name.endswith("experts.gate_up_proj")]
    assert {name: value.tobytes() for name, value in ours.items()} == {n: v.tobytes() for n, v in theirs.items()}


@pytest.mark.parametrize("of", ["a model", "its folder", "a preset"])
def test_two_variables_with_one_tensor_are_not_written_once_they_differ(of, tmp_path):
    folder = folders.build(folders.read_family("t5gemma2")["t5gemma2, tied"], tmp_path / "hf")
    loaded = shardload.load(folder, mesh="1x3")
    model = loaded if of == "its folder" else exported_folders.without_origin(folder, mesh="1x3")
    shardload.save_as(model, tmp_path / "equal", to="safetensors")
    weights = getattr(model, "backbone", model).decoder_token_embedding.embeddings
    weights.assign(weights.value.at[5, 3].add(0.5))
    if of == "a preset":
        shardload.save_as(model, tmp_path / "preset", to="preset")
    match = "token_embedding/embeddings' and 'decoder_token_embedding/embeddings' have different values"
    with pytest.raises(UnsupportedError, match=match):
        if of == "a preset":
            shardload.convert(tmp_path / "preset", tmp_path / "out", to="safetensors")
        else:
            shardload.save_as(model, tmp_path / "out", to="safetensors")
    assert not (tmp_path / "out").exists()


def test_t5gemma_2_that_reads_no_images_is_not_written(tmp_path):
    folder = folders.build(folders.read_family("t5gemma2")["t5gemma2, tied"], tmp_path / "hf")
    known = exported_folders.without_origin(folder)
    backbone = type(known).from_config(known.get_config() | {"vision_encoder": None})
    with pytest.raises(UnsupportedError, match=r"Cannot write T5Gemma2Backbone .* it has vision_encoder=None"):
        shardload.save_as(backbone, tmp_path / "out", to="safetensors")
