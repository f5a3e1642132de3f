"""KerasHub preset folders: backbone and head from their own files."""

import keras_hub
import models
import pytest
from by_hand import check_same, fill, lay_out, mesh

from shardload.keras_bridge.model_state import optimizer_variables_of
from shardload.loaders import open_manifest
from shardload.mapping import map_weights


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
