"""Which Hugging Face tensors variables make up: every element once, of one dtype."""

import json
from types import SimpleNamespace

import keras
import keras_hub
import numpy as np
import pytest

import shardload
from shardload.converting.hugging_face_copy import in_dtype
from shardload.converting.transformers import covers, wanted
from shardload.errors import UnsupportedError
from shardload.manifest import Extent, Tensor, View
from shardload.stores.local import located
from shardload.synth import synth

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
    assert covers(bindings, FUSED) == whole


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
