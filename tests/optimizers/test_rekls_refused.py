"""What `REKLS` refuses: arguments, variables, gradients, meshes. Nothing is half-updated."""

import json
import re
import subprocess
import sys

import keras
import numpy as np
import pytest
from rekls_runs import gradients, mesh_of, same, trained, values, weight

from shardload.errors import BackendError, LayoutError, MismatchError, UsageError
from shardload.keras_bridge.variables import relocate
from shardload.optimizers import REKLS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay_method": "none"}, "weight_decay_method='none': expected one of decoupled, independent"),
        ({"decomposition": "svd"}, "decomposition='svd': expected one of eigh, qr"),
        ({"factor_dtype": "float16"}, "factor_dtype='float16': expected one of float32, bfloat16"),
        ({"skip_first_update": None}, "skip_first_update=None: expected one of True, False"),
        ({"limit_updates": "yes"}, "limit_updates='yes': expected one of True, False"),
        ({"beta_1": 1.0}, "beta_1=1.0: expected a number of at least 0 and below 1"),
        ({"beta_2": "0.9"}, "beta_2='0.9': expected a number of at least 0 and below 1"),
        ({"factor_beta": None}, "factor_beta=None: expected a number of at least 0 and below 1"),
        ({"relative_epsilon": -0.1}, "relative_epsilon=-0.1: expected a number of at least 0 and below 1"),
        ({"rank_tolerance": -1e-5}, "rank_tolerance=-1e-05: expected a number of at least 0 and below 1"),
        ({"rank_tolerance": 1}, "rank_tolerance=1: expected a number of at least 0 and below 1"),
        ({"rank_tolerance": None}, "rank_tolerance=None: expected a number of at least 0 and below 1"),
        ({"adamw_ratio": np.inf}, "adamw_ratio=inf: expected a finite number of at least 0"),
        ({"epsilon": 0.0}, "epsilon=0.0: expected a number of at least 1.18e-38"),
        ({"epsilon": 1e-39}, "epsilon=1e-39: expected a number of at least 1.18e-38"),
        ({"beta_1": 0.99999999}, "beta_1=0.99999999: expected a number of at least 0 and below 1"),
        ({"epsilon": np.nan}, "epsilon=nan: expected a finite number of at least 0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1: expected a finite number of at least 0"),
        ({"weight_decay": True}, "weight_decay=True: expected a finite number of at least 0"),
        ({"learning_rate": -1e-3}, "learning_rate=-0.001: expected a finite number of at least 0, a Learn"),
        ({"learning_rate": "fast"}, "learning_rate='fast': expected a finite number of at least 0, a Learn"),
        ({"init_factor": -1.0}, "init_factor=-1.0: expected a finite number of at least 0, or 'rms'"),
        ({"init_factor": np.nan}, "init_factor=nan: expected a finite number of at least 0, or 'rms'"),
        ({"init_factor": "mean"}, "init_factor='mean': expected a finite number of at least 0, or 'rms'"),
        ({"precondition_frequency": 0}, "precondition_frequency=0: expected an integer of at least 1"),
        ({"max_dimension": 1.5}, "max_dimension=1.5: expected an integer of at least 1"),
        ({"adamw_for": "dense"}, "adamw_for='dense': expected a list of regular expressions"),
        ({"adamw_for": [3]}, r"adamw_for=\[3\]: expected a list of regular expressions"),
        ({"adamw_for": ["("]}, r"adamw_for=\['\('\]: expected a list of regular expressions"),
        ({"row_dims": ["a"]}, r"row_dims=\['a'\]: expected a dict of regular expressions"),
        ({"learning_rate": keras.optimizers.schedules.CosineDecay}, "learning_rate=<class .*: expected .* a function"),
        ({"learning_rate": lambda step: 1 / step}, "learning_rate=<function .*: expected .* without arguments"),
        ({"limit_updates": np.ones(2)}, r"limit_updates=array\(.*: expected one of True, False"),
        ({"whole_bytes": 0}, "whole_bytes=0: expected a number of bytes, or text like '4GiB'"),
        ({"whole_bytes": "much"}, "whole_bytes='much': expected a number of bytes, or text like '4GiB'"),
        ({"whole_bytes": 1e9}, "whole_bytes=1000000000.0: expected a number of bytes, or text like '4GiB'"),
        ({"row_dims": {"a": 1}}, "row_dims={'a': 1}: expected a dict of regular expressions"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=f"Cannot create REKLS with {message}"):
        REKLS(**options)


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        (lambda: keras.Variable(np.ones((4, 4)), dtype="complex64"), "of dtype complex64: expected a floating-point"),
        (lambda: keras.Variable(np.ones((4, 4)), dtype="int32"), "of dtype int32: expected a floating-point"),
        (lambda: keras.Variable(np.ones((4, 0))), r"of shape \(4, 0\): expected dims of at least 1"),
    ],
)
def test_variables_that_cannot_be_optimized(variable, message):
    optimizer = REKLS()
    with pytest.raises(UsageError, match=message):
        optimizer.build([weight((4, 4)), variable()])
    assert not optimizer.built and len(optimizer.variables) == 2


def test_numbers_and_dtypes_of_numpy_are_taken():
    given = {"precondition_frequency": np.int64(2), "beta_1": np.float32(0.5), "factor_dtype": np.float32}
    made = REKLS(**given, whole_bytes="2KiB")
    again = REKLS.from_config(json.loads(json.dumps(made.get_config())))
    assert json.dumps(again.get_config()) == json.dumps(made.get_config())
    assert (again.options.whole_bytes, again.options.factor_dtype) == (2048, "float32")


def test_a_function_of_variables_answers_yes_or_no():
    with pytest.raises(UsageError, match="for 'kernel' it returned 'dense', expected True"):
        REKLS(adamw_for=lambda variable: "dense").build([weight((4, 4))])


def test_what_is_not_a_variable():
    with pytest.raises(UsageError, match=r"Cannot optimize an object of type ndarray: expected a keras\.Variable"):
        REKLS().build([np.ones((4, 4))])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_more_or_fewer_gradients_than_variables(count):
    variables = [weight((4, 4)), weight((4, 4))]
    optimizer = trained(variables, steps=1)
    before = values(optimizer, variables)
    with pytest.raises(MismatchError, match=f"Cannot update 2 variables .* and {count} gradients?:"):
        optimizer.apply([np.ones((4, 4), "float32")] * count, variables)
    assert same(values(optimizer, variables), before)


@pytest.mark.parametrize("options", [{"adamw_for": ["kernel", "heads"]}, {"row_dims": {"heads": (0,)}}])
def test_patterns_that_match_nothing(options):
    optimizer, option = REKLS(**options), [*options][-1]
    message = f"Cannot build REKLS with {option}: the pattern 'heads' matches none of 2 variables.*: kernel, bias"
    with pytest.raises(UsageError, match=message):
        optimizer.build([weight((4, 4)), weight((4,), name="bias")])
    assert not optimizer.built and len(optimizer.variables) == 2


@pytest.mark.parametrize("accumulated", [None, 2])
@pytest.mark.parametrize("shape", [(4, 6), (1,), (6, 1)])
def test_a_gradient_of_another_shape(shape, accumulated):
    variables = [weight((3,)), weight((6, 4), seed=1)]
    optimizer = trained(variables, gradient_accumulation_steps=accumulated)
    before = values(optimizer, variables)
    wrong = re.escape(str(shape))
    message = rf"Cannot update 'kernel' of shape \(6, 4\) .* gradient has shape {wrong}, expected the same"
    with pytest.raises(MismatchError, match=message):
        optimizer.apply([np.ones(3, "float32"), np.ones(shape, "float32")], variables)
    with pytest.raises(MismatchError, match=message):
        optimizer.apply([np.ones(3, "float32"), np.ones(shape, "float32")])
    assert same(before, values(optimizer, variables))


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(bad):
    variables = [weight((6, 8)), weight((6, 4), seed=1), weight((3,))]
    optimizer = trained(variables)
    before, counts = values(optimizer, variables), optimizer.counts()
    given = [np.ones(v.shape, "float32") for v in variables]
    given[1][2, 3] = bad
    optimizer.apply(given, variables)
    assert optimizer.counts().skipped_steps == counts.skipped_steps + 1 and optimizer.counts().steps == counts.steps
    after = zip((*variables, *optimizer.variables), before, strict=True)
    changed = [v.name for v, old in after if np.asarray(v.value).tobytes() != old.tobytes()]
    assert changed == ["iteration", "skipped_steps"]


def test_a_factor_that_overflows_keeps_its_eigenpairs():
    variables = [weight((6, 8))]
    optimizer = trained(variables)
    before = np.asarray(optimizer.left_vectors[0].value)
    optimizer.apply([np.full((6, 8), 1e30, "float32")], variables)
    assert optimizer.counts().kept_eigenpairs == 2
    assert np.isfinite(optimizer.left_factors[0].value).all() and np.isfinite(variables[0].value).all()
    np.testing.assert_allclose(np.abs(before.T @ np.asarray(optimizer.left_vectors[0].value)), np.eye(6), atol=1e-3)


def test_a_factor_that_does_not_divide():
    variable = weight((16, 12), mesh=mesh_of(8), spec=("model", None))
    message = r"Cannot shard the factors of 'kernel' of shape \(16, 12\): a factor of length 12 does not divide into 8"
    with pytest.raises(LayoutError, match=message):
        REKLS().build([variable])
    optimizer = trained([variable], uneven="replicate")
    assert optimizer.right_factors[0].value.sharding.is_fully_replicated
    assert not optimizer.left_factors[0].value.sharding.is_fully_replicated


def test_a_mesh_that_changes_under_it():
    variables = [weight((16, 32), mesh=mesh_of(8), spec=("model", None))]
    optimizer = trained(variables)
    relocate(variables[0], weight((16, 32), mesh=mesh_of(2, 4), spec=("data", "model")).value.sharding)
    before = values(optimizer, variables)
    message = "'kernel' is on the mesh data=2, model=4 of devices 0 to 7, but '.*momentum' on model=8"
    with pytest.raises(LayoutError, match=f"Cannot update with 'rekls.*{message}"):
        optimizer.apply([gradients((16, 32))[0]], variables)
    assert same(before, values(optimizer, variables))


def test_counts_before_the_first_step():
    with pytest.raises(UsageError, match=r"Cannot count the steps of 'rekls.*': it is not built"):
        REKLS().counts()


def test_another_backend(monkeypatch):
    monkeypatch.setattr(keras.config, "backend", lambda: "tensorflow")
    with pytest.raises(BackendError, match=r"Keras was imported to run on 'tensorflow'. Set .* KERAS_BACKEND=jax"):
        REKLS()


def test_a_backend_that_is_not_installed(monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    command = [sys.executable, "-c", "import shardload.optimizers as o; o.REKLS"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.stderr.splitlines()[-1].startswith("shardload.errors.BackendError: shardload needs Keras on JAX, but")


@pytest.mark.parametrize("rate", [1, np.float32(0.5), 0.0])
def test_numbers_of_other_types(rate):
    optimizer = REKLS(rate, beta_1=np.float64(0.5), weight_decay=0)
    assert float(optimizer.learning_rate) == rate and optimizer.options.beta_1 == 0.5
