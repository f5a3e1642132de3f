"""A model with an attribute named `backbone` is no task of KerasHub, and is treated as any other model."""

import keras
import numpy as np
import pytest

import shardload
from shardload.errors import MismatchError


class Plain(keras.Model):
    def __init__(self, **named):
        super().__init__(**named)
        self.backbone = keras.Sequential([keras.layers.Dense(4), keras.layers.Dense(4)])
        self.head = keras.layers.Dense(2)

    def build(self, shape):
        self.backbone.build(shape)
        self.head.build((None, 4))

    def call(self, x):
        return self.head(self.backbone(x))


@keras.saving.register_keras_serializable("test_backbone_of")
class Described(Plain):
    def get_config(self):
        return {"name": self.name}


def made(cls):
    model = cls()
    model.build((None, 3))
    return model


def equal(one, two):
    pairs = zip(one.weights, two.weights, strict=True)
    return all(np.asarray(a.value).tobytes() == np.asarray(b.value).tobytes() for a, b in pairs)


@pytest.mark.parametrize("cls", [Plain, Described])
def test_it_goes_to_a_file_and_a_step_and_comes_back(cls, tmp_path):
    model = made(cls)
    shardload.save_as(model, tmp_path / "m.weights.h5")
    by_keras, by_us, restored, fast = (made(cls) for _ in range(4))
    by_keras.load_weights(tmp_path / "m.weights.h5")
    shardload.load_weights(by_us, tmp_path / "m.weights.h5", mesh="1x8", layout="auto")
    with shardload.fast():
        fast.load_weights(tmp_path / "m.weights.h5")
    shardload.save(model, tmp_path / "steps", step=1)
    shardload.restore(restored, tmp_path / "steps")
    assert all(equal(model, other) for other in (by_keras, by_us, restored, fast))


def test_its_description_goes_along(tmp_path):
    model = made(Described)
    report = shardload.save_as(model, tmp_path / "m.weights.h5")
    assert not [note for note in report.notes if "cannot describe" in note]
    assert equal(shardload.load(tmp_path / "m.weights.h5"), model)
    shardload.save(model, tmp_path / "steps", step=1)
    shardload.convert(tmp_path / "steps", tmp_path / "c.weights.h5")
    assert equal(shardload.load(tmp_path / "c.weights.h5"), model)


def test_a_preset_for_a_model_that_holds_a_backbone_names_it(tmp_path):
    import keras_hub

    sizes = {"vocabulary_size": 20, "num_layers": 1, "num_heads": 2, "hidden_dim": 8, "intermediate_dim": 8}
    saved, held = (keras_hub.models.BertBackbone(**sizes, max_sequence_length=4) for _ in range(2))
    saved.save_to_preset(tmp_path)
    model = keras.Sequential([keras.layers.Dense(2, name="head")])
    model.build((None, 8))
    model.encoder = held
    with pytest.raises(MismatchError, match=r"The preset has the weights of a backbone.*: pass model\.encoder\."):
        shardload.load_weights(model, tmp_path)
    shardload.load_weights(model.encoder, tmp_path)
    assert equal(saved, held)
