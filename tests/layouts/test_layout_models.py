"""The reduced models of the layout tests run, can be trained, and can be built without values."""

import keras
import numpy as np
import pytest
from layout_models import LAYOUT_MODELS, MESHES, loss_for

import shardload
from shardload.keras_bridge.variables import has_value
from shardload.parallel import choose
from shardload.sharding.mesh import MeshSpec


@pytest.mark.parametrize("name", LAYOUT_MODELS)
def test_model_is_built_without_values_and_gets_a_layout_on_every_mesh(name):
    with shardload.abstract():
        model = LAYOUT_MODELS[name]().model
    choices = [choose(model, MeshSpec.parse(mesh)) for mesh in MESHES]
    assert model.variables and not any(map(has_value, model.variables))
    assert any(choice.sharded for choice in choices if choice.mesh.sizes != (8, 1))


@pytest.mark.sample(2)
@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUT_MODELS)
def test_a_training_step_lowers_the_loss_of_the_batch(name):
    keras.utils.set_random_seed(0)
    model, inputs, target = LAYOUT_MODELS[name]()
    model.compile(keras.optimizers.SGD(0.03), loss_for(target))
    before, after = (model.train_on_batch(inputs, target, return_dict=True)["loss"] for _ in range(2))
    assert np.isfinite(before) and after < before
