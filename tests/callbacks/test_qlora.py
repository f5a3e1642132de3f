"""LoRA on quantised bases: trained, killed, resumed, restored on another mesh, written for PEFT, merged."""

import itertools

import numpy as np
import pytest
import warm_start
from qlora_child import X, Y, qlora_model
from transformers_cross import folders

import shardload
from shardload.errors import UnsupportedError
from shardload.keras_bridge.lora import lora_layers

pytestmark = pytest.mark.filterwarnings("ignore:Layer .* does not have a `quantize` method")
BASES = {"int8": ("gemma2", "gemma2, 1 KV head"), "int4": ("llama", "llama, 3 KV heads")}


def base_of(mode, folder):
    family, name = BASES[mode]
    return folders.build(folders.read_family(family)[name], folder / "base")


def trainable(model):
    return [np.asarray(v.value) for v in model.trainable_variables]


@pytest.mark.parametrize("mesh", ["1x8", "2x4", "1x3"])
@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_adapters_on_a_quantised_base_learn(mode, mesh, tmp_path):
    model = qlora_model(base_of(mode, tmp_path), mode, mesh)
    before = {id(v): np.asarray(v.value) for v in model.weights}
    losses = model.fit(X, Y, batch_size=8, epochs=6, verbose=0, shuffle=False).history["loss"]
    assert all(b < a for a, b in itertools.pairwise(losses)), losses
    changed = {v.path.rpartition("/")[2] for v in model.weights if not np.array_equal(before[id(v)], v.value)}
    assert changed == {"lora_kernel_a", "lora_kernel_b"}


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "mesh", "other"), [("int8", "1x8", "2x4"), ("int4", "2x4", "1x8")])
def test_a_killed_run_goes_on_and_is_restored_and_merged(mode, mesh, other, tmp_path):
    base = base_of(mode, tmp_path)
    command = ["-m", "qlora_child"]
    assert warm_start.run([*command, tmp_path / "run", base, mode, mesh, "4", "kill"]).returncode == -9
    for run in ("run", "whole"):
        warm_start.run([*command, tmp_path / run, base, mode, mesh, "4"], check=True)
    resumed, whole, elsewhere = (qlora_model(base, mode, m) for m in (mesh, mesh, other))
    shardload.restore(resumed, tmp_path / "run")
    shardload.restore(whole, tmp_path / "whole")
    report = shardload.restore(elsewhere, tmp_path / "run")
    assert any("the step is partial" in note for note in report.notes)
    for found in (resumed, elsewhere):
        assert all(a.tobytes() == b.tobytes() for a, b in zip(trainable(found), trainable(whole), strict=True))
    # Merged into the base as it was before it was quantised.
    with pytest.raises(UnsupportedError, match=r"is quantised .*to='peft'"):
        shardload.save_as(elsewhere, tmp_path / "merged", to="safetensors", merge_lora=True)
    shardload.save_as(elsewhere, tmp_path / "adapter", to="peft")
    shardload.convert(base, tmp_path / "merged", to="safetensors", adapter=tmp_path / "adapter")
    merged = shardload.load(tmp_path / "merged", mesh="1x3", dtype="float32")
    kept = shardload.load(base, mesh=mesh, dtype="float32")
    kept.backbone.enable_lora(2)
    for variable, value in zip(kept.trainable_variables, trainable(whole), strict=True):
        variable.assign(value)
    one, two = (model.predict(X, batch_size=8, verbose=0) for model in (merged, kept))
    np.testing.assert_allclose(one, two, atol=2e-5 * np.abs(two).max())


def test_an_adapter_of_peft_is_put_onto_a_quantised_model(tmp_path):
    base = base_of("int8", tmp_path)
    trained = qlora_model(base, "int8", "1x8")
    trained.fit(X, Y, batch_size=8, epochs=2, verbose=0, shuffle=False)
    shardload.save_as(trained, tmp_path / "adapter", to="peft")
    model = shardload.load(base, mesh="2x4", dtype="float32")
    model.preprocessor = None
    model.quantize("int8")
    with pytest.raises(UnsupportedError, match="which is quantised"):
        shardload.load_adapter(model, tmp_path / "adapter", merge=True)
    shardload.load_adapter(model, tmp_path / "adapter")
    # Not their outputs: a last bit decides to which int8 an activation is rounded.
    one, two = (lora_layers(m) for m in (model, trained))
    for a, b in zip(one, two, strict=True):
        assert a.lora_rank == b.lora_rank == 2 and a.lora_alpha == b.lora_alpha
        np.testing.assert_allclose(*(layer.lora_kernel_a @ layer.lora_kernel_b for layer in (a, b)), atol=1e-6)
