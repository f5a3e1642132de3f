"""Hugging Face folders of every architecture equal KerasHub's own loader, bit for bit."""

import dataclasses
import tracemalloc
from pathlib import Path

import hub_folders
import keras
import numpy as np
import pytest
from by_hand import check_same, fill, lay_out, mesh, read_tensor
from fuzz_child import status
from hub_folders import build
from safetensors.numpy import load_file, save_file

import shardload.keras_bridge.abstraction
from shardload.errors import LimitError, MismatchError, MissingExtraError, UnsupportedError
from shardload.hub import kerashub
from shardload.keras_bridge.variables import current_value
from shardload.loaders import open_manifest
from shardload.mapping.converter_run import Run, record
from shardload.mapping.converters import map_hub

pytestmark = pytest.mark.filterwarnings("ignore:.*mask attached to it:UserWarning")  # KerasHub's Swin

COMPUTING = {"mixtral", "qwen2_moe", "qwen3_moe", "xlm-roberta", "dinov2", "swin"}
"""Architectures whose converters do more than transpose, reshape and cut."""
FAST = {"gemma2", "gpt2", "mixtral", "xlm-roberta", "vit"}
EVERY = [pytest.param(m, marks=[] if m in FAST else pytest.mark.slow) for m in hub_folders.CONFIGS]


def written(tmp_path, model_type, *stored, **options):
    """A model, and the manifest of the folder that it was written to."""
    made = build(tmp_path / "hf", model_type)
    return made, open_manifest(hub_folders.write(tmp_path / "hf", model_type, made, *stored, **options))


def pair(tmp_path, model_type, stored="float32", *, files=1, **options):
    """A model filled by us, another filled by KerasHub, and what we found."""
    _, manifest = written(tmp_path, model_type, stored, files=files)
    model = build(tmp_path / "hf", model_type, abstract=True, **options)
    found = map_hub(model, manifest)
    assert all(current_value(v) is None for v in model.weights)
    fill(found, manifest)
    shardload.keras_bridge.abstraction.initialise(list(found.state))
    reference = build(tmp_path / "hf", model_type, **options)
    return model, hub_folders.reference(tmp_path / "hf", reference, model_type), found


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("model_type", EVERY)
def test_equals_kerashub(model_type, tmp_path):
    model, reference, found = pair(tmp_path, model_type)
    assert not found.missing and not found.mismatched and found.unused == ("model.unwanted.weight",)
    assert bool(found.computed) == (model_type in COMPUTING)
    check_same(model, reference)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["gemma2", "mixtral"])
def test_equals_kerashub_from_several_files_in_bfloat16(model_type, tmp_path):
    model, reference, _ = pair(tmp_path, model_type, "bfloat16", files=3, dtype="bfloat16")
    check_same(model, reference)


@pytest.mark.parametrize("model_type", ["mixtral", "xlm-roberta", "dinov2"])
def test_computed_values_are_placed_sharded(model_type, tmp_path):
    made, manifest = written(tmp_path, model_type)
    model = lay_out(build(tmp_path / "hf", model_type, abstract=True), mesh())
    found = map_hub(model, manifest)
    fill(found, manifest)
    assert any(not current_value(v).sharding.is_fully_replicated for c in found.computed for v in c.variables)
    check_same(model, hub_folders.reference(tmp_path / "hf", made, model_type))


def test_experts_name_their_tensors(tmp_path):
    _, _, found = pair(tmp_path, "mixtral")
    bank = next(c for c in found.computed if c.names[0].endswith("feedforward_output_dense"))
    assert [t.split("experts.")[1] for t in bank.tensors] == ["0.w2.weight", "1.w2.weight", "2.w2.weight"]
    assert bank.owner == "converter convert_mixtral"


def without(folder, name):
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return open_manifest(folder)


def test_every_absent_tensor_is_missing(tmp_path):
    made, _ = written(tmp_path, "gpt2")
    without(tmp_path / "hf", "ln_f.bias")
    found = map_hub(made, without(tmp_path / "hf", "wte.weight"))
    assert found.missing == ("token_embedding/embeddings", "layer_norm/beta")
    assert any("'wte.weight'" in note for note in found.notes)


def test_a_converter_that_needs_an_absent_tensor(tmp_path):
    made, _ = written(tmp_path, "mixtral")
    name = "model.layers.0.block_sparse_moe.experts.1.w1.weight"
    with pytest.raises(UnsupportedError, match=r"experts.1.w1.weight', which the checkpoint lacks"):
        map_hub(made, without(tmp_path / "hf", name))


def test_a_shape_that_differs(tmp_path):
    made, manifest = written(tmp_path, "gpt2")
    manifest.tensors["wte.weight"] = dataclasses.replace(manifest.tensors["wte.weight"], shape=(24, 64))
    (mismatch,) = map_hub(made, manifest).mismatched
    assert (mismatch.tensor, mismatch.expected, mismatch.found) == ("wte.weight", (48, 32), (24, 64))


def test_a_converter_that_cannot_reshape(tmp_path):
    made, manifest = written(tmp_path, "gpt2")
    name = "h.0.attn.c_attn.weight"
    manifest.tensors[name] = dataclasses.replace(manifest.tensors[name], shape=(32, 95))
    with pytest.raises(MismatchError, match=r"to GPT2Backbone with .*convert_gpt2: .*correct config.json"):
        map_hub(made, manifest)


def test_a_quantised_model_is_told_the_way_out(tmp_path):
    made, manifest = written(tmp_path, "gpt2")
    getattr(made, "backbone", made).enable_lora(2)
    with pytest.raises(UnsupportedError, match="then call quantize"):
        map_hub(made, manifest)


def test_recording_takes_no_memory(tmp_path):
    """Thousands of times the tensor's real size declared: nothing of it is touched, in Python's heap or beside it."""
    made, manifest = written(tmp_path, "qwen3_moe")
    map_hub(made, manifest)  # imports and caches are no cost of a tensor
    name = "model.layers.0.mlp.experts.{}.{}_proj.weight"
    sizes = {"gate": (1 << 18, 1 << 14), "up": (1 << 18, 1 << 14), "down": (1 << 14, 1 << 18)}
    for part, shape in ((name.format(n, part), shape) for n in range(3) for part, shape in sizes.items()):
        manifest.tensors[part] = dataclasses.replace(manifest.tensors[part], shape=shape)
    assert sum(manifest.tensors[name.format(n, part)].nbytes for n in range(3) for part in sizes) == 144 << 30
    Path("/proc/self/clear_refs").write_text("5")  # the resident peak starts anew from here
    before = status("VmRSS")
    tracemalloc.start()
    mismatched = map_hub(made, manifest).mismatched
    traced = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The experts' matrices, transposed, joined and stacked: computed, so they are new arrays.
    assert [m.found for m in mismatched] == [(3, 1 << 14, 1 << 19), (3, 1 << 18, 1 << 14)]
    assert traced < 16 << 20
    assert status("VmHWM") - before < 32 << 20


def converted(tmp_path, monkeypatch, hook):
    """GPT-2 whose converter passes one tensor through ``hook``: what is loaded for it, and what is noted."""
    made, manifest = written(tmp_path, "gpt2", "float32")
    weight = getattr(made, "backbone", made).token_embedding.embeddings

    def convert(target, loader, config):
        loader.port_weight(weight, "wte.weight", hook_fn=lambda x, _: hook(x))

    monkeypatch.setattr(kerashub.converter(manifest), "convert_weights", convert)
    found = map_hub(made, manifest)
    fill(found, manifest)
    return read_tensor(manifest, "wte.weight"), np.asarray(current_value(weight)), " ".join(found.notes)


CASTS = {
    "astype": lambda x: x.astype("float16"),
    "asarray": lambda x: np.asarray(x, np.float16),
    "array": lambda x: np.array(x, "float16"),
    "keras.ops.cast": lambda x: keras.ops.cast(x, "float16"),
}


@pytest.mark.parametrize("hook", CASTS.values(), ids=CASTS)
def test_a_cast_alone_leaves_the_values_as_they_are(hook, tmp_path, monkeypatch):
    stored, found, notes = converted(tmp_path, monkeypatch, hook)
    assert found.tobytes() == stored.tobytes() and "rounds" not in notes


def test_a_converter_that_computes_with_rounded_values_is_followed_and_noted(tmp_path, monkeypatch):
    stored, found, notes = converted(tmp_path, monkeypatch, lambda x: x.astype("float16") * np.float16(3))
    np.testing.assert_array_equal(found, (stored.astype("float16") * np.float16(3)).astype("float32"))
    assert "KerasHub's converter rounds 'wte.weight' to float16" in notes


@pytest.mark.parametrize(
    ("raised", "kind", "match"),
    [
        (ModuleNotFoundError("No module named 'gone'", name="gone"), MissingExtraError, "package 'gone', which is not"),
        (ImportError("cannot import name 'x' from 'keras_hub'", name="keras_hub"), MissingExtraError, "reinstall"),
        (OSError(24, "Too many open files"), LimitError, "ulimit -n 4096"),
        (RuntimeError("odd"), MismatchError, "Cannot convert .*: odd"),
    ],
)
def test_a_converter_that_cannot_run_here_says_nothing_about_the_model(raised, kind, match, tmp_path):
    save_file({"a": np.zeros(1, "float32")}, tmp_path / "model.safetensors")

    def convert(target, loader, config):
        raise raised

    with pytest.raises(kind, match=match):
        record(Run(convert, object(), open_manifest(tmp_path / "model.safetensors"), None))
