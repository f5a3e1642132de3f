"""Contract with Keras 3.15: what it tracks in lists and dicts of a layer's attributes, and its state per thread."""

import inspect
import threading

import keras
import pytest
from keras.src.utils.tracking import TrackedDict, TrackedList, Tracker

import shardload
from shardload.keras_bridge.model_state import members_of, without_walking_vocabularies
from shardload.keras_bridge.recording import InThread

WORDS = ["a", "b", "c"]


class Odd(type):
    """A metaclass whose classes can be neither hashed nor compared."""

    __hash__ = None

    def __eq__(cls, other):
        raise RuntimeError("not comparable")


def layer_with(**attributes):
    layer = keras.layers.Layer()
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def test_attributes_are_the_same_as_keras_makes_them():
    values = {"words": WORDS, "ids": {w: i for i, w in enumerate(WORDS)}, "none": [], "mixed": ["a", [1, "b"], None]}
    plain = layer_with(**values)
    with without_walking_vocabularies():
        quick = layer_with(**values)
    for name in values:
        assert getattr(quick, name) == getattr(plain, name)
        assert type(getattr(quick, name)) is type(getattr(plain, name))
    assert type(quick.words) is TrackedList and type(quick.ids) is TrackedDict


def test_layers_in_containers_are_tracked_inside_and_afterwards():
    inside, added, in_dict = (keras.layers.Dense(1) for _ in range(3))
    for part in (inside, added, in_dict):
        part.build((1, 1))
    with without_walking_vocabularies():
        layer = layer_with(words=WORDS, ids={"a": 1}, parts=["a", inside])
    layer.words.append(added)
    layer.ids["b"] = in_dict
    assert [id(v) for v in layer.weights] == [id(v) for part in (inside, added, in_dict) for v in part.weights]


def test_strings_are_not_asked_one_by_one():
    asked = []
    tracker = Tracker({"all": (asked.append, [])})
    with without_walking_vocabularies():
        tracker.track(WORDS)
    assert asked == [WORDS]
    tracker.track(WORDS)  # outside, Keras does
    assert asked[1:] == [WORDS, *WORDS]


def test_members_of_containers():
    part = keras.layers.Dense(1)
    odd = Odd("Of", (), {})()
    assert list(members_of(WORDS)) == list(members_of({"a": 1})) == []
    assert list(members_of(["a", part])) == list(members_of({"a": "a", "b": part})) == ["a", part]
    assert list(members_of((odd,))) == [odd]


# ---- another thread ------------------------------------------------------------------------------


def test_a_thread_counts_names_on_and_shares_settings():
    class NumberedOn(keras.layers.Layer):
        pass

    first, policy = NumberedOn().name, keras.config.dtype_policy()
    keras.config.set_dtype_policy("bfloat16")
    try:
        other = InThread(lambda: (NumberedOn().name, keras.config.dtype_policy().name), name="counting").result()
    finally:
        keras.config.set_dtype_policy(policy)
    assert (first, other, NumberedOn().name) == ("numbered_on", ("numbered_on_1", "bfloat16"), "numbered_on_2")


def test_its_error_is_raised_by_result():
    work = InThread(lambda: 1 // 0, name="dividing")
    with pytest.raises(ZeroDivisionError):
        work.result()


def test_a_thread_has_the_name_that_its_user_gives():
    assert InThread(lambda: threading.current_thread().name, name="reading").result() == "reading"


# ---- signatures, which Keras reads once inside abstract() ----------------------------------------


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
