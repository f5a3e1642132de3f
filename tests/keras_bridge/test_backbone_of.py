"""A model with an attribute named `backbone` is no task of KerasHub, and is treated as any other model."""

import keras
import numpy as np
import pytest

import shardload


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
