"""A model computes what its configuration says, or it is refused with the field's name; ignored fields are reported."""

import functools
import json
import re

import jax
import keras
import keras_hub
import numpy as np
import pytest
import small_folders
from checkpoints import finish_gguf, llama3_factors, write_gguf
from gguf import GGUFWriter
from keras_hub.src.models.llama.llama_rotary_embedding import LlamaRotaryEmbedding
from safetensors.numpy import load_file, save_file

import shardload
from shardload.converting import transformers as written
from shardload.errors import MismatchError, SourceError, UnsupportedError, UsageError
from shardload.families.parts import rope
from shardload.families.registry import model_types
from shardload.hub import building, described, fidelity, fields, kerashub
from shardload.hub import built as built_layers
from shardload.hub.config_forms import completed, read_config
from shardload.loaders import open_manifest
from shardload.manifest import Extent, Manifest, Tensor
from shardload.stores.local import located

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
LINEAR, DYNAMIC = ({"rope_type": kind, "factor": 4.0} for kind in ("linear", "dynamic"))
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
LONG = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "factor": 2.0}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
CHECKED = [name for name, kind in model_types().items() if kind.checks is not None]
NESTED = {"full_attention": {**LINEAR, "rope_theta": 1e6}, "sliding_attention": DEFAULT}
PER_HEAD = {"hidden_size": 24, "query_pre_attn_scalar": 6}
"""As Gemma 27B: scores are scaled by the width of the model per head."""


def built(model_type, **entries):
    """A model of that configuration, without weights."""
    return built_from(described_by(small_folders.config_of(model_type, **entries)))


def built_from(manifest, **options):
    with shardload.abstract():
        return building.build_model(manifest, task=False, **options)


def described_by(config, *, location="/m", format="hf-safetensors"):
    """A manifest with as many tensors as a model of that configuration's number of layers has at least."""
    held = {str(n): Tensor(str(n), (1,), np.dtype(np.float32), Extent(located(""), 0)) for n in range(9)}
    return Manifest(located(location), format, held, {}, config)


# ---- set: the numbers of PyTorch -----------------------------------------------------------------

RESULTS = {
    "Llama 3.1, transformers 5": (
        ("llama", {"rope_theta": ..., "rope_parameters": {"rope_theta": 1e4, **LLAMA3}, "rms_norm_eps": 1e-5}),
        [-0.176756, 0.0363319, -0.524464, 0.0350554, -0.896081, -0.248105],
    ),
    "Llama 3.1, transformers 4": (
        ("llama", {"rope_scaling": LLAMA3, "rms_norm_eps": 1e-5}),
        [-0.176756, 0.0363319, -0.524464, 0.0350554, -0.896081, -0.248105],
    ),
    "a base in rope_parameters": (
        ("llama", {"rope_theta": ..., "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"}}),
        [-0.0110119, 0.0305209, -0.722318, -0.358705, -0.766445, -0.258656],
    ),
    "linear": (("qwen2", {"rope_scaling": LINEAR}), [0.0454651, -1.56229, -0.0186993, -0.156069, 0.183352, -0.0109072]),
    "norms inside attention": (("qwen3", {}), [-0.00204545, 0.13559, 0.236691, 0.471677, 0.011687, 0.00477656]),
    "Gemma 2 27B's scale": (("gemma2", PER_HEAD), [-0.0425822, -2.69769, 1.85432, -2.33359, -0.862418, 1.78006]),
    "Gemma 3 27B's scale, positions nested": (
        ("gemma3_text", {**PER_HEAD, "rope_theta": ..., "rope_local_base_freq": ..., "rope_parameters": NESTED}),
        [-0.681689, -0.459452, -0.430638, -1.27561, -0.1185, 0.861683],
    ),
    "exact GELU, another epsilon": (
        ("bert", {"hidden_act": "gelu", "layer_norm_eps": 1e-5}),
        [-0.193488, 0.447489, -1.38554, -0.131754, 0.430238, 0.426486],
    ),
    "a window in both directions": (
        ("gemma3_text", {"use_bidirectional_attention": True, "sliding_window": 4, "attn_logit_softcapping": 0.5}),
        [0.149186, -4.10799, 0.300757, -0.52671, 0.403599, 1.31119],
    ),
    "GELU of tanh, one segment": (
        ("bert", {"hidden_act": "gelu_new", "type_vocab_size": 1}),
        [0.00564388, 0.435317, -0.507914, -2.11854, 0.124436, 0.203712],
    ),
}
"""First features of the last token's last hidden state, by transformers 5 in float32 on these weights."""


FAST = {"Llama 3.1, transformers 5", "linear", "Gemma 2 27B's scale", "exact GELU, another epsilon"}
FAST |= {"a window in both directions"}


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(c, marks=[] if c in FAST else pytest.mark.slow) for c in RESULTS])
def test_a_loaded_model_computes_what_pytorch_computes(case, tmp_path):
    (model_type, entries), expected = RESULTS[case]
    model = shardload.load(small_folders.write(tmp_path / "hf", model_type, **entries), mesh="1x1", task=False)
    tokens = small_folders.TOKENS
    inputs = {"token_ids": tokens, "padding_mask": np.ones_like(tokens), "segment_ids": np.zeros_like(tokens)}
    found = jax.jit(model)({name: inputs[name] for name in model.input})
    found = found["sequence_output"] if isinstance(found, dict) else found
    np.testing.assert_allclose(np.asarray(found)[0, -1, :6], expected, rtol=2e-5, atol=2e-5)


def test_what_no_argument_takes_is_set_on_layers_and_reported(tmp_path):
    notes = "\n".join(shardload.plan(small_folders.write(tmp_path / "hf", "bert", hidden_act="gelu")).notes)
    assert "hidden_act: set to gelu on the layers, because BertBackbone does not pass it on" in notes


def test_what_an_argument_takes_needs_no_note(tmp_path):
    folder = small_folders.write(tmp_path / "hf", "llama", rope_scaling=LLAMA3, rms_norm_eps=1e-5)
    model = built("llama", rope_scaling=LLAMA3, rms_norm_eps=1e-5)
    (note,) = shardload.plan(folder).notes
    assert note.startswith("tie_word_embeddings: True, which Llama3Backbone does not serialise")
    assert (model.rope_frequency_adjustment_factor, model.layer_norm_epsilon) == (8.0, 1e-5)


def test_a_gemma_of_kerashubs_own_scales_as_it_says(tmp_path):
    model = built("gemma2", **PER_HEAD)
    model.query_head_dim_normalize = False
    described.save_description(model, tmp_path, extra={})
    config = json.loads((tmp_path / "config.json").read_text())
    preset = built_from(described_by(config, location=tmp_path, format="keras-hub-preset"))
    assert not preset.transformer_layers[0].attention.query_head_dim_normalize


# ---- what follows the last layer -----------------------------------------------------------------

MODULES = ("Transformer", "Pooling", "Dense", "Dense", "Normalize")
IDENTITY = "torch.nn.modules.linear.Identity"


def embedder(folder, modules=MODULES, pooling=None, **dense):
    """A model for embeddings as sentence-transformers saves it, its dense layers 32 → 12 → 20."""
    folder = small_folders.write(folder, "gemma3_text", use_bidirectional_attention=True)
    if modules:
        paths = ["", *(f"{i}_{name}" for i, name in enumerate(modules) if i)]
        told = [{"type": f"sentence_transformers.models.{n}", "path": p} for n, p in zip(modules, paths, strict=True)]
        (folder / "modules.json").write_text(json.dumps(told))
    for part, shape in (("1_Pooling", None), ("2_Dense", (12, 32)), ("3_Dense", (20, 12))):
        (folder / part).mkdir()
        if shape:
            config = {"out_features": shape[0], "bias": False, "activation_function": IDENTITY, **dense}
            weight = np.random.default_rng(shape[0]).normal(size=shape).astype(np.float32)
            save_file({"linear.weight": weight}, folder / part / "model.safetensors")
        else:
            config = pooling or {"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}
        (folder / part / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_the_head_of_a_model_for_embeddings_has_the_widths_of_its_folder(tmp_path):
    model = shardload.load(embedder(tmp_path / "hf"), mesh="1x1")
    tokens = small_folders.TOKENS
    found = jax.jit(model)({"token_ids": tokens, "padding_mask": np.ones_like(tokens)})
    pooled = np.asarray(found["sequence_output"]).mean(axis=1)
    for part in ("2_Dense", "3_Dense"):
        pooled = pooled @ load_file(tmp_path / "hf" / part / "model.safetensors")["linear.weight"].T
    expected = pooled / np.linalg.norm(pooled)
    np.testing.assert_allclose(np.asarray(found["pooled_output"]), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"modules": MODULES[:2]}, "modules.json lists Transformer → Pooling, and"),
        ({"pooling": {"pooling_mode": "lasttoken"}}, "1_Pooling/config.json sets lasttoken"),
        ({"pooling": {"pooling_mode_cls_token": True}}, "1_Pooling/config.json sets cls"),
        ({"activation_function": "torch.nn.modules.activation.Tanh"}, "2_Dense/config.json sets torch.*Tanh"),
        ({"bias": True}, "2_Dense/config.json sets bias"),
    ],
)
def test_a_head_that_kerashub_does_not_have_is_left_off_and_noted(changed, why, tmp_path):
    folder = embedder(tmp_path / "hf", **changed)
    assert any(re.search(f"without pooled_output, because {why}", note) for note in shardload.plan(folder).notes)


def test_a_head_whose_files_have_other_places_is_left_off_and_noted(tmp_path):
    folder = embedder(tmp_path / "hf")
    told = json.loads((folder / "modules.json").read_text())
    told[2]["path"], told[3]["path"] = told[3]["path"], told[2]["path"]
    (folder / "modules.json").write_text(json.dumps(told))
    assert any("modules.json lists 1_Pooling, 3_Dense, 2_Dense, and" in note for note in shardload.plan(folder).notes)


def test_a_head_without_its_weights_is_refused(tmp_path):
    folder = embedder(tmp_path / "hf")
    (folder / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(MismatchError, match="missing from the checkpoint: pooling_dense_1/kernel"):
        shardload.load(folder, mesh="1x1")


def test_a_model_in_both_directions_needs_no_head(tmp_path):
    folder = small_folders.write(tmp_path / "hf", "gemma3_text", use_bidirectional_attention=True)
    assert any("neither modules.json nor 2_Dense" in note for note in shardload.plan(folder).notes)
    with pytest.raises(UnsupportedError, match="Cannot write Gemma 3 with bidirectional attention"):
        written.config_of(built("gemma3_text", use_bidirectional_attention=True), "float32")


# ---- refused -------------------------------------------------------------------------------------

NESTED_YARN = {"full_attention": {**YARN, "rope_theta": 1e6}, "sliding_attention": DEFAULT}
WINDOW = {"use_sliding_window": True, "sliding_window": 4}
SWAPPED = ["full_attention", "sliding_attention"]
REFUSED = {
    "yarn, transformers 4": ("llama", {"rope_scaling": YARN}, "rope_scaling"),
    "yarn, transformers 5": ("qwen2", {"rope_parameters": {"rope_theta": 1e4, **YARN}}, "rope_parameters"),
    "yarn of Mistral": ("mistral", {"rope_scaling": YARN}, "rope_scaling"),
    "longrope": ("llama", {"rope_scaling": {**LONG, "original_max_position_embeddings": 32}}, "rope_scaling"),
    "linear, which Llama's class ignores": ("llama", {"rope_scaling": LINEAR}, "rope_scaling"),
    "an unknown kind": ("llama", {"rope_scaling": {"type": "spiral"}}, "rope_scaling"),
    "a base of Gemma's": ("gemma2", {"rope_theta": 100.0}, "rope_parameters"),
    "Gemma 3 with yarn": ("gemma3_text", {"rope_parameters": NESTED_YARN}, "rope_parameters"),
    "a scale of its own": ("gemma2", {"query_pre_attn_scalar": 24}, "query_pre_attn_scalar"),
    "windows of Qwen": ("qwen2", {**WINDOW, "max_window_layers": 0}, "sliding_window"),
    "windows in some layers": ("qwen3", {**WINDOW, "max_window_layers": 1}, "sliding_window"),
    "another pattern of windows": ("gemma2", {"sliding_window": 4, "layer_types": SWAPPED}, "sliding_window"),
    "an activation": ("llama", {"hidden_act": "gelu"}, "hidden_act"),
    "an activation of GPT-2": ("gpt2", {"activation_function": "relu"}, "activation_function"),
    "an epsilon": ("bert", {"layer_norm_eps": 1e-2}, "layer_norm_eps"),
    "scores scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    "scores not scaled": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights"),
    "a causal BERT": ("bert", {"is_decoder": True}, "is_decoder"),
    "scores scaled by nothing": ("gpt2", {"scale_attn_weights": None}, "scale_attn_weights"),
    "no positions": ("bert", {"position_embedding_type": None}, "position_embedding_type"),
    "relative positions": ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
    "Llama in both directions": ("llama", {"is_causal": False}, "is_causal"),
    "GPT-2 in both directions": ("gpt2", {"is_causal": False}, "is_causal"),
    "Gemma 3 in both directions": ("gemma3_text", {"is_causal": False}, "is_causal"),
}


@pytest.mark.parametrize(("model_type", "entries", "field"), REFUSED.values(), ids=REFUSED)
def test_a_field_the_class_cannot_express_is_refused_by_name(model_type, entries, field):
    with pytest.raises(UnsupportedError, match=rf"{field} is .*ignore_config=\('{field}',\)"):
        built(model_type, **entries)


def test_load_plan_and_convert_refuse_and_load_all_the_same_when_told_so(tmp_path):
    folder = small_folders.write(tmp_path / "hf", "qwen2", rope_scaling=YARN, tie_word_embeddings=True)
    told = {"ignore_config": ("rope_scaling",)}
    for strict in (True, False):
        with pytest.raises(UnsupportedError, match=r"rope_scaling is .* yarn with factor 4\.0"):
            shardload.load(folder, mesh="1x1", strict=strict)
    with pytest.raises(UnsupportedError, match="yarn"):
        shardload.convert(folder, tmp_path / "preset", to="h5")
    model = shardload.load(folder, mesh="1x1", **told)
    for notes in (
        shardload.report(model).notes,
        shardload.plan(folder, **told).notes,
        shardload.convert(folder, tmp_path / "preset", to="h5", **told).notes,
    ):
        assert any(note.startswith("rope_scaling ignored: rotary positions of type yarn") for note in notes)


def test_somebodys_own_model_is_filled_and_the_report_tells_where_it_differs(tmp_path):
    folder = small_folders.write(tmp_path / "hf", "qwen2", rope_scaling=YARN)
    other = small_folders.write(tmp_path / "plain", "qwen2")
    report = shardload.load_weights(shardload.load(other, mesh="1x1"), folder)
    assert any("rope_scaling: rotary positions of type yarn" in note for note in report.notes)


def test_an_ignored_field_must_be_one_that_is_checked(tmp_path):
    with pytest.raises(UsageError, match=r"Cannot ignore 'rope_skaling'.*rope_scaling"):
        shardload.plan(small_folders.write(tmp_path / "hf", "llama"), ignore_config=("rope_skaling",))


# ---- not refused ---------------------------------------------------------------------------------

ORDINARY = {
    "plain": ("llama", {}),
    "the default kind": ("llama", {"rope_scaling": {"rope_type": "default"}}),
    "dynamic, which changes nothing up to the longest text": ("llama", {"rope_scaling": DYNAMIC}),
    "windows no shorter than the longest text": ("mistral", {"sliding_window": 64}),
    "a window": ("mistral", {"sliding_window": 4}),
    "windows that are not used": ("qwen2", {"sliding_window": 4, "max_window_layers": 0}),
    "windows above the last layer": ("qwen2", {**WINDOW, "max_window_layers": 2}),
    "Gemma 3's own pattern": ("gemma3_text", {"sliding_window": 4, "sliding_window_pattern": 6}),
    "Gemma's first name for its activation": ("gemma", {"hidden_act": "gelu"}),
    "fields nobody knows": ("llama", {"pretraining_tp": 2, "future_field": {"a": 1}, "attention_dropout": 0.5}),
    "a part of each head, which no version of Llama turns": ("llama", {"partial_rotary_factor": 0.5}),
    "a causal model that says so": ("llama", {"is_causal": True}),
    "an encoder that says so": ("bert", {"is_causal": False}),
    "no optional field": ("qwen3", {"max_window_layers": ..., "max_position_embeddings": ...}),
}


def test_a_folder_older_than_some_keys_has_the_defaults_of_transformers(tmp_path):
    folder = small_folders.write(tmp_path / "hf", "llama", num_key_value_heads=4, rms_norm_eps=1e-6)
    now = shardload.load(folder, mesh="1x1")
    config = json.loads((folder / "config.json").read_text())
    for key in ("num_key_value_heads", "rope_theta", "rope_parameters", "tie_word_embeddings", "rms_norm_eps"):
        config.pop(key, None)
    for entries in ({}, {"num_key_value_heads": None, "rope_parameters": None}):
        (folder / "config.json").write_text(json.dumps({**config, **entries}))
        assert shardload.load(folder, mesh="1x1").get_config() | {"name": ""} == now.get_config() | {"name": ""}


@pytest.mark.parametrize("model_type", sorted({*CHECKED, "dinov3_vit"} - {"gemma3", "gemma3n", "blip-2"}))
def test_every_field_may_be_left_out_that_has_a_default(model_type):
    needed = {"vocab_size": 33, "pad_token_id": 1} if model_type == "esm" else {}
    manifest = described_by({"model_type": model_type, **needed})
    assert kerashub.converter(manifest).convert_backbone_config(read_config(manifest))


@pytest.mark.parametrize(
    ("said", "derived"),
    [
        ({"model_type": "llama"}, {"num_key_value_heads": 32}),
        ({"model_type": "mixtral", "num_key_value_heads": None}, {"num_key_value_heads": 32}),
        ({"model_type": "qwen3_moe", "hidden_size": 64, "num_attention_heads": 4}, {"head_dim": 16}),
        (
            {"model_type": "smollm3", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 8},
            {"no_rope_layers": [1, 1, 1, 0], "layer_types": [*["full_attention"] * 3, "sliding_attention"]},
        ),
        ({"model_type": "smollm3", "no_rope_layers": [0, 1]}, {"layer_types": ["full_attention"] * 2}),
    ],
)
def test_some_defaults_follow_from_other_fields(said, derived):
    assert completed(said).items() >= derived.items()


def test_gpt_oss_without_rotary_parameters_has_those_of_its_class():
    said = rope.rotation(completed({"model_type": "gpt_oss"}), rope.FULL, rope.Rotary(1.0), head_dim=64)
    assert (said.kind, said.theta, said.parameters["factor"]) == ("yarn", 1.5e5, 32.0)


@pytest.mark.parametrize(("kind", "dims"), [("default", 8), ("linear", 4)])
def test_a_part_of_each_head_is_turned_only_where_transformers_does(kind, dims):
    config = {"rope_scaling": {"rope_type": kind, "factor": 2.0}, "partial_rotary_factor": 0.5}
    assert 2 * len(rope.rotation(config, rope.FULL, rope.Rotary(1e4), head_dim=8).angles) == dims


@pytest.mark.parametrize(("model_type", "entries"), ORDINARY.values(), ids=ORDINARY)
def test_an_ordinary_folder_is_not_refused(model_type, entries):
    assert built(model_type, **entries)


def differing_from(model, said):
    """The fields in which a small backbone of KerasHub differs from what a configuration says."""
    small = {"vocabulary_size": 8, "num_layers": 1, "hidden_dim": 8, "intermediate_dim": 8}
    with shardload.abstract():
        return {d.field for d in fields.differences(said, model(**small))}


@pytest.mark.parametrize(("entries", "found"), [({}, False), ({"pad_token_id": 1}, False), ({"pad_token_id": 0}, True)])
def test_roberta_counts_positions_from_its_padding(entries, found):
    roberta = functools.partial(keras_hub.models.RobertaBackbone, num_heads=1)
    assert ("pad_token_id" in differing_from(roberta, {"model_type": "roberta", **entries})) is found


def test_a_limit_of_gpt_oss_is_kerashubs_or_refused():
    heads = {"num_query_heads": 1, "num_key_value_heads": 1}
    gpt_oss = functools.partial(keras_hub.models.GptOssBackbone, **heads, num_experts=2, top_k=2)
    found = differing_from(gpt_oss, {"model_type": "gpt_oss", "swiglu_limit": 3.0, "swiglu_alpha": 1.702})
    assert "swiglu_limit" in found and "swiglu_alpha" not in found


@pytest.mark.parametrize("said", [{}, {"decoder_attention_heads": 8}])
def test_a_missing_number_of_heads_is_that_of_transformers(said):
    bart = functools.partial(keras_hub.models.BartBackbone, num_heads=4)
    assert "decoder_attention_heads" in differing_from(bart, {"model_type": "bart", **said})


def test_a_model_that_was_built_causal_differs_from_a_source_that_is_not():
    backbone = built("gemma3_text")
    said = small_folders.config_of("gemma3_text", use_bidirectional_attention=True, attn_logit_softcapping=0.5)
    assert {d.field for d in fields.differences(said, backbone)} == {"use_bidirectional_attention", "sliding_window"}
    assert any("attn_logit_softcapping" in note and "does not apply" in note for note in fields.limits(said))


@pytest.mark.parametrize(
    ("model_type", "field"), [("gemma4", "use_bidirectional_attention"), ("qwen3_5", "hidden_act")]
)
def test_a_family_may_be_looked_at_in_part(model_type, field):
    said = {"model_type": model_type, "text_config": {field: "all", "is_causal": False}}
    assert {d.field for d in fields.differences(said, None)} == {field, "is_causal"}


@pytest.mark.parametrize(
    ("part", "field", "value"),
    [
        ("vision_config", "hidden_activation", "gelu"),
        ("audio_config", "hidden_act", "gelu"),
        ("audio_config", "rms_norm_eps", 1e-3),
        ("audio_config", "use_clipped_linears", False),
    ],
)
def test_fields_that_a_tower_of_gemma_4_ignores_are_compared(part, field, value):
    said = {"model_type": "gemma4", "text_config": {}, "vision_config": None, part: {field: value}}
    [difference] = fields.differences(said, None)
    assert f"{difference.field}: {difference}".startswith(f"{field}: {value} (in {part})")
    assert list(fields.differences({**said, part: {"patch_size": 16}}, None)) == []


@pytest.mark.parametrize(
    ("part", "entries", "found"),
    [
        ("text_config", {"eos_token_id": 3}, "eos_token_id: 3 in the configuration, but 2"),
        ("text_config", {"model_type": "metaclip_2_text_model"}, "eos_token_id: 49407 in the configuration, but 2"),
        ("text_config", {"eos_token_id": 2, "layer_norm_eps": 1e-3}, "layer_norm_eps: 0.001 (in text_config)"),
        ("vision_config", {"layer_norm_eps": 1e-3}, "layer_norm_eps: 0.001 (in vision_config)"),
    ],
)
def test_fields_that_kerashubs_converter_of_metaclip_2_ignores_are_compared(part, entries, found):
    said = {"model_type": "metaclip_2", "text_config": {"eos_token_id": 2}, part: entries}
    [difference] = fields.differences(said, None)
    assert f"{difference.field}: {difference}".startswith(found)


def test_scaling_that_begins_after_the_longest_text_is_noted(tmp_path):
    folder = small_folders.write(tmp_path / "hf", "llama", rope_scaling=DYNAMIC)
    assert any("scales positions dynamically beyond position 64" in note for note in shardload.plan(folder).notes)


@pytest.mark.parametrize("model_type", small_folders.CONFIGS)
def test_half_precision_is_as_good_as_float32(model_type):
    assert built(model_type, dtype="bfloat16").compute_dtype == "bfloat16"


def test_every_family_is_one_that_kerashub_converts():
    for model_type in CHECKED:
        assert kerashub.converter(described_by({"model_type": model_type}))


# ---- rotary positions ----------------------------------------------------------------------------

YARN_64 = {"factor": 4.0, "original_max_position_embeddings": 64}
MSCALE = {"mscale": 0.7, "mscale_all_dim": 0.5, "truncate": False, "beta_fast": 8, "beta_slow": 2}
SHORT = {"short_factor": [1.0, 1.5, 2.0, 2.5], "original_max_position_embeddings": 32}
ANGLES = {
    "default": ({}, [1.0, 0.1, 0.01, 0.001], 1.0),
    "linear": ({"factor": 4.0}, [0.25, 0.025, 0.0025, 0.00025], 1.0),
    "llama3": ({**LLAMA3, "original_max_position_embeddings": 100}, [1.0, 0.0297535, 0.00125, 0.000125], 1.0),
    "yarn": (YARN_64, [1.0, 0.0625, 0.0025, 0.00025], 1.138629),
    "yarn with mscale": ({**YARN_64, **MSCALE}, [1.0, 0.025, 0.0025, 0.00025], 1.025929),
    "longrope": ({**SHORT, "factor": 2.0}, [1.0, 0.0666667, 0.005, 0.0004], 1.095445),
}
"""By transformers 5's own rules, of a head of eight features."""


@pytest.mark.parametrize("kind", ANGLES)
def test_rotary_positions_are_those_of_transformers(kind):
    parameters, angles, scale = ANGLES[kind]
    config = {"rope_theta": 1e4, "rope_scaling": {"rope_type": kind.split()[0], **parameters}}
    found = rope.rotation(config, rope.FULL, rope.Rotary(1.0), head_dim=8)
    np.testing.assert_allclose(found.angles, angles, rtol=2e-5)
    assert found.scale == pytest.approx(scale, rel=1e-5)


@pytest.mark.parametrize(
    "made",
    [
        lambda hub: hub.RotaryEmbedding(max_wavelength=5e5),
        lambda hub: hub.RotaryEmbedding(max_wavelength=1e6, scaling_factor=8.0),
        lambda hub: LlamaRotaryEmbedding(max_wavelength=1e4),
        lambda hub: LlamaRotaryEmbedding(max_wavelength=1e4, position_scaling_factor=4.0),
    ],
)
def test_a_rotary_layer_turns_by_the_angles_it_is_said_to(made):
    block = keras.layers.Layer()
    block.rotary_embedding = made(keras_hub.layers)
    unit = np.zeros((1, 2, 1, 8), np.float32)
    unit[..., :4] = 1.0
    cos, sin = np.split(np.asarray(block.rotary_embedding(unit), np.float64)[0, 1, 0], 2)
    angles, scales, error = built_layers.turns_of(block, 8)
    np.testing.assert_allclose(angles, np.arctan2(sin, cos), rtol=error)
    np.testing.assert_array_equal(scales.round(5), 1.0)


@pytest.mark.parametrize("factor", [None, "8", [], True, 10**400])
def test_a_factor_that_is_no_number_is_an_error_of_the_source(factor):
    config = {"rope_scaling": {"rope_type": "linear", "factor": factor}}
    with pytest.raises(SourceError, match="factor"):
        rope.rotation(config, rope.FULL, rope.Rotary(1e4), head_dim=8)


# ---- GGUF ----------------------------------------------------------------------------------------


def said_by_gguf(path, **entries):
    """The configuration of a file."""
    writer = GGUFWriter(str(path), "qwen2")
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(56)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_context_length(64)
    for key, value in entries.items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32 if isinstance(value, int) else None
        (add or writer.add_float32)(f"qwen2.rope.scaling.{key}", value)
    writer.add_tensor("token_embd.weight", np.zeros((48, 32), np.float32))
    finish_gguf(writer)
    return open_manifest(path).config


def test_gguf_says_yarn_too(tmp_path):
    entries = {"type": "yarn", "factor": 4.0, "original_context_length": 16, "yarn_beta_fast": 8.0}
    config = said_by_gguf(tmp_path / "m.gguf", **entries)
    assert config["rope_scaling"] == {**YARN, "beta_fast": 8.0}
    with pytest.raises(UnsupportedError, match=r"rope_scaling is .* yarn"):
        built_from(described_by(config, format="gguf"))


def test_gguf_with_linear_positions_gets_them(tmp_path):
    manifest = described_by(said_by_gguf(tmp_path / "m.gguf", type="linear", factor=4.0), format="gguf")
    model = built_from(manifest)
    assert model.rope_scaling_factor == 4.0
    assert not fidelity.notes_of(model, manifest)


def test_gguf_with_llama_3_s_positions_in_another_model_is_refused(tmp_path):
    """As llama.cpp writes a Llama 3.1 whose heads do not add up to the hidden size, such as Minitron."""
    scaling = {**LLAMA3, "original_max_position_embeddings": 8192}
    factors = llama3_factors(scaling, theta=5e5, head_dim=16).astype(np.float32)
    described = lambda w: (w.add_key_length(16), w.add_context_length(64))  # noqa: E731
    path = write_gguf(tmp_path / "m.gguf", {"rope_freqs.weight": factors}, hidden=64, theta=5e5, extra=described)
    manifest = described_by(open_manifest(path).config, format="gguf")
    ways_out = r"rope_scaling is .* llama3 with factor 8\.0.*ignore_config=\('rope_scaling',\)"
    with pytest.raises(UnsupportedError, match=ways_out):
        built_from(manifest)
    model = built_from(manifest, ignore_config=("rope_scaling",))
    assert "rope_scaling ignored" in " ".join(fidelity.notes_of(model, manifest))
