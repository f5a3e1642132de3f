"""Inside `abstract()`, Keras reads the signature of each class once, and layers are what they are outside."""

import inspect

import keras
import pytest

import shardload


class Scaled(keras.layers.Layer):
    """A layer that Keras serialises from the arguments of its constructor."""

    def __init__(self, factor, *, offset=0.5, **options):
        super().__init__(**options)

    def call(self, inputs, training=None):
        return inputs


def made():
    return [Scaled(2.0, name="a"), Scaled(3.0, offset=1.0, name="b"), keras.layers.Dense(4, name="c")]


def test_configurations_and_call_signatures_are_those_of_outside():
    outside = made()
    with shardload.abstract():
        inside = made()
    for one, other in zip(inside, outside, strict=True):
        assert one.get_config() == other.get_config()
        assert one.call_signature_parameters == other.call_signature_parameters
        assert one.__class__.from_config(one.get_config()).get_config() == other.get_config()


def test_each_signature_is_read_once(monkeypatch):
    read = []
    look = inspect.signature

    def counted(subject, **options):
        read.append(subject)
        return look(subject, **options)

    monkeypatch.setattr(inspect, "signature", counted)
    with shardload.abstract():
        first, _ = Scaled(1.0), read.clear()
        [Scaled(float(i)) for i in range(20)]
    assert not read and first.built is False
    with pytest.raises(TypeError, match="factor"), shardload.abstract():
        Scaled()
