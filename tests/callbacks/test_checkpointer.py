"""Steps of training loops without `fit`: an optimizer outside `compile`, another mesh, and `fit` that takes over."""

import json

import grain
import jax
import keras
import numpy as np
import pytest
import warm_start

import shardload
from shardload.callbacks import OrbaxCheckpoint
from shardload.errors import SaveError, SourceNotFoundError, StepExistsError, UsageError
from shardload.keras_bridge.variables import current_value

X, Y = np.random.default_rng(0).random((64, 16), "float32"), np.random.default_rng(1).random((64, 8), "float32")


def build():
    return keras.Sequential([keras.Input((16,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(8)])


def adam():
    return keras.optimizers.Adam(0.01)


def train(model, optimizer, batches):
    """A loop in JAX: no `compile`, no `fit`."""
    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    weights, fixed, slots = ([v.value for v in group] for group in groups)

    def loss(weights, x, y):
        return ((model.stateless_call(weights, fixed, x)[0] - y) ** 2).mean()

    for x, y in batches:
        value, gradients = jax.value_and_grad(loss)(weights, x, y)
        weights, slots = optimizer.stateless_apply(slots, gradients, weights)
    for variable, new in zip([*model.trainable_variables, *optimizer.variables], [*weights, *slots], strict=True):
        variable.assign(new)
    return float(value)


@pytest.fixture
def trained():
    keras.utils.set_random_seed(1)
    model, optimizer = build(), adam()
    optimizer.build(model.trainable_variables)
    train(model, optimizer, [(X, Y)] * 3)
    return model, optimizer


def content(model, optimizer):
    return [np.asarray(current_value(v)) for v in (*model.variables, *optimizer.variables)]


def assert_equal(one, other):
    assert len(content(*one)) == len(content(*other))
    for a, b in zip(content(*one), content(*other), strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("mesh", [None, "1x8", "2x4"])
def test_a_loop_continues_as_if_it_had_not_stopped(tmp_path, trained, mesh):
    folder = shardload.save(trained[0], tmp_path, step=3, optimizer=trained[1], metrics={"loss": 0.5}, metadata=[1])
    assert folder == tmp_path / "3"
    model, optimizer = build(), adam()  # without slots yet
    info = shardload.Checkpointer(tmp_path).restore(model, optimizer=optimizer, mesh=mesh)
    assert (info.step, info.metrics, info.recorded.metadata) == (3, {"loss": 0.5}, [1])
    assert_equal((model, optimizer), trained)
    assert int(optimizer.iterations) == 3
    if mesh:
        kernel = model.trainable_variables[0]
        moments = [v for v in optimizer.variables if v.shape == kernel.shape]
        assert len(moments) == 2 and all(v.value.sharding == kernel.value.sharding for v in moments)
        assert not kernel.value.sharding.is_fully_replicated
        assert shardload.report(model).mesh == ("batch=1,model=8" if mesh == "1x8" else "batch=2,model=4")
    on, whole = train(model, optimizer, [(X, Y)] * 2), train(*trained, [(X, Y)] * 2)
    assert on == pytest.approx(whole, rel=1e-5)
    assert getattr(model, "optimizer", None) is None


def test_the_variables_may_change_while_a_step_is_written(tmp_path, trained):
    before = content(*trained)
    with shardload.Checkpointer(tmp_path, max_to_keep=2) as checkpointer:
        for step in (3, 4, 5):
            checkpointer.save(step, trained[0], optimizer=trained[1])
            if step == 3:
                assert checkpointer.restore(trained[0], optimizer=trained[1]).step == 3
            train(*trained, [(X, Y)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["4", "5"]
    assert all(a.tobytes() != b.tobytes() for a, b in zip(before[:2], content(*trained)[:2], strict=True))
    model, optimizer = build(), adam()
    checkpointer.restore(model, optimizer=optimizer, step=4)
    assert int(optimizer.iterations) == 4


def test_the_best_and_the_latest_are_kept_and_found(tmp_path, trained):
    checkpointer = shardload.Checkpointer(tmp_path, max_to_keep=1, keep_best=1, monitor="accuracy", mode="max")
    assert checkpointer.restore(trained[0]) is checkpointer.latest() is checkpointer.best() is None
    for step, accuracy in enumerate([0.1, 0.9, 0.5, 0.4]):
        checkpointer.save(step, trained[0], metrics={"accuracy": np.float32(accuracy)})
    with pytest.warns(UserWarning, match="Step 4 cannot be ranked by 'accuracy': metrics has \\['loss'\\]"):
        checkpointer.save(4, trained[0], metrics={"loss": 1})
    checkpointer.wait()
    assert [info.step for info in checkpointer.steps()] == [1, 4]
    assert (checkpointer.best().step, checkpointer.latest().step) == (1, 4)
    assert checkpointer.restore(build(), step="best").step == 1


def test_an_iterator_continues_where_it_stood(tmp_path, trained):
    data = grain.MapDataset.range(100).to_iter_dataset()
    iterator, again = iter(data), iter(data)
    read = [next(iterator) for _ in range(7)]
    shardload.save(trained[0], tmp_path, step=7, iterator=iterator)
    shardload.Checkpointer(tmp_path).restore(build(), iterator=again)
    assert next(again) == len(read) == 7
    shardload.save(trained[0], tmp_path, step=8)
    with pytest.warns(UserWarning, match="Step 8 stores no position of a data iterator"):
        shardload.Checkpointer(tmp_path).restore(build(), iterator=again)


def test_fit_continues_after_a_loop_and_a_loop_after_fit(tmp_path, trained):
    shardload.save(trained[0], tmp_path, step=3, optimizer=trained[1], epoch=1)
    model = build()
    model.compile(adam(), "mse")
    shown = []
    log = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, logs: shown.append(epoch))
    model.fit(X, Y, epochs=4, verbose=0, callbacks=[log, OrbaxCheckpoint(tmp_path, resume=True, max_to_keep=None)])
    assert shown == [2, 3]
    other, optimizer = build(), adam()
    info = shardload.Checkpointer(tmp_path).restore(other, optimizer=optimizer)
    assert (info.step, info.epoch) == (7, 3)
    assert_equal((other, optimizer), (model, model.optimizer))


def test_a_compiled_model_needs_no_optimizer(tmp_path):
    model = build()
    model.compile(adam(), "mse")
    model.fit(X, Y, verbose=0)
    shardload.save(model, tmp_path, step=2)
    other = build()
    other.compile(adam(), "mse")
    shardload.Checkpointer(tmp_path).restore(other)
    assert_equal((other, other.optimizer), (model, model.optimizer))
    with pytest.raises(UsageError, match=r"the model 'sequential.*' is compiled with 'adam.*'. Leave out optimizer="):
        shardload.restore(other, tmp_path, optimizer=adam())
    shardload.restore(other, tmp_path, optimizer=other.optimizer)


def test_what_cannot_be_saved_is_refused_and_leaves_nothing(tmp_path, trained):
    checkpointer = shardload.Checkpointer(tmp_path)
    checkpointer.save(1, trained[0])
    with pytest.raises(StepExistsError):
        checkpointer.save(1, trained[0])
    for arguments, message in [
        ({"metadata": object()}, "Cannot save metadata: .*Expected JSON"),
        ({"iterator": object()}, "Cannot save the state of data_iterator: .*Expected bytes or JSON"),
        ({"step": -1}, "expected a non-negative integer"),
        ({"step": True}, "expected a non-negative integer"),
        ({"step": 10**18}, "at most 18 digits"),
        ({"step": 0}, "it has later steps, up to 1, and `restore` would take the latest"),
        ({"epoch": -1}, "Cannot use epoch=-1: expected a non-negative integer"),
        ({"epoch": "1"}, "Cannot use epoch='1'"),
        ({"metrics": [1]}, "expected a mapping from names to numbers"),
        ({"metrics": {"loss": "low"}}, "Cannot use the metric 'loss': expected a number"),
        ({"optimizer": "adam"}, "Cannot use optimizer='adam': expected an object"),
        ({"model": None}, "expected a Keras model, got NoneType"),
        ({"checkpointables": {"pytree": {}}}, "Cannot name a checkpointable 'pytree'"),
    ]:
        with pytest.raises(UsageError, match=message):
            checkpointer.save(**{"step": 2, "model": trained[0]} | arguments)
    checkpointer.wait()
    assert [info.step for info in checkpointer.steps()] == [1]
    assert list((tmp_path / ".staging").glob("*")) == []
    with pytest.raises(SourceNotFoundError):
        checkpointer.restore(trained[0], step=9)
    with pytest.raises(UsageError, match=r"Cannot use a dict as model: .* shardload\.save_arrays"):
        shardload.Checkpointer(tmp_path / "new").restore({"w": np.ones(3)})
    with pytest.raises(UsageError, match=r"Cannot restore the position of iterator: object has no set_state"):
        checkpointer.restore(trained[0], iterator=object())
    for arguments, message in (
        ({"directory": None}, "expected the path of a folder"),
        ({"async_timeout_s": -1}, "positive"),
        ({"max_to_keep": 0}, "Cannot use max_to_keep=0: expected a positive integer"),
    ):
        with pytest.raises(UsageError, match=message):
            shardload.Checkpointer(**{"directory": tmp_path} | arguments)
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError):
        shardload.Checkpointer(tmp_path / "file")


@pytest.mark.parametrize("number", [np.int64(3), jax.numpy.int32(3)])
def test_a_number_of_numpy_or_jax_is_a_number(tmp_path, trained, number):
    assert shardload.save(trained[0], tmp_path, step=number, epoch=number) == tmp_path / "3"
    info = shardload.Checkpointer(tmp_path).latest()
    assert (info.step, info.epoch) == (3, 3)


def test_a_new_loop_in_a_used_folder_loses_nothing(tmp_path, trained):
    for step in (100, 200):
        shardload.save(trained[0], tmp_path, step=step)
    with pytest.raises(UsageError, match="later steps, up to 200"):
        shardload.Checkpointer(tmp_path, max_to_keep=2).save(1, trained[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["100", "200"]


@pytest.mark.slow
def test_the_command_lists_and_verifies_the_steps(tmp_path, trained):
    shardload.save(trained[0], tmp_path, step=3, optimizer=trained[1], metrics={"loss": 0.5})
    for command in ("steps", "verify"):
        done = warm_start.run(["-m", "shardload", command, tmp_path, "--json"], check=True)
        assert json.loads(done.stdout)
    done = warm_start.run(["-m", "shardload", "steps", tmp_path], check=True)
    assert "None" not in done.stdout and "loss" in done.stdout
