"""Hugging Face folders as they really are: with tensors that are no part of the model, and without some that are."""

import functools
import json
import shutil
import tempfile
from pathlib import Path

import hub_folders
import hub_nested
import numpy as np
import pytest
from by_hand import check_same
from hub_folders import build
from initial_values import zeros_for_random
from safetensors.numpy import load_file, save_file

import shardload
from shardload.errors import MismatchError, SourceError, UnsupportedError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning")  # KerasHub's Swin
WEIGHTS = "model.safetensors"
TRIANGLE = np.tril(np.ones((1, 1, 24, 24), np.bool_))
HEAD = np.ones((3, 32), np.float32)


@functools.cache
def clean(family):
    """A folder of one family that KerasHub loads as it is, made once."""
    folder = Path(tempfile.mkdtemp()) / family
    with zeros_for_random():  # it is only asked for shapes
        model = build(folder, family)
    return hub_folders.write(folder, family, model, unwanted=False)


def edited(tmp_path, family, *, add=None, rename=lambda name: name, drop=(), config=None):
    """A copy of that folder with other tensors and another configuration."""
    folder = Path(shutil.copytree(clean(family), tmp_path / "hf"))
    tensors = {rename(n): v for n, v in load_file(folder / WEIGHTS).items() if n not in drop}
    save_file({**(add or {}), **tensors}, folder / WEIGHTS)
    settings = {**json.loads((folder / "config.json").read_text()), **(config or {})}
    (folder / "config.json").write_text(json.dumps({k: v for k, v in settings.items() if v is not None}))
    return folder


def stored(family, name):
    return load_file(clean(family) / WEIGHTS)[name]


def architecture(name):
    return {"architectures": [name]}


@functools.cache
def reference(family, task):
    return shardload.load(clean(family), mesh="1x1", task=task)


def same_as_clean(folder, family, *, task=False):
    model = shardload.load(folder, mesh="1x2", task=task)
    check_same(model, reference(family, task))
    return shardload.report(model)


# ---- outside the model ---------------------------------------------------------------------------

NUMBERS = np.arange(24, dtype=np.int64)[None]
CLUTTER = {
    "bert": {
        "bert.embeddings.position_ids": NUMBERS,
        "cls.predictions.transform.dense.weight": HEAD,
        "cls.predictions.decoder.weight": HEAD,
        "classifier.weight": HEAD,
        "qa_outputs.bias": HEAD[0],
    },
    "roberta": {
        "roberta.embeddings.token_type_embeddings.weight": np.zeros((1, 32), np.float32),
        "roberta.embeddings.position_ids": NUMBERS,
        "roberta.pooler.dense.weight": HEAD,
        "lm_head.dense.weight": HEAD,
        "lm_head.decoder.weight": HEAD,
    },
    "distilbert": {"vocab_transform.weight": HEAD, "vocab_layer_norm.bias": HEAD[0], "pre_classifier.weight": HEAD},
    "llama": {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32), "score.weight": HEAD},
    "gpt2": {
        "h.0.attn.bias": TRIANGLE,
        "h.1.attn.bias": TRIANGLE.astype(np.float32),
        "h.0.attn.masked_bias": np.array(-1e4, np.float32),
        "multiple_choice_head.summary.weight": HEAD,
    },
    "vit": {"vit.embeddings.mask_token": HEAD, "vit.pooler.dense.bias": HEAD[0], "decoder.0.weight": HEAD},
    "swin": {"encoder.layers.0.blocks.0.attention.self.relative_position_index": NUMBERS, "classifier.weight": HEAD},
    "esm": {
        "contact_head.regression.weight": HEAD,
        "encoder.layer.0.attention.self.rotary_embeddings.inv_freq": HEAD[0],
    },
    "dinov2": {"classifier.weight": HEAD, "embeddings.register_tokens": np.zeros((1, 0, 32), np.float32)},
}


@pytest.mark.slow
@pytest.mark.parametrize("family", CLUTTER)
def test_what_is_no_part_of_the_model_is_reported_and_refuses_nothing(family, tmp_path):
    folder = edited(tmp_path, family, add=CLUTTER[family], config=architecture("XForSequenceClassification"))
    report = same_as_clean(folder, family) if family in ("bert", "roberta") else shardload.plan(folder)
    heads = {"classifier.weight", "classifier.bias"} if family == "vit" else set()
    assert {each.tensor for each in report.outside} == CLUTTER[family].keys() | heads
    assert report.unused == report.missing == ()
    assert all(each.reason for each in report.outside)


@pytest.mark.parametrize("family", ["gemma2", "gpt2"])
def test_an_output_layer_that_equals_the_embedding_is_a_copy_of_it(family, tmp_path):
    name = {"gemma2": "model.embed_tokens.weight", "gpt2": "wte.weight"}[family]
    folder = edited(tmp_path, family, add={"lm_head.weight": stored(family, name)})
    report = same_as_clean(folder, family, task=True)
    assert report.bytes.read == report.bytes.needed + 2 * stored(family, name).nbytes  # both tensors are compared
    (copy,) = report.outside
    assert copy.tensor == "lm_head.weight" and f"equal to '{name}'" in copy.reason
    (planned,) = shardload.plan(folder).outside
    assert planned.tensor == "lm_head.weight" and "loading checks that it equals" in planned.reason


TYPES = "roberta.embeddings.token_type_embeddings.weight"
WANTED = {
    "attention bias": ("llama", "model.layers.0.self_attn.k_proj.bias", HEAD[0], ""),
    "MLP bias": ("llama", "model.layers.1.mlp.up_proj.bias", HEAD[0], ""),
    "another layer": ("llama", "model.layers.2.mlp.up_proj.weight", HEAD, ""),
    "untied head": ("gemma2", "lm_head.weight", np.zeros((48, 32), np.float32), "it differs from 'model.embed_tokens"),
    "token types": ("roberta", TYPES, np.eye(1, 32, dtype=np.float32), "not all zeros"),
    "a bias called attn.bias": ("gpt2", "h.0.attn.bias", HEAD[0], ""),
    "position_ids of floats": ("bert", "bert.embeddings.position_ids", HEAD, ""),
    "the end of another name": ("bert", "my_embeddings.position_ids2", NUMBERS, ""),
    "a head behind a head": ("llama", "score.weight", HEAD, ""),
}


@pytest.mark.parametrize(("family", "name", "value", "why"), WANTED.values(), ids=WANTED)
def test_what_the_model_should_use_is_refused_and_named(family, name, value, why, tmp_path):
    folder = edited(tmp_path, family, add={name: value}, config=architecture("XForCausalLM"))
    with pytest.raises(MismatchError, match=rf"(?s)not used by the model: {name}.*{why}.*--ignore {name}\)") as caught:
        shardload.load(folder, mesh="1x2")
    assert "also accepts missing weights" in str(caught.value)


def test_the_bias_of_bart_matters_unless_it_is_zero(tmp_path):
    zeros = np.zeros((1, 48), np.float32)
    config = {**architecture("BartForConditionalGeneration"), "num_hidden_layers": None, "encoder_layers": 2}
    folder = edited(tmp_path, "bart", add={"final_logits_bias": zeros}, config={**config, "decoder_layers": 2})
    (bias,) = shardload.report(shardload.load(folder, mesh="1x2")).outside
    assert "all zeros" in bias.reason
    # Float32 would round 1e-300 to zero.
    for value in (zeros + 1, np.full((1, 48), 1e-300)):
        save_file({**load_file(folder / WEIGHTS), "final_logits_bias": value}, folder / WEIGHTS)
        with pytest.raises(MismatchError, match=r"final_logits_bias .it is added to the logits and not all zeros"):
            shardload.load(folder, mesh="1x2")


def test_filling_a_model_of_ones_own_stays_strict(tmp_path):
    folder = edited(tmp_path, "bert", add=CLUTTER["bert"])
    with pytest.raises(MismatchError, match=r"not used by the model: bert.embeddings.position_ids"):
        shardload.load_weights(build(tmp_path / "m", "bert"), folder, mesh="1x2")


def test_a_tensor_left_out_on_request_is_reported_and_waives_nothing_else(tmp_path):
    name = "model.layers.0.self_attn.k_proj.bias"
    folder = edited(tmp_path, "llama", add={name: HEAD[0]})
    for ignore in ([name], ["model.layers.*.k_proj.bias"]):
        (left,) = shardload.report(shardload.load(folder, mesh="1x2", ignore=ignore)).outside
        assert left.tensor == name and f"on request ({ignore[0]})" in left.reason
    with pytest.raises(UsageError, match=r"ignore='lm_\*' matches none of the unused tensors"):
        shardload.load(folder, mesh="1x2", ignore=[name, "lm_*"])
    with pytest.raises(UsageError, match=r"Cannot use ignore=.*: expected a list of tensor names"):
        shardload.load(folder, mesh="1x2", ignore=name)
    folder = edited(tmp_path / "less", "llama", add={name: HEAD[0]}, drop=["model.norm.weight"])
    with pytest.raises(MismatchError, match="missing from the checkpoint: sequence_output_layernorm/scale"):
        shardload.load(folder, mesh="1x2", ignore=[name])


# ---- names ---------------------------------------------------------------------------------------

BASES = {"roberta": "roberta", "distilbert": "distilbert", "vit": "vit", "deit": "deit", "albert": "albert"}
BASES |= dict.fromkeys(("llama", "mixtral"), "model")
SLOW = ("deit", "mixtral", "distilbert")


@pytest.mark.parametrize("family", [pytest.param(f, marks=pytest.mark.slow if f in SLOW else []) for f in BASES])
def test_a_base_model_without_its_familys_prefix(family, tmp_path):
    same_as_clean(edited(tmp_path, family, rename=lambda n: n.removeprefix(f"{BASES[family]}.")), family)


def test_a_base_model_behind_another_prefix(tmp_path):
    """`LlamaForQuestionAnswering` calls its base model ``transformer``."""
    changes = {"drop": ["lm_head.weight"], "add": {"qa_outputs.weight": HEAD}}
    changes |= {"config": architecture("LlamaForQuestionAnswering")}
    renamed = edited(tmp_path, "llama", rename=lambda n: n.replace("model.", "transformer.", 1), **changes)
    model = shardload.load(renamed, mesh="1x2")
    assert [each.tensor for each in shardload.report(model).outside] == ["qa_outputs.weight"]
    assert model.tie_word_embeddings  # it has no output layer, and none is invented


def test_a_prefix_that_cannot_be_told_is_an_error(tmp_path):
    tensors = load_file(clean("llama") / WEIGHTS)
    twice = {n.replace("model.", other, 1): v for other in ("a.", "b.") for n, v in tensors.items()}
    folder = edited(tmp_path, "llama", drop=tensors, add=twice)
    with pytest.raises(SourceError, match=r"means by 'model.embed_tokens.weight': 2 names match: 'a.emb"):
        shardload.load(folder, mesh="1x2")


def test_normalisations_by_the_names_of_old_checkpoints_and_of_transformers_5(tmp_path):
    def rename(name):
        return name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")

    same_as_clean(edited(tmp_path, "albert", rename=rename), "albert")


# ---- what is not stored --------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["mistral", pytest.param("mixtral", marks=pytest.mark.slow)])
def test_a_tied_output_layer_is_filled_from_the_embedding_where_kerashub_cannot_tie(family, tmp_path):
    config = {"tie_word_embeddings": True, **architecture("XForCausalLM")}
    model = shardload.load(edited(tmp_path, family, drop=["lm_head.weight"], config=config), mesh="1x2")
    embedding = model.backbone.token_embedding
    np.testing.assert_array_equal(np.asarray(embedding.reverse_embeddings).T, np.asarray(embedding.embeddings))
    assert shardload.report(model).missing == ()


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen2_moe", {"drop": ["lm_head.weight"], "config": {"tie_word_embeddings": True}}),
        ("vit", {"config": {"image_size": [32, 32], "patch_size": [16, 16]}}),
    ],
    ids=["tied where its configuration says so", "an image described by two equal sides"],
)
def test_nothing_is_missing_from(family, changes, tmp_path):
    assert shardload.plan(edited(tmp_path, family, **changes)).missing == ()


@pytest.mark.parametrize("family", ["llama", "qwen2_moe"])
def test_another_output_layer_than_the_configuration_ties_is_used_and_noted(family, tmp_path):
    folder = edited(tmp_path, family, config={"tie_word_embeddings": True, **architecture("XForCausalLM")})
    plan, model = shardload.plan(folder), shardload.load(folder, mesh="1x2")
    layer = model.backbone.token_embedding
    np.testing.assert_array_equal(np.asarray(layer.reverse_embeddings).T, stored(family, "lm_head.weight"))
    for report in (plan, shardload.report(model)):
        assert any("is used, as in transformers 5 (version 4 leaves it out)" in note for note in report.notes)
    embedding = {"lm_head.weight": stored(family, "model.embed_tokens.weight")}
    folder = edited(tmp_path / "tied", family, add=embedding, drop=embedding, config={"tie_word_embeddings": True})
    assert shardload.plan(folder).missing == () and shardload.plan(folder).outside[0].tensor == "lm_head.weight"


POOLER = ["pooler.dense.weight", "pooler.dense.bias"]


def test_bert_without_a_pooler_gets_an_initial_one_and_says_so(tmp_path):
    folder = edited(tmp_path, "bert", drop=POOLER, config=architecture("BertForMaskedLM"))
    report = shardload.report(shardload.load(folder, mesh="1x2"))
    assert {"pooled_dense/kernel", "pooled_dense/bias"} <= set(report.initialised) and report.missing == ()
    assert any("BertForMaskedLM has no pooler" in note for note in report.notes)


REVERSE = "token_embedding/reverse_embeddings"
NEEDED = {
    "an untied output layer": ("mistral", ["lm_head.weight"], "MistralForCausalLM", REVERSE),
    "a pooler that is used": ("bert", POOLER, "BertForSequenceClassification", "pooled_dense/kernel"),
    "a pooler that is half there": ("bert", POOLER[:1], "BertModel", "pooled_dense/kernel"),
}


@pytest.mark.parametrize(("family", "drop", "kind", "missing"), NEEDED.values(), ids=NEEDED)
def test_what_the_model_needs_is_missing(family, drop, kind, missing, tmp_path):
    folder = edited(tmp_path, family, drop=drop, config=architecture(kind))
    with pytest.raises(MismatchError, match=f"missing from the checkpoint: {missing}"):
        shardload.load(folder, mesh="1x2")


# ---- configurations ------------------------------------------------------------------------------


def test_mixture_of_experts_as_transformers_5_describes_it(tmp_path):
    same_as_clean(edited(tmp_path, "qwen3_moe", config={"num_experts": None, "num_local_experts": 3}), "qwen3_moe")


def test_a_classifier_of_two_classes_whose_labels_are_the_default(tmp_path):
    head = {"classifier.weight": HEAD[:2], "classifier.bias": HEAD[0, :2]}
    folder = edited(tmp_path, "vit", config={"id2label": None}, add=head, drop=head)
    assert shardload.load(folder, mesh="1x2").num_classes == 2


UNEVEN = {"encoder_layers": 2, "decoder_layers": 1}
LACKING = {
    "head_dim": ("llama", {"head_dim": 16}, r"head_dim=16, but KerasHub's Llama3Backbone computes it as .*32 / 4 = 8"),
    "bart": ("bart", UNEVEN, "encoder_layers=2 and decoder_layers=1, .* one number"),
    "esm": ("esm", {"position_embedding_type": "absolute"}, "transformers from pad_token_id . 1"),
    "vit": ("vit", {"qkv_bias": False}, "qkv_bias=False, but KerasHub's converter needs biases"),
    "dense layers": ("qwen2_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\], but .* experts in every layer"),
    "dense steps": ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2, but .* experts in every layer"),
    "cut images": ("vit", {"image_size": 40}, r"image_size=40, but .* needs a multiple of patch_size=16"),
    "oblong images": ("vit", {"image_size": [32, 48]}, r"image_size=\[32, 48\], but .* takes one number"),
    "padded images": ("swin", {"image_size": 30}, r"image_size=30, but .* needs a multiple of patch_size=4"),
    "padded windows": ("swin", {"image_size": 36}, r"9 x 9 patches in stage 0, but .* multiple of window_size=2"),
    "padded halves": ("swin", {"image_size": 36, "depths": [1, 1]}, "9 x 9 patches in stage 0, but .* an even number"),
}


@pytest.mark.parametrize(("family", "config", "says"), LACKING.values(), ids=LACKING)
def test_what_kerashub_lacks_is_named(family, config, says, tmp_path):
    with pytest.raises(UnsupportedError, match=f"Cannot build the model of .*{says}.*load_weights"):
        shardload.load(edited(tmp_path, family, config=config), mesh="1x2")


def test_scaled_embeddings_of_esm_are_refused_by_name_and_can_be_ignored(tmp_path):
    folder = edited(tmp_path, "esm", config={"token_dropout": True})
    with pytest.raises(UnsupportedError, match="token_dropout is True in the configuration, but False"):
        shardload.plan(folder)
    notes = shardload.plan(folder, ignore_config=["token_dropout"]).notes
    assert any("token_dropout ignored" in note for note in notes)


def test_the_base_of_esms_rotary_positions_is_set(tmp_path):
    folder = edited(tmp_path, "esm", config={"rope_theta": 100.0})
    assert shardload.load(folder, mesh="1x2", task=False).max_wavelength == 100


@pytest.mark.slow
def test_vision_towers_as_transformers_5_names_them(tmp_path):
    folder = hub_nested.write(tmp_path / "hf", "gemma3 vision")
    options = {"mesh": "1x2", "task": False, "ignore_config": ("rope_parameters", "sliding_window")}
    before = shardload.load(folder, **options)
    tensors = load_file(folder / WEIGHTS)
    renamed = {n.replace("vision_tower.vision_model.", "vision_tower."): v for n, v in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, folder / WEIGHTS)
    check_same(shardload.load(folder, **options), before)


# ---- conversion ----------------------------------------------------------------------------------


def test_conversion_leaves_out_what_a_load_leaves_out_and_says_so(tmp_path):
    add = {}
    for name, value, told in (("bert.embeddings.position_ids", NUMBERS, "a buffer"), ("classifier.weight", HEAD, "")):
        add[name] = value
        notes = shardload.convert(edited(tmp_path / name, "bert", add=add), tmp_path / name / "out", to="h5").notes
        assert any(f"'{name}' left out: {told}" in note for note in notes)
        check_same(shardload.load(tmp_path / name / "out", mesh="1x2"), reference("bert", False))


def test_conversion_leaves_out_what_is_ignored(tmp_path):
    folder = edited(tmp_path, "bert", add={"encoder.odd.weight": HEAD})
    lost = r"would be lost, .* --ignore encoder.odd.weight|ignore=\['encoder.odd.weight'\]"
    with pytest.raises(MismatchError, match=lost):
        shardload.convert(folder, tmp_path / "out", to="h5")
    notes = shardload.convert(folder, tmp_path / "out", to="h5", ignore=["*.odd.*"]).notes
    assert any("'encoder.odd.weight' left out: left out on request" in note for note in notes)
    with pytest.raises(UsageError, match="matches no"):
        shardload.convert(folder, tmp_path / "other", to="h5", ignore=["no_such"])
    with pytest.raises(UsageError, match="expected a list of tensor names"):
        shardload.convert(folder, tmp_path / "other", to="h5", ignore="*.odd.*")


# ---- a file of a folder --------------------------------------------------------------------------


def test_a_file_that_a_configuration_describes_loads_as_its_folder(tmp_path):
    folder = edited(tmp_path, "llama")
    model = shardload.load(folder / WEIGHTS, mesh="1x2")
    check_same(model, shardload.load(folder, mesh="1x2"))
    report = shardload.report(model)
    assert (report.source, report.format) == (str(folder), "hf-safetensors")
    assert any("loaded the folder" in note for note in report.notes)
    assert shardload.plan(folder / WEIGHTS).format == "hf-safetensors"
    assert shardload.inspect(folder / WEIGHTS).format == "safetensors"


def test_an_index_or_a_shard_of_it_loads_as_its_folder(tmp_path):
    folder = edited(tmp_path, "llama")
    hub_folders.save(folder, taken(folder), 2)
    for name in ("model.safetensors.index.json", "model-00002-of-00002.safetensors"):
        assert shardload.plan(folder / name).source == str(folder)


def test_a_file_that_is_no_part_of_the_folders_checkpoint_stays_a_file(tmp_path):
    folder = edited(tmp_path, "llama")
    save_file({"a": HEAD}, folder / "other.safetensors")
    with pytest.raises(UnsupportedError, match="no description of their model"):
        shardload.load(folder / "other.safetensors", mesh="1x2")
    with pytest.raises(UnsupportedError, match="no description"):
        shardload.load(folder / WEIGHTS, mesh="1x2", format="safetensors")


def test_reports_name_a_tensor_that_the_index_does_not_assign_to_its_shard(tmp_path):
    folder = edited(tmp_path, "llama")
    hub_folders.save(folder, taken(folder), 2)
    shard = folder / "model-00002-of-00002.safetensors"
    save_file({**load_file(shard), "left.over": np.ones(3, np.float32)}, shard)
    left_out = f"left out 1 unlisted tensor: model.safetensors.index.json does not assign 'left.over' to {shard.name}"
    assert left_out in shardload.plan(folder).notes
    assert left_out in shardload.report(shardload.load(folder, mesh="1x1")).notes
    assert left_out in shardload.convert(folder, tmp_path / "preset", to="h5").notes


def taken(folder):
    """The tensors of a folder, whose file is deleted."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    return tensors


@pytest.mark.parametrize("names", [(WEIGHTS, "model.fp16.safetensors"), ("a.safetensors", "b.safetensors")])
def test_one_of_two_variants_is_loaded_by_its_own_path(names, tmp_path):
    folder = edited(tmp_path, "gpt2")
    tensors = taken(folder)
    for factor, name in enumerate(names, start=1):
        save_file({key: value * factor for key, value in tensors.items()}, folder / name)
    for factor, name in enumerate(names, start=1):
        model = shardload.load(folder / name, mesh="1x2")
        found = np.asarray(model.get_layer("token_embedding").embeddings)
        np.testing.assert_array_equal(found, tensors["wte.weight"] * factor)
    note = f"describes the model of {names[1]}: loaded this file, and no other variant"
    assert any(note in found for found in shardload.report(model).notes)
    assert any(note in found for found in shardload.plan(folder / names[1], mesh="1x2").notes)


def test_a_file_without_a_number_beside_others_is_one_of_several_shards(tmp_path):
    folder = edited(tmp_path, "gpt2")
    items = list(taken(folder).items())
    save_file(dict(items[::2]), folder / "a.safetensors")
    save_file(dict(items[1::2]), folder / "b.safetensors")
    same_as_clean(folder / "b.safetensors", "gpt2")


def test_a_shard_in_a_subfolder_means_the_folder_of_its_index(tmp_path):
    folder = edited(tmp_path, "gpt2")
    tensors = taken(folder)
    (folder / "parts").mkdir()
    halves = {f"parts/model-0000{n + 1}-of-00002.safetensors": list(tensors)[n::2] for n in range(2)}
    for name, keys in halves.items():
        save_file({key: tensors[key] for key in keys}, folder / name)
    listed = {key: name for name, keys in halves.items() for key in keys}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    for name in halves:
        same_as_clean(folder / name, "gpt2")
        assert set(shardload.inspect(folder / name).tensors) == set(tensors)
