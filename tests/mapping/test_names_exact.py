"""Bare files: exact names only. KerasHub preset folders: backbone and head from their own files."""

import keras
import keras_hub
import models
import numpy as np
import pytest
from by_hand import check_same, fill, lay_out, mesh
from keras import layers
from safetensors.numpy import save_file

from shardload.errors import MismatchError
from shardload.keras_bridge.model_state import optimizer_variables_of
from shardload.loaders import open_manifest
from shardload.mapping import map_weights
from shardload.mapping.by_name_or_order import map_by_name


def model(names=("a", "a_1"), *, use_bias=True):
    inputs = keras.Input((8,))
    x = inputs
    for name in names:
        x = layers.Dense(8, use_bias=use_bias, name=name)(x)
    return keras.Model(inputs, x)


def by_path(source):
    return {
        v.path: np.random.default_rng(n).normal(size=v.shape).astype("float32") for n, v in enumerate(source.weights)
    }


def stored(tmp_path, tensors):
    save_file(tensors, tmp_path / "x.safetensors")
    return open_manifest(tmp_path / "x.safetensors")


def filled(target, tensors):
    for v in target.weights:
        v.assign(tensors[v.path])
    return target


def test_variable_paths(tmp_path):
    tensors = by_path(model())
    manifest = stored(tmp_path, tensors)
    target = lay_out(model(), mesh())
    found = map_weights(target, manifest)
    assert len(found.bindings) == 4 and not found.missing and not found.unused
    fill(found, manifest)
    check_same(target, filled(model(), tensors))


def test_structural_keys(tmp_path):
    source = filled(model(), by_path(model()))
    keys = [f"layers/{d}/vars/{n}" for d in ("dense", "dense_1") for n in (0, 1)]
    manifest = stored(tmp_path, {k: np.asarray(v) for k, v in zip(keys, source.weights, strict=True)})
    target = model()
    fill(map_by_name(target, manifest), manifest)
    check_same(target, source)


def test_an_explicit_map(tmp_path):
    tensors = by_path(model())
    renamed = {f"x.{n}": t for n, t in enumerate(tensors.values())}
    manifest = stored(tmp_path, renamed)
    target = model()
    fill(map_by_name(target, manifest, names=dict(zip(renamed, tensors, strict=True))), manifest)
    check_same(target, filled(model(), tensors))


def test_likeness_is_not_enough(tmp_path):
    manifest = stored(tmp_path, {"model/a/kernel": np.ones((8, 8), "float32"), "A/bias": np.ones(8, "float32")})
    found = map_by_name(model(), manifest)
    assert not found.bindings and len(found.missing) == 4 and len(found.unused) == 2


def test_shapes_that_differ(tmp_path):
    found = map_by_name(model(), stored(tmp_path, {"a/kernel": np.ones((8, 9), "float32")}))
    assert str(found.mismatched[0]) == "Variable 'a/kernel' has shape (8, 8), but tensor 'a/kernel' has shape (8, 9)"
    assert "a/kernel" not in found.missing


def shared_path():
    """Two variables of the same path."""
    target = model(("a", "b"))
    target.layers[2].kernel._path = "a/kernel"
    return target


def test_a_path_of_two_variables_is_refused(tmp_path):
    manifest = stored(tmp_path, {"a/kernel": np.ones((8, 8), "float32")})
    with pytest.raises(MismatchError, match="2 variables share the path 'a/kernel'"):
        map_by_name(shared_path(), manifest)


def test_structural_keys_tell_equal_paths_apart(tmp_path):
    shared_path().save_weights(tmp_path / "m.weights.h5")
    found = map_weights(shared_path(), open_manifest(tmp_path / "m.weights.h5"))
    assert sorted(b.name for b in found.bindings) == ["a/bias", "a/kernel", "a/kernel#2", "b/bias"]


@pytest.mark.parametrize(
    ("tensors", "names", "message"),
    [
        (["q"], {"q": "no/such"}, "no variable with that path"),
        (["q"], {"r": "a/kernel"}, "Cannot map tensor 'r': .* does not contain it"),
        (["a/kernel/value", "b/kernel"], {"a/kernel": "a/kernel"}, r"contain it\. Did you mean 'a/kernel/value'\?$"),
        (["q", "a/kernel"], {"q": "a/kernel"}, "two tensors to variable 'a/kernel': tensor"),
        (["a/kernel", "layers/dense/vars/0"], None, "tensor 'a/kernel', and the tensor of its structural key"),
    ],
)
def test_maps_that_contradict_are_refused(tensors, names, message, tmp_path):
    manifest = stored(tmp_path, {t: np.ones((8, 8), "float32") for t in tensors})
    target = model(("a",), use_bias=False)
    with pytest.raises(MismatchError, match=message):
        map_by_name(target, manifest, names=names)


def classifier():
    return keras_hub.models.BertTextClassifier(backbone=models.build("bert"), num_classes=3, preprocessor=None)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("preset") / "p"
    task = models.randomise(classifier())
    task.save_to_preset(str(path))
    return task, open_manifest(path)


def test_a_task_takes_both(saved):
    task, manifest = saved
    target = lay_out(classifier(), mesh())
    found = map_weights(target, manifest)
    assert not found.missing and not found.unused and not found.skipped and not found.mismatched
    fill(found, manifest)
    check_same(target, task)


def test_a_backbone_leaves_the_head(saved):
    task, manifest = saved
    target = models.build("bert")
    found = map_weights(target, manifest)
    assert not found.missing and not found.unused
    assert found.skipped and all(n.startswith("task:") for n in found.skipped)
    fill(found, manifest)
    check_same(target, task.backbone)


def test_a_new_head_is_missing(tmp_path):
    models.randomise(models.build("bert")).save_to_preset(str(tmp_path / "p"))
    target = classifier()
    found = map_weights(target, open_manifest(tmp_path / "p"))
    heads = {v.path for v in target.weights} - {v.path for v in target.backbone.weights}
    assert set(found.missing) == heads and not found.unused


def test_a_compiled_task_initialises_its_optimizer_later(saved):
    _, manifest = saved
    target = classifier()
    target.optimizer.build(target.trainable_variables)
    found = map_weights(target, manifest)
    slots = {id(v) for v in optimizer_variables_of(target)}
    assert slots and slots <= {id(v) for v in found.state} and not found.missing
