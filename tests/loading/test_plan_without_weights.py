"""A plan from a configuration alone is that of the checkpoint itself; only a plan needs no weights."""

import inspect
import json
import math
import re
import shutil
import socket

import hub_folders
import jax
import pytest
import small_folders
from small_family import published
from transformers_cross import folders, table
from transformers_cross.cases import CASES

import shardload
from shardload.errors import ShardloadError, SourceError, SourceNotFoundError, UnsupportedError
from shardload.families.registry import families
from shardload.hub import built, kerashub
from shardload.hub.config_forms import transformers_tensors
from shardload.loaders import open_manifest
from shardload.pipeline.load import build, open_planned
from shardload.pipeline.request import PlanRequest
from shardload.resolve import hubs
from shardload.resolve.architectures import lookup, scaled
from shardload.synth import synth
from shardload.verifying import verify

FAMILIES = ["gemma_2b", "gemma2_9b", "gemma3_1b", "llama3_8b", "llama3.2_1b", "mistral_7b", "qwen2.5_0.5b"]
FAMILIES += ["qwen3_0.6b", "gpt2_base", "bert_base"]
MESHES = ["4x8", "data=4,model=8", "data=2,fsdp=2,model=2", "64x16", "1x3"]
TINY = 0.02


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """An empty root, empty caches, and sockets that fail the test."""

    def refuse(*args, **options):
        raise AssertionError("a plan from a configuration opened a connection")

    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path / "root"))
    monkeypatch.setenv("KAGGLEHUB_CACHE", str(tmp_path / "kaggle"))
    monkeypatch.setattr("shardload.resolve.PIP_PACKAGE", "no_such_package")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture
def tiny():
    """The name of a small architecture."""
    with published("tiny", scaled(lookup("gemma2_9b")[1], TINY)) as name:
        yield name


def facts(report, *more):
    """What a plan says, without its times and notes, and these; Keras numbers layers as it builds them."""
    found = {key: value for key, value in report.to_json().items() if key not in ("seconds", "notes", *more)}
    for variable in found["layout"]["variables"]:
        variable |= {key: re.sub(r"\d+", "*", variable[key]) for key in ("name", "reason")}
    return found


def tiny_synth(name, directory, *, format="safetensors", **options):
    return synth(name, format=format, scale=TINY, directory=directory, **options)


def without_weights(folder):
    """The same folder, with its configuration files only."""
    bare = folder.with_name(f"{folder.name}-bare")
    shutil.copytree(folder, bare, ignore=lambda _, names: [name for name in names if not name.endswith(".json")])
    return bare


def config_folder(path, config):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def assert_same_facts(found, expected):
    """Compare plans; without weights, no gap is known between tensors, so other ones may be read together."""
    peaks = [{**one}.pop("host_bytes") for one in (found, expected)]
    assert abs(peaks[0]["peak_staging"] - peaks[1]["peak_staging"]) < 512 << 10
    assert {**found, "host_bytes": None} == {**expected, "host_bytes": None}


def assert_same(whole, bare, **options):
    plans = [shardload.plan(folder, **options) for folder in (whole, bare)]
    expected, found = (facts(plan, "source") for plan in plans)
    assert_same_facts(found, expected)
    first, *others = plans[0].notes
    assert plans[1].notes == (first, f"planned from its configuration: no weights are in {bare}", *others)


@pytest.mark.parametrize("number", range(len(FAMILIES)))
def test_a_hugging_face_configuration_plans_as_its_checkpoint(number, tmp_path):
    whole = tiny_synth(FAMILIES[number], tmp_path)
    options = {"mesh": MESHES[number % len(MESHES)], "dtype": (None, "float32")[number % 2]}
    assert_same(whole, without_weights(whole), device_memory_bytes="64KiB", **options)


@pytest.mark.parametrize("name", ["gemma2_9b", "llama3.2_1b", "bert_base"])
def test_the_configuration_of_a_kerashub_preset_plans_as_the_preset(name, tmp_path):
    whole = tiny_synth(name, tmp_path, format="preset")
    assert_same(whole, without_weights(whole), mesh="2x4", dtype="float32")


def test_the_weights_of_a_task_outside_its_backbone_are_planned(tmp_path):
    from keras_hub.models import BertBackbone, BertTextClassifier

    backbone = BertBackbone(48, 2, 4, 32, 56, max_sequence_length=64)
    BertTextClassifier(backbone=backbone, num_classes=3).save_to_preset(str(tmp_path / "preset"))
    whole = tmp_path / "preset"
    expected, found = (shardload.plan(folder, mesh="2x4") for folder in (whole, without_weights(whole)))
    assert found.variables == expected.variables > len(backbone.weights)
    assert_same_facts(facts(found, "source"), facts(expected, "source"))


@pytest.mark.parametrize("mesh", MESHES)
def test_the_name_of_an_architecture_plans_as_its_checkpoint_on_any_mesh(mesh, tiny, tmp_path):
    planned = shardload.plan(tiny, mesh=mesh)
    assert planned.notes == ("planned from the architecture: no weights of tiny are on this machine",)
    assert planned.source == "tiny"
    whole = synth(tiny, format="safetensors", directory=tmp_path)
    assert facts(shardload.plan(whole, mesh=mesh)) == {**facts(planned), "source": str(whole)}


def test_a_local_checkpoint_wins_over_the_architecture(tiny):
    path = synth(tiny)
    found = shardload.plan(tiny)
    assert (found.source, found.format) == (str(path), "keras-hub-preset")
    assert found.notes == ("its weights are random (made by shardload synth)",)


def test_an_alias_says_what_is_planned():
    found = shardload.plan("gemma2_7b", mesh="4x8", device_memory_bytes="16GiB")
    assert found.notes[:2] == (
        "Gemma 2 was never released at 7B: using gemma2_9b",
        "planned from the architecture: no weights of gemma2_9b are on this machine",
    )
    assert (found.parameters, len(found.devices), found.fits.fits) == (9_241_705_984, 32, True)


def test_a_preset_that_is_another_model_than_the_architecture_is_noted():
    assert shardload.plan("bert_base_en").notes[0] == (
        "bert_base_en is an alias: using bert_base; KerasHub's preset bert_base_en is a different model: it has 108.3 "
        "M parameters, the architecture has 109.5 M"
    )


def test_a_name_that_kerashub_has_too_is_not_looked_up_there():
    assert shardload.plan("gemma3_1b").source == "gemma3_1b"  # its converter asks KerasHub for more files


@pytest.fixture
def gemma_config(tmp_path):
    return config_folder(tmp_path / "config", scaled(lookup("gemma2_9b")[1], TINY))


def test_the_path_of_a_configuration_is_enough(gemma_config):
    assert facts(shardload.plan(gemma_config / "config.json")) == facts(shardload.plan(gemma_config))


def test_a_configuration_may_have_another_name(tmp_path):
    folder = config_folder(tmp_path / "config", scaled(lookup("llama3_8b")[1], TINY))
    named = (folder / "config.json").rename(tmp_path / "my8b.json")
    found = shardload.plan(named)
    assert found.source == str(named) and found.notes[0].startswith(f"planned from its configuration: {named} alone")
    told = r"my8b\.json is a model's configuration .* shardload plan takes this file"
    with pytest.raises(UnsupportedError, match=told):
        shardload.load(named)
    named.rename(folder / "config.json")
    assert facts(found, "source") == facts(shardload.plan(folder), "source")


def test_names_of_architectures_match_with_hyphens(tiny):
    assert facts(shardload.plan("GPT2-Base")) == facts(shardload.plan("gpt2_base"))


def test_with_weights_beside_it_the_path_of_a_configuration_means_the_checkpoint(tmp_path):
    whole = tiny_synth("gpt2", tmp_path)
    assert facts(shardload.plan(whole / "config.json")) == facts(shardload.plan(whole))


def test_files_of_other_models_beside_a_configuration_are_no_obstacle(gemma_config):
    path = gemma_config / "config.json"
    alone = shardload.plan(path)
    (gemma_config / "other.h5").write_bytes(b"")
    found = shardload.plan(path)
    assert facts(found) == facts(alone)
    [note] = found.notes
    assert note.startswith(f"planned from its configuration: its weights are not in {gemma_config}. It states no dtype")
    assert found.dtypes == ("float32",)
    assert shardload.plan(path, dtype="bfloat16").dtypes == ("bfloat16",)


def test_an_index_whose_shards_are_not_there_is_no_obstacle(tmp_path):
    whole = tiny_synth("gpt2", tmp_path, shard_bytes=100_000)
    bare = without_weights(whole)
    assert (bare / "model.safetensors.index.json").exists()
    assert shardload.plan(bare).parameters == shardload.plan(whole).parameters
    shutil.copy(next(whole.glob("*00001-of*")), bare)
    with pytest.raises(SourceNotFoundError, match=r"shards, but .* lacks \d+ of them"):
        shardload.plan(bare)


@pytest.mark.parametrize(
    ("model_type", "defaults"),
    [
        ("gemma", {"tie_word_embeddings": True, "head_dim": 256}),
        ("gemma2", {"tie_word_embeddings": True, "head_dim": 256, "num_key_value_heads": 4}),
        ("llama", {"tie_word_embeddings": False, "num_key_value_heads": 4, "head_dim": None}),
        ("qwen3", {"tie_word_embeddings": False, "head_dim": 128}),
        ("gpt2", {"n_inner": 128}),
        ("bert", {"type_vocab_size": 2}),
    ],
)
def test_omitted_fields_have_the_defaults_of_transformers(model_type, defaults, tmp_path):
    config = small_folders.config_of(model_type, architectures=[""], **dict.fromkeys(defaults, ...))
    expected = shardload.plan(config_folder(tmp_path / "explicit", config | defaults))
    found = shardload.plan(config_folder(tmp_path / "omitted", config))
    assert found.parameters == expected.parameters
    assert found.missing == found.unused == found.mismatched == ()


def test_biases_that_the_model_cannot_use_are_listed(tmp_path):
    config = small_folders.config_of("llama", architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True)
    unused = shardload.plan(config_folder(tmp_path / "llama", config)).unused
    assert {name.split(".", 3)[3] for name in unused} == {
        *(f"self_attn.{letter}_proj.bias" for letter in "qkvo"),
        *(f"mlp.{part}_proj.bias" for part in ("gate", "up", "down")),
    }


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_a_model_with_experts_plans_as_its_checkpoint(family, tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    hub_folders.write(whole, family, hub_folders.build(whole, family), unwanted=False)
    config = {**hub_folders.config_of(family), "architectures": [CAUSAL[family]], "torch_dtype": "float32"}
    (whole / "config.json").write_text(json.dumps(config))
    plans = [shardload.plan(folder, mesh="2x4") for folder in (whole, without_weights(whole))]
    # The names of layers are numbered as they are built.
    one, two = (facts(plan, "source", "computed") for plan in plans)
    assert one == two
    assert len(plans[0].computed) == len(plans[1].computed)


CAUSAL = {"mixtral": "MixtralForCausalLM", "qwen2_moe": "Qwen2MoeForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}
MIXTRAL = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
MIXTRAL |= {"num_key_value_heads": 8, "num_local_experts": 8, "vocab_size": 32000, "model_type": "mixtral"}
QWEN3 = {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48, "num_attention_heads": 32}
QWEN3 |= {"num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "moe_intermediate_size": 768}
QWEN3 |= {"vocab_size": 151936, "model_type": "qwen3_moe"}


@pytest.mark.parametrize(("config", "published"), [(MIXTRAL, 46_702_792_704), (QWEN3, 30_532_122_624)])
def test_experts_are_counted_as_published(config, published):
    assert sum(math.prod(spec.shape) for spec in transformers_tensors(config)) == published


def test_more_experts_than_any_model_has_are_refused():
    with pytest.raises(SourceError, match="sets 2,000 experts in 32 layers, expected at most 32768"):
        transformers_tensors({**MIXTRAL, "num_local_experts": 2000})


EXPECTED = table.read()
LOADABLE = {case.family: case.name for case in reversed(CASES) if EXPECTED[case.name].ours != "refused"}
"""The first folder of each family that loads."""
EXPERTS = ["gpt_oss, untied", "gemma4_text, experts", "qwen3_5_moe, text", "mixtral, untied", "qwen2_moe, untied"]
EXPERTS += ["qwen3_moe, untied"]
OTHERS = sorted({*LOADABLE.values()} - {*EXPERTS})


@pytest.mark.parametrize("name", [*EXPERTS, *(pytest.param(name, marks=pytest.mark.full) for name in OTHERS)])
def test_the_configuration_of_any_family_plans_as_its_folder(name, tmp_path):
    whole = folders.build(folders.read_family(name.partition(", ")[0])[name], tmp_path / "whole")
    with_weights, found = (shardload.plan(folder, mesh="1x8") for folder in (whole, without_weights(whole)))
    assert found.parameters == with_weights.parameters
    assert found.weight_bytes == with_weights.weight_bytes
    assert [d.bytes for d in found.devices] == [d.bytes for d in with_weights.devices]
    assert [each.why for each in found.layout.fallbacks] == [each.why for each in with_weights.layout.fallbacks]
    assert (found.dtypes, found.missing, found.mismatched) == (with_weights.dtypes, (), ())
    listed = json.loads((whole / "config.json").read_text())["model_type"] in LISTED
    assert listed != any("planned as a KerasHub preset of the same model" in note for note in found.notes)


LISTED = {one.name for family in families() for one in family.model_types if one.tensors}
"""Of these, the tensors are known without the model."""


def test_every_family_is_planned():
    written = {path.name.removesuffix(".json.gz") for path in folders.FIXTURES.glob("*.json.gz")}
    # KerasHub has no converters for the text models alone, and another text encoder in SAM 3.
    assert written - LOADABLE.keys() == {"qwen3_5_text", "qwen3_5_moe_text", "sam3_video"}
    assert {name.partition(", ")[0] for name in EXPERTS} <= LOADABLE.keys()


MIXTURES = ["gpt_oss, untied", "gemma4_text, experts", "mixtral, untied", "qwen2_moe, untied", "qwen3_moe, untied"]
MIXTURES += ["qwen3_5_moe, text"]


@pytest.mark.parametrize("name", MIXTURES)
def test_every_expert_computes_every_token_and_the_plan_says_so(name, tmp_path):
    config = folders.read_family(name.partition(", ")[0])[name]["json"]["config.json"]
    folder = config_folder(tmp_path / "mixture", config)
    [note] = [note for note in shardload.plan(folder, mesh="expert=2").notes if "dense dispatch" in note]
    request = PlanRequest(source=folder)
    model = build(open_planned(request).manifest, request.construction)
    layer = next(layer for layer in built.layers(model) if type(layer).__name__ in note)
    assert f"all {layer.num_experts} experts" in note and layer.num_experts > 1
    tokens, experts = 7, layer.num_experts
    weights = next(w for w in layer.weights if len(w.shape) == 3)
    width = next(d for d in weights.shape[1:] if d in (config.get("text_config") or config).values())
    state = [[jax.ShapeDtypeStruct(v.shape, v.dtype) for v in layer.trainable_variables], []]
    x = [jax.ShapeDtypeStruct((tokens, width), "float32")]
    if "dispatch_weights" in inspect.signature(layer.call).parameters:
        x.append(jax.ShapeDtypeStruct((tokens, experts), "float32"))
    jaxpr = jax.make_jaxpr(layer.stateless_call)(*state, *x)
    products = [e.outvars[0].aval.shape for e in jaxpr.eqns if e.primitive.name == "dot_general"]
    assert products and all(shape[0] == experts and tokens in shape for shape in products)


def test_a_model_without_experts_has_no_such_note():
    assert not any("dispatch" in note for note in shardload.plan("gpt2_base").notes)


def test_experts_are_spread_over_their_axis_and_nothing_else_is(tmp_path):
    config = lookup("qwen3_30b_a3b")[1] | {"num_hidden_layers": 2, "torch_dtype": "bfloat16"}
    planned = shardload.plan(config_folder(tmp_path / "qwen", config), mesh="data=2,expert=8")
    experts = 2 * 128 * 3 * 2048 * 768 * 2  # layers, experts, kernels, dims, bytes
    assert {device.bytes for device in planned.devices} == {planned.weight_bytes - experts * 7 // 8}
    assert (planned.layout.sharded, planned.layout.fallbacks) == (2 * 2, ())


def test_codes_in_a_configuration_are_planned_as_plain_weights_in_their_usual_dtype(tmp_path):
    config = lookup("gpt_oss_20b")[1] | {"quantization_config": {"quant_method": "mxfp4"}, "num_hidden_layers": 2}
    planned = shardload.plan(config_folder(tmp_path / "oss", config), mesh="1x8")
    assert planned.dtypes == ("bfloat16",)
    assert "sizes are for bfloat16" in planned.notes[0]
    assert planned.notes[1] == "planned as plain weights in bfloat16: of MXFP4 codes, a load reads fewer bytes"


@pytest.mark.parametrize(("bits", "said"), [(4, "of GPTQ (4 bits) codes, a load reads fewer bytes"), (5, "bits=5")])
def test_settings_of_quantisation_are_known_or_refused_without_weights_too(bits, said, tmp_path):
    config = small_folders.config_of("llama") | {"quantization_config": {"quant_method": "gptq", "bits": bits}}
    folder = config_folder(tmp_path / "gptq", config)
    if bits == 4:
        assert any(said in note for note in shardload.plan(folder, mesh="1x8").notes)
    else:
        with pytest.raises(UnsupportedError, match=said):
            shardload.plan(folder)


UNKNOWN = ("olmoe", "deepseek_v2", "deepseek_v3", "granitemoe", "phimoe", "llama4", "llama4_text", "jamba", "dbrx")
UNKNOWN += ("glm4_moe", "ernie4_5_moe", "hunyuan_v1_moe", "minimax", "switch_transformers", "nllb-moe", "qwen3_next")


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_a_family_that_kerashub_lacks_is_refused_in_a_sentence(model_type, tmp_path):
    folder = config_folder(tmp_path / "moe", {**MIXTRAL, "model_type": model_type, "num_experts": 8})
    with pytest.raises(UnsupportedError) as caught:
        shardload.plan(folder, mesh="1x8")
    said = str(caught.value)
    assert f"there is no converter for model_type {model_type!r}, only for albert, " in said and "mixtral" in said
    assert len(said) < 1000 and "\n" not in said


def test_a_field_that_kerashub_lacks_is_ignored_only_on_request(tmp_path):
    config = folders.read_family("phi3")["phi3, sliding window"]["json"]["config.json"]
    folder = config_folder(tmp_path / "phi3", config)
    with pytest.raises(UnsupportedError, match="--ignore-config sliding_window"):
        shardload.plan(folder)
    assert shardload.plan(folder, ignore_config=("sliding_window",)).parameters


def test_weights_in_an_unsupported_format_are_not_overlooked(tmp_path):
    folder = config_folder(tmp_path / "pickled", small_folders.config_of("llama"))
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x02")
    with pytest.raises(UnsupportedError, match="contains only PyTorch pickles"):
        shardload.plan(folder)


def test_a_configuration_of_nothing_known_is_refused_as_with_weights(tmp_path):
    folder = config_folder(tmp_path / "x", {"name": "x"})
    with pytest.raises(SourceError, match=r"should describe a model by 'registered_name' .* or 'model_type'"):
        shardload.plan(folder / "config.json")


HUGE = {"hidden_size": 1 << 20, "intermediate_size": 1 << 24, "head_dim": 1 << 18}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000, expected a whole number from 1 to 1000"),
        ({"num_key_value_heads": 3}, r"num_attention_heads=\d+, expected a multiple of num_key_value_heads=3"),
        ({"num_hidden_layers": -1}, "num_hidden_layers=-1, expected"),
        ({"hidden_size": 10**30}, "expected a whole number from 1 to 16777216"),
        ({"hidden_size": "32"}, "hidden_size='32', expected"),
        ({"vocab_size": None}, "vocab_size=None, expected"),
        ({"vocab_size": 2.5}, "vocab_size=2.5, expected"),
        ({"head_dim": [8]}, r"head_dim=\[8\], expected"),
        ({"intermediate_size": True}, "intermediate_size=True, expected"),
        (HUGE, "describes 408 TiB of weights, expected at most 16 TiB"),
        ({"architectures": 5}, "Cannot build the model of .*hostile"),
        ({"add_cross_attention": True}, "expected a model without cross-attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "sets gptq quantisation"),
        ({"model_type": ["llama"]}, "should describe a model|names? the architecture"),
    ],
    ids=str,
)
def test_a_hostile_configuration_is_refused(changes, said, tmp_path):
    folder = config_folder(tmp_path / "hostile", small_folders.config_of("llama") | changes)
    with pytest.raises(ShardloadError, match=said):
        shardload.plan(folder)


def test_a_preset_of_more_layers_than_any_model_is_refused(tmp_path):
    bare = without_weights(tiny_synth("gpt2", tmp_path, format="preset"))
    config = json.loads((bare / "config.json").read_text())
    config["config"]["num_layers"] = 10**9
    (bare / "config.json").write_text(json.dumps(config))
    with pytest.raises(SourceError, match=r"sets num_layers=1000000000, but expected at most 1000"):
        shardload.plan(bare)


def test_a_format_that_needs_other_files_is_refused(tiny):
    assert shardload.plan(tiny, format="hf-safetensors").source == "tiny"
    with pytest.raises(SourceError, match=r"Cannot plan tiny as gguf: it has no weights.* Leave out format"):
        shardload.plan(tiny, format="gguf")


@pytest.fixture(params=["name", "hugging-face", "preset"])
def weightless(request, tmp_path, monkeypatch):
    """A source that can be planned only."""
    monkeypatch.setattr(hubs, "reachable", lambda url: False)
    if request.param == "name":
        return "gemma2_27b"
    format = "preset" if request.param == "preset" else "safetensors"
    return str(without_weights(tiny_synth("gpt2", tmp_path, format=format)))


@pytest.mark.parametrize(
    "call",
    [
        shardload.load,
        shardload.inspect,
        lambda source: shardload.convert(source, "out", to="orbax"),
        lambda source: shardload.load_weights(small_model(), source),
    ],
    ids=["load", "inspect", "convert", "load_weights"],
)
def test_only_a_plan_needs_no_weights(call, weightless, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shardload.plan(weightless).parameters
    with pytest.raises(SourceNotFoundError, match=r"Cannot find 'gemma2_27b'|contains neither|without weights"):
        call(weightless)
    assert not (tmp_path / "out").exists()


def test_a_folder_without_weights_is_no_readable_checkpoint(tmp_path):
    (verdict,) = verify(without_weights(tiny_synth("gpt2", tmp_path)))
    assert verdict.verdict == "damaged" and "contains neither model.safetensors nor" in verdict.problems[0]


def small_model():
    import keras

    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])


HANDLE = "kaggle://keras/some/keras/some_model_en/2"


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub with one preset, and the names of the files that were downloaded from it."""
    source = tiny_synth("gpt2", tmp_path / "remote", format="preset")
    (source / "metadata.json").unlink()
    cache = tmp_path / "kaggle" / "models" / HANDLE.removeprefix("kaggle://")
    asked = []

    def download(name, path=None):
        asked.append(path)
        if path is None:
            shutil.copytree(source, cache, dirs_exist_ok=True)
            return str(cache)
        if not (source / path).exists():
            raise OSError(f"404 Client Error. Resource not found at URL: {name}/{path}")
        cache.mkdir(parents=True, exist_ok=True)
        return str(shutil.copy(source / path, cache))

    monkeypatch.setattr(kerashub, "preset_handles", lambda: {"some_model_en": HANDLE})
    monkeypatch.setattr(hubs, "reachable", lambda url: True)
    monkeypatch.setattr("kagglehub.model_download", download)
    return source, cache, asked


@pytest.mark.parametrize("name", ["some_model_en", "some_model", HANDLE])
def test_of_a_preset_only_the_configuration_is_downloaded(name, hub):
    source, cache, asked = hub
    planned = shardload.plan(name, mesh="4x8")
    assert asked == ["task.json", "metadata.json", "config.json"]
    assert planned.notes[-1] == f"planned from its configuration: no weights are in {cache}"
    asked.clear()
    again = shardload.plan(name, mesh="4x8")
    assert (asked, facts(again)) == ([], facts(planned))
    assert_same_facts(facts(planned), {**facts(shardload.plan(source, mesh="4x8")), "source": str(cache)})


def test_of_a_hugging_face_model_a_cached_configuration_is_enough(tmp_path, monkeypatch):
    source, cache = tiny_synth("llama3_8b", tmp_path / "remote"), tmp_path / "cache"
    cache.mkdir()
    shutil.copy(source / "config.json", cache)

    def cached(name, *, allow_patterns, revision=None, local_files_only=False):
        assert (name, revision, local_files_only) == ("some/model", None, True)
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", cached)
    planned = shardload.plan("hf://some/model", mesh="4x8")
    assert_same_facts(facts(planned), {**facts(shardload.plan(source, mesh="4x8")), "source": str(cache)})


def test_a_load_then_downloads_the_weights(hub):
    _, cache, asked = hub
    shardload.plan("some_model")
    shardload.load("some_model", mesh="1x2")
    assert asked[-1] is None
    assert open_manifest(cache).files
    assert "no weights" not in str(shardload.plan("some_model").notes)


def test_a_configuration_that_cannot_be_downloaded_is_the_hubs_error(hub, monkeypatch):
    monkeypatch.setattr(hubs, "reachable", lambda url: False)
    with pytest.raises(SourceNotFoundError, match="cannot be reached"):
        shardload.plan("some_model")


def test_float16_has_no_angles_below_its_smallest_number():
    """Llama 3.1 turns its slowest features by 3e-7 radians per token."""
    assert facts(shardload.plan("llama3.2_1b", dtype="float16"))


def test_the_smallest_mesh_is_not_larger_than_one_that_fits():
    planned = shardload.plan("gemma2_2b", mesh="1x3", dtype="bfloat16", device_memory_bytes="2600MiB")
    assert planned.fits.fits and planned.fits.smallest_mesh == "1x3"
