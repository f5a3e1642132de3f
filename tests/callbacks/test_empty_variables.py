"""Variables without elements, which Orbax refuses: steps store them in their structure, and bring them back."""

import json

import jax
import keras
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1 as ocp
from saving_models import Empty, around

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import SourceError, UsageError
from shardload.keras_bridge.variables import value_of
from shardload.runs.digests import Digests
from shardload.verifying import verify

DATA = np.ones((8, 4)), np.ones((8, 2))


def build(optimizer="adam"):
    model = around(Empty)()
    model.compile(optimizer, "mse")
    return model


def state(model):
    return [np.asarray(value_of(v)) for v in (*model.variables, *model.optimizer.variables)]


def save(model, root):
    shardload.save(model, root, step=2)


def checkpointed(model, root):
    with shardload.Checkpointer(root) as checkpointer:
        checkpointer.save(2, model)


def trained_on(model, root):
    model.fit(*DATA, batch_size=4, verbose=0, callbacks=[OrbaxCheckpoint(root)])


@pytest.mark.parametrize("write", [save, checkpointed, trained_on])
@pytest.mark.parametrize("mesh", [None, "1x2"])
def test_a_step_brings_them_back(write, mesh, tmp_path):
    source, target = build(), build()
    source.fit(*DATA, batch_size=4, verbose=0)
    write(source, tmp_path)
    report = shardload.restore(target, tmp_path, mesh=mesh)
    assert not report.missing and not report.unused
    for mine, its in zip(state(target), state(source), strict=True):
        assert mine.dtype == its.dtype
        np.testing.assert_array_equal(mine, its)
    whole = shardload.load(tmp_path, custom_objects={"Empty": Empty})
    assert [v.shape for v in whole.weights if not np.prod(v.shape)] == [(0, 4), (0,)]
    assert all(verdict.is_good for verdict in verify(tmp_path))
    sizes = [array.size for array in shardload.load_arrays(tmp_path, P(), mesh="1x2").values()]
    assert sizes.count(0) == 4  # two weights, and Adam's two slots of one of them


def test_a_resumed_run_continues(tmp_path):
    trained_on(build(), tmp_path)
    model = build()
    model.fit(*DATA, batch_size=4, epochs=2, verbose=0, callbacks=[OrbaxCheckpoint(tmp_path, resume=True)])
    assert int(model.optimizer.iterations) == 4


def test_a_model_of_nothing_else(tmp_path):
    shardload.save(keras.Sequential([keras.Input((4,)), Empty()]), tmp_path, step=1)
    report = shardload.restore(keras.Sequential([keras.Input((4,)), Empty()]), tmp_path, strict=False)
    assert "step 1, verified" in report.notes


@pytest.mark.filterwarnings("ignore:Sharding info not provided:UserWarning")
def test_orbax_itself_reads_the_rest(tmp_path):
    save(build("sgd"), tmp_path)
    found = ocp.load_checkpointables(tmp_path / "2")["pytree"]
    assert all(leaf.size for leaf in jax.tree.leaves(found))


def test_items_of_the_user_are_refused_before_the_save(tmp_path):
    with shardload.Checkpointer(tmp_path) as checkpointer:
        said = r"checkpointable 'mine': its array \['a'\] of shape \(0, 3\) has no elements"
        with pytest.raises(UsageError, match=said):
            checkpointer.save(1, build(), checkpointables={"mine": {"a": np.zeros((0, 3)), "b": np.ones(2)}})
        checkpointer.save(2, build(), checkpointables={"mine": {"b": np.ones(2)}})
    assert [path.name for path in tmp_path.iterdir() if path.name.isdecimal()] == ["2"]


@pytest.mark.parametrize(
    "change", [{"shape": [0, 1 << 70]}, {"shape": [0, "4"]}, {"dtype": "float33"}, {"path": ["a", 1]}]
)
def test_a_manipulated_structure_is_refused(change, tmp_path):
    save(build("sgd"), tmp_path)
    path = tmp_path / "2" / "shardload" / "structure.json"
    structure = json.loads(path.read_text())
    next(leaf for leaf in structure["leaves"] if leaf["shape"] == [0, 4]).update(change)
    path.write_text(json.dumps(structure))
    Digests.compute(tmp_path / "2").write(tmp_path / "2")
    with pytest.raises(SourceError):
        shardload.restore(build("sgd"), tmp_path)
