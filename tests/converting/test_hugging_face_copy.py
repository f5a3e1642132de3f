"""From Hugging Face to Hugging Face: the same tensors, the same files, whatever the model is."""

import inspect
import json
import re
import shutil
from types import SimpleNamespace

import hub_nested
import keras
import keras_hub
import ml_dtypes
import numpy as np
import pytest
import quantised_folders
from conversions import held
from keras_hub.src.utils.transformers import preset_loader
from safetensors import deserialize
from safetensors.numpy import load_file, save_file
from transformers_cross import folders

import shardload
from shardload.converting.hugging_face_copy import in_dtype
from shardload.converting.transformers import covers, wanted
from shardload.errors import SourceError, UnsupportedError, UsageError
from shardload.manifest import Extent, Tensor, View
from shardload.stores.local import located
from shardload.synth import synth

WRITTEN = sorted(path.name.removesuffix(".json.gz") for path in folders.FIXTURES.iterdir())
"""Families of which there are folders that `transformers` wrote."""
OTHERS = {"gemma3n", "gemma4_assistant", "sam3_video"}
"""Families of which there are none."""
KINDS = r", (base model|tied|untied|classifier|masked LM|sharded|fp8 without scales|images?|moe)$|stored|inv_freq"
"""Cases that every run has; ``--every-folder`` has all of them."""
SMALL = {
    "generation_config.json": b'{"eos_token_id": [1, 106],\r\n "temperature": 1.0}',
    "tokenizer.json": '{"model": {"vocab": {"\u2581\u00e9": 0}}}'.encode(),
    "tokenizer.model": bytes(range(256)),
    "tokenizer_config.json": b'{"z": 1, "a": 2}\n\n',
    "special_tokens_map.json": b"{}",
    "chat_template.jinja": b"{{ bos_token }}\n",
    "preprocessor_config.json": b'{"size": {"height": 224}}',
    "processor_config.json": b'{"image_seq_length": 256}',
    "modules.json": b"[]",
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
    "LICENSE": b"yours\n",
}
"""What lies next to the weights."""


def tensors_of(folder):
    """Each tensor of the safetensors in a folder itself: dtype, shape and bytes."""
    found = {}
    for path in folder.glob("*.safetensors"):
        for name, entry in deserialize(path.read_bytes()):
            found[name] = entry["dtype"], tuple(entry["shape"]), bytes(entry["data"])
    return found


def small_files_of(folder):
    paths = [path for path in folder.rglob("*") if path.is_file() and not re.search(r"^model[-.]", path.name)]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def write_small_files(folder, files=SMALL):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)


def assert_copy(copy, source):
    assert tensors_of(copy) == tensors_of(source) != {}
    assert small_files_of(copy) == small_files_of(source)


def mixed(folder, config, *, name="model.safetensors", metadata=None):
    """A folder with tensors of several dtypes, one of them stored twice."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(8, 6)).astype(ml_dtypes.bfloat16)
    tensors = {"embed.weight": weight, "lm_head.weight": weight.copy(), "norm.weight": rng.normal(size=6)}
    tensors |= {"blocks.0.w": rng.normal(size=(2, 3, 4)).astype(np.float32), "codes": np.arange(7, dtype=np.uint8)}
    tensors |= {"scale": np.full((), 2, np.float16), "none": np.zeros((0, 3), np.float32)}
    save_file(tensors, folder / name, metadata=metadata)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", WRITTEN)
def test_every_folder_that_transformers_wrote_is_copied(family, tmp_path, request):
    fixtures = folders.read_family(family)
    some = [case for case in fixtures if re.search(KINDS, case)] or [*fixtures][:1]
    for i, case in enumerate(fixtures if request.config.getoption("--every-folder") else some):
        fixture = fixtures[case]
        source = folders.build(fixture, tmp_path / f"{i}")
        if "config.json" not in fixture["json"]:  # an adapter alone
            continue
        write_small_files(source, {name: SMALL[name] for name in SMALL if name not in fixture["json"]})
        assert shardload.convert(source, tmp_path / f"{i}-copy", to="safetensors").notes == (), case
        assert_copy(tmp_path / f"{i}-copy", source)


@pytest.mark.parametrize("family", sorted(OTHERS))
def test_families_without_such_folders_are_copied(family, tmp_path):
    (name,) = [name for name in hub_nested.CONFIGS if name.split()[0] == family]
    source = mixed(tmp_path / "hf", hub_nested.config_of(name))
    write_small_files(source)
    shardload.convert(source, tmp_path / "copy", to="safetensors")
    assert_copy(tmp_path / "copy", source)


def test_no_family_of_keras_hub_is_forgotten():
    compared = [line for line in inspect.getsource(preset_loader).splitlines() if "if model_type " in line]
    known = set(re.findall(r'"([\w-]+)"', "".join(compared)))
    assert len(known) > 35 and known <= {*WRITTEN, *OTHERS}


@pytest.mark.parametrize("metadata", [None, {"format": "tf", "license": "mit"}])
def test_a_single_file_keeps_what_its_header_says(metadata, tmp_path):
    source = mixed(tmp_path / "hf", {"model_type": "of nobody"}, metadata=metadata)
    shardload.convert(source, tmp_path / "copy", to="safetensors")
    assert shardload.inspect(tmp_path / "copy").metadata == (metadata or {"format": "pt"})


def test_a_copy_can_have_another_dtype(tmp_path):
    part = {"dtype": "bfloat16", "hidden_size": 6}
    source = mixed(tmp_path / "hf", {"model_type": "of nobody", "torch_dtype": "bfloat16", "audio_config": part})
    write_small_files(source, {"2_Dense/model.safetensors": (source / "model.safetensors").read_bytes()})
    report = shardload.convert(source, tmp_path / "copy", to="safetensors", dtype="float32")
    assert report.notes == ("'2_Dense/model.safetensors' copied in the dtype of the source",)
    found, wanted = held(tmp_path / "copy"), held(source)
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value if name == "codes" else np.asarray(value, np.float32))
        assert found[name].dtype == ("uint8" if name == "codes" else "float32")
    config = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert config == {"model_type": "of nobody", "torch_dtype": "float32", "audio_config": part | {"dtype": "float32"}}


def test_quantised_weights_are_copied_and_not_cast(tmp_path):
    source, _ = quantised_folders.write(tmp_path / "hf", "gptq 4", intermediate_size=96)
    shutil.rmtree(source / "plain")
    shardload.convert(source, tmp_path / "copy", to="safetensors")
    assert_copy(tmp_path / "copy", source)
    source = folders.build(folders.read_family("llama")["llama, fp8 without scales"], tmp_path / "bare")
    with pytest.raises(UnsupportedError, match=r"Cannot cast .*bare to float32: .*quantised.* Omit dtype \(--dtype\)"):
        shardload.convert(source, tmp_path / "cast", to="safetensors", dtype="float32")


def test_weights_next_to_the_checkpoint(tmp_path):
    """What belongs to it is copied, what is another checkpoint is named."""
    source = mixed(tmp_path / "hf", {"model_type": "of nobody"})
    part = (source / "model.safetensors").read_bytes()
    write_small_files(source, {"2_Dense/model.safetensors": part, "adapter_model.safetensors": part})
    others = ("pytorch_model.bin", "checkpoint-5/model.safetensors", "original/consolidated.00.pth")
    write_small_files(source, dict.fromkeys(others, part))
    (note,) = shardload.convert(source, tmp_path / "copy", to="safetensors").notes
    assert all(repr(name) in note for name in others) and note.endswith("left out: weights outside of the checkpoint")
    copied = {path.relative_to(tmp_path / "copy").as_posix() for path in (tmp_path / "copy").rglob("*.*")}
    assert copied == {"config.json", "model.safetensors", "2_Dense/model.safetensors", "adapter_model.safetensors"}


def test_shards_in_subfolders_are_written_into_the_folder_itself(tmp_path):
    source = mixed(tmp_path / "hf", {"model_type": "x"})
    expected, stored = tensors_of(source), load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    write_small_files(source)
    placed = {name: f"{i % 2}_weights/model.safetensors" for i, name in enumerate(stored)}
    for shard in {*placed.values()}:
        (source / shard).parent.mkdir()
        save_file({name: stored[name] for name in stored if placed[name] == shard}, source / shard)
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    report = shardload.convert(source, tmp_path / "copy", to="safetensors")
    assert tensors_of(tmp_path / "copy") == expected
    assert small_files_of(tmp_path / "copy") == SMALL | {"config.json": (source / "config.json").read_bytes()}
    assert not report.notes


def test_a_part_that_is_a_link_to_a_private_file_is_refused(tmp_path):
    source = mixed(tmp_path / "hf", {"model_type": "of nobody"})
    (tmp_path / "secret").write_text("private")
    (source / "adapter_model.safetensors").symlink_to(tmp_path / "secret")
    with pytest.raises(SourceError, match=r"adapter_model\.safetensors"):
        shardload.convert(source, tmp_path / "copy", to="safetensors")


def test_tensors_are_left_out_only_on_request(tmp_path):
    source = mixed(tmp_path / "hf", {"model_type": "of nobody"})
    report = shardload.convert(source, tmp_path / "copy", to="safetensors", ignore=["lm_head.*"])
    assert report.notes == ("'lm_head.weight' left out on request",)
    assert tensors_of(source).keys() - tensors_of(tmp_path / "copy").keys() == {"lm_head.weight"}
    for pattern, match in (("nothing", r"ignore='nothing' matches no tensor"), ("*", r"ignore=\['\*'\] matches every")):
        with pytest.raises(UsageError, match=match):
            shardload.convert(source, tmp_path / "other", to="safetensors", ignore=[pattern])


def test_shards_keep_every_tensor(tmp_path):
    source = folders.build(folders.read_family("qwen3")["qwen3, sharded"], tmp_path / "hf")
    shardload.convert(source, tmp_path / "copy", to="safetensors", max_shard_bytes="8KiB")
    assert len([*(tmp_path / "copy").glob("model-*.safetensors")]) > 3
    assert_copy(tmp_path / "copy", source)


def test_elements_that_share_bytes_are_refused_before_anything_is_written(tmp_path):
    (tmp_path / "hf").mkdir()
    header = json.dumps({"w": {"dtype": "F4", "shape": [4], "data_offsets": [0, 2]}}).encode()
    (tmp_path / "hf" / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"ab")
    (tmp_path / "hf" / "config.json").write_text('{"model_type": "of nobody"}')
    with pytest.raises(UnsupportedError, match=r"Cannot copy tensor 'w' .*share a byte.*--ignore w"):
        shardload.convert(tmp_path / "hf", tmp_path / "copy", to="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


FUSED = Tensor("c_attn", (4, 6), np.dtype("f4"), Extent(located(""), 0))


def binding(offset, shape, strides):
    return SimpleNamespace(view=View("c_attn", offset, shape, strides), variable=SimpleNamespace(path="kernel"))


def third(number):
    return binding(2 * number, (4, 2), (6, 1))


@pytest.mark.parametrize(
    ("bindings", "whole"),
    [
        ([third(0), third(1), third(2)], True),
        ([third(2), binding(0, (4, 2, 2), (6, 2, 1))], True),
        ([third(0), third(1)], False),
        ([third(0), third(1), third(1)], False),
        ([third(0), third(1), third(2), third(2)], False),
        ([third(0), third(1), *[third(2)] * 257], False),
        ([third(0), third(1), binding(4, (5, 2), (6, 1))], False),
        ([third(0), third(1), binding(4, (4, 2), (0, 1))], False),
        ([binding(0, (6, 4), (1, 6))], True),
        ([third(0)], False),
        ([], False),
    ],
)
def test_every_element_comes_from_somewhere_once(bindings, whole):
    assert covers([binding.view for binding in bindings], FUSED) == whole


def test_a_tensor_of_two_dtypes_is_refused():
    one, two = third(0), third(1)
    same = {id(one.variable): np.dtype("f4"), id(two.variable): np.dtype("f4")}
    assert wanted([one, two], {"c_attn": FUSED}, same)["c_attn"].shape == (4, 6)
    with pytest.raises(
        UnsupportedError, match=r"'c_attn' for Hugging Face: its variables are float32 and float16.*--dtype"
    ):
        wanted([one, two], {"c_attn": FUSED}, {**same, id(two.variable): np.dtype("f2")})


@keras.saving.register_keras_serializable("test_convert_transformers")
class Shift(keras.layers.Layer):
    def build(self, shape):
        self.by = self.add_weight(shape=shape[1:], dtype="int32", initializer="ones", trainable=False)

    def call(self, x):
        return x + keras.ops.cast(self.by, x.dtype)


def test_a_model_of_whole_numbers_is_refused(tmp_path):
    x = keras.Input((4,))
    model = keras_hub.models.Backbone(inputs=x, outputs=Shift()(x))
    with pytest.raises(
        UnsupportedError, match=r"Cannot write Backbone for Hugging Face.*floating-point.*format preset or"
    ):
        shardload.save_as(model, tmp_path / "out", to="safetensors")


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_configuration_states_the_dtype_under_its_own_key(key, tmp_path):
    source = synth("qwen3_0.6b", scale=0.02, directory=tmp_path, format="safetensors")
    config = json.loads((source / "config.json").read_text())
    del config["torch_dtype"]
    (source / "config.json").write_text(json.dumps({**config, key: "bfloat16"}))
    shardload.convert(source, tmp_path / "converted", to="safetensors", dtype="float32")
    shardload.save_as(shardload.load(source, dtype="float32"), tmp_path / "saved", to="safetensors")
    for made in ("converted", "saved"):
        found = json.loads((tmp_path / made / "config.json").read_text())
        assert {name: found[name] for name in ("dtype", "torch_dtype") if name in found} == {key: "float32"}


def test_a_part_of_a_configuration_states_the_dtype_as_well():
    config = {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}}
    assert in_dtype(config, "float32") == {"dtype": "float32", "text_config": {"torch_dtype": "float32"}}
    assert in_dtype({"text_config": None}, "float32") == {"text_config": None}
