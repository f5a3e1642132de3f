"""The how-to's own code, run; and the same for every way of plain Orbax to lay a tree down."""

import re
from pathlib import Path

import jax
import keras
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.sharding import PartitionSpec as P
from orbax.checkpoint import v1

import shardload
from shardload.errors import MismatchError, SourceNotFoundError

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "load-plain-orbax.md").read_text()
SAVE_NNX, LOAD_NNX, TRAIN_NNX, SAVE, LOAD = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
DEVICES = 'jax.config.update("jax_num_cpu_devices", 8)'
"""Set before the first test; JAX takes it once."""
NOTE = "not saved by shardload: unverified, as it has no digests"


@pytest.fixture
def page(tmp_path):
    """Runs code of the page with its folder here; the names it defines."""
    found = {}

    def run(code):
        exec(code.replace("/runs/mlp", str(tmp_path / "mlp")).replace(DEVICES, ""), found)  # our own page
        return found

    return run


def assert_loaded(model, tree):
    for layer, theirs in zip(model.layers, ("Dense_0", "Dense_1"), strict=True):
        assert np.array_equal(layer.kernel, tree["params"][theirs]["kernel"])
        assert np.array_equal(layer.bias, tree["params"][theirs]["bias"])
        assert len({d for v in layer.weights for d in v.value.sharding.device_set}) == 8


def test_the_page(page, capsys):
    page(SAVE)
    found = page(LOAD)
    assert_loaded(found["model"], found["tree"])
    assert found["report"].notes == (NOTE,) and NOTE in PAGE
    assert NOTE in capsys.readouterr().out


def test_a_tree_of_nnx_with_the_state_of_optax(page, capsys):
    page(SAVE_NNX)
    found = page(LOAD_NNX)
    saved, loaded = found["saved"], found["state"]
    assert jax.tree.structure(saved) == jax.tree.structure(loaded)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, saved, loaded)))
    assert loaded["optimizer"][0].mu["hidden"]["kernel"][...].sharding.spec == P(None, "model")
    page(TRAIN_NNX)
    printed = capsys.readouterr().out.strip()
    assert printed and f"# {printed}\n" in TRAIN_NNX


def manager(tree, path):
    with ocp.CheckpointManager(path, item_names=("state", "count")) as made:
        made.save(3, args=ocp.args.Composite(state=ocp.args.StandardSave(tree), count=ocp.args.JsonSave({"n": 1})))
    return path


def v0(tree, path):
    with ocp.StandardCheckpointer() as made:
        made.save(path, tree)
    return path


def v1_tree(tree, path):
    v1.save(path, tree)
    return path


def v1_items(tree, path):
    v1.save_checkpointables(path, {"model": tree, "optimizer": {"count": jax.numpy.zeros((), "int32")}})
    return path / "model"


@pytest.mark.filterwarnings("ignore:Sharding info not provided")
@pytest.mark.parametrize("save", [manager, v0, v1_tree, v1_items])
def test_every_way_to_lay_it_down(save, page, tmp_path):
    tree = page(SAVE)["tree"]
    where = save(tree, tmp_path / "other")
    found = page(LOAD)
    with shardload.abstract():
        model = keras.models.clone_model(found["model"])
    paths = dict(zip(found["names"], (v.path for v in model.weights), strict=True))
    report = shardload.load_weights(model, where, names=paths, mesh="1x8")
    assert_loaded(model, tree)
    assert report.notes == (NOTE,)
    if save is not manager:
        with pytest.raises(SourceNotFoundError, match=r"single checkpoint of Orbax: use shardload\.load_weights"):
            shardload.restore(model, where, names=paths)


@pytest.mark.parametrize("read", [shardload.load_weights, shardload.restore])
def test_a_wrong_name_shows_the_closest(read, page):
    page(SAVE)
    found = page(LOAD)
    names = {k: v.removeprefix("mlp/") for k, v in found["names"].items()}
    where = Path(found["report"].source).parent
    with pytest.raises(MismatchError, match=r"Did you mean 'mlp/[a-z0-9_]+/(bias|kernel)'"):
        read(found["model"], where, names=names)
    with pytest.raises(MismatchError, match=r"tensor 'Dense_0/kernel': .* Did you mean .*'params/Dense_0/kernel'"):
        read(found["model"], where, names={"Dense_0/kernel": "mlp/x/kernel"})


def test_what_the_model_has_no_use_for_is_listed_or_left_out(page, tmp_path):
    tree = {**page(SAVE)["tree"], "step": jax.numpy.int32(3)}
    with ocp.StandardCheckpointer() as made:
        made.save(tmp_path / "state", tree)
    found = page(LOAD)
    with pytest.raises(MismatchError, match="not used by the model: step"):
        shardload.load_weights(found["model"], tmp_path / "state", names=found["names"])
    report = shardload.load_weights(found["model"], tmp_path / "state", names=found["names"], strict=False)
    assert report.unused == ("step",)
    assert_loaded(found["model"], tree)
