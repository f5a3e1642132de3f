"""Adapters of PEFT, merged while a base model is read: as PyTorch and PEFT compute, on any mesh."""

import json
import re
import shutil

import gguf_from_folder
import ml_dtypes
import numpy as np
import peft_folders
import pytest
from safetensors.numpy import load_file, save_file
from transformers_cross import adapters, folders, running

import shardload
from shardload.errors import MismatchError, ShardloadError, SourceError, UnsupportedError, UsageError
from shardload.resolve.adapters import open_adapters, with_adapters
from shardload.resolve.opening import open_source
from shardload.transfer.read_tensor import read_rows, read_tensor

FIXTURES = folders.read_family(adapters.FAMILY, adapters.FIXTURES)
MESHES = ("1x8", "2x4", "1x3", "1x1")


def given(fixture, made):
    """The argument ``adapter`` of a case."""
    weights = fixture["weights"]
    return made[0] if len(made) == 1 else dict(zip(made, weights, strict=True))


@pytest.fixture
def built(tmp_path):
    return lambda name: adapters.build(FIXTURES[name], tmp_path)


@pytest.fixture
def llama(built):
    base, [adapter] = built("llama, every linear")
    return base, adapter


def opened(base, adapter, dtype=None):
    pairs = adapter.items() if isinstance(adapter, dict) else [(adapter, 1.0)]
    return with_adapters(open_source(base, None), open_adapters(pairs), dtype=dtype).manifest


def edited(folder, **settings):
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))
    return folder


def with_tensors(folder, change):
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.parametrize("name", FIXTURES)
def test_merged_weights_are_those_of_peft(name, built):
    """In float32, within the order of a product's sum: PEFT adds the same product to the same weight."""
    fixture = FIXTURES[name]
    base, made = built(name)
    manifest, plain = opened(base, given(fixture, made), "float32"), open_source(base, None).manifest
    changed = set()
    for key, tensor in manifest.tensors.items():
        value = read_tensor(manifest, key).astype("float32")
        if not np.array_equal(value, read_tensor(plain, key).astype("float32")):
            changed.add(key)
        if (wanted := fixture["merged"].get(key)) is not None:
            assert list(tensor.shape) == wanted["shape"]
            sample = value.ravel()[folders.positions(value.size)]
            np.testing.assert_allclose(sample, wanted["sample"], rtol=2e-7, atol=2e-7 * wanted["scale"])
    stored = {key for key in fixture["merged"] if key in manifest.tensors}
    assert changed == stored and stored


@pytest.mark.parametrize(("name", "mesh"), [(name, MESHES[i % 4]) for i, name in enumerate(FIXTURES)])
def test_a_merged_model_computes_what_peft_does(name, mesh, built):
    fixture = FIXTURES[name]
    base, made = built(name)
    model = shardload.load(base, mesh=mesh, dtype="float32", adapter=given(fixture, made))
    found = running.compare(model, fixture)
    assert found.kind == "equal", found
    notes = shardload.report(model).notes
    assert any("merged into" in note and "float32" in note for note in notes)


@pytest.mark.parametrize("name", ["llama, ranks and alphas", "gemma2, every linear", "gpt2, transposed"])
def test_a_gguf_file_of_the_base_is_merged_too(name, built, tmp_path):
    """Its queries and keys are in another order (Llama), and its matrices transposed (GPT-2), as the loader undoes."""
    base, made = built(name)
    file = gguf_from_folder.write(base, tmp_path / "model.gguf", kind="F32")
    model = shardload.load(file, mesh="1x3", dtype="float32", adapter=given(FIXTURES[name], made))
    found = running.compare(model, FIXTURES[name])
    assert found.kind == "equal", found


@pytest.mark.parametrize("mesh", MESHES[:3])
def test_any_mesh_gets_the_same_bits(llama, mesh):
    base, adapter = llama
    one, other = (shardload.load(base, mesh=m, dtype="bfloat16", adapter=adapter) for m in ("1x1", mesh))
    for a, b in zip(one.get_weights(), other.get_weights(), strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sums_are_rounded_once(llama, dtype):
    base, adapter = llama
    manifest, plain = opened(base, adapter, dtype), open_source(base, None).manifest
    factors = load_file(adapter / "adapter_model.safetensors")
    module = "model.layers.0.mlp.down_proj"
    a, b = (factors[f"base_model.model.{module}.lora_{x}.weight"].astype("float64") for x in "AB")
    exact = read_tensor(plain, f"{module}.weight").astype("float64") + 2.0 * (b @ a)
    found = read_tensor(manifest, f"{module}.weight")
    # The values of fixtures are short enough for float32 to compute with them exactly.
    np.testing.assert_array_equal(found, exact.astype(getattr(ml_dtypes, dtype, dtype)))


def test_rows_do_not_depend_on_where_a_read_begins(tmp_path):
    rng = np.random.default_rng(0)
    base = shutil.copytree(adapters.build(FIXTURES["llama, ranks and alphas"], tmp_path)[0], tmp_path / "b")
    config = json.loads((base / "config.json").read_text())
    config |= {"vocab_size": 333}
    (base / "config.json").write_text(json.dumps(config))
    tensors = load_file(base / "model.safetensors")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        tensors[name] = rng.normal(size=(333, 32)).astype("float32")
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    adapter = edited(tmp_path / "adapter0", rank_pattern={}, alpha_pattern={}, r=7, modules_to_save=None)
    stored = {"lm_head.lora_A.weight": (7, 32), "lm_head.lora_B.weight": (333, 7)}
    stored |= {"model.embed_tokens.lora_embedding_A": (7, 333), "model.embed_tokens.lora_embedding_B": (32, 7)}
    made = {f"base_model.model.{name}": rng.normal(size=shape).astype("float32") for name, shape in stored.items()}
    save_file(made, adapter / "adapter_model.safetensors")
    manifest = opened(base, adapter)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        whole = read_tensor(manifest, name)
        for start, stop in ((0, 1), (63, 65), (64, 128), (100, 333), (332, 333), (5, 5)):
            assert read_rows(manifest.tensors[name], start, stop).tobytes() == whole[start:stop].tobytes()


def test_the_base_of_another_size_is_refused(built, tmp_path):
    _, [adapter] = built("llama, every linear")
    other = folders.build(folders.read_family("llama")["llama, untied"], tmp_path / "other")
    with pytest.raises(MismatchError, match=r"shape.*that of the base has.*trained on 'example/llama'"):
        shardload.load(other, adapter=adapter)


def test_the_base_of_another_family_is_refused(built, tmp_path):
    _, [adapter] = built("llama, every linear")
    other = folders.build(folders.read_family("gpt2")["gpt2, tied"], tmp_path / "other")
    with pytest.raises(MismatchError, match=r"it changes 'model.layers.0.*', and the base lacks it"):
        shardload.load(other, adapter=adapter)


def test_a_base_of_another_name_is_a_note(llama):
    base, adapter = llama
    notes = shardload.report(shardload.load(base, adapter=adapter)).notes
    assert any("was trained on 'example/llama': its shapes fit, but names differ" in note for note in notes)
    edited(adapter, base_model_name_or_path=f"someone/{base.name}")
    assert not any("trained on" in note for note in shardload.report(shardload.load(base, adapter=adapter)).notes)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"peft_type": "IA3"}, UnsupportedError, "peft_type='IA3', expected 'LORA'"),
        ({"peft_type": None}, UnsupportedError, "peft_type=None"),
        ({"use_dora": True}, UnsupportedError, "sets use_dora=True, which is not supported"),
        ({"a_new_setting": 3}, UnsupportedError, "sets a_new_setting=3, which is not supported"),
        ({"init_lora_weights": "pissa"}, UnsupportedError, "init_lora_weights='pissa'"),
        ({"lora_bias": True}, UnsupportedError, "lora_bias=True"),
        ({"layer_replication": [[0, 4], [2, 5]]}, UnsupportedError, "layer_replication"),
        ({"target_parameters": ["experts.gate_up_proj"]}, UnsupportedError, "target_parameters"),
        ({"alpha_pattern": {"(a+)+$": 3}}, UnsupportedError, "alpha_pattern"),
        ({"bias": "some"}, UnsupportedError, "bias='some'"),
        ({"lora_alpha": float("nan")}, SourceError, "lora_alpha=nan, expected a finite number"),
        ({"lora_alpha": "16"}, SourceError, "lora_alpha='16', expected a finite number"),
        ({"lora_alpha": True}, SourceError, "lora_alpha=True, expected a finite number"),
        ({"alpha_pattern": {"q_proj": float("inf")}}, SourceError, r"alpha_pattern\['q_proj'\]=inf"),
        ({"r": 0}, SourceError, "r=0, expected a positive whole number"),
        ({"r": 4}, SourceError, r"states the rank 4"),
        ({"rank_pattern": {"v_proj": 1}}, SourceError, r"'model.layers.0.self_attn.v_proj'.*states the rank 1"),
        ({"rank_pattern": [3]}, SourceError, "rank_pattern=.*expected an object"),
        ({"use_rslora": "yes"}, SourceError, "use_rslora='yes', expected true or false"),
        ({"fan_in_fan_out": True}, UnsupportedError, "fan_in_fan_out=True does not fit"),
    ],
)
def test_settings_that_are_not_known_are_refused(llama, settings, error, says):
    base, adapter = llama
    with pytest.raises(error, match=says):
        shardload.load(base, adapter=edited(adapter, **settings))


Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda t: t.pop(f"{Q}.lora_A.weight"), SourceError, "has one factor only, without the tensor .*lora_A"),
        (lambda t: t.pop(f"{Q}.lora_B.weight"), SourceError, "has one factor only, without the tensor .*lora_B"),
        (lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((2, 48), "f4")}), SourceError, "expected \\(3, in\\)"),
        (lambda t: t.update({f"{Q}.lora_A.weight": np.zeros(3, "f4")}), SourceError, "expected matrices"),
        (
            lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((3, 7), "f4")}),
            MismatchError,
            "are for a weight of shape",
        ),
        (lambda t: t.update({f"{Q}.lora_A.weight": np.zeros((3, 48), "i4")}), SourceError, "stored as int32"),
        (lambda t: t.update({f"{Q}.lora_magnitude_vector": np.zeros(48, "f4")}), UnsupportedError, "not a factor"),
        (lambda t: t.update({"model.layers.0.x": np.zeros(1, "f4")}), SourceError, "does not begin with 'base_model"),
        (lambda t: t.update({"base_model.model.../../etc.weight": np.zeros(1, "f4")}), MismatchError, "lacks it"),
        (lambda t: t.update({f"{Q}.bias": np.zeros(5, "f4")}), MismatchError, "the base lacks it"),
        (lambda t: t.clear(), SourceError, "has no tensors"),
        (
            lambda t: (
                t.update({"base_model.model.conv.lora_A.weight": np.zeros((3, 2, 1, 1), "f4")})
                or t.update({"base_model.model.conv.lora_B.weight": np.zeros((4, 3, 1, 1), "f4")})
            ),
            UnsupportedError,
            "is a convolution",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(llama, change, error, says):
    base, adapter = llama
    with pytest.raises(error, match=says):
        shardload.load(base, adapter=with_tensors(adapter, change))


def test_adapters_of_tied_embeddings_are_refused(built, tmp_path):
    """PEFT adds them to the embedding only, but a merge also changes the output layer."""
    base = folders.build(folders.read_family("llama")["llama, tied"], tmp_path / "tied")
    _, [adapter] = built("llama, embedding and head")
    with pytest.raises(UnsupportedError, match=r"the embedding or the output layer of .*, which are one tensor"):
        shardload.load(base, adapter=adapter)
    linear = peft_folders.write(tmp_path / "linear", base, ("embed_tokens",))  # by the names of a linear layer
    with pytest.raises(UnsupportedError, match=r"the embedding or the output layer of .*, which are one tensor"):
        shardload.load(base, adapter=linear)


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_damaged_files_are_refused(llama, file):
    base, adapter = llama
    content = (adapter / file).read_bytes()
    (adapter / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(SourceError, match=file):
        shardload.load(base, adapter=adapter)
    (adapter / file).unlink()
    with pytest.raises(ShardloadError, match=file):
        shardload.load(base, adapter=adapter)


def test_a_pickle_of_an_adapter_says_how_to_convert_it(llama):
    base, adapter = llama
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(
        UnsupportedError, match=r"adapter_model\.bin: .* pickle .* Convert it .*adapter_model\.safetensors"
    ):
        shardload.load(base, adapter=adapter)


def test_another_place_than_the_folder_of_an_adapter_says_which_to_pass(llama, tmp_path):
    base, adapter = llama
    for name in ("facts", "style"):
        shutil.copytree(adapter, tmp_path / "named" / name)
    for place, says in (
        (
            tmp_path / "named",
            f"2 adapters, expected one. Pass one of them: {tmp_path}/named/facts, {tmp_path}/named/style",
        ),
        (adapter / "adapter_model.safetensors", f"it is a file, expected its folder. Pass {adapter}"),
    ):
        with pytest.raises(SourceError, match=re.escape(says)):
            shardload.load(base, adapter=place)


def test_a_config_that_is_too_large_is_refused(llama):
    base, adapter = llama
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "x": "' + "a" * (33 << 20) + '"}')
    with pytest.raises(SourceError, match="description has at most"):
        shardload.load(base, adapter=adapter)


@pytest.mark.parametrize("wrong", [3, [], {}, [3], "", {"a": "b"}, {"a": float("nan")}])
def test_arguments_of_the_wrong_kind_are_refused(llama, wrong):
    with pytest.raises(UsageError, match="adapter"):
        shardload.load(llama[0], adapter=wrong)


def test_two_adapters_cannot_replace_one_tensor(built, tmp_path):
    base, [adapter] = built("llama, modules_to_save")
    again = shutil.copytree(adapter, tmp_path / "again")
    with pytest.raises(UnsupportedError, match=r"two adapters replace 'lm_head.weight'"):
        shardload.load(base, adapter=[adapter, again])
    with pytest.raises(UnsupportedError, match="which cannot be weighted"):
        shardload.load(base, adapter={adapter: 0.5})
