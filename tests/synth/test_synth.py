"""What synth writes loads with Keras, KerasHub and safetensors as the real thing does, bit for bit."""

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import keras_hub
import numpy as np
import pytest
from keras_hub.src.utils.preset_utils import BUILTIN_PRESETS
from keras_hub.src.utils.transformers.preset_loader import TransformersPresetLoader
from keras_hub.src.utils.transformers.safetensor_utils import SafetensorLoader
from progress_calls import AfterShare, Counted
from safetensors import safe_open

import shardload
from shardload.errors import SourceNotFoundError, UnsupportedError, UsageError, WriteError
from shardload.families.registry import exports
from shardload.hub.config_forms import transformers_tensors
from shardload.keras_bridge.abstraction import abstract
from shardload.resolve.architectures import aliases, architectures, scaled
from shardload.synth import DTYPES, names, random_values, synth

FAMILIES = {
    "gemma_2b": "Gemma", "gemma2_9b": "Gemma", "gemma3_270m": "Gemma3", "llama3_8b": "Llama3", "llama3.2_1b": "Llama3",
    "mistral_7b": "Mistral", "qwen2.5_0.5b": "Qwen", "qwen3_0.6b": "Qwen3", "gpt2_base": "GPT2", "bert_base": "Bert",
}  # fmt: skip
TINY = {"scale": 0.02, "dtype": "bfloat16"}


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDLOAD_HOME", str(tmp_path / "root"))
    return tmp_path / "root"


def drawn(size, *, number, near_one, dtype="bfloat16", seed=0):
    """All values of one tensor, as unsigned integers."""
    return np.concatenate(list(random_values(size, dtype=dtype, near_one=near_one, seed=(seed, number))))


PUBLISHED = {
    "llama3_70b": 70_553_706_496, "llama3.1_70b": 70_553_706_496, "llama3.1_405b": 405_853_388_800,
    "qwen2.5_32b": 32_763_876_352, "qwen2.5_72b": 72_706_203_648, "mixtral_8x22b": 140_620_634_112,
    "gpt_oss_20b": 20_914_757_184, "gpt_oss_120b": 116_829_156_672, "phi4": 14_659_507_200,
    "gemma3_4b_vision": 4_300_079_472, "gemma3_12b_vision": 12_187_325_040, "gemma3_27b_vision": 27_432_406_640,
    "t5gemma2_270m_270m": 786_029_296, "t5gemma2_1b_1b": 2_115_977_456, "t5gemma2_4b_4b": 7_508_928_880,
    "pali_gemma_3b_224": 2_923_466_480, "pali_gemma_3b_448": 2_924_351_216, "pali_gemma_3b_896": 2_927_890_160,
    "gemma3n_e2b": 5_439_595_456 - 157_184, "gemma3n_e4b": 7_850_135_376 - 157_184,  # biases that KerasHub adds
    "bloom_7.1b": 7_069_016_064, "bloom_176b": 176_247_271_424, "smollm3_3b": 3_075_098_624,
    "dinov2_with_registers_small": 22_058_112, "dinov2_with_registers_base": 86_583_552,
    "dinov2_with_registers_large": 304_372_736, "dinov2_with_registers_giant": 1_136_486_912,
    "dinov2_small": 22_056_576, "dinov2_base": 86_580_480, "dinov2_large": 304_368_640, "dinov2_giant": 1_136_480_768,
    "gemma4_26b_a4b": 25_805_936_206, "gemma4_26b_a4b_text": 25_233_141_790, "gemma4_31b": 31_273_088_876,
}  # fmt: skip
"""Parameters of models of which KerasHub has no base preset, or counts more than Hugging Face stores."""
ROUNDED = {
    "dinov3_vit_small": 21.6e6, "dinov3_vit_small_plus": 28.7e6, "dinov3_vit_base": 85.7e6, "dinov3_vit_large": 303e6,
    "dinov3_vit_huge_plus": 841e6, "dinov3_vit_7b": 6_716e6, "gemma4_31b_text": 30.7e9,
}  # fmt: skip
"""Parameters of models of which three digits were published."""
OTHERS = ("qwen2.5_7b", "llama3.2", "gemma4", *PUBLISHED, *ROUNDED)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
def test_parameter_counts_are_those_that_were_published(name, parameters):
    assert sum(math.prod(spec.shape) for spec in transformers_tensors(architectures()[name])) == parameters


@pytest.mark.parametrize(("name", "parameters"), ROUNDED.items())
def test_parameter_counts_are_near_those_that_were_published(name, parameters):
    found = sum(math.prod(spec.shape) for spec in transformers_tensors(architectures()[name]))
    assert found == pytest.approx(parameters, rel=2e-3)


@pytest.mark.parametrize(("name", "published"), [("gemma4_2b", 5_123_178_051), ("gemma4_4b", 7_996_156_490)])
def test_gemma_4_has_the_published_parameters_but_bounds_and_unused_keys(name, published):
    """Hugging Face counts no scalars, and the published files have keys and values that no layer uses."""
    config, text = architectures()[name], architectures()[f"{name}_text"]
    known = {spec.name: spec.shape for spec in transformers_tensors(config)}
    counted = sum(math.prod(shape) for shape in known.values() if shape)
    for kind in text["layer_types"][-text["num_kv_shared_layers"] :]:
        width = text["global_head_dim" if kind == "full_attention" else "head_dim"]
        counted += 2 * text["num_key_value_heads"] * width * text["hidden_size"] + width
    assert counted == published
    of_text = sum(math.prod(spec.shape) for spec in transformers_tensors(text))
    assert of_text == sum(math.prod(shape) for name, shape in known.items() if "language_model" in name)


@pytest.mark.parametrize("name", ["gemma4_2b", "gemma4_4b", "gemma4_26b_a4b", "gemma4_31b"])
def test_assistants_of_gemma_4_have_the_parameters_of_kerashubs_presets(name):
    """KerasHub states the projections and centroids of the smallest assistant for all of them."""
    shapes = {spec.name: spec.shape for spec in transformers_tensors(architectures()[f"{name}_assistant"])}
    of_smallest = 3 * 1536 * 256 + 2048 * 256
    stated = BUILTIN_PRESETS[f"{name.replace('gemma4', 'gemma4_instruct')}_assistant"]["metadata"]["params"]
    assert sum(math.prod(s) for n, s in shapes.items() if n.startswith("model.")) == stated - of_smallest
    outside = {n: math.prod(s) for n, s in shapes.items() if not n.startswith("model.")}
    if name == "gemma4_2b":
        assert sum(outside.values()) - outside["masked_embedding.token_ordering"] == of_smallest


def of_keras_hub(config):
    """How many parameters KerasHub has of the tensors: not those that it lacks, and that are written as zeros."""
    lacking = {
        z.tensor: z.rows for one in exports().values() if config["model_type"] in one.model_types for z in one.zeros
    }
    shapes = {spec.name: spec.shape for spec in transformers_tensors(config)}
    lost = (math.prod((lacking[n] or s[0], *s[1:])) for n, s in shapes.items() if n in lacking)
    return sum(map(math.prod, shapes.values())) - sum(lost)


@pytest.mark.parametrize("name", [n for n in architectures() if not n.startswith(OTHERS)])
def test_parameter_counts_are_those_of_kerashubs_presets(name):
    known = {n: entry["metadata"].get("params") for n, entry in BUILTIN_PRESETS.items()}
    others = [f"{alias}_en" for alias, of in aliases().items() if of == name]
    endings = ("", "_en_uncased", "_en", "_text", "_multi", "_imagenet", "_imagenet21k", "_ul2")
    preset = next(p for p in (*others, *(f"{name}{ending}" for ending in endings)) if p in known)
    if name == "gemma3_4b":
        preset = "gemma3_4b_text"
    assert of_keras_hub(architectures()[name]) == known.get(f"{name}_text", known[preset])


@pytest.mark.parametrize("name", ["gemma2_2b", "gemma3_1b", "gpt2_base", "llama3_8b", "qwen1.5_moe_a2.7b"])
def test_scaling_keeps_heads_and_divisibility(name):
    big, small = architectures()[name], scaled(architectures()[name], 0.05)
    for key in ("num_attention_heads", "num_key_value_heads", "n_head"):
        assert small.get(key) == big.get(key)
    assert small["vocab_size"] % 8 == big["vocab_size"] % 8
    assert sum(math.prod(s.shape) for s in transformers_tensors(small)) < 6_000_000


FIRST = list({config["model_type"]: name for name, config in reversed(architectures().items())}.values())
"""The first size of each ``model_type``."""


@pytest.mark.filterwarnings("ignore:.*passed an input with a mask:UserWarning")  # KerasHub's shifted windows
@pytest.mark.sample(4)
@pytest.mark.parametrize("name", FIRST)
def test_each_model_that_has_a_size_is_made_up_and_loads(name):
    path = synth(name, format="safetensors", **TINY)
    model = shardload.load(path, mesh="1x2")
    weights = model.backbone.weights if hasattr(model, "backbone") else model.weights
    assert weights and all(np.isfinite(np.asarray(v.value, "float32")).all() for v in weights)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_preset_loads_with_keras_bit_for_bit(name):
    path, family = synth(name, **TINY), FAMILIES[name]
    with abstract():
        backbone = getattr(keras_hub.models, f"{family}Backbone").from_preset(str(path), dtype="bfloat16")
    backbone.load_weights(path / "model.weights.h5")
    for number, variable in enumerate(backbone.variables):
        if variable.dtype == "bfloat16":
            near_one = "Gemma" not in family and variable.path.endswith(("scale", "gamma"))
            expected = drawn(math.prod(variable.shape), number=number, near_one=near_one)
            found = np.asarray(variable.value).view(np.uint16).ravel()
            np.testing.assert_array_equal(found, expected, err_msg=variable.path)


@pytest.mark.parametrize("name", FAMILIES)
def test_hugging_face_folder_loads_with_kerashubs_converter(name):
    path = synth(name, format="safetensors", **TINY)
    config = json.loads((path / "config.json").read_text())
    loader = TransformersPresetLoader(str(path), config)
    with abstract():
        backbone = loader.load_backbone(loader.check_backbone_class(), False, dtype="bfloat16")
    with SafetensorLoader(str(path)) as tensors:
        loader.converter.convert_weights(backbone, tensors, config)
    weights = [v for v in backbone.weights if v.dtype == "bfloat16"]
    assert sum(math.prod(v.shape) for v in weights) == sum(math.prod(s.shape) for s in transformers_tensors(config))
    smallest = min(float(np.abs(np.asarray(v.value, "float32")).min()) for v in weights)
    assert smallest >= 2**-7  # every one was filled: initialisers make zeros, ones and values near zero


@pytest.mark.slow
def test_preset_loads_with_from_preset():
    path = synth("gpt2", **TINY)
    task = keras_hub.models.CausalLM.from_preset(str(path), dtype="bfloat16", preprocessor=None)
    assert isinstance(task, keras_hub.models.GPT2CausalLM)
    found = np.asarray(task.backbone.variables[0].value).view(np.uint16).ravel()
    np.testing.assert_array_equal(found, drawn(found.size, number=0, near_one=False))


def test_sharded_safetensors_have_an_index_and_the_same_values(tmp_path):
    whole = synth("gpt2", format="safetensors", directory=tmp_path / "a", **TINY)
    cut = synth("gpt2", format="safetensors", directory=tmp_path / "b", shard_bytes=10_000, **TINY)
    weight_map = json.loads((cut / "model.safetensors.index.json").read_text())["weight_map"]
    assert len(set(weight_map.values())) > 3
    with safe_open(whole / "model.safetensors", framework="np") as one:
        for name, file in weight_map.items():
            with safe_open(cut / file, framework="np") as part:
                np.testing.assert_array_equal(part.get_tensor(name), one.get_tensor(name))
        assert set(one.keys()) == set(weight_map)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_file_loads_with_keras(dtype):
    path = synth("gpt2", format="h5", scale=0.02, dtype=dtype)
    config = json.loads(path.with_name("gpt2_base-x0.02.json").read_text())
    with abstract():
        backbone = keras_hub.models.GPT2Backbone.from_config(config["config"])
    backbone.load_weights(path)
    found = np.asarray(backbone.get_layer("token_embedding").embeddings.value)
    assert found.dtype.name == dtype
    assert 0.01 < np.abs(found.astype("float32")).mean() < 0.03


@pytest.mark.slow
def test_logits_are_finite_and_alive():
    path = synth("gemma2_2b", scale=0.05)
    with abstract():
        task = keras_hub.models.GemmaCausalLM.from_preset(str(path), preprocessor=None)
    task.backbone.load_weights(path / "model.weights.h5")
    tokens = np.arange(24, dtype="int32").reshape(2, 12)
    logits = np.asarray(task({"token_ids": tokens, "padding_mask": np.ones_like(tokens)}))
    assert np.isfinite(logits).all()
    assert logits.std() > 1e-3


def test_same_seed_same_bytes_other_seed_other_bytes(tmp_path):
    def written(place, seed):
        folder = synth("gpt2", format="safetensors", directory=tmp_path / place, seed=seed, **TINY)
        return (folder / "model.safetensors").read_bytes()

    first, again, other = written("a", 0), written("b", 0), written("c", 1)
    assert first == again
    assert first != other


def test_alias_is_written_under_its_own_name(home):
    assert synth("gemma2_7b", format="safetensors", **TINY) == home / "gemma2_9b-x0.02"


def test_progress_counts_every_byte():
    counted = Counted()
    config = json.loads((synth("gpt2", format="safetensors", progress=counted, **TINY) / "config.json").read_text())
    size = 2 * sum(math.prod(s.shape) for s in transformers_tensors(config))
    assert counted.stages == [["Writing gpt2_base-x0.02", size, size]]


def test_the_same_again_is_reused_and_another_needs_overwrite():
    path = synth("gpt2", format="safetensors", **TINY)
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    synth("gpt2", format="safetensors", **TINY)
    assert (path / "model.safetensors").stat().st_mtime_ns == stamp
    with pytest.raises(WriteError, match="overwrite"):
        synth("gpt2", format="safetensors", seed=1, **TINY)
    synth("gpt2", format="safetensors", seed=1, overwrite=True, **TINY)
    assert json.loads((path / "config.json").read_text())["shardload"]["seed"] == 1


def test_a_failure_leaves_nothing_behind(home):
    with pytest.raises(KeyboardInterrupt):
        synth("gpt2", format="safetensors", progress=AfterShare(KeyboardInterrupt, 0), **TINY)
    assert list(home.iterdir()) == []


def test_killed_between_the_two_renames_the_old_one_is_not_lost(home, monkeypatch):
    path = synth("gpt2", format="safetensors", **TINY)
    rename = Path.rename

    def killed(self, target):
        if target == path:
            raise KeyboardInterrupt
        return rename(self, target)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Path, "rename", killed)
        patched.setattr(Path, "replace", killed)
        synth("gpt2", format="safetensors", seed=1, overwrite=True, **TINY)
    assert not path.exists()
    with pytest.raises(WriteError, match="already exists"):
        synth("gpt2", format="safetensors", seed=1, **TINY)
    assert json.loads((path / "config.json").read_text())["shardload"]["seed"] == 0
    synth("gpt2", format="safetensors", seed=1, overwrite=True, **TINY)
    assert list(home.iterdir()) == [path]


def test_a_full_disk_is_seen_before_writing(home, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**12, 10**12, 10**9)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    needs = r"gemma2_27b: it needs 50\.7 GiB and 64\.0 MiB to spare, but .* has 953\.7 MiB free"
    with pytest.raises(WriteError, match=needs):
        synth("gemma2_27b")
    assert list(home.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_a_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match=r"Cannot write gpt2.* to .* set SHARDLOAD_HOME"):
        synth("gpt2", directory=tmp_path / "file" / "root", **TINY)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"name": "gemma2_9c"}, SourceNotFoundError, "Did you mean gemma2_9b"),
        ({"name": "gpt2", "format": "onnx"}, UnsupportedError, "expected one of preset, h5, safetensors"),
        ({"name": "gpt2", "dtype": "int8"}, UsageError, "Choose bfloat16"),
        ({"name": "gpt2", "scale": 2.0}, UsageError, "scale"),
        ({"name": "gpt2", "scale": float("nan")}, UsageError, "scale"),
        ({"name": "gpt2", "seed": -1}, UsageError, "seed=-1 is not valid, expected an integer from 0 to 4294967295"),
        ({"name": "gpt2", "seed": 1 << 32}, UsageError, "seed"),
    ],
)
def test_bad_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        synth(**arguments)


def test_names_lists_sizes_and_aliases():
    listed = {a.name: a for a in names()}
    assert listed["gemma2_9b"].aliases == ("gemma2_7b",)
    assert listed["gemma2_9b"].nbytes == 18_483_411_968


def test_listing_names_imports_nothing_heavy():
    code = "import sys; from shardload.synth import names; names(); print({'jax', 'keras'} & set(sys.modules))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"


def test_files_that_may_not_be_so_large_are_a_clear_error(home):
    """libhdf5 ends the process when a write fails: it must not come to that."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))"
    code = f"{limit}; from shardload.cli import main; raise SystemExit(main())"
    command = [sys.executable, "-c", code, "synth", "gpt2_base", "--scale", "0.3", "--format", "h5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "File too large" in done.stderr and "Traceback" not in done.stderr
    assert not list(home.iterdir())


def test_what_a_killed_run_left_is_removed_but_not_what_another_one_writes(tmp_path):
    stale = tmp_path / ".gpt2_base-x0.01.abcdefgh.partial"
    live = tmp_path / ".gpt2_base-x0.01.ijklmnop.partial"
    for folder in (stale, live):
        folder.mkdir()
        (folder / "model.weights.h5").write_bytes(b"half")
    fd = os.open(live, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    synth("gpt2_base", scale=0.01, directory=tmp_path, format="safetensors")
    assert {path.name for path in tmp_path.iterdir()} == {"gpt2_base-x0.01", live.name}
    os.close(fd)
