"""Steps of a training run, written without the callback: state tree, Orbax, digests, one rename."""

import json
from contextlib import contextmanager

import numpy as np

from shardload.loaders.orbax import saving as orbax_writer
from shardload.mapping.state_tree import state_tree_of
from shardload.runs.digests import Digests
from shardload.runs.publish import Staging


def assert_one_to_one(pairing):
    assert not pairing.missing and not pairing.unexpected
    assert all(stored.shape == leaf.shape for stored, leaf in pairing.pairs)


def save_step(model, root, step, *, compression="none", weights_only=False, **details):
    root.mkdir(exist_ok=True)
    state = state_tree_of(model).weights_only() if weights_only else state_tree_of(model)
    staging = Staging.begin(root, step)
    orbax_writer.start_save(staging.path, {"pytree": state.tree}, compression=compression, step=step).result()
    own = staging.path / "shardload"
    own.mkdir(exist_ok=True)
    (own / "structure.json").write_text(json.dumps(state.to_json()))
    (own / "step.json").write_text(json.dumps({"step": step, **details}))
    Digests.compute(staging.path).write(staging.path)
    return staging.publish()


def let_save(callback, model):
    """Let a callback save a model, as at the end of its first epoch."""
    callback.set_model(model)
    callback.on_train_begin()
    callback.on_epoch_end(0, {})
    callback.on_train_end()


@contextmanager
def edited_structure(step):
    """The structure of a step, which is written back with what was changed in it, and digests of that."""
    path = step / "shardload" / "structure.json"
    structure = json.loads(path.read_text())
    yield structure
    path.write_text(json.dumps(structure))
    Digests.compute(step).write(step)


def with_optimizer_values(model):
    """As after training: every variable of the optimizer has values of its own."""
    model.optimizer.build(model.trainable_variables)
    for number, variable in enumerate(model.optimizer.variables):
        whole = "int" in str(variable.dtype)
        variable.assign(np.full(variable.shape, number + 6 if whole else (number + 1) / 64, variable.dtype))
    return model
